"""`compare`, which names the first operation where two programs part."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jamp import _jaxpr
from jamp._autocast.arguments import Call
from jamp._cast import is_floating
from jamp.debug._align import Alignment, Entry, align
from jamp.debug._observe import Operation, Value, difference, observe

_JUMP = 8.0  # A result that differs by more than this, times what its operands differ by, is not explained by rounding.
_SHOWN = 12


@dataclasses.dataclass(frozen=True)
class ComparedRow:
    """An operation of one function, and the same of the other one. All differences are relative, by the norm.

    Attributes:
      operation, source, scope, dtype: The primitive, the user's line, the name scopes, and the dtype of the result.
      other_operation, other_source, other_scope, other_dtype: The same in the other function.
      backward: Whether it is part of a backward pass.
      difference: How much the results differ, estimated to about 15 %.
      operands: How much its operands differ.
      rounding: The unit of rounding of the coarsest dtype up to here.
      reaches_results: Whether a result still shows the difference. That of masked values does not.
    """

    operation: str
    source: str
    scope: str
    dtype: str
    other_operation: str
    other_source: str
    other_scope: str
    other_dtype: str
    backward: bool
    difference: float
    operands: float
    rounding: float
    reaches_results: bool = True

    @property
    def is_jump(self) -> bool:
        """Whether rounding and the operands do not explain the difference."""
        return self.difference > _JUMP * max(self.operands, self.rounding)

    def __str__(self) -> str:
        name = self.operation if self.operation == self.other_operation else f"{self.operation}, {self.other_operation}"
        dtypes = self.dtype if self.dtype == self.other_dtype else f"{self.dtype}, {self.other_dtype}"
        lines = [f"{name}, {dtypes}: differs by {self.difference:.1e}, and its operands by {self.operands:.1e}"]
        for title, line, scope in (("line", self.source, self.scope), ("other", self.other_source, self.other_scope)):
            lines.append(f"  {title:<7} {line or 'unknown'}{f' in {scope}' if scope else ''}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of `compare`. `bool()` is whether the functions part, `str()` is a report.

    Attributes:
      rows: The operations that both functions have, in order.
      first: The first operation that differs by more than rounding explains.
      only_here, only_there: The operations before it that only one of the functions has.
      results: How much each floating result differs.
      compiled: How much the results of each function differ if XLA compiles it whole.
    """

    rows: tuple[ComparedRow, ...]
    first: ComparedRow | None
    only_here: tuple[str, ...]
    only_there: tuple[str, ...]
    results: tuple[float, ...]
    compiled: tuple[float, float]

    def __bool__(self) -> bool:
        rounding = max((row.rounding for row in self.rows), default=0.0) * math.sqrt(len(self.rows))
        return self.first is not None or max(self.results, default=0.0) > _JUMP * rounding

    def __str__(self) -> str:
        worst = max(self.results, default=0.0)
        if not self:
            lines = [f"The functions agree: the results differ by {worst:.1e}, which rounding explains"]
        elif self.first is None:
            lines = [f"The results differ by {worst:.1e}, but of {len(self.rows)} operations in both no one parts"]
        else:
            lines = [f"The functions part at {self.first}"]
            for title, names in (("here", self.only_here), ("there", self.only_there)):
                lines += [f"  only {title:<5} {', '.join(names[-3:])}"] if names else []
        grown, largest = [], 0.0
        for row in self.rows:
            if row.reaches_results and row.difference > 1.5 * largest:
                grown.append(row)
                largest = row.difference
        if grown:
            cells = [
                (f"{x.difference:.1e}", x.operation + ", backward" * x.backward, f"{x.dtype}, {x.other_dtype}", x.scope, x.source)
                for x in grown[-_SHOWN:]
            ]
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            lines += ["", "The difference grows:"]
            lines += ["  " + "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True) if w).rstrip() for line in cells]
            lines += [f"  {worst:.1e}  the results"]
        if max(self.compiled) > max(2 * worst, 1e-6):  # Below, it is the order of sums.
            here, there = self.compiled
            lines += [
                "",
                f"Compiled whole, the results change by {here:.1e} and {there:.1e}. This is the compiler's difference and "
                "not the program's: XLA may leave out roundings (xla_allow_excess_precision).",
            ]
        return "\n".join(lines)


def compare(fun: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Comparison]:
    """Run two functions of the same arguments, and find the first operation where they part.

    Both run operation by operation, as in `find_nonfinite`. Of each result only some sums are kept. Operations are aligned
    by name scope, line, primitive, shape and values, so that each function may have some that the other one has not. A
    loop may be unrolled in one of them, a batch split into micro-batches, and tokens decoded one by one.

    Two values of the same operation part if they differ by more than eight roundings, and eight times more than their
    operands do. If the functions compute in different dtypes, the coarser one counts.

    Args:
      fun, other: Functions of the same arguments: before and after a change, sampler and trainer, float32 and autocast,
        one device and several.

    Returns:
      A function of the arguments that returns a `Comparison`. It is false if the functions agree.

    Examples:
      >>> import jax, jax.numpy as jnp, jamp.debug
      >>> def before(x):
      ...     return jnp.sum(jax.nn.gelu(x @ x))
      >>> def after(x):
      ...     return jnp.sum(jax.nn.gelu(x @ x, approximate=False))
      >>> found = jamp.debug.compare(before, after)(jnp.linspace(-1, 1, 64).reshape(8, 8))
      >>> bool(found), bool(jamp.debug.compare(before, before)(jnp.ones((8, 8))))
      (True, False)
    """

    def comparison(*args: Any, **kwargs: Any) -> Comparison:
        _jaxpr.core()
        (ours, results, compiled), (theirs, others, other_compiled) = (_run(f, args, kwargs) for f in (fun, other))
        aligned = align(ours, theirs)
        rows = _rows(aligned)
        reaching = _reaching(aligned, rows, results)
        rows = [dataclasses.replace(row, reaches_results=k in reaching) for k, row in enumerate(rows)]
        differences = tuple(
            _distance([(x.array, y.array)])
            for x, y in zip(results, others, strict=False)
            if is_floating(x.array) and np.shape(x.array) == np.shape(y.array)
        )
        i, only = next((i for i, row in enumerate(rows) if row.is_jump and row.reaches_results), None), ((), ())
        if i is not None:
            starts, stops = aligned.pairs[i - 1] if i else (-1, -1), aligned.pairs[i]
            sides = zip((aligned.ours, aligned.theirs), starts, stops, strict=True)
            only = tuple(tuple(_name(x.operation) for x in side[start + 1 : stop]) for side, start, stop in sides)
        first = None if i is None else rows[i]
        return Comparison(tuple(rows), first, *only, differences, (compiled, other_compiled))

    return comparison


def _reaching(aligned: Alignment, rows: Sequence[ComparedRow], results: Sequence[Value]) -> set[int]:
    """The rows whose difference reaches a result. That of a masked value does not."""
    row_of = {i: k for k, (i, _) in enumerate(aligned.pairs)}
    todo = [(aligned.entry_of[i], math.inf) for x in results for i in x.made_by]
    seen: dict[int, float] = {}
    while todo:
        i, limit = todo.pop()
        k = row_of.get(i)
        if k is None or rows[k].difference <= limit:
            limit = limit if k is None else _JUMP * max(rows[k].difference, rows[k].rounding)
            if limit > seen.get(i, -1.0):
                seen[i] = limit
                todo += [(j, limit) for j in aligned.ours[i].reads]
    return {row_of[i] for i in seen if i in row_of}


def _run(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Operation], list[Value], float]:
    """The operations of a function, its results, and how much they change if it is compiled whole."""
    call = Call(args, kwargs)
    flat = call.traceable(fun)
    operations, results = observe(jax.make_jaxpr(flat)(*call.leaves), call.leaves)
    compiled = jax.jit(flat)(*call.leaves)
    return operations, results, _distance([(x, y.array) for x, y in zip(compiled, results, strict=True)])


def _rows(aligned: Alignment) -> list[ComparedRow]:
    ours, theirs = aligned.ours, aligned.theirs
    differences: list[dict[int, float]] = [{}, {}]
    units: list[dict[int, float]] = [{}, {}]
    partner = dict(aligned.pairs)
    of = lambda known, entry: max((known.get(k, 0.0) for k in entry.reads), default=0.0)
    # What only one function has differs as much as what it reads.
    rows, done = [], 0
    for i, entry in enumerate(ours):
        j = partner.get(i)
        if j is None:
            differences[0][i] = of(differences[0], entry)
            units[0][i] = max(_unit(entry), of(units[0], entry))
            continue
        for k in range(done, j):
            differences[1].setdefault(k, of(differences[1], theirs[k]))
            units[1].setdefault(k, max(_unit(theirs[k]), of(units[1], theirs[k])))
        done = j + 1
        x, y = entry, theirs[j]
        a, b = x.operation, y.operation
        is_split = a.shape != b.shape or x.parts != y.parts
        apart = difference(x.numbers, y.numbers, a.shape[-1:] == b.shape[-1:], is_split)
        unit = max(_unit(x), _unit(y), of(units[0], x), of(units[1], y))
        operands = max(of(differences[0], x), of(differences[1], y))
        differences[0][i] = differences[1][j] = apart
        units[0][i] = units[1][j] = unit
        rows.append(
            ComparedRow(
                *(a.primitive, a.place.line, a.place.scope, str(a.dtype)),
                *(b.primitive, b.place.line, b.place.scope, str(b.dtype)),
                *(a.place.backward, apart, operands, unit),
            )
        )
    return rows


def _unit(entry: Entry) -> float:
    return float(jnp.finfo(entry.operation.dtype).eps) / 2


def _name(x: Operation) -> str:
    return f"{x.primitive} at {x.place.line or 'an unknown line'}" + f" in {x.place.scope}" * bool(x.place.scope)


def _distance(pairs: Sequence[tuple[Any, Any]]) -> float:
    """The norm of the differences of several arrays over that of the second ones."""
    wide = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs if is_floating(y)]
    size = math.sqrt(sum(float(np.sum(y**2)) for _, y in wide))
    error = math.sqrt(sum(float(np.sum((x - y) ** 2)) for x, y in wide))
    return error / size if size else error
