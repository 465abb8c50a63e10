"""How much a residual stream in bfloat16 costs in digits, over depth.

    python -m benchmarks.accuracy.residual_stream

A transformer of GPT-2's layers with random parameters, and its products in bfloat16. The sum of its layers is kept in
float32, as autocast keeps it, or is rounded to bfloat16 after each addition. Printed: the relative distance of the
logits and of the gradient from those of float32, in multiples of 2**-8, the spacing of bfloat16 near 1.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jamp
from benchmarks.models import Shape, cross_entropy, logits, made

DEPTHS = (6, 12, 24, 48, 96)
STREAMS = {"float32, as autocast keeps it": jnp.float32, "bfloat16": jnp.bfloat16}


def results(fun: Any, params: Any, batch: Any) -> tuple[Any, Any]:
    """The logits, and the gradient of the cross entropy."""

    def loss(params: Any) -> Any:
        found = fun(params, batch[0])
        return cross_entropy(found, batch[1]), found

    return jax.jit(jax.grad(loss, has_aux=True))(params)[::-1]


def distance(found: Any, true: Any) -> float:
    difference = optax.tree.norm(optax.tree.sub(found, true)) / optax.tree.norm(true)
    return float(difference) * 2**8


if __name__ == "__main__":
    print("| layers | " + " | ".join(f"{what}, {name}" for name in STREAMS for what in ("logits", "gradient")) + " |")
    print("|---" * (1 + 2 * len(STREAMS)) + "|")
    for layers in DEPTHS:
        shape = Shape(layers, 128, 2, 512, 64, scanned=True)
        params, batch = made(shape, 4)
        true = results(partial(logits, shape=shape), params, batch)
        in_stream = [jamp.autocast(partial(logits, shape=shape, stream=x), jnp.bfloat16) for x in STREAMS.values()]
        found = [x for fun in in_stream for x in map(distance, results(fun, params, batch), true)]
        print(f"| {layers} | " + " | ".join(f"{x:.2f}" for x in found) + " |", flush=True)
