"""The memory of a gradient under autocast, beside the same model written in bfloat16, without the device.

    python -m benchmarks.memory tpu --json docs/benchmarks/memory_tpu.json     needs `pip install libtpu`
    python -m benchmarks.memory h200 --json docs/benchmarks/memory_h200.json   needs `pip install "jax[cuda13]"`

For each model: what the compiler for a TPU v5e or an H200 says of `jax.value_and_grad(loss)` (bytes accessed, floating
operations, temporary memory), what its program reads from and writes to main memory, and what `jax.vjp` keeps from the
forward pass before any compiler has seen it. XLA's "bytes accessed" also counts the prefetches to the memory
on a TPU's chip, and a loop's body only once.

`dots_saveable`: each block is in a `jax.checkpoint` with that policy, as an expert would add it by hand.
"""

import os
from dataclasses import replace
from functools import partial
from typing import Any

# The autotuner needs the device, and the Triton emitter refuses some shapes of a ViT without it.
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false")

import jax
import jax.numpy as jnp
import numpy as np

import jamp
from benchmarks import hlo, models
from benchmarks.ahead_of_time import TARGETS, kept, on_device
from benchmarks.memory import llama
from benchmarks.models import SHAPES, Shape, problem, resnet_loss, resnet_params
from benchmarks.record import Rows, parser, record, write

SMALL = Shape(3, 512, 8, 1024, 512)
DEEP = "GPT, 24 layers of 512, 8 x 512, unrolled"


def resnet() -> tuple[Any, Any, Any]:
    images, labels = jax.ShapeDtypeStruct((64, 56, 56, 3), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32)
    return resnet_loss, jax.eval_shape(lambda: resnet_params(64)), (images, labels)


MODELS = {
    "ViT-B/16, batch 64, scanned": lambda: problem(models, SHAPES["ViT-B/16"], 64, True),
    "GPT-2 124 M, batch 8 x 1024, scanned": lambda: problem(models, SHAPES["GPT-2 124 M"], 8, True),
    "Llama, 3 layers of 512, 8 x 512, scanned": lambda: problem(llama, SMALL, 8, True),
    "Llama, 3 layers of 512, 8 x 512, unrolled": lambda: problem(llama, SMALL, 8, False),
    "GPT, 3 layers of 512, 8 x 512, scanned": lambda: problem(models, SMALL, 8, True),
    "GPT, 3 layers of 512, 8 x 512, unrolled": lambda: problem(models, SMALL, 8, False),
    DEEP: lambda: problem(models, replace(SMALL, layers=24), 8, False),
    "ViT, 3 layers of 512, 16 x 196, unrolled": lambda: problem(models, Shape(3, 512, 8, 100, 196, 16), 16, False),
    "ResNet-18, 64 images of 56 x 56": resnet,
}


def variants(model: str, loss: Any) -> dict[str, Any]:
    """The same loss in float32, by hand, under autocast, and with the checkpoints of an expert."""
    by_hand, auto = partial(loss, dtype=jnp.bfloat16), partial(jamp.autocast, compute_dtype=jnp.bfloat16)
    if model == DEEP:
        return {"by hand": by_hand, "autocast": auto(loss)}
    found = {
        "by hand": by_hand,
        "float32": loss,
        "autocast": auto(loss),
        "recompute=False": auto(loss, recompute=False),
    }
    if loss is not resnet_loss:
        policy = {"policy": jax.checkpoint_policies.dots_saveable}
        found["by hand, dots_saveable"] = partial(by_hand, **policy)
        found["autocast, dots_saveable"] = auto(partial(loss, **policy))
    return found


def measure(target: str, only: list[str]) -> Rows:
    rows: Rows = []
    for model, make in MODELS.items():
        if not any(part in model for part in only or [""]):
            continue
        loss, params, batch = make()
        first: dict[str, Any] = {}
        for name, fun in variants(model, loss).items():
            found = facts(target, fun, params, batch)
            first = first or found
            ratios = dict(zip(RATIOS, (found[key] / first[key] for key in found), strict=True))
            row = {"model": model, "variant": name} | found | ratios
            rows.append({key: None if x != x else x for key, x in row.items()})
            print(
                "{model:42s} {variant:24s} {temporary_megabytes:8.0f} MB temporary ({temporary:.2f})  "
                "{gigabytes_accessed:6.2f} GB accessed ({accessed:.2f})  "
                "{main_memory_gigabytes:6.2f} GB of main memory ({main_memory:.2f})  flops {flops:.2f}  "
                "{kept_megabytes:8.0f} MB kept ({kept:.2f})".format(**row),
                flush=True,
            )
    return rows


RATIOS = ("temporary", "accessed", "main_memory", "flops", "kept")  # to "by hand", of what `facts` returns


def facts(target: str, fun: Any, params: Any, batch: Any) -> dict[str, float]:
    compiled = jax.jit(jax.value_and_grad(fun)).lower(*on_device(target, (params, batch))).compile()
    cost: Any = compiled.cost_analysis() or {}  # XLA:GPU has no analysis without a GPU
    return {
        "temporary_megabytes": compiled.memory_analysis().temp_size_in_bytes / 1e6,
        "gigabytes_accessed": cost.get("bytes accessed", np.nan) / 1e9,
        "main_memory_gigabytes": hlo.count(compiled.as_text()).bytes / 1e9,
        "gigaflops": cost.get("flops", np.nan) / 1e9,
        "kept_megabytes": kept(fun, params, batch),
    }


if __name__ == "__main__":
    arguments = parser("benchmarks.memory", __doc__)
    arguments.add_argument("target", choices=TARGETS)
    arguments.add_argument("--only", nargs="+", default=[], help="parts of the names of models")
    options = arguments.parse_args()
    jax.config.update("jax_platforms", "cpu")
    only = options.only or (["GPT, 3 layers"] if options.quick else [])
    about = record("benchmarks.memory", options.quick, options.target)
    write(options.json, about | {"rows": measure(options.target, only)})
