"""The time of autocast on this machine: a training step, and tracing. The memory is in `benchmarks.memory`.

    python -m benchmarks.step.autocast             forward, backward and AdamW on float32 parameters, in turn
    python -m benchmarks.step.autocast --trace     trace time of 24 layers, against plain tracing

A step is in float32, under autocast, and of the same model written with `dtype=bfloat16`.
"""

import gc
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jamp
from benchmarks import models
from benchmarks.record import Rows, parser, record, show, write
from benchmarks.timing import Case, compare


def transformer(shape: models.Shape, batch: int) -> Any:
    return partial(models.loss_fn, shape=shape), *models.made(shape, batch)


def on_cpu(quick: bool) -> Rows:
    images = np.linspace(-1, 1, 8 * 32 * 32 * 3, dtype=np.float32).reshape(8, 32, 32, 3)
    problems = {
        "transformer": transformer(models.Shape(2, 128, 2, 1000, 64), 4),
        "resnet": (models.resnet_loss, models.resnet_params(8), (images, np.arange(8, dtype=np.int32))),
    }
    return timed(problems, 1 if quick else 21)


def timed(problems: dict[str, Any], rounds: int) -> Rows:
    """Each model is its loss with a keyword `dtype`, its parameters and a batch."""
    rows, tx = [], optax.adamw(1e-3)
    for model, (loss, params, batch) in problems.items():
        ways = {
            "float32": loss,
            "autocast float16": jamp.autocast(loss, jnp.float16),
            "autocast bfloat16": jamp.autocast(loss, jnp.bfloat16),
            "written with dtype=bfloat16": partial(loss, dtype=jnp.bfloat16),
        }
        step = lambda loss: partial(models.train_step, loss, tx, False)
        cases = [Case(name, step(loss), (params, tx.init(params)), (batch,)) for name, loss in ways.items()]
        for row in compare(cases, rounds):
            rows.append({"model": model} | row)
            show(rows[-1])
    return rows


def trace_times() -> Rows:
    rows = []
    shape = models.Shape(24, 64, 4, 256, 32)
    loss = partial(models.loss_fn, shape=shape)
    params, batch = jax.eval_shape(partial(models.made, shape, 2))
    for name, wrap in {"forward": lambda f: f, "gradient": jax.grad}.items():
        seconds: dict[str, float] = {}
        for _ in range(3):
            for how, fun in {"plain": loss, "autocast": jamp.autocast(loss, jnp.bfloat16)}.items():
                jax.clear_caches()
                gc.collect()
                start = time.process_time()
                jax.jit(wrap(fun)).trace(params, batch)
                seconds[how] = min(seconds.get(how, np.inf), time.process_time() - start)
        rows.append({"name": name, **seconds, "ratio": seconds["autocast"] / seconds["plain"]})
        show(rows[-1])
    return rows


if __name__ == "__main__":
    arguments = parser("benchmarks.step.autocast", __doc__)
    arguments.add_argument("--trace", action="store_true")
    options = arguments.parse_args()
    found = record("benchmarks.step.autocast", options.quick, jax.devices()[0].device_kind)
    write(options.json, found | {"rows": trace_times() if options.trace else on_cpu(options.quick)})
