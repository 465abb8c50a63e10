"""The table of code in float64."""

from typing import Any

from benchmarks.float64 import AGAIN, FLOAT32, KEPT, PRODUCTS
from benchmarks.record import Rows
from benchmarks.report.markdown import names, select, table

WAYS = (PRODUCTS, KEPT, FLOAT32)


def problems(rows: Rows, h200: dict[str, Any]) -> str:
    """A row for each problem: how many times as fast as float64 each way is, the errors, and bytes on an H200."""
    short = dict(zip(WAYS, ("products", "recompute=False", FLOAT32), strict=True)) | {AGAIN: "A/A"}
    header = ["", *(f"speed, {x}" for x in short.values()), f"error, {short[PRODUCTS]}", f"error, {FLOAT32}"]
    header += [f"bytes, {short[name]}" for name in WAYS]
    body = []
    for problem in names(rows, "problem"):
        found = {row["name"]: row for row in select(rows, problem=problem)}
        speeds = [_speed(found[name]) for name in (*WAYS, AGAIN)]
        errors = [_error(found[name]["error"]) for name in (PRODUCTS, FLOAT32)]
        moved = {row["name"]: f"{row['bytes_ratio']:.2f}" for row in select(h200["rows"], problem=problem)}
        body.append([problem, *speeds, *errors, *(moved.get(name, "") for name in WAYS)])
    return table(header, body)


def _error(error: float) -> str:
    """An error. In float32, a sampler draws other random numbers."""
    return f"{error:.0e}".replace("e-0", "e-") if error < 0.1 else "another sample"


def _speed(row: dict[str, Any]) -> str:
    """The inverse of a ratio of times, with its range. Nothing if it was not timed."""
    if "ratio" not in row:
        return ""
    return f"{1 / row['ratio']:.2f}&nbsp;({1 / row['ratio_high']:.2f}-{1 / row['ratio_low']:.2f})"
