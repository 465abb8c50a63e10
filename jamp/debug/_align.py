"""Align the operations of two programs, first by their values, then by what they are."""

import dataclasses
import difflib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from jamp._jaxprs.primitives import MOVING
from jamp.debug._compared_array import FILL, NEAR, ComparedArray, have_same_elements
from jamp.debug._observe import ARGUMENT, CONSTANT, Operation

LAYOUT = (MOVING | {"item", "stack"}) - {"concatenate", "dynamic_slice", "gather", "pad", "select_n", "slice"}
_MOST = 2000  # operations of each program that are aligned without their values


@dataclasses.dataclass(eq=False)
class Entry:
    """An operation, in all iterations of the merged loops together.

    Attributes:
      operation, reads: The operation in the first iteration, and the entries of its operands there.
      result, carried: The result in all iterations, and the operands in the others.
      kind: Equal for entries of both programs with the same elements. None if the other program has no such entry.
    """

    operation: Operation
    result: ComparedArray
    reads: list["Entry"]
    carried: list["Entry"]
    kind: int | None = None

    @property
    def is_leaf(self) -> bool:
        """Whether it is an argument or a constant."""
        return self.operation.primitive in (ARGUMENT, CONSTANT)

    @property
    def is_layout(self) -> bool:
        """Whether it only rearranges or copies its operand."""
        return self.operation.primitive in LAYOUT


AlignedProgram = dict[int, Entry]  # by the index of the operation; entries of several operations are repeated


def align(
    ours: Sequence[Operation], theirs: Sequence[Operation], results: Sequence[Sequence[int]]
) -> list[AlignedProgram]:
    """Return two programs whose entries with the same elements have the same `kind`.

    Operations that no result is computed from are left out. In the other program, an iteration of a loop may be an
    operation of its own (layers), or a part of one (micro-batches, or tokens that are decoded one by one). A loop is
    merged if more entries agree then.
    """
    sides = [_used(operations, indices) for operations, indices in zip((ours, theirs), results, strict=True)]
    merged = set[int](), set[int]()
    programs = [_merged(side, set()) for side in sides]
    best = _match(*programs)
    for k, operations in enumerate(sides):
        for loop in dict.fromkeys(loop for x in operations.values() for loop, _ in x.loops):
            tried = list(programs)
            tried[k] = _merged(operations, merged[k] | {loop})
            agreeing = _match(*tried)
            if agreeing > best:
                best, programs = agreeing, tried
                merged[k].add(loop)
    _match(*programs)
    return programs


def skip_layout(x: Entry) -> Entry:
    """Return the entry that an entry rearranges or copies, or the entry itself."""
    while x.is_layout and len(x.reads) == 1:
        (x,) = x.reads
    return x


def computed_from(results: Sequence[Entry], is_followed: Callable[[Entry], bool]) -> Iterator[Entry]:
    """Yield the results, and the entries that they are computed from, as far as they are followed, each once."""
    todo, seen = list(results), set[int]()
    while todo:
        x = todo.pop()
        if id(x) not in seen and is_followed(x):
            seen.add(id(x))
            todo += [*x.reads, *x.carried]
            yield x


def list_entries(program: AlignedProgram) -> list[Entry]:
    """Return the entries of a program, in order."""
    return list({id(x): x for x in program.values()}.values())


def _used(operations: Sequence[Operation], results: Sequence[int]) -> dict[int, Operation]:
    used = set(results)
    for i in reversed(range(len(operations))):
        used.update(operations[i].reads if i in used else ())
    return {i: operations[i] for i in sorted(used)}


def _merged(operations: Mapping[int, Operation], merged: set[int]) -> AlignedProgram:
    seen: Counter[Any] = Counter()
    groups: dict[Any, list[int]] = {}
    for i, x in operations.items():
        # A function may be called several times in an iteration.
        seen[x.equation, x.loops] += 1
        kept = tuple(pair for pair in x.loops if pair[0] not in merged)
        groups.setdefault((x.equation, kept, seen[x.equation, x.loops]), []).append(i)
    program: AlignedProgram = {}
    for group in groups.values():
        parts = [operations[i].result for i in group]
        result = parts[0]
        if any(not np.array_equal(x.value, result.value, equal_nan=x.is_inexact) for x in parts):  # else invariant
            join = lambda arrays: np.concatenate(list(map(np.ravel, arrays)))
            value, traced = join(x.value for x in parts), join(x.traced for x in parts)
            unit, constant, scale = (max(getattr(x, name) for x in parts) for name in ("unit", "constant", "scale"))
            result = ComparedArray(value, traced, unit, constant, scale)
        if operations[group[0]].primitive == "select_n":  # Any fill of a mask does the same.
            result = dataclasses.replace(result, value=np.where(result.value < FILL, -np.inf, result.value))
        program |= dict.fromkeys(group, Entry(operations[group[0]], result, [], []))
    for i, x in operations.items():
        entry = program[i]
        (entry.reads if x is entry.operation else entry.carried).extend(program[k] for k in x.reads)
    return program


def _match(here: AlignedProgram, there: AlignedProgram) -> int:
    """Set the kinds of all entries. Return how many operations agree, in the program where they are fewer."""
    sides = list_entries(here), list_entries(there)
    groups: dict[int, list[Entry]] = {}
    for x in (*sides[0], *sides[1]):
        x.kind = None
    for y in sides[1]:
        groups.setdefault(y.result.value.size, []).append(y)
    norms = {size: np.array([y.result.norm for y in group]) for size, group in groups.items()}
    shared = set.intersection(*({x.operation.name for x in side if _is_argument(x)} for side in sides))
    for kind, x in enumerate(sides[0]):
        size, norm = x.result.value.size, x.result.norm
        for i in np.flatnonzero(np.abs(norms.get(size, np.zeros(0)) - norm) <= NEAR * abs(norm)):
            y = groups[size][i]
            is_open = None in (x.kind, y.kind) and not _is_chance(x, y, shared)
            if is_open and have_same_elements(x.result, y.result):
                x.kind = next(k for k in (x.kind, y.kind, kind) if k is not None)
                y.kind = x.kind if y.kind is None else y.kind
    counts = lambda x: x.kind is not None and not x.is_layout and x.result.value.size > 1
    return min(sum(map(counts, side)) for side in sides)


def _is_argument(x: Entry) -> bool:
    return x.operation.primitive == ARGUMENT


def _is_chance(x: Entry, y: Entry, shared: Set[str]) -> bool:
    """Whether one is an argument that both programs read, and the other one is computed from other arguments too.

    In the first step of a policy gradient, the log-probabilities equal the sampler's, and a ratio of 1 times the
    advantages equals the advantages.
    """
    given, other = (x, y) if _is_argument(skip_layout(x)) else (y, x)
    name = skip_layout(given).operation.name
    if not _is_argument(skip_layout(given)) or _is_argument(skip_layout(other)) or name not in shared:
        return False
    return any(_is_argument(z) and z.operation.name != name for z in computed_from([other], lambda z: True))


def pair_up(ours: Sequence[Entry], theirs: Sequence[Entry]) -> list[tuple[int, int]]:
    """Return the pairs of operations, in order, that seem to be the same."""
    weights = lambda x: frozenset(y.kind for y in map(skip_layout, x.reads) if y.is_leaf and not y.result.is_uniform)
    key = lambda x: (x.operation.primitive, x.result.value.size, weights(x))
    matcher = difflib.SequenceMatcher(None, list(map(key, ours)), list(map(key, theirs)), autojunk=False)
    return [(x.a + k, x.b + k) for x in matcher.get_matching_blocks() for k in range(x.size)]
