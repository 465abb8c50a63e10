"""torch.optim's optimizers: their hyperparameters, defaults and numerics, as plain optax transformations.

Each takes `learning_rate` as a number or as a schedule (a function of the number of steps applied), and keeps it in its
state, where `get_learning_rate` reads and `set_learning_rate` sets it. Wrap them like any optimizer:
`jamp.loss_scaled(jamp.optimizers.adamw(1e-3))`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.tree_util import keystr
from jax.typing import ArrayLike


def sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Stochastic gradient descent as `torch.optim.SGD`.

    The momentum starts at the first gradient, undampened; the weight decay is added to the gradient.

    Args:
      learning_rate: A number or a schedule.
      momentum: The part of the momentum that remains when a gradient is added.
      dampening: The part of each gradient, after the first, that is not added.
      weight_decay: What the parameters are multiplied by before they are added to the gradient.
      nesterov: Whether to look ahead by one step of the momentum.

    Returns:
      An optax transformation; with `weight_decay`, its `update` needs `params`.

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
    _check_not_negative(learning_rate=learning_rate, momentum=momentum, weight_decay=weight_decay)
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
    """Adam as `torch.optim.Adam`.

    The weight decay is added to the gradient, and AMSGrad takes the maximum before the bias correction: optax's takes
    it afterwards.

    Args:
      learning_rate: A number or a schedule.
      betas: The decay rates of the averages of the gradient and of its square.
      eps: Added to the denominator, outside the square root.
      weight_decay: What the parameters are multiplied by before they are added to the gradient.
      amsgrad: Whether to divide by the largest average of the squares so far.

    Returns:
      An optax transformation; with `weight_decay`, its `update` needs `params`.

    Raises:
      ValueError: If a number is out of its range.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> tx = jamp.optimizers.adam(1e-3)
      >>> float(jamp.optimizers.get_learning_rate(tx.init(jnp.ones(1))))
      0.0010000000474974513

    References:
      `torch.optim.Adam`; Kingma and Ba, Adam, ICLR 2015; Reddi et al., The convergence of Adam and beyond, ICLR 2018.
    """
    _check_not_negative(learning_rate=learning_rate, weight_decay=weight_decay)
    return _descend(learning_rate, *_decay(weight_decay), _scale_by_adam(betas, eps, amsgrad))


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    amsgrad: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """AdamW as `torch.optim.AdamW`.

    torch's default weight decay is 0.01, optax's 1e-4.

    Args:
      learning_rate: As for `adam`.
      betas: As for `adam`.
      eps: As for `adam`.
      weight_decay: The part of each parameter, times the learning rate, that is taken away.
      amsgrad: As for `adam`.

    Returns:
      An optax transformation; with `weight_decay`, its `update` needs `params`.

    Raises:
      ValueError: If a number is out of its range.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> tx = jamp.loss_scaled(jamp.optimizers.adamw(optax.cosine_decay_schedule(1e-3, 1000)))
      >>> float(jamp.optimizers.get_learning_rate(tx.init(jnp.ones(1))))
      0.0010000000474974513

    References:
      `torch.optim.AdamW`; Loshchilov and Hutter, Decoupled weight decay regularization, ICLR 2019.
    """
    _check_not_negative(learning_rate=learning_rate, weight_decay=weight_decay)
    return _descend(learning_rate, _scale_by_adam(betas, eps, amsgrad), *_decay(weight_decay))


def rmsprop(
    learning_rate: optax.ScalarOrSchedule,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """RMSprop as `torch.optim.RMSprop`.

    Args:
      learning_rate: A number or a schedule. The momentum is taken before it is applied.
      alpha: The decay rate of the average of the squared gradient.
      eps: Added to the denominator, outside the square root.
      weight_decay: What the parameters are multiplied by before they are added to the gradient.
      momentum: The part of the momentum that remains when a step is added.
      centered: Whether to divide by the standard deviation of the gradient.

    Returns:
      An optax transformation; with `weight_decay`, its `update` needs `params`.

    Raises:
      ValueError: If a number is out of its range.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> tx = jamp.optimizers.rmsprop(1e-2, momentum=0.9)
      >>> state = jamp.optimizers.set_learning_rate(tx.init(jnp.ones(1)), 1e-3)

    References:
      `torch.optim.RMSprop`; Hinton, Neural networks for machine learning, lecture 6e.
    """
    _check_not_negative(learning_rate=learning_rate, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum)
    steps = _decay(weight_decay)
    normalise = optax.scale_by_stddev if centered else optax.scale_by_rms
    steps.append(normalise(alpha, eps, eps_in_sqrt=False))
    if momentum:
        steps.append(optax.trace(momentum))
    return _descend(learning_rate, *steps)


def get_learning_rate(tree: Any) -> Array:
    """The learning rate in an optimizer state.

    Args:
      tree: The state of one of these optimizers or of any under `optax.inject_hyperparams`, or a pytree with one.

    Returns:
      f32[], the learning rate; of a schedule, the one of the last step applied.

    Raises:
      ValueError: If the tree holds no `learning_rate` or several.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> float(jamp.optimizers.get_learning_rate(jamp.optimizers.sgd(0.5).init(jnp.ones(1))))
      0.5
    """
    return jnp.asarray(_find(tree))


def set_learning_rate(tree: Any, value: ArrayLike) -> Any:
    """The optimizer state with another learning rate.

    Args:
      tree: As for `get_learning_rate`.
      value: The new learning rate, a number or f32[].

    Returns:
      A tree of the same structure, shapes and dtypes.

    Raises:
      ValueError: If the tree holds no `learning_rate` or several, the value is negative, or the learning rate follows
        a schedule, which would replace the value at the next step.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> state = jamp.optimizers.set_learning_rate(jamp.optimizers.sgd(0.5).init(jnp.ones(1)), 0.25)
      >>> float(jamp.optimizers.get_learning_rate(state))
      0.25
    """
    _check_not_negative(learning_rate=value)
    old = _find(tree)
    if len(optax.tree.get_all_with_path(tree, "learning_rate")) > 1:
        raise ValueError(
            "The learning rate follows a schedule, which would replace the value at the next step: make the optimizer "
            "with a number, or change the schedule."
        )
    new = jnp.broadcast_to(jnp.asarray(value, jnp.result_type(old)), jnp.shape(old))
    return optax.tree.set(tree, learning_rate=new)


def _find(tree: Any) -> Any:
    # Of a scheduled learning rate, optax also keeps the schedule's state under this name.
    is_number = lambda path, value: jax.tree_util.all_leaves([value])
    found = optax.tree.get_all_with_path(tree, "learning_rate", is_number)
    if len(found) == 1:
        return found[0][1]
    if not found:
        raise ValueError(
            f"Found no learning_rate in this {type(tree).__name__}. Use one of jamp.optimizers, or make the optimizer "
            "with `optax.inject_hyperparams(optax.adamw, hyperparam_dtype=jnp.float32)(learning_rate=1e-3)`."
        )
    paths = ", ".join(keystr(path) for path, _ in found)
    raise ValueError(
        f"Expected exactly one learning_rate, found {len(found)}: at {paths}. Pass the state that is meant."
    )


def _descend(
    learning_rate: optax.ScalarOrSchedule, *steps: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """The steps, then down the gradient at a learning rate that lies in the state, in float32 for all params."""

    def factory(learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
        return optax.chain(*steps, optax.scale_by_learning_rate(learning_rate))

    rate = float(learning_rate) if isinstance(learning_rate, int) else learning_rate
    return optax.inject_hyperparams(factory, hyperparam_dtype=jnp.float32)(learning_rate=rate)


def _decay(weight_decay: float) -> list[optax.GradientTransformation]:
    return [optax.add_decayed_weights(weight_decay)] if weight_decay else []


def _scale_by_adam(betas: tuple[float, float], eps: float, amsgrad: bool) -> optax.GradientTransformation:
    """Not `optax.scale_by_adam`: its bias correction, 1 - b2**count in float32, is off by 1e-5 in the first steps."""
    b1, b2 = betas
    if not (0 <= b1 < 1 and 0 <= b2 < 1):
        raise ValueError(f"betas must be at least 0 and below 1, got {betas=}.")
    _check_not_negative(eps=eps)

    def init(params: optax.Params) -> Any:
        kind = optax.ScaleByAmsgradState if amsgrad else optax.ScaleByAdamState
        moments = [optax.tree.zeros_like(params) for _ in range(3 if amsgrad else 2)]
        return kind(jnp.zeros([], jnp.int32), *moments)

    def update(grads: optax.Updates, state: Any, params: optax.Params | None = None) -> tuple[optax.Updates, Any]:
        del params
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(grads, state.mu, b1, 1)
        nu = optax.tree.update_moment_per_elem_norm(grads, state.nu, b2, 2)
        new = state._replace(count=count, mu=mu, nu=nu)
        if amsgrad:
            new = new._replace(nu_max=jax.tree.map(jnp.maximum, state.nu_max, nu))
        correct1, correct2 = _bias_correction(b1, count), jnp.sqrt(_bias_correction(b2, count))
        step = lambda m, v: (m / correct1) / (jnp.sqrt(v) / correct2 + eps)
        return jax.tree.map(step, mu, new.nu_max if amsgrad else nu), new

    return optax.GradientTransformation(init, update)


def _bias_correction(decay: float, count: Array) -> Array:
    """1 - decay**count, to float32's precision also where decay**count is nearly 1."""
    return -jnp.expm1(count.astype(jnp.float32) * np.float32(math.log(decay) if decay > 0 else -math.inf))


def _check_not_negative(**numbers: Any) -> None:
    for name, value in numbers.items():
        if isinstance(value, (int, float)) and not value >= 0:
            raise ValueError(f"{name} must not be negative, got {name}={value!r}.")
