"""Where two programs part: what can be read from their operations, and the first one whose operands agree."""

from collections.abc import Iterator, Sequence

import numpy as np

from jamp._jaxprs.primitives import MOVING
from jamp.debug._align import AlignedProgram, Entry, computed_from, list_entries, skip_layout
from jamp.debug._compared_array import FILL, JUMP, agree, have_same_elements, relative_difference
from jamp.debug._comparison import ComparedRow
from jamp.debug._observe import ARGUMENT

_COMMUTE = ("add", "add_any", "mul", "dot_general", "max", "min", "and", "or", "xor", "eq", "ne")
# Of the parameters of primitives, those that do not change what is computed, or that follow from the shapes.
_NO_OPTIONS = ("sharding", "precision", "dtype", "element_type", "name", "shape", "sizes", "jaxpr", "accuracy", "mode")


def make_row(x: Entry | None, y: Entry | None, text: str = "", only: str = "") -> ComparedRow:
    """Return the row of an entry of each program."""
    sides = [_place(z) if z else ("", "", "") for z in (x, y)]
    if not (x and y and not text):
        return ComparedRow(text, *sides[0], *sides[1], only, np.inf, False)
    is_moved = not agree(x.result, y.result) and have_same_elements(x.result, y.result)
    arrays = [np.ravel((z.result.sorted if is_moved else z.result).traced) for z in (x, y)]
    return ComparedRow(_name(x), *sides[0], *sides[1], "", relative_difference(*arrays), x.kind is not None)


def _place(x: Entry) -> tuple[str, str, str]:
    """Return the line, the scopes and the dtype of an entry."""
    return x.operation.context.line, x.operation.context.scope, str(x.operation.dtype)


def find_region(program: AlignedProgram, results: Sequence[Entry]) -> list[Entry]:
    """Return what differing results are computed from and the other program does not have, in order.

    Where the other program has the same value, the difference cannot come from before it.
    """
    found = {id(x) for x in computed_from(results, lambda x: x.kind is None and not x.is_leaf)}
    kept = (x for x in list_entries(program) if id(x) in found)
    return [x for x in kept if not x.is_layout and _name(x) != "iota"]


def find_differences(sides: Sequence[Sequence[Entry]], aligned: Sequence[tuple[int, int]]) -> list[ComparedRow]:
    """Return the differences in the operations of both programs, in one order. `aligned` are pairs of them."""
    found = [*_other_leaves(sides), *_operations(sides, aligned)]
    if found and found[0].only:  # What the other program has instead is next to it.
        found.insert(1, next((x for x in found if x.only not in ("", found[0].only)), found[0]))
    distinct: dict[object, ComparedRow] = {}
    for x in found:
        distinct.setdefault((x.operation, x.source, x.other_source), x)
    return list(distinct.values())


def _other_leaves(sides: Sequence[Sequence[Entry]]) -> Iterator[ComparedRow]:
    """Yield the arguments and constant arrays of one program where, after they part, the other one reads others."""
    is_array = lambda y: y.is_leaf and y.result.is_inexact and not y.result.is_uniform
    reads = [
        {id(y): (y, x) for x in reversed(side) for z in x.reads if is_array(y := skip_layout(z))} for side in sides
    ]
    alone = [
        [x for y, x in reversed(mine.values()) if not any(_equal(y, z) for z, _ in other.values())]
        for mine, other in (reads, reads[::-1])
    ]
    return (make_row(x, y, f"{_text(x)} here, {_text(y)} there") for x, y in zip(*alone, strict=False))


def _operations(sides: Sequence[Sequence[Entry]], aligned: Sequence[tuple[int, int]]) -> Iterator[ComparedRow]:
    i = j = 0
    for a, b in (*aligned, (len(sides[0]), len(sides[1]))):
        x, y = (side[k] if k < len(side) else None for side, k in zip(sides, (a, b), strict=True))
        yield from (make_row(z, y, f"{_text(z)} only here", "here") for z in sides[0][i:a])
        yield from (make_row(x, z, f"{_text(z)} only there", "there") for z in sides[1][j:b])
        if x and y:
            yield from _compared(x, y)
        i, j = a + 1, b + 1


def _compared(x: Entry, y: Entry) -> list[ComparedRow]:
    """Return the difference of two aligned operations, or none if it follows from their operands."""
    left, right = x.reads, y.reads
    if _name(x) in _COMMUTE and not all(map(_equal, left, right)) and any(map(_equal, left, right[::-1])):
        right = right[::-1]
    operands = list(zip(left, right, strict=False))
    known = [pair for pair in operands if not any(map(_follows, pair))]
    other = [pair for pair in known if not _equal(*pair)]
    is_whole = not (x.carried or y.carried)
    if other and is_whole:
        a, b = map(skip_layout, other[0])
        if all(skip_layout(z).is_leaf for pair in other for z in pair):
            return [make_row(x, y, f"{_text(x)} here, {_text(y)} there")]
        if a.result.value.size != b.result.value.size:  # They are not the same operation.
            return [make_row(x, y, f"{_text(x)} only here", "here"), make_row(x, y, f"{_text(y)} only there", "there")]
        return [make_row(x, y, f"{_name(x)} of {_value(a)} here, {_value(b)} there")]
    if len(known) < len(operands):
        return []
    moved = [(a, b) for a, b in known if not agree(a.result, b.result) and a.result.value.size > 1]
    if moved and is_whole:
        # Programs may hold weights, and operands of other shapes, in another layout.
        a, b = min(moved, key=lambda z: (skip_layout(z[0]).is_leaf, z[0].result.value.shape != z[1].result.value.shape))
        deeper = _compared(a, b) if _name(a) == _name(b) and _name(a) not in MOVING else []
        a, b = (z if z.operation.context.line else w for z, w in ((a, x), (b, y)))
        return deeper or [make_row(a, b, f"an operand of {_name(x)} has the same elements in another order")]
    shapes = [[z.result.value.shape for z in side] for side in (left, right)]
    options = _options(x, y) if shapes[0] == shapes[1] else ""
    return [make_row(x, y, f"{_name(x)} {'with ' + options if options else 'of operands that agree'}")]


def _equal(x: Entry, y: Entry) -> bool:
    """Whether two operands have the same elements. A scalar may be broadcast in one program."""
    a, b = x.result, y.result
    if a.is_uniform and b.is_uniform:
        p, q = (complex(z.value.flat[0]) for z in (a, b))
        return (
            p == q
            or max(p.real, q.real) < FILL
            or abs(p - q) <= JUMP * max(a.constant, b.constant) * max(abs(p), abs(q))
        )
    return (x.kind is not None and x.kind == y.kind) or have_same_elements(a, b)


def _follows(x: Entry) -> bool:
    """Whether an operand comes from an operation that the other program does not have."""
    return x.kind is None and skip_layout(x).kind is None and not skip_layout(x).is_leaf


def _value(x: Entry) -> str:
    """Return an operand as text."""
    if not x.is_leaf:
        return f"{_name(x)} at {x.operation.context.line or 'an unknown line'}"
    if x.operation.primitive == ARGUMENT:
        return x.operation.name
    return f"{x.result.value.flat[0]:.6g}" if x.result.is_uniform else "a constant"


def _text(x: Entry) -> str:
    """Return an operation as text, with the operands that can be read: "mul(_, 0.97)"."""
    texts = [_value(y) if y.is_leaf else "_" for y in map(skip_layout, x.reads)]
    return _name(x) + (f"({', '.join(texts)})" if {*texts} - {"_"} else "")


def _name(x: Entry) -> str:
    return x.operation.primitive


def _options(x: Entry, y: Entry) -> str:
    """Return the parameters of a primitive that differ and can be read."""
    texts = []
    for name, a in x.operation.options.items():
        sides = [str(z).replace("np.int64", "") for z in (a, y.operation.options.get(name))]
        if len({*sides}) == 2 and not any(part in name for part in _NO_OPTIONS) and max(map(len, sides)) < 40:
            texts.append(f"{name}={sides[0]} here, {sides[1]} there")
    return "; ".join(texts)
