"""Tables of bfloat16 parameters."""

import numpy as np

from benchmarks.processes import cell
from benchmarks.record import Rows
from benchmarks.report.markdown import names, table


def training(rows: Rows) -> str:
    tasks, ways = names(rows, "task"), names(rows, "way")

    def losses(task: str, way: str) -> str:
        values = [row["loss"] for row in rows if (row["task"], row["way"]) == (task, way)]
        return f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"

    return table(["", *tasks], [[way, *(losses(task, way) for task in tasks)] for way in ways])


def optimizers(rows: Rows) -> str:
    ways = names(rows, "way")
    loss = {(row["optimizer"], row["way"]): f"{row['loss']:.3f}" for row in rows}
    return table(["", *ways], [[name, *(loss[name, way] for way in ways)] for name in names(rows, "optimizer")])


def step(rows: Rows) -> str:
    sizes = names(rows, "millions")
    cells = {(row["millions"], row["name"]): cell(row) for row in rows}
    head = ["", *(f"{size:.0f} M parameters" for size in sizes)]
    return table(head, [[name, *(cells[size, name] for size in sizes)] for name in names(rows)])
