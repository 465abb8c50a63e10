"""`loss_scaled`, an Optax wrapper that skips steps whose gradients overflowed and adapts the loss scale."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.typing import ArrayLike

from jamp._loss_scale.dynamic import DynamicLossScale
from jamp._loss_scale.scaler_state import (
    AnyLossScaledState,
    check_optimizer,
    check_state,
    check_whole,
    get_scaler,
    wrap_inner,
)
from jamp._loss_scale.static import LossScale, check_loss_scale, is_noop
from jamp._optimizer_state.dtypes import keeping_dtypes
from jamp._optimizer_state.params import cast_params, cast_params_for_init, check_rounds_last, warn_if_rounded
from jamp._step import scale_unscale
from jamp._step.misuse import check_not_a_pair
from jamp._step.skip import update_or_skip


def loss_scaled(
    inner: optax.GradientTransformation,
    loss_scale: LossScale = DynamicLossScale(),
    *,
    unscale: bool = False,
    axis_name: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Skip steps whose gradients overflowed, and adapt the loss scale.

    Wrap the whole optimizer chain: `jamp.loss_scaled(optax.chain(clip, adamw))`. Compute the gradients with
    `jamp.value_and_grad(loss_fn, opt_state)`. Nothing outside the wrapper is skipped. Before it in a chain, the
    state of `optax.trace` or the like keeps an inf forever. After it, `optax.add_decayed_weights` changes the
    parameters on a skipped step.

    `update` takes the true gradients. If they are finite, it returns the inner update. If not, it returns updates of
    -0.0, and nothing in the inner state changes: no count, no schedule, no moment. The loss scale always adapts.

    On a skip `optax.apply_updates` leaves every parameter as it is, but XLA:CPU may flush subnormal ones to 0 in that
    addition. A selection changes no bit: `jnp.where(jamp.get_grads_finite(state), new, old)`. `GradScaler` and the
    steps of `jamp.linen`, `jamp.nnx` and `jamp.equinox` select.

    Outside `jit`, `update` is compiled, once for arguments of the same shapes and dtypes, unless an extra argument of
    `inner` is a function or a bool of Python.

    float16 and bfloat16 gradients and params reach `inner` as float32. The updates are as `inner` returns them. Only
    `jamp.stochastic_rounding` and `jamp.master_params(split=True)` get their parameters as they are.

    Args:
      inner: The optimizer.
      loss_scale: A loss scale. `NoOpLossScale()` switches scaling, checks and skips off.
      unscale: If True, `update` takes the gradients of `jamp.scale_loss(loss, opt_state)` and unscales them. It is for
        trainers that call `jax.grad` themselves. No transformation may stand before it in a chain. Do not pass it
        gradients that are unscaled already, such as those that `jamp.scaled` returns. It would divide them again.
      axis_name: Name(s) of the `shard_map`, `pmap` or `vmap` axes whose replicas must skip together.

    Returns:
      An Optax transformation. Its `update` also takes `grads_finite` (bool[]), which replaces the check, and passes any
      other extra argument to `inner`. False means an overflow, and the loss scale backs off. To skip a step for another
      reason, such as a large norm, put `optax.MultiSteps(tx, 1, should_skip_update_fn=...)` inside.

      Its state is a `LossScaledState`. With `unscale=True` its state has another type, with the same fields.

    Raises:
      TypeError: If `inner` or `loss_scale` is of the wrong kind. From `update`, if the state is not from `init`.
      ValueError: From `init`, if `inner` is already loss-scaled, a mask hides some of the parameters, or parameters are
        averaged after their stochastic rounding. From `update`, if a transformation after
        `stochastic_rounding` multiplies its updates by a number.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> tx = jamp.loss_scaled(optax.adamw(1e-3))
      >>> params = jnp.ones(2)
      >>> updates, state = tx.update(jnp.array([1.0, jnp.inf]), tx.init(params), params)
      >>> optax.apply_updates(params, updates).tolist(), float(jamp.get_loss_scale(state))
      ([1.0, 1.0], 32768.0)

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018. `torch.amp.GradScaler.step`.
    """
    check_optimizer(inner, "jamp.loss_scaled({})")
    check_loss_scale(loss_scale)
    inner = keeping_dtypes(inner)
    example = jax.eval_shape(loss_scale.init)
    structure, is_off = jax.tree.structure(example), is_noop(example)

    def init(params: optax.Params) -> AnyLossScaledState:
        check_whole(params)
        inner_state = jax.tree.map(_without_weak_type, inner.init(cast_params_for_init(inner.init, params)))
        check_rounds_last(inner_state)
        if not is_off:
            warn_if_rounded(inner_state, params)
        return wrap_inner(inner_state, loss_scale, unscale=unscale)

    def update(
        updates: optax.Updates,
        state: AnyLossScaledState,
        params: optax.Params | None = None,
        *,
        grads_finite: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AnyLossScaledState]:
        check_state(state, unscale, loss_scale, structure)
        _check_extra_args(extra_args, unscale)
        args = updates, state, cast_params(state.inner_state, params), grads_finite, extra_args
        # Outside jit, the trace and each operation of a step would take longer than the step. A bool of Python may be a
        # flag in an `if` of `inner`, in which a tracer is an error.
        has_flag = any(isinstance(x, bool) for x in jax.tree.leaves(extra_args))
        return (compiled if not is_off and _is_concrete(args) and not has_flag else step)(*args)

    def step(
        grads: Any, state: AnyLossScaledState, params: Any, grads_finite: Any, extra_args: dict[str, Any]
    ) -> tuple[Any, AnyLossScaledState]:
        def inner_update(grads: Any, inner_state: Any, params: Any) -> tuple[Any, Any]:
            return inner.update(grads, inner_state, params, **extra_args)

        check_not_a_pair(grads, params)
        scale = state.loss_scale_state.loss_scale if unscale and not is_off else None
        check = grads_finite is None and not is_off
        true, finite = scale_unscale.true_gradients(grads, scale, check=check, axis_name=axis_name)
        if not (is_off or check):
            finite = _as_flag(grads_finite)
        updates, inner_state = update_or_skip(finite, inner_update, true, state.inner_state, params)
        scaler = get_scaler(state) if finite is None else get_scaler(state).advance(loss_scale, finite)
        return updates, type(state)(*scaler, inner_state)

    compiled = jax.jit(step)
    return optax.GradientTransformationExtraArgs(init, update)


def _check_extra_args(extra_args: dict[str, Any], unscale: bool) -> None:
    functions = [name for name, x in extra_args.items() if callable(x)]
    if unscale and functions:
        raise ValueError(
            f"With unscale=True the results of {functions[0]}= stay scaled. Use loss_scaled without unscale=True, with "
            "gradients from jamp.grad."
        )


def _is_concrete(args: Any) -> bool:
    """Whether all arguments of a step are arrays and numbers: no tracers, no functions."""
    return all(
        isinstance(x, (jax.Array, np.ndarray, np.generic, bool, int, float)) and not isinstance(x, jax.core.Tracer)
        for x in jax.tree.leaves(args)
    )


def _as_flag(grads_finite: Any) -> Array:
    flag = jnp.asarray(grads_finite, bool)
    if flag.shape != ():
        raise ValueError(f"grads_finite must be one bool, got shape {flag.shape}. Write jnp.all(grads_finite).")
    return flag


def _without_weak_type(x: Any) -> Any:
    # The first update would lose a weak type, and `jit` would compile the second step again.
    return lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x
