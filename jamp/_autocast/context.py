"""The surroundings of a jaxpr: facts about its inputs, its outputs and its place."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jamp import _jaxpr
from jamp._jaxpr import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jamp._primitives import MOVING

# Name scopes, which an operation keeps through every transformation: of a function marked by the user, of everything in
# an autocast function, and of a call that `recompute` made.
FULL_PRECISION, AUTOCAST, SEGMENT = "jamp.full_precision", "jamp.autocast", "jamp.segment"
# The categories of equations that no rule decides.
ENTERED, NOT_ENTERED, REGION, NO_RULE = "entered", "not entered", "full_precision", "no rule"
_PASSED_ON = MOVING | {"add", "add_any", "psum", "psum_invariant", "reduce_scatter", "reduce_sum"}


class Input(NamedTuple):
    """An input of a jaxpr.

    Attributes:
      low: Whether it is stored in 16 bit.
      constant: The number that it is filled with, if known.
      weight: Whether it is an argument of the function, perhaps moved, and not computed.
    """

    low: bool = False
    constant: Any = None
    weight: bool = False


class Place(NamedTuple):
    """The surroundings of a jaxpr.

    Attributes:
      manual: Whether it is in a shard_map.
      inside: The shard_map, if it is in the traced function and not around it.
      scope: Its name stack, if a rule is for part of one.
      backward: Whether it is part of a backward pass.
    """

    manual: bool = False
    inside: JaxprEqn | None = None
    scope: str = ""
    backward: bool = False


def consumed(jaxpr: Jaxpr, returned: Sequence[bool]) -> set[Var]:
    """The values with a reader other than the moves and sums that lead to the returned outputs."""
    found: set[Any] = {v for v, x in zip(jaxpr.outvars, returned, strict=True) if not x and not _jaxpr.is_literal(v)}
    for eqn in reversed(jaxpr.eqns):
        reads = list[Any](eqn.invars)
        if _jaxpr.name(eqn) in _PASSED_ON and not any(v in found for v in eqn.outvars):
            continue
        if body := _jaxpr.inlinable(eqn):
            inner = consumed(body.jaxpr, [v not in found for v in eqn.outvars])
            reads = [v for v, x in zip(eqn.invars, body.jaxpr.invars, strict=True) if x in inner]
        found.update(v for v in reads if not _jaxpr.is_literal(v))
    return found


def returned_by(eqn: JaxprEqn, bodies: Sequence[ClosedJaxpr], consumed_later: set[Var]) -> list[bool]:
    """Which results of a construct's bodies are returned. Of its own results, all but those in `consumed_later` are."""
    found = [v not in consumed_later for v in eqn.outvars]
    carry, operands = _jaxpr.carry(eqn), _jaxpr.body_operands(eqn)[-1]
    for _ in carry:  # A value may take a step of the loop from each element of the carry to the next.
        read = consumed(bodies[-1].jaxpr, found)
        inputs = [bodies[-1].jaxpr.invars[operands.index(i)] for i in carry]
        new = [x and v not in read for x, v in zip(found, inputs, strict=False)] + found[len(carry) :]
        if new == found:
            break
        found = new
    return found
