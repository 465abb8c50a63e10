"""The benchmarks: every recipe steps as plain Optax does, counts are right, and the pages say what the results say."""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import ahead_of_time, timing
from benchmarks.accuracy import intervals
from benchmarks.gpu import __main__ as gpu, processes
from benchmarks.gpu.measure import Way, measure
from benchmarks.memory import budget, vocabulary
from benchmarks.record import record
from benchmarks.report import __main__ as report, tables
from benchmarks.step import peers
from benchmarks.step.instructions import instructions

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
    every = report.TABLES | report.ONE_GPU | report.GPUS
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = {page.relative_to(ROOT): page.read_text() for page in pages}
    found = report.read(sorted(RESULTS.glob("*.json")))
    assert {name for files, _ in report.TABLES.values() for name in files} <= found.keys()
    for page, text in texts.items():
        for mark in every:  # empty, so that a table that is not made is missed
            text = re.sub(rf"(<!-- {mark} -->\n).*(<!-- /{mark} -->)", r"\1\2", text, flags=re.DOTALL)
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text(text)
    report.write(tmp_path, found)
    for page, text in texts.items():
        assert (tmp_path / page).read_text() == text, page


def test_a_table_is_filled_on_whichever_page_has_its_marks_and_must_have_one(tmp_path):
    put = lambda: report.put(tmp_path, "budgets", "| new |", [])
    page = tmp_path / "docs" / "below" / "page.md"
    page.parent.mkdir(parents=True)
    page.write_text("a\n<!-- budgets -->\n| old |\n<!-- /budgets -->\nb\n")
    put()
    assert page.read_text() == "a\n<!-- budgets -->\n\n| new |\n\n<!-- /budgets -->\nb\n"
    page.write_text("<!-- budgets -->\n| old |\n")  # without its end
    with pytest.raises(ValueError, match="No page has the marks <!-- budgets --> and <!-- /budgets -->"):
        put()


def test_every_result_is_shown_and_says_when_and_how_it_was_made():
    """Its program may be gone since. Then the commit has it."""
    prose = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    for file in RESULTS.glob("*.json"):
        found = json.loads(file.read_text())
        for result in [found | part for part in found["parts"].values()] if "parts" in found else [found]:
            how = ("note",) if "note" in result else ("commit", "command")
            assert all(result[key] for key in ("date", "versions", "machine", *how)), file
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
    assert "| one more read of the gradients, by bytes | 1.14 |" in table
    assert "| jamp | 1.15 (1.10-1.20) |" in table
    ways = {"by hand": 1.0, "autocast, budget 1.0": 0.5}
    rows = [
        {
            "model": "ViT-B/16, batch 64",
            "name": name,
            "milliseconds": 4.0 * ratio,
            "temporary_gigabytes": 12.0,
        }
        for name, ratio in ways.items()
    ]
    table = tables.models(rows)
    assert table.splitlines()[0] == "|  | ViT-B/16 |"
    assert "| bfloat16 by hand | 4.0&nbsp;ms, 12.0&nbsp;GB |" in table
    assert "| autocast (budget 1.0) | 2.0&nbsp;ms, 12.0&nbsp;GB |" in table


def test_a_gpu_table_has_a_column_for_each_card_and_says_what_did_not_compile():
    row = lambda name, milliseconds: {
        "name": name,
        "milliseconds": milliseconds,
        "temporary_gigabytes": 2.0,
        "compile_seconds": 3.0,
    }
    hung = {"name": "Float8, default flags", "outcome": "did not compile in 20 s"}
    table = tables.llama_float8({"A": [row("by hand", 4.0), row("Float8", 3.0)], "B": [row("Float8", 5.0), hung]})
    assert table.splitlines()[0].endswith(" | A | B |")
    assert "| 3.0 ms (0.75), 2 GB | 5.0 ms, 2 GB |" in table  # B has no baseline
    assert "|  | did not compile in 20 s |" in table
    assert "dots_saveable" not in table  # what no card has measured


FAKE = """
import time
from pathlib import Path
from benchmarks.gpu.processes import COMPILING

def hangs(quick, send):
    send(0, {"name": "a", "outcome": COMPILING})
    send(0, {"name": "a", "milliseconds": 1.0})
    send(1, {"name": "b", "outcome": COMPILING})
    time.sleep(30)
    Path(__file__).with_name("woke up").touch()

def ends(quick, send):
    send(0, {"name": "c", "milliseconds": 2.0})

def crashes(quick, send):
    ends(quick, send)
    raise SystemExit(3)
"""


@pytest.mark.slow  # of a time-out that a busy machine needs to start a process
def test_a_part_that_hangs_or_crashes_keeps_its_rows_and_loses_no_other(tmp_path, monkeypatch):
    (tmp_path / "fake_part.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path)  # also of the processes
    file = tmp_path / "gpu.json"
    parts = {
        name: processes.Part(12 if name == "hangs" else 120, "fake_part", name) for name in ("hangs", "crashes", "ends")
    }
    gpu.measure(parts, False, file, record("benchmarks.gpu", False, "NVIDIA X1"))
    found = json.loads(file.read_text())["parts"]
    assert list(found) == ["hangs", "crashes", "ends"]
    assert found["hangs"]["outcome"] == "stopped after 12 s"
    timed, hung = found["hangs"]["rows"]
    assert timed == {"name": "a", "milliseconds": 1.0}
    assert re.fullmatch(r"did not compile in \d+ s", hung["outcome"])
    assert not (tmp_path / "woke up").exists()  # its process was killed, and not waited for
    assert found["crashes"]["outcome"] == "exit code 3"
    assert found["ends"]["outcome"] == "complete"
    assert found["crashes"]["rows"] == found["ends"]["rows"] == [{"name": "c", "milliseconds": 2.0}]


def test_rows_are_in_the_file_before_their_part_ends(tmp_path, monkeypatch):
    file, seen = tmp_path / "gpu.json", []

    def run(part, quick, save):
        save({"outcome": "running", "rows": [{"name": "a"}]})
        seen.append(json.loads(file.read_text())["parts"]["x"]["rows"])
        save({"outcome": "complete", "seconds": 1.0, "rows": [{"name": "a"}, {"name": "b"}]})

    monkeypatch.setattr(gpu, "run", run)
    gpu.measure({"x": None}, False, file, record("benchmarks.gpu", False, "NVIDIA X1"))
    assert seen == [[{"name": "a"}]]


def test_a_later_call_replaces_its_parts_of_the_same_card_alone(tmp_path, monkeypatch):
    file = tmp_path / "gpu.json"

    def call(part, device, date):
        run = lambda part, quick, save: save({"outcome": "complete", "seconds": 1.0, "rows": [{"name": date}]})
        monkeypatch.setattr(gpu, "run", run)
        gpu.measure({part: None}, False, file, record("benchmarks.gpu", False, device) | {"date": date})
        return {name: found["date"] for name, found in json.loads(file.read_text())["parts"].items()}

    call("x", "NVIDIA X1", "first")
    assert call("y", "NVIDIA X1", "second") == {"x": "first", "y": "second"}
    assert call("x", "NVIDIA X1", "third") == {"x": "third", "y": "second"}
    assert call("x", "NVIDIA X2", "fourth") == {"x": "fourth"}


def test_a_rehearsal_fails_where_a_part_or_a_program_did(tmp_path, monkeypatch):
    outcomes = iter(["exit code 1", "complete"])
    rows = [{"name": "a", "outcome": "TypeError: no"}, {"name": "b", "milliseconds": 1.0}]
    run = lambda part, quick, save: save({"outcome": next(outcomes), "seconds": 1.0, "rows": rows})
    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--quick", "--only", "loop", "linen"])
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # which the command sets
    with pytest.raises(SystemExit, match="linen: exit code 1\nlinen, a: TypeError: no\nloop, a: TypeError: no"):
        gpu.main()


def test_the_time_outs_of_all_parts_are_below_five_minutes():
    assert sum(part.seconds for part in gpu.PARTS.values()) < 300


@pytest.mark.parametrize(
    ("device_kind", "name"),
    [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA GeForce RTX 4090", "4090")],
)
def test_a_card_has_one_file(device_kind, name):
    assert gpu.card(device_kind) == name


def test_a_program_that_fails_loses_its_own_row():
    found = {}
    make = lambda: (jnp.ones(4), (jnp.ones(4),))
    fails = lambda carry, x: carry @ jnp.ones((3, 3))
    ways = [Way("one", jnp.add, make), Way("fails", fails, make), Way("one, again", jnp.add, make)]
    measure({"model": "m"}, ways, True, found.__setitem__)
    assert [row["name"] for row in found.values()] == ["one", "fails", "one, again"]
    assert found[1]["outcome"].startswith("TypeError: ")
    assert found[0]["ratio"] == 1
    assert {"milliseconds", "ratio_low", "compile_seconds", "peak_gigabytes"} <= found[2].keys()
    assert found[2]["model"] == "m"
    assert found[2]["peak_gigabytes"] == 32e-9  # the carry, which is donated, and the argument


@pytest.mark.slow
def test_a_rehearsal_writes_well_formed_parts_with_their_baseline_twice(tmp_path):
    file = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--quick", "--json", str(file)]
    subprocess.run([*command, "--only", "loop", "linen"], cwd=ROOT, check=True)
    found = json.loads(file.read_text())
    assert found["quick"]
    assert list(found["parts"]) == ["linen", "loop"]
    for part in found["parts"].values():
        assert part["outcome"] == "complete"
        base = part["rows"][0]["name"]
        assert part["rows"][1]["name"] == f"{base}, again"
        for row in part["rows"]:
            assert "outcome" not in row
            assert all(row[key] > 0 for key in ("milliseconds", "ratio", "compile_seconds", "peak_gigabytes"))
    flags = {row["name"]: row.get("flags") for row in found["parts"]["linen"]["rows"]}
    assert flags["Float8, float32 model"] == {"xla_gpu_enable_triton_gemm": False}
    assert flags["bfloat16 by hand, default flags"] is None


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


def test_instructions_are_those_of_the_kernels_that_move_several_elements_at_once():
    kernel = ".visible .entry {name}(\n\t.param .b64 p\n)\n{{\n{body}\n}}\n"
    wide = [
        r"mov.u32 %r1, %tid.x;",
        r"ld.global.nc.v4.b32 {%r1}, [%rd2];",
        r"@%p1 bra $L__1;",
        "st.global.v4.b32 [%rd1], {%r1};",
    ]
    wide = "\n".join("\t" + line for line in wide)
    one = "\tld.global.b32 \t%r1, [%rd2];\n\tst.global.b32 \t[%rd1], %r1;"
    found = instructions(kernel.format(name="wide", body=wide) + kernel.format(name="one", body=one))
    assert found == {"wide": 1.0}


@pytest.mark.slow
def test_all_ways_to_sum_over_a_vocabulary_give_one_loss_and_its_gradients():
    head = vocabulary.SMALL
    params, targets = head.make()
    rows = {
        (form, half, name): jax.jit(jax.value_and_grad(fun))(params, *targets)
        for form in vocabulary.FORMS
        for half in (False, True)
        for name, fun in vocabulary.ways(head.chunks, form, half, "cpu").items()
        if "tokamax" not in name  # which is wrong unless 2048 divides the vocabulary
    }
    loss, grads = rows["where", False, "whole logits"]
    for (_, half, _), (found, found_grads) in rows.items():
        np.testing.assert_allclose(found, loss, rtol=1e-3 if half else 1e-6)
        for x, y in zip(found_grads, grads, strict=True):
            assert np.linalg.norm(x - y) < (1e-2 if half else 1e-5) * np.linalg.norm(y)
