"""A language model trained until a table of trigrams is far behind: float32, float16, bfloat16 and 8 bit, paired seeds.

    taskset -c 0 python -m benchmarks.accuracy.text_model --seeds 0 1 --json docs/benchmarks/text_model.json
    taskset -c 1 python -m benchmarks.accuracy.text_model --seeds 2 3 --json docs/benchmarks/text_model.json

1.4 M parameters read 8.4 MB of Python's standard library in 16,384 steps, about half an hour on one core. A run that
the file has already is not made again, so the study can be stopped and continued, and run in two processes.

Decided before the first result: these four formats, seeds 0 to 3, `MARGIN`, and the loss of 1,024 windows of files
that are held out, at the end of the run and computed as the run computes. The difference to float32 is taken seed by
seed. A format is equivalent if the 90 % interval of the mean difference (Student's t, three degrees of freedom) lies
within plus and minus its margin. The seed decides the initial parameters and the order of the batches.
"""

import json
import math
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jamp
from benchmarks import models
from benchmarks.accuracy.intervals import show_intervals
from benchmarks.accuracy.windows import halves, spread, windows
from benchmarks.models import updated
from benchmarks.record import parser, processor, record, show, write

# Nats a byte.
MARGIN = {"float16": 0.01, "bfloat16": 0.01, "float8": 0.02}
SEEDS = range(4)
# Or XLA may leave out a rounding to 16 bit that is followed by a cast back.
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}
# With this interval the scale climbs until it overflows, and again every few hundred steps.
LOSS_SCALE = jamp.DynamicLossScale(growth_interval=200, max_scale=math.inf)
# By name: the function around the loss, and the loss scale.
FORMATS: dict[str, tuple[Callable[[Any], Any], jamp.LossScale]] = {
    "float32": (lambda loss: loss, jamp.NoOpLossScale()),
    "float16": (lambda loss: jamp.autocast(loss, jnp.float16), LOSS_SCALE),
    "bfloat16": (lambda loss: jamp.autocast(loss, jnp.bfloat16), jamp.NoOpLossScale()),
    "float8": (lambda loss: jamp.autocast(loss, jamp.Float8()), jamp.NoOpLossScale()),
}


@dataclass(frozen=True)
class Study:
    shape: models.Shape
    batch: int = 4  # windows
    steps: int = 16384
    every: int = 512  # steps between two evaluations
    judged: int = 1024  # windows at the end; a sixteenth of them during the run
    learning_rate: float = 1.5e-3


FULL = Study(models.Shape(layers=3, width=192, heads=3, classes=256, tokens=128, scanned=True))
QUICK = Study(models.Shape(1, 128, 2, 256, 128, scanned=True), 2, 4, 2, 16)


def text() -> tuple[jax.Array, jax.Array]:
    """Python's standard library without its tests: nine files in ten to train on, and the tenth, u8[n] each."""
    library, left_out = Path(sysconfig.get_path("stdlib")), {"site-packages", "test", "tests", "idle_test"}
    return halves(file for file in library.rglob("*.py") if not left_out & set(file.parts))


def init(key: jax.Array, shape: models.Shape) -> Any:
    """GPT-2's: what is added to the residual stream starts smaller, the more layers add to it."""
    params = models.init(key, shape)
    for block in [params["blocks"]] if shape.scanned else params["blocks"]:
        for name in ("out", "down"):
            block[name]["w"] *= (2 * shape.layers) ** -0.5
    return params


def train(study: Study, name: str, seed: int, data: jax.Array, held_out: jax.Array) -> dict[str, Any]:
    shape, (way, loss_scale) = study.shape, FORMATS[name]
    loss_fn = way(partial(models.loss_fn, shape=shape))
    schedule = optax.warmup_cosine_decay_schedule(0.0, study.learning_rate, study.steps // 20, study.steps)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1)
    tx = jamp.loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), adamw), loss_scale)

    def step(carry: Any, key: jax.Array) -> tuple[Any, Any]:
        params, opt_state = carry
        starts = jax.random.randint(key, (study.batch,), 0, len(data) - shape.tokens)
        x = windows(data, starts, shape.tokens)
        scale = jamp.get_loss_scale(opt_state)
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, (x[:, :-1], x[:, 1:]))
        params, opt_state = updated(tx, grads, params, opt_state)
        return (params, opt_state), (loss, jnp.log2(scale), jamp.get_grads_finite(opt_state))

    @partial(jax.jit, compiler_options=COMPILER_OPTIONS)
    def steps(carry: Any, keys: jax.Array) -> tuple[Any, Any]:
        return jax.lax.scan(step, carry, keys)

    @partial(jax.jit, compiler_options=COMPILER_OPTIONS)
    def judge(params: Any, x: jax.Array) -> jax.Array:
        return jax.lax.map(lambda x: loss_fn(params, (x[:, :-1], x[:, 1:])), x.reshape(-1, 16, x.shape[-1])).mean()

    init_key, key = jax.random.split(jax.random.key(seed))
    params = init(init_key, shape)
    carry, curve, history, start = (params, tx.init(params)), [], [], time.process_time()
    all_windows = spread(held_out, study.judged, shape.tokens)
    few = all_windows[:: max(1, study.judged // 64)]
    for i, keys in enumerate(jax.random.split(key, study.steps).reshape(-1, study.every)):
        carry, out = jax.block_until_ready(steps(carry, keys))
        history.append(jax.device_get(out))
        curve.append(float(judge(carry[0], few)))
        print(f"{name} {seed}: step {(i + 1) * study.every}, held-out loss {curve[-1]:.4f}", flush=True)
    losses, scales, finite = (np.concatenate(x) for x in zip(*history, strict=True))
    every = slice(study.every - 1, None, study.every)
    return {
        "name": name,
        "seed": seed,
        "loss": float(judge(carry[0], all_windows)),
        "steps": list(range(study.every, study.steps + 1, study.every)),
        "held_out_loss": [round(x, 5) for x in curve],
        "train_loss": [round(float(x.mean()), 5) for x in losses.reshape(-1, study.every)],
        "log2_scale": scales[every].tolist(),
        "skipped": np.flatnonzero(~finite).tolist(),
        "minutes": round((time.process_time() - start) / 60, 1),  # of this process alone: others may run beside it
        "processor": processor(),
        "date": time.strftime("%Y-%m-%d"),
    }


def trigrams(data: np.ndarray, held_out: np.ndarray, smoothing: float) -> float:
    """Nats a byte of a table of trigrams on the held-out text. Each order is smoothed with the one below."""
    probability = np.full(256, 1 / 256)
    for order in (1, 2, 3):
        code = sum(data[i : len(data) - order + 1 + i].astype(np.int64) << 8 * (order - 1 - i) for i in range(order))
        counts = np.bincount(code, minlength=256**order).reshape(-1, 256)
        lower = np.tile(probability.reshape(-1, 256), (256 if order > 1 else 1, 1))
        probability = (counts + smoothing * lower) / (counts.sum(1, keepdims=True) + smoothing)
    a, b, c = (held_out[i : len(held_out) - 2 + i].astype(np.int64) for i in range(3))
    return float(-np.log(probability[(a << 8) + b, c]).mean())


if __name__ == "__main__":
    arguments = parser("benchmarks.accuracy.text_model", __doc__)
    arguments.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    options = arguments.parse_args()
    study = QUICK if options.quick else FULL
    data, held_out = text()

    def known() -> dict[str, Any]:
        """What the file has. The other process may have written to it since."""
        if options.json and options.json.exists():
            return dict(json.loads(options.json.read_text()))
        found = record("benchmarks.accuracy.text_model", options.quick, jax.devices()[0].device_kind)
        found["command"] = "python -m benchmarks.accuracy.text_model"
        parameters = sum(x.size for x in jax.tree.leaves(init(jax.random.key(0), study.shape)))
        best = min(trigrams(np.asarray(data), np.asarray(held_out), smoothing) for smoothing in (1.0, 2.0, 5.0, 10.0))
        bytes_read = study.steps * study.batch * study.shape.tokens
        sizes = {"training_bytes": len(data), "held_out_bytes": len(held_out), "bytes_read": bytes_read}
        return found | sizes | {"parameters": parameters, "trigrams": best, "rows": []}

    found = known()
    for seed in options.seeds[:1] if options.quick else options.seeds:
        for name in FORMATS:
            found = known()
            if not any(row["name"] == name and row["seed"] == seed for row in found["rows"]):
                row = train(study, name, seed, data, held_out)
                found = known()
                found["rows"].append(row)
                write(options.json, found)
                show(row)
    if options.json:
        show_intervals(known()["rows"], "float32", label="name")
