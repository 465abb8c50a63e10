"""Weight gradients in float32, as autocast writes them, or rounded to 16 bit: errors, and what float16 makes of them.

    export XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    taskset -c 1 python -m benchmarks.accuracy.gradients --json docs/benchmarks/gradients.json

Training in float16 with a loss scale that grows every 50 steps until it overflows, five seeds: the steps skipped, and
the scale at the end. For the same models before training: the relative error of the gradient of each weight, against
float64, in a batch on one device and summed over eight.

Expected, and written down before the first run: the scale ends two to seven powers of two higher, and fewer steps are
skipped until then. The errors fall by less than a tenth, because the rounded operands of a product cost more digits
than its result. Summed over eight devices in 16 bit, they are up to half as large again.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jamp
from benchmarks.accuracy import reinforce, study
from benchmarks.accuracy.tasks import Task, convolutional, language_model, overflowing
from benchmarks.record import parser, record, show, write
from examples.reinforce import make_step, pretrain

Row = dict[str, Any]
DEVICES = 8
KEPT = "task", "setup", "seed", "skipped", "final_log2_scale", "held_out_loss"  # of a run's results
GRADIENTS = ("dot_general[gradient]", "conv_general_dilated[gradient]")
FLOAT32 = study.FLOAT32.make_loss
RULES = {"16 bit": dict.fromkeys(GRADIENTS, "compute"), "float32": dict.fromkeys(GRADIENTS, "accumulate")}


def setup(name: str) -> study.Setup:
    """float16 with weight gradients in 16 bit or in float32."""
    rules, loss_scale = tuple(RULES[name].items()), study.OFTEN.loss_scale
    return study.Setup(name, **study.FULL, autocast=True, loss_scale=loss_scale, rules=rules)


def training(quick: bool) -> Iterator[Row]:
    for task in (language_model(quick), convolutional(quick), *overflowing(quick))[: 1 if quick else None]:
        # A batch as it is: the division by a number of micro-batches would only lower the gradients.
        task = replace(task, micro_batches=1)
        for name in RULES:
            for row in study.run(task, setup(name), range(1 if quick else study.SEEDS)):
                yield {key: row[key] for key in KEPT}


def reinforced(quick: bool) -> Iterator[Row]:
    """The run of `benchmarks.accuracy.reinforce` whose loss scale grows every 20 steps."""
    seeds, steps = (1, 4) if quick else (reinforce.SEEDS, reinforce.STEPS)
    for name, rules in RULES.items():
        init, step = make_step(jnp.float16, reinforce.SETUPS[reinforce.OFTEN][1], rules)
        step = jax.jit(step.__wrapped__, compiler_options=reinforce.EXACT)
        for seed in range(seeds):
            params = pretrain(*jax.random.split(jax.random.key(seed)))
            opt_state, skipped = init(params), []
            for i, key in enumerate(jax.random.split(jax.random.key(seed + 1000), steps)):
                params, opt_state, _ = step(params, opt_state, key)
                skipped += [] if jamp.get_grads_finite(opt_state) else [i]
            scale = float(jnp.log2(jamp.get_loss_scale(opt_state)))
            row = {"task": "REINFORCE", "setup": name, "seed": seed, "skipped": skipped, "final_log2_scale": scale}
            show(row)
            yield row


def errors(task: Task, dtype: Any) -> Iterator[Row]:
    """The relative error of each weight's gradient, in the 2-norm."""
    key = jax.random.key(0)
    params, batch = task.init(key), task.get_batch(task.data, key)
    state = jamp.loss_scale_for(dtype).init()
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x, (params, batch))
        truth, _ = jax.jit(jax.grad(FLOAT32(task), has_aux=True))(*exact)
    parts = [jax.tree.map(lambda x, i=i: jnp.split(x, DEVICES)[i], batch) for i in range(DEVICES)]
    for name, rules in RULES.items():
        loss = jamp.autocast(FLOAT32(task), dtype, rules=rules)
        of_loss = lambda state, *args, loss=loss: jamp.grad(loss, state, has_aux=True)(*args)[0]
        grad = functools.partial(jax.jit(of_loss, compiler_options=study.COMPILER_OPTIONS), state)
        whole, shards = grad(params, batch), [grad(params, part) for part in parts]
        summed = jax.tree.map(functools.partial(_summed, dtype if name == "16 bit" else jnp.float32), *shards)
        about = {"task": task.name, "dtype": jnp.dtype(dtype).name, "setup": name}
        leaves = jax.tree.leaves_with_path(truth), jax.tree.leaves(whole), jax.tree.leaves(summed)
        for (path, true), of_one, of_eight in zip(*leaves, strict=True):
            if true.ndim > 1:
                one, eight = _error(of_one, true), _error(of_eight, true)
                yield about | {"weight": jax.tree_util.keystr(path), "one device": one, "eight devices": eight}


def _summed(dtype: Any, *parts: jax.Array) -> jax.Array:
    """The mean over devices, as a ring adds it: one after the other, each sum rounded to a dtype."""
    return functools.reduce(jnp.add, (x.astype(dtype) for x in parts)).astype(jnp.float32) / DEVICES


def _error(found: jax.Array, true: jax.Array) -> float:
    with jax.enable_x64(True):
        return float(optax.global_norm(found.astype(jnp.float64) - true) / optax.global_norm(true))


if __name__ == "__main__":
    options = parser("benchmarks.accuracy.gradients", __doc__).parse_args()
    found = record("benchmarks.accuracy.gradients", options.quick, jax.devices()[0].device_kind)
    found |= {"rows": [], "errors": []}
    few = slice(1 if options.quick else None)
    for task in (language_model(options.quick), convolutional(options.quick))[few]:
        for dtype in (jnp.float16, jnp.bfloat16)[few]:
            for row in errors(task, dtype):
                show(row)
                found["errors"].append(row)
    for runs in (reinforced, training):
        for row in runs(options.quick):
            found["rows"].append(row)
            write(options.json, found)
