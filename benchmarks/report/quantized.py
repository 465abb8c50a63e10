"""Tables of docs/8-bit.md: compiled gradients in 8 bit, those of other libraries, and where training ends."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.record import Rows
from benchmarks.report.accuracy import interval
from benchmarks.report.markdown import names, origin, select, table

Found = dict[str, Any]
WAYS = {"float8": "float8", "float8, per row": "per row", "float8, all products": "all products", "int8": "int8"}
MARGIN = 0.0025  # of bfloat16's loss
TITLES = {"float8, E4M3 gradients": "float8, cotangents in E4M3"}


def models(found: Found) -> str:
    """Of each model: the share of the layers and of all, then memory and kernels of each way beside bfloat16."""
    head = ["model", "float8: GEMMs", "of layers", "of all", *(f"{name}: memory, kernels" for name in WAYS.values())]
    body = []
    for model in names(found["rows"], "model"):
        rows = {row["way"]: row for row in select(found["rows"], model=model)}
        row = rows["float8"]
        shares = f"{row['float8_gemms']} of {row['gemms']}", f"{row['layer_share']:.2f}", f"{row['share']:.2f}"
        cells = (f"{rows[way]['temporary']:.2f}, {rows[way]['kernel_ratio']:.2f}" for way in WAYS)
        body.append([model, *shares, *cells])
    return f"{table(head, body)}\n\n{origin(found)}"


def peers(found: Found) -> str:
    head = ["way", "lines changed", "state leaves", "8-bit GEMMs", "share of all", "memory", "kernels"]
    body = []
    for row in found["peers"]:
        gemms = f"{row['float8_gemms']} of {row['gemms']}", f"{row['share']:.2f}"
        cells = gemms if "error" not in row else ("", "")
        ratios = f"{row['temporary']:.2f}", f"{row['kernel_ratio']:.2f}"
        body.append([row["way"], str(row["lines"]), str(row["state_leaves"]), *cells, *ratios])
    return table(head, body)


def tpu(found: Found) -> str:
    head = ["model", "int8 products", "temporary memory", "bytes of main memory", "kernels"]
    rows = select(found["rows"], way="int8")
    ratios = lambda row: (f"{row[name]:.2f}" for name in ("temporary", "bytes", "kernels"))
    body = [[row["model"], f"{row['int8']} of {row['products']}", *ratios(row)] for row in rows]
    return f"{table(head, body)}\n\n{origin(found)}"


def training(found: Found) -> str:
    """Mean and range of the loss on held-out data, and the paired difference to bfloat16 with its 90 % interval."""
    parts = []
    for task in names(found["rows"], "task"):
        rows = select(found["rows"], task=task)
        base = losses(rows, "bfloat16")
        body = []
        for way in names(rows, "way"):
            loss = losses(rows, way)
            low, high = (100 * x / base.mean() for x in interval(loss - base))
            compared = f"{low:+.2f} to {high:+.2f} %" if way != "bfloat16" else ""
            within = "yes" if max(-low, high) < 100 * MARGIN else "no"
            name = TITLES.get(way, way)
            body.append(
                [name, f"{loss.mean():.4f}", f"{loss.min():.3f} to {loss.max():.3f}", compared, within * bool(compared)]
            )
        head = [task, "loss", "lowest to highest", "minus bfloat16's, 90 % interval", "within 0.25 %"]
        parts.append(table(head, body))
    return "\n\n".join([*parts, origin(found)])


def losses(rows: Rows, way: str) -> np.ndarray:
    return np.array([row["loss"] for row in select(rows, way=way)])


FILES: dict[str, dict[str, Callable[[Found], str]]] = {
    "float8_h200": {"models": models, "peers": peers},
    "int8_tpu": {"int8": tpu},
    "float8_accuracy": {"training": training},
}
