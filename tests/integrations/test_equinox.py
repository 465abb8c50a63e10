"""jamp.equinox: models with static and other leaves that are not parameters. The rest: test_contract.py."""

import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxprs import products
from norms import distance
from steps import with_masters
from trees import avals

import jamp
import jamp.equinox

X = np.linspace(-1, 1, 48, dtype=np.float32).reshape(4, 12)
WRAPS = {
    "plain": lambda fun: fun,
    "autocast": functools.partial(jamp.autocast, compute_dtype=jnp.float16),
    "cast": lambda fun: lambda model, x: fun(jamp.cast_floating(model, jnp.float16), x),
    "masters of float16": lambda fun: fun,
}


class Net(eqx.Module):
    layers: list
    name: str
    activation: Callable
    steps: jax.Array
    missing: None = None
    width: int = eqx.field(static=True, default=12)

    def __init__(self, dtype=None):
        self.layers = [eqx.nn.Linear(12, n, key=jax.random.key(n), dtype=dtype) for n in (12, 2)]
        self.name, self.activation, self.steps = "net", jax.nn.relu, jnp.array(7)

    def __call__(self, x):
        x = self.layers[1](self.activation(self.layers[0](x.astype(self.layers[0].weight.dtype))))
        return x.astype(jnp.float32)


def loss_fn(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


@functools.cache
def make(dtype=None, wrap=jamp.loss_scaled):
    model, tx = eqx.filter_jit(Net)(dtype), wrap(optax.sgd(0.1, momentum=0.9), jamp.DynamicLossScale(init_scale=256.0))
    return model, tx, tx.init(eqx.filter(model, eqx.is_inexact_array))


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_model_with_static_and_other_leaves_trains_and_a_skip_does_not_move_it(wrap):
    model, tx, opt_state = make(*(jnp.float16, with_masters) if "masters" in wrap else ())
    types, losses = avals(eqx.filter(model, eqx.is_array)), []

    def step(model, opt_state, x):
        loss, grads = jamp.equinox.filter_value_and_grad(WRAPS[wrap](loss_fn), opt_state)(model, x)
        return loss, *jamp.equinox.apply_gradients(tx, grads, opt_state, model)

    compiled = eqx.filter_jit(step)
    for x in (X, X * np.float32(np.inf), X, X):
        before = model
        loss, model, opt_state = compiled(model, opt_state, x)
        assert eqx.tree_equal(model, before) == (not np.isfinite(loss))
        assert avals(eqx.filter(model, eqx.is_array)) == types
        losses.append(float(loss))
    assert losses[0] > losses[2] > losses[3]
    assert (model.name, model.activation, int(model.steps), model.width) == ("net", jax.nn.relu, 7, 12)
    assert ("f16[" in str(eqx.filter_make_jaxpr(step)(model, opt_state, X)[0])) == (wrap != "plain")


def test_gradients_and_has_aux_are_those_of_equinox_and_extra_args_are_passed():
    model, tx, opt_state = make()
    aux_fn = lambda model, x, *, power: (jnp.mean(jax.vmap(model)(x) ** power), {"model": model.name, "x": x})
    mine = eqx.filter_jit(lambda s, *args: jamp.equinox.filter_value_and_grad(aux_fn, s, has_aux=True)(*args, power=2))
    plain = eqx.filter_jit(eqx.filter_value_and_grad(aux_fn, has_aux=True))
    found, expected = mine(opt_state, model, X), plain(model, X, power=2)
    assert eqx.tree_equal(found, expected, rtol=1e-6)
    assert found[1].steps is None
    kept, _ = jamp.equinox.apply_gradients(tx, found[1], opt_state, model, grads_finite=jnp.bool_(False))
    assert eqx.tree_equal(kept, model)


def test_autocast_and_full_precision_on_a_module():
    class Head(Net):
        @jamp.full_precision
        def __call__(self, x):
            return super().__call__(x)

    params, static = eqx.partition(make()[0], eqx.is_inexact_array)
    loss = lambda wrap: lambda params: wrap(loss_fn)(eqx.combine(params, static), X)
    functions = [jax.value_and_grad(loss(WRAPS[name])) for name in ("autocast", "plain")]
    assert products(functions[0], params) == {jnp.dtype(jnp.float16)}
    assert distance(*jax.jit(lambda p: [f(p) for f in functions])(params)) < 5e-3
    assert products(jamp.autocast(lambda x: Head()(x), jnp.float16), X[0]) == {jnp.dtype(jnp.float32)}


def test_scaled_differentiates_a_model_with_leaves_that_are_no_arrays():
    loss_fn, (model, *_) = lambda model, x: jnp.mean(jax.vmap(model)(x).astype(jnp.float32) ** 2), make()
    gradients = [eqx.filter_jit(eqx.filter_grad(fun))(model, X) for fun in (jamp.scaled(loss_fn), loss_fn)]
    assert eqx.tree_equal(*gradients, rtol=1e-6, atol=1e-7)
    closed_over = eqx.filter_jit(eqx.filter_grad(lambda model: jamp.scaled(lambda x: loss_fn(model, x))(X)))(model)
    assert eqx.tree_equal(closed_over, gradients[1], rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("make_inner", [pytest.param(optax.adam, marks=pytest.mark.slow), optax.adamw])
def test_an_optimizer_takes_a_whole_model_as_plain_optax_does(make_inner):
    class Model(eqx.Module):
        mlp: eqx.nn.MLP
        steps: jax.Array
        name: str = "a leaf"

    model = Model(eqx.filter_jit(eqx.nn.MLP)(3, 2, 4, 2, key=jax.random.key(0)), jnp.int32(7))
    grads = eqx.filter_jit(eqx.filter_grad(lambda model: jnp.mean(jax.vmap(model.mlp)(jnp.ones((5, 3))) ** 2)))(model)
    inner, scaler = make_inner(1e-2), jamp.GradScaler()
    tx = jamp.loss_scaled(inner, jamp.DynamicLossScale())
    params = eqx.filter(model, eqx.is_inexact_array)
    state, scaled_state = jax.jit(lambda params: (inner.init(params), tx.init(params)))(params)
    step = eqx.filter_jit(lambda tx, *args: eqx.apply_updates(model, tx.update(*args, model)[0]))
    expected = step(inner, grads, state)
    assert eqx.tree_equal(step(tx, grads, scaled_state), expected, rtol=1e-6)
    scaler_step = eqx.filter_jit(lambda grads: scaler.step(inner, state, model, grads=grads))
    assert eqx.tree_equal(scaler_step(grads).params, expected, rtol=1e-6)
    skipped = scaler_step(jax.tree.map(lambda g: g * jnp.inf, grads))
    assert eqx.tree_equal((skipped.params, skipped.opt_state), (model, state))


def test_a_state_that_is_a_constant_of_the_jitted_step_warns():
    model, _, opt_state = make()
    loss = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
    with pytest.warns(UserWarning, match="keeps the first scale forever") as caught:
        eqx.filter_jit(jamp.equinox.filter_value_and_grad(loss, opt_state))(model, X)
    assert [w.filename for w in caught] == [__file__]
    jamp.equinox.filter_value_and_grad(loss, opt_state)(model, X)
