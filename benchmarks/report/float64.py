"""The table of code in float64."""

from benchmarks.float64 import AGAIN, FLOAT32, KEPT, PRODUCTS
from benchmarks.record import Rows
from benchmarks.report.markdown import names, select, table

HEADER = (
    "",
    "products in float32",
    "the same, recompute=False",
    "float32",
    "float64 again (A/A)",
    "error, products in float32",
    "error, float32",
)


def problems(rows: Rows) -> str:
    """A row for each problem: how many times as fast as float64 each way is, with its range, and the errors."""
    body = []
    for problem in names(rows, "problem"):
        found = {row["name"]: row for row in select(rows, problem=problem)}
        speeds = [_speed(found[name]) for name in (PRODUCTS, KEPT, FLOAT32, AGAIN)]
        errors = [_error(found[name]["error"]) for name in (PRODUCTS, FLOAT32)]
        body.append([problem, *speeds, *errors])
    return table(HEADER, body)


def _error(error: float) -> str:
    """An error. In float32, a sampler draws other random numbers."""
    return f"{error:.0e}".replace("e-0", "e-") if error < 0.1 else "another sample"


def _speed(row: dict[str, float]) -> str:
    """The inverse of a ratio of times, with its range. Nothing if it was not timed."""
    if "ratio" not in row:
        return ""
    return f"{1 / row['ratio']:.2f}&nbsp;({1 / row['ratio_high']:.2f}-{1 / row['ratio_low']:.2f})"
