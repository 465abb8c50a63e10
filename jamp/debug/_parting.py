"""Where two programs part: what can be read from their operations, and the first one whose operands agree."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jamp._source_line import Location
from jamp.debug._align import LAYOUT, Entry, Program, pairs
from jamp.debug._numbers import agree, relative, same_elements
from jamp.debug._observe import ARGUMENT, CONSTANT

_LEAVES = ARGUMENT, CONSTANT
_COMMUTE = ("add", "add_any", "mul", "max", "min", "and", "or", "xor", "eq", "ne")
# They do not change what is computed, or follow from the shapes.
_NO_OPTIONS = ("sharding", "precision", "dtype", "name", "shape", "sizes", "jaxpr", "accuracy", "layout", "mode", "unique")


class Parted(NamedTuple):
    """A difference of two programs: a text, and the entry of each that it is about, if it is in that one."""

    text: str
    here: Entry | None
    there: Entry | None


class Parting(NamedTuple):
    """What `part` finds.

    Attributes:
      differences: In the order of the programs.
      first: The first aligned operations that differ.
      aligned: The entries whose values differ, but which seem to be the same operation.
      region: Those entries of both programs whose difference reaches a result.
    """

    differences: list[Parted]
    first: tuple[Entry, Entry] | None
    aligned: list[tuple[Entry, Entry]]
    region: set[int]


def part(here: Program, there: Program, results: Sequence[tuple[int, int]]) -> Parting:
    """Where two programs part, given the entries of the results that differ."""
    regions = [_region(program, [pair[k] for pair in results]) for k, program in enumerate((here, there))]
    sides = [[x for x in program.entries if _is_unmatched(x)] for program in (here, there)]
    operands = {id(x): [p.entries[i] for i in x.reads] for p in (here, there) for x in p.entries}
    kinds = lambda x: frozenset(y.kind for y in operands[id(x)] if y.kind is not None and y.numbers.value.size > 1)
    aligned = pairs(sides[0], sides[1], kinds)
    region = {id(p.entries[i]) for p, r in zip((here, there), regions, strict=True) for i in r}
    found, first = list[Parted](), None
    for x, y in _merged(sides[0], sides[1], aligned):
        if not any(id(z) in region for z in (x, y) if z):
            continue
        if x and y:
            found += _compared(x, y, operands, region)
            first = first or ((x, y) if found and x.numbers.is_inexact else None)
        elif x or y:
            found.append(Parted(f"{_describe(x or y, operands)} only {'here' if x else 'there'}", x, y))
    found = list({(d.text, *(z and z.operation.location for z in d[1:])): d for d in found}.values())
    if not found:
        found = [Parted("the results are other values", here.entries[i], there.entries[j]) for i, j in results[:1]]
    return Parting(found, first, [(sides[0][i], sides[1][j]) for i, j in aligned], region)


def _is_unmatched(x: Entry) -> bool:
    return x.kind is None and x.operation.primitive not in (*LAYOUT, *_LEAVES)


def _region(program: Program, results: Sequence[int]) -> set[int]:
    """The entries without a partner from which a result is computed, without going through one that has a partner."""
    found, todo = set[int](results), [k for i in results for k in program.entries[i].reads]
    while todo:
        i = todo.pop()
        x = program.entries[i]
        if i not in found and x.kind is None and x.operation.primitive not in _LEAVES:
            found.add(i)
            todo += x.reads
    return found


def _merged(
    ours: Sequence[Entry], theirs: Sequence[Entry], aligned: Sequence[tuple[int, int]]
) -> Iterator[tuple[Entry | None, Entry | None]]:
    """The operations of both in one order, aligned ones as pairs."""
    i = j = 0
    for a, b in (*aligned, (len(ours), len(theirs))):
        yield from ((x, None) for x in ours[i:a])
        yield from ((None, y) for y in theirs[j:b])
        if a < len(ours) and b < len(theirs):
            yield ours[a], theirs[b]
        i, j = a + 1, b + 1


def _compared(x: Entry, y: Entry, operands: dict[int, list[Entry]], region: set[int]) -> list[Parted]:
    """The difference of two aligned operations, or none if it follows from that of their operands."""
    left, right = operands[id(x)], operands[id(y)]
    if x.operation.primitive in _COMMUTE and not all(map(_equal, left, right)):
        right = right[::-1] if all(map(_equal, left, right[::-1])) or _equal(left[0], right[-1]) else right
    known = [(a, b) for a, b in zip(left, right, strict=False) if not {id(a), id(b)} & region]
    other = [(a, b) for a, b in known if not _equal(a, b)]
    if other and x.parts == y.parts == 1:
        if all(_leaf(a, operands) or _leaf(b, operands) for a, b in other):
            text = f"{_describe(x, operands)} here, {_describe(y, operands)} there"
        else:
            a, b = next((a, b) for a, b in other)
            text = f"{_name(x)} reads {_origin(a, operands)} here, {_origin(b, operands)} there"
        return [Parted(text, x, y)]
    shapes = [[z.numbers.value.shape for z in side] for side in (left, right)]
    if shapes[0] == shapes[1] and (options := _options(x, y)):
        return [Parted(f"{_name(x)} has {options}", x, y)]
    if len(known) < len(left):
        return []
    moved = [(a, b) for a, b in known if not agree(a.numbers, b.numbers) and a.numbers.value.size > 1]
    if moved and x.parts == y.parts == 1:
        (a, b), *_ = moved
        text = f"an operand of {_name(x)} has its elements in another order: {_moves(a, b, operands)}"
        return [Parted(text, x, y)]
    return [Parted(f"{_name(x)} has operands that agree and a result that does not", x, y)]


def _equal(x: Entry, y: Entry) -> bool:
    """Whether two operands have the same elements. A scalar may be broadcast in one program."""
    a, b = x.numbers, y.numbers
    if a.is_uniform and b.is_uniform and a.value.size != b.value.size:
        return bool(np.isclose(np.ravel(a.value)[0], np.ravel(b.value)[0], rtol=8 * max(a.constant, b.constant), atol=0))
    return (x.kind is not None and x.kind == y.kind) or same_elements(a, b)


def _source(x: Entry, operands: dict[int, list[Entry]]) -> Entry:
    """What an entry is, but for data movement."""
    while x.operation.primitive in LAYOUT and len(operands[id(x)]) == 1:
        (x,) = operands[id(x)]
    return x


def _leaf(x: Entry, operands: dict[int, list[Entry]]) -> str:
    """An argument or a constant as text, or nothing."""
    x = _source(x, operands)
    if x.operation.primitive == ARGUMENT:
        return x.operation.name
    flat = np.ravel(x.numbers.value)
    is_number = x.operation.primitive == CONSTANT and x.numbers.is_uniform
    return f"{flat[0]:.6g}" if is_number else "a constant" if x.operation.primitive == CONSTANT else ""


def _describe(x: Entry, operands: dict[int, list[Entry]]) -> str:
    """An operation with those operands that can be read: "mul(_, 0.97)"."""
    texts = [_leaf(y, operands) or "_" for y in operands[id(x)]]
    return _name(x) + (f"({', '.join(texts)})" if any(text != "_" for text in texts) else "")


def _origin(x: Entry, operands: dict[int, list[Entry]]) -> str:
    leaf, x = _leaf(x, operands), _source(x, operands)
    return leaf or f"{_name(x)} at {x.operation.location.line or 'an unknown line'}"


def _name(x: Entry) -> str:
    return x.operation.primitive


def _options(x: Entry, y: Entry) -> str:
    texts = []
    for name, a in x.operation.options.items():
        b = y.operation.options.get(name)
        if str(a) != str(b) and not any(part in name for part in _NO_OPTIONS) and len(f"{a}{b}") < 60:
            texts.append(f"{name}={a} here, {b} there")
    return "; ".join(texts)


def _moves(x: Entry, y: Entry, operands: dict[int, list[Entry]]) -> str:
    """The data movement that leads to two operands."""
    texts = []
    for side, z in (("here", x), ("there", y)):
        names = []
        while z.operation.primitive in LAYOUT and operands[id(z)]:
            names.append(f"{_name(z)} at {z.operation.location.line}")
            z = operands[id(z)][0]
        texts.append(f"{', '.join(names[:2]) or _origin(z, operands)} {side}")
    return "; ".join(texts)


def difference(x: Entry, y: Entry) -> float:
    """The relative difference of two entries as traced."""
    is_moved = not agree(x.numbers, y.numbers) and same_elements(x.numbers, y.numbers)
    a, b = (z.numbers.sorted if is_moved else z.numbers for z in (x, y))
    return relative(*(np.ravel(z.traced) for z in (a, b)))


