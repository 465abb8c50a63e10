"""Optax wrappers: loss scaling around an optimizer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.typing import ArrayLike

from jamp import _jaxpr
from jamp._loss_scale import DynamicLossScale, LossScale, NoOpLossScale
from jamp._skip import update_or_skip
from jamp._stats import LossScaleStats
from jamp._tree import all_finite, widen_half


class LossScaledState(NamedTuple):
    """State of `loss_scaled`.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> bool(jamp.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3)).grads_finite)
      True
    """

    loss_scale_state: Any  # the loss scale's state
    stats: LossScaleStats
    grads_finite: Array  # bool[], whether the last step was applied
    inner_state: Any


def loss_scaled(
    inner: optax.GradientTransformation, loss_scale: LossScale = DynamicLossScale(), *, axis_name: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Skip steps whose gradients overflowed, and adapt the loss scale.

    Wrap the whole optimizer chain: `jamp.loss_scaled(optax.chain(clip, adamw))`. Compute the gradients with
    `jamp.value_and_grad(loss_fn, opt_state)`.

    `update(grads, state, params=None, *, grads_finite=None, **extra_args)` takes the true gradients. If they are
    finite it is the inner update. If not, the updates are -0.0 (which leaves every parameter as it is, bit for bit)
    and nothing in the inner state moves: no count, no schedule, no moment. Either way the loss scale adapts.

    float16 and bfloat16 gradients and params reach `inner` as float32, and its updates come out float32.

    Args:
      inner: The optimizer.
      loss_scale: A loss scale; `NoOpLossScale()` switches everything off.
      axis_name: Name(s) of the `shard_map`, `pmap` or `vmap` axes whose replicas must skip together.

    Returns:
      An optax transformation whose `update` also takes `grads_finite` (bool[]), which takes the place of the check,
      and hands any other extra argument to `inner`. Its state is a `LossScaledState`.

    Raises:
      TypeError: If `inner` is no optax transformation or `loss_scale` no loss scale.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> tx = jamp.loss_scaled(optax.adamw(1e-3))
      >>> params = jnp.ones(2)
      >>> updates, state = tx.update(jnp.array([1.0, jnp.inf]), tx.init(params), params)
      >>> optax.apply_updates(params, updates).tolist(), float(jamp.get_loss_scale(state))
      ([1.0, 1.0], 32768.0)

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018; `torch.amp.GradScaler.step`.
    """
    _jaxpr.core()  # its import, in the middle of a trace, would have jax 0.12 trace the first step twice
    _check_inner(inner)
    if isinstance(loss_scale, type) or not isinstance(loss_scale, LossScale):
        raise TypeError(
            f"loss_scale must be a loss scale, got loss_scale={loss_scale!r}. Use jamp.DynamicLossScale(), or "
            "jamp.StaticLossScale(scale) for a constant."
        )
    inner = optax.with_extra_args_support(inner)
    enabled = not isinstance(loss_scale, NoOpLossScale)

    def init(params: optax.Params) -> LossScaledState:
        state = loss_scale.init()
        stats = LossScaleStats.init(state.loss_scale)
        return LossScaledState(state, stats, jnp.array(True), jax.tree.map(_strong, inner.init(widen_half(params))))

    def update(
        grads: optax.Updates,
        state: LossScaledState,
        params: optax.Params | None = None,
        *,
        grads_finite: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, LossScaledState]:
        grads, params = widen_half(grads), widen_half(params)

        def step(grads: Any, inner_state: Any, params: Any) -> tuple[Any, Any]:
            return inner.update(grads, inner_state, params, **extra_args)

        if not enabled:
            updates, inner_state = step(grads, state.inner_state, params)
            return updates, state._replace(inner_state=inner_state)
        ok = all_finite(grads, axis_name=axis_name) if grads_finite is None else _as_flag(grads_finite)
        updates, inner_state = update_or_skip(ok, step, grads, state.inner_state, params)
        old = state.loss_scale_state
        new = loss_scale.update(old, ok)
        stats = state.stats.update(ok, old.loss_scale, new.loss_scale)
        return updates, LossScaledState(new, stats, ok, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _as_flag(grads_finite: ArrayLike) -> Array:
    flag = jnp.asarray(grads_finite, bool)
    if flag.shape != ():
        raise ValueError(
            f"grads_finite must be one bool, got an array of shape {flag.shape}. Say whether all gradients are finite: "
            "jnp.all(grads_finite)."
        )
    return flag


def _strong(x: Any) -> Any:
    """A leaf of the inner state without a weak type, which the first update would lose and `jit` compile twice for."""
    return lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x


def _check_inner(inner: Any) -> None:
    if not callable(getattr(inner, "init", None)) or not callable(getattr(inner, "update", None)):
        raise TypeError(
            f"inner must be an optax gradient transformation, got inner={inner!r}. "
            "Pass an optimizer such as optax.adamw(1e-3)."
        )
