"""cast_floating and check_castable."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from steps import NO_GRADIENTS

import jamp


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn, jnp.float64])
def test_cast_floating_casts_floating_arrays_and_leaves_the_rest(dtype, x64):
    floating = {
        name: jnp.ones((0, 3) if name == "bfloat16" else 1, name) for name in ("float16", "float64", "bfloat16")
    }
    rest = NO_GRADIENTS | {"complex": jnp.complex64([1j]), "number": 2.0}
    cast = jamp.cast_floating([floating, rest], dtype)
    assert jax.tree.structure(cast) == jax.tree.structure([floating, rest])
    assert {k: (x.shape, x.dtype) for k, x in cast[0].items()} == {k: (x.shape, dtype) for k, x in floating.items()}
    assert all(x is y for x, y in zip(jax.tree.leaves(cast[1]), jax.tree.leaves(rest), strict=True))


def test_check_castable_names_the_leaves_that_would_become_inf_and_no_others():
    params = {
        "fits": jnp.array([1.0, -65504.0, 1e-30, jnp.inf, jnp.nan]),  # What is inf already does not become it.
        "large": [jnp.zeros(5), jnp.array([0.0, -7e4, 0.0, 0.0, 0.0])],
        "ignored": NO_GRADIENTS | {"large int": jnp.int32(10**6), "number": 1e9},  # cast_floating leaves them unchanged
        "none": None,
    }
    assert jamp.check_castable(params, jnp.float16) == ["['large'][1]"]
    assert jamp.check_castable(params, jnp.bfloat16) == []
    assert jamp.check_castable({"w": jnp.array([1e3])}, jnp.float8_e4m3fn) == ["['w']"]  # NaN there: it has no inf
    assert jamp.check_castable({}, jnp.float16) == []


def test_check_castable_to_a_dtype_that_is_not_floating_is_an_error():
    with pytest.raises(ValueError, match="floating"):
        jamp.check_castable(jnp.ones(2), jnp.int8)


def test_check_castable_sees_numbers_of_numpy_that_jax_would_round_to_inf_first():
    assert jamp.check_castable({"w": np.array([1e39])}, jnp.float32) == ["['w']"]
    assert jamp.check_castable({"w": np.array([np.inf, 1e38])}, jnp.float32) == []


def test_short_names_of_dtypes_are_dtypes_everywhere():
    w = jnp.ones(2)
    assert jamp.cast_floating(w, "fp16").dtype == jnp.float16
    assert jamp.autocast_report(lambda x: x @ x, "half")(w).compute_dtype == "float16"
    assert jamp.loss_scale_for("bf16") == jamp.StaticLossScale(1.0)
    assert jamp.autocast("bfloat16")(lambda x: x @ x)(w).dtype == jnp.float32
    assert jamp.Float8(carrier="fp16").carrier == jnp.float16
    assert jamp.Float8(forward="float8_e5m2") == jamp.Float8(forward=jnp.float8_e5m2)
    assert jamp.check_castable({"w": w * 1e5}, "fp16") == ["['w']"]
    assert jamp.unscale_and_check(w, jamp.DynamicLossScale().init(), dtype="bf16")[0].dtype == jnp.bfloat16
    assert jamp.master_params(optax.sgd(0.1), "f32").init(w.astype(jnp.float16)).master_params.dtype == jnp.float32
    rounded = jamp.stochastic_rounding(optax.adam(0.1), state_dtype="bf16").init(w.astype(jnp.bfloat16))
    assert rounded.inner_state[0].mu.dtype == jnp.bfloat16
    for call in (lambda x: jamp.cast_floating(w, x), jamp.loss_scale_for, lambda x: jamp.autocast(jnp.sin, x)):
        for wrong in ("fp17", "int8"):
            with pytest.raises(ValueError, match="dtype must be float"):
                call(wrong)
    for call in (lambda x: jamp.cast_floating(w, x), jamp.loss_scale_for):
        with pytest.raises(ValueError, match="dtype must be float"):
            call(None)
    with pytest.raises(TypeError, match="autocast takes a function and a compute_dtype, got sin alone"):
        jamp.autocast(jnp.sin, None)
