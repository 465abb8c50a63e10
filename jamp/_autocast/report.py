"""What autocast decides about a function, operation by operation."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from jamp import _jaxpr
from jamp._autocast.plan import ENTERED, NO_RULE, NOT_ENTERED, REGION, PlannedJaxpr
from jamp._autocast.program import PlannedEqn
from jamp._autocast.rules import COMPUTE, MOVES_DATA, RULES, WIDEST
from jamp._autocast.transform import planned
from jamp._jaxpr import JaxprEqn
from jamp._source_line import user_line


@dataclasses.dataclass(frozen=True)
class AutocastRow:
    """One row of an `AutocastReport`: all operations of one kind from one line of source.

    Attributes:
      operation: The key of its rule: a primitive's name, with the special case in brackets.
      category: compute, float32 or widest; or full_precision, not entered, no rule.
      before: The dtypes of its operands and results as traced: "float32, float32 -> float32".
      after: The same under autocast.
      source: The user's line: "model.py:12 (dense)".
      reason: Why it is in its category.
      count: How often a call runs it. The body of a while counts once, and each branch of a cond.
      flops: Of all of them together; 0 where that is not known.
    """

    operation: str
    category: str
    before: str
    after: str
    source: str
    reason: str
    count: int = 0
    flops: float = 0.0


@dataclasses.dataclass(frozen=True)
class AutocastReport:
    """What `autocast` decides about a function. `str()` is a table; `rows` is for programs.

    Attributes:
      rows: One row for each kind of floating operation and source line, the most FLOPs first.
      compute_dtype: The name of the compute dtype.
    """

    rows: tuple[AutocastRow, ...]
    compute_dtype: str

    @property
    def share_16_bit(self) -> float:
        """The share of the FLOPs in 16 bit, from 0 to 1; nan where there are none."""
        total = sum(row.flops for row in self.rows)
        return sum(row.flops for row in self.rows if self._is_low(row)) / total if total else math.nan

    @property
    def hints(self) -> tuple[str, ...]:
        """For each operation of 1 % of the FLOPs or more that stayed float32, and each one not entered: why."""
        total = sum(row.flops for row in self.rows)
        return tuple(
            f"{row.source}: {row.operation} "
            + (f"({row.flops / total:.1%} of the FLOPs) stays {_results(row.after)}" if row.flops else "runs as traced")
            + f": {row.reason}"
            for row in self.rows
            if (row.flops >= 0.01 * total > 0 and "float32" in row.after and not self._is_low(row))
            or (row.category in (NOT_ENTERED, NO_RULE) and "float32" in row.after)
        )

    def _is_low(self, row: AutocastRow) -> bool:
        return self.compute_dtype in row.after and "float32" not in row.after

    def __str__(self) -> str:
        share = self.share_16_bit
        title = "no FLOPs counted" if math.isnan(share) else f"{share:.1%} of the FLOPs in 16 bit"
        total = sum(row.flops for row in self.rows)
        header = ("operation", "category", "count", "FLOPs", "before", "after", "source")
        lines = []
        for row in self.rows:
            if row.flops or row.category != WIDEST:
                flops = f"{row.flops / total:.1%}" if row.flops else "-"
                after = _short(row.after) if row.after != row.before else "same"
                lines.append(
                    (row.operation, row.category, str(row.count), flops, _short(row.before), after, row.source)
                )
        hidden = len(self.rows) - len(lines)
        widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
        padded = ([cell.ljust(w) for cell, w in zip(line, widths, strict=True)] for line in (header, *lines))
        table = ["  ".join(cells).rstrip() for cells in padded]
        hints = ["", "Hints", *(f"- {hint}" for hint in self.hints)] if self.hints else []
        moves = [f"... and {hidden} rows of operations that only move data, in `.rows`"] if hidden else []
        return "\n".join([f"autocast to {self.compute_dtype}: {title}", "", *table, *moves, *hints])


def autocast_report(
    fun: Callable[..., Any], compute_dtype: DTypeLike = jnp.float16, *, rules: Mapping[str, str] | None = None
) -> Callable[..., AutocastReport]:
    """What `autocast` does to a function, without running it.

    Its arguments and errors are those of `autocast`. The gradient of a loss, `jax.grad(loss)`, is a function too.

    Returns:
      A function of the arguments of `fun` that returns an `AutocastReport`. It traces `fun` and computes nothing.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> report = jamp.autocast_report(lambda x: jnp.exp(x @ x))(jnp.ones((8, 8)))
      >>> [(row.operation, row.category, row.after) for row in report.rows]
      [('dot_general', 'compute', 'float16, float16 -> float16'), ('exp', 'float32', 'float32 -> float32')]
      >>> round(report.share_16_bit, 2)
      0.94
    """
    trace_plan = planned(fun, compute_dtype, rules)

    def report(*args: Any, **kwargs: Any) -> AutocastReport:
        _, body = trace_plan(args, kwargs)
        merged: dict[AutocastRow, list[float]] = {}
        for planned_eqn, times, source in _flat_equations(body, 1, ""):
            row = _row(planned_eqn, body, source)
            if row is not None:
                counted = merged.setdefault(row, [0, 0.0])
                counted[0] += times
                counted[1] += times * _flops(planned_eqn.eqn)
        rows = [dataclasses.replace(row, count=int(n), flops=flops) for row, (n, flops) in merged.items()]
        return AutocastReport(tuple(sorted(rows, key=lambda row: -row.flops)), str(jnp.dtype(compute_dtype)))

    return report


def _flat_equations(body: PlannedJaxpr, times: int, caller: str) -> Iterator[tuple[PlannedEqn, int, str]]:
    """Every planned equation that is not a construct, how often it runs, and where it comes from."""
    for planned_eqn in body.program().eqns:
        source = user_line(planned_eqn.eqn) or caller
        if planned_eqn.category == ENTERED:
            for inner in planned_eqn.bodies:
                yield from _flat_equations(inner, times * _jaxpr.iterations(planned_eqn.eqn), source)
        else:
            yield planned_eqn, times, source


def _row(planned_eqn: PlannedEqn, body: PlannedJaxpr, source: str) -> AutocastRow | None:
    """The row of an equation, without its counts, or None if it reads and writes no floating value."""
    eqn, category = planned_eqn.eqn, planned_eqn.category
    before = _dtypes(eqn.invars), _dtypes(eqn.outvars)
    if "float" not in before[0] or eqn.primitive.name == "convert_element_type":
        return None
    after = _dtypes(planned_eqn.reads), _dtypes(planned_eqn.writes)
    if category == COMPUTE and after == before:
        reason = "its operands have other dtypes, which autocast leaves alone"
    elif category == WIDEST and after == before:
        reason = "an operand of it is float32, or a constant that 16 bit cannot hold"
    else:
        reason = _WHY[category] if category in _WHY else body.planner.rules[planned_eqn.key][1]
    operation = planned_eqn.key if category != REGION else eqn.primitive.name
    return AutocastRow(operation, category, " -> ".join(before), " -> ".join(after), source, reason)


_WHY = {
    REGION: "it is inside jamp.full_precision",
    NOT_ENTERED: "what is inside is of a kind or a layout that autocast does not enter",
    NO_RULE: "autocast has no rule for it: give it one with rules={...} if 16 bit is right",
}


def _dtypes(atoms: Any) -> str:
    return ", ".join(str(v.aval.dtype) for v in atoms if hasattr(v.aval, "dtype"))


def _results(dtypes: str) -> str:
    return dtypes.rpartition("-> ")[2]


def _short(dtypes: str) -> str:
    for long, short in {"bfloat": "bf", "float": "f", "int": "i"}.items():
        dtypes = dtypes.replace(long, short)
    return dtypes


def _flops(eqn: JaxprEqn) -> float:
    """Two for each multiply-add of a product, one for each element of any other arithmetic."""
    shapes = [tuple(getattr(v.aval, "shape", ())) for v in (*eqn.invars, *eqn.outvars)]
    name, size = eqn.primitive.name, math.prod(shapes[-1])
    if name in _jaxpr.PRODUCTS:
        return 2.0 * size * _jaxpr.summed_terms(eqn)
    is_arithmetic = name in RULES and RULES[name][1] != MOVES_DATA
    return float(max(map(math.prod, shapes))) if is_arithmetic else 0.0
