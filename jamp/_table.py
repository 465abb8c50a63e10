"""Tables as lines of text, for the reports."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows with their columns aligned. A column of empty cells is left out."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True) if w).rstrip() for row in rows]


def with_header(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A header and the rows below it, aligned. A column that is empty in every row is left out with its title."""
    kept = [i for i in range(len(header)) if not rows or any(row[i] for row in rows)]
    return aligned([[row[i] for i in kept] for row in (header, *rows)])
