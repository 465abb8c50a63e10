"""jamp.equinox: models with static and other leaves that are no parameters."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
import jamp.equinox

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
INF = np.full_like(X, np.inf)
POLICY = jamp.get_policy("params=float32,compute=float16,output=float32")


class Net(eqx.Module):
    layers: list
    name: str
    activation: Callable
    steps: jax.Array
    missing: None = None
    width: int = eqx.field(static=True, default=6)

    def __init__(self, dtype=None):
        keys = jax.random.split(jax.random.key(0))
        self.layers = [eqx.nn.Linear(6, 6, key=keys[0], dtype=dtype), eqx.nn.Linear(6, 3, key=keys[1], dtype=dtype)]
        self.name, self.activation, self.steps = "net", jax.nn.gelu, jnp.array(7)

    def __call__(self, x):
        x = self.layers[1](self.activation(self.layers[0](x.astype(self.layers[0].weight.dtype))))
        return x.astype(jnp.float32)


def loss_fn(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


TX = jamp.loss_scaled(optax.adam(1e-2), jamp.DynamicLossScale(init_scale=256.0))
WRAPS = {
    "plain": lambda fun: fun,
    "autocast": jamp.autocast,
    "policy": lambda fun: lambda model, x: fun(POLICY.cast_to_compute(model), x),
}


def init(model, tx=TX):
    return tx.init(eqx.filter(model, eqx.is_inexact_array))


def make_step(wrap=WRAPS["plain"], tx=TX):
    @eqx.filter_jit
    def step(model, opt_state, x):
        loss, grads = jamp.equinox.filter_value_and_grad(wrap(loss_fn), opt_state)(model, x)
        return loss, *jamp.equinox.apply_gradients(tx, grads, opt_state, model)

    return step


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_model_with_static_and_other_leaves_trains_and_on_an_overflow_does_not_move(wrap):
    model, step = Net(), make_step(WRAPS[wrap])
    opt_state, losses = init(model), []
    for x in (X, INF, X, X):
        before = model
        loss, model, opt_state = step(model, opt_state, x)
        assert eqx.tree_equal(model, before) is not True if np.isfinite(loss) else eqx.tree_equal(model, before)
        losses.append(float(loss))
    assert losses[0] > losses[2] > losses[3]
    assert jamp.metrics(opt_state)["overflow_steps"] == 1
    assert (model.name, model.activation, int(model.steps), model.width) == ("net", jax.nn.gelu, 7, 6)
    traced = eqx.filter_make_jaxpr(make_step(WRAPS[wrap]))(model, opt_state, X)[0]
    assert ("f16[" in str(traced)) == (wrap != "plain")


def test_gradients_and_has_aux_are_those_of_equinox():
    model = Net()
    aux_fn = lambda model, x, *, power: (jnp.mean(jax.vmap(model)(x) ** power), {"model": model.name, "x": x})
    mine = jamp.equinox.filter_value_and_grad(aux_fn, init(model), has_aux=True)(model, X, power=2)
    plain = eqx.filter_value_and_grad(aux_fn, has_aux=True)(model, X, power=2)
    assert eqx.tree_equal(mine, plain, rtol=1e-6)
    assert mine[1].steps is None


def test_float16_parameters_keep_their_dtype_under_masters():
    tx = jamp.mixed_precision(optax.adam(1e-2), jamp.DynamicLossScale(init_scale=256.0))
    model = Net(jnp.float16)
    _, stepped, opt_state = make_step(tx=tx)(model, init(model, tx), X)
    assert bool(jamp.get_grads_finite(opt_state))
    kinds = lambda tree: jax.tree.map(lambda x: (x.dtype, x.shape), eqx.filter(tree, eqx.is_array))
    assert kinds(stepped) == kinds(model)


def test_a_plain_optimizer_state_is_an_error_and_extra_args_reach_the_optimizer():
    model = Net()
    with pytest.raises(ValueError, match=r"use\s+`tx = jamp\.loss_scaled\(tx\)`"):
        jamp.equinox.filter_value_and_grad(loss_fn, init(model, optax.sgd(0.1)))(model, X)
    grads = jax.tree.map(jnp.ones_like, eqx.filter(model, eqx.is_inexact_array))
    new, _ = jamp.equinox.apply_gradients(TX, grads, init(model), model, grads_finite=jnp.bool_(False))
    assert eqx.tree_equal(new, model)
