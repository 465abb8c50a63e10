"""Lines and tables of text of at most 100 columns, for the reports."""

import re
import textwrap
from collections.abc import Collection, Sequence

WIDTH = 100
_FUNCTION = re.compile(r"(:\d+) \([^()]*\)$")  # after a source line


def fit(text: str, width: int = WIDTH) -> str:
    """A line of at most `width` characters.

    The function after a source line goes first. Then the middle is cut, because both ends of a path or line matter.
    """
    if len(text) > width:
        text = _FUNCTION.sub(r"\1", text)
    if len(text) <= width:
        return text
    end = (width - 3) // 2
    return f"{text[: width - 3 - end]}...{text[len(text) - end :]}"


def short_line(source: str) -> str:
    """A source line for a table. A long one is without its function and without the folders of a library."""
    if len(source) <= 30:
        return source
    user, _, library = re.sub(r" \([^()]*\)", "", source, count=1).partition(" > ")
    return " > ".join(filter(None, [user, library.rpartition("/")[2]]))


def wrapped(text: str, indent: int = 10) -> str:
    """A line, as several of at most 100 characters if it is longer. All but the first are indented."""
    wrap = textwrap.TextWrapper(WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrap.wrap(text)) if len(text) > WIDTH else text


def aligned(rows: Sequence[Sequence[str]], elastic: Collection[int] = ()) -> list[str]:
    """The rows with their columns aligned. A column of empty cells is left out.

    The cells of the `elastic` columns are cut so that a line has at most 100 characters: first the functions after
    source lines, then the widest column.
    """
    widths, excess = _widths(rows)
    if excess > 0:
        rows = [[_FUNCTION.sub(r"\1", x) if i in elastic else x for i, x in enumerate(row)] for row in rows]
        widths, excess = _widths(rows)
    while excess > 0 and (most := max(elastic, key=lambda i: widths[i], default=None)) is not None and widths[most] > 8:
        widths[most] -= 1
        excess -= 1
    return ["  ".join(fit(x, w).ljust(w) for x, w in zip(row, widths, strict=True) if w).rstrip() for row in rows]


def _widths(rows: Sequence[Sequence[str]]) -> tuple[list[int], int]:
    """The widths of the columns, and by how much a line would exceed 100 characters."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return widths, sum(w + 2 for w in widths if w) - 2 - WIDTH


def with_header(header: Sequence[str], rows: Sequence[Sequence[str]], elastic: Collection[str] = ()) -> list[str]:
    """A header and the rows below it, aligned. A column that is empty in every row is left out with its title.

    `elastic` are the titles of the columns whose cells are cut if a line would be longer than 100 characters.
    """
    kept = [i for i in range(len(header)) if not rows or any(row[i] for row in rows)]
    places = [n for n, i in enumerate(kept) if header[i] in elastic]
    return aligned([[row[i] for i in kept] for row in (header, *rows)], places)
