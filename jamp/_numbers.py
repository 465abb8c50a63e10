"""NumPy's numbers as numbers of Python, which configurations hold."""

import dataclasses
from typing import Any

import numpy as np


def as_number(value: Any) -> Any:
    """The Python number that a scalar of NumPy, or an array of shape (), is. Any other value is returned unchanged."""
    is_scalar = isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0)
    return value.item() if is_scalar else value


def with_numbers(config: Any) -> None:
    """Replace NumPy's numbers in the fields of a frozen dataclass."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        new = type(value)(map(as_number, value)) if isinstance(value, (list, tuple)) else as_number(value)
        object.__setattr__(config, field.name, new)
