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
from jamp.debug._comparison import JUMP, ComparedRow, Comparison
from jamp.debug._observe import Operation, Value, difference, observe


def compare(fun: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Comparison]:
    """Run two functions of the same arguments, and find the first operation where they part.

    Both run operation by operation, as in `find_nonfinite`. Of each result only some sums are kept. Operations are
    aligned by name scope, line, primitive, shape and values, so that each function may have some that the other one has
    not. A loop may be unrolled in one of them, a batch split into micro-batches, and tokens decoded one by one.

    Two values of the same operation part if they differ by more than eight roundings, and eight times more than their
    operands do. If the functions compute in different dtypes, the coarser one counts.

    Args:
      fun: A function of arrays, or pytrees of them, and any other arguments.
      other: A function of the same arguments: before and after a change, sampler and trainer, float32 and autocast, one
        device and several.

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
        apart = [_result_difference(x.array, y.array) for x, y in zip(results, others, strict=False)]
        reaching = _reaching(aligned, rows, list(zip(results, apart, strict=False)))
        rows = [dataclasses.replace(row, reaches_results=k in reaching) for k, row in enumerate(rows)]
        i = next((i for i, row in enumerate(rows) if row.is_jump and row.reaches_results), None)
        only: list[tuple[str, ...]] = [(), ()]
        if i is not None:
            agreed = [k for k in range(i) if rows[k].reaches_results and rows[k].difference <= JUMP * rows[k].rounding]
            starts, stops = aligned.pairs[agreed[-1]] if agreed else (-1, -1), aligned.pairs[i]
            sides = zip((aligned.ours, aligned.theirs), starts, stops, zip(*aligned.pairs, strict=True), strict=True)
            only = [
                tuple(_name(side[k].operation) for k in range(start + 1, stop) if k not in matched)
                for side, start, stop, matched in sides
            ]
        return Comparison(
            tuple(rows),
            None if i is None else rows[i],
            only[0],
            only[1],
            tuple(x for x in apart if x is not None),
            (compiled, other_compiled),
        )

    return comparison


def _reaching(
    aligned: Alignment, rows: Sequence[ComparedRow], results: Sequence[tuple[Value, float | None]]
) -> set[int]:
    """The rows whose difference reaches a result. That of a masked value does not."""
    row_of = {i: k for k, (i, _) in enumerate(aligned.pairs)}
    unit = max((row.rounding for row in rows), default=0.0)
    limits = [math.inf if apart is None else JUMP * max(apart, unit) for _, apart in results]
    todo = [(aligned.entry_of[i], limit) for (x, _), limit in zip(results, limits, strict=True) for i in x.made_by]
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


def _run(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Operation], list[Value], float]:
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
        # What differs much more than the result was masked, or is not the same operation.
        read = [differences[0].get(k, 0.0) for k in x.reads] + [differences[1].get(k, 0.0) for k in y.reads]
        operands = max((z for z in read if z <= JUMP * max(apart, unit)), default=0.0)
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
    """Half the distance of 1 to the next number. Float32 has more, because sums may be in another order."""
    eps = float(jnp.finfo(entry.operation.dtype).eps)
    return eps / 2 if entry.operation.dtype.itemsize < 4 else 4 * eps


def _name(x: Operation) -> str:
    return f"{x.primitive} at {x.place.line or 'an unknown line'}" + f" in {x.place.scope}" * bool(x.place.scope)


def _result_difference(x: Any, y: Any) -> float | None:
    """The relative difference of two results, or None if they are no floating arrays of one shape."""
    return _distance([(x, y)]) if is_floating(x) and is_floating(y) and x.shape == y.shape else None


def _distance(pairs: Sequence[tuple[Any, Any]]) -> float:
    """The norm of the differences of several arrays over that of the second ones."""
    wide = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs if is_floating(y)]
    size = math.sqrt(sum(float(np.sum(y**2)) for _, y in wide))
    error = math.sqrt(sum(float(np.sum((x - y) ** 2)) for x, y in wide))
    return error / size if size else error
