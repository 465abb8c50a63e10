"""jamp.interop.autocast_from_jmp: the text is parsed as jmp parses it, and each part of a policy has its effect."""

import importlib.util
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trees import assert_equal

import jamp
from jamp.interop import autocast_from_jmp

W, X = jax.random.normal(jax.random.key(0), (16, 16)), jax.random.normal(jax.random.key(1), (3, 16))
HAS = {name: importlib.util.find_spec(name) is not None for name in ("jmp", "haiku", "flax")}

TEXTS = [
    "p=f32,c=bf16,o=f32",
    "params=float32,compute=float16,output=float32",
    "c=f16",
    "p=f16,c=bf16",
    "p=bf16",
    "bf16",
    "half",
    "full",
    "o=bf16,c=half",
]


def fun(w, x):
    return jnp.tanh(x @ w) @ w


@pytest.mark.skipif(not HAS["jmp"], reason="jmp is not installed")
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_and_the_policy_that_jmp_makes_of_it_give_the_same_program(text):
    import jmp

    policy = jmp.get_policy(text)
    program = lambda policy: str(jax.make_jaxpr(autocast_from_jmp(fun, policy))(W, X))
    assert program(text) == program(policy)
    assert autocast_from_jmp(fun, text)(W, X).dtype == policy.output_dtype
    compute = jnp.dtype(policy.compute_dtype)
    if compute != jnp.float32:
        expected = jamp.autocast(fun, compute)(W, X).astype(policy.output_dtype)
        assert_equal(autocast_from_jmp(fun, text)(W, X), expected)


def test_spaces_are_allowed_and_compute_and_output_follow_as_in_jmp():
    dtype = lambda text: autocast_from_jmp(fun, text)(W, X).dtype
    assert dtype(" p = f32, c = bf16 , o = f32 ") == jnp.float32
    assert dtype("c=f16") == jnp.float16
    assert dtype("p=bf16") == jnp.bfloat16
    assert dtype("c=f16,o=f32") == jnp.float32


@pytest.mark.parametrize("stored", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_parameters_may_be_in_any_dtype_and_what_lies_between_the_products_is_float32(stored):
    policy = types.SimpleNamespace(param_dtype=stored, compute_dtype=jnp.bfloat16, output_dtype=jnp.float32)
    w = W.astype(stored)
    wrapped = autocast_from_jmp(fun, policy)
    jaxpr = jax.make_jaxpr(wrapped)(w, X)
    assert "bf16[3,16] = dot_general" in str(jaxpr)
    assert "f32[3,16] = tanh" in str(jaxpr)
    grads = jax.grad(lambda w: wrapped(w, X).sum())(w)
    assert grads.dtype == stored
    exact = jax.grad(lambda w: fun(w, X).sum())(w.astype(jnp.float32))
    np.testing.assert_allclose(grads.astype(jnp.float32), exact, rtol=0.05, atol=0.1)


def test_float32_products_of_16_bit_parameters_are_float32():
    """jmp's "p=f16,c=f32,o=f32"."""
    w = W.astype(jnp.float16)
    assert_equal(autocast_from_jmp(fun, "p=f16,c=f32")(w, X), fun(w.astype(jnp.float32), X))


def test_options_reach_autocast_and_all_results_are_cast():
    pair = lambda w, x: ({"loss": jnp.mean(fun(w, x))}, jnp.arange(3))
    loss, count = autocast_from_jmp(pair, "c=bf16,o=f16", rules={"dot_general": "float32"})(W, X)
    assert (loss["loss"].dtype, count.dtype) == (jnp.float16, jnp.int32)
    assert loss["loss"] == jnp.mean(fun(W, X)).astype(jnp.float16)
    assert autocast_from_jmp(fun, "bf16").__name__ == "fun"


def test_what_is_no_policy_is_an_error():
    for wrong, kind, match in (
        ("p=f32,d=f16", ValueError, "params, compute and output, got 'd'"),
        ("c=f17", ValueError, "compute='f17'"),
        ("c=int32,o=f32", ValueError, "compute='int32'"),
        ("c=f16,o=", ValueError, "output=''"),
        ("c=f64", ValueError, "float64"),
        (jnp.bfloat16, TypeError, r"jmp\.Policy"),
        (None, TypeError, r"jmp\.Policy"),
    ):
        with pytest.raises(kind, match=match):
            autocast_from_jmp(fun, wrong)(W, X)
    with pytest.raises(TypeError, match="autocast_from_jmp"):
        autocast_from_jmp("p=f32,c=bf16", fun)


@pytest.mark.skipif(not HAS["flax"], reason="Flax is not installed")
@pytest.mark.promotes("Flax")
def test_the_statistics_of_an_nnx_model_are_kept():
    from flax import nnx

    model = nnx.BatchNorm(16, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    before = model.mean[...]
    autocast_from_jmp(lambda model, x: model(x), "p=bf16,c=bf16,o=f32")(model, X)
    assert not np.array_equal(model.mean[...], before)


@pytest.fixture
def haiku():
    if not (HAS["haiku"] and HAS["jmp"]):
        pytest.skip("Haiku is not installed")
    import haiku as hk

    class Encoder(hk.Module):
        def __call__(self, x):
            x = hk.Conv2D(8, 3, name="conv")(x)
            x = jax.nn.relu(hk.BatchNorm(True, True, 0.9, name="norm")(x, is_training=True))
            return hk.Linear(10, name="head")(x.reshape(x.shape[0], -1))

    yield hk, Encoder
    hk.mixed_precision.clear_policy(Encoder)
    hk.mixed_precision.clear_policy(hk.BatchNorm)
    hk.mixed_precision.clear_policy(hk.Linear)


@pytest.mark.promotes("Haiku")
def test_haikus_policies_of_classes_are_rules_of_scopes(haiku):
    """docs/from-jmp.md: BatchNorm in float32 needs no rule, and any other class is a rule with the module's name."""
    import jmp

    hk, encoder = haiku
    net = hk.transform_with_state(lambda x: encoder()(x))
    x = jax.random.normal(jax.random.key(1), (4, 8, 8, 3))
    params, state = net.init(jax.random.key(0), x)
    fun = lambda params, x: net.apply(params, state, None, x)[0]
    exact = fun(params, x)

    rows = jamp.autocast_report(fun, jnp.bfloat16)(params, x).rows
    of_norm = [row for row in rows if "norm" in row.scope]
    assert len(of_norm) > 5
    assert not any("bfloat16" in str(row.runs) for row in of_norm)
    runs = {row.operation: str(row.runs) for row in rows if row.category == "compute"}
    assert runs == dict.fromkeys(["conv_general_dilated", "dot_general"], "bfloat16, bfloat16 -> bfloat16")

    rules = {"dot_general[head]": "float32"}
    rows = jamp.autocast_report(fun, jnp.bfloat16, rules=rules)(params, x).rows
    assert [str(row.runs) for row in rows if row.scope == "encoder/head" and "dot_general" in row.operation] == [
        "float32, float32 -> float32"
    ]
    ours = autocast_from_jmp(fun, "p=f32,c=bf16,o=f32", rules=rules)(params, x)

    hk.mixed_precision.set_policy(encoder, jmp.get_policy("p=f32,c=bf16,o=f32"))
    hk.mixed_precision.set_policy(hk.BatchNorm, jmp.get_policy("p=f32,c=f32,o=bf16"))
    hk.mixed_precision.set_policy(hk.Linear, jmp.get_policy("p=f32,c=f32,o=f32"))
    theirs = fun(params, x)
    error = lambda y: float(abs(y - exact).max() / abs(exact).max())
    assert 0 < error(ours) < 0.02
    assert 0 < error(theirs) < 0.02
