"""The pairs of dtypes of autocast: float32 and 16 bit, float64 and float32."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np


def wide(dtype):
    """The dtype of the operands that products cast to the compute dtype."""
    return np.dtype(np.float64 if dtype == jnp.float32 else np.float32)


@contextlib.contextmanager
def of_pair(dtype):
    """Enables float64 if the pair needs it. Gives a function that makes an array of the wide dtype.

    Float64 numbers have digits that float32 does not hold.
    """
    with jax.enable_x64(wide(dtype) == np.float64):
        digits = 1 + 1e-9 * np.pi if wide(dtype) == np.float64 else 1
        yield lambda x: jnp.asarray(np.asarray(x, wide(dtype)) * wide(dtype).type(digits))
