"""A transformer with mixtures of experts: tokens sorted by expert and ragged products, or einsums over experts."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks import models
from benchmarks.models import Shape, attention, cast, cross_entropy, rms_norm, stacked

EXPERTS, CHOSEN = 8, 2


def init(key: Array, shape: Shape) -> Any:
    """Random float32 parameters: the transformer of `models` with a router and experts in each block."""
    params, width = models.init(key, shape), shape.width
    normal = lambda i, *size: 0.02 * jax.random.normal(jax.random.fold_in(key, i), size)
    for i, block in enumerate(params["blocks"]):
        del block["up"], block["down"]
        block["router"] = normal(4 * i, width, EXPERTS)
        for j, name in enumerate(("gate", "up", "down")):
            sizes = (4 * width, width) if name == "down" else (width, 4 * width)
            block[name] = normal(4 * i + j + 1, EXPERTS, *sizes)
    return params


def route(p: Any, x: Array) -> tuple[Array, Array]:
    """The experts of each token, i32[n, 2], and their weights."""
    with jax.named_scope("router"):
        probabilities = jax.nn.softmax((x @ cast(p["router"], x.dtype)).astype(jnp.float32))
    weights, experts = jax.lax.top_k(probabilities, CHOSEN)
    return experts, (weights / weights.sum(-1, keepdims=True)).astype(x.dtype)


def ragged(p: Any, x: Array) -> Array:
    """As MaxText and Levanter write it: sort by expert, three ragged products, unsort."""
    experts, weights = route(p, x)
    order = jnp.argsort(experts.ravel())
    product = partial(jax.lax.ragged_dot, group_sizes=jnp.bincount(experts.ravel(), length=EXPERTS))
    rows = x[order // CHOSEN]
    gate, up, down = (cast(p[name], x.dtype) for name in ("gate", "up", "down"))
    found = product(jax.nn.silu(product(rows, gate)) * product(rows, up), down)
    found = found[jnp.argsort(order)].reshape(*experts.shape, -1)
    return jnp.einsum("nkd,nk->nd", found, weights)


def einsums(p: Any, x: Array) -> Array:
    """Each expert with room for twice its share of the tokens, as in Switch Transformer; the rest is dropped."""
    experts, weights = route(p, x)
    room = 2 * CHOSEN * len(x) // EXPERTS
    one_hot = jax.nn.one_hot(experts.ravel(), EXPERTS, dtype=jnp.int32)
    place = (jnp.cumsum(one_hot, 0) * one_hot).sum(-1) - 1
    slot = experts.ravel() * room + jnp.where(place < room, place, EXPERTS * room)  # out of range: dropped
    rows = jnp.zeros((EXPERTS * room, x.shape[-1]), x.dtype).at[slot].set(jnp.repeat(x, CHOSEN, 0), mode="drop")
    rows = rows.reshape(EXPERTS, room, -1)
    gate, up, down = (cast(p[name], x.dtype) for name in ("gate", "up", "down"))
    hidden = jax.nn.silu(jnp.einsum("erd,edf->erf", rows, gate)) * jnp.einsum("erd,edf->erf", rows, up)
    found = jnp.einsum("erf,efd->erd", hidden, down).reshape(EXPERTS * room, -1)
    found = found.at[slot].get(mode="fill", fill_value=0).reshape(*experts.shape, -1)
    return jnp.einsum("nkd,nk->nd", found, weights)


def loss_fn(
    params: Any, batch: Any, *, shape: Shape, mixture: Any = ragged, dtype: Any = None, policy: Any = None
) -> Array:
    """Mean cross entropy. With a policy, each block is in a `jax.checkpoint`."""
    inputs, targets = batch
    norm = lambda p, x: rms_norm(x, cast(p["scale"], x.dtype))

    def block(x: Array, p: Any) -> tuple[Array, None]:
        x = x + attention(p, norm(p["norm1"], x), shape, dtype)
        y = norm(p["norm2"], x)
        return x + mixture(p, y.reshape(-1, shape.width)).reshape(x.shape), None

    x = cast(params["embed"][inputs] + params["positions"], dtype)
    x = stacked(block, x, params["blocks"], shape, policy)
    with jax.named_scope("head"):
        return cross_entropy(norm(params["norm"], x) @ cast(params["embed"], dtype).T, targets)
