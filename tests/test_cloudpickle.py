"""Every function that jamp makes works in another process, to which cloudpickle brings it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxprs import normal
from shipped import results_of

import jamp
import jamp.debug
import jamp.optimizers

W = normal(16, 16, scale=0.25)
# `cloudpickle` sends a lambda by value, and a function of a module by its name, which another process may not know.
loss = lambda w: jnp.sum(jnp.tanh(jnp.tanh(w @ w) @ w) ** 2)
SCALE = jamp.StaticLossScale(1024.0)
TRANSFORMED = {
    "autocast": jax.grad(jamp.autocast(loss, jnp.float16)),
    "autocast, budget": jax.grad(jamp.autocast(loss, jnp.bfloat16, memory_budget=0)),
    "Float8": jax.grad(jamp.autocast(loss, jamp.Float8(min_size=1))),
    "Int8": jax.grad(jamp.autocast(loss, jamp.Int8(min_size=1))),
    "full_precision": jax.grad(jamp.autocast(jamp.full_precision(loss), jnp.bfloat16)),
    "recompute": jax.grad(jamp.recompute(loss, 0)),
    "scaled": jax.grad(jamp.scaled(loss)),
    "scaled autocast": jax.grad(jamp.scaled(jamp.autocast(loss, jnp.float16))),
    "value_and_grad": jamp.value_and_grad(loss, SCALE.init()),
    "grad": jamp.grad(loss, SCALE.init()),
}
REPORTS = {
    "memory_report": jamp.memory_report(loss, 0),
    "autocast_report": jamp.autocast_report(loss, jnp.bfloat16),
    "rounding_report": jamp.debug.rounding_report(loss, jnp.bfloat16),
}
WRAPPERS = {
    "master_params": jamp.loss_scaled(jamp.master_params(optax.sgd(0.1, momentum=0.9)), jamp.DynamicLossScale()),
    "split masters": jamp.master_params(optax.sgd(0.1, momentum=0.9), split=True),
    "stochastic_rounding": jamp.stochastic_rounding(optax.sgd(0.1)),
    "quantized_state": jamp.quantized_state(optax.sgd(0.1, momentum=0.9)),
}
OPTIMIZERS = {"loss_scaled": jamp.loss_scaled(optax.sgd(0.1, momentum=0.9), SCALE), "adamw": jamp.optimizers.adamw(0.1)}


@pytest.mark.slow
def test_functions_and_optimizers_of_jamp_work_in_another_process(tmp_path):
    functions = {name: functools.partial(jax.jit(f), W) for name, f in TRANSFORMED.items()}
    functions |= {name: lambda f=f, w=W: len(f(w).rows) for name, f in REPORTS.items()}
    low = W.astype(jnp.bfloat16)
    run = lambda tx, w: jax.jit(lambda w: tx.update(jnp.ones_like(w), tx.init(w), w))(w)
    functions |= {name: functools.partial(run, tx, W) for name, tx in OPTIMIZERS.items()}
    functions |= {name: functools.partial(run, tx, low) for name, tx in WRAPPERS.items()}
    scaler = jamp.GradScaler(init_scale=1024.0)
    functions["GradScaler"] = lambda: scaler.scale(jnp.float32(3.0))
    functions["History"] = lambda history=jamp.History(): history.first_step
    there, here = results_of(functions, tmp_path)
    assert {name: x for name, x in there.items() if isinstance(x, str)} == {}
    for name in functions:
        for x, y in zip(there[name], here[name], strict=True):
            np.testing.assert_array_equal(x, y, name)
