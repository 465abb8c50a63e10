"""Scale losses and unscale gradients: `scale_loss`, `unscale_and_check`, `value_and_grad` and `grad`."""

import functools
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.tree_util import keystr
from jax.typing import DTypeLike

from jamp._cast import cast_leaf, check_floating, is_inexact, to_float32
from jamp._step.finite import leaves_finite, on_mesh_of, split_gradients
from jamp._step.state import find_loss_scale


def scale_loss(loss: Any, state: Any) -> Any:
    """Multiply a loss by the loss scale.

    It is one dispatch outside `jit`, and is inlined into the caller's computation inside `jit`.

    Args:
      loss: A floating or complex array, or a pytree of them (several losses under one scale). float16 and bfloat16
        losses come out float32, so that the scaled loss does not overflow. Other dtypes are kept.
      state: A loss-scale state, or any pytree that holds exactly one, such as the optimizer state.

    Returns:
      The scaled loss. Its gradient is the scaled gradient, for `unscale_and_check`.

    Raises:
      ValueError: If `state` holds no loss-scale state or several.
      TypeError: If a loss is neither floating nor complex.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> float(jamp.scale_loss(jnp.float32(0.5), jamp.StaticLossScale(8.0).init()))
      4.0
    """
    return scale_by(loss, find_loss_scale(state))


def scale_by(loss: Any, scale: Array | None) -> Any:
    """Multiply a loss by a loss scale, f32[]. If the scale is None, only cast the loss to float32."""
    leaves = jax.tree.leaves(loss)
    for x in leaves:
        if not is_inexact(x):
            raise TypeError(f"A loss must be floating, got {jax.typeof(x)}: compute it in float32.")
    if scale is None:
        return to_float32(loss)
    if any(jnp.result_type(x) == jnp.float16 for x in leaves):
        warnings.warn(
            "The loss is float16. Its cotangent is the loss scale, and float16 ends at 65504, so every gradient "
            "overflows at the default scale of 2**16. Compute the loss in float32: `loss.astype(jnp.float32)`.",
            stacklevel=_users_stacklevel(),
        )
    return _multiply_leaves(loss, scale)


def unscale_and_check(
    grads: Any, state: Any, *, dtype: DTypeLike = jnp.float32, axis_name: Any = None
) -> tuple[Any, Array]:
    """Divide gradients by the loss scale and check that they are finite.

    It is one dispatch outside `jit`, and is inlined into the caller's computation inside `jit`.

    Args:
      grads: The scaled gradients: a pytree of arrays. Integers, bools, PRNG keys, float0, None, `optax.MaskedNode`
        and leaves of Flax's `_overwrite_with_gradient` collection are neither unscaled nor checked.
      state: The state that scaled the loss, before any update: a loss-scale state, or a pytree with exactly one.
      dtype: The dtype of the returned gradients, if they are floating and at most 32 bits wide. float64 and complex
        gradients keep their dtype. The arithmetic is done in float32 or wider.
      axis_name: Name(s) of the `shard_map`, `pmap` or `vmap` axes that must agree on the check.

    Returns:
      The true gradients, and whether they are all finite (bool[]). The check is exact for gradients of any size, and
      reads the unscaled ones. Under `NoOpLossScale` the result is always True.

    Raises:
      ValueError: If `state` holds no loss-scale state or several, or is that of an optimizer with `unscale=True`.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> grads, finite = jamp.unscale_and_check({"w": jnp.float16([8.0])}, jamp.StaticLossScale(4.0).init())
      >>> float(grads["w"][0]), bool(finite)
      (2.0, True)
    """
    scale = find_loss_scale(state, "unscale_and_check")
    target = check_floating("dtype", dtype)
    if scale is None:
        return unscale(grads, None, target), jnp.bool_(True)
    leaves, labels, merge = split_gradients(grads)
    true, grads_finite = _unscale_and_check(leaves, scale, target, labels, axis_name)
    return merge(true), grads_finite


def unscale(grads: Any, scale: Array | None, dtype: DTypeLike = jnp.float32) -> Any:
    """Divide gradients by a loss scale, f32[]. If the scale is None, only cast them to `dtype`."""
    leaves, _, merge = split_gradients(grads)
    if scale is None:
        return merge([cast_leaf(x, dtype) for x in leaves])
    return merge(_unscale(leaves, scale, jnp.dtype(dtype)))


def value_and_grad(
    fun: Callable[..., Any],
    state: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """`jax.value_and_grad` with loss scaling inside.

    It scales the loss before the backward pass and unscales the gradients after it, so that float16 cotangents do not
    underflow. It returns the true (unscaled) loss, and the true gradients in float32. On an overflow the gradients hold
    inf or NaN, and `loss_scaled` skips the step.

    Call it inside the jitted train step. It reads the loss scale of the `state` that it is given, so one that is made
    once, outside the step, scales by the first loss scale forever.

    Args:
      fun: A function that returns a scalar loss, or `(loss, aux)` with `has_aux`.
      state: A loss-scale state, or any pytree that holds exactly one, such as the optimizer state.
      argnums: As for `jax.value_and_grad`.
      has_aux: As for `jax.value_and_grad`.
      holomorphic: As for `jax.value_and_grad`.
      allow_int: As for `jax.value_and_grad`.

    Returns:
      A function of the arguments of `fun` that returns `(value, grads)`. Gradients of at most 32 bits are float32.
      float64 and complex gradients keep their dtype.

    Raises:
      ValueError: If `state` holds no loss-scale state or several, or is that of an optimizer with `unscale=True`.
      TypeError: When called, if an argument to differentiate holds what is not an array.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> opt_state = jamp.loss_scaled(optax.sgd(0.1)).init(jnp.ones(2))
      >>> loss, grads = jamp.value_and_grad(lambda w: jnp.sum(w**2), opt_state)(jnp.ones(2))
      >>> float(loss), grads.tolist()
      (2.0, [2.0, 2.0])

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2.
    """
    scale = find_loss_scale(state, "value_and_grad")

    def scaled(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, Any]]:
        loss, aux = fun(*args, **kwargs) if has_aux else (fun(*args, **kwargs), None)
        return scale_by(loss, scale), (loss, aux)

    differentiate = jax.value_and_grad(scaled, argnums, has_aux=True, holomorphic=holomorphic, allow_int=allow_int)

    @functools.wraps(fun)
    def with_true_gradients(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        for i in np.ravel(argnums).tolist():
            _check_differentiable(args[i : i + 1 or None], i)
        (_, (loss, aux)), scaled_grads = differentiate(*args, **kwargs)
        return ((loss, aux) if has_aux else loss), unscale(scaled_grads, scale)

    return with_true_gradients


def grad(
    fun: Callable[..., Any],
    state: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """`jax.grad` with loss scaling inside. Its arguments and errors are those of `value_and_grad`.

    Returns:
      A function of the arguments of `fun` that returns the true gradients, or `(grads, aux)` with `has_aux`.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> jamp.grad(lambda w: jnp.sum(w**2), jamp.StaticLossScale().init())(jnp.ones(2)).tolist()
      [2.0, 2.0]
    """
    differentiate = value_and_grad(fun, state, argnums, has_aux, holomorphic=holomorphic, allow_int=allow_int)

    @functools.wraps(fun)
    def with_true_gradients(*args: Any, **kwargs: Any) -> Any:
        value, grads = differentiate(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return with_true_gradients


def _check_differentiable(arg: Any, i: int) -> None:
    for path, x in jax.tree.leaves_with_path(arg):
        if not (hasattr(x, "dtype") or isinstance(x, (bool, int, float, complex))):
            raise TypeError(
                f"Argument {i} has no gradient: it holds {x!r} at {keystr(path[1:])}. For an Equinox model: "
                "jamp.equinox.filter_value_and_grad(loss_fn, opt_state). Else differentiate with respect to a pytree "
                "of arrays, and pass the rest as another argument."
            )


def _users_stacklevel() -> int:
    """The stacklevel at which a warning of the calling function points at a line outside jamp and jax."""
    frames = traceback.walk_stack(sys._getframe(1))
    modules = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in frames]
    return next((i for i, name in enumerate(modules, start=1) if name not in ("jamp", "jax")), 2)


@functools.partial(jax.jit, inline=True)
def _multiply_leaves(loss: Any, scale: Array) -> Any:
    return jax.tree.map(lambda x: _multiply(jnp.asarray(cast_leaf(x, jnp.float32)), scale), loss)


@functools.partial(jax.jit, static_argnums=2, inline=True)
def _unscale(grads: list[Any], scale: Array, dtype: Any) -> list[Any]:
    # Above 2**126 the reciprocal is subnormal, which XLA flushes to 0. There, g is multiplied by 4 / scale and by 1/4.
    # Elsewhere this is g * float32(1 / scale), bit for bit. The barrier keeps XLA from folding the two factors of a
    # constant scale into that subnormal.
    scale = lax.optimization_barrier(scale)
    quarter = jnp.where(scale > 2.0**126, jnp.float32(0.25), jnp.float32(1.0))
    reciprocal = 1.0 / (scale * quarter)

    def unscale_leaf(g: Any) -> Any:
        g = jnp.asarray(cast_leaf(g, jnp.float32))
        return cast_leaf(_multiply(_multiply(g, reciprocal), quarter), dtype)

    return [unscale_leaf(g) for g in grads]


@functools.partial(jax.jit, static_argnums=(2, 3, 4), inline=True)
def _unscale_and_check(
    grads: list[Any], scale: Array, dtype: Any, labels: tuple[str, ...], axis_name: Any
) -> tuple[list[Any], Array]:
    true = _unscale(grads, scale, dtype)
    return true, leaves_finite(true, labels, axis_name)


def _multiply(x: Array, scale: Array) -> Array:
    return x * on_mesh_of(x, scale.astype(x.real.dtype).astype(x.dtype))
