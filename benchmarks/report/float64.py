"""The table of code in float64."""

from typing import Any

from benchmarks.float64 import AGAIN, FLOAT32, KEPT, PRODUCTS
from benchmarks.record import Rows
from benchmarks.report.markdown import names, select, table

WAYS = (PRODUCTS, KEPT, FLOAT32)


def problems(rows: Rows, h200: dict[str, Any]) -> str:
    """How many times float64's time each way takes, with the range; then the errors, and bytes as compiled."""
    short = dict(zip(WAYS, ("products", "products, recompute=False", FLOAT32), strict=True)) | {AGAIN: "float64 (A/A)"}
    times, others = [], []
    for problem in names(rows, "problem"):
        found = {row["name"]: row for row in select(rows, problem=problem)}
        times.append([problem, *(_time(found[name]) for name in short)])
        errors = [_error(found[name]["error"]) for name in (PRODUCTS, FLOAT32)]
        others.append([problem, *errors, *(_bytes(h200["rows"], problem, name) for name in WAYS)])
    head = ["time to float64's", *short.values()]
    errors_of = [f"error, {short[name]}" for name in (PRODUCTS, FLOAT32)]
    below = table(["", *errors_of, *(f"bytes, {short[name]}" for name in WAYS)], others)
    return f"{table(head, times)}\n\n{below}"


def _bytes(rows: Rows, problem: str, name: str) -> str:
    found = [row["bytes_ratio"] for row in select(rows, problem=problem, name=name)]
    return f"{found[0]:.2f}" if found else ""


def _error(error: float) -> str:
    """An error. In float32, a sampler draws other random numbers."""
    return f"{error:.0e}".replace("e-0", "e-") if error < 0.1 else "another sample"


def _time(row: dict[str, Any]) -> str:
    """A ratio of times, with its range. Nothing if it was not timed."""
    return f"{row['ratio']:.2f}&nbsp;({row['ratio_low']:.2f}-{row['ratio_high']:.2f})" if "ratio" in row else ""
