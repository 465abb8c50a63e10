"""Build equations and jaxprs."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from jamp._jaxprs import ir
from jamp._jaxprs.constructs import BODIES, LOOPS
from jamp._jaxprs.ir import ClosedJaxpr, Jaxpr, JaxprEqn, Var, avals
from jamp._jaxprs.primitives import PRODUCTS
from jamp._jaxprs.source import user_line

CAST = "jamp.cast"  # the name scope of the casts that jamp adds to a jaxpr


def closed_jaxpr(
    constants: dict[Var, Any], inputs: Sequence[Var], outputs: Sequence[Any], eqns: Sequence[JaxprEqn]
) -> ClosedJaxpr:
    """Build a closed jaxpr from equations. Reads and writes of a Ref that is made in it are no effects of it."""
    made = {v for eqn in eqns for v in eqn.outvars if ir.is_ref(v)}
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    if made:
        is_inside = lambda effect: any(v is ref for v in vars(effect).values() for ref in made)
        effects = frozenset(x for x in effects if not is_inside(x))
    # JAX warns if a Jaxpr is made without a DebugInfo.
    debug_info = core.DebugInfo("jamp", "jamp", None, None)
    is_high = any(map(ir.is_high, eqns))
    jaxpr = core.Jaxpr(list(constants), list(inputs), list(outputs), list(eqns), effects, debug_info, is_high)
    return core.ClosedJaxpr(jaxpr, list(constants.values()))


def without_constants(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same jaxpr with its constants as its first inputs."""
    jaxpr = closed.jaxpr
    return closed_jaxpr({}, [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns)


def without_dead_code(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return the same function without equations that no result needs. Its inputs stay."""
    return ClosedJaxpr(dce_jaxpr(closed.jaxpr, [True] * len(closed.out_avals), instantiate=True)[0], closed.consts)


def in_scope_of(eqn: JaxprEqn, call: JaxprEqn) -> JaxprEqn:
    """An equation of the body of a call, with the scopes of the call around its own.

    In a call of JAX, such as `jnp.where`, no line is of the user, so it has the line of the call. A product keeps its
    own: by it, autocast knows the products of JAX's linear algebra.
    """
    stack = call.source_info.name_stack + eqn.source_info.name_stack
    has_line = ir.name(eqn) in PRODUCTS or user_line(eqn) is not None
    source = eqn.source_info if has_line else call.source_info
    return eqn.replace(source_info=source.replace(name_stack=stack))


def located(eqn: JaxprEqn, like: JaxprEqn) -> JaxprEqn:
    """An equation with the line and the mesh of another, and its scopes around its own."""
    stack = like.source_info.name_stack + eqn.source_info.name_stack
    return eqn.replace(source_info=like.source_info.replace(name_stack=stack), ctx=like.ctx)


def loop(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The loop of JAX that a construct of jamp runs, at its line and in its scopes. None for any other equation."""
    run = LOOPS.get(ir.name(eqn))
    if run is None:
        return None
    with ir.trace_context(eqn):
        closed = jax.make_jaxpr(functools.partial(run, **ir.params(eqn)))(*avals(eqn.invars))
    jaxpr, constants = closed.jaxpr, dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    return closed_jaxpr(constants, jaxpr.invars, jaxpr.outvars, [located(x, eqn) for x in jaxpr.eqns])


def with_bodies(
    eqn: JaxprEqn, bodies: Sequence[ClosedJaxpr], invars: Sequence[Any], outvars: Sequence[Var]
) -> JaxprEqn:
    """A construct with other operands, results and bodies. The bodies are in the order of `constructs.bodies`."""
    params = ir.params(eqn)
    if "branches" in params:
        new: dict[str, Any] = {"branches": tuple(bodies)}
    elif "jaxprs" in params:
        old, given = params["jaxprs"], iter(bodies)
        new = {"jaxprs": type(old)(*(None if x is None else next(given) for x in old))}
    else:
        names = [name for name in BODIES if name in params]
        fitting = [
            body if hasattr(params[name], "consts") else _opened(body) for name, body in zip(names, bodies, strict=True)
        ]
        new = dict(zip(names, fitting, strict=True))
    effects = frozenset().union(*(body.effects for body in bodies))
    return ir.with_params(eqn, **new).replace(invars=list(invars), outvars=list(outvars), effects=effects)


def with_thunk(eqn: JaxprEqn, rewrite: Callable[[ClosedJaxpr], ClosedJaxpr]) -> JaxprEqn:
    """A remat_opt (the forward rule of a custom_vjp) whose `fun_jaxpr_thunk` returns the rewritten primal function."""
    original = eqn.params["fun_jaxpr_thunk"]

    def thunk() -> tuple[Jaxpr, Sequence[Any]]:
        jaxpr, constants = original()
        closed = rewrite(core.ClosedJaxpr(jaxpr, constants))
        return closed.jaxpr, closed.consts

    return eqn.replace(params={**eqn.params, "fun_jaxpr_thunk": thunk})


def _opened(body: ClosedJaxpr) -> Jaxpr:
    assert not body.consts  # a construct that holds an open jaxpr has its constants among its operands
    return body.jaxpr


def convert(source: Var, target: Var, like: JaxprEqn | None) -> JaxprEqn:
    """The equation that casts a variable to the dtype of another, in the scope `CAST`, at the place of `like`."""
    template = _conversion()
    eqn = replace_dtype(template, np.dtype(np.float32), avals([target])[0].dtype)
    eqn = eqn.replace(invars=[source], outvars=[target])
    return located(eqn, like) if like else eqn


@functools.cache
def _conversion() -> JaxprEqn:
    cast = jax.named_scope(CAST)(lambda x: jax.lax.convert_element_type(x, np.float32))
    return jax.make_jaxpr(cast)(np.int8(0)).eqns[0]


def replace_dtype(eqn: JaxprEqn, old: Any, new: Any) -> JaxprEqn:
    """An equation with another dtype in its parameters (preferred_element_type, new_dtype)."""
    is_old = lambda param: isinstance(param, (np.dtype, type)) and param == old
    if ir.name(eqn) == "name":
        (aval,) = avals(eqn.invars)
        return ir.with_name_for(eqn, aval.update(dtype=new) if aval.dtype == old else aval)
    return eqn.replace(params={name: new if is_old(param) else param for name, param in eqn.params.items()})


def widened(eqn: JaxprEqn, narrow: Iterable[Any], wide: np.dtype[Any]) -> JaxprEqn:
    """An equation in a `wide` dtype in place of some `narrow` ones. A product has the highest precision."""
    for dtype in narrow:
        eqn = replace_dtype(eqn, dtype, wide)
    if "precision" not in eqn.params:
        return eqn
    return eqn.replace(params={**eqn.params, "precision": (jax.lax.Precision.HIGHEST,) * 2})


def replaced(values: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """The values, with new ones at some places."""
    given = dict(zip(places, new, strict=True))
    return [given.get(i, x) for i, x in enumerate(values)]
