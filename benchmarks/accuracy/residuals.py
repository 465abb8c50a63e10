"""What residuals in 8 bits do to gradients, and to a language model that is trained with them. Paired seeds.

    python -m benchmarks.accuracy.residuals --json docs/benchmarks/residuals.json

Gradients: of each parameter, the error is the size of the difference to float32's gradient, divided by the size of
that. "ratio" is the error of autocast to bfloat16 with residuals in int8, divided by the error without: the largest of
all parameters, and the median. The weights are random. With "outliers", one feature of every normalised activation is
so many times larger than the others. "GPT on text" is the model that is trained below, after 512 steps in float32.

Training: the model and the text of `benchmarks.accuracy.text_model`, in fewer steps. Decided before the first run:
seeds 0 to 5, the loss of 256 windows that are held out, and a margin of 0.01 nats a byte. 8 bits are equivalent if the
90 % interval of the mean difference to bfloat16's loss (Student's t, five degrees of freedom) lies within the margin.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jamp
from benchmarks import mixture, models
from benchmarks.accuracy import text_model
from benchmarks.accuracy.intervals import show_intervals
from benchmarks.accuracy.windows import spread, windows
from benchmarks.memory import convolutions, llama
from benchmarks.models import Shape, updated
from benchmarks.record import Rows, parser, processor, record, show, write

BF16, I8 = jnp.bfloat16, jnp.int8
MARGIN, SEEDS = 0.01, range(6)
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
    pictures = jax.random.normal(key, (4, 32, 32, 3)), jax.random.normal(jax.random.key(1), (4, 32, 32, 3))
    yield "U-Net", convolutions.unet_loss, convolutions.unet_params(), pictures
    yield on_text(512)


def on_text(steps: int) -> tuple[str, Any, Any, Any]:
    """The language model after some steps on real text, and a batch of it."""
    shape, (data, held_out) = STUDY.shape, text_model.text()
    loss, tx = partial(models.loss_fn, shape=shape), optax.adamw(1e-3, b2=0.95)
    pair = lambda x: (x[:, :-1], x[:, 1:])
    params = text_model.init(jax.random.key(0), shape)

    def step(carry: Any, key: jax.Array) -> tuple[Any, None]:
        params, state = carry
        starts = jax.random.randint(key, (8,), 0, len(data) - shape.tokens)
        return updated(tx, jax.grad(loss)(params, pair(windows(data, starts, shape.tokens))), params, state), None

    keys = jax.random.split(jax.random.key(1), steps)
    params, _ = jax.jit(lambda x: jax.lax.scan(step, x, keys)[0])((params, tx.init(params)))
    return "GPT on text", loss, params, pair(spread(held_out, 16, shape.tokens))


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
    for seed in list(SEEDS)[:1] if options.quick else SEEDS:
        for name in WAYS:
            if not any(row["name"] == name and row["seed"] == seed for row in found["rows"]):
                found["rows"].append(text_model.train(study, name, seed, data, held_out))
                write(options.json, found)
                show(found["rows"][-1])
    if options.json:
        show_intervals(found["rows"], "bfloat16", label="name")
