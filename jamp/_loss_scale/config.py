"""Loss scales for a dtype and from configuration files."""

import difflib
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from jamp._cast import check_floating
from jamp._loss_scale.adaptive import AdaptiveLossScale
from jamp._loss_scale.checks import check_number
from jamp._loss_scale.dynamic import DynamicLossScale
from jamp._loss_scale.static import LossScale, NoOpLossScale, StaticLossScale
from jamp._numbers import as_number


def loss_scale_for(dtype: DTypeLike) -> LossScale:
    """Return the loss scale that a compute dtype needs.

    Args:
      dtype: A floating dtype or its name. Of an 8-bit format, such as `Float8`, the carrier decides: its products
        have scales.

    Returns:
      For float16, `DynamicLossScale()`. For bfloat16, which has the range of float32, `StaticLossScale(1.0)`. It still
      skips steps that are not finite. For float32 and float64, `NoOpLossScale()`. For float8 and narrower,
      `AdaptiveLossScale()`.

    Raises:
      ValueError: If the dtype is not floating.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> jamp.loss_scale_for(jnp.bfloat16)
      StaticLossScale(scale=1.0)
    """
    checked = check_floating("dtype", getattr(dtype, "carrier", dtype))
    if checked == jnp.float16:
        return DynamicLossScale()
    if checked == jnp.bfloat16:
        return StaticLossScale(1.0)
    return NoOpLossScale() if checked.itemsize > 2 else AdaptiveLossScale()


def loss_scale_from_config(config: Mapping[str, Any] | float | str) -> LossScale:
    """Make the loss scale that a mapping or a number describes, such as a section of a YAML or JSON file.

    `type` is one of

    - "dynamic", "static", "adaptive", "none": the other keys are the fields of `DynamicLossScale`,
      `StaticLossScale`, `AdaptiveLossScale` or `NoOpLossScale`. `to_config()` writes such a mapping.
    - MindSpore's "AdaptiveLossScaleUpdateCell", "DynamicLossScaleUpdateCell", "FixedLossScaleUpdateCell": the other
      keys are the arguments of these classes.

    `config` may also be a whole MindFormers document or its `runner_wrapper`. Only `scale_sense` is read from it. If
    that is a number, it is a static scale. `use_clip_grad: True` warns, because clipping belongs in the optimizer
    chain. If you clip there, pass only the `scale_sense`.

    A number is a static scale. Any number may be given as a string, because YAML 1.1 reads `1e9` as a string and JSON
    has no other way to say "inf".

    Raises:
      ValueError: If a type or key is unknown, or a key is missing. The message lists the valid names and the nearest.
      TypeError: If `config` is neither a mapping nor a number.

    Examples:
      >>> import jamp
      >>> jamp.loss_scale_from_config({"type": "static", "scale": 1024.0})
      StaticLossScale(scale=1024.0)
      >>> jamp.loss_scale_from_config({"type": "dynamic", "growth_interval": "2e3", "max_scale": "inf"}).max_scale
      inf
      >>> jamp.loss_scale_from_config(jamp.DynamicLossScale().to_config()) == jamp.DynamicLossScale()
      True
    """
    section: Any = config.get("runner_wrapper", config) if isinstance(config, Mapping) else config
    if isinstance(section, Mapping) and "scale_sense" in section:
        if section.get("use_clip_grad") is True:
            clip = f"optax.clip_by_global_norm({section.get('max_grad_norm', 1.0)})"
            warnings.warn(
                "A loss scale does not clip, got use_clip_grad=True. Pass config['runner_wrapper']['scale_sense'], and "
                f"clip in the optimizer: jamp.loss_scaled(optax.chain({clip}, tx), loss_scale).",
                stacklevel=2,
            )
        section = section["scale_sense"]
    section = _to_number(section)
    if isinstance(section, (int, float)):
        return StaticLossScale(section)
    if not isinstance(section, Mapping):
        raise TypeError(f"A loss scale is configured by a mapping with a 'type', got {section!r}.")
    if "type" not in section:
        raise ValueError(f"A mapping needs a 'type', got {_join_names(section)}. Valid: {_join_names(_BUILDERS)}.")
    kind, fields = section["type"], {k: v for k, v in section.items() if k != "type"}
    _check_name("type", kind, _BUILDERS)
    build = _BUILDERS[kind]
    parameters = inspect.signature(build).parameters
    for key in fields:
        _check_name(f"key for type {kind!r}:", key, parameters)
    missing = [k for k, p in parameters.items() if p.default is p.empty and k not in fields]
    if missing:
        raise ValueError(f"Type {kind!r} needs {_join_names(missing)}; got {_join_names(fields)}.")
    return build(**{k: _to_number(v, whole=parameters[k].annotation is not float) for k, v in fields.items()})


# MindSpore's classes, with their arguments by name. They have no ceiling and a floor of 1.


def _adaptive_cell(
    loss_scale_value: float, scale_factor: float, scale_window: int,
    max_scale_window: int = 1000, min_scale_window: int = 20,
) -> LossScale:  # fmt: skip
    return AdaptiveLossScale(loss_scale_value, scale_factor, min_scale_window, max_scale_window, scale_window)


def _dynamic_cell(loss_scale_value: float, scale_factor: float, scale_window: int) -> LossScale:
    check_number("scale_factor", scale_factor, above=1, hint="such as 2.0")
    return DynamicLossScale(loss_scale_value, scale_factor, 1 / scale_factor, scale_window, max_scale=math.inf)


def _fixed_cell(loss_scale_value: float) -> LossScale:
    return StaticLossScale(loss_scale_value)


_BUILDERS: dict[str, Callable[..., LossScale]] = {
    "adaptive": AdaptiveLossScale,
    "dynamic": DynamicLossScale,
    "none": NoOpLossScale,
    "static": StaticLossScale,
    "AdaptiveLossScaleUpdateCell": _adaptive_cell,
    "DynamicLossScaleUpdateCell": _dynamic_cell,
    "FixedLossScaleUpdateCell": _fixed_cell,
}


def _to_number(value: Any, *, whole: bool = False) -> Any:
    """Return the number in a string, or in each string of a list, an int if `whole` is set and it is whole."""
    if isinstance(value, (list, tuple)):
        return [_to_number(x, whole=whole) for x in value]
    if not isinstance(value, str):
        return as_number(value)
    try:
        number = float(value)
    except ValueError:
        return value  # the constructor's check names the field
    return int(number) if whole and number.is_integer() else number


def _check_name(what: str, name: Any, valid: Iterable[str]) -> None:
    names = {x.lower(): x for x in valid}
    if name in names.values():
        return
    near = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.5)
    hint = f" Did you mean {names[near[0]]!r}?" if near else ""
    raise ValueError(f"Unknown {what} {name!r}.{hint} Valid: {_join_names(names.values()) or 'none'}.")


def _join_names(names: Iterable[Any]) -> str:
    return ", ".join(repr(x) for x in names)
