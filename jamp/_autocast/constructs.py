"""Evaluate a planned jaxpr; control flow and custom derivatives through the public functions that make them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jamp import _jaxpr
from jamp._autocast.plan import Input, PlannedEqn, PlannedJaxpr
from jamp._autocast.planner import Planner
from jamp._jaxpr import ClosedJaxpr, JaxprEqn


def run(body: PlannedJaxpr, args: Sequence[Any], low: Sequence[bool]) -> list[Any]:
    """The outputs of a planned jaxpr, each low or at its traced dtype as `low` says."""
    env: _jaxpr.Env = dict(zip(body.closed.jaxpr.constvars, body.closed.consts, strict=True))
    env |= dict(zip(body.inputs, args, strict=True))
    read_later = {v for v in body.outputs if not _jaxpr.is_literal(v)}
    needed = []
    for piece in reversed(body.pieces):
        needed.append(read_later)
        reads = piece.reads if isinstance(piece, PlannedEqn) else [v for eqn in piece for v in eqn.invars]
        read_later = read_later.union(v for v in reads if not _jaxpr.is_literal(v))
    for piece, wanted in zip(body.pieces, reversed(needed), strict=True):
        if isinstance(piece, PlannedEqn):
            values = _ENTER[piece.key](piece, [_jaxpr.read(env, v) for v in piece.reads])
            env.update(zip(piece.writes, values, strict=True))
        else:
            _jaxpr.evaluate(piece, env, wanted.__contains__)
    values = [_jaxpr.read(env, v) for v in body.outputs]
    avals = _jaxpr.avals(body.closed.jaxpr.outvars)
    return [_cast(body.planner, x, aval, want) for x, aval, want in zip(values, avals, low, strict=True)]


def _cast(planner: Planner, x: Any, aval: Any, low: bool) -> Any:
    """A value in the compute dtype, or in its traced dtype, weak if that was weak."""
    if low:
        return lax.convert_element_type(x, planner.compute_dtype)
    found = jax.typeof(x)
    if (found.dtype, found.weak_type) == (aval.dtype, aval.weak_type):
        return x
    x = lax.convert_element_type(x, aval.dtype)
    return _jaxpr.weaken(x) if aval.weak_type else x


def _traced(body: PlannedJaxpr) -> ClosedJaxpr:
    """A jaxpr at its planned dtypes, traced once, so that equal calls stay one function to the compiler."""
    if body.traced is None:
        body.traced = jax.make_jaxpr(lambda *args: run(body, args, body.low))(*_jaxpr.avals(body.inputs))
    return body.traced


def _call(planned: PlannedEqn, args: Sequence[Any]) -> Sequence[Any]:
    """A jit or remat call: the same call of another body, so that shardings, policy and the rest stay."""
    eqn, consts = _jaxpr.with_body(planned.eqn, _traced(planned.bodies[0]))
    return _jaxpr.bind(eqn, [*consts, *args], _jaxpr.avals(planned.writes))


def _scan(planned: PlannedEqn, args: Sequence[Any]) -> Sequence[Any]:
    carry, (body,) = _jaxpr.carry(planned.eqn), planned.bodies
    low = [i >= len(carry) and x for i, x in enumerate(body.low)]

    def one_step(state: Any, xs: Any) -> Any:
        values = run(body, [*args[: carry.start], *state, *xs], low)
        return values[: len(carry)], values[len(carry) :]

    init, xs = list(args[carry.start : carry.stop]), list(args[carry.stop :])
    state, ys = lax.scan(one_step, init, xs, **_jaxpr.scan_options(planned.eqn))
    return [*state, *ys]


def _while(planned: PlannedEqn, args: Sequence[Any]) -> Sequence[Any]:
    cond, body = planned.bodies
    carry, n = _jaxpr.carry(planned.eqn), _jaxpr.condition_constants(planned.eqn)

    def holds(state: Any) -> Any:
        return run(cond, [*args[:n], *state], cond.low)[0]

    def one_step(state: Any) -> Any:
        return run(body, [*args[n : carry.start], *state], [False] * len(carry))

    values: list[Any] = lax.while_loop(holds, one_step, list(args[carry.start :]))
    return values


def _cond(planned: PlannedEqn, args: Sequence[Any]) -> Sequence[Any]:
    low = [all(body.low[i] for body in planned.bodies) for i in range(len(planned.writes))]
    branches = [lambda *xs, body=body: run(body, xs, low) for body in planned.bodies]
    values: list[Any] = lax.switch(args[0], branches, *args[1:])
    return values


def _shard_map(planned: PlannedEqn, args: Sequence[Any]) -> Sequence[Any]:
    (body,) = planned.bodies
    mapped = jax.shard_map(lambda *xs: tuple(run(body, xs, body.low)), **_jaxpr.shard_map_options(planned.eqn))
    values: Sequence[Any] = mapped(*args)
    return values


def _custom_jvp(planned: PlannedEqn, args: Sequence[Any]) -> Sequence[Any]:
    """Keep the author's rule. It is traced through the original call and planned like any other code."""
    (body,) = planned.bodies
    n, result_low = len(args), body.low

    @jax.custom_jvp
    def call(*xs: Any) -> list[Any]:
        return run(body, xs, result_low)

    @call.defjvp
    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        differentiable = _differentiable(planned.eqn)

        def original(*values: Any) -> Any:
            primals, tangents = values[:n], values[n:]
            fun = _as_function_of(planned.eqn, primals, differentiable)
            return jax.jvp(fun, [primals[i] for i in differentiable], list(tangents))

        avals = _jaxpr.avals(planned.eqn.invars)
        values = _replay(
            body.planner,
            original,
            [*avals, *(avals[i] for i in differentiable)],
            [*primals, *(tangents[i] for i in differentiable)],
            lambda _: [*result_low, *result_low],
        )
        return values[: len(result_low)], values[len(result_low) :]

    result: list[Any] = call(*args)
    return result


def _custom_vjp(planned: PlannedEqn, args: Sequence[Any]) -> Sequence[Any]:
    """As `_custom_jvp`. The residuals of the forward rule have the dtypes that were planned for them."""
    (body,) = planned.bodies
    result_low, differentiable = body.low, _differentiable(planned.eqn)
    avals = _jaxpr.avals(planned.eqn.invars)
    saved: dict[str, Any] = {}

    @jax.custom_vjp
    def call(*xs: Any) -> list[Any]:
        return run(body, xs, result_low)

    def forward(*xs: Any) -> tuple[list[Any], list[Any]]:
        def original(*values: Any) -> Any:
            fun = _as_function_of(planned.eqn, values, differentiable)
            results, backward = jax.vjp(fun, *(values[i] for i in differentiable))
            residuals, saved["backward"] = jax.tree.flatten(backward)
            saved["avals"] = [jax.typeof(r) for r in residuals]
            return [*results, *residuals]

        values = _replay(
            body.planner, original, avals, xs, lambda planned: [*result_low, *planned.low[len(result_low) :]]
        )
        return values[: len(result_low)], values[len(result_low) :]

    def backward(residuals: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
        def original(*values: Any) -> Any:
            pull_back = jax.tree.unflatten(saved["backward"], values[: len(residuals)])
            return pull_back(list(values[len(residuals) :]))

        types = [*saved["avals"], *_jaxpr.avals(planned.eqn.outvars)]
        operand_low = [x.dtype != aval.dtype for x, aval in zip(args, avals, strict=True)]
        values = _replay(
            body.planner, original, types, [*residuals, *cotangents], lambda _: [operand_low[i] for i in differentiable]
        )
        by_position = dict(zip(differentiable, values, strict=True))
        return tuple(by_position.get(i) for i in range(len(args)))

    call.defvjp(forward, backward)
    result: list[Any] = call(*args)
    return result


def _differentiable(eqn: JaxprEqn) -> list[int]:
    """The operands with respect to which a call can be differentiated."""
    return [i for i, x in enumerate(_jaxpr.avals(eqn.invars)) if jnp.issubdtype(x.dtype, jnp.inexact)]


def _as_function_of(eqn: JaxprEqn, operands: Sequence[Any], some: Sequence[int]) -> Callable[..., list[Any]]:
    """An equation as it was traced, as a function of some of its operands."""

    def original(*values: Any) -> list[Any]:
        given = dict(zip(some, values, strict=True))
        return _jaxpr.bind(eqn, [given.get(i, x) for i, x in enumerate(operands)], _jaxpr.avals(eqn.outvars))

    return original


def _replay(
    planner: Planner, fun: Callable[..., Any], avals: Sequence[Any], args: Sequence[Any], low: Callable[..., Any]
) -> list[Any]:
    """Trace `fun` at `avals`, and evaluate it on `args`, of which some are low."""
    closed = jax.make_jaxpr(fun)(*avals)
    body = planner.body(closed, [Input(x.dtype != aval.dtype) for x, aval in zip(args, avals, strict=True)])
    return run(body, args, low(body))


_ENTER: dict[str, Callable[[PlannedEqn, Sequence[Any]], Sequence[Any]]] = {
    "jit": _call,
    "remat2": _call,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
}
