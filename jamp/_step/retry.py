"""A backward pass on scaled cotangents, repeated with a smaller scale until its gradients are finite.

For a scale of 2**15 and cotangents of at most 0.3, f32[], which is between 2**-2 and 2**-1:

    try 0    pull_back(cotangents * 2**17)    the largest is between 2**15 and 2**16; a gradient is inf
    try 1    again(cotangents * 2**9)         a gradient is inf
    try 2    again(cotangents * 2**-7)        all are finite, and are multiplied by 2**7

Scales are powers of two, so these multiplications do not round.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jamp._cast import to_float32
from jamp._jaxprs import interpret
from jamp._jaxprs.ir import ClosedJaxpr
from jamp._jaxprs.manual_axes import varying, varying_over, zeros
from jamp._step.finite import are_leaves_finite
from jamp._step.scale_unscale import multiply

RETRY = "jamp.retry"  # the name scope of retries, for profiles
_EXPONENT = 8  # The first retry divides by 2**8, to lose few digits, the next by 2**16, then by 2**24.

PullBack = Callable[[Sequence[Array]], Sequence[Array]]


class Scaling(NamedTuple):
    """How to scale.

    Attributes:
      exponent: The exponent of the power of two to which the largest cotangent is scaled.
      retries: How often to try again.
      are_gradients: For each input, whether its gradient is unscaled and checked. The new values of Flax's fp8 scales
        are not.
    """

    exponent: int
    retries: int
    are_gradients: tuple[bool, ...]


class _Attempt(NamedTuple):
    tries: Array  # i32[], so far
    is_finite: Array  # bool[]
    results: list[Array]


def pull_back_scaled(
    pull_back: PullBack,
    again: Callable[[Array, Sequence[Array]], Sequence[Array]],
    cotangents: Sequence[Array],
    are_gradients: Sequence[bool],
    axes: tuple[str, ...],
    scaling: Scaling,
) -> list[Array]:
    """Return the unscaled results of `pull_back` on scaled cotangents.

    Args:
      pull_back: The first backward pass.
      again: A backward pass of a retry. It also takes the number of tries so far.
      cotangents: The cotangents, of any dtypes.
      are_gradients: For each result, whether it is unscaled and checked.
      axes: The mapped axes whose replicas must scale alike and try again together.
      scaling: The scale and the number of retries.
    """
    first, is_usable = _choose_exponent(cotangents, scaling.exponent, axes)
    run_scaled = lambda run: lambda scale: run([_multiply(x, scale) for x in cotangents])
    attempt = functools.partial(_attempt, first, are_gradients, axes)

    def retry(last: _Attempt) -> _Attempt:
        return attempt(last.tries, run_scaled(functools.partial(again, last.tries)))

    def is_retried(last: _Attempt) -> Array:
        return ~last.is_finite & is_usable & (last.tries <= scaling.retries)

    last = attempt(jnp.int32(0), run_scaled(pull_back))
    if scaling.retries and isinstance(last.is_finite, jax.core.Tracer):
        with jax.named_scope(RETRY):
            last = lax.while_loop(is_retried, retry, last)
    elif scaling.retries:  # Outside `jit`, a loop would be compiled in each call.
        while is_retried(last):
            last = retry(last)
    return last.results


def compute_scaled(
    run: Callable[[Array, Sequence[Any]], Sequence[Array]], operands: Sequence[Any], scaling: Scaling
) -> list[Array]:
    """Return the results of `run(scale, operands)`, of which the gradients are unscaled.

    The first try is in the loop too, so the compiled program has the code of `run` once. `scaling.are_gradients` has a
    flag for each result.
    """
    closed = jax.make_jaxpr(run)(jnp.float32(1), operands)
    axes = shared_axes(closed.in_avals[1:], closed)
    attempt = functools.partial(_attempt, jnp.int32(scaling.exponent), scaling.are_gradients, axes)
    call = lambda scale: interpret.call(closed, [scale, *jax.tree.leaves(operands)])
    if not scaling.retries:
        return attempt(jnp.int32(0), call).results
    types = jax.make_jaxpr(lambda: attempt(jnp.int32(0), call))().out_avals
    start = _Attempt(zeros(types[0]), zeros(types[1]), list(map(zeros, types[2:])))
    is_tried = lambda last: (last.tries == 0) | (~last.is_finite & (last.tries <= scaling.retries))
    last: _Attempt = lax.while_loop(is_tried, lambda last: attempt(last.tries, call), start)
    return last.results


def _attempt(
    first: Array,
    are_gradients: Sequence[bool],
    axes: tuple[str, ...],
    tries: Array,
    run: Callable[[Array], Sequence[Array]],
) -> _Attempt:
    """Run a backward pass with a scale, the first of which is 2**first, and unscale its gradients."""
    exponent = jnp.clip(first - _EXPONENT * (tries * (tries + 1) // 2), -126, 126)
    scale, inverse = _exp2(exponent), _exp2(-exponent)
    results = run(scale)
    true = [_multiply(x, inverse) if flag else x for x, flag in zip(results, are_gradients, strict=True)]
    checked = [x for x, flag in zip(true, are_gradients, strict=True) if flag]
    return _Attempt(tries + 1, are_leaves_finite(checked, ("",) * len(checked), axes or None), true)


def shared_axes(inputs: Sequence[Any], closed: ClosedJaxpr) -> tuple[str, ...]:
    """Return the mapped axes along which replicas must have one scale, given the types of the inputs that may vary.

    The backward pass communicates over them, or some of its values vary along them and others do not.
    """
    communicated = {effect.name for effect in closed.effects if hasattr(effect, "name")}
    kinds = [varying(aval) for aval in (*inputs, *closed.out_avals)]
    of_some = frozenset[str]().union(*kinds)
    return tuple(sorted(communicated | {axis for axis in of_some if not all(axis in kind for kind in kinds)}))


def _choose_exponent(cotangents: Sequence[Array], target: int, axes: tuple[str, ...]) -> tuple[Array, Array]:
    """Choose the exponent of the first scale.

    Returns:
      The exponent, i32[], and whether a scale may help, bool[]: not if the largest cotangent is 0, inf or NaN.
    """
    sizes = [jnp.max(jnp.abs(to_float32(x))).astype(jnp.float32) for x in cotangents if x.size]
    largest = functools.reduce(jnp.maximum, sizes, jnp.float32(0))
    largest = lax.pmax(varying_over(largest, axes), axes) if axes else largest
    own = (lax.bitcast_convert_type(largest, jnp.int32) >> 23) - 127
    is_usable = jnp.isfinite(largest) & (largest > 0)
    return jnp.where(is_usable, target - own, 0), is_usable


def _exp2(exponent: Array) -> Array:
    """Return 2**exponent, exactly, f32[]. The exponent is i32[], from -126 to 127."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _multiply(x: Array, factor: Array) -> Array:
    """Multiply in at least float32, and return the product at the dtype of `x`."""
    in_float32: Any = to_float32(x)
    return multiply(in_float32, factor).astype(x.dtype)
