"""Tables of docs/8-bit.md: gradients in 8 bit beside other libraries', and where training ends."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.record import Rows
from benchmarks.report.accuracy import interval
from benchmarks.report.markdown import select, table

Found = dict[str, Any]
WAYS = (
    "float32",
    "float8, per tensor",
    "float8, per tensor, head and attention too",
    "cast to float8 without scales",
    "int8",
)


def peers(found: Found) -> str:
    """One model in several ways, beside bfloat16 by hand."""
    rows = {row["way"]: row for row in found["peers"]}
    cell = lambda way: f"{rows[way]['temporary']:.2f}, {rows[way]['kernel_ratio']:.2f}" if way in rows else ""
    body = [
        [way, str(row["lines"]), str(row["state_leaves"]), f"{row['share']:.2f}", cell(way), cell(f"{way}, remat")]
        for way, row in rows.items()
        if not way.endswith(", remat")
    ]
    return table(["way", "lines", "state", "8-bit share", "memory, kernels", "with remat"], body)


def training(found: Found) -> str:
    """The paired difference of the language model's loss to bfloat16's, on held-out data, with its 90 % interval."""
    rows = select(found["rows"], task="language model")
    base = losses(rows, "bfloat16")
    limits = {way: [100 * x / base.mean() for x in interval(losses(rows, way) - base)] for way in WAYS}
    return table(["", "loss"], [[way, f"{low:+.2f} to {high:+.2f} %"] for way, (low, high) in limits.items()])


def losses(rows: Rows, way: str) -> np.ndarray:
    return np.array([row["loss"] for row in select(rows, way=way)])


FILES: dict[str, dict[str, Callable[[Found], str]]] = {
    "float8_h200": {"peers": peers},
    "float8_accuracy": {"training": training},
}
