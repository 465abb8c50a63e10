"""Recompute: keep fewer values for the backward pass, and compute the others again.

`recompute` maps a jaxpr to one that computes the same. A segment becomes a `jax.checkpoint` whose policy keeps the
values that `kept.py` chooses and that `budget.py` does not drop. They have a name.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core

from jamp._cast import is_inexact
from jamp._compiler_hints import cotangents_behind_barrier, unless_tpu
from jamp._jaxprs import build, inline, interpret, ir
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn, Var
from jamp._jaxprs.manual_axes import trace_inside
from jamp._recompute.budget import Chosen, MemoryBudget, Place, choose
from jamp._recompute.coded import coded_segment
from jamp._recompute.derivative_rules import coded_rule
from jamp._recompute.policies import check_version
from jamp._recompute.residuals import stopped
from jamp._recompute.segments import (
    CODED_RULE,
    KEPT,
    SEGMENT,
    CodedRule,
    FlatSegment,
    Part,
    Segment,
    Split,
    SplitConstruct,
    SplitJaxpr,
    computed_twice,
    flatten_segment,
    opened,
    with_names,
)
from jamp._recompute.stored import round_stored, rounding, with_rounding
from jamp._recompute.stores import Store, Stores
from jamp._rounded import may_be_wider, rounded


def recompute(closed: ClosedJaxpr, budget: MemoryBudget | None, residuals: Store = Store.ITSELF) -> ClosedJaxpr:
    """The same function, whose backward pass computes values again, and keeps large ones as `residuals` says.

    Within a budget of 1.0 these are the results of cheap operations. No product, random number or collective is
    computed twice. Without a budget, nothing is computed again. The outermost budget decides, also about the segments
    that another one made in the function.
    """
    if budget is None:
        return round_stored(closed)
    check_version(budget)
    closed = round_stored(opened(closed))
    if budget == 1.0 and residuals is Store.ITSELF:
        return _Checkpointer({}).run(Split().function(closed), ())
    plan = choose(closed, budget, residuals)
    if budget == 1.0 and not plan.is_coded:
        return _Checkpointer({}).run(plan.body, ())
    return _Checkpointer(plan.chosen).run(plan.body, ())


class _Checkpointer:
    """Rewrites a body. A segment keeps the values that are `chosen` for it, else the choice of `kept.py`."""

    def __init__(self, chosen: Chosen):
        self._chosen = chosen
        self._bodies: dict[Any, tuple[SplitJaxpr, ClosedJaxpr]] = {}
        self._segments: dict[Any, ClosedJaxpr] = {}

    def run(self, body: SplitJaxpr, place: Place) -> ClosedJaxpr:
        inside = {at[len(place) :]: x for at, x in self._chosen.items() if at[: len(place)] == place}
        key = id(body), frozenset(inside.items())  # so equal choices for a body that runs twice make one
        if key in self._bodies:
            return self._bodies[key][1]
        jaxpr = body.closed.jaxpr
        stored = self._stored(body, inside, is_function=not place)
        given = {v: core.Var(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars) if not place and v in stored}
        given = {v: x for v, x in given.items() if may_be_wider(v.aval)}
        eqns: list[JaxprEqn] = []
        codes = _Codes(body, inside)
        eqns.extend(codes.of([*jaxpr.constvars, *jaxpr.invars]))
        for i, part in enumerate(body.parts):
            if isinstance(part, Segment):
                eqns.extend(self._segment(part, inside.get((i,)), stored, given, codes))
            elif isinstance(part, SplitConstruct):
                new = [self.run(inner, (*place, i, j)) for j, inner in enumerate(part.bodies)]
                eqns.append(build.with_bodies(part.eqn, new, part.eqn.invars, part.eqn.outvars))
            elif isinstance(part, CodedRule):
                eqns.extend(with_rounding(self._rule(part, codes), stored))
            else:
                eqns.extend(with_rounding([part], stored))
            eqns.extend(codes.of(_results(part)))
        read = {v for eqn in eqns for v in eqn.invars if not ir.is_literal(v)}.union(
            v for v in jaxpr.outvars if not ir.is_literal(v)
        )
        eqns = [*(rounding(source, v) for v, source in given.items() if v in read), *eqns]
        constants = {given.get(v, v): x for v, x in zip(jaxpr.constvars, body.closed.consts, strict=True)}
        inputs = [given.get(v, v) for v in jaxpr.invars]
        new_body = build.closed_jaxpr(constants, inputs, jaxpr.outvars, eqns)
        self._bodies[key] = body, new_body  # With the body, so that no other one gets its id.
        return new_body

    def _stored(self, body: SplitJaxpr, chosen: Chosen, is_function: bool) -> set[Any]:
        """The values that are stored between the passes: the inputs of calls of segments, in this body or others.

        XLA may round a value for its readers in the backward pass alone. So all its readers get it rounded, and the
        results of a loop's body are rounded, too.
        """
        found: set[Any] = set() if is_function else {v for v in body.closed.jaxpr.outvars if not ir.is_literal(v)}
        for i, part in enumerate(body.parts):
            if isinstance(part, SplitConstruct):
                found.update(v for v in part.eqn.invars if not ir.is_literal(v))
            elif isinstance(part, Segment) and _is_call(part, chosen.get((i,))):
                found.update(part.inputs)
        return found

    def _segment(
        self, segment: Segment, chosen: Stores | None, stored: set[Any], given: dict[Var, Var], codes: "_Codes"
    ) -> list[JaxprEqn]:
        """The equations of a segment, as they are or in one call.

        A call reads the arguments of the function, which are `given` as they come, and rounds them itself. A rounded
        argument would be another array, such as a copy of each 16-bit weight, which XLA:TPU keeps.
        """
        if not _is_call(segment, chosen):
            return with_rounding(segment.eqns, stored)
        inputs = _coded_inputs(segment, chosen)
        outputs = codes.made_by(segment)
        is_coded = bool(inputs or outputs) or Store.INT8 in dict(chosen or ()).values()
        unrounded = () if is_coded else tuple(i for i, v in enumerate(segment.inputs) if v in given)
        key = segment.key(sources=True), chosen, tuple(outputs), unrounded
        if key not in self._segments:  # Equal layers share a segment, which is differentiated once.
            scoped, flat = jax.named_scope(SEGMENT), flatten_segment(segment)
            if is_coded:
                inner = _in_checkpoint(coded_segment(segment, flat, dict(chosen or ()), inputs, outputs), segment)
            else:
                inner = _checkpointed(segment, flat, chosen, unrounded)
            # The scope is of the call, and of the checkpoint in it.
            call: Callable[..., list[Array]] = scoped(jax.jit(scoped(inner)))
            call = _with_barrier(call, segment, flat, has_barrier=chosen is not None and not segment.context.in_loop)
            types = ir.avals([*segment.inputs, *codes.read([segment.inputs[i] for i in inputs])])
            self._segments[key] = trace_inside(segment.context.shard_map, call, types)
        reads = [given[v] if i in unrounded else v for i, v in enumerate(segment.inputs)]
        reads += codes.read([segment.inputs[i] for i in inputs])
        writes = [*segment.outputs, *codes.write([segment.outputs[i] for i in outputs])]
        return inline.inline(self._segments[key], reads, writes)

    def _rule(self, part: CodedRule, codes: "_Codes") -> list[JaxprEqn]:
        eqn = part.eqn
        reads = [*eqn.invars, *codes.read([eqn.invars[i] for i in part.operands])]
        writes = [*eqn.outvars, *codes.write([eqn.outvars[j] for j in part.results])]
        call = coded_rule(eqn, part.rule, part.operands, part.results, part.context.in_loop)
        closed = trace_inside(part.context.shard_map, jax.named_scope(CODED_RULE)(call), ir.avals(reads))
        return [build.located(x, eqn) for x in inline.inline(closed, reads, writes)]


class _Codes:
    """The codes of the values that parts of a body read in 8 bits. Each value is encoded once, where it is computed."""

    def __init__(self, body: SplitJaxpr, chosen: Chosen):
        self._wanted, self._codes = set[Any](), dict[Any, list[Var]]()
        self._inside = body.context.shard_map
        for i, part in enumerate(body.parts):
            if isinstance(part, Segment):
                self._wanted.update(part.inputs[j] for j in _coded_inputs(part, chosen.get((i,))))
            elif isinstance(part, CodedRule):
                self._wanted.update(part.coded)

    def made_by(self, segment: Segment) -> list[int]:
        """Which outputs a segment encodes itself: those that other parts read in 8 bits."""
        first = {v: i for i, v in reversed(list(enumerate(segment.outputs)))}
        return [i for v, i in sorted(first.items(), key=lambda x: x[1]) if v in self._wanted]

    def read(self, values: Sequence[Any]) -> list[Var]:
        """The variables of the codes of some values."""
        return [x for v in values for x in self._codes[v]]

    def write(self, values: Sequence[Any]) -> list[Var]:
        """New variables for the codes of some values."""
        for v in values:
            self._codes[v] = list(map(core.Var, self._encoded(v).out_avals))
        return self.read(values)

    def of(self, values: Sequence[Any]) -> list[JaxprEqn]:
        """The equations that encode some values, if they are read in 8 bits and have no codes yet."""
        found = [v for v in dict.fromkeys(values) if v in self._wanted and v not in self._codes]
        return [eqn for v in found for eqn in inline.inline(self._encoded(v), [v], self.write([v]))]

    def _encoded(self, v: Var) -> ClosedJaxpr:
        return trace_inside(self._inside, lambda x: Store.INT8.encode(lax.stop_gradient(x)), [v.aval])


def _results(part: Part) -> Sequence[Any]:
    if isinstance(part, Segment):
        return part.outputs
    return part.eqn.outvars if isinstance(part, (SplitConstruct, CodedRule)) else part.outvars


def _coded_inputs(segment: Segment, chosen: Stores | None) -> list[int]:
    """Which inputs of a segment its backward pass reads in 8 bits."""
    return sorted(-1 - i for i, store in chosen or () if i < 0 and store is Store.INT8)


def _is_call(segment: Segment, chosen: Stores | None) -> bool:
    """Whether a segment becomes a call. Else computing something in it again would free nothing."""
    return chosen is not None or segment.is_worth_it


def _with_barrier(
    call: Callable[..., list[Array]], segment: Segment, flat: FlatSegment, has_barrier: bool
) -> Callable[..., list[Array]]:
    """A segment, perhaps with the cotangents of its inputs behind a barrier.

    Without one, XLA:GPU computes cotangents where they are added to others, later, and the values that were computed
    again stay in memory (for an H200, jaxlib 0.10.2). Inputs whose tangents reach no result get no barrier. The
    barrier, and JAX's next checkpoint, would give them cotangents of zeros, which JAX then sends through operations
    that it cannot transpose.
    """
    behind = [i for i, x in enumerate(segment.perturbed) if has_barrier and x and flat.reaching[i]]
    without = [i for i, v in enumerate(segment.inputs) if is_inexact(v.aval) and not flat.reaching[i]]
    without = without if ir.is_next_checkpoint() else []

    def with_barrier(*args: Array) -> list[Array]:
        given = build.replaced(args, without, [lax.stop_gradient(args[i]) for i in without])
        return call(*build.replaced(given, behind, cotangents_behind_barrier([given[i] for i in behind])))

    return with_barrier if behind or without else call


def _checkpointed(
    piece: Segment, flat: FlatSegment, chosen: Stores | None, unrounded: Sequence[int]
) -> Callable[..., list[Array]]:
    """A segment as a function that keeps some of its values, as they are, for the backward pass.

    It rounds its `unrounded` inputs.
    """
    values = [v for eqn in flat.eqns for v in eqn.outvars]
    kept = flat.kept if chosen is None else {values[i] for i, _ in chosen}
    body = with_names(flat, dict.fromkeys(kept, KEPT), kept | computed_twice(flat))
    reaches = [x or not is_inexact(v.aval) for x, v in zip(flat.reaching, piece.inputs, strict=True)]

    def segment(*args: Array) -> list[Array]:
        # In here, because outside it would be another array, which is kept.
        given = build.replaced(args, unrounded, [rounded.bind(args[i]) for i in unrounded])
        return stopped(interpret.call(body, tuple(stopped(given, reaches))), piece.alive)

    # JAX's next checkpoint would compute in the forward pass what a rule of ours around it linearizes.
    has_own_barrier = piece.convolves and chosen is None and not ir.is_next_checkpoint()
    call = _in_checkpoint(segment, piece, has_own_barrier)
    return _behind_barrier_unless_tpu(call) if has_own_barrier else call


def _in_checkpoint(
    fun: Callable[..., list[Array]], piece: Segment, has_own_barrier: bool = False
) -> Callable[..., list[Array]]:
    policy = jax.checkpoint_policies.save_only_these_names(KEPT)
    # Outside of a loop, XLA would merge the recomputation with the forward pass (CSE).
    call: Callable[..., list[Array]] = jax.checkpoint(
        fun, policy=policy, prevent_cse=not (piece.context.in_loop or has_own_barrier)
    )
    return call


def _behind_barrier_unless_tpu(fun: Callable[..., list[Array]]) -> Callable[..., list[Array]]:
    """A function whose backward pass gets its residuals behind a barrier, except on TPUs.

    For convolutions, XLA:TPU needs 1.4 times the memory with a barrier (ResNet-18, for a v5e, jaxlib 0.10.2).
    """

    @jax.custom_jvp
    def call(*args: Array) -> list[Array]:
        return fun(*args)

    def rule(primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[list[Array], list[Any]]:
        perturbed = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero) and is_inexact(primals[i])]
        of_perturbed = lambda *xs: fun(*build.replaced(primals, perturbed, xs))
        results, push_forward = jax.linearize(of_perturbed, *(primals[i] for i in perturbed))
        values, structure = jax.tree.flatten(push_forward)
        # Inputs are in memory anyway. Behind the barrier they would be other arrays, which are kept.
        inner = [i for i, x in enumerate(values) if not any(x is given for given in primals)]
        values = build.replaced(values, inner, unless_tpu([values[i] for i in inner]))
        push_forward = jax.tree.unflatten(structure, values)
        return results, push_forward(*(tangents[i] for i in perturbed))

    call.defjvp(rule, symbolic_zeros=True)
    return call
