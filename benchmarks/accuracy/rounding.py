"""bfloat16 parameters without masters: where training ends.

    python -m benchmarks.accuracy.rounding --json docs/benchmarks/rounding.json   half an hour on one core
    python -m benchmarks.accuracy.rounding --optimizers --json docs/benchmarks/rounding_optimizers.json   15 minutes

Three tasks, five seeds: the language model and the digits of `benchmarks.accuracy`, and that model fine-tuned on
other text with a learning rate so low that most updates are below half the spacing of bfloat16. All ways but float32
compute in bfloat16 under autocast, and have bfloat16 gradients. The loss is that of data that are never trained on.
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
from benchmarks.accuracy.study import FLOAT32
from benchmarks.accuracy.tasks import Task, digits, halves, language_model, spread
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
}


def fine_tuning(quick: bool) -> tuple[Task, Any]:
    """The language model after training, and other text: the tables of Python's codecs, every tenth file held out."""
    task = language_model(quick)
    train, test = halves((Path(os.__file__).parent / "encodings").glob("*.py"))
    params = jax.jit(lambda key: trained(task, "float32", task.init(key), key, task.optimizer()))(jax.random.key(99))
    return dataclasses.replace(task, name="fine-tuning", data=train, held_out=spread(test, 4 if quick else 128)), params


def trained(task: Task, way: str, params: Any, key: jax.Array, tx: optax.GradientTransformation) -> Any:
    """The parameters at the end of a run, in float32."""
    dtype, wrap = WAYS[way]
    plain = FLOAT32.make_loss(task)
    loss = plain if dtype == jnp.float32 else jamp.autocast(lambda p, batch: plain(wide(p), batch), dtype)
    return wide(tasks.trained(task, loss, wrap(tx), jamp.cast_floating(params, dtype), key))


def measure(task: Task, way: str, tx: optax.GradientTransformation, seeds: int, start: Any = None) -> Rows:
    """The loss on held-out data of each seed, from other parameters where they are given."""

    def run(key: jax.Array) -> Any:
        params = task.init(key) if start is None else start
        return FLOAT32.make_loss(task)(trained(task, way, params, key, tx), task.held_out)

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


def accuracy(quick: bool) -> Rows:
    seeds, (tuned, start), rows = 1 if quick else SEEDS, fine_tuning(quick), []
    for task in (language_model(quick), digits(quick), tuned):
        tx, first = (optax.adamw(LOW), start) if task is tuned else (task.optimizer(), None)
        for way in WAYS:
            rows += measure(task, way, tx, seeds, first)
    return rows


if __name__ == "__main__":
    arguments = parser("benchmarks.accuracy.rounding", __doc__)
    arguments.add_argument("--optimizers", action="store_true", help="the language model with six optimizers")
    options = arguments.parse_args()
    found = record("benchmarks.accuracy.rounding", options.quick, "cpu")
    write(options.json, found | {"rows": (optimizers if options.optimizers else accuracy)(options.quick)})
