"""Comparing pytrees to the bit, and their types."""

import jax
import jax.numpy as jnp
import numpy as np


def is_key(x):
    """Whether a leaf is an array of typed PRNG keys."""
    return jnp.issubdtype(getattr(x, "dtype", np.float64), jax.dtypes.prng_key)


def numbers(x):
    """The array of a leaf. Of a PRNG key, its data."""
    return np.asarray(jax.random.key_data(x) if is_key(x) else x)


def bits(tree):
    """Equal for two trees only if their structures, dtypes, shapes and bits are."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(str(numbers(x).dtype), np.shape(x), numbers(x).tobytes()) for x in leaves]


def avals(tree):
    """Equal for two trees only if their structures, shapes, dtypes and weak types are."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(x.shape, x.dtype, x.weak_type) for x in leaves]


def assert_close(tree, other, rtol=1e-5, atol=None):
    """Assert the same structure and dtypes, and values within a tolerance."""
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert jnp.result_type(x) == jnp.result_type(y)
        np.testing.assert_allclose(numbers(x), numbers(y), rtol=rtol, atol=rtol if atol is None else atol)


def assert_equal(tree, other):
    """Assert the same structure, dtypes and bits."""
    assert bits(tree) == bits(other)


def assert_same_quotients(x, y):
    """Assert equal bits on a CPU. A GPU's division in float32 may be wrong by two units in the last place."""
    if jax.default_backend() == "cpu":
        assert_equal(x, y)
    else:
        np.testing.assert_array_max_ulp(x, y, maxulp=2)
