"""Errors and warnings of loss scaling that is used wrongly, as far as a trace shows it.

A backward pass is scaled once and unscaled once, and the scale is an argument of the compiled step. `find`
checks the types in an optimizer state. Whether an array is scaled shows in no type:

    scaled = jax.grad(lambda p: jamp.scale_loss(loss_fn(p), state))(params)    # f32, like true gradients
    tx.update(scaled, state, params)                                           # too large a step, 65536 times

So some arrays are recognized by identity, in the trace in which jamp made them. Results of arithmetic with them, and of
a `jit` of its own, are other arrays, of which nothing is known.
"""

import contextlib
import traceback
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Literal

import jax
from jax.tree_util import keystr

from jamp._jaxprs.source import users_stacklevel
from jamp._loss_scale.static import LossScale
from jamp._staging import is_differentiated, is_recorded, is_trace_reused
from jamp._step.leaves import is_numeric
from jamp._step.state import can_change

# What may be known of an array:
# scaled loss: it was multiplied by a loss scale
# true gradient: it was divided by a loss scale
# gradient of scaled: `scaled` returned it
# scale in use: it scaled a loss, and no gradients were unscaled since
# scale read: a user asked for it, perhaps to divide by it
_Role = Literal["scaled loss", "true gradient", "gradient of scaled", "scale in use", "scale read"]
_KNOWN: dict[_Role, weakref.WeakValueDictionary[int, Any]] = defaultdict(weakref.WeakValueDictionary)  # by id
_SCALED_BY: ContextVar[str | None] = ContextVar("scaled_by", default=None)  # jamp's function that is being traced


def note(role: _Role, tree: Any) -> None:
    """Remember the arrays of a tree as long as they exist."""
    _KNOWN[role].update((id(x), x) for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))


def _is_any(role: _Role, tree: Any) -> bool:
    """Whether any array of a tree is remembered in this role."""
    return any(_KNOWN[role].get(id(x)) is x for x in jax.tree.leaves(tree))


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


def note_scaled_loss(loss_scale_state: Any) -> None:
    """Remember that a loss was scaled by the loss scale of a state, until gradients are unscaled.

    A scale is recognized by identity, in the same trace. So only a scaled loss that is differentiated inside a jitted
    step is remembered, and not one that is logged, or whose gradients leave a `jit`.
    """
    # Only the class of the trace tells a loss that is logged from one that is differentiated. A `custom_jvp` rule would
    # too, but it stays in the program of the logged one, and keeps the tracers of its closure alive.
    if is_recorded() and is_differentiated():
        scales = jax.tree.leaves(loss_scale_state.loss_scale)
        note("scale in use", [x for x in scales if not _is_any("scale read", x)])


def note_unscaled() -> None:
    """Forget all scaled losses, because some gradients were unscaled.

    Inside a `jit` of its own, the scale is another array, so it cannot be found by identity.
    """
    _KNOWN["scale in use"].clear()


def note_scale_read(loss_scale_state: Any) -> None:
    """Remember that a user asked for the loss scale of a state, perhaps to divide by it."""
    note("scale read", loss_scale_state.loss_scale)
    note_unscaled()


def warn_if_scaled(loss_scale_state: Any) -> None:
    """Warn if a loss was scaled by the loss scale of a state, and nothing has unscaled gradients.

    It is not an error, because a program can take the scale out of the state by hand and divide.
    """
    if _is_any("scale in use", loss_scale_state.loss_scale):
        note_unscaled()
        warnings.warn(
            "The loss went through jamp.scale_loss, and nothing has unscaled the gradients: a step would be too large "
            "by the loss scale. Use jamp.value_and_grad(loss_fn, opt_state), jamp.loss_scaled(tx, unscale=True), or "
            "jamp.unscale_and_check.",
            stacklevel=users_stacklevel(),
        )


def check_unscaled(gradients: Any, loss_scale: LossScale) -> None:
    """Raise ValueError if an optimizer with a loss scale of its own gets gradients of `scaled`.

    Gradients are recognized by identity. Averaged or clipped ones, and results of a `jit`, are not recognized.
    """
    own = getattr(loss_scale, "scale", None) if getattr(loss_scale, "is_constant", False) else None
    if own != 1 and _is_any("gradient of scaled", gradients):
        raise ValueError(
            f"These are gradients of jamp.scaled, which has unscaled them, and this optimizer has {loss_scale!r}, "
            "which did not scale their loss. Use jamp.loss_scaled(tx, jamp.StaticLossScale(1.0)), which skips steps "
            "that overflowed, or jamp.value_and_grad(loss_fn, opt_state) without jamp.scaled."
        )


def check_not_a_pair(grads: Any, params: Any) -> None:
    """Raise TypeError if an optimizer gets the result of `value_and_grad`, which is (loss, grads)."""
    structures: list[Any] = list(map(jax.tree.structure, (params, grads)))
    is_pair = type(grads) is tuple and len(grads) == 2 and params is not None and structures[0] != structures[1]
    if is_pair and structures[0] == jax.tree.structure(grads[1]):
        raise TypeError(
            "The gradients are a pair, such as the (loss, grads) that value_and_grad returns. Write "
            "loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params), and give grads to the optimizer."
        )


@contextlib.contextmanager
def naming_misfits(init: Any = None, grads: Any = None, state: Any = None, params: Any = None) -> Iterator[None]:
    """If an optimizer fails, say which of its arguments does not fit. Without an error it costs nothing."""
    try:
        yield
    except Exception as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").startswith("jamp."):  # An error of jamp's own says it better.
            raise
        if message := _misfit(init, grads, state, params):
            raise ValueError(message) from error
        raise


def _misfit(init: Any, grads: Any, state: Any, params: Any) -> str:
    leaves = lambda tree: jax.tree.leaves_with_path(tree, is_leaf=lambda x: x is None)
    if other := [(path, x) for path, x in leaves(params) if x is not None and not is_numeric(x)]:
        return (
            f"A parameter must be an array, and {keystr(other[0][0])} is a {type(other[0][1]).__name__}. Of an Equinox "
            "model, take the arrays: tx.init(eqx.filter(model, eqx.is_inexact_array))."
        )
    if init is None:
        return ""
    given = [path for path, x in leaves(params) if x is not None]
    missing = [path for path, x in leaves(grads) if x is None and any(p[: len(path)] == path for p in given)]
    if missing:
        return (
            f"The gradient of params{keystr(missing[0])} is None. For a parameter that stays as it is, give zeros "
            "(jnp.zeros_like), or leave it out of params and of tx.init(params) too. optax.partition freezes by label."
        )
    found = [path for path, x in leaves(grads) if x is not None]
    if params is not None and found != given:
        odd = next((path for path in found + given if (path in found) != (path in given)), ())
        return (
            f"The gradients do not have the structure of params: {keystr(odd) or 'an array'} is in one of them only. "
            "Write loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params); tx.update(grads, opt_state, params)."
        )
    try:
        expected = state if params is None else jax.eval_shape(init, params)
    except Exception:  # The first error says more than that of `init`.
        return ""
    structures: list[Any] = list(map(jax.tree.structure, (expected, state)))
    if structures[0] != structures[1]:
        return (
            "The state is that of another optimizer, or of other parameters. Make it with the same one: opt_state = "
            "tx.init(params)."
        )
    return ""


def warn_if_scaled_twice(loss: Any, scaled: Any) -> None:
    """Remember the scaled losses. Warn if the loss was one already."""
    _warn_if_twice(
        "scaled loss", loss, scaled,
        "The loss is scaled already, and is multiplied by the loss scale once more, so that the gradients are divided "
        "once too few. Scale the loss that your function returned, once.",
    )  # fmt: skip


def warn_if_unscaled_twice(gradients: Any, unscaled: Any) -> None:
    """Remember the unscaled gradients. Warn if the gradients were unscaled already."""
    _warn_if_twice(
        "true gradient", gradients, unscaled,
        "The gradients are true already, and are divided by the loss scale once more. jamp.value_and_grad, "
        "GradScaler.value_and_grad and unscale return true gradients: clip them as they are, and give them to "
        "GradScaler.step as grads=.",
    )  # fmt: skip


def _warn_if_twice(role: _Role, given: Any, results: Any, message: str) -> None:
    if _is_any(role, given):
        warnings.warn(message, stacklevel=users_stacklevel())
    note(role, results)


def warn_if_frozen(loss: Any, loss_scale_state: Any) -> None:
    """Warn if a traced loss is scaled by an adapting loss scale that is a constant in the trace.

    It is not an error, because a function that is traced anew for each step gets the current scale, and one that is
    only traced, such as by `jax.eval_shape`, needs none.
    """
    is_constant = _is_traced(loss) and not _is_traced(loss_scale_state.loss_scale)
    if can_change(loss_scale_state) and is_constant and is_trace_reused():
        warnings.warn(
            "The loss scale is a constant of the function that is being traced, because the state that holds it, of "
            "the optimizer or a GradScaler, is not one of its arguments. A compiled function keeps the first scale "
            "forever, and skips every step if that overflows. Pass the state to the jitted step, and make "
            "jamp.value_and_grad(loss_fn, opt_state) or jamp.scale_loss(loss, opt_state) inside it.",
            stacklevel=users_stacklevel(),
        )


def _is_traced(tree: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))
