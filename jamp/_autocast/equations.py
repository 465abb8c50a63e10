"""List the planned equations of a function: where each comes from, how often it runs, what it reads, and its FLOPs."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from jamp import _jaxpr
from jamp._autocast.plan import ENTERED, PlannedJaxpr
from jamp._autocast.program import PlannedEqn
from jamp._autocast.rules import MOVES_DATA, RULES
from jamp._jaxpr import Jaxpr, JaxprEqn
from jamp._source_line import REARRANGES, scope, user_line


def all_equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Every equation of a jaxpr and of those in it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner, _ in _jaxpr.inner(eqn):
            yield from all_equations(inner)


@dataclasses.dataclass(frozen=True)
class Found:
    """A planned equation that is not entered, how often it runs, where it comes from, and what parameters it reads."""

    planned: PlannedEqn
    times: int
    source: str
    scope: str
    parameters: list[str]


def flat_equations(
    body: PlannedJaxpr, parameters: dict[Any, str], times: int = 1, source: str = "", caller: str = ""
) -> Iterator[Found]:
    """Every planned equation that is not a construct. The other arguments are about the construct around the body."""
    parameters = dict(parameters)
    for planned_eqn in body.program().eqns:
        eqn = planned_eqn.eqn
        line, place = user_line(eqn) or source, scope(eqn, caller)
        reads = [None if _jaxpr.is_literal(v) else parameters.get(v) for v in eqn.invars]
        if planned_eqn.category == ENTERED:
            carry = _jaxpr.carry(eqn)
            for inner, operands in zip(planned_eqn.bodies, _jaxpr.body_operands(eqn), strict=True):
                given = zip(inner.closed.jaxpr.invars, operands, strict=True)
                known = {v: path for v, i in given if i not in carry and (path := reads[i])}
                yield from flat_equations(inner, known, times * _jaxpr.iterations(eqn), line, place)
        else:
            yield Found(planned_eqn, times, line, place, [path for path in reads if path])
            if eqn.primitive.name in REARRANGES and reads[0]:
                parameters.update(dict.fromkeys(eqn.outvars, reads[0]))


def flops(eqn: JaxprEqn) -> float:
    """Two for each multiply-add of a product, one for each element of any other arithmetic. A symbolic size is 1."""
    known = lambda sizes: math.prod(n for n in sizes if isinstance(n, int))
    sizes = [known(getattr(v.aval, "shape", ())) for v in (*eqn.invars, *eqn.outvars)]
    name = eqn.primitive.name
    if name in _jaxpr.PRODUCTS:
        return 2.0 * sizes[-1] * known([_jaxpr.summed_terms(eqn)])
    if name in RULES:
        return float(max(sizes)) if RULES[name][1] != MOVES_DATA else 0.0
    return float(sum(times * flops(e) for inner, times in _jaxpr.inner(eqn) for e in inner.eqns))
