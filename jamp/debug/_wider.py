"""Evaluate an equation at the dtypes that it was traced with, or in a wider one."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jamp._cast import is_floating
from jamp._jaxprs import build, constructs, interpret, ir
from jamp._jaxprs.ir import JaxprEqn


def bind_as_traced(eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """Return the results of an equation. Floating operands are cast to the dtypes that it was traced with."""
    given = [
        x.astype(aval.dtype) if is_floating(aval) else x for x, aval in zip(args, ir.avals(eqn.invars), strict=True)
    ]
    return interpret.bind(eqn, given, ir.avals(eqn.outvars))


def try_wider(eqn: JaxprEqn, args: Sequence[Any], dtype: np.dtype[Any]) -> list[Any] | None:
    """Return the results in a dtype, also float64 without x64. None if the operation does not exist in it."""
    if constructs.has_body(eqn):  # A body runs only at its own dtypes.
        return None
    try:
        with jax.enable_x64(True):
            return jax.block_until_ready(bind_wider(eqn, args, dtype))
    except (TypeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
        return None


def bind_wider(eqn: JaxprEqn, args: Sequence[Any], dtype: np.dtype[Any]) -> list[Any]:
    """Return the results of an equation, in `dtype` where they or its operands have fewer bits.

    Products are not rounded.
    """
    before, after = ir.avals(eqn.invars), ir.avals(eqn.outvars)
    wider = build.widened(eqn, {x.dtype for x in (*before, *after) if is_narrower(x, dtype)}, dtype)
    given = [x.astype(dtype) if is_narrower(x, dtype) else x for x in args]
    types = [x.update(dtype=dtype, weak_type=False) if is_narrower(x, dtype) else x for x in after]
    return interpret.bind(wider, given, types)


def is_narrower(x: Any, dtype: np.dtype[Any]) -> bool:
    """Whether an array, or its type, is floating and has fewer bits than a dtype."""
    return is_floating(x) and x.dtype.itemsize < dtype.itemsize
