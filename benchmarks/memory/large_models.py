"""Training steps of whole models compiled for a device that is not there: memory, and the dtypes of matrix products.

    python -m benchmarks.memory.large_models tpu --json docs/benchmarks/large_models_tpu.json    needs libtpu
    python -m benchmarks.memory.large_models h200 --json docs/benchmarks/large_models_h200.json  needs "jax[cuda13]"

A step is forward, backward and AdamW on float32 parameters. The layers are scanned. Attention is cuDNN's kernel on the
H200 where the step is in 16 bit, and written out on the TPU.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax

from benchmarks import hlo, models
from benchmarks.ahead_of_time import on_device
from benchmarks.record import Rows, parser, record, show, write

# Float32 has to fit into the 16 GB of a TPU v5e too. Without a GPU, XLA:GPU finds no tiles for ViT's 197 tokens, and
# leaves the products to cuBLAS.
AHEAD: dict[str, tuple[str, dict[str, int], dict[str, bool]]] = {
    "tpu": ("compiled for one core of a TPU v5e", {"ViT-B/16": 32, "GPT-2 124 M": 2}, {}),
    "h200": ("compiled for an H200", {"ViT-B/16": 64, "GPT-2 124 M": 8}, {"xla_gpu_enable_triton_gemm": False}),
}
NAMES = (
    models.DEFAULT,
    "jamp.autocast float16, loss_scaled",
    "jamp.autocast bfloat16",
    "dtype=float16, loss_scaled",
    "dtype=bfloat16",
)


def ahead(target: str, quick: bool) -> Rows:
    """Temporary memory, bytes accessed and the dtypes of the matrix products."""
    _, batches, options = AHEAD[target]
    rows = []
    for model, batch in batches.items():
        shape = replace((models.SMALL if quick else models.SHAPES)[model], scanned=True)
        params, args = jax.eval_shape(partial(models.made, shape, batch))
        labels = {"model": model, "millions": sum(x.size for x in jax.tree.leaves(params)) / 1e6, "batch": batch}
        for name in NAMES:
            step, tx = models.steps(shape, fused=target == "h200")[name]
            carry, batch_on_device = on_device(target, ((params, jax.eval_shape(tx.init, params)), args))
            lowered = jax.jit(step, donate_argnums=0).lower(carry, batch_on_device)
            rows.append(labels | {"name": name} | facts(lowered.compile(compiler_options=options)))
            show(rows[-1])
    return rows


def facts(compiled: Any) -> dict[str, Any]:
    text, cost = compiled.as_text(), compiled.cost_analysis() or {}  # XLA:GPU has no analysis without a GPU
    return {
        "temporary_megabytes": compiled.memory_analysis().temp_size_in_bytes / 1e6,
        "gigabytes_accessed": cost["bytes accessed"] / 1e9 if "bytes accessed" in cost else None,
        "conditionals": text.count(" conditional("),
        "products": hlo.products(text),
    }


if __name__ == "__main__":
    arguments = parser("benchmarks.memory.large_models", __doc__)
    arguments.add_argument("target", choices=AHEAD)
    options = arguments.parse_args()
    jax.config.update("jax_platforms", "cpu")
    about = record("benchmarks.memory.large_models", options.quick, AHEAD[options.target][0])
    write(options.json, about | {f"ahead_{options.target}": ahead(options.target, options.quick)})
