"""Mixed precision's speed-up of whole models, beside torch.amp's on the same device: `python -m benchmarks.gpu`.

    python -m benchmarks.gpu --json gpu.json          time a training step of ViT-B/16 and a 124 M-parameter transformer
    python -m benchmarks.gpu --quick                  the same with tiny models, on a CPU too
    python -m benchmarks.gpu --ahead tpu --json ...   compile them for a device that is not there (tpu or h200)

A step is forward, backward and AdamW on float32 parameters; the data are random, only the speed is looked at. Each
library has a process of its own, one after the other, so that neither holds the other's memory.
"""

import argparse
import multiprocessing
import os
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # before jax starts: torch needs memory too

import jax
import numpy as np

from benchmarks import models
from benchmarks.ahead_of_time import on_device
from benchmarks.record import record, write
from benchmarks.timing import compare, paired, ratio

Rows = list[dict[str, Any]]
BATCH = {"ViT-B/16": 64, "GPT-2 124 M": 8}
# Float32 has to fit into the 16 GB of a TPU v5e too. Without a GPU, XLA:GPU finds no tiles for ViT's 197 tokens, and
# leaves the products to cuBLAS.
AHEAD: dict[str, tuple[str, dict[str, int], dict[str, bool]]] = {
    "tpu": ("one core of a TPU v5e, not there", {"ViT-B/16": 32, "GPT-2 124 M": 2}, {}),
    "h200": ("an H200, not there", BATCH, {"xla_gpu_enable_triton_gemm": False}),
}
LIBRARIES = ("jax", "torch")


def measure(library: str, name: str, quick: bool) -> tuple[str, Rows]:
    """The device, and a row for each way to train the model; ratios are to the library's own float32."""
    shape, batch, rounds = (models.SMALL[name], 2, 1) if quick else (models.SHAPES[name], BATCH[name], 11)
    labels = {"model": name, "library": library, "batch": batch}
    if library == "jax":
        results = compare(models.cases(shape, batch), rounds, tries=1)
        return jax.devices()[0].device_kind, [labels | result.as_dict() for result in results]
    import torch

    from benchmarks import torch_models

    device = "cuda" if torch.cuda.is_available() else "cpu"
    times = paired(torch_models.steps(shape, batch, device), rounds)
    base = next(iter(times.values()))
    rows = [
        {"name": name, "milliseconds": float(np.median(t) * 1e3)}
        | dict(zip(("ratio", "ratio_low", "ratio_high"), ratio(t, base), strict=True))
        for name, t in times.items()
    ]
    return torch.cuda.get_device_name() if device == "cuda" else "cpu", [labels | row for row in rows]


def speed(quick: bool, file: str | None) -> None:
    """Written after each library and model: a run that is cut off leaves what it has measured."""
    rows: Rows = []
    devices: dict[str, None] = {}
    for name in models.SHAPES:
        for library in LIBRARIES:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                try:
                    device, found = pool.apply(measure, (library, name, quick))
                except ImportError as error:
                    print(f"left out: {error}")
                    continue
            for row in found:
                print("{model:12s} {name:36s} {milliseconds:9.2f} ms   x {ratio:.3f}".format(**row), flush=True)
            rows += found
            devices[device] = None
            write(file, record("benchmarks.gpu", quick, ", ".join(devices)) | {"gpu": rows})


def ahead(target: str, quick: bool) -> Rows:
    """Temporary memory, bytes accessed and the dtypes of the matrix products; the layers are scanned."""
    _, batches, options = AHEAD[target]
    rows = []
    for model, batch in batches.items():
        shape = replace((models.SMALL if quick else models.SHAPES)[model], scanned=True)
        params, args = jax.eval_shape(partial(made, shape, batch))
        labels = {"model": model, "millions": sum(x.size for x in jax.tree.leaves(params)) / 1e6, "batch": batch}
        for name, (step, tx) in models.steps(shape).items():
            if name == "float32":
                continue  # of the compilers, only JAX's default precision is asked
            carry, batch_on_device = on_device(target, ((params, jax.eval_shape(tx.init, params)), args))
            lowered = jax.jit(step, donate_argnums=0).lower(carry, batch_on_device)
            rows.append(labels | {"name": name} | facts(lowered.compile(compiler_options=options)))
            print(rows[-1], flush=True)
    return rows


def made(shape: models.Shape, batch: int) -> Any:
    return models.init(jax.random.key(0), shape), models.data(jax.random.key(1), shape, batch)


def facts(compiled: Any) -> dict[str, Any]:
    text, cost = compiled.as_text(), compiled.cost_analysis() or {}  # XLA:GPU has no analysis without a GPU
    return {
        "temporary_megabytes": compiled.memory_analysis().temp_size_in_bytes / 1e6,
        "gigabytes_accessed": cost["bytes accessed"] / 1e9 if "bytes accessed" in cost else None,
        "conditionals": text.count(" conditional("),
        "products": products(text),
    }


def products(text: str) -> dict[str, int]:
    """Matrix products and convolutions of an optimized program by the dtypes of their operands; a loop's count once."""
    dtype_of = dict(re.findall(r"(%[\w.-]+) = (\w+)\[", text))
    found: Counter[str] = Counter()
    for kind, operands, rest in re.findall(r" (dot|convolution|custom-call)\(([^)]*)\)(.*)", text):
        if kind != "custom-call" or "__cublas" in rest or "__cudnn$conv" in rest:
            found[" x ".join(dtype_of.get(name, "?") for name in re.findall(r"%[\w.-]+", operands)[:2])] += 1
    return dict(found.most_common())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny models, each step once")
    parser.add_argument("--ahead", choices=AHEAD, help="compile for this device instead of timing")
    parser.add_argument("--json", metavar="FILE", help="write the results here too")
    options = parser.parse_args()
    if options.ahead:
        jax.config.update("jax_platforms", "cpu")
        rows = ahead(options.ahead, options.quick)
        about = record("benchmarks.gpu", options.quick, AHEAD[options.ahead][0])
        write(options.json, about | {f"ahead_{options.ahead}": rows})
    else:
        speed(options.quick, options.json)


if __name__ == "__main__":
    main()
