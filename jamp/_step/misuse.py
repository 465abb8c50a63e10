"""Errors and warnings of loss scaling that is used wrongly, as far as a trace shows it.

`find` checks the types in an optimizer state. Whether an array is scaled shows in no type, so gradients that nothing
has unscaled, or that were unscaled twice, are not found.
"""

import contextlib
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax

from jamp._jaxprs import ir
from jamp._jaxprs.dataflow import Forward
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn
from jamp._jaxprs.source import users_stacklevel
from jamp._loss_scale.scaler_state import can_change
from jamp._optimizer_state.rounding import is_straight_through
from jamp._staging import is_trace_reused

_PLAIN, _ROUNDED, _SCALED = range(3)  # What is known of a value: nothing, a rounded update, or one times a number.
_SCALED_BY: ContextVar[str | None] = ContextVar("scaled_by", default=None)  # jamp's function that is being traced


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
            f"jamp.{name} inside jamp.{outer} would scale the backward pass twice. Use one of them, such as "
            "jamp.value_and_grad(loss_fn, opt_state)."
        )


def check_not_a_pair(grads: Any, params: Any) -> None:
    """Raise TypeError if an optimizer gets the result of `value_and_grad`, which is (loss, grads)."""
    structures: list[Any] = list(map(jax.tree.structure, (params, grads)))
    is_pair = type(grads) is tuple and len(grads) == 2 and params is not None and structures[0] != structures[1]
    if is_pair and structures[0] == jax.tree.structure(grads[1]):
        raise TypeError(
            "Expected gradients, got a pair. Write loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params)."
        )


def check_not_scaled(closed: ClosedJaxpr, updates: int) -> None:
    """Raise ValueError if any of the first outputs, the `updates`, is a rounded update times a number other than 1.

    What may leave a rounded update as it is, such as a mask of its shape or a selection, is not an error.
    """
    analysis = Forward(_rounding_of, max, lambda value: _PLAIN, is_straight_through)
    facts = analysis(closed, [_PLAIN] * len(closed.in_avals))
    if _SCALED in analysis.read(facts, closed.jaxpr.outvars[:updates]):
        raise ValueError(
            "The updates are multiplied by a number after stochastic_rounding, which undoes it. Put the rounding last: "
            "jamp.stochastic_rounding(optax.chain(tx, optax.scale(0.1)))."
        )


def _rounding_of(eqn: JaxprEqn, operands: list[int]) -> int:
    if is_straight_through(eqn):
        return _ROUNDED
    if ir.name(eqn) not in ("mul", "div"):
        return _PLAIN
    others: list[Any] = [v for v, x in zip(eqn.invars, operands, strict=True) if x == _PLAIN]
    is_number = [v.aval.shape == () and getattr(v, "val", None) != 1 for v in others]
    return _SCALED if is_number == [True] else _PLAIN


def warn_if_frozen(loss: Any, loss_scale_state: Any) -> None:
    """Warn if a traced loss is scaled by an adapting loss scale that is a constant in the trace.

    It is not an error, because a function that is traced anew for each step gets the current scale, and one that is
    only traced, such as by `jax.eval_shape`, needs none.
    """
    is_constant = _is_traced(loss) and not _is_traced(loss_scale_state.loss_scale)
    if can_change(loss_scale_state) and is_constant and is_trace_reused():
        warnings.warn(
            "The loss scale is a constant of the traced function, which keeps the first scale forever. Pass the state "
            "to the jitted step, and write jamp.value_and_grad(loss_fn, opt_state) inside it.",
            stacklevel=users_stacklevel(),
        )


def _is_traced(tree: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))
