"""A backward pass is scaled once: errors where two parts of jamp would do it."""

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import jax

from jamp._scale.static import LossScale

_SCALED_BY: ContextVar[str | None] = ContextVar("scaled_by", default=None)  # the function of jamp's that is traced
_TRUE: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # gradients of `scaled` that are in use


@contextlib.contextmanager
def scales_once(name: str) -> Iterator[None]:
    """Say that the function that is called inside is scaled. Raise ValueError for `scaled` in one that is."""
    outer = _SCALED_BY.get()
    if outer and name == "scaled":  # A gradient of a gradient, each scaled and unscaled by value_and_grad, is right.
        raise ValueError(
            f"jamp.scaled inside jamp.{outer}: the backward pass would be scaled twice. Use one of them. "
            "jamp.scaled(loss_fn) is for trainers that call jax.grad themselves. Where you compute the gradients, use "
            "jamp.value_and_grad(loss_fn, opt_state) alone."
        )
    token = _SCALED_BY.set(name)
    try:
        yield
    finally:
        _SCALED_BY.reset(token)


def remember(gradients: Iterable[Any]) -> None:
    """Remember the gradients of `scaled` for as long as they exist."""
    _TRUE.update((id(x), x) for x in gradients)


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
