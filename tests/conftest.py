"""Strict everywhere: no implicit dtype promotion, warnings are errors (pyproject.toml), compiled functions shared."""

import jax
import pytest

# Optax's own code promotes dtypes, so strictness is scoped to what calls it on jamp's behalf: `strict`.


@pytest.fixture
def strict():
    """Fail on any implicit dtype promotion; for tests that do not go through an optimizer that promotes."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def x64():
    """64-bit dtypes for one test."""
    with jax.enable_x64(True):
        yield
