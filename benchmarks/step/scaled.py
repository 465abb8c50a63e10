"""A whole float16 step with `jamp.scaled`, beside `jamp.loss_scaled`, compiled for a device that is not there.

    python -m benchmarks.step.scaled tpu --json docs/benchmarks/scaled_tpu.json     needs `pip install libtpu`
    python -m benchmarks.step.scaled h200 --json docs/benchmarks/scaled_h200.json   needs `pip install "jax[cuda13]"`

Adam with a clip by the global norm, under `autocast`. Temporaries are what the compiler allocates; bytes and kernels
are counted in the program. The retries are not counted: almost always there is none.
"""

import os
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false")

import jax
import optax

import jamp
from benchmarks import hlo
from benchmarks.ahead_of_time import TARGETS, compiled, is_installed
from benchmarks.memory.__main__ import MODELS
from benchmarks.record import Rows, parser, record, show, write

NAMES = "GPT-2 124 M, batch 8 x 1024, scanned", "Llama, 3 layers", "GPT, 3 layers", "ViT, 3 layers", "ResNet-18"


def variants(loss: Any) -> dict[str, Any]:
    """By name, the optimizer and the gradient, given the loss and the optimizer's state."""
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    low, static = jamp.autocast(loss, "float16"), jamp.loss_scaled(inner, jamp.StaticLossScale(1.0))
    of_scaled = lambda retries: lambda state: jax.value_and_grad(jamp.scaled(low, retries=retries))
    return {
        "loss_scaled": (jamp.loss_scaled(inner), lambda state: jamp.value_and_grad(low, state)),
        "no scale": (static, lambda state: jax.value_and_grad(low)),
        "scaled, retries=0": (static, of_scaled(0)),
        "scaled": (static, of_scaled(2)),
    }


def step_of(tx: Any, gradient: Any) -> Any:
    def step(carry: Any, batch: Any) -> Any:
        params, state = carry
        value, grads = gradient(state)(params, batch)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    return step


def measure(target: str, only: list[str]) -> Rows:
    rows: Rows = []
    for model in (name for name in MODELS if any(part in name for part in only)):
        loss, params, batch = MODELS[model]()
        first: dict[str, Any] = {}
        for name, (tx, gradient) in variants(loss).items():
            carry = params, jax.eval_shape(tx.init, params)
            program = compiled(target, step_of(tx, gradient), carry, batch, donate=True)
            counted = hlo.count(program.as_text())
            memory = program.memory_analysis().temp_size_in_bytes
            found = {"temporary_megabytes": memory / 1e6, "gigabytes": counted.bytes / 1e9, "kernels": counted.kernels}
            first = first or found
            rows.append({"model": model, "variant": name} | found)
            rows[-1] |= {f"{key}_ratio": found[key] / first[key] for key in found}
            show(rows[-1])
    return rows


if __name__ == "__main__":
    arguments = parser("benchmarks.step.scaled", __doc__)
    arguments.add_argument("target", choices=TARGETS)
    options = arguments.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if is_installed(options.target):
        about = record("benchmarks.step.scaled", options.quick, options.target)
        names = ["GPT, 3 layers"] if options.quick else list(NAMES)
        write(options.json, about | {"rows": measure(options.target, names)})
