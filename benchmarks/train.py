"""Whole train steps in float16 of three models at three batch sizes: an MLP, a ResNet and a transformer."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import jamp
from benchmarks import transformer, whole_step
from benchmarks.processes import PROCESSES, across, line
from benchmarks.timing import Case, compare

BATCHES = {"mlp": (8, 64, 512), "resnet": (2, 8, 32), "transformer": (1, 4, 16)}


def train(quick: bool) -> list[dict[str, Any]]:
    """AdamW, float16, each model at each batch size, in several processes."""
    there = whole_step.installed()
    rows = []
    for model, batches in BATCHES.items():
        for batch in batches[:1] if quick else batches:
            names = there[:3] if quick and model != "mlp" else there
            found = across(measure, model, batch, names, quick, processes=1 if quick else PROCESSES)
            print(f"\n{model} of {found[0]['millions']:.2g} M parameters, batch {batch}, whole step in float16")
            for row in found:
                print(line(row), flush=True)
            rows += found
    return rows


def measure(model: str, batch: int, names: list[str], quick: bool) -> list[dict[str, Any]]:
    cases = CASES[model](batch, names, quick)
    labels = {"model": model, "batch": batch, "millions": sum(x.size for x in jax.tree.leaves(cases[0].carry[0])) / 1e6}
    return [labels | result.as_dict() for result in compare(cases, rounds=1 if quick else 7)]


def mlp(batch: int, names: list[str], quick: bool) -> list[Case]:
    """784 inputs, three hidden layers of 512 units, 10 classes."""
    widths = (784, 32, 10) if quick else (784, 512, 512, 512, 10)
    keys = jax.random.split(jax.random.key(0), len(widths))
    shapes = zip(widths[:-1], widths[1:], keys, strict=False)
    params = [{"w": jax.random.normal(key, (n, m)) * n**-0.5, "b": jnp.zeros(m)} for n, m, key in shapes]
    return whole_step.cases(mlp_loss, params, images(batch, (784,)), names)


def mlp_loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    *hidden, last = jamp.cast_floating(params, jnp.float16)
    x = x.astype(jnp.float16)
    for layer in hidden:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return cross_entropy(x @ last["w"] + last["b"], labels)


def resnet(batch: int, names: list[str], quick: bool) -> list[Case]:
    """A stem and three stages of two blocks with GroupNorm, 32 to 128 channels, on 32 x 32 images."""
    widths = (8, 16) if quick else (32, 64, 128)
    keys = iter(jax.random.split(jax.random.key(0), 4 * len(widths) + 2))

    def conv(n: int, m: int) -> jax.Array:
        return jax.random.normal(next(keys), (3, 3, n, m)) * (9 * n) ** -0.5

    def block(n: int, m: int) -> dict[str, jax.Array]:
        return {"conv1": conv(n, m), "conv2": conv(m, m), "norm1": jnp.ones(n), "norm2": jnp.ones(m)}

    stages = zip((widths[0], *widths), widths, strict=False)
    params = {
        "stem": conv(3, widths[0]),
        "blocks": [b for n, m in stages for b in (block(n, m), block(m, m))],
        "head": jax.random.normal(next(keys), (widths[-1], 10)) * widths[-1] ** -0.5,
    }
    return whole_step.cases(resnet_loss, params, images(batch, (32, 32, 3)), names)


def resnet_loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    half = jamp.cast_floating(params, jnp.float16)
    x = convolve(x.astype(jnp.float16), half["stem"], 1)
    for block in half["blocks"]:
        grows = block["conv1"].shape[2] != block["conv1"].shape[3]
        h = convolve(jax.nn.relu(group_norm(x, block["norm1"])), block["conv1"], 2 if grows else 1)
        h = convolve(jax.nn.relu(group_norm(h, block["norm2"])), block["conv2"], 1)
        # A shortcut without parameters where the width grows: every other pixel, zeros for the new channels.
        x = jnp.pad(x[:, ::2, ::2], [(0, 0)] * 3 + [(0, h.shape[-1] - x.shape[-1])]) + h if grows else x + h
    return cross_entropy(x.mean((1, 2)) @ half["head"], labels)


def convolve(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=numbers)


def group_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """GroupNorm of groups of 8 channels, in float32."""
    groups = x.astype(jnp.float32).reshape(*x.shape[:3], -1, 8)
    centered = groups - groups.mean((1, 2, 4), keepdims=True)
    normed = centered * jax.lax.rsqrt((centered**2).mean((1, 2, 4), keepdims=True) + 1e-5)
    return normed.reshape(x.shape).astype(x.dtype) * scale


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def images(batch: int, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(1))
    return jax.random.normal(keys[0], (batch, *shape)), jax.random.randint(keys[1], (batch,), 0, 10)


def language_model(batch: int, names: list[str], quick: bool) -> list[Case]:
    """Sequences of 64 tokens."""
    size = {"layers": 1, "width": 32} if quick else {"layers": 4}
    return transformer.cases(batch, **size, names=names)


CASES = {"mlp": mlp, "resnet": resnet, "transformer": language_model}
