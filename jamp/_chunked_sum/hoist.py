"""Compute before the loop what all chunks share: a weight in 16 or 8 bit.

Under autocast, `x @ w` with f32 `w` becomes `low = cast(w)` and a product that reads `low` and has the derivative of
`x @ w`. Left in the loop, the cast would read and write all of `w` for each chunk. No gradient passes through `low`,
so each chunk gets it as a constant.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.interpreters.partial_eval import dce_jaxpr

from jamp._jaxprs import build, dataflow, inline, interpret, ir
from jamp._jaxprs.ir import ClosedJaxpr
from jamp._products.lower import reads_without_derivative


def hoisted(closed: ClosedJaxpr, shared: int) -> tuple[ClosedJaxpr, Callable[[Sequence[Any]], list[Any]]]:
    """Split a jaxpr into what depends on its first `shared` inputs alone and has no derivative, and the rest.

    Returns:
      A jaxpr that takes some values and then the inputs of the given one, and the function that computes these values
      from the shared inputs.
    """
    eqns, outputs = inline.flattened(closed)
    inputs, flat = closed.jaxpr.invars, build.closed_jaxpr({}, closed.jaxpr.invars, outputs, eqns)
    sources, shares = dataflow.sources(flat), set(inputs[:shared])
    passes = lambda eqn, results: [any(results) and not x for x in reads_without_derivative(eqn)]
    differentiated = dataflow.Backward(passes, is_whole=lambda eqn: True)(flat, [True] * len(outputs))
    is_moved = lambda eqn: (
        eqn.outvars
        and all(sources[v] and sources[v] <= shares and v not in differentiated for v in eqn.outvars)
        and not all(reads_without_derivative(eqn))  # else a value would be given twice
    )
    moved = [v for eqn in eqns if is_moved(eqn) for v in eqn.outvars]
    if not moved:
        return closed, lambda values: []
    rest = [eqn for eqn in eqns if not is_moved(eqn)]
    read = {v for eqn in rest for v in eqn.invars if not ir.is_literal(v)}
    values = [v for v in moved if v in read]  # in the order of the code: every process compiles the same program
    before = [eqn for eqn in eqns if all(sources[v] <= shares for v in eqn.outvars) and not eqn.effects]
    once, _ = dce_jaxpr(build.closed_jaxpr({}, inputs[:shared], values, before).jaxpr, [True] * len(values), True)
    return build.closed_jaxpr({}, [*values, *inputs], outputs, rest), lambda xs: interpret.call(
        ClosedJaxpr(once, []), xs
    )
