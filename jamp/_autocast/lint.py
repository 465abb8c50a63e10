"""Lints: values with the digits of 16 bit that need more, by what the jaxpr does with them.

They need no run of the function and no bound for an error: large angles, router logits, and sums of many terms.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jamp._autocast.decisions import Decisions
from jamp._autocast.rules import ACCUMULATE, ANY, FLOAT32
from jamp._cast import is_floating
from jamp._jaxprs import dataflow, ir
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn
from jamp._jaxprs.primitives import GATHERS, IDENTITIES, MOVES, PRODUCTS, TRANSFERS
from jamp._jaxprs.source import is_transposed, scope, user_line
from jamp._jaxprs.walk import walk
from jamp._products import product as _product
from jamp._products.product import name_of

_LARGE_ANGLE, _MANY = 100.0, 4096
_READ = 2**20  # elements of an array that is read for its range
_MOVES = MOVES | TRANSFERS | GATHERS | IDENTITIES | {"broadcast_in_dim", "gather", "tile"}
_SUMS = {"reduce_sum": "axes", "cumsum": "axis"}


class Lint(NamedTuple):
    """A place where 16 bit is not enough.

    Attributes:
      what: What is wrong.
      source, scope: Its line, and the name scopes around it.
      rules: Rules that may raise it, with their categories: the first, or if it is not enough all of them.
    """

    what: str
    source: str
    scope: str
    rules: tuple[tuple[str, str], ...]


class _Value(NamedTuple):
    """What is known of a value.

    Attributes:
      low: The 16-bit dtype whose digits it has, also after arithmetic in float32, or "".
      moved: The same, but only through moves and casts.
      product: The key of a rule for the product that rounded it, or "".
      least, most: The range of its elements, if it follows from constants.
    """

    low: str = ""
    moved: str = ""
    product: str = ""
    least: float = -math.inf
    most: float = math.inf


def lints(closed: ClosedJaxpr, decisions: Decisions, args: Sequence[Any]) -> Iterator[Lint]:
    """Yield the lints of a jaxpr that `cast` returned, whose inputs are `args`, or types in their place."""
    analysis = dataflow.Forward[_Value](_computed, _join, _constant)
    is_entered = lambda eqn: _product.of(eqn) is None and decisions.of(eqn) is None
    given = [_constant(x) if jnp.issubdtype(x.dtype, np.integer) else _Value() for x in args]
    for eqn, facts, context in walk(closed, is_entered, analysis, given):
        # The gradient of a bias in 16 bit is a sum over all tokens, too, which XLA adds in float32.
        is_back = is_transposed(eqn) or context.is_backward
        check = None if is_back and name_of(eqn) in _SUMS else _CHECKS.get(name_of(eqn))
        operands = analysis.read(facts, eqn.invars) if check else []
        what = check(eqn, operands) if check else ""
        if what:
            place = scope(eqn, context.scope)
            yield Lint(what, user_line(eqn) or context.line, place, _rules(name_of(eqn), operands[0], place))


def _rules(name: str, operand: _Value, place: str) -> tuple[tuple[str, str], ...]:
    own = f"{name}[{place}]" if place else name, FLOAT32
    if operand.product:
        return (operand.product, ACCUMULATE), own
    return (own,) if name in _SUMS or not place else ((f"{ANY}[{place}]", FLOAT32),)


def _angles(eqn: JaxprEqn, operands: list[_Value]) -> str:
    (x,) = operands
    largest = max(abs(x.least), abs(x.most))
    if not (x.low and math.isfinite(largest) and largest > _LARGE_ANGLE):
        return ""
    error = largest * float(jnp.finfo(x.low).eps) / 2
    return f"{name_of(eqn)} of angles up to {largest:.0f} with the digits of {x.low}, which is off by up to {error:.2g}"


def _choices(eqn: JaxprEqn, operands: list[_Value]) -> str:
    low = operands[0].moved
    return f"{name_of(eqn)} chooses by values with the digits of {low}, as of router logits" if low else ""


def _sums(eqn: JaxprEqn, operands: list[_Value]) -> str:
    (x,), (result,), axes = ir.avals(eqn.invars), ir.avals(eqn.outvars), ir.params(eqn)[_SUMS[name_of(eqn)]]
    known = [n for i in np.atleast_1d(np.asarray(axes, int)) if isinstance(n := x.shape[int(i)], int)]
    terms = math.prod(known)
    if terms <= _MANY or not is_floating(result) or result.dtype.itemsize != 2:
        return ""
    least = ", which overflows if their mean is 1 or more" if result.dtype == np.float16 and terms >= 2**16 else ""
    return f"{name_of(eqn)} adds {terms} terms in {result.dtype}{least}"


_CHECKS: dict[str, Callable[[JaxprEqn, list[_Value]], str]] = {
    **dict.fromkeys(("sin", "cos"), _angles),
    **dict.fromkeys(("top_k", "approx_top_k"), _choices),
    **dict.fromkeys(_SUMS, _sums),
}


def _constant(x: Any) -> _Value:
    """The range of a constant array of real numbers that this process can read."""
    is_read = isinstance(x, jax.Array | np.ndarray | np.generic | int | float) and not isinstance(x, jax.core.Tracer)
    if not is_read or not np.size(x) or np.size(x) > _READ or not getattr(x, "is_fully_addressable", True):
        return _Value()
    is_real = jnp.issubdtype(jnp.result_type(x), np.floating) or jnp.issubdtype(jnp.result_type(x), np.integer)
    if not is_real:
        return _Value()
    values = np.asarray(x).astype(np.float64)
    return _Value()._replace(least=float(values.min()), most=float(values.max()))


def _join(x: _Value, y: _Value) -> _Value:
    """What is known of a value from one of two places."""
    is_known = (x.least, x.most) == (y.least, y.most)
    least, most = (x.least, x.most) if is_known else (-math.inf, math.inf)
    same = lambda a, b: a if a == b else ""
    return _Value(same(x.low, y.low), same(x.moved, y.moved), same(x.product, y.product), least, most)


def _computed(eqn: JaxprEqn, operands: list[_Value]) -> _Value:
    """What is known of the result of an equation."""
    name, aval = name_of(eqn), ir.avals(eqn.outvars)[0] if eqn.outvars else None
    if aval is None or not hasattr(aval, "dtype") or not (is_floating(aval) or jnp.issubdtype(aval.dtype, np.integer)):
        return _Value()
    least, most = _range(name, eqn, operands)
    if not is_floating(aval):
        return _Value(least=least, most=most)
    own = str(aval.dtype) if aval.dtype.itemsize == 2 else ""
    before = ir.avals(eqn.invars[:1])
    is_of_integers = name == "iota" or (name == "convert_element_type" and jnp.issubdtype(before[0].dtype, np.integer))
    if own and is_of_integers and max(abs(least), abs(most)) <= 2.0 ** (jnp.finfo(aval.dtype).nmant + 1):
        own = ""  # It is exact.
    low = own or next((x.low for x in operands if x.low), "")
    source = operands[0] if name in _MOVES and operands else _Value()
    own_product = f"{name}[{place}]" if (place := scope(eqn)) else name
    product = own_product if own and name in PRODUCTS else source.product
    return _Value(low, own or source.moved, product, least, most)


def _range(name: str, eqn: JaxprEqn, operands: list[_Value]) -> tuple[float, float]:
    """The range of the result of an equation, in exact arithmetic."""
    unknown = -math.inf, math.inf
    params, ends = ir.params(eqn), [(x.least, x.most) for x in operands]
    if name == "iota":
        n = params["shape"][params["dimension"]]
        return (0.0, float(max(n - 1, 0))) if isinstance(n, int) else unknown
    if not all(math.isfinite(x) for pair in ends for x in pair):
        return unknown
    found: Sequence[float] = ()
    with np.errstate(all="ignore"):
        if name in _MOVES and ends:
            found = ends[0] if name != "concatenate" else [x for pair in ends for x in pair]
        elif name in _BINARY and (name not in ("div", "pow") or _is_positive(ends[name == "div"])):
            found = [float(_BINARY[name](np.float64(x), np.float64(y))) for x in ends[0] for y in ends[1]]
        elif name in _MONOTONIC:
            found = [float(_MONOTONIC[name](np.float64(x))) for x in ends[0]]
        elif name in ("integer_pow", "square") and _is_positive(ends[0]):
            power = 2 if name == "square" else ir.exponent(eqn)
            found = [float(np.float64(x) ** power) for x in ends[0]]
        elif name in ("sin", "cos"):
            found = -1.0, 1.0
        elif name in PRODUCTS:
            terms = ir.summed_terms(_product.as_traced(eqn))
            found = [x * y * terms for x in ends[0] for y in ends[1]] if isinstance(terms, int) else ()
    return (min(found), max(found)) if found and not any(map(math.isnan, found)) else unknown


def _is_positive(ends: tuple[float, float]) -> bool:
    return ends[0] > 0


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "pow": np.power,
}
_MONOTONIC: dict[str, Callable[[Any], Any]] = {
    "neg": np.negative,
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.round,
    "reduce_max": lambda x: x,
    "reduce_min": lambda x: x,
}
