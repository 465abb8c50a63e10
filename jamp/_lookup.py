"""Find the one loss-scale state in any pytree, by field name."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import keystr, tree_flatten_with_path
from jax.typing import ArrayLike

from jamp._stats import LossScaleStats

_HOLDERS = "an optimizer state from `jamp.loss_scaled(...).init(params)`, a loss-scale state, or a pytree with one"


def find_state(tree: Any) -> Any:
    """The one loss-scale state in `tree`.

    Raises:
      ValueError: If there is none, or more than one.
    """
    return _find(tree, "loss_scale", "loss-scale state", _HOLDERS)


def get_loss_scale(tree: Any) -> Array:
    """The loss scale.

    Args:
      tree: A loss-scale state, or any pytree that holds exactly one: an optimizer state, a train state.

    Returns:
      f32[], the scale of the next loss.

    Raises:
      ValueError: If the tree holds no loss-scale state or several.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> opt_state = jamp.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3))
      >>> float(jamp.get_loss_scale(opt_state))
      65536.0
    """
    return jnp.asarray(find_state(tree).loss_scale)


def set_loss_scale(tree: Any, value: ArrayLike) -> Any:
    """The tree with another loss scale.

    Growth starts anew and the hysteresis is refilled. A value outside the bounds of the configuration is used for
    the next step, whose update brings it back inside.

    Args:
      tree: As for `get_loss_scale`.
      value: The new scale, a number or f32[].

    Returns:
      A tree of the same structure, shapes and dtypes.

    Raises:
      ValueError: If the tree holds no loss-scale state or several.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> opt_state = jamp.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3))
      >>> float(jamp.get_loss_scale(jamp.set_loss_scale(opt_state, 1024.0)))
      1024.0
    """
    found = find_state(tree)
    # A copy: the caller may go on using the value, or it may be a buffer of this very tree, which donation forbids.
    scale = jnp.array(jnp.broadcast_to(jnp.asarray(value, jnp.float32), jnp.shape(found.loss_scale)))
    new = found.restarted(scale) if hasattr(found, "restarted") else found._replace(loss_scale=scale)
    new = jax.tree.unflatten(jax.tree.structure(found), jax.tree.leaves(new))  # into Flax NNX's Variables, where it was
    return jax.tree.map(lambda x: new if x is found else x, tree, is_leaf=lambda x: x is found)


def get_stats(tree: Any) -> LossScaleStats:
    """The statistics of the one loss-scaled optimizer state in a tree.

    Args:
      tree: An optimizer state from `jamp.loss_scaled`, or any pytree that holds exactly one.

    Raises:
      ValueError: If the tree holds none or several.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> int(jamp.get_stats(jamp.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3))).overflow_steps)
      0
    """
    stats: LossScaleStats = _find(tree, "stats", "loss-scaled optimizer state", _HOLDERS).stats
    return LossScaleStats(*jax.tree.leaves(stats))  # out of the Variables in which Flax NNX keeps arrays


def get_grads_finite(tree: Any) -> Array:
    """Whether the last step was applied, without a device sync.

    Args:
      tree: An optimizer state from `jamp.loss_scaled`, or any pytree that holds exactly one.

    Returns:
      bool[], True before the first step.

    Raises:
      ValueError: If the tree holds none or several.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> bool(jamp.get_grads_finite(jamp.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3))))
      True
    """
    return jnp.asarray(_find(tree, "grads_finite", "loss-scaled optimizer state", _HOLDERS).grads_finite)


def metrics(tree: Any) -> dict[str, Array]:
    """What to log: the loss scale, whether the last step was applied, and the statistics.

    Args:
      tree: An optimizer state from `jamp.loss_scaled`, or any pytree that holds exactly one.

    Returns:
      Arrays on device by name: `loss_scale` (f32[]), `grads_finite` (bool[]), the fields of `LossScaleStats` and
      `success_rate` (f32[]). Convert them only when they are written: that is the device sync.

    Raises:
      ValueError: If the tree holds none or several.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> float(jamp.metrics(jamp.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3)))["success_rate"])
      1.0
    """
    stats = get_stats(tree)
    named = {"loss_scale": get_loss_scale(tree), "grads_finite": get_grads_finite(tree)}
    return named | stats._asdict() | {"success_rate": stats.success_rate}


def _find(tree: Any, field: str, what: str, holders: str) -> Any:
    has_field: Callable[[Any], bool]
    if field == "loss_scale":
        # A NamedTuple that merely keeps a state under this name (a user's train state) is not one itself. Flax NNX
        # keeps each array in a Variable, a pytree of one leaf.
        one_leaf = lambda x: not _fields(x) and len(jax.tree.leaves(x)) == 1
        has_field = lambda x: field in _fields(x) and one_leaf(x.loss_scale)
    else:
        has_field = lambda x: {field, "loss_scale_state"} <= set(_fields(x))
    found = list(_holders(tree, has_field))
    if len(found) == 1:
        return found[0][1]
    if not found:
        raise ValueError(
            f"Expected {holders}; found no {what} in this {type(tree).__name__}. If the state was split, turned into "
            "dicts or serialised, merge or restore it first; if the optimizer is not wrapped yet, use "
            "`tx = jamp.loss_scaled(tx)`."
        )
    paths = ", ".join(keystr(p) for p, _ in found)
    raise ValueError(f"Expected exactly one {what}, found {len(found)}: at {paths}. Pass the one that is meant.")


def _holders(
    tree: Any, has_field: Callable[[Any], bool], path: tuple[Any, ...] = (), *, below: bool = False
) -> Iterator[tuple[Any, Any]]:
    """Path and value of every node with the field, also of those inside another one."""
    is_leaf = lambda x: has_field(x) and not (below and x is tree)
    for p, x in tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
        if has_field(x):
            yield (*path, *p), x
            yield from _holders(x, has_field, (*path, *p), below=True)


def _fields(x: Any) -> tuple[str, ...]:
    return getattr(x, "_fields", ()) if isinstance(x, tuple) else ()
