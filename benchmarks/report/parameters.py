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


def ways(tpu: Rows, h200: Rows, trained: dict[str, Any], moments: dict[str, Any]) -> str:
    """Of AdamW: bytes a parameter held, moved and temporary, kernels of a step, its error, and the loss it leads to."""
    head = ["AdamW", "held", "v5e: moved", "temporary", "kernels", "H200: moved", "temporary", "kernels"]
    head += ["error of an update", "loss, language model"]
    code = select(moments["rows"], way="powers 2 and 4, stochastic", task="language model, b2 0.999")[0]
    errors = {"8-bit": f"{np.mean(code['errors']):.3f}", "bfloat16": "not measured"}
    body = []
    for name in names(select(tpu, optimizer="adamw")):
        rows = [select(found, optimizer="adamw", name=name)[0] for found in (tpu, h200)]
        cells = [
            part
            for row in rows
            for part in (f"{row['moved']:.1f} ({row['bytes_ratio']:.2f})", f"{row['temporary']:.1f}", row["kernels"])
        ]
        error = next((x for kind, x in errors.items() if f"{kind} state" in name), "0")
        loss = differences(trained["rows"], "language model", name)
        body.append([CALLS[name], f"{rows[0]['stored']:.2f}", *map(str, cells), error, loss])
    return table(head, body)


def differences(rows: Rows, task: str, way: str) -> str:
    """float32's mean, or the 90 % interval of the paired differences to it: percent, or for the digits points."""
    key = "accuracy" if task == "digits" else "loss"
    base, found = (np.array([row[key] for row in select(rows, task=task, way=w)]) for w in ("float32", way))
    if not found.size:
        return ""
    if way == "float32":
        return f"{100 * base.mean():.1f} %" if task == "digits" else f"{base.mean():.3f}"
    low, high = (100 * x / (1 if task == "digits" else base.mean()) for x in interval(found - base))
    text = f"{low:+.2f} to {high:+.2f}"
    return text if -MARGIN < low < high < MARGIN else f"**{text}**"


def training(found: dict[str, Any]) -> str:
    """How each task ends on data held out."""
    rows, tasks = found["rows"], names(found["rows"], "task")
    body = [[CALLS[way], *(differences(rows, task, way) for task in tasks)] for way in names(rows, "way")]
    return f"{table(['', *tasks], body)}\n\n{origin(found)}"


def codes(found: dict[str, Any]) -> str:
    """The error of Adam's update by code, of each seed."""
    tasks = names(found["rows"], "task")
    body = []
    for way in names(found["rows"], "way"):
        errors = [select(found["rows"], way=way, task=task)[0]["errors"] for task in tasks]
        body.append([way, *(", ".join(f"{error:.3f}" for error in of_task) for of_task in errors)])
    return f"{table(['moments', *tasks], body)}\n\n{origin(found)}"
