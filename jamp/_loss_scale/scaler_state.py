"""The scaler state: its types, and checks of the state of an optimizer.

`ScalerState` is everything that a step updates besides the optimizer: the loss scale, its statistics and whether the
last gradients were finite. `LossScaledState` is the same with the optimizer's state.
"""

import typing
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jamp._cast import is_floating, is_inexact
from jamp._leaves import contains
from jamp._loss_scale.static import LossScale, StaticLossScaleState, is_noop
from jamp._loss_scale.stats import LossScaleStats


class ScalerState(NamedTuple):
    """A loss scale's state with its statistics."""

    loss_scale_state: Any
    stats: LossScaleStats
    grads_finite: Array  # bool[], whether the last step was applied

    @classmethod
    def init(cls, loss_scale: LossScale) -> "ScalerState":
        """Make the state before the first step."""
        state = loss_scale.init()
        state = _cast_types(state, state._replace(loss_scale=jnp.float32(0)))
        return cls(state, LossScaleStats.init(state.loss_scale), jnp.array(True))

    def advance(self, loss_scale: LossScale, grads_finite: Array) -> "ScalerState":
        """Return the state after a step, given whether its gradients were finite (bool[])."""
        old = self.loss_scale_state
        new = _cast_types(loss_scale.update(old, grads_finite), old)
        return ScalerState(new, self.stats.update(grads_finite, old.loss_scale, new.loss_scale), grads_finite)


class LossScaledState(NamedTuple):
    """State of `loss_scaled`.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> bool(jamp.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3)).grads_finite)
      True
    """

    loss_scale_state: Any  # the loss scale's state
    stats: LossScaleStats
    grads_finite: Array  # bool[], whether the last step was applied
    inner_state: Any


class ScaledGradsState(NamedTuple):
    """State of `loss_scaled(..., unscale=True)`, whose `update` takes the gradients of a scaled loss.

    It is not a subclass of `LossScaledState`, because Levanter and others find NamedTuples by `__bases__ == (tuple,)`.
    """

    loss_scale_state: Any
    stats: LossScaleStats
    grads_finite: Array
    inner_state: Any


# The state of `loss_scaled`, with and without `unscale=True`. It is for annotations and for `isinstance`.
AnyLossScaledState = LossScaledState | ScaledGradsState


def get_scaler(state: AnyLossScaledState | ScalerState) -> ScalerState:
    """Return the part of a state that is not the optimizer's."""
    return ScalerState(state.loss_scale_state, state.stats, state.grads_finite)


def is_scaler_state(x: Any) -> bool:
    """Whether a node of a pytree is a `ScalerState` or the state of `loss_scaled`."""
    return isinstance(x, (ScalerState, LossScaledState, ScaledGradsState))


def is_skipping(x: Any) -> bool:
    """Whether a node of a pytree is a scaler state that skips steps, which `NoOpLossScale` does not."""
    return is_scaler_state(x) and not is_noop(x.loss_scale_state)


def can_change(loss_scale_state: Any) -> bool:
    """Whether a loss scale may change. One of a user's own may, unless it is off."""
    return not is_noop(loss_scale_state) and not isinstance(loss_scale_state, StaticLossScaleState)


def wrap_inner(inner_state: Any, loss_scale: LossScale, *, unscale: bool) -> AnyLossScaledState:
    """Make the state of `loss_scaled` around an optimizer's. Raise ValueError if it already holds a scaler state."""
    check_holds_no_scaler(
        inner_state,
        "Two scalers: the optimizer is already loss-scaled. Pass the plain optimizer.",
    )
    return (ScaledGradsState if unscale else LossScaledState)(*ScalerState.init(loss_scale), inner_state)


def check_holds_no_scaler(opt_state: Any, message: str) -> None:
    """Raise ValueError with this message if the state of an optimizer holds a scaler state."""
    if contains(opt_state, is_scaler_state):
        raise ValueError(message)


def check_whole(params: Any) -> None:
    """Raise ValueError if a mask hides some parameters from the optimizer."""
    if contains(params, lambda x: isinstance(x, optax.MaskedNode)):
        raise ValueError(
            "A masked loss-scaled optimizer does not see an inf in the other gradients. Wrap the whole: "
            "jamp.loss_scaled(optax.masked(tx, mask)) or jamp.loss_scaled(optax.partition(transforms, labels))."
        )


def check_kind(state: Any, kind: Any, cure: str) -> None:
    """Raise TypeError if a state is not of this type: a NamedTuple, or a union. The error names its first."""
    if not isinstance(state, kind):
        expected = typing.get_args(kind)[0] if typing.get_args(kind) else kind
        raise TypeError(
            f"Expected the {expected.__name__} of tx.init(params), got {_name(state)}. Write tx.update(grads, state, "
            f"params), or restore into tx.init(params). {cure}"
        )


def check_optimizer(inner: Any, call: str) -> None:
    """Raise TypeError unless `inner` is an optimizer. The error shows the right `call`, with {} for the optimizer."""
    is_optimizer = all(callable(getattr(inner, name, None)) for name in ("init", "update"))
    if is_optimizer and not isinstance(inner, type) and not hasattr(inner, "to_config"):
        return
    got = f"the function {inner.__name__}" if hasattr(inner, "__name__") else _name(inner)
    use = call.format("optax.adamw(1e-3)")
    if hasattr(inner, "to_config"):  # A loss scale has the methods `init` and `update` too.
        use = "jamp.loss_scaled(tx, loss_scale=...)"
    elif hasattr(inner, "_fields") and not hasattr(inner, "update"):
        use = f"tx = {call.format('tx')}, then opt_state = tx.init(params)"
    raise TypeError(f"inner must be an optimizer, got {got}. Write {use}.")


def check_state(state: Any, unscale: bool, loss_scale: LossScale, structure: Any) -> None:
    """Raise TypeError if a state is not of this `loss_scaled`, whose loss scale's state has this `structure`."""
    check_kind(state, AnyLossScaledState, "For the plain optimizer's: jamp.interop.wrap_state(state, loss_scale).")
    is_unscaling = isinstance(state, ScaledGradsState)
    if is_unscaling != unscale:
        raise TypeError(f"Expected a state with unscale={unscale}, got unscale={is_unscaling}. Call tx.init(params).")
    if jax.tree.structure(state.loss_scale_state) != structure:
        raise TypeError(
            f"Expected the state of {loss_scale!r}, got {_name(state.loss_scale_state)}. "
            f"Write jamp.convert_loss_scale(state, {loss_scale!r})."
        )
    scale = state.loss_scale_state.loss_scale
    if is_floating(scale) and jnp.finfo(scale.dtype).bits < 32:
        raise TypeError(f"The loss scale must be float32, got {scale.dtype.name}. Restore into tx.init(params).")


def _cast_types(new: Any, old: Any) -> Any:
    """Cast a loss scale's new state to the dtypes of `old`, with no weak types, so that `jit` compiles once."""

    def cast(x: Any, y: Any) -> Array:
        is_truncated = is_inexact(x) and not is_inexact(y)  # such as an average that `init` started with the int 0
        return jnp.asarray(x, jnp.result_type(x if is_truncated else y))

    return jax.tree.map(cast, new, old)


def _name(x: Any) -> str:
    return f"a tuple of {len(x)}" if type(x) is tuple else f"a {type(x).__name__}"
