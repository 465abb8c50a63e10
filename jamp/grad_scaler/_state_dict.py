"""A `ScalerState` as a dictionary of Python numbers, with the keys of torch's `GradScaler.state_dict`."""

import dataclasses
import reprlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jamp._leaves import replace_leaves
from jamp._loss_scale.dynamic import DynamicLossScale
from jamp._loss_scale.scaler_state import ScalerState
from jamp._loss_scale.static import LossScale

# torch's names of these fields, and the part of the configuration that its state dict holds.
_TORCH_NAMES = {"loss_scale": "scale", "growth_count": "_growth_tracker"}
_TORCH_CONFIG = ("growth_factor", "backoff_factor", "growth_interval")
# For each dtype kind of the scaler's own array: its name in messages, and the kinds that a saved value may have.
_KINDS = {"b": ("a bool", "b"), "i": ("an int", "iu"), "f": ("a number", "fiu")}


def to_state_dict(loss_scale: LossScale, state: ScalerState) -> dict[str, Any]:
    """Return the state as Python numbers. It waits for the device."""
    config = {name: getattr(loss_scale, name) for name in _TORCH_CONFIG if hasattr(loss_scale, name)}
    fields = _fields(state)
    numbers = [x.tolist() for x in jax.device_get(list(fields.values()))]
    return dict(zip(fields, numbers, strict=True)) | config


def from_state_dict(
    loss_scale: LossScale, state: ScalerState, saved: Mapping[str, Any]
) -> tuple[LossScale, ScalerState]:
    """Invert `to_state_dict`, for a configuration and a state of the same kind.

    A ValueError says which keys are missing, or which value has another shape or type than the state's own.
    """
    if not isinstance(saved, Mapping):
        raise ValueError(f"A state dict is a mapping, got {reprlib.repr(saved)}. Pass scaler.state_dict().")
    if not saved:
        raise ValueError("The state dict is empty, as a disabled scaler's is. Use GradScaler(enabled=False).")
    missing = [name for name in to_state_dict(loss_scale, state) if name not in saved]
    if missing:
        raise ValueError(
            f"The state dict of a {type(loss_scale).__name__} needs {', '.join(missing)}, got "
            f"{', '.join(map(str, saved))}. For torch's, use jamp.interop.from_torch."
        )
    foreign = [name for name in _TORCH_CONFIG if name in saved and not hasattr(loss_scale, name)]
    if foreign:
        raise ValueError(f"Expected the state dict of a {loss_scale!r}, got {', '.join(foreign)} of a dynamic scale.")
    if isinstance(loss_scale, DynamicLossScale):
        loss_scale = dataclasses.replace(loss_scale, **{name: saved[name] for name in _TORCH_CONFIG})
    return loss_scale, replace_leaves(state, [_array(name, saved[name], x) for name, x in _fields(state).items()])


def _array(name: str, value: Any, own: Any) -> Array:
    """Return a saved value as an array of the shape and dtype of the state's own."""
    expected, kinds = _KINDS.get(own.dtype.kind, _KINDS["f"])
    try:
        array = np.asarray(value)
    except ValueError:  # lists of several lengths
        array = np.asarray(None)
    fits = array.dtype.kind in kinds and array.shape == own.shape
    if not fits or (own.dtype.kind == "i" and not np.array_equal(array.astype(own.dtype), array)):
        got, own_type = reprlib.repr(value), f"{own.dtype.name}{list(own.shape)}"
        raise ValueError(f"{name} must be {expected}, {own_type}, got {got}. Pass scaler.state_dict() unchanged.")
    return jnp.array(array, own.dtype)


def _fields(state: ScalerState) -> dict[str, Any]:
    """Return the arrays by name, in the order of the pytree's leaves."""
    named = state.loss_scale_state._asdict() | state.stats._asdict() | {"grads_finite": state.grads_finite}
    return {_TORCH_NAMES.get(name, name): x for name, x in named.items()}
