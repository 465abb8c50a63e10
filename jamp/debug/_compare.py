"""`compare`, which names the first operation where two programs part."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jamp._arguments import Call
from jamp._cast import is_floating, is_inexact
from jamp.debug._align import Alignment, Entry, align
from jamp.debug._comparison import JUMP, ComparedRow, Comparison
from jamp.debug._observe import Operation, Value, difference, gain, observe, rows_gain


def compare(fun: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Comparison]:
    """Run two functions of the same arguments, and find the first operation where they part.

    Both run operation by operation, as in `find_nonfinite`. Of each result only some sums are kept. Operations are
    aligned by name scope, line, primitive, shape and values, so that each function may have some that the other one has
    not. A loop may be unrolled in one of them, a batch split into micro-batches, and tokens decoded one by one.

    Two values of the same operation part if they differ by more than eight roundings, and by eight times more than the
    differences of their operands explain. If the functions compute in different dtypes, the coarser one counts, so look
    for mistakes in float32. The memory of the alignment grows with the product of the numbers of operations.

    Args:
      fun: A function of arrays, or pytrees of them, and any other arguments.
      other: A function of the same arguments: before and after a change, sampler and trainer, float32 and autocast, one
        device and several.

    Returns:
      A function of the arguments that returns a `Comparison`. It is false if the functions agree.

    Raises:
      ValueError: If the results have different structures.

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
        here, there = (_run(f, args, kwargs) for f in (fun, other))
        if here.tree != there.tree:
            raise ValueError(f"compare needs functions with the same results, got {here.tree} and {there.tree}.")
        aligned = align(here.operations, there.operations)
        rows, known = _rows(aligned)
        apart = [_apart(x.array, y.array) for x, y in zip(here.results, there.results, strict=True)]
        sides = zip(known, (aligned.entry_of, aligned.other_entry_of), (here, there), strict=True)
        origins = [[[known[entry_of[i]] for i in x.made_by] for x in side.results] for known, entry_of, side in sides]
        units, explained = [], []
        for x, y, ours, theirs in zip(here.results, there.results, *origins, strict=True):
            units.append(max([_unit(x.array), _unit(y.array), *(unit for _, unit in (*ours, *theirs))]))
            explained.append(max([units[-1], *(apart for apart, _ in (*ours, *theirs))]))
        limits = [JUMP * max(pair) for pair in zip(apart, units, strict=True)]
        reaching = _reaching(aligned, rows, here.results, limits)
        rows = [dataclasses.replace(row, reaches_results=k in reaching) for k, row in enumerate(rows)]
        i = next((i for i, row in enumerate(rows) if row.is_jump and row.reaches_results), None)
        results_part = any(x > JUMP * y for x, y in zip(apart, explained, strict=True))
        only = _only(aligned, rows, i) if i is not None or results_part else ((), ())
        first = None if i is None else rows[i]
        return Comparison(
            tuple(rows), first, only[0], only[1], tuple(apart), results_part, (here.compiled, there.compiled)
        )

    return comparison


class _Run(NamedTuple):
    """The operations and results of a function, their tree, and how much they change if it is compiled whole."""

    operations: list[Operation]
    results: list[Value]
    tree: Any
    compiled: float


def _run(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Run:
    call = Call(args, kwargs)
    flat = call.traceable(fun)
    closed = jax.make_jaxpr(flat)(*call.leaves)
    operations, results = observe(closed, call.leaves)
    compiled = jax.jit(flat)(*call.leaves)
    tree = call.result_structure  # without the new values of an NNX module
    pairs = [(x, y.array) for x, y in zip(compiled, results, strict=True) if is_floating(x)]
    return _Run(operations, results[: tree.num_leaves], tree, max((_apart(*pair) for pair in pairs), default=0.0))


def _rows(aligned: Alignment) -> tuple[list[ComparedRow], list[dict[int, tuple[float, float]]]]:
    """The rows, and for each entry of both sides its difference, and the unit roundoff with its amplification."""
    known: list[dict[int, tuple[float, float]]] = [{}, {}]
    sides = aligned.ours, aligned.theirs

    def carried(side: int, entry: Entry) -> list[tuple[float, float]]:
        """The differences and unit roundoffs of the operands of an entry, times their weights in its result."""
        weights = [(k, _weight(entry, sides[side][k])) for k in entry.reads if k in known[side]]
        return [(known[side][k][0] * weight, known[side][k][1] * weight) for k, weight in weights]

    def add_alone(side: int, k: int) -> None:
        """Add an operation that only one function has. Its difference is that of its operands."""
        entry = sides[side][k]
        reads = carried(side, entry)
        unit = max([gain(entry.numbers) * _unit(entry.operation), *(unit for _, unit in reads)])
        known[side].setdefault(k, (max((apart for apart, _ in reads), default=0.0), unit))

    rows, partner, done = [], dict(aligned.pairs), 0
    for i, x in enumerate(aligned.ours):
        j = partner.get(i)
        if j is None:
            add_alone(0, i)
            continue
        for k in range(done, j):
            add_alone(1, k)
        done, y = j + 1, aligned.theirs[j]
        a, b = x.operation, y.operation
        is_split = a.shape != b.shape or x.parts != y.parts
        apart = difference(x.numbers, y.numbers, a.shape[-1:] == b.shape[-1:], is_split)
        reads = [*carried(0, x), *carried(1, y)]
        own = max(_unit(a) * gain(x.numbers), _unit(b) * gain(y.numbers))
        unit = max([own, *(unit for _, unit in reads)])
        known[0][i] = known[1][j] = apart, unit
        seen = max(rows_gain(x.numbers), rows_gain(y.numbers)) if is_split else 1.0
        # An operand that differs much more than the result was masked, or is not the same operation.
        near = [z for z, _ in reads if z <= JUMP * max(apart, unit)]
        rows.append(
            ComparedRow(
                *(a.primitive, a.location.line, a.location.scope, str(a.dtype)),
                *(b.primitive, b.location.line, b.location.scope, str(b.dtype)),
                *(a.location.backward, apart, seen * max(near, default=0.0), seen * unit),
            )
        )
    for k in range(done, len(aligned.theirs)):
        add_alone(1, k)
    return rows, known


def _weight(entry: Entry, read: Entry) -> float:
    """The weight of an operand's relative error in the result: less for a small term of a sum."""
    if entry.operation.primitive not in ("add", "sub", "add_any"):
        return gain(entry.numbers)
    of_read, of_result = (float(x.numbers.square) / max(x.numbers.size, 1) for x in (read, entry))
    return math.sqrt(of_read / of_result) if of_result else math.inf if of_read else 0.0


def _reaching(
    aligned: Alignment, rows: Sequence[ComparedRow], results: Sequence[Value], limits: Sequence[float]
) -> set[int]:
    """The rows whose difference reaches a result. That of a masked value does not."""
    row_of = {i: k for k, (i, _) in enumerate(aligned.pairs)}
    todo = [(aligned.entry_of[i], limit) for x, limit in zip(results, limits, strict=True) for i in x.made_by]
    limit_of: dict[int, float] = {}
    reaching = set()
    while todo:
        i, limit = todo.pop()
        k = row_of.get(i)
        if k is not None and rows[k].difference <= limit:
            reaching.add(k)
            limit = JUMP * max(rows[k].difference, rows[k].rounding)
        if limit > limit_of.get(i, -1.0):
            limit_of[i] = limit
            todo += [(j, limit) for j in aligned.ours[i].reads]
    return reaching


def _only(aligned: Alignment, rows: Sequence[ComparedRow], first: int | None) -> tuple[tuple[str, ...], ...]:
    """The operations that only one function has, between the last that agrees and the first that does not."""
    stop = len(rows) if first is None else first
    agreed = [k for k in range(stop) if rows[k].reaches_results and rows[k].difference <= JUMP * rows[k].rounding]
    sides = aligned.ours, aligned.theirs
    starts = aligned.pairs[agreed[-1]] if agreed else (-1, -1)
    stops = [len(side) for side in sides] if first is None else aligned.pairs[first]
    matched = [{pair[side] for pair in aligned.pairs} for side in (0, 1)]
    return tuple(
        tuple(_name(side[k].operation) for k in range(start + 1, stop) if k not in aligned_here)
        for side, start, stop, aligned_here in zip(sides, starts, stops, matched, strict=True)
    )


def _unit(x: Any) -> float:
    """The unit roundoff of a dtype. For float32 it is larger, because sums may be in another order."""
    if not is_floating(x):
        return 0.0
    eps = float(jnp.finfo(x.dtype).eps)
    return eps / 2 if x.dtype.itemsize < 4 else 4 * eps


def _name(x: Operation) -> str:
    return f"{x.primitive} at {x.location.line or 'an unknown line'}" + f" in {x.location.scope}" * bool(
        x.location.scope
    )


def _apart(x: Any, y: Any) -> float:
    """The relative difference of two arrays. inf if their shapes differ, or inf and NaN are at other elements."""
    if np.shape(x) != np.shape(y):
        return math.inf
    if not is_inexact(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        same = jax.random.key_data(x) == jax.random.key_data(y) if is_key else x == y
        return float(np.mean(~np.asarray(same))) if np.size(same) else 0.0
    wide = [np.asarray(z).astype(np.complex128 if np.iscomplexobj(z) else np.float64) for z in (x, y)]
    finite = np.isfinite(wide[0])
    if not np.array_equal(finite, np.isfinite(wide[1])):
        return math.inf
    left, right = (z[finite] for z in wide)
    size = max(np.linalg.norm(left), np.linalg.norm(right))
    return float(np.linalg.norm(left - right) / size) if size else 0.0
