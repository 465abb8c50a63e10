"""Which equations are straight-line code, and where it is cut into segments: where the fewest bytes cross the cut.

A segment has about as many products as a layer. The end of a function, its last product and what follows, is apart.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jamp._cast import is_complex, is_inexact
from jamp._jaxprs import constructs, ir, walk
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn, Var
from jamp._jaxprs.manual_axes import is_partial
from jamp._jaxprs.primitives import CHEAP, CUBIC, EXPENSIVE, MOVING, PRODUCTS
from jamp._jaxprs.walk import holds_product, is_product
from jamp._products.product import name_of
from jamp._recompute.kept import Origin, is_cheap, nbytes, values_to_keep

_LARGE = 1024  # elements: a segment without an array of this size is not worth computing again
PRODUCTS_OF_A_SEGMENT = 6  # more or less: a layer
_MOST = 1.5  # a segment has at most so many times that number, and at least half as many
_SMALL = 0.1  # of the bytes that cross a cut: the most that may be kept in the end of a function, and is never dropped
_LEAST_CUT = 4  # Code that computes fewer times the bytes that cross a cut is not cut.


def may_be_in_segment(eqn: JaxprEqn) -> bool:
    """Whether an equation may be in a segment: not a construct, without effects, and not a `checkpoint_name`."""
    operations = list(walk.through_calls(eqn, _inlinable_body))
    # JAX keeps no partial sum between the passes unless the axes are explicit. Its checkpoint rounds the values that it
    # keeps, and cannot round complex ones.
    avals = ir.avals([v for e in (eqn, *operations) for v in (*e.invars, *e.outvars)])
    return not any(is_partial(x) or is_complex(x) for x in avals) and all(map(_may_operation, operations))


def _inlinable_body(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The body of a call that may be in a segment."""
    # A derivative rule that multiplies would do so again in the backward pass.
    is_call = ir.name(eqn) == "jit" or (ir.name(eqn) == "custom_jvp_call" and not holds_product(eqn))
    return constructs.body_of_call(eqn) if is_call else None


def _may_operation(eqn: JaxprEqn) -> bool:
    # The backward pass would compute again what the derivative reads of these, also if their results are kept.
    if eqn.effects or ir.name(eqn) in CUBIC.keys() | {"name", "sort", "jit", "custom_jvp_call"}:
        return False
    if ir.name(eqn) == "custom_vjp_call":  # An identity, such as a clip of cotangents, has nothing to compute again.
        body = constructs.body_of_call(eqn)
        return body is not None and not body.jaxpr.eqns
    return name_of(eqn) in CHEAP | EXPENSIVE | PRODUCTS or not constructs.has_body(eqn)


def with_refs(eqns: Sequence[JaxprEqn]) -> range:
    """The equations from the first one that makes a Ref to the last one that uses a Ref. They stay together."""
    makes = [i for i, eqn in enumerate(eqns) if any(map(ir.is_ref, eqn.outvars))]
    uses = [i for i, eqn in enumerate(eqns) if any(map(ir.is_ref, eqn.invars))]
    return range(makes[0], max([*makes, *uses]) + 1) if makes else range(0)


def convolves(eqns: Sequence[JaxprEqn]) -> bool:
    """Whether more than half of the products of some equations are convolutions."""
    names = [name for eqn in eqns if (name := name_of(eqn)) in PRODUCTS]
    return names.count("conv_general_dilated") > len(names) / 2


def frees_memory(eqn: JaxprEqn) -> bool:
    """Whether an equation computes a large array that may be computed again. A symbolic size is large."""
    sizes = [aval.size for aval in ir.avals(eqn.outvars) if is_inexact(aval)]
    is_large = any(not isinstance(size, int) or size >= _LARGE for size in sizes)
    return is_large and ir.name(eqn) not in MOVING and is_cheap(eqn)


def end(eqns: Sequence[JaxprEqn], last_uses: dict[Any, int], origins: Mapping[Var, Origin]) -> int:
    """Where the end of a function begins: at its last product, or before, where fewer bytes cross.

    The values that are kept in between are small, because no budget drops them: a random key, or the mean of a norm.
    """
    products = [i for i, eqn in enumerate(eqns) if holds_product(eqn)]
    if not products or not may_be_in_segment(eqns[products[-1]]):
        return products[-1] + 1 if products else len(eqns)
    last, start = products[-1], products[-2] + 1 if len(products) > 1 else 0
    inputs = reads(eqns[start:last])
    held = values_to_keep(eqns[start:last], inputs, origins, frozenset())
    crossing = _crossing(eqns, range(len(eqns)), last_uses)
    between = [sum(nbytes(v) for v in eqn.outvars if v in held) for eqn in eqns[start:last]]
    sizes = itertools.accumulate(reversed(between))  # kept from each equation on, the last one first
    start = last - sum(1 for _ in itertools.takewhile(lambda size: size <= _SMALL * crossing[last], sizes))
    return min(range(start, last + 1), key=crossing.__getitem__)


def reads(eqns: Sequence[JaxprEqn]) -> tuple[Var, ...]:
    """The variables that some equations read and do not compute."""
    defined = {v for eqn in eqns for v in eqn.outvars}
    reads: list[Any] = [v for eqn in eqns for v in eqn.invars]
    return tuple(dict.fromkeys(v for v in reads if not ir.is_literal(v) and v not in defined))


def _crossing(eqns: Sequence[JaxprEqn], whole: range, last_uses: dict[Any, int]) -> list[float]:
    """For each equation, the bytes that cross a cut in front of it."""
    change = [0.0] * (whole.stop + 2)
    for i in whole:
        for v in eqns[i].outvars:
            change[i + 1] += nbytes(v)
            change[max(i, min(last_uses.get(v, -1), whole.stop)) + 1] -= nbytes(v)
    return list(itertools.accumulate(change))


def cut(eqns: Sequence[JaxprEqn], whole: range, last_uses: dict[Any, int], products: int) -> list[range]:
    """Cut straight-line code into segments of some products each, where the fewest bytes cross the cut.

    A whole construct counts as the products that it runs, from one, for a kernel, to as many as a layer has.
    """
    layers = lambda eqn: min(max(1, _runs(eqn)), PRODUCTS_OF_A_SEGMENT) if _is_whole(eqn) else holds_product(eqn)
    counts = itertools.accumulate((layers(eqns[i]) for i in whole), initial=0)
    before = dict(zip([*whole, whole.stop], counts, strict=True))  # the number of products before each equation
    least, most = products / 2 * _MOST, _MOST * products
    if before[whole.stop] <= most:
        return [whole]
    crossing = _crossing(eqns, whole, last_uses)
    found, start = [], whole.start
    while before[whole.stop] - before[start] > most:
        ends = [j for j in range(start + 1, whole.stop) if least <= before[j] - before[start] <= most]
        if not ends:  # a single call holds more products
            break
        end = min(ends, key=crossing.__getitem__)
        found.append(range(start, end))
        start = end
    return [*found, range(start, whole.stop)]


def cut_by_bytes(eqns: Sequence[JaxprEqn], whole: range, last_uses: dict[Any, int], products: int) -> list[range]:
    """Cut straight-line code without products, where the fewest bytes cross the cut.

    Of code that computes 40 times the bytes that cross a cut, six segments (the square root) keep and compute again
    about as many bytes as each other. With twice the `products`, segments are twice as long.
    """
    sizes = dict(zip(whole, (_computed_bytes(eqns[i]) for i in whole), strict=True))
    crossing = _crossing(eqns, whole, last_uses)
    inner = sorted(crossing[i] for i in whole[1:]) or [0.0]
    computed, typical = sum(sizes.values()), inner[len(inner) // 2]
    least = math.sqrt(computed * typical) * products / PRODUCTS_OF_A_SEGMENT
    if typical * _LEAST_CUT > computed:
        return [whole]
    found, start, size = [], whole.start, 0.0
    for i in whole:
        size += sizes[i]
        if size < least or i + 1 == whole.stop:
            continue
        near = range(max(start, i - (i - start) // 4), i + 1)  # a quarter shorter at most
        end = min(reversed(near), key=lambda j: crossing[j + 1]) + 1
        found.append(range(start, end))
        start, size = end, sum(sizes[j] for j in range(end, i + 1))
    return [*found, range(start, whole.stop)]


def _computed_bytes(eqn: JaxprEqn) -> float:
    """The bytes of the floating-point values that an equation computes."""
    return 0.0 if ir.name(eqn) in MOVING else sum((nbytes(v) for v in eqn.outvars if is_inexact(v.aval)), 0.0)


def _is_whole(eqn: JaxprEqn) -> bool:
    """Whether an equation of a segment is a whole construct, which is computed again."""
    return constructs.has_body(eqn) and not is_cheap(eqn)


def _runs(eqn: JaxprEqn) -> int:
    """How many products an equation runs."""
    return sum(times for e, times in walk.innermost(eqn, is_product) if is_product(e))
