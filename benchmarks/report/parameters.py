"""Tables of the memory of optimizers."""

from typing import Any

import numpy as np

from benchmarks.record import Rows
from benchmarks.report.accuracy import interval
from benchmarks.report.markdown import names, origin, select, table

MARGIN = 1.0  # percent of float32's loss, and for the digits points of accuracy
CALLS = {
    "float32": "float32",
    "masters": "`master_params`",
    "rounded to nearest": "rounded to nearest",
    "stochastic": "`stochastic_rounding`",
    "stochastic, bfloat16 state": "`stochastic_rounding`, bfloat16 state",
    "Kahan sums": "Kahan sums",
    "loss_scaled(stochastic)": "`loss_scaled(stochastic_rounding)`",
    "split masters": "`master_params`, split",
    "split masters, 8-bit state": "`master_params`, split, of `quantized_state`",
    "stochastic, 8-bit state": "`stochastic_rounding(quantized_state)`",
    "float32, 8-bit state": "`quantized_state`, float32 parameters",
}


def ways(tpu: Rows, h200: Rows) -> str:
    """Of AdamW's step: bytes a parameter that are held, moved and temporary, and kernels an array."""
    head = ["AdamW", "held", "v5e: moved", "temporary", "kernels", "H200: moved", "temporary", "kernels"]
    body = []
    for name in names(select(tpu, optimizer="adamw")):
        rows = [select(found, optimizer="adamw", name=name)[0] for found in (tpu, h200)]
        cells = (
            f"{row['moved']:.1f} ({row['bytes_ratio']:.2f}); {row['temporary']:.1f}; {row['kernels']}" for row in rows
        )
        body.append([CALLS[name], f"{rows[0]['stored']:.2f}", *(part for cell in cells for part in cell.split("; "))])
    return table(head, body)


def training(found: dict[str, Any]) -> str:
    """float32's mean on data held out, and the 90 % interval of each way's paired differences to it."""
    tasks = names(found["rows"], "task")
    body = []
    for way in names(found["rows"], "way"):
        cells = []
        for task in tasks:
            key = "accuracy" if task == "digits" else "loss"
            values = [np.array([row[key] for row in select(found["rows"], task=task, way=w)]) for w in ("float32", way)]
            base = values[0].mean()
            unit = 100 if task == "digits" else 100 / base
            low, high = (unit * x for x in interval(values[1] - values[0]))
            text = f"{low:+.2f} to {high:+.2f}"
            first = f"{100 * base:.1f} %" if task == "digits" else f"{base:.3f}"
            cells.append(first if way == "float32" else text if -MARGIN < low < high < MARGIN else f"**{text}**")
        body.append([CALLS[way], *cells])
    return f"{table(['', *tasks], body)}\n\n{origin(found)}"


def codes(found: dict[str, Any]) -> str:
    """The error of Adam's update by code, of each seed."""
    tasks = names(found["rows"], "task")
    body = []
    for way in names(found["rows"], "way"):
        errors = [select(found["rows"], way=way, task=task)[0]["errors"] for task in tasks]
        body.append([way, *(", ".join(f"{error:.3f}" for error in of_task) for of_task in errors)])
    return f"{table(['moments', *tasks], body)}\n\n{origin(found)}"
