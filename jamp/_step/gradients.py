"""Differentiate with loss scaling inside: `value_and_grad` and `grad`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from jamp._arguments import check_function, nnx_state
from jamp._cast import is_inexact
from jamp._leaves import is_numeric
from jamp._step.find import check_not_nnx, find_state_to_unscale, read_scale, warn_of_order
from jamp._step.scale_unscale import unscale, with_scaled_loss

P = ParamSpec("P")
R = TypeVar("R")


def value_and_grad(
    fun: Callable[P, R],
    state: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, tuple[R, Any]]:
    """`jax.value_and_grad` with loss scaling inside.

    It scales the loss before the backward pass and unscales the gradients after it, so that float16 cotangents do not
    underflow. On an overflow the gradients hold inf or NaN, and `loss_scaled` skips the step.

    Call it inside the jitted train step, with the state that is an argument of the step. If you call it once, outside
    the step, the step keeps the first loss scale forever. While it is traced, a warning says so.

    The backward pass must be linear, as derivatives are. A `custom_vjp` that clips its cotangents clips scaled
    ones: clip the gradients in the optimizer instead.

    Args:
      fun: A function that returns a scalar loss, or `(loss, aux)` with `has_aux`.
      state: A loss-scale state, or any pytree that holds exactly one, such as the optimizer state.
      argnums: As for `jax.value_and_grad`.
      has_aux: As for `jax.value_and_grad`.
      holomorphic: As for `jax.value_and_grad`.
      allow_int: As for `jax.value_and_grad`.

    Returns:
      A function of the arguments of `fun` that returns the true `(value, grads)`. The gradients are float32, except for
      float64 and complex ones, which keep their dtype.

    Raises:
      ValueError: If `state` holds no loss-scale state or several, or is of an optimizer with `unscale=True`.
      TypeError: If `fun` is not a function. When called, if an argument to differentiate holds a leaf that is not an
        array, or is an NNX module with random keys or statistics.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> opt_state = jamp.loss_scaled(optax.sgd(0.1)).init(jnp.ones(2))
      >>> loss, grads = jamp.value_and_grad(lambda w: jnp.sum(w**2), opt_state)(jnp.ones(2))
      >>> float(loss), grads.tolist()
      (2.0, [2.0, 2.0])

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2.
    """
    check_function(fun, "jamp.value_and_grad({}, opt_state)")
    loss_scale_state = find_state_to_unscale(state, "value_and_grad")
    check_not_nnx(loss_scale_state)
    warn_of_order(state)
    scale, scaled_fun = read_scale(loss_scale_state), with_scaled_loss(fun, loss_scale_state, has_aux)
    differentiate = jax.value_and_grad(scaled_fun, argnums, has_aux=True, holomorphic=holomorphic, allow_int=allow_int)

    @functools.wraps(fun)
    def with_true_gradients(*args: P.args, **kwargs: P.kwargs) -> tuple[R, Any]:
        for i in np.ravel(argnums).tolist():
            if -len(args) <= i < len(args):  # Otherwise JAX raises an error.
                _check_differentiable(args[i], i, allow_int)
        (_, (loss, aux)), scaled_grads = differentiate(*args, **kwargs)
        value: Any = (loss, aux) if has_aux else loss
        return value, unscale(scaled_grads, scale)

    return with_true_gradients


def grad(
    fun: Callable[P, Any],
    state: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, Any]:
    """`jax.grad` with loss scaling inside. It has the arguments and errors of `value_and_grad`.

    Returns:
      A function of the arguments of `fun` that returns the true gradients, or `(grads, aux)` with `has_aux`.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> jamp.grad(lambda w: jnp.sum(w**2), jamp.StaticLossScale().init())(jnp.ones(2)).tolist()
      [2.0, 2.0]
    """
    differentiate = value_and_grad(fun, state, argnums, has_aux, holomorphic=holomorphic, allow_int=allow_int)

    @functools.wraps(fun)
    def with_true_gradients(*args: P.args, **kwargs: P.kwargs) -> Any:
        value: Any
        value, grads = differentiate(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return with_true_gradients


def _check_differentiable(arg: Any, i: int, allow_int: bool) -> None:
    if variables := nnx_state(arg):
        raise TypeError(
            f"Argument {i} must hold parameters, got {variables}. Write jamp.nnx.value_and_grad(loss_fn, optimizer)"
            "(model, batch), or with a scaler jamp.nnx.value_and_grad(loss_fn, scaler, "
            "argnums=nnx.DiffState(0, nnx.Param))(model, batch)."
        )
    for path, x in jax.tree.leaves_with_path(arg):
        if not allow_int and is_numeric(x) and not (is_inexact(x) or jnp.result_type(x) == jax.dtypes.float0):
            got = f"got {jnp.result_type(x)}{list(jnp.shape(x))} at {keystr(path)}"
            cure = "Pass state.params of a state, or jnp.asarray(x, jnp.float32)."
            raise TypeError(f"Argument {i} must be floating to have a gradient, {got}. {cure}")
        if not is_numeric(x):
            raise TypeError(
                f"Argument {i} must be a pytree of arrays to have a gradient, got {x!r} at {keystr(path)}. For an "
                "Equinox model, write jamp.equinox.filter_value_and_grad(loss_fn, opt_state)."
            )
