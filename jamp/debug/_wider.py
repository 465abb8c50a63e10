"""Evaluate an equation in a wider dtype than it was traced with."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jamp._cast import is_floating
from jamp._jaxprs import build, interpret, ir
from jamp._jaxprs.ir import JaxprEqn


def bind_wider(eqn: JaxprEqn, args: Sequence[Any], dtype: np.dtype[Any]) -> list[Any]:
    """The results of an equation, in `dtype` where they or its operands have fewer bits. Products are not rounded."""
    before, after = ir.avals(eqn.invars), ir.avals(eqn.outvars)
    wider = build.widened(eqn, {x.dtype for x in (*before, *after) if is_narrower(x, dtype)}, dtype)
    given = [x.astype(dtype) if is_narrower(x, dtype) else x for x in args]
    types = [x.update(dtype=dtype, weak_type=False) if is_narrower(x, dtype) else x for x in after]
    return interpret.bind(wider, given, types)


def is_narrower(x: Any, dtype: np.dtype[Any]) -> bool:
    """Whether an array, or its type, is floating and has fewer bits than a dtype."""
    return is_floating(x) and x.dtype.itemsize < dtype.itemsize
