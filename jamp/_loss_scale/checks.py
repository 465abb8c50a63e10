"""Checks of the Python numbers in a configuration."""

import math
from typing import Any

import numpy as np

INT32_MAX = np.iinfo(np.int32).max
TINY = float(np.finfo(np.float32).tiny)  # the smallest normal float32
HUGE = float(np.finfo(np.float32).max)


def check_range(init_scale: float, min_scale: float, max_scale: float) -> None:
    """Raise ValueError unless min_scale <= init_scale <= max_scale and all are usable as float32."""
    check_scale("min_scale", min_scale)
    check_scale("init_scale", init_scale)
    if max_scale != math.inf:
        check_scale("max_scale", max_scale)
    if min_scale > max_scale:
        raise ValueError(f"min_scale must not exceed max_scale, got {min_scale=} and {max_scale=}.")
    if not min_scale <= init_scale <= max_scale:
        raise ValueError(f"init_scale must lie between the others, got {init_scale=}, {min_scale=}, {max_scale=}.")


def check_number(name: str, value: Any, *, above: float, below: float = math.inf, hint: str) -> None:
    """Raise ValueError unless `value` is a Python number that is a normal float32 between `above` and `below`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Compared in float32, where 1 - 1e-9 is 1. A backoff by that factor would change nothing.
    if not (is_number and TINY <= value <= HUGE and above < np.float32(value) < below):
        bounds = f"above {above}" if math.isinf(below) else f"between {above} and {below}"
        raise ValueError(f"{name} must be a normal float32 {bounds}, {hint}, got {name}={value!r}.")


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raise ValueError unless `value` is a Python int of at least `least` that an int32 holds."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= INT32_MAX:
        raise ValueError(f"{name} must be an int from {least} to {INT32_MAX}, got {name}={value!r}.")


def check_scale(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a Python number that is a normal float32 above 0."""
    check_number(name, value, above=0, hint="such as 2.0**16")
