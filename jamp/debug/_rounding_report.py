"""`rounding_report`, which names the operations whose rounding does the most damage."""

import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from jamp import _table
from jamp._arguments import Call, describe, is_array
from jamp._jaxprs.primitives import PRODUCTS
from jamp._jaxprs.source import pattern
from jamp._products.formats import Format
from jamp._transforms.autocast import autocast
from jamp._transforms.lints import lints_of
from jamp._transforms.passes import passes
from jamp.debug._error_curve import ErrorCurve, ErrorPoint
from jamp.debug._errors import Errors
from jamp.debug._program import ON
from jamp.debug._rules import Found, RuleSearch
from jamp.debug._run_steps import Damage
from jamp.debug._steps import Site
from jamp.debug._usage import called_as, check_concrete, naming_states

_RESIDUALS = "residuals"  # the operation of the row of residuals in 8 bits
_CHECKED = 2  # rows that are measured, too
_SHOWN = 12  # rows
_NUMBER = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class RoundingRow:
    """One row of a `RoundingReport`: the operations of one primitive and line that round, forward or backward.

    Layers whose name scopes differ in numbers only are one row. Every error is relative, by the norm. The errors
    of the value and of the gradients are predicted to first order.

    Attributes:
      operation: The primitive: "dot_general". Or "residuals", for what residuals in 8 bits add.
      source: The user's line, "model.py:12 (dense)", and after a `>` the innermost line of a package that it calls.
      scope: The name scopes around it, such as the names of Linen modules: "h_3/attn/query", or "h_*" for many layers.
      parameter: The paths, in the arguments, of the parameters that it reads.
      backward: Whether it is part of the backward pass.
      gradient_of: In the backward pass of a product with weights, or in 8 bits, the operand of which it is the
        gradient: "left" or "right".
      dtype: The dtypes that it rounds to.
      flops: Its share of the FLOPs, from 0 to 1.
      own_error: The error of its own results.
      value_error: The error that it causes in the value of the function.
      gradient_error: The error that it causes in the gradients. NaN if there are none.
      measured: For the first two rows, the errors of value and gradients in a run in which only this row rounds.
      overflows: Whether the rounding makes inf.
      step, steps: In a scan, the step with the most damage, and the number of steps. In nested scans, one of each.
      worst: The name scopes of the layer with the most damage.
      format: The format of 8 bits in which they are products, such as "float8", or "".
    """

    operation: str
    source: str
    scope: str
    parameter: str
    backward: bool
    gradient_of: str
    dtype: str
    flops: float
    own_error: float
    value_error: float
    gradient_error: float
    overflows: bool = False
    step: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    measured: tuple[float, float] | None = None
    worst: str = ""
    format: str = ""

    @property
    def damage(self) -> float:
        """The predicted error that `rules` bounds: of the gradients, or of the value if there are none, or inf."""
        known = [x for x in (self.gradient_error, self.value_error) if not math.isnan(x)]
        return math.inf if self.overflows else next(iter(known), 0.0)

    def __str__(self) -> str:
        where = " ".join(filter(None, [self.scope, f"with {self.parameter}" if self.parameter else ""]))
        named = ("own", self.own_error), ("value", self.value_error), ("gradients", self.gradient_error)
        errors = [f"{name} {_error(x)}" for name, x in named if _error(x)]
        lines = [
            f"{self.operation}{_PASSES[self.gradient_of] * self.backward}: rounded to {self.dtype}",
            f"  line    {self.source or 'unknown'}",
            *([f"  layer   {where}"] if where else []),
            *([f"  step    {_step(self)}"] if self.steps else []),
            f"  errors  {', '.join(errors) or 'none'}" + " (it overflows)" * self.overflows,
        ]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class RoundingReport:
    """The damage that rounding does to a function. `str()` is a table, and `rows` is for programs.

    Attributes:
      rows: One row for each line, layer and pass that rounds, the most damage first.
      compute_dtype: The name of the compute dtype, or of the format: "float8".
      share: The share of the FLOPs that are products in the compute dtype or format, from 0 to 1.
      value_error: The measured error of the value of the function, with all roundings.
      gradient_error: The measured error of its gradients. NaN if there are none.
      opaque: Lines whose gradients JAX cannot differentiate. Damage that goes through them does not count.
      lints: As in an `AutocastReport`: values of 16 bit that need more digits, whatever their error here.
    """

    rows: tuple[RoundingRow, ...]
    compute_dtype: str
    share: float
    value_error: float
    gradient_error: float
    opaque: tuple[str, ...]
    lints: tuple[str, ...]
    _search: RuleSearch = dataclasses.field(repr=False, compare=False)

    def rules(self, *, error: float) -> dict[str, str]:
        """Rules for `autocast`, with few FLOPs in more bits, that bring an error below a bound.

        For a compute dtype, they say which products run in float32, or keep float32 results. For a format of 8 bits,
        they say which products stay in 16 bit, each in all three passes, or keep float32 results if they have 16 bit
        anyway: "accumulate" has 16-bit operands and a float32 result.

        The predicted damage and the FLOPs of each product decide which sets of rules are tried, with the fewest FLOPs
        first. A few are measured, each by a run of the function, and the set that is returned was run with `autocast`.
        Another set may have fewer FLOPs.

        Args:
          error: The bound of the error of the gradients, or of the value if there are no gradients.

        Returns:
          Rules to merge into the rules of `autocast`. They are empty if the error is below the bound without them.

        Raises:
          ValueError: If no rules reach the bound, because the code itself computes in 16 bit, or for a format because
            16 bit is not enough: it says what the least error is, and which lines make it. Or if the bound is not
            positive, or there is no error.

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
        found = self._search.find(error)
        if self._error_of(found) > error:
            raise ValueError(self._search.unreachable(found, error))
        if found.warning:
            warnings.warn(found.warning, stacklevel=2)
        return found.rules

    def curve(self, errors: Sequence[float] = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01)) -> ErrorCurve:
        """The share of the FLOPs in few bits for several bounds of an error, each with its rules.

        Args:
          errors: The bounds, as in `rules`.

        Returns:
          An `ErrorCurve`, with a point for each bound. If no rules reach a bound, its point has the least error.

        Raises:
          ValueError: If a bound is not positive, or there is no error.

        Examples:
          >>> import jax, jax.numpy as jnp, jamp, jamp.debug
          >>> def fun(w, x):
          ...     for i in range(2):
          ...         with jax.named_scope(f"layer_{i}"):
          ...             x = jnp.tanh(x @ w[i])
          ...     return jnp.mean((x @ w[2]) ** 2)
          >>> w, x = jax.random.normal(jax.random.key(0), (3, 128, 128)) / 12, jnp.ones((128, 128))
          >>> report = jamp.debug.rounding_report(fun, jamp.Float8())(w, x)
          >>> [point.share > 0 for point in report.curve((0.5, 0.001)).points]
          [True, False]
        """
        points = []
        for bound in errors:
            found = self._search.find(bound)
            points.append(ErrorPoint(bound, self._error_of(found), found.errors.share, found.rules))
        return ErrorCurve(self.compute_dtype, tuple(points))

    def _error_of(self, found: Found) -> float:
        """The error that `rules` bounds."""
        return found.errors.total[not math.isnan(self.gradient_error)]

    def __str__(self) -> str:
        total = f"error of the value {self.value_error:.1e}"
        if not math.isnan(self.gradient_error):
            total += f", of the gradients {self.gradient_error:.1e}"
        if not self.rows:
            return f"rounding to {self.compute_dtype}: no operation rounds"
        columns = ("operation", "format", "pass", "where", "FLOPs", "value", "gradients", "measured", "line")
        lines = [_cells(row) for row in self.rows[:_SHOWN]]
        more = len(self.rows) - len(lines)
        rest = [f"... and {more} rows with less damage, in `.rows`"] if more else []
        unseen = [
            f"JAX has no derivative of what runs at {line}: damage in it and through it is not counted"
            for line in self.opaque
        ]
        unseen += [f"lint: {x}" for x in self.lints]
        table = _table.with_header(columns, lines, ("where", "line"))
        is_16_bit = self.compute_dtype in ("bfloat16", "float16", "float32")
        share = "" if is_16_bit else f", {self.share:.1%} of the FLOPs in it"
        title = f"rounding to {self.compute_dtype}{share}: {total}"
        legend = _LEGEND + _OF_OPERANDS * any(row.gradient_of for row in self.rows[:_SHOWN])
        return "\n".join(
            [title, _table.wrapped(legend, 0), "", *table, *rest, *map(_table.wrapped, unseen), *self._next()]
        )

    def _next(self) -> list[str]:
        first = next(row for row in self.rows if row.operation != _RESIDUALS)
        error = self.value_error if math.isnan(self.gradient_error) else self.gradient_error
        if first.overflows:
            return [_table.wrapped(f"next: {first.source} overflows: jamp.debug.find_nonfinite, or full_precision", 6)]
        if not error > 0:
            return []
        what = "value" if math.isnan(self.gradient_error) else "gradients"
        how = f"report.rules(error={error / 10:.0e}) finds rules for autocast that bound the error of the {what}"
        if first.operation not in PRODUCTS:
            narrow, wide = ("float32", "float64") if self.compute_dtype == "float32" else ("16 bit", "float32")
            how = f"if {first.source or 'the code'} itself casts to {narrow}, no rule helps: stay in {wide}. Else {how}"
        return [_table.wrapped(f"next: {how}", 6)]


_PASSES = {
    "": " in the backward pass",
    "left": " for the gradient of the left operand",
    "right": " for the gradient of the right operand",
}
_LEGEND = "Relative errors of a row alone: of value and gradients, predicted; of the gradients, measured"
_OF_OPERANDS = '. The pass "d left" is the gradient of the left operand of a matmul'


def _cells(row: RoundingRow) -> list[str]:
    measured = row.measured[not math.isnan(row.gradient_error)] if row.measured else math.nan
    where = row.scope or _short(row.parameter)
    where += f", most in {row.worst}" * bool(row.worst)
    return [
        row.operation,
        row.format,
        f"d {row.gradient_of}" if row.gradient_of else "backward" * row.backward,
        where + f" {_step(row)}" * bool(row.steps),
        f"{row.flops:.1%}",
        *("overflow" if row.overflows and x > 0 else _error(x) for x in (row.value_error, row.gradient_error)),
        _error(measured),
        _table.short_line(row.source),
    ]


def _short(parameter: str) -> str:
    """Return the end of a long path, because tables cut the middle of their cells: "...['kernel']"."""
    keys = re.findall(r"\[[^]]*\]|\.\w+", parameter)
    return f"...{keys[-1]}" if len(parameter) > 20 and len(keys) > 1 else parameter


def _step(row: RoundingRow) -> str:
    return ", ".join(f"step {i} of {n}" for i, n in zip(row.step, row.steps, strict=False))


def _error(x: float) -> str:
    return "" if math.isnan(x) or not x else f"{x:.1e}"


_CALL = "jamp.debug.rounding_report(loss_fn, jnp.bfloat16)(params, batch)"


@called_as(_CALL, functions=1)
def rounding_report(
    fun: Callable[..., Any],
    compute_dtype: DTypeLike | Format,
    *,
    rules: Mapping[str, str] | None = None,
    residuals: DTypeLike | None = None,
) -> Callable[..., RoundingReport]:
    """Find the operations whose rounding under `autocast` does the most damage to a function and its gradients.

    It runs the function and its gradient in a reference dtype, which is float64 if x64 is on, else float32. To first
    order, the damage of a rounding is its error times the sensitivity of the result to it, which one more backward pass
    gives for all operations. For the gradients, this result is their sum with random signs, which estimates the norm of
    their error. For the first two rows the function also runs with nothing else rounded, to check the prediction. The
    prediction for a scalar value is the expected size of the error. The measurement is one draw.

    The gradients are taken of a scalar first result with respect to the floating arrays in the first argument that
    holds some. In an argument that `jax.grad` takes, Python floats count as arrays. In float16 they are computed at a
    loss scale of 2**15, or a lower one if that overflows. Code that rounds without autocast is reported too. It takes
    about ten times as long as a compiled gradient, after it has compiled its own programs, and keeps all values in
    memory, so use a small batch. Inside `while`, `shard_map`, solvers and kernels it does not tell operations apart.

    In a format of 8 bits, a row is a product in one of its three passes: the result, or the gradient of the left or of
    the right operand. To round is to encode the operands as the format does, and the sensitivity is taken of the
    product of operands that are not encoded. Products that [stay in 16 bit](../8-bit.md#which-products) have rows too.
    With the rule {"dot_general": "compute"} the report is about all products in 8 bits.

    Args:
      fun: A function of arrays, or pytrees of them, and any other arguments.
      compute_dtype: float16, bfloat16, or for code in float64 float32, or its name. Or a format of 8 bits: a `Float8`,
        `Int8` or `MXFP8`, or one of your own.
      rules: As for `autocast`.
      residuals: As for `autocast`: with `jnp.int8`, one row "residuals" has the error that residuals in 8 bits add to
        the gradients, measured by two more gradients. `gradient_error` and the bound of `rules` are without it.

    Returns:
      A function of the arguments of `fun` that returns a `RoundingReport`.

    Raises:
      ValueError: If the function or its gradients are not finite in the reference. For others see `autocast`.

    Examples:
      >>> import jax, jax.numpy as jnp, jamp.debug
      >>> def attend(q, k, v):
      ...     return jnp.sum(jax.nn.softmax(100 * (q @ k.T)) @ v)
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 16, 16))
      >>> report = jamp.debug.rounding_report(attend, jnp.bfloat16)(q, k, v)
      >>> report.rows[0].operation, report.rows[0].value_error > 30 * report.rows[-1].value_error
      ('dot_general', True)

      Which products can run in float8? In "up", a feature is 100 times larger than the others:

      >>> def fun(w, x):
      ...     with jax.named_scope("up"):
      ...         h = jnp.tanh(x.at[:, 3].set(8.0) @ w["up"] - 8 * jax.lax.stop_gradient(w["up"])[3])
      ...     with jax.named_scope("down"):
      ...         return jnp.mean((jnp.tanh(h @ w["down"]) @ w["head"]) ** 2)
      >>> keys = jax.random.split(jax.random.key(0), 4)
      >>> *w, x = [jax.random.normal(key, (128, 128)) / 12 for key in keys]
      >>> report = jamp.debug.rounding_report(fun, jamp.Float8())(dict(zip(("up", "down", "head"), w)), x)
      >>> report.rows[0].scope, report.rules(error=0.4)
      ('up', {'dot_general[up]': 'accumulate'})
    """
    if not isinstance(compute_dtype, str | Format) and (
        isinstance(compute_dtype, Mapping | Sequence) or is_array(compute_dtype)
    ):
        got = describe(compute_dtype)
        raise TypeError(f"jamp.debug.rounding_report takes a dtype as 'compute_dtype', got {got}. Write {_CALL}.")
    autocast(fun, compute_dtype, rules=rules, residuals=residuals)  # checks the arguments

    def report(*args: Any, **kwargs: Any) -> RoundingReport:
        check_concrete("rounding_report", Call(args, kwargs).leaves)
        compiled: dict[Any, Any] = {}
        errors_of = lambda more, *exact: Errors(
            fun, compute_dtype, {**more, **(rules or {}), **more}, args, kwargs, compiled, *exact
        )
        with naming_states(_CALL, args):
            errors = errors_of({})
        program, total, damages = errors.program, errors.total, errors.damages
        layers: dict[Any, list[int]] = {}  # the sites of each row
        for i, x in enumerate(program.sites):
            layer = x.operation, x.line, _NUMBER.sub("*", x.scope), x.is_backward, x.gradient_of, x.steps, x.format
            layers.setdefault(layer, []).append(i)
        pairs = [(_row(program.sites, mine, damages, program.flops), mine) for mine in layers.values()]
        pairs = [(row, mine) for row, mine in pairs if row.damage or row.flops]  # A result depends on these.
        pairs.sort(key=lambda pair: -pair[0].damage)
        checked = [
            dataclasses.replace(row, measured=errors.of(dict.fromkeys(mine, ON))) for row, mine in pairs[:_CHECKED]
        ]
        rows = [*checked, *(row for row, _ in pairs[_CHECKED:])]
        if residuals is not None and errors.has_gradients:
            rows = sorted([*rows, _row_of_residuals(errors.of_residuals(residuals))], key=lambda row: -row.damage)
        name, search = errors.format.name if errors.format else errors.dtype, RuleSearch(errors, errors_of)
        opaque = tuple(sorted(program.opaque))
        found = lints_of(lambda more: passes(fun, compute_dtype, {**(rules or {}), **more})(args, kwargs))
        return RoundingReport(tuple(rows), name, errors.share, *total, opaque, found, search)

    return report


def _row(
    sites: Sequence[Site], mine: Sequence[int], damages: Sequence[Mapping[int, Damage]], flops: float
) -> RoundingRow:
    """Return the row of some sites, from the damage of each to the value, and to the gradients if there are any."""
    first, known = sites[mine[0]], [[by_site[i] for i in mine if i in by_site] for by_site in damages]
    some = next((x for x in known if x), [])
    none = 0.0 if some else math.nan
    predicted = [math.sqrt(sum(_predicted(x) ** 2 for x in of)) if of else none for of in known]
    of_value, of_gradients, *_ = [*predicted, math.nan]
    error, size = (float(sum(np.sum(getattr(x, name)) for x in some)) for name in ("error", "size"))
    by_layer = {i: _predicted(damages[-1][i]) for i in mine if i in damages[-1]}
    worst = max(by_layer, key=lambda i: by_layer[i], default=mine[0])
    is_one = len(mine) > 1 and by_layer and by_layer[worst] ** 2 > 0.5 * sum(x**2 for x in by_layer.values())
    step: tuple[int, ...] = ()
    squares = damages[-1][worst].operands + damages[-1][worst].result if by_layer else np.zeros(0)
    if first.steps and np.size(squares):
        step = tuple(int(i) for i in np.unravel_index(np.argmax(squares), first.steps))
    return RoundingRow(
        first.operation,
        first.line,
        pattern(sites[i].scope for i in mine),
        pattern(path for i in mine for path in sites[i].parameters),
        first.is_backward,
        first.gradient_of,
        ", ".join(sorted({dtype for i in mine for dtype in sites[i].dtypes})),
        sum(sites[i].flops for i in mine) / flops if flops else 0.0,
        math.sqrt(error / size) if size else none,
        of_value,
        of_gradients,
        any(bool(np.any(x.overflows)) for x in some),
        step,
        first.steps,
        worst=sites[worst].scope if is_one else "",
        format=first.format,
    )


def _row_of_residuals(error: float) -> RoundingRow:
    """Return the row of residuals in 8 bits. They change no value."""
    return RoundingRow(_RESIDUALS, "", "", "", True, "", "int8", 0.0, error, 0.0, error, measured=(0.0, error))


def _predicted(damage: Damage) -> float:
    """Return the error of a site. A sum far beyond its expected size shows that the errors are not independent."""
    expected = math.sqrt(float(np.sum(damage.operands) + np.sum(damage.result)))
    total = abs(float(np.sum(damage.total)))
    return total if total > 4 * expected else expected
