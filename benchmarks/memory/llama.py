"""A stack of Llama's blocks: RMS norm, rotary positions, causal attention, SwiGLU."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.models import Shape, cast, cross_entropy, of_layers, stacked

SHAPE = Shape(8, 1024, 16, 32000, 1024)


def init(key: jax.Array, shape: Shape) -> Any:
    """Random float32 parameters."""
    width, hidden = shape.width, 11 * shape.width // 4
    sizes = dict.fromkeys(["q", "k", "v", "out"], (width, width)) | dict.fromkeys(["gate", "up"], (width, hidden))
    sizes["down"] = (hidden, width)
    keys = iter(jax.random.split(key, shape.layers * len(sizes) + 1))
    weight = lambda *size: 0.02 * jax.random.normal(next(keys), size)
    norms = {"norm1": jnp.ones(width), "norm2": jnp.ones(width)}
    blocks = [{name: weight(*size) for name, size in sizes.items()} | norms for _ in range(shape.layers)]
    return {"blocks": of_layers(blocks, shape), "norm": jnp.ones(width), "embed": weight(shape.classes, width)}


def rms_norm(scale: jax.Array, x: jax.Array, dtype: Any) -> jax.Array:
    x = x.astype(jnp.float32)
    return cast(x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale, dtype)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions: in float32, because 4096 times a frequency has to be right to a fraction of a turn."""
    angles = jnp.outer(jnp.arange(x.shape[1]), 1e4 ** -jnp.linspace(0, 1, x.shape[-1] // 2, endpoint=False))
    cos, sin = (f(angles)[None, :, None] for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of arrays [batch, tokens, heads, width of a head]."""
    scores = jnp.einsum("bthd,bshd->bhts", rotate(q), rotate(k)).astype(jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, jnp.finfo(jnp.float32).min)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores).astype(v.dtype), v)


def block(x: jax.Array, p: Any, shape: Shape, dtype: Any, attend: Any) -> tuple[jax.Array, None]:
    y, heads = rms_norm(p["norm1"], x, dtype), (*x.shape[:2], shape.heads, shape.width // shape.heads)
    q, k, v = ((y @ cast(p[name], dtype)).reshape(heads) for name in ("q", "k", "v"))
    x = x + attend(q, k, v).reshape(x.shape) @ cast(p["out"], dtype)
    y = rms_norm(p["norm2"], x, dtype)
    hidden = jax.nn.silu(y @ cast(p["gate"], dtype)) * (y @ cast(p["up"], dtype))
    return x + hidden @ cast(p["down"], dtype), None


def loss_fn(
    params: Any, batch: Any, shape: Shape, dtype: Any = None, policy: Any = None, attend: Any = attend
) -> jax.Array:
    """Mean cross entropy. With a policy, each block is in a `jax.checkpoint`."""
    tokens, targets = batch
    x = cast(params["embed"], dtype)[tokens]
    x = stacked(partial(block, shape=shape, dtype=dtype, attend=attend), x, params["blocks"], shape, policy)
    logits = rms_norm(params["norm"], x, dtype) @ cast(params["embed"], dtype).T
    return cross_entropy(logits, targets)
