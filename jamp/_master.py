"""Half-precision parameters with float32 masters in the optimizer state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jamp._loss_scale import DynamicLossScale, LossScale
from jamp._transforms import loss_scaled
from jamp._tree import is_floating, widen


class MasterParamsState(NamedTuple):
    """State of `master_params`.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> jamp.master_params(optax.sgd(0.1)).init(jnp.ones(3, jnp.bfloat16)).master_params.dtype
      dtype('float32')
    """

    master_params: Any  # the parameters in full precision, and the ones that count
    inner_state: Any


def master_params(
    inner: optax.GradientTransformation, dtype: DTypeLike = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    """Keep float32 masters of float16 or bfloat16 parameters in the optimizer state.

    A step of 1e-4 on a bfloat16 parameter of 1.0 is lost in rounding, each time. Here `inner` steps the masters, and
    the updates bring the parameters to the rounded masters: `optax.apply_updates(params, updates)` gives
    `masters.astype(params.dtype)`. Only where one step is more than twice its result may the sum round differently;
    the next step corrects it.

    The masters start as the parameters that `init` is given, so hand it float32 parameters if there are any, and
    `jamp.cast_floating` them afterwards. To load other parameters later, call `init` again: the next update brings
    edited ones back to their masters.

    Args:
      inner: The optimizer. It sees gradients and parameters in `dtype`.
      dtype: The masters' dtype. Wider leaves, and leaves that are not floating, keep their own.

    Returns:
      An optax transformation whose `update` needs `params`. Its state is a `MasterParamsState`, sharded like the
      parameters.

    Raises:
      ValueError: From `update`, without `params`.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> tx, params = jamp.master_params(optax.sgd(1e-4)), jnp.ones(1, jnp.bfloat16)
      >>> state = tx.init(params)
      >>> for _ in range(1000):
      ...     updates, state = tx.update(-jnp.ones(1), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> params
      Array([1.10156], dtype=bfloat16)

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.1.
    """
    return _with_masters(inner, dtype, param_dtype=None, grad_dtype=dtype)


def mixed_precision(
    inner: optax.GradientTransformation,
    loss_scale: LossScale = DynamicLossScale(),
    *,
    param_dtype: DTypeLike | None = None,
    grad_dtype: DTypeLike = jnp.float32,
    axis_name: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """`loss_scaled` and `master_params` in one: all that training with half-precision parameters needs.

    On an overflow neither the masters nor the parameters move, bit for bit.

    Args:
      inner: The optimizer, which sees float32 parameters: the masters.
      loss_scale: As for `loss_scaled`; `jamp.NoOpLossScale()` keeps the masters alone.
      param_dtype: The dtype whose values the parameters take, whatever dtype holds them. None: the one they come in.
      grad_dtype: The dtype of the gradients that `inner` sees.
      axis_name: As for `loss_scaled`.

    Returns:
      An optax transformation whose `update` needs `params`. Its state is a `LossScaledState` around a
      `MasterParamsState`.

    Raises:
      ValueError: From `update`, without `params`.
      TypeError: If `inner` is no optax transformation or `loss_scale` no loss scale.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jamp
      >>> tx, params = jamp.mixed_precision(optax.adamw(1e-3)), jnp.ones(2)
      >>> state, params = tx.init(params), params.astype(jnp.bfloat16)
      >>> grads = jamp.grad(lambda w: jnp.sum(w.astype(jnp.float32) ** 2), state)(params)
      >>> updates, state = tx.update(grads, state, params)
      >>> optax.apply_updates(params, updates).dtype, state.inner_state.master_params.dtype
      (dtype(bfloat16), dtype('float32'))
    """
    masters = _with_masters(inner, jnp.float32, param_dtype, grad_dtype)
    return loss_scaled(masters, loss_scale, axis_name=axis_name)


def _with_masters(
    inner: optax.GradientTransformation, dtype: DTypeLike, param_dtype: DTypeLike | None, grad_dtype: DTypeLike
) -> optax.GradientTransformationExtraArgs:
    inner = optax.with_extra_args_support(inner)

    def master(p: Any) -> Any:
        # A copy, also of a float32 parameter: donated together, the two must not be one buffer.
        return jnp.array(widen(p, dtype), copy=True)

    def init(params: optax.Params) -> MasterParamsState:
        masters = jax.tree.map(master, params)
        return MasterParamsState(masters, inner.init(masters))

    def update(
        grads: optax.Updates, state: MasterParamsState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, MasterParamsState]:
        if params is None:
            raise ValueError("Master parameters need the parameters: tx.update(grads, state, params).")
        grads = jax.tree.map(lambda g: widen(g, grad_dtype), grads)
        steps, inner_state = inner.update(grads, state.inner_state, state.master_params, **extra_args)
        masters = optax.apply_updates(state.master_params, steps)

        def to_master(step: Any, master: Any, p: Any) -> Any:
            if not is_floating(p):
                return step
            target = master if param_dtype is None else widen(widen(master, param_dtype), master.dtype)
            return target - p.astype(master.dtype)

        return jax.tree.map(to_master, steps, masters, params), MasterParamsState(masters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
