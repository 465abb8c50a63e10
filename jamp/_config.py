"""Which loss scale: for a dtype, from a configuration file, and another one for a run that goes on."""

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jamp._adaptive import AdaptiveLossScale
from jamp._checks import TINY, check_number
from jamp._lookup import find_state
from jamp._loss_scale import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale


def loss_scale_for(dtype: DTypeLike) -> LossScale:
    """The loss scale that a compute dtype needs.

    Args:
      dtype: A floating dtype or its name.

    Returns:
      float16: `DynamicLossScale()`. bfloat16, whose range is that of float32: `StaticLossScale(1.0)`, which still
      skips steps that are not finite. float32 and float64: `NoOpLossScale()`. float8 and narrower:
      `AdaptiveLossScale()`.

    Raises:
      ValueError: If the dtype is not floating.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> jamp.loss_scale_for(jnp.bfloat16)
      StaticLossScale(scale=1.0)
    """
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype must be floating, such as jnp.float16, got dtype={dtype.name!r}.")
    if dtype == jnp.float16:
        return DynamicLossScale()
    if dtype == jnp.bfloat16:
        return StaticLossScale(1.0)
    return NoOpLossScale() if dtype.itemsize > 2 else AdaptiveLossScale()


def loss_scale_from_config(config: Mapping[str, Any]) -> LossScale:
    """The loss scale that a mapping describes, such as a part of a YAML or JSON file.

    `type` is one of

    - "dynamic", "static", "adaptive", "none": the other keys are the fields of `DynamicLossScale`,
      `StaticLossScale`, `AdaptiveLossScale`, `NoOpLossScale`. `to_config()` writes such a mapping.
    - MindSpore's "AdaptiveLossScaleUpdateCell", "DynamicLossScaleUpdateCell", "FixedLossScaleUpdateCell": the other
      keys are the arguments of these classes. Of a whole MindFormers document, or of its `runner_wrapper`,
      `scale_sense` is read; a plain number there is a static scale. Clipping (`use_clip_grad`) belongs into the
      optimizer chain.

    A number may be given as a string: YAML 1.1 reads `1e9` as one, and JSON has no other way to say "inf".

    Args:
      config: The mapping.

    Raises:
      ValueError: If a type or key is unknown, or a key is missing. The message lists the valid ones and the nearest.
      TypeError: If `config` is no mapping.

    Examples:
      >>> import jamp
      >>> jamp.loss_scale_from_config({"type": "static", "scale": 1024.0})
      StaticLossScale(scale=1024.0)
      >>> jamp.loss_scale_from_config(jamp.DynamicLossScale().to_config()) == jamp.DynamicLossScale()
      True
    """
    section: Any = config
    for part in ("runner_wrapper", "scale_sense"):
        if isinstance(section, Mapping):
            section = section.get(part, section)
    if isinstance(section, (int, float)):
        return StaticLossScale(section)
    if not isinstance(section, Mapping):
        raise TypeError(f"A loss scale is configured by a mapping with a 'type', got {section!r}.")
    if "type" not in section:
        raise ValueError(
            f"The mapping has no 'type', only {_listed(section)}. Valid types: {_listed(_BUILDERS)}; or give a "
            "MindFormers document with runner_wrapper.scale_sense."
        )
    kind, fields = section["type"], {k: v for k, v in section.items() if k != "type"}
    _check_name("type", kind, _BUILDERS)
    build = _BUILDERS[kind]
    parameters = inspect.signature(build).parameters
    for key in fields:
        _check_name(f"key for type {kind!r}:", key, parameters)
    missing = [k for k, p in parameters.items() if p.default is p.empty and k not in fields]
    if missing:
        raise ValueError(f"Type {kind!r} needs {_listed(missing)}; got {_listed(fields)}.")
    return build(**{k: _number(v) if parameters[k].annotation is float else v for k, v in fields.items()})


def convert_loss_scale(tree: Any, loss_scale: LossScale) -> Any:
    """Go on with another loss scale: a tree saved under one, made ready for an optimizer wrapped with another.

    The new loss scale starts from the present scale, brought inside its bounds; a static one and `NoOpLossScale` have
    their own. The inner optimizer's state, the statistics and all else stay as they are.

    Args:
      tree: A loss-scale state, or any pytree that holds exactly one: an optimizer state, a train state.
      loss_scale: The loss scale to go on with.

    Returns:
      The tree with the state of `loss_scale` in place of the old one.

    Raises:
      ValueError: If the tree holds no loss-scale state or several.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> params = jnp.ones(3)
      >>> opt_state = jamp.loss_scaled(optax.adam(0.1), jamp.DynamicLossScale()).init(params)  # or from a checkpoint
      >>> adaptive = jamp.AdaptiveLossScale()
      >>> tx, opt_state = jamp.loss_scaled(optax.adam(0.1), adaptive), jamp.convert_loss_scale(opt_state, adaptive)
      >>> type(opt_state.loss_scale_state).__name__, float(jamp.get_loss_scale(opt_state))
      ('AdaptiveLossScaleState', 65536.0)
    """
    found = find_state(tree)
    old = jnp.asarray(found.loss_scale)
    new = jax.tree.map(lambda x: jnp.broadcast_to(x, old.shape + x.shape), loss_scale.init())
    if not isinstance(loss_scale, (NoOpLossScale, StaticLossScale)):
        bounds = getattr(loss_scale, "min_scale", TINY), getattr(loss_scale, "max_scale", math.inf)
        scale = jnp.clip(old, *(np.float32(x) for x in bounds))
        new = new._replace(loss_scale=jnp.where(jnp.isfinite(scale), scale, new.loss_scale))
    return jax.tree.map(lambda x: new if x is found else x, tree, is_leaf=lambda x: x is found)


# MindSpore's classes, their arguments by name. No ceiling, a floor of 1.


def _adaptive_cell(
    loss_scale_value: float,
    scale_factor: float,
    scale_window: int,
    max_scale_window: int = 1000,
    min_scale_window: int = 20,
) -> LossScale:
    return AdaptiveLossScale(loss_scale_value, scale_factor, min_scale_window, max_scale_window, scale_window)


def _dynamic_cell(loss_scale_value: float, scale_factor: float, scale_window: int) -> LossScale:
    check_number("scale_factor", scale_factor, above=1, hint="such as 2.0")
    return DynamicLossScale(
        loss_scale_value,
        scale_factor,
        1 / scale_factor,
        growth_interval=scale_window,
        min_scale=1.0,
        max_scale=math.inf,
    )


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


def _number(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value  # the constructor's check names the field


def _check_name(what: str, name: Any, valid: Iterable[str]) -> None:
    names = {x.lower(): x for x in valid}
    if name in names.values():
        return
    near = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.5)
    hint = f" Did you mean {names[near[0]]!r}?" if near else ""
    raise ValueError(f"Unknown {what} {name!r}.{hint} Valid: {_listed(names.values()) or 'none'}.")


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(repr(x) for x in names)
