"""The facts on the README."""

from typing import Any

import numpy as np

from benchmarks.accuracy.text_model import MARGIN
from benchmarks.float64 import FLOAT32, PRODUCTS
from benchmarks.record import Rows
from benchmarks.report.accuracy import interval
from benchmarks.report.markdown import select, table

CUDNN = "cuDNN's attention"
GPT, FUSED = "GPT-2 124 M, 8 x 1024, scanned", f"GPT-2 124 M, 8 x 1024, {CUDNN}, scanned"


def facts(
    memory: dict[str, Any], whole: dict[str, Any], text: dict[str, Any], optimizers: Rows, steps: Rows, float64: Rows
) -> str:
    """Memory of a gradient, the loss where training ends, bytes a parameter, the cost of a step, and float64."""
    found = of_training(text), of_optimizers(optimizers), of_steps(steps), of_float64(float64)
    return "\n".join([of_models(memory, whole), "", *(f"- {line}" for line in found)])


def of_models(found: dict[str, Any], whole: dict[str, Any]) -> str:
    """A table: temporary memory of a gradient of GPT-2 by the way and by the attention."""
    rows = {(row["model"], row["variant"]): row for row in found["rows"]}
    for row in select(whole["rows"], variant="float32"):
        if row["model"].startswith("GPT-2") and CUDNN not in row["model"]:
            rows[GPT, "float32"] = {"temporary_megabytes": row["temporary_megabytes"]}
    ways = {
        "float32": "float32",
        "autocast": "autocast, budget 1.0",
        "autocast, `memory_budget=0.5`": "autocast, budget 0.5",
        "bfloat16 by hand": "by hand",
        "with the `dots_saveable` policy": "by hand, dots_saveable",
        "with a checkpoint around each block": "by hand, each block again",
    }

    def cell(model: str, variant: str) -> str:
        if (model, variant) not in rows:
            return ""
        row, first = rows[model, variant], rows[model, "by hand"]["gigaflops"]
        more = 100 * (row.get("gigaflops", first) / first - 1)
        return f"{row['temporary_megabytes'] / 1e3:.1f}" + (f", {more:.0f} % more FLOPs" if more > 0.5 else "")

    head = ["Temporary GB of a gradient of GPT-2 (124 M, 8 x 1024 tokens)", "attention written out", CUDNN]
    return table(head, [[name, cell(GPT, variant), cell(FUSED, variant)] for name, variant in ways.items()])


def of_training(found: dict[str, Any]) -> str:
    base, shown, others = {row["seed"]: row["loss"] for row in select(found["rows"], name="float32")}, [], []
    for name, margin in MARGIN.items():
        less = np.array([row["loss"] - base[row["seed"]] for row in select(found["rows"], name=name)])
        low, high = interval(less)
        if -margin < low and high < margin:
            shown.append(f"{name} within {margin}")
        else:
            others.append(f"{len(less)} seeds do not show it for {name} ({low:+.3f} to {high:+.3f})")
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
    of = lambda name: select(rows, name=name, optimizer="adamw")[0]
    own = of("jamp")
    milliseconds = own["predicted_milliseconds"] - of("optax")["predicted_milliseconds"]
    return (
        f"**Skipping**: the check of the gradients adds {100 * (own['bytes_ratio'] - 1):.0f} % to the bytes that AdamW "
        f"moves, which predicts {milliseconds:.2f} ms for {own['millions']:.0f} M parameters. A `where` by hand moves "
        f"as many ([table](docs/benchmarks/index.md))."
    )
