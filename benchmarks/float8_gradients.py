"""float8 gradients beside float32's by layer, and the memory that a transformer block keeps for the backward pass.

    python -m benchmarks.float8_gradients --json docs/benchmarks/float8_gradients.json   about five minutes

Cosines: of the first gradient with respect to each weight matrix, on the tasks of `benchmarks.accuracy`, five seeds.
Memory: what `jax.vjp` keeps of a GPT block of width 512 for 8 sequences of 512 tokens, without its parameters: the
difference between models of two blocks and of one.
"""

import argparse
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr

import jamp
from benchmarks import models
from benchmarks.accuracy_setups import FLOAT32
from benchmarks.accuracy_tasks import digits, language_model
from benchmarks.float8 import SEEDS, WAYS, unscaled
from benchmarks.memory import kept, transformer
from benchmarks.models import Shape
from benchmarks.record import record, write
from jamp._autocast import quantized

MEMORY = {
    "float32": {},
    "bfloat16 by hand": {},
    "bfloat16": {"compute_dtype": jnp.bfloat16},
    "float8, per tensor": {"compute_dtype": jamp.Float8()},
    "float8, per row": {"compute_dtype": jamp.Float8(granularity="row")},
}


def cosine(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.vdot(x, y) / (optax.tree.norm(x) * optax.tree.norm(y))


def cosines(quick: bool) -> list[dict[str, Any]]:
    rows = []
    for task in (language_model(quick), digits(quick)):
        plain = FLOAT32.make_loss(task)
        for name, way in WAYS.items():
            loss = way(plain)

            def compare(key: jax.Array, loss: Any = loss, plain: Any = plain, task: Any = task) -> Any:
                params, batch = task.init(key), task.get_batch(task.data, jax.random.fold_in(key, 1))
                found, true = (jax.grad(lambda p, f=f: f(p, batch)[0])(params) for f in (loss, plain))
                return jax.tree.map(cosine, found, true)

            with mock.patch.object(quantized, "quantize", unscaled if "without" in name else quantized.quantize):
                run = jax.jit(compare).lower(jax.random.key(0)).compile()
            seeds = [run(jax.random.key(seed)) for seed in range(1 if quick else SEEDS)]
            matrices = [
                path
                for path, x in jax.tree.leaves_with_path(jax.eval_shape(task.init, jax.random.key(0)))
                if x.ndim > 1
            ]
            layers = {
                keystr(path): min(float(dict(jax.tree.leaves_with_path(seed))[path]) for seed in seeds)
                for path in matrices
            }
            worst = min(layers, key=lambda layer: layers[layer])
            rows.append({"task": task.name, "way": name, "layers": layers, "smallest": layers[worst], "at": worst})
            print("{task:15s} {way:45s} smallest cosine {smallest:.5f} at {at}".format(**rows[-1]), flush=True)
    return rows


def memory() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for way, options in MEMORY.items():

        def megabytes(layers: int, way: str = way, options: Any = options) -> float:
            loss, params, batch = transformer(models, Shape(layers, 512, 8, 1024, 512), 8, False)
            loss = partial(loss, dtype=jnp.bfloat16) if "by hand" in way else loss
            return kept(jamp.autocast(loss, **options) if options else loss, params, batch)

        rows.append({"way": way, "megabytes": megabytes(2) - megabytes(1)})
        print("{way:20s} {megabytes:6.1f} MB".format(**rows[-1]))
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    found = record("benchmarks.float8_gradients", args.quick, "cpu")
    write(args.json, found | {"memory": memory(), "cosines": cosines(args.quick)})
