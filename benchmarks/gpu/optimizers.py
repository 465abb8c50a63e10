"""AdamW's step at 537 M parameters, in every format of its parameters and moments."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jamp
from benchmarks.gpu.measure import Send, Way, measure
from benchmarks.models import updated
from benchmarks.step import parameters

CLIP = optax.clip_by_global_norm(1.0)
# The first two are the baseline and its repetition.
WAYS = parameters.WAYS | {
    "bfloat16 to nearest": (jnp.bfloat16, lambda tx: tx),
    "loss_scaled": (jnp.float32, jamp.loss_scaled),
    "clip": (jnp.float32, lambda tx: optax.chain(CLIP, tx)),
    "loss_scaled(clip)": (jnp.float32, lambda tx: jamp.loss_scaled(optax.chain(CLIP, tx))),
    "loss_scaled(split masters, 8-bit state)": (
        jnp.bfloat16,
        lambda tx: jamp.loss_scaled(jamp.master_params(jamp.quantized_state(tx), split=True)),
    ),
}


def optimizers(quick: bool, send: Send) -> None:
    leaves, width = (2, 128) if quick else (8, 8192)
    ways = []
    for name, (dtype, wrap) in WAYS.items():
        tx = wrap(parameters.ADAMW)
        step = lambda carry, grads, tx=tx: updated(tx, grads, *carry)
        ways.append(Way(name, step, partial(arrays, tx, dtype, leaves, width)))
    measure({"optimizer": "adamw", "millions": leaves * width**2 / 1e6}, ways, quick, send, calls=10)


def arrays(tx: optax.GradientTransformation, dtype: Any, leaves: int, width: int) -> Any:
    """Parameters and state, and gradients of the parameters' dtype."""
    random = jax.random.normal(jax.random.key(0), (width, width))
    params = {f"w{i}": (0.02 * (1 + i / leaves) * random).astype(dtype) for i in range(leaves)}
    grads = jax.tree.map(lambda x: 0.01 * x + jnp.asarray(1e-4, x.dtype), params)
    return (params, tx.init(params)), (grads,)
