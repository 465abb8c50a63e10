"""What residuals in 8 bits do to gradients, and to a language model that is trained with them. Paired seeds.

    python -m benchmarks.accuracy.residuals --json docs/benchmarks/residuals.json

Gradients: of each parameter, the error is the size of the difference to float32's gradient, divided by the size of
that. "ratio" is the error of autocast to bfloat16 with residuals in int8, divided by the error without: the largest of
all parameters, and the median. The weights are random. With "outliers", one feature of every normalised activation is
so many times larger than the others. "GPT on text" is the model that is trained below, after 512 steps in float32. Its
"mean of 64" is the error of the mean of the gradients of 64 batches, in which a bias of rounding would stay.

Training: the model and the text of `benchmarks.accuracy.text_model`, in fewer steps; a vision transformer on
handwritten digits of 8 x 8 pixels; and a convolutional network with group norms that takes noise out of parts of two
photographs. Decided before the first run: seeds 0 to 5, the loss of what is held out, and margins of 0.01 nats a byte,
of 0.02 nats a digit, and of 2 % of the squared error. 8 bits are equivalent if the 90 % interval of the mean difference
to bfloat16's loss (Student's t, five degrees of freedom) lies within the margin. The task of photographs was made
smaller after the first run, in bfloat16, because it took too long.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits, load_sample_images

import jamp
from benchmarks import mixture, models
from benchmarks.accuracy import text_model
from benchmarks.accuracy.intervals import show_intervals
from benchmarks.accuracy.text_model import COMPILER_OPTIONS
from benchmarks.accuracy.windows import spread, windows
from benchmarks.memory import convolutions, llama
from benchmarks.models import Shape, updated
from benchmarks.record import Rows, parser, processor, record, show, write

BF16, I8 = jnp.bfloat16, jnp.int8
SEEDS = range(6)
STUDY = replace(text_model.FULL, steps=1024, every=256, judged=256)
WAYS: dict[str, Callable[[Any], Any]] = {
    "bfloat16": lambda loss: jamp.autocast(loss, BF16),
    "int8": lambda loss: jamp.autocast(loss, BF16, residuals=I8),
}
TOKENS = Shape(4, 256, 4, 512, 256, scanned=True)
IMAGES = Shape(4, 256, 4, 10, 64, 4, scanned=True)


def problems(quick: bool) -> Iterator[tuple[str, Any, Any, Any]]:
    """The name, the loss, the parameters and a batch."""
    key = jax.random.key(0)
    for name, module, shape in (("Llama", llama, TOKENS), ("GPT", models, TOKENS), ("ViT", models, IMAGES)):
        yield name, partial(module.loss_fn, shape=shape), module.init(key, shape), models.data(key, shape, 4)
        if quick:
            return
    loose = replace(TOKENS, scanned=False)
    yield (
        "mixture of experts",
        partial(mixture.loss_fn, shape=loose),
        mixture.init(key, loose),
        models.data(key, loose, 4),
    )
    yield on_text(STUDY, 512)
    name, loss, params, batch = on_text(STUDY, 512, batch=1024)
    parts = jax.tree.map(lambda x: x.reshape(64, 16, *x.shape[1:]), batch)
    yield f"{name}, mean of 64", lambda p, b: jax.lax.map(lambda x: loss(p, x), b).mean(), params, parts


def on_text(study: text_model.Study, steps: int, seed: int = 0, batch: int = 16) -> tuple[str, Any, Any, Any]:
    """A language model after some steps on real text, and a batch of it."""
    shape, (data, held_out) = study.shape, text_model.text()
    loss, tx = partial(models.loss_fn, shape=shape), optax.adamw(1e-3, b2=0.95)
    pair = lambda x: (x[:, :-1], x[:, 1:])
    params = text_model.init(jax.random.key(seed), shape)

    def step(carry: Any, key: jax.Array) -> tuple[Any, None]:
        params, state = carry
        starts = jax.random.randint(key, (8,), 0, len(data) - shape.tokens)
        return updated(tx, jax.grad(loss)(params, pair(windows(data, starts, shape.tokens))), params, state), None

    keys = jax.random.split(jax.random.key(seed + 1), steps)
    params, _ = jax.jit(lambda x: jax.lax.scan(step, x, keys)[0])((params, tx.init(params)))
    return "GPT on text", loss, params, pair(spread(held_out, batch, shape.tokens))


def with_outliers(params: Any, size: float) -> Any:
    """The Llama, in which a feature of what its products read is so many times larger, and its weights are smaller."""
    blocks = dict(params["blocks"])
    for norm, readers in {"norm1": "qkv", "norm2": ("gate", "up")}.items():
        blocks[norm] = blocks[norm].at[..., 5].mul(size)
        for name in readers:
            blocks[name] = blocks[name].at[..., 5, :].divide(size)
    return params | {"blocks": blocks}


def errors(loss: Any, params: Any, batch: Any) -> np.ndarray:
    exact = jax.tree.leaves(jax.jit(jax.grad(loss))(params, batch))
    size = lambda x: float(jnp.linalg.norm(x.ravel().astype(jnp.float32)))
    found = [jax.tree.leaves(jax.jit(jax.grad(way(loss)))(params, batch)) for way in WAYS.values()]
    return np.array([[size(x - y) / (size(y) or 1) for x, y in zip(one, exact, strict=True)] for one in found])


def gradients(quick: bool) -> Rows:
    rows: Rows = []
    for name, loss, params, batch in problems(quick):
        cases = {"as made": params}
        if name == "Llama":
            cases |= {f"outliers of {n}": with_outliers(params, n) for n in (10, 30, 100)}
        for case, weights in cases.items():
            without, within = errors(loss, weights, batch)
            ratio = within / np.maximum(without, 1e-12)
            rows.append(
                {
                    "model": name,
                    "weights": case,
                    "bfloat16": float(without.max()),
                    "int8": float(within.max()),
                    "ratio": float(ratio.max()),
                    "parameter": jax.tree_util.keystr(jax.tree.leaves_with_path(weights)[int(ratio.argmax())][0]),
                    "median_ratio": float(np.median(ratio)),
                }
            )
            show(rows[-1])
    return rows


@dataclass(frozen=True)
class Images:
    """A task of images: its name, its loss, and functions of a key that make parameters and a batch."""

    task: str
    loss: Callable[[Any, Any], jax.Array]
    init: Callable[[jax.Array], Any]
    batch: Callable[[jax.Array], Any]
    held_out: Any
    steps: int
    learning_rate: float


def digits() -> Images:
    """1,437 digits to train on, and 360 that are held out."""
    images, labels = load_digits(return_X_y=True)
    pixels = jnp.repeat(jnp.float32(images).reshape(-1, 8, 8, 1) / 8 - 1, 3, -1)
    shape, labels, n = Shape(3, 64, 4, 10, 16, 2, scanned=True), jnp.int32(labels), 1437

    def batch(key: jax.Array) -> Any:
        chosen = jax.random.randint(key, (64,), 0, n)
        return pixels[chosen], labels[chosen]

    loss = partial(models.loss_fn, shape=shape)
    return Images("digits", loss, partial(models.init, shape=shape), batch, (pixels[n:], labels[n:]), 512, 1e-3)


def photographs() -> Images:
    """Parts of 16 x 16 pixels of the left three quarters of two photographs to train on; of the rest, held out."""
    photos = jnp.float32(np.stack(load_sample_images().images)) / 127.5 - 1
    edge = photos.shape[2] * 3 // 4

    def parts(key: jax.Array, low: int, high: int, n: int) -> Any:
        which, row, column, noise = jax.random.split(key, 4)
        at = jax.random.randint(row, (n,), 0, photos.shape[1] - 16), jax.random.randint(column, (n,), low, high - 16)
        chosen = jax.random.randint(which, (n,), 0, len(photos))
        clean = jax.vmap(lambda i, y, x: jax.lax.dynamic_slice(photos, (i, y, x, 0), (1, 16, 16, 3))[0])(chosen, *at)
        return clean, clean + 0.5 * jax.random.normal(noise, clean.shape)

    def init(key: jax.Array) -> Any:
        weight = lambda key, *size: jax.random.normal(key, size) / np.prod(size[:-1]) ** 0.5
        keys = jax.random.split(key, 8)
        norm = lambda: {"scale": jnp.ones(32), "bias": jnp.zeros(32)}
        block = lambda i: {
            "norm1": norm(),
            "conv1": weight(keys[i], 3, 3, 32, 32),
            "norm2": norm(),
            "conv2": weight(keys[i + 1], 3, 3, 32, 32) / 4,
        }
        ends = {"first": weight(keys[6], 3, 3, 3, 32), "last": weight(keys[7], 3, 3, 32, 3) / 4}
        return ends | {"blocks": [block(i) for i in (0, 2, 4)]}

    def loss(params: Any, batch: Any) -> jax.Array:
        clean, noisy = batch
        x = models.conv(params["first"], noisy, 1)
        for p in params["blocks"]:
            x = convolutions.residual(p, x, 2, None)
        return jnp.mean((noisy + models.conv(params["last"], jax.nn.silu(x), 1) - clean) ** 2)

    held_out = parts(jax.random.key(9), edge, photos.shape[2], 128)
    return Images("photographs", loss, init, lambda key: parts(key, 0, edge, 8), held_out, 128, 2e-3)


def train_on_images(task: Images, name: str, seed: int, steps: int) -> dict[str, Any]:
    loss_fn, tx = WAYS[name](task.loss), optax.adamw(optax.cosine_decay_schedule(task.learning_rate, steps), b2=0.95)

    def step(carry: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        params, state = carry
        value, grads = jax.value_and_grad(loss_fn)(params, task.batch(key))
        return updated(tx, grads, params, state), value

    init_key, key = jax.random.split(jax.random.key(seed))
    params = task.init(init_key)
    run = jax.jit(lambda x: jax.lax.scan(step, x, jax.random.split(key, steps)), compiler_options=COMPILER_OPTIONS)
    (params, _), losses = run((params, tx.init(params)))
    held_out = float(jax.jit(WAYS["bfloat16"](task.loss))(params, task.held_out))
    return {"task": task.task, "name": name, "seed": seed, "loss": held_out, "train_loss": float(losses[-32:].mean())}


if __name__ == "__main__":
    options = parser("benchmarks.accuracy.residuals", __doc__).parse_args()
    text_model.FORMATS |= {name: (way, jamp.NoOpLossScale()) for name, way in WAYS.items()}
    study = replace(text_model.QUICK, steps=4) if options.quick else STUDY
    before = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    found = before or record("benchmarks.accuracy.residuals", options.quick, jax.devices()[0].device_kind)
    if "gradients" not in found:
        found |= {"processor": processor(), "gradients": gradients(options.quick), "rows": []}
        write(options.json, found)
    data, held_out = text_model.text()
    rows = found["rows"]
    is_text = lambda row: "task" not in row
    for seed in list(SEEDS)[:1] if options.quick else SEEDS:
        for name in WAYS:
            if not any(is_text(row) and (row["name"], row["seed"]) == (name, seed) for row in rows):
                rows.append(text_model.train(study, name, seed, data, held_out))
                write(options.json, found)
                show(rows[-1])
    for task in (digits(), photographs()):
        for seed in list(SEEDS)[:1] if options.quick else SEEDS:
            for name in WAYS:
                if not any(row.get("task") == task.task and (row["name"], row["seed"]) == (name, seed) for row in rows):
                    rows.append(train_on_images(task, name, seed, 2 if options.quick else task.steps))
                    write(options.json, found)
                    show(rows[-1])
    if options.json:
        show_intervals(found["rows"], "bfloat16", label="name")
