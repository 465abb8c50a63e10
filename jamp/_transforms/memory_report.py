"""`memory_report`: what the backward pass of a function keeps, by line and layer."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jax.typing import DTypeLike

from jamp import _table
from jamp._arguments import check_function, of_types
from jamp._jaxprs import ir, walk
from jamp._jaxprs.ir import ClosedJaxpr
from jamp._jaxprs.primitives import operation
from jamp._jaxprs.source import pattern, scope, user_line
from jamp._numbers import as_number
from jamp._recompute.budget import MemoryBudget, bytes_of, check_budget, megabytes
from jamp._recompute.choose import choose
from jamp._recompute.opened import without_calls
from jamp._recompute.plan import MemoryPlan, Occurrence, Value
from jamp._recompute.stored import round_stored
from jamp._recompute.stores import Store, as_store
from jamp._transforms.recompute import traced_with_budget


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """One row of a `MemoryReport`: the values that one line of source computes, in all layers.

    Attributes:
      operation: The primitive that computes them.
      type: Their dtype and shape: "bfloat16[8,12,1024,1024]". In a loop, of one step.
      kept: Whether they are kept for the backward pass. If not, the budget drops them.
      store: How they are kept: "itself" or "int8", or else "again".
      nbytes: Their bytes in all layers and steps, as they are kept.
      flops: The FLOPs of computing one of them again where the others are kept, for all of them. inf if it cannot be.
      count: How many there are.
      source: The user's line, "model.py:12 (attend)", and after a `>` the innermost line of a package that it calls.
      scope: The name scopes, such as the names of Linen modules: "h_*/attn" for many layers.
    """

    operation: str
    type: str
    kept: bool
    store: str
    nbytes: float
    flops: float
    count: int
    source: str
    scope: str


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """What the backward pass of a function keeps. `str()` is a table, and `rows` is for programs.

    Attributes:
      rows: Kept and dropped values, the most bytes first.
      kept: The bytes that are kept.
      without_budget: The bytes that are kept at a budget of 1.0, as they are.
      flops: The FLOPs that the backward pass computes again.
      largest: The most bytes that one segment computes again and holds at once.
      end: The bytes of the last product and what follows, such as logits. The backward pass reads them at once, so they
        are neither dropped nor in `kept`.
      memory_budget: The budget.
      uncoded: Why nothing is kept in 8 bits, if `residuals` asks for it. Else it is empty.
    """

    rows: tuple[MemoryRow, ...]
    kept: float
    without_budget: float
    flops: float
    largest: float
    end: float
    memory_budget: MemoryBudget
    uncoded: str = ""

    def beside(self, compiled: Any) -> str:
        """Compare with a compiled gradient, `jax.jit(jax.grad(fun)).lower(*args).compile()`.

        Temporary memory also holds the gradients, the values that a segment computes again, and XLA's temporaries.
        """
        found = compiled.memory_analysis()
        temporary = found.temp_size_in_bytes
        rest = temporary - self.kept - self.end - self.largest
        parts = [
            ("temporary memory, as compiled", temporary),
            ("kept for the backward pass", self.kept),
            ("the last product and what follows, read at once", self.end),
            ("computed again at once, at most", self.largest),
            ("the rest: gradients of activations, casts and copies", rest),
        ]
        return "\n".join(f"{megabytes(size):>10} MB  {what}" for what, size in parts)

    def __str__(self) -> str:
        share = self.kept / self.without_budget if self.without_budget else 1.0
        title = [
            f"The backward pass keeps {megabytes(self.kept)} MB, {share:.0%} of the "
            f"{megabytes(self.without_budget)} MB without a budget.",
            f"It computes {self.flops / 1e9:.4g} GFLOP again. GFLOP in a row: to compute its values again.",
            *filter(None, [self.uncoded]),
        ]
        header = ("MB", "share", "GFLOP", "values", "line and layer")
        lines = [_cells(row, self.without_budget) for row in self.rows if row.nbytes >= 0.005 * self.without_budget]
        hidden = len(self.rows) - len(lines)
        more = [f"... and {hidden} rows with less than 0.5 %, in `.rows`"] if hidden else []
        sections = []
        for kept, name in ((True, "Kept"), (False, "Dropped by the budget")):
            chosen = [cells for cells, row in zip(lines, self.rows, strict=False) if row.kept == kept]
            sections += ["", name, *_table.with_header(header, chosen, header[4:])] if chosen else []
        if self.memory_budget == 1.0:
            next_step = "To keep less: a memory_budget of 0.5."
        elif self.kept <= bytes_of(self.memory_budget, self.without_budget):
            next_step = f"To keep less: a memory_budget of less than {self.memory_budget}."
        else:
            next_step = "This is the least that a budget can keep."
        return "\n".join([*title, *sections, *more, "", next_step])


def memory_report(
    fun: Callable[..., Any], memory_budget: MemoryBudget = 1.0, *, residuals: DTypeLike | None = None
) -> Callable[..., MemoryReport]:
    """Report what the backward pass of a function keeps under `recompute`, without running it.

    For a function under autocast, pass it: `memory_report(jamp.autocast(loss, dtype), 0.5)`. It has the
    arguments and errors of `recompute`, and ignores the budget and the `residuals` of `autocast`. Arrays may be given
    as `jax.ShapeDtypeStruct`. Python numbers are constants: if `jax.grad` differentiates one, pass `jnp.asarray(x)`.

    Returns:
      A function of the arguments of `fun` that returns a `MemoryReport`. It traces `fun` and computes nothing.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> loss = lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w)
      >>> report = jamp.memory_report(loss)(jnp.ones((64, 64)), jnp.ones((256, 64)))
      >>> [(row.operation, row.type, row.nbytes, row.kept) for row in report.rows]
      [('dot_general', 'float32[256,64]', 65536.0, True)]
    """
    check_function(fun, "jamp.memory_report({}, 0.5)")
    check_budget(memory_budget)
    memory_budget, store = as_number(memory_budget), as_store(residuals)

    return of_types(lambda *args, **kwargs: _report(fun, memory_budget, store, args, kwargs))


def _report(
    fun: Callable[..., Any], budget: MemoryBudget, residuals: Store, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> MemoryReport:
    _, closed = traced_with_budget(args, kwargs, fun, budget, "memory_report")
    closed = without_calls(round_stored(closed))
    plan, without = choose(closed, budget, residuals)
    rows: dict[tuple[Any, ...], list[tuple[Value, float]]] = {}
    for value, is_kept, flops in _values(plan):
        eqn = value.eqn
        assert eqn is not None  # An argument is in no row.
        line = user_line(eqn) or value.context.line or "line unknown"
        shape = ",".join(map(str, value.aval.shape))
        store = value.store.value if is_kept else "again"
        key = operation(eqn), f"{value.aval.dtype}[{shape}]", is_kept, store, line
        rows.setdefault(key, []).append((value, flops))
    found = [
        MemoryRow(
            operation,
            kind,
            is_kept,
            store,
            sum(value.size for value, _ in members),
            sum(flops for _, flops in members),
            sum(value.context.times for value, _ in members),
            line,
            pattern(filter(None, (_scope(value) for value, _ in members))),
        )
        for (operation, kind, is_kept, store, line), members in rows.items()
    ]
    found.sort(key=lambda row: -row.nbytes)
    is_uncoded = residuals is not Store.ITSELF and all(row.store != residuals.value for row in found)
    why = _why_uncoded(closed, budget) if is_uncoded else ""
    return MemoryReport(tuple(found), plan.total, without, plan.flops, plan.largest, plan.end, budget, why)


def _why_uncoded(closed: ClosedJaxpr, budget: MemoryBudget) -> str:
    why = ""
    if any(ir.name(eqn) == "remat2" for eqn in walk.all_equations(closed.jaxpr)):
        why = " What your own jax.checkpoint or nn.remat keeps stays as it is."
    elif budget == 1.0:
        why = " It would free less than an eighth of the bytes."
    return f"Nothing is kept in 8 bits.{why}"


def _scope(value: Value) -> str:
    assert value.eqn is not None
    return scope(value.eqn, value.context.scope)


def _values(plan: MemoryPlan) -> list[tuple[Value, bool, float]]:
    """The values that are kept or dropped: whether they are kept, and the FLOPs of computing them again."""
    found: dict[Value, tuple[bool, float]] = {}
    for x in plan.occurrences.values():
        for i, flops in _dropped(x).items():
            found[x.values[i]] = False, flops
    for x in plan.occurrences.values():
        for i, flops in _prices(x).items():
            found[x.values[i]] = True, flops
    others = {value: (True, math.inf) for value, n in plan.readers.items() if n > 0 and value.eqn}
    return [(value, *rest) for value, rest in (others | found).items() if value.size]


def _prices(x: Occurrence) -> dict[int, float]:
    """The values of a segment that are kept, and the FLOPs of computing each again."""
    kept = x.choice.kept
    found = (i for i in x.residuals.needs(kept)[0] if i >= 0 and not x.segment.is_end)
    return {i: x.times * (x.residuals.choice(kept - {i}, frozenset()).flops - x.choice.flops) for i in found}


def _dropped(x: Occurrence) -> dict[int, float]:
    """The values that would be kept without a budget, and the FLOPs of computing each again."""
    now, first = x.residuals.needs(x.choice.kept)[0], x.residuals.choice(x.residuals.kept_without_budget, frozenset())
    found = (i for i in x.residuals.needs(x.residuals.kept_without_budget)[0] if i >= 0 and i not in now)
    return {
        i: x.times * (x.residuals.choice(x.residuals.kept_without_budget - {i}, frozenset()).flops - first.flops)
        for i in found
    }


def _cells(row: MemoryRow, total: float) -> list[str]:
    share = f"{row.nbytes / (total or 1):.1%}"
    again = "-" if row.flops == math.inf else f"{row.flops / 1e9:.1f}"
    kind = f"{row.type} in int8" if row.store == "int8" else row.type
    value = f"{row.count} {kind} {row.operation}".replace("bfloat", "bf").replace("float", "f")
    line = _table.short_line(row.source)
    return [megabytes(row.nbytes), share, again, value, f"{line} {row.scope}".rstrip()]
