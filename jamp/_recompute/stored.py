"""Round the 16-bit values that both passes read, once, at their producers.

    scores = q @ k.T              bf16[t, t], which XLA may compute and hand on in float32
    loss = rule(scores)           the forward rule takes their largest element and their sum; the residual is in 16 bit
    its backward pass             computes the exponentials again, from the residual

Without rounding, the sum is of other scores than the exponentials, and the rows of that softmax do not sum to 1. So the
product is followed by a `rounded`, and every reader of the scores gets what is stored. These round:

    round_stored          what derivative rules and the user's checkpoints read, here, with or without a budget
    checkpoint.py         what segments and loops hand on, in each body
    segment_call.py       arguments that a segment reads, in it; what it keeps; results of products and casts in it
    _products/lower.py    the results of products of autocast
"""

import functools
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jamp._jaxprs import build, constructs, dataflow, ir
from jamp._jaxprs.constructs import Derivative
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn, Var
from jamp._jaxprs.primitives import MOVING
from jamp._jaxprs.rewrite import Body, Rewriter
from jamp._products.product import of
from jamp._rounded import may_be_wider, rounded


def round_stored(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a function in which derivative rules and the user's checkpoints read 16-bit values as they are stored."""
    analysis = dataflow.Backward(_is_stored, is_whole=constructs.reads_again)
    nothing = [False] * len(closed.out_avals)
    inputs = [*closed.jaxpr.constvars, *closed.jaxpr.invars]
    stored = analysis(closed, nothing)
    unrounded = {v: core.Var(v.aval) for v in inputs if v in stored and may_be_wider(v.aval)}
    found = Rewriter(_rule, enters=constructs.differentiates_bodies, analysis=analysis)(closed, given=nothing)
    if not unrounded:
        return found
    constants = dict(zip(found.jaxpr.constvars, found.consts, strict=True))
    return with_rounded_inputs(unrounded, constants, found.jaxpr.invars, found.jaxpr.outvars, found.jaxpr.eqns)


def with_rounded_inputs(
    unrounded: Mapping[Var, Var],
    constants: Mapping[Var, Any],
    inputs: Sequence[Var],
    outputs: Sequence[Any],
    eqns: Sequence[JaxprEqn],
) -> ClosedJaxpr:
    """A jaxpr that rounds some inputs for its equations. `unrounded` has the variables of these, as they come."""
    read: set[Any] = {v for v in (*outputs, *(v for eqn in eqns for v in eqn.invars)) if not ir.is_literal(v)}
    first = [rounding(source, v) for v, source in unrounded.items() if v in read]
    given = lambda v: unrounded.get(v, v)
    return build.closed_jaxpr(
        {given(v): x for v, x in constants.items()}, list(map(given, inputs)), outputs, [*first, *eqns]
    )


def _is_stored(eqn: JaxprEqn, results: list[bool]) -> bool:
    """Whether the operands of an equation are stored, given which of its results are."""
    return constructs.reads_again(eqn) or (any(results) and ir.name(eqn) in MOVING)


def _rule(eqn: JaxprEqn, body: Body) -> list[JaxprEqn] | None:
    if constructs.differentiates_bodies(eqn):
        return None
    # The residuals of a rule may be its results.
    is_rule = constructs.reads_again(eqn) and constructs.derivative(eqn) is Derivative.BY_RULE
    new = with_rounding([eqn], body.facts.union(eqn.outvars) if is_rule else body.facts)
    return new if len(new) > 1 else None


def with_rounding(eqns: Iterable[JaxprEqn], stored: Set[Var]) -> list[JaxprEqn]:
    """Equations in which every reader of a 16-bit value that is `stored` gets it as it is stored.

    `lower` rounds the results of autocast's products.
    """
    found: list[JaxprEqn] = []
    for eqn in eqns:
        if ((product := of(eqn)) and product.format is not None) or eqn.primitive is rounded:
            found.append(eqn)
            continue
        places = {i: core.Var(v.aval) for i, v in enumerate(eqn.outvars) if v in stored and may_be_wider(v.aval)}
        found.append(eqn.replace(outvars=[places.get(i, v) for i, v in enumerate(eqn.outvars)]) if places else eqn)
        found.extend(build.located(rounding(v, eqn.outvars[i]), eqn) for i, v in places.items())
    return found


def rounding(source: Var, target: Var) -> JaxprEqn:
    """The equation that rounds a value to its dtype."""
    return _rounding_equation().replace(invars=[source], outvars=[target])


@functools.cache
def _rounding_equation() -> Any:
    return jax.make_jaxpr(rounded.bind)(np.float32(0)).eqns[0]
