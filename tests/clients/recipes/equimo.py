"""Equimo: a small vision transformer with dropped paths, in a loop of Equinox, with the checkpoints of Equinox."""

import tempfile
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from equimo.vision.models.vit import VisionTransformer

import jamp

MARGIN = 0.05
BATCH, SIZE, CLASSES = 32, 32, 10


def images(i):
    """Noisy copies of ten images, f32[batch, 3, size, size], and which they are."""
    originals = np.random.default_rng(0).normal(size=(CLASSES, 3, SIZE, SIZE))
    rng = np.random.default_rng((1, i))
    labels = rng.integers(0, CLASSES, BATCH)
    return (originals[labels] / 4 + rng.normal(size=(BATCH, 3, SIZE, SIZE))).astype(np.float32), labels


def plain_loss(model, x, labels, key, weight):
    logits = jax.vmap(model)(x, jax.random.split(key, len(x)))
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean() * weight


def of_way(way, loss_fn=plain_loss):
    """The loss function, the optimizer and the dtype of the parameters."""
    tx, dtype = optax.adamw(3e-4), jnp.float32
    if way == "float16":
        loss_fn = jamp.scaled(jamp.autocast(loss_fn, jnp.float16))
        tx = jamp.loss_scaled(tx, jamp.StaticLossScale(1.0))
    elif way == "bfloat16":
        loss_fn = jamp.autocast(loss_fn, jnp.bfloat16)
    elif way == "8 bit":
        loss_fn = jamp.autocast(loss_fn, jamp.Float8())
    elif way == "bfloat16 parameters":
        tx, dtype = jamp.stochastic_rounding(tx), jnp.bfloat16
        loss_fn = lambda model, *args: plain_loss(jamp.cast_floating(model, jnp.float32), *args)
    return loss_fn, tx, dtype


class Run:
    def __init__(self, way):
        self.loss_fn, self.tx, dtype = of_way(way)
        model = VisionTransformer(
            SIZE, 3, 128, 8, 4, [2], num_classes=CLASSES, drop_path_rate=0.1, key=jax.random.key(0)
        )
        self.params, self.rest = eqx.partition(jamp.cast_floating(model, dtype), eqx.is_inexact_array)
        self.opt_state = self.tx.init(self.params)
        self.update = eqx.filter_jit(self._update)

    def _update(self, params, opt_state, *batch):
        model = eqx.combine(params, self.rest)
        loss, grads = eqx.filter_value_and_grad(self.loss_fn)(model, *batch)
        updates, opt_state = self.tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def step(self, i, weight=1.0):
        batch = *images(i), jax.random.key(i), weight
        self.params, self.opt_state, loss = self.update(self.params, self.opt_state, *batch)
        return float(loss)


def train(way):
    run = Run(way)
    return [run.step(i) for i in range(100)]


def overflow():
    run = Run("float16")
    run.step(0)
    before = run.params, run.opt_state.inner_state
    run.step(1, np.inf)
    return before, (run.params, run.opt_state.inner_state), jamp.metrics(run.opt_state)["overflow_steps"]


def checkpoint():
    run, other = Run("float16"), Run("float16")
    for i in range(3):
        run.step(i)
    with tempfile.TemporaryDirectory() as folder:
        eqx.tree_serialise_leaves(Path(folder) / "state.eqx", (run.params, run.opt_state))
        like = other.params, other.opt_state
        other.params, other.opt_state = eqx.tree_deserialise_leaves(Path(folder) / "state.eqx", like)
    for i in range(3, 6):
        run.step(i), other.step(i)
    return (run.params, run.opt_state), (other.params, other.opt_state)


def metrics():
    run = Run("float16")
    for i in range(3):
        run.step(i, np.inf if i == 1 else 1.0)
    return jamp.metrics(run.opt_state)  # Equimo has no loggers: what you hand to yours
