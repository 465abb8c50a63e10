"""The memory of a gradient under autocast, beside the same model written in bfloat16, without the device.

    python -m benchmarks.memory tpu --json docs/benchmarks/memory_tpu.json     needs `pip install libtpu`
    python -m benchmarks.memory h200 --json docs/benchmarks/memory_h200.json   needs `pip install "jax[cuda13]"`

For each model: what the compiler says of `jax.value_and_grad(loss)` (bytes accessed, floating operations, temporary
memory), what its program reads from and writes to main memory, and what `jax.vjp` keeps from the forward pass. XLA's
"bytes accessed" also counts the prefetches to the memory on a TPU's chip, and a loop's body only once.
`dots_saveable`: each block is in a `jax.checkpoint` with that policy, as an expert would add it by hand. cuDNN's
attention computes in 16 bit and keeps no scores: for the H200 only, and in float32 XLA's attention takes its place.
"""

import os
from dataclasses import replace
from functools import partial
from typing import Any

# The autotuner needs the device, and the Triton emitter refuses some shapes of a ViT without it.
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false")

import jax
import jax.numpy as jnp

import jamp
from benchmarks import hlo, models
from benchmarks.ahead_of_time import TARGETS, compiled, facts, kept
from benchmarks.memory import llama
from benchmarks.memory.large_models import fused_attention
from benchmarks.models import SHAPES, Shape, problem, resnet_loss, resnet_params
from benchmarks.record import Rows, parser, record, show, write

# To "by hand", of what is measured.
RATIOS = {"temporary_megabytes": "temporary", "gigabytes_accessed": "accessed", "kept_megabytes": "kept"}
RATIOS |= {"main_memory_gigabytes": "main_memory", "gigaflops": "flops"}
SMALL = Shape(3, 512, 8, 1024, 512)
IMAGES = jax.ShapeDtypeStruct((64, 56, 56, 3), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32)
CUDNN = "cuDNN's attention"
DEEP = "GPT, 24 layers of 512, 8 x 512, unrolled"


def with_cudnn(name: str, batch: int) -> Any:
    loss, params, data = problem(models, SHAPES[name], batch, True)
    return partial(loss, attend=fused_attention(jnp.bfloat16)), params, data


MODELS = {
    "ViT-B/16, batch 64, scanned": lambda: problem(models, SHAPES["ViT-B/16"], 64, True),
    "GPT-2 124 M, batch 8 x 1024, scanned": lambda: problem(models, SHAPES["GPT-2 124 M"], 8, True),
    "ViT-B/16, batch 64, cuDNN's attention, scanned": lambda: with_cudnn("ViT-B/16", 64),
    "GPT-2 124 M, batch 8 x 1024, cuDNN's attention, scanned": lambda: with_cudnn("GPT-2 124 M", 8),
    "Llama, 3 layers of 512, 8 x 512, scanned": lambda: problem(llama, SMALL, 8, True),
    "Llama, 3 layers of 512, 8 x 512, unrolled": lambda: problem(llama, SMALL, 8, False),
    "GPT, 3 layers of 512, 8 x 512, scanned": lambda: problem(models, SMALL, 8, True),
    "GPT, 3 layers of 512, 8 x 512, unrolled": lambda: problem(models, SMALL, 8, False),
    DEEP: lambda: problem(models, replace(SMALL, layers=24), 8, False),
    "ViT, 3 layers of 512, 16 x 196, unrolled": lambda: problem(models, Shape(3, 512, 8, 100, 196, 16), 16, False),
    "ResNet-18, 64 images of 56 x 56": lambda: (resnet_loss, jax.eval_shape(lambda: resnet_params(64)), IMAGES),
}


def variants(model: str, loss: Any) -> dict[str, Any]:
    """The same loss in float32, by hand, under autocast, and with the checkpoints of an expert."""
    by_hand, auto = partial(loss, dtype=jnp.bfloat16), partial(jamp.autocast, compute_dtype=jnp.bfloat16)
    if model == DEEP:
        return {"by hand": by_hand, "autocast": auto(loss)}
    float32 = partial(loss, attend=fused_attention(None)) if CUDNN in model else loss
    found = {"by hand": by_hand, "float32": float32, "autocast": auto(loss)}
    found["recompute=False"] = auto(loss, recompute=False)
    if loss is not resnet_loss:
        policy = {"policy": jax.checkpoint_policies.dots_saveable}
        found["by hand, dots_saveable"] = partial(by_hand, **policy)
        found["autocast, dots_saveable"] = auto(partial(loss, **policy))
    return found


def measure(target: str, only: list[str]) -> Rows:
    rows: Rows = []
    for model, make in MODELS.items():
        if not any(part in model for part in only or [""]) or (CUDNN in model and target != "h200"):
            continue
        loss, params, batch = make()
        first: dict[str, Any] = {}
        for name, fun in variants(model, loss).items():
            program = compiled(target, jax.value_and_grad(fun), params, batch)
            found = facts(program) | {"kept_megabytes": kept(fun, params, batch)}
            found["main_memory_gigabytes"] = hlo.count(program.as_text()).bytes / 1e9
            first = first or found
            ratios = {ratio: found[key] and found[key] / first[key] for key, ratio in RATIOS.items()}
            rows.append({"model": model, "variant": name} | found | ratios)
            show(rows[-1])
    return rows


if __name__ == "__main__":
    arguments = parser("benchmarks.memory", __doc__)
    arguments.add_argument("target", choices=TARGETS)
    arguments.add_argument("--only", nargs="+", default=[], help="parts of the names of models")
    options = arguments.parse_args()
    jax.config.update("jax_platforms", "cpu")
    only = options.only or (["GPT, 3 layers"] if options.quick else [])
    about = record("benchmarks.memory", options.quick, options.target)
    write(options.json, about | {"rows": measure(options.target, only)})
