"""`jamp.mixed_precision(adamw)` on bfloat16 parameters beside the same masters written by hand with optax.

    python -m benchmarks.master_params [--quick] [--tpu] [--json FILE]

By hand nothing is checked. A check has to read the gradients once more, so that read is a case of its own.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jamp
from benchmarks.processes import PROCESSES, across, line
from benchmarks.timing import Case, compare

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "clip + adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
}


def cases(make: Callable[[], optax.GradientTransformation], leaves: int, width: int) -> list[Case]:
    """By hand without and with the second read, jamp, and jamp disabled."""
    shapes = [(width, width)] * (leaves // 2) + [(width,)] * (leaves // 2)
    params = {f"p{i}": jnp.full(shape, 0.01, jnp.bfloat16) for i, shape in enumerate(shapes)}
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 1e-3, jnp.bfloat16), params)
    wrapped = {
        "by hand": by_hand(make()),
        "by hand, again": by_hand(make()),
        "by hand, gradients read twice": with_second_read(by_hand(make())),
        "jamp.mixed_precision": jamp.mixed_precision(make()),
        "jamp.mixed_precision, disabled": jamp.mixed_precision(make(), jamp.NoOpLossScale()),
    }
    return [Case(name, train_step(tx), (params, tx.init(params)), (grads,)) for name, tx in wrapped.items()]


def measure(optimizer: str, leaves: int, width: int, rounds: int) -> list[dict[str, Any]]:
    return [result.as_dict() for result in compare(cases(OPTIMIZERS[optimizer], leaves, width), rounds)]


def by_hand(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """float32 masters in the state, and updates that bring the parameters to them."""

    def init(params: Any) -> Any:
        masters = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        return masters, tx.init(masters)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        masters, inner_state = state
        steps, inner_state = tx.update(jax.tree.map(lambda g: g.astype(jnp.float32), grads), inner_state, masters)
        masters = optax.apply_updates(masters, steps)
        return jax.tree.map(lambda m, p: m - p.astype(jnp.float32), masters, params), (masters, inner_state)

    return optax.GradientTransformation(init, update)


def with_second_read(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    def update(grads: Any, state: Any, params: Any = None) -> Any:
        updates, inner_state = tx.update(grads, state[0], params)
        return updates, (inner_state, jamp.all_finite(grads))

    return optax.GradientTransformation(lambda params: (tx.init(params), jnp.array(True)), update)


def train_step(tx: optax.GradientTransformation) -> Callable[[Any, Any], Any]:
    def step(carry: Any, grads: Any) -> Any:
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.master_params", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="every case once, small: does it run at all")
    parser.add_argument("--tpu", action="store_true", help="compile for a TPU v5e in place of running: needs libtpu")
    parser.add_argument("--json", metavar="FILE", help="write the results here too")
    options = parser.parse_args()
    leaves, width = (4, 64) if options.quick else (40, 1024)
    rows = []
    for name, make in OPTIMIZERS.items():
        print(f"\n{name}, {leaves * width * (width + 1) / 2e6:.2g} M bfloat16 parameters in {leaves} leaves")
        if options.tpu:
            from benchmarks.ahead_of_time import compile_for

            rows += [{"optimizer": name, **row} for row in compile_for("tpu", cases(make, leaves, width))]
            continue
        rounds, processes = (1, 1) if options.quick else (9, PROCESSES)
        for row in across(measure, name, leaves, width, rounds, processes=processes):
            print(line(row), flush=True)
            rows.append({"optimizer": name, **row})
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {"versions": {m.__name__: m.__version__ for m in (jax, optax, jamp)}, "steps": rows}, file, indent=1
            )


if __name__ == "__main__":
    main()
