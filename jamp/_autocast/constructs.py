"""Enter control flow, calls and custom derivatives: the same construct around planned bodies."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jamp import _evaluate, _jaxpr
from jamp._jaxpr import JaxprEqn, Var


def enter(
    eqn: JaxprEqn, bodies: Sequence[Any], low: Sequence[bool], reads: Sequence[Any], writes: Sequence[Var]
) -> list[JaxprEqn]:
    """The equations of a construct whose bodies are planned, and of whose results some are low."""
    name = eqn.primitive.name
    if name in _RETRACED:
        closed = jax.make_jaxpr(lambda *args: _RETRACED[name](eqn, bodies[0], low, args))(*_jaxpr.avals(reads))
        return _evaluate.inline(closed, reads, writes)
    wanted = [(False,), tuple(low)] if name == "while" else [tuple(low)] * len(bodies)
    planned = [body.program(x).closed for body, x in zip(bodies, wanted, strict=True)]
    return [_evaluate.with_bodies(eqn, planned, reads, writes)]


def _run(body: Any, args: Sequence[Any], low: Sequence[bool]) -> list[Any]:
    return _evaluate.call(body.program(tuple(low)).closed, args)


def _shard_map(eqn: JaxprEqn, body: Any, low: Sequence[bool], args: Sequence[Any]) -> Sequence[Any]:
    mapped = jax.shard_map(lambda *xs: tuple(_run(body, xs, low)), **_jaxpr.shard_map_options(eqn))
    values: Sequence[Any] = mapped(*args)
    return values


def _custom_jvp(eqn: JaxprEqn, body: Any, result_low: Sequence[bool], args: Sequence[Any]) -> Sequence[Any]:
    """Keep the author's rule. It is traced through the original call and planned like any other code."""
    n = len(args)

    @jax.custom_jvp
    def call(*xs: Any) -> list[Any]:
        return _run(body, xs, result_low)

    @call.defjvp
    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        differentiable = _differentiable(eqn)

        def original(*values: Any) -> Any:
            primals, tangents = values[:n], values[n:]
            fun = _as_function_of(eqn, primals, differentiable)
            return jax.jvp(fun, [primals[i] for i in differentiable], list(tangents))

        avals = _jaxpr.avals(eqn.invars)
        values = _replay(
            body,
            original,
            [*avals, *(avals[i] for i in differentiable)],
            [*primals, *(tangents[i] for i in differentiable)],
            lambda _: [*result_low, *result_low],
        )
        return values[: len(result_low)], values[len(result_low) :]

    result: list[Any] = call(*args)
    return result


def _custom_vjp(eqn: JaxprEqn, body: Any, result_low: Sequence[bool], args: Sequence[Any]) -> Sequence[Any]:
    """As `_custom_jvp`. The residuals of the forward rule have the dtypes that were planned for them."""
    differentiable = _differentiable(eqn)
    avals = _jaxpr.avals(eqn.invars)
    saved: dict[str, Any] = {}

    @jax.custom_vjp
    def call(*xs: Any) -> list[Any]:
        return _run(body, xs, result_low)

    def forward(*xs: Any) -> tuple[list[Any], list[Any]]:
        def original(*values: Any) -> Any:
            fun = _as_function_of(eqn, values, differentiable)
            results, backward = jax.vjp(fun, *(values[i] for i in differentiable))
            residuals, saved["backward"] = jax.tree.flatten(backward)
            saved["avals"] = [jax.typeof(r) for r in residuals]
            return [*results, *residuals]

        values = _replay(body, original, avals, xs, lambda planned: [*result_low, *planned.low[len(result_low) :]])
        return values[: len(result_low)], values[len(result_low) :]

    def backward(residuals: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
        def original(*values: Any) -> Any:
            pull_back = jax.tree.unflatten(saved["backward"], values[: len(residuals)])
            return pull_back(list(values[len(residuals) :]))

        types = [*saved["avals"], *_jaxpr.avals(eqn.outvars)]
        operand_low = [x.dtype != aval.dtype for x, aval in zip(args, avals, strict=True)]
        values = _replay(
            body, original, types, [*residuals, *cotangents], lambda _: [operand_low[i] for i in differentiable]
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
        return _evaluate.bind(eqn, [given.get(i, x) for i, x in enumerate(operands)], _jaxpr.avals(eqn.outvars))

    return original


def _replay(
    like: Any, fun: Callable[..., Any], avals: Sequence[Any], args: Sequence[Any], low: Callable[..., Any]
) -> list[Any]:
    """Trace `fun` at `avals`, and evaluate it on `args`, of which some are low."""
    closed = jax.make_jaxpr(fun)(*avals)
    body = like.same_as(closed, [x.dtype != aval.dtype for x, aval in zip(args, avals, strict=True)])
    return _run(body, args, low(body))


_RETRACED: dict[str, Callable[[JaxprEqn, Any, Sequence[bool], Sequence[Any]], Sequence[Any]]] = {
    "shard_map": _shard_map,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
}
