"""Convert states from and to the loss scalers of other libraries, and jmp's policies. None of them is imported.

A GradScaler holds a configuration (`scaler.loss_scale`) and a state (`scaler.state`). To use them with an optimizer:

    tx = jamp.loss_scaled(optax.adamw(1e-3), scaler.loss_scale)
    opt_state = optax.tree.set(tx.init(params), loss_scale_state=scaler.state)
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jamp._checkpoint import check_checkpoint_config as check_checkpoint_config, checkpoint_config as checkpoint_config
from jamp._jmp_policy import autocast_from_jmp as autocast_from_jmp
from jamp._leaves import contains
from jamp._loss_scale.adaptive import AdaptiveLossScale, AdaptiveLossScaleState
from jamp._loss_scale.checks import INT32_MAX, TINY
from jamp._loss_scale.dynamic import DynamicLossScale
from jamp._loss_scale.scaler_state import AnyLossScaledState, wrap_inner
from jamp._loss_scale.static import LossScale, check_loss_scale
from jamp._optimizer_state.eight_bit import dequantize_state as dequantize_state, quantize_state as quantize_state
from jamp._optimizer_state.split_masters import join_masters as join_masters, split_masters as split_masters
from jamp._step.find import find_loss_scale_state
from jamp.grad_scaler import GradScaler

__all__ = [
    "autocast_from_jmp", "check_checkpoint_config", "checkpoint_config", "dequantize_state", "from_flax", "from_jmp",
    "from_mindformers", "from_torch", "join_masters", "quantize_state", "split_masters", "to_mindformers", "to_torch",
    "unwrap_state", "wrap_state",
]  # fmt: skip
__dir__ = lambda: __all__

_TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def from_torch(state_dict: Mapping[str, Any]) -> GradScaler:
    """Make the scaler that continues from a `torch.amp.GradScaler`.

    torch has no bounds, so `min_scale` is the smallest normal float32 and `max_scale` is inf. With factors that float32
    holds, such as 2 and 0.5, the scale equals torch's at every step, with one exception. If the growth interval was
    lowered below the tracker, torch never grows again, and jamp grows at the next finite step.

    Args:
      state_dict: The result of `scaler.state_dict()` in torch.

    Raises:
      ValueError: If it is empty or lacks keys. The message names them.
      TypeError: If it is not a mapping.

    Examples:
      >>> import jamp
      >>> saved = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
      >>> scaler = jamp.interop.from_torch(saved | {"_growth_tracker": 7})
      >>> float(scaler.get_scale()), int(scaler.state.growth_count)
      (1024.0, 7)
    """
    if hasattr(state_dict, "state_dict"):
        raise TypeError("from_torch takes a state dict: jamp.interop.from_torch(scaler.state_dict()).")
    if not state_dict:
        raise ValueError("The state dict is empty, as a disabled scaler's is. Use GradScaler(enabled=False).")
    _check_keys(state_dict, _TORCH_KEYS, "state dict of torch's GradScaler")
    return _dynamic(
        scale=state_dict["scale"],
        growth_count=state_dict["_growth_tracker"],
        growth_factor=state_dict["growth_factor"],
        backoff_factor=max(state_dict["backoff_factor"], TINY),  # torch accepts 0
        growth_interval=state_dict["growth_interval"] or INT32_MAX,  # with 0, torch never grows
        min_scale=TINY,
        max_scale=math.inf,
    )


def to_torch(scaler: GradScaler) -> dict[str, Any]:
    """Return the state dict that torch's `GradScaler.load_state_dict` accepts. For a disabled scaler it is empty.

    Args:
      scaler: A scaler with a `DynamicLossScale`. Its bounds and hysteresis are lost, because torch has neither.

    Raises:
      ValueError: If the scaler has another kind of loss scale.
      TypeError: If `scaler` is not a `GradScaler`.

    Examples:
      >>> import jamp
      >>> jamp.interop.to_torch(jamp.GradScaler())["scale"]
      65536.0
    """
    if not isinstance(scaler, GradScaler):
        raise TypeError(f"Expected a GradScaler, got a {type(scaler).__name__}. Write jamp.interop.to_torch(scaler).")
    saved = scaler.state_dict()
    if saved and not isinstance(scaler.loss_scale, DynamicLossScale):
        raise ValueError(f"torch has a dynamic loss scale only, got {scaler.loss_scale!r}.")
    return {key: saved[key] for key in _TORCH_KEYS if saved}


def from_flax(dynamic_scale: Any) -> GradScaler:
    """Make the scaler that continues from a `flax.training.dynamic_scale.DynamicScale`.

    Flax grows one finite step after its `growth_interval`, so the interval of the returned scaler is one longer. If
    `fin_steps` is above that `growth_interval` already, Flax grows again only after an overflow, and jamp at the next
    finite step.

    Args:
      dynamic_scale: The object. Reading it waits for the device.

    Returns:
      A scaler with the same scale, counts and rule.

    Examples:
      >>> import types, jamp  # in place of flax's DynamicScale(), its attributes
      >>> rule = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "minimum_scale": None}
      >>> dynamic_scale = types.SimpleNamespace(**rule, scale=1024.0, fin_steps=7)
      >>> jamp.interop.from_flax(dynamic_scale).loss_scale.growth_interval
      2001
    """
    return _dynamic(
        scale=dynamic_scale.scale,
        growth_count=dynamic_scale.fin_steps,
        growth_factor=dynamic_scale.growth_factor,
        backoff_factor=dynamic_scale.backoff_factor,
        growth_interval=dynamic_scale.growth_interval + 1,
        min_scale=max(float(dynamic_scale.minimum_scale or 0.0), TINY),
        max_scale=float(np.finfo(np.float32).max),
    )


def from_jmp(loss_scale: Any) -> GradScaler:
    """Make the scaler that continues from a `jmp.DynamicLossScale`.

    jmp loses `min_loss_scale` in every pytree round trip. The value that the object has now is used. With a factor that
    is a power of two, as jmp's default is, the scale equals jmp's at every step.

    Args:
      loss_scale: The object. Reading it waits for the device.

    Returns:
      A scaler with the same scale, counts and rule.

    Examples:
      >>> import types, jamp  # in place of jmp's DynamicLossScale, its attributes
      >>> rule = {"period": 2000, "factor": 2, "min_loss_scale": 1.0}
      >>> float(jamp.interop.from_jmp(types.SimpleNamespace(**rule, loss_scale=2.0**15, counter=7)).get_scale())
      32768.0
    """
    return _dynamic(
        scale=loss_scale.loss_scale,
        growth_count=loss_scale.counter,
        growth_factor=float(loss_scale.factor),
        backoff_factor=1.0 / loss_scale.factor,
        growth_interval=loss_scale.period,
        min_scale=max(float(loss_scale.min_loss_scale), TINY),
        max_scale=math.inf,
    )


def from_mindformers(parameters: Mapping[str, Any]) -> AdaptiveLossScaleState:
    """Make the state of MindFormers' adaptive loss scale.

    Args:
      parameters: The six parameters of `AdaptiveLossScaleUpdateCell` by name, and `scale_sense` of the train-step cell,
        as a checkpoint holds them. Other entries are not read.

    Returns:
      The state for an `AdaptiveLossScale` with the same window list.

    Raises:
      ValueError: If a parameter is missing. The message names it.

    Examples:
      >>> import jamp
      >>> state = jamp.AdaptiveLossScale().init()
      >>> int(jamp.interop.from_mindformers(jamp.interop.to_mindformers(state)).steps_since_change)
      1
    """
    names = to_mindformers(AdaptiveLossScale().init())
    _check_keys(parameters, names, "set of parameters of MindFormers' adaptive loss scale")
    number = {name: np.asarray(parameters[name]).item() for name in names}  # A checkpoint holds the model too.
    counts = [number[name] for name in ("list_index", "scale_window_up_count", "scale_window_down_count")]
    counts.append(number["current_iterator_step"] - number["last_overflow_iterator_step"])
    return AdaptiveLossScaleState(jnp.float32(number["scale_sense"]), *(jnp.array(x, jnp.int32) for x in counts))


def to_mindformers(tree: Any, loss_scale: AdaptiveLossScale = AdaptiveLossScale()) -> dict[str, Any]:
    """Return MindFormers' six parameters and `scale_sense`. `last_overflow_iterator_step` is always 0.

    Args:
      tree: A state of an `AdaptiveLossScale`, or any pytree that holds exactly one. Reading it waits for the device.
      loss_scale: Its configuration, for the length of the window.

    Raises:
      ValueError: If the tree holds no state of an `AdaptiveLossScale` or several, or `loss_scale` has fewer windows.

    Examples:
      >>> import jamp
      >>> jamp.interop.to_mindformers(jamp.AdaptiveLossScale().init())["scale_window"]
      20
    """
    found, windows = find_loss_scale_state(tree), loss_scale.window_list
    if not isinstance(found, AdaptiveLossScaleState):
        cure = "Write jamp.convert_loss_scale(tree, jamp.AdaptiveLossScale())."
        raise ValueError(f"Expected the state of an AdaptiveLossScale, got a {type(found).__name__}. {cure}")
    state = jax.tree.map(lambda x: x.item(), jax.device_get(found))
    if state.window_index >= len(windows):
        got = f"window {state.window_index} and windows {windows}"
        raise ValueError(f"loss_scale must be the AdaptiveLossScale that made the state, got {got}.")
    return {
        "scale_sense": state.loss_scale,
        "scale_window": 1 if state.window_index < 0 else windows[state.window_index],
        "list_index": state.window_index,
        "scale_window_up_count": state.up_count,
        "scale_window_down_count": state.down_count,
        "current_iterator_step": state.steps_since_change,
        "last_overflow_iterator_step": 0,
    }


def wrap_state(
    opt_state: Any, loss_scale: LossScale = DynamicLossScale(), *, unscale: bool = False
) -> AnyLossScaledState:
    """Wrap a state of the plain `tx`, so that `jamp.loss_scaled(tx, loss_scale)` continues from it.

    Args:
      opt_state: A state of `tx`, such as one restored from a checkpoint. `loss_scaled` holds the moments of 16-bit
        parameters in float32: `optax.tree.cast_like(opt_state, jamp.loss_scaled(tx).init(params).inner_state)`.
      loss_scale: The loss scale. It starts at its initial scale.
      unscale: As for `loss_scaled`.

    Returns:
      The state for `jamp.loss_scaled(tx, loss_scale, unscale=unscale)`.

    Raises:
      TypeError: If `loss_scale` is not a loss scale.
      ValueError: If the state is loss-scaled already.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> opt_state = optax.adam(0.1).init(jnp.ones(3))
      >>> float(jamp.get_loss_scale(jamp.interop.wrap_state(opt_state)))
      65536.0
    """
    check_loss_scale(loss_scale)
    return wrap_inner(opt_state, loss_scale, unscale=unscale)


def unwrap_state(tree: Any) -> Any:
    """Return a tree with the inner state in place of each state of `jamp.loss_scaled`.

    Raises:
      ValueError: If the tree holds no loss-scaled state.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> tx = optax.sgd(0.1)
      >>> jamp.interop.unwrap_state(jamp.loss_scaled(tx).init(jnp.ones(3))) == tx.init(jnp.ones(3))
      True
    """
    is_wrapped = lambda x: isinstance(x, AnyLossScaledState)
    if not contains(tree, is_wrapped):
        raise ValueError(f"Expected the state of `jamp.loss_scaled`, found none in this {type(tree).__name__}.")
    return jax.tree.map(lambda x: x.inner_state if is_wrapped(x) else x, tree, is_leaf=is_wrapped)


def _dynamic(scale: Any, growth_count: Any, **config: Any) -> GradScaler:
    scale = float(scale)
    # At a scale of 0, training had stopped. It starts again from the floor.
    scaler = GradScaler(DynamicLossScale(init_scale=config["min_scale"] if scale == 0 else scale, **config))
    return scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": int(growth_count)})


def _check_keys(mapping: Mapping[str, Any], keys: Sequence[str] | Mapping[str, Any], what: str) -> None:
    if not isinstance(mapping, Mapping):
        raise TypeError(f"A {what} is a mapping, got a {type(mapping).__name__}.")
    missing = [key for key in keys if key not in mapping]
    if missing:
        raise ValueError(f"This is not a {what}: it lacks {', '.join(missing)} and has {', '.join(map(str, mapping))}.")
