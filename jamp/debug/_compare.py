"""`compare`, which says whether the results of two programs differ by more than rounding, and where they part."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jamp._arguments import Call, named, paths
from jamp._cast import is_floating, is_inexact
from jamp.debug._align import LAYOUT, Entry, Program, align
from jamp.debug._comparison import ComparedRow, Comparison, Difference
from jamp.debug._numbers import JUMP, agree, apart, relative, roundoff, same_elements
from jamp.debug._observe import Operation, observe, to_host
from jamp.debug._parting import Parted, Parting, part


def compare(fun: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Comparison]:
    """Say whether the results of two functions differ by more than rounding explains, and where the functions part.

    Both run operation by operation, as they are and in float64. What differs in float64 is not rounding. So the order
    of sums, the dtypes and the casts of the functions make no difference, and a test needs no tolerance:
    `assert not jamp.debug.compare(fun, other)(*args)`.

    If the results differ, `compare` follows the difference back to values that both functions compute, in any order
    and layout. A loop may be unrolled in one of them, a batch split into micro-batches, and tokens decoded one by one.
    Of the operations after these values it names those whose constants, arguments or options differ, those that only
    one function has, and the first whose operands agree and whose result does not.

    All values of both functions are kept on the host: use a small batch. A call without a body that can be entered,
    such as a kernel, runs as it is, and its rounding is allowed for. Rounding to integers counts as a difference.

    Args:
      fun: A function of arrays, or pytrees of them, and any other arguments.
      other: A function of the same arguments: before and after a change, sampler and trainer, float32 and autocast, one
        device and several.

    Returns:
      A function of the arguments that returns a `Comparison`. It is false if rounding explains all differences.

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
        pairs = [[run.operations[i].numbers for i in run.results] for run in (here, there)]
        explained = [agree(x, y) for x, y in zip(*pairs, strict=True)]
        differing = [k for k, x in enumerate(here.apart(there)) if np.isinf(x) or not explained[k]]
        programs = align(here.operations, there.operations, [here.results, there.results])
        entries = [(programs[0].entry_of[here.results[k]], programs[1].entry_of[there.results[k]]) for k in differing]
        parting = part(*programs, entries) if differing else Parting([], [])
        rows, first = _rows(programs, parting)
        return Comparison(
            results_part=bool(differing),
            results=tuple(here.apart(there)),
            without_rounding=tuple(apart(x, y)[0] for x, y in zip(*pairs, strict=True)),
            dtype="" if differing else _dtype(here, there),
            differences=tuple(_readable(x) for x in parting.differences),
            first=first,
            rows=tuple(rows),
            compiled=(here.compiled_apart, there.compiled_apart),
        )

    return comparison


class _Run(NamedTuple):
    """The operations of a function, those that computed its results, the results and their tree.

    `compiled_apart` is how much the results differ if the function is compiled whole.
    """

    operations: list[Operation]
    results: list[int]
    tree: Any
    compiled_apart: float

    def arrays(self) -> list[Any]:
        """The results as traced."""
        found = [self.operations[i].numbers for i in self.results]
        return [x.traced for x in found]

    def apart(self, other: "_Run") -> list[float]:
        """How much the results differ, as traced."""
        return list(map(relative, self.arrays(), other.arrays()))


def _run(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Run:
    call = Call(args, kwargs)
    flat = call.traceable(fun)
    closed = jax.make_jaxpr(flat)(*call.leaves)
    tree = call.result_structure  # without the new values of an NNX module
    parameters = list(named(fun, args, kwargs))
    whole = [parameters[path[1].idx] if hasattr(path[1], "idx") else str(path[1].key) for path in call.paths]
    names = [path or name for path, name in zip(paths(fun, args, kwargs), whole, strict=True)]
    operations, results = observe(closed, call.leaves, names)
    run = _Run(operations, results[: tree.num_leaves], tree, 0.0)
    compiled = [to_host(x) for x in jax.jit(flat)(*call.leaves)[: tree.num_leaves]]
    floating = [relative(x, y) for x, y in zip(compiled, run.arrays(), strict=True) if is_inexact(x)]
    return run._replace(compiled_apart=max(floating, default=0.0))


def _dtype(here: _Run, there: _Run) -> str:
    """The finest dtype of the functions whose rounding explains how much the results differ."""
    used = {str(x.dtype): roundoff(x.dtype) for run in (here, there) for x in run.operations if is_floating(x)}
    used = dict(sorted(used.items(), key=lambda x: x[1]))
    numbers = [[run.operations[i].numbers for i in run.results] for run in (here, there)]
    for dtype, unit in used.items():
        limits = [
            JUMP * max(unit, *(relative(z.value, z.traced) * unit / z.unit for z in (x, y)))
            for x, y in zip(*numbers, strict=True)
        ]
        if all(x <= limit for x, limit in zip(here.apart(there), limits, strict=True)):
            return dtype
    return next(reversed(used), "")


def _rows(programs: tuple[Program, Program], parting: Parting) -> tuple[list[ComparedRow], ComparedRow | None]:
    """The rows, and the first one that differs."""
    is_row = lambda x: is_floating(x.operation) and not x.is_leaf and x.operation.primitive not in LAYOUT
    key = lambda x: (x.kind, x.operation.primitive)
    partners: dict[Any, list[Entry]] = {}
    for y in programs[1].entries:
        if is_row(y) and y.kind is not None:
            partners.setdefault(key(y), []).append(y)
    for x, y in parting.aligned:
        partners.setdefault(id(x), []).append(y)
    pairs = []
    for x in filter(is_row, programs[0].entries):
        if same := partners.get(id(x) if x.kind is None else key(x)):
            pairs.append((x, same.pop(0)))
    rows = [_row(x, y) for x, y in pairs]
    differing = [i for i, (x, _) in enumerate(pairs) if x.kind is None]
    about = [x for d in parting.differences[:1] for x in (d.here, d.there) if x]
    first = next((i for i in differing if any(z is x for z in pairs[i] for x in about)), *differing[:1] or [None])
    return rows, None if first is None else rows[first]


def _row(x: Entry, y: Entry) -> ComparedRow:
    """The row of two aligned entries."""
    place = lambda z: (z.operation.primitive, z.operation.location.line, z.operation.location.scope, str(z.operation.dtype))
    is_moved = not agree(x.numbers, y.numbers) and same_elements(x.numbers, y.numbers)
    traced = [np.ravel((z.numbers.sorted if is_moved else z.numbers).traced) for z in (x, y)]
    return ComparedRow(*place(x), *place(y), x.operation.location.backward, relative(*traced))


def _readable(x: Parted) -> Difference:
    places = [(z.operation.location.line, z.operation.location.scope) if z else ("", "") for z in (x.here, x.there)]
    return Difference(x.text, x.only, *places[0], *places[1])
