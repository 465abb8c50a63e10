"""jamp.debug on models of every framework, and `python -m jamp.doctor`. The page: test_docs.py."""

import re
import types

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jaxprs import normal
from processes import run_python

import jamp
import jamp.debug
from jamp import doctor

X = normal(2, 4)


def linen():
    model = nn.Sequential([nn.Dense(4), jnp.log])
    return lambda params, x: model.apply(params, x).mean(), jax.jit(model.init)(jax.random.key(0), X)


def nnx_model():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.dense, self.norm = nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
            self.drop, self.rngs = nnx.Dropout(0.1), rngs

        def __call__(self, x):
            return jnp.log(self.drop(self.norm(self.dense(x)), rngs=self.rngs))

    return lambda model, x: model(x).mean(), nnx.jit(Model)(nnx.Rngs(0))


def equinox():
    linear = eqx.filter_jit(eqx.nn.Linear)(4, 4, key=jax.random.key(0))
    return lambda model, x: jnp.log(jax.vmap(model)(x)).mean(), linear


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("make", "autocast"),
    [
        (linen, True),
        (nnx_model, False),
        (equinox, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((linen, False), (nnx_model, True), (equinox, False))
        ),
    ],
)
def test_a_model_of_any_framework_is_searched_and_left_as_it_is(make, autocast):
    loss, model = make()
    before = jax.tree.leaves(model)
    found = jamp.debug.find_nonfinite(jamp.autocast(loss, jnp.float16) if autocast else loss)(model, X).finding
    assert (found.primitive, found.cause.startswith("log of a negative number")) == ("log", True)
    assert "test_diagnose.py" in found.source
    assert all(x is y for x, y in zip(before, jax.tree.leaves(model), strict=True) if hasattr(x, "shape"))


@pytest.mark.parametrize("program", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_doctor_prints_versions_devices_native_types_speeds_and_advice(program):
    text = run_python("-m", "jamp.doctor") if program else doctor.report(seconds=0)
    assert [x for x in (f"jax {jax.__version__}", jax.devices()[0].device_kind, "Recommended: ") if x not in text] == []
    rows = re.findall(r"^  (\w+) +([\d.]+) TFLOP/s +[\d.]+ x float32  (native|converted)", text, re.MULTILINE)
    dtypes, speeds, ways = zip(*rows, strict=True)
    assert (dtypes, ways[2]) == (("float16", "bfloat16", "float32"), "native")
    assert min(map(float, speeds)) > 0


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("platform", "capability", "is_named"),
    [
        *(("gpu", capability, True) for capability in ("8.9", "9.0", "10.0")),
        *(("gpu", capability, False) for capability in ("8.0", "gfx942")),
        ("cpu", None, False),
        ("tpu", None, False),
    ],
)
def test_the_doctor_names_the_option_for_float8_where_a_gpu_has_it(monkeypatch, platform, capability, is_named):
    device = types.SimpleNamespace(platform=platform, device_kind="a device")
    if capability is not None:
        device.compute_capability = capability
    monkeypatch.setattr(jax, "devices", lambda: [device])
    text = doctor.report(seconds=0)
    assert ('compiler_options={"xla_gpu_enable_triton_gemm": False}' in text) == is_named
    assert ("XLA_FLAGS=--xla_gpu_enable_triton_gemm=false" in text) == is_named


@pytest.mark.parametrize("name", ["sqrt", "add", "exp", "log", "tanh", "sum", "cumsum", "matmul", "where", "maximum"])
def test_the_doctor_names_operations_outside_jit_that_numpy_contradicts(monkeypatch, name):
    monkeypatch.setattr(doctor, "_speeds", lambda seconds: dict.fromkeys(("float16", "bfloat16", "float32"), 1.0))
    monkeypatch.setattr(doctor, "_is_native", lambda dtype: True)
    assert "WRONG RESULTS" not in doctor.report()
    right = getattr(jnp, name)
    monkeypatch.setattr(jnp, name, lambda *args, **kwargs: right(*args, **kwargs) * 0 + jnp.float32(jnp.nan))
    text = doctor.report()
    assert f"WRONG RESULTS on {jax.local_devices()[0].device_kind} outside jit: {name}. The first is " in text
    assert "jax/issues/40633" in text
    assert "find_nonfinite" in text


def test_the_doctor_looks_at_each_kind_of_local_device(monkeypatch):
    seen = []
    devices = [types.SimpleNamespace(device_kind=kind) for kind in ("a GPU", "a GPU", "another GPU")]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    monkeypatch.setattr(jax, "default_device", lambda x: (seen.append(x.device_kind), jax.enable_x64(False))[1])
    monkeypatch.setattr(jnp, "exp", lambda x: x * 0)
    lines = doctor._wrong_results()
    assert seen == ["a GPU", "another GPU"]
    assert [line.split(" outside")[0] for line in lines] == [f"WRONG RESULTS on {kind}" for kind in seen]


def test_the_doctor_recommends_16_bit_only_where_it_is_native_and_faster(monkeypatch):
    bfloat16 = "bfloat16. jamp.autocast(loss_fn, jnp.bfloat16); it needs no loss scale"
    for native, times, expected in (
        ((True, True, True), (8, 8, 1), bfloat16 + ", or float16"),
        ((False, True, True), (8, 8, 1), bfloat16 + "."),
        ((True, False, True), (8, 8, 1), "float16. jamp.autocast(loss_fn, jnp.float16), and jamp.loss_scaled(tx)"),
        ((True, True, True), (1, 1.1, 1), "float32"),
        ((False, False, True), (8, 8, 1), "float32"),
    ):
        is_native, speeds = (dict(zip(("float16", "bfloat16", "float32"), x, strict=True)) for x in (native, times))
        monkeypatch.setattr(doctor, "_is_native", is_native.get)
        monkeypatch.setattr(doctor, "_speeds", lambda seconds, speeds=speeds: speeds)
        assert f"Recommended: {expected}" in doctor.report()
