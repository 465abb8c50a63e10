"""`DynamicLossScale`, and the arithmetic that it shares with `AdaptiveLossScale`."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jamp._loss_scale.checks import INT32_MAX, check_count, check_number, check_range
from jamp._loss_scale.static import Configuration
from jamp._numbers import with_numbers


class DynamicLossScaleState(NamedTuple):
    """State of `DynamicLossScale`.

    Examples:
      >>> import jamp
      >>> int(jamp.DynamicLossScale(hysteresis=2).init().hysteresis_count)
      2
    """

    loss_scale: Array  # f32[]
    growth_count: Array  # i32[], finite steps since the last change or overflow
    hysteresis_count: Array  # i32[], overflows left before the next backoff, counting the one that backs off

    def with_loss_scale(self, loss_scale: Array) -> Self:
        """Return this state with another scale, no finite steps counted and a full hysteresis."""
        # Only the configuration knows the full count. Its `update` reduces a larger count to it.
        full = jnp.full_like(self.hysteresis_count, INT32_MAX)
        return self._replace(
            loss_scale=loss_scale, growth_count=jnp.zeros_like(self.growth_count), hysteresis_count=full
        )


@dataclass(frozen=True)
class DynamicLossScale(Configuration):
    """A loss scale that grows while gradients are finite and backs off when they overflow.

    The `growth_interval`-th finite step in a row multiplies the scale by `growth_factor`. An overflow multiplies it by
    `backoff_factor`. If the scale in the state is inf, NaN or outside its bounds, the next update brings it back.

    Args:
      init_scale: The initial scale.
      growth_factor: The factor of a growth, above 1.
      backoff_factor: The factor of a backoff, between 0 and 1.
      growth_interval: The number of finite steps in a row before a growth.
      min_scale: The smallest scale, a normal float32 above 0. It may be below 1.
      max_scale: The largest scale. It may be inf. Then a growth to infinity is refused.
      hysteresis: The first `hysteresis - 1` overflows since the last refill leave the scale unchanged.
      hysteresis_refill: When the hysteresis is refilled: when the scale grows ("growth", as in Megatron-LM) or at
        every finite step ("finite", as in apex).

    Raises:
      ValueError: If a value is out of its range. The message names it and says what to do.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> config = jamp.DynamicLossScale(init_scale=1024.0)
      >>> float(config.update(config.init(), jnp.bool_(False)).loss_scale)
      512.0

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018. `torch.amp.GradScaler`. Megatron-LM's
      `DynamicGradScaler` for the hysteresis. apex for the bounds.
    """

    _kind: ClassVar = "dynamic"
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    hysteresis: int = 1
    hysteresis_refill: Literal["growth", "finite"] = "growth"

    def __post_init__(self) -> None:
        with_numbers(self)
        check_range(self.init_scale, self.min_scale, self.max_scale)
        check_number("growth_factor", self.growth_factor, above=1, hint="such as 2.0")
        check_number("backoff_factor", self.backoff_factor, above=0, below=1, hint="such as 0.5")
        check_count("growth_interval", self.growth_interval)
        check_count("hysteresis", self.hysteresis)
        if self.hysteresis_refill not in ("growth", "finite"):
            raise ValueError(f"hysteresis_refill must be 'growth' or 'finite', got {self.hysteresis_refill!r}.")

    @classmethod
    def conservative(cls) -> Self:
        """Grow every 5000 finite steps: fewer overflows, a slower rise."""
        return cls(growth_interval=5000)

    @classmethod
    def aggressive(cls) -> Self:
        """Grow every 1000 finite steps: a faster rise, more overflows."""
        return cls(growth_interval=1000)

    def init(self) -> DynamicLossScaleState:
        """Make the initial state."""
        # Each array is a buffer of its own, so that a donated state donates no buffer twice.
        counts = [jnp.array(x, jnp.int32) for x in (0, self.hysteresis)]
        return DynamicLossScaleState(jnp.array(self.init_scale, jnp.float32), *counts)

    def update(self, state: DynamicLossScaleState, grads_finite: ArrayLike) -> DynamicLossScaleState:
        """Return the next state, given the state that scaled the loss and whether its gradients were finite, bool[]."""
        finite = jnp.asarray(grads_finite, bool)
        overflow = ~finite
        growth_count = jnp.where(finite, increment(state.growth_count), 0)
        grow = growth_count >= self.growth_interval
        left = jnp.minimum(state.hysteresis_count, self.hysteresis)
        left = jnp.where(overflow, jnp.maximum(left - 1, 0), left)
        back_off = overflow & (left == 0)
        refill = grow if self.hysteresis_refill == "growth" else finite
        scale = change_scale(state.loss_scale, grow, self.growth_factor, back_off, self.backoff_factor, self.max_scale)
        return DynamicLossScaleState(
            loss_scale=heal(scale, self.init_scale, self.min_scale, self.max_scale),
            growth_count=jnp.where(grow, 0, growth_count),
            hysteresis_count=jnp.where(refill, self.hysteresis, left),
        )


def change_scale(
    scale: Array, grow: Array, growth_factor: float, back_off: Array, backoff_factor: float, max_scale: float
) -> Array:
    """Grow or back off the scale in float32. Without a ceiling, a growth to infinity leaves it unchanged."""
    grown = scale * np.float32(growth_factor)
    if math.isinf(max_scale):
        grown = jnp.where(jnp.isinf(grown), scale, grown)
    return jnp.where(grow, grown, jnp.where(back_off, scale * np.float32(backoff_factor), scale))


def heal(scale: Array, init_scale: float, min_scale: float, max_scale: float) -> Array:
    """Clip the scale to its bounds. NaN becomes init_scale, and so does inf if there is no ceiling."""
    lost = jnp.isnan(scale) | (scale == jnp.inf) if math.isinf(max_scale) else jnp.isnan(scale)
    return jnp.where(lost, np.float32(init_scale), jnp.clip(scale, np.float32(min_scale), np.float32(max_scale)))


def increment(count: Array) -> Array:
    """Return `count + 1`, saturating at the largest int32."""
    return jnp.where(count < INT32_MAX, count + 1, INT32_MAX)
