"""Recompute: keep fewer values for the backward pass, and compute the cheap ones again.

`recompute` takes a jaxpr and returns one that computes the same. A *segment* is straight-line code between constructs
such as loops. Its derivative is split in two (`_autocast/derivative.py`): the forward pass computes the results and the
values to keep, and the backward pass recomputes the others (`_autocast/recomputed.py`). No product, random number or
collective is computed twice.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.custom_derivatives import SymbolicZero

from jamp import _barrier, _evaluate, _jaxpr
from jamp._autocast.derivative import derivative, is_live, is_recomputed, nbytes, split_derivative
from jamp._autocast.facts import SEGMENT
from jamp._autocast.lower import Lower
from jamp._autocast.product import name_of
from jamp._autocast.recomputed import recomputed
from jamp._cast import is_inexact
from jamp._jaxpr import ClosedJaxpr, JaxprEqn, Var
from jamp._primitives import CHEAP, EXPENSIVE, MOVING, PRODUCTS, holds_product
from jamp._shard_map import trace

_LARGE = 1024  # elements: a segment without an array of this size is not worth computing again
_PRODUCTS = 6  # of a segment, more or less: those of a layer


def recompute(closed: ClosedJaxpr, lower: Lower) -> ClosedJaxpr:
    """The same function, whose backward pass recomputes cheap values.

    A segment is differentiated when JAX asks for its derivative, and `lower` is applied to it then.
    Operations after the last product stay as they are, because the backward pass reads their values at once.
    """
    eqns = closed.jaxpr.eqns
    last = max((i for i, eqn in enumerate(eqns) if holds_product(eqn)), default=-1)
    return _Pass(lower).run(closed, [False] * len(closed.in_avals), _Around(), last + 1)


class _Around(NamedTuple):
    """The constructs around a jaxpr: a loop, and a shard_map."""

    loop: bool = False
    inside: JaxprEqn | None = None


class _Pass:
    def __init__(self, lower: Lower) -> None:
        self._lower = lower
        self._bodies: dict[Any, ClosedJaxpr] = {}
        self._segments: dict[Any, JaxprEqn] = {}

    def run(self, closed: ClosedJaxpr, live: Sequence[bool], around: "_Around", end: int | None = None) -> ClosedJaxpr:
        """Rewrite a jaxpr. `live` says which of its inputs depend on a product, or change with each step of a loop."""
        jaxpr = closed.jaxpr
        key = id(jaxpr), tuple(live), around, end
        if key in self._bodies:
            return self._bodies[key]
        alive = {v for v, x in zip(jaxpr.invars, live, strict=True) if x}
        eqns: list[JaxprEqn] = []
        segment: list[JaxprEqn] = []
        last_uses = _jaxpr.last_uses(jaxpr)

        def close(stop: int) -> None:
            start = stop - len(segment)
            is_whole = around.loop or _convolves(segment)
            for piece in [range(start, stop)] if is_whole else _cut(jaxpr.eqns, range(start, stop), last_uses):
                members = [jaxpr.eqns[i] for i in piece]
                outputs = [v for eqn in members for v in eqn.outvars if last_uses.get(v, -1) >= piece.stop]
                eqns.extend(self._segment(members, outputs, alive, around))
            segment.clear()

        for i, eqn in enumerate(jaxpr.eqns):
            is_before_end = end is None or i < end
            if is_before_end and _is_plain(eqn):
                segment.append(eqn)
            else:
                close(i)
                flags = [_in(alive, v) for v in eqn.invars]
                eqns.append(self._construct(eqn, flags, around) if is_before_end else eqn)
            if is_live(eqn, alive):
                alive.update(eqn.outvars)
        close(len(jaxpr.eqns))
        constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self._bodies[key] = _evaluate.closed_jaxpr(constants, jaxpr.invars, jaxpr.outvars, eqns)
        return self._bodies[key]

    def _construct(self, eqn: JaxprEqn, live: Sequence[bool], around: "_Around") -> JaxprEqn:
        """An equation that is in no segment, with segments in its bodies if they are part of the same function."""
        bodies = _jaxpr.bodies(eqn)
        if _jaxpr.name(eqn) not in ("jit", "scan", "cond", "shard_map", "scaled_call") or bodies is None:
            return eqn
        carry = _jaxpr.carry(eqn)
        live = [x or i in carry for i, x in enumerate(live)]
        around = _Around(
            around.loop or _jaxpr.name(eqn) == "scan", eqn if _jaxpr.name(eqn) == "shard_map" else around.inside
        )
        new = [
            self.run(body, [live[i] for i in operands], around)
            for body, operands in zip(bodies, _jaxpr.body_operands(eqn), strict=True)
        ]
        return _evaluate.with_bodies(eqn, new, eqn.invars, eqn.outvars)

    def _segment(self, eqns: list[JaxprEqn], outputs: list[Var], live: set[Var], around: "_Around") -> list[JaxprEqn]:
        """The equations of a segment, as they are or in one call."""
        if not any(map(_is_worth_it, eqns)):
            return list(eqns)
        defined = {v for eqn in eqns for v in eqn.outvars}
        reads: list[Any] = [v for eqn in eqns for v in eqn.invars]
        inputs = list(dict.fromkeys(v for v in reads if not _jaxpr.is_literal(v) and v not in defined))
        flags = tuple(v in live for v in inputs)
        key = _evaluate.fingerprint(inputs, outputs, eqns), flags, around
        if key not in self._segments:  # Equal layers share a segment, which is differentiated once.
            body = _evaluate.closed_jaxpr({}, inputs, outputs, eqns)
            call = _recomputing(body, flags, around.loop, self._lower)
            named = jax.named_scope(SEGMENT)
            self._segments[key] = trace(around.inside, named(jax.jit(named(call))), body.in_avals).eqns[0]
        return [self._segments[key].replace(invars=inputs, outvars=outputs)]


def _cut(eqns: Sequence[JaxprEqn], whole: range, last_uses: dict[Any, int]) -> list[range]:
    """Cut straight-line code into segments of some products each, where the fewest bytes cross the cut."""
    counts = itertools.accumulate((holds_product(eqns[i]) for i in whole), initial=0)
    before = dict(zip([*whole, whole.stop], counts, strict=True))  # the number of products before each equation
    least, most = 0.75 * _PRODUCTS, 1.5 * _PRODUCTS
    if before[whole.stop] <= most:
        return [whole]
    change = [0.0] * (whole.stop + 2)  # of the bytes that cross a cut in front of an equation
    for i in whole:
        for v in eqns[i].outvars:
            change[i + 1] += nbytes(v)
            change[max(i, min(last_uses.get(v, -1), whole.stop)) + 1] -= nbytes(v)
    crossing = list(itertools.accumulate(change))
    found, start = [], whole.start
    while before[whole.stop] - before[start] > most:
        ends = [j for j in range(start + 1, whole.stop) if least <= before[j] - before[start] <= most]
        if not ends:  # a single call holds more products
            break
        end = min(ends, key=crossing.__getitem__)
        found.append(range(start, end))
        start = end
    return [*found, range(start, whole.stop)]


def _convolves(eqns: Sequence[JaxprEqn]) -> bool:
    """Whether more than half of the products are convolutions."""
    names = [name for eqn in _flat(eqns) if (name := name_of(eqn)) in PRODUCTS]
    found = [name == "conv_general_dilated" for name in names]
    return sum(found) > len(found) / 2


def _flat(eqns: Sequence[JaxprEqn]) -> Iterator[JaxprEqn]:
    for eqn in eqns:
        yield eqn
        for jaxpr, _ in () if _jaxpr.name(eqn) in CHEAP else _jaxpr.inner(eqn):
            yield from _flat(jaxpr.eqns)


def _in(some: set[Var], atom: Any) -> bool:
    return not _jaxpr.is_literal(atom) and atom in some


def _is_plain(eqn: JaxprEqn) -> bool:
    """Whether an equation may be in a segment: not a construct, without effects, and not a `checkpoint_name`."""
    if eqn.effects or _jaxpr.name(eqn) == "name":
        return False
    if _jaxpr.name(eqn) in ("jit", "custom_jvp_call"):
        body = _evaluate.body_of_call(eqn)
        return body is not None and all(map(_is_plain, body.jaxpr.eqns))
    return name_of(eqn) in CHEAP | EXPENSIVE | PRODUCTS or not _jaxpr.has_body(eqn)


def _is_worth_it(eqn: JaxprEqn) -> bool:
    """Whether an equation computes a large float32 array. A symbolic size is large."""
    sizes = [aval.size for aval in _jaxpr.avals(eqn.outvars) if is_inexact(aval)]
    is_large = any(not isinstance(size, int) or size >= _LARGE for size in sizes)
    return is_large and _jaxpr.name(eqn) not in MOVING and is_recomputed(eqn)


def _recomputing(closed: ClosedJaxpr, live: Sequence[bool], in_loop: bool, lower: Lower) -> Callable[..., list[Array]]:
    """A segment as a function whose derivative is split in two."""
    convolves = _convolves(closed.jaxpr.eqns)
    split = functools.cache(lambda moving: split_derivative(lower(closed), live, moving))

    @jax.custom_jvp
    def segment(*args: Array) -> list[Array]:
        return _evaluate.call(closed, args)

    def rule(primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[list[Array], list[Any]]:
        moving = tuple(i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero) and is_inexact(primals[i]))
        parts, moved = split(moving), [tangents[i] for i in moving]
        if parts is None:
            found = derivative(lower(closed), moving)(*primals, *moved)
            results, derivatives = found[: len(closed.out_avals)], iter(found[len(closed.out_avals) :])
        else:
            values = _evaluate.call(parts.forward, primals)
            results, kept = values[: len(closed.out_avals)], values[len(closed.out_avals) :]
            # A barrier keeps XLA from merging the recomputation with the forward pass (CSE). A loop is a barrier, too.
            args = [*kept, *(primals[i] for i in parts.inputs)]
            # For convolutions XLA:TPU needs half as much memory again with one (docs/design.md has the figures).
            args = _barrier.unless_tpu(args) if convolves and not in_loop else args
            needs_barrier = not in_loop and not convolves
            derivatives = iter(recomputed(parts.backward, args, moved, barrier=needs_barrier))
        return results, [next(derivatives) if is_inexact(x) else np.zeros(x.shape, jax.dtypes.float0) for x in results]

    segment.defjvp(rule, symbolic_zeros=True)
    return segment
