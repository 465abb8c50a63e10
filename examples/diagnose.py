"""Find the cause of an overflow and of underflowing gradients, in two models with a planted fault each.

1. An attention whose scores are not divided by the square root of the width. They overflow in float16, in the second
   layer. `jamp.debug.find_nonfinite` names the operation, the line and the layer. `nonfinite_report` names the
   gradients.
2. A regression to small targets. Most of its gradients underflow in float16. `jamp.debug.underflow_report` tells how
   many, how many of them the loss scale saves, and which scale fits. A training run with an adaptive loss scale is
   recorded with `jamp.History`, checked with `check_health` and plotted.

    pip install '.[examples]'
    python examples/diagnose.py

It prints the reports, and writes history.csv and three figures. It takes about twenty seconds on a CPU.
"""

import argparse
import csv
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax

import jamp
import jamp.debug
import jamp.plot

WIDTH, LAYERS, LENGTH = 256, 4, 32


def dense(key, rows, columns):
    return jax.random.normal(key, (rows, columns)) * rows**-0.5


def attention(params, x, divisor):
    """A scan over the stacked parameters of the layers."""

    def layer(x, w):
        q, k, v = x @ w["q"], x @ w["k"], x @ w["v"]
        scores = q @ k.T  # the planted fault: the scores are not divided yet
        return x + jax.nn.softmax(scores / divisor) @ v, None

    return jax.lax.scan(layer, x, params)[0]


def overflow():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    split = lambda key: zip("qkv", jax.random.split(key, 3), strict=True)
    one = lambda key: {name: 16 * dense(k, WIDTH, WIDTH) for name, k in split(key)}
    params = jax.vmap(one)(keys)
    x = jax.random.normal(jax.random.key(1), (LENGTH, WIDTH))

    @functools.partial(jamp.autocast, compute_dtype=jnp.float16)
    def loss_fn(params, x):
        return jnp.mean(attention(params, x, divisor=WIDTH**0.5) ** 2)

    grads = jax.grad(loss_fn)(params, x)
    print("The gradients of an attention with unscaled scores, in float16:")
    print(jamp.debug.nonfinite_report(grads), end="\n\n")
    print("The first operation that gave inf or NaN:")
    print(jamp.debug.find_nonfinite(loss_fn, grad=True)(params, x), end="\n\n")

    small = jax.tree.map(lambda w: w / 16, params)
    print("With weights of the usual size:")
    print(jamp.debug.find_nonfinite(loss_fn, grad=True)(small, x), end="\n\n")


def regression():
    keys = jax.random.split(jax.random.key(2), 6)
    x = jax.random.normal(keys[0], (512, 32))
    y = 1e-3 * jnp.tanh(x @ dense(keys[1], 32, 1))
    sizes = [32, 128, 128, 128, 1]
    layers = zip(keys[2:], sizes[:-1], sizes[1:], strict=True)
    params = {f"layer{i}": dense(key, rows, columns) for i, (key, rows, columns) in enumerate(layers)}
    params["layer3"] *= 1e-3  # so that the predictions start near the targets

    def loss_fn(params, x, y):
        for name in ("layer0", "layer1", "layer2"):
            x = jax.nn.gelu(x @ params[name])
        return jnp.mean((x @ params["layer3"] - y) ** 2)

    return params, loss_fn, (x, y)


def share_of_zeros(grads):
    return sum(jnp.sum(g == 0) for g in jax.tree.leaves(grads)) / sum(g.size for g in jax.tree.leaves(grads))


def train(params, loss_fn, data, init_scale, steps, out):
    """Train in float16 with an adaptive loss scale, and record every step."""
    # With such short windows the scale rises to the first overflow and then oscillates, which makes a clear figure.
    config = jamp.AdaptiveLossScale(init_scale, windows=(2, 4, 8, 16))
    tx = jamp.loss_scaled(optax.adam(1e-3), config)
    opt_state = tx.init(params)
    loss_16_bit = jamp.autocast(loss_fn, jnp.float16)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state):
        loss, grads = jamp.value_and_grad(loss_16_bit, opt_state)(params, *data)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, optax.tree.norm(grads)

    history = jamp.History(every=50)
    for _ in range(steps):
        params, opt_state, loss, norm = step(params, opt_state)
        history.append(opt_state, loss=loss, grad_norm=norm)
    with open(out / "history.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *history.names])
        writer.writerows(zip(range(steps), *(history[name].tolist() for name in history.names), strict=True))
    print(f"After {steps} steps: {jamp.get_stats(opt_state)}")
    jamp.check_health(opt_state, loss_scale=config, history=history, policy=lambda text: print(f"Health: {text}"))
    return history


def underflow(steps, out):
    params, loss_fn, data = regression()
    state = jamp.DynamicLossScale().init()
    grads = jax.grad(loss_fn)(params, *data)  # of the float32 model, in which nothing underflows
    print("The gradients of a regression to small targets:")
    report = jamp.debug.underflow_report(grads, state)
    print(report)
    loss_16_bit = jamp.autocast(loss_fn, jnp.float16)
    plain = share_of_zeros(jax.grad(loss_16_bit)(params, *data))
    best = jamp.set_loss_scale(state, report.recommended_loss_scale)
    scaled, recommended = (share_of_zeros(jamp.grad(loss_16_bit, s)(params, *data)) for s in (state, best))
    print(f"In float16 {plain:.1%} are 0, {scaled:.1%} when scaled, {recommended:.1%} at the recommended scale.\n")

    history = train(params, loss_fn, data, float(report.recommended_loss_scale), steps, out)
    pictures = {
        "loss_scale": jamp.plot.loss_scale_history(history),
        "gradient_range": jamp.plot.gradient_range(grads, state),
        "layer_ranges": jamp.plot.layer_ranges(report),
    }
    for name, figure in pictures.items():
        figure.savefig(out / f"{name}.png")
        plt.close(figure)
    print(f"history.csv and {', '.join(f'{name}.png' for name in pictures)} are in {out}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Find an overflow and underflowing gradients, in two small models.")
    parser.add_argument("--steps", type=int, default=400, help="steps of the recorded run")
    parser.add_argument("--out", type=Path, default=Path("out"), help="the folder for history.csv and the figures")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    overflow()
    underflow(args.steps, args.out)
