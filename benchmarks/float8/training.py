"""Training in float8: where the loss is after the first hundreds of steps, beside float32 and bfloat16.

    python -m benchmarks.float8.training --json docs/benchmarks/float8_training.json   half an hour, with qwix

A decoder of 1.45 M parameters reads Python's standard library for 300 steps of 1,024 bytes. It has the form of a
larger one, of 8 layers of 768, that ended 0.047 nats a byte above bfloat16 after 300 steps in one run on an H200
(float32 2.269, bfloat16 2.285, float8 2.332). A run that the file has already is not made again.

Decided before the first run: the ways in `WAYS`, seeds 0 to 2, 300 steps, and `MARGIN`. The seed decides the initial
parameters and the batches. The loss is that of held-out windows, computed in float32 whatever the way trained, as in
the run on the H200. The difference to bfloat16 is taken seed by seed, at each of `STEPS`. A way is as good as bfloat16
if the 90 % interval of the mean difference at the end lies within plus and minus the margin, and worse if the whole
interval lies above 0. Otherwise three seeds do not tell. `OTHERS` run after them on the same seeds.
"""

import importlib.util
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import Array

import jamp
from benchmarks.accuracy.intervals import T, interval
from benchmarks.accuracy.text_model import COMPILER_OPTIONS, text
from benchmarks.accuracy.windows import spread, windows
from benchmarks.models import attend_written_out, cross_entropy, train_step
from benchmarks.record import Rows, parser, record, show, write
from jamp._products.formats import scaled

MARGIN = 0.02  # nats a byte
SEEDS = (0, 1, 2)
STEPS = (25, 50, 100, 200, 300)
LAYERS, WIDTH, HEADS, TOKENS, BATCH = 3, 192, 3, 128, 8
JUDGED = 128  # windows
LEARNING_RATE, WARM_UP = 2e-3, 60


class Block(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        dense = partial(linear, dtype=self.dtype)
        qkv = dense(3 * WIDTH, "qkv")(normed(x)).reshape(*x.shape[:2], 3 * HEADS, -1)
        q, k, v = jnp.split(qkv, 3, 2)
        attended = attend_written_out(q, k, v, causal=True)
        x = x + dense(WIDTH, "out", 0.3)(attended.reshape(x.shape))
        return x + dense(WIDTH, "down", 0.3)(nn.gelu(dense(4 * WIDTH, "up")(normed(x))))


class Decoder(nn.Module):
    """With a dtype, its products are computed in it, by hand, and all else in float32."""

    dtype: Any = None

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        small = nn.initializers.normal(0.02)
        x = nn.Embed(256, WIDTH, embedding_init=small)(tokens) + self.param("positions", small, (TOKENS, WIDTH))
        for i in range(LAYERS):
            x = Block(self.dtype, name=f"layer{i}")(x)
        return linear(256, "head", dtype=self.dtype)(normed(x))


def linear(size: int, name: str, deviation: float = 1.0, dtype: Any = None) -> nn.Dense:
    kernel_init = nn.initializers.variance_scaling(deviation**2, "fan_in", "normal")
    return nn.Dense(size, use_bias=False, dtype=dtype, kernel_init=kernel_init, name=name)


def normed(x: Array) -> Array:
    return nn.RMSNorm(epsilon=1e-6)(x)


def loss(params: Any, tokens: Array, model: nn.Module | None = None) -> Array:
    logits: Any = (model or Decoder()).apply(params, tokens[:, :-1])
    return cross_entropy(logits, tokens[:, 1:])


def qwix_loss() -> Callable[[Any, Array], Array]:
    """Qwix's float8 in a bfloat16 model, for the products that are 8 bit in `jamp.Float8()`, with its scales."""
    import qwix

    dtypes = {"weight_qtype": jnp.float8_e4m3fn, "act_qtype": jnp.float8_e4m3fn, "bwd_qtype": jnp.float8_e5m2}
    rule = qwix.QtRule(module_path=".*/(qkv|out|up|down)", disable_channelwise_axes=True, **dtypes)
    return partial(loss, model=qwix.quantize_model(Decoder(jnp.bfloat16), qwix.QtProvider([rule])))


def under_autocast(compute_dtype: Any, **options: Any) -> Any:
    return lambda: jamp.autocast(loss, compute_dtype, **options)


Way = Callable[[], Callable[[Any, Array], Array]]
WAYS: dict[str, Way] = {
    "float32": lambda: loss,
    "bfloat16": under_autocast(jnp.bfloat16),
    "float8": under_autocast(jamp.Float8()),
    "float8, head and attention too": under_autocast(jamp.Float8(min_size=16), rules={"dot_general": "compute"}),
    "Qwix, one scale for each tensor": qwix_loss,
}
OTHERS: dict[str, Way] = {
    "int8": under_autocast(jamp.Int8()),
    "mxfp8": under_autocast(jamp.MXFP8()),
    "cast to float8 without scales": under_autocast(jamp.Float8()),
    "float8, E4M3 gradients": under_autocast(jamp.Float8(backward=jnp.float8_e4m3fn)),
}
ALL = WAYS | OTHERS


def unscaled(x: Any, dtype: Any, axes: Any = None) -> Any:
    """A plain cast to float8, in place of `quantize`: every scale is 1."""
    x = jax.lax.stop_gradient(x).astype(jnp.float32)
    ones = jnp.sign(1 + jnp.max(jnp.abs(x), axes, keepdims=axes is not None))
    return scaled.Encoded(x.astype(dtype), ones)


quantized_by_jamp = scaled.quantize
PATCHES = {"cast to float8 without scales": unscaled}


def optimizer() -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, WARM_UP, STEPS[-1], LEARNING_RATE / 10)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1))


def train(way: str, seed: int, data: Array, held_out: Array, steps: tuple[int, ...]) -> dict[str, Any]:
    loss_of_way, tx = ALL[way](), optimizer()

    @partial(jax.jit, compiler_options=COMPILER_OPTIONS)
    def step(carry: Any, key: Array) -> Any:
        starts = jax.random.randint(key, (BATCH,), 0, len(data) - TOKENS)
        return train_step(loss_of_way, tx, False, carry, windows(data, starts, TOKENS))

    @partial(jax.jit, compiler_options=COMPILER_OPTIONS, static_argnums=0)
    def judge(loss: Callable[[Any, Array], Array], params: Any) -> Array:
        return jax.lax.map(lambda x: loss(params, x), held_out.reshape(-1, 16, TOKENS + 1)).mean()

    init_key, batches = jax.random.split(jax.random.key(seed))
    params = jax.jit(Decoder().init)(init_key, held_out[:1, :-1])
    carry, curve, start = (params, tx.init(params)), [], time.process_time()
    for i, key in enumerate(jax.random.split(batches, steps[-1]), 1):
        carry = step(carry, key)
        if i in steps:
            curve.append(float(judge(loss, carry[0])))
            print(f"{way} {seed}: step {i}, held-out loss {curve[-1]:.4f}", flush=True)
    return {
        "way": way,
        "seed": seed,
        "loss": curve[-1],
        "as_trained": float(judge(loss_of_way, carry[0])),  # the same in the arithmetic of the way
        "steps": list(steps),
        "held_out_loss": [round(x, 5) for x in curve],
        "minutes": round((time.process_time() - start) / 60, 1),  # of this process alone: others may run beside it
    }


def training(file: Path | None, quick: bool) -> None:
    found: dict[str, Any] = record("benchmarks.float8.training", quick, "cpu", ("qwix",))
    found |= {"margin": MARGIN, "rows": []}
    if file and file.exists():
        found = json.loads(file.read_text())
    data, test = text()
    held_out = spread(test, 16 if quick else JUDGED, TOKENS)
    seeds = SEEDS[:1] if quick else SEEDS
    runs = [(way, seed) for seed in seeds for way in WAYS] + [(way, seed) for way in OTHERS for seed in seeds]
    for way, seed in runs:
        is_known = any(row["way"] == way and row["seed"] == seed for row in found["rows"])
        if is_known or (way.startswith("Qwix") and not importlib.util.find_spec("qwix")):
            continue
        with mock.patch.object(scaled, "quantize", PATCHES.get(way, quantized_by_jamp)):
            found["rows"].append(train(way, seed, data, held_out, (1, 2) if quick else STEPS))
        show(found["rows"][-1])
        write(file, found)
    show_differences(found["rows"])


def show_differences(rows: Rows) -> None:
    """Print a table of the mean difference to bfloat16 after each number of steps, with its interval at the end."""
    curves: dict[str, dict[int, np.ndarray]] = {}
    for row in rows:
        curves.setdefault(row["way"], {})[row["seed"]] = np.array([*row["held_out_loss"][:-1], row["loss"]])
    base = curves.pop("bfloat16")
    print("| way |", " | ".join(f"step {n}" for n in rows[0]["steps"]), "| 90 % interval at the end |")
    for way, found in curves.items():
        differences = np.array([curve - base[seed] for seed, curve in found.items() if seed in base])
        cells = [way, *(f"{x:+.4f}" for x in differences.mean(0))]
        if len(differences) in T:
            cells.append("{:+.4f} to {:+.4f}".format(*interval(differences[:, -1])))
        print("|", " | ".join(cells), "|")


if __name__ == "__main__":
    options = parser("benchmarks.float8.training", __doc__).parse_args()
    training(options.json, options.quick)
