"""`check_health`, which checks on the host that training still makes progress."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import SequenceKey, keystr

from jamp._cast import is_inexact
from jamp._leaves import find_nodes, is_gradient, is_overwritten
from jamp._loss_scale.scaler_state import LossScaledState, ScaledGradsState, is_scaler_state
from jamp._loss_scale.static import LossScale, check_loss_scale
from jamp._loss_scale.stats import LossScaleStats
from jamp._optimizer_state.moments import averages_and_sums
from jamp._step.accessors import get_loss_scale, get_stats
from jamp._step.find import find_scaler_state
from jamp._step.finite import all_finite
from jamp.history import History

_RECENT = 200  # the last steps of the history, which are examined
_SHORTEST, _LONGEST = 20, 200  # the steps before and after a growth of the scale in which grad_norm is examined


class LossScaleError(FloatingPointError):
    """Training makes no progress. The message names the likely cause and the cure.

    Examples:
      >>> import jamp
      >>> issubclass(jamp.LossScaleError, FloatingPointError)
      True
    """


def check_health(
    tree: Any,
    *,
    max_consecutive_overflows: int = 50,
    loss_scale: LossScale | None = None,
    history: History | None = None,
    policy: str | Callable[[str], None] = "raise",
) -> None:
    """Check on the host that steps are applied, with gradients that are not zero, at a loss scale that fits.

    It waits for the device, so call it every few hundred steps, outside `jit`. It finds

    - in `tree`: more than `max_consecutive_overflows` steps skipped in a row. Optimizer moments that are all zero. inf
      or NaN outside the wrapper, such as in a stateful transform before it.
    - with `loss_scale`: a skip at the floor. A scale that has reached its ceiling, which is harmless if it is intended.
    - with `history`: a scale that oscillates while steps are lost. A column `grad_norm`, the norm of the gradients
      that `update` takes, of zeros. Without `unscale=True`, a `grad_norm` that grows with the loss scale.

    Args:
      tree: An optimizer state from `jamp.loss_scaled`, or any pytree that holds exactly one, such as the whole state of
        a chain. For an ensemble made with `vmap`, the message names the first member that is not healthy.
      max_consecutive_overflows: The largest accepted number of skipped steps in a row.
      loss_scale: The configuration of the loss scale.
      history: A `jamp.History` of the run.
      policy: "raise", "warn", or a function that is called with the message.

    Raises:
      LossScaleError: With policy "raise", if anything was found. The message names the likely cause and the cure.
      ValueError: If the tree holds no loss-scaled state or several, or the policy is unknown.
      TypeError: Inside `jit`, or if `loss_scale` or `history` is of another kind.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jamp
      >>> opt_state = jamp.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3))
      >>> jamp.check_health(opt_state)

      Inside `jit`, use a callback. It leaves out the moments, so that they stay on the device:

      >>> @jax.jit
      ... def train_step(opt_state):
      ...     check = lambda state: jamp.check_health(state, policy=print)
      ...     jax.debug.callback(check, opt_state._replace(inner_state=()))
      >>> train_step(opt_state)
    """
    if not callable(policy) and policy not in ("raise", "warn"):
        raise ValueError(f"policy must be 'raise', 'warn' or a function of the message, got policy={policy!r}.")
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree)):
        call = "lambda state: jamp.check_health(state, policy=print), opt_state._replace(inner_state=())"
        raise TypeError(f"check_health works on the host. Inside `jit`, write jax.debug.callback({call}).")
    if history is not None and not isinstance(history, History):
        raise TypeError(f"history must be a jamp.History, got a {type(history).__name__}.")
    if loss_scale is not None:
        check_loss_scale(loss_scale)
    state = find_scaler_state(tree)
    members = _check_members(state, max_consecutive_overflows, loss_scale)
    problems = [*members, *_check_outside(tree), *_check_recent(history)]
    if history is not None and isinstance(state, LossScaledState):
        problems += _check_scaled_norms(history)
    if not any(_ZERO in problem for problem in problems):
        problems += _check_zero_norms(history)
    message = " ".join(problems)
    if not problems:
        return
    if callable(policy):
        policy(message)
    elif policy == "warn":
        warnings.warn(message, stacklevel=2)
    else:
        raise LossScaleError(message)


def _check_members(state: Any, limit: int, loss_scale: LossScale | None) -> Iterator[str]:
    moments = averages_and_sums(state)
    all_stats, scales = jax.device_get((get_stats(state), get_loss_scale(state)))

    def problems(i: tuple[int, ...]) -> str:
        stats, scale = jax.tree.map(lambda x: x[i], (all_stats, scales))
        texts = [
            *_check_skips(stats, scale, limit),
            *_check_bounds(stats, scale, loss_scale, isinstance(state, ScaledGradsState)),
            *_check_moments(stats, moments, i),
        ]
        return " ".join(texts)

    sick = [(i, text) for i in np.ndindex(scales.shape) if (text := problems(i))]
    for i, text in sick[:1]:
        name = f"Member {', '.join(map(str, i))} of the ensemble" + f" (and {len(sick) - 1} more)" * (len(sick) > 1)
        yield f"{name}: {text}" if i else text


def _check_skips(stats: LossScaleStats, scale: float, limit: int) -> Iterator[str]:
    if stats.consecutive_overflows > limit:
        yield (
            f"{stats.consecutive_overflows} steps in a row were skipped, at a loss scale of {scale:g}, which is seldom "
            "the cause. Write jamp.debug.find_nonfinite(loss_fn, grad=True)(params, batch)."
        )


def _check_bounds(stats: LossScaleStats, scale: float, loss_scale: LossScale | None, unscale: bool) -> Iterator[str]:
    floor, ceiling = (getattr(loss_scale, name, None) for name in ("min_scale", "max_scale"))
    if floor is not None and stats.consecutive_overflows and scale <= np.float32(floor):
        yield (
            f"The gradients overflow with the loss scale at its floor, min_scale={floor:g}. If they are finite in "
            "float32, lower min_scale. If not, the model diverges."
        )
    if ceiling is not None and stats.min_loss_scale < scale >= np.float32(ceiling):
        yield (
            f"The loss scale has come to its ceiling, max_scale={ceiling:g}, because the gradients are tiny. If "
            "`jamp.debug.underflow_report(grads, opt_state)` shows lost ones, raise max_scale."
        ) + _NOT_SCALED * unscale


def _check_outside(tree: Any) -> Iterator[str]:
    found = list(find_nodes(tree, lambda x: is_scaler_state(x) or is_overwritten(x) or is_inexact(x)))
    wrapper = next(path for path, x in found if is_scaler_state(x))
    outside = [(path, x) for path, x in found if not is_scaler_state(x) and is_gradient(path, x)]
    if not outside or all_finite([x for _, x in outside]):
        return

    def is_poisoned(path: tuple[Any, ...], x: Any) -> bool:
        # A mask of a model or a best value so far may be inf on purpose. An array in a chain of transforms may not.
        in_chain = wrapper and isinstance(wrapper[-1], SequenceKey) and path[: len(wrapper) - 1] == wrapper[:-1]
        return not all_finite(x) if in_chain and np.ndim(x) else bool(jnp.any(jnp.isnan(x)))

    bad = [keystr(path) for path, x in outside if is_poisoned(path, x)]
    if bad:
        more = f" and {len(bad) - 1} more hold" if len(bad) > 1 else " holds"
        yield (
            f"{bad[0]}{more} inf or NaN. Go back to a checkpoint, and if it is a transform's before the wrapper, wrap "
            "the whole chain: `jamp.loss_scaled(optax.chain(...))`."
        )


def _check_moments(stats: LossScaleStats, moments: Sequence[Any], i: tuple[int, ...]) -> Iterator[str]:
    if stats.finite_steps > 0 and moments and not any(bool(jnp.any(x[i] != 0)) for x in moments):
        yield _ZEROS.format(f"the moments of the optimizer are all zero after {stats.finite_steps} steps")


_NOT_SCALED = " With unscale=True, take the gradients of jamp.scale_loss(loss_fn(params), opt_state)."
_ZERO = "The gradients have all been zero"
_ZEROS = (
    _ZERO + ": {}. Either the loss does not depend on the parameters, or they underflow, which "
    "`jamp.debug.underflow_report(grads, opt_state)` shows. Then raise the loss scale."
)


def _check_recent(history: History | None) -> Iterator[str]:
    if history is None or "loss_scale" not in history.names:
        return
    scales, finite = (history[name][-_RECENT:] for name in ("loss_scale", "grads_finite"))
    ups, downs = (int(np.sum(x)) for x in (scales[1:] > scales[:-1], scales[1:] < scales[:-1]))
    lost = int(np.sum(~finite))
    if min(ups, downs) >= 3 and lost > 0.05 * len(finite):
        yield (
            f"The loss scale oscillates between {scales.min():g} and {scales.max():g}: in the last {len(finite)} steps "
            f"it rose {ups} times and fell {downs} times, and {lost} were lost. Raise growth_interval (of an "
            "AdaptiveLossScale, the windows), or use hysteresis=2."
        )


def _check_zero_norms(history: History | None) -> Iterator[str]:
    if history is not None and "grad_norm" in history.names:
        norms = history["grad_norm"][-_RECENT:]
        if len(norms) and not norms.any():
            yield _ZEROS.format(f"grad_norm is 0 in the last {len(norms)} steps")


def _check_scaled_norms(history: History) -> Iterator[str]:
    """Report a `grad_norm` that jumps by the factor of the loss scale whenever that grows.

    The number of steps decides when the scale grows, so a true norm has no reason to jump there. Growths near which the
    norm drifts do not count. Three must remain, and half of all.
    """
    if not {"loss_scale", "grad_norm"} <= set(history.names):
        return
    scales, norms = history["loss_scale"], history["grad_norm"]
    valid = np.isfinite(norms) & (norms > 0)
    used, logs = np.append(scales[:1], scales[:-1])[valid], np.log2(norms[valid])  # `used` scaled the loss of the step
    starts = [0, *(np.flatnonzero(np.diff(used)) + 1), len(used)]
    jumps = []  # at each growth, or None if the norm drifts
    for start, i, end in zip(starts, starts[1:], starts[2:], strict=False):
        half = min(i - start, end - i, _LONGEST) // 2
        if 2 * half >= _SHORTEST and used[i] > used[i - 1]:
            parts = logs[i - 2 * half : i + 2 * half].reshape(4, half) / np.log2(used[i] / used[i - 1])
            drifts = np.diff(np.median(parts, axis=1))[[0, 2]]
            jumps.append(np.median(parts[2:]) - np.median(parts[:2]) if np.all(abs(drifts) < 0.25) else None)
    clear = [jump for jump in jumps if jump is not None]
    if len(clear) >= max(3, len(jumps) / 2) and all(abs(jump - 1) < 0.25 for jump in clear):
        yield (
            f"grad_norm has grown with the loss scale, {len(clear)} times, because nothing unscales the gradients. "
            "Take them from jamp.value_and_grad, or make the optimizer with unscale=True."
        )
