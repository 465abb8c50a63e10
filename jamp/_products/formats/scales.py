"""The scales of formats: powers of two, and the derivative that a scale does not have."""

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from jamp._jaxprs.define import define


def power_of_two(amax: Array, dtype: DTypeLike) -> Array:
    """Return the smallest power of two with amax / scale <= the largest number of a dtype."""
    # That is 1.m * 2**k: the exponent of amax * 2**-k, plus one if its mantissa is above m.
    largest = np.float32(jnp.finfo(dtype).max)
    mantissa, k = int(largest.view(np.int32)) & 0x7FFFFF, int(np.frexp(largest)[1]) - 1
    bits = lax.bitcast_convert_type(amax * np.float32(2.0**-k), jnp.int32)
    return lax.bitcast_convert_type((bits + (0x7FFFFF - mantissa)) & 0x7F800000, jnp.float32)


def no_derivative(*_: Any, **__: Any) -> NoReturn:
    """Raise, because what is encoded has no such derivative."""
    raise TypeError(
        "8-bit products have no forward-mode derivative (jvp, jacfwd) and no second one. Use their carrier there: "
        "jamp.autocast(fun, jnp.bfloat16)."
    )


@jax.custom_jvp
def derived(scale: Array, x: Array) -> Array:
    """The scale of `x`. Products ignore its tangent, and no other use of it has a derivative.

    Without it, the second derivative of a product would be zero where it is unknown.
    """
    return scale


def _derived_rule(primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[Array, Any]:
    (scale, x), t = primals, tangents[1]
    aval = jax.typeof(scale)
    is_zero = isinstance(t, SymbolicZero)
    return derived(scale, x), SymbolicZero(aval.to_tangent_aval()) if is_zero else _scale_tangent.bind(t, aval=aval)


def _batch_scale_tangent(_: Any, args: Sequence[Any], dims: Sequence[Any], *, aval: Any) -> tuple[Any, int]:
    return _scale_tangent.bind(*args, aval=aval.update(shape=(args[0].shape[dims[0]], *aval.shape))), 0


derived.defjvp(_derived_rule, symbolic_zeros=True)
_scale_tangent = define(
    "scale_tangent",
    no_derivative,
    lambda _, aval: aval,
    jvp=no_derivative,
    transpose=no_derivative,
    batch=_batch_scale_tangent,
)
