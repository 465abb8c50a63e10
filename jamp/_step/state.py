"""The scaler state, and finding it in any pytree.

`ScalerState` is everything that a step updates besides the optimizer: the loss scale, its statistics and whether the
last gradients were finite. `LossScaledState` is the same with the optimizer's state.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import keystr, tree_flatten_with_path

from jamp._scale.static import LossScale, NoOpLossScaleState
from jamp._scale.stats import LossScaleStats


class ScalerState(NamedTuple):
    """A loss scale's state with its statistics."""

    loss_scale_state: Any
    stats: LossScaleStats
    grads_finite: Array  # bool[], whether the last step was applied

    @classmethod
    def init(cls, loss_scale: LossScale) -> "ScalerState":
        """Make the state before the first step."""
        state = loss_scale.init()
        return cls(state, LossScaleStats.init(state.loss_scale), jnp.array(True))

    def advance(self, loss_scale: LossScale, grads_finite: Array) -> "ScalerState":
        """Return the state after a step, given whether its gradients were finite (bool[])."""
        old = self.loss_scale_state
        new = loss_scale.update(old, grads_finite)
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

    @property
    def scaler_state(self) -> ScalerState:
        """This state without the optimizer's."""
        return ScalerState(self.loss_scale_state, self.stats, self.grads_finite)

    def step_applied(self) -> Array:
        """bool[], whether the last step was applied. Under `NoOpLossScale` it is a constant."""
        return jnp.bool_(True) if isinstance(self.loss_scale_state, NoOpLossScaleState) else self.grads_finite


def is_scaler_state(x: Any) -> bool:
    """Whether a node of a pytree is a `ScalerState` or a `LossScaledState`."""
    return isinstance(x, (ScalerState, LossScaledState))


def find_scaler_state(tree: Any) -> Any:
    """The one `ScalerState` or `LossScaledState` in a tree. None or several raise a ValueError."""
    return _find_one(tree, is_scaler_state, "loss-scaled optimizer state")


def find_loss_scale_state(tree: Any) -> Any:
    """The one NamedTuple with a field `loss_scale` in a tree. None or several raise a ValueError."""
    return _find_one(tree, _is_loss_scale_state, "loss-scale state")


def find_loss_scale(tree: Any) -> Array | None:
    """The loss scale in a tree, f32[], or None under `NoOpLossScale`. No state or several raise a ValueError."""
    found = find_loss_scale_state(tree)
    return None if isinstance(found, NoOpLossScaleState) else jnp.asarray(found.loss_scale)


def contains(tree: Any, is_match: Callable[[Any], bool] = is_scaler_state) -> bool:
    """Whether any node of a tree matches, by default whether it holds a scaler state."""
    return any(map(is_match, jax.tree.leaves(tree, is_leaf=is_match)))


def check_one_scaler(inner_state: Any) -> None:
    """Raise ValueError if the state of the optimizer that is to be wrapped holds a scaler state."""
    if contains(inner_state):
        raise ValueError(
            "Two scalers: tx is already loss-scaled, and this would scale it again. Pass the plain optimizer as tx and "
            "the loss scale as loss_scale=; in place of jamp.mixed_precision(tx), pass jamp.master_params(tx)."
        )


def replace_node(tree: Any, node: Any, new: Any) -> Any:
    """The tree with `new` in place of one of its nodes."""
    return jax.tree.map(lambda x: new if x is node else x, tree, is_leaf=lambda x: x is node)


def _is_loss_scale_state(x: Any) -> bool:
    # A NamedTuple whose field of this name holds a state (a user's train state) is not a loss-scale state. Flax NNX
    # keeps each array in a Variable, a pytree of one leaf.
    return "loss_scale" in _fields(x) and not _fields(x.loss_scale) and len(jax.tree.leaves(x.loss_scale)) == 1


def _fields(x: Any) -> tuple[str, ...]:
    return getattr(x, "_fields", ()) if isinstance(x, tuple) else ()


def _find_one(tree: Any, is_match: Callable[[Any], bool], what: str) -> Any:
    found = list(_matches(tree, is_match))
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


def _matches(
    tree: Any, is_match: Callable[[Any], bool], path: tuple[Any, ...] = (), *, below: bool = False
) -> Iterator[tuple[Any, Any]]:
    """Path and value of every matching node, including those inside another match."""
    is_leaf = lambda x: is_match(x) and not (below and x is tree)
    for p, x in tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
        if is_match(x):
            yield (*path, *p), x
            yield from _matches(x, is_match, (*path, *p), below=True)
