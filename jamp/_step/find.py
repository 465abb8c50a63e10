"""Find the loss scale in any pytree, and check that the wrappers around it are in the right places.

Wrappers of other libraries are recognized by their states. This is the state of a chain in which a NaN never reaches
the loss scale:

    (ZeroNansState(...), LossScaledState(...))
"""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.tree_util import keystr

from jamp._jaxprs.source import users_stacklevel
from jamp._leaves import Node, contains, find_nodes
from jamp._loss_scale.scaler_state import LossScaledState, ScaledGradsState, can_change, is_scaler_state, is_skipping
from jamp._loss_scale.static import LossScale, is_noop

_HIDES_OVERFLOWS = (
    "optax.apply_if_finite, or should_skip_update_fn of optax.MultiSteps, hides overflows from loss_scaled inside it. "
    "Put it inside, jamp.loss_scaled(optax.apply_if_finite(tx, max_consecutive_errors)), or leave it out."
)
_KEEPS_CHANGES = (
    "nnx.Optimizer applies skipped steps to the model. Use jamp.nnx.Optimizer(model, tx, wrt=nnx.Param), tx unscaled."
)
_BEFORE = (
    "optax.zero_nans before loss_scaled in a chain hides a NaN from it. Put it inside: "
    "jamp.loss_scaled(optax.chain(optax.zero_nans(), tx))."
)
_BEFORE_UNSCALE = (
    "A clip or a decay before loss_scaled(..., unscale=True) in a chain works on scaled gradients. Put it inside: "
    "jamp.loss_scaled(optax.chain(clip, tx), unscale=True)."
)
_AROUND = (
    "optax.MultiSteps around loss_scaled keeps the overflow of a micro-batch in its sum forever. Put it inside: "
    "jamp.loss_scaled(optax.MultiSteps(tx, every_k_schedule))."
)
_AFTER = (
    "An optimizer after loss_scaled in a chain changes moments and parameters in a skipped step. Put it inside: "
    "jamp.loss_scaled(optax.chain(clip, optax.adamw(1e-3)))."
)


def find_scaler_state(tree: Any) -> Any:
    """Return the one `ScalerState` or state of `loss_scaled`. Raise ValueError unless a tree holds exactly one."""
    nodes = [(path, x) for path, x in _find_holders(tree) if is_scaler_state(x)]
    return _get_only(tree, nodes, "loss-scaled optimizer state")


def find_loss_scale_state(tree: Any) -> Any:
    """Return the one NamedTuple with a field `loss_scale`. Raise ValueError unless a tree holds exactly one."""
    return _loss_scale_state(_get_only(tree, _find_holders(tree), "loss-scale state"))


def find_state_to_unscale(tree: Any, caller: str) -> Any:
    """Return the loss-scale state for a function that unscales gradients, called `caller` in errors.

    Raise ValueError for the state of `loss_scaled(..., unscale=True)`, which would unscale the gradients again.
    """
    holder = _get_only(tree, _find_holders(tree), "loss-scale state")
    if isinstance(holder, ScaledGradsState):
        raise ValueError(
            f"{caller} returns true gradients, and an optimizer with unscale=True would unscale them again. Make it "
            "without unscale=True, or take the gradients of jamp.scale_loss(loss_fn(params), opt_state)."
        )
    return _loss_scale_state(holder)


def read_scale(loss_scale_state: Any) -> Array | None:
    """Return the loss scale in a loss scale's state, f32[], or None under `NoOpLossScale`."""
    return None if is_noop(loss_scale_state) else to_array(loss_scale_state.loss_scale)


def is_step_applied(opt_state: Any) -> Array | None:
    """Return whether the last step was applied, bool[], or None if nothing was checked, as under `NoOpLossScale`."""
    states = [x for _, x in find_nodes(opt_state, is_scaler_state)]
    return states[0].grads_finite if len(states) == 1 and not is_noop(states[0].loss_scale_state) else None


def to_array(x: Any) -> Array:
    """Return the array itself, or the array in a Flax NNX Variable."""
    return jnp.asarray(*jax.tree.leaves(x))


def check_not_nnx(loss_scale_state: Any) -> None:
    """Raise ValueError if the scale is in a Flax NNX Variable, for a function that does not restore NNX modules."""
    if hasattr(type(loss_scale_state.loss_scale), "get_value"):
        raise ValueError(
            "value_and_grad does not restore the state of an NNX model, got an nnx.Optimizer. Use jamp.nnx.Optimizer "
            "and jamp.nnx.value_and_grad."
        )


def warn_of_order(tree: Any) -> None:
    """Warn if a tree holds the state of a chain, or of a `MultiSteps`, with `loss_scaled` in a wrong place."""
    messages: list[str] = []
    is_place = lambda x: type(x) is tuple or isinstance(x, optax.MultiStepsState)
    for _, x in find_nodes(tree, is_place, enters=lambda x: True, has_paths=False):
        if type(x) is tuple:
            messages += _find_misplaced(x)
        elif x.skip_state == () and contains(x.inner_opt_state, is_skipping):
            messages.append(_AROUND)
    for message in dict.fromkeys(messages):
        warnings.warn(message, stacklevel=users_stacklevel())


def _find_misplaced(states: tuple[Any, ...]) -> list[str]:
    """Return the messages about the state of a chain. A user's tuple of states has no such entries."""
    messages, is_late, is_hidden = [], False, False
    for i, x in enumerate(states):
        # Clips and decays have no state of their own. Before `loss_scaled`, a clip of the norm is right and one of each
        # element is not, but they look the same.
        is_late = is_late or isinstance(x, (optax.EmptyState, optax.ZeroNansState))
        is_hidden = is_hidden or isinstance(x, optax.ZeroNansState)
        if is_late and contains(x, lambda y: isinstance(y, ScaledGradsState) and is_skipping(y)):
            messages.append(_BEFORE_UNSCALE)
        if is_hidden and contains(x, lambda y: isinstance(y, LossScaledState) and is_skipping(y)):
            messages.append(_BEFORE)
        if is_skipping(x) and _wraps_no_optimizer(x) and any(map(_has_state, states[i + 1 :])):
            messages.append(_AFTER)
    return messages


def _wraps_no_optimizer(state: Any) -> bool:
    """Whether a wrapper of this state is around `optax.identity` or a clip. A user's tuple of states holds none."""
    return isinstance(getattr(state, "inner_state", None), optax.EmptyState)


def _has_state(x: Any) -> bool:
    """Whether this is the state of an optimizer, with arrays in a NamedTuple."""
    return contains(x, lambda y: hasattr(y, "_fields") and not is_scaler_state(y) and bool(jax.tree.leaves(y)))


def _find_holders(tree: Any) -> list[Node]:
    """Return the scaler states and the other loss-scale states, with their paths.

    A user's NamedTuple may have others inside. Raise ValueError if a wrapper is in a wrong place.
    """

    def is_holder(x: Any) -> bool:
        _check_wraps_no_scaler(x)
        return is_scaler_state(x) or _is_loss_scale_state(x)

    return list(find_nodes(tree, is_holder, enters=lambda x: not is_scaler_state(x)))


def _is_loss_scale_state(x: Any) -> bool:
    # A NamedTuple whose field of this name holds a state (a user's train state) is not a loss-scale state. Flax NNX
    # keeps each array in a Variable, a pytree of one leaf.
    return "loss_scale" in _fields(x) and not _fields(x.loss_scale) and len(jax.tree.leaves(x.loss_scale)) == 1


def _fields(x: Any) -> tuple[str, ...]:
    return getattr(x, "_fields", ()) if isinstance(x, tuple) else ()


def _loss_scale_state(holder: Any) -> Any:
    return holder.loss_scale_state if is_scaler_state(holder) else holder


def _get_only(tree: Any, nodes: list[Node], what: str) -> Any:
    """Return the one node. Raise ValueError unless there is exactly one."""
    if len(nodes) == 1:
        return nodes[0][1]
    if not nodes:
        raise ValueError(f"Expected a pytree with a {what}, found none in this {type(tree).__name__}. {_cure(tree)}")
    paths = ", ".join(keystr(path) for path, _ in nodes)
    raise ValueError(f"Expected exactly one {what}, found {len(nodes)}: at {paths}. Pass the one that is meant.")


def _cure(tree: Any) -> str:
    """What to pass in place of an argument that holds no state."""
    if isinstance(tree, optax.GradientTransformation):
        return "Pass its state: opt_state = tx.init(params)."
    if isinstance(tree, LossScale):
        return "Pass its state: loss_scale.init()."
    if tree is not None and (callable(tree) or jax.tree_util.all_leaves([tree])):
        calls = "jamp.value_and_grad(loss_fn, opt_state), jamp.scale_loss(loss, opt_state)"
        return f"Write {calls} or jamp.set_loss_scale(opt_state, 1024.0)."
    return "Use `tx = jamp.loss_scaled(tx)`. If the state was split or serialised, merge or restore it first."


def _check_wraps_no_scaler(x: Any) -> None:
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
