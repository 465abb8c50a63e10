"""What jamp makes for Flax and Equinox works in another process, to which cloudpickle brings it."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jaxprs import normal
from shipped import results_of

import jamp.equinox
import jamp.linen
import jamp.nnx

X, SGD = normal(4, 4), optax.sgd(0.1, momentum=0.9)
loss_fn = lambda model, x: jnp.mean(model(x) ** 2)


def of_linen():
    model = nn.Dense(4)
    params = model.init(jax.random.key(0), X)
    state = jamp.linen.TrainState.create(apply_fn=model.apply, params=params, tx=SGD, ema=params)

    def run(x=X):
        loss, grads = state.value_and_grad(lambda params: jnp.mean(state.apply_fn(params, x) ** 2))(state.params)
        return loss, state.apply_gradients(grads=grads)

    return run


def of_nnx():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    optimizer = jamp.nnx.Optimizer(model, SGD, wrt=nnx.Param, loss_scale=jamp.DynamicLossScale())
    differentiate = jamp.nnx.value_and_grad(loss_fn, optimizer)

    def run(x=X):
        loss, grads = differentiate(model, x)
        optimizer.update(model, grads)
        return loss, nnx.state(model), nnx.state(optimizer)

    return run


def of_equinox():
    model, tx = eqx.nn.Linear(4, 4, key=jax.random.key(0)), jamp.loss_scaled(SGD)
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    differentiate = jamp.equinox.filter_value_and_grad(lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2), state)

    def run(x=X):
        loss, grads = differentiate(model, x)
        return loss, eqx.filter(jamp.equinox.apply_gradients(tx, grads, state, model), eqx.is_array)

    return run


@pytest.mark.slow
def test_functions_and_states_of_flax_and_equinox_work_in_another_process(tmp_path):
    functions = {make.__name__: make() for make in (of_linen, of_nnx, of_equinox)}
    there, here = results_of(functions, tmp_path)
    assert {name: x for name, x in there.items() if isinstance(x, str)} == {}
    for name in functions:
        for x, y in zip(there[name], here[name], strict=True):
            np.testing.assert_array_equal(x, y, name)
