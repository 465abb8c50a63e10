"""A `ScalerState` as a dictionary of Python numbers, with the keys of torch's `GradScaler.state_dict`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jamp._scale.dynamic import DynamicLossScale
from jamp._scale.static import LossScale
from jamp._step.state import ScalerState

# torch's names of these fields, and the part of the configuration that its state dict holds.
_TORCH_NAMES = {"loss_scale": "scale", "growth_count": "_growth_tracker"}
_TORCH_CONFIG = ("growth_factor", "backoff_factor", "growth_interval")


def to_state_dict(loss_scale: LossScale, state: ScalerState) -> dict[str, Any]:
    """Return the state as Python numbers. It waits for the device."""
    config = {name: getattr(loss_scale, name) for name in _TORCH_CONFIG if hasattr(loss_scale, name)}
    fields = _fields(state)
    numbers = [x.tolist() for x in jax.device_get(list(fields.values()))]
    return dict(zip(fields, numbers, strict=True)) | config


def from_state_dict(
    loss_scale: LossScale, state: ScalerState, saved: Mapping[str, Any]
) -> tuple[LossScale, ScalerState]:
    """Invert `to_state_dict`, for a configuration and a state of the same kind. Missing keys raise a ValueError."""
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


def _fields(state: ScalerState) -> dict[str, Any]:
    """The arrays by name, in the order of the pytree's leaves."""
    named = state.loss_scale_state._asdict() | state.stats._asdict() | {"grads_finite": state.grads_finite}
    return {_TORCH_NAMES.get(name, name): x for name, x in named.items()}
