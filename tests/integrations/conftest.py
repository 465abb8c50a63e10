"""Flax, Equinox and most optimizers of Optax promote dtypes implicitly."""

import pytest


def pytest_itemcollected(item):
    item.add_marker(pytest.mark.promotes("Flax, Equinox and Optax"))
