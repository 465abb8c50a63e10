"""Values on their way through a function: whether they hold inf or nan, and which operation made it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jamp._cast import is_inexact
from jamp.debug._finding import Finding

INF, NAN = 1, 2

# Where an inf or nan comes from: the operation that made it, an input of the function, or a constant in the code.
# A mask of -inf is meant; what makes nan of one is not.
Origin = Finding | Literal["input", "constant"]


@dataclasses.dataclass(frozen=True)
class Value:
    """A value; if it holds inf or nan, the worst it holds, and where that comes from."""

    array: Any
    bits: int = 0  # 0, INF or NAN
    origin: Origin | None = None


def known(array: Any, origin: Origin) -> Value:
    """A value that is not the result of an operation."""
    (bits,) = worst([array])
    return Value(array, bits, origin if bits else None)


def worst(arrays: Sequence[Any]) -> list[int]:
    """For each array 0, INF or NAN."""
    inexact = [i for i, x in enumerate(arrays) if is_inexact(x)]
    bits = np.zeros(len(arrays), int)
    if inexact:
        bits[inexact] = _classify([arrays[i] for i in inexact])
    return bits.tolist()


@jax.jit
def _classify(arrays: list[Array]) -> Array:
    has_nan = [jnp.any(jnp.isnan(x)) for x in arrays]
    has_inf = [jnp.any(jnp.isinf(x)) for x in arrays]
    return jnp.where(jnp.stack(has_nan), NAN, jnp.where(jnp.stack(has_inf), INF, 0))


def earliest(values: Iterable[Value]) -> Origin | None:
    """The origin of what an operation makes of some values: the finding that was made first, else input, constant."""
    origins = [x.origin for x in values if x.origin is not None]
    made = [origin for origin in origins if isinstance(origin, Finding)]
    if made:
        return min(made, key=lambda finding: finding.order)
    return "input" if "input" in origins else "constant" if origins else None
