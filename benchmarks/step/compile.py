"""Seconds to trace and to compile the gradient of GPT-2 in each way, on the device that is there.

    python -m benchmarks.step.compile --json docs/benchmarks/compile_cpu.json

Layers are in a loop, or unrolled. A cell is the median of three rounds, and their range. Before each, JAX forgets all
traces and programs. A round before them, which loads modules, is not counted. No compilation cache is used.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jamp
from benchmarks import models
from benchmarks.record import Rows, parser, record, show, write


def ways_of(loss: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    by_hand = partial(loss, dtype=jnp.bfloat16)
    return {
        "float32": loss,
        "bfloat16 by hand": by_hand,
        "bfloat16 by hand, each block again": partial(by_hand, policy=jax.checkpoint_policies.nothing_saveable),
        "autocast": jamp.autocast(loss, jnp.bfloat16),
        "autocast, memory_budget=0.5": jamp.autocast(loss, jnp.bfloat16, memory_budget=0.5),
        "autocast, Float8": jamp.autocast(loss, jamp.Float8()),
        "recompute(by hand, 0.5)": jamp.recompute(by_hand, 0.5),
    }


def seconds(fun: Callable[..., Any], args: tuple[Any, ...]) -> tuple[float, float]:
    """To trace and lower the gradient of a function, and to compile it."""
    jax.clear_caches()
    start = time.perf_counter()
    lowered = jax.jit(jax.grad(fun)).lower(*args)
    traced = time.perf_counter()
    lowered.compile()
    return traced - start, time.perf_counter() - traced


def measured(shape: models.Shape, rounds: int) -> Rows:
    params, batch = jax.eval_shape(partial(models.made, shape, 1))
    ways = ways_of(partial(models.loss_fn, shape=shape))
    found = np.array([[seconds(fun, (params, batch)) for fun in ways.values()] for _ in range(rounds + 1)])[1:]
    name = f"{shape.layers} layers {'in a loop' if shape.scanned else 'unrolled'}"
    rows = []
    for way, (trace, compilation) in zip(ways, found.transpose(1, 2, 0), strict=True):
        row = {"model": f"GPT-2 of {name}", "name": way}
        for key, values in (("trace", trace), ("compile", compilation)):
            row |= {
                f"{key}_seconds": float(np.median(values)),
                f"{key}_range": [float(values.min()), float(values.max())],
            }
        show(row)
        rows.append(row)
    return rows


if __name__ == "__main__":
    options = parser("benchmarks.step.compile", __doc__).parse_args()
    shape = (models.SMALL if options.quick else models.SHAPES)["GPT-2 124 M"]
    found = [
        row for scanned in (True, False) for row in measured(replace(shape, scanned=scanned), 1 if options.quick else 3)
    ]
    write(
        options.json, record("benchmarks.step.compile", options.quick, jax.devices()[0].device_kind) | {"rows": found}
    )
