"""Recompute: keep fewer values for the backward pass, and compute the cheap ones again.

`recompute` maps a jaxpr to one that computes the same. A *segment* is straight-line code between constructs such as
loops. It becomes a `jax.checkpoint` whose policy keeps the values that `kept.py` chooses, which have a name. No
product, random number or collective is computed twice.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend import core

from jamp import _dataflow, _evaluate, _fingerprint, _jaxpr
from jamp._autocast.facts import SEGMENT
from jamp._autocast.kept import is_activation, is_recomputed, kept, nbytes
from jamp._autocast.lower import lower
from jamp._autocast.product import name_of
from jamp._barrier import unless_tpu
from jamp._cast import is_inexact
from jamp._jaxpr import ClosedJaxpr, JaxprEqn, Var
from jamp._primitives import CHEAP, EXPENSIVE, MOVING, PRODUCTS, holds_product
from jamp._shard_map import trace

_LARGE = 1024  # elements: a segment without an array of this size is not worth computing again
_PRODUCTS = 6  # of a segment, more or less: those of a layer
# JAX differentiates the bodies of these. A while has no gradient, a custom rule replaces the derivative of its body,
# and in a `jax.checkpoint` the user has decided.
_ENTERED = ("jit", "scan", "cond", "shard_map", "scaled_call")
_KEPT = "jamp.kept"  # the name of the values that are kept


def recompute(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same function, whose backward pass recomputes cheap values.

    Operations after the last product stay as they are, because the backward pass reads their values at once.
    """
    eqns = closed.jaxpr.eqns
    last = max((i for i, eqn in enumerate(eqns) if holds_product(eqn)), default=-1)
    return _Pass().run(closed, [False] * len(closed.in_avals), _Around(), last + 1)


class _Around(NamedTuple):
    """The constructs around a jaxpr: a loop, and a shard_map."""

    loop: bool = False
    inside: JaxprEqn | None = None


class _Pass:
    def __init__(self) -> None:
        self._activations = _dataflow.spreads(is_activation)
        self._bodies: dict[Any, tuple[ClosedJaxpr, ClosedJaxpr]] = {}
        self._segments: dict[Any, JaxprEqn] = {}

    def run(self, closed: ClosedJaxpr, flags: Sequence[bool], around: _Around, end: int | None = None) -> ClosedJaxpr:
        """Rewrite a jaxpr. `flags` say which inputs are activations."""
        jaxpr = closed.jaxpr
        key = id(jaxpr), tuple(flags), around, end
        if key in self._bodies:
            return self._bodies[key][1]
        activations = self._activations(closed, flags)
        eqns: list[JaxprEqn] = []
        segment: list[JaxprEqn] = []
        last_uses = _jaxpr.last_uses(jaxpr)

        def close(stop: int) -> None:
            start = stop - len(segment)
            is_whole = around.loop or _convolves(segment)
            for piece in [range(start, stop)] if is_whole else _cut(jaxpr.eqns, range(start, stop), last_uses):
                members = [jaxpr.eqns[i] for i in piece]
                outputs = [v for eqn in members for v in eqn.outvars if last_uses.get(v, -1) >= piece.stop]
                eqns.extend(self._segment(members, outputs, activations, around))
            segment.clear()

        for i, eqn in enumerate(jaxpr.eqns):
            is_before_end = end is None or i < end
            if is_before_end and _is_plain(eqn):
                segment.append(eqn)
            else:
                close(i)
                of_operands = self._activations.read(activations, eqn.invars)
                eqns.append(self._construct(eqn, of_operands, around) if is_before_end else eqn)
        close(len(jaxpr.eqns))
        constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        new = _evaluate.closed_jaxpr(constants, jaxpr.invars, jaxpr.outvars, eqns)
        self._bodies[key] = closed, new  # With the jaxpr, so that no other one gets its id.
        return new

    def _construct(self, eqn: JaxprEqn, flags: Sequence[bool], around: _Around) -> JaxprEqn:
        """An equation that is in no segment, with segments in its bodies."""
        bodies = _jaxpr.bodies(eqn)
        if _jaxpr.name(eqn) not in _ENTERED or bodies is None:
            return eqn
        inside = eqn if _jaxpr.name(eqn) == "shard_map" else around.inside
        around = _Around(around.loop or _jaxpr.name(eqn) == "scan", inside)
        into = self._activations.into(eqn, flags)
        new = [self.run(body, given, around) for body, given in zip(bodies, into, strict=True)]
        return _evaluate.with_bodies(eqn, new, eqn.invars, eqn.outvars)

    def _segment(
        self, eqns: list[JaxprEqn], outputs: list[Var], activations: dict[Var, bool], around: _Around
    ) -> list[JaxprEqn]:
        """The equations of a segment, as they are or in one call."""
        if not any(map(_is_worth_it, eqns)):
            return list(eqns)
        defined = {v for eqn in eqns for v in eqn.outvars}
        reads: list[Any] = [v for eqn in eqns for v in eqn.invars]
        inputs = list(dict.fromkeys(v for v in reads if not _jaxpr.is_literal(v) and v not in defined))
        flags = tuple(activations[v] for v in inputs)
        key = _fingerprint.fingerprint(inputs, outputs, eqns), flags, around
        if key not in self._segments:  # Equal layers share a segment, which is differentiated once.
            body = _evaluate.closed_jaxpr({}, inputs, outputs, eqns)
            named = jax.named_scope(SEGMENT)  # of the call, and of the checkpoint in it
            call = named(jax.jit(named(_checkpointed(body, flags, around.loop))))
            self._segments[key] = trace(around.inside, call, body.in_avals).eqns[0]
        return [self._segments[key].replace(invars=inputs, outvars=outputs)]


def _checkpointed(closed: ClosedJaxpr, flags: Sequence[bool], in_loop: bool) -> Callable[..., list[Array]]:
    """A segment as a function that keeps some of its values for the backward pass."""
    eqns, outputs = _evaluate.flattened(closed)
    inputs, named = closed.jaxpr.invars, list[JaxprEqn]()
    chosen = kept(eqns, inputs, flags)
    for eqn in eqns:
        results = [core.Var(v.aval) if v in chosen else v for v in eqn.outvars]
        named.append(eqn.replace(outvars=results))
        for value, v in zip(results, eqn.outvars, strict=True):
            if v in chosen:
                name = _jaxpr.with_name_for(_name_equation(), v.aval).replace(invars=[value], outvars=[v])
                named.append(_evaluate.located(name, eqn))
    body = _evaluate.closed_jaxpr({}, inputs, outputs, named)
    convolves = _convolves(eqns) and not in_loop

    def segment(*args: Array) -> list[Array]:
        return _evaluate.call(lower(body) if convolves else body, args)  # Its rule is traced after all passes.

    policy = jax.checkpoint_policies.save_only_these_names(_KEPT)
    # Outside of a loop, XLA would merge the recomputation with the forward pass (CSE).
    call = jax.checkpoint(segment, policy=policy, prevent_cse=not (in_loop or convolves))
    return _behind_barrier_unless_tpu(call) if convolves else call


@functools.cache
def _name_equation() -> JaxprEqn:
    return jax.make_jaxpr(lambda x: checkpoint_name(x, _KEPT))(0.0).eqns[0]


def _behind_barrier_unless_tpu(fun: Callable[..., list[Array]]) -> Callable[..., list[Array]]:
    """A function whose backward pass gets what it keeps behind a barrier, but on TPUs.

    For convolutions, XLA:TPU needs 1.4 times the memory with a barrier (ResNet-18, compiled for a v5e).
    """

    @jax.custom_jvp
    def call(*args: Array) -> list[Array]:
        return fun(*args)

    def rule(primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[list[Array], list[Any]]:
        perturbed = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero) and is_inexact(primals[i])]
        of_perturbed = lambda *xs: fun(*_evaluate.replaced(primals, perturbed, xs))
        results, push_forward = jax.linearize(of_perturbed, *(primals[i] for i in perturbed))
        values, structure = jax.tree.flatten(push_forward)
        push_forward = jax.tree.unflatten(structure, unless_tpu(values))
        return results, push_forward(*(tangents[i] for i in perturbed))

    call.defjvp(rule, symbolic_zeros=True)
    return call


def _convolves(eqns: Sequence[JaxprEqn]) -> bool:
    """Whether more than half of the products are convolutions."""
    names = [name for eqn in eqns if (name := name_of(eqn)) in PRODUCTS]
    return names.count("conv_general_dilated") > len(names) / 2


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


def _is_plain(eqn: JaxprEqn) -> bool:
    """Whether an equation may be in a segment: not a construct, without effects, and not a `checkpoint_name`."""
    if eqn.effects or _jaxpr.name(eqn) == "name":
        return False
    if _jaxpr.name(eqn) == "sort" or (_jaxpr.name(eqn) == "custom_jvp_call" and holds_product(eqn)):
        return False  # A derivative rule that sorts or multiplies would do so again in the backward pass.
    if _jaxpr.name(eqn) in ("jit", "custom_jvp_call"):
        body = _evaluate.body_of_call(eqn)
        return body is not None and all(map(_is_plain, body.jaxpr.eqns))
    return name_of(eqn) in CHEAP | EXPENSIVE | PRODUCTS or not _jaxpr.has_body(eqn)


def _is_worth_it(eqn: JaxprEqn) -> bool:
    """Whether an equation computes a large array that may be computed again. A symbolic size is large."""
    if body := _jaxpr.inlinable(eqn):
        return any(map(_is_worth_it, body.jaxpr.eqns))
    sizes = [aval.size for aval in _jaxpr.avals(eqn.outvars) if is_inexact(aval)]
    is_large = any(not isinstance(size, int) or size >= _LARGE for size in sizes)
    return is_large and _jaxpr.name(eqn) not in MOVING and is_recomputed(eqn)
