"""The memory of a gradient under autocast, beside the same model written in bfloat16, without the device.

    python -m benchmarks.memory tpu --json docs/benchmarks/memory_tpu.json     needs `pip install libtpu`
    python -m benchmarks.memory h200 --json docs/benchmarks/memory_h200.json   needs `pip install "jax[cuda13]"`

For each model: what the compiler for a TPU v5e or an H200 says of `jax.value_and_grad(loss)` (bytes accessed, floating
operations, temporary memory), and what `jax.vjp` keeps from the forward pass before any compiler has seen it.
`dots_saveable`: each block is in a `jax.checkpoint` with that policy, as an expert would add it by hand.
"""

import argparse
import os
from functools import partial
from typing import Any
from unittest import mock

# The autotuner needs the device, and the Triton emitter refuses some shapes of a ViT without it.
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false")

import jax
import jax.numpy as jnp
import numpy as np

import jamp
from benchmarks import llama, models
from benchmarks.ahead_of_time import TARGETS, on_device
from benchmarks.autocast import resnet_loss, resnet_params
from benchmarks.models import SHAPES, Shape
from benchmarks.record import record, write

SMALL = Shape(3, 512, 8, 1024, 512)


def transformer(module: Any, shape: Shape, batch: int, scanned: bool) -> tuple[Any, Any, Any]:
    """A loss with the keywords `dtype` and `policy`, and the shapes of its parameters and its batch."""
    shape = Shape(**{**vars(shape), "scanned": scanned})
    params = jax.eval_shape(lambda: module.init(jax.random.key(0), shape))
    return (
        partial(module.loss_fn, shape=shape),
        params,
        jax.eval_shape(lambda: models.data(jax.random.key(1), shape, batch)),
    )


def resnet() -> tuple[Any, Any, Any]:
    images, labels = jax.ShapeDtypeStruct((64, 56, 56, 3), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32)
    return resnet_loss, jax.eval_shape(lambda: resnet_params(64)), (images, labels)


MODELS = {
    "ViT-B/16, batch 64, scanned": lambda: transformer(models, SHAPES["ViT-B/16"], 64, True),
    "GPT-2 124 M, batch 8 x 1024, scanned": lambda: transformer(models, SHAPES["GPT-2 124 M"], 8, True),
    "Llama, 3 layers of 512, 8 x 512, scanned": lambda: transformer(llama, SMALL, 8, True),
    "Llama, 3 layers of 512, 8 x 512, unrolled": lambda: transformer(llama, SMALL, 8, False),
    "GPT, 3 layers of 512, 8 x 512, scanned": lambda: transformer(models, SMALL, 8, True),
    "GPT, 3 layers of 512, 8 x 512, unrolled": lambda: transformer(models, SMALL, 8, False),
    "ViT, 3 layers of 512, 16 x 196, unrolled": lambda: transformer(models, Shape(3, 512, 8, 100, 196, 16), 16, False),
    "ResNet-18, 64 images of 56 x 56": resnet,
}


def variants(loss: Any) -> dict[str, Any]:
    """The same loss in float32, by hand, under autocast, and with the checkpoints of an expert."""
    by_hand, auto = partial(loss, dtype=jnp.bfloat16), partial(jamp.autocast, compute_dtype=jnp.bfloat16)
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


def kept(loss: Any, params: Any, batch: Any) -> float:
    """The megabytes that `jax.vjp` keeps, without the parameters."""
    megabytes = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) / 1e6
    return megabytes(jax.eval_shape(lambda p, b: jax.vjp(lambda p: loss(p, b), p)[1], params, batch)) - megabytes(
        params
    )


def measure(target: str, only: list[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    first: dict[str, Any] = {}
    for model, make in MODELS.items():
        if not any(part in model for part in only or [""]):
            continue
        loss, params, batch = make()
        for name, fun in variants(loss).items():
            # What autocast does depends on the platform that JAX runs on.
            with mock.patch("jax.default_backend", return_value="tpu" if target == "tpu" else "gpu"):
                lowered = jax.jit(jax.value_and_grad(fun)).lower(*on_device(target, (params, batch)))
            compiled = lowered.compile()
            cost = compiled.cost_analysis() or {}  # XLA:GPU has no analysis without a GPU
            row = {
                "model": model,
                "variant": name,
                "temporary_megabytes": compiled.memory_analysis().temp_size_in_bytes / 1e6,
                "gigabytes_accessed": cost.get("bytes accessed", np.nan) / 1e9,
                "gigaflops": cost.get("flops", np.nan) / 1e9,
                "kept_megabytes": kept(fun, params, batch),
            }
            first = row if name == "by hand" else first
            ratios = [row[key] / first[key] for key in list(row)[2:]]
            row |= dict(zip(("temporary", "accessed", "flops", "kept"), ratios, strict=True))
            rows.append({key: None if x != x else x for key, x in row.items()})
            print(
                "{model:42s} {variant:24s} {temporary_megabytes:8.0f} MB temporary ({temporary:.2f})  "
                "{gigabytes_accessed:6.2f} GB accessed ({accessed:.2f})  flops {flops:.2f}  "
                "{kept_megabytes:8.0f} MB kept ({kept:.2f})".format(**row),
                flush=True,
            )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--only", nargs="+", default=[], help="parts of the names of models")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    found = record("benchmarks.memory", False, options.target)
    write(options.json, found | {"rows": measure(options.target, options.only)})
