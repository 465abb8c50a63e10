"""Which values may be kept in 8 bits: large activations whose rounding is a small error of what is computed from them.

    scores = q @ k.T            stays as it is: it is *precise*, because its error is one of an exponent
    p = exp(scores - ...)       stays as it is: it has a *wide range*, because one block has numbers of all magnitudes
    out = p @ v                 8 bits
    size = mean(out**2)         small, and kept as it is

A segment with both `out` and `size` among its inputs reads `out` as it is: a decoded `out` would not have that size.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jamp._cast import is_floating
from jamp._jaxprs import constructs, ir, walk
from jamp._jaxprs.dataflow import Backward, Forward
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn, Var
from jamp._jaxprs.primitives import AMPLIFYING, ELEMENTWISE, WIDE_RANGE
from jamp._jaxprs.source import in_scope
from jamp._products.quantized import QUANTIZE
from jamp._recompute.kept import Origin, is_cheap
from jamp._recompute.stores import BLOCK, fits_8_bits

_VERY_LARGE = 1e4  # a constant of this size fills masked places


class Around(NamedTuple):
    """What the code around a jaxpr says of its inputs with a wide range, and of its outputs that are precise."""

    wide_range: tuple[bool, ...]
    precise: tuple[bool, ...]


def nothing_around(closed: ClosedJaxpr) -> Around:
    """Nothing is said of a jaxpr."""
    return Around((False,) * len(closed.in_avals), (False,) * len(closed.out_avals))


class SensitivityAnalyses(NamedTuple):
    """The dataflow analyses that are made once for a function."""

    wide_range: Forward[bool]
    precise: Backward


class Codable:
    """The values of a jaxpr that may be kept in 8 bits.

    Attributes:
      values: The values.
    """

    def __init__(
        self, closed: ClosedJaxpr, origins: Mapping[Var, Origin], around: Around, analyses: SensitivityAnalyses
    ):
        self._analyses = analyses
        self._wide_range = analyses.wide_range(closed, around.wide_range)
        self._precise = analyses.precise(closed, around.precise)
        self._producers = {v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}
        is_coded = lambda v, x: x.activation and x.perturbed and not self._wide_range[v] and v not in self._precise
        self.values = {v for v, origin in origins.items() if is_coded(v, origin) and fits_8_bits(v.aval)}

    def of_segment(self, values: Iterable[Var], inputs: Sequence[Var]) -> frozenset[Var]:
        """The values of a segment, and its inputs, that are kept in 8 bits for it, if they are kept."""
        return frozenset(self.values.intersection((*values, *inputs)) - self._with_statistics(inputs))

    def into(self, eqn: JaxprEqn) -> list[Around]:
        """What is said to each body of a construct."""
        exact = dict.fromkeys(self._with_statistics(eqn.invars), True)  # so that the body keeps them as they are, too
        inputs = self._analyses.wide_range.into(eqn, self._wide_range | exact)
        outputs = self._analyses.precise.into(eqn, self._precise)
        return [Around(tuple(x), tuple(y)) for x, y in zip(inputs, outputs, strict=True)]

    def _with_statistics(self, atoms: Sequence[Any]) -> set[Var]:
        """The inputs of a segment, or a construct, of which it also reads an exact statistic, such as a mean."""
        inputs = {v for v in atoms if not ir.is_literal(v)}
        found, seen = set[Var](), set[Var]()
        stack = [v for v in inputs if is_floating(v.aval) and v not in self.values]
        while stack:
            v = stack.pop()
            if v in seen or v not in self._producers:
                continue
            seen.add(v)
            if is_cheap(self._producers[v]):
                reads: list[Any] = [x for x in self._producers[v].invars if not ir.is_literal(x)]
                found.update(x for x in reads if x in self.values and x in inputs)
                stack.extend(reads)
        return found


def wide_range() -> Forward[bool]:
    """The analysis of which values may differ by orders of magnitude: exponentials, or -1e9 where a mask is.

    In a block, the other numbers would have no digits left. Cumulative sums and the factors of a matrix are among
    them: of the first, later code often takes small differences, and the others must fit each other.
    """
    return Forward(_has_wide_range, operator.or_, _is_very_large, constructs.has_own_rule)


def _has_wide_range(eqn: JaxprEqn, operands: Sequence[bool]) -> bool:
    if any(operands):
        return all(ir.name(e) in ELEMENTWISE | WIDE_RANGE for e in walk.through_calls(eqn))
    return ir.name(eqn) in WIDE_RANGE


def _is_very_large(value: Any) -> bool:
    is_known = not isinstance(value, jax.core.Tracer) and getattr(value, "is_fully_addressable", True)
    is_number = is_known and not np.ndim(value) and (isinstance(value, float) or is_floating(value))
    # By NumPy, because a function of JAX would be traced here.
    return bool(is_number and abs(float(np.asarray(value))) > _VERY_LARGE)


def precise() -> Backward:
    """The analysis of which values must be kept as they are: arguments of exponentials, roots, divisors and maxima.

    They reach one by operations on single elements. A sum over the last axis, as in a norm, averages their errors. A
    sum over others, as in a batch norm, does not: a block may hold a small channel beside a large one. The scales
    of 8-bit products are no reason: the backward pass finds them again, from the decoded operand.
    """
    return Backward(_asks_for_precision)


def _asks_for_precision(eqn: JaxprEqn, results: list[bool]) -> bool | list[bool]:
    name = ir.name(eqn)
    if in_scope(eqn, QUANTIZE):
        return False
    if name in AMPLIFYING or (name == "integer_pow" and ir.exponent(eqn) < 0):
        return True
    if name == "div":
        return [any(results), True]
    if name == "reduce_sum":
        (operand,) = ir.avals(eqn.invars)
        is_over_blocks = operand.ndim - 1 in ir.params(eqn)["axes"] and operand.shape[-1] >= BLOCK
        return any(results) and not is_over_blocks
    return any(results) and name in ELEMENTWISE
