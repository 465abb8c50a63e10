"""The optimizer step with bfloat16 parameters: with float32 masters, and without them by stochastic rounding.

    python -m benchmarks.step.parameters masters [--on tpu] [--quick] [--json FILE]
    python -m benchmarks.step.parameters rounding [--on tpu | h200] [--quick] [--json FILE]

`--on` compiles for a TPU v5e (needs libtpu) or an H200 (needs jax[cuda13]) in place of running.
masters: `loss_scaled(master_params(tx))` beside the same masters by hand with optax. By hand nothing is checked.
A check has to read the gradients once more, so that read is a case of its own.
rounding: gradients have the dtype of the parameters.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jamp
from benchmarks.ahead_of_time import compile_for, in_shapes
from benchmarks.record import Rows, parser, record, write
from benchmarks.step.peers import plain
from benchmarks.step.update import like
from benchmarks.timing import Case, across, compare

Tx = optax.GradientTransformation
ADAMW = optax.adamw(1e-3)
OPTIMIZERS = {
    "masters": {"adamw": ADAMW, "clip + adamw": optax.chain(optax.clip_by_global_norm(1.0), ADAMW)},
    "rounding": {"adamw": ADAMW},
}


def by_hand(tx: Tx) -> Tx:
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


def with_second_read(tx: Tx) -> Tx:
    def update(grads: Any, state: Any, params: Any = None) -> Any:
        updates, inner_state = tx.update(grads, state[0], params)
        return updates, (inner_state, jamp.all_finite(grads))

    return optax.GradientTransformation(lambda params: (tx.init(params), jnp.array(True)), update)


HALF, FULL = jnp.bfloat16, jnp.float32
WAYS: dict[str, dict[str, tuple[Any, Callable[[Tx], Tx]]]] = {
    "masters": {
        "by hand": (HALF, by_hand),
        "by hand, again": (HALF, by_hand),
        "by hand, gradients read twice": (HALF, lambda tx: with_second_read(by_hand(tx))),
        "jamp": (HALF, lambda tx: jamp.loss_scaled(jamp.master_params(tx))),
        "jamp, disabled": (HALF, lambda tx: jamp.loss_scaled(jamp.master_params(tx), jamp.NoOpLossScale())),
    },
    "rounding": {
        "float32": (FULL, lambda tx: tx),
        "float32, again": (FULL, lambda tx: tx),
        "masters": (HALF, jamp.master_params),
        "stochastic": (HALF, jamp.stochastic_rounding),
        "stochastic, bfloat16 state": (HALF, partial(jamp.stochastic_rounding, state_dtype=jnp.bfloat16)),
        "loss_scaled(stochastic)": (HALF, lambda tx: jamp.loss_scaled(jamp.stochastic_rounding(tx))),
        "split masters": (HALF, partial(jamp.master_params, split=True)),
        "split masters, 8-bit state": (HALF, lambda tx: jamp.master_params(jamp.quantized_state(tx), split=True)),
        "stochastic, 8-bit state": (HALF, lambda tx: jamp.stochastic_rounding(jamp.quantized_state(tx))),
        "float32, 8-bit state": (FULL, jamp.quantized_state),
    },
}


def shapes(what: str, leaves: int, width: int) -> list[tuple[int, ...]]:
    if what == "rounding":
        return [(width, width)] * leaves
    return [(width, width)] * (leaves // 2) + [(width,)] * (leaves // 2)


def millions(*sizes: Any) -> float:
    return sum(map(math.prod, shapes(*sizes))) / 1e6


def case(what: str, optimizer: str, name: str, leaves: int, width: int) -> Case:
    dtype, wrap = WAYS[what][name]
    params = {f"p{i}": jnp.full(x, 0.01, dtype) for i, x in enumerate(shapes(what, leaves, width))}
    recipe = plain(wrap(OPTIMIZERS[what][optimizer]), params)
    return Case(name, recipe.step, recipe.carry, (like(params, 1e-3),))


def measure(what: str, optimizer: str, leaves: int, width: int, rounds: int) -> Rows:
    return compare([case(what, optimizer, name, leaves, width) for name in WAYS[what]], rounds)


def on_this_machine(what: str, quick: bool) -> Rows:
    rows = []
    sizes, rounds = ([(20, 1024), (6, 4096)], 7) if what == "rounding" else ([(40, 1024)], 9)
    if quick:
        sizes, rounds = [(4, 64)], 1
    for optimizer, size in product(OPTIMIZERS[what], sizes):
        labels = {"optimizer": optimizer, "millions": millions(what, *size)}
        rows += across(labels, measure, what, optimizer, *size, rounds, quick=quick)
    return rows


def ahead(what: str, target: str, quick: bool) -> Rows:
    """With the bytes of a parameter: stored, temporary and moved."""
    # Arrays that do not fit into the fast memory of a TPU, as a large model's do not.
    leaves, width = (4, 64) if quick else (8, 4096) if what == "rounding" else (40, 1024)
    rows, size = [], millions(what, leaves, width)
    for optimizer in OPTIMIZERS[what]:
        ways = [name for name in WAYS[what] if not name.endswith("again")]
        made = [in_shapes(partial(case, what, optimizer, name, leaves, width)) for name in ways]
        for one, row in zip(made, compile_for(target, made), strict=True):
            stored = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((one.carry, one.args))) / size / 1e6
            each = {"stored": stored, "temporary": row["temporary_megabytes"] / size, "moved": row["megabytes"] / size}
            rows.append({"optimizer": optimizer} | row | each)
    return rows


if __name__ == "__main__":
    arguments = parser("benchmarks.step.parameters", __doc__)
    arguments.add_argument("what", choices=WAYS)
    arguments.add_argument("--on", choices=["tpu", "h200"])
    options = arguments.parse_args()
    jax.config.update("jax_platforms", "cpu")
    found = record("benchmarks.step.parameters", options.quick, options.on or "cpu")
    run = partial(ahead, options.what, options.on) if options.on else partial(on_this_machine, options.what)
    rows = f"{options.what}_{options.on}" if options.on else "rows"
    write(options.json, found | {rows: run(options.quick)})
