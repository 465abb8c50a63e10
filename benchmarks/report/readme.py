"""The facts on the README."""

from typing import Any

import numpy as np

from benchmarks.accuracy.text_model import MARGIN
from benchmarks.record import Rows
from benchmarks.report.accuracy import interval
from benchmarks.report.markdown import names, select

HAND = "by hand, dots_saveable"
CUDNN = "cuDNN's attention"  # beside it, the same model with attention written out is a weaker baseline


def facts(memory: dict[str, Any], text: dict[str, Any], optimizers: Rows, steps: Rows) -> str:
    """Memory of models, the loss where training ends, bytes a parameter, and the cost of a step."""
    found = of_models(memory), of_training(text), of_optimizers(optimizers), of_steps(steps)
    return "\n".join(f"- {line}" for line in found)


def of_models(found: dict[str, Any]) -> str:
    models = [model for model in names(found["rows"], "model") if select(found["rows"], model=model, variant=HAND)]
    fused = [model for model in models if CUDNN in model]
    models = [model for model in models if model not in {other.replace(f", {CUDNN}", "") for other in fused}]

    def shares(way: str) -> str:
        ratios = [select(found["rows"], model=model, variant=way)[0]["temporary"] for model in models]
        return f"{min(ratios):.2f} to {max(ratios):.2f}"

    return (
        f"**Memory**, compiled for an H200, not run: temporary memory of the gradient of {len(models)} transformers, "
        f"{len(fused)} with {CUDNN}, beside bfloat16 by hand: float32 {shares('float32')}, autocast "
        f"{shares('autocast')}, by hand with a `dots_saveable` policy {shares(HAND)}. Autocast does not change the "
        "model ([table](docs/autocast.md#what-it-costs))."
    )


def of_training(found: dict[str, Any]) -> str:
    base, told = {row["seed"]: row["loss"] for row in select(found["rows"], name="float32")}, []
    for name in MARGIN:
        less = np.array([row["loss"] - base[row["seed"]] for row in select(found["rows"], name=name)])
        told.append("{} {:+.4f} to {:+.4f}".format(name, *interval(less)))
    mean = np.mean(list(base.values()))
    return (
        f"**Loss** of a language model, minus float32's {mean:.3f} nats a byte, 90 % intervals of {len(less)} paired "
        f"seeds: {', '.join(told)} ([study](docs/benchmarks/accuracy.md#text-model))."
    )


def of_optimizers(rows: Rows) -> str:
    held = lambda name: f"{select(rows, optimizer='adamw', name=name)[0]['stored']:.1f}"
    return (
        f"**Bytes a parameter** with AdamW, gradients included: {held('float32')} in float32. With bfloat16 "
        f"parameters and 8-bit moments: {held('split masters, 8-bit state')} with exact float32 masters, "
        f"{held('stochastic, 8-bit state')} without ([table](docs/optimizer-memory.md))."
    )


def of_steps(rows: Rows) -> str:
    of = lambda name, optimizer="adamw": select(rows, name=name, optimizer=optimizer)[0]
    own = of("jamp")
    where = of("where by hand")
    milliseconds = own["predicted_milliseconds"] - of("optax")["predicted_milliseconds"]
    behind = 100 * (of("jamp", "clip + adamw")["bytes_ratio"] - 1)
    return (
        f"**Cost of a step**: about one more read of the gradients, predicted {milliseconds:.2f} ms for "
        f"{own['millions']:.0f} M parameters on an H200, and {behind:.0f} % more bytes behind a clip. A "
        f"`where` by hand moves {where['megabytes'] / own['megabytes']:.2f} times the bytes of jamp's step, in "
        f"{where['kernels']} kernels, not {own['kernels']} ([table](docs/benchmarks/index.md))."
    )
