"""The table of the memory of optimizers."""

from typing import Any

import numpy as np

from benchmarks.record import Rows
from benchmarks.report.accuracy import interval
from benchmarks.report.markdown import names, select, table

TASK = "language model"
CALLS = {
    "float32": "float32",
    "masters": "`master_params`",
    "stochastic": "`stochastic_rounding`",
    "stochastic, bfloat16 state": "`stochastic_rounding`, bfloat16 state",
    "loss_scaled(stochastic)": "`loss_scaled(stochastic_rounding)`",
    "split masters": "`master_params`, split",
    "split masters, 8-bit state": "`master_params`, split, of `quantized_state`",
    "stochastic, 8-bit state": "`stochastic_rounding(quantized_state)`",
    "float32, 8-bit state": "`quantized_state`, float32 parameters",
}


def ways(tpu: Rows, h200: Rows, trained: dict[str, Any]) -> str:
    """Of AdamW: bytes a parameter held and moved, and the loss it leads to."""
    body = []
    for name in names(select(tpu, optimizer="adamw")):
        rows = [select(found, optimizer="adamw", name=name)[0] for found in (tpu, h200)]
        moved = [f"{row['moved']:.1f} ({row['bytes_ratio']:.2f})" for row in rows]
        body.append([CALLS[name], f"{rows[0]['stored']:.2f}", *moved, differences(trained["rows"], name)])
    return table(["AdamW", "held", "v5e: moved", "H200: moved", "loss"], body)


def differences(rows: Rows, way: str) -> str:
    """Of the language model: float32's mean, or the 90 % interval of the paired differences to it in percent."""
    base, found = (np.array([row["loss"] for row in select(rows, task=TASK, way=w)]) for w in ("float32", way))
    if not found.size:
        return ""
    if way == "float32":
        return f"{base.mean():.3f}"
    low, high = (100 * x / base.mean() for x in interval(found - base))
    return f"{low:+.2f} to {high:+.2f}"
