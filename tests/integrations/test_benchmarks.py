"""The benchmarks: every recipe steps as plain Optax does, counts are right, and the pages say what the results say."""

import functools
import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trees import assert_close, bits

from benchmarks import ahead_of_time, timing
from benchmarks.gpu import __main__ as gpu
from benchmarks.memory import budget
from benchmarks.report import __main__ as report, accuracy, age, same, step as report_step
from benchmarks.step import peers, train

TX = optax.sgd(1e-3, momentum=0.9)  # not Adam, which does not see a forgotten division by the loss scale
PARAMS = {"b": jnp.array([0.5, -1.0]), "w": jnp.array([[1.0, 2.0], [3.0, -4.0]])}
GRADS = {"b": np.float32([0.1, -0.3]), "w": np.float32([[1.0, -2.0], [1e-3, 0.5]])}
LAYERS = [{"w": jnp.full((4, 3), 0.5).at[0, 1].set(1.0), "b": jnp.zeros(3)}]
X, LABELS = train.images(8, (4,))
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "benchmarks"


def run(recipe, *factors):
    """The parameters, flat, after a step on the gradients times each of some factors."""
    times = lambda factor: jax.tree.map(lambda g: g * np.float32(recipe.scale * factor), GRADS)
    params = recipe.params(functools.reduce(recipe.step, map(times, factors), recipe.carry))
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(params)])


@functools.cache
def compiled(name):
    recipe = peers.JAX[name](TX, PARAMS)
    return recipe._replace(step=jax.jit(recipe.step))


@pytest.mark.parametrize("name", peers.installed(peers.JAX))
def test_every_step_is_plain_optax_s_and_skips_an_overflow(name):
    plain, recipe = compiled("optax"), compiled(name)
    np.testing.assert_allclose(run(recipe, 1.0, 0.5), run(plain, 1.0, 0.5), rtol=1e-6)
    if name in peers.UNCHECKED:
        assert not np.isfinite(run(recipe, 1.0, np.inf)).any()
        return
    np.testing.assert_array_equal(run(recipe, 1.0, np.inf), run(recipe, 1.0))
    halved = 1.0 if recipe.scale == 1.0 else 0.5  # the scale, and so the gradients of the next loss
    np.testing.assert_allclose(run(recipe, 1.0, np.inf, halved), run(plain, 1.0, 1.0), rtol=1e-6)


@pytest.mark.parametrize("name", peers.installed(peers.WHOLE))
def test_every_whole_step_is_plain_optax_s_and_skips_an_overflow(name):
    recipe = peers.JAX[name](TX, LAYERS)
    step = jax.jit(train.whole(recipe, train.mlp_loss))
    carry = step(recipe.carry, X, LABELS)
    updates, _ = TX.update(jax.jit(jax.grad(train.mlp_loss))(LAYERS, X, LABELS), TX.init(LAYERS), LAYERS)
    assert_close(carry[0], optax.apply_updates(LAYERS, updates), rtol=0, atol=1e-6)
    if name not in peers.UNCHECKED:
        assert bits(step(carry, X * np.float32(np.inf), LABELS)[0]) == bits(carry[0])


def test_every_ratio_has_its_interval():
    runs = [[{"name": "jamp", "ratio": x}, {"name": "other", "ratio": 1.0}] for x in (1.2, 1.1, 1.3)]
    rows = timing.summary(runs)
    assert timing.cell(rows[0]) == "1.20 (1.10-1.30)"
    assert timing.cell(rows[1]) == "1.00 (1.00-1.00)"


def test_the_tables_of_every_page_are_those_that_the_results_give(tmp_path):
    for name in report.PAGES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    found = report.read(sorted(RESULTS.glob("*.json")))
    assert {f"{name}.json" for name in report.FILES} <= found.keys()
    report.write(tmp_path, found)
    for name in report.PAGES:
        assert (tmp_path / name).read_text() == (ROOT / name).read_text()
    (tmp_path / report.ACCURACY).write_text("# No marks\n")
    with pytest.raises(ValueError, match="has no marks <!-- small -->"):
        report.write(tmp_path, found)


def test_every_result_says_by_which_program_it_was_made():
    for file in RESULTS.glob("*.json"):
        command = json.loads(file.read_text())["command"]
        made_by = re.match(r"python -m (benchmarks[\w.]*)|.* of (tests/\S+)$", command)
        assert importlib.util.find_spec(made_by[1]) if made_by[1] else (ROOT / made_by[2]).exists(), file


def test_every_result_has_paths_that_it_measures_and_they_exist():
    for file in RESULTS.glob("*.json"):
        assert all((ROOT / path).exists() for path in age.measured(file.stem)), file


@pytest.fixture
def commit(monkeypatch, tmp_path):
    """Commits files, with their texts, to a new clone. Results lie in it too."""
    monkeypatch.setattr(age, "ROOT", tmp_path)
    for module in (age, same):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    age.git("init", "-q")

    def commit(**files):
        for name, text in files.items():
            (tmp_path / name.replace("__", ".")).write_text(text)
        age.git("add", ".")
        age.git("-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-q", "-m", "message")
        return age.git("log", "-1", "--format=%h", "--abbrev=12")

    return commit


def test_a_result_is_older_once_a_path_that_it_measures_is_another_one(monkeypatch, tmp_path, commit):
    monkeypatch.setattr(age, "MEASURED", {"dot": ("dot.py",), "dot_bytes": ("bytes.py",)})
    first = commit(dot__py="1", bytes__py="1")
    of_first = json.dumps({"commit": first})
    commit(dot_said__json=of_first, dot_bytes__json=of_first, dot_unsaid__json="{}")
    assert age.older() == []
    commit(dot__py='"""Of another comment."""\n1  # it does not count')
    assert age.older() == []
    second = commit(dot__py="2")
    assert age.older() == ["dot_said.json", "dot_unsaid.json"]
    commit(dot_said__json=json.dumps({"commit": f"{second}-dirty"}))
    assert age.older() == ["dot_unsaid.json"]
    (tmp_path / "bytes.py").write_text("not_committed_yet")
    assert age.older() == ["dot_bytes.json", "dot_unsaid.json"]
    (tmp_path / "bytes.py").write_text("not yet Python")
    assert age.older() == ["dot_bytes.json", "dot_unsaid.json"]
    (tmp_path / "bytes.py").unlink()
    assert age.older() == ["dot_bytes.json", "dot_unsaid.json"]


@pytest.mark.slow
def test_a_result_is_as_new_as_the_last_commit_that_compiles_the_same_programs(monkeypatch, tmp_path, commit):
    monkeypatch.setattr(age, "MEASURED", {"dot": ("dot.py",)})
    starts_another = "import jax, subprocess, sys; jax.jit(lambda x: x + 1)(sys.argv.count('--quick')); "
    starts_another += "subprocess.run([sys.executable, 'child.py'], check=True)"

    def older_after(**files):
        last = commit(**files)
        monkeypatch.setattr(sys, "argv", ["same", "dot"])
        same.main()
        return age.older(), json.loads((tmp_path / "dot.json").read_text()).get("same_programs") == last

    child = "import jax; jax.jit(lambda x: x * {}.0)(1.0)"
    first = commit(dot__py=starts_another, child__py=child.format(2))
    made = {"commit": first, "command": "python -m dot --json docs/dot.json"}
    assert older_after(dot__py=f"UNUSED = 1; {starts_another}", dot__json=json.dumps(made)) == ([], True)
    assert older_after(dot__py=starts_another.replace("x + 1", "x + 2")) == (["dot.json"], False)
    other_child = {"child__py": child.format(3)}  # in another process
    assert older_after(dot__py=f"UNUSED = 2; {starts_another}", **other_child) == (["dot.json"], False)
    with pytest.raises(SystemExit, match=r"cannot be run again: f\(x\) of tests"):
        same.command({"command": "f(x) of tests/f.py"}, [])


@pytest.mark.parametrize(
    ("options", "message"),
    [([], r"JAX sees no GPU but 'cpu'.*--device cpu --quick"), (["--device", "cpu"], "a rehearsal: add --quick")],
)
def test_without_a_gpu_the_error_says_how_to_rehearse(monkeypatch, options, message):
    monkeypatch.setattr(sys, "argv", ["gpu", *options])
    with pytest.raises(SystemExit, match=message):
        gpu.main()


def test_the_gpu_tables_hold_ratios_and_memory():
    labels = {"optimizer": "adamw", "leaves": 40, "millions": 25.0, "grads": "float32", "limit_ratio": 8 / 7}
    runs = [
        [labels | {"name": n, "milliseconds": 1.0, "ratio": r} for n, r in ratios.items()]
        for ratios in (
            {"optax": 1.0, "optax, again": 1.01, "jamp": 1.1},
            {"optax": 1.0, "optax, again": 1.0, "jamp": 1.2},
        )
    ]
    table = report_step.step(timing.summary(runs))
    assert "| **one extra read** | 1.14 |" in table
    assert "| jamp | 1.15 (1.10-1.20) |" in table
    ways = {"by hand": 1.0, "autocast, budget 1.0": 0.5}
    rows = [
        {
            "model": "ViT-B/16, batch 64",
            "name": name,
            "milliseconds": 4.0 * ratio,
            "temporary_megabytes": 12e3,
            "ratio": ratio,
        }
        for name, ratio in ways.items()
    ]
    table = report_step.models(rows)
    assert "| by hand, ms | 4 |" in table
    assert "| autocast, budget 1.0 | 0.50, 12 GB |" in table


def test_the_loss_scale_works_in_every_dynamic_run_of_the_overflow_study():
    rows = json.loads((RESULTS / "accuracy_overflow.json").read_text())["rows"]
    dynamic = [row for row in rows if row["setup"] == "float16, dynamic"]
    assert len(dynamic) == 10
    assert all(row["skipped"] and row["start"] == "default" for row in dynamic)


def test_an_interval_is_that_of_student_s_distribution():
    low, high = accuracy.interval(np.array([0.0, 0.002, 0.004, 0.002, 0.002]))
    assert (low, high) == pytest.approx((0.002 - 0.001348, 0.002 + 0.001348), abs=1e-6)  # 2.132 * 0.001414 / 5**0.5


def test_what_is_kept_is_counted_without_the_arguments():
    x, w = jnp.ones((512, 256)), jnp.ones((256, 128))
    kept = lambda fun: 1e6 * ahead_of_time.kept(fun, w, x) / 4
    assert kept(lambda w, x: jnp.sum(x @ w)) == 0  # x
    assert kept(lambda w, x: jnp.sum(jnp.sin(x @ w))) == 512 * 128  # x, and the cosine
    assert kept(lambda w, x: jnp.sum((x @ w.astype(jnp.bfloat16).astype(jnp.float32)) ** 2)) == 512 * 128  # 2 x @ w


def test_a_budget_is_compiled_again_only_where_its_program_is_another(monkeypatch):
    on_cpu = lambda target, fun, *args: jax.jit(fun).lower(*args)
    compilations = []
    monkeypatch.setattr(budget, "lowered", on_cpu)
    monkeypatch.setattr(budget, "BUDGETS", (0.5,))
    monkeypatch.setattr(budget, "FEW", (1.0,))
    monkeypatch.setattr(budget, "temporary", lambda program: compilations.append(program) or 1e6)
    first = budget.measure("tpu", [], True, [])
    assert len(compilations) == len(first)
    compilations.clear()
    before = [row | {"temporary_megabytes": 2.0} for row in first[:-1]]
    del before[0]["program"]
    again = budget.measure("tpu", [], True, before)
    assert len(compilations) == 2  # of the row without a program, and of the last, which is missing
    assert [row["temporary_megabytes"] for row in again] == [1.0, *[2.0] * (len(first) - 2), 1.0]
