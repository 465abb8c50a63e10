"""Two tasks on which the loss scale grows until it overflows, again and again, because its interval is 50.

The digits in batches of which one in a hundred has its pixels multiplied by 64, and a network of 16 hidden layers.
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

import jamp
from benchmarks.accuracy.setups import FLOAT32, NONE, Setup
from benchmarks.accuracy.study import SEEDS
from benchmarks.accuracy.tasks import Task, digits, init_digits

SPIKE, EVERY = 64.0, 100  # a batch in a hundred is so many times as large
INTERVAL = 50
SETUPS = [
    FLOAT32,
    Setup("float16, unscaled", loss_scale=NONE),
    Setup("float16, static", loss_scale=jamp.StaticLossScale()),
    Setup("float16, dynamic", loss_scale=jamp.DynamicLossScale(growth_interval=INTERVAL, max_scale=math.inf)),
    Setup("float16, adaptive", loss_scale=jamp.AdaptiveLossScale()),
]


def spikes(quick: bool) -> Task:
    task = digits(quick, batch=128)

    def get_batch(data: Any, key: jax.Array) -> Any:
        x, y = task.get_batch(data, key)
        return x * jnp.where(jax.random.randint(jax.random.fold_in(key, 1), (), 0, EVERY) == 0, SPIKE, 1.0), y

    return replace(task, name="digits with spikes", get_batch=get_batch)


def deep(quick: bool) -> Task:
    sizes = (64, *[128] * (2 if quick else 16), 10)
    init = lambda key: init_digits(key, sizes)
    return replace(digits(quick, batch=128), name="16 hidden layers", init=init, learning_rate=1e-3)


def plan(quick: bool) -> list[tuple[Task, list[Setup], int]]:
    return [(task, SETUPS, 2 if quick else SEEDS) for task in (spikes(quick), deep(quick))]
