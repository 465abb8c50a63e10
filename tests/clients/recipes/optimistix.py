"""Optimistix: a network fitted with `OptaxMinimiser`, stepped by hand, with an Equinox checkpoint."""

import io

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimistix as optx

import jamp
from tests.clients.data import line_batches

MARGIN = 0.05
X, Y = next(line_batches(1, batch=4096))
X, Y = jnp.asarray(X), jnp.asarray(Y)


def residuals(params, args):
    x, y, weight = args
    for w, b in params[:-1]:
        x = jnp.tanh(x @ w + b)
    (w, b) = params[-1]
    return ((x @ w + b)[:, 0] - y) * weight


def loss_fn(params, args):
    return jnp.mean(residuals(params, args) ** 2), None


def make_params(dtype=jnp.float32, sizes=(128, 128, 128, 1)):
    keys = jax.random.split(jax.random.key(0), len(sizes) - 1)
    return [
        ((jax.random.normal(key, (n, m)) / np.sqrt(n)).astype(dtype), jnp.zeros(m, dtype))
        for key, n, m in zip(keys, sizes, sizes[1:], strict=False)
    ]


def of_way(way, fn=loss_fn):
    """The function, the optimizer and the dtype of the parameters."""
    tx, dtype = optax.adamw(1e-3), jnp.float32
    if way == "float16":
        fn = jamp.scaled(jamp.autocast(fn, jnp.float16))
        tx = jamp.loss_scaled(tx, jamp.StaticLossScale(1.0))
    elif way == "bfloat16":
        fn = jamp.autocast(fn, jnp.bfloat16)
    elif way == "8 bit":
        fn = jamp.autocast(fn, jamp.Float8())
    elif way == "bfloat16 parameters":
        tx, dtype = jamp.stochastic_rounding(tx), jnp.bfloat16
    return fn, tx, dtype


class Run:
    def __init__(self, way):
        fn, tx, dtype = of_way(way)
        solver = optx.OptaxMinimiser(tx, rtol=1e-12, atol=1e-12)
        self.params, weighted = make_params(dtype), (X, Y, 1.0)
        kinds = jax.eval_shape(fn, self.params, weighted)
        options = {"options": {}, "tags": frozenset()}
        self.state = solver.init(fn, self.params, weighted, f_struct=kinds[0], aux_struct=kinds[1], **options)
        self.update = eqx.filter_jit(lambda y, args, state: solver.step(fn, y, args, state=state, **options))

    def step(self, weight=1.0):
        self.params, self.state, _ = self.update(self.params, (X, Y, weight), self.state)
        return float(self.state.f)


def train(way):
    run = Run(way)
    return [run.step() for _ in range(100)]


def overflow():
    run = Run("float16")
    run.step()
    before = run.params, run.state.opt_state.inner_state
    run.step(np.inf)
    return before, (run.params, run.state.opt_state.inner_state), jamp.metrics(run.state.opt_state)["overflow_steps"]


def checkpoint():
    run, other = Run("float16"), Run("float16")
    for _ in range(3):
        run.step()
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, (run.params, run.state))
    file.seek(0)
    other.params, other.state = eqx.tree_deserialise_leaves(file, (other.params, other.state))
    for _ in range(3):
        run.step(), other.step()
    return (run.params, run.state.opt_state), (other.params, other.state.opt_state)


def metrics():
    run = Run("float16")
    for i in range(3):
        run.step(np.inf if i == 1 else 1.0)
    return jamp.metrics(run.state.opt_state)
