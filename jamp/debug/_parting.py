"""Where two programs part: what can be read from their operations, and the first one whose operands agree."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jamp._primitives import MOVING
from jamp.debug._align import LAYOUT, Entry, Program, pairs
from jamp.debug._numbers import JUMP, agree, same_elements
from jamp.debug._observe import ARGUMENT

_COMMUTE = ("add", "add_any", "mul", "dot_general", "max", "min", "and", "or", "xor", "eq", "ne")
# Of the parameters of primitives, those that do not change what is computed, or that follow from the shapes.
_NO_OPTIONS = ("sharding", "precision", "dtype", "element_type", "name", "shape", "sizes", "jaxpr", "accuracy", "mode")


class Parted(NamedTuple):
    """A difference of two programs, and where it is in each, or what follows there if it is only in the other one."""

    text: str
    only: str  # "here", "there" or ""
    here: Entry | None
    there: Entry | None


class Parting(NamedTuple):
    """What `part` finds: differences, the first one first, and aligned operations whose results differ."""

    differences: list[Parted]
    aligned: list[tuple[Entry, Entry]]


def part(here: Program, there: Program, results: Sequence[tuple[int, int]]) -> Parting:
    """Where two programs part, given the entries of the results that differ."""
    sides = [_region(program, [pair[k] for pair in results]) for k, program in enumerate((here, there))]
    kinds = lambda x: frozenset(y.kind for y in x.reads if y.kind is not None and y.numbers.value.size > 1)
    aligned = pairs(sides[0], sides[1], kinds)
    found = [*_other_leaves(sides), *_differences(sides, aligned)]
    # Of operations that only one program has, the first of each is next to the other.
    if found and found[0].only:
        beside = next((x for x in found if x.only not in ("", found[0].only)), found[0])
        found = list(dict.fromkeys([found[0], beside, *found]))
    if not found:
        x, y = (program.entries[i] for program, i in zip((here, there), results[0], strict=True))
        found = [Parted("the results are other values", "", x, y)]
    place = lambda x: x and x.operation.location.line
    distinct = list({(x.text, place(x.here), place(x.there)): x for x in reversed(found)}.values())[::-1]
    return Parting(distinct, [(sides[0][i], sides[1][j]) for i, j in aligned])


def _region(program: Program, results: Sequence[int]) -> list[Entry]:
    """The operations that the other program does not have and that differing results are computed from, in order.

    Where the other program has the same value, the difference cannot come from before it.
    """
    found = program.behind(results, lambda x: x.kind is None and not x.is_leaf)
    return [x for x in found if x.operation.primitive not in (*LAYOUT, "iota")]


def _other_leaves(sides: Sequence[Sequence[Entry]]) -> Iterator[Parted]:
    """The arguments and constant arrays that one program reads after they part, where the other one reads others."""
    reads = [{id(y): (y, x) for x in reversed(side) for z in x.reads if _is_array(y := _source(z))} for side in sides]
    alone = [
        [x for y, x in reversed(mine.values()) if not any(_equal(y, z) for z, _ in other.values())]
        for mine, other in (reads, reads[::-1])
    ]
    return (Parted(f"{_text(x)} here, {_text(y)} there", "", x, y) for x, y in zip(*alone, strict=False))


def _differences(sides: Sequence[Sequence[Entry]], aligned: Sequence[tuple[int, int]]) -> Iterator[Parted]:
    """What differs in the operations of both, in one order."""
    i = j = 0
    for a, b in (*aligned, (len(sides[0]), len(sides[1]))):
        ours, theirs = (side[k] if k < len(side) else None for side, k in zip(sides, (a, b), strict=True))
        yield from (Parted(_text(x), "here", x, theirs) for x in sides[0][i:a])
        yield from (Parted(_text(y), "there", ours, y) for y in sides[1][j:b])
        if ours and theirs:
            yield from _compared(ours, theirs)
        i, j = a + 1, b + 1


def _compared(x: Entry, y: Entry) -> list[Parted]:
    """The difference of two aligned operations, or none if it follows from that of their operands."""
    left, right = x.reads, y.reads
    if x.operation.primitive in _COMMUTE and not all(map(_equal, left, right)) and any(map(_equal, left, right[::-1])):
        right = right[::-1]
    follows = [_follows(a) or _follows(b) for a, b in zip(left, right, strict=False)]
    known = [pair for pair, does in zip(zip(left, right, strict=False), follows, strict=True) if not does]
    other = [(a, b) for a, b in known if not _equal(a, b)]
    is_whole = x.parts == y.parts == 1
    if other and is_whole:
        sources = [(_source(a), _source(b)) for a, b in other]
        if all(a.is_leaf and b.is_leaf for a, b in sources):
            return [Parted(f"{_text(x)} here, {_text(y)} there", "", x, y)]
        if any(a.numbers.value.size != b.numbers.value.size for a, b in other):  # They are not the same operation.
            return [Parted(_text(x), "here", x, y), Parted(_text(y), "there", x, y)]
        a, b = sources[0]
        return [Parted(f"{_name(x)} of {_value(a)} here, {_value(b)} there", "", x, y)]
    if any(follows):
        return []
    moved = [(a, b) for a, b in known if not agree(a.numbers, b.numbers) and a.numbers.value.size > 1]
    if moved and is_whole:
        # Programs may hold weights, and operands of other shapes, in another layout.
        a, b = min(moved, key=lambda z: (_source(z[0]).is_leaf, z[0].numbers.value.shape != z[1].numbers.value.shape))
        if _name(a) == _name(b) and not _is_moving(a) and (found := _compared(a, b)):
            return found
        text = f"an operand of {_name(x)} has the same elements in another order"
        return [Parted(text, "", *(z if z.operation.location.line else w for z, w in ((a, x), (b, y))))]
    shapes = [[z.numbers.value.shape for z in side] for side in (left, right)]
    if shapes[0] == shapes[1] and (options := _options(x, y)):
        return [Parted(f"{_name(x)} with {options}", "", x, y)]
    return [Parted(f"{_name(x)} of operands that agree", "", x, y)]


def _equal(x: Entry, y: Entry) -> bool:
    """Whether two operands have the same elements. A scalar may be broadcast in one program."""
    a, b = x.numbers, y.numbers
    if a.is_uniform and b.is_uniform:
        first = [float(np.ravel(z.value)[0]) for z in (a, b)]
        return abs(first[0] - first[1]) <= JUMP * max(a.constant, b.constant) * max(map(abs, first))
    return (x.kind is not None and x.kind == y.kind) or same_elements(a, b)


def _follows(x: Entry) -> bool:
    """Whether an operand comes from an operation that the other program does not have."""
    source = _source(x)
    return x.kind is None and source.kind is None and not source.is_leaf


def _is_moving(x: Entry) -> bool:
    return x.operation.primitive in MOVING


def _is_array(x: Entry) -> bool:
    return x.is_leaf and x.numbers.is_inexact and not x.numbers.is_uniform


def _source(x: Entry) -> Entry:
    """What an entry is, but for its layout."""
    while x.operation.primitive in LAYOUT and len(x.reads) == 1:
        (x,) = x.reads
    return x


def _value(x: Entry) -> str:
    """An operand as text."""
    if not x.is_leaf:
        return f"{_name(x)} at {x.operation.location.line or 'an unknown line'}"
    if x.operation.primitive == ARGUMENT:
        return x.operation.name
    return f"{np.ravel(x.numbers.value)[0]:.6g}" if x.numbers.is_uniform else "a constant"


def _text(x: Entry) -> str:
    """An operation with those operands that can be read: "mul(_, 0.97)"."""
    texts = [_value(y) if y.is_leaf else "_" for y in map(_source, x.reads)]
    return _name(x) + (f"({', '.join(texts)})" if set(texts) > {"_"} or "_" not in texts and texts else "")


def _name(x: Entry) -> str:
    return x.operation.primitive


def _options(x: Entry, y: Entry) -> str:
    """The parameters of a primitive that differ and can be read."""
    texts = []
    for name, a in x.operation.options.items():
        sides = [str(z).replace("np.int64", "") for z in (a, y.operation.options.get(name))]
        if len(set(sides)) == 2 and not any(part in name for part in _NO_OPTIONS) and max(map(len, sides)) < 40:
            texts.append(f"{name}={sides[0]} here, {sides[1]} there")
    return "; ".join(texts)
