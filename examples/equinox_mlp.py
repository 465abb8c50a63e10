"""Train a multilayer perceptron in Equinox on handwritten digits, with and without autocast.

    pip install '.[examples,equinox]'
    python examples/equinox_mlp.py

An Equinox model is a pytree of arrays and other leaves: here an activation function, a name and a count. jamp's
`filter_value_and_grad` and `apply_gradients` scale the loss, update the floating arrays and leave the other leaves
unchanged. In the second run `jamp.autocast` computes the matrix products in float16, without a change to the model.

What to expect: both runs end at the same loss and the same accuracy. The second run skips a few steps until the loss
scale has found its place. It takes about 10 seconds on two cores. The data are part of scikit-learn.
"""

import argparse
import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import trange

import jamp
import jamp.equinox


class Classifier(eqx.Module):
    layers: list[eqx.nn.Linear]
    activation: Callable  # not a parameter
    name: str  # not a parameter
    classes: int = eqx.field(static=True)  # not a parameter

    def __init__(self, sizes, key):
        keys = jax.random.split(key, len(sizes) - 1)
        self.layers = [eqx.nn.Linear(n, m, key=k) for n, m, k in zip(sizes[:-1], sizes[1:], keys, strict=True)]
        self.activation, self.name, self.classes = jax.nn.gelu, "digits", sizes[-1]

    def __call__(self, x):
        *hidden, last = self.layers
        for layer in hidden:
            x = self.activation(layer(x))
        return last(x)


def loss_fn(model, images, labels):
    logits = jax.vmap(model)(images)
    correct = jnp.mean(logits.argmax(-1) == labels)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), correct


def make_train_step(tx, loss_fn):
    @eqx.filter_jit(donate="all-except-first")
    def train_step(batch, model, opt_state):
        # 1. Replaces eqx.filter_value_and_grad. It returns the true loss and the true float32 gradients.
        (loss, _), grads = jamp.equinox.filter_value_and_grad(loss_fn, opt_state, has_aux=True)(model, *batch)
        # 2. Replaces tx.update and eqx.apply_updates. On an overflow it changes nothing.
        model, opt_state = jamp.equinox.apply_gradients(tx, grads, opt_state, model)
        return loss, model, opt_state

    return train_step


def train(name, loss_fn, loss_scale, steps, batch):
    model = Classifier((64, 256, 256, 10), jax.random.key(0))
    tx = jamp.loss_scaled(optax.adamw(1e-3), loss_scale)  # 3. wraps the whole optimizer
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    train_step = make_train_step(tx, loss_fn)
    for step in (bar := trange(1, steps + 1, desc=name)):
        loss, model, opt_state = train_step(batch, model, opt_state)
        if step % 20 == 0 or step == steps:
            seen = jax.device_get(jamp.metrics(opt_state))  # waits for the device, so not at every step
            scale, skipped = f"2**{math.log2(seen['loss_scale']):g}", int(seen["overflow_steps"])
            bar.set_postfix(loss=f"{loss:.1e}", scale=scale, skipped=skipped)
    return model, float(loss), skipped


def main():
    parser = argparse.ArgumentParser(description="An Equinox perceptron in float32 and under autocast.")
    parser.add_argument("--steps", type=int, default=400, help="steps to train, each on all training images")
    args = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    halves = train_test_split(images / 16, labels, test_size=0.5, stratify=labels, random_state=0)
    images, test_images, labels, test_labels = map(jnp.asarray, halves)
    runs = {
        "float32": (loss_fn, jamp.NoOpLossScale()),
        "autocast": (
            jamp.autocast(loss_fn, jnp.float16),
            jamp.DynamicLossScale(growth_interval=25, max_scale=math.inf),
        ),
    }
    rows = []
    for name, (fun, loss_scale) in runs.items():
        model, loss, skipped = train(name, fun, loss_scale, args.steps, (images, labels))
        _, correct = eqx.filter_jit(fun)(model, test_images, test_labels)
        rows.append(f"{name:10}{correct:>14.1%}{loss:>15.1e}{skipped:>9}")
    print("          test accuracy  training loss  skipped", *rows, sep="\n")


if __name__ == "__main__":
    main()
