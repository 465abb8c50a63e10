"""Evaluate an equation in a wider dtype than it was traced with."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jamp import _evaluate, _jaxpr
from jamp._cast import is_floating
from jamp._jaxpr import JaxprEqn


def bind_wider(eqn: JaxprEqn, args: Sequence[Any], dtype: np.dtype[Any]) -> list[Any]:
    """The results of an equation, in `dtype` where they or its operands have fewer bits. Products are not rounded."""
    before, after = _jaxpr.avals(eqn.invars), _jaxpr.avals(eqn.outvars)
    wider = _evaluate.widened(eqn, {x.dtype for x in (*before, *after) if is_narrower(x, dtype)}, dtype)
    given = [x.astype(dtype) if is_narrower(x, dtype) else x for x in args]
    types = [x.update(dtype=dtype, weak_type=False) if is_narrower(x, dtype) else x for x in after]
    return _evaluate.bind(wider, given, types)


def is_narrower(x: Any, dtype: np.dtype[Any]) -> bool:
    """Whether an array, or its type, is floating and has fewer bits than a dtype."""
    return is_floating(x) and x.dtype.itemsize < dtype.itemsize
