"""Align the operations of two programs, each of which may have operations that the other one lacks."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jamp.debug._observe import Numbers, Operation

_MOST = 4_000_000  # pairs


@dataclasses.dataclass(frozen=True)
class Entry:
    """An operation, in all iterations of the merged loops together."""

    operation: Operation  # in the first iteration
    numbers: Numbers
    reads: frozenset[int]  # entries
    parts: int  # how many iterations


class Alignment(NamedTuple):
    """The entries of two programs, the pairs of those that compute the same, and the entry of each operation."""

    ours: list[Entry]
    theirs: list[Entry]
    pairs: list[tuple[int, int]]
    entry_of: dict[int, int]  # of ours
    other_entry_of: dict[int, int]


def align(ours: Sequence[Operation], theirs: Sequence[Operation]) -> Alignment:
    """Align two programs.

    In the other program, an iteration of a loop may be an operation of its own (layers), or a part of one
    (micro-batches, or tokens that are decoded one by one). Each loop is merged if more operations are aligned then.
    """
    # The entries of a long loop would need too much memory.
    long = len(ours) * len(theirs) > _MOST
    merged = [{loop for x in side for loop, _ in x.loops} if long else set[int]() for side in (ours, theirs)]
    entries = [_entries(x, loops) for x, loops in zip((ours, theirs), merged, strict=True)]
    best, pairs = _pairs(entries[0][0], entries[1][0])
    for side, operations in enumerate((ours, theirs)):
        for loop in dict.fromkeys(loop for x in operations for loop, _ in x.loops if loop not in merged[side]):
            tried = list(entries)
            tried[side] = _entries(operations, merged[side] | {loop})
            score, tried_pairs = _pairs(tried[0][0], tried[1][0])
            if score > best:
                best, pairs, entries = score, tried_pairs, tried
                merged[side].add(loop)
    return Alignment(entries[0][0], entries[1][0], pairs, entries[0][1], entries[1][1])


def _entries(operations: Sequence[Operation], merged: set[int]) -> tuple[list[Entry], dict[int, int]]:
    seen: Counter[Any] = Counter()
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(operations):
        # A function may be called several times in an iteration.
        seen[x.equation, x.loops] += 1
        kept = tuple(pair for pair in x.loops if pair[0] not in merged)
        groups.setdefault((x.equation, kept, seen[x.equation, x.loops]), []).append(i)
    number = {i: j for j, group in enumerate(groups.values()) for i in group}
    entries = []
    for j, group in enumerate(groups.values()):
        numbers = [operations[i].numbers for i in group]
        total = Numbers(*(sum(column) for column in zip(*numbers, strict=True)))
        reads = {number[k] for i in group for k in operations[i].reads} - {j}
        entries.append(Entry(operations[group[0]], total, frozenset(reads), len(group)))
    return entries, number


def _pairs(ours: Sequence[Entry], theirs: Sequence[Entry]) -> tuple[float, list[tuple[int, int]]]:
    """The sum of the weights, and the pairs, in order, that make it largest."""
    if not ours or not theirs:
        return 0.0, []
    weights = _weights(ours, theirs)
    best = np.zeros((len(ours) + 1, len(theirs) + 1), np.float32)
    for i, row in enumerate(weights):
        best[i + 1, 1:] = np.maximum.accumulate(np.maximum(best[i, 1:], best[i, :-1] + row))
    i, j = len(ours), len(theirs)
    pairs = []
    while i and j:
        if best[i, j] == best[i - 1, j]:
            i -= 1
        elif best[i, j] == best[i, j - 1]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            pairs.append((i, j))
    return float(best[-1, -1]), pairs[::-1]


def _weights(ours: Sequence[Entry], theirs: Sequence[Entry]) -> np.ndarray[Any, Any]:
    """How likely it is that two entries compute the same, f32[ours, theirs]. 0 if they cannot."""

    def equal(key: Callable[[Entry], Any]) -> np.ndarray[Any, Any]:
        codes: dict[Any, int] = {}
        left, right = ([codes.setdefault(key(x), len(codes)) for x in side] for side in (ours, theirs))
        return np.equal.outer(np.array(left), np.array(right))

    log = lambda square: np.log(square) if 0 < square < np.inf else np.sign(square) * 1e3  # 0, inf and NaN, too
    left, right = (np.nan_to_num([log(float(x.numbers.square)) for x in side], nan=2e3) for side in (ours, theirs))
    apart = np.abs(np.subtract.outer(left, right))
    same_size, same_primitive = equal(lambda x: x.numbers.size), equal(lambda x: x.operation.primitive)
    hints = [
        (2.0, equal(lambda x: (x.operation.location.line, x.operation.location.backward))),
        (2.0, equal(lambda x: (x.operation.location.scope, x.operation.location.backward))),
        (1.0, equal(lambda x: x.operation.shape[-1:])),
        (3.0, apart < 0.02),
    ]
    weights = same_primitive * (1 + sum(weight * hint for weight, hint in hints)) + ~same_primitive * (apart < 1e-5)
    result: np.ndarray[Any, Any] = (weights * same_size).astype(np.float32)
    return result
