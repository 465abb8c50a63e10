"""The parameters that an optimizer gets, in float32 or at their own dtypes, and the updates that it returns."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.tree_util import keystr

from jamp._cast import is_floating, to_float32
from jamp._jaxprs.source import users_stacklevel
from jamp._leaves import contains, is_numeric


def rounds_params(opt_state: Any) -> bool:
    """Whether the optimizer of this state rounds parameters: a node of the state has `rounds_params` True."""
    return contains(opt_state, lambda x: getattr(x, "rounds_params", False) is True)


def check_rounds_last(opt_state: Any) -> None:
    """Raise ValueError if an optimizer of this state averages bfloat16 parameters after their rounding."""

    def averages(x: Any) -> bool:
        # By its name, because Optax moves what is in `contrib`.
        if type(x).__name__ != "ScheduleFreeState" or not rounds_params(getattr(x, "base_optimizer_state", ())):
            return False
        own = jax.tree.leaves(x._replace(base_optimizer_state=()))
        return any(getattr(y, "dtype", None) == jnp.bfloat16 for y in own)

    if contains(opt_state, averages):
        raise ValueError(
            "schedule_free averages parameters after stochastic_rounding, which undoes it. Put the rounding last: "
            "jamp.stochastic_rounding(optax.contrib.schedule_free(tx, learning_rate))."
        )


def check_bfloat16(params: Any, advice: str) -> None:
    """Raise ValueError with this advice if a parameter is of another floating dtype of fewer than 32 bits."""
    for path, p in jax.tree.leaves_with_path(params):
        if is_floating(p) and p.dtype.itemsize < 4 and p.dtype != jnp.bfloat16:
            raise ValueError(f"The parameter {keystr(path) or 'array'} is {p.dtype.name}. {advice}")


def warn_if_rounded(opt_state: Any, params: Any) -> None:
    """Warn if all parameters are float16 and nothing in the state of their optimizer keeps more digits."""
    dtypes = {x.dtype for x in jax.tree.leaves(params) if hasattr(x, "dtype") and is_floating(x)}
    has_masters = contains(opt_state, lambda x: hasattr(x, "master_params")) or rounds_params(opt_state)
    if dtypes == {jnp.dtype(jnp.float16)} and not has_masters:
        warnings.warn(
            "float16 parameters without a master copy lose updates below a 2000th of their value. Keep them in "
            "float32, or use jamp.master_params(tx).",
            stacklevel=users_stacklevel(),
        )


def compute_update(old: Array, new: Array) -> Array:
    """Return the update with which `optax.apply_updates` turns an array into another of its floating dtype.

    Where they are the same it is -0.0, which leaves every number unchanged, also inf and NaN.
    """
    bits = f"uint{jnp.finfo(new.dtype).bits}"
    is_same = lax.bitcast_convert_type(new, bits) == lax.bitcast_convert_type(old, bits)
    return jnp.where(is_same, jnp.asarray(-0.0, new.dtype), new - old)


def cast_params(opt_state: Any, params: Any) -> Any:
    """Cast the parameters for the `update` of an optimizer of this state, to float32 unless it rounds them.

    Plain Optax also takes a whole Equinox model. Its functions and strings become None, as in its gradients.
    """
    params = jax.tree.map(lambda x: x if is_numeric(x) else None, params)
    return params if rounds_params(opt_state) else to_float32(params)


def cast_params_for_init(init: Callable[[Any], Any], params: Any) -> Any:
    """Cast the parameters for the `init` of an optimizer. Tracing `init` tells whether it rounds 16-bit ones."""
    in_float32 = to_float32(params)
    is_same = all(x is y for x, y in zip(jax.tree.leaves(in_float32), jax.tree.leaves(params), strict=True))
    return params if is_same else cast_params(jax.eval_shape(init, in_float32), params)
