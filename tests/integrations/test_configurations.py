"""The adapters in JAX's strict and unusual configurations: their steps are those of the default one."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from configurations import CONFIGURATIONS
from flax import linen, nnx
from jaxprs import normal
from trees import assert_close

import jamp.equinox
import jamp.linen
import jamp.nnx

X, BAD, SGD = normal(4, 8), normal(4, 8).at[0, 0].set(jnp.inf), optax.sgd(0.1, momentum=0.9)
LINEN, EQUINOX = linen.Dense(8), eqx.nn.Linear(8, 8, key=jax.random.key(0))


def with_linen():
    params = jax.tree.map(jnp.zeros_like, LINEN.init(jax.random.key(0), X)["params"])
    state = jamp.linen.TrainState.create(apply_fn=LINEN.apply, params=params, tx=SGD, seen=jnp.int32(0))

    @jax.jit
    def step(state, x):
        loss_fn = lambda params: jnp.mean((state.apply_fn({"params": params}, x) - 1.0) ** 2)
        _, grads = state.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads, seen=state.seen + 1)

    return jax.tree.leaves(step(step(state, X), BAD))


def with_nnx():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    optimizer = jamp.nnx.Optimizer(model, SGD, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        _, grads = jamp.nnx.value_and_grad(lambda model: jnp.mean((model(x) - 1.0) ** 2), optimizer)(model)
        optimizer.update(model, grads)

    step(model, optimizer, X)
    step(model, optimizer, BAD)
    return jax.tree.leaves(nnx.as_pure((nnx.state(model), nnx.state(optimizer))))


def with_equinox():
    tx = jamp.loss_scaled(SGD)

    @eqx.filter_jit
    def step(model, opt_state, x):
        loss_fn = lambda model: jnp.mean((jax.vmap(model)(x) - 1.0) ** 2)
        _, grads = jamp.equinox.filter_value_and_grad(loss_fn, opt_state)(model)
        return jamp.equinox.apply_gradients(tx, grads, opt_state, model)

    return jax.tree.leaves(step(*step(EQUINOX, tx.init(eqx.filter(EQUINOX, eqx.is_inexact_array)), X), BAD))


@pytest.mark.slow
@pytest.mark.parametrize("train", [with_linen, with_nnx, with_equinox])
def test_two_steps_are_those_of_the_default_configuration(train):
    expected = train()
    for configuration in CONFIGURATIONS.values():
        with configuration():
            found = train()
        assert list(map(jnp.result_type, found)) == list(map(jnp.result_type, expected))
        assert_close(found, expected)
