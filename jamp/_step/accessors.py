"""Read and replace the loss scale in any pytree that holds one: an optimizer state, a train state, a `GradScaler`.

If the tree holds none or several, each of these functions raises a ValueError that says what was found.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jamp._leaves import find_nodes, replace_leaves, replace_node
from jamp._loss_scale.checks import TINY
from jamp._loss_scale.scaler_state import ScalerState, get_scaler
from jamp._loss_scale.static import LossScale, check_loss_scale, is_noop
from jamp._loss_scale.stats import LossScaleStats
from jamp._step.find import find_loss_scale_state, find_scaler_state, to_array


def get_loss_scale(tree: Any) -> Array:
    """Return the loss scale.

    Args:
      tree: A loss-scale state, or any pytree that holds exactly one: an optimizer state, a train state. Otherwise a
        ValueError says what was found.

    Returns:
      f32[], the scale of the next loss.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> opt_state = jamp.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3))
      >>> float(jamp.get_loss_scale(opt_state))
      65536.0
    """
    state = find_loss_scale_state(tree)
    return _copy(to_array(state.loss_scale))


def set_loss_scale(tree: Any, value: ArrayLike) -> Any:
    """Return the tree with another loss scale.

    The count of finite steps starts again and the hysteresis is refilled. A value outside the bounds of the
    configuration is used for one step. The next update brings it back inside. `StaticLossScale` has no bounds and keeps
    the value. Under `NoOpLossScale`, which scales nothing, the scale stays 1.

    Args:
      tree: As for `get_loss_scale`.
      value: The new scale, a number or f32[].

    Returns:
      A tree of the same structure, shapes and dtypes.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> opt_state = jamp.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3))
      >>> float(jamp.get_loss_scale(jamp.set_loss_scale(opt_state, 1024.0)))
      1024.0
    """
    state = find_loss_scale_state(tree)
    if isinstance(value, (LossScale, str)):
        raise TypeError(
            f"The scale must be a number, got {value!r}. Write jamp.set_loss_scale(opt_state, 1024.0), or "
            "jamp.convert_loss_scale(opt_state, loss_scale)."
        )
    if is_noop(state):
        return tree
    # A copy, because the caller may still use the value, and a donated tree must not hold the same buffer twice.
    scale = jnp.array(jnp.broadcast_to(jnp.asarray(value, jnp.float32), jnp.shape(state.loss_scale)))
    new = state.with_loss_scale(scale) if hasattr(state, "with_loss_scale") else state._replace(loss_scale=scale)
    return replace_node(tree, state, replace_leaves(state, new))  # in Flax NNX's Variables, if it has any


def reset(tree: Any, loss_scale: LossScale) -> Any:
    """Return the tree with the initial loss scale and zero statistics. Everything else stays as it is.

    Args:
      tree: An optimizer state from `jamp.loss_scaled`, or any pytree that holds exactly one.
      loss_scale: The loss scale that it was made with.

    Returns:
      A tree of the same structure, shapes and dtypes. What was placed on devices is on the same ones.

    Raises:
      TypeError: If `loss_scale` is not a loss scale.
      ValueError: If the tree holds no such state or several, or `loss_scale` is of another kind.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> tx = jamp.loss_scaled(optax.sgd(0.1))
      >>> _, opt_state = tx.update(jnp.array([jnp.nan]), tx.init(jnp.ones(1)))
      >>> float(jamp.get_loss_scale(jamp.reset(opt_state, jamp.DynamicLossScale())))
      65536.0
    """
    check_loss_scale(loss_scale)
    state, new = find_scaler_state(tree), ScalerState.init(loss_scale)
    if type(state.loss_scale_state) is not type(new.loss_scale_state):
        raise ValueError(
            f"Expected the state of {loss_scale!r}, got a {type(state.loss_scale_state).__name__}. "
            f"Write jamp.convert_loss_scale(tree, {loss_scale!r})."
        )
    old = get_scaler(state)
    new = jax.tree.map(_place_like, replace_leaves(old, new), old)
    return replace_node(tree, state, state._replace(**new._asdict()))


def _place_like(x: Array, old: Any) -> Any:
    """Return an array with the shape, dtype and sharding of another."""
    x = jnp.broadcast_to(x, jnp.shape(old)).astype(jnp.result_type(old))
    # An array that no one has placed must stay one that `jit` may move to the devices of the parameters.
    is_placed = isinstance(old, jax.Array) and not isinstance(old, jax.core.Tracer) and old.committed
    return jax.device_put(x, old.sharding) if is_placed else x


def convert_loss_scale(tree: Any, loss_scale: LossScale) -> Any:
    """Convert a state of one loss scale for an optimizer that is wrapped with another.

    The new loss scale starts from the current scale, clipped to its bounds. `StaticLossScale` and `NoOpLossScale` keep
    their own scale. Everything else in the tree stays as it is. A `GradScaler` steps with the new loss scale.

    Args:
      tree: As for `get_loss_scale`.
      loss_scale: The loss scale to continue with.

    Returns:
      The tree with a state of `loss_scale` in place of the old one.

    Raises:
      TypeError: If `loss_scale` is not a loss scale.
      ValueError: If the tree holds no loss-scale state or several.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> params = jnp.ones(3)
      >>> opt_state = jamp.loss_scaled(optax.adam(0.1), jamp.DynamicLossScale()).init(params)  # or from a checkpoint
      >>> adaptive = jamp.AdaptiveLossScale()
      >>> tx, opt_state = jamp.loss_scaled(optax.adam(0.1), adaptive), jamp.convert_loss_scale(opt_state, adaptive)
      >>> type(opt_state.loss_scale_state).__name__, float(jamp.get_loss_scale(opt_state))
      ('AdaptiveLossScaleState', 65536.0)
    """
    check_loss_scale(loss_scale)
    state = find_loss_scale_state(tree)
    # A `GradScaler` holds the loss scale too, which the state of an optimizer does not.
    for _, scaler in find_nodes(tree, lambda x: hasattr(x, "_converted")):
        return replace_node(tree, scaler, scaler._converted(loss_scale))
    old = jnp.asarray(state.loss_scale)
    new = jax.tree.map(lambda x: jnp.broadcast_to(x, old.shape + x.shape), loss_scale.init())
    if not getattr(loss_scale, "is_constant", False):
        bounds = getattr(loss_scale, "min_scale", TINY), getattr(loss_scale, "max_scale", math.inf)
        scale = jnp.clip(old, *(np.float32(x) for x in bounds))
        new = new._replace(loss_scale=jnp.where(jnp.isfinite(scale), scale, new.loss_scale))
    return replace_node(tree, state, new)


def get_stats(tree: Any) -> LossScaleStats:
    """Return the statistics of the one loss-scaled optimizer state in a tree.

    Args:
      tree: An optimizer state from `jamp.loss_scaled`, or any pytree that holds exactly one (else a ValueError).

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> int(jamp.get_stats(jamp.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3))).overflow_steps)
      0
    """
    return _copy(_stats(find_scaler_state(tree)))


def get_grads_finite(tree: Any) -> Array:
    """Return whether the last step was applied, without waiting for the device.

    Args:
      tree: An optimizer state from `jamp.loss_scaled`, or any pytree that holds exactly one (else a ValueError).

    Returns:
      bool[], True before the first step.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> bool(jamp.get_grads_finite(jamp.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3))))
      True
    """
    return _copy(to_array(find_scaler_state(tree).grads_finite))


def metrics(tree: Any) -> dict[str, Array]:
    """Return the values to log: the loss scale, whether the last step was applied, and the statistics.

    Building the dictionary is asynchronous. Only converting a value to a Python number waits for the device.

    Args:
      tree: An optimizer state from `jamp.loss_scaled`, or any pytree that holds exactly one (else a ValueError).

    Returns:
      Arrays on the device by name: `loss_scale` (f32[]), `grads_finite` (bool[]), the fields of `LossScaleStats` and
      `success_rate` (f32[]).

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> float(jamp.metrics(jamp.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3)))["success_rate"])
      1.0
    """
    state = find_scaler_state(tree)
    named = _metrics(*map(to_array, (state.loss_scale_state.loss_scale, state.grads_finite)), _stats(state))
    order = ["loss_scale", "grads_finite", *LossScaleStats._fields, "success_rate"]  # jit sorts the keys
    return {name: named[name] for name in order}


def _stats(state: Any) -> LossScaleStats:
    return LossScaleStats(*map(to_array, state.stats))


# Copies, which outlive a donated state; compiled, so that no constant is transferred to the device.


@functools.partial(jax.jit, inline=True)
def _copy(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


@functools.partial(jax.jit, inline=True)
def _metrics(loss_scale: Array, grads_finite: Array, stats: LossScaleStats) -> dict[str, Array]:
    named = {"loss_scale": loss_scale, "grads_finite": grads_finite} | stats._asdict()
    return jax.tree.map(jnp.copy, named) | {"success_rate": stats.success_rate}
