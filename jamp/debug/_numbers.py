"""Arrays that were computed twice, as traced and in float64, and whether two of them differ by more than rounding."""

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

JUMP = 4.0  # Rounding explains a difference of at most four roundings.
NEAR = 1e-2  # The norms of arrays that agree differ by less, relative to the larger one.
FINEST = 2.0**-44  # of float64, whose errors are estimated from those of float32


@dataclasses.dataclass(frozen=True, eq=False)
class Numbers:
    """An array.

    Attributes:
      value: The array without rounding: float64, complex128 or integers.
      traced: The same as the function computes it.
      unit: The unit roundoff of the coarsest dtype on the way to it.
      constant: The same of what float64 does not remove: constants, and calls that run as traced.
    """

    value: np.ndarray[Any, Any]
    traced: np.ndarray[Any, Any]
    unit: float
    constant: float

    @functools.cached_property
    def is_inexact(self) -> bool:
        """Whether it is floating or complex."""
        return bool(np.issubdtype(self.value.dtype, np.inexact))

    @functools.cached_property
    def norm(self) -> float:
        """The norm of its finite elements. -1 if it is not inexact."""
        with np.errstate(over="ignore"):
            return float(np.linalg.norm(self.value[np.isfinite(self.value)])) if self.is_inexact else -1.0

    @functools.cached_property
    def is_uniform(self) -> bool:
        """Whether all elements are equal."""
        flat = np.ravel(self.value)
        return flat.size > 0 and bool((flat == flat[0]).all())

    @functools.cached_property
    def sorted(self) -> "Numbers":
        """The same elements in the order of their values."""
        order = np.argsort(self.value, axis=None, kind="stable")
        return dataclasses.replace(self, value=np.ravel(self.value)[order], traced=np.ravel(self.traced)[order])


def roundoff(dtype: Any) -> float:
    """The unit roundoff of a dtype, at least `FINEST`."""
    return max(float(jnp.finfo(dtype).eps), FINEST) if jnp.issubdtype(dtype, jnp.inexact) else FINEST


def apart(x: Numbers, y: Numbers) -> tuple[float, float]:
    """The relative difference of two arrays without rounding, and how much of it their rounding explains.

    Elements that are equal but for one rounding take no part, such as the fill of a mask, which would hide the others.
    """
    if x.value.size != y.value.size or x.is_inexact != y.is_inexact:
        return math.inf, 0.0
    a, b = np.ravel(x.value), np.ravel(y.value)
    if not x.is_inexact:
        return (float(np.mean(a != b)) if a.size else 0.0), 0.0
    constant = max(x.constant, y.constant)
    with np.errstate(all="ignore"):
        finite = np.isfinite(a) & np.isfinite(b)
        if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            return math.inf, 0.0
        unequal = finite & ~(np.abs(a - b) <= constant * np.maximum(np.abs(a), np.abs(b)))
        size = max(np.linalg.norm(a[unequal]), np.linalg.norm(b[unequal]))
        if not size:
            return 0.0, constant
        errors = [np.ravel(z.traced - z.value)[unequal] * (constant / z.unit) for z in (x, y)]
        noise = max(np.linalg.norm(e[np.isfinite(e)]) for e in errors)
        return float(np.linalg.norm((a - b)[unequal]) / size), max(float(noise / size), constant)


def agree(x: Numbers, y: Numbers) -> bool:
    """Whether rounding explains the difference of two arrays of any shapes, element by element."""
    difference, explained = apart(x, y)
    return difference <= JUMP * explained


def same_elements(x: Numbers, y: Numbers) -> bool:
    """The same, with floating elements in any order."""
    if x.value.size != y.value.size or not abs(x.norm - y.norm) <= NEAR * max(abs(x.norm), abs(y.norm)):
        return False
    return agree(x, y) or (x.is_inexact and agree(x.sorted, y.sorted))


def relative(x: Any, y: Any) -> float:
    """The relative difference of two arrays, by the norm, or the share of unequal integers.

    It is inf if their shapes differ, or if inf and NaN are at other elements.
    """
    if np.shape(x) != np.shape(y):
        return math.inf
    if not np.issubdtype(np.asarray(x).dtype, np.inexact):
        return float(np.mean(np.not_equal(x, y))) if np.size(x) else 0.0
    with np.errstate(all="ignore"):
        finite = np.isfinite(x)
        if not np.array_equal(finite, np.isfinite(y)):
            return math.inf
        a, b = (np.asarray(z)[finite & ~np.equal(x, y)] for z in (x, y))
        size = max(np.linalg.norm(a), np.linalg.norm(b))
        return float(np.linalg.norm(a - b) / size) if size else 0.0
