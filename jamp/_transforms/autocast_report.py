"""`autocast_report`: the decisions of autocast about each operation of a function."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jamp import _table
from jamp._arguments import check_function, of_types, parameter_paths
from jamp._autocast.cast import cast
from jamp._autocast.decisions import Dtypes, Entry, entries
from jamp._autocast.facts import AUTOCAST, NO_RULE, NOT_ENTERED, REGION
from jamp._autocast.rules import ACCUMULATE, COMPUTE, ROUNDED_AGAIN, WIDEST, Rule, rules_for, wide_dtype
from jamp._autocast.target import Target
from jamp._jaxprs import ir, walk
from jamp._jaxprs.primitives import CHEAP, PRODUCTS, operation
from jamp._jaxprs.source import in_scope, is_transposed, pattern
from jamp._products.flops import flops
from jamp._products.formats import Format
from jamp._transforms.lints import lints_of
from jamp._transforms.passes import Passes, finished, passes
from jamp._transforms.warn import cause

_SHOWN = 30  # rows


@dataclasses.dataclass(frozen=True)
class AutocastRow:
    """One row of an `AutocastReport`: all operations of one kind from one line of source.

    Attributes:
      operation: The key of its rule: a primitive's name, with the special case in brackets.
      category: compute, accumulate, float32 or widest; or full_precision, not entered, no rule. For a compute dtype of
        float32, it is float64 in place of float32.
      traced, runs: The dtypes of its operands and results, as traced and under autocast. `before` and `after` are their
        texts.
      source: The user's line, "model.py:12 (dense)", and after a `>` the innermost line of a package that it calls.
      reason: Why it is in its category.
      count: How often they run in one call. The body of a while and each branch of a cond count once.
      flops: The FLOPs of all runs, or 0 if unknown. A construct that is not entered has the FLOPs of its bodies.
      scope: The name scopes around them, such as the names of Linen modules: "h_*/attn/{query,key}" for many layers.
      parameter: The paths, in the arguments, of the parameters that they read: `params['h_*']['attn']['kernel']`.
    """

    operation: str
    category: str
    traced: Dtypes
    runs: Dtypes
    source: str
    reason: str
    count: int = 0
    flops: float = 0.0
    scope: str = ""
    parameter: str = ""

    @property
    def before(self) -> str:
        """The dtypes of its operands and results as traced: "float32, float32 -> float32"."""
        return str(self.traced)

    @property
    def after(self) -> str:
        """The same under autocast."""
        return str(self.runs)


@dataclasses.dataclass(frozen=True)
class AutocastReport:
    """The decisions of `autocast` about a function. `str()` is a table, and `rows` is for programs.

    Attributes:
      rows: One row for each kind of floating operation and source line, the most FLOPs first.
      compute_dtype: The name of the compute dtype.
      backward: Whether the function takes the gradient of a function that autocast has not transformed.
      quantized: The name of an 8-bit format, such as "float8", whose carrier is the compute dtype; else "".
      as_run: Whether the function has autocast inside, and is reported as it runs.
      unchanged: For a compute dtype of float32, why the function is unchanged; else "".
      unread: The types of closed-over arrays that were not searched for values beyond the range of the compute dtype,
        because parts of them are on devices of other processes.
      lints: Values of 16 bit that need more digits, whatever the bound of an error is, each with its line and a rule:
        angles above 100, values by which `top_k` chooses, and sums of more than 4096 terms.
    """

    rows: tuple[AutocastRow, ...]
    compute_dtype: str
    backward: bool = False
    quantized: str = ""
    as_run: bool = False
    unchanged: str = ""
    unread: tuple[str, ...] = ()
    lints: tuple[str, ...] = ()

    @property
    def share_16_bit(self) -> float:
        """The share of the FLOPs in 16 bit or fewer, from 0 to 1; nan where there are none."""
        return self._share(lambda row: self._is_low(row) and np.float32 not in row.runs.operands)

    @property
    def share_float32(self) -> float:
        """The share of the FLOPs in float32 or less, from 0 to 1; nan where there are none."""
        return self._share(lambda row: np.float64 not in row.runs.operands)

    @property
    def share_float8(self) -> float:
        """The share of the FLOPs in float8, from 0 to 1; nan where there are none."""
        return self._share(lambda row: _is_8_bit(row, ("float8",)))

    @property
    def share_8_bit(self) -> float:
        """The share of the FLOPs in float8 or int8, from 0 to 1; nan where there are none."""
        return self._share(_is_8_bit)

    def _share(self, counts: Callable[[AutocastRow], bool]) -> float:
        total = sum(row.flops for row in self.rows)
        return sum(row.flops for row in self.rows if counts(row)) / total if total else math.nan

    @property
    def hints(self) -> tuple[str, ...]:
        """The lints. For each operation with 1 % of the FLOPs or more: why it is float32, if that costs time, or not
        8 bit."""
        total = sum(row.flops for row in self.rows)
        stays = []
        for row in self.rows:
            is_large = row.flops >= 0.01 * total > 0 and row.operation not in CHEAP  # Between products float32 is free.
            is_reached = row.category not in (NOT_ENTERED, NO_RULE)
            is_high = self._wide in (*row.runs.operands, *row.runs.results) and not self._is_low(row)
            is_kept = self.quantized and row.category == COMPUTE and not _is_8_bit(row)
            is_out_of_range = row.operation.endswith("[range]")
            is_in_vain = row.reason.startswith(ROUNDED_AGAIN)
            if (is_high and (is_large or not is_reached or is_out_of_range)) or (is_kept and is_large) or is_in_vain:
                share = f"({row.flops / (total or 1):.1%} of the FLOPs) stays {', '.join(map(str, row.runs.results))}"
                place = f"in {row.scope} " * bool(row.scope) + f"with {row.parameter} " * bool(row.parameter)
                what = share if row.flops else "runs as traced"
                stays.append(f"{row.source}: {row.operation} {place}{what}: {row.reason}")
        unread = (
            f"a closed-over {x} was not searched for values beyond the range of {self.compute_dtype}, because other "
            "processes hold parts of it. If it has some, give its products the rule 'float32'"
            for x in self.unread
        )
        return (*self.lints, *stays, *unread, *[_BACKWARD] * self.backward)

    @property
    def _wide(self) -> np.dtype[Any]:
        """The dtype of the operands that products cast."""
        return wide_dtype(self.compute_dtype)

    def _is_low(self, row: AutocastRow) -> bool:
        is_low = lambda x: x.itemsize < self._wide.itemsize if jnp.issubdtype(x, jnp.floating) else "int8" in x.name
        return any(map(is_low, (*row.runs.operands, *row.runs.results))) and self._wide not in row.runs.operands

    def _was_low(self, row: AutocastRow) -> bool:
        return row.traced == row.runs and self._is_low(row) and not self.as_run

    def __str__(self) -> str:
        total = sum(row.flops for row in self.rows)
        header = ("operation", "category", "count", "FLOPs", "before", "after", "where", "source")
        lines = []
        for row in self.rows:
            if row.flops or row.category != WIDEST:
                flops = f"{row.flops / total:.1%}" if row.flops else "-"
                after = _short(row.runs) if row.runs != row.traced else "same"
                cells = [row.operation, row.category, str(row.count), flops, _short(row.traced), after]
                lines.append([*cells, row.scope or row.parameter, _table.short_line(row.source)])
        hidden, small = len(self.rows) - len(lines), len(lines) - _SHOWN
        table = _table.with_header(header, lines[:_SHOWN], ("where", "source"))
        rest = [f"... and {small} rows with fewer FLOPs, in `.rows`"] if small > 0 else []
        rest += [f"... and {hidden} rows of operations that only move data, in `.rows`"] if hidden else []
        hints = ["", "Hints", *(_table.wrapped(f"- {hint}", 2) for hint in self.hints)] if self.hints else []
        title = f"autocast to {self.compute_dtype}: {self._title()}"
        return "\n".join([title, "", *table, *rest, *hints, *self._next()])

    def _title(self) -> str:
        share, was = self._share(self._is_low), self._share(self._was_low)
        if self.unchanged:
            return f"the function is unchanged, because {self.unchanged}"
        if math.isnan(share):
            return "no FLOPs counted"
        if self.quantized:
            title = f"{self.share_8_bit:.1%} of the FLOPs in {self.quantized}, {share:.1%} in 16 bit or less"
            return f"{title}, of which {was:.1%} as it was" if was else title
        is_16_bit = self._wide == np.float32
        if not any(map(self._was_low, self.rows)):
            return f"{share:.1%} of the FLOPs " + ("in 16 bit" if is_16_bit else "are products in float32")
        changed = f"{share - was:.1%} of the FLOPs "
        if is_16_bit:
            return f"{changed}in {self.compute_dtype}, and {was:.1%} in 16 bit already"
        return f"{changed}are products in float32, and {was:.1%} are float32 already"

    def _next(self) -> list[str]:
        if not self.rows or self.quantized:
            return []
        of = "jamp.debug.rounding_report(fun, dtype)(*args)"
        return ["", f"next: {of} measures the error that each row causes"]


def _is_8_bit(row: AutocastRow, names: tuple[str, ...] = ("float8", "float4", "int8", "int4")) -> bool:
    """Whether the operands of a product have 8 bits or fewer."""
    return any(dtype.name.startswith(names) for dtype in row.runs.operands[:1])


def autocast_report(
    fun: Callable[..., Any], compute_dtype: DTypeLike | Format, *, rules: Mapping[str, str] | None = None
) -> Callable[..., AutocastReport]:
    """Report what `autocast` does to a function, without running it.

    It has the arguments and errors of `autocast`. Arrays may be given as `jax.ShapeDtypeStruct`. For a gradient pass
    `jax.grad(jamp.autocast(loss, dtype))`: a function that has autocast inside is reported as it runs.

    Returns:
      A function of the arguments of `fun` that returns an `AutocastReport`. It traces `fun` and computes nothing.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> report = jamp.autocast_report(lambda x: jnp.exp(x @ x), jnp.float16)(jnp.ones((16, 16)))
      >>> [(row.operation, row.category, row.after) for row in report.rows]
      [('dot_general', 'compute', 'float16, float16 -> float16'), ('exp', 'float32', 'float32 -> float32')]
      >>> round(report.share_16_bit, 2)
      0.97
    """
    check_function(fun, "jamp.autocast_report({}, jnp.bfloat16)")
    trace = passes(fun, compute_dtype, rules)

    def report(*args: Any, **kwargs: Any) -> AutocastReport:
        traced = trace(args, kwargs)
        as_run = any(in_scope(eqn, AUTOCAST) for eqn in walk.all_equations(traced.traced.jaxpr))
        closed, decisions, target = traced.decided, traced.decisions, traced.target
        if as_run:
            target = Target(target.compute_dtype, _as_run(target.wide))
            closed, decisions = cast(traced.traced, target, None, finished)
        parameters = dict(zip(closed.jaxpr.invars, parameter_paths(fun, args, kwargs), strict=True))
        merged: dict[AutocastRow, list[Entry]] = {}
        for x in entries(closed, decisions, target, parameters):
            row = _row(x, target, as_run)
            if row is not None:
                merged.setdefault(row, []).append(x)
        rows = sorted((_summed(row, x) for row, x in merged.items()), key=lambda row: -row.flops)
        backward = not as_run and any(map(is_transposed, walk.all_equations(traced.traced.jaxpr)))
        name = traced.format.name if traced.format else ""
        unchanged = "" if as_run else _unchanged(traced)
        unread = tuple(traced.target.unread)
        with_rules = lambda more: passes(fun, compute_dtype, {**(rules or {}), **more})(args, kwargs)
        found = lints_of(lambda more: with_rules(more) if more else traced)
        return AutocastReport(tuple(rows), str(target.compute_dtype), backward, name, as_run, unchanged, unread, found)

    return of_types(report)


def _row(x: Entry, target: Target, as_run: bool) -> AutocastRow | None:
    """The row of an equation, without the sums, or None if it reads no floating value or only casts one."""
    name, category, before, after = ir.name(x.eqn), x.category, x.before, x.after
    floats = [dtype for dtype in before.operands if jnp.issubdtype(dtype, jnp.floating)]
    is_integer = not floats and not (as_run and name in PRODUCTS)  # Int8's products are shown
    if is_integer or name == "convert_element_type":
        return None
    if as_run and name in PRODUCTS and any(dtype.itemsize == target.compute_dtype.itemsize for dtype in floats):
        category = ACCUMULATE if target.wide in after.results else COMPUTE
    if category in (NOT_ENTERED, NO_RULE):
        reason = cause(x.eqn)
    elif x.product and x.product.reason and not as_run:
        reason = x.product.reason
    elif category == REGION:
        reason = "it is inside jamp.full_precision"
    elif as_run:
        reason = "the function has autocast inside, and this is how it runs"
    elif after == before and (category in (COMPUTE, ACCUMULATE) or target.wide not in before.operands):
        reason = "its operands have other dtypes, which autocast leaves alone"
    elif category == WIDEST and after == before:
        low = "16 bit" if target.compute_dtype.itemsize == 2 else target.compute_dtype
        reason = f"an operand of it is {target.wide}, or has other readers, or is a constant that {low} cannot hold"
    else:
        reason = target.rules[x.key].reason
    key = (x.product.operation if x.product else operation(x.eqn)) + "".join(x.key.partition("[")[1:])
    return AutocastRow(key, category, before, after, x.source, reason)


def _summed(row: AutocastRow, merged: list[Entry]) -> AutocastRow:
    return dataclasses.replace(
        row,
        count=sum(x.times for x in merged),
        flops=sum(x.times * flops(x.eqn) for x in merged),
        scope=pattern(x.scope for x in merged if x.scope),
        parameter=pattern(path for x in merged for path in x.parameters),
    )


def _unchanged(passes: Passes) -> str:
    """Why autocast to float32 changes nothing."""
    if passes.target.compute_dtype != np.float32 or passes.is_cast:
        return ""
    if not jax.config.read("jax_enable_x64"):
        return "x64 is off, so there is no float64"
    return "it has no product of float64 operands that may run in float32"


def _as_run(wide: np.dtype[Any]) -> dict[str, Rule]:
    """The rules of a function that is reported as it runs."""
    category = lambda rule: WIDEST if rule.category == WIDEST else str(wide)
    return {key: rule._replace(category=category(rule)) for key, rule in rules_for(wide).items()}


_BACKWARD = (
    "this is autocast of a gradient. The gradient of autocast may have other dtypes: "
    "autocast_report(jax.grad(jamp.autocast(f, dtype)), dtype) shows it"
)


def _short(dtypes: Dtypes) -> str:
    """Dtypes without those that are repeated: "f16 -> f32" for "float16, float16 -> float32", and "f32" if all are."""
    sides = dict.fromkeys(", ".join(dict.fromkeys(map(str, side))) for side in dtypes)
    return " -> ".join(sides).replace("bfloat", "bf").replace("float", "f").replace("int", "i")
