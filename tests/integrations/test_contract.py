"""The train states, optimizers and gradients of Flax and Equinox keep the contract of tests/contract.py."""

import functools
from typing import Any

import equinox as eqx
import flax.training.train_state
import jax
import jax.numpy as jnp
import optax
import pytest
from contract import BATCHES, CHECKS, DYNAMIC, INNER, Adapter, check_skips, loss_fn, params
from flax import nnx
from trees import bits

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
@pytest.mark.filterwarnings("ignore:float16 parameters without a master copy")
@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize(
    "check",
    [pytest.param(check, marks=[pytest.mark.slow] * (check is not check_skips)) for check in CHECKS],
    ids=lambda check: check.__name__.removeprefix("check_"),
)
def test_keeps_the_contract(name, check):
    check(ADAPTERS[name])


@pytest.mark.promotes("Flax")
def test_gradients_of_a_scaled_loss_give_the_steps_of_true_ones():
    fields = {"apply_fn": None, "params": params(), "tx": INNER, "loss_scale": DYNAMIC}
    true, scaled = (jamp.linen.TrainState.create(**fields, unscale=unscale) for unscale in (False, True))
    models = [Net(jnp.float32) for _ in range(3)]
    wrapped = jamp.loss_scaled(INNER, DYNAMIC, unscale=True)
    optimizers = [
        jamp.nnx.Optimizer(models[0], INNER, wrt=nnx.Param, loss_scale=DYNAMIC),
        jamp.nnx.Optimizer(models[1], INNER, wrt=nnx.Param, loss_scale=DYNAMIC, unscale=True),
        nnx.Optimizer(models[2], wrapped, wrt=nnx.Param),
    ]
    pairs = list(zip(models, optimizers, strict=True))
    for batch in ("good", "inf", "good"):
        x = BATCHES[batch]
        true = true.apply_gradients(grads=jax.grad(loss_fn)(true.params, x))
        grads = jax.grad(lambda p, x=x, state=scaled: jamp.scale_loss(loss_fn(p, x), state))(scaled.params)
        scaled = scaled.apply_gradients(grads=grads)
        assert bits((true.params, true.step, tuple(true.opt_state))) == bits(
            (scaled.params, scaled.step, tuple(scaled.opt_state))
        )
        for model, optimizer in pairs:
            factor = 1.0 if optimizer is optimizers[0] else jamp.get_loss_scale(optimizer)
            optimizer.update(model, nnx.grad(lambda m, x=x, factor=factor: net_loss(m, x) * factor)(model))
        first, *others = (bits(nnx.as_pure((nnx.state(m, nnx.Param), o.opt_state)))[1] for m, o in pairs)
        assert others == [first] * 2
    assert jamp.metrics(optimizers[2])["overflow_steps"] == 1
    assert float(jamp.scale_loss(1.0, optimizers[2])) == 2.0**9
    plain = nnx.Optimizer(models[0], jamp.loss_scaled(INNER), wrt=nnx.Param)
    for call in (jamp.metrics, lambda tree: jamp.value_and_grad(loss_fn, tree), jamp.get_loss_scale):
        with pytest.raises(ValueError, match=r"jamp\.nnx\.Optimizer\(model"):
            call(plain)
    skipping = nnx.Optimizer(models[0], jamp.skip_nonfinite(INNER), wrt=nnx.Param)
    skipping.update(models[0], nnx.grad(jamp.scaled(net_loss))(models[0], BATCHES["inf"]))  # as a trainer does it
    assert (int(jamp.metrics(skipping)["overflow_steps"]), bool(jamp.get_grads_finite(skipping))) == (1, False)
    unscaled = nnx.Optimizer(models[1], INNER, wrt=nnx.Param)
    assert jamp.get_loss_scale({"g": optimizers[0], "d": unscaled}) == 2.0**9  # two models, one of them scaled
    assert jamp.unscale_and_check(params(), optimizers[0])[1]
    for optimizer in (plain.opt_state, optimizers[0], optimizers[0].opt_state):
        with pytest.raises(ValueError, match=r"jamp\.nnx\.value_and_grad"):
            jamp.value_and_grad(loss_fn, optimizer)


@pytest.mark.promotes("Flax and Equinox")
def test_outside_jit_a_skip_keeps_subnormal_parameters_too():
    tiny, x = {"w": jnp.float32([1e-40, 0.5, 1.0]), "b": jnp.float32(-1e-42)}, BATCHES["inf"]
    state = jamp.linen.TrainState.create(apply_fn=None, params=tiny, tx=INNER)
    found = [state.apply_gradients(grads=state.value_and_grad(loss_fn)(tiny, x)[1]).params]
    tx, model = jamp.loss_scaled(INNER), Net(jnp.float32)
    nnx.update(model, {"params": tiny})
    optimizer = jamp.nnx.Optimizer(model, INNER, wrt=nnx.Param)
    optimizer.update(model, jamp.nnx.value_and_grad(net_loss, optimizer)(model, x)[1])
    found.append(nnx.as_pure(nnx.state(model, nnx.Param))["params"])
    grads = jax.tree.map(lambda p: p * jnp.inf, tiny)
    found.append(jamp.equinox.apply_gradients(tx, grads, tx.init(tiny), tiny)[0])
    found.append(jamp.GradScaler().step(INNER, INNER.init(tiny), tiny, grads=grads).params)
    assert [bits(params)[1] for params in found] == [bits(tiny)[1]] * 4


@pytest.mark.slow
@pytest.mark.promotes("Flax and Equinox")
def test_stochastic_rounding_reaches_the_16_bit_parameters_of_every_framework():
    tx, p, x = jamp.stochastic_rounding(INNER), params(jnp.bfloat16), BATCHES["good"]
    exact = jax.tree.map(lambda w, g: w - 0.1 * g, params(), jax.grad(loss_fn)(params(), x))
    train_state = jamp.linen.TrainState.create(apply_fn=None, params=p, tx=tx, loss_scale=DYNAMIC)
    train_state = train_state.apply_gradients(grads=train_state.value_and_grad(loss_fn)(p, x)[1])
    net = Net(jnp.bfloat16)
    optimizer = jamp.nnx.Optimizer(net, tx, wrt=nnx.Param, loss_scale=DYNAMIC)
    optimizer.update(net, jamp.nnx.value_and_grad(net_loss, optimizer)(net, x)[1])
    scaled, model = jamp.loss_scaled(tx, DYNAMIC), Model(p, jnp.int32(7))
    state = scaled.init(eqx.filter(model, eqx.is_inexact_array))
    grads = jamp.equinox.filter_value_and_grad(lambda model: loss_fn(model.params, x), state)(model)[1]
    model, state = jamp.equinox.apply_gradients(scaled, grads, state, model)
    of_net = {name: value[...] for name, value in net.params.items()}
    for opt_state in (train_state.opt_state, nnx.as_pure(optimizer.opt_state), state):
        assert int(opt_state.inner_state.rounding_count) == 1
    for new in (train_state.params, of_net, model.params):
        for name in new:
            assert new[name].dtype == jnp.bfloat16
            error = jnp.abs(new[name].astype(jnp.float32) - exact[name])
            assert jnp.all(error <= jnp.abs(exact[name]) * 2.0**-7 + 1e-3)
