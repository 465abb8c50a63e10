"""The dtypes of an optimizer's state: those that its `init` made, also where its `update` returns others.

Optax's `ademamix(1e-3, mu_dtype=jnp.bfloat16)` makes a bfloat16 moment, and its first update returns a float32 one.
"""

from typing import Any

import jax
import optax

from jamp._cast import is_complex, is_floating
from jamp._leaves import replace_leaves


def keeping_dtypes(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer whose `update` casts the arrays of its new state to the dtypes that `init` makes.

    A floating array is not cast to another kind, nor is a complex one. `init` is only traced if a dtype changed. It
    cannot be without `params`, and the dtypes of the old state are kept.
    """
    inner = optax.with_extra_args_support(inner)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        updates, new = inner.update(updates, state, params, **extra_args)
        if not has_other_dtypes(new, state):
            return updates, new
        return updates, cast_like(new, state if params is None else jax.eval_shape(inner.init, params))

    return optax.GradientTransformationExtraArgs(inner.init, update)


def has_other_dtypes(state: Any, other: Any) -> bool:
    """Whether a floating or complex array has another dtype of its kind in another state of the same optimizer."""
    return any(_is_other(x, y) for x, y in _pairs(state, other))


def cast_like(state: Any, like: Any) -> Any:
    """Return a state with its floating and complex arrays at the dtypes of another state of the same optimizer."""
    cast = [cast_array_like(x, y) for x, y in _pairs(state, like)]
    return replace_leaves(state, cast) if cast else state


def cast_array_like(x: Any, like: Any) -> Any:
    """Return an array at the dtype of another one, if both are floating or both are complex, and else as it is."""
    return x.astype(like.dtype) if _is_other(x, like) else x


def _pairs(state: Any, other: Any) -> list[tuple[Any, Any]]:
    """Return pairs of leaves, or none if the states are of different optimizers and have different numbers of them."""
    leaves = list(map(jax.tree.leaves, (state, other)))
    return list(zip(*leaves, strict=True)) if len(leaves[0]) == len(leaves[1]) else []


def _is_other(x: Any, y: Any) -> bool:
    is_same_kind = (is_floating(x) and is_floating(y)) or (is_complex(x) and is_complex(y))
    return is_same_kind and x.dtype != y.dtype
