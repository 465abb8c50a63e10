"""Modules of Flax and Equinox as functions, methods and parameters of the transformations."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn, nnx

import jamp
import jamp.equinox
import jamp.nnx

X, ADAM = jnp.ones((2, 4)), optax.adam(0.1)
TX = jamp.loss_scaled(ADAM)
LINEN = nn.Dense(4)
VARIABLES = LINEN.init(jax.random.key(0), X)
STATE = TX.init(VARIABLES["params"])
EQX = eqx.nn.MLP(4, 4, 4, 1, key=jax.random.key(0))
EQX_STATE = TX.init(eqx.filter(EQX, eqx.is_inexact_array))


class Model(nnx.Module):
    def __init__(self, dropout=0.0, is_normed=False):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None
        self.norm = nnx.BatchNorm(4, rngs=rngs) if is_normed else None

    def __call__(self, x):
        for layer in (self.linear, self.dropout, self.norm):
            x = x if layer is None else layer(x)
        return x


class LinenMethod(nn.Module):
    @jamp.autocast("bf16")
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(x)


PLAIN, DROPOUT, NORMED = Model(), Model(dropout=0.5), Model(is_normed=True)
OPTIMIZER = jamp.nnx.Optimizer(PLAIN, ADAM, wrt=nnx.Param)
nnx_loss = lambda model: jnp.mean(model(X) ** 2)
eqx_loss = lambda model: jnp.mean(jax.vmap(model)(X) ** 2)
eqx_grad = jamp.equinox.filter_value_and_grad


def test_modules_that_are_functions_pass():
    """An Equinox module, a bound Linen module, a module inside a module, and an NNX module that changes nothing."""
    assert jamp.autocast(EQX, "bf16")(X[0]).shape == (4,)
    assert jamp.autocast(LINEN.bind(VARIABLES), "bf16")(X).shape == (2, 4)
    assert jamp.autocast(PLAIN, "bf16")(X).shape == (2, 4)
    assert jamp.autocast(nnx.view(DROPOUT, deterministic=True), "bf16")(X).shape == (2, 4)
    changed = jamp.autocast(lambda model, x: model(x), "bf16")(NORMED, X)
    assert changed.shape == (2, 4)

    class Inside(nn.Module):
        def setup(self):
            self.first = jamp.autocast(nn.Dense(4), "bf16")

        @nn.compact
        def __call__(self, x):
            return jamp.full_precision(nn.Dense(4))(x)

    assert Inside().init_with_output(jax.random.key(0), X)[0].shape == (2, 4)


class NnxMethod(Model):
    @jamp.autocast(jnp.bfloat16)
    def __call__(self, x):
        return super().__call__(x)


class EqxMethod(eqx.Module):
    linear: eqx.nn.Linear

    @jamp.autocast("bfloat16")
    def __call__(self, x):
        return self.linear(x)


def test_a_method_may_be_decorated():
    multiplied = lambda fun, *args: str(jax.make_jaxpr(fun)(*args)).count("preferred_element_type=bfloat16")
    features, x = VARIABLES["params"]["bias"].shape[0], jnp.ones((2, 16))  # enough terms to be in 16 bit
    variables = {"params": {"Dense_0": {"kernel": jnp.ones((16, features)), "bias": jnp.zeros(features)}}}
    assert multiplied(LinenMethod().apply, variables, x) == 1
    model = NnxMethod(dropout=0.5)
    assert not jnp.array_equal(model(X), model(X))
    assert nnx.grad(lambda model: model(X).sum())(model) is not None
    linear = EqxMethod(eqx.nn.Linear(16, 4, key=jax.random.key(0)))
    assert multiplied(linear, x[0]) == 1
    assert eqx.filter_grad(lambda model: model(x[0]).sum())(linear).linear.weight.shape == (4, 16)


def test_gradients_of_an_nnx_module_of_parameters_alone_are_those_of_jamp_nnx():
    """Only what a step changes without a gradient needs jamp.nnx."""
    grads = jamp.grad(nnx_loss, STATE)(PLAIN)
    wanted = jamp.nnx.value_and_grad(nnx_loss, OPTIMIZER)(PLAIN)[1]
    for x, y in zip(jax.tree.leaves(nnx.state(grads)), jax.tree.leaves(wanted), strict=True):
        assert jnp.array_equal(x, y)
    assert jamp.grad(nnx_loss, STATE)(PLAIN) is not None
    jamp.nnx.value_and_grad(nnx_loss, jamp.GradScaler(), argnums=nnx.DiffState(0, nnx.Param))(DROPOUT)
    params = nnx.state(DROPOUT, nnx.Param)
    jamp.grad(lambda params: sum(jnp.sum(x) for x in jax.tree.leaves(params)), STATE)(params)


def test_what_has_no_gradient_may_be_none():
    """As in the gradients of an Equinox model: where the optimizer has no state for it."""
    grads = eqx_grad(eqx_loss, EQX_STATE)(EQX)[1]
    assert grads.activation is None
    updates, _ = TX.update(grads, EQX_STATE, EQX)
    assert updates.activation is None
    sgd = jamp.loss_scaled(optax.sgd(0.1))
    assert sgd.update({"w": X, "b": None}, sgd.init({"w": X, "b": X}), {"w": X, "b": X})[0]["b"] is None
