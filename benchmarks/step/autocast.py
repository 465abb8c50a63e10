"""The time of autocast on this machine: a training step, and tracing. The memory is in `benchmarks.memory`.

    python -m benchmarks.step.autocast             forward, backward and AdamW on float32 parameters, in turn
    python -m benchmarks.step.autocast --trace     trace time of 24 layers, against plain tracing

A step is in float32, under autocast, and of the same model written with `dtype=bfloat16`.
"""

import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jamp
from benchmarks import models
from benchmarks.models import Shape, resnet_loss, resnet_params
from benchmarks.record import parser, record, write
from benchmarks.timing import Case, compare

SHAPE = Shape(2, 128, 2, 1000, 64)


def problem(model: str) -> tuple[Callable[..., Any], Any, Any]:
    """A loss with a `dtype` argument, and its parameters and batch."""
    if model == "transformer":
        return partial(models.loss_fn, shape=SHAPE), *models.made(SHAPE, 4)
    images = np.linspace(-1, 1, 8 * 32 * 32 * 3, dtype=np.float32).reshape(8, 32, 32, 3)
    return resnet_loss, resnet_params(8), (images, np.arange(8, dtype=np.int32))


def cases(model: str) -> list[Case]:
    loss, params, batch = problem(model)
    tx = optax.adamw(1e-3)
    ways = {
        "float32": loss,
        "autocast float16": jamp.autocast(loss, jnp.float16),
        "autocast bfloat16": jamp.autocast(loss, jnp.bfloat16),
        "written with dtype=bfloat16": partial(loss, dtype=jnp.bfloat16),
    }
    step = lambda fun: partial(models.train_step, fun, tx, None)
    return [Case(name, step(fun), (params, tx.init(params)), (batch,)) for name, fun in ways.items()]


def trace_times() -> list[dict[str, Any]]:
    rows = []
    shape = Shape(24, 64, 4, 256, 32)
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
        print("{name:10s} plain {plain:.2f} s  autocast {autocast:.2f} s  x {ratio:.2f}".format(**rows[-1]), flush=True)
    return rows


def timed(quick: bool) -> list[dict[str, Any]]:
    rows = []
    for model in ("transformer", "resnet"):
        for row in compare(cases(model), 1 if quick else 21):
            rows.append({"model": model} | row)
            print("{model:12s} {name:36s} {milliseconds:9.2f} ms   x {ratio:.3f}".format(**rows[-1]), flush=True)
    return rows


if __name__ == "__main__":
    arguments = parser("benchmarks.step.autocast", __doc__)
    arguments.add_argument("--trace", action="store_true")
    options = arguments.parse_args()
    found = record("benchmarks.step.autocast", options.quick, jax.devices()[0].device_kind)
    write(options.json, found | {"rows": trace_times() if options.trace else timed(options.quick)})
