"""Fit a photograph three times from the same seed: in float32, in float16, and in float16 with jamp.

    python examples/photo.py

The network maps the coordinates of a pixel to its colour. The loss is the mean squared error over all 427 x 640 pixels
and three colours, which are 819,840 values. The three runs share one train step, in which the changes for jamp are
marked. All settings of jamp are its defaults. The photograph is part of scikit-learn.

What to expect: float32 and float16 with jamp reach the same quality. Without loss scaling float16 ends about 6 dB below
and gets the colours wrong. The quality is the peak signal-to-noise ratio, PSNR = -10 log10(loss), in decibels.

Why float16 fails: the gradient of a mean over N values with respect to one of them is 2 / N times its error. Here it is
at most 2 / 819,840 = 2.4e-6, and it gets smaller in each layer that it passes on its way back. The smallest float16
number is 6e-8. In the second half of the float32 run, 97 percent of the gradients of the hidden units are too small for
float16. jamp multiplies the loss by 2**16 before the backward pass, and divides the gradients by 2**16 after it.
"""

import argparse
import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_sample_image
from tqdm import tqdm

import jamp

CHUNK = 10  # steps in one call, because memory is then allocated once in ten steps


def loss_fn(params, features, colours):
    return jnp.mean((predict(params, features) - colours) ** 2)


RUNS = {  # the loss function, and the loss scale
    "float32": (loss_fn, jamp.NoOpLossScale()),
    "float16 without loss scaling": (jamp.autocast(loss_fn, jnp.float16), jamp.NoOpLossScale()),
    # 1. Matrix products in float16.
    "float16 with jamp": (jamp.autocast(loss_fn, jnp.float16), jamp.DynamicLossScale()),
}


def make_train_step(optimizer, loss_scale, loss_fn):
    # 2. Wrap the optimizer. It skips steps that overflow and adapts the loss scale.
    tx = jamp.loss_scaled(optimizer, loss_scale)

    def train_step(params, opt_state, *data):
        # 3. Replace jax.value_and_grad. This one scales inside, and returns the true loss and float32 gradients.
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, *data)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return tx.init, train_step


def load_photo(stride):
    """Return its shape, the features f32[pixels, 64] of the coordinates, and the colours f32[pixels, 3] from 0 to 1."""
    photo = load_sample_image("flower.jpg")[::stride, ::stride] / np.float32(255)
    height, width, _ = photo.shape
    coordinates = np.stack(np.mgrid[:height, :width], -1).reshape(-1, 2) / width
    # Random waves, about five across the photograph. A network of bare coordinates would learn only a blur.
    waves = 2 * np.pi * coordinates @ np.random.default_rng(0).normal(0, 5, (2, 32))
    features = np.concatenate([np.sin(waves), np.cos(waves)], -1)
    return photo.shape, jnp.asarray(features, jnp.float32), jnp.asarray(photo.reshape(-1, 3))


def init_params(key, sizes=(64, 64, 64, 3)):
    he = jax.nn.initializers.he_normal()
    layers = zip(jax.random.split(key, len(sizes) - 1), sizes[:-1], sizes[1:], strict=True)
    return [{"w": he(k, (n, m)), "b": jnp.zeros(m)} for k, n, m in layers]


def predict(params, x):
    *hidden, last = params
    for layer in hidden:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return jax.nn.sigmoid(x @ last["w"] + last["b"])


def psnr(loss):
    return -10 * np.log10(loss)


def train(name, loss_fn, loss_scale, steps, data):
    optimizer = optax.adam(optax.cosine_decay_schedule(2e-2, steps))
    init, train_step = make_train_step(optimizer, loss_scale, loss_fn)

    @functools.partial(jax.jit, static_argnums=1)
    def run(carry, length, *data):  # The data are arguments: as constants they would be compiled into the program.
        def body(carry, _):
            params, opt_state, loss = train_step(*carry, *data)
            return (params, opt_state), (loss, jamp.get_loss_scale(opt_state))

        return jax.lax.scan(body, carry, length=length)

    params = init_params(jax.random.key(0))
    carry, history = (params, init(params)), []
    with tqdm(total=steps, desc=name) as bar:
        while bar.n < steps:
            carry, out = run(carry, min(CHUNK, steps - bar.n), *data)
            history.append(jax.device_get(out))
            losses, scales = history[-1]
            bar.set_postfix(PSNR=f"{psnr(losses[-1]):.2f} dB", scale=f"2**{math.log2(scales[-1]):g}", refresh=False)
            bar.update(len(losses))
    return *carry, [np.concatenate(x) for x in zip(*history, strict=True)]


def draw(results, shape, path):
    fig = Figure(figsize=(11, 5.4), layout="constrained")
    upper, lower = fig.subfigures(2, height_ratios=[3, 2])
    curve, scale = lower.subplots(1, 2, width_ratios=[2, 1])
    styles = [("0.7", 6), ("C1", 2), ("C0", 2)]
    for axes, name, (color, width) in zip(upper.subplots(1, 3), results, styles, strict=True):
        pixels, quality, losses, scales = results[name]
        axes.imshow(pixels.reshape(shape))
        axes.set_title(f"{name}: {quality:.1f} dB", fontsize=11)
        axes.axis("off")
        curve.plot(psnr(losses), color=color, linewidth=width, label=name)
    scale.semilogy(scales, base=2, color=color)  # of the last run, with jamp
    scale.set(xlabel="step", ylabel="loss scale", ylim=(2**0, 2**25))
    curve.set(xlabel="step", ylabel="PSNR (dB)")
    curve.legend(loc="lower right")
    fig.savefig(path)


def main():
    parser = argparse.ArgumentParser(description="A photograph in float32, in float16, and in float16 with jamp.")
    parser.add_argument("--steps", type=int, default=150, help="steps of each run, each on all pixels")
    parser.add_argument("--stride", type=int, default=1, help="use every n-th row and column of the photograph")
    parser.add_argument("--out", type=Path, default=Path("out"), help="the folder for photo.png")
    args = parser.parse_args()

    shape, *data = load_photo(args.stride)
    table, results = [], {}
    for name, (loss_fn, loss_scale) in RUNS.items():
        params, opt_state, (losses, scales) = train(name, loss_fn, loss_scale, args.steps, data)
        pixels = jax.jit(jamp.autocast(predict, jnp.float16) if "16" in name else predict)(params, data[0])
        loss = float(jnp.mean((pixels - data[1]) ** 2))
        results[name] = np.asarray(pixels), psnr(loss), losses, scales
        skipped, scale = jamp.get_stats(opt_state).overflow_steps, f"2**{math.log2(scales[-1]):g}"
        table.append(f"{name:28}{psnr(loss):8.2f} dB{loss:15.5f}{skipped:9}{scale:>13}")
    print("                                 PSNR  training loss  skipped  final scale", *table, sep="\n")
    args.out.mkdir(parents=True, exist_ok=True)
    draw(results, shape, args.out / "photo.png")
    print(f"The picture is in {args.out / 'photo.png'}.")


if __name__ == "__main__":
    main()
