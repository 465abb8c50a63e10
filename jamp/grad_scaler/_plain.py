"""The step, or skip, of a plain optimizer, whose state holds no loss scale."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax
from jax import Array

from jamp._cast import to_float32
from jamp._loss_scale.scaler_state import check_holds_no_scaler, check_optimizer
from jamp._optimizer_state.dtypes import cast_array_like
from jamp._optimizer_state.params import cast_params, warn_if_rounded
from jamp._step.misuse import check_not_a_pair
from jamp._step.skip import apply_or_keep, update_or_skip


class GradScalerStep(NamedTuple):
    """Result of `GradScaler.step`."""

    params: Any
    opt_state: Any
    scaler: Any  # the GradScaler of the next step
    stepped: Array  # bool[], False if an overflow was found


def step_plain(
    tx: optax.GradientTransformation,
    opt_state: Any,
    params: Any,
    grads: Any,
    grads_finite: Array | None,
    extra_args: Mapping[str, Any],
) -> tuple[Any, Any]:
    """Return the parameters and the optimizer state after a step, or unchanged if the gradients are not finite.

    `tx` sees float32 gradients and parameters. If `grads_finite` (bool[]) is None, the step is unconditional. An
    `opt_state` with a loss scale of its own raises a ValueError.
    """
    check_optimizer(tx, "scaler.step({}, opt_state, params, grads=grads)")
    check_not_a_pair(grads, params)
    check_holds_no_scaler(
        opt_state,
        "Two scalers on one optimizer: opt_state has a loss scale. Step the plain optimizer, or use "
        "jamp.value_and_grad(fun, opt_state) without a GradScaler.",
    )
    of_grads, of_state, of_params = list[Any](map(jax.tree.structure, (grads, opt_state, params)))
    if of_state == of_grads != of_params:
        raise ValueError("opt_state comes before params: scaler.step(tx, opt_state, params, grads=grads).")
    warn_if_rounded(opt_state, params)
    with_extra_args = optax.with_extra_args_support(tx)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, new = with_extra_args.update(grads, state, params, **extra_args)
        # State that `init` made float16 for float16 parameters stays float16.
        return updates, jax.tree.map(cast_array_like, new, state)

    args = to_float32(grads), opt_state, cast_params(opt_state, params)
    updates, new_state = update_or_skip(grads_finite, update, *args)
    # Of an Equinox model, what has no gradient stays as it is.
    is_none = lambda x: x is None
    with_updates = jax.tree.map(lambda u, p: None if u is None else p, updates, params, is_leaf=is_none)
    new = apply_or_keep(grads_finite, with_updates, updates)
    return jax.tree.map(lambda x, p: p if x is None else x, new, params, is_leaf=is_none), new_state
