"""torch.optim's optimizers as plain Optax transformations, with torch's hyperparameters, defaults and numerics.

Each takes `learning_rate` as a number or as a schedule (a function of the number of steps applied), and keeps it in its
state. `get_learning_rate` reads it and `set_learning_rate` sets it. Wrap them like any optimizer:
`jamp.loss_scaled(jamp.optimizers.adamw(1e-3))`. With `weight_decay`, `update` needs `params`. A number out of its range
raises a ValueError.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jamp._learning_rate import (
    check_not_negative,
    get_learning_rate as get_learning_rate,
    set_learning_rate as set_learning_rate,
)

__all__ = ["adam", "adamw", "get_learning_rate", "rmsprop", "set_learning_rate", "sgd"]
__dir__ = lambda: __all__


def sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Make stochastic gradient descent as `torch.optim.SGD`.

    The momentum starts as the first gradient, without dampening. The weight decay is added to the gradient.

    Args:
      learning_rate: A number or a schedule.
      momentum: The decay rate of the momentum.
      dampening: The share of each gradient after the first that is left out of the momentum.
      weight_decay: The multiple of the parameters that is added to the gradient.
      nesterov: Whether to use Nesterov momentum.

    Raises:
      ValueError: If a number is out of its range, or `nesterov` is used without momentum or with dampening.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> tx = jamp.optimizers.sgd(0.1, momentum=0.9)
      >>> updates, state = tx.update(jnp.ones(1), tx.init(jnp.ones(1)))
      >>> float(updates[0])
      -0.10000000149011612

    References:
      `torch.optim.SGD`; Sutskever et al., On the importance of initialization and momentum, ICML 2013.
    """
    check_not_negative(learning_rate=learning_rate, momentum=momentum, weight_decay=weight_decay)
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError(f"nesterov needs a momentum and no dampening, got {momentum=} and {dampening=}.")
    steps = _decay(weight_decay)
    if momentum:
        if dampening:
            steps.append(optax.scale_by_schedule(lambda count: jnp.where(count == 0, 1.0, 1.0 - dampening)))
        steps.append(optax.trace(momentum, nesterov))
    return _descend(learning_rate, *steps)


def adam(
    learning_rate: optax.ScalarOrSchedule,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Make Adam as `torch.optim.Adam`.

    The weight decay is added to the gradient. AMSGrad takes the maximum before the bias correction. Optax takes it
    afterwards.

    Args:
      learning_rate: A number or a schedule.
      betas: The decay rates of the averages of the gradient and of its square.
      eps: Added to the denominator, outside the square root.
      weight_decay: The multiple of the parameters that is added to the gradient.
      amsgrad: Whether to divide by the largest average of the squares so far.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> tx = jamp.optimizers.adam(1e-3)
      >>> float(jamp.optimizers.get_learning_rate(tx.init(jnp.ones(1))))
      0.0010000000474974513

    References:
      `torch.optim.Adam`; Kingma and Ba, Adam, ICLR 2015; Reddi et al., The convergence of Adam and beyond, ICLR 2018.
    """
    check_not_negative(learning_rate=learning_rate, weight_decay=weight_decay)
    return _descend(learning_rate, *_decay(weight_decay), _scale_by_adam(betas, eps, amsgrad))


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    amsgrad: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Make AdamW as `torch.optim.AdamW`.

    torch's default weight decay is 0.01. Optax's is 1e-4.

    Args:
      learning_rate: As for `adam`.
      betas: As for `adam`.
      eps: As for `adam`.
      amsgrad: As for `adam`.
      weight_decay: The share of each parameter that is subtracted, times the learning rate.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> tx = jamp.loss_scaled(jamp.optimizers.adamw(optax.cosine_decay_schedule(1e-3, 1000)))
      >>> float(jamp.optimizers.get_learning_rate(tx.init(jnp.ones(1))))
      0.0010000000474974513

    References:
      `torch.optim.AdamW`; Loshchilov and Hutter, Decoupled weight decay regularization, ICLR 2019.
    """
    check_not_negative(learning_rate=learning_rate, weight_decay=weight_decay)
    return _descend(learning_rate, _scale_by_adam(betas, eps, amsgrad), *_decay(weight_decay))


def rmsprop(
    learning_rate: optax.ScalarOrSchedule,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Make RMSprop as `torch.optim.RMSprop`.

    Args:
      learning_rate: A number or a schedule. It is applied after the momentum.
      alpha: The decay rate of the average of the squared gradient.
      eps: Added to the denominator, outside the square root.
      weight_decay: The multiple of the parameters that is added to the gradient.
      momentum: The decay rate of the momentum.
      centered: Whether to divide by the standard deviation of the gradient.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> tx = jamp.optimizers.rmsprop(1e-2, momentum=0.9)
      >>> state = jamp.optimizers.set_learning_rate(tx.init(jnp.ones(1)), 1e-3)

    References:
      `torch.optim.RMSprop`; Hinton, Neural networks for machine learning, lecture 6e.
    """
    check_not_negative(learning_rate=learning_rate, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum)
    steps = _decay(weight_decay)
    normalise = optax.scale_by_stddev if centered else optax.scale_by_rms
    steps.append(normalise(alpha, eps, eps_in_sqrt=False))
    if momentum:
        steps.append(optax.trace(momentum))
    return _descend(learning_rate, *steps)


def _descend(
    learning_rate: optax.ScalarOrSchedule, *steps: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Chain the steps with a learning rate that is kept in the state, in float32 for params of any dtype."""

    def factory(learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
        return optax.chain(*steps, optax.scale_by_learning_rate(learning_rate))

    rate = float(learning_rate) if isinstance(learning_rate, int) else learning_rate
    return optax.inject_hyperparams(factory, hyperparam_dtype=jnp.float32)(learning_rate=rate)


def _decay(weight_decay: float) -> list[optax.GradientTransformation]:
    return [optax.add_decayed_weights(weight_decay)] if weight_decay else []


def _scale_by_adam(betas: tuple[float, float], eps: float, amsgrad: bool) -> optax.GradientTransformation:
    """Make Adam's steps with an exact bias correction. Optax's 1 - b2**count is off by 1e-5 in the first steps."""
    if not (isinstance(betas, (tuple, list)) and len(betas) == 2):
        raise ValueError(f"betas must be two numbers, got {betas=}. Write betas=(0.9, 0.95).")
    b1, b2 = betas
    if not (0 <= b1 < 1 and 0 <= b2 < 1):
        raise ValueError(f"betas must be at least 0 and below 1, got {betas=}.")
    check_not_negative(eps=eps)

    def init(params: optax.Params) -> Any:
        kind = optax.ScaleByAmsgradState if amsgrad else optax.ScaleByAdamState
        moments = [optax.tree.zeros_like(params) for _ in range(3 if amsgrad else 2)]
        return kind(jnp.zeros([], jnp.int32), *moments)

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> tuple[optax.Updates, Any]:
        del params
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        nu = optax.tree.update_moment_per_elem_norm(updates, state.nu, b2, 2)
        new = state._replace(count=count, mu=mu, nu=nu)
        if amsgrad:
            new = new._replace(nu_max=jax.tree.map(jnp.maximum, state.nu_max, nu))
        correct1, correct2 = _bias_correction(b1, count), jnp.sqrt(_bias_correction(b2, count))
        step = lambda m, v: (m / correct1) / (jnp.sqrt(v) / correct2 + eps)
        return jax.tree.map(step, mu, new.nu_max if amsgrad else nu), new

    return optax.GradientTransformation(init, update)


def _bias_correction(decay: float, count: Array) -> Array:
    """Return 1 - decay**count to float32's precision, also if decay**count is nearly 1."""
    return -jnp.expm1(count.astype(jnp.float32) * np.float32(math.log(decay) if decay > 0 else -math.inf))
