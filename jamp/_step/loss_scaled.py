"""`loss_scaled`, an Optax wrapper that skips steps whose gradients overflowed and adapts the loss scale."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.typing import ArrayLike

from jamp import _jaxpr
from jamp._cast import to_float32
from jamp._scale.dynamic import DynamicLossScale
from jamp._scale.static import LossScale, NoOpLossScale, check_loss_scale
from jamp._step import scaling
from jamp._step.finite import all_finite
from jamp._step.rounding import params_for, rounds_stochastically
from jamp._step.skip import update_or_skip
from jamp._step.state import (
    LossScaledState,
    ScaledGradsState,
    ScalerState,
    check_one_scaler,
    check_state,
    check_whole,
    find_loss_scale,
)


def loss_scaled(
    inner: optax.GradientTransformation,
    loss_scale: LossScale = DynamicLossScale(),
    *,
    unscale: bool = False,
    axis_name: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Skip steps whose gradients overflowed, and adapt the loss scale.

    Wrap the whole optimizer chain: `jamp.loss_scaled(optax.chain(clip, adamw))`. Compute the gradients with
    `jamp.value_and_grad(loss_fn, opt_state)`.

    `update(grads, state, params=None, *, grads_finite=None, **extra_args)` takes the true gradients (with
    `unscale=True`, those of `jamp.scale_loss(loss, opt_state)`). If they are finite, it returns the inner update. If
    not, it returns updates of -0.0, and nothing in the inner state changes: no count, no schedule, no moment. Inside
    one `jit` with `optax.apply_updates`, every parameter then stays unchanged bit for bit. Outside, XLA:CPU flushes
    subnormal parameters to 0 in that addition. The loss scale always adapts.

    float16 and bfloat16 gradients and params reach `inner` as float32, and its updates come out float32. Only
    `jamp.stochastic_rounding` gets its parameters as they are.

    Args:
      inner: The optimizer.
      loss_scale: A loss scale. `NoOpLossScale()` switches scaling, checks and skips off.
      unscale: If True, `update` divides the gradients by the loss scale before anything else. It is for trainers that
        call `jax.grad` themselves. No transformation may stand before it in a chain.
      axis_name: Name(s) of the `shard_map`, `pmap` or `vmap` axes whose replicas must skip together.

    Returns:
      An Optax transformation. Its `update` also takes `grads_finite` (bool[]), which replaces the check, and passes any
      other extra argument to `inner`. Its state is a `LossScaledState`.

    Raises:
      TypeError: If `inner` is not an Optax transformation or `loss_scale` is not a loss scale. From `update`, if the
        state is not one that this optimizer's `init` returns.
      ValueError: From `init`, if `inner` is loss-scaled too, or a mask hides some of the parameters.

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
    _jaxpr.core()  # Its import in the middle of a trace would make jax 0.12 trace the first step twice.
    _check_inner(inner)
    check_loss_scale(loss_scale)
    inner = optax.with_extra_args_support(inner)
    kind = ScaledGradsState if unscale else LossScaledState
    structure = jax.tree.structure(jax.eval_shape(loss_scale.init))

    def init(params: optax.Params) -> LossScaledState:
        check_whole(params)
        inner_state = inner.init(to_float32(params))
        if rounds_stochastically(inner_state):
            inner_state = inner.init(params)  # It checks their dtypes.
        inner_state = jax.tree.map(_without_weak_type, inner_state)
        check_one_scaler(inner_state)
        return kind(*ScalerState.init(loss_scale), inner_state)

    def update(
        grads: optax.Updates,
        state: LossScaledState,
        params: optax.Params | None = None,
        *,
        grads_finite: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, LossScaledState]:
        check_state(state, kind, loss_scale, structure)
        true = scaling.unscale(grads, find_loss_scale(state.loss_scale_state)) if unscale else to_float32(grads)
        params = params_for(state.inner_state, params)

        def inner_update(grads: Any, inner_state: Any, params: Any) -> tuple[Any, Any]:
            return inner.update(grads, inner_state, params, **extra_args)

        if isinstance(loss_scale, NoOpLossScale):
            updates, inner_state = inner_update(true, state.inner_state, params)
            return updates, state._replace(inner_state=inner_state)
        finite = all_finite(true, axis_name=axis_name) if grads_finite is None else _as_flag(grads_finite)
        updates, inner_state = update_or_skip(finite, inner_update, true, state.inner_state, params)
        return updates, type(state)(*state.scaler_state.advance(loss_scale, finite), inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _as_flag(grads_finite: ArrayLike) -> Array:
    flag = jnp.asarray(grads_finite, bool)
    if flag.shape != ():
        raise ValueError(
            f"grads_finite must be one bool, got an array of shape {flag.shape}. Say whether all gradients are finite: "
            "jnp.all(grads_finite)."
        )
    return flag


def _without_weak_type(x: Any) -> Any:
    # The first update would lose a weak type, and `jit` would compile the second step again.
    return lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x


def _check_inner(inner: Any) -> None:
    if not callable(getattr(inner, "init", None)) or not callable(getattr(inner, "update", None)):
        raise TypeError(
            f"inner must be an optax gradient transformation, got inner={inner!r}. "
            "Pass an optimizer such as optax.adamw(1e-3)."
        )
