"""Whether parameters fit into another dtype."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr
from jax.typing import DTypeLike

from jamp._tree import is_floating


def check_castable(params: Any, dtype: DTypeLike) -> list[str]:
    """The parameters that cannot be cast to a floating dtype.

    For use on the host, before training: it waits for the device.

    Args:
      params: A pytree of arrays.
      dtype: The floating dtype to cast to, with `cast_floating`.

    Returns:
      The paths of the leaves that are not floating, or hold a finite number that becomes inf (nan in a float8 without
      inf). Empty if all are compatible.

    Raises:
      ValueError: If `dtype` is not floating.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> jamp.check_castable({"w": jnp.array([1.0, 1e5]), "b": jnp.zeros(2)}, jnp.float16)
      ["['w']"]
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype must be floating, such as jnp.float16, got dtype={jnp.dtype(dtype).name!r}.")
    return [keystr(path) for path, x in jax.tree.leaves_with_path(params) if not is_floating(x) or _overflows(x, dtype)]


def _overflows(x: Any, dtype: DTypeLike) -> bool:
    x = jnp.asarray(x)
    return bool(jnp.any(jnp.isfinite(x) & ~jnp.isfinite(x.astype(dtype))))
