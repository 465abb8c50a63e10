"""Whole train steps in float16 of three models at three batch sizes: an MLP, a ResNet and a transformer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jamp
from benchmarks.accuracy import tasks
from benchmarks.models import conv as convolve, cross_entropy
from benchmarks.record import Rows
from benchmarks.step import peers
from benchmarks.timing import Case, across, compare

BATCHES = {"mlp": (8, 64, 512), "resnet": (2, 8, 32), "transformer": (1, 4, 16)}


def train(quick: bool) -> Rows:
    """AdamW, float16, each model at each batch size, in several processes."""
    there = peers.installed(peers.WHOLE)
    rows = []
    for model, batches in BATCHES.items():
        for batch in batches[:1] if quick else batches:
            names = there[:3] if quick and model != "mlp" else there
            labels = {"model": model, "batch": batch}
            rows += across(labels, measure, model, batch, names, quick, quick=quick)
    return rows


def measure(model: str, batch: int, names: list[str], quick: bool) -> Rows:
    loss, params, arrays = MODELS[model](batch, quick)
    recipes = {name: peers.JAX[name](optax.adamw(1e-3), params) for name in names}
    cases = [Case(name, whole(recipe, loss), recipe.carry, arrays) for name, recipe in recipes.items()]
    return compare(cases, rounds=1 if quick else 7)


def whole(recipe: peers.Recipe, loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Forward, backward and optimizer: `step(carry, *batch) -> carry`."""
    if recipe.whole:
        return partial(recipe.whole, loss)
    return lambda carry, *batch: recipe.step(carry, recipe.grads(loss, carry, *batch))


# Each model: its loss `loss(params, *batch)`, which computes in float16 from float32 parameters, parameters and batch.
Model = tuple[Callable[..., jax.Array], Any, tuple[jax.Array, ...]]


def mlp(batch: int, quick: bool) -> Model:
    """784 inputs, three hidden layers of 512 units, 10 classes."""
    widths = (784, 32, 10) if quick else (784, 512, 512, 512, 10)
    return mlp_loss, tasks.init_digits(jax.random.key(0), widths), images(batch, (784,))


def mlp_loss(params: Any, *batch: jax.Array) -> jax.Array:
    return tasks.mlp_loss(jnp.float16, jnp.float16, tasks.cross_entropy)(params, batch)[0]


def resnet(batch: int, quick: bool) -> Model:
    """A stem and three stages of two blocks with GroupNorm, 32 to 128 channels, on 32 x 32 images."""
    widths = (8, 16) if quick else (32, 64, 128)
    keys = iter(jax.random.split(jax.random.key(0), 4 * len(widths) + 2))
    conv = lambda n, m: jax.random.normal(next(keys), (3, 3, n, m)) * (9 * n) ** -0.5
    block = lambda n, m: {"conv1": conv(n, m), "conv2": conv(m, m), "norm1": jnp.ones(n), "norm2": jnp.ones(m)}
    stages = zip((widths[0], *widths), widths, strict=False)
    params = {
        "stem": conv(3, widths[0]),
        "blocks": [b for n, m in stages for b in (block(n, m), block(m, m))],
        "head": jax.random.normal(next(keys), (widths[-1], 10)) * widths[-1] ** -0.5,
    }
    return resnet_loss, params, images(batch, (32, 32, 3))


def resnet_loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    half = jamp.cast_floating(params, jnp.float16)
    x = convolve(half["stem"], x.astype(jnp.float16), 1)
    for block in half["blocks"]:
        grows = block["conv1"].shape[2] != block["conv1"].shape[3]
        h = convolve(block["conv1"], jax.nn.relu(group_norm(x, block["norm1"])), 2 if grows else 1)
        h = convolve(block["conv2"], jax.nn.relu(group_norm(h, block["norm2"])), 1)
        # A shortcut without parameters where the width grows: every other pixel, zeros for the new channels.
        x = jnp.pad(x[:, ::2, ::2], [(0, 0)] * 3 + [(0, h.shape[-1] - x.shape[-1])]) + h if grows else x + h
    return cross_entropy(x.mean((1, 2)) @ half["head"], labels)


def group_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """GroupNorm of groups of 8 channels, in float32."""
    groups = x.astype(jnp.float32).reshape(*x.shape[:3], -1, 8)
    centered = groups - groups.mean((1, 2, 4), keepdims=True)
    normed = centered * jax.lax.rsqrt((centered**2).mean((1, 2, 4), keepdims=True) + 1e-5)
    return normed.reshape(x.shape).astype(x.dtype) * scale


def images(batch: int, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(1))
    return jax.random.normal(keys[0], (batch, *shape)), jax.random.randint(keys[1], (batch,), 0, 10)


def transformer(batch: int, quick: bool) -> Model:
    """Sequences of 64 tokens, a vocabulary of 1024."""
    params = tasks.init_lm(jax.random.key(0), *((1, 32) if quick else (4, 256)), 1024)
    loss = lambda params, tokens: tasks.lm_loss(jnp.float16, jnp.float16, tasks.cross_entropy)(params, tokens)[0]
    return loss, params, (jax.random.randint(jax.random.key(1), (batch, tasks.CONTEXT + 1), 0, 1024),)


MODELS: dict[str, Callable[[int, bool], Model]] = {"mlp": mlp, "resnet": resnet, "transformer": transformer}
