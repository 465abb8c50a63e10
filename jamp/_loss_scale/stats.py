"""`LossScaleStats`: counts and extremes for reporting. No loss scale reads them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jamp._loss_scale.dynamic import increment


class LossScaleStats(NamedTuple):
    """Counts and extremes since the optimizer state was made.

    Every count saturates at the largest int32. `str()` gives one readable line.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> stats = jamp.get_stats(jamp.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3)))
      >>> int(stats.finite_steps), float(stats.success_rate)
      (0, 1.0)
    """

    finite_steps: Array  # i32[], steps applied
    overflow_steps: Array  # i32[], steps skipped
    consecutive_overflows: Array  # i32[], steps skipped since the last one applied
    increases: Array  # i32[], number of times the loss scale grew
    decreases: Array  # i32[], number of times the loss scale shrank
    min_loss_scale: Array  # f32[], the smallest so far, the initial one included
    max_loss_scale: Array  # f32[], the largest so far, the initial one included

    @classmethod
    def init(cls, loss_scale: Array) -> "LossScaleStats":
        """Make the statistics before the first step. `loss_scale` (f32[]) is the initial scale."""
        zero = lambda: jnp.array(0, jnp.int32)  # a new buffer each, so that a donated state donates no buffer twice
        scale = lambda: jnp.array(loss_scale, copy=True)
        return cls(zero(), zero(), zero(), zero(), zero(), scale(), scale())

    def update(self, grads_finite: Array, old_scale: Array, new_scale: Array) -> "LossScaleStats":
        """Return the statistics after a step, given the loss scale of that step and of the next, f32[]."""
        finite = jnp.asarray(grads_finite, bool)

        def count_if(happened: Array, count: Array) -> Array:
            return jnp.where(happened, increment(count), count)

        return LossScaleStats(
            finite_steps=count_if(finite, self.finite_steps),
            overflow_steps=count_if(~finite, self.overflow_steps),
            consecutive_overflows=jnp.where(finite, 0, increment(self.consecutive_overflows)),
            increases=count_if(new_scale > old_scale, self.increases),
            decreases=count_if(new_scale < old_scale, self.decreases),
            min_loss_scale=jnp.minimum(self.min_loss_scale, new_scale),
            max_loss_scale=jnp.maximum(self.max_loss_scale, new_scale),
        )

    @property
    def success_rate(self) -> Array:
        """f32[], the share of steps that were applied. It is 1 before the first step."""
        finite, overflow = (jnp.asarray(x, jnp.float32) for x in (self.finite_steps, self.overflow_steps))
        return jnp.where(finite + overflow > 0, finite / jnp.maximum(finite + overflow, 1.0), 1.0)

    def __str__(self) -> str:
        arrays = (jax.Array, np.ndarray, np.generic)
        if not all(isinstance(x, arrays) and not isinstance(x, jax.core.Tracer) and x.ndim == 0 for x in self):
            return repr(self)
        return (
            f"{int(self.finite_steps)} steps applied, {int(self.overflow_steps)} skipped "
            f"({float(self.success_rate):.2%} applied, {int(self.consecutive_overflows)} skipped in a row); "
            f"loss scale raised {int(self.increases)} and lowered {int(self.decreases)} times, "
            f"between {float(self.min_loss_scale):g} and {float(self.max_loss_scale):g}"
        )
