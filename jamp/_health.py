"""Is training still going? Checks on the host, for each few hundred steps."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from jamp._lookup import get_loss_scale, get_stats
from jamp._loss_scale import LossScale


class LossScaleError(FloatingPointError):
    """Loss scaling cannot go on as it is; the message names the likely cause and the cure.

    Examples:
      >>> import jamp
      >>> issubclass(jamp.LossScaleError, FloatingPointError)
      True
    """


def check_health(
    tree: Any,
    *,
    max_consecutive_overflows: int = 50,
    loss_scale: LossScale | None = None,
    policy: str | Callable[[str], None] = "raise",
) -> None:
    """Check on the host that steps are being applied.

    It waits for the device, so call it each few hundred steps, outside `jit`.

    Args:
      tree: An optimizer state from `jamp.loss_scaled`, or any pytree that holds exactly one.
      max_consecutive_overflows: How many skipped steps in a row are too many.
      loss_scale: The configuration, to tell whether the scale lies at its floor.
      policy: "raise", "warn", or a function that is called with the message.

    Raises:
      LossScaleError: With policy "raise", when more than `max_consecutive_overflows` steps were skipped in a row, or
        a step was skipped with the scale at its floor, so that no smaller scale can help.
      ValueError: If the tree holds no loss-scaled state or several, or the policy is unknown.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> jamp.check_health(jamp.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3)))
    """
    if not callable(policy) and policy not in ("raise", "warn"):
        raise ValueError(f"policy must be 'raise', 'warn' or a function of the message, got policy={policy!r}.")
    stats, scale = get_stats(tree), float(get_loss_scale(tree))
    skipped = int(stats.consecutive_overflows)
    floor = getattr(loss_scale, "min_scale", None)
    problems = []
    if skipped > max_consecutive_overflows:
        problems.append(
            f"{skipped} steps in a row were skipped (the limit is {max_consecutive_overflows}); the loss scale is "
            f"{scale:g}. So long a run is seldom the scale's fault: look for nan in the data, in the loss (a log or a "
            "division of 0) or in the parameters, and for a learning rate that diverges."
        )
    if floor is not None and skipped and scale <= np.float32(floor):
        problems.append(
            f"The gradients overflow with the loss scale at its floor, min_scale={floor:g}. If they are finite in "
            "float32, lower min_scale (values below 1 are legal) or compute the overflowing operation in float32; if "
            "not, the model diverges."
        )
    if not problems:
        return
    message = " ".join(problems)
    if callable(policy):
        policy(message)
    elif policy == "warn":
        warnings.warn(message, stacklevel=2)
    else:
        raise LossScaleError(message)
