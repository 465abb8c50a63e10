"""What JAX keeps of a function for its backward pass."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from jamp._cast import is_inexact
from jamp._jaxprs import build, inline, interpret, ir, walk
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn
from jamp._jaxprs.manual_axes import trace_inside


def with_residuals(
    closed: ClosedJaxpr, perturbed: Sequence[bool], alive: Sequence[bool], inside: JaxprEqn | None
) -> ClosedJaxpr:
    """A function that also returns its residuals, which its backward pass reads. It may be inside a shard_map.

    `perturbed` are the inputs that may have tangents, and `alive` the results that get cotangents. No gradient goes
    through an operation that JAX does not differentiate. In place of a Ref, it takes what the Ref holds.
    """
    if any(map(ir.is_ref, closed.jaxpr.invars)):
        held = [v.aval.inner_aval if ir.is_ref(v) else v.aval for v in closed.jaxpr.invars]
        closed = trace_inside(inside, partial(_on_new_refs, closed), held)
    try:
        return _with_residuals(closed, perturbed, alive, inside)
    except Exception as error:
        if not _has_no_derivative(error, closed):
            raise
        return _with_residuals(_stopped(closed, inside), perturbed, alive, inside)


# JAX's messages for a primitive without a derivative, where it does not raise NotImplementedError.
_WITHOUT_DERIVATIVE = re.compile(
    r"Reverse-mode differentiation does not work|does not support reverse-mode|callbacks? do(es)? not support JVP"
    r"|cannot be differentiated|can't apply forward-mode differentiation|JVP rule for \w+ not implemented"
)


def _has_no_derivative(error: Exception, closed: ClosedJaxpr) -> bool:
    """Whether JAX raised an error because something has no derivative. Other errors come from the user's rules."""
    if isinstance(error, AssertionError) and not str(error):  # A linear_call asserts that its residuals are constants.
        return any(ir.name(eqn) == "linear_call" for eqn in walk.all_equations(closed.jaxpr))
    return isinstance(error, NotImplementedError) or bool(_WITHOUT_DERIVATIVE.search(str(error)))


def _stopped(closed: ClosedJaxpr, inside: JaxprEqn | None) -> ClosedJaxpr:
    """A function in which the operands of operations that JAX does not differentiate have no tangents."""
    eqns, outputs = inline.flattened(closed)
    found: list[JaxprEqn] = []
    for eqn in eqns:
        inputs: list[Any] = list(dict.fromkeys(v for v in eqn.invars if not ir.is_literal(v)))
        single = build.closed_jaxpr({}, inputs, eqn.outvars, [eqn])
        try:
            _with_residuals(single, [is_inexact(v.aval) for v in inputs], [True] * len(eqn.outvars), inside)
            found.append(eqn)
        except Exception as error:
            if not _has_no_derivative(error, single):
                raise
            stopped = trace_inside(inside, partial(_with_stopped_gradients, single), single.in_avals)
            found.extend(inline.inline(stopped, inputs, eqn.outvars))
    return build.closed_jaxpr({}, closed.jaxpr.invars, outputs, found)


def _on_new_refs(closed: ClosedJaxpr, *args: Any) -> list[Any]:
    """A function on Refs of its own: JAX differentiates what is written to these, but not to a Ref that is given."""
    refs = [jax.new_ref(x) if ir.is_ref(v) else x for x, v in zip(args, closed.jaxpr.invars, strict=True)]
    return interpret.call(closed, refs)


def _with_stopped_gradients(closed: ClosedJaxpr, *args: Any) -> list[Any]:
    return interpret.call(closed, [jax.lax.stop_gradient(x) for x in args])


def _with_residuals(
    closed: ClosedJaxpr, perturbed: Sequence[bool], alive: Sequence[bool], inside: JaxprEqn | None
) -> ClosedJaxpr:
    places = [i for i, x in enumerate(perturbed) if x]

    def forward(*args: Any) -> list[Any]:
        of_perturbed = lambda *xs: stopped(interpret.call(closed, build.replaced(args, places, xs)), alive)
        results, pull_back = jax.vjp(of_perturbed, *(args[i] for i in places))
        residuals = jax.tree.leaves(pull_back)  # A rule that writes to a Ref in its backward pass keeps the Ref.
        return [*results, *(x for x in residuals if not ir.is_ref_type(jax.typeof(x)))]

    return trace_inside(inside, forward, closed.in_avals)


def stopped(results: Sequence[Any], alive: Sequence[bool]) -> list[Any]:
    """The results, of which only those that are `alive` have tangents."""
    return [x if is_alive else jax.lax.stop_gradient(x) for x, is_alive in zip(results, alive, strict=True)]
