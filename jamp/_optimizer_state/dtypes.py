"""The dtypes of an optimizer's state: those that its `init` made, also where its `update` returns others.

Optax's `ademamix(1e-3, mu_dtype=jnp.bfloat16)` makes a bfloat16 moment, and its first update returns a float32 one.
"""

from typing import Any

import jax
import optax

from jamp._cast import is_floating
from jamp._step.leaves import replace_leaves


def keeping_dtypes(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer whose `update` casts the floating arrays of its new state to the dtypes that `init` makes.

    `init` is only traced if a dtype changed. Without `params` it cannot be, and the dtypes of the old state are kept.
    """
    inner = optax.with_extra_args_support(inner)

    def update(
        grads: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        updates, new = inner.update(grads, state, params, **extra_args)
        if not has_other_dtypes(new, state):
            return updates, new
        return updates, cast_like(new, state if params is None else jax.eval_shape(inner.init, params))

    return optax.GradientTransformationExtraArgs(inner.init, update)


def has_other_dtypes(state: Any, other: Any) -> bool:
    """Whether a floating array of a state has another floating dtype in another state of the same optimizer."""
    return any(_is_other(x, y) for x, y in _pairs(state, other))


def cast_like(state: Any, like: Any) -> Any:
    """Return a state with its floating arrays at the dtypes of another state of the same optimizer."""
    cast = [x.astype(y.dtype) if _is_other(x, y) else x for x, y in _pairs(state, like)]
    return replace_leaves(state, cast) if cast else state


def _pairs(state: Any, other: Any) -> list[tuple[Any, Any]]:
    """Return pairs of leaves, or none if the states are of different optimizers and have different numbers of them."""
    leaves = list(map(jax.tree.leaves, (state, other)))
    return list(zip(*leaves, strict=True)) if len(leaves[0]) == len(leaves[1]) else []


def _is_other(x: Any, y: Any) -> bool:
    return is_floating(x) and is_floating(y) and x.dtype != y.dtype
