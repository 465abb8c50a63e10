"""Train a small transformer in float32, bfloat16, float16 and with 8-bit Adam, and compare loss, time and memory.

A decoder learns to predict the next byte of Python's own standard library. The model is plain JAX in float32, and no
way of training changes it. Each way is one line in `ways`.

    pip install '.[examples]'
    python examples/train.py    # one to two minutes on two cores

It prints a table and draws out/train.png: the losses, and the loss scale of float16. So that a short run shows an
overflow, the scale here may grow every 10 steps and has no ceiling. In a long run, keep the defaults.
"""

import argparse
import math
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from tqdm import trange

import jamp

LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 3, 128, 4, 64, 8
LOSS_SCALE = jamp.DynamicLossScale(growth_interval=10, max_scale=math.inf)


def init_params(key):
    sizes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    *keys, embed, head = jax.random.split(key, len(sizes) + 2)
    layers = {
        name: jax.random.normal(key, (LAYERS, *size)) * size[0] ** -0.5
        for key, (name, size) in zip(keys, sizes.items(), strict=True)
    }
    return {
        "embed": jax.random.normal(embed, (256, WIDTH)),
        "position": jnp.zeros((CONTEXT, WIDTH)),
        "layers": layers,
        "head": jax.random.normal(head, (WIDTH, 256)) * WIDTH**-0.5,
    }


def loss_fn(params, tokens):
    def norm(x):
        return jax.nn.standardize(x, axis=-1)

    def layer(x, w):
        q, k, v = jnp.split((norm(x) @ w["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["out"]
        return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(layer, params["embed"][tokens[:, :-1]] + params["position"], params["layers"])
    return optax.softmax_cross_entropy_with_integer_labels(norm(x) @ params["head"], tokens[:, 1:]).mean()


def ways(tx):
    """The name of each way to train, its loss function, and its optimizer."""
    unscaled = jamp.NoOpLossScale()
    return {
        "float32": (loss_fn, jamp.loss_scaled(tx, unscaled)),
        "bfloat16": (jamp.autocast(loss_fn, jnp.bfloat16), jamp.loss_scaled(tx, unscaled)),
        "float16": (jamp.autocast(loss_fn, jnp.float16), jamp.loss_scaled(tx, LOSS_SCALE)),
        "bfloat16, 8-bit Adam": (
            jamp.autocast(loss_fn, jnp.bfloat16),
            jamp.loss_scaled(jamp.quantized_state(tx), unscaled),
        ),
    }


def read_text():
    """About 2 MB of Python's standard library, uint8[n]. Every machine has this text."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return np.frombuffer(b"\n".join(file.read_bytes() for file in files)[:2_000_000], np.uint8)


def get_batch(text, index, size=BATCH):
    """Make batch number `index`, i32[size, CONTEXT + 1]. All ways get the same batches."""
    starts = np.random.default_rng(index).integers(len(text) - CONTEXT, size=size)
    return text[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)


def train(name, loss_fn, tx, text, steps):
    """Train, and return a row of the table and the history of the run."""

    def train_step(params, opt_state, tokens):
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = init_params(jax.random.key(0))
    opt_state = tx.init(params)
    # Donated, the new parameters and state take the memory of the old ones.
    step = jax.jit(train_step, donate_argnums=(0, 1)).lower(params, opt_state, get_batch(text, 0)).compile()
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves((params, opt_state)))
    history = jamp.History()
    start = time.perf_counter()
    for index in (bar := trange(steps, desc=name)):
        params, opt_state, loss = step(params, opt_state, get_batch(text, index))
        history.append(opt_state, loss=loss)
        if index % 10 == 0 or index == steps - 1:
            bar.set_postfix(loss=f"{loss:.3f}")
    milliseconds = (time.perf_counter() - start) / steps * 1e3
    return params, milliseconds, step.memory_analysis().temp_size_in_bytes / 1e6, state_bytes / 1e6, history


def draw(histories, path):
    figure = Figure(figsize=(8, 6), layout="constrained")
    top, bottom = figure.subplots(2, sharex=True)
    for width, (name, history) in zip((8, 5, 2.5, 1), histories.items(), strict=True):  # The curves lie on each other.
        smooth = np.convolve(history["loss"], np.ones(20) / 20, mode="valid")  # each the mean of 20 steps
        top.plot(np.arange(len(smooth)) + 20, smooth, label=name, linewidth=width)
    top.set(ylabel="training loss (nats per byte)", title="A transformer reads Python's standard library")
    top.legend()
    history = histories["float16"]
    skipped = np.flatnonzero(~history["grads_finite"])
    bottom.semilogy(history["loss_scale"], base=2, color="C2", label="loss scale of float16")
    bottom.plot(skipped, history["loss_scale"][skipped], "rx", label=f"overflow, step skipped ({len(skipped)} times)")
    bottom.set(xlabel="step", ylabel="loss scale")
    bottom.legend(loc="lower right")
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description="A small transformer in float32, 16 bit and with 8-bit Adam.")
    parser.add_argument("--steps", type=int, default=200, help="steps to train in each way")
    parser.add_argument("--out", type=Path, default=Path("out"), help="the folder for the picture")
    args = parser.parse_args()
    text = read_text()
    training, held_out = np.split(text, [len(text) * 9 // 10])
    evaluate, tokens = jax.jit(loss_fn), get_batch(held_out, 0, 64)
    tx = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, args.steps // 10, args.steps))
    rows, histories = [], {}
    for name, (loss, tx_of_way) in ways(tx).items():
        params, milliseconds, temporary, state, histories[name] = train(name, loss, tx_of_way, training, args.steps)
        rows.append((name, evaluate(params, tokens), milliseconds, temporary, state))
    print(f"{'':22}{'loss':>8}{'time':>12}{'temporary memory':>20}{'parameters and state':>24}")
    for name, loss, milliseconds, temporary, state in rows:
        print(f"{name:22}{loss:8.3f}{milliseconds:9.1f} ms{temporary:17.1f} MB{state:21.1f} MB")
    print("loss: of text not trained on, in nats per byte. time: of a step.")
    print("Most CPUs have no products in 16 bit. There, a step takes less time because it")
    print("writes less memory. This says nothing about a GPU.")
    args.out.mkdir(parents=True, exist_ok=True)
    draw(histories, args.out / "train.png")
    print(f"The curves are in {args.out / 'train.png'}.")


if __name__ == "__main__":
    main()
