"""Run a function operation by operation, as traced and in float64 at the same time."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jamp._cast import is_floating
from jamp._jaxprs import build, constructs, interpret, ir
from jamp._jaxprs.context import Context
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn
from jamp._jaxprs.primitives import operation
from jamp.debug._compared_array import FILL, ComparedArray, roundoff
from jamp.debug._wider import bind_as_traced, try_wider

ARGUMENT, CONSTANT = "argument", "constant"
# They work on bits, or would draw other numbers in float64.
_AS_TRACED = ("bitcast_convert_type", "nextafter", "random_bits", "random_gamma", "rng_uniform")
_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)


class Operation(NamedTuple):
    """A result of an operation that ran, an argument, or a constant.

    Attributes:
      primitive, dtype: The name of its primitive, and the dtype of the result as traced.
      context, options: The constructs around it and its equation, and the parameters of the primitive.
      name: The path of an argument.
      equation: A key of the equation and the result, in all iterations.
      result: The result.
      loops: The loops around it, and the iteration of each.
      reads: The operations that computed its operands.
    """

    primitive: str
    dtype: Any
    context: Context = Context()
    options: Mapping[str, Any] = MappingProxyType({})
    name: str = ""
    equation: Any = None
    result: Any = None
    loops: tuple[tuple[int, int], ...] = ()
    reads: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class ObservedArray:
    """An array as traced but at most float32, the same in float64, and the index of its operation."""

    array: Any
    wide: Any
    index: int


class Observer(interpret.Interpreter[ObservedArray]):
    """An evaluation that keeps every result on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def argument(self, array: Any, name: str) -> ObservedArray:
        """An argument of the function. It is exact."""
        return self._add(Operation(ARGUMENT, array.dtype, name=name), array, array)

    def constant(self, array: Any) -> ObservedArray:
        # One of few digits, such as 0.5, was not rounded.
        is_short = is_floating(array) and bool(jnp.all((array * 64 == jnp.round(array * 64)) | jnp.isinf(array)))
        return self._add(Operation(CONSTANT, array.dtype), array, array, (), 0.0 if is_short else roundoff(array.dtype))

    def item(self, value: ObservedArray, i: int) -> ObservedArray:
        return self._add(Operation("item", value.array.dtype), value.array[i], value.wide[i], [value])

    def stack(self, values: list[ObservedArray]) -> ObservedArray:
        array, wide = (interpret.stacked([get(x) for x in values]) for get in (lambda x: x.array, lambda x: x.wide))
        return self._add(Operation("stack", array.dtype), array, wide, values)

    def operation(self, eqn: JaxprEqn, values: list[ObservedArray]) -> list[ObservedArray]:
        results, after = _as_traced(eqn, [x.array for x in values]), ir.avals(eqn.outvars)
        wides = _in_float64(eqn, values, results)
        # Two kernels may round twice as much as the operations that they are compared with.
        constant = 0.0 if wides else 2 * max(roundoff(x.dtype) for x in (*ir.avals(eqn.invars), *after))
        wides = wides or _as_traced(eqn, [x.wide for x in values])
        found = Operation(operation(eqn), None, self.context(eqn), ir.params(eqn))
        keep = lambda i, *arrays: self._add(found._replace(dtype=after[i].dtype, equation=(id(eqn), i)), *arrays)
        return [keep(i, x, y, values, constant) for i, (x, y) in enumerate(zip(results, wides, strict=True))]

    def _add(
        self, found: Operation, array: Any, wide: Any, xs: Sequence[ObservedArray] = (), constant: float = 0.0
    ) -> ObservedArray:
        """Keep a result. Its unit roundoffs are the coarsest of itself and its operands."""
        array, wide, index = _narrow(array), _widen(wide), len(self.operations)
        before = [self.operations[x.index].result for x in xs]
        unit = max([roundoff(array.dtype), *(x.unit for x in before)])
        least = min(roundoff(found.dtype), roundoff(_F32))
        constant = max([constant, least, *(x.constant for x in before)])
        value = to_host(wide)
        scale = max([_largest(value), *(x.scale for x in before)])
        result = ComparedArray(value, to_host(array), unit, constant, scale)
        loops = tuple((id(x.eqn), x.iteration) for x in self.entered if x.iteration is not None)
        found = found._replace(equation=found.equation or index, loops=loops, reads=tuple(x.index for x in xs))
        self.operations.append(found._replace(result=result))
        return ObservedArray(array, wide, index)


def observe(closed: ClosedJaxpr, args: Sequence[Any], names: Sequence[str]) -> tuple[list[Operation], list[int]]:
    """Return the operations of a jaxpr whose arguments have names, and the indices of its results."""
    observer, arrays = Observer(), list(map(jnp.asarray, args))
    with jax.enable_x64(True):
        results = observer.run(closed, list(map(observer.argument, arrays, names)))
    return observer.operations, [x.index for x in results]


def to_host(x: Any) -> np.ndarray[Any, Any]:
    """An array in float64 or complex128, an integer, or the data of a random key, on the host."""
    x = np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
    wide = np.complex128 if np.iscomplexobj(x) else _F64 if is_floating(x) else x.dtype
    return x.astype(wide)


def _largest(x: np.ndarray[Any, Any]) -> float:
    """Return the largest finite magnitude of an array, without the fills of masks."""
    if not np.issubdtype(x.dtype, np.inexact):
        return 0.0
    return float(np.max(np.abs(x), where=np.isfinite(x) & (x.real >= FILL), initial=0.0))


def _widen(x: Any) -> Any:
    is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
    return jnp.asarray(x, np.complex128) if is_complex else jnp.asarray(x, _F64) if is_floating(x) else x


def _narrow(x: Any) -> Any:
    return jnp.asarray(x, _F32) if x.dtype == _F64 else x


def _as_traced(eqn: JaxprEqn, arrays: list[Any]) -> list[Any]:
    """Evaluate as traced, but with float32 in place of float64, so that the errors of float64 can be estimated."""
    before, after = ir.avals(eqn.invars), ir.avals(eqn.outvars)
    if not any(x.dtype == _F64 for x in (*before, *after)) or constructs.has_body(eqn):
        return bind_as_traced(eqn, arrays)
    types = [x.update(dtype=_F32, weak_type=False) if x.dtype == _F64 else x for x in after]
    return interpret.bind(build.widened(eqn, {_F64}, _F32), list(map(_narrow, arrays)), types)


def _in_float64(eqn: JaxprEqn, values: list[ObservedArray], results: list[Any]) -> list[Any]:
    """Return the results in float64, or an empty list if the operation does not exist there."""
    name = ir.name(eqn)
    if name == "reduce_precision":
        return [values[0].wide]
    if all(x.wide is x.array for x in values) and not any(map(is_floating, results)):
        return results
    return [] if name in _AS_TRACED else try_wider(eqn, [x.wide for x in values], _F64) or []
