"""Read and replace the loss scale in any pytree that holds one: an optimizer state, a train state, a `GradScaler`.

If the tree holds none or several, each of these functions raises a ValueError that says what was found.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jamp._scale.checks import TINY
from jamp._scale.static import LossScale, NoOpLossScale, StaticLossScale
from jamp._scale.stats import LossScaleStats
from jamp._step.state import find_loss_scale_state, find_scaler_state, replace_node


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
    return jnp.asarray(find_loss_scale_state(tree).loss_scale)


def set_loss_scale(tree: Any, value: ArrayLike) -> Any:
    """Return the tree with another loss scale.

    The count of finite steps starts again and the hysteresis is refilled. A value outside the bounds of the
    configuration is used for the next step. The update after that step brings it back inside.

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
    found = find_loss_scale_state(tree)
    # A copy, because the caller may still use the value, and a donated tree must not hold the same buffer twice.
    scale = jnp.array(jnp.broadcast_to(jnp.asarray(value, jnp.float32), jnp.shape(found.loss_scale)))
    new = found.with_loss_scale(scale) if hasattr(found, "with_loss_scale") else found._replace(loss_scale=scale)
    new = jax.tree.unflatten(
        jax.tree.structure(found), jax.tree.leaves(new)
    )  # into Flax NNX's Variables, if it has any
    return replace_node(tree, found, new)


def convert_loss_scale(tree: Any, loss_scale: LossScale) -> Any:
    """Convert a state of one loss scale for an optimizer that is wrapped with another.

    The new loss scale starts from the current scale, clipped to its bounds. `StaticLossScale` and `NoOpLossScale` keep
    their own scale. The inner optimizer's state, the statistics and everything else stay as they are.

    Args:
      tree: As for `get_loss_scale`.
      loss_scale: The loss scale to continue with.

    Returns:
      The tree with the state of `loss_scale` in place of the old one.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> params = jnp.ones(3)
      >>> opt_state = jamp.loss_scaled(optax.adam(0.1), jamp.DynamicLossScale()).init(params)  # or from a checkpoint
      >>> adaptive = jamp.AdaptiveLossScale()
      >>> tx, opt_state = jamp.loss_scaled(optax.adam(0.1), adaptive), jamp.convert_loss_scale(opt_state, adaptive)
      >>> type(opt_state.loss_scale_state).__name__, float(jamp.get_loss_scale(opt_state))
      ('AdaptiveLossScaleState', 65536.0)
    """
    found = find_loss_scale_state(tree)
    old = jnp.asarray(found.loss_scale)
    new = jax.tree.map(lambda x: jnp.broadcast_to(x, old.shape + x.shape), loss_scale.init())
    if not isinstance(loss_scale, (NoOpLossScale, StaticLossScale)):
        bounds = getattr(loss_scale, "min_scale", TINY), getattr(loss_scale, "max_scale", math.inf)
        scale = jnp.clip(old, *(np.float32(x) for x in bounds))
        new = new._replace(loss_scale=jnp.where(jnp.isfinite(scale), scale, new.loss_scale))
    return replace_node(tree, found, new)


def get_stats(tree: Any) -> LossScaleStats:
    """Return the statistics of the one loss-scaled optimizer state in a tree.

    Args:
      tree: An optimizer state from `jamp.loss_scaled`, or any pytree that holds exactly one (else a ValueError).

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> int(jamp.get_stats(jamp.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3))).overflow_steps)
      0
    """
    stats = find_scaler_state(tree).stats
    return LossScaleStats(*jax.tree.leaves(stats))  # out of the Variables in which Flax NNX keeps arrays


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
    return jnp.asarray(find_scaler_state(tree).grads_finite)


def metrics(tree: Any) -> dict[str, Array]:
    """Return what to log: the loss scale, whether the last step was applied, and the statistics.

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
    stats = get_stats(tree)
    named = {"loss_scale": get_loss_scale(tree), "grads_finite": get_grads_finite(tree)}
    return named | stats._asdict() | {"success_rate": stats.success_rate}
