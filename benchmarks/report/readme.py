"""The facts on the README."""

from typing import Any

import numpy as np

from benchmarks.accuracy.text_model import MARGIN
from benchmarks.float64 import FLOAT32, PRODUCTS
from benchmarks.record import Rows
from benchmarks.report.accuracy import interval
from benchmarks.report.markdown import select, table

GPT, CUDNN = "GPT-2 124 M, 8 x 1024", "cuDNN's attention"


def facts(gpu: Rows, text: dict[str, Any], optimizers: Rows, steps: Rows, float64: Rows) -> str:
    """Time and memory of a gradient, the loss where training ends, bytes a parameter, the cost of a step, float64."""
    found = of_training(text), of_optimizers(optimizers), of_steps(steps), of_float64(float64)
    return "\n".join([of_models(gpu), "", *(f"- {line}" for line in found)])


def of_models(rows: Rows) -> str:
    """A table: the time and the temporary memory of a gradient of GPT-2 on a GPU, by the way and by the attention."""
    found = {row["name"]: row for row in select(rows, model=GPT)}
    ways = {
        "float32": "float32",
        "bfloat16 by hand": "by hand",
        "with the `dots_saveable` policy": "by hand, dots_saveable",
        "with a checkpoint around each block": "by hand, each block again",
        "autocast": "autocast, budget 1.0",
        "autocast, `memory_budget=0.5`": "autocast, budget 0.5",
        "autocast, `memory_budget=0.1`": "autocast, budget 0.1",
    }

    def cell(name: str) -> str:
        row = found.get(name)
        return f"{row['milliseconds']:.1f} ms, {row['temporary_megabytes'] / 1e3:.1f} GB" if row else ""

    head = ["Gradient of GPT-2 (124 M, 8 x 1024 tokens)", "attention written out", f"{CUDNN}, operands cast by hand"]
    return table(head, [[way, cell(name), cell(f"{name}, {CUDNN}")] for way, name in ways.items()])


def of_training(found: dict[str, Any]) -> str:
    base, shown, others = {row["seed"]: row["loss"] for row in select(found["rows"], name="float32")}, [], []
    for name, margin in MARGIN.items():
        less = np.array([row["loss"] - base[row["seed"]] for row in select(found["rows"], name=name)])
        low, high = interval(less)
        if -margin < low and high < margin:
            shown.append(f"{name} within {margin}")
        else:
            others.append(f"{name} between {low:+.3f} and {high:+.3f} ({len(less)} seeds)")
    return (
        f"**Loss** of a language model of 1.4 M parameters, on a CPU, compared with float32's: {' and '.join(shown)} "
        f"nats a byte; {', '.join(others)} "
        "([study](docs/benchmarks/accuracy.md))."
    )


def of_float64(rows: Rows) -> str:
    timed = select(rows, name=PRODUCTS)
    found, float32 = (select(rows, name=name, problem="energies and forces")[0] for name in (PRODUCTS, FLOAT32))
    slower = sum(row["ratio_low"] > 1 for row in timed)
    told = lambda row: f"{row['ratio']:.2f} times the time, error {row['error']:.0e}"
    return (
        "**float64**: energies and forces of a network on a CPU, compared with float64: products in float32 "
        f"{told(found)}; all in float32 {told(float32)}. Of {len(timed)} programs, {slower} are slower "
        "([table](docs/frameworks/science.md#float64))."
    )


def of_optimizers(rows: Rows) -> str:
    held = lambda name: f"{select(rows, optimizer='adamw', name=name)[0]['stored']:.1f}"
    return (
        f"**Optimizer memory**: parameters, gradients and AdamW's state take {held('float32')} bytes a parameter in "
        "float32. With bfloat16 parameters and 8-bit moments they take "
        f"{held('split masters, 8-bit state')} with exact float32 masters, and {held('stochastic, 8-bit state')} "
        "without ([table](docs/optimizer-memory.md))."
    )


def of_steps(rows: Rows) -> str:
    plain, own, by_hand = (
        select(rows, name=name, optimizer="adamw", grads="float32")[0]["milliseconds"]
        for name in ("optax", "jamp", "where by hand")
    )
    return (
        f"**Skipping** adds {own - plain:.2f} ms to AdamW's {plain:.2f} ms on an H200 (by hand {by_hand - plain:.2f}; "
        "100 M parameters; [table](docs/benchmarks/index.md#on-a-gpu))."
    )
