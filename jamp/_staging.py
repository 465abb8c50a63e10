"""Whether operations run at once or are recorded, once for many calls or anew for each call."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax
import jax.numpy as jnp

_ANEW: ContextVar[bool] = ContextVar("anew", default=False)  # whether jamp traces a function for one call only


def is_recorded() -> bool:
    """Whether operations are recorded (`jit`, `scan`). `grad` and `vmap` outside `jit` run them at once.

    Where they are recorded, JAX also records one whose operands are all known.
    """
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def is_trace_reused() -> bool:
    """Whether operations are recorded for more than one call. jamp's own traces outside `jit` are for one call."""
    return is_recorded() and not _ANEW.get()


@contextlib.contextmanager
def traced_anew(flag: bool) -> Iterator[None]:
    """Say whether jamp traces the function that is called inside for one call only, as it does outside `jit`."""
    token = _ANEW.set(flag or _ANEW.get())
    try:
        yield
    finally:
        _ANEW.reset(token)
