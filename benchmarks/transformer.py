"""A whole train step of a transformer in float16: forward, backward, optimizer."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jamp
from benchmarks import whole_step
from benchmarks.timing import Case


def init(key: jax.Array, layers: int, width: int, vocabulary: int, length: int) -> dict[str, Any]:
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


def loss_fn(params: Any, tokens: jax.Array, heads: int) -> jax.Array:
    """Mean cross entropy of the next token; matrix products in float16, norms, softmax and the loss in float32."""
    half = jamp.cast_floating(params, jnp.float16)
    x = half["embed"][tokens] + half["position"][: tokens.shape[1]]
    for block in half["blocks"]:
        h = norm(x, block["norm1"])
        q, k, v = (split(h @ block[name], heads) for name in ("q", "k", "v"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k).astype(jnp.float32)
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)).astype(jnp.float16)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ block["o"]
        x = x + jax.nn.gelu(norm(x, block["norm2"]) @ block["up"]) @ block["down"]
    logits = (x @ half["embed"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def split(x: jax.Array, heads: int) -> jax.Array:
    return x.reshape(*x.shape[:2], heads, -1)


def cases(
    batch: int = 2, length: int = 64, layers: int = 6, width: int = 256, names: Iterable[str] = ("optax", "jamp")
) -> list[Case]:
    """A case for each of some of `whole_step.RECIPES`."""
    params = init(jax.random.key(0), layers, width, 1024, length)
    tokens = jax.random.randint(jax.random.key(1), (batch, length), 0, 1024)
    return whole_step.cases(functools.partial(loss_fn, heads=4), params, (tokens,), names)
