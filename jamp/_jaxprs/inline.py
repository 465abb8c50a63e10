"""Put the equations of a jaxpr into another one."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

from jamp._jaxprs.constructs import inlinable
from jamp._jaxprs.interpret import interpret_names
from jamp._jaxprs.ir import ClosedJaxpr, Env, JaxprEqn, Var


def inline(closed: ClosedJaxpr, inputs: Sequence[Any], outputs: Sequence[Var]) -> list[JaxprEqn]:
    """The equations of a jaxpr, with `inputs` and `outputs` in place of its own, and new variables in between."""
    return _inlined(closed, inputs, lambda eqn: None, dict(zip(closed.jaxpr.outvars, outputs, strict=True)))[0]


def inlined(closed: ClosedJaxpr, inputs: Sequence[Any]) -> tuple[list[JaxprEqn], list[Any]]:
    """The equations and the outputs of a jaxpr, with `inputs` in place of its own and new variables for all others."""
    return _inlined(closed, inputs, lambda eqn: None, {})


def flattened(
    closed: ClosedJaxpr, enter: Callable[[JaxprEqn], ClosedJaxpr | None] = inlinable
) -> tuple[list[JaxprEqn], list[Any]]:
    """The equations and the outputs of a jaxpr in which jit calls are inlined. Its inputs keep their variables.

    `enter` returns the body of an equation to inline, or None.
    """
    return _inlined(closed, closed.jaxpr.invars, enter, {})


def _inlined(
    closed: ClosedJaxpr, inputs: Sequence[Any], enter: Callable[[JaxprEqn], ClosedJaxpr | None], names: Env
) -> tuple[list[JaxprEqn], list[Any]]:
    """The equations and the outputs of a jaxpr. `enter` returns the body that replaces an equation, or None.

    Variables that are not in `names` get new ones.
    """
    eqns: list[JaxprEqn] = []

    def run(eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        if body := enter(eqn):
            return interpret_names(body, operands, run)
        outvars = [names[v] if v in names else core.Var(v.aval) for v in eqn.outvars]
        eqns.append(eqn.replace(invars=operands, outvars=outvars))
        return outvars

    return eqns, interpret_names(closed, inputs, run)
