"""`rounding_report`, which names the operations whose rounding to 16 bit does the most damage."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from jamp._autocast.formats import Format
from jamp._autocast.transform import autocast
from jamp._primitives import PRODUCTS
from jamp._source_line import pattern
from jamp.debug._errors import Errors
from jamp.debug._program import ON
from jamp.debug._rounded import Damage
from jamp.debug._rounding_report import RoundingReport, RoundingRow
from jamp.debug._steps import Place

_CHECKED = 2  # rows


def rounding_report(
    fun: Callable[..., Any], compute_dtype: DTypeLike, *, rules: Mapping[str, str] | None = None
) -> Callable[..., RoundingReport]:
    """Find the operations whose rounding under `autocast` does the most damage to a function and its gradients.

    It runs the function and its gradient in float32. To first order, the damage of a rounding is its error times the
    sensitivity of the result to it, which one more backward pass gives for all operations. For the gradients, this
    result is their sum with random signs, which estimates the norm of their error. For the first two rows the function
    also runs with nothing else rounded, to check the prediction. The prediction for a scalar value is the expected
    size of the error. The measurement is one draw.

    The gradients are those of a scalar first result with respect to the floating arrays in the first argument. In
    float16 they are computed at a loss scale of 2**15, or a lower one if that overflows. If x64 is on, the reference is
    float64. Code that computes in 16 bit without autocast is reported too. It costs about ten gradients and keeps all
    values in memory, so use a small batch. Inside `while`, `shard_map` and kernels it does not tell operations apart.

    Args:
      fun: A function of arrays, or pytrees of them, and any other arguments.
      compute_dtype: float16 or bfloat16, or its name.
      rules: As for `autocast`.

    Returns:
      A function of the arguments of `fun` that returns a `RoundingReport`.

    Raises:
      ValueError: If the compute dtype is a `Float8` or `Int8`, or the function or its gradients are not finite in
        float32. For others see `autocast`.

    Examples:
      >>> import jax, jax.numpy as jnp, jamp.debug
      >>> def attend(q, k, v):
      ...     return jnp.sum(jax.nn.softmax(100 * (q @ k.T)) @ v)
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 8, 8))
      >>> report = jamp.debug.rounding_report(attend, jnp.bfloat16)(q, k, v)
      >>> report.rows[0].operation, report.rows[0].value_error > 30 * report.rows[-1].value_error
      ('dot_general', True)
    """
    if isinstance(compute_dtype, Format):
        raise ValueError(
            f"rounding_report is for 16 bit, got {compute_dtype}: 8-bit products have no second derivative."
        )
    autocast(fun, compute_dtype, rules=rules)  # checks the arguments

    def report(*args: Any, **kwargs: Any) -> RoundingReport:
        errors_of = lambda more: Errors(fun, compute_dtype, dict(rules or {}) | more, args, kwargs)
        errors = errors_of({})
        total, damages = errors.total, errors.damages()
        places = list(enumerate(errors.program.places))
        found = [(i, _row(place, [x.get(i) for x in damages], errors.program.flops)) for i, place in places]
        found = [(i, row) for i, row in found if row.damage or row.flops]  # without places that no result depends on
        found.sort(key=lambda x: -x[1].damage)
        rows = [dataclasses.replace(row, measured=errors.of({i: ON})) for i, row in found[:_CHECKED]]
        rows += [row for _, row in found[_CHECKED:]]
        return RoundingReport(tuple(rows), errors.dtype, *total, tuple(sorted(errors.program.opaque)), errors_of)

    return report


def _row(place: Place, damages: Sequence[Damage | None], flops: float) -> RoundingRow:
    """A row, from the damage to the value, and to the gradients if there are any."""
    names = sorted(place.operations, key=lambda name: (name not in PRODUCTS, name))
    known = [x for x in damages if x is not None]
    none = 0.0 if known else math.nan
    of_value, of_gradients, *_ = [*(none if x is None else _predicted(x) for x in damages), math.nan]
    error, size = (float(np.sum(getattr(known[0], name))) if known else 0.0 for name in ("error", "size"))
    step: tuple[int, ...] = ()
    squares = known[-1].operands + known[-1].result if known else np.zeros(0)
    if place.steps and np.size(squares):
        step = tuple(int(i) for i in np.unravel_index(np.argmax(squares), place.steps))
    return RoundingRow(
        ", ".join([name for name in names if name in PRODUCTS] or names),
        place.source,
        place.scope,
        pattern(place.parameters),
        place.backward,
        ", ".join(sorted(place.dtypes)),
        sum(place.operations.values()) / flops if flops else 0.0,
        math.sqrt(error / size) if size else none,
        of_value,
        of_gradients,
        any(bool(np.any(x.overflows)) for x in known),
        step,
        place.steps,
    )


def _predicted(damage: Damage) -> float:
    """The error that a place causes. A sum far beyond its expected size shows that the errors are not independent."""
    expected = math.sqrt(float(np.sum(damage.operands) + np.sum(damage.result)))
    total = abs(float(np.sum(damage.total)))
    return total if total > 4 * expected else expected
