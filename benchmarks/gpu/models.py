"""Training steps of whole models on one GPU, by JAX and by PyTorch: `benchmarks.gpu` runs each in its own process.

Forward, backward and AdamW on float32 parameters. The data are random, because only the speed is looked at. Attention
is the fused kernel of each library wherever the step is in 16 bit, and PyTorch's model is compiled.
"""

from functools import partial
from typing import Any

import jax

from benchmarks import models
from benchmarks.gpu.pipelined import carried, peak_gigabytes, timed, utilization

BATCH = {"ViT-B/16": 128, "GPT-2 124 M": 16, "GPT 0.9 B": 4}
SHAPES = models.SHAPES | models.LARGE
# float32 and float16 of the largest model say nothing new.
LARGE = ("jamp.autocast bfloat16", "jamp.autocast float8", "jamp.autocast float16, loss_scaled", "dtype=bfloat16")
AGAIN = f"{models.TF32}, again"
TORCH = (
    "torch float32",
    "torch float32, TF32",
    "torch.autocast float16, GradScaler",
    "torch.autocast float16, unscaled",
    "torch.autocast bfloat16",
)


def units(quick: bool) -> list[dict[str, Any]]:
    in_16_bit = [name for name in models.steps(models.SMALL["ViT-B/16"]) if not name.startswith("float32")]
    of_jax = ("float32", models.TF32, AGAIN, *in_16_bit)
    found = [
        {"library": library, "model": model, "name": name}
        for model in BATCH
        for library, names in (("jax", LARGE if model in models.LARGE else of_jax), ("torch", TORCH))
        if library == "jax" or model in models.SHAPES
        for name in names
    ]
    return [unit for unit in found if not quick or "loss_scaled" in unit["name"] or "GradScaler" in unit["name"]]


def rows(unit: dict[str, Any], quick: bool) -> list[dict[str, Any]]:
    shape = (models.SMALL if quick else SHAPES)[unit["model"]]
    batch = 2 if quick else BATCH[unit["model"]]
    measured, device = (in_jax if unit["library"] == "jax" else in_torch)(shape, batch, unit["name"], quick)
    tokens = batch * (shape.tokens + bool(shape.patch))
    return [
        {
            "batch": batch,
            **measured,
            "tokens_per_second": 1e3 * tokens / measured["milliseconds"],
            "mfu": utilization(models.flops(shape, batch), measured["milliseconds"], device),
        }
    ]


def in_jax(shape: models.Shape, batch: int, name: str, quick: bool) -> tuple[dict[str, Any], str]:
    params, batch_of_data = jax.jit(partial(models.made, shape, batch))()
    step, tx = models.steps(shape, fused=jax.default_backend() == "gpu")[name.removesuffix(", again")]
    found = timed(carried(jax.jit(step, donate_argnums=0), (params, jax.jit(tx.init)(params)), (batch_of_data,)), quick)
    return found | {"peak_gigabytes": peak_gigabytes()}, jax.devices()[0].device_kind


def in_torch(shape: models.Shape, batch: int, name: str, quick: bool) -> tuple[dict[str, Any], str]:
    import torch

    from benchmarks.gpu import torch_models

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not quick:
        raise RuntimeError("PyTorch sees no GPU.")
    found = timed(torch_models.advance(shape, batch, device, name, "eager" if quick else "inductor"), quick)
    if device == "cpu":
        return found | {"peak_gigabytes": None}, "cpu"
    return found | {"peak_gigabytes": torch.cuda.max_memory_allocated() / 1e9}, torch.cuda.get_device_name()
