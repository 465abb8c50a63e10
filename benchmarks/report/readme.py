"""The facts on the README."""

from typing import Any

import numpy as np

from benchmarks.accuracy.text_model import MARGIN
from benchmarks.float64 import PRODUCTS
from benchmarks.record import Rows
from benchmarks.report.accuracy import interval
from benchmarks.report.markdown import select

GPT = "GPT-2 124 M, 8 x 1024, cuDNN's attention, scanned"


def facts(
    memory: dict[str, Any], whole: dict[str, Any], text: dict[str, Any], optimizers: Rows, steps: Rows, float64: Rows
) -> str:
    """Memory of a gradient, the loss where training ends, bytes a parameter, the cost of a step, and float64."""
    found = of_models(memory, whole), of_training(text), of_optimizers(optimizers), of_steps(steps), of_float64(float64)
    return "\n".join(f"- {line}" for line in found)


def of_models(found: dict[str, Any], whole: dict[str, Any]) -> str:
    rows = {row["variant"]: row for row in select(found["rows"], model=GPT)}
    gigabytes = lambda row: f"{row['temporary_megabytes'] / 1e3:.1f} GB"
    of = lambda name: gigabytes(rows[name])
    more = lambda name: f"{100 * (rows[name]['gigaflops'] / rows['by hand']['gigaflops'] - 1):.0f} % more FLOPs"
    float32 = next(row for row in select(whole["rows"], variant="float32") if row["model"].startswith("GPT-2"))
    half, block = "autocast, budget 0.5", "by hand, each block again"
    return (
        "**Memory**: the gradient of GPT-2 (124 M parameters, 8 x 1024 tokens) takes "
        f"{gigabytes(float32)} of temporary memory in float32, {of('autocast, budget 1.0')} with autocast, and "
        f"{of(half)} with `memory_budget=0.5`, for {more(half)}. Written by hand in bfloat16 it takes {of('by hand')}, "
        f"{of('by hand, dots_saveable')} with the `dots_saveable` policy, and {of(block)} with a checkpoint around "
        f"each block, for {more(block)}. In 16 bit, attention is cuDNN's kernel "
        "([other models](docs/a-model-that-does-not-fit.md))."
    )


def of_training(found: dict[str, Any]) -> str:
    base, told = {row["seed"]: row["loss"] for row in select(found["rows"], name="float32")}, []
    for name in MARGIN:
        less = np.array([row["loss"] - base[row["seed"]] for row in select(found["rows"], name=name)])
        told.append("{} {:+.4f} to {:+.4f}".format(name, *interval(less)))
    mean = np.mean(list(base.values()))
    return (
        f"**Loss** of a small language model on held-out text, minus the {mean:.3f} nats a byte of float32: "
        f"{', '.join(told)} (90 % intervals of {len(less)} seeds, [study](docs/benchmarks/accuracy.md))."
    )


def of_float64(rows: Rows) -> str:
    timed = select(rows, name=PRODUCTS)
    found = select(timed, problem="energies and forces")[0]
    slower = sum(row["ratio_low"] > 1 for row in timed)
    return (
        f"**float64**: with products in float32, energies and forces of a network take {found['ratio']:.2f} times the "
        f"time of float64 on a CPU, with an error of {found['error']:.0e}. Of {len(timed)} programs, {slower} are "
        "slower ([table](docs/frameworks/science.md#float64))."
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
