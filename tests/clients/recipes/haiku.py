"""Haiku: a language model in the loop of its documentation, with an Orbax checkpoint."""

import tempfile
from pathlib import Path

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import jamp
from tests.clients.data import text_batches

MARGIN = 0.01
WIDTH, LENGTH = 128, 32


def network(tokens):
    x = hk.Embed(256, WIDTH)(tokens) + hk.Embed(LENGTH, WIDTH)(jnp.arange(tokens.shape[1]))
    mask = jnp.tril(jnp.ones((1, 1, tokens.shape[1], tokens.shape[1])))
    for _ in range(2):
        y = hk.LayerNorm(-1, True, True)(x)
        x = x + hk.MultiHeadAttention(4, WIDTH // 4, w_init=hk.initializers.VarianceScaling(1.0))(y, y, y, mask)
        y = hk.Linear(4 * WIDTH)(hk.LayerNorm(-1, True, True)(x))
        x = x + hk.Linear(WIDTH)(jax.nn.gelu(y))
    return hk.Linear(256)(hk.LayerNorm(-1, True, True)(x))


net = hk.without_apply_rng(hk.transform(network))
BATCHES = text_batches(101, length=LENGTH)


def plain_loss(params, tokens, weight):
    logits = net.apply(params, tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean() * weight


def of_way(way, loss_fn=plain_loss):
    """The loss function, the optimizer and the dtype of the parameters."""
    tx, dtype = optax.adamw(1e-3), jnp.float32
    if way == "float16":
        loss_fn = jamp.scaled(jamp.autocast(loss_fn, jnp.float16))
        tx = jamp.loss_scaled(tx, jamp.StaticLossScale(1.0))
    elif way == "bfloat16":
        loss_fn = jamp.autocast(loss_fn, jnp.bfloat16)
    elif way == "8 bit":
        loss_fn = jamp.autocast(loss_fn, jamp.Float8())
    elif way == "bfloat16 parameters":
        tx, dtype = jamp.stochastic_rounding(tx), jnp.bfloat16
    return loss_fn, tx, dtype


class Run:
    def __init__(self, way):
        self.loss_fn, self.tx, dtype = of_way(way)
        self.params = jamp.cast_floating(net.init(jax.random.key(0), BATCHES[0][:, :-1]), dtype)
        self.opt_state = self.tx.init(self.params)
        self.update = jax.jit(self._update)

    def _update(self, params, opt_state, tokens, weight):
        loss, grads = jax.value_and_grad(self.loss_fn)(params, tokens, weight)
        updates, opt_state = self.tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def step(self, i, weight=1.0):
        self.params, self.opt_state, loss = self.update(self.params, self.opt_state, BATCHES[i], weight)
        return float(loss)


def train(way):
    run = Run(way)
    return [run.step(i) for i in range(100)]


def overflow():
    run = Run("float16")
    run.step(0)
    before = run.params
    run.step(1, np.inf)
    return before, run.params, jamp.metrics(run.opt_state)["overflow_steps"]


def checkpoint():
    run, other = Run("float16"), Run("float16")
    for i in range(3):
        run.step(i)
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder) / "state", (run.params, run.opt_state))
        checkpointer.wait_until_finished()
        other.params, other.opt_state = checkpointer.restore(Path(folder) / "state", (other.params, other.opt_state))
    for i in range(3, 6):
        run.step(i), other.step(i)
    return (run.params, run.opt_state), (other.params, other.opt_state)


def metrics():
    run = Run("float16")
    for i in range(3):
        run.step(i, np.inf if i == 1 else 1.0)
    return jamp.metrics(run.opt_state)  # Haiku has no loggers: what you hand to yours
