"""Build equations and jaxprs, and evaluate them."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jamp import _jaxpr
from jamp._jaxpr import BODIES, ClosedJaxpr, Env, Jaxpr, JaxprEqn, Var, avals, bodies, inlinable, is_literal

CAST = "jamp.cast"  # the name scope of the casts that jamp adds to a jaxpr
Run = Callable[[JaxprEqn, list[Any]], Sequence[Any]]  # an equation and its operands to its results


def closed_jaxpr(
    constants: dict[Var, Any], inputs: Sequence[Var], outputs: Sequence[Any], eqns: Sequence[JaxprEqn]
) -> ClosedJaxpr:
    """Build a closed jaxpr from equations. Reads and writes of a Ref that is made in it are no effects of it."""
    made = {v for eqn in eqns for v in eqn.outvars if _jaxpr.is_ref(v)}
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    if made:
        is_inside = lambda effect: any(v is ref for v in vars(effect).values() for ref in made)
        effects = frozenset(x for x in effects if not is_inside(x))
    # JAX warns if a Jaxpr is made without a DebugInfo.
    debug_info = core.DebugInfo("jamp", "jamp", None, None)
    is_high = any(map(_jaxpr.is_high, eqns))
    jaxpr = core.Jaxpr(list(constants), list(inputs), list(outputs), list(eqns), effects, debug_info, is_high)
    return core.ClosedJaxpr(jaxpr, list(constants.values()))


def without_constants(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same jaxpr with its constants as its first inputs."""
    jaxpr = closed.jaxpr
    return closed_jaxpr({}, [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns)


def call(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr."""
    values: list[Any] = core.jaxpr_as_fun(closed)(*args)
    return values


def evaluate(eqns: Sequence[JaxprEqn], env: Env, needed: Callable[[Var], bool]) -> None:
    """Evaluate `eqns` at their traced dtypes and add to `env` those outputs that are `needed`."""
    defined = dict.fromkeys(v for eqn in eqns for v in eqn.outvars)
    reads: dict[Any, None] = dict.fromkeys(v for eqn in eqns for v in eqn.invars if not is_literal(v))
    inputs = [v for v in reads if v not in defined]
    outputs = [v for v in defined if needed(v)]
    closed = closed_jaxpr({}, inputs, outputs, eqns)
    env.update(zip(outputs, call(closed, [env[v] for v in inputs]), strict=True))


def bind(eqn: JaxprEqn, args: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Evaluate one equation on values of any dtypes that it accepts. `results` are the types of its results."""
    inputs: list[Any] = [core.Var(jax.typeof(x)) for x in args]
    outputs = [core.Var(aval) for aval in results]
    env: Env = dict(zip(inputs, args, strict=True))
    evaluate([eqn.replace(invars=inputs, outvars=outputs)], env, lambda v: True)
    return [env[v] for v in outputs]


def interpret(jaxpr: Jaxpr, values: Sequence[Any], run: Run, literal: Callable[[Any], Any] = _jaxpr.value) -> list[Any]:
    """The results of a jaxpr whose equations are evaluated one by one, on values of any kind.

    `values` are those of its constants and inputs. `run` returns the results of an equation, given its operands.
    `literal` returns the value of a literal.
    """
    env: Env = dict(zip([*jaxpr.constvars, *jaxpr.invars], values, strict=True))
    read = lambda v: literal(v) if is_literal(v) else env[v]
    last_use = _jaxpr.last_uses(jaxpr)
    for index, eqn in enumerate(jaxpr.eqns):
        env.update(zip(eqn.outvars, run(eqn, [read(v) for v in eqn.invars]), strict=True))
        for v in {v for v in (*eqn.invars, *eqn.outvars) if not is_literal(v)}:
            if last_use.get(v, -1) <= index:
                del env[v]  # The activations of a model would not all fit in memory.
    return [read(v) for v in jaxpr.outvars]


def interpret_names(closed: ClosedJaxpr, inputs: Sequence[Any], run: Run) -> list[Any]:
    """Interpret a jaxpr on variables and literals. Its constants become literals."""
    constants = [core.Literal(x, jax.typeof(x)) for x in closed.consts]
    return interpret(closed.jaxpr, [*constants, *inputs], run, lambda v: v)


def inline(closed: ClosedJaxpr, inputs: Sequence[Any], outputs: Sequence[Var]) -> list[JaxprEqn]:
    """The equations of a jaxpr, with `inputs` and `outputs` in place of its own, and new variables in between."""
    return _inlined(closed, inputs, lambda eqn: None, dict(zip(closed.jaxpr.outvars, outputs, strict=True)))[0]


def inlined(closed: ClosedJaxpr, inputs: Sequence[Any]) -> tuple[list[JaxprEqn], list[Any]]:
    """The equations and the outputs of a jaxpr, with `inputs` in place of its own and new variables for all others."""
    return _inlined(closed, inputs, lambda eqn: None, {})


def located(eqn: JaxprEqn, like: JaxprEqn) -> JaxprEqn:
    """An equation with the line and the mesh of another, and its scopes around its own."""
    stack = like.source_info.name_stack + eqn.source_info.name_stack
    return eqn.replace(source_info=like.source_info.replace(name_stack=stack), ctx=like.ctx)


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


def with_bodies(
    eqn: JaxprEqn, bodies: Sequence[ClosedJaxpr], invars: Sequence[Any], outvars: Sequence[Var]
) -> JaxprEqn:
    """A construct with other operands, results and bodies. The bodies are in the order of `_jaxpr.bodies`."""
    params = _jaxpr.params(eqn)
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
    return _jaxpr.with_params(eqn, **new).replace(invars=list(invars), outvars=list(outvars), effects=effects)


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


def body_of_call(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The body of a call that, unless it is differentiated, only evaluates this body. Otherwise None."""
    calls = ("custom_jvp_call", "custom_vjp_call", "closed_call", "scaled_call")
    if _jaxpr.name(eqn) in calls or (_jaxpr.name(eqn) == "remat2" and not eqn.params.get("differentiated")):
        found = bodies(eqn)
        return found[0] if found else None
    return inlinable(eqn)


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
    if _jaxpr.name(eqn) == "name":
        (aval,) = avals(eqn.invars)
        return _jaxpr.with_name_for(eqn, aval.update(dtype=new) if aval.dtype == old else aval)
    return eqn.replace(params={name: new if is_old(param) else param for name, param in eqn.params.items()})


def widened(eqn: JaxprEqn, narrow: Iterable[Any], wide: np.dtype[Any]) -> JaxprEqn:
    """An equation in a `wide` dtype in place of some `narrow` ones. A product has the highest precision."""
    for dtype in narrow:
        eqn = replace_dtype(eqn, dtype, wide)
    if "precision" not in eqn.params:
        return eqn
    return eqn.replace(params={**eqn.params, "precision": (jax.lax.Precision.HIGHEST,) * 2})


def batched(closed: ClosedJaxpr, axis: Any, args: Sequence[Any], axes: Sequence[Any]) -> ClosedJaxpr:
    """A jaxpr of batches, along the first axis of each result. JAX gives `axis` to the batching rule of a primitive."""
    run = lambda *xs: call(closed, xs)
    mapped = jax.vmap(run, tuple(axes), axis_name=axis.name, axis_size=axis.size, spmd_axis_name=axis.spmd_name)
    return without_constants(jax.make_jaxpr(mapped)(*args))


def replaced(values: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """The values, with new ones at some places."""
    given = dict(zip(places, new, strict=True))
    return [given.get(i, x) for i, x in enumerate(values)]


def weaken(x: Any) -> Any:
    """A value made weakly typed, as a traced Python scalar is. JAX has no public function for this."""
    eqn = jax.make_jaxpr(lambda y: jax.lax.convert_element_type(y, x.dtype))(np.uint8(0)).eqns[0]
    return bind(eqn.replace(params={**eqn.params, "weak_type": True}), [x], [jax.typeof(x)])[0]
