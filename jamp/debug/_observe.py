"""Run a function operation by operation, and keep numbers about each result instead of the result."""

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
from jamp._primitives import MOVING
from jamp.debug._walk import Place, Walker

_SKETCHES = 24


class Numbers(NamedTuple):
    """Numbers about an array. Those of several arrays add up to those of all.

    Attributes:
      flat: Sums of all elements with random signs, f32[24]. The mean square of the difference of two of them is an
        unbiased estimate of the squared norm of the difference of two arrays.
      rows: The same with signs that depend on the index along the last axis only, so that the order of rows, and how
        they are split, does not matter.
      square: The sum of the squares.
      size: The number of elements.
    """

    flat: Any
    rows: Any
    square: Any
    size: int


class Operation(NamedTuple):
    """An operation that ran.

    Attributes:
      site: The number of its equation.
      primitive, place, shape, dtype: What it is. The shape and dtype are those of its first floating result.
      loops: The loops around it and the iteration of each: the number of the loop's equation, and of the iteration.
      reads: The operations that computed what it reads.
      numbers: Of its first floating result.
    """

    site: int
    primitive: str
    place: Place
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    loops: tuple[tuple[int, int], ...]
    reads: frozenset[int]
    numbers: Numbers


@dataclasses.dataclass(frozen=True)
class Value:
    """An array, and the numbers of the operations that computed it, perhaps moved since."""

    array: Any
    made_by: frozenset[int] = frozenset()


class Observer(Walker[Value]):
    """An evaluation that keeps `Operation`s: arithmetic with a floating result. What only moves data is left out."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[Operation] = []

    def operations(self) -> list[Operation]:
        """All of them, in order, with numbers on the host."""
        numbers = jax.device_get([x.numbers for x in self._found])
        return [x._replace(numbers=y) for x, y in zip(self._found, numbers, strict=True)]

    def operation(self, eqn: JaxprEqn, values: list[Value], here: Place) -> list[Value]:
        results = _evaluate.bind(eqn, [x.array for x in values], _jaxpr.avals(eqn.outvars))
        made_by = frozenset[int]().union(*(x.made_by for x in values))
        first = next((x for x in results if is_floating(x)), None)
        if first is not None and eqn.primitive.name not in MOVING:
            flat, rows, square = _numbers(first)
            numbers = Numbers(flat, rows, square, first.size)
            loops = tuple(self.loops)
            name = eqn.primitive.name
            self._found.append(Operation(id(eqn), name, here, first.shape, first.dtype, loops, made_by, numbers))
            made_by = frozenset({len(self._found) - 1})
        return [Value(x, made_by) for x in results]

    def constant(self, array: Any) -> Value:
        return Value(array)

    def array(self, value: Value) -> Any:
        return value.array

    def item(self, value: Value, i: int) -> Value:
        return Value(value.array[i], value.made_by)

    def stack(self, values: list[Value], aval: Any) -> Value:
        if not values:
            return Value(jnp.zeros(aval.shape, aval.dtype))
        return Value(jnp.stack([x.array for x in values]), frozenset().union(*(x.made_by for x in values)))


def observe(closed: Any, args: Sequence[Any]) -> tuple[list[Operation], list[Value]]:
    """The operations of a jaxpr, and its results."""
    observer = Observer()
    results = observer.run(closed, [Value(jnp.asarray(x)) for x in args])
    return observer.operations(), results


@jax.jit
def _numbers(x: Array) -> tuple[Array, Array, Array]:
    x = cast_leaf(x, jnp.float32)
    columns = jnp.sum(x, range(x.ndim - 1)) if x.ndim > 1 else jnp.ravel(x)

    sketch = lambda key, y: jnp.sum(y * jax.random.rademacher(key, y.shape, y.dtype))
    keys = jax.random.split(jax.random.key(0), _SKETCHES)
    flat, rows = jax.lax.map(lambda key: (sketch(key, jnp.ravel(x)), sketch(key, columns)), keys)
    return flat, rows, jnp.sum(x**2)


def difference(x: Numbers, y: Numbers, same_rows: bool, is_split: bool) -> float:
    """The relative difference of two arrays, estimated from less if the rows are split or not the same."""
    finite = np.isfinite([x.square, y.square])
    if not all(finite):
        return 0.0 if not any(finite) else math.inf
    norm, other = math.sqrt(x.square), math.sqrt(y.square)
    size = max(norm, other) or 1.0
    if same_rows and not is_split:
        return _root_mean_square(x.flat - y.flat) / size
    rows = max(map(_root_mean_square, (x.rows, y.rows))) or 1.0
    apart = _root_mean_square(x.rows - y.rows) / rows if same_rows else 0.0
    return max(apart, abs(norm - other) / size)


def _root_mean_square(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(x))))
