"""The parameters as an optimizer takes them: float32, or at their own dtypes if it rounds them itself."""

from collections.abc import Callable
from typing import Any

import jax

from jamp._cast import to_float32
from jamp._step.state import contains


def rounds_stochastically(opt_state: Any) -> bool:
    """Whether an optimizer of this state rounds parameters, as the `rounds_params` of one of its nodes says."""
    return contains(opt_state, lambda x: getattr(x, "rounds_params", False) is True)


def params_for(opt_state: Any, params: Any) -> Any:
    """The parameters for the `update` of an optimizer of this state."""
    return params if rounds_stochastically(opt_state) else to_float32(params)


def params_for_init(init: Callable[[Any], Any], params: Any) -> Any:
    """The parameters for the `init` of an optimizer. It is traced with 16-bit ones, because its state is not known."""
    wide = to_float32(params)
    is_wide = all(x is y for x, y in zip(jax.tree.leaves(wide), jax.tree.leaves(params), strict=True))
    return params if is_wide else params_for(jax.eval_shape(init, wide), params)
