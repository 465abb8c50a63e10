"""A segment whose backward pass reads values in 8 bits. It has two chains of equations.

The first computes the results, from exact inputs, and what is kept. The second starts from what was kept. Only its
tangents are used, so the results of its products are dead code:

    x -> s = x @ w -> y = gelu(s)               results, and the codes of s; x comes with its codes
    decode(x) -> decode(s) -> y' = gelu(s)      y' is not used, but its derivative is, at the decoded values
    with_tangent_of(y, y')

So the forward pass is exact, and all that the backward pass computes is computed from decoded values alone.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from jamp._cast import is_inexact
from jamp._jaxprs import build, inline, interpret
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn, Var
from jamp._recompute.derivative_rules import computed_together
from jamp._recompute.residuals import stopped
from jamp._recompute.segments import KEPT, FlatSegment, Segment, computed_twice
from jamp._recompute.stored import with_rounding
from jamp._recompute.stores import Store, once_differentiable, with_tangent_of


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
    tangents = _given(flat, eqns, list(kept))
    reaches = [x or not is_inexact(v.aval) for x, v in zip(flat.reaching, piece.inputs, strict=True)]
    n, is_loop = len(flat.outputs), piece.context.in_loop

    def segment(*args: Array) -> list[Array]:
        args, codes = tuple(stopped(args[: len(piece.inputs)], reaches)), iter(args[len(piece.inputs) :])
        found = interpret.call(exact, once_differentiable(args))
        results = found[:n]
        parts = {(v, store): store.encode(x) for (v, store), x in zip(kept.items(), found[n:], strict=True)}
        for i in outputs:
            key = flat.outputs[i], Store.INT8
            parts[key] = parts.get(key) or Store.INT8.encode(results[i])
        if not is_loop:
            results, parts = computed_together(results, parts)
        parts = {key: [checkpoint_name(x, KEPT) for x in held] for key, held in parts.items()}
        known = [store.decode(parts[v, store], v.aval) for v, store in kept.items()]
        decoded = {i: Store.INT8.decode([next(codes), next(codes)], piece.inputs[i].aval) for i in inputs}
        given = [with_tangent_of(decoded[i], x) if i in decoded else x for i, x in enumerate(args)]
        derived = stopped(interpret.call(tangents, [*given, *known]), piece.alive)
        results = [with_tangent_of(x, y) if is_inexact(x) else x for x, y in zip(results, derived, strict=True)]
        return [*results, *(x for i in outputs for x in parts[flat.outputs[i], Store.INT8])]

    return segment


def _given(flat: FlatSegment, eqns: Sequence[JaxprEqn], kept: Sequence[Var]) -> ClosedJaxpr:
    """A segment as a function of its inputs and of some of its values, which it gives their tangents."""
    # An integer has no tangent. What is kept of it takes its place.
    given = {v: core.Var(v.aval) if is_inexact(v.aval) else v for v in kept}
    new: list[JaxprEqn] = []
    for eqn in eqns:
        results = [core.Var(v.aval) if v in given else v for v in eqn.outvars]
        new.append(eqn.replace(outvars=results))
        for computed, v in zip(results, eqn.outvars, strict=True):
            if v in given and is_inexact(v.aval):
                chosen = jax.make_jaxpr(with_tangent_of)(v.aval, v.aval)
                new.extend(inline.inline(chosen, [given[v], computed], [v]))
    return build.closed_jaxpr({}, [*flat.inputs, *given.values()], flat.outputs, new)
