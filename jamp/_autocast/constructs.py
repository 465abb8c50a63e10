"""Enter control flow, calls and custom derivatives: the same construct around planned bodies."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero, linear_call
from jax.tree_util import Partial

from jamp import _evaluate, _jaxpr
from jamp._cast import is_inexact
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
    return _evaluate.call(body.program(low).closed, args)


def _shard_map(eqn: JaxprEqn, body: Any, low: Sequence[bool], args: Sequence[Any]) -> Sequence[Any]:
    mapped = jax.shard_map(lambda *xs: tuple(_run(body, xs, low)), **_jaxpr.shard_map_options(eqn))
    values: Sequence[Any] = mapped(*args)
    return values


def _custom_jvp(eqn: JaxprEqn, body: Any, result_low: Sequence[bool], args: Sequence[Any]) -> Sequence[Any]:
    """Keep the author's rule. It is traced through the original call and planned like any other code."""
    inputs, outputs = _jaxpr.avals(eqn.invars), _jaxpr.avals(eqn.outvars)
    n, floating = len(inputs), [i for i, x in enumerate(outputs) if is_inexact(x)]

    @jax.custom_jvp
    def call(*xs: Any) -> list[Any]:
        return _run(body, xs, result_low)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        # Only with respect to what has a tangent: the author's rule may ask what has.
        moving = [i for i, t in enumerate(tangents) if is_inexact(inputs[i]) and not isinstance(t, SymbolicZero)]

        def original(*values: Any) -> Any:
            fun = _as_function_of(eqn, values[:n], moving)
            results, derivatives = jax.jvp(fun, [values[i] for i in moving], list(values[n:]))
            return [*results, *(derivatives[i] for i in floating)]

        types, values = [*inputs, *(inputs[i] for i in moving)], [*primals, *(tangents[i] for i in moving)]
        low = [*result_low, *(result_low[i] for i in floating)]
        results = _replay(body, original, types, values, lambda _: low)
        derivatives = dict(zip(floating, results[len(outputs) :], strict=True))
        return results[: len(outputs)], [derivatives.get(i, _no_tangent(x)) for i, x in enumerate(outputs)]

    call.defjvp(rule, symbolic_zeros=_jaxpr.asks_for_zeros(eqn))
    result: list[Any] = call(*args)
    return result


def _custom_vjp(eqn: JaxprEqn, body: Any, result_low: Sequence[bool], args: Sequence[Any]) -> Sequence[Any]:
    """As `_custom_jvp`. The residuals of the forward rule have the dtypes that were planned for them."""
    inputs, outputs = _jaxpr.avals(eqn.invars), _jaxpr.avals(eqn.outvars)
    asks = _jaxpr.asks_for_zeros(eqn)

    @jax.custom_vjp
    def call(*xs: Any) -> list[Any]:
        return _run(body, xs, result_low)

    def forward(*primals: Any) -> tuple[list[Any], Any]:
        xs = [x.value for x in primals] if asks else primals
        moving = [i for i, x in enumerate(primals) if is_inexact(inputs[i]) and (not asks or x.perturbed)]
        traced: list[Any] = []

        def original(*values: Any) -> Any:
            results, pull_back = jax.vjp(_as_function_of(eqn, values, moving), *(values[i] for i in moving))
            residuals, structure = jax.tree.flatten(pull_back)
            traced[:] = structure, [jax.typeof(x) for x in residuals]
            return [*results, *residuals]

        low = lambda planned: [*result_low, *planned.low[len(outputs) :]]
        values = _replay(body, original, inputs, xs, low)
        # What is static goes to the backward rule as the function of a Partial.
        rest = functools.partial(_pull_back, body, inputs, outputs, moving, *traced)
        return values[: len(outputs)], Partial(rest, *values[len(outputs) :])

    call.defvjp(forward, lambda rest, cotangents: rest(cotangents=cotangents), symbolic_zeros=asks)
    result: list[Any] = call(*args)
    return result


def _pull_back(
    body: Any,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    moving: Sequence[int],
    structure: Any,
    types: Sequence[Any],
    *residuals: Any,
    cotangents: Sequence[Any],
) -> tuple[Any, ...]:
    """The backward rule of a custom_vjp: the cotangents of its inputs."""
    floating = [i for i, x in enumerate(outputs) if is_inexact(x)]

    def original(*values: Any) -> Any:
        given = dict(zip(floating, values[len(residuals) :], strict=True))
        pull_back = jax.tree.unflatten(structure, values[: len(residuals)])
        return pull_back([given.get(i, _no_tangent(x)) for i, x in enumerate(outputs)])

    dense = lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x
    values = [*residuals, *(dense(cotangents[i]) for i in floating)]
    low = [body.inputs[i].low for i in moving]
    found = _replay(body, original, [*types, *(outputs[i] for i in floating)], values, lambda _: low)
    by_position = dict(zip(moving, found, strict=True))
    return tuple(by_position.get(i) for i in range(len(inputs)))


def _no_tangent(aval: Any) -> Any:
    return np.zeros(aval.shape, jax.dtypes.float0)


def _linear_call(eqn: JaxprEqn, body: Any, result_low: Sequence[bool], args: Sequence[Any]) -> Sequence[Any]:
    """A linear function with its own transpose, traced through the original call."""
    inputs, n = _jaxpr.avals(eqn.invars), _jaxpr.residuals(eqn)
    low = [known.low for known in body.inputs[n:]]

    def transposed(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        def original(*values: Any) -> Any:
            fun = _as_function_of(eqn, [*values[:n], *inputs[n:]], range(n, len(inputs)))
            return jax.linear_transpose(fun, *inputs[n:])(list(values[n:]))

        types = [*inputs[:n], *_jaxpr.avals(eqn.outvars)]
        return _replay(body, original, types, [*residuals, *cotangents], lambda _: low)

    fun = lambda residuals, operands: _run(body, [*residuals, *operands], result_low)
    values: Sequence[Any] = linear_call(fun, transposed, list(args[:n]), list(args[n:]))
    return values


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
    body = like.same_as(closed, [jax.typeof(x).dtype != aval.dtype for x, aval in zip(args, avals, strict=True)])
    return _run(body, args, low(body))


_RETRACED: dict[str, Callable[[JaxprEqn, Any, Sequence[bool], Sequence[Any]], Sequence[Any]]] = {
    "shard_map": _shard_map,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "linear_call": _linear_call,
}
