"""Training in float8, its first gradient beside float32's, and what a block keeps for the backward pass."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr

import jamp
from benchmarks import models
from benchmarks.accuracy.study import FLOAT32
from benchmarks.accuracy.tasks import Loss, Task, digits, held_out, language_model, trained
from benchmarks.ahead_of_time import kept
from benchmarks.float8.models import GRADIENTS
from benchmarks.record import Rows, show
from jamp._autocast import quantized

SEEDS = 5
TENSOR = jamp.Float8(min_size=16)  # The models of the study are small.
WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": GRADIENTS["bfloat16"],
    "float8, per tensor": {"compute_dtype": TENSOR},
    "float8, per row": {"compute_dtype": replace(TENSOR, granularity="row")},
    "float8, per tensor, head and attention too": GRADIENTS["float8, all products"],
    "float8, E4M3 gradients": {"compute_dtype": replace(TENSOR, backward=jnp.float8_e4m3fn)},
    "cast to float8 without scales": {"compute_dtype": TENSOR},
}
MEMORY = {"float32": {}, "bfloat16 by hand": {}, "bfloat16": GRADIENTS["bfloat16"]}
MEMORY |= {"float8, per tensor": GRADIENTS["float8"], "float8, per row": GRADIENTS["float8, per row"]}


def unscaled(x: Any, dtype: Any, axes: Any = None) -> Any:
    """A plain cast to float8, in place of `quantize`: every scale is 1."""
    x = jax.lax.stop_gradient(x).astype(jnp.float32)
    return x.astype(dtype), jnp.sign(1 + jnp.max(jnp.abs(x), axes, keepdims=axes is not None))


def on_tasks(measure: Callable[..., Rows], quick: bool) -> Rows:
    """`measure(task, way, plain loss, loss, seeds)` for each way to compute each task."""
    rows: Rows = []
    for task in (language_model(quick), digits(quick)):
        plain = FLOAT32.make_loss(task)
        for way, options in WAYS.items():
            loss = jamp.autocast(plain, **options) if options else plain
            with mock.patch.object(quantized, "quantize", unscaled if "without" in way else quantized.quantize):
                rows += measure(task, way, plain, loss, 1 if quick else SEEDS)
    return rows


def losses(task: Task, way: str, plain: Loss, loss: Loss, seeds: int) -> Rows:
    def run(key: jax.Array) -> Any:
        return plain(trained(task, loss, task.optimizer(), task.init(key), key), task.held_out)

    return held_out(task, way, run, seeds)


def accuracy(quick: bool) -> dict[str, Rows]:
    return {"rows": on_tasks(losses, quick)}


def gradients(quick: bool) -> dict[str, Rows]:
    return {"memory": memory(), "cosines": on_tasks(cosines, quick)}


def cosine(x: jax.Array, y: jax.Array) -> jax.Array | None:
    return jnp.vdot(x, y) / (optax.tree.norm(x) * optax.tree.norm(y)) if x.ndim > 1 else None


def cosines(task: Task, way: str, plain: Loss, loss: Loss, seeds: int) -> Rows:
    """Of the first gradient with respect to each weight matrix: the smallest of the seeds."""

    def compare(key: jax.Array) -> Any:
        params, batch = task.init(key), task.get_batch(task.data, jax.random.fold_in(key, 1))
        found, true = (jax.grad(lambda p, f=f: f(p, batch)[0])(params) for f in (loss, plain))
        return jax.tree.map(cosine, found, true)

    run = jax.jit(compare).lower(jax.random.key(0)).compile()
    found = [jax.tree.leaves_with_path(run(jax.random.key(seed))) for seed in range(seeds)]
    layers = {keystr(same[0][0]): min(float(x) for _, x in same) for same in zip(*found, strict=True)}
    worst = min(layers, key=lambda layer: layers[layer])
    row = {"task": task.name, "way": way, "layers": layers, "smallest": layers[worst], "at": worst}
    show(row)
    return [row]


def memory() -> Rows:
    """What a GPT block of width 512 keeps of 8 sequences of 512 tokens: two blocks less one."""
    rows = []
    for way, options in MEMORY.items():

        def megabytes(layers: int, way: str = way, options: Any = options) -> float:
            loss, params, batch = models.problem(models, models.Shape(layers, 512, 8, 1024, 512), 8, False)
            loss = partial(loss, dtype=jnp.bfloat16) if "by hand" in way else loss
            return kept(jamp.autocast(loss, **options) if options else loss, params, batch)

        rows.append({"way": way, "megabytes": megabytes(2) - megabytes(1)})
        show(rows[-1])
    return rows
