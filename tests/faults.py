"""Layers with one line each that needs more digits than 16 bit has. `here` marks it."""

import inspect

import jax
import jax.numpy as jnp
from jax import Array, lax


def large_logits(h: Array) -> Array:
    """Logits near 1000 that differ by a few, because all keys have a part in common."""
    keys, query = h + 30, h + 2
    scores = query @ keys.swapaxes(-1, -2)  # here
    return jax.nn.softmax(scores) @ h


def variance_of_squares(h: Array) -> Array:
    """A variance as the difference of two large numbers."""
    ones = jnp.full((h.shape[-1], 1), 1 / h.shape[-1])
    mean, square = (h + 30) @ ones, (h + 30) ** 2 @ ones  # here
    return (h + 30 - mean) * lax.rsqrt(jnp.abs(square - mean**2) + 1e-2)


def long_sum(h: Array) -> Array:
    """A sum of 1e5 terms, in 16 bit by hand."""

    def add(total: Array, term: Array) -> tuple[Array, None]:
        return total + term, None  # here

    terms = jnp.broadcast_to(0.1 + jnp.ravel(h) / 1000, (100_000 // h.size, h.size))
    total, _ = lax.scan(add, jnp.bfloat16(0), jnp.ravel(terms).astype(jnp.bfloat16))
    return h * (total.astype(h.dtype) / 1e4)


def positions(h: Array) -> Array:
    """Positions of a few thousand in 16 bit."""
    steps = jnp.arange(float(h.shape[-2])) * 300 + 0.37
    angles = steps.astype(jnp.bfloat16).astype(jnp.float32)[:, None] + h  # here
    return jnp.sin(angles)


def distances(h: Array) -> Array:
    """Squared distances of points that are near to each other and far from 0."""
    x = h + 20
    squares = jnp.sum(x**2, -1)
    products = x @ x.swapaxes(-1, -2)  # here
    return jnp.exp(-jnp.abs(squares[..., None] + squares[..., None, :] - 2 * products)) @ h


def router_offset(h: Array) -> Array:
    """Four experts, whose scores all have the same large offset."""
    weights = jnp.cos(jnp.arange(4.0 * h.shape[-1])).reshape(-1, 4) + 20
    scores = (h + 2) @ weights  # here
    return h * (jax.nn.softmax(scores) @ jnp.linspace(0.5, 2, 4))[..., None]


def slow_average(h: Array) -> Array:
    """An average over many steps whose state is kept in 16 bit by hand."""

    def step(state: Array, x: Array) -> tuple[Array, Array]:
        state = (0.998 * state.astype(jnp.float32) + 0.002 * x).astype(jnp.bfloat16)  # here
        return state, state

    rows = jnp.concatenate([h.reshape(-1, h.shape[-1])] * 8)
    average = lax.scan(step, jnp.ones(h.shape[-1], jnp.bfloat16), rows)[0]
    return h * (20 * average.astype(jnp.float32) - 19)


def near_one(h: Array) -> Array:
    """One minus a cosine near 1."""
    x = h + 30
    x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    cosines = x @ x[..., :1, :].swapaxes(-1, -2)  # here
    return h * (1 + 100 * (1 - cosines))


def hidden_offset(h: Array) -> Array:
    """A constant of a few hundred, which a product would cancel, in its operand."""
    weights = jnp.eye(h.shape[-1]) - 1 / h.shape[-1]
    return jnp.tanh((h + 300) @ weights)  # here


FAULTS = [
    large_logits,
    variance_of_squares,
    long_sum,
    positions,
    distances,
    router_offset,
    slow_average,
    near_one,
    hidden_offset,
]


def planted(fault) -> str:
    """The source of the planted line, as a row has it."""
    lines, first = inspect.getsourcelines(fault)
    (line,) = [first + i for i, text in enumerate(lines) if "# here" in text]
    return f"faults.py:{line} "
