"""Whether operations run at once or are recorded, once for many calls or anew for each call."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax
from jax import lax

_ANEW: ContextVar[bool] = ContextVar("anew", default=False)  # whether jamp traces a function for one call only


def is_recorded() -> bool:
    """Whether operations are recorded (`jit`, `scan`). `grad` and `vmap` outside `jit` run them at once."""
    return isinstance(lax.iota("int32", 1), jax.core.Tracer)  # no operand: nothing is transferred to the device


def is_kept() -> bool:
    """Whether operations are recorded for more than one call, as far as it can be known: not by jamp outside `jit`."""
    return is_recorded() and not _ANEW.get()


@contextlib.contextmanager
def anew(flag: bool) -> Iterator[None]:
    """Say whether the functions called inside are traced for one call only."""
    token = _ANEW.set(flag)
    try:
        yield
    finally:
        _ANEW.reset(token)
