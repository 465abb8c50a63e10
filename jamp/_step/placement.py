"""What jamp knows of other libraries' wrappers: which are wrong around `loss_scaled`, recognized by their states."""

import warnings
from typing import Any

import jax
import optax

from jamp._jaxprs.source import users_stacklevel
from jamp._step.leaves import contains, find_nodes
from jamp._step.state import LossScaledState, ScaledGradsState, can_change, is_scaler_state, skips

_HIDES_OVERFLOWS = (
    "optax.apply_if_finite (or should_skip_update_fn of optax.MultiSteps) around a loss-scaled optimizer keeps "
    "overflows from it, so the loss scale stays too high. loss_scaled skips such steps itself: leave it out, "
    "or put it inside, jamp.loss_scaled(optax.apply_if_finite(tx, max_consecutive_errors))."
)
_KEEPS_CHANGES = (
    "nnx.Optimizer counts skipped steps, and does not undo their changes to the model. Use "
    "jamp.nnx.Optimizer(model, tx, wrt=nnx.Param), with the plain optimizer as tx."
)
_BEFORE = (
    "optax.zero_nans stands before loss_scaled in its chain. It makes a NaN finite there, so the step is applied and "
    "the loss scale stays too high. Put it inside: jamp.loss_scaled(optax.chain(optax.zero_nans(), tx))."
)
_BEFORE_UNSCALE = (
    "A transformation stands before loss_scaled(..., unscale=True) in its chain. A clip or a decay there works on "
    "gradients that are multiplied by the loss scale. Put it inside: "
    "jamp.loss_scaled(optax.chain(clip, tx), unscale=True)."
)
_AROUND = (
    "optax.MultiSteps around a loss-scaled optimizer adds the overflow of one micro-batch to its sum, where it stays "
    "forever, and every later step is skipped. Put it inside, which leaves such a micro-batch out: "
    "jamp.loss_scaled(optax.MultiSteps(tx, every_k_schedule))."
)
_AFTER = (
    "An optimizer stands after loss_scaled in its chain. In a skipped step it gets updates of zero, and changes its "
    "moments, its counts and the parameters. Put it inside: jamp.loss_scaled(optax.chain(clip, optax.adamw(1e-3)))."
)


def check_wraps_no_scaler(x: Any) -> None:
    """Raise ValueError if a node of a pytree is the state of a wrapper that makes the loss scaling in it wrong."""
    is_filter = isinstance(x, optax.ApplyIfFiniteState) or (isinstance(x, optax.MultiStepsState) and x.skip_state != ())
    if is_filter and contains(x, _may_change):
        raise ValueError(_HIDES_OVERFLOWS)
    # The attributes of an `nnx.Optimizer`. With `unscale=True`, its user takes the gradients without jamp.
    is_plain_nnx = hasattr(x, "wrt") and hasattr(x, "opt_state") and not hasattr(x, "undoes_skips")
    if is_plain_nnx and contains(x.opt_state, lambda y: _may_change(y) and not isinstance(y, ScaledGradsState)):
        raise ValueError(_KEEPS_CHANGES)


def _may_change(x: Any) -> bool:
    """Whether a node of a pytree is a scaler state whose loss scale may change."""
    return is_scaler_state(x) and can_change(x.loss_scale_state)


def check_not_nnx(loss_scale_state: Any) -> None:
    """Raise ValueError if the scale is in a Flax NNX Variable, for a function that does not restore NNX modules."""
    if hasattr(type(loss_scale_state.loss_scale), "get_value"):
        raise ValueError(
            "This is an nnx.Optimizer or its state, whose arrays are Variables, and value_and_grad does not restore "
            "state that the loss function changes in a model. Use jamp.nnx.Optimizer and jamp.nnx.value_and_grad."
        )


def warn_of_order(tree: Any) -> None:
    """Warn if a tree holds the state of a chain, or of a `MultiSteps`, with `loss_scaled` in a wrong place."""
    messages: list[str] = []
    is_place = lambda x: type(x) is tuple or isinstance(x, optax.MultiStepsState)
    for _, x in find_nodes(tree, is_place, enters=lambda x: True):
        if type(x) is tuple:
            messages += _warnings_about_chain(x)
        elif x.skip_state == () and contains(x.inner_opt_state, skips):
            messages.append(_AROUND)
    for message in dict.fromkeys(messages):
        warnings.warn(message, stacklevel=users_stacklevel())


def _warnings_about_chain(states: tuple[Any, ...]) -> list[str]:
    """The messages about the state of a chain, or about a user's tuple, which has no such entries."""
    messages, is_late, hides = [], False, False
    for i, x in enumerate(states):
        # Clips and decays have no state of their own. Before `loss_scaled`, a clip of the norm is right and one of each
        # element is not, but they look the same.
        is_late = is_late or isinstance(x, (optax.EmptyState, optax.ZeroNansState))
        hides = hides or isinstance(x, optax.ZeroNansState)
        if is_late and contains(x, lambda y: isinstance(y, ScaledGradsState) and skips(y)):
            messages.append(_BEFORE_UNSCALE)
        if hides and contains(x, lambda y: isinstance(y, LossScaledState) and skips(y)):
            messages.append(_BEFORE)
        if skips(x) and _wraps_no_optimizer(x) and any(map(_has_state, states[i + 1 :])):
            messages.append(_AFTER)
    return messages


def _wraps_no_optimizer(state: Any) -> bool:
    """Whether a state is that of a wrapper around `optax.identity` or a clip. A user's tuple of states holds none."""
    return isinstance(getattr(state, "inner_state", None), optax.EmptyState)


def _has_state(x: Any) -> bool:
    """Whether this is the state of an optimizer, with arrays in a NamedTuple."""
    return contains(x, lambda y: hasattr(y, "_fields") and not is_scaler_state(y) and bool(jax.tree.leaves(y)))
