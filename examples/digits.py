"""Train a classifier of handwritten digits three times from the same seed, with and without loss scaling.

    python examples/digits.py

The runs are float32, float16 without loss scaling, and float16 with jamp. They share one train step, in which the three
changes for jamp are marked. The data, 1797 images of 8 x 8 pixels, are part of scikit-learn.

The loss is a mean over 898 training images, and the network is trained until it fits them. Late in training many
gradients are therefore smaller than the smallest float16, 6e-8, and become zero. The table shows how many after each
quarter of training. It counts the gradient entries that are zero in float16 but not in float32, at the same parameters
and on the same images.

What to expect: without loss scaling most gradients vanish in the end, and the training loss stalls several times higher
than in float32. The test accuracy is about the same, because on these images it is reached long before. With jamp
almost no gradient vanishes, and the training loss is that of float32.
"""

import argparse
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import trange

import jamp


def make_loss_fn(dtype):
    def loss_fn(params, images, labels):
        # 1. Compute in float16. The optimizer keeps float32 parameters: its updates may be too small for float16.
        params, images = jamp.cast_floating((params, images), dtype)
        # The loss is float32 in every run, because the scaled loss would exceed 65504, the largest float16.
        logits = predict(params, images).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return loss_fn


def make_train_step(optimizer, loss_scale, loss_fn):
    # 2. Wrap the optimizer. It skips steps that overflow and adapts the loss scale.
    tx = jamp.loss_scaled(optimizer, loss_scale)

    @jax.jit
    def train_step(params, opt_state, images, labels):
        # 3. Replace jax.value_and_grad. This one scales inside, and returns the true loss and float32 gradients.
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, images, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return tx.init, train_step


RUNS = {
    "float32": (jnp.float32, jamp.NoOpLossScale()),
    "float16, unscaled": (jnp.float16, jamp.NoOpLossScale()),
    # The defaults, a growth every 2000 steps up to 2**24, are for long runs. Here the scale may grow every 50 steps
    # and has no ceiling, so it follows the shrinking gradients until they overflow.
    "float16 with jamp": (jnp.float16, jamp.DynamicLossScale(growth_interval=50, max_scale=math.inf)),
}


def init_params(key, sizes=(64, 128, 128, 128, 10)):
    he = jax.nn.initializers.he_normal()
    layers = zip(jax.random.split(key, len(sizes) - 1), sizes[:-1], sizes[1:], strict=True)
    return [{"w": he(k, (n, m)), "b": jnp.zeros(m)} for k, n, m in layers]


def predict(params, x):
    *hidden, last = params
    for layer in hidden:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


def zero_fraction(loss_fn, params, opt_state, *batch):
    """The share of the gradient's entries that are zero with `loss_fn` and not in float32."""
    grads = jax.tree.leaves(jamp.grad(loss_fn, opt_state)(params, *batch))
    exact = jax.tree.leaves(jax.grad(make_loss_fn(jnp.float32))(params, *batch))
    lost = sum(jnp.sum((g == 0) & (e != 0)) for g, e in zip(grads, exact, strict=True))
    return lost / sum(jnp.sum(e != 0) for e in exact)


def train(name, dtype, loss_scale, steps, *batch):
    loss_fn = make_loss_fn(dtype)
    init, train_step = make_train_step(optax.adam(1e-2), loss_scale, loss_fn)
    params = init_params(jax.random.key(0))
    opt_state = init(params)
    history, zeros, quarters = [], [], [math.ceil(steps * k / 4) for k in (1, 2, 3, 4)]
    for step in (bar := trange(1, steps + 1, desc=name)):
        scale = jamp.get_loss_scale(opt_state)
        params, opt_state, loss = train_step(params, opt_state, *batch)
        history.append((loss, scale, jamp.get_grads_finite(opt_state)))  # on the device, to avoid waiting
        if step in quarters:
            zeros.append(jax.jit(zero_fraction, static_argnums=0)(loss_fn, params, opt_state, *batch))
        if step % 100 == 0 or step == steps:
            skipped = jamp.get_stats(opt_state).overflow_steps
            bar.set_postfix(loss=f"{loss:.1e}", scale=f"2**{math.log2(scale):g}", skipped=int(skipped))
    return params, opt_state, [np.array(x) for x in zip(*jax.device_get(history), strict=True)], zeros


def draw(histories, path):
    fig = Figure(figsize=(8, 6), layout="constrained")
    top, bottom = fig.subplots(2, sharex=True)
    for (name, history), color, width in zip(histories.items(), ["0.7", "C1", "C0"], [6, 1.5, 1.5], strict=True):
        losses, scales, finite = history
        top.semilogy(losses, color=color, linewidth=width, label=name)
    top.set(ylabel="training loss (nats)", title="Digits: float16 with and without loss scaling")
    overflows = np.flatnonzero(~finite)  # of the last run, with jamp
    bottom.semilogy(scales, base=2, color=color, label=name)
    bottom.plot(overflows, scales[overflows], "rx", label=f"overflow, step skipped ({len(overflows)} times)")
    bottom.set(xlabel="step", ylabel="loss scale")
    top.legend()
    bottom.legend(loc="lower right")
    fig.savefig(path)


def main():
    parser = argparse.ArgumentParser(description="Digits in float32, in float16, and in float16 with jamp.")
    parser.add_argument("--epochs", type=int, default=2000, help="passes over the training images, of one step each")
    parser.add_argument("--steps", type=int, default=None, help="the largest number of steps of a run")
    parser.add_argument("--out", type=Path, default=Path("out"), help="the folder for digits.png")
    args = parser.parse_args()
    steps = args.epochs if args.steps is None else min(args.epochs, args.steps)

    images, labels = load_digits(return_X_y=True)
    halves = train_test_split(images / 16, labels, test_size=0.5, stratify=labels, random_state=0)
    images, test_images, labels, test_labels = map(jnp.asarray, halves)
    table, histories = [], {}
    for name, (dtype, loss_scale) in RUNS.items():
        params, opt_state, histories[name], zeros = train(name, dtype, loss_scale, steps, images, labels)
        logits = predict(*jamp.cast_floating((params, test_images), dtype))
        accuracy, loss = jnp.mean(logits.argmax(-1) == test_labels), histories[name][0][-1]
        skipped, scale = jamp.get_stats(opt_state).overflow_steps, f"2**{math.log2(jamp.get_loss_scale(opt_state)):g}"
        share = "".join(f"{z:7.1%}" for z in zeros)
        table.append(f"{name:18}{accuracy:13.2%}{loss:15.1e}{share:>29}{skipped:9}{scale:>13}")
    head = "                  test accuracy  training loss    zero gradients by quarter  skipped  final scale"
    print(head, *table, sep="\n")
    args.out.mkdir(parents=True, exist_ok=True)
    draw(histories, args.out / "digits.png")
    print(f"The curves are in {args.out / 'digits.png'}.")


if __name__ == "__main__":
    main()
