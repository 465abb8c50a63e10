"""The result of `rounding_report`."""

import dataclasses
import math
from collections.abc import Callable, Mapping

from jamp import _table
from jamp.debug._errors import Errors
from jamp.debug._rules import smallest_rules

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
