"""Three products whose result may stay float32: the logits, the scores of attention, and the router of a mixture.

    python -m benchmarks.accuracy.accumulate --json docs/benchmarks/accumulate.json

Errors, in bfloat16 on this machine, of log-probabilities, attended values and the router's probabilities: against
float64 of the function, and against float64 of the function of rounded operands. The second is how far two programs are
apart that round the same operands, such as a sampler and a trainer. Costs: temporary memory and bytes of a gradient
under autocast with the rule "accumulate", to those without it, as the compilers for a TPU v5e and an H200 count them
(`benchmarks.memory` says what they need).
"""

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false")

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jamp
from benchmarks import hlo, mixture, models
from benchmarks.accuracy.reinforce import EXACT
from benchmarks.ahead_of_time import TARGETS, compiled
from benchmarks.models import Shape, problem
from benchmarks.record import Rows, parser, record, show, write

SHAPE, BATCH = Shape(3, 512, 8, 32768, 512), 8
LOW, FULL = jnp.bfloat16, jnp.float64


def logits(x: Array, weight: Array) -> Array:
    """Log-probabilities of 8192 tokens, f[256, 8192]; the logits have a standard deviation of 4."""
    with jax.named_scope("head"):
        return jax.nn.log_softmax(x @ weight)


def scores(x: Array, weight: Array) -> Array:
    """What attention reads of 512 values, f[256, 64]; the scores have a standard deviation of 4."""
    with jax.named_scope("scores"):
        found = x @ weight
    return jax.lax.dot(jax.nn.softmax(found), jnp.cos(jnp.arange(512 * 64.0)).reshape(512, 64), precision="highest")


def router(x: Array, weight: Array) -> Array:
    """The probabilities of 64 experts, f[256, 64]; the logits have a standard deviation of 4."""
    with jax.named_scope("router"):
        return jax.nn.softmax(x @ weight)


USES: dict[str, tuple[Callable[..., Array], int, Any]] = {
    "head": (logits, 8192, models),
    "scores": (scores, 512, models),
    "router": (router, 64, mixture),
}


def errors(quick: bool) -> Rows:
    """The relative errors, in the 2-norm over all results."""
    rows = []
    for scope, (fun, outputs, _) in USES.items():
        keys, width = jax.random.split(jax.random.key(0)), 64 if quick else 1024
        x, weight = jax.random.normal(keys[0], (256, width)), jax.random.normal(keys[1], (width, outputs))
        operands = x, 4 * width**-0.5 * weight
        exact = []
        for dtype in (jnp.float32, LOW):
            with jax.enable_x64(True):
                exact.append(np.asarray(jax.jit(fun)(*(x.astype(dtype).astype(FULL) for x in operands))))
        for category in ("compute", "accumulate", "float32"):
            low = jamp.autocast(fun, LOW, rules={f"dot_general[{scope}]": category})
            found = np.asarray(jax.jit(low, compiler_options=EXACT)(*operands), np.float64)
            whole, rounded = (float(np.linalg.norm(found - true) / np.linalg.norm(true)) for true in exact)
            rows.append({"use": scope, "category": category, "error": whole, "error, rounded operands": rounded})
            show(rows[-1])
    return rows


def costs(quick: bool) -> Rows:
    rows = []
    shape = Shape(1, 128, 2, 1024, 128) if quick else SHAPE
    for scope, (_, _, module) in USES.items():
        loss, params, batch = problem(module, shape, BATCH, False)
        for target in TARGETS:
            found = []
            for rules in ({}, {f"dot_general[{scope}]": "accumulate"}):
                program = compiled(target, jax.value_and_grad(jamp.autocast(loss, LOW, rules=rules)), params, batch)
                count = hlo.count(program.as_text()).bytes
                found.append((program.memory_analysis().temp_size_in_bytes, count))
            temporary, moved = (y / x for x, y in zip(*found, strict=True))
            rows.append({"use": scope, "target": target, "temporary": temporary, "main_memory": moved})
            show(rows[-1])
    return rows


if __name__ == "__main__":
    options = parser("benchmarks.accuracy.accumulate", __doc__).parse_args()
    jax.config.update("jax_platforms", "cpu")
    found = record("benchmarks.accuracy.accumulate", options.quick, "tpu v5e and h200, which were not there") | {
        "rows": errors(options.quick)
    }
    write(options.json, found | {"costs": costs(options.quick)})
