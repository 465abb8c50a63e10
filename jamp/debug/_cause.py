"""Explain why an operation returned inf or NaN, from its operands and by running it again in a wider dtype."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jamp._cast import is_floating, is_inexact
from jamp._jaxprs import interpret, ir
from jamp._jaxprs.ir import JaxprEqn
from jamp.debug._nonfinite_search import format_number, to_host
from jamp.debug._wider import try_wider


def explain(eqn: JaxprEqn, inputs: Sequence[Any], outputs: Sequence[Any]) -> str:
    """Return one line on the first inf or NaN in the outputs of an equation."""
    name = ir.name(eqn)
    if name == "shard_map":
        return _NOT_ENTERED
    output = next(x for x in outputs if is_inexact(x) and not np.isfinite(to_host(x)).all())
    values = to_host(output)
    clean = all(np.isfinite(to_host(x)).all() for x in inputs if is_inexact(x))
    index = tuple(np.argwhere(~np.isfinite(values) if clean else np.isnan(values))[0])
    is_nan = bool(np.isnan(values[index]))
    if name in _CHOOSE and clean:
        return _CONSTANT
    operands = _operands_at(index, np.shape(output), inputs)
    cause = _domain(eqn, operands) if operands else None
    if cause is None and clean and is_floating(output):
        cause = _overflow(eqn, inputs, outputs, next(i for i, x in enumerate(outputs) if x is output), index)
    if cause is not None:
        small = cause.startswith(("division by zero", "nan from 0/0", "log of 0"))
        is_half = operands and jnp.result_type(output) == jnp.float16
        return cause + (", and in float16 all below 3e-8 is 0" if small and is_half else "")
    if name in _WHOLE and is_nan:
        return _WHOLE[name]
    if is_nan:
        return f"nan from {'finite' if clean else 'inf'} inputs"
    return f"{_kind(name)}overflow: beyond what {jnp.result_type(output)} holds"


def _operands_at(index: tuple[Any, ...], shape: tuple[int, ...], inputs: Sequence[Any]) -> list[float] | None:
    """Return the real operands of an elementwise operation at an index."""
    if not inputs or not all(is_floating(x) or jnp.issubdtype(x.dtype, jnp.integer) for x in inputs):
        return None
    try:
        return [float(np.broadcast_to(to_host(x), shape)[index]) for x in inputs]
    except ValueError:  # It is not an elementwise operation.
        return None


def _domain(eqn: JaxprEqn, operands: list[float]) -> str | None:
    """Return the domain error of an elementwise operation at these operands, in any dtype, or None."""
    name = ir.name(eqn)
    x, y = (*operands, 0.0)[:2]
    if name == "integer_pow":
        y = ir.exponent(eqn)
    texts = (text for names, condition, text in _DOMAINS if name in names and condition(x, y))
    return next((text.format(x=format_number(x), y=format_number(y), name=name) for text in texts), None)


# Primitives, a condition on their operands x and y, and the message. The first condition that holds is reported.
_DOMAINS: list[tuple[set[str], Callable[[float, float], bool], str]] = [
    ({"log", "log2"}, lambda x, y: x < 0, "log of a negative number: log({x})"),
    ({"log", "log2"}, lambda x, y: x == 0, "log of 0"),
    ({"log1p"}, lambda x, y: x < -1, "log of a negative number: log1p({x})"),
    ({"log1p"}, lambda x, y: x == -1, "log of 0: log1p(-1)"),
    ({"sqrt"}, lambda x, y: x < 0, "sqrt of a negative number: sqrt({x})"),
    ({"rsqrt"}, lambda x, y: x < 0, "sqrt of a negative number: 1/sqrt({x})"),
    ({"rsqrt"}, lambda x, y: x == 0, "division by zero: 1/sqrt(0)"),
    ({"div"}, lambda x, y: x == 0 and y == 0, "nan from 0/0"),
    ({"div"}, lambda x, y: y == 0, "division by zero: {x}/0"),
    ({"div"}, lambda x, y: np.isinf(x) and np.isinf(y), "nan from inf/inf"),
    ({"rem"}, lambda x, y: y == 0, "division by zero: the remainder of {x}/0"),
    ({"pow"}, lambda x, y: x < 0 and y != round(y), "a negative number to a fractional power: ({x})**{y}"),
    ({"pow", "integer_pow"}, lambda x, y: x == 0 and y < 0, "division by zero: 0**{y}"),
    ({"add", "add_any", "sub"}, lambda x, y: np.isinf(x) and np.isinf(y), "nan from inf - inf"),
    ({"mul"}, lambda x, y: np.isinf(x) or np.isinf(y), "nan from 0 * inf"),
    ({"sin", "cos", "tan"}, lambda x, y: np.isinf(x), "{name} of inf"),
    ({"asin", "acos"}, lambda x, y: abs(x) > 1, "{name} of a number outside [-1, 1]: {x}"),
    ({"atanh", "erf_inv"}, lambda x, y: abs(x) >= 1, "{name} of a number that is not between -1 and 1: {x}"),
    ({"acosh"}, lambda x, y: x < 1, "acosh of a number below 1: {x}"),
    ({"lgamma", "digamma"}, lambda x, y: x <= 0, "{name} has a pole at {x}"),
]
_NOT_ENTERED = "made inside it, where the search does not look"
# What `explain` gets has no NaN where a constant has one.
_CONSTANT = "nan is a constant in the code"
# They return elements of their operands.
_CHOOSE = ("concatenate", "dynamic_update_slice", "pad", "select_n")
_WHOLE = {
    "gather": "an index is out of bounds, for which gather gives nan",
    "cholesky": "cholesky of a matrix that is not positive definite",
    "triangular_solve": "the matrix is singular",
    "custom_linear_solve": "the matrix is singular",
}


def _overflow(
    eqn: JaxprEqn, inputs: Sequence[Any], outputs: Sequence[Any], position: int, index: tuple[Any, ...]
) -> str | None:
    """Describe an overflow by the result that a wider dtype gives, or return None."""
    dtype = jnp.result_type(outputs[position])
    end = float(jnp.finfo(dtype).max)
    # bfloat16 has the range of float32, so it takes float64.
    wide_dtype = np.dtype(np.float32 if end < 1e30 else np.float64)
    wide = None if jnp.finfo(dtype).bits == 64 else try_wider(eqn, inputs, wide_dtype)
    if wide is None:
        return None
    value = float(to_host(wide[position])[index])
    exponential = _kind(ir.name(eqn))
    if np.isinf(value):
        return f"{exponential}overflow in {dtype}, and in {wide_dtype}"
    if not np.isfinite(value):
        return None
    on_the_way = ""
    if abs(value) <= end:
        on_the_way, again = " on the way", interpret.bind(eqn, inputs, ir.avals(eqn.outvars))[position]
        if np.isfinite(to_host(again)[index]):
            return _CONSTANT
    ends = f"{dtype} ends at {format_number(end) if end > 1e6 else f'{end:g}'}"
    return f"{exponential}overflow in {dtype}{on_the_way}: value would be {format_number(value, 1)}, {ends}"


def _kind(name: str) -> str:
    return "exp " if name in ("exp", "exp2", "expm1", "sinh", "cosh") else ""
