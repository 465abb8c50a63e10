"""The facts on the README."""

from typing import Any

import numpy as np

from benchmarks.accuracy.text_model import MARGIN
from benchmarks.float64 import PRODUCTS
from benchmarks.record import Rows
from benchmarks.report.accuracy import interval
from benchmarks.report.markdown import select, table

GPT, CUDNN = "GPT-2 124 M, 8 x 1024", "cuDNN's attention"


def facts(gpu: Rows, text: dict[str, Any], optimizers: Rows, float64: Rows) -> str:
    """Time and memory of a gradient, the loss where training ends, bytes a parameter, float64."""
    found = of_training(text), of_optimizers(optimizers), of_float64(float64)
    return "\n".join([of_models(gpu), "", *(f"- {line}" for line in found)])


def of_models(rows: Rows) -> str:
    """A table: the time and the temporary memory of a step of GPT-2 on a GPU, by the way and by the attention."""
    found = {row["name"]: row for row in select(rows, model=GPT)}
    ways = {
        "float32": "float32",
        "bfloat16 by hand": "by hand",
        "by hand, `dots_saveable` policy": "by hand, dots_saveable",
        "by hand, a checkpoint around each block": "by hand, each block again",
        "autocast (budget 1.0)": "autocast, budget 1.0",
        "with `memory_budget=0.5`": "autocast, budget 0.5",
        "with `memory_budget=0.1`": "autocast, budget 0.1",
    }

    def cell(name: str) -> str:
        row = found.get(name)
        return f"{row['milliseconds']:.1f} ms, {row['temporary_megabytes'] / 1e3:.1f} GB" if row else ""

    head = [
        "Time and temporary memory of a gradient and SGD update of GPT-2 (124 M, 8 x 1024 tokens)",
        "attention written out",
        f"{CUDNN}, in bfloat16",
    ]
    return table(head, [[way, cell(name), cell(f"{name}, {CUDNN}")] for way, name in ways.items()])


def of_training(found: dict[str, Any]) -> str:
    base = {row["seed"]: row["loss"] for row in select(found["rows"], name="float32")}
    told, outside = [], []
    for name in MARGIN:
        less = np.array([row["loss"] - base[row["seed"]] for row in select(found["rows"], name=name)])
        low, high = interval(less)
        told.append(f"{name} {low:+.3f} to {high:+.3f}")
        if max(-low, high) >= MARGIN[name]:
            outside.append(name)
    margins = dict.fromkeys(str(MARGIN[name]) for name in outside)
    judged = f"; {' and '.join(outside)} leave their margin of {' and '.join(margins)}" if outside else ""
    return (
        "**Loss** of a language model of 1.4 M parameters, on a CPU, minus float32's, in nats a byte: "
        f"{', '.join(told)} (90 % intervals of {len(base)} seeds{judged}; "
        "[study](docs/benchmarks/accuracy.md))."
    )


def of_float64(rows: Rows) -> str:
    timed = select(rows, name=PRODUCTS)
    least, most = (f(row["ratio"] for row in timed) for f in (min, max))
    slower = sum(row["ratio_low"] > 1 for row in timed)
    return (
        f"**float64**: {len(timed)} programs on a CPU with products in float32 take {least:.2f} to {most:.2f} times "
        f"the time of float64; {slower} are slower ([table](docs/frameworks/science.md#float64))."
    )


def of_optimizers(rows: Rows) -> str:
    held = lambda name: f"{select(rows, optimizer='adamw', name=name)[0]['stored']:.1f}"
    return (
        f"**Optimizer memory**: parameters, gradients and AdamW's state take {held('float32')} bytes a parameter in "
        f"float32, {held('split masters, 8-bit state')} with bfloat16 parameters, exact float32 masters and 8-bit "
        f"moments, and {held('stochastic, 8-bit state')} without masters ([table](docs/optimizer-memory.md))."
    )
