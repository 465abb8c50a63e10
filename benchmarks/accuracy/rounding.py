"""Parameters and moments in fewer bits: where training ends.

    python -m benchmarks.accuracy.rounding --json docs/benchmarks/rounding.json   three hours on one core
    python -m benchmarks.accuracy.rounding --optimizers --json docs/benchmarks/rounding_optimizers.json   15 minutes

Five tasks, five seeds, at least 2000 steps: the language model and the digits of `benchmarks.accuracy.tasks`; that
model fine-tuned on other text with a learning rate so low that most updates are below half the spacing of bfloat16;
with gradients a thousand times as large in one step in the middle, and no clip; and a model whose embedding has 65536
rows, most of which get a gradient in few steps. The loss is that of data that are never trained on. All ways with
bfloat16 parameters compute in bfloat16 under autocast, and have bfloat16 gradients.

Written down before the runs: a way passes a task if the 90 % interval of its paired differences to float32 lies within
1 % of float32's loss, and for the digits, whose losses differ by half between seeds, within one point of accuracy.
Expected: all ways with 8-bit state pass where the same way without it does; rounding to nearest fails in fine-tuning.
With --optimizers: the language model with six optimizers, two seeds.
"""

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jamp
from benchmarks.accuracy import tasks
from benchmarks.accuracy.intervals import show_intervals
from benchmarks.accuracy.tasks import Task, cross_entropy, digits, halves, language_model, spread
from benchmarks.record import Rows, parser, record, show, write

SEEDS = 5
LOW = 3e-5  # the learning rate of fine-tuning


def kahan(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Rounding to nearest, with what is cut off added to the next update (Zamirai et al., arXiv:2010.06192)."""

    def init(params: Any) -> Any:  # the inner state, and what the roundings so far have cut off, bfloat16
        return inner.init(wide(params)), jax.tree.map(jnp.zeros_like, params)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        updates, inner_state = inner.update(wide(grads), state[0], wide(params))
        wanted = jax.tree.map(lambda u, lost: u + lost.astype(jnp.float32), updates, state[1])
        moved = jax.tree.map(lambda p, u: (p + u).astype(p.dtype).astype(jnp.float32) - p, params, wanted)
        return moved, (inner_state, jax.tree.map(lambda u, m: (u - m).astype(jnp.bfloat16), wanted, moved))

    return optax.GradientTransformation(init, update)


wide = partial(jamp.cast_floating, dtype=jnp.float32)
WAYS: dict[str, tuple[Any, Callable[[optax.GradientTransformation], optax.GradientTransformation]]] = {
    "float32": (jnp.float32, lambda tx: tx),
    "masters": (jnp.bfloat16, jamp.master_params),
    "rounded to nearest": (jnp.bfloat16, lambda tx: jamp.loss_scaled(tx, jamp.NoOpLossScale())),
    "stochastic": (jnp.bfloat16, jamp.stochastic_rounding),
    "stochastic, bfloat16 state": (jnp.bfloat16, partial(jamp.stochastic_rounding, state_dtype=jnp.bfloat16)),
    "Kahan sums": (jnp.bfloat16, kahan),
    "float32, 8-bit state": (jnp.float32, jamp.quantized_state),
    "stochastic, 8-bit state": (jnp.bfloat16, lambda tx: jamp.stochastic_rounding(jamp.quantized_state(tx))),
    "split masters, 8-bit state": (
        jnp.bfloat16,
        lambda tx: jamp.master_params(jamp.quantized_state(tx), split=True),
    ),
}


def fine_tuning(quick: bool) -> tuple[Task, Any]:
    """The language model after training, and other text: the tables of Python's codecs, every tenth file held out."""
    task = language_model(quick)
    train, test = halves((Path(os.__file__).parent / "encodings").glob("*.py"))
    params = jax.jit(lambda key: trained(task, "float32", task.init(key), key, task.optimizer()))(jax.random.key(99))
    return dataclasses.replace(task, name="fine-tuning", data=train, held_out=spread(test, 4 if quick else 128)), params


def long(task: Task, quick: bool) -> Task:
    return task if quick else dataclasses.replace(task, steps=max(task.steps, 2000))


def spike(task: Task) -> tuple[Task, optax.GradientTransformation]:
    """A step in the middle with gradients a thousand times as large."""
    middle = task.steps // 2
    larger = optax.scale_by_schedule(lambda count: jnp.where(count == middle, 1e3, 1.0))
    return dataclasses.replace(task, name="spike"), optax.chain(larger, optax.adamw(task.learning_rate / 3))


def rare_tokens(quick: bool) -> Task:
    """The next byte after four, from an embedding of pairs of bytes."""
    task, width = language_model(quick), 32

    def init(key: jax.Array) -> Any:
        keys, he = jax.random.split(key, 3), jax.nn.initializers.he_normal()
        hidden = {"w": he(keys[1], (2 * width, 128)), "b": jnp.zeros(128)}
        return {
            "embed": 0.1 * jax.random.normal(keys[0], (2**16, width)),
            "hidden": hidden,
            "out": he(keys[2], (128, 256)),
        }

    def loss(params: Any, text: jax.Array) -> tuple[jax.Array, jax.Array]:
        pairs = 256 * text[:, :-1] + text[:, 1:]
        x = jnp.concatenate([params["embed"][pairs[:, :-3]], params["embed"][pairs[:, 2:-1]]], -1)
        x = jax.nn.relu(x @ params["hidden"]["w"] + params["hidden"]["b"])
        return cross_entropy(x @ params["out"], text[:, 4:])

    return dataclasses.replace(task, name="rare tokens", init=init, loss=loss)


def trained(task: Task, way: str, params: Any, key: jax.Array, tx: optax.GradientTransformation) -> Any:
    """The parameters at the end of a run, in float32."""
    dtype, wrap = WAYS[way]
    loss = task.loss if dtype == jnp.float32 else jamp.autocast(lambda p, batch: task.loss(wide(p), batch), dtype)
    return wide(tasks.trained(task, loss, wrap(tx), jamp.cast_floating(params, dtype), key))


def measure(task: Task, way: str, tx: optax.GradientTransformation, seeds: int, start: Any = None) -> Rows:
    """The loss on held-out data of each seed, from other parameters where they are given."""

    def run(key: jax.Array) -> Any:
        params = task.init(key) if start is None else start
        return task.loss(trained(task, way, params, key, tx), task.held_out)

    return tasks.held_out(task, way, run, seeds)


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(3e-3),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=32),
    "lion": lambda: optax.lion(5e-4),
    "muon": lambda: optax.contrib.muon(5e-3),
    "sgd with momentum": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)),
    "schedule-free adamw": lambda: optax.contrib.schedule_free_adamw(3e-3, warmup_steps=50),
}


def optimizers(quick: bool) -> Rows:
    rows, task = [], language_model(quick)
    for name, make in OPTIMIZERS.items():
        for way in ("float32", "rounded to nearest", "stochastic", "stochastic, bfloat16 state"):
            losses = [row["loss"] for row in measure(task, way, make(), 1 if quick else 2)]
            rows.append({"optimizer": name, "way": way, "losses": losses, "loss": float(np.mean(losses))})
            show(rows[-1])
    return rows


def accuracy(only: list[str], quick: bool) -> Rows:
    seeds, (tuned, start), rows = 1 if quick else SEEDS, fine_tuning(quick), []
    model = long(language_model(quick), quick)
    ways = [(task, task.optimizer(), None) for task in (model, digits(quick), long(rare_tokens(quick), quick))]
    for task, tx, first in [*ways, (*spike(model), None), (long(tuned, quick), optax.adamw(LOW), start)]:
        if only and task.name not in only:
            continue
        for way in WAYS:
            rows += measure(task, way, tx, seeds, first)
    show_intervals(rows, "float32")
    return rows


if __name__ == "__main__":
    arguments = parser("benchmarks.accuracy.rounding", __doc__)
    arguments.add_argument("--optimizers", action="store_true", help="the language model with six optimizers")
    arguments.add_argument("--only", nargs="+", default=[], help="names of tasks")
    options = arguments.parse_args()
    found, quick = record("benchmarks.accuracy.rounding", options.quick, "cpu"), options.quick
    write(options.json, found | {"rows": optimizers(quick) if options.optimizers else accuracy(options.only, quick)})
