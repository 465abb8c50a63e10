"""Recompute: keep fewer values for the backward pass, and compute the others again.

`recompute` maps a jaxpr to one that computes the same. A segment becomes a `jax.checkpoint` whose policy keeps the
values that `kept.py` chooses and that `plan.py` does not drop. They have a name.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from jamp._jaxprs import build, inline, ir
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn, Var
from jamp._jaxprs.manual_axes import trace_inside
from jamp._recompute.budget import MemoryBudget
from jamp._recompute.choose import choose
from jamp._recompute.derivative_rules import CodedRule, coded_rule
from jamp._recompute.opened import CODED_RULE, opened, without_calls
from jamp._recompute.policies import check_version
from jamp._recompute.segment_call import as_call
from jamp._recompute.segments import Chosen, Part, Place, Segment, Split, SplitConstruct, SplitJaxpr
from jamp._recompute.shared_codes import SharedCodes
from jamp._recompute.stored import round_stored, with_rounded_inputs, with_rounding
from jamp._recompute.stores import Store, Stores
from jamp._rounded import may_be_wider


def recompute(closed: ClosedJaxpr, budget: MemoryBudget, residuals: Store = Store.ITSELF) -> ClosedJaxpr:
    """The same function, whose backward pass computes values again, and keeps large ones as `residuals` says.

    Within a budget of 1.0 these are the results of cheap operations. No product, random number or collective is
    computed twice. The outermost budget decides, also about the segments that another one made in the function.
    """
    check_version(budget)
    closed = round_stored(opened(closed))
    flat = without_calls(closed)
    if budget != 1.0 or residuals is not Store.ITSELF:
        plan, _ = choose(flat, budget, residuals)
        if budget != 1.0 or plan.is_coded:
            return _Checkpointer(plan.chosen, drops=True).run(plan.body, ())
    body = Split().function(flat)
    kept = body.kept()
    if not kept:  # The user's jit calls stay.
        body = Split().function(closed)
    return _Checkpointer(kept, drops=False).run(body, ())


class _Checkpointer:
    """Rewrites a body. A segment is a call that keeps what is `chosen` for it. If nothing is, it is as it was.

    `drops` says whether a budget may have dropped values.
    """

    def __init__(self, chosen: Chosen, drops: bool):
        self._chosen, self._drops = chosen, drops
        self._bodies: dict[Any, tuple[SplitJaxpr, ClosedJaxpr]] = {}
        self._segments: dict[Any, ClosedJaxpr] = {}

    def run(self, body: SplitJaxpr, place: Place) -> ClosedJaxpr:
        inside = {at[len(place) :]: x for at, x in self._chosen.items() if at[: len(place)] == place}
        key = id(body), frozenset(inside.items())  # so equal choices for a body that runs twice make one
        if key in self._bodies:
            return self._bodies[key][1]
        jaxpr = body.closed.jaxpr
        stored = self._read_by_both_passes(body, inside, is_function=not place)
        inputs = [] if place else [*jaxpr.constvars, *jaxpr.invars]
        unrounded = {v: core.Var(v.aval) for v in inputs if v in stored and may_be_wider(v.aval)}
        eqns: list[JaxprEqn] = []
        codes = SharedCodes(body, inside)
        eqns.extend(codes.encode([*jaxpr.constvars, *jaxpr.invars]))
        for i, part in enumerate(body.parts):
            if isinstance(part, Segment):
                eqns.extend(self._segment(part, inside.get((i,)), stored, unrounded, codes))
            elif isinstance(part, SplitConstruct):
                new = [self.run(inner, (*place, i, j)) for j, inner in enumerate(part.bodies)]
                eqns.append(build.with_bodies(part.eqn, new, part.eqn.invars, part.eqn.outvars))
            elif isinstance(part, CodedRule):
                eqns.extend(with_rounding(self._rule(part, codes), stored))
            else:
                eqns.extend(with_rounding([part], stored))
            eqns.extend(codes.encode(_results(part)))
        constants = dict(zip(jaxpr.constvars, body.closed.consts, strict=True))
        new_body = with_rounded_inputs(unrounded, constants, jaxpr.invars, jaxpr.outvars, eqns)
        self._bodies[key] = body, new_body  # With the body, so that no other one gets its id.
        return new_body

    def _read_by_both_passes(self, body: SplitJaxpr, chosen: Chosen, is_function: bool) -> set[Any]:
        """The values that are stored between the passes: the inputs of calls of segments, in this body or others.

        XLA may round a value for its readers in the backward pass alone. So all its readers get it rounded, and the
        results of a loop's body are rounded, too.
        """
        found: set[Any] = set() if is_function else {v for v in body.closed.jaxpr.outvars if not ir.is_literal(v)}
        for i, part in enumerate(body.parts):
            if isinstance(part, SplitConstruct):
                found.update(v for v in part.eqn.invars if not ir.is_literal(v))
            elif isinstance(part, Segment) and (i,) in chosen:
                found.update(part.inputs)
        return found

    def _segment(
        self, segment: Segment, stores: Stores | None, stored: set[Any], unrounded: dict[Var, Var], codes: SharedCodes
    ) -> list[JaxprEqn]:
        """The equations of a segment, as they are or in one call.

        A call reads the arguments of the function `unrounded`, as they come, and rounds them itself. A rounded argument
        would be another array, such as a copy of each 16-bit weight, which XLA:TPU keeps.
        """
        if stores is None:
            return with_rounding(segment.eqns, stored)
        coded = [segment.inputs[i] for i in sorted(stores.inputs)]
        outputs = codes.encoded_by(segment)
        rounds = () if outputs or stores.is_coded else tuple(i for i, v in enumerate(segment.inputs) if v in unrounded)
        key = segment.key(sources=True), stores, tuple(outputs), rounds
        if key not in self._segments:  # Equal layers share a segment, which is differentiated once.
            call = as_call(segment, stores, outputs, rounds, self._drops)
            types = ir.avals([*segment.inputs, *codes.of(coded)])
            self._segments[key] = trace_inside(segment.context.shard_map, call, types)
        reads = [unrounded[v] if i in rounds else v for i, v in enumerate(segment.inputs)]
        writes = [*segment.outputs, *codes.define([segment.outputs[i] for i in outputs])]
        return inline.inline(self._segments[key], [*reads, *codes.of(coded)], writes)

    def _rule(self, part: CodedRule, codes: SharedCodes) -> list[JaxprEqn]:
        eqn = part.eqn
        reads = [*eqn.invars, *codes.of([eqn.invars[i] for i in part.operands])]
        writes = [*eqn.outvars, *codes.define([eqn.outvars[j] for j in part.results])]
        call = jax.named_scope(CODED_RULE)(coded_rule(part))
        closed = trace_inside(part.context.shard_map, call, ir.avals(reads))
        return [build.located(x, eqn) for x in inline.inline(closed, reads, writes)]


def _results(part: Part) -> Sequence[Any]:
    if isinstance(part, Segment):
        return part.outputs
    return part.eqn.outvars if isinstance(part, (SplitConstruct, CodedRule)) else part.outvars
