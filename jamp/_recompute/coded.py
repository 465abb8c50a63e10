"""A segment whose backward pass reads values in 8 bits. It has two chains of equations.

The first computes the results, from exact inputs, and what is kept. The second starts from what was kept. Only its
tangents are used, so the results of its products are dead code:

    x -> s = x @ w -> y = gelu(s)               results, and the codes of s; x comes with its codes
    decode(x) -> decode(s) -> y' = gelu(s)      y' is not used, but its derivative is, at the decoded values
    with_tangents_of([y'], [y])

So the forward pass is exact, and all that the backward pass computes is computed from decoded values alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from jamp._cast import is_inexact
from jamp._jaxprs import build, inline, interpret
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn, Var
from jamp._recompute.residuals import stopped
from jamp._recompute.segments import KEPT, FlatSegment, Segment, computed_twice
from jamp._recompute.stored import with_rounding
from jamp._recompute.stores import Store, probe, with_tangents_of


def coded_segment(
    piece: Segment, flat: FlatSegment, stores: Mapping[int, Store], inputs: Sequence[int], outputs: Sequence[int]
) -> Callable[..., list[Array]]:
    """A segment as a function of its inputs and of the codes of some of them, to be differentiated in a checkpoint.

    It returns its results, and the codes of some of them. `stores` has the values that are kept, by their numbers.
    """
    values = [v for eqn in flat.eqns for v in eqn.outvars]
    kept = {values[i]: store for i, store in stores.items() if 0 <= i < len(values)}
    eqns = with_rounding(flat.eqns, kept.keys() | computed_twice(flat))
    exact = build.closed_jaxpr({}, flat.inputs, [*flat.outputs, *kept], eqns)
    reaches = [x or not is_inexact(v.aval) for x, v in zip(flat.reaching, piece.inputs, strict=True)]
    n = len(flat.outputs)

    def segment(*args: Array) -> list[Array]:
        args, codes = tuple(stopped(args[: len(piece.inputs)], reaches)), iter(args[len(piece.inputs) :])
        found = interpret.call(exact, stopped(args, [False] * len(args)))
        parts = {(v, store): store.encode(x) for (v, store), x in zip(kept.items(), found[n:], strict=True)}
        for i in outputs:
            key = flat.outputs[i], Store.INT8
            parts[key] = parts.get(key) or Store.INT8.encode(found[i])
        parts = {key: _named(held) for key, held in parts.items()}
        probes = _named([probe(x) for x in args if is_inexact(x)])
        given = list(args)
        for i in inputs:
            decoded = Store.INT8.decode([next(codes), next(codes)], piece.inputs[i].aval)
            (given[i],) = with_tangents_of([args[i]], [decoded], probes)
        known = [store.decode(parts[v, store], v.aval) for v, store in kept.items()]
        tangents = _given(flat, eqns, list(kept), [jax.typeof(x) for x in probes])
        derived = stopped(interpret.call(tangents, [*given, *known, *probes]), piece.alive)
        places = [i for i, x in enumerate(derived) if is_inexact(x)]
        held = [] if piece.context.in_loop else [x for held in parts.values() for x in held]
        exact_of, derived_of = ([xs[i] for i in places] for xs in (found, derived))
        results = build.replaced(found[:n], places, with_tangents_of(derived_of, exact_of, probes, held))
        return [*results, *(x for i in outputs for x in parts[flat.outputs[i], Store.INT8])]

    return segment


def _named(values: Sequence[Array]) -> list[Array]:
    return [checkpoint_name(x, KEPT) for x in values]


def _given(flat: FlatSegment, eqns: Sequence[JaxprEqn], kept: Sequence[Var], types: Sequence[Any]) -> ClosedJaxpr:
    """A segment as a function of its inputs, some of its values, which it gives their tangents, and the probes."""
    # An integer has no tangent. What is kept of it takes its place.
    given = {v: core.Var(v.aval) if is_inexact(v.aval) else v for v in kept}
    probes = list(map(core.Var, types))
    new: list[JaxprEqn] = []
    for eqn in eqns:
        results = [core.Var(v.aval) if v in given else v for v in eqn.outvars]
        new.append(eqn.replace(outvars=results))
        for computed, v in zip(results, eqn.outvars, strict=True):
            if v in given and is_inexact(v.aval):
                chosen = jax.make_jaxpr(lambda x, y, *probes: with_tangents_of([x], [y], probes))
                closed = chosen(v.aval, v.aval, *types)
                new.extend(inline.inline(closed, [computed, given[v], *probes], [v]))
    return build.closed_jaxpr({}, [*flat.inputs, *given.values(), *probes], flat.outputs, new)
