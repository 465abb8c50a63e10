"""Exact values with the tangents of what is computed from decoded ones. They have no second derivative."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jamp._compiler_hints import behind_barrier
from jamp._jaxprs.define import batch_first, define, no_tangent, with_tangents


def _with_tangents(
    primals: Sequence[Any], tangents: Sequence[Any], *, n: int, probes: int, others: int
) -> tuple[Any, Any]:
    values, codes = primals[:n], primals[2 * n + probes + others :]
    # Else XLA:GPU computes them late, and keeps in memory what they are computed from (jaxlib 0.10.2, 0.12.0).
    if codes:
        values = behind_barrier([*values, *codes])[:n]
    return differentiated_once([*values, *primals[2 * n : 2 * n + probes]])[:n], list(tangents[n : 2 * n])


def _transposed(cotangents: Sequence[Any], *operands: Any, n: int, **_: Any) -> list[Any]:
    return [None] * n + list(cotangents) + [None] * (len(operands) - 2 * n)


def _batched(axis: Any, args: Sequence[Any], dims: Sequence[Any], *, n: int, **params: int) -> tuple[Any, Any]:
    if all(d is None for d in dims[: 2 * n]):
        return _with_tangents_of.bind(*args, n=n, **params), [None] * n
    pairs = batch_first(args[: 2 * n], dims[: 2 * n])
    return _with_tangents_of.bind(*pairs, *args[2 * n :], n=n, **params), [0] * n


_with_tangents_of = define(
    "with_tangents_of",
    lambda *operands, n, **_: list(operands[:n]),
    lambda *operands, n, **_: list(operands[:n]),
    jvp=_with_tangents,
    transpose=_transposed,
    batch=_batched,
    multiple_results=True,
)


def with_tangents_of(
    sources: Sequence[Any],
    values: Sequence[Any],
    probes: Sequence[Any],
    others: Sequence[Any] = (),
    codes: Sequence[Any] = (),
) -> list[Any]:
    """The values, with the tangents of `sources`, which are not computed for it.

    `probes` are of what the values are computed from, `others` of what else is differentiated. Where one of them has a
    tangent, the values depend on nothing but the `probes`, and no code reads them before the `codes` are computed. A
    second derivative, in which one of the `probes` has a tangent, is an error: what was encoded has none.
    """
    operands = *values, *sources, *probes, *others, *codes
    counts = {"n": len(values), "probes": len(probes), "others": len(others)}
    found: list[Any] = _with_tangents_of.bind(*operands, **counts)
    return found


def probe(x: Any) -> Any:
    """Nothing of an array, but with a tangent if the array has one. It takes no memory."""
    return lax.slice_in_dim(x, 0, 0) if jnp.ndim(x) else lax.slice_in_dim(x.reshape(1), 0, 0)


def _second_derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    if with_tangents(tangents):
        raise NotImplementedError(
            "Residuals in 8 bits have no second derivative. Leave residuals=jnp.int8 out of the jamp.recompute or "
            "jamp.autocast inside."
        )
    return differentiated_once(primals), list(map(no_tangent, primals))


_differentiated_once: Any = define(
    "differentiated_once",
    lambda *xs: list(xs),
    lambda *xs: list(xs),
    jvp=_second_derivative,
    transpose=lambda cotangents, *xs: [None] * len(xs),
    multiple_results=True,
)


def differentiated_once(values: Sequence[Any]) -> list[Any]:
    """The values, in code of a derivative. To differentiate it again is an error."""
    found: list[Any] = _differentiated_once.bind(*values)
    return found
