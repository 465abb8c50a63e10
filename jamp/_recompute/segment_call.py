"""A segment as a call, whose backward pass reads what is kept of it, and computes the rest again.

A segment that keeps values as they are is a `jax.checkpoint`, whose policy knows their name. One that keeps values in
8 bits has two chains of equations. The first computes the results, from exact inputs, and what is kept. The second
starts from what was kept. Only its tangents are used, so the results of its products are dead code:

    x -> s = x @ w -> y = gelu(s)               results, and the codes of s; x comes with its codes
    decode(x) -> decode(s) -> y' = gelu(s)      y' is not used, but its derivative is, at the decoded values
    with_tangents_of([y'], [y])

So the forward pass is exact, and all that the backward pass computes is computed from decoded values alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jamp._cast import is_inexact
from jamp._compiler_hints import cotangents_behind_barrier, unless_tpu
from jamp._jaxprs import build, dataflow, interpret, ir
from jamp._jaxprs.ir import JaxprEqn, Var
from jamp._recompute.linearized import stopped
from jamp._recompute.names import computed_twice, with_names
from jamp._recompute.opened import KEPT, SEGMENT
from jamp._recompute.segments import Segment
from jamp._recompute.stored import with_rounding
from jamp._recompute.stores import Store, Stores
from jamp._recompute.tangents import probe, with_tangents_of
from jamp._rounded import rounded

Call = Callable[..., list[Array]]


def as_call(segment: Segment, stores: Stores, outputs: Sequence[int], rounds: Sequence[int], drops: bool) -> Call:
    """A segment as a function of its inputs, and of the codes of those that it reads in 8 bits.

    It also returns codes, of some `outputs`. `rounds` are the inputs that it rounds itself. `drops` says whether a
    budget may drop what it would keep without one.
    """
    scoped = jax.named_scope(SEGMENT)
    if outputs or stores.is_coded:
        inner = _in_checkpoint(_coded(segment, stores, outputs), segment)
    else:
        inner = _uncoded(segment, stores, rounds, drops)
    # The scope is of the call, and of the checkpoint in it.
    call: Call = scoped(jax.jit(scoped(inner)))
    return _with_barrier(call, segment, has_barrier=drops and not segment.context.in_loop)


def _with_barrier(call: Call, segment: Segment, has_barrier: bool) -> Call:
    """A segment, perhaps with the cotangents of its inputs behind a barrier.

    Without one, XLA:GPU computes cotangents where they are added to others, later, and the values that were computed
    again stay in memory (for an H200, jaxlib 0.10.2). Inputs whose tangents reach no result get no barrier. The
    barrier, and JAX's next checkpoint, would give them cotangents of zeros, which JAX then sends through operations
    that it cannot transpose.
    """
    behind = [i for i, x in enumerate(segment.perturbed) if has_barrier and x and segment.reaching[i]]
    without = [i for i, v in enumerate(segment.inputs) if is_inexact(v.aval) and not segment.reaching[i]]
    without = without if ir.is_next_checkpoint() else []

    def with_barrier(*args: Array) -> list[Array]:
        given = build.replaced(args, without, [lax.stop_gradient(args[i]) for i in without])
        return call(*build.replaced(given, behind, cotangents_behind_barrier([given[i] for i in behind])))

    return with_barrier if behind or without else call


def _uncoded(piece: Segment, stores: Stores, rounds: Sequence[int], drops: bool) -> Call:
    """A segment as a function that keeps some of its values, as they are, for the backward pass."""
    kept = {piece.values[i] for i, _ in stores.values}
    body = with_names(piece, dict.fromkeys(kept, KEPT), kept | computed_twice(piece))

    def segment(*args: Array) -> list[Array]:  # the name of the call in jaxprs and profiles
        # In here, because outside it would be another array, which is kept.
        given = build.replaced(args, rounds, [rounded.bind(args[i]) for i in rounds])
        return stopped(interpret.call(body, tuple(stopped(given, _reaches(piece)))), piece.alive)

    # JAX's next checkpoint would compute in the forward pass what a rule of ours around it linearizes.
    has_own_barrier = piece.convolves and not drops and not ir.is_next_checkpoint()
    call = _in_checkpoint(segment, piece, has_own_barrier)
    return _behind_barrier_unless_tpu(call) if has_own_barrier else call


def _in_checkpoint(fun: Call, segment: Segment, has_own_barrier: bool = False) -> Call:
    policy = jax.checkpoint_policies.save_only_these_names(KEPT)
    # Outside of a loop, XLA would merge the recomputation with the forward pass (CSE).
    prevent_cse = not (segment.context.in_loop or has_own_barrier)
    call: Call = jax.checkpoint(fun, policy=policy, prevent_cse=prevent_cse)
    return call


def _reaches(segment: Segment) -> list[bool]:
    """Which inputs of a segment may have tangents in it."""
    return [x or not is_inexact(v.aval) for x, v in zip(segment.reaching, segment.inputs, strict=True)]


def _behind_barrier_unless_tpu(fun: Call) -> Call:
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


def _coded(piece: Segment, stores: Stores, outputs: Sequence[int]) -> Call:
    """A segment as a function that keeps some of its values in 8 bits, to be differentiated in a checkpoint."""
    kept = {piece.values[i]: store for i, store in stores.values}
    eqns = with_rounding(piece.eqns, kept.keys() | computed_twice(piece))
    exact = build.closed_jaxpr({}, piece.inputs, [*piece.outputs, *kept], eqns)
    sources = dataflow.sources(exact)
    n = len(piece.outputs)
    # A result that is kept as it is. It has its name as it is returned, so that JAX keeps it once.
    named = {v for v, store in kept.items() if store is Store.ITSELF and v in piece.outputs and is_inexact(v.aval)}

    def segment(*args: Array) -> list[Array]:
        codes = iter(args[len(piece.inputs) :])
        args = tuple(stopped(args[: len(piece.inputs)], _reaches(piece)))
        found = interpret.call(exact, stopped(args, [False] * len(args)))
        parts = {(v, store): store.encode(x) for (v, store), x in zip(kept.items(), found[n:], strict=True)}
        for i in outputs:
            key = piece.outputs[i], Store.INT8
            parts[key] = parts.get(key) or Store.INT8.encode(found[i])
        of_names = [key for key in parts if key[0] not in named or key[1] is Store.INT8]
        parts |= {key: [checkpoint_name(x, KEPT) for x in parts[key]] for key in of_names}
        held = [] if piece.context.in_loop else [x for key in of_names for x in parts[key]]
        known = {v: store.decode(parts[v, store], v.aval) for v, store in kept.items()}
        probes = {v: checkpoint_name(probe(x), KEPT) for v, x in zip(piece.inputs, args, strict=True) if is_inexact(x)}

        def probes_of(values: Sequence[Var]) -> tuple[list[Array], list[Array]]:
            """The probes of the inputs that values are computed from, and the others.

            JAX keeps a value once that is the same in each step of a loop, if it depends on nothing else.
            """
            needed = frozenset[Var]().union(*(sources[v] for v in values))
            return [x for v, x in probes.items() if v in needed], [x for v, x in probes.items() if v not in needed]

        given = list(args)
        for i in sorted(stores.inputs):
            decoded = Store.INT8.decode([next(codes), next(codes)], piece.inputs[i].aval)
            (given[i],) = with_tangents_of([args[i]], [decoded], [*probes.values()])

        def run(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
            results = interpret.bind(eqn, operands, ir.avals(eqn.outvars))
            for i, v in enumerate(eqn.outvars):
                if v in named:
                    (x,) = with_tangents_of([results[i]], [known[v]], *probes_of([v]), held)
                    results[i] = checkpoint_name(x, KEPT)
                elif v in known and is_inexact(v.aval):
                    (results[i],) = with_tangents_of([results[i]], [known[v]], *probes_of([v]))
                elif v in known:
                    results[i] = known[v]
            return results

        derived = stopped(interpret.interpret(exact.jaxpr, given, run)[:n], piece.alive)
        results = [y if v in named else x for v, x, y in zip(piece.outputs, found[:n], derived, strict=True)]
        places = [i for i, x in enumerate(derived) if is_inexact(x) and piece.outputs[i] not in named]
        for some in [[i] for i in places] if piece.context.in_loop else [places]:
            of_results = probes_of([piece.outputs[i] for i in some])
            exact_of, derived_of = ([xs[i] for i in some] for xs in (found, derived))
            results = build.replaced(results, some, with_tangents_of(derived_of, exact_of, *of_results, held))
        return [*results, *(x for i in outputs for x in parts[piece.outputs[i], Store.INT8])]

    return segment
