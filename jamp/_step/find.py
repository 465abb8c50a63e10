"""Find the scaler state, or the loss-scale state, in any pytree."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.tree_util import keystr, tree_flatten_with_path

from jamp._scale.static import is_noop
from jamp._step.state import ScaledGradsState, contains, is_scaler_state

_Nodes = list[tuple[tuple[Any, ...], Any]]  # path and value


def find_scaler_state(tree: Any) -> Any:
    """The one `ScalerState` or state of `loss_scaled` in a tree. Raises ValueError unless there is exactly one."""
    return _only(tree, list(_nodes(tree)), is_scaler_state, "loss-scaled optimizer state")


def find_loss_scale_state(tree: Any) -> Any:
    """The one NamedTuple with a field `loss_scale` in a tree. Raises ValueError unless there is exactly one."""
    return _only(tree, list(_nodes(tree)), _is_loss_scale_state, "loss-scale state")


def find_state_to_unscale(tree: Any, caller: str) -> Any:
    """`find_loss_scale_state` for a function that unscales gradients, which error messages name by `caller`.

    Raises ValueError for the state of `loss_scaled(..., unscale=True)`, which would unscale the gradients again.
    """
    nodes = list(_nodes(tree))
    if _has_scaled_grads(nodes):
        raise ValueError(
            f"{caller} returns true gradients, and an optimizer with unscale=True would unscale them again. Take the "
            "gradients of the scaled loss, jax.grad(lambda *args: jamp.scale_loss(loss_fn(*args), opt_state)), or make "
            "the optimizer without unscale=True."
        )
    return _only(tree, nodes, _is_loss_scale_state, "loss-scale state")


def scale_of(loss_scale_state: Any) -> Array | None:
    """The loss scale in a loss scale's state, f32[], or None under `NoOpLossScale`."""
    return None if is_noop(loss_scale_state) else array_of(loss_scale_state.loss_scale)


def adapts(loss_scale_state: Any) -> bool:
    """Whether a loss scale can change. The state of one that never does holds nothing else."""
    return len(jax.tree.leaves(loss_scale_state)) > 1


def step_applied(opt_state: Any) -> Array | None:
    """bool[], whether the last step was applied; None if nothing was checked, as under `NoOpLossScale`."""
    found = [x for _, x in _nodes(opt_state) if is_scaler_state(x)]
    return found[0].grads_finite if len(found) == 1 and not is_noop(found[0].loss_scale_state) else None


def array_of(x: Any) -> Array:
    """The array itself, or the array in a Flax NNX Variable."""
    return jnp.asarray(*jax.tree.leaves(x))


def _nodes(tree: Any, path: tuple[Any, ...] = (), *, below: bool = False) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Path and value of each node that a look-up may ask for, in one pass. Nodes may be inside other nodes."""

    def is_leaf(x: Any) -> bool:
        is_known = is_scaler_state(x) or _is_loss_scale_state(x) or _is_plain_nnx_optimizer(x)
        return (is_known or _hides_overflows(x)) and not (below and x is tree)

    for p, x in tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
        if is_leaf(x):
            yield (*path, *p), x
            yield from _nodes(x, (*path, *p), below=True)


def _is_loss_scale_state(x: Any) -> bool:
    # A NamedTuple whose field of this name holds a state (a user's train state) is not a loss-scale state. Flax NNX
    # keeps each array in a Variable, a pytree of one leaf.
    return "loss_scale" in _fields(x) and not _fields(x.loss_scale) and len(jax.tree.leaves(x.loss_scale)) == 1


def _fields(x: Any) -> tuple[str, ...]:
    return getattr(x, "_fields", ()) if isinstance(x, tuple) else ()


def _is_plain_nnx_optimizer(x: Any) -> bool:
    """Whether a node has the attributes of an `nnx.Optimizer` and an adapting loss scale, and undoes no skips."""
    is_plain = hasattr(x, "wrt") and hasattr(x, "opt_state") and not hasattr(x, "undoes_skips")
    return is_plain and contains(x.opt_state, _adapts)


def _hides_overflows(x: Any) -> bool:
    """Whether a node is the state of a wrapper that keeps overflows from an optimizer whose loss scale adapts."""
    is_filter = isinstance(x, optax.ApplyIfFiniteState) or (isinstance(x, optax.MultiStepsState) and x.skip_state != ())
    return is_filter and contains(x, _adapts)


def _adapts(x: Any) -> bool:
    return is_scaler_state(x) and adapts(x.loss_scale_state)


def _has_scaled_grads(nodes: _Nodes) -> bool:
    return any(isinstance(x, ScaledGradsState) for _, x in nodes)


def _only(tree: Any, nodes: _Nodes, is_match: Callable[[Any], bool], what: str) -> Any:
    """The one node that matches. Raises ValueError unless there is exactly one."""
    if any(_is_plain_nnx_optimizer(x) for _, x in nodes) and not _has_scaled_grads(nodes):
        raise ValueError(
            "nnx.Optimizer counts skipped steps, and does not undo their changes to the model. Use "
            "jamp.nnx.Optimizer(model, tx, wrt=nnx.Param), with the plain optimizer as tx."
        )
    if any(_hides_overflows(x) for _, x in nodes):
        raise ValueError(
            "optax.apply_if_finite (or should_skip_update_fn of optax.MultiSteps) around a loss-scaled optimizer keeps "
            "overflows from it, so the loss scale stays too high. loss_scaled skips such steps itself: leave it out, "
            "or put it inside, jamp.loss_scaled(optax.apply_if_finite(tx, max_consecutive_errors))."
        )
    found = [(path, x) for path, x in nodes if is_match(x)]
    if len(found) == 1:
        return found[0][1]
    if not found:
        raise ValueError(
            "Expected an optimizer state from `jamp.loss_scaled(...).init(params)`, a loss-scale state, or a pytree "
            f"with one; found no {what} in this {type(tree).__name__}. If the state was split, turned into dicts or "
            "serialised, merge or restore it first; if the optimizer is not wrapped yet, use "
            "`tx = jamp.loss_scaled(tx)`."
        )
    paths = ", ".join(keystr(p) for p, _ in found)
    raise ValueError(f"Expected exactly one {what}, found {len(found)}: at {paths}. Pass the one that is meant.")
