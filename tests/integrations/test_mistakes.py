"""Mistakes with modules of Flax and Equinox: each is an error that holds the right line or the right name."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn, nnx

import jamp
import jamp.equinox
import jamp.linen
import jamp.nnx
import jamp.plot

X, ADAM, SCALER = jnp.ones((2, 4)), optax.adam(0.1), jamp.GradScaler()
TX = jamp.loss_scaled(ADAM)
LINEN = nn.Dense(4)
VARIABLES = LINEN.init(jax.random.key(0), X)
STATE = TX.init(VARIABLES["params"])
CREATE = functools.partial(jamp.linen.TrainState.create, apply_fn=LINEN.apply, params=VARIABLES["params"])
TRAIN_STATE = CREATE(tx=ADAM)
EQX = eqx.nn.MLP(4, 4, 4, 1, key=jax.random.key(0))
ARRAYS = eqx.filter(EQX, eqx.is_inexact_array)
EQX_STATE = TX.init(ARRAYS)


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


class Inside(nn.Module):
    transform: object
    argument: object

    @nn.compact
    def __call__(self, x):
        return self.transform(nn.Dense(4), self.argument)(x)


PLAIN, DROPOUT, NORMED = Model(), Model(dropout=0.5), Model(is_normed=True)
OPTIMIZER = jamp.nnx.Optimizer(PLAIN, ADAM, wrt=nnx.Param)
linen_loss = lambda params: jnp.mean(LINEN.apply({"params": params}, X) ** 2)
nnx_loss = lambda model: jnp.mean(model(X) ** 2)
eqx_loss = lambda model: jnp.mean(jax.vmap(model)(X) ** 2)
eqx_grad = jamp.equinox.filter_value_and_grad
A_MODULE, A_SPLIT = (
    "(lambda model, x: model(x), ...)(model, x)",
    "jamp.nnx.value_and_grad(loss_fn, optimizer)(model, batch)",
)

MISTAKES = {
    # Linen.
    "autocast of a Linen module": (lambda: jamp.autocast(LINEN, "bf16"), "jamp.autocast(model.apply, jnp.bfloat16)"),
    "a decorator of a Linen module": (lambda: jamp.autocast("bf16")(LINEN), "jamp.autocast(model.apply, jnp.bfloat16)"),
    "recompute of a Linen module": (
        lambda: jamp.recompute(LINEN, 0.5),
        "jamp.recompute(model.apply, 0.5)(variables, x)",
    ),
    "scaled of a Linen module": (lambda: jamp.scaled(LINEN), "jamp.scaled(model.apply)"),
    "chunked_sum of a Linen module": (lambda: jamp.chunked_sum(LINEN, 2), "jamp.chunked_sum(model.apply, 1024)"),
    "full_precision of a Linen module": (lambda: jamp.full_precision(LINEN), "jamp.full_precision(model.apply)"),
    "value_and_grad of a Linen module": (
        lambda: TRAIN_STATE.value_and_grad(LINEN),
        "jamp.value_and_grad(model.apply, ",
    ),
    "a train state of a number": (lambda: CREATE(tx=ADAM, loss_scale=8.0), "jamp.StaticLossScale(8.0)"),
    "a train state of loss_scaled": (lambda: CREATE(tx=TX), "Pass the plain optimizer"),
    "a train state of a function": (lambda: CREATE(tx=optax.adam), "jamp.loss_scaled(optax.adamw(1e-3))"),
    "a field with the name of a method": (lambda: CREATE(tx=ADAM, metrics={}), "Rename the collection"),
    "a field that was not created": (lambda: TRAIN_STATE.apply_gradients(grads=VARIABLES["params"], ema=1), "`create`"),
    "apply_gradients of a pair": (
        lambda: TRAIN_STATE.apply_gradients(grads=TRAIN_STATE.value_and_grad(linen_loss)(TRAIN_STATE.params)),
        "loss, grads =",
    ),
    "a train state in place of params": (lambda: TRAIN_STATE.value_and_grad(linen_loss)(TRAIN_STATE), "state.params"),
    "init of a decorated method": (lambda: LinenMethod().init(jax.random.key(0), X), "jamp.autocast(model.apply, ...)"),
    "init of a layer": (
        lambda: Inside(jamp.recompute, 0.5).init(jax.random.key(0), X),
        "jamp.recompute(model.apply, ...)",
    ),
    # NNX.
    "autocast of Dropout": (lambda: jamp.autocast(DROPOUT, "bf16")(X), "jamp.autocast" + A_MODULE),
    "autocast of BatchNorm": (lambda: jax.jit(jamp.autocast(NORMED, "bf16"))(X), "jamp.autocast" + A_MODULE),
    "autocast of a closure": (lambda: jamp.autocast(lambda x: DROPOUT(x), "bf16")(X), "jamp.autocast" + A_MODULE),
    "recompute of Dropout": (lambda: jamp.recompute(DROPOUT, 0.5)(X), "jamp.recompute" + A_MODULE),
    "scaled of BatchNorm": (lambda: jamp.scaled(NORMED)(X), "jamp.scaled" + A_MODULE),
    "value_and_grad of Dropout": (lambda: jamp.value_and_grad(nnx_loss, STATE)(DROPOUT), A_SPLIT),
    "value_and_grad of BatchNorm": (lambda: jamp.value_and_grad(nnx_loss, STATE)(NORMED), A_SPLIT),
    "grad of Dropout": (lambda: jamp.grad(nnx_loss, STATE)(DROPOUT), A_SPLIT),
    "grad of a tuple with Dropout": (lambda: jamp.grad(lambda x: nnx_loss(x[0]), STATE)((DROPOUT, X)), A_SPLIT),
    "GradScaler of Dropout": (
        lambda: SCALER.value_and_grad(nnx_loss)(DROPOUT),
        "jamp.nnx.value_and_grad(loss_fn, scaler, argnums=nnx.DiffState(0, nnx.Param))",
    ),
    "value_and_grad with an optimizer": (lambda: jamp.value_and_grad(nnx_loss, OPTIMIZER), "jamp.nnx.value_and_grad"),
    "a plain nnx.Optimizer": (
        lambda: jamp.nnx.value_and_grad(nnx_loss, nnx.Optimizer(PLAIN, ADAM, wrt=nnx.Param))(PLAIN),
        "jamp.nnx.Optimizer(model, tx, wrt=nnx.Param)",
    ),
    "jamp.nnx with a state": (lambda: jamp.nnx.value_and_grad(nnx_loss, STATE)(PLAIN), "a jamp.nnx.Optimizer"),
    "jamp.nnx with a GradScaler": (lambda: jamp.nnx.value_and_grad(nnx_loss, SCALER)(PLAIN), "argnums=nnx.DiffState(0"),
    "jamp.nnx, swapped": (lambda: jamp.nnx.value_and_grad(OPTIMIZER, nnx_loss)(PLAIN), "(loss_fn, opt_state)"),
    "jamp.nnx, the batch first": (
        lambda: jamp.nnx.value_and_grad(lambda x, m: m(x).sum(), OPTIMIZER)(X, PLAIN),
        A_SPLIT,
    ),
    "jamp.nnx of a pair": (
        lambda: jamp.nnx.value_and_grad(lambda m: (nnx_loss(m), 1), OPTIMIZER)(PLAIN),
        "has_aux=True",
    ),
    "an optimizer, swapped": (
        lambda: jamp.nnx.Optimizer(ADAM, PLAIN, wrt=nnx.Param),
        "jamp.nnx.Optimizer(model, optax.",
    ),
    "an optimizer of loss_scaled": (lambda: jamp.nnx.Optimizer(PLAIN, TX, wrt=nnx.Param), "Pass the plain optimizer"),
    "an optimizer with a number": (
        lambda: jamp.nnx.Optimizer(PLAIN, ADAM, wrt=nnx.Param, loss_scale=1024),
        "jamp.StaticLossScale(1024.0)",
    ),
    "update, swapped": (lambda: OPTIMIZER.update(nnx.grad(nnx_loss)(PLAIN), PLAIN), "optimizer.update(model, grads)"),
    "metrics of a split optimizer": (lambda: jamp.metrics(nnx.split(OPTIMIZER)[0]), "merge or restore it first"),
    # Equinox.
    "value_and_grad of a model": (
        lambda: jamp.value_and_grad(eqx_loss, EQX_STATE)(EQX),
        "jamp.equinox.filter_value_and_grad(loss_fn, opt_state)",
    ),
    "filter_value_and_grad with a model": (lambda: eqx_grad(eqx_loss, EQX)(EQX), "(loss_fn, opt_state)"),
    "filter_value_and_grad, swapped": (lambda: eqx_grad(EQX_STATE, eqx_loss)(EQX), "(loss_fn, opt_state)"),
    "apply_gradients, the optimizer second": (
        lambda: jamp.equinox.apply_gradients(ARRAYS, TX, EQX_STATE, EQX),
        "jamp.equinox.apply_gradients(optax.adamw(1e-3), grads, opt_state, model)",
    ),
    "apply_gradients, the state second": (
        lambda: jamp.equinox.apply_gradients(TX, EQX_STATE, ARRAYS, EQX),
        "tx.update(grads, state, params)",
    ),
    "apply_gradients of a filtered pair": (
        lambda: jamp.equinox.apply_gradients(TX, eqx_grad(eqx_loss, EQX_STATE)(EQX), EQX_STATE, EQX),
        "loss, grads =",
    ),
    # Plots.
    "a plot of no steps": (lambda: jamp.plot.loss_scale_history(jamp.History()), "history.append(opt_state)"),
    "a plot of no gradients": (lambda: jamp.plot.gradient_range({"w": X * 0}, STATE), "none of 8 gradients"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_with_a_module_is_an_error_that_names_the_cure(name):
    mistake, cure = MISTAKES[name]
    with pytest.raises((TypeError, ValueError)) as caught:
        mistake()
    assert cure in str(caught.value), str(caught.value)
    assert len(str(caught.value)) < 700


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
    with pytest.raises(
        TypeError, match=r"__call__ stores parameters.*jamp\.autocast\(model\.apply, \.\.\.\)"
    ) as caught:
        LinenMethod().init(jax.random.key(0), X)
    assert "Linen" in str(caught.value)
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
    jamp.nnx.value_and_grad(nnx_loss, SCALER, argnums=nnx.DiffState(0, nnx.Param))(DROPOUT)
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
