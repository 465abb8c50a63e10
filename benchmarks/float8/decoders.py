"""Decoder layers of MaxText and Levanter, written again, so that neither has to be installed.

Both have float32 parameters and compute in bfloat16 by hand, with statistics of norms and softmax in float32. Their
products are as there: MaxText's dense layers contract kernels of three dimensions with `lax.dot_general`, Levanter's
einsums name their axes. Both scan over the layers, and compute each again in the backward pass.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.models import cross_entropy

LAYERS, WIDTH, HEADS, GROUPS, TOKENS, BATCH, CLASSES = 3, 512, 4, 2, 512, 64, 1152
SIZE, HIDDEN = WIDTH // HEADS, 3 * WIDTH
SHAPES = {"query": (WIDTH, HEADS, SIZE), "key": (WIDTH, GROUPS, SIZE), "value": (WIDTH, GROUPS, SIZE)}
SHAPES |= {"out": (HEADS, SIZE, WIDTH), "wi_0": (WIDTH, HIDDEN), "wi_1": (WIDTH, HIDDEN), "wo": (HIDDEN, WIDTH)}
SHAPES |= {"norm_1": (WIDTH,), "norm_2": (WIDTH,)}
Decoder = Callable[[Any, Array], Array]


def norm(x: Array, scale: Array) -> Array:
    wide = x.astype(jnp.float32)
    normed = (wide * lax.rsqrt(jnp.mean(lax.square(wide), -1, keepdims=True) + 1e-5)).astype(x.dtype)
    return normed * scale.astype(x.dtype)


def rotary(x: Array) -> Array:
    """Of [batch, tokens, heads, size]."""
    frequencies = 1e4 ** -(jnp.arange(SIZE // 2, dtype=jnp.float32) / (SIZE // 2))
    angles = jnp.arange(TOKENS, dtype=jnp.float32)[:, None, None] * frequencies
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def maxtext_layer(x: Array, p: Any) -> Array:
    def dense(name: str, x: Array, axes: int = 1) -> Array:
        summed = tuple(range(x.ndim - axes, x.ndim)), tuple(range(axes))
        return lax.dot_general(x, jnp.asarray(p[name], x.dtype), (summed, ((), ())), precision=lax.Precision.DEFAULT)

    h = norm(x, p["norm_1"])
    query, key, value = rotary(dense("query", h)), rotary(dense("key", h)), dense("value", h)
    query = query.reshape(*query.shape[:2], GROUPS, HEADS // GROUPS, SIZE) * SIZE**-0.5
    scores = jnp.einsum("btkgd,bskd->bkgts", query, key).astype(jnp.float32)
    scores = jnp.where(jnp.tril(jnp.ones((TOKENS, TOKENS), bool)), scores, jnp.finfo(jnp.float32).min * 0.7)
    exps = jnp.exp(scores - scores.max(-1, keepdims=True))
    found = jnp.einsum("bkgts,bskd->btkgd", exps.astype(value.dtype), value)
    found = found / jnp.moveaxis(exps.sum(-1), 3, 1)[..., None].astype(found.dtype)
    x = x + dense("out", found.reshape(*x.shape[:2], HEADS, SIZE), 2)
    h = norm(x, p["norm_2"])
    return x + dense("wo", jax.nn.silu(dense("wi_0", h)) * dense("wi_1", h))


def levanter_layer(x: Array, p: Any) -> Array:
    p = jax.tree.map(lambda w: w.astype(x.dtype), p)  # jmp's policy, for the whole model
    h = norm(x, p["norm_1"])
    query, key, value = (jnp.einsum("bte,ehd->bthd", h, p[name]) for name in ("query", "key", "value"))
    query = rotary(query).reshape(*query.shape[:2], GROUPS, HEADS // GROUPS, SIZE)
    scores = jnp.einsum("btkgd,bskd->bkgts", query * SIZE**-0.5, rotary(key)).astype(jnp.float32)
    scores = scores + jnp.where(jnp.tril(jnp.ones((TOKENS, TOKENS), bool)), 0, -1e9)
    weights = jax.nn.softmax(scores).astype(x.dtype)
    found = jnp.einsum("bkgts,bskd->btkgd", weights, value).reshape(*x.shape[:2], HEADS, SIZE)
    x = x + jnp.einsum("bthd,hde->bte", found, p["out"])
    h = norm(x, p["norm_2"])
    hidden = jax.nn.silu(jnp.einsum("bte,em->btm", h, p["wi_0"])) * jnp.einsum("bte,em->btm", h, p["wi_1"])
    return x + jnp.einsum("btm,me->bte", hidden, p["wo"])


def decoder(layer: Callable[[Array, Any], Array], dtype: Any = jnp.bfloat16) -> tuple[Any, Any, Any]:
    """The loss, and the shapes of the parameters and of a batch."""
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    params = {"layers": {name: shape(LAYERS, *sizes) for name, sizes in SHAPES.items()}, "norm": shape(WIDTH)}
    params |= {"embed": shape(CLASSES, WIDTH), "head": shape(WIDTH, CLASSES)}

    def loss(params: Any, batch: Any) -> Array:
        x = params["embed"].astype(dtype)[batch[0]]
        x, _ = lax.scan(lambda x, p: (jax.checkpoint(layer)(x, p), None), x, params["layers"])
        return cross_entropy(norm(x, params["norm"]) @ params["head"].astype(dtype), batch[1])

    return loss, params, (jax.ShapeDtypeStruct((BATCH, TOKENS), jnp.int32),) * 2
