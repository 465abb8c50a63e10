"""Memory and memory traffic of gradients with residuals in 8 bits, beside what experts write, compiled for an H200.

    python -m benchmarks.memory.residuals --json docs/benchmarks/residuals_h200.json   needs `pip install "jax[cuda13]"`

Each program is `jax.value_and_grad(loss)`. "By hand" is the model written in bfloat16, with a `jax.checkpoint` around
each block, whose policy is `dots_saveable` or keeps nothing. Temporary memory is what the compiler says. Bytes
to and from main memory count the body of a loop as often as it runs. FLOPs count the products in the jaxpr of the
gradient, but not the products inside cuDNN's kernel. Nothing is timed.
"""

import os
from dataclasses import replace
from functools import partial
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false")

import jax
import jax.numpy as jnp

import jamp
from benchmarks import hlo, models
from benchmarks.ahead_of_time import compiled, is_installed
from benchmarks.memory import llama
from benchmarks.memory.budget import problems
from benchmarks.memory.large_models import fused_attention
from benchmarks.models import SHAPES, Shape, cast, problem, stacked
from benchmarks.record import Rows, parser, record, show, write
from jamp._products.flops import flops_of_products

BF16, I8 = jnp.bfloat16, jnp.int8
DEEP = Shape(32, 2048, 16, 32000, 1024)
BUDGETS = (1.0, 0.25, 0.1)


def rotated(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention by cuDNN, with rotary positions."""
    return fused_attention(BF16)(llama.rotate(q), llama.rotate(k), v, True)


def loss_in_chunks(params: Any, batch: Any, shape: Shape, dtype: Any = None, policy: Any = None) -> jax.Array:
    """The Llama with a loss that makes no logits."""
    tokens, targets = batch
    block = partial(llama.block, shape=shape, dtype=dtype, attend=rotated)
    x = stacked(block, cast(params["embed"], dtype)[tokens], params["blocks"], shape, policy)
    x = llama.rms_norm(params["norm"], x, dtype).reshape(-1, shape.width)

    def loss(embed: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = (x @ cast(embed, dtype).T).astype(jnp.float32)
        return jnp.sum(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, y[:, None], -1)[:, 0])

    total = jamp.chunked_sum(loss, 1024)(params["embed"], x, targets.reshape(-1))
    return total / targets.size


def made() -> dict[str, tuple[Any, Any, Any]]:
    """By name: the loss, and the shapes of its parameters and its batch."""
    name = "Llama, 32 layers of 2048, 4 x 1024, cuDNN's attention, scanned"
    loss, *shapes = problem(llama, DEEP, 4, True)
    found = {name: (partial(loss, attend=rotated), *shapes)}
    found[f"{name}, logits in chunks"] = (partial(loss_in_chunks, shape=replace(DEEP, scanned=True)), *shapes)
    return found | {name: (loss, params, batch) for name, (loss, params, batch, _) in problems("h200").items()}


def variants(loss: Any) -> dict[str, Any]:
    hand = partial(loss, dtype=BF16)
    policies = jax.checkpoint_policies
    found = {
        "by hand, `dots_saveable`": partial(hand, policy=policies.dots_saveable),
        "by hand, each block again": partial(hand, policy=policies.nothing_saveable),
    }
    found |= {f"autocast, budget {b}": jamp.autocast(loss, BF16, memory_budget=b) for b in BUDGETS}
    found |= {f"int8, budget {b}": jamp.autocast(loss, BF16, memory_budget=b, residuals=I8) for b in BUDGETS}
    return found | {"by hand, under `recompute` in int8": jamp.recompute(hand, 1.0, residuals=I8)}


def measure(only: list[str], quick: bool) -> Rows:
    rows: Rows = []
    small = replace(SHAPES["GPT-2 124 M"], layers=2, width=64, heads=2, classes=128, tokens=64)
    chosen = {"GPT-2 124 M, small": problem(models, small, 2, True)} if quick else made()
    for model, (loss, params, batch) in chosen.items():
        if not any(part in model for part in only or [""]):
            continue
        first = len(rows)
        for name, fun in variants(loss).items():
            grad = jax.value_and_grad(fun)
            program = compiled("h200", grad, params, batch)
            counts = hlo.count(program.as_text())
            row = {
                "model": model,
                "variant": name,
                "temporary_megabytes": program.memory_analysis().temp_size_in_bytes / 1e6,
                "gigabytes_moved": counts.bytes / 1e9,
                "kernels": int(counts.kernels),
                "gigaflops": flops_of_products(jax.make_jaxpr(grad)(params, batch).jaxpr) / 1e9,
            }
            rows.append(row)
            # To autocast at a budget of 1.0, as soon as it is known.
            base = next((x for x in rows[first:] if x["variant"] == "autocast, budget 1.0"), None)
            row["moved_ratio"] = row["gigabytes_moved"] / base["gigabytes_moved"] if base else None
            show(row)
    return rows


if __name__ == "__main__":
    arguments = parser("benchmarks.memory.residuals", __doc__)
    arguments.add_argument("--only", nargs="+", default=[], help="parts of the names of models")
    options = arguments.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if is_installed("h200"):
        about = record("benchmarks.memory.residuals", options.quick, "h200")
        write(options.json, about | {"rows": measure(options.only, options.quick)})
