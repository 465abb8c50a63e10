"""Lines and tables of text for the reports, as wide as the terminal or of 100 columns."""

import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence

WIDTH = 100
_FUNCTION = re.compile(r"(:\d+) \([^()]*\)")  # after a source line
_LIBRARY = re.compile(r"(:\d+) > \S+:\d+")  # after a source line
_PLACE = re.compile(r"(?:.*\S:\d+(?: \([^()]*\))?(?: |$))?")  # a source line, before a path or scope


def fit(text: str, width: int = WIDTH) -> str:
    """A line without what tells least, if it is longer than `width`.

    The function after a source line goes first, then the line of a library, then names in the middle of a path, those
    with numbers last. The user's line and both ends of a path stay, so the result may be longer than `width`.
    """
    for shorter in (_without_function, _without_library):
        text = shorter(text) if len(text) > width else text
    place = _PLACE.match(text)
    at = place.end() if place else 0
    names = re.findall(r"[/.\[]?[^/.\[]+", text[at:])
    if len(text) <= width or len(names) < 3:
        return text
    cuts = [(i, j) for i in range(1, len(names)) for j in range(i + 1, len(names))]

    def without(cut: tuple[int, int]) -> str:
        return text[:at] + "".join(names[: cut[0]]) + "..." + "".join(names[cut[1] :]).lstrip(".")

    def loss(cut: tuple[int, int]) -> tuple[int, ...]:
        lost = "".join(names[slice(*cut)])
        return max(0, len(without(cut)) - width), len(re.findall(r"\d+|\*", lost)), len(lost)

    return without(min(cuts, key=loss))


def _without_function(text: str) -> str:
    return _FUNCTION.sub(r"\1", text)


def _without_library(text: str) -> str:
    return _LIBRARY.sub(r"\1", text)


def _width() -> int:
    """The columns of a terminal. A file, or a page of a notebook, has `WIDTH`."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return max(80, shutil.get_terminal_size((WIDTH, 24)).columns) if is_terminal else WIDTH


def short_line(source: str) -> str:
    """A source line for a table. A long one is without its function and without the folders of a library."""
    if len(source) <= 30:
        return source
    user, _, library = re.sub(r" \([^()]*\)", "", source, count=1).partition(" > ")
    return " > ".join(filter(None, [user, library.rpartition("/")[2]]))


def wrapped(text: str, indent: int = 10) -> str:
    """A line, as several if it is longer than the terminal or 100 characters. All but the first are indented."""
    width = _width()
    wrap = textwrap.TextWrapper(width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrap.wrap(text)) if len(text) > width else text


def aligned(rows: Sequence[Sequence[str]], elastic: Collection[int] = ()) -> list[str]:
    """The rows with their columns aligned. A column of empty cells is left out.

    If a line is longer than the terminal or 100 characters, the cells of the `elastic` columns are shortened as by
    `fit`: all without functions, then without lines of libraries, then the widest columns. Nothing that tells is cut,
    so a line may stay longer.
    """
    for shorter in (_without_function, _without_library):
        if _excess(rows) > 0:
            rows = [[shorter(x) if i in elastic else x for i, x in enumerate(row)] for row in rows]
    rest = set(elastic)
    while (excess := _excess(rows)) > 0 and rest:
        widest = max(rest, key=lambda i: _widths(rows)[i])
        wanted = _widths(rows)[widest] - excess
        rows = [[fit(x, wanted) if i == widest else x for i, x in enumerate(row)] for row in rows]
        rest.remove(widest)
    return ["  ".join(x.ljust(w) for x, w in zip(row, _widths(rows), strict=True) if w).rstrip() for row in rows]


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _excess(rows: Sequence[Sequence[str]]) -> int:
    """By how much a line would exceed the width."""
    return sum(w + 2 for w in _widths(rows) if w) - 2 - _width()


def with_header(header: Sequence[str], rows: Sequence[Sequence[str]], elastic: Collection[str] = ()) -> list[str]:
    """A header and the rows below it, aligned. A column that is empty in every row is left out with its title.

    `elastic` are the titles of the columns whose cells are shortened if a line would be too long.
    """
    kept = [i for i in range(len(header)) if not rows or any(row[i] for row in rows)]
    places = [n for n, i in enumerate(kept) if header[i] in elastic]
    return aligned([[row[i] for i in kept] for row in (header, *rows)], places)
