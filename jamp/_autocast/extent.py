"""The largest number of an array of constants, found on its device and remembered."""

import functools
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_SMALL = 2**16  # elements: to read so many takes less than to compile a reduction of them
_KNOWN: dict[int, tuple[Any, "Extent"]] = {}  # of arrays that exist, by their ids, with a weak reference to each


class Extent(NamedTuple):
    """The largest absolute value among the finite elements of an array, and whether all its elements are finite."""

    largest: float
    is_finite: bool


def extent(x: Any) -> Extent:
    """The extent of an array of real numbers that this process can read. That of a `jax.Array` is found once."""
    if not isinstance(x, jax.Array):  # NumPy's may change.
        return _on_host(x)
    key = id(x)
    known = _KNOWN.get(key)
    if known is not None and known[0]() is x:
        return known[1]
    found = _on_host(x) if x.size <= _SMALL else _on_device(x)
    _KNOWN[key] = weakref.ref(x, lambda _: _KNOWN.pop(key, None)), found
    return found


def _on_host(x: Any) -> Extent:
    return _as_numbers(_measure(np, np.asarray(x)))


def _on_device(x: jax.Array) -> Extent:
    # In a thread of its own. In this one, JAX may record operations, or map them over devices.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_reduce, x).result()


def _reduce(x: jax.Array) -> Extent:
    with jax.enable_x64(True):  # for float64
        return _as_numbers(jax.device_get(_compiled()(x)))


@functools.cache
def _compiled() -> Any:
    return jax.jit(functools.partial(_measure, jnp))


def _measure(xp: Any, x: Any) -> tuple[Any, Any]:
    """The largest finite number and whether all are finite, by NumPy or by JAX's version of it."""
    values = xp.abs(x.astype(x.dtype if x.dtype == np.float64 else np.float32))
    finite = xp.isfinite(values)
    return xp.max(xp.where(finite, values, 0), initial=0), xp.all(finite)


def _as_numbers(found: tuple[Any, Any]) -> Extent:
    return Extent(float(found[0]), bool(found[1]))
