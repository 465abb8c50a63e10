"""A training step of a small model, a hundred times in one program: what a step costs without the host.

Started from the host one by one, the same program varies by more than the ways differ.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jamp
from benchmarks.gpu.measure import Send, Way, measure
from benchmarks.models import train_step
from benchmarks.step.peers import where

ADAMW = optax.adamw(1e-3)
SCALED = jamp.loss_scaled(ADAMW)
LEAVES, WIDTH, BATCH, STEPS = 40, 64, 32, 100


def loss(params: Any, x: jax.Array) -> jax.Array:
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def by_hand(carry: Any, x: jax.Array) -> Any:
    """A loss scale, one check, and a choice over parameters and state."""
    *old, scale, good_steps = carry
    grads = jax.grad(lambda params: loss(params, x) * scale)(old[0])
    grads = jax.tree.map(lambda g: g / scale, grads)
    finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()

    def update(params: Any, state: Any) -> Any:
        updates, state = ADAMW.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    grown = jnp.where(good_steps >= 2000, scale * 2, scale)
    return *where(finite, update, *old), jnp.where(finite, grown, scale / 2), jnp.where(finite, good_steps + 1, 0)


def plain_carry(params: Any) -> Any:
    return params, ADAMW.init(params)


WAYS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "plain Optax": (partial(train_step, loss, ADAMW, False), plain_carry),
    "plain Optax, again": (partial(train_step, loss, ADAMW, False), plain_carry),
    "loss_scaled": (partial(train_step, loss, SCALED, True), lambda params: (params, SCALED.init(params))),
    "where by hand": (by_hand, lambda params: (*plain_carry(params), jnp.float32(2.0**16), jnp.int32(0))),
}


def loop(quick: bool, send: Send) -> None:
    leaves = 4 if quick else LEAVES
    ways = [Way(name, partial(repeated, step), partial(made, start, leaves)) for name, (step, start) in WAYS.items()]
    labels = {"model": f"{LEAVES} matrices of {WIDTH} x {WIDTH}, {STEPS} steps in a loop"}
    measure(labels, ways, quick, send, calls=5, steps=STEPS)


def repeated(step: Callable[..., Any], carry: Any, x: jax.Array) -> Any:
    return jax.lax.fori_loop(0, STEPS, lambda i, carry: step(carry, x), carry)


def made(start: Callable[..., Any], leaves: int) -> Any:
    keys = jax.random.split(jax.random.key(0), leaves)
    params = {f"w{i}": 0.1 * jax.random.normal(key, (WIDTH, WIDTH)) for i, key in enumerate(keys)}
    return start(params), (jnp.ones((BATCH, WIDTH)),)
