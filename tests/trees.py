"""Comparing pytrees to the bit, and their types."""

import jax
import numpy as np


def numbers(x):
    """The array of a leaf; of a PRNG key, its data."""
    return np.asarray(
        jax.random.key_data(x) if jax.dtypes.issubdtype(jax.numpy.result_type(x), jax.dtypes.prng_key) else x
    )


def bits(tree):
    """What two trees share only if their structures, dtypes, shapes and bits are the same."""
    return jax.tree.map(lambda x: (str(numbers(x).dtype), x.shape, numbers(x).tobytes()), tree)


def avals(tree):
    """Shapes, dtypes and weak types, in the tree's structure."""
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)
