"""How much a residual stream in bfloat16 costs in digits, over depth.

    python -m benchmarks.accuracy.residual_stream

A transformer of GPT-2's layers (width 128, 64 tokens, random parameters), with its products in bfloat16. The sum of its
layers is kept in float32, as autocast keeps it, or is rounded to bfloat16 after each addition, as in a model written
with `dtype=bfloat16`. Printed: the distance of the logits and of the gradient from those of float32, relative, in
multiples of 2**-8, the spacing of bfloat16 near 1.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jamp
from benchmarks.models import Shape, attention, cross_entropy, dense, layer_norm, made

DEPTHS = (6, 12, 24, 48, 96)
STREAMS = {"float32, as autocast keeps it": jnp.float32, "bfloat16": jnp.bfloat16}


def logits(params: Any, tokens: Any, shape: Shape, stream: Any) -> jax.Array:
    def block(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        x = (x + attention(p, layer_norm(p["norm1"], x, None), shape, None)).astype(stream)
        hidden = jax.nn.gelu(dense(p["up"], layer_norm(p["norm2"], x, None), None))
        return (x + dense(p["down"], hidden, None)).astype(stream), None

    x = (params["embed"][tokens] + params["positions"]).astype(stream)
    x, _ = jax.lax.scan(block, x, params["blocks"])
    return layer_norm(params["norm"], x, None) @ params["embed"].T


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
        true = results(partial(logits, shape=shape, stream=jnp.float32), params, batch)
        found = [
            results(jamp.autocast(partial(logits, shape=shape, stream=stream), jnp.bfloat16), params, batch)
            for stream in STREAMS.values()
        ]
        cells = [f"{distance(x, t):.2f}" for one in found for x, t in zip(one, true, strict=True)]
        print(f"| {layers} | " + " | ".join(cells) + " |", flush=True)
