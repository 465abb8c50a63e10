"""What a `GradScaler` holds: its leaves, and the dict of numbers as which they are saved."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jamp._loss_scale import DynamicLossScale, LossScale, NoOpLossScale
from jamp._stats import LossScaleStats

# What torch's state dict calls these fields, and the part of the configuration that it holds.
_TORCH_NAMES = {"loss_scale": "scale", "growth_count": "_growth_tracker"}
_TORCH_CONFIG = ("growth_factor", "backoff_factor", "growth_interval")


class GradScalerState(NamedTuple):
    """The leaves, under the names by which `jamp.get_loss_scale`, `get_stats` and `metrics` find them."""

    loss_scale_state: Any
    stats: LossScaleStats
    grads_finite: Array  # bool[], of the last update

    @classmethod
    def init(cls, loss_scale: LossScale) -> "GradScalerState":
        """The state before the first step."""
        state = loss_scale.init()
        return cls(state, LossScaleStats.init(state.loss_scale), jnp.array(True))

    def update(self, loss_scale: LossScale, grads_finite: Array) -> "GradScalerState":
        """The state after a step."""
        old = self.loss_scale_state
        new = loss_scale.update(old, grads_finite)
        stats = self.stats.update(grads_finite, old.loss_scale, new.loss_scale)
        return GradScalerState(new, stats, grads_finite)

    def silent(self) -> "GradScalerState":
        """The state of a disabled scaler: every function that finds it scales by nothing."""
        return self._replace(loss_scale_state=NoOpLossScale().init())


def to_state_dict(loss_scale: LossScale, state: GradScalerState) -> dict[str, Any]:
    """The state as Python numbers, torch's keys among them."""
    config = {name: getattr(loss_scale, name) for name in _TORCH_CONFIG if hasattr(loss_scale, name)}
    fields = _fields(state)
    numbers = [x.tolist() for x in jax.device_get(list(fields.values()))]
    return dict(zip(fields, numbers, strict=True)) | config


def from_state_dict(
    loss_scale: LossScale, state: GradScalerState, saved: Mapping[str, Any]
) -> tuple[LossScale, GradScalerState]:
    """The inverse of `to_state_dict`, for a configuration and a state of the same kind.

    Raises:
      ValueError: If `saved` is empty or lacks keys.
    """
    if not saved:
        raise ValueError(
            "The state dict is empty, as that of a disabled scaler is. Use GradScaler(enabled=False), or a new scaler."
        )
    missing = [name for name in to_state_dict(loss_scale, state) if name not in saved]
    if missing:
        raise ValueError(
            f"The state dict lacks {', '.join(missing)}; it has {', '.join(map(str, saved))}. Load one that a scaler "
            f"with a {type(loss_scale).__name__} wrote; for one that torch wrote, use jamp.interop.from_torch."
        )
    if isinstance(loss_scale, DynamicLossScale):
        loss_scale = dataclasses.replace(loss_scale, **{name: saved[name] for name in _TORCH_CONFIG})
    leaves = [jnp.array(saved[name], x.dtype) for name, x in _fields(state).items()]
    return loss_scale, jax.tree.unflatten(jax.tree.structure(state), leaves)


def _fields(state: GradScalerState) -> dict[str, Any]:
    """The leaves by name, in the order of the pytree."""
    named = state.loss_scale_state._asdict() | state.stats._asdict() | {"grads_finite": state.grads_finite}
    return {_TORCH_NAMES.get(name, name): x for name, x in named.items()}
