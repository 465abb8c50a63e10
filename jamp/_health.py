"""Is training still going? Checks on the host, for each few hundred steps."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import SequenceKey, keystr, tree_flatten_with_path

from jamp._lookup import find_state, get_stats
from jamp._loss_scale import LossScale
from jamp._stats import LossScaleStats
from jamp._tree import all_finite, is_inexact

_RECENT = 200  # steps of the history that count
# What optax calls the moments of the gradients: where they are zero, all gradients have been.
_MOMENTS = ("mu", "nu", "trace", "sum_of_squares", "ema")


class LossScaleError(FloatingPointError):
    """Loss scaling cannot go on as it is; the message names the likely cause and the cure.

    Examples:
      >>> import jamp
      >>> issubclass(jamp.LossScaleError, FloatingPointError)
      True
    """


class Recorded(Protocol):
    """What is read of a `jamp.History`."""

    names: Any

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        """The values of all steps, [steps]."""


def check_health(
    tree: Any,
    *,
    max_consecutive_overflows: int = 50,
    loss_scale: LossScale | None = None,
    history: Recorded | None = None,
    policy: str | Callable[[str], None] = "raise",
) -> None:
    """Check on the host that training goes on: that steps are applied, with gradients, at a scale that fits.

    It waits for the device, so call it each few hundred steps, outside `jit`. What it finds depends on what it gets:

    - from `tree`: more than `max_consecutive_overflows` steps skipped in a row; moments of the optimizer that are
      still all zero, because the gradients were; inf or nan in what stands beside the wrapper, such as a stateful
      transform before it, which an overflow poisons for ever.
    - with `loss_scale`: a skip with the scale at its floor; a scale that has come to its ceiling. That alone does no
      harm: with a ceiling that you mean to reach, use policy "warn", or hand in no `loss_scale`.
    - with `history`: a scale that goes up and down while steps are lost; a column `grad_norm` of zeros.

    Args:
      tree: An optimizer state from `jamp.loss_scaled`, or any pytree that holds exactly one. To have what stands
        before the wrapper checked, hand in the whole state of the chain.
      max_consecutive_overflows: How many skipped steps in a row are too many.
      loss_scale: The configuration.
      history: A `jamp.History` of the run.
      policy: "raise", "warn", or a function that is called with the message.

    Raises:
      LossScaleError: With policy "raise", if anything was found. The message says what is likely, and what to do.
      ValueError: If the tree holds no loss-scaled state or several, or the policy is unknown.
      TypeError: Inside `jit`.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jamp
      >>> opt_state = jamp.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3))
      >>> jamp.check_health(opt_state)

      Inside `jit`, two lines, without the moments, which need not leave the device:

      >>> @jax.jit
      ... def train_step(opt_state):
      ...     check = lambda state: jamp.check_health(state, policy=print)
      ...     jax.debug.callback(check, opt_state._replace(inner_state=()))
      >>> train_step(opt_state)
    """
    if not callable(policy) and policy not in ("raise", "warn"):
        raise ValueError(f"policy must be 'raise', 'warn' or a function of the message, got policy={policy!r}.")
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree)):
        raise TypeError(
            "check_health works on the host. Inside `jit`: jax.debug.callback(lambda state: "
            "jamp.check_health(state, policy=print), opt_state._replace(inner_state=()))"
        )
    stats: LossScaleStats = jax.device_get(get_stats(tree))
    scale = float(find_state(tree).loss_scale)
    problems = [
        *_skips(stats, scale, max_consecutive_overflows),
        *_bounds(stats, scale, loss_scale),
        *_poisoned(tree),
        *_no_gradients(tree, stats),
        *_recent(history),
    ]
    message = " ".join(problems)
    if not problems:
        return
    if callable(policy):
        policy(message)
    elif policy == "warn":
        warnings.warn(message, stacklevel=2)
    else:
        raise LossScaleError(message)


def _skips(stats: LossScaleStats, scale: float, limit: int) -> Iterator[str]:
    if stats.consecutive_overflows > limit:
        yield (
            f"{stats.consecutive_overflows} steps in a row were skipped (the limit is {limit}); the loss scale is "
            f"{scale:g}. So long a run is seldom the scale's fault: look for nan in the data, in the loss (a log or a "
            "division of 0) or in the parameters, and for a learning rate that diverges. After `import jamp.debug`, "
            "`jamp.debug.find_nonfinite(loss_fn, grad=True)(params, batch)` names the operation."
        )


def _bounds(stats: LossScaleStats, scale: float, loss_scale: LossScale | None) -> Iterator[str]:
    floor, ceiling = (getattr(loss_scale, name, None) for name in ("min_scale", "max_scale"))
    if floor is not None and stats.consecutive_overflows and scale <= np.float32(floor):
        yield (
            f"The gradients overflow with the loss scale at its floor, min_scale={floor:g}. If they are finite in "
            "float32, lower min_scale (values below 1 are legal) or compute the overflowing operation in float32; if "
            "not, the model diverges."
        )
    if ceiling is not None and stats.min_loss_scale < scale >= np.float32(ceiling):
        yield (
            f"The loss scale has come to its ceiling, max_scale={ceiling:g}: the gradients are tiny, and more of them "
            "could be saved. Raise max_scale (math.inf removes it) if `jamp.debug.underflow_report(grads, opt_state)` "
            "finds some lost; if they are zero, the loss does not depend on the parameters."
        )


def _poisoned(tree: Any) -> Iterator[str]:
    flat, _ = tree_flatten_with_path(tree, is_leaf=_is_wrapper)
    wrapper = next(path for path, x in flat if _is_wrapper(x))
    beside = [(path, x) for path, x in flat if is_inexact(x)]
    if not beside or all_finite([x for _, x in beside]):
        return

    def is_poisoned(path: tuple[Any, ...], x: Any) -> bool:
        # Inf is meant in a mask of a model, or as the best value so far; in a chain of transforms it is not.
        in_chain = wrapper and isinstance(wrapper[-1], SequenceKey) and path[: len(wrapper) - 1] == wrapper[:-1]
        return not all_finite(x) if in_chain and np.ndim(x) else bool(jnp.any(jnp.isnan(x)))

    bad = [keystr(path) for path, x in beside if is_poisoned(path, x)]
    if bad:
        more = f" and {len(bad) - 1} more hold" if len(bad) > 1 else " holds"
        yield (
            f"{bad[0]}{more} inf or nan. If it is the state of a transform before the wrapper (an average, a trace, "
            "Adam), an overflow has poisoned it for ever: wrap the whole chain, `jamp.loss_scaled(optax.chain(...))`, "
            "and start from a sound state. If it is a parameter, an update was not finite: go back to a checkpoint."
        )


def _no_gradients(tree: Any, stats: LossScaleStats) -> Iterator[str]:
    wrapper = next(x for x in jax.tree.leaves(tree, is_leaf=_is_wrapper) if _is_wrapper(x))
    moments = [x for x in jax.tree.leaves(list(_moments(wrapper))) if is_inexact(x)]
    if stats.finite_steps > 0 and moments and not any(bool(jnp.any(x != 0)) for x in moments):
        yield _ZEROS.format(f"the moments of the optimizer are all zero after {stats.finite_steps} steps")


_ZEROS = (
    "The gradients have all been zero: {}. Either the loss does not depend on the parameters (a stop_gradient, a batch "
    "that is masked out, dead units), or the gradients underflow: compare them with those of the float32 model, with "
    "`jamp.debug.underflow_report(grads, opt_state)`, and raise the loss scale."
)


def _recent(history: Recorded | None) -> Iterator[str]:
    if history is None or "loss_scale" not in history.names:
        return
    scales, finite = (history[name][-_RECENT:] for name in ("loss_scale", "grads_finite"))
    ups, downs = (int(np.sum(x)) for x in (scales[1:] > scales[:-1], scales[1:] < scales[:-1]))
    lost = int(np.sum(~finite))
    if min(ups, downs) >= 3 and lost > 0.05 * len(finite):
        yield (
            f"The loss scale oscillates between {scales.min():g} and {scales.max():g}: in the last {len(finite)} steps "
            f"it rose {ups} times and fell {downs} times, and {lost} steps were lost. It grows too soon: raise "
            "growth_interval (of an AdaptiveLossScale, the windows), lower growth_factor, or use hysteresis=2."
        )
    if "grad_norm" in history.names:
        norms = history["grad_norm"][-_RECENT:]
        if len(norms) and not norms.any():
            yield _ZEROS.format(f"grad_norm is 0 in the last {len(norms)} steps")


def _is_wrapper(x: Any) -> bool:
    return isinstance(x, tuple) and {"loss_scale_state", "stats"} <= set(getattr(x, "_fields", ()))


def _moments(state: Any) -> Iterator[Any]:
    """What the NamedTuples in an optimizer state hold under the names of moments."""
    fields: Mapping[str, Any] = state._asdict() if hasattr(state, "_asdict") else {}
    yield from (x for name, x in fields.items() if name in _MOMENTS)
    children = fields.values() if fields else state.values() if isinstance(state, Mapping) else state
    if isinstance(state, (tuple, list, Mapping)):
        for child in children:
            yield from _moments(child)
