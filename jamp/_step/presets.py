"""The constructors of `GradScaler` that have names."""

from collections.abc import Mapping
from typing import Any, Self

import jax.numpy as jnp

from jamp._scale.config import loss_scale_for, loss_scale_from_config
from jamp._scale.dynamic import DynamicLossScale
from jamp._scale.static import LossScale, StaticLossScale


class Presets:
    """Base class of `GradScaler`."""

    def __init__(self, loss_scale: LossScale | None = None, *, enabled: bool = True) -> None:
        raise NotImplementedError

    @classmethod
    def default(cls) -> Self:
        """A dynamic scaler with torch's defaults, and bounds of 1 and 2**24."""
        return cls()

    @classmethod
    def static(cls, scale: float = 2.0**16, *, enabled: bool = True) -> Self:
        """A constant scale. An overflow skips the step and leaves the scale unchanged."""
        return cls(StaticLossScale(scale), enabled=enabled)

    @classmethod
    def conservative(cls) -> Self:
        """A dynamic scaler that grows every 5000 finite steps."""
        return cls(DynamicLossScale.conservative())

    @classmethod
    def aggressive(cls) -> Self:
        """A dynamic scaler that grows every 1000 finite steps."""
        return cls(DynamicLossScale.aggressive())

    @classmethod
    def for_fp16(cls) -> Self:
        """The scaler for float16: a dynamic scale."""
        return cls(loss_scale_for(jnp.float16))

    @classmethod
    def for_bf16(cls) -> Self:
        """The scaler for bfloat16: a scale of 1 that still skips steps that are not finite."""
        return cls(loss_scale_for(jnp.bfloat16))

    @classmethod
    def from_config(cls, config: LossScale | Mapping[str, Any]) -> Self:
        """Make a scaler from a loss scale, or a mapping for `loss_scale_from_config`. The default type is "dynamic"."""
        if not isinstance(config, Mapping):
            return cls(config)
        has_type = {"type", "runner_wrapper", "scale_sense"} & set(config)
        return cls(loss_scale_from_config(config if has_type else {"type": "dynamic", **config}))
