"""Step a plain optimizer, whose state holds no loss scale, under a `GradScaler`."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jamp._loss_scale import LossScale, NoOpLossScale
from jamp._scaler_state import GradScalerState
from jamp._transforms import LossScaledState, loss_scaled


def step_optimizer(
    loss_scale: LossScale,
    state: GradScalerState,
    tx: optax.GradientTransformation,
    opt_state: Any,
    params: Any,
    grads: Any,
    grads_finite: Array,
) -> tuple[Any, Any]:
    """The parameters and the optimizer state after a step, or as they are unless `grads_finite`.

    With `NoOpLossScale` the step is unconditional.

    Raises:
      ValueError: If `opt_state` has a loss scale of its own.
    """
    if not isinstance(loss_scale, NoOpLossScale) and _holds(opt_state, "loss_scale_state"):
        raise ValueError(
            "Two scalers on one optimizer: opt_state has a loss scale of its own. Step the plain optimizer with the "
            "GradScaler, or do without the GradScaler: jamp.value_and_grad(fun, opt_state) and tx.update."
        )
    half = any(getattr(x, "dtype", None) == jnp.float16 for x in jax.tree.leaves(params))
    if half and not _holds(opt_state, "master_params"):
        warnings.warn(
            "float16 parameters without a master copy lose every step smaller than about a 2000th of them. Use "
            "tx = jamp.master_params(tx), or keep the parameters in float32 and compute in float16.",
            stacklevel=3,
        )
    # Only for its skip: the scale and the statistics, which it updates too, are the scaler's to update.
    skippable = loss_scaled(_keep_dtypes(tx), loss_scale)
    updates, new = skippable.update(grads, LossScaledState(*state, opt_state), params, grads_finite=grads_finite)
    return optax.apply_updates(params, updates), new.inner_state


def _holds(opt_state: Any, field: str) -> bool:
    return bool(optax.tree.get_all_with_path(opt_state, field))


def _keep_dtypes(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`tx` on float32 gradients and parameters; what its `init` made half of half parameters stays half."""

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, new = tx.update(grads, state, params)
        return updates, optax.tree.cast_like(new, state)

    return optax.GradientTransformation(tx.init, update)
