"""A text model of GPT-2's architecture, 5 M parameters: trained in float32 and in float16 under autocast, four seeds.

    export XLA_FLAGS=--xla_cpu_multi_thread_eigen=false  # one core a run
    python -m benchmarks.accuracy.text_model --processes 2 --json docs/benchmarks/text_model.json

The model is the one that `benchmarks.gpu` times, smaller. It learns the next byte of the source code of Python's
standard library, without its tests, which every machine with Python has. Every tenth file is held out. The two runs of
a seed have the same parameters, batches and optimizer; float16 adds `jamp.autocast` and `jamp.loss_scaled` with their
defaults. A run takes about 15 minutes on one core, and there are eight.
"""

import sysconfig
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import models
from benchmarks.accuracy.setups import FLOAT32, FULL, Setup
from benchmarks.accuracy.study import run
from benchmarks.accuracy.tasks import Loss, Task, halves, spread, windows
from benchmarks.record import parser, record, write

SHAPE = models.Shape(layers=6, width=256, heads=4, classes=256, tokens=256, scanned=True)
BATCH, SEEDS = 8, 4
SETUPS = {"float32": FLOAT32, "float16": Setup("float16", **FULL, autocast=True)}


class TextModel(Task):
    def optimizer(self) -> optax.GradientTransformation:
        schedule = optax.warmup_cosine_decay_schedule(0.0, self.learning_rate, self.steps // 20, self.steps)
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1))


def task(quick: bool) -> Task:
    library = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "test", "tests", "idle_test"}
    train, test = halves(file for file in library.rglob("*.py") if not left_out & set(file.parts))
    shape = replace(SHAPE, layers=1, width=32, heads=2, tokens=16) if quick else SHAPE

    def init(key: jax.Array) -> Any:
        """GPT-2's: what is added to the residual stream starts smaller, the more layers add to it."""
        params = models.init(key, shape)
        for name in ("out", "down"):
            params["blocks"][name]["w"] *= (2 * shape.layers) ** -0.5
        return params

    def make_loss(*_: Any) -> Loss:
        return lambda params, text: (models.loss_fn(params, (text[:, :-1], text[:, 1:]), shape), jnp.nan)  # no accuracy

    def get_batch(text: jax.Array, key: jax.Array) -> jax.Array:
        return windows(text, jax.random.randint(key, (BATCH,), 0, len(text) - shape.tokens), shape.tokens)

    held_out = spread(test, 8 * BATCH, shape.tokens)
    steps, every = (20, 10) if quick else (600, 25)
    return TextModel("text model", init, make_loss, train, get_batch, None, held_out, 2e-3, steps, every)


def trained(name: str, seed: int, quick: bool) -> dict[str, Any]:
    return {"name": name, **run(task(quick), SETUPS[name], [seed])[0]}


if __name__ == "__main__":
    arguments = parser("benchmarks.accuracy.text_model", __doc__)
    arguments.add_argument("--processes", type=int, default=1, metavar="N", help="so many runs beside each other")
    options = arguments.parse_args()
    found = record("benchmarks.accuracy.text_model", options.quick, jax.devices()[0].device_kind)
    runs = [(name, seed) for seed in range(2 if options.quick else SEEDS) for name in SETUPS]
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        rows = list(pool.map(partial(trained, quick=options.quick), *zip(*runs, strict=True)))
    write(options.json, found | {"rows": rows})
