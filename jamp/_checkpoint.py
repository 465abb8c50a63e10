"""A description of the state in a checkpoint, to save with it and to compare before restoring it."""

import reprlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.tree_util import keystr, tree_leaves_with_path

from jamp._leaves import contains, is_numeric
from jamp._loss_scale.scaler_state import is_skipping
from jamp._loss_scale.static import LossScale, NoOpLossScale


def checkpoint_config(tree: Any, loss_scale: LossScale = NoOpLossScale()) -> dict[str, Any]:
    """Describe a state: the configuration of the loss scale, and the shape and dtype of every array.

    Save it with the checkpoint. Restoring may cast arrays silently, and two kinds of loss scale may have the same
    fields. `check_checkpoint_config` detects both.

    Args:
      tree: The state that is saved, or its `jax.ShapeDtypeStruct`s. Leaves that are not arrays or numbers are left out.
      loss_scale: The configuration of its loss scale. Leave it out if the state has none.

    Returns:
      A mapping of strings, numbers, lists and None, for Python's `json`. `loss_scale` is the result of `to_config()`.
      Without that method it only has the class name as `type`. `arrays` has an entry such as "float32[3,4]" for each
      path.

    Raises:
      ValueError: If the state holds a loss scale, and `loss_scale` is left out.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> jamp.interop.checkpoint_config({"w": jnp.ones((3, 4))}, jamp.StaticLossScale(8.0))
      {'loss_scale': {'type': 'static', 'scale': 8.0}, 'arrays': {"['w']": 'float32[3,4]'}}
    """
    _check_given(tree, loss_scale)
    # Without x64, `result_type` takes NumPy's float64 for float32.
    describe = lambda x: f"{getattr(x, 'dtype', None) or jnp.result_type(x)}[{','.join(map(str, jnp.shape(x)))}]"
    arrays = {keystr(path): describe(x) for path, x in tree_leaves_with_path(tree) if is_numeric(x)}
    return {"loss_scale": _config(loss_scale), "arrays": arrays}


def check_checkpoint_config(saved: Mapping[str, Any], tree: Any, loss_scale: LossScale = NoOpLossScale()) -> None:
    """Raise unless a checkpoint fits a state. Call it before restoring the checkpoint into the state.

    Different numbers of the same kind of loss scale, such as another `growth_interval`, are not an error. The run
    continues with the new ones.

    Args:
      saved: The result of `checkpoint_config` from when the checkpoint was saved.
      tree: The state to restore into.
      loss_scale: The configuration of its loss scale. Leave it out if the state has none.

    Raises:
      ValueError: If the kind of loss scale or an array differs, or `saved` is damaged. The message names both sides.
        If the state holds a loss scale, and `loss_scale` is left out.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> saved = jamp.interop.checkpoint_config({"w": jnp.ones(3)}, jamp.StaticLossScale())
      >>> jamp.interop.check_checkpoint_config(saved, {"w": jnp.ones(3)}, jamp.StaticLossScale(8.0))
      >>> try:
      ...     jamp.interop.check_checkpoint_config(saved, {"w": jnp.ones(3, jnp.float16)}, jamp.StaticLossScale())
      ... except ValueError as error:
      ...     print(str(error).partition(" Restore")[0])
      The checkpoint does not fit: ['w'] was saved as float32[3], the state has float16[3].
    """
    _check_form(saved)
    _check_given(tree, loss_scale)
    kind, wanted = saved["loss_scale"]["type"], _config(loss_scale)["type"]
    if kind != wanted:
        raise ValueError(
            f"The checkpoint was saved under a loss scale of type {kind!r}, this run has {wanted!r}. Restore it with "
            "jamp.loss_scale_from_config(saved['loss_scale']), then jamp.convert_loss_scale(restored, loss_scale)."
        )
    arrays, own = saved["arrays"], checkpoint_config(tree, loss_scale)["arrays"]
    wrong = [_difference(path, arrays.get(path), x) for path, x in own.items() if arrays.get(path) != x]
    wrong += [_difference(path, x, None) for path, x in arrays.items() if path not in own]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            f"The checkpoint does not fit: {'; '.join(wrong[:3])}{more}. Restore it into a state of the saved types, "
            "then convert that with jamp.cast_floating or jamp.interop.wrap_state."
        )


def _check_given(tree: Any, loss_scale: LossScale) -> None:
    """Raise ValueError if the state holds a loss scale, and the default stands for its configuration."""
    if isinstance(loss_scale, NoOpLossScale) and contains(tree, is_skipping):
        raise ValueError("The state holds a loss scale. Pass its configuration, such as jamp.DynamicLossScale().")


def _check_form(saved: Any) -> None:
    """Raise ValueError unless `saved` has the form that `checkpoint_config` gives it."""
    parts: list[Any] = [saved.get(x) if isinstance(saved, Mapping) else None for x in ("loss_scale", "arrays")]
    is_mapping = all(isinstance(x, Mapping) for x in parts)
    if not is_mapping or not all(isinstance(x, str) for x in (parts[0].get("type"), *parts[1].values())):
        got = reprlib.repr(saved)
        raise ValueError(f"saved must be what jamp.interop.checkpoint_config returned, got {got}. Save it again.")


def _difference(path: str, saved: str | None, own: str | None) -> str:
    return f"{path} was {f'saved as {saved}' if saved else 'not saved'}, the state has {own or 'no such array'}"


def _config(loss_scale: LossScale) -> dict[str, Any]:
    to_config = getattr(loss_scale, "to_config", dict)
    return {"type": type(loss_scale).__name__} | to_config()
