"""The example, the page and `python -m jamp.doctor` as a reader runs them; models of every framework."""

import os
import re
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib as mpl
import pytest
from flax import nnx

import jamp
import jamp.debug
from jamp import doctor

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "diagnosis.md").read_text()


def run(*command):
    paths = [str(Path(jamp.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "MPLBACKEND": "Agg"}
    command = [sys.executable, "-W", "error", *map(str, command)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_example_finds_both_faults_and_writes_the_pictures(tmp_path):
    text = run("examples/diagnose.py", "--steps", "60", "--out", tmp_path)
    source = (ROOT / "examples" / "diagnose.py").read_text().splitlines()
    line = next(i for i, x in enumerate(source, start=1) if "the planted fault" in x)
    assert f"diagnose.py:{line} (layer)" in text
    assert "overflow in float16: value would be" in text
    assert "scan, iteration 1 of 4" in text
    assert "Found nothing" in text
    plain, default, recommended = map(float, re.search(r"In float16 (\S+)% .* 0, (\S+)% .*, (\S+)% at", text).groups())
    assert plain > 90 > 2 > default > recommended
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "gradient_range.png",
        "history.csv",
        "layer_ranges.png",
        "loss_scale.png",
    ]
    assert len((tmp_path / "history.csv").read_text().splitlines()) == 61


def test_the_programs_of_the_page_run_in_their_order_and_its_reports_are_what_they_print(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mpl.use("Agg")
    namespace = {}
    blocks = re.findall(r"^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    printed = 0
    for number, (program, expected) in enumerate(blocks):
        exec(compile(program, f"page{number}.py", "exec"), namespace)
        out = capsys.readouterr().out
        if expected:
            printed += 1
            assert re.sub(r"page\d+\.py:\d+", "FILE", out) == re.sub(r"\S+\.py:\d+", "FILE", expected)
    assert printed >= 2


def test_every_cause_of_the_page_is_one_that_is_reported():
    causes = re.findall(r"^\| `(.+?)` \|", PAGE, re.MULTILINE)
    source = (Path(jamp.__file__).parent / "debug" / "_cause.py").read_text()
    assert len(causes) >= 8
    assert not [cause for cause in causes if cause.split(" ")[0] not in source]


def linen():
    model = nn.Sequential([nn.Dense(8), jnp.log, nn.Dense(1)])
    params = model.init(jax.random.key(0), jnp.ones((2, 4)))
    return lambda params, x: model.apply(params, x).mean(), params


def nnx_model():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.dense, self.norm, self.drop = (
                nnx.Linear(4, 8, rngs=rngs),
                nnx.BatchNorm(8, rngs=rngs),
                nnx.Dropout(0.1),
            )
            self.rngs = rngs

        def __call__(self, x):
            return jnp.log(self.drop(self.norm(self.dense(x)), rngs=self.rngs))

    return lambda model, x: model(x).mean(), Model(nnx.Rngs(0))


def equinox():
    linear = eqx.nn.Linear(4, 8, key=jax.random.key(0))
    return lambda model, x: jnp.log(jax.vmap(model)(x)).mean(), linear


@pytest.mark.parametrize("make", [linen, nnx_model, equinox])
@pytest.mark.parametrize("wrap", [lambda f: f, jamp.autocast])
def test_a_model_of_any_framework_is_searched_and_left_as_it_is(make, wrap):
    loss, model = make()
    before = jax.tree.leaves(model)
    found = jamp.debug.find_nonfinite(wrap(loss))(model, jax.random.normal(jax.random.key(1), (2, 4))).finding
    assert found.primitive == "log"
    assert found.cause.startswith("log of a negative number")
    assert "test_diagnose.py" in found.source
    after = jax.tree.leaves(model)
    assert all(x is y for x, y in zip(before, after, strict=True) if hasattr(x, "shape"))


def test_the_doctor_prints_versions_devices_native_types_speeds_and_a_recommendation():
    text = run("-m", "jamp.doctor")
    assert f"jax {jax.__version__}" in text
    assert jax.devices()[0].device_kind in text
    rows = re.findall(r"^  (\w+) +([\d.]+) TFLOP/s +[\d.]+ x float32  (native|converted)", text, re.MULTILINE)
    assert [row[0] for row in rows] == ["float16", "bfloat16", "float32"]
    assert all(float(row[1]) > 0 for row in rows)
    assert rows[2][2] == "native"
    assert "Recommended: " in text


@pytest.mark.parametrize(
    ("native", "times", "expected"),
    [
        ((True, True), (8, 8), "bfloat16. jamp.autocast(loss_fn, jnp.bfloat16); it needs no loss scale, or float16"),
        ((False, True), (8, 8), "bfloat16. jamp.autocast(loss_fn, jnp.bfloat16); it needs no loss scale."),
        ((True, False), (8, 8), "float16. jamp.autocast(loss_fn), and jamp.loss_scaled(tx)"),
        ((True, True), (1, 1.1), "float32"),
        ((False, False), (8, 8), "float32"),
    ],
)
def test_the_doctor_recommends_16_bit_only_where_it_is_native_and_faster(native, times, expected, monkeypatch):
    monkeypatch.setattr(doctor, "_is_native", dict(zip(("float16", "bfloat16"), native, strict=True), float32=True).get)
    speeds = dict(zip(("float16", "bfloat16"), times, strict=True), float32=1.0)
    monkeypatch.setattr(doctor, "_speeds", lambda seconds: speeds)
    assert f"Recommended: {expected}" in doctor.report()
