"""`rounding_report`, which names the operations whose rounding to 16 bit does the most damage."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jamp._autocast.formats import Format
from jamp._primitives import PRODUCTS
from jamp._source_line import pattern
from jamp.debug._errors import Errors
from jamp.debug._program import ON
from jamp.debug._rounded import Damage
from jamp.debug._rules import smallest_rules
from jamp.debug._steps import Place

_CHECKED, _SHOWN = 2, 12  # rows


@dataclasses.dataclass(frozen=True)
class RoundingRow:
    """One row of a `RoundingReport`: the operations that round at one line, in one layer, forward or backward.

    Every error is relative, by the norm. Those of the value and of the gradients are predicted to first order.

    Attributes:
      operation: The primitives, products first: "dot_general".
      source: The user's line, "model.py:12 (dense)", and after a `>` the innermost line of a package that it calls.
      scope: The name scopes around it, such as the names of Linen modules: "h_3/attn/query".
      parameter: The paths, in the arguments, of the parameters that it reads.
      backward: Whether it is part of the backward pass.
      dtype: The dtypes that it rounds to.
      flops: Its share of the FLOPs, from 0 to 1.
      own_error: The error of its own results.
      value_error: The error that it causes in the value of the function.
      gradient_error: The error that it causes in the gradients. NaN if there are none.
      measured: For the first two rows, the errors of value and gradients in a run in which only this row rounds.
      overflows: Whether the rounding makes inf.
      step, steps: In a scan, the step with the most damage, and how many steps there are. In nested scans, one for each.
    """

    operation: str
    source: str
    scope: str
    parameter: str
    backward: bool
    dtype: str
    flops: float
    own_error: float
    value_error: float
    gradient_error: float
    overflows: bool = False
    step: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    measured: tuple[float, float] | None = None

    @property
    def damage(self) -> float:
        """The larger one of both predicted errors. inf if it overflows."""
        return math.inf if self.overflows else max([0.0, *(x for x in (self.value_error, self.gradient_error) if x > 0)])

    def __str__(self) -> str:
        where = " ".join(filter(None, [self.scope, f"with {self.parameter}" if self.parameter else ""]))
        lines = [
            f"{self.operation}{' in the backward pass' * self.backward}: rounded to {self.dtype}",
            f"  line    {self.source or 'unknown'}",
            *([f"  layer   {where}"] if where else []),
            *([f"  step    {_step(self)}"] if self.steps else []),
            f"  errors  own {_error(self.own_error)}, value {_error(self.value_error)}, gradients "
            f"{_error(self.gradient_error)}" + " (it overflows)" * self.overflows,
        ]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class RoundingReport:
    """The damage that rounding to 16 bit does to a function. `str()` is a table, and `rows` is for programs.

    Attributes:
      rows: One row for each line and layer that rounds, the most damage first.
      compute_dtype: The name of the compute dtype.
      value_error: The measured error of the value of the function, with all roundings.
      gradient_error: The same of its gradients. NaN if there are none.
      opaque: Lines of operations whose gradients JAX cannot differentiate. Damage that goes through them does not count.
    """

    rows: tuple[RoundingRow, ...]
    compute_dtype: str
    value_error: float
    gradient_error: float
    opaque: tuple[str, ...]
    _errors_of: Callable[[Mapping[str, str]], Errors] = dataclasses.field(repr=False, compare=False)

    def rules(self, *, error: float) -> dict[str, str]:
        """The rules for `autocast` with the fewest FLOPs in float32 that bring an error below a bound.

        Each candidate runs with the arguments of the report, and the result was run with `autocast`. The search goes by the
        predicted damage for each FLOP, so another set may have a few FLOPs less.

        Args:
          error: The bound of the error of the gradients, or of the value if there are no gradients.

        Returns:
          Rules to merge into those of `autocast`. They are empty if the error is below the bound without them.

        Raises:
          ValueError: If no rules reach the bound, because the code itself computes in 16 bit or its products have no
            name scope. It names the lines.

        Examples:
          >>> import jax, jax.numpy as jnp, jamp.debug
          >>> def fun(w, x):
          ...     with jax.named_scope("logits"):
          ...         y = x @ w
          ...     return jnp.sum(jax.nn.softmax(y)[:, 0])
          >>> w, x = jax.random.normal(jax.random.key(0), (2, 16, 16))
          >>> jamp.debug.rounding_report(fun)(w, x).rules(error=1e-6)
          {'dot_general': 'float32'}
        """
        return smallest_rules(self._errors_of, error)

    def __str__(self) -> str:
        total = f"error of the value {self.value_error:.1e}"
        if not math.isnan(self.gradient_error):
            total += f", of the gradients {self.gradient_error:.1e}"
        if not self.rows:
            return f"rounding to {self.compute_dtype}: no operation rounds"
        header = ("operation", "where", "FLOPs", "own", "value", "gradients", "measured", "", "source")
        lines = [_cells(row) for row in self.rows[:_SHOWN]]
        kept = [i for i, name in enumerate(header) if name == "operation" or any(line[i] for line in lines)]
        table = [[line[i] for i in kept] for line in (header, *lines)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        text = ["  ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)).rstrip() for line in table]
        more = len(self.rows) - len(lines)
        rest = [f"... and {more} rows with less damage, in `.rows`"] if more else []
        unseen = [f"JAX cannot differentiate the gradients of {line}: damage through them is not counted" for line in self.opaque]
        return "\n".join([f"rounding to {self.compute_dtype}: {total}", "", *text, *rest, *unseen])


def rounding_report(
    fun: Callable[..., Any], compute_dtype: DTypeLike = jnp.float16, *, rules: Mapping[str, str] | None = None
) -> Callable[..., RoundingReport]:
    """Find the operations whose rounding under `autocast` does the most damage to a function and its gradients.

    It runs the function and its gradient in float32. To first order, the damage of a rounding is its error times the
    sensitivity of the result to it, which one more backward pass gives for all operations. For the gradients the result
    is a sum of all of them with random signs, which estimates the norm of their error. The first two rows are checked: the
    function runs with nothing else rounded.

    The gradients are those of a scalar first result with respect to the floating arrays in the first argument. Gradients
    in float16 are computed at a loss scale of 2**15. If x64 is on, the reference is float64. A function that computes in
    16 bit without autocast is reported too. It costs about eight gradients and keeps all values in memory, so use a small
    batch. Inside `while`, `shard_map` and kernels it does not tell operations apart.

    Args:
      fun: A function of arrays, or pytrees of them, and any other arguments.
      compute_dtype, rules: As for `autocast`.

    Returns:
      A function of the arguments of `fun` that returns a `RoundingReport`.

    Raises:
      ValueError: If the function or its gradients are not finite in float32, or the compute dtype is a `Float8` or `Int8`.

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
        raise ValueError(f"rounding_report is for 16 bit, got {compute_dtype}: 8-bit products have no second derivative.")

    def report(*args: Any, **kwargs: Any) -> RoundingReport:
        errors_of = lambda more: Errors(fun, compute_dtype, dict(rules or {}) | more, args, kwargs)
        errors = errors_of({})
        total, damages = errors.total, errors.damages()
        places = list(enumerate(errors.program.places))
        found = [(i, _row(place, [x.get(i) for x in damages], errors.program.flops)) for i, place in places]
        found = [(i, row) for i, row in found if row.damage or row.flops]  # not of what computes no result
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
    if place.steps and known:
        squares = known[-1].operands + known[-1].result
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


def _cells(row: RoundingRow) -> list[str]:
    measured = row.measured[not math.isnan(row.gradient_error)] if row.measured else math.nan
    where = row.scope or row.parameter
    return [
        row.operation + ", backward" * row.backward,
        where + f" {_step(row)}" * bool(row.steps),
        f"{row.flops:.1%}",
        *map(_error, (row.own_error, row.value_error, row.gradient_error, measured)),
        "overflows" if row.overflows else "",
        row.source,
    ]


def _step(row: RoundingRow) -> str:
    return ", ".join(f"step {i} of {n}" for i, n in zip(row.step, row.steps, strict=False))


def _error(x: float) -> str:
    return "" if math.isnan(x) or not x else f"{x:.1e}"
