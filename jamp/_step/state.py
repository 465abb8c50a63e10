"""The scaler state, and finding it in any pytree.

`ScalerState` is everything that a step updates besides the optimizer: the loss scale, its statistics and whether the
last gradients were finite. `LossScaledState` is the same with the optimizer's state.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.tree_util import keystr, tree_flatten_with_path

from jamp._cast import is_inexact
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
        state = _with_types(state, state._replace(loss_scale=jnp.float32(0)))
        return cls(state, LossScaleStats.init(state.loss_scale), jnp.array(True))

    def advance(self, loss_scale: LossScale, grads_finite: Array) -> "ScalerState":
        """Return the state after a step, given whether its gradients were finite (bool[])."""
        old = self.loss_scale_state
        new = _with_types(loss_scale.update(old, grads_finite), old)
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


class ScaledGradsState(LossScaledState):
    """State of `loss_scaled(..., unscale=True)`: `update` takes the gradients of a scaled loss, and unscales them."""

    __slots__ = ()


def is_scaler_state(x: Any) -> bool:
    """Whether a node of a pytree is a `ScalerState` or a `LossScaledState`."""
    return isinstance(x, (ScalerState, LossScaledState))


def find_scaler_state(tree: Any) -> Any:
    """The one `ScalerState` or `LossScaledState` in a tree. None or several raise a ValueError."""
    return _find_one(tree, is_scaler_state, "loss-scaled optimizer state")


def step_applied(opt_state: Any) -> Array | None:
    """bool[], whether the last step was applied; None if nothing was checked, as under `NoOpLossScale`."""
    found = [x for _, x in _matches(opt_state, is_scaler_state)]
    is_checked = len(found) == 1 and not isinstance(found[0].loss_scale_state, NoOpLossScaleState)
    return found[0].grads_finite if is_checked else None


def find_loss_scale_state(tree: Any) -> Any:
    """The one NamedTuple with a field `loss_scale` in a tree. None or several raise a ValueError."""
    return _find_one(tree, _is_loss_scale_state, "loss-scale state")


def find_loss_scale(tree: Any, unscales: str = "") -> Array | None:
    """The loss scale in a tree, f32[], or None under `NoOpLossScale`.

    No state or several raise a ValueError, and so does the state of `loss_scaled(..., unscale=True)` if the caller, by
    name, unscales gradients itself.
    """
    if unscales and contains(tree, lambda x: isinstance(x, ScaledGradsState)):
        raise ValueError(
            f"{unscales} returns true gradients, and an optimizer with unscale=True would unscale them again. Take the "
            "gradients of the scaled loss, jax.grad(lambda *args: jamp.scale_loss(loss_fn(*args), opt_state)), or make "
            "the optimizer without unscale=True."
        )
    found = find_loss_scale_state(tree)
    if unscales == "value_and_grad" and hasattr(type(found.loss_scale), "get_value"):
        raise ValueError(
            f"This is an nnx.Optimizer or its state, whose arrays are Variables, and {unscales} does not restore what "
            "the loss function changes in a model. Use jamp.nnx.Optimizer and jamp.nnx.value_and_grad."
        )
    return None if isinstance(found, NoOpLossScaleState) else array_of(found.loss_scale)


def array_of(x: Any) -> Array:
    """An array, also if it is in a Variable, as Flax NNX keeps each array."""
    return jnp.asarray(*jax.tree.leaves(x))


def contains(tree: Any, is_match: Callable[[Any], bool] = is_scaler_state) -> bool:
    """Whether any node of a tree matches, by default whether it holds a scaler state."""
    return any(map(is_match, jax.tree.leaves(tree, is_leaf=is_match)))


def check_one_scaler(inner_state: Any) -> None:
    """Raise ValueError if the state of the optimizer that is to be wrapped holds a scaler state."""
    if contains(inner_state):
        raise ValueError(
            "Two scalers: the optimizer is already loss-scaled, and this would scale it again. Pass the plain "
            "optimizer, and the loss scale as loss_scale=; in place of jamp.mixed_precision(tx), pass "
            "jamp.master_params(tx)."
        )


def check_whole(params: Any) -> None:
    """Raise ValueError if a mask hides some parameters from the optimizer that is to be wrapped."""
    if contains(params, lambda x: isinstance(x, optax.MaskedNode)):
        raise ValueError(
            "A loss-scaled optimizer inside optax.masked or optax.partition sees only some of the gradients: an inf in "
            "the others would be applied. Wrap the whole: jamp.loss_scaled(optax.masked(tx, mask)), or "
            "jamp.loss_scaled(optax.partition(transforms, labels)), also if the others are frozen."
        )


def check_state(state: Any, kind: type[LossScaledState], loss_scale: LossScale, structure: Any) -> None:
    """Raise TypeError if a state is not of this kind, or not of an optimizer with a loss scale of this structure."""
    if not isinstance(state, LossScaledState):
        raise TypeError(
            f"Expected the state that this optimizer's init returns, a {kind.__name__}; got {_name(state)}. If it is "
            "the state of the plain optimizer, from a run without jamp: jamp.interop.wrap_state(state, loss_scale). If "
            "it was restored from a checkpoint without a target, restore it into tx.init(params)."
        )
    given, here = isinstance(state, ScaledGradsState), kind is ScaledGradsState
    if given != here:
        raise TypeError(
            f"The state is that of an optimizer with unscale={given}, and this one has unscale={here}. One takes "
            "scaled gradients and the other true ones, so use the same optimizer for init and update."
        )
    if jax.tree.structure(state.loss_scale_state) != structure:
        raise TypeError(
            f"The state is that of another loss scale: it holds {_name(state.loss_scale_state)}, and this optimizer "
            f"has {loss_scale!r}. To continue with it: jamp.convert_loss_scale(state, {loss_scale!r})."
        )


def replace_node(tree: Any, node: Any, new: Any) -> Any:
    """The tree with `new` in place of one of its nodes."""
    return jax.tree.map(lambda x: new if x is node else x, tree, is_leaf=lambda x: x is node)


def _is_loss_scale_state(x: Any) -> bool:
    # A NamedTuple whose field of this name holds a state (a user's train state) is not a loss-scale state. Flax NNX
    # keeps each array in a Variable, a pytree of one leaf.
    return "loss_scale" in _fields(x) and not _fields(x.loss_scale) and len(jax.tree.leaves(x.loss_scale)) == 1


def _is_plain_nnx_optimizer(x: Any) -> bool:
    flax, ours = sys.modules.get("flax.nnx"), sys.modules.get("jamp.nnx")
    is_plain = flax is not None and isinstance(x, flax.Optimizer) and not (ours and isinstance(x, ours.Optimizer))
    return is_plain and contains(x.opt_state)


def _with_types(new: Any, old: Any) -> Any:
    """The state of a user's loss scale with the dtypes of `old` and no weak types, so that `jit` compiles once."""

    def cast(x: Any, y: Any) -> Array:
        is_truncated = is_inexact(x) and not is_inexact(y)  # such as an average that `init` started with the int 0
        return jnp.asarray(x, jnp.result_type(x if is_truncated else y))

    return jax.tree.map(cast, new, old)


def _name(x: Any) -> str:
    return f"a tuple of {len(x)}" if type(x) is tuple else f"a {type(x).__name__}"


def _fields(x: Any) -> tuple[str, ...]:
    return getattr(x, "_fields", ()) if isinstance(x, tuple) else ()


def _find_one(tree: Any, is_match: Callable[[Any], bool], what: str) -> Any:
    found = list(_matches(tree, is_match))
    if contains(tree, _is_plain_nnx_optimizer) and not contains(tree, lambda x: isinstance(x, ScaledGradsState)):
        raise ValueError(
            "nnx.Optimizer counts skipped steps, and does not restore what they changed in the model. Use "
            "jamp.nnx.Optimizer(model, tx, wrt=nnx.Param), with the plain optimizer as tx."
        )
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
