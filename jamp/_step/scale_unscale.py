"""Multiply losses and divide gradients by the loss scale: `scale_loss` and `unscale_and_check`."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jamp._cast import cast_leaf, check_floating, is_inexact, to_float32
from jamp._jaxprs.manual_axes import hashable
from jamp._jaxprs.source import users_stacklevel
from jamp._leaves import is_numeric, split_gradients
from jamp._mesh import reshard_like
from jamp._step.find import find_loss_scale_state, find_state_to_unscale, read_scale, warn_of_order
from jamp._step.finite import are_leaves_finite
from jamp._step.misuse import check_scaled_once, scales_once, warn_if_frozen


def scale_loss(loss: Any, state: Any) -> Any:
    """Multiply a loss by the loss scale. It is one dispatch outside `jit` and is inlined inside it.

    As for `value_and_grad`, `state` must be an argument of the jitted step, and the backward pass must be linear.

    Args:
      loss: A floating or complex array, or a pytree of them (several losses under one scale). float16 and bfloat16
        losses come out float32, so that the scaled loss does not overflow. Other dtypes are kept.
      state: A loss-scale state, or any pytree that holds exactly one, such as the optimizer state.

    Returns:
      The scaled loss. Its gradient is the scaled gradient, for `unscale_and_check`.

    Raises:
      ValueError: If `state` holds no loss-scale state or several, or inside `value_and_grad` or `scaled`.
      TypeError: If a loss is neither floating nor complex.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> float(jamp.scale_loss(jnp.float32(0.5), jamp.StaticLossScale(8.0).init()))
      4.0
    """
    loss_scale_state = find_loss_scale_state(state)
    warn_of_order(state)
    check_scaled_once("scale_loss")
    return _scale_by(loss, loss_scale_state)


def _scale_by(loss: Any, loss_scale_state: Any) -> Any:
    """Multiply a loss by the loss scale of a state. Under `NoOpLossScale`, only cast the loss to float32."""
    leaves = jax.tree.leaves(loss)
    for x in leaves:
        if not is_inexact(x):
            call = "jamp.scale_loss(loss_fn(params), opt_state) in float32"
            raise TypeError(f"A loss must be floating, got {_kind(x)}. Write {call}.")
    scale = read_scale(loss_scale_state)
    if scale is None:
        return to_float32(loss)
    warn_if_frozen(loss, loss_scale_state)
    if any(jnp.result_type(x) == jnp.float16 for x in leaves):
        warnings.warn(
            "The loss is float16, whose gradients overflow at a scale of 2**16. Write loss.astype(jnp.float32).",
            stacklevel=users_stacklevel(),
        )
    return _multiply_leaves(loss, scale)


def _kind(x: Any) -> str:
    return f"{jnp.result_type(x)}{list(jnp.shape(x))}" if is_numeric(x) else f"a {type(x).__name__}"


def with_scaled_loss(fun: Callable[..., Any], loss_scale_state: Any, has_aux: bool) -> Callable[..., Any]:
    """Return a function that returns the scaled loss, and `(loss, aux)` of `fun`."""

    @functools.wraps(fun)
    def scaled(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, Any]]:
        with scales_once("value_and_grad"):
            result = fun(*args, **kwargs)
        is_pair = isinstance(result, (tuple, list)) and len(result) == 2
        if has_aux and not is_pair:
            got = "one array" if isinstance(result, jax.Array) else f"a {type(result).__name__}"
            raise TypeError(f"With has_aux=True, the function must return (loss, aux), got {got}.")
        if isinstance(result, tuple) and not has_aux:
            raise TypeError("A loss must be floating, got a tuple. For (loss, aux), pass has_aux=True.")
        loss, aux = result if has_aux else (result, None)
        if not is_inexact(loss) or jnp.shape(loss):
            got = f"A loss must be one floating number, got {_kind(loss)}."
            raise TypeError(f"{got} Return jnp.mean(losses) in float32, and all else as aux with has_aux=True.")
        return _scale_by(loss, loss_scale_state), (loss, aux)

    return scaled


def unscale_and_check(
    grads: Any, state: Any, *, dtype: DTypeLike = jnp.float32, axis_name: Any = None
) -> tuple[Any, Array]:
    """Divide gradients by the loss scale and check that they are finite, in one dispatch outside `jit`.

    Args:
      grads: The scaled gradients: a pytree of arrays. Integers, bools, PRNG keys, float0, None, `optax.MaskedNode`
        and leaves of Flax's `_overwrite_with_gradient` collection are neither unscaled nor checked.
      state: The state that scaled the loss, before any update: a loss-scale state, or a pytree with exactly one.
      dtype: The dtype of the returned gradients. float64 and complex ones keep their own. The arithmetic is at least
        float32.
      axis_name: Name(s) of the `shard_map`, `pmap` or `vmap` axes that must agree on the check.

    Returns:
      The true gradients, and whether they are all finite (bool[]). The check is exact for gradients of any size, and
      reads the unscaled ones. Under `NoOpLossScale` the result is always True.

    Raises:
      ValueError: If `state` holds no loss-scale state or several, or is of an optimizer with `unscale=True`.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> grads, finite = jamp.unscale_and_check({"w": jnp.float16([8.0])}, jamp.StaticLossScale(4.0).init())
      >>> float(grads["w"][0]), bool(finite)
      (2.0, True)
    """
    scale = read_scale(find_state_to_unscale(state, "unscale_and_check"))
    target, check = check_floating("dtype", dtype), scale is not None
    true, grads_finite = true_gradients(grads, scale, check=check, dtype=target, axis_name=axis_name)
    return true, jnp.bool_(True) if grads_finite is None else grads_finite


def unscale(grads: Any, scale: Array | None) -> Any:
    """Divide gradients by a loss scale, f32[]. If the scale is None, only cast them to float32."""
    return true_gradients(grads, scale, check=False)[0]


def true_gradients(
    grads: Any, scale: Array | None, *, check: bool, dtype: DTypeLike = jnp.float32, axis_name: Any = None
) -> tuple[Any, Array | None]:
    """Unscale, and return the result and whether it is finite (bool[]; None without the check), in one dispatch."""
    leaves, labels, merge = split_gradients(grads)
    if scale is None and not check:
        return merge([cast_leaf(x, dtype) for x in leaves]), None
    labels_to_check, axis_name = labels if check else None, hashable(axis_name)
    true, grads_finite = _true_gradients(leaves, scale, jnp.dtype(dtype), labels_to_check, axis_name)
    return merge(true), grads_finite


@functools.partial(jax.jit, inline=True)
def _multiply_leaves(loss: Any, scale: Array) -> Any:
    return jax.tree.map(lambda x: multiply(jnp.asarray(cast_leaf(x, jnp.float32)), scale), loss)


@functools.partial(jax.jit, static_argnums=(2, 3, 4), inline=True)
def _true_gradients(
    grads: list[Any], scale: Array | None, dtype: DTypeLike, labels: tuple[str, ...] | None, axis_name: Any
) -> tuple[list[Any], Array | None]:
    true = [cast_leaf(x, dtype) for x in (grads if scale is None else _unscale(grads, scale))]
    return true, None if labels is None else are_leaves_finite(true, labels, axis_name)


def _unscale(grads: list[Any], scale: Array) -> list[Array]:
    # Above 2**126 the reciprocal is subnormal, which XLA flushes to 0 by design (jax-ml/jax#16200). There, g is
    # multiplied by 4 / scale and by 1/4. Elsewhere this is g * float32(1 / scale), bit for bit. The barrier keeps XLA
    # from folding the two factors of a constant scale into that subnormal (jaxlib 0.10.0 and 0.10.2, not 0.12.0).
    scale = lax.optimization_barrier(scale)
    quarter = jnp.where(scale > 2.0**126, jnp.float32(0.25), jnp.float32(1.0))
    reciprocal = 1.0 / (scale * quarter)
    in_float32 = [jnp.asarray(cast_leaf(g, jnp.float32)) for g in grads]
    return [multiply(multiply(g, reciprocal), quarter) for g in in_float32]


def multiply(x: Array, scale: Array) -> Array:
    """Multiply an array by a factor, f32[], at the array's dtype and on its mesh."""
    return x * reshard_like(x, scale.astype(x.real.dtype).astype(x.dtype))
