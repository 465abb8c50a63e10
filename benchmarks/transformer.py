"""A whole train step of a transformer in float16: forward, backward, optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import jamp
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


def cases(batch: int = 2, length: int = 64, layers: int = 6, width: int = 256) -> list[Case]:
    """Plain optax (no loss scaling), jamp, and flax's DynamicScale as its documentation uses it."""
    params = init(jax.random.key(0), layers, width, 1024, length)
    tokens = jax.random.randint(jax.random.key(1), (batch, length), 0, 1024)
    tx = optax.adamw(1e-3)
    scaled = jamp.loss_scaled(tx)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return loss_fn(params, tokens, heads=4)

    def plain_step(carry: Any, tokens: jax.Array) -> Any:
        params, state = carry
        _, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def jamp_step(carry: Any, tokens: jax.Array) -> Any:
        params, state = carry
        _, grads = jamp.value_and_grad(loss, state)(params, tokens)
        updates, state = scaled.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    found = [
        Case("optax", plain_step, (params, tx.init(params)), (tokens,)),
        Case("jamp", jamp_step, (params, scaled.init(params)), (tokens,)),
    ]
    try:
        from flax.training.dynamic_scale import DynamicScale
    except ImportError:
        return found

    def flax_step(carry: Any, tokens: jax.Array) -> Any:
        params, state, scale = carry
        scale, finite, _, grads = scale.value_and_grad(loss)(params, tokens)
        updates, new_state = tx.update(grads, state, params)
        new_params = optax.apply_updates(params, updates)
        select = lambda new, old: jnp.where(finite, new, old)
        params, state = jax.tree.map(select, (new_params, new_state), (params, state))
        return params, state, scale

    carry = (params, tx.init(params), DynamicScale(scale=jnp.float32(2.0**16), fin_steps=jnp.int32(0)))
    return [*found, Case("flax DynamicScale recipe", flax_step, carry, (tokens,))]
