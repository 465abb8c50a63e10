"""Time and temporary memory of gradients at several memory budgets, on the device that JAX sees.

    python -m benchmarks.memory.timed --json docs/benchmarks/budget_cpu.json      on a CPU, five processes a model
    python -m benchmarks.gpu --json docs/benchmarks/gpu.json                      on a GPU, one process a model

A step is the gradient and an update of the parameters in place. On a CPU, models are in float32, beside the plain
gradient and `jax.checkpoint` around each block. On a GPU, they are in bfloat16, beside those written by hand in
bfloat16, with the policies that experts write and with cuDNN's attention. A baseline is timed twice (A/A). Layers are
in a loop: of layers that are not, XLA:CPU takes out the barriers of what is computed again, by hand and by jamp.
Temporary memory is the one buffer that XLA allocates for a call.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jamp
from benchmarks import models
from benchmarks.memory import llama
from benchmarks.memory.large_models import fused_attention
from benchmarks.models import SHAPES, Shape
from benchmarks.record import Rows, parser, record, write
from benchmarks.timing import PROCESSES, Case, across, compare

BF16, POLICIES = jnp.bfloat16, jax.checkpoint_policies
Model = tuple[Any, Shape, int]  # its module, its shape and its batch
CPU: dict[str, Model] = {
    "GPT, 6 layers of 256, 4 x 256": (models, Shape(6, 256, 8, 1024, 256), 4),
    "Llama, 6 layers of 256, 4 x 256": (llama, Shape(6, 256, 8, 1024, 256), 4),
    "ViT, 6 layers of 256, 8 x 196": (models, Shape(6, 256, 8, 1000, 196, 16), 8),
}
WIDE = "Llama, 2 layers of 4096, 4 x 2048"
GPU: dict[str, Model] = {
    "GPT-2 124 M, 8 x 1024": (models, SHAPES["GPT-2 124 M"], 8),
    "Llama, 8 layers of 1024, 8 x 1024": (llama, llama.SHAPE, 8),
    WIDE: (llama, Shape(2, 4096, 32, 32000, 2048), 4),
    "ViT-B/16, batch 64": (models, SHAPES["ViT-B/16"], 64),
}
MODELS = CPU | GPU


def on_cpu(loss: Any) -> dict[str, Any]:
    ways = {"gradient": loss, "gradient, again": loss}
    ways["jax.checkpoint around each block"] = partial(loss, policy=POLICIES.nothing_saveable)
    return ways | {f"recompute, budget {budget}": jamp.recompute(loss, budget) for budget in (1.0, 0.5, 0.1, 0)}


def rotated(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Llama's attention by cuDNN's kernel."""
    return fused_attention(BF16)(llama.rotate(q), llama.rotate(k), v, causal=True)


def on_gpu(model: str, loss: Any) -> dict[str, Any]:
    by_hand, auto = partial(loss, dtype=BF16), partial(jamp.autocast, compute_dtype=BF16)
    fused = {"attend": rotated if model.startswith("Llama") else fused_attention(BF16)}
    ways = {"by hand": by_hand, "by hand, again": by_hand, "float32": loss}
    if model == WIDE:  # for the time of products in 8 bit
        ways |= {"by hand, cuDNN's attention": partial(by_hand, **fused), "autocast, budget 1.0": auto(loss)}
        ways |= {"autocast, budget 1.0, cuDNN's attention": auto(partial(loss, **fused))}
        ways |= {"Float8, budget 1.0": jamp.autocast(loss, jamp.Float8())}
        return ways | {"Float8, budget 1.0, cuDNN's attention": jamp.autocast(partial(loss, **fused), jamp.Float8())}
    policies = {"dots_saveable": POLICIES.dots_saveable, "each block again": POLICIES.nothing_saveable}
    ways |= {f"by hand, {name}": partial(by_hand, policy=policy) for name, policy in policies.items()}
    ways |= {f"autocast, budget {budget}": auto(loss, memory_budget=budget) for budget in (1.0, 0.5, 0.1)}
    if model.startswith("GPT"):
        ways |= {"autocast float16, budget 1.0": jamp.autocast(loss, jnp.float16)}
        ways |= {"by hand, cuDNN's attention": partial(by_hand, **fused)}
        for name, policy in policies.items():
            ways[f"by hand, {name}, cuDNN's attention"] = partial(by_hand, policy=policy, **fused)
        for budget in (1.0, 0.5):
            ways[f"autocast, budget {budget}, cuDNN's attention"] = auto(partial(loss, **fused), memory_budget=budget)
    return ways


def gradients(model: str, quick: bool) -> Rows:
    """A row for each way to compute the gradient of a model, its first the baseline."""
    module, shape, batch = MODELS[model]
    if quick:
        shape, batch = replace(shape, layers=2, width=64, heads=4, classes=128), 1
    shape = replace(shape, scanned=True)
    loss = partial(module.loss_fn, shape=shape)
    params = jax.jit(partial(module.init, shape=shape))(jax.random.key(0))
    args = models.data(jax.random.key(1), shape, batch)
    ways = on_cpu(loss) if model in CPU else on_gpu(model, loss)
    if jax.default_backend() != "gpu":
        ways = {name: fun for name, fun in ways.items() if "cuDNN" not in name}
    rounds, steps = (1, 1) if quick else (7, 1) if model in CPU else (9, 5)
    return compare([Case(name, partial(_step, fun), params, (args,)) for name, fun in ways.items()], rounds, steps)


def _step(fun: Any, params: Any, batch: Any) -> Any:
    return jax.tree.map(lambda x, g: x - 1e-6 * g, params, jax.grad(fun)(params, batch))


def timed(names: list[str], quick: bool, processes: int = PROCESSES) -> Rows:
    """The rows of some models, each model in processes of its own."""
    rows: Rows = []
    for name in names:
        rows += across({"model": name}, gradients, name, quick, quick=quick, processes=processes)
    return rows


if __name__ == "__main__":
    arguments = parser("benchmarks.memory.timed", __doc__)
    arguments.add_argument("--only", nargs="*", default=list(CPU), choices=CPU)
    options = arguments.parse_args()
    about = record("benchmarks.memory.timed", options.quick, jax.devices()[0].device_kind)
    write(options.json, about | {"rows": timed(options.only, options.quick)})
