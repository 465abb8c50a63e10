"""bfloat16 parameters without masters: where training ends.

    python -m benchmarks.rounding --json docs/benchmarks/rounding.json       about half an hour on one core
    python -m benchmarks.rounding --optimizers --json docs/benchmarks/rounding_optimizers.json   about 15 minutes

Three tasks, five seeds, the same initial parameters and batches for each way to keep the parameters: the language model
and the digits of `benchmarks.accuracy`, and the language model fine-tuned on other text with a learning rate so low
that most updates are below half the spacing of bfloat16. All ways but float32 compute in bfloat16 under autocast, and
have bfloat16 gradients. The loss is that of data that are never trained on. With --optimizers: the language model with
six optimizers, two seeds.
"""

import argparse
import dataclasses
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jamp
from benchmarks.accuracy_setups import FLOAT32
from benchmarks.accuracy_tasks import CONTEXT, Task, digits, language_model
from benchmarks.record import record, write

SEEDS = 5
LOW = 3e-5  # the learning rate of fine-tuning


class KahanState(NamedTuple):
    inner_state: Any
    lost: Any  # what the roundings so far have cut off, bfloat16


def kahan(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Rounding to nearest, with what is cut off added to the next update (Zamirai et al., arXiv:2010.06192)."""

    def init(params: Any) -> KahanState:
        return KahanState(inner.init(wide(params)), jax.tree.map(jnp.zeros_like, params))

    def update(grads: Any, state: KahanState, params: Any = None) -> tuple[Any, KahanState]:
        updates, inner_state = inner.update(wide(grads), state.inner_state, wide(params))
        wanted = jax.tree.map(lambda u, lost: u + lost.astype(jnp.float32), updates, state.lost)
        moved = jax.tree.map(lambda p, u: (p + u).astype(p.dtype).astype(jnp.float32) - p, params, wanted)
        return moved, KahanState(inner_state, jax.tree.map(lambda u, m: (u - m).astype(jnp.bfloat16), wanted, moved))

    return optax.GradientTransformation(init, update)


wide = partial(jamp.cast_floating, dtype=jnp.float32)
Wrap = Callable[[optax.GradientTransformation], optax.GradientTransformation]
WAYS: dict[str, tuple[Any, Wrap]] = {
    "float32": (jnp.float32, lambda tx: tx),
    "masters": (jnp.bfloat16, jamp.master_params),
    "rounded to nearest": (jnp.bfloat16, lambda tx: jamp.loss_scaled(tx, jamp.NoOpLossScale())),
    "stochastic": (jnp.bfloat16, jamp.stochastic_rounding),
    "stochastic, bfloat16 state": (jnp.bfloat16, partial(jamp.stochastic_rounding, state_dtype=jnp.bfloat16)),
    "Kahan sums": (jnp.bfloat16, kahan),
}


def fine_tuning(quick: bool) -> tuple[Task, Any]:
    """The language model after training, and other text: the tables of Python's codecs, every tenth file held out."""
    task = language_model(quick)
    files = sorted((Path(os.__file__).parent / "encodings").glob("*.py"))
    read = lambda some: jnp.asarray(np.frombuffer(b"\n".join(file.read_bytes() for file in some), np.uint8))
    train, test = read(file for i, file in enumerate(files) if i % 10), read(files[::10])
    starts = jnp.linspace(0, len(test) - CONTEXT - 1, 4 if quick else 128).astype(jnp.int32)
    held_out = test[starts[:, None] + jnp.arange(CONTEXT + 1)].astype(jnp.int32)
    params = jax.jit(lambda key: trained(task, "float32", task.init(key), key, task.optimizer()))(jax.random.key(99))
    return dataclasses.replace(task, name="fine-tuning", data=train, held_out=held_out), params


def trained(task: Task, way: str, params: Any, key: jax.Array, tx: optax.GradientTransformation) -> Any:
    """The parameters at the end of a run."""
    dtype, wrap = WAYS[way]
    plain = FLOAT32.make_loss(task)
    loss = plain if dtype == jnp.float32 else jamp.autocast(lambda p, batch: plain(wide(p), batch), dtype)
    tx, params = wrap(tx), jamp.cast_floating(params, dtype)

    def step(carry: Any, key: jax.Array) -> tuple[Any, None]:
        params, state = carry
        grads = jax.grad(lambda p: loss(p, task.get_batch(task.data, key))[0])(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    keys = jax.random.split(jax.random.fold_in(key, 2), task.steps)
    return jax.lax.scan(step, (params, tx.init(params)), keys)[0][0]


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(3e-3),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=32),
    "lion": lambda: optax.lion(5e-4),
    "muon": lambda: optax.contrib.muon(5e-3),
    "sgd with momentum": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)),
    "schedule-free adamw": lambda: optax.contrib.schedule_free_adamw(3e-3, warmup_steps=50),
}


def optimizers(quick: bool) -> list[dict[str, Any]]:
    rows, task = [], language_model(quick)
    for name, make in OPTIMIZERS.items():
        for way in ("float32", "rounded to nearest", "stochastic", "stochastic, bfloat16 state"):

            def run(key: jax.Array, make: Any = make, way: str = way) -> Any:
                return FLOAT32.make_loss(task)(wide(trained(task, way, task.init(key), key, make())), task.held_out)[0]

            compiled = jax.jit(run).lower(jax.random.key(0)).compile()
            losses = [float(compiled(jax.random.key(seed))) for seed in range(1 if quick else 2)]
            rows.append({"optimizer": name, "way": way, "losses": losses, "loss": float(np.mean(losses))})
            print("{optimizer:20s} {way:28s} {loss:.4f}  {losses}".format(**rows[-1]), flush=True)
    return rows


def accuracy(quick: bool) -> list[dict[str, Any]]:
    rows = []
    tuned, start = fine_tuning(quick)
    for task in (language_model(quick), digits(quick), tuned):
        tx = optax.adamw(LOW) if task is tuned else task.optimizer()
        for way in WAYS:

            def run(key: jax.Array, task: Task = task, way: str = way, tx: Any = tx) -> Any:
                params = start if task is tuned else task.init(key)
                return FLOAT32.make_loss(task)(wide(trained(task, way, params, key, tx)), task.held_out)

            compiled = jax.jit(run).lower(jax.random.key(0)).compile()
            for seed in range(1 if quick else SEEDS):
                begin = time.perf_counter()
                loss, right = compiled(jax.random.key(seed))
                row = {"task": task.name, "way": way, "seed": seed, "loss": float(loss), "accuracy": float(right)}
                rows.append(row)
                took = time.perf_counter() - begin
                print(
                    "{task:15s} {way:28s} seed {seed}  {loss:.4f}  {accuracy:.4f}".format(**row),
                    f"{took:.0f} s",
                    flush=True,
                )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps and one seed")
    parser.add_argument("--optimizers", action="store_true", help="the language model with six optimizers")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    found = record("benchmarks.rounding", options.quick, "cpu")
    write(options.json, found | {"rows": (optimizers if options.optimizers else accuracy)(options.quick)})
