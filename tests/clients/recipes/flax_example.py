"""Flax: the CNN and the train step of its MNIST tutorial, in NNX, with its metrics and an Orbax checkpoint."""

import collections
import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from sklearn.datasets import load_digits

import jamp
import jamp.nnx

MARGIN = 0.03
learning_rate, momentum, batch_size = 0.005, 0.9, 128
IMAGES, LABELS = load_digits(return_X_y=True)
# In noise, because a CNN learns the digits so well that the last losses of two runs differ by a large part.
IMAGES = IMAGES / 16 + np.random.default_rng(0).normal(size=IMAGES.shape)
IMAGES = IMAGES.astype(np.float32).reshape(-1, 8, 8, 1)


class CNN(nnx.Module):
    def __init__(self, *, rngs, dtype=None):
        own = {"dtype": dtype, "rngs": rngs}
        self.conv1 = nnx.Conv(1, 32, kernel_size=(3, 3), **own)
        self.batch_norm1 = nnx.BatchNorm(32, **own)
        self.dropout1 = nnx.Dropout(rate=0.025)
        self.conv2 = nnx.Conv(32, 64, kernel_size=(3, 3), **own)
        self.batch_norm2 = nnx.BatchNorm(64, **own)
        self.avg_pool = partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.linear1 = nnx.Linear(256, 256, **own)
        self.dropout2 = nnx.Dropout(rate=0.025)
        self.linear2 = nnx.Linear(256, 10, **own)

    def __call__(self, x, rngs):
        x = self.avg_pool(nnx.relu(self.batch_norm1(self.dropout1(self.conv1(x), rngs=rngs))))
        x = self.avg_pool(nnx.relu(self.batch_norm2(self.conv2(x))))
        x = x.reshape(x.shape[0], -1)
        x = nnx.relu(self.dropout2(self.linear1(x), rngs=rngs))
        return self.linear2(x)


def loss_fn(model, rngs, batch):
    logits = model(batch["image"], rngs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), logits


def make(way, loss_fn=loss_fn):
    """The model, the optimizer and the train step."""
    model = CNN(rngs=nnx.Rngs(0))
    if way == "float16":
        loss_fn = jamp.autocast(loss_fn, jnp.float16)
        optimizer = jamp.nnx.Optimizer(model, optax.adamw(learning_rate, momentum), wrt=nnx.Param)
    elif way == "bfloat16 parameters":
        nnx.update(model, jamp.cast_floating(nnx.state(model, nnx.Param), jnp.bfloat16))
        tx = jamp.stochastic_rounding(optax.adamw(learning_rate, momentum))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    else:
        loss_fn = {
            "float32": loss_fn,
            "bfloat16": jamp.autocast(loss_fn, jnp.bfloat16),
            "8 bit": jamp.autocast(loss_fn, jamp.Float8()),
        }[way]
        optimizer = nnx.Optimizer(model, optax.adamw(learning_rate, momentum), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, metrics, rngs, batch):
        if way == "float16":
            grad_fn = jamp.nnx.value_and_grad(loss_fn, optimizer, has_aux=True)
        else:
            grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
        (loss, logits), grads = grad_fn(model, rngs, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        optimizer.update(model, grads)

    return model, optimizer, train_step


class Run:
    """The loop of the tutorial, which logs each step."""

    def __init__(self, way):
        self.way = way
        self.model, self.optimizer, self.train_step = make(way)
        self.metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
        self.rngs = nnx.Rngs(1)
        self.metrics_history = collections.defaultdict(list)

    def train(self, start, stop, bad=()):
        """Train, with an infinite pixel in a bad step."""
        for step in range(start, stop):
            chosen = np.random.default_rng(step).choice(len(LABELS), batch_size, replace=False)
            batch = {"image": IMAGES[chosen], "label": LABELS[chosen]}
            if step in bad:
                batch["image"][0, 0, 0] = np.inf
            self.train_step(self.model, self.optimizer, self.metrics, self.rngs, batch)
            log = self.metrics.compute()
            if self.way == "float16":
                log |= jamp.metrics(self.optimizer)
            for metric, value in log.items():
                self.metrics_history[metric].append(value)
            self.metrics.reset()

    def arrays(self):
        """The parameters and BatchNorm's statistics, Adam's state, and the count of Dropout's keys."""
        state = nnx.state(self.model), self.optimizer.opt_state.inner_state, nnx.state(self.rngs, nnx.RngCount)
        return jax.device_get(nnx.as_pure(state))


def train(way):
    run = Run(way)
    run.train(0, 100)
    return run.metrics_history["loss"]


def overflow():
    run = Run("float16")
    run.train(0, 1)
    before = run.arrays()
    run.train(1, 2, bad={1})
    return before, run.arrays(), run.metrics_history["overflow_steps"][-1]


def checkpoint():
    undisturbed, continued = Run("float16"), Run("float16")
    undisturbed.train(0, 3)
    nodes = lambda run: (run.model, run.optimizer, run.rngs)
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder) / "state", nnx.state(nodes(undisturbed)))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(Path(folder) / "state", nnx.state(nodes(continued)))
    nnx.update(nodes(continued), restored)
    undisturbed.train(3, 6)
    continued.train(3, 6)
    return undisturbed.arrays(), continued.arrays()


def metrics():
    run = Run("float16")
    run.train(0, 3, bad={1})
    return {name: values[-1] for name, values in run.metrics_history.items()}


def reported():
    def of(dtype):
        graphdef, params, rest = nnx.split(CNN(rngs=nnx.Rngs(0), dtype=dtype), nnx.Param, ...)
        batch = {"image": IMAGES, "label": LABELS}
        return params, lambda params: loss_fn(nnx.merge(graphdef, params, rest, copy=True), nnx.Rngs(1), batch)[0]

    return {"float32": of(None), "bfloat16": of(jnp.bfloat16)}
