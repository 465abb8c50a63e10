"""The recursion into control flow, calls and custom derivatives: the same construct around rewritten bodies.

When JAX asks for a custom rule, it is traced through the original call and rewritten by the callback `Rewrite`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero, linear_call
from jax.tree_util import Partial

from jamp import _evaluate, _jaxpr
from jamp._autocast.context import Input
from jamp._cast import is_inexact
from jamp._jaxpr import ClosedJaxpr, JaxprEqn, Var
from jamp._shard_map import trace


class Rewritten(Protocol):
    """A rewritten jaxpr. `stored` says which of its outputs are exact in 16 bit."""

    stored: list[bool]

    def closed(self, low: Sequence[bool] | None = None) -> ClosedJaxpr:
        """The jaxpr to evaluate. `low` says which outputs are to be 16 bit."""


class Rewrite(Protocol):
    """Rewrites a jaxpr. `backward` says that it is the backward rule of a custom_vjp."""

    def __call__(self, closed: ClosedJaxpr, inputs: Sequence[Input], backward: bool = False) -> Rewritten: ...


# The results of these keep their traced dtypes, because the author's derivative rule computes them too.
KEEPS_RESULTS = ("custom_jvp_call", "custom_vjp_call", "linear_call", "remat_opt")


class _Call(NamedTuple):
    """A call with a custom rule: the equation, its rewritten body, its operands, and the callback."""

    eqn: JaxprEqn
    body: ClosedJaxpr
    known: Sequence[Input]
    rewrite: Rewrite

    def run(self, args: Sequence[Any]) -> list[Any]:
        return _evaluate.call(self.body, args)

    def replay(
        self,
        fun: Callable[..., Any],
        avals: Sequence[Any],
        args: Sequence[Any],
        low: Callable[[list[bool]], Sequence[bool]],
        weights: Sequence[bool] = (),
        backward: bool = False,
    ) -> list[Any]:
        """Trace `fun` at `avals`, rewrite it, and evaluate it on `args`. `low` says which results are 16 bit."""
        closed = jax.make_jaxpr(fun)(*avals)
        types = zip(args, avals, weights or [False] * len(args), strict=True)
        inputs = [Input(jax.typeof(x).dtype != aval.dtype, weight=is_weight) for x, aval, is_weight in types]
        rewritten = self.rewrite(closed, inputs, backward)
        return _evaluate.call(rewritten.closed(low(rewritten.stored)), args)


def enter(
    eqn: JaxprEqn,
    bodies: Sequence[Rewritten],
    known: Sequence[Input],
    low: Sequence[bool],
    reads: Sequence[Any],
    writes: Sequence[Var],
    rewrite: Rewrite,
    inside: JaxprEqn | None,
) -> list[JaxprEqn]:
    """The equations of a construct with rewritten bodies. `low` results are 16 bit. It may be `inside` a shard_map."""
    name = _jaxpr.name(eqn)
    if name in _RETRACED:
        call = _Call(eqn, bodies[0].closed(), known, rewrite)
        closed = trace(inside, lambda *args: _RETRACED[name](call, args), _jaxpr.avals(reads))
        return _evaluate.inline(closed, reads, writes)
    wanted = [[False], low] if name == "while" else [low] * len(bodies)
    closed_bodies = [body.closed(x) for body, x in zip(bodies, wanted, strict=True)]
    entered = _evaluate.with_bodies(eqn, closed_bodies, reads, writes)
    return [
        _evaluate.with_thunk(entered, lambda closed: rewrite(closed, known).closed())
        if name == "remat_opt"
        else entered
    ]


def _custom_jvp(call: _Call, args: Sequence[Any]) -> Sequence[Any]:
    """Keep the author's rule. It is traced through the original call and rewritten like any other code."""
    eqn = call.eqn
    inputs, outputs = _jaxpr.avals(eqn.invars), _jaxpr.avals(eqn.outvars)
    n, floating = len(inputs), [i for i, x in enumerate(outputs) if is_inexact(x)]

    @jax.custom_jvp
    def fun(*xs: Any) -> list[Any]:
        return call.run(xs)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        # Differentiates only inputs that have a tangent, because the author's rule may ask which ones have.
        moving = [i for i, t in enumerate(tangents) if is_inexact(inputs[i]) and not isinstance(t, SymbolicZero)]

        def original(*values: Any) -> Any:
            fun = _as_function_of(eqn, values[:n], moving)
            results, derivatives = jax.jvp(fun, [values[i] for i in moving], list(values[n:]))
            return [*results, *(derivatives[i] for i in floating)]

        types, values = [*inputs, *(inputs[i] for i in moving)], [*primals, *(tangents[i] for i in moving)]
        weights = [x.weight for x in (*call.known, *(call.known[i] for i in moving))]
        results = call.replay(original, types, values, lambda stored: [False] * len(stored), weights)
        derivatives = _evaluate.replaced(list(map(_no_tangent, outputs)), floating, results[len(outputs) :])
        return results[: len(outputs)], derivatives

    fun.defjvp(rule, symbolic_zeros=_jaxpr.asks_for_zeros(eqn))
    result: list[Any] = fun(*args)
    return result


def _custom_vjp(call: _Call, args: Sequence[Any]) -> Sequence[Any]:
    """As `_custom_jvp`. The residuals of the forward rule are 16 bit where that is exact."""
    eqn = call.eqn
    inputs, outputs = _jaxpr.avals(eqn.invars), _jaxpr.avals(eqn.outvars)
    asks = _jaxpr.asks_for_zeros(eqn)

    @jax.custom_vjp
    def fun(*xs: Any) -> list[Any]:
        return call.run(xs)

    def forward(*primals: Any) -> tuple[list[Any], Any]:
        xs = [x.value for x in primals] if asks else primals
        moving = [i for i, x in enumerate(primals) if is_inexact(inputs[i]) and (not asks or x.perturbed)]
        traced: list[Any] = []

        def original(*values: Any) -> Any:
            results, pull_back = jax.vjp(_as_function_of(eqn, values, moving), *(values[i] for i in moving))
            residuals, structure = jax.tree.flatten(pull_back)
            traced[:] = structure, [jax.typeof(x) for x in residuals]
            return [*results, *residuals]

        low = lambda stored: [False] * len(outputs) + stored[len(outputs) :]
        values = call.replay(original, inputs, xs, low)
        # The static values reach the backward rule in the function of a Partial.
        rest = functools.partial(_pull_back, call, moving, *traced)
        return values[: len(outputs)], Partial(rest, *values[len(outputs) :])

    fun.defvjp(forward, lambda rest, cotangents: rest(cotangents=cotangents), symbolic_zeros=asks)
    result: list[Any] = fun(*args)
    return result


def _pull_back(
    call: _Call,
    moving: Sequence[int],
    structure: Any,
    types: Sequence[Any],
    *residuals: Any,
    cotangents: Sequence[Any],
) -> tuple[Any, ...]:
    """The backward rule of a custom_vjp: the cotangents of its inputs."""
    inputs, outputs = _jaxpr.avals(call.eqn.invars), _jaxpr.avals(call.eqn.outvars)
    floating = [i for i, x in enumerate(outputs) if is_inexact(x)]

    def original(*values: Any) -> Any:
        pull_back = jax.tree.unflatten(structure, values[: len(residuals)])
        return pull_back(_evaluate.replaced(list(map(_no_tangent, outputs)), floating, values[len(residuals) :]))

    dense = lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x
    values = [*residuals, *(dense(cotangents[i]) for i in floating)]
    found = call.replay(
        original,
        [*types, *(outputs[i] for i in floating)],
        values,
        lambda _: [call.known[i].low for i in moving],
        backward=True,
    )
    return tuple(_evaluate.replaced([None] * len(inputs), moving, found))


def _no_tangent(aval: Any) -> Any:
    return np.zeros(aval.shape, jax.dtypes.float0)


def _linear_call(call: _Call, args: Sequence[Any]) -> Sequence[Any]:
    """A linear function with its own transpose, traced through the original call."""
    inputs, n = _jaxpr.avals(call.eqn.invars), _jaxpr.residuals(call.eqn)

    def transposed(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        def original(*values: Any) -> Any:
            fun = _as_function_of(call.eqn, [*values[:n], *inputs[n:]], range(n, len(inputs)))
            return jax.linear_transpose(fun, *inputs[n:])(list(values[n:]))

        types = [*inputs[:n], *_jaxpr.avals(call.eqn.outvars)]
        return call.replay(original, types, [*residuals, *cotangents], lambda _: [x.low for x in call.known[n:]])

    fun = lambda residuals, operands: call.run([*residuals, *operands])
    values: Sequence[Any] = linear_call(fun, transposed, list(args[:n]), list(args[n:]))
    return values


def _as_function_of(eqn: JaxprEqn, operands: Sequence[Any], some: Sequence[int]) -> Callable[..., list[Any]]:
    """An equation as it was traced, as a function of some of its operands."""

    def original(*values: Any) -> list[Any]:
        return _evaluate.bind(eqn, _evaluate.replaced(operands, some, values), _jaxpr.avals(eqn.outvars))

    return original


_RETRACED: dict[str, Callable[[_Call, Sequence[Any]], Sequence[Any]]] = {
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "linear_call": _linear_call,
}
