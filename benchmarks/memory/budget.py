"""Temporary memory over FLOPs at several memory budgets, beside what experts write, compiled without the device.

    python -m benchmarks.memory.budget tpu --json docs/benchmarks/budget_tpu.json     needs `pip install libtpu`
    python -m benchmarks.memory.budget h200 --json docs/benchmarks/budget_h200.json   needs `pip install "jax[cuda13]"`

Each program is `jax.value_and_grad(loss)`. By hand: the model written in bfloat16, with `jax.checkpoint` around each
block. Its policies keep nothing, `dots_saveable`, or `dots_with_no_batch_dims_saveable`. "attention again" is
`jax.checkpoint` around attention alone (Korthikanti et al. 2022). Temporary memory is what the compiler says. FLOPs are
those of the products of the gradient, counted in its jaxpr, because XLA:GPU counts none and XLA counts a loop once.
`beside_best` is the temporary memory to the least of those by hand that need no more FLOPs.

All rows for a TPU take hours to compile. So a row that FILE holds is kept if the same versions are given the same
program for the same target, text for text. With --only, FILE then holds those models alone.
"""

import json
import os
import time
from dataclasses import replace
from functools import partial
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false")

import jax
import jax.numpy as jnp

import jamp
from benchmarks import mixture, models
from benchmarks.ahead_of_time import TARGETS, digest, does_not_fit, lowered
from benchmarks.memory import convolutions, llama
from benchmarks.memory.large_models import fused_attention
from benchmarks.models import SHAPES, Shape, attend_written_out, problem
from benchmarks.record import Rows, parser, record, show, write
from jamp._products.flops import flops_of_products

POLICIES = jax.checkpoint_policies
BF16 = jnp.bfloat16
MIXTURE = Shape(8, 512, 8, 32000, 1024)
IMAGES = jax.ShapeDtypeStruct((32, 224, 224, 3), jnp.float32), jax.ShapeDtypeStruct((32,), jnp.int32)
NOISE = (jax.ShapeDtypeStruct((32, 64, 64, 3), jnp.float32),) * 2
BUDGETS, FEW = (1.0, 0.75, 0.5, 0.25, 0.1, 0), (1.0, 0.5, 0.1)
HAND = {
    "by hand": {},
    "by hand, dots_saveable": {"policy": POLICIES.dots_saveable},
    "by hand, dots_with_no_batch_dims": {"policy": POLICIES.dots_with_no_batch_dims_saveable},
    "by hand, each block again": {"policy": POLICIES.nothing_saveable},
    "by hand, every second block again": {"policy": (POLICIES.nothing_saveable, None)},
}
STREAM = {"gather": "compute", "add": "compute"}  # embeddings and sums, and so the residual stream, in 16 bit


def problems(target: str) -> dict[str, tuple[Any, Any, Any, Any]]:
    """By name: the loss, the shapes of parameters and batch, and the attention that is written out, if that varies."""
    gpt, vit = SHAPES["GPT-2 124 M"], SHAPES["ViT-B/16"]
    causal = attend_written_out
    made = {"GPT-2 124 M, 8 x 1024, scanned": (*problem(models, gpt, 8, True), causal)}
    made["Llama, 8 layers of 1024, 8 x 1024, scanned"] = (*problem(llama, llama.SHAPE, 8, True), llama.attend)
    made["ViT-B/16, batch 64, scanned"] = (*problem(models, vit, 64, True), causal)
    made["GPT-2 124 M, 8 x 1024, unrolled"] = (*problem(models, gpt, 8, False), causal)
    made["Llama, 8 layers of 1024, 8 x 1024, unrolled"] = (*problem(llama, llama.SHAPE, 8, False), llama.attend)
    if target == "h200":  # The FLOPs of cuDNN's kernel are not counted.
        loss, *shapes = problem(models, gpt, 8, True)
        made["GPT-2 124 M, 8 x 1024, cuDNN's attention, scanned"] = (
            partial(loss, attend=fused_attention(BF16)),
            *shapes,
            None,
        )
    made["Mixture of 8 experts, 8 layers of 512, 8 x 1024"] = (*problem(mixture, MIXTURE, 8, False), None)
    resnet, unet = jax.eval_shape(convolutions.resnet_params), jax.eval_shape(convolutions.unet_params)
    made["ResNet-50, 32 images of 224 x 224"] = convolutions.resnet_loss, resnet, IMAGES, None
    made["U-Net, 37 M, 32 images of 64 x 64"] = convolutions.unet_loss, unet, NOISE, None
    return made


def variants(model: str, loss: Any, attend: Any, target: str) -> dict[str, Any]:
    by_hand, auto = partial(loss, dtype=BF16), partial(jamp.autocast, compute_dtype=BF16)
    budgets = BUDGETS if model.startswith(("GPT", "Llama")) else FEW
    found = {f"autocast, budget {b}": auto(loss, memory_budget=b) for b in budgets}
    found["autocast, each block again"] = auto(partial(loss, policy=POLICIES.nothing_saveable))
    if not attend:
        names = {name: options for name, options in HAND.items() if "second" not in name}
        return {name: partial(by_hand, **options) for name, options in names.items()} | found
    names = {name: options for name, options in HAND.items() if "second" not in name or "unrolled" in model}
    hand = {name: partial(by_hand, **options) for name, options in names.items()}
    again = lambda *qkv, **options: jax.checkpoint(partial(attend, **options))(*qkv)
    hand["by hand, attention again"] = partial(by_hand, attend=again)
    if "unrolled" in model and target == "tpu":
        found |= {f"autocast, stream in 16 bit, budget {b}": auto(loss, rules=STREAM, memory_budget=b) for b in FEW}
    if model.startswith("GPT-2 124 M, 8 x 1024, scanned") and target == "h200":
        found |= {f"float32, budget {b}": jamp.recompute(loss, b) for b in FEW}
        found |= {f"bfloat16 by hand, budget {b}": jamp.recompute(by_hand, b) for b in FEW}
        found |= {f"Float8, budget {b}": jamp.autocast(loss, jamp.Float8(), memory_budget=b) for b in FEW}
    return hand | found


def temporary(program: Any) -> float:
    """The bytes of temporary memory. If they are more than a TPU has, those that its compiler names."""
    try:
        return float(program.compile().memory_analysis().temp_size_in_bytes)
    except jax.errors.JaxRuntimeError as error:
        return does_not_fit(error)


def measure(target: str, only: list[str], quick: bool, before: Rows) -> Rows:
    known = {(row["model"], row["variant"], row.get("program")): row for row in before}
    rows: Rows = []
    chosen = problems(target)
    if quick:
        small = replace(SHAPES["GPT-2 124 M"], layers=2, width=64, heads=2, classes=128, tokens=64)
        chosen = {"GPT-2 124 M, small": (*problem(models, small, 2, False), attend_written_out)}
    for model, (loss, params, batch, attend) in chosen.items():
        if not any(part in model for part in only or [""]):
            continue
        found = []
        for name, fun in variants(model, loss, attend, target).items():
            start = time.time()
            grad = jax.value_and_grad(fun)
            program = lowered(target, grad, params, batch)
            text = digest(program)
            row = known.get((model, name, text)) or {
                "model": model,
                "variant": name,
                "temporary_megabytes": temporary(program) / 1e6,
                "seconds": time.time() - start,
                "program": text,
            }
            row |= {"gigaflops": flops_of_products(jax.make_jaxpr(grad)(params, batch).jaxpr) / 1e9}
            found.append(row)
            show(row)
        hand = [row for row in found if row["variant"].startswith("by hand")]
        for row in found:
            best = [x["temporary_megabytes"] for x in hand if x["gigaflops"] <= 1.001 * row["gigaflops"]]
            row["beside_best"] = row["temporary_megabytes"] / min(best) if best else None
        rows.extend(found)
    return rows


if __name__ == "__main__":
    arguments = parser("benchmarks.memory.budget", __doc__)
    arguments.add_argument("target", choices=TARGETS)
    arguments.add_argument("--only", nargs="+", default=[], help="parts of the names of models")
    options = arguments.parse_args()
    jax.config.update("jax_platforms", "cpu")
    about = record("benchmarks.memory.budget", options.quick, options.target)
    last = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    versions = lambda found: {name: version for name, version in found.get("versions", {}).items() if name != "jamp"}
    same = last and last["machine"]["device"] == options.target and versions(last) == versions(about)
    before = last["rows"] if same else []
    write(options.json, about | {"rows": measure(options.target, options.only, options.quick, before)})
