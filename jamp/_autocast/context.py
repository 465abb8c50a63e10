"""The surroundings of a jaxpr: facts about its inputs, its outputs and its place."""

from typing import Any, NamedTuple

from jamp import _jaxpr
from jamp._cast import is_float32
from jamp._dataflow import Flags
from jamp._jaxpr import JaxprEqn
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
      large: Whether it is a constant with elements beyond the range of the compute dtype.
    """

    low: bool = False
    constant: Any = None
    weight: bool = False
    large: bool = False


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


def computes(eqn: JaxprEqn, operands: Flags) -> bool:
    """Whether the results of an equation are computed, and not an argument of the function or a constant that is moved.

    A rule for `_dataflow.Forward`. An argument that a product reads is a weight.
    """
    floats = [is_float32(aval) and x for aval, x in zip(_jaxpr.avals(eqn.invars), operands, strict=True)]
    return any(floats) or _jaxpr.name(eqn) not in MOVING


def consumes(eqn: JaxprEqn, results: Flags) -> bool:
    """Whether the operands of an equation are *consumed*: read by other than moves and sums that lead to a result.

    A rule for `_dataflow.Backward`. The gradient of a weight that nothing consumes is kept in float32.
    """
    return any(results) or _jaxpr.name(eqn) not in _PASSED_ON
