"""Loss scales: a frozen configuration of Python numbers, and its state of arrays, made by `init`."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jamp._checks import INT32_MAX, check_count, check_number, check_range, check_scale


@runtime_checkable
class LossScale(Protocol):
    """Anything with these two methods is a loss scale.

    Examples:
      A loss scale that halves on an overflow and never grows:

      >>> from typing import NamedTuple
      >>> import jax, jax.numpy as jnp, jamp
      >>> class HalvingState(NamedTuple):
      ...     loss_scale: jax.Array  # f32[]
      >>> class Halving:
      ...     def init(self):
      ...         return HalvingState(jnp.float32(2.0**16))
      ...     def update(self, state, grads_finite):
      ...         return HalvingState(jnp.where(grads_finite, 1.0, 0.5) * state.loss_scale)
      >>> isinstance(Halving(), jamp.LossScale)
      True
    """

    def init(self) -> Any:
        """The initial state: a NamedTuple of arrays with a field `loss_scale`, f32[]."""

    def update(self, state: Any, grads_finite: ArrayLike) -> Any:
        """The next state, given whether the gradients were finite (bool[]). Pure and jit-able."""


class NoOpLossScaleState(NamedTuple):
    """State of `NoOpLossScale`.

    Examples:
      >>> import jamp
      >>> float(jamp.NoOpLossScale().init().loss_scale)
      1.0
    """

    loss_scale: Array  # f32[], 1


@dataclass(frozen=True)
class NoOpLossScale:
    """No loss scaling: nothing is scaled, checked or skipped, and the step compiles to the plain optimizer's.

    Takes the place of `enabled=False`. For float32, float64 and most bfloat16 training.

    Examples:
      >>> import optax, jamp
      >>> tx = jamp.loss_scaled(optax.adamw(1e-3), jamp.NoOpLossScale())
    """

    def init(self) -> NoOpLossScaleState:
        """The state: a loss scale of 1."""
        return NoOpLossScaleState(_f32(1.0))

    def update(self, state: NoOpLossScaleState, grads_finite: ArrayLike) -> NoOpLossScaleState:
        """The state as it is."""
        del grads_finite
        return state

    def to_config(self) -> dict[str, Any]:
        """The mapping of which `loss_scale_from_config` makes this loss scale."""
        return as_config("none", self)


class StaticLossScaleState(NamedTuple):
    """State of `StaticLossScale`.

    Examples:
      >>> import jamp
      >>> float(jamp.StaticLossScale(1024.0).init().loss_scale)
      1024.0
    """

    loss_scale: Array  # f32[]


@dataclass(frozen=True)
class StaticLossScale:
    """A constant loss scale. An overflow skips the step and leaves the scale.

    Args:
      scale: The loss scale, a positive float32.

    Raises:
      ValueError: If `scale` is not a positive number that a normal float32 holds.

    Examples:
      >>> import optax, jamp
      >>> tx = jamp.loss_scaled(optax.adamw(1e-3), jamp.StaticLossScale(1024.0))

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2.
    """

    scale: float = 2.0**16

    def __post_init__(self) -> None:
        check_scale("scale", self.scale)

    def init(self) -> StaticLossScaleState:
        """The state: the constant scale."""
        return StaticLossScaleState(_f32(self.scale))

    def update(self, state: StaticLossScaleState, grads_finite: ArrayLike) -> StaticLossScaleState:
        """The state as it is."""
        del grads_finite
        return state

    def to_config(self) -> dict[str, Any]:
        """The mapping of which `loss_scale_from_config` makes this loss scale."""
        return as_config("static", self)


class DynamicLossScaleState(NamedTuple):
    """State of `DynamicLossScale`.

    Examples:
      >>> import jamp
      >>> int(jamp.DynamicLossScale(hysteresis=2).init().hysteresis_count)
      2
    """

    loss_scale: Array  # f32[]
    growth_count: Array  # i32[], finite steps since the last change or overflow
    hysteresis_count: Array  # i32[], overflows left before the next backoff, which is the one that brings it to 0

    def restarted(self, loss_scale: Array) -> Self:
        """This state with another scale: growth starts anew and the hysteresis is full."""
        # Only the configuration knows what full is; its `update` takes a larger count as full.
        full = jnp.full_like(self.hysteresis_count, INT32_MAX)
        return self._replace(
            loss_scale=loss_scale, growth_count=jnp.zeros_like(self.growth_count), hysteresis_count=full
        )


@dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that grows while gradients are finite and backs off when they overflow.

    The `growth_interval`-th finite step in a row multiplies the scale by `growth_factor`; an overflow multiplies it by
    `backoff_factor`. A scale that is found inf, nan or outside its bounds is brought back by the next update.

    Args:
      init_scale: The initial scale.
      growth_factor: What a growth multiplies by, above 1.
      backoff_factor: What an overflow multiplies by, between 0 and 1.
      growth_interval: Finite steps in a row before a growth.
      min_scale: The smallest scale, a normal float32 above 0; may be below 1.
      max_scale: The largest scale; may be inf, in which case a growth that would be infinite is refused.
      hysteresis: The first `hysteresis - 1` overflows since the last refill leave the scale.
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
      Micikevicius et al., Mixed Precision Training, ICLR 2018; `torch.amp.GradScaler`; Megatron-LM's
      `DynamicGradScaler` for the hysteresis; apex for the bounds.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    hysteresis: int = 1
    hysteresis_refill: str = "growth"

    def __post_init__(self) -> None:
        check_range(self.init_scale, self.min_scale, self.max_scale)
        check_number("growth_factor", self.growth_factor, above=1, hint="such as 2.0")
        check_number("backoff_factor", self.backoff_factor, above=0, below=1, hint="such as 0.5")
        check_count("growth_interval", self.growth_interval)
        check_count("hysteresis", self.hysteresis)
        if self.hysteresis_refill not in ("growth", "finite"):
            raise ValueError(
                f"hysteresis_refill must be 'growth' or 'finite', got hysteresis_refill={self.hysteresis_refill!r}."
            )

    @classmethod
    def conservative(cls) -> Self:
        """Grows every 5000 finite steps: fewer overflows, a slower rise."""
        return cls(growth_interval=5000)

    @classmethod
    def aggressive(cls) -> Self:
        """Grows every 1000 finite steps: a faster rise, more overflows."""
        return cls(growth_interval=1000)

    def init(self) -> DynamicLossScaleState:
        """The initial state."""
        return DynamicLossScaleState(_f32(self.init_scale), _i32(0), _i32(self.hysteresis))

    def update(self, state: DynamicLossScaleState, grads_finite: ArrayLike) -> DynamicLossScaleState:
        """The next state.

        Args:
          state: The state whose scale scaled this step's loss.
          grads_finite: bool[], whether this step's gradients were finite.
        """
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

    def to_config(self) -> dict[str, Any]:
        """The mapping of which `loss_scale_from_config` makes this loss scale."""
        return as_config("dynamic", self)


def change_scale(
    scale: Array, grow: Array, growth_factor: float, back_off: Array, backoff_factor: float, max_scale: float
) -> Array:
    """The scale after a growth or a backoff, in float32; a growth to infinity is refused where there is no ceiling."""
    grown = scale * np.float32(growth_factor)
    if math.isinf(max_scale):
        grown = jnp.where(jnp.isinf(grown), scale, grown)
    return jnp.where(grow, grown, jnp.where(back_off, scale * np.float32(backoff_factor), scale))


def heal(scale: Array, init_scale: float, min_scale: float, max_scale: float) -> Array:
    """The scale inside [min_scale, max_scale]; init_scale in place of nan, and of inf where there is no ceiling."""
    lost = jnp.isnan(scale) | (scale == jnp.inf) if math.isinf(max_scale) else jnp.isnan(scale)
    return jnp.where(lost, np.float32(init_scale), jnp.clip(scale, np.float32(min_scale), np.float32(max_scale)))


def increment(count: Array) -> Array:
    """`count + 1`, saturating at the largest int32."""
    return jnp.where(count < INT32_MAX, count + 1, INT32_MAX)


def as_config(kind: str, loss_scale: Any) -> dict[str, Any]:
    """The fields of a configuration and its type: Python numbers, strings and None."""
    return {"type": kind, **dataclasses.asdict(loss_scale)}


def _f32(value: float) -> Array:
    return jnp.array(value, jnp.float32)  # a buffer of its own, so that a donated state donates it once


def _i32(value: int) -> Array:
    return jnp.array(value, jnp.int32)
