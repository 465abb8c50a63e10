"""Read and set the learning rate in an optimizer state."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.tree_util import keystr
from jax.typing import ArrayLike


def get_learning_rate(tree: Any) -> Array:
    """Return the learning rate in an optimizer state.

    Args:
      tree: The state of one of `jamp.optimizers` or of `optax.inject_hyperparams`, or a pytree with one.

    Returns:
      f32[], the learning rate. With a schedule, it is the one of the last applied step.

    Raises:
      ValueError: If the tree holds no `learning_rate` or several.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> float(jamp.optimizers.get_learning_rate(jamp.optimizers.sgd(0.5).init(jnp.ones(1))))
      0.5
    """
    return jnp.asarray(_find(tree))


def set_learning_rate(tree: Any, value: ArrayLike) -> Any:
    """Return the optimizer state with another learning rate.

    Args:
      tree: As for `get_learning_rate`.
      value: The new learning rate, a number or f32[]. Whether an array of JAX is negative is not checked.

    Returns:
      A tree of the same structure, shapes and dtypes.

    Raises:
      ValueError: If the tree holds no `learning_rate` or several, the value is negative, or the learning rate follows
        a schedule, which would replace the value at the next step.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> state = jamp.optimizers.set_learning_rate(jamp.optimizers.sgd(0.5).init(jnp.ones(1)), 0.25)
      >>> float(jamp.optimizers.get_learning_rate(state))
      0.25
    """
    if hasattr(value, "_fields") or isinstance(value, (tuple, dict)):
        raise TypeError("The state comes first: jamp.optimizers.set_learning_rate(opt_state, 1e-3).")
    check_not_negative(learning_rate=value)
    old = _find(tree)
    if len(optax.tree.get_all_with_path(tree, "learning_rate")) > 1:
        raise ValueError("The next step would replace the value by its schedule's. Make the optimizer with a number.")
    new = jnp.broadcast_to(jnp.asarray(value, jnp.result_type(old)), jnp.shape(old))
    return optax.tree.set(tree, learning_rate=new)


def _find(tree: Any) -> Any:
    # Optax also keeps the state of a schedule under this name.
    is_number = lambda path, value: jax.tree_util.all_leaves([value])
    found = optax.tree.get_all_with_path(tree, "learning_rate", is_number)
    if len(found) == 1:
        return found[0][1]
    if isinstance(tree, optax.GradientTransformation):
        raise ValueError("Got an optimizer. The learning rate is in its state: opt_state = tx.init(params).")
    if not found:
        raise ValueError(
            f"Found no learning_rate in this {type(tree).__name__}. Use one of jamp.optimizers, or "
            "optax.inject_hyperparams(optax.adamw, hyperparam_dtype=jnp.float32)(learning_rate=1e-3)."
        )
    paths = ", ".join(keystr(path) for path, _ in found)
    raise ValueError(f"Expected one learning_rate, found {len(found)}: at {paths}. Pass the one that is meant.")


def check_not_negative(**numbers: Any) -> None:
    """Raise ValueError if a number of Python or NumPy is negative or NaN. JAX's arrays would wait for the device.

    Raise TypeError for what is not a number. A learning rate may be a schedule.
    """
    for name, value in numbers.items():
        is_rate = name == "learning_rate"
        if not (isinstance(value, (int, float, np.generic, np.ndarray, jax.Array)) or (is_rate and callable(value))):
            cure = " Write tx = jamp.optimizers.adamw(1e-3); tx.init(params)." * is_rate
            raise TypeError(f"{name} must be a number, got a {type(value).__name__}.{cure}")
        if isinstance(value, (int, float, np.generic, np.ndarray)) and not np.all(np.asarray(value) >= 0):
            raise ValueError(f"{name} must not be negative, got {name}={value!r}.")
