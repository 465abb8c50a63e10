"""`rounding_report`, which names the operations whose rounding to 16 bit does the most damage."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from jamp import _table
from jamp._arguments import Call, check_concrete
from jamp._autocast.formats import Format
from jamp._autocast.transform import autocast
from jamp._primitives import PRODUCTS
from jamp._source_line import pattern
from jamp.debug._errors import Errors
from jamp.debug._program import ON
from jamp.debug._rules import smallest_rules
from jamp.debug._run_steps import Damage
from jamp.debug._steps import Site

_CHECKED = 2  # rows that are measured, too
_SHOWN = 12  # rows


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
      step, steps: In a scan, the step with the most damage, and the number of steps. In nested scans, one of each.
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
        return (
            math.inf if self.overflows else max([0.0, *(x for x in (self.value_error, self.gradient_error) if x > 0)])
        )

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
      opaque: Lines whose gradients JAX cannot differentiate. Damage that goes through them does not count.
    """

    rows: tuple[RoundingRow, ...]
    compute_dtype: str
    value_error: float
    gradient_error: float
    opaque: tuple[str, ...]
    _errors_of: Callable[[Mapping[str, str]], Errors] = dataclasses.field(repr=False, compare=False)

    def rules(self, *, error: float) -> dict[str, str]:
        """Rules for `autocast`, with few FLOPs in float32, that bring an error below a bound.

        Candidates are taken by the damage that they prevent for each FLOP, so another set may have a few FLOPs less.
        Each step of the search runs the function, and the result was run with `autocast`.

        Args:
          error: The bound of the error of the gradients, or of the value if there are no gradients.

        Returns:
          Rules to merge into those of `autocast`. They are empty if the error is below the bound without them.

        Raises:
          ValueError: If no rules reach the bound, because the code itself computes in 16 bit: it names the lines. Or if
            the bound is not positive, or there is no error.

        Examples:
          >>> import jax, jax.numpy as jnp, jamp.debug
          >>> def fun(w, x):
          ...     with jax.named_scope("body"):
          ...         h = jnp.tanh(x @ w)
          ...     with jax.named_scope("head"):
          ...         return jnp.mean(jax.nn.softmax((h + 50) @ w) ** 2)
          >>> w, x = jax.random.normal(jax.random.key(0), (2, 16, 16)) / 4
          >>> jamp.debug.rounding_report(fun, jnp.float16)(w, x).rules(error=1e-3)
          {'dot_general[head]': 'float32'}
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
        more = len(self.rows) - len(lines)
        rest = [f"... and {more} rows with less damage, in `.rows`"] if more else []
        unseen = [
            f"JAX has no derivative of what runs at {line}: damage in it and through it is not counted"
            for line in self.opaque
        ]
        return "\n".join(
            [f"rounding to {self.compute_dtype}: {total}", "", *_table.with_header(header, lines), *rest, *unseen]
        )


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
        check_concrete("rounding_report", Call(args, kwargs).leaves)
        errors_of = lambda more: Errors(fun, compute_dtype, dict(rules or {}) | more, args, kwargs)
        errors = errors_of({})
        program, total, damages = errors.program, errors.total, errors.damages()
        every = (_row(x, [by_site.get(i) for by_site in damages], program.flops) for i, x in enumerate(program.sites))
        rows = {i: row for i, row in enumerate(every) if row.damage or row.flops}  # A result depends on these.
        order = sorted(rows, key=lambda i: -rows[i].damage)
        rows |= {i: dataclasses.replace(rows[i], measured=errors.of({i: ON})) for i in order[:_CHECKED]}
        ordered, opaque = tuple(rows[i] for i in order), tuple(sorted(program.opaque))
        return RoundingReport(ordered, errors.dtype, *total, opaque, errors_of)

    return report


def _row(site: Site, damages: Sequence[Damage | None], flops: float) -> RoundingRow:
    """A row, from the damage to the value, and to the gradients if there are any."""
    names = sorted(site.operations, key=lambda name: (name not in PRODUCTS, name))
    known = [x for x in damages if x is not None]
    none = 0.0 if known else math.nan
    of_value, of_gradients, *_ = [*(none if x is None else _predicted(x) for x in damages), math.nan]
    error, size = (float(np.sum(getattr(known[0], name))) if known else 0.0 for name in ("error", "size"))
    step: tuple[int, ...] = ()
    squares = known[-1].operands + known[-1].result if known else np.zeros(0)
    if site.steps and np.size(squares):
        step = tuple(int(i) for i in np.unravel_index(np.argmax(squares), site.steps))
    return RoundingRow(
        ", ".join([name for name in names if name in PRODUCTS] or names),
        site.location.line,
        site.location.scope,
        pattern(site.parameters),
        site.location.backward,
        ", ".join(sorted(site.dtypes)),
        sum(site.operations.values()) / flops if flops else 0.0,
        math.sqrt(error / size) if size else none,
        of_value,
        of_gradients,
        any(bool(np.any(x.overflows)) for x in known),
        step,
        site.steps,
    )


def _predicted(damage: Damage) -> float:
    """The error that a site causes. A sum far beyond its expected size shows that the errors are not independent."""
    expected = math.sqrt(float(np.sum(damage.operands) + np.sum(damage.result)))
    total = abs(float(np.sum(damage.total)))
    return total if total > 4 * expected else expected
