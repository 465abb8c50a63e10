"""What to turn first if a model does not fit: the memory of a whole training step, compiled for an H200, not run.

    python -m benchmarks.memory.fit h200 --json docs/benchmarks/fit_h200.json     needs `pip install "jax[cuda13]"`

A transformer of GPT-2's 124 M shapes, 8 x 1024 tokens, its layers in a loop, AdamW. State is what
a step takes and returns: parameters and optimizer state. Temporary memory includes the gradients. From
`memory_budget=0` on, each row has what the rows above it have.
"""

import os
from functools import partial
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false")

import jax
import jax.numpy as jnp
import optax

import jamp
from benchmarks import models
from benchmarks.ahead_of_time import TARGETS, compiled
from benchmarks.models import SHAPES, SMALL, problem, train_step
from benchmarks.record import Rows, parser, record, show, write

POLICIES = jax.checkpoint_policies
OFFLOAD = POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host")


def ways(loss: Any) -> dict[str, tuple[Any, Any, Any]]:
    """By name: the loss, the optimizer and the dtype of the parameters."""
    adamw, auto = optax.adamw(1e-3), partial(jamp.autocast, compute_dtype=jnp.bfloat16)
    least = auto(partial(loss, stream=jnp.float32), memory_budget=0)  # the stream of bfloat16 parameters too
    small = jamp.stochastic_rounding(jamp.quantized_state(adamw))
    return {
        "float32": (loss, adamw, jnp.float32),
        "autocast": (auto(loss), adamw, jnp.float32),
        "autocast, `memory_budget=0.5`": (auto(loss, memory_budget=0.5), adamw, jnp.float32),
        "autocast, `memory_budget=0`": (least, adamw, jnp.float32),
        "products offloaded to the host": (auto(partial(loss, policy=OFFLOAD)), adamw, jnp.float32),
        "`memory_budget=0`, moments in 8 bits": (least, jamp.quantized_state(adamw), jnp.float32),
        "and split masters": (least, jamp.master_params(jamp.quantized_state(adamw), split=True), jnp.bfloat16),
        "or no masters": (least, small, jnp.bfloat16),
    }


def measure(target: str, quick: bool) -> Rows:
    rows: Rows = []
    loss, params, batch = problem(models, (SMALL if quick else SHAPES)["GPT-2 124 M"], 2 if quick else 8, True)
    for name, (fun, tx, dtype) in ways(loss).items():
        cast = jax.eval_shape(partial(jamp.cast_floating, dtype=dtype), params)
        carry = cast, jax.eval_shape(tx.init, cast)
        found = compiled(target, partial(train_step, fun, tx, False), carry, batch, donate=True).memory_analysis()
        state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(carry))
        sizes = {"state_gigabytes": state / 1e9, "temporary_gigabytes": found.temp_size_in_bytes / 1e9}
        sizes["host_gigabytes"] = found.host_temp_size_in_bytes / 1e9
        rows.append({"name": name} | sizes)
        show(rows[-1])
    return rows


if __name__ == "__main__":
    arguments = parser("benchmarks.memory.fit", __doc__)
    arguments.add_argument("target", choices=TARGETS)
    options = arguments.parse_args()
    jax.config.update("jax_platforms", "cpu")
    about = record("benchmarks.memory.fit", options.quick, options.target)
    write(options.json, about | {"rows": measure(options.target, options.quick)})
