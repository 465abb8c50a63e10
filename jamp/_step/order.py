"""Warnings of transformations that stand before or after `loss_scaled` in a chain, as far as the state shows them."""

import warnings
from typing import Any

import jax
import optax

from jamp._step.stacklevel import users_stacklevel
from jamp._step.state import LossScaledState, ScaledGradsState, contains, is_scaler_state, skips

_BEFORE = (
    "A transformation stands before loss_scaled in its chain. A clip of each element (optax.clip) or optax.zero_nans "
    "makes an overflow finite there, so the step is applied and the loss scale stays too high. Put it inside: "
    "jamp.loss_scaled(optax.chain(clip, tx))."
)
_BEFORE_UNSCALE = (
    "A transformation stands before loss_scaled(..., unscale=True) in its chain. A clip or a decay there works on "
    "gradients that are multiplied by the loss scale. Put it inside: "
    "jamp.loss_scaled(optax.chain(clip, tx), unscale=True)."
)
_AFTER = (
    "An optimizer stands after loss_scaled in its chain. In a skipped step it gets updates of zero, and changes its "
    "moments, its counts and the parameters. Put it inside: jamp.loss_scaled(optax.chain(clip, optax.adamw(1e-3)))."
)


def warn_of_order(tree: Any) -> None:
    """Warn if a tree holds the state of a chain with `loss_scaled` in a wrong place."""
    found: list[str] = []

    def is_match(x: Any) -> bool:
        if type(x) is tuple:
            found.extend(_in_chain(x))
        return False

    contains(tree, is_match)
    for message in dict.fromkeys(found):
        warnings.warn(message, stacklevel=users_stacklevel())


def _in_chain(states: tuple[Any, ...]) -> list[str]:
    """The messages about the state of a chain, or about a user's tuple, which has no such entries."""
    messages, is_late = [], False
    for i, x in enumerate(states):
        # Clips and decays have no state of their own.
        is_late = is_late or isinstance(x, (optax.EmptyState, optax.ZeroNansState))
        if is_late and contains(x, lambda y: isinstance(y, ScaledGradsState) and skips(y)):
            messages.append(_BEFORE_UNSCALE)
        if is_late and contains(x, lambda y: isinstance(y, LossScaledState) and skips(y)):
            messages.append(_BEFORE)
        if skips(x) and _wraps_no_state(x) and any(map(_has_state, states[i + 1 :])):
            messages.append(_AFTER)
    return messages


def _wraps_no_state(state: Any) -> bool:
    return hasattr(state, "inner_state") and not jax.tree.leaves(state.inner_state)


def _has_state(x: Any) -> bool:
    """Whether this is the state of an optimizer, with arrays in a NamedTuple."""
    return contains(x, lambda y: hasattr(y, "_fields") and not is_scaler_state(y) and bool(jax.tree.leaves(y)))
