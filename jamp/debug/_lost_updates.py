"""`lost_updates`: the updates that are too small for the parameters' dtype."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jamp._cast import is_floating


def lost_updates(params: optax.Params, updates: optax.Updates) -> Any:
    """The share of the updates that rounding to nearest loses.

    An update is lost if it is nonzero but leaves the parameter unchanged. That happens to updates below half the
    spacing of the parameters: for bfloat16, a 512th of a parameter or less.

    Args:
      params: A pytree. To see what would be lost in bfloat16, pass `jamp.cast_floating(params, jnp.bfloat16)`.
      updates: A pytree like `params`, from an optimizer's `update`, but not from that of `jamp.stochastic_rounding`.

    Returns:
      A pytree like `params` of the shares of the updates that are not 0, f32[], from 0 to 1. It works under `jit`.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> float(jamp.debug.lost_updates(jnp.ones(4, jnp.bfloat16), jnp.float32([0, 1e-3, 1e-2, 1e-1])))
      0.3333333432674408
    """

    def share(p: Any, update: Any) -> Array:
        if not is_floating(p):
            return jnp.float32(0)
        moves = update != 0
        with jax.numpy_dtype_promotion("standard"):
            wide = jnp.promote_types(p.dtype, update.dtype)
        is_lost = moves & ((p.astype(wide) + update.astype(wide)).astype(p.dtype) == p)
        return jnp.sum(is_lost, dtype=jnp.float32) / jnp.maximum(jnp.sum(moves, dtype=jnp.float32), 1)

    return jax.tree.map(share, params, updates)
