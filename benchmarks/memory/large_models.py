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
import jax.numpy as jnp
import optax

import jamp
from benchmarks import hlo, models
from benchmarks.ahead_of_time import compiled, facts
from benchmarks.models import Attend, cast
from benchmarks.record import Rows, parser, record, show, write

# Float32 has to fit into the 16 GB of a TPU v5e too. Without a GPU, XLA:GPU finds no tiles for ViT's 197 tokens, and
# leaves the products to cuBLAS.
AHEAD: dict[str, tuple[str, dict[str, int], dict[str, bool]]] = {
    "tpu": ("compiled for one core of a TPU v5e", {"ViT-B/16": 32, "GPT-2 124 M": 2}, {}),
    "h200": ("compiled for an H200", {"ViT-B/16": 64, "GPT-2 124 M": 8}, {"xla_gpu_enable_triton_gemm": False}),
}
# The dtype of autocast, that of a model written by hand, and whether the loss is scaled. JAX's default precision is
# TF32 on GPUs that have it, and one pass in bfloat16 on a TPU.
STEPS: dict[str, tuple[Any, Any, bool]] = {
    "float32, JAX's default precision": (None, None, False),
    "jamp.autocast float16, loss_scaled": (jnp.float16, None, True),
    "jamp.autocast bfloat16": (jnp.bfloat16, None, False),
    "dtype=float16, loss_scaled": (None, jnp.float16, True),
    "dtype=bfloat16": (None, jnp.bfloat16, False),
}
ADAMW = optax.adamw(1e-4)


def fused_attention(dtype: Any) -> Attend:
    """The kernel of cuDNN, which computes in 16 bit alone. Float32 takes XLA's fusions."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
        q, k, v = (cast(y, dtype) for y in (q, k, v))
        if not dtype:
            return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="xla")
        # For training, cuDNN takes an even number of tokens. Of the one that is added, nothing is read.
        tokens = q.shape[1]
        q, k, v = (jnp.pad(y, ((0, 0), (0, tokens % 2), (0, 0), (0, 0))) for y in (q, k, v))
        lengths = jnp.full(len(q), tokens, jnp.int32) if tokens % 2 else None
        options = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths, "is_causal": causal}
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options)[:, :tokens]

    return attend


def ahead(target: str, quick: bool) -> Rows:
    """Temporary memory, bytes accessed and the dtypes of the matrix products."""
    _, batches, options = AHEAD[target]
    rows = []
    for model, batch in batches.items():
        shape = replace((models.SMALL if quick else models.SHAPES)[model], scanned=True)
        params, args = jax.eval_shape(partial(models.made, shape, batch))
        for name, (half, dtype, is_scaled) in STEPS.items():
            attend = fused_attention(half or dtype) if target == "h200" else models.attend_written_out
            loss = partial(models.loss_fn, shape=shape, dtype=dtype, attend=attend)
            tx = jamp.loss_scaled(ADAMW) if is_scaled else ADAMW
            step = partial(models.train_step, jamp.autocast(loss, half) if half else loss, tx, is_scaled)
            carry = params, jax.eval_shape(tx.init, params)
            program = compiled(target, step, carry, args, donate=True, options=options)
            row = {"model": model, "batch": batch, "name": name, "products": hlo.products(program.as_text())}
            rows.append(row | facts(program))
            show(rows[-1])
    return rows


if __name__ == "__main__":
    arguments = parser("benchmarks.memory.large_models", __doc__)
    arguments.add_argument("target", choices=AHEAD)
    options = arguments.parse_args()
    jax.config.update("jax_platforms", "cpu")
    about = record("benchmarks.memory.large_models", options.quick, AHEAD[options.target][0])
    write(options.json, about | {f"ahead_{options.target}": ahead(options.target, options.quick)})
