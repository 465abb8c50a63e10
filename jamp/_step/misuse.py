"""Errors and warnings of loss scaling that is used wrongly, as far as a trace or a state shows it.

A backward pass is scaled once and unscaled once; the scale is an argument of the compiled step; and `loss_scaled` is
around the whole chain. Scales and gradients are recognized by identity.
"""

import contextlib
import sys
import traceback
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import optax

from jamp._scale.static import LossScale
from jamp._staging import is_differentiated, is_kept, is_recorded
from jamp._step.find import adapts
from jamp._step.state import LossScaledState, ScaledGradsState, contains, is_scaler_state, skips

_SCALED_BY: ContextVar[str | None] = ContextVar("scaled_by", default=None)  # the function of jamp's that is traced
_TRUE: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # gradients of `scaled` that are in use
_SCALES: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # that scaled a loss, to be unscaled
_READ: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # scales that a user asked for
_LIBRARIES = "jamp", "jax", "optax", "flax", "equinox"

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


@contextlib.contextmanager
def scales_once(name: str) -> Iterator[None]:
    """Remember that the function called inside is scaled. Raise ValueError for `scaled` if it already is."""
    if name == "scaled":  # A gradient of a gradient, each scaled and unscaled by value_and_grad, is right.
        check_scaled_once(name)
    token = _SCALED_BY.set(name)
    try:
        yield
    finally:
        _SCALED_BY.reset(token)


def check_scaled_once(name: str) -> None:
    """Raise ValueError if `scaled` or `scale_loss`, called `name`, is called in a function that is scaled already."""
    if outer := _SCALED_BY.get():
        raise ValueError(
            f"jamp.{name} inside jamp.{outer}: the backward pass would be scaled twice. Use one of them. "
            "jamp.scaled and jamp.scale_loss are for trainers that call jax.grad themselves. Where you compute the "
            "gradients, use jamp.value_and_grad(loss_fn, opt_state) alone."
        )


def remember(gradients: Iterable[Any]) -> None:
    """Remember the gradients of `scaled` for as long as they exist."""
    _TRUE.update((id(x), x) for x in gradients)


def scales(loss_scale_state: Any) -> None:
    """Remember that a loss was scaled by the loss scale of a state, until gradients are unscaled.

    A scale is recognized by identity, in the same trace. So this is about a jitted step in which the scaled loss is
    differentiated. One that is logged, or whose gradients leave a `jit`, is not remembered: that would be guessing.
    """
    if is_recorded() and is_differentiated():
        found = jax.tree.leaves(loss_scale_state.loss_scale)
        _SCALES.update((id(x), x) for x in found if isinstance(x, jax.Array) and _READ.get(id(x)) is not x)


def unscales() -> None:
    """Say that some gradients are divided by a loss scale, which in a function of its own is another array."""
    _SCALES.clear()


def is_read(loss_scale_state: Any) -> None:
    """Say that a user asked for the loss scale of a state, perhaps to divide by it."""
    _READ.update((id(x), x) for x in jax.tree.leaves(loss_scale_state.loss_scale) if isinstance(x, jax.Array))
    unscales()


def warn_if_scaled(loss_scale_state: Any) -> None:
    """Warn if a loss was scaled by the loss scale of a state, and nothing has unscaled gradients.

    It is not an error, because a program can take the scale out of the state by hand and divide.
    """
    if any(_SCALES.get(id(x)) is x for x in jax.tree.leaves(loss_scale_state.loss_scale)):
        unscales()
        warnings.warn(
            "The loss went through jamp.scale_loss, and nothing has unscaled the gradients: a step would be too large "
            "by the loss scale. Use jamp.value_and_grad(loss_fn, opt_state), jamp.loss_scaled(tx, unscale=True), or "
            "jamp.unscale_and_check.",
            stacklevel=users_stacklevel(),
        )


def check_unscaled(gradients: Any, loss_scale: LossScale) -> None:
    """Raise ValueError if gradients of `scaled` come to an optimizer with a loss scale of its own.

    Gradients are recognized by identity: averaged or clipped ones, and those that a `jit` returns, are not.
    """
    own = getattr(loss_scale, "scale", None) if getattr(loss_scale, "is_constant", False) else None
    if own != 1 and any(_TRUE.get(id(x)) is x for x in jax.tree.leaves(gradients)):
        raise ValueError(
            f"These are gradients of jamp.scaled, which has unscaled them, and this optimizer has {loss_scale!r}, "
            "which did not scale their loss. Use jamp.loss_scaled(tx, jamp.StaticLossScale(1.0)), which skips steps "
            "that overflowed, or jamp.value_and_grad(loss_fn, opt_state) without jamp.scaled."
        )


def warn_if_frozen(loss: Any, loss_scale_state: Any) -> None:
    """Warn if a traced loss is scaled by an adapting loss scale that is a constant in the trace.

    It is not an error, because a function that is traced anew for each step gets the current scale, and one that is
    only traced, such as by `jax.eval_shape`, needs none.
    """
    is_constant = _is_traced(loss) and not _is_traced(loss_scale_state.loss_scale)
    if adapts(loss_scale_state) and is_constant and is_kept():
        warnings.warn(
            "The loss scale is a constant of the function that is being traced, because the optimizer state is not one "
            "of its arguments. A compiled function keeps the first scale forever, and skips every step if that "
            "overflows. Pass the state to the jitted step, and make jamp.value_and_grad(loss_fn, opt_state) or "
            "jamp.scale_loss(loss, opt_state) inside it.",
            stacklevel=users_stacklevel(),
        )


def _is_traced(tree: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def warn_of_order(tree: Any) -> None:
    """Warn if a tree holds the state of a chain, or of a `MultiSteps`, with `loss_scaled` in a wrong place."""
    found: list[str] = []

    def is_match(x: Any) -> bool:
        if type(x) is tuple:
            found.extend(_in_chain(x))
        if isinstance(x, optax.MultiStepsState) and x.skip_state == () and contains(x.inner_opt_state, skips):
            found.append(_AROUND)
        return False

    contains(tree, is_match)
    for message in dict.fromkeys(found):
        warnings.warn(message, stacklevel=users_stacklevel())


def _in_chain(states: tuple[Any, ...]) -> list[str]:
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


def users_stacklevel() -> int:
    """The stacklevel at which a warning of the calling function points at a line of the user."""
    frames = traceback.walk_stack(sys._getframe(1))
    modules = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in frames]
    return next((i for i, name in enumerate(modules, start=1) if name not in _LIBRARIES), 2)
