"""Training in float8, its first gradient beside float32's, and what a block keeps for the backward pass."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr

import jamp
from benchmarks import models
from benchmarks.accuracy.setups import FLOAT32
from benchmarks.accuracy.tasks import digits, held_out, language_model, trained
from benchmarks.ahead_of_time import kept
from benchmarks.record import Rows, show
from jamp._autocast import quantized

SEEDS = 5
TENSOR = jamp.Float8(min_size=16)  # The models of the study are small.
ROW = jamp.Float8(min_size=16, granularity="row")
E4M3 = jamp.Float8(min_size=16, backward=jnp.float8_e4m3fn)
ALL = {"dot_general": "compute"}
WAYS: dict[str, Callable[[Any], Any]] = {
    "float32": lambda loss: loss,
    "bfloat16": partial(jamp.autocast, compute_dtype=jnp.bfloat16),
    "float8, per tensor": partial(jamp.autocast, compute_dtype=TENSOR),
    "float8, per row": partial(jamp.autocast, compute_dtype=ROW),
    "float8, per tensor, head and attention too": partial(jamp.autocast, compute_dtype=TENSOR, rules=ALL),
    "float8, E4M3 gradients": partial(jamp.autocast, compute_dtype=E4M3),
    "cast to float8 without scales": partial(jamp.autocast, compute_dtype=TENSOR),
}
MEMORY: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16 by hand": {},
    "bfloat16": {"compute_dtype": jnp.bfloat16},
    "float8, per tensor": {"compute_dtype": jamp.Float8()},
    "float8, per row": {"compute_dtype": jamp.Float8(granularity="row")},
}


def unscaled(x: Any, dtype: Any, axes: Any = None) -> Any:
    """A plain cast to float8, in place of `quantize`: every scale is 1."""
    x = jax.lax.stop_gradient(x).astype(jnp.float32)
    return x.astype(dtype), jnp.sign(1 + jnp.max(jnp.abs(x), axes, keepdims=axes is not None))


def patched(way: str) -> Any:
    """Within it, a gradient is traced without scales where the way says so."""
    return mock.patch.object(quantized, "quantize", unscaled if "without" in way else quantized.quantize)


def accuracy(quick: bool) -> dict[str, Rows]:
    rows = []
    for task in (language_model(quick), digits(quick)):
        plain = FLOAT32.make_loss(task)
        for way, wrap in WAYS.items():

            def run(key: jax.Array, task: Any = task, loss: Any = wrap(plain), plain: Any = plain) -> Any:
                return plain(trained(task, loss, task.optimizer(), task.init(key), key), task.held_out)

            with patched(way):
                rows += held_out(task, way, run, 1 if quick else SEEDS)
    return {"rows": rows}


def gradients(quick: bool) -> dict[str, Rows]:
    return {"memory": memory(), "cosines": cosines(quick)}


def cosine(x: jax.Array, y: jax.Array) -> jax.Array | None:
    return jnp.vdot(x, y) / (optax.tree.norm(x) * optax.tree.norm(y)) if x.ndim > 1 else None


def cosines(quick: bool) -> Rows:
    """Of the first gradient with respect to each weight matrix: the smallest of the seeds."""
    rows = []
    for task in (language_model(quick), digits(quick)):
        plain = FLOAT32.make_loss(task)
        for way, wrap in WAYS.items():

            def compare(key: jax.Array, task: Any = task, losses: Any = (wrap(plain), plain)) -> Any:
                params, batch = task.init(key), task.get_batch(task.data, jax.random.fold_in(key, 1))
                found, true = (jax.grad(lambda p, f=f: f(p, batch)[0])(params) for f in losses)
                return jax.tree.map(cosine, found, true)

            with patched(way):
                run = jax.jit(compare).lower(jax.random.key(0)).compile()
            seeds = [jax.tree.leaves_with_path(run(jax.random.key(seed))) for seed in range(1 if quick else SEEDS)]
            layers = {keystr(same[0][0]): min(float(x) for _, x in same) for same in zip(*seeds, strict=True)}
            worst = min(layers, key=lambda layer: layers[layer])
            rows.append({"task": task.name, "way": way, "layers": layers, "smallest": layers[worst], "at": worst})
            show(rows[-1])
    return rows


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
