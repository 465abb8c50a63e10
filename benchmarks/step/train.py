"""Whole train steps in float16 of three models at three batch sizes: an MLP, a ResNet and a transformer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jamp
from benchmarks.models import conv as convolve, cross_entropy
from benchmarks.processes import PROCESSES, across, line
from benchmarks.record import Rows
from benchmarks.step import peers
from benchmarks.timing import Case, compare

BATCHES = {"mlp": (8, 64, 512), "resnet": (2, 8, 32), "transformer": (1, 4, 16)}


def train(quick: bool) -> Rows:
    """AdamW, float16, each model at each batch size, in several processes."""
    there = peers.installed(peers.WHOLE)
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


def measure(model: str, batch: int, names: list[str], quick: bool) -> Rows:
    loss, params, arrays = MODELS[model](batch, quick)
    labels = {"model": model, "batch": batch, "millions": sum(x.size for x in jax.tree.leaves(params)) / 1e6}
    recipes = {name: peers.JAX[name](optax.adamw(1e-3), params) for name in names}
    cases = [Case(name, whole(recipe, loss), recipe.carry, arrays) for name, recipe in recipes.items()]
    return [labels | row for row in compare(cases, rounds=1 if quick else 7)]


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
    keys = jax.random.split(jax.random.key(0), len(widths))
    shapes = zip(widths[:-1], widths[1:], keys, strict=False)
    params = [{"w": jax.random.normal(key, (n, m)) * n**-0.5, "b": jnp.zeros(m)} for n, m, key in shapes]
    return mlp_loss, params, images(batch, (784,))


def mlp_loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    *hidden, last = jamp.cast_floating(params, jnp.float16)
    x = x.astype(jnp.float16)
    for layer in hidden:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return cross_entropy(x @ last["w"] + last["b"], labels)


def resnet(batch: int, quick: bool) -> Model:
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
    params = init_transformer(jax.random.key(0), *((1, 32) if quick else (4, 256)), 1024, 64)
    return transformer_loss, params, (jax.random.randint(jax.random.key(1), (batch, 64), 0, 1024),)


def init_transformer(key: jax.Array, layers: int, width: int, vocabulary: int, length: int) -> dict[str, Any]:
    """Parameters in float32: 12 * layers * width**2 + (vocabulary + length) * width, plus norms."""
    keys = iter(jax.random.split(key, 6 * layers + 2))

    def dense(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns)) * rows**-0.5

    def block() -> dict[str, jax.Array]:
        attention = {name: dense(width, width) for name in ("q", "k", "v", "o")}
        mlp = {"up": dense(width, 4 * width), "down": dense(4 * width, width)}
        return attention | mlp | {"norm1": jnp.ones(width), "norm2": jnp.ones(width)}

    blocks = [block() for _ in range(layers)]
    return {"embed": dense(vocabulary, width), "position": dense(length, width), "blocks": blocks}


def transformer_loss(params: Any, tokens: jax.Array, heads: int = 4) -> jax.Array:
    """Mean cross entropy of the next token; matrix products in float16, norms, softmax and the loss in float32."""
    half = jamp.cast_floating(params, jnp.float16)
    x = half["embed"][tokens] + half["position"][: tokens.shape[1]]
    for block in half["blocks"]:
        h = rms_norm(x, block["norm1"])
        q, k, v = ((h @ block[name]).reshape(*x.shape[:2], heads, -1) for name in ("q", "k", "v"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k).astype(jnp.float32)
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)).astype(jnp.float16)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ block["o"]
        x = x + jax.nn.gelu(rms_norm(x, block["norm2"]) @ block["up"]) @ block["down"]
    return cross_entropy((x @ half["embed"].T)[:, :-1], tokens[:, 1:])


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


MODELS: dict[str, Callable[[int, bool], Model]] = {"mlp": mlp, "resnet": resnet, "transformer": transformer}
