"""Arrays computed twice, as traced and in float64, and whether two of them differ by more than rounding."""

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

JUMP = 4.0  # Rounding explains a difference of at most four roundings.
FLOAT32 = 2.0**-23  # its unit roundoff
FILL = -1e4  # Less is the fill of a mask, if it is selected.
DIGITS = 2.0**-44  # of float64, whose errors are estimated from float32
NEAR = 1e-4  # The norms of arrays that agree differ by less, relative to the larger one.


@dataclasses.dataclass(frozen=True, eq=False)
class ComparedArray:
    """An array.

    Attributes:
      value, traced: Its elements without rounding, and as the function computes them: float64, complex128 or integers.
      unit: The unit roundoff of the coarsest dtype on the way to it.
      constant: The unit roundoff that float64 does not remove: of constants, and of calls that run as traced.
      scale: The largest finite magnitude on the way to it, without the fills of masks.
    """

    value: np.ndarray[Any, Any]
    traced: np.ndarray[Any, Any]
    unit: float
    constant: float
    scale: float

    @functools.cached_property
    def is_inexact(self) -> bool:
        """Whether it is floating or complex."""
        return bool(np.issubdtype(self.value.dtype, np.inexact))

    @functools.cached_property
    def norm(self) -> float:
        """The 3-norm of its finite elements, or -1. Results of a norm share a 2-norm, of a softmax a 1-norm."""
        finite = np.abs(self.value[np.isfinite(self.value)]) if self.is_inexact else np.zeros(0)
        top = float(finite.max(initial=0.0))
        return top * float(np.cbrt(np.sum((finite / (top or 1.0)) ** 3))) if self.is_inexact else -1.0

    @functools.cached_property
    def is_uniform(self) -> bool:
        """Whether all elements are equal."""
        return self.value.size > 0 and bool((self.value == self.value.flat[0]).all())

    @functools.cached_property
    def sorted(self) -> "ComparedArray":
        """The same elements in the order of their values."""
        order = np.argsort(self.value, axis=None, kind="stable")
        return dataclasses.replace(self, value=np.ravel(self.value)[order], traced=np.ravel(self.traced)[order])


def roundoff(dtype: Any) -> float:
    """Return the unit roundoff of a dtype, for float64 `DIGITS`."""
    return max(float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0, DIGITS)


def differ_by(x: ComparedArray, y: ComparedArray) -> tuple[float, float]:
    """Return the relative difference of two arrays without rounding, and how much of it one rounding explains.

    Elements that are equal but for one rounding take no part, such as the fill of a mask, which would hide the others.
    """
    a, b = np.ravel(x.value), np.ravel(y.value)
    if a.size != b.size or x.is_inexact != y.is_inexact:
        return math.inf, 0.0
    if not x.is_inexact:
        return relative_difference(a, b), 0.0
    constant = max(x.constant, y.constant)
    if np.array_equal(a, b):  # as in most operations of equal programs
        return 0.0, constant
    with np.errstate(all="ignore"):
        finite = np.isfinite(a) & np.isfinite(b)
        if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            return math.inf, 0.0
        differ = finite & ~(np.abs(a - b) <= constant * np.maximum(np.abs(a), np.abs(b)))
        size = max(_norm(a[differ]), _norm(b[differ])) or 1.0
        errors = [np.ravel(z.traced - z.value)[differ] for z in (x, y)]
        norms = [_norm(e[np.isfinite(e)]) for e in errors]
        # If rounding leaves hardly a digit, the value may be 0 but for the rounding of float64.
        is_zero = size <= DIGITS * max(x.scale, y.scale)
        noise = max(
            e if is_zero and e >= size / 8 else e * constant / z.unit for e, z in zip(norms, (x, y), strict=True)
        )
        return _norm((a - b)[differ]) / size, max(float(noise / size), constant)


def agree(x: ComparedArray, y: ComparedArray) -> bool:
    """Whether rounding explains the difference of two arrays of any shapes, element by element."""
    difference, explained = differ_by(x, y)
    return difference <= JUMP * explained


def have_same_elements(x: ComparedArray, y: ComparedArray) -> bool:
    """Whether rounding explains the difference of two arrays, with floating elements in any order."""
    is_near = x.value.size == y.value.size and abs(x.norm - y.norm) <= NEAR * max(abs(x.norm), abs(y.norm))
    return is_near and (agree(x, y) or (x.is_inexact and agree(x.sorted, y.sorted)))


def relative_difference(x: Any, y: Any) -> float:
    """Return the relative difference of two arrays, by the norm of what differs, or the share of unequal integers.

    It is inf if their shapes differ, or if inf and NaN are at other elements.
    """
    if np.shape(x) != np.shape(y) or not np.array_equal(np.isfinite(x), np.isfinite(y)):
        return math.inf
    differ = np.isfinite(x) & np.not_equal(x, y)
    if not np.issubdtype(x.dtype, np.inexact):
        return float(np.mean(differ)) if differ.size else 0.0
    a, b = x[differ], y[differ]
    return _norm(a - b) / max(_norm(a), _norm(b)) if a.size else 0.0


def _norm(x: np.ndarray[Any, Any]) -> float:
    """Return the norm. NumPy's function waits for the threads of the BLAS."""
    return float(np.sqrt(np.sum(np.square(np.abs(x)))))
