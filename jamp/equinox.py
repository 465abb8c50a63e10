"""Equinox: gradients and optimizer steps for models with leaves that are not parameters."""

import functools
from collections.abc import Callable
from typing import Any

import optax

from jamp._loss_scale.scaler_state import check_optimizer
from jamp._step.find import is_step_applied
from jamp._step.gradients import value_and_grad
from jamp._step.skip import apply_or_keep

try:
    import equinox as eqx
except ImportError as error:
    raise ImportError("jamp.equinox needs Equinox: pip install 'jamp-jax[equinox]'.") from error

__all__ = ["apply_gradients", "filter_value_and_grad"]
__dir__ = lambda: __all__


def filter_value_and_grad(fun: Callable[..., Any], state: Any, *, has_aux: bool = False) -> Callable[..., Any]:
    """`eqx.filter_value_and_grad` with loss scaling inside.

    Args:
      fun: A function of a model and other arguments. It returns a scalar loss, or `(loss, aux)` with `has_aux`.
      state: The optimizer state, or any pytree that holds exactly one loss-scale state.
      has_aux: As for `eqx.filter_value_and_grad`.

    Returns:
      A function of the arguments of `fun` that returns `(value, grads)`, the true loss and the true float32 gradients
      of the floating arrays in the first argument. Every other leaf of `grads` is None.

    Raises:
      ValueError: If `state` holds no loss-scale state or several.

    Examples:
      >>> import equinox as eqx, jax, jax.numpy as jnp, optax, jamp.equinox
      >>> model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
      >>> opt_state = jamp.loss_scaled(optax.adam(1e-3)).init(eqx.filter(model, eqx.is_inexact_array))
      >>> loss_fn = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
      >>> loss, grads = jamp.equinox.filter_value_and_grad(loss_fn, opt_state)(model, jnp.ones((3, 2)))
      >>> grads.layers[0].weight.shape, grads.activation
      ((4, 2), None)
    """

    @functools.wraps(fun)
    def with_true_gradients(model: Any, /, *args: Any, **kwargs: Any) -> Any:
        params, rest = eqx.partition(model, eqx.is_inexact_array)
        loss_fn = lambda params, *args, **kwargs: fun(eqx.combine(params, rest), *args, **kwargs)
        return value_and_grad(loss_fn, state, has_aux=has_aux)(params, *args, **kwargs)

    return with_true_gradients


def apply_gradients(
    tx: optax.GradientTransformationExtraArgs, grads: Any, opt_state: Any, model: Any, **extra_args: Any
) -> tuple[Any, Any]:
    """Step a model, or skip the step if the gradients are not finite.

    Args:
      tx: A `jamp.loss_scaled` optimizer.
      grads: The true gradients, from `filter_value_and_grad`. Without a loss scale in `tx` they are not checked.
      opt_state: Its state, made by `tx.init(eqx.filter(model, eqx.is_inexact_array))`.
      model: The model. Its floating arrays are stepped and keep their dtypes. Its other leaves stay unchanged.
      **extra_args: Extra arguments for `tx.update`, such as `value=loss`.

    Returns:
      The model and the optimizer state after the step.

    Examples:
      >>> import equinox as eqx, jax, jax.numpy as jnp, optax, jamp.equinox
      >>> model, tx = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0)), jamp.loss_scaled(optax.adam(1e-3))
      >>> opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
      >>> @eqx.filter_jit
      ... def train_step(model, opt_state, x):
      ...     loss_fn = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
      ...     loss, grads = jamp.equinox.filter_value_and_grad(loss_fn, opt_state)(model, x)
      ...     return jamp.equinox.apply_gradients(tx, grads, opt_state, model)
      >>> model, opt_state = train_step(model, opt_state, jnp.full((3, 2), jnp.inf))
      >>> bool(jamp.get_grads_finite(opt_state))
      False
    """
    check_optimizer(tx, "jamp.equinox.apply_gradients({}, grads, opt_state, model)")
    params, rest = eqx.partition(model, eqx.is_inexact_array)
    updates, opt_state = tx.update(grads, opt_state, params, **extra_args)
    # Not `eqx.apply_updates`, which would cast 16-bit parameters to the updates' float32.
    return eqx.combine(apply_or_keep(is_step_applied(opt_state), params, updates), rest), opt_state
