"""Diffrax: a neural ODE fitted with Equinox and Optax, as in its documentation, with an Equinox checkpoint."""

import io

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jamp

MARGIN = 0.1
TIMES = jnp.linspace(0.0, 2.0, 10)


class Field(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(2, 2, 128, 2, activation=jax.nn.softplus, key=key)


def neural_field(t, y, model):
    return jax.vmap(model.mlp)(y)


def true_field(t, y, _):
    x = y / (1 + y)
    return jnp.stack([x[:, 1], -x[:, 0]], axis=1)


def solve(field, y0, model):
    term, steps = diffrax.ODETerm(field), diffrax.SaveAt(ts=TIMES)
    controller = diffrax.PIDController(rtol=1e-3, atol=1e-6)
    return diffrax.diffeqsolve(
        term, diffrax.Tsit5(), TIMES[0], TIMES[-1], 0.1, y0, model, saveat=steps, stepsize_controller=controller
    ).ys  # f32[times, batch, 2]


START = jax.random.uniform(jax.random.key(1), (128, 2), minval=0.6, maxval=1.0)
TRUE = jax.jit(solve, static_argnums=0)(true_field, START, None)


class Run:
    def __init__(self, way):
        tx, dtype = optax.adabelief(3e-3), jnp.float32
        field = neural_field
        if way == "float16":
            field = jamp.autocast(field, jnp.float16)
            tx = jamp.loss_scaled(tx, jamp.StaticLossScale(1.0))
        elif way == "bfloat16":
            field = jamp.autocast(field, jnp.bfloat16)
        elif way == "8 bit":
            field = jamp.autocast(field, jamp.Float8())
        elif way == "bfloat16 parameters":
            tx, dtype = jamp.stochastic_rounding(tx), jnp.bfloat16

        def loss_fn(model, weight):
            return jnp.mean((solve(field, START, model) - TRUE) ** 2) * weight

        if way == "float16":
            loss_fn = jamp.scaled(loss_fn)

        @eqx.filter_jit
        def update(model, opt_state, weight):
            loss, grads = eqx.filter_value_and_grad(loss_fn)(model, weight)
            params = eqx.filter(model, eqx.is_inexact_array)
            updates, opt_state = tx.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)  # unlike that of Equinox, it keeps the dtype
            return eqx.combine(params, model), opt_state, loss

        self.update = update
        self.model = jamp.cast_floating(Field(jax.random.key(0)), dtype)
        self.opt_state = tx.init(eqx.filter(self.model, eqx.is_inexact_array))

    def step(self, weight=1.0):
        self.model, self.opt_state, loss = self.update(self.model, self.opt_state, weight)
        return float(loss)


def train(way):
    run = Run(way)
    return [run.step() for _ in range(100)]


def arrays(run):
    return eqx.filter((run.model, run.opt_state), eqx.is_array)


def overflow():
    run = Run("float16")
    run.step()
    before = run.model, run.opt_state.inner_state
    run.step(np.inf)
    after = run.model, run.opt_state.inner_state
    counted = jamp.metrics(run.opt_state)["overflow_steps"]
    return eqx.filter(before, eqx.is_array), eqx.filter(after, eqx.is_array), counted


def checkpoint():
    run, other = Run("float16"), Run("float16")
    for _ in range(3):
        run.step()
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, (run.model, run.opt_state))
    file.seek(0)
    other.model, other.opt_state = eqx.tree_deserialise_leaves(file, (other.model, other.opt_state))
    for _ in range(3):
        run.step(), other.step()
    return arrays(run), arrays(other)


def metrics():
    run = Run("float16")
    for i in range(3):
        run.step(np.inf if i == 1 else 1.0)
    return jamp.metrics(run.opt_state)  # Diffrax has no loggers: what you hand to yours
