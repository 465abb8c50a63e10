"""Does training in 16 bit end where float32 ends? Two tasks, several seeds, every way to compute.

    XLA_FLAGS=--xla_cpu_multi_thread_eigen=false taskset -c 1 python -m benchmarks.accuracy --json FILE
    python -m benchmarks.accuracy --from FILE --page docs/benchmarks/accuracy.md --plot docs/images

The first trains, on one core for about half an hour, and writes its results after each configuration: started again,
it goes on. The second makes tables and pictures of results that are there.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jamp
import jamp.debug
from benchmarks.accuracy_report import sections, select, write_page
from benchmarks.accuracy_setups import BAD_STARTS, FLOAT32, NONE, SETUPS, SMALLER_BATCHES, STARTS, Setup
from benchmarks.accuracy_tasks import Loss, Task, digits, language_model
from benchmarks.record import record

Rows = list[dict[str, Any]]
SEEDS = 5
MEASURED = ("loss", "held_out_loss", "accuracy", "lost_unscaled", "lost_scaled", "error_scaled")
# Or XLA may leave out a rounding to 16 bit that is followed by a cast back.
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}


def make_programs(task: Task, setup: Setup) -> tuple[Any, Callable[..., Any], Callable[..., Any]]:
    """The optimizer; a function that takes a step for each of some keys; and one that measures where this led."""
    tx = jamp.loss_scaled(task.optimizer(), setup.loss_scale)
    divisor = task.micro_batches if setup.micro_batches is None else setup.micro_batches

    def divided(make: Setup) -> Loss:
        loss_fn = make.make_loss(task)

        def of_micro_batch(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
            loss, _ = loss_fn(params, batch)
            return loss / divisor, loss

        return of_micro_batch

    own, exact = divided(setup), divided(FLOAT32)

    def step(carry: Any, key: jax.Array, data: Any) -> tuple[Any, Any]:
        params, opt_state = carry
        scale = jamp.get_loss_scale(opt_state)
        (_, loss), grads = jamp.value_and_grad(own, opt_state, has_aux=True)(params, task.get_batch(data, key))
        # One micro-batch stands for all of them: their sum, in float32, is as large as the undivided gradient.
        grads = jax.tree.map(lambda g: g * divisor, grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        out = loss, jnp.log2(scale), jamp.get_grads_finite(opt_state)
        return (optax.apply_updates(params, updates), opt_state), out

    def train(params: Any, opt_state: Any, data: Any, keys: jax.Array) -> tuple[Any, Any]:
        return jax.lax.scan(lambda carry, key: step(carry, key, data), (params, opt_state), keys)

    def evaluate(params: Any, opt_state: Any, data: Any, judged: Any, held_out: Any, key: jax.Array) -> dict[str, Any]:
        loss_fn, batch = setup.make_loss(task), task.get_batch(data, key)
        held_out_loss, accuracy = loss_fn(params, held_out)
        loss = held_out_loss if judged is None else loss_fn(params, judged)[0]
        found = {"loss": loss, "held_out_loss": held_out_loss, "accuracy": accuracy}
        true = jax.grad(exact, has_aux=True)(params, batch)[0]
        for name, state in (("unscaled", NONE.init()), ("scaled", opt_state)):
            grads = jamp.grad(own, state, has_aux=True)(params, batch)[0]
            found |= {f"{key}_{name}": x for key, x in _compare(grads, true).items()}
        return found | _report(true, opt_state)

    return tx, *(jax.jit(fun, compiler_options=COMPILER_OPTIONS) for fun in (train, evaluate))


def _compare(grads: Any, true: Any) -> dict[str, jax.Array]:
    """The share of gradients that are 0 and should not be, and the relative error of all together."""
    total = sum(jnp.sum(t != 0) for t in jax.tree.leaves(true))
    lost = sum(jnp.sum((g == 0) & (t != 0)) for g, t in zip(*map(jax.tree.leaves, (grads, true)), strict=True))
    error = optax.global_norm(jax.tree.map(jnp.subtract, grads, true)) / optax.global_norm(true)
    return {"lost": lost / total, "error": error}


def _report(true: Any, state: Any) -> dict[str, jax.Array]:
    """Shares of the parameters' float32 gradients that float16 would round to 0 or to a subnormal."""
    report = jamp.debug.underflow_report(true, state)
    weights = jnp.stack([jnp.sum(t != 0) for t in jax.tree.leaves(true)]).astype(jnp.float32)
    names = ("zero_unscaled", "subnormal_unscaled", "zero_scaled", "subnormal_scaled")
    return {name: jnp.vdot(getattr(report, name), weights) / weights.sum() for name in names}


def run(task: Task, setup: Setup, seeds: int) -> Rows:
    """Train from every start and seed; the seed decides the initial parameters and the batches."""
    tx, train, evaluate = make_programs(task, setup)
    rows = []
    for start in setup.starts:
        for seed in range(seeds):
            init_key, key = jax.random.split(jax.random.key(seed))
            params = task.init(init_key)
            opt_state = tx.init(params)
            if STARTS[start]:
                opt_state = jamp.set_loss_scale(opt_state, STARTS[start])
            about = {
                "task": task.name,
                "setup": setup.name,
                "start": start,
                "seed": seed,
                "micro_batches": setup.micro_batches or task.micro_batches,
                "steps": list(range(task.every, task.steps + 1, task.every)),
            }
            rows.append(about | _train(task, train, evaluate, (params, opt_state), key))
            print(_line(rows[-1]), flush=True)
    return rows


def _train(task: Task, train: Any, evaluate: Any, carry: Any, key: jax.Array) -> dict[str, Any]:
    history, curve, seconds = [], [], []
    for i, keys in enumerate(jax.random.split(key, task.steps).reshape(-1, task.every)):
        start = time.process_time()  # of this process alone: others may run on the machine
        carry, out = jax.block_until_ready(train(*carry, task.data, keys))
        seconds.append((time.process_time() - start) / task.every)
        history.append(out)
        probe = jax.random.fold_in(key, i)
        curve.append(jax.device_get(evaluate(*carry, task.data, task.judged, task.held_out, probe)))
    losses, scales, finite = (np.concatenate(x) for x in zip(*history, strict=True))
    return {
        **{name: [_digits(point[name]) for point in curve] for name in curve[0]},
        "train_loss": [_digits(x) for x in losses.reshape(-1, task.every).mean(1)],
        "skipped": np.flatnonzero(~finite).tolist(),
        "log2_scale": [_digits(x) for x in scales[task.every - 1 :: task.every]],
        "final_log2_scale": math.log2(jamp.get_loss_scale(carry)),
        "seconds_per_step": _digits(np.median(seconds[1:])),  # the first compiles
    }


def _line(row: dict[str, Any]) -> str:
    last = {name: math.nan if (x := row[name][-1]) is None else x for name in row if name in MEASURED}
    return (
        f"{row['task']:15s} {row['setup']:36s} {row['start']:9s} seed {row['seed']}  loss {last['loss']:.3e}"
        f"  held out {last['held_out_loss']:.4f} {last['accuracy']:7.2%}  skipped {len(row['skipped']):4d}"
        f"  lost {last['lost_unscaled']:6.1%} {last['lost_scaled']:6.1%}  error {last['error_scaled']:.1e}"
        f"  2**{row['final_log2_scale']:g}  {row['seconds_per_step'] * 1e3:6.1f} ms a step"
    )


def _digits(x: Any) -> float | None:
    """Five significant digits; None for what is not finite."""
    return float(f"{x:.5g}") if math.isfinite(x) else None


def plan(quick: bool) -> list[tuple[Task, list[Setup], int]]:
    large, small, batches = language_model(quick), digits(quick), digits(quick, batch=128)
    if quick:
        return [(small, [SETUPS[0], SETUPS[-1], BAD_STARTS[-1]], 1), (large, SETUPS[-3:-2], 1)]
    return [
        (small, SETUPS, SEEDS),
        (large, SETUPS, SEEDS),
        (batches, [*SETUPS, *BAD_STARTS], SEEDS),
        (large, [*SMALLER_BATCHES, *BAD_STARTS], 2),
    ]


def accuracy(quick: bool, done: Sequence[Any] = (), write: Callable[[Rows], None] = lambda rows: None) -> Rows:
    """All configurations of both tasks but those that are done; `write` is called after each."""
    rows, order = list(done), []
    for task, setups, seeds in plan(quick):
        for setup in setups:
            order.append((task.name, setup.name))
            if not select(rows, task=task.name, setup=setup.name):
                rows += run(task, setup, seeds)
                write(rows)
    rows.sort(key=lambda row: order.index((row["task"], row["setup"])))
    write(rows)
    return rows


def finished(file: Path | None, found: dict[str, Any]) -> Rows:
    """What a run that was cut off has left in its file, if machine and versions are the same."""
    if not file or not file.exists():
        return []
    old = json.loads(file.read_text())
    if any(old.get(name) != found[name] for name in ("machine", "versions", "xla_flags", "quick")):
        return []
    print(f"{file} holds {len(old['rows'])} runs, which are kept. Remove it to begin anew.")
    return old["rows"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few steps of each: does it run at all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="given", help="results that are there: train nothing")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw the pictures there")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the tables between the marks of this page")
    options = parser.parse_args()

    if options.given:
        found = json.loads(options.given.read_text())
    else:
        found = record("benchmarks.accuracy", options.quick, jax.devices()[0].device_kind)
        found["xla_flags"] = os.environ.get("XLA_FLAGS", "")

        def write(rows: Rows) -> None:
            found["rows"] = rows
            if options.json:
                options.json.write_text(json.dumps(found).replace('{"task"', '\n{"task"') + "\n")

        accuracy(options.quick, finished(options.json, found), write)
    for name, text in sections(found).items():
        print(f"\n{name}\n\n{text}")
    if options.page:
        write_page(options.page, found)
    if options.plot:
        from benchmarks.accuracy_plot import draw  # needs matplotlib

        draw(found, options.plot)


if __name__ == "__main__":
    main()
