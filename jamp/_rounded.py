"""`rounded`: the identity on a value that both passes read, in a form whose rounding XLA carries out.

By default XLA leaves out a cast to 16 bit that a cast back follows (`--xla_allow_excess_precision`). Then one reader of
a 16-bit value gets what was stored, and another one what was not rounded. It never leaves out a `reduce_precision`,
unless the value is stored in 16 bit anyway. XLA does so by design. `jax.checkpoint` rounds what it keeps for the same
reason (jax-ml/jax#22244).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jamp._cast import is_floating
from jamp._jaxprs.define import define
from jamp._jaxprs.manual_axes import is_partial

ROUNDED = "rounded"


def _by_jax(x: Any) -> Any:
    info = jnp.finfo(x.dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)


# Its tangents and cotangents are not rounded, as `lax.reduce_precision` rounds its own.
rounded: Any = define(
    ROUNDED,
    _by_jax,
    lambda x: x,
    jvp=lambda xs, tangents: (rounded.bind(*xs), tangents[0]),
    transpose=lambda ct, _: [ct],
)


def as_stored(x: Any) -> Any:
    """A value, rounded to its dtype for all its readers."""
    return rounded.bind(x) if may_be_wider(jax.typeof(x)) else x


def may_be_wider(aval: Any) -> bool:
    """Whether XLA may compute with more digits than a type has: with the digits of float32.

    JAX cannot round what is still to be summed over devices, and `reduce_precision` makes large float8 E4M3 NaN (448
    and 416, in jaxlib 0.10.0 to 0.12.0).
    """
    is_array = isinstance(aval, jax.core.ShapedArray)  # and no Ref
    return is_array and is_floating(aval) and aval.dtype.itemsize == 2 and not is_partial(aval)
