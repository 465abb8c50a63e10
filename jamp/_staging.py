"""Whether operations run at once or are recorded, once for many calls or anew for each call."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax
from jax import lax

_ANEW: ContextVar[bool] = ContextVar("anew", default=False)  # whether jamp traces a function for one call only


def is_kept() -> bool:
    """Whether operations are recorded (`jit`, `scan`) for more than one call, as far as it can be known.

    `grad` and `vmap` outside `jit` run them at once. To ask leaves an operation without an operand in the trace.
    """
    return not _ANEW.get() and isinstance(lax.iota("int32", 1), jax.core.Tracer)


@contextlib.contextmanager
def traced_anew(flag: bool) -> Iterator[None]:
    """Say whether jamp traces the function that is called inside for one call only, as it does outside `jit`."""
    token = _ANEW.set(flag or _ANEW.get())
    try:
        yield
    finally:
        _ANEW.reset(token)
