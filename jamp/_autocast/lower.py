"""Lower: products that a checkpoint policy of the user recognizes.

Under `jax_remat3`, a checkpoint never looks into a call with a custom derivative: all of it is computed again, whatever
the policy says. So in the body of such a checkpoint, the value of a call is computed by JAX's own primitives, outside
of the call, and a second call attaches the derivative to it.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from jamp import _evaluate, _jaxpr
from jamp._jaxpr import ClosedJaxpr, JaxprEqn
from jamp._primitives import holds_product
from jamp._shard_map import trace

_SAME_FUNCTION = ("jit", "scan", "while", "cond", "closed_call", "remat2", "shard_map", "scaled_call")


def lower(closed: ClosedJaxpr, in_checkpoint: bool = False, inside: JaxprEqn | None = None) -> ClosedJaxpr:
    """The same function. `in_checkpoint` and `inside` say whether it is the body of a checkpoint, or in a shard_map."""
    if not closed.jaxpr.eqns or (not any(map(_jaxpr.is_high, closed.jaxpr.eqns)) and not in_checkpoint):
        return closed
    jaxpr, eqns = closed.jaxpr, list[JaxprEqn]()
    for eqn in jaxpr.eqns:
        name, bodies = _jaxpr.name(eqn), _jaxpr.bodies(eqn)
        if in_checkpoint and name == "custom_jvp_call" and bodies and holds_product(eqn):
            attached = trace(inside, lambda *args, eqn=eqn: _attached(eqn, args), _jaxpr.avals(eqn.invars))
            eqns.extend(_evaluate.inline(attached, eqn.invars, eqn.outvars))
        elif name in _SAME_FUNCTION and bodies:
            around = eqn if name == "shard_map" else inside
            new = [lower(body, in_checkpoint or _has_policy(eqn), around) for body in bodies]
            eqns.append(_evaluate.with_bodies(eqn, new, eqn.invars, eqn.outvars))
        else:
            eqns.append(eqn)
    constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    return _evaluate.closed_jaxpr(constants, jaxpr.invars, jaxpr.outvars, eqns)


def _has_policy(eqn: JaxprEqn) -> bool:
    """Whether an equation is a checkpoint under `jax_remat3` that keeps some values and not others."""
    params, policies = _jaxpr.params(eqn), jax.checkpoint_policies
    is_new = _jaxpr.name(eqn) == "remat2" and "differentiated" not in params
    return is_new and params["policy"] not in (None, policies.everything_saveable)


def _attached(eqn: JaxprEqn, operands: Sequence[Array]) -> list[Array]:
    """The results of a custom_jvp call, of which only the derivative is in a custom rule."""
    (body,) = _jaxpr.bodies(eqn) or ()
    n = len(eqn.outvars)

    @jax.custom_jvp
    def attach(*args: Array) -> list[Array]:
        return list(args[:n])

    def rule(primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[list[Array], list[Any]]:
        given = primals[n:]
        moving = [i for i, t in enumerate(tangents[n:]) if not isinstance(t, SymbolicZero)]
        call = lambda *xs: _evaluate.bind(eqn, _evaluate.replaced(given, moving, xs), _jaxpr.avals(eqn.outvars))
        found = jax.jvp(call, [given[i] for i in moving], [tangents[n + i] for i in moving])[1]
        return list(primals[:n]), found

    attach.defjvp(rule, symbolic_zeros=True)
    found: list[Array] = attach(*_evaluate.call(body, list(map(lax.stop_gradient, operands))), *operands)
    return found
