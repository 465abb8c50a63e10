"""Where an operation makes inf or NaN, and where its operands explain it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jamp._cast import is_inexact
from jamp._jaxprs import ir
from jamp._jaxprs.ir import JaxprEqn
from jamp._jaxprs.primitives import ARITHMETIC, MOVING, PRODUCTS
from jamp.debug._evaluate import bind, is_on_cpu

# A sum of products of its operands. If it overflows, it does so without the inf in them.
_SUMS = PRODUCTS | {"cumsum", "psum", "reduce_sum", "reduce_window_sum", "scatter-add"}
_ON_ELEMENTS = ("convert_element_type", "reduce_precision", "rounded", "select_n")
_SMALL = 2.0**-5  # In float16 the sum of millions of its squares is finite, and none of them is 0.


def all_finite(x: Any) -> bool:
    """Whether an array has no inf and no NaN. On a CPU nothing is compiled for it."""
    if not is_inexact(x):
        return True
    if isinstance(x, Array) and not is_on_cpu(x):
        return bool(_all_finite(x))
    return bool(np.isfinite(np.asarray(x)).all())


@jax.jit
def _all_finite(x: Array) -> Array:
    return jnp.all(jnp.isfinite(x))


def is_bad(x: Any) -> Any:
    """Test for inf and NaN."""
    return ~np.isfinite(x)


def where(test: Callable[[Any], Any], x: Any) -> Any:
    """Test each element of an array, bool[...] on the host. It is false if the array is not floating."""
    return test(np.asarray(x)) if is_inexact(x) else np.zeros(np.shape(x), bool)


def where_new(x: Any, reference: Any) -> Any:
    """Test where an array has an inf or NaN that another one does not have, bool[...] on the host."""
    tests = is_bad, np.isnan
    return functools.reduce(np.logical_or, [where(test, x) & ~where(test, reference) for test in tests])


def filled(x: Any, mask: Any) -> Any:
    """Return an array with 0 in some places."""
    return jnp.where(mask, jnp.zeros_like(x), x) if mask.any() else x


class Made(NamedTuple):
    """The inf and NaN that an operation makes.

    Attributes:
      masks: Where they are, bool[...] for each result.
      explained: Those that `operands` show how they are made.
      operands: The operands without the inf or NaN that explains others.
    """

    masks: list[Any]
    explained: list[Any]
    operands: list[Any]


def find_made(eqn: JaxprEqn, operands: Sequence[Any], results: Sequence[Any]) -> Made | None:
    """Return the inf and NaN in the results that the operands do not explain, or None if there are none.

    A NaN is explained by a NaN, and an inf by an inf or NaN: in the same place if the operation is elementwise.
    """
    if all(map(all_finite, results)):
        return None
    if all(map(all_finite, operands)):
        masks = [where(is_bad, x) for x in results]
        return Made(masks, masks, list(operands))
    found = []
    for test in (is_bad, np.isnan):  # an overflow first, then a NaN that is made of inf
        given = [filled(x, where(test, x)) for x in operands]
        if ir.name(eqn) in _SUMS:
            masks = [where(test, x) for x in bind(eqn, given)]
        else:
            explained = _reached(eqn, [where(test, x) for x in operands], operands, results)
            masks = [where(test, x) & ~y for x, y in zip(results, explained, strict=True)]
        if any(mask.any() for mask in masks):
            found.append(Made(masks, masks, given))
    if not found:
        return None
    masks = [functools.reduce(np.logical_or, both) for both in zip(*(x.masks for x in found), strict=True)]
    return found[0]._replace(masks=masks)


def find_explained(eqn: JaxprEqn, operands: Sequence[Any], reference: Sequence[Any], results: Sequence[Any]) -> Any:
    """Return for each result where an inf or NaN of the operands, which other operands do not have, explains one."""
    return _reached(eqn, list(map(where_new, operands, reference)), operands, results)


def find_changed(eqn: JaxprEqn, operands: Sequence[Any], reference: Sequence[Any], results: Sequence[Any]) -> Any:
    """Return for each result where it reads elements that differ from those of other operands."""
    masks = list(map(_differs, operands, reference))
    return [_on_elements(masks, x) if _is_elementwise(eqn) else any(map(np.any, masks)) for x in results]


def _differs(x: Any, reference: Any) -> Any:
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return np.False_
    return (np.asarray(x) != np.asarray(reference)) & ~(where(np.isnan, x) & where(np.isnan, reference))


def _reached(eqn: JaxprEqn, masks: Sequence[Any], operands: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Return for each result where the elements in `masks` reach, bool[...]. They are inf or NaN."""
    if not any(map(np.any, masks)):
        return [np.zeros(np.shape(x), bool) for x in results]
    if _is_elementwise(eqn):
        return [_on_elements(masks, x) for x in results]
    if ir.name(eqn) not in _SUMS | MOVING:
        return [np.ones(np.shape(x), bool) for x in results]
    small = lambda x: jnp.sign(x) * jnp.asarray(_SMALL, x.dtype)
    alone = [jnp.where(mask, x, small(x)) if is_inexact(x) else x for x, mask in zip(operands, masks, strict=True)]
    none = [jnp.zeros_like(x) if is_inexact(x) else x for x in operands]  # A gather makes NaN out of bounds.
    return [where(is_bad, x) & ~where(is_bad, y) for x, y in zip(bind(eqn, alone), bind(eqn, none), strict=True)]


def _on_elements(masks: Sequence[Any], result: Any) -> Any:
    return functools.reduce(np.logical_or, masks, np.zeros(np.shape(result), bool))


def _is_elementwise(eqn: JaxprEqn) -> bool:
    """Whether an element of the result reads the same element of each operand, which may have one of a row for all."""
    name, shapes = ir.name(eqn), [x.shape for x in ir.avals(eqn.invars)]
    if name in _ON_ELEMENTS:
        return True
    if name not in ARITHMETIC or name.startswith(("reduce", "arg")):
        return False
    result = ir.avals(eqn.outvars)[0].shape
    return all(
        not x or (len(x) == len(result) and all(n in (1, m) for n, m in zip(x, result, strict=True))) for x in shapes
    )
