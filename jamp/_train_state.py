"""What the train states of the frameworks share: one scaler, and whatever a skipped step must keep."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.tree_util import keystr

from jamp._loss_scale import NoOpLossScaleState
from jamp._transforms import LossScaledState


def check_one_scaler(opt_state: LossScaledState) -> None:
    """Raise ValueError if the optimizer inside this state scales the loss itself."""
    if optax.tree.get_all_with_path(opt_state.inner_state, "loss_scale_state"):
        raise ValueError(
            "Two scalers: tx is already loss-scaled, and this would scale it again. Pass the plain optimizer as tx and "
            "the loss scale as loss_scale=; in place of jamp.mixed_precision(tx), pass jamp.master_params(tx)."
        )


def step_applied(opt_state: LossScaledState) -> Array:
    """Whether the step that made this state was applied, bool[]: a constant under `NoOpLossScale`."""
    return jnp.bool_(True) if isinstance(opt_state.loss_scale_state, NoOpLossScaleState) else opt_state.grads_finite


def select(ok: Array, new: Any, old: Any, name: str) -> Any:
    """`new` where `ok`, else `old`, for trees of one structure.

    Raises:
      ValueError: If the structure, a shape or a dtype changed. The message names it.
    """
    before, after = _kinds(old), _kinds(new)
    if before != after:
        path = next(path for path in before | after if before.get(path) != after.get(path))
        raise ValueError(
            f"{name}{path} changed from {before.get(path)} to {after.get(path)}, so that a skipped step could not keep "
            "it. Pass what has the structure, shapes and dtypes that it was made with (of "
            "`model.apply(..., mutable=['batch_stats'])`, that is `updates['batch_stats']`)."
        )
    return jax.tree.map(lambda n, o: jnp.where(ok, n, o), new, old)


def _kinds(tree: Any) -> dict[str, Any]:
    kinds = {keystr(path): jax.typeof(x) for path, x in jax.tree.leaves_with_path(tree)}
    return {path: f"{x.dtype}{list(x.shape)}" for path, x in kinds.items()} | {".structure": jax.tree.structure(tree)}
