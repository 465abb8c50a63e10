"""What docs/nan.md says, on eight devices and in NNX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from processes import run_python

import jamp
import jamp.nnx

EIGHT = "--xla_force_host_platform_device_count=8"


@pytest.mark.slow
def test_the_programs_of_the_page_find_the_same_on_eight_devices():
    code = """
import contextlib, io, sys
from pages import agree, programs
namespace = {"__name__": "nan.md"}
for block, expected in programs("nan.md"):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(block, "model.py", "exec"), namespace)
    assert not expected or agree(out.getvalue(), expected, roughly=False), (out.getvalue(), expected)
print(namespace["jax"].device_count(), namespace["step"])
"""
    from pages import ROOT

    printed = run_python("-c", code, XLA_FLAGS=EIGHT, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    assert printed.split() == ["8", "37"]


def test_nnx_draws_the_same_dropout_mask_after_a_bad_step():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.dropout = nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.linear(x))

    loss_fn = lambda model, x: jnp.sum(jnp.log(model(x) * 0))
    model, one = Model(nnx.Rngs(0)), jamp.StaticLossScale(1.0)
    optimizer = jamp.nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param, loss_scale=one)
    before = nnx.as_pure(nnx.state(model))
    _, grads = jamp.nnx.value_and_grad(loss_fn, optimizer)(model, jnp.ones((2, 4)))
    optimizer.update(model, grads)
    assert not jamp.get_grads_finite(optimizer)
    same = lambda x, y: np.testing.assert_array_equal(*map(jax.random.key_data, (x, y)))
    for x, y in zip(*map(jax.tree.leaves, (before, nnx.as_pure(nnx.state(model)))), strict=True):
        (same if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.testing.assert_array_equal)(x, y)


def test_a_linen_module_in_place_of_a_function_is_an_error_that_names_apply():
    with pytest.raises(TypeError, match=r"got the Linen module Dense, whose function is model\.apply"):
        jamp.debug.find_nonfinite(nn.Dense(1))
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    assert not jamp.debug.find_nonfinite(model)(jnp.ones((1, 2)))  # An NNX module is a function.
