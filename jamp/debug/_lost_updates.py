"""`lost_updates`: the updates that are too small for the parameters' dtype."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.tree_util import keystr

from jamp import _table
from jamp._arguments import describe
from jamp._cast import is_floating
from jamp.debug._usage import called_as, is_state

_SHOWN = 20  # leaves


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LostUpdates:
    """The shares of the updates that rounding loses, from `lost_updates`. `str()` is a table, the most first.

    It is a pytree, so `jit` can return it. `lost["w"]` is `lost.shares["w"]`.

    Attributes:
      shares: A pytree like the parameters, f32[] from 0 to 1. NaN if an update is inf or NaN.
    """

    shares: Any

    def __getitem__(self, key: Any) -> Any:
        return self.shares[key]

    def __str__(self) -> str:
        flat = [(keystr(path) or "the array", x) for path, x in jax.tree.leaves_with_path(self.shares)]
        if any(isinstance(x, jax.core.Tracer) for _, x in flat):
            return repr(self)
        some = sorted([(path, float(x)) for path, x in flat if x != 0], key=lambda pair: -np.nan_to_num(pair[1], nan=2))
        bad = sum(np.isnan(x) for _, x in some)
        title = (
            f"rounding loses updates of {len(some) - bad} of {len(flat)} leaves"
            + f"; {bad} hold inf or nan" * bool(bad)
        )
        rows = [(path, "inf or nan" if np.isnan(x) else f"{x:.1%}") for path, x in some[:_SHOWN]]
        more = [f"... and {len(some) - _SHOWN} more, in `.shares`"] if len(some) > _SHOWN else []
        table = _table.with_header(("leaf", "updates that are lost"), rows, ("leaf",)) if rows else []
        return "\n".join([title, *table, *more, *[_NAN if bad else _NEXT] * bool(some)])


_NAN = "next: jamp.debug.find_nonfinite(loss_fn, grad=True)(params, batch) names what made the inf or nan"
_NEXT = "next: keep float32 masters (jamp.master_params), or round at random (jamp.stochastic_rounding)"


_CALL = "updates, opt_state = tx.update(grads, opt_state, params), and then jamp.debug.lost_updates(params, updates)"


@called_as(_CALL, trees=2)
def lost_updates(params: optax.Params, updates: optax.Updates) -> LostUpdates:
    """The share of the updates that rounding to nearest loses.

    An update is lost if it is nonzero but leaves the parameter unchanged. That happens to updates below half the
    spacing of the parameters: for bfloat16, a 512th of a parameter or less.

    Args:
      params: A pytree. To see what would be lost in bfloat16, pass `jamp.cast_floating(params, jnp.bfloat16)`.
      updates: A pytree like `params`, from the `update` of an optimizer other than `jamp.stochastic_rounding`.

    Returns:
      `LostUpdates`, whose `shares` are a pytree like `params`, f32[]: of the updates that are not 0, the share that is
      lost. Leaves without an update have 0. It works under `jit`.

    Raises:
      TypeError: If an argument is a function or the state of an optimizer.
      ValueError: If the trees have different structures.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> lost = jamp.debug.lost_updates({"w": jnp.ones(4, jnp.bfloat16)}, {"w": jnp.float32([0, 1e-3, 1e-2, 1e-1])})
      >>> print(lost)
      rounding loses updates of 1 of 1 leaves
      leaf   updates that are lost
      ['w']  33.3%
      next: keep float32 masters (jamp.master_params), or round at random (jamp.stochastic_rounding)
    """

    def share(p: Any, update: Any) -> Array:
        p, update = (jnp.asarray(x) if isinstance(x, float) else x for x in (p, update))
        if not is_floating(p) or not is_floating(update):  # None and `optax.MaskedNode` are no updates.
            return jnp.float32(0)
        moves = update != 0
        with jax.numpy_dtype_promotion("standard"):
            wide = jnp.promote_types(p.dtype, update.dtype)
        is_lost = moves & ((p.astype(wide) + update.astype(wide)).astype(p.dtype) == p)
        lost = jnp.sum(is_lost, dtype=jnp.float32) / jnp.maximum(jnp.sum(moves, dtype=jnp.float32), 1)
        return lost + jnp.sum(update - update, dtype=jnp.float32)  # 0, or NaN

    if states := [x for x in (params, updates) if is_state(x)]:
        raise TypeError(f"jamp.debug.lost_updates takes params and updates, got {describe(states[0])}. Write {_CALL}.")
    try:
        shares = jax.tree.map(share, params, updates)
    except ValueError as error:
        raise ValueError(f"updates must have the structure of params. Write {_CALL}.") from error
    return LostUpdates(shares)
