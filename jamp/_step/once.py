"""A backward pass is scaled once: errors where two parts of jamp would do it."""

import contextlib
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import jax

from jamp._scale.static import LossScale
from jamp._step.stacklevel import users_stacklevel

_SCALED_BY: ContextVar[str | None] = ContextVar("scaled_by", default=None)  # the function of jamp's that is traced
_TRUE: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # gradients of `scaled` that are in use
_SCALES: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # that scaled a loss, to be unscaled


@contextlib.contextmanager
def scales_once(name: str) -> Iterator[None]:
    """Say that the function that is called inside is scaled. Raise ValueError for `scaled` in one that is."""
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
    """Remember that a loss was scaled by the loss scale of a state, until `unscales` says that gradients are unscaled.

    A scale is recognized by identity: in the same trace, and not as an argument of a function inside it.
    """
    _SCALES.update((id(x), x) for x in jax.tree.leaves(loss_scale_state.loss_scale) if isinstance(x, jax.Array))


def unscales(loss_scale_state: Any) -> None:
    """Say that gradients are divided by the loss scale of a state, or that it was read to do so."""
    for x in jax.tree.leaves(loss_scale_state.loss_scale):
        _SCALES.pop(id(x), None)


def warn_if_scaled(loss_scale_state: Any) -> None:
    """Warn if a loss was scaled by the loss scale of a state, and nothing has unscaled gradients.

    It is not an error, because a program can take the scale out of the state by hand and divide.
    """
    if any(_SCALES.get(id(x)) is x for x in jax.tree.leaves(loss_scale_state.loss_scale)):
        unscales(loss_scale_state)
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
