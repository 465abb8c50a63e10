"""The primitives of `jamp.scaled`: a call of a function, and one of its derivative, whose transpose scales.

    scaled_call(inputs)                                the function's results
    scaled_linear_call(inputs, residuals, tangents)    the results' tangents, by `jax.linearize`
    its transpose(cotangents)                          the gradients: scale, pull back, unscale, check, try again

The first try of a backward pass reads the residuals of the forward pass. A retry computes the forward pass again, from
the inputs. So the residuals are freed as they are used, and a gradient with retries takes no more temporary memory.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.interpreters import ad

from jamp._cast import is_inexact
from jamp._compiler_hints import behind_barrier
from jamp._jaxprs import build, interpret, ir
from jamp._jaxprs.define import define
from jamp._jaxprs.ir import ClosedJaxpr
from jamp._jaxprs.source import users_stacklevel
from jamp._step import retry
from jamp._step.retry import Scaling


class _Derivative(NamedTuple):
    """The derivative of a function.

    Attributes:
      function: The function.
      differentiated: Which of its inputs have tangents.
      floating: Which of its results have tangents, because they are floating or complex.
      linear: Maps residuals and tangents of inputs to tangents of results.
      residuals: The number of residuals.
    """

    function: ClosedJaxpr
    differentiated: tuple[int, ...]
    floating: tuple[int, ...]
    linear: ClosedJaxpr
    residuals: int

    def split(self, operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Return the inputs, the residuals and the tangents."""
        n, m = len(self.function.in_avals), self.residuals
        return operands[:n], operands[n : n + m], operands[n + m :]

    def pull_back(self, inputs: Sequence[Any], used: Sequence[int], cotangents: Sequence[Array]) -> Sequence[Array]:
        """Compute the forward pass again, and the gradients of the differentiated inputs from some cotangents."""

        def fun(*xs: Any) -> list[Any]:
            results = interpret.call(self.function, build.replaced(inputs, self.differentiated, xs))
            return [results[self.floating[i]] for i in used]

        return jax.vjp(fun, *(inputs[i] for i in self.differentiated))[1](list(cotangents))


@functools.cache
def scaled_call() -> Any:
    """Make the primitive that evaluates a function, the jaxpr `jaxpr`."""

    def run(*inputs: Any, jaxpr: ClosedJaxpr, scaling: Scaling) -> list[Any]:
        return interpret.call(jaxpr, inputs)

    def batch(axis: Any, inputs: Sequence[Any], axes: Sequence[Any], *, jaxpr: ClosedJaxpr, scaling: Scaling) -> Any:
        results = call.bind(*inputs, jaxpr=interpret.batched(jaxpr, axis, inputs, axes), scaling=scaling)
        return results, [0] * len(results)

    call = define(
        "scaled_call",
        run,
        lambda *_, jaxpr, scaling: (jaxpr.out_avals, jaxpr.effects),
        jvp=_linearize,
        batch=batch,
        multiple_results=True,
        has_bodies=True,
    )
    return call


@functools.cache
def _linear_call() -> Any:
    """Make the primitive that evaluates a derivative, from the function's inputs, residuals and tangents."""

    def run(*operands: Any, derivative: _Derivative, scaling: Scaling) -> list[Any]:
        return interpret.call(derivative.linear, operands[len(derivative.function.in_avals) :])

    def batch(
        axis: Any, operands: Sequence[Any], axes: Sequence[Any], *, derivative: _Derivative, scaling: Scaling
    ) -> Any:
        n = len(derivative.function.in_avals)
        function = interpret.batched(derivative.function, axis, operands[:n], axes[:n])
        linear = interpret.batched(derivative.linear, axis, operands[n:], axes[n:])
        new = derivative._replace(function=function, linear=linear)
        results = call.bind(*operands, derivative=new, scaling=scaling)
        return results, [0] * len(results)

    def differentiate(operands: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        indices = _find_tangents(tangents)
        fun = lambda *xs: run(*build.replaced(operands, indices, xs), **params)
        return jax.jvp(fun, [operands[i] for i in indices], [tangents[i] for i in indices])

    types = lambda *_, derivative, scaling: (derivative.linear.out_avals, derivative.linear.effects)
    call = define(
        "scaled_linear_call",
        run,
        types,
        jvp=differentiate,
        transpose=_transpose,
        batch=batch,
        multiple_results=True,
        has_bodies=True,
    )
    return call


def _linearize(
    inputs: Sequence[Any], tangents: Sequence[Any], *, jaxpr: ClosedJaxpr, scaling: Scaling
) -> tuple[list[Any], list[Any]]:
    """Return the results and their tangents."""
    differentiated = _find_tangents(tangents)
    floating = tuple(i for i, aval in enumerate(jaxpr.out_avals) if is_inexact(aval))

    def fun(*xs: Any) -> tuple[list[Any], list[Any]]:
        results = interpret.call(jaxpr, build.replaced(inputs, differentiated, xs))
        return [results[i] for i in floating], results

    _, push_forward, results = jax.linearize(fun, *(inputs[i] for i in differentiated), has_aux=True)
    given = [tangents[i] for i in differentiated]
    linear = jax.make_jaxpr(push_forward)(*given)
    derivative = _Derivative(jaxpr, differentiated, floating, build.without_constants(linear), len(linear.consts))
    pushed = _linear_call().bind(*inputs, *linear.consts, *given, derivative=derivative, scaling=scaling)
    zeros = [ad.Zero(aval.to_tangent_aval()) for aval in jaxpr.out_avals]
    return results, build.replaced(zeros, floating, pushed)


def _transpose(
    cotangents: Sequence[Any], *operands: Any, derivative: _Derivative, scaling: Scaling
) -> list[Array | None]:
    """Return the gradients of the differentiated inputs, and None for the other operands."""
    inputs, residuals, tangents = derivative.split(operands)
    types = [x.aval for x in tangents]
    if any(aval.dtype == jnp.float16 for aval in types):
        warnings.warn(
            "jamp.scaled returns gradients at the dtypes of the arguments, and in float16 they underflow. Keep the "
            "parameters in float32, which jamp.autocast casts.",
            stacklevel=users_stacklevel(),
        )
    # Auxiliary results have no cotangents, and their part of the backward pass is left out.
    used = [i for i, x in enumerate(cotangents) if not isinstance(x, ad.Zero)]
    given = [cotangents[i] for i in used]

    def of_tangents(*xs: Any) -> list[Any]:
        pushed = interpret.call(derivative.linear, [*residuals, *xs])
        return [pushed[i] for i in used]

    pull_back = jax.make_jaxpr(lambda *xs: _apply_transpose(of_tangents, types, derivative.linear, list(xs)))(*given)

    def again(tries: Array, scaled: Sequence[Array]) -> Sequence[Array]:
        # The barrier makes the inputs depend on the loop. Else XLA would compute the forward pass before it, always.
        return derivative.pull_back(behind_barrier([tries, *inputs])[1:], used, scaled)

    gradients = retry.pull_back_scaled(
        functools.partial(interpret.call, pull_back),
        again,
        given,
        [scaling.are_gradients[i] for i in derivative.differentiated],
        retry.shared_axes(pull_back.in_avals, pull_back),
        scaling,
    )
    if scaling.retries:
        gradients = [_refusing_identity().bind(x) for x in gradients]
    return [None] * (len(operands) - len(tangents)) + gradients


def _apply_transpose(
    push_forward: Callable[..., Any], types: Sequence[Any], linear: ClosedJaxpr, cotangents: list[Any]
) -> Any:
    if any(ir.is_ref(v) for eqn in linear.jaxpr.eqns for v in eqn.outvars):
        # `jax.linear_transpose` takes no function that makes a Ref. `jax.vjp` does.
        return jax.vjp(push_forward, *(jnp.zeros(aval.shape, aval.dtype) for aval in types))[1](cotangents)
    return jax.linear_transpose(push_forward, *types)(cotangents)


def _find_tangents(tangents: Sequence[Any]) -> tuple[int, ...]:
    return tuple(i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero))


@functools.cache
def _refusing_identity() -> Any:
    """Make the identity, a primitive that ends a backward pass. Its transpose raises a ValueError about `jamp.scaled`.

    Without it, JAX would say that a `while_loop` cannot be differentiated.
    """
    same = lambda x: x
    jvp = lambda xs, tangents: (identity.bind(*xs), identity.bind(*tangents))
    identity: Any = define("scaled_gradient", same, same, jvp=jvp, transpose=_refuse)
    return identity


def _refuse(*_: Any) -> None:
    raise ValueError("A gradient of a gradient of jamp.scaled must not retry. Write jamp.scaled(fun, retries=0).")
