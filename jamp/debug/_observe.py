"""Run a function operation by operation, and keep statistics of each result instead of the result."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jamp import _evaluate, _jaxpr
from jamp._cast import cast_leaf, is_floating
from jamp._jaxpr import JaxprEqn
from jamp._primitives import MOVING, PRODUCTS
from jamp._source_line import Location
from jamp.debug._walk import Walker
from jamp.debug._wider import bind_wider

_SKETCHES = 24


class Numbers(NamedTuple):
    """Statistics of an array. Those of several arrays add up to those of all.

    Attributes:
      flat: Sums of all elements with random signs, f32[24]. The mean square of the difference of two of them is an
        unbiased estimate of the squared norm of the difference of two arrays.
      rows: The same with signs that depend on the index along the last axis only, so that the order of rows, and how
        they are split, does not matter.
      square: The sum of the squares.
      terms: What `square` would be if the terms of each sum had random signs. It is larger where they cancel.
      bad: How many elements are inf or NaN. The other numbers are without them.
      size: The number of elements.
    """

    flat: Any
    rows: Any
    square: Any
    terms: Any
    bad: Any
    size: int


class Operation(NamedTuple):
    """An operation that ran.

    Attributes:
      equation: The number of its equation.
      primitive, location: The name of its primitive, and where it is in the source.
      shape, dtype: Those of its first floating result.
      loops: The loops around it and the iteration of each: the number of the loop's equation, and of the iteration.
      reads: The operations that computed what it reads.
      numbers: Of its first floating result.
    """

    equation: int
    primitive: str
    location: Location
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    loops: tuple[tuple[int, int], ...]
    reads: frozenset[int]
    numbers: Numbers


@dataclasses.dataclass(frozen=True)
class Value:
    """An array, and the indices of the operations that computed it. Data movement does not count."""

    array: Any
    made_by: frozenset[int] = frozenset()


class Observer(Walker[Value]):
    """An evaluation that keeps an `Operation` for all arithmetic with a floating result, but not for data movement."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[Operation] = []

    def operations(self) -> list[Operation]:
        """All of them, in order, with numbers on the host."""
        numbers = jax.device_get([x.numbers for x in self._operations])
        return [x._replace(numbers=y) for x, y in zip(self._operations, numbers, strict=True)]

    def operation(self, eqn: JaxprEqn, values: list[Value], here: Location) -> list[Value]:
        results = _evaluate.bind(eqn, [x.array for x in values], _jaxpr.avals(eqn.outvars))
        made_by = frozenset[int]().union(*(x.made_by for x in values))
        first = next((x for x in results if is_floating(x)), None)
        name = _jaxpr.name(eqn)
        if first is not None and (name not in MOVING or _narrows(eqn)):
            flat, rows, square, bad = _numbers(first)
            numbers = Numbers(flat, rows, square, _terms(eqn, [x.array for x in values], square), bad, first.size)
            loops = tuple(self.loops)
            self._operations.append(Operation(id(eqn), name, here, first.shape, first.dtype, loops, made_by, numbers))
            made_by = frozenset({len(self._operations) - 1})
        return [Value(x, made_by) for x in results]

    def constant(self, array: Any) -> Value:
        return Value(array)

    def item(self, value: Value, i: int) -> Value:
        return Value(value.array[i], value.made_by)

    def stack(self, values: list[Value]) -> Value:
        return Value(jnp.stack([x.array for x in values]), frozenset().union(*(x.made_by for x in values)))


def observe(closed: Any, args: Sequence[Any]) -> tuple[list[Operation], list[Value]]:
    """The operations of a jaxpr, and its results."""
    observer = Observer()
    results = observer.run(closed, [Value(jnp.asarray(x)) for x in args])
    return observer.operations(), results


def _narrows(eqn: JaxprEqn) -> bool:
    """Whether an operation is a cast that rounds."""
    (before, *_), (after, *_) = _jaxpr.avals(eqn.invars) or [None], _jaxpr.avals(eqn.outvars)
    is_cast = _jaxpr.name(eqn) == "convert_element_type" and is_floating(before) and is_floating(after)
    return is_cast and after.dtype.itemsize < before.dtype.itemsize


@jax.jit
def _numbers(x: Array) -> tuple[Array, Array, Array, Array]:
    x = cast_leaf(x, jnp.float32)
    bad = jnp.sum(~jnp.isfinite(x))
    x = jnp.where(jnp.isfinite(x), x, 0)
    columns = jnp.sum(x, range(x.ndim - 1)) if x.ndim > 1 else jnp.ravel(x)
    sketch = lambda key, y: jnp.sum(y * jax.random.rademacher(key, y.shape, y.dtype))
    keys = jax.random.split(jax.random.key(0), _SKETCHES)
    flat, rows = jax.lax.map(lambda key: (sketch(key, jnp.ravel(x)), sketch(key, columns)), keys)
    return flat, rows, jnp.sum(x**2), bad


def _terms(eqn: JaxprEqn, operands: Sequence[Any], square: Array) -> Any:
    name = _jaxpr.name(eqn)
    if name == "reduce_sum":
        return _square(operands[0])
    if name in ("add", "sub", "add_any"):
        return sum(_square(jnp.broadcast_to(x, _jaxpr.avals(eqn.outvars)[0].shape)) for x in operands)
    if name in PRODUCTS and all(map(is_floating, operands[:2])):
        squares = [jnp.square(cast_leaf(x, jnp.float32)) for x in operands[:2]]
        return jnp.sum(bind_wider(eqn, [*squares, *operands[2:]], np.dtype(np.float32))[0])
    return square


@jax.jit
def _square(x: Array) -> Array:
    x = cast_leaf(x, jnp.float32)
    return jnp.sum(jnp.where(jnp.isfinite(x), x, 0) ** 2)


def gain(x: Numbers) -> float:
    """How much a sum amplifies relative errors of its terms, because they cancel. 1 for any other operation."""
    return max(1.0, math.sqrt(x.terms / x.square)) if x.square else math.inf if x.terms else 1.0


def rows_gain(x: Numbers) -> float:
    """The same for the sums over rows, by which arrays are compared whose rows are split."""
    rows = _root_mean_square(x.rows)
    return max(1.0, math.sqrt(x.square) / rows) if rows else math.inf


def difference(x: Numbers, y: Numbers, same_rows: bool, is_split: bool) -> float:
    """The estimated relative difference of two arrays. It uses fewer statistics if their rows are split or differ."""
    if x.bad != y.bad:
        return math.inf
    norm, other = math.sqrt(x.square), math.sqrt(y.square)
    size = max(norm, other) or 1.0
    if same_rows and not is_split:
        return _root_mean_square(x.flat - y.flat) / size
    rows = max(map(_root_mean_square, (x.rows, y.rows))) or 1.0
    apart = _root_mean_square(x.rows - y.rows) / rows if same_rows else 0.0
    return max(apart, abs(norm - other) / size)


def _root_mean_square(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(x))))
