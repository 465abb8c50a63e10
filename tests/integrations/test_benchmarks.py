"""The benchmarks: every recipe steps as plain Optax does, counts are right, and the pages say what the results say."""

import functools
import json
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import ahead_of_time, timing
from benchmarks.accuracy import intervals
from benchmarks.gpu import __main__ as gpu
from benchmarks.memory import budget
from benchmarks.report import __main__ as report, tables
from benchmarks.step import peers

TX = optax.sgd(1e-3, momentum=0.9)  # not Adam, which does not see a forgotten division by the loss scale
PARAMS = {"b": jnp.array([0.5, -1.0]), "w": jnp.array([[1.0, 2.0], [3.0, -4.0]])}
GRADS = {"b": np.float32([0.1, -0.3]), "w": np.float32([[1.0, -2.0], [1e-3, 0.5]])}
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


def test_every_ratio_has_its_interval():
    runs = [[{"name": "jamp", "ratio": x}, {"name": "other", "ratio": 1.0}] for x in (1.2, 1.1, 1.3)]
    rows = timing.summary(runs)
    assert timing.cell(rows[0]) == "1.20 (1.10-1.30)"
    assert timing.cell(rows[1]) == "1.00 (1.00-1.00)"


def test_the_tables_of_every_page_are_those_that_the_results_give(tmp_path):
    pages = {page for page, *_ in report.TABLES.values()}
    for page in pages:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    found = report.read(sorted(RESULTS.glob("*.json")))
    assert {name for _, files, _ in report.TABLES.values() for name in files} <= found.keys()
    report.write(tmp_path, found)
    for page in pages:
        assert (tmp_path / page).read_text() == (ROOT / page).read_text()
    (tmp_path / report.FIT).write_text("# No marks\n")
    with pytest.raises(ValueError, match="has no marks <!-- budgets -->"):
        report.write(tmp_path, found)


def test_every_result_is_shown_and_says_when_and_how_it_was_made():
    """Its program may be gone since. Then the commit has it."""
    prose = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    for file in RESULTS.glob("*.json"):
        found = json.loads(file.read_text())
        assert all(found[key] for key in ("date", "commit", "versions", "machine", "command")), file
        assert not found["quick"], file
        assert file.name in prose, file


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
    table = tables.step(timing.summary(runs))
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
    table = tables.models(rows)
    assert "| by hand, ms | 4 |" in table
    assert "| autocast, budget 1.0 | 0.50, 12 GB |" in table


def test_an_interval_is_that_of_student_s_distribution():
    low, high = intervals.interval(np.array([0.0, 0.002, 0.004, 0.002, 0.002]))
    assert (low, high) == pytest.approx((0.002 - 0.001348, 0.002 + 0.001348), abs=1e-6)  # 2.132 * 0.001414 / 5**0.5


def test_intervals_are_those_of_differences_paired_by_seed(capsys):
    losses = {"float32": (1.0, 2.0), "float8": (1.1, 2.3)}
    rows = [{"way": way, "seed": i, "loss": x} for way, found in losses.items() for i, x in enumerate(found)]
    intervals.show_intervals(rows[::-1], "float32")
    low, high = 0.2 - 6.314 * 0.1, 0.2 + 6.314 * 0.1
    assert f"float8: {low:+.4f} to {high:+.4f}, {low / 0.015:+.2f} to {high / 0.015:+.2f} %" in capsys.readouterr().out


def test_what_is_kept_is_counted_without_the_arguments():
    x, w = jnp.ones((512, 256)), jnp.ones((256, 128))
    kept = lambda fun: 1e6 * ahead_of_time.kept(fun, w, x) / 4
    assert kept(lambda w, x: jnp.sum(x @ w)) == 0  # x
    assert kept(lambda w, x: jnp.sum(jnp.sin(x @ w))) == 512 * 128  # x, and the cosine
    assert kept(lambda w, x: jnp.sum((x @ w.astype(jnp.bfloat16).astype(jnp.float32)) ** 2)) == 512 * 128  # 2 x @ w


@pytest.mark.slow
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
