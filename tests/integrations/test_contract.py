"""The train states, optimizers and gradients of Flax and Equinox keep the contract of tests/contract.py."""

import functools
from typing import Any

import equinox as eqx
import flax.training.train_state
import jax
import jax.numpy as jnp
import optax
import pytest
from contract import DYNAMIC, EVERY_CHECK, INNER, Adapter, loss_fn, params
from flax import nnx

import jamp
import jamp.equinox
import jamp.linen
import jamp.nnx


def as_first(make):
    """`make`, whose results share the static parts of the first, so that `jit` compiles one step for all."""
    first = functools.cache(lambda *args: jax.tree.structure(make(*args)))
    return lambda *args: jax.tree.unflatten(first(*args), jax.tree.leaves(make(*args)))


@as_first
def train_state(loss_scale, axis_name, dtype):
    fields = {"apply_fn": None, "params": params(dtype), "seen": jnp.zeros(2), "ema": params()}
    return jamp.linen.TrainState.create(tx=INNER, loss_scale=loss_scale, axis_name=axis_name, **fields)


def new_fields(state, x):
    ema = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new.astype(old.dtype), state.ema, state.params)
    return {"seen": state.seen + 1 + jnp.mean(x), "ema": ema}


class FlaxState(flax.training.train_state.TrainState):
    seen: Any
    ema: Any


def plain_linen():
    def step(state, x):
        new = state.apply_gradients(grads=jax.grad(loss_fn)(state.params, x), **new_fields(state, x))
        return new.replace(step=optax.safe_increment(state.step))

    state = FlaxState.create(apply_fn=None, params=params(), tx=INNER, seen=jnp.zeros(2), ema=params())
    return state.replace(step=jnp.int32(0)), step


def linen(loss_scale=DYNAMIC, axis_name=None, dtype=jnp.float32):
    def step(state, x):
        grads = state.value_and_grad(loss_fn)(state.params, x)[1]
        return state.apply_gradients(grads=grads, **new_fields(state, x))

    kept = lambda state: (state.params, state.opt_state.inner_state, state.step, state.seen, state.ema)
    return train_state(loss_scale, axis_name, dtype), step, kept


class Net(nnx.Module):
    def __init__(self, dtype):
        self.params = nnx.data({k: nnx.Param(x) for k, x in params(dtype).items()})
        self.seen = nnx.BatchStat(jnp.zeros(2))


def net_loss(model, x):
    model.seen[...] += 1 + jnp.mean(x)
    return loss_fn({k: p[...] for k, p in model.params.items()}, x)


@functools.cache
def split(loss_scale, axis_name, dtype):
    model, kwargs = Net(dtype), {"wrt": nnx.Param}
    if loss_scale is None:
        return nnx.split((model, nnx.Optimizer(model, INNER, **kwargs)))
    kwargs |= {"loss_scale": loss_scale, "axis_name": axis_name}
    return nnx.split((model, jamp.nnx.Optimizer(model, INNER, **kwargs)))


def of_nnx(loss_scale=DYNAMIC, axis_name=None, dtype=jnp.float32):
    """NNX. The carry is the state of the model and of the optimizer, as pytrees of arrays."""
    graphdef, start = split(loss_scale, axis_name, dtype)
    pure = lambda model, optimizer: nnx.as_pure((nnx.state(model), optimizer.opt_state, optimizer.step))

    def step(carry, x):
        model, optimizer = nnx.merge(graphdef, start, copy=True)
        nnx.update(model, nnx.state(carry[0]))
        nnx.update(optimizer.opt_state, nnx.state(carry[1]))
        optimizer.step[...] = carry[2]
        if loss_scale is None:
            grads = nnx.grad(net_loss)(model, x)
        else:
            grads = jamp.nnx.value_and_grad(net_loss, optimizer)(model, x)[1]
        optimizer.update(model, grads)
        return pure(model, optimizer)

    carry = jax.tree.map(jnp.copy, pure(*nnx.merge(graphdef, start)))
    return carry, step, lambda carry: (carry[0], carry[1].inner_state, carry[2])


class Model(eqx.Module):
    params: dict
    steps: jax.Array


def equinox(loss_scale=DYNAMIC, axis_name=None, dtype=jnp.float32):
    tx = jamp.loss_scaled(INNER, loss_scale, axis_name=axis_name)

    def step(carry, x):
        model, state = carry
        fun = lambda model, x: loss_fn(model.params, x)
        grads = jamp.equinox.filter_value_and_grad(fun, state)(model, x)[1]
        return jamp.equinox.apply_gradients(tx, grads, state, model)

    model = Model(params(dtype), jnp.int32(7))
    return (model, tx.init(eqx.filter(model, eqx.is_inexact_array))), step, lambda c: (c[0], c[1].inner_state)


ADAPTERS = {
    "linen": Adapter(linen, plain_linen),
    "nnx": Adapter(of_nnx, lambda: of_nnx(None)[:2]),
    "equinox": Adapter(equinox),
}


@pytest.mark.promotes("Flax and Equinox")
@pytest.mark.parametrize("name", ADAPTERS)
@EVERY_CHECK
def test_keeps_the_contract(name, check):
    check(ADAPTERS[name])
