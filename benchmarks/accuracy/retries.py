"""How often `jamp.scaled` tries again, and where its float16 trainings end.

    taskset -c 1 python -m benchmarks.accuracy.retries --json docs/benchmarks/retries.json

The tasks of `benchmarks.accuracy`, with whole batches and weight gradients in float32. The same seeds train in float32.
In the digits with spikes, a batch in a hundred is multiplied by 64. So each loss and gradient there is much larger.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

import jamp
from benchmarks.accuracy import study
from benchmarks.accuracy.tasks import Task, convolutional, language_model, overflowing
from benchmarks.models import updated
from benchmarks.record import parser, record, show, write

SEEDS = 3
SCALE = 2.0**15
FLOAT16 = study.Setup("float16, scaled", **study.FULL, autocast=True)


def trained(task: Task, setup: study.Setup, seed: int) -> dict[str, Any]:
    """The held-out loss after a training, the steps whose first and second tries overflowed, and the skipped ones."""
    tx, loss_fn = jamp.loss_scaled(task.optimizer(), jamp.StaticLossScale(1.0)), setup.make_loss(task)
    gradient = jax.grad(jamp.scaled(loss_fn) if setup.autocast else loss_fn, has_aux=True)
    tries = [jax.grad(jamp.scaled(loss_fn, scale, retries=0), has_aux=True) for scale in (SCALE, SCALE / 2**8)]

    def step(carry: Any, key: jax.Array) -> tuple[Any, Any]:
        params, opt_state = carry
        batch = task.get_batch(task.data, key)
        grads, _ = gradient(params, batch)
        failed = [~jamp.all_finite(fun(params, batch)[0]) for fun in tries if setup.autocast]
        params, opt_state = updated(tx, grads, params, opt_state)
        return (params, opt_state), jnp.stack([*failed, ~jamp.get_grads_finite(opt_state)])

    init_key, key = jax.random.split(jax.random.key(seed))
    params = task.init(init_key)
    run = jax.jit(lambda carry, keys: jax.lax.scan(step, carry, keys), compiler_options=study.COMPILER_OPTIONS)
    (params, _), failed = run((params, tx.init(params)), jax.random.split(key, task.steps))
    held_out, _ = jax.jit(loss_fn, compiler_options=study.COMPILER_OPTIONS)(params, task.held_out)
    counts = [int(n) for n in failed.sum(0)]
    names = ("second_tries", "third_tries", "skipped")[-len(counts) :]
    return {"held_out_loss": float(held_out)} | dict(zip(names, counts, strict=True))


def measure(quick: bool) -> Iterator[dict[str, Any]]:
    for task in (language_model(quick), convolutional(quick), *overflowing(quick)):
        task = replace(task, micro_batches=1)
        for seed in range(1 if quick else SEEDS):
            for setup in (study.FLOAT32, FLOAT16):
                about = {"task": task.name, "setup": setup.name, "seed": seed, "steps": task.steps}
                yield about | trained(task, setup, seed)


if __name__ == "__main__":
    arguments = parser("benchmarks.accuracy.retries", __doc__)
    options = arguments.parse_args()
    found = record("benchmarks.accuracy.retries", options.quick, jax.devices()[0].device_kind)
    found |= {"xla_flags": os.environ.get("XLA_FLAGS", ""), "rows": []}
    for row in measure(options.quick):
        found["rows"].append(row)
        show(row)
        write(options.json, found)
