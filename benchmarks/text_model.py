"""A text model of GPT-2's architecture, 5 M parameters: trained in float32 and in float16 under autocast, four seeds.

    export XLA_FLAGS=--xla_cpu_multi_thread_eigen=false  # one core a run
    python -m benchmarks.text_model --processes 2 --json docs/benchmarks/text_model.json
    python -m benchmarks.text_model --from docs/benchmarks/text_model.json --page docs/benchmarks/accuracy.md \\
        --plot docs/images/text_model.png

The model is the one that `benchmarks.gpu` times, smaller. It learns the next byte of the source code of Python's
standard library, without its tests, which every machine with Python has. Every tenth file is held out. The two runs of
a seed have the same parameters, batches and optimizer; float16 adds `jamp.autocast` and `jamp.loss_scaled` with their
defaults. The first command trains for about 15 minutes a run on one core, eight runs in all.
"""

import argparse
import json
import sysconfig
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jamp
from benchmarks import models
from benchmarks.accuracy import COMPILER_OPTIONS
from benchmarks.accuracy_overflow import interval
from benchmarks.accuracy_plot import SETTINGS
from benchmarks.accuracy_report import last, select
from benchmarks.markdown import fill, origin, table
from benchmarks.record import record

SHAPE = models.Shape(layers=6, width=256, heads=4, classes=256, tokens=256, scanned=True)
BATCH, STEPS, EVERY = 8, 600, 25
SEEDS = 4
COLORS = {"float32": "#8c8c8c", "float16": "#d55e00"}


def text() -> tuple[jax.Array, jax.Array]:
    """Bytes to train on and bytes held out, u8[n] each."""
    library = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "test", "tests", "idle_test"}
    files = sorted(file for file in library.rglob("*.py") if not left_out & set(file.parts))
    read = lambda some: jnp.asarray(np.frombuffer(b"\n".join(file.read_bytes() for file in some), np.uint8))
    return read(file for i, file in enumerate(files) if i % 10), read(files[::10])


def windows(data: jax.Array, starts: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
    found = data[starts[:, None] + jnp.arange(tokens + 1)].astype(jnp.int32)
    return found[:, :-1], found[:, 1:]


def init(key: jax.Array, shape: models.Shape) -> Any:
    """GPT-2's: what is added to the residual stream starts smaller, the more layers add to it."""
    params = models.init(key, shape)
    for name in ("out", "down"):
        params["blocks"][name]["w"] *= (2 * shape.layers) ** -0.5
    return params


def train(name: str, seed: int, shape: models.Shape, steps: int, every: int) -> dict[str, Any]:
    """One run: the losses of training, and those on held-out text after every so many steps."""
    data, held_out = text()
    params_key, batches_key = jax.random.split(jax.random.key(seed))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, steps // 20, steps)
    tx = jamp.loss_scaled(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1)),
        jamp.DynamicLossScale() if name == "float16" else jamp.NoOpLossScale(),
    )
    loss_fn = partial(models.loss_fn, shape=shape)
    loss_fn = jamp.autocast(loss_fn, jnp.float16) if name == "float16" else loss_fn

    def step(carry: Any, key: jax.Array, data: jax.Array) -> tuple[Any, Any]:
        params, opt_state = carry
        scale = jamp.get_loss_scale(opt_state)
        starts = jax.random.randint(key, (BATCH,), 0, len(data) - shape.tokens)
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, windows(data, starts, shape.tokens))
        updates, opt_state = tx.update(grads, opt_state, params)
        carry = optax.apply_updates(params, updates), opt_state
        return carry, (loss, jnp.log2(scale), jamp.get_grads_finite(opt_state))

    @partial(jax.jit, donate_argnums=0, compiler_options=COMPILER_OPTIONS)
    def advance(carry: Any, keys: jax.Array, data: jax.Array) -> tuple[Any, Any]:
        return jax.lax.scan(partial(step, data=data), carry, keys)

    @partial(jax.jit, compiler_options=COMPILER_OPTIONS)
    def evaluate(params: Any, batches: Any) -> jax.Array:
        return jax.lax.map(lambda batch: loss_fn(params, batch), batches).mean()

    spread = jnp.linspace(0, len(held_out) - shape.tokens - 1, 8 * BATCH).astype(jnp.int32)
    batches = jax.tree.map(lambda x: x.reshape(8, BATCH, -1), windows(held_out, spread, shape.tokens))
    params = init(params_key, shape)
    carry: Any = params, tx.init(params)
    row: dict[str, Any] = {"name": name, "seed": seed, "millions": sum(x.size for x in jax.tree.leaves(params)) / 1e6}
    row |= {"megabytes": len(data) / 1e6, "steps": [], "held_out_loss": [], "train_loss": [], "log2_scale": []}
    row |= {"skipped": []}
    for i, keys in enumerate(jax.random.split(batches_key, steps).reshape(-1, every)):
        carry, (losses, scales, finite) = jax.block_until_ready(advance(carry, keys, data))
        row["steps"].append((i + 1) * every)
        row["held_out_loss"].append(round(float(evaluate(carry[0], batches)), 5))
        row["train_loss"].append(round(float(losses.mean()), 5))
        row["log2_scale"].append(float(scales[-1]))
        row["skipped"] += (i * every + np.flatnonzero(~finite)).tolist()
        measured = (f"{key} {row[key][-1]:g}" for key in ("steps", "train_loss", "held_out_loss"))
        print(name, "seed", seed, *measured, flush=True)
    return row


def section(found: dict[str, Any]) -> str:
    head = ["seed", "float32's held-out loss", "float16's", "difference", "steps skipped", "final loss scale"]
    pairs = list(zip(*(select(found["rows"], name=name) for name in COLORS), strict=True))
    body = [
        [
            str(base["seed"]),
            f"{base['held_out_loss'][-1]:.4f}",
            f"{half['held_out_loss'][-1]:.4f}",
            f"{half['held_out_loss'][-1] - base['held_out_loss'][-1]:+.4f}",
            str(len(half["skipped"])),
            f"{2 ** half['log2_scale'][-1]:.0f}",
        ]
        for base, half in pairs
    ]
    base, half = (last(select(found["rows"], name=name), "held_out_loss") for name in COLORS)
    low, high = interval(half - base)
    after = (
        f"Nats a byte. Mean: float32 {base.mean():.4f}, float16 {half.mean():.4f}. The mean difference is "
        f"{np.mean(half - base):+.4f}, with a 90 % interval of {low:+.4f} to {high:+.4f}. Float32's seeds are up to "
        f"{np.ptp(base):.4f} apart."
    )
    return f"{table(head, body)}\n\n{after}\n\n{origin(found)}"


def draw(found: dict[str, Any], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    whole, end = figure.subplots(1, 2)
    for axes, first, title in ((whole, 0, "the whole run"), (end, len(found["rows"][0]["steps"]) // 2, "second half")):
        for row in found["rows"]:
            label = row["name"] if row["seed"] == found["rows"][0]["seed"] else None
            style = {"linewidth": 3} if row["name"] == "float32" else {"linewidth": 1.2}
            style |= {"color": COLORS[row["name"]], "label": label}
            axes.plot(row["steps"][first:], row["held_out_loss"][first:], **style)
        axes.set(title=title, xlabel="step", ylabel="held-out loss (nats a byte)")
        axes.grid(alpha=0.25)
    whole.legend(frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, **SETTINGS)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.text_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, a few steps: does it run at all")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="so many runs beside each other")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="given", help="results that are there: train nothing")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table between the marks of this page")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the picture there")
    options = parser.parse_args()
    if options.given:
        found = json.loads(options.given.read_text())
    else:
        found = record("benchmarks.text_model", options.quick, jax.devices()[0].device_kind)
        shape = replace(SHAPE, layers=1, width=32, heads=2, tokens=16) if options.quick else SHAPE
        steps, every = (20, 10) if options.quick else (STEPS, EVERY)
        runs = [(name, seed) for seed in range(2 if options.quick else SEEDS) for name in COLORS]
        with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
            found["rows"] = list(
                pool.map(partial(train, shape=shape, steps=steps, every=every), *zip(*runs, strict=True))
            )
        if options.json:
            options.json.write_text(json.dumps(found).replace('{"name"', '\n{"name"') + "\n")
    print(section(found))
    if options.page:
        options.page.write_text(fill(options.page.read_text(), "text-model", section(found)))
    if options.plot:
        draw(found, options.plot)


if __name__ == "__main__":
    main()
