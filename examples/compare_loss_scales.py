"""Train one network in float16 with four loss scales, and compare the cost of each choice.

    python examples/compare_loss_scales.py [--steps 6000]

The network classifies handwritten digits. The scales that adapt start at 2**32, far too high, and have no ceiling.
Halfway, 16 batches hold images that are 60000 times too bright. They overflow in the forward pass at any scale. Each
step also measures the largest safe scale: the largest power of two at which none of the latest 20 batches overflows.
Numbers are means over four random seeds. The figure shows the first seed.
"""

import argparse
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits
from tqdm import tqdm

import jamp

LOSS_SCALES = {
    "static": jamp.StaticLossScale(),
    "dynamic, interval 2000": jamp.DynamicLossScale(2.0**32, max_scale=math.inf),
    "dynamic, interval 20": jamp.DynamicLossScale(2.0**32, growth_interval=20, max_scale=math.inf),
    "adaptive, 20 to 1000": jamp.AdaptiveLossScale(2.0**32),
}
SEEDS, CHUNK, SPELL, LATEST = 4, 100, 16, 20
images, labels = load_digits(return_X_y=True)
images, labels = jnp.asarray(images / 16, jnp.float16), jnp.asarray(labels)


def init(key):
    sizes = [64, 64, 64, 10]
    layer = lambda k, n, m: {"w": jax.random.normal(k, (n, m)) * math.sqrt(2 / n), "b": jnp.zeros(m)}
    return [layer(*x) for x in zip(jax.random.split(key, 3), sizes[:-1], sizes[1:], strict=True)]


def loss_fn(params, x, y):
    *hidden, last = jamp.cast_floating(params, jnp.float16)
    for layer in hidden:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    logits = (x @ last["w"] + last["b"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def largest_safe(params, x, y, guess):
    """The largest exponent at which the gradients are finite, searched from `guess`. -20 if there is none."""

    def safe(exponent):
        scale = jamp.StaticLossScaleState(jnp.exp2(exponent.astype(jnp.float32)))
        return jamp.all_finite(jamp.grad(loss_fn, scale)(params, x, y))

    up = jax.lax.while_loop(lambda k: safe(k + 1) & (k < 100), lambda k: k + 1, guess)
    return jax.lax.while_loop(lambda k: ~safe(k) & (k > -20), lambda k: k - 1, up)


def train(loss_scale, steps, progress):
    """Return the scale, the largest safe one and whether the step was applied [seed, step]; the final loss [seed]."""
    tx = jamp.loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), loss_scale)

    def step(carry, i):
        key, params, opt_state, safe = carry
        chosen = jax.random.randint(jax.random.fold_in(key, i), (64,), 0, len(labels))
        outlier = (i >= steps // 2) & (i < steps // 2 + SPELL)
        x, y = images[chosen] * jnp.where(outlier, 60000, 1).astype(jnp.float16), labels[chosen]
        safe = largest_safe(params, x, y, safe)
        scale = jamp.get_loss_scale(opt_state)
        _, grads = jamp.value_and_grad(loss_fn, opt_state)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (key, params, opt_state, safe), (scale, safe, jamp.get_grads_finite(opt_state))

    def start(key):
        params = init(key)
        return key, params, tx.init(params), jnp.int32(16)

    run = jax.jit(jax.vmap(lambda carry, chunk: jax.lax.scan(step, carry, chunk), in_axes=(0, None)))
    carry = jax.vmap(start)(jax.random.split(jax.random.key(0), SEEDS))
    history = []
    for begin in range(0, steps, CHUNK):
        carry, out = run(carry, jnp.arange(begin, begin + CHUNK))
        history.append(jax.device_get(out))
        progress.update(CHUNK)
    final = jax.vmap(lambda params: loss_fn(params, images, labels))(carry[1])
    return *(np.concatenate(x, axis=1) for x in zip(*history, strict=True)), np.asarray(final)


def latest_minimum(safe):
    """The minimum over the latest batches. NaN if one of them overflows at any scale."""
    padded = np.pad(safe.astype(float), ((0, 0), (LATEST - 1, 0)), mode="edge")
    lowest = np.lib.stride_tricks.sliding_window_view(padded, LATEST, axis=1).min(axis=-1)
    return np.where(lowest <= -20, np.nan, lowest)


HEAD = ["loss scale", "good batches lost", "first applied", "over 4x too low", "recovered after", "final loss"]


def row(name, scale, safe, applied, final):
    """A row of the table."""
    half = scale.shape[1] // 2
    lost = (~applied).sum(axis=1) - SPELL
    low = np.log2(scale) < latest_minimum(safe) - 2
    back = np.log2(scale[:, half + SPELL :]) >= safe[:, half + SPELL :] - 2
    back = np.median(np.where(back.any(axis=1), np.argmax(back, axis=1), np.inf))
    return [
        name,
        f"{lost.mean():.0f}",
        f"step {np.argmax(applied, axis=1).mean():.0f}",
        f"{low.mean():.0%} of steps",
        f"{back:.0f} steps" if np.isfinite(back) else "never",
        f"{final.mean():.2e} ± {final.std():.0e}",
    ]


def plot(results, steps, path):
    fig, axes = plt.subplots(2, 2, figsize=(8, 5.2), sharex=True, sharey=True, layout="constrained")
    for ax, (name, (scale, safe, applied, _)) in zip(axes.flat, results.items(), strict=True):
        ax.plot(latest_minimum(safe)[0], color="0.6", lw=1.5, label="largest safe scale")
        ax.plot(np.log2(scale[0]), color="tab:blue", lw=1.2, label="loss scale")
        skips = np.flatnonzero(~applied[0])
        ax.plot(skips, np.full(len(skips), -1.0), "|", color="tab:red", ms=7, mew=0.8, label="skipped step")
        ax.set_title(f"{name}: {len(skips) - SPELL} good batches lost", fontsize=10)
        ax.grid(alpha=0.3)
    note = {"arrowprops": {"arrowstyle": "-", "color": "tab:red"}, "fontsize": 9}
    axes[0, 0].annotate(f"{SPELL} outlier batches", (steps / 2, 0), (steps * 0.53, 8), **note)
    axes[0, 0].yaxis.set_major_formatter(lambda exponent, _: f"$2^{{{exponent:.0f}}}$")  # of all, which share it
    plt.setp(axes[1], xlabel="step")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    fig.savefig(path, dpi=100)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="One network in float16 with four loss scales.")
    parser.add_argument("--steps", type=int, default=6000, help="steps of each run, rounded up to hundreds")
    parser.add_argument("--out", type=Path, default=Path("out"), help="the folder for compare_loss_scales.png")
    args = parser.parse_args()
    steps = math.ceil(args.steps / CHUNK) * CHUNK
    with tqdm(total=len(LOSS_SCALES) * steps, unit="step") as progress:
        results = {name: train(loss_scale, steps, progress) for name, loss_scale in LOSS_SCALES.items()}
    table = [HEAD, *(row(name, *result) for name, result in results.items())]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in [HEAD, ["-" * width for width in widths], *table[1:]]:
        print("|", " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), "|")
    args.out.mkdir(parents=True, exist_ok=True)
    plot(results, steps, path := args.out / "compare_loss_scales.png")
    print(f"The curves are in {path}.")
