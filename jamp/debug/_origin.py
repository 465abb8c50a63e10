"""Trace each inf and NaN in the evaluation of a function to the operation that made it."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jamp import _evaluate, _jaxpr
from jamp._cast import is_inexact
from jamp._jaxpr import JaxprEqn
from jamp._primitives import REARRANGES
from jamp._source_line import Location, pattern
from jamp.debug._cause import explain
from jamp.debug._nonfinite_search import Finding, Values
from jamp.debug._walk import Walker

INF, NAN = 1, 2

# Where an inf or NaN comes from: the operation that made it, an input of the function, or a constant in the code. A
# deliberate -inf mask is not reported. An operation that turns it into NaN is.
Origin = Finding | Literal["input", "constant"]


@dataclasses.dataclass(frozen=True)
class Value:
    """An array, the worst kind of number in it, the origin of that number, and the path if it is an argument."""

    array: Any
    bits: int = 0  # 0, INF or NAN
    origin: Origin | None = None
    parameter: str = ""


def known(array: Any, origin: Origin, parameter: str = "") -> Value:
    """A value that is not the result of an operation."""
    (bits,) = worst([array])
    return Value(array, bits, origin if bits else None, parameter)


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
    """The origin of the result of an operation on some values: the first finding, else an input, else a constant."""
    origins = [x.origin for x in values if x.origin is not None]
    made = [origin for origin in origins if isinstance(origin, Finding)]
    if made:
        return min(made, key=lambda finding: finding.order)
    return "input" if "input" in origins else "constant" if origins else None


class OriginWalker(Walker[Value]):
    """An evaluation that follows inf and NaN.

    Attributes:
      findings: The operations that returned inf or NaN for finite inputs, in the order in which they ran.
      count: The number of operations that ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self.findings: list[Finding] = []
        self.count = 0

    def operation(self, eqn: JaxprEqn, values: list[Value], here: Location) -> list[Value]:
        self.count += 1
        arrays = [x.array for x in values]
        results = _evaluate.bind(eqn, arrays, _jaxpr.avals(eqn.outvars))
        bits = worst(results)
        origin = earliest(values)
        # If no operation made the inf (a mask of -inf), the operation that turns it into NaN is reported.
        is_new = origin is None or (not isinstance(origin, Finding) and max(x.bits for x in values) < NAN == max(bits))
        if any(bits) and is_new:
            origin = Finding(
                _jaxpr.name(eqn),
                explain(eqn, arrays, results),
                here.line,
                tuple(filter(None, self.path)),
                here.backward,
                tuple(map(Values.of, filter(is_inexact, arrays))),
                tuple(map(Values.of, filter(is_inexact, results))),
                order=len(self.findings),
                scope=here.scope,
                parameter=pattern(x.parameter for x in values if x.parameter),
            )
            self.findings.append(origin)
        parameter = values[0].parameter if _jaxpr.name(eqn) in REARRANGES else ""
        return [Value(x, b, origin if b else None, parameter) for x, b in zip(results, bits, strict=True)]

    def constant(self, array: Any) -> Value:
        return known(array, "constant")

    def item(self, value: Value, i: int) -> Value:
        if value.origin:
            return known(value.array[i], value.origin, value.parameter)
        return Value(value.array[i], parameter=value.parameter)

    def stack(self, values: list[Value]) -> Value:
        arrays = jnp.stack([x.array for x in values])
        return Value(arrays, max(x.bits for x in values), earliest(values))
