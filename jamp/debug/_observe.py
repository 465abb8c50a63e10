"""Run a function operation by operation, as traced and in float64 at the same time."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jamp import _evaluate, _jaxpr
from jamp._cast import is_floating
from jamp._jaxpr import ClosedJaxpr, JaxprEqn
from jamp._source_line import Location
from jamp.debug._numbers import FINEST, Numbers, roundoff
from jamp.debug._walk import Walker
from jamp.debug._wider import bind_wider

ARGUMENT, CONSTANT = "argument", "constant"
_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)
_AS_TRACED = ("bitcast_convert_type", "nextafter", "random_bits")  # They work on bits.


class Operation(NamedTuple):
    """A result of an operation that ran, an argument or a constant.

    Attributes:
      equation: A number that the results of one equation share in all iterations.
      primitive, location: The name of its primitive, and where it is in the source.
      name: The path of an argument.
      options: The parameters of the primitive.
      dtype, numbers: Its dtype as traced, and its elements.
      loops: The loops around it and the iteration of each.
      reads: The operations that computed its operands.
    """

    equation: Any
    primitive: str
    location: Location
    name: str
    options: dict[str, Any]
    dtype: Any
    numbers: Numbers
    loops: tuple[tuple[int, int], ...]
    reads: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Value:
    """An array as traced but at most float32, the same in float64, and the index of its operation."""

    array: Any
    wide: Any
    index: int


class Observer(Walker[Value]):
    """An evaluation that keeps every result on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def argument(self, array: Any, name: str) -> Value:
        """An argument of the function. It is exact."""
        constant = roundoff(array.dtype if array.dtype.itemsize == 8 else _F32)
        return self._add(ARGUMENT, _narrow(array), _widen(array), constant=constant, name=name)

    def constant(self, array: Any) -> Value:
        # One of few digits, such as 0.5, was not rounded.
        is_short = is_floating(array) and bool(jnp.all((array * 64 == jnp.round(array * 64)) | jnp.isinf(array)))
        constant = roundoff(_F32 if is_short and array.dtype.itemsize < 4 else array.dtype)
        return self._add(CONSTANT, _narrow(array), _widen(array), constant=constant)

    def item(self, value: Value, i: int) -> Value:
        return self._add("item", value.array[i], value.wide[i], [value])

    def stack(self, values: list[Value]) -> Value:
        return self._add("stack", *(jnp.stack([getattr(x, a) for x in values]) for a in ("array", "wide")), values)

    def operation(self, eqn: JaxprEqn, values: list[Value], here: Location) -> list[Value]:
        results = _bind(eqn, [x.array for x in values])
        wides, is_exact = _in_float64(eqn, values, results)
        types = _jaxpr.avals([*eqn.invars, *eqn.outvars])
        # Two kernels may round twice as much as their operands.
        constant = 0.0 if is_exact else 2 * max(roundoff(x.dtype) for x in types)
        options = {"location": here, "options": _jaxpr.params(eqn), "constant": constant}
        outs = zip(results, wides, _jaxpr.avals(eqn.outvars), strict=True)
        name = _jaxpr.name(eqn)
        return [
            self._add(name, x, y, values, **options, equation=(id(eqn), i), dtype=aval.dtype)
            for i, (x, y, aval) in enumerate(outs)
        ]

    def _add(
        self, primitive: str, array: Any, wide: Any, reads: Sequence[Value] = (), constant: float = 0.0, **known: Any
    ) -> Value:
        """Keep a result. Its unit roundoffs are the coarsest of its own and those of its operands."""
        index = len(self.operations)
        before = [self.operations[x.index].numbers for x in reads]
        unit = max([roundoff(array.dtype), *(x.unit for x in before)])
        numbers = Numbers(to_host(wide), to_host(array), unit, max([constant, FINEST, *(x.constant for x in before)]))
        known = {"equation": (primitive, index), "location": Location(), "name": "", "options": {}, "dtype": array.dtype} | known
        indices = tuple(x.index for x in reads)
        self.operations.append(Operation(primitive=primitive, numbers=numbers, loops=tuple(self.loops), reads=indices, **known))
        return Value(array, wide, index)


def observe(closed: ClosedJaxpr, args: Sequence[Any], names: Sequence[str]) -> tuple[list[Operation], list[int]]:
    """The operations of a jaxpr, and the indices of those that computed its results."""
    observer = Observer()
    arrays = list(map(jnp.asarray, args))
    with jax.enable_x64(True):
        results = observer.run(closed, [observer.argument(x, name) for x, name in zip(arrays, names, strict=True)])
    return observer.operations, [x.index for x in results]


def to_host(x: Any) -> np.ndarray[Any, Any]:
    """An array as float64, complex128, integers or bools."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    kind = np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else _F64 if is_floating(x) else None
    return np.asarray(x) if kind is None else np.asarray(x).astype(kind)


def _widen(x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.asarray(x, np.complex128)
    return jnp.asarray(x, _F64) if is_floating(x) else x


def _narrow(x: Any) -> Any:
    return jnp.asarray(x, _F32) if x.dtype == _F64 else x


def _bind(eqn: JaxprEqn, arrays: list[Any]) -> list[Any]:
    """The results as traced, with float32 in place of float64, so that its errors can be seen."""
    before, after = _jaxpr.avals(eqn.invars), _jaxpr.avals(eqn.outvars)
    if not any(x.dtype == _F64 for x in (*before, *after)) or _jaxpr.has_body(eqn):
        given = [x.astype(aval.dtype) if aval.dtype == _F64 else x for x, aval in zip(arrays, before, strict=True)]
        return list(map(_narrow, _evaluate.bind(eqn, given, after)))
    types = [x.update(dtype=_F32, weak_type=False) if x.dtype == _F64 else x for x in after]
    return _evaluate.bind(_evaluate.widened(eqn, {_F64}, _F32), arrays, types)


def _in_float64(eqn: JaxprEqn, values: list[Value], results: list[Any]) -> tuple[list[Any], bool]:
    """The results in float64, and whether all rounding in the operation is gone then."""
    name, before, after = _jaxpr.name(eqn), _jaxpr.avals(eqn.invars), _jaxpr.avals(eqn.outvars)
    if name == "reduce_precision":
        return [values[0].wide], True
    if all(x.wide is x.array for x in values) and not any(map(is_floating, after)):
        return results, True
    wides = [x.wide for x in values]
    if name not in _AS_TRACED and not _jaxpr.has_body(eqn):
        try:
            return [_widen(x) if is_floating(x) else x for x in bind_wider(eqn, wides, _F64)], True
        except (TypeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
            pass  # The operation does not exist in float64.
    given = [x.astype(aval.dtype) if x.dtype != aval.dtype else x for x, aval in zip(wides, before, strict=True)]
    return list(map(_widen, _evaluate.bind(eqn, given, after))), False
