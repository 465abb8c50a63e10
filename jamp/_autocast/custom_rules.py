"""Rebuild constructs around their cast bodies, and their derivative rules.

When JAX asks for a custom rule, it is traced through the original call, cast, and run through the rest of the passes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero, linear_call
from jax.extend import core
from jax.tree_util import Partial

from jamp._autocast.facts import Input, Output
from jamp._autocast.target import Target
from jamp._cast import is_inexact
from jamp._jaxprs import build, constructs, inline, interpret, ir
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn, Var
from jamp._jaxprs.manual_axes import trace_inside


class Rewritten:
    """A jaxpr with products in 16 bit.

    Attributes:
      closed: The jaxpr, or the traced one if nothing in it changes.
      recast: Which of its outputs are 16 bit in place of float32, or by a rule float32 in place of 16 bit.
      changed: Whether anything changes.
      follow_long_sums: Which of its outputs depend on a product that sums more than a few terms.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        recast: Sequence[bool],
        types: Sequence[Any],
        changed: bool,
        follow_long_sums: Sequence[bool],
    ):
        self.closed, self.recast, self.changed, self._types = closed, tuple(recast), changed, types
        self.follow_long_sums = follow_long_sums
        self._done: dict[tuple[bool, ...], ClosedJaxpr] = {self.recast: closed}

    def at(self, recast: Sequence[bool]) -> ClosedJaxpr:
        """The jaxpr with these outputs in the other dtype, and the rest as traced.

        Any output that was traced in 16 bit can be float32. Of the others, only those that are `recast` can be 16 bit.
        """
        wanted = tuple(recast)
        if wanted not in self._done:
            eqns, outputs = list(self.closed.jaxpr.eqns), list(self.closed.jaxpr.outvars)
            for i, v in enumerate(outputs):
                if self.recast[i] != wanted[i]:
                    wide = self._types[i].update(dtype=np.dtype(np.float32))
                    outputs[i] = core.Var(wide if wanted[i] else self._types[i])
                    eqns.append(build.convert(v, outputs[i], eqns[-1] if eqns else None))
            constants = dict(zip(self.closed.jaxpr.constvars, self.closed.consts, strict=True))
            self._done[wanted] = build.closed_jaxpr(constants, self.closed.jaxpr.invars, outputs, eqns)
        return self._done[wanted]


class Rewrite(Protocol):
    """Casts a jaxpr."""

    def __call__(
        self, closed: ClosedJaxpr, inputs: Sequence[Input], outputs: Sequence[Output], in_backward_rule: bool = False
    ) -> Rewritten: ...


class CastConstruct(NamedTuple):
    """A construct whose bodies were cast.

    Attributes:
      eqn: The construct as it was traced.
      bodies: Its bodies.
      inputs, outputs: What is known of the inputs and the outputs of each body.
      recast: Which of its results are 16 bit.
      rewrite: Casts other jaxprs as if they stood in its place.
      rest: The passes after `cast`.
    """

    eqn: JaxprEqn
    bodies: Sequence[Rewritten]
    inputs: Sequence[Sequence[Input]]
    outputs: Sequence[Sequence[Output]]
    recast: Sequence[bool]
    rewrite: Rewrite
    rest: Callable[[ClosedJaxpr], ClosedJaxpr]

    def run(self, args: Sequence[Any]) -> list[Any]:
        """Evaluate the body of a call. Its results have the traced dtypes."""
        return interpret.call(self.bodies[0].at([False] * len(self.recast)), args)

    def replay(
        self,
        fun: Callable[..., Any],
        avals: Sequence[Any],
        args: Sequence[Any],
        inputs: Sequence[Input],
        outputs: Sequence[Output] = (),
        *,
        residuals_from: int | None = None,
        in_backward_rule: bool = False,
    ) -> tuple[list[Any], Sequence[bool]]:
        """Trace a derivative rule, `fun` at `avals`, run the passes on it, and evaluate it on `args`.

        Returns the results, and which of them depend on a product that sums more than a few terms.

        `inputs` say what is known of the arguments, but for whether they are 16 bit. `outputs` say what is known of the
        first results. Results have the traced dtypes. Residuals, which are those from `residuals_from` on, are 16 bit
        where that is exact.
        """
        closed = jax.make_jaxpr(fun)(*avals)
        known = zip(args, avals, inputs, strict=True)
        given = [x._replace(is_stored=jax.typeof(y).dtype != aval.dtype, constant=None) for y, aval, x in known]
        n = len(closed.out_avals)
        stored = [i >= (n if residuals_from is None else residuals_from) for i in range(n)]
        known_outputs = [*outputs, *[Output()] * (n - len(outputs))]
        wanted = [x._replace(keeps_narrow=y) for x, y in zip(known_outputs, stored, strict=True)]
        rewritten = self.rewrite(closed, given, wanted, in_backward_rule)
        recast = [x and y for x, y in zip(rewritten.recast, stored, strict=True)]
        return interpret.call(self.rest(rewritten.at(recast)), args), rewritten.follow_long_sums


def is_entered(eqn: JaxprEqn, manual: bool, target: Target) -> bool:
    """Whether a construct is entered."""
    if ir.name(eqn) == "custom_linear_solve" and target.compute_dtype.itemsize == 2:
        return False  # A solver needs the digits of float32.
    # Inside a shard_map, JAX does not tell a custom rule which of its operands are differentiated.
    return constructs.bodies(eqn) is not None and not (manual and constructs.asks_for_zeros(eqn))


def enter(call: CastConstruct, reads: Sequence[Any], writes: Sequence[Var], inside: JaxprEqn | None) -> list[JaxprEqn]:
    """Return the equations of a construct with cast bodies. It may be `inside` a shard_map."""
    eqn, bodies, recast = call.eqn, call.bodies, call.recast
    name = ir.name(eqn)
    if name in _RETRACED:
        closed = trace_inside(inside, lambda *args: _RETRACED[name](call, args), ir.avals(reads))
        return [build.located(item, eqn) for item in inline.inline(closed, reads, writes)]
    wanted = [[False], recast] if name == "while" else [recast[: len(body.recast)] for body in bodies]
    closed_bodies = [body.at(x) for body, x in zip(bodies, wanted, strict=True)]
    entered = build.with_bodies(eqn, closed_bodies, reads, writes)
    if name != "remat_opt":
        return [entered]

    def thunk(closed: ClosedJaxpr) -> ClosedJaxpr:
        outputs = [False] * len(closed.out_avals)
        return call.rest(call.rewrite(closed, call.inputs[0], [Output()] * len(outputs)).at(outputs))

    return [build.with_thunk(entered, thunk)]


def _custom_jvp(call: CastConstruct, args: Sequence[Any]) -> Sequence[Any]:
    """Keep the author's rule. It is traced through the original call and rewritten like any other code."""
    eqn = call.eqn
    inputs, outputs = ir.avals(eqn.invars), ir.avals(eqn.outvars)
    n, floating = len(inputs), [i for i, x in enumerate(outputs) if is_inexact(x)]

    @jax.custom_jvp
    def fun(*xs: Any) -> list[Any]:
        return call.run(xs)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        # Differentiates only inputs that have a tangent, because the author's rule may ask which ones have.
        perturbed = [i for i, t in enumerate(tangents) if is_inexact(inputs[i]) and not isinstance(t, SymbolicZero)]

        def original(*values: Any) -> Any:
            fun = interpret.function_of(eqn, values[:n], perturbed)
            results, derivatives = jax.jvp(fun, [values[i] for i in perturbed], list(values[n:]))
            return [*results, *(derivatives[i] for i in floating)]

        types, values = [*inputs, *(inputs[i] for i in perturbed)], [*primals, *(tangents[i] for i in perturbed)]
        of_tangents = [call.inputs[0][i]._replace(follows_tangent=True) for i in perturbed]
        known = [*call.inputs[0], *of_tangents]
        results, _ = call.replay(original, types, values, inputs=known, outputs=call.outputs[0])
        derivatives = build.replaced(list(map(_no_tangent, outputs)), floating, results[len(outputs) :])
        return results[: len(outputs)], derivatives

    fun.defjvp(rule, symbolic_zeros=constructs.asks_for_zeros(eqn))
    result: list[Any] = fun(*args)
    return result


def _custom_vjp(call: CastConstruct, args: Sequence[Any]) -> Sequence[Any]:
    """As `_custom_jvp`. The residuals of the forward rule are 16 bit where that is exact."""
    eqn = call.eqn
    inputs, outputs = ir.avals(eqn.invars), ir.avals(eqn.outvars)
    asks = constructs.asks_for_zeros(eqn)

    @jax.custom_vjp
    def fun(*xs: Any) -> list[Any]:
        return call.run(xs)

    def forward(*primals: Any) -> tuple[list[Any], Any]:
        xs = [x.value for x in primals] if asks else primals
        perturbed = [i for i, x in enumerate(primals) if is_inexact(inputs[i]) and (not asks or x.perturbed)]
        traced: list[Any] = []

        def original(*values: Any) -> Any:
            results, pull_back = jax.vjp(interpret.function_of(eqn, values, perturbed), *(values[i] for i in perturbed))
            residuals, structure = jax.tree.flatten(pull_back)
            traced[:] = structure, [jax.typeof(x) for x in residuals]
            return [*results, *residuals]

        known = call.inputs[0], call.outputs[0]
        n = len(outputs)
        values, follow = call.replay(original, inputs, xs, *known, residuals_from=n)
        # The static values reach the backward rule in the function of a Partial.
        dtypes = [jax.typeof(xs[i]).dtype for i in perturbed]
        rest = functools.partial(_pull_back, call, perturbed, dtypes, *traced, follow[n:])
        return values[:n], Partial(rest, *values[n:])

    fun.defvjp(forward, lambda rest, cotangents: rest(cotangents=cotangents), symbolic_zeros=asks)
    result: list[Any] = fun(*args)
    return result


def _pull_back(
    call: CastConstruct,
    perturbed: Sequence[int],
    dtypes: Sequence[Any],
    structure: Any,
    types: Sequence[Any],
    follow_long_sums: Sequence[bool],
    *residuals: Any,
    cotangents: Sequence[Any],
) -> tuple[Any, ...]:
    """The backward rule of a custom_vjp: the cotangents of its inputs."""
    inputs, outputs = ir.avals(call.eqn.invars), ir.avals(call.eqn.outvars)
    floating = [i for i, x in enumerate(outputs) if is_inexact(x)]

    def original(*values: Any) -> Any:
        pull_back = jax.tree.unflatten(structure, values[: len(residuals)])
        return pull_back(build.replaced(list(map(_no_tangent, outputs)), floating, values[len(residuals) :]))

    dense = lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x
    # A score that both rules compute has the same dtype in both.
    known = [Input(follows_long_sum=x) for x in (*follow_long_sums, *[True] * len(floating))]
    found, _ = call.replay(
        original,
        [*types, *(outputs[i] for i in floating)],
        [*residuals, *(dense(cotangents[i]) for i in floating)],
        inputs=known,
        in_backward_rule=True,
    )
    cotangents = [x.astype(dtype) for x, dtype in zip(found, dtypes, strict=True)]
    return tuple(build.replaced([None] * len(inputs), perturbed, cotangents))


def _no_tangent(aval: Any) -> Any:
    return np.zeros(aval.shape, jax.dtypes.float0)


def _linear_call(call: CastConstruct, args: Sequence[Any]) -> Sequence[Any]:
    """A linear function with its own transpose, traced through the original call."""
    inputs, n = ir.avals(call.eqn.invars), constructs.nonlinear_operands(call.eqn)

    def transposed(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        def original(*values: Any) -> Any:
            fun = interpret.function_of(call.eqn, [*values[:n], *inputs[n:]], range(n, len(inputs)))
            return jax.linear_transpose(fun, *inputs[n:])(list(values[n:]))

        types = [*inputs[:n], *ir.avals(call.eqn.outvars)]
        known = [Input(follows_long_sum=x.follows_long_sum) for x in call.inputs[0][:n]]
        known += [Input(follows_long_sum=True, follows_tangent=True)] * len(cotangents)
        found, _ = call.replay(original, types, [*residuals, *cotangents], inputs=known)
        return [x.astype(jax.typeof(y).dtype) for x, y in zip(found, args[n:], strict=True)]

    fun = lambda residuals, operands: call.run([*residuals, *operands])
    values: Sequence[Any] = linear_call(fun, transposed, list(args[:n]), list(args[n:]))
    return values


_RETRACED: dict[str, Callable[[CastConstruct, Sequence[Any]], Sequence[Any]]] = {
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "linear_call": _linear_call,
}
