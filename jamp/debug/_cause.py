"""Explain why an operation returned inf or NaN, from its operands and by running it again in a wider dtype."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jamp._cast import is_floating, is_inexact
from jamp._jaxprs import interpret, ir
from jamp._jaxprs.ir import JaxprEqn
from jamp.debug._nonfinite_search import Cause, format_number, to_host
from jamp.debug._wider import try_wider


def explain(eqn: JaxprEqn, inputs: Sequence[Any], outputs: Sequence[Any], of_squares: bool = False) -> Cause:
    """Explain the first inf or NaN in the outputs of an equation.

    `of_squares` is whether the operand of a root is a difference of squares.
    """
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
    cause = _domain(eqn, operands, jnp.result_type(output)) if operands else None
    if cause is None and clean and is_floating(output):
        cause = _overflow(eqn, inputs, outputs, next(i for i, x in enumerate(outputs) if x is output), index)
    if cause is not None:
        return Cause(f"{cause.text}, a difference of squares", _VARIANCE) if of_squares else cause
    dtype = jnp.result_type(output)
    if is_nan and name in _SINGULAR:
        return Cause(_SINGULAR[name], f"add a small multiple of the identity{_SMALL.get(str(dtype), '')}")
    if is_nan:
        return _WHOLE.get(name) or Cause(f"nan from {'finite' if clean else 'inf'} inputs", _FIND_INF)
    if name in _EXPONENTIALS:
        return Cause(f"exp overflow: beyond what {dtype} holds", _EXPONENT)
    is_widest = jnp.finfo(dtype).dtype == np.float64
    return Cause(f"overflow: beyond what {dtype} holds", _LOOK_FOR_LARGE if is_widest else _BEYOND_FLOAT32)


def _operands_at(index: tuple[Any, ...], shape: tuple[int, ...], inputs: Sequence[Any]) -> list[float] | None:
    """Return the real operands of an elementwise operation at an index."""
    if not inputs or not all(is_floating(x) or jnp.issubdtype(x.dtype, jnp.integer) for x in inputs):
        return None
    try:
        return [float(np.broadcast_to(to_host(x), shape)[index]) for x in inputs]
    except ValueError:  # It is not an elementwise operation.
        return None


def _domain(eqn: JaxprEqn, operands: list[float], dtype: Any) -> Cause | None:
    """Return the domain error of an elementwise operation at these operands, or None."""
    name = ir.name(eqn)
    x, y = (*operands, 0.0)[:2]
    if name == "integer_pow":
        y = ir.exponent(eqn)
    error = next((error for error in _DOMAINS if name in error.names and error.includes(x, y)), None)
    if error is None:
        return None
    text = error.text.format(x=format_number(x), y=format_number(y), name=name)
    is_float16 = dtype == jnp.float16
    cure = error.cure.replace(_ADD_EPSILON, _ADD_LARGE_EPSILON) if is_float16 else error.cure
    return Cause(text + ", and in float16 all below 3e-8 is 0" * (error.at_zero and is_float16), cure)


_CLIP_POSITIVE = "clip it, or find out why it is not positive"
_CLIP = "clip the operand, with a margin that the dtype can hold"
_LOG_OF_0 = "add an epsilon that the dtype can hold, or compute the logarithm itself: jax.nn.log_softmax of logits"
_ADD_EPSILON = "add an epsilon; under a gradient, also jnp.where inside the operation"
_ADD_LARGE_EPSILON = _ADD_EPSILON.replace("epsilon", "epsilon (in float16, 1e-8 is 0)")
_EMPTY = "add an epsilon, or look for a mean over an empty array or mask"
_FIND_INF = "find the inf among its inputs, and mask with a large finite number in its place"
_INF_MINUS_INF = "find what made the inf, or mask with a large finite number a row that is all -inf in a softmax"
_CLIP_RESULT = "find the operation that made the inf, and clip its result"
_VARIANCE = "if it is a variance, use jnp.var: E[x**2] - E[x]**2 cancels, and may be negative"


class _Domain(NamedTuple):
    """A domain error.

    Attributes:
      names: The primitives that have it.
      includes: The condition on their operands x and y.
      text, cure: Why the result is inf or NaN, and what to do about it.
      at_zero: Whether an operand is 0, which may be an underflow.
    """

    names: set[str]
    includes: Callable[[float, float], bool]
    text: str
    cure: str
    at_zero: bool = False


# The first one that holds is reported.
_DOMAINS = [
    _Domain({"log", "log2"}, lambda x, y: x < 0, "log of a negative number: log({x})", _CLIP_POSITIVE),
    _Domain({"log", "log2"}, lambda x, y: x == 0, "log of 0", _LOG_OF_0, at_zero=True),
    _Domain({"log1p"}, lambda x, y: x < -1, "log of a negative number: log1p({x})", _CLIP_POSITIVE),
    _Domain({"log1p"}, lambda x, y: x == -1, "log of 0: log1p(-1)", _LOG_OF_0, at_zero=True),
    _Domain({"sqrt"}, lambda x, y: x < 0, "sqrt of a negative number: sqrt({x})", _CLIP_POSITIVE),
    _Domain({"rsqrt"}, lambda x, y: x < 0, "sqrt of a negative number: 1/sqrt({x})", _CLIP_POSITIVE),
    _Domain({"rsqrt"}, lambda x, y: x == 0, "division by zero: 1/sqrt(0)", _ADD_EPSILON, at_zero=True),
    _Domain({"div"}, lambda x, y: x == 0 and y == 0, "nan from 0/0", _EMPTY, at_zero=True),
    _Domain({"div"}, lambda x, y: y == 0, "division by zero: {x}/0", _ADD_EPSILON, at_zero=True),
    _Domain({"div"}, lambda x, y: np.isinf(x) and np.isinf(y), "nan from inf/inf", _FIND_INF),
    _Domain({"rem"}, lambda x, y: y == 0, "division by zero: the remainder of {x}/0", _ADD_EPSILON, at_zero=True),
    _Domain(
        {"pow"}, lambda x, y: x < 0 and y != round(y), "a negative number to a fractional power: ({x})**{y}", _CLIP
    ),
    _Domain(
        {"pow", "integer_pow"}, lambda x, y: x == 0 and y < 0, "division by zero: 0**{y}", _ADD_EPSILON, at_zero=True
    ),
    _Domain({"add", "add_any", "sub"}, lambda x, y: np.isinf(x) and np.isinf(y), "nan from inf - inf", _INF_MINUS_INF),
    _Domain({"mul"}, lambda x, y: np.isinf(x) or np.isinf(y), "nan from 0 * inf", _FIND_INF),
    _Domain({"sin", "cos", "tan"}, lambda x, y: np.isinf(x), "{name} of inf", _CLIP_RESULT),
    _Domain({"asin", "acos"}, lambda x, y: abs(x) > 1, "{name} of a number outside [-1, 1]: {x}", _CLIP),
    _Domain(
        {"atanh", "erf_inv"}, lambda x, y: abs(x) >= 1, "{name} of a number that is not between -1 and 1: {x}", _CLIP
    ),
    _Domain({"acosh"}, lambda x, y: x < 1, "acosh of a number below 1: {x}", _CLIP),
    _Domain({"lgamma", "digamma"}, lambda x, y: x <= 0, "{name} has a pole at {x}", _CLIP),
]
_NOT_ENTERED = Cause(
    "made inside it, where the search does not look",
    "search what it maps: find_nonfinite(jax.vmap(body, axis_name=...)), on arrays with an axis for the devices",
)
# What `explain` gets has no NaN where a constant has one.
_CONSTANT = Cause("nan is a constant in the code", "look at the condition that chooses it, or at what reads it")
# They return elements of their operands.
_CHOOSE = ("concatenate", "dynamic_update_slice", "pad", "select_n")
_WHOLE = {
    "gather": Cause("an index is out of bounds, for which gather gives nan", "check the indices of jnp.take and x[i]"),
}
_SINGULAR = {
    "cholesky": "cholesky of a matrix that is not positive definite",
    "triangular_solve": "the matrix is singular",
    "custom_linear_solve": "the matrix is singular",
}
_SMALL = {"float32": ", 1e-6 of its diagonal in float32", "float64": ", 1e-12 of its diagonal in float64"}
_EXPONENTIALS = ("exp", "exp2", "expm1", "sinh", "cosh")
_EXPONENT = "subtract the maximum first (jax.nn.softmax, jax.nn.logsumexp), or clip the exponent"
_ON_THE_WAY = "compute it in float32: put it into jamp.full_precision, or give autocast a rule for it"
_NARROW = "use jamp.full_precision or smaller operands; in attention divide by sqrt(width)"
_TOO_LARGE = "the value is too large for any dtype: divide, normalize or clip before"
_LOOK_FOR_LARGE = "look for a learning rate, a scale or an input that is too large"
_BEYOND_FLOAT32 = f"{_LOOK_FOR_LARGE}, or compute it in float64"
_LOWER_SCALE = "lower the loss scale: a dynamic one does so itself, for others jamp.set_loss_scale"


def _overflow(
    eqn: JaxprEqn, inputs: Sequence[Any], outputs: Sequence[Any], position: int, index: tuple[Any, ...]
) -> Cause | None:
    """Describe an overflow by the result that a wider dtype gives, or return None."""
    dtype = jnp.result_type(outputs[position])
    end = float(jnp.finfo(dtype).max)
    # bfloat16 has the range of float32, so it takes float64.
    wide_dtype = np.dtype(np.float32 if end < 1e30 else np.float64)
    wide = None if jnp.finfo(dtype).bits == 64 else try_wider(eqn, inputs, wide_dtype)
    if wide is None:
        return None
    value = float(to_host(wide[position])[index])
    if np.isnan(value):
        return None
    is_exponential = ir.name(eqn) in _EXPONENTIALS
    what = f"{'exp ' * is_exponential}overflow in {dtype}"
    cure = _EXPONENT if is_exponential else _NARROW if end < 1e30 else ""
    in_backward = _LOWER_SCALE if dtype == jnp.float16 else ""
    if np.isinf(value):
        return Cause(f"{what}, and in {wide_dtype}", cure or _TOO_LARGE, in_backward)
    if abs(value) <= end:
        again = interpret.bind(eqn, inputs, ir.avals(eqn.outvars))[position]
        if np.isfinite(to_host(again)[index]):
            return _CONSTANT
        what, cure = f"{what} on the way", _EXPONENT if is_exponential else _ON_THE_WAY if end < 1e30 else ""
    ends = f"{dtype} ends at {format_number(end) if end > 1e6 else f'{end:g}'}"
    return Cause(f"{what}: value would be {format_number(value, 1)}, {ends}", cure or _BEYOND_FLOAT32, in_backward)
