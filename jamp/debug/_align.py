"""Align the operations of two programs, first by their values, then by what they are."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jamp._primitives import MOVING
from jamp.debug._numbers import NEAR, Numbers, same_elements
from jamp.debug._observe import ARGUMENT, CONSTANT, Operation

LAYOUT = (MOVING | {"item", "stack"}) - {"concatenate", "dynamic_slice", "gather", "pad", "select_n", "slice"}
_MOST = 2000  # operations of each program that are aligned without their values


@dataclasses.dataclass(eq=False)
class Entry:
    """An operation, in all iterations of the merged loops together.

    Attributes:
      operation: The operation in the first iteration.
      numbers: Those of all iterations.
      reads: The entries of the operands, in the first iteration.
      carried: Those of other iterations.
      parts: How many iterations.
      kind: Equal for entries of both programs with the same elements. None if the other program has no such entry.
    """

    operation: Operation
    numbers: Numbers
    reads: list["Entry"]
    carried: list["Entry"]
    parts: int
    kind: int | None = None

    @property
    def is_leaf(self) -> bool:
        """Whether it is an argument or a constant."""
        return self.operation.primitive in (ARGUMENT, CONSTANT)


@dataclasses.dataclass(frozen=True)
class Program:
    """The entries of a program in order, and the entry of each operation."""

    entries: list[Entry]
    entry_of: dict[int, int]

    def behind(self, results: Sequence[int], enter: Callable[[Entry], bool]) -> list[Entry]:
        """The entries that some are computed from, in order, and themselves. `enter` says which of them to follow."""
        todo = [self.entries[i] for i in results]
        found = {id(x) for x in todo}
        while todo:
            x = todo.pop()
            new = {id(y): y for y in (*x.reads, *x.carried) if id(y) not in found and enter(y)}
            found.update(new)
            todo += new.values()
        return [x for x in self.entries if id(x) in found]


def align(ours: Sequence[Operation], theirs: Sequence[Operation], results: Sequence[Sequence[int]]) -> tuple[Program, Program]:
    """Two programs whose entries with the same elements have the same `kind`.

    Operations that no result is computed from are left out. In the other program, an iteration of a loop may be an operation of its own (layers), or a part of one
    (micro-batches, or tokens that are decoded one by one). A loop is merged if more entries agree then.
    """
    sides = [_used(operations, indices) for operations, indices in zip((ours, theirs), results, strict=True)]
    merged = set[int](), set[int]()
    programs = [_program(side, set()) for side in sides]
    best = _match(programs[0], programs[1])
    for k, operations in enumerate(sides):
        for loop in dict.fromkeys(loop for x in operations.values() for loop, _ in x.loops):
            tried = list(programs)
            tried[k] = _program(operations, merged[k] | {loop})
            agreeing = _match(tried[0], tried[1])
            if agreeing > best:
                best, programs = agreeing, tried
                merged[k].add(loop)
    _match(programs[0], programs[1])
    return programs[0], programs[1]


def _used(operations: Sequence[Operation], results: Sequence[int]) -> dict[int, Operation]:
    """The operations by their indices, without those that no result is computed from."""
    used = set(results)
    for i in reversed(range(len(operations))):
        used.update(operations[i].reads if i in used else ())
    return {i: operations[i] for i in sorted(used)}


def _program(operations: Mapping[int, Operation], merged: set[int]) -> Program:
    seen: Counter[Any] = Counter()
    groups: dict[Any, list[int]] = {}
    for i, x in operations.items():
        # A function may be called several times in an iteration.
        seen[x.equation, x.loops] += 1
        kept = tuple(pair for pair in x.loops if pair[0] not in merged)
        groups.setdefault((x.equation, kept, seen[x.equation, x.loops]), []).append(i)
    number = {i: j for j, group in enumerate(groups.values()) for i in group}
    entries = []
    for group in groups.values():
        parts = [operations[i].numbers for i in group]
        numbers = parts[0]
        if any(not np.array_equal(x.value, numbers.value, equal_nan=x.is_inexact) for x in parts):  # else invariant
            join = lambda arrays: np.concatenate([np.ravel(x) for x in arrays])
            unit, constant = max(x.unit for x in parts), max(x.constant for x in parts)
            numbers = Numbers(join(x.value for x in parts), join(x.traced for x in parts), unit, constant)
        entries.append(Entry(operations[group[0]], numbers, [], [], len(group)))
    for entry, group in zip(entries, groups.values(), strict=True):
        reads = [[entries[number[k]] for k in operations[i].reads] for i in group]
        entry.reads, entry.carried = reads[0], [x for later in reads[1:] for x in later if x not in reads[0]]
    return Program(entries, number)


def _match(here: Program, there: Program) -> int:
    """Set the kinds of all entries. Return how many operations agree, in the program where they are fewer."""
    groups: dict[int, list[Entry]] = {}
    for x in (*here.entries, *there.entries):
        x.kind = None
    for y in there.entries:
        groups.setdefault(y.numbers.value.size, []).append(y)
    norms = {size: np.array([y.numbers.norm for y in group]) for size, group in groups.items()}
    for kind, x in enumerate(here.entries):
        size, norm = x.numbers.value.size, x.numbers.norm
        for i in np.flatnonzero(np.abs(norms.get(size, np.zeros(0)) - norm) <= NEAR * abs(norm)):
            y = groups[size][i]
            if None in (x.kind, y.kind) and same_elements(x.numbers, y.numbers):
                x.kind = x.kind if x.kind is not None else y.kind if y.kind is not None else kind
                y.kind = y.kind if y.kind is not None else x.kind
    counts = lambda x: x.kind is not None and x.operation.primitive not in LAYOUT and x.numbers.value.size > 1
    return min(sum(map(counts, side.entries)) for side in (here, there))


def pairs(ours: Sequence[Entry], theirs: Sequence[Entry], kinds: Callable[[Entry], Any]) -> list[tuple[int, int]]:
    """The pairs of operations, in order, that are most alike. `kinds` are those of the operands of an entry."""
    ours, theirs = ours[:_MOST], theirs[:_MOST]
    if not ours or not theirs:
        return []

    def equal(key: Callable[[Entry], Any]) -> np.ndarray[Any, Any]:
        codes: dict[Any, int] = {}
        left, right = ([codes.setdefault(key(x), len(codes)) for x in side] for side in (ours, theirs))
        return np.equal.outer(np.array(left), np.array(right))

    location = lambda x: x.operation.location
    hints = [
        (3.0, equal(lambda x: kinds(x) or id(x))),
        (2.0, equal(lambda x: x.numbers.value.size)),
        (1.0, equal(lambda x: (location(x).line, location(x).backward))),
        (1.0, equal(lambda x: (location(x).scope, location(x).backward))),
    ]
    alike = 1 + sum(weight * hint for weight, hint in hints)
    weights = (equal(lambda x: x.operation.primitive) * alike).astype(np.float32)
    best = np.zeros((len(ours) + 1, len(theirs) + 1), np.float32)
    for i, row in enumerate(weights):
        best[i + 1, 1:] = np.maximum.accumulate(np.maximum(best[i, 1:], (best[i, :-1] + row) * (row > 0)))
    i, j, found = len(ours), len(theirs), list[tuple[int, int]]()
    while i and j:
        if best[i, j] == best[i - 1, j]:
            i -= 1
        elif best[i, j] == best[i, j - 1]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            found.append((i, j))
    return found[::-1]
