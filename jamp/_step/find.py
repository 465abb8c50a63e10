"""Find the scaler state, or the loss-scale state, in any pytree."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import keystr

from jamp._loss_scale.static import is_noop
from jamp._step.leaves import Node, find_nodes
from jamp._step.placement import check_wraps_no_scaler
from jamp._step.state import ScaledGradsState, is_scaler_state


def find_scaler_state(tree: Any) -> Any:
    """The one `ScalerState` or state of `loss_scaled` in a tree. Raises ValueError unless there is exactly one."""
    nodes = [(path, x) for path, x in _holders(tree) if is_scaler_state(x)]
    return _only(tree, nodes, "loss-scaled optimizer state")


def find_loss_scale_state(tree: Any) -> Any:
    """The one NamedTuple with a field `loss_scale` in a tree. Raises ValueError unless there is exactly one."""
    return _loss_scale_state(_only(tree, _holders(tree), "loss-scale state"))


def find_state_to_unscale(tree: Any, caller: str) -> Any:
    """`find_loss_scale_state` for a function that unscales gradients, which error messages name by `caller`.

    Raises ValueError for the state of `loss_scaled(..., unscale=True)`, which would unscale the gradients again.
    """
    holder = _only(tree, _holders(tree), "loss-scale state")
    if isinstance(holder, ScaledGradsState):
        raise ValueError(
            f"{caller} returns true gradients, and an optimizer with unscale=True would unscale them again. Take the "
            "gradients of the scaled loss, jax.grad(lambda *args: jamp.scale_loss(loss_fn(*args), opt_state)), or make "
            "the optimizer without unscale=True."
        )
    return _loss_scale_state(holder)


def scale_of(loss_scale_state: Any) -> Array | None:
    """The loss scale in a loss scale's state, f32[], or None under `NoOpLossScale`."""
    return None if is_noop(loss_scale_state) else array_of(loss_scale_state.loss_scale)


def step_applied(opt_state: Any) -> Array | None:
    """bool[], whether the last step was applied; None if nothing was checked, as under `NoOpLossScale`."""
    states = [x for _, x in find_nodes(opt_state, is_scaler_state)]
    return states[0].grads_finite if len(states) == 1 and not is_noop(states[0].loss_scale_state) else None


def array_of(x: Any) -> Array:
    """The array itself, or the array in a Flax NNX Variable."""
    return jnp.asarray(*jax.tree.leaves(x))


def _holders(tree: Any) -> list[Node]:
    """Return the scaler states and the other loss-scale states, with their paths.

    A user's NamedTuple may have others inside. Raises ValueError if a wrapper is in a wrong place.
    """

    def is_holder(x: Any) -> bool:
        check_wraps_no_scaler(x)
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


def _only(tree: Any, nodes: list[Node], what: str) -> Any:
    """The one node. Raises ValueError unless there is exactly one."""
    if len(nodes) == 1:
        return nodes[0][1]
    if not nodes:
        raise ValueError(
            "Expected an optimizer state from `jamp.loss_scaled(...).init(params)`, a loss-scale state, or a pytree "
            f"with one; found no {what} in this {type(tree).__name__}. If the state was split, turned into dicts or "
            "serialised, merge or restore it first; if the optimizer is not wrapped yet, use "
            "`tx = jamp.loss_scaled(tx)`."
        )
    paths = ", ".join(keystr(path) for path, _ in nodes)
    raise ValueError(f"Expected exactly one {what}, found {len(nodes)}: at {paths}. Pass the one that is meant.")
