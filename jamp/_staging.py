"""Whether operations run at once or are recorded, once for many calls or anew for each call."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from jax.extend import core

_ANEW: ContextVar[bool] = ContextVar("anew", default=False)  # whether jamp traces a function for one call only


def is_differentiated() -> bool:
    """Whether operations are differentiated as they are called. In a `jit` of its own, a function is not."""
    return type(core.find_top_trace(())).__name__ in ("JVPTrace", "LinearizeTrace")


def is_recorded() -> bool:
    """Whether operations are recorded (`jit`, `scan`). `grad` and `vmap` outside `jit` run them at once."""
    trace: Any = core.find_top_trace(())
    while trace is not None and type(trace).__name__ != "DynamicJaxprTrace":
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


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
