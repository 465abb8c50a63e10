"""The optimizer step with bfloat16 parameters: with float32 masters, and without them by stochastic rounding.

    python -m benchmarks.step.parameters masters [--on tpu] [--quick] [--json FILE]
    python -m benchmarks.step.parameters rounding [--on tpu | h200] [--quick] [--json FILE]

`--on` compiles for a TPU v5e (needs libtpu) or an H200 (needs jax[cuda13]) in place of running.
masters: `jamp.mixed_precision` beside the same masters written by hand with optax. By hand nothing is checked. A check
has to read the gradients once more, so that read is a case of its own.
rounding: gradients have the dtype of the parameters. Bytes a parameter are those of the arguments (parameters, state,
gradients) and of the temporaries, and those that a step reads and writes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jamp
from benchmarks.ahead_of_time import compile_for
from benchmarks.processes import PROCESSES, across, line
from benchmarks.record import Rows, parser, record, write
from benchmarks.timing import Case, compare

Tx = optax.GradientTransformation
ADAMW = optax.adamw(1e-3)
OPTIMIZERS = {
    "masters": {"adamw": ADAMW, "clip + adamw": optax.chain(optax.clip_by_global_norm(1.0), ADAMW)},
    "rounding": {
        "adamw": ADAMW,
        "sgd with momentum": optax.sgd(1e-3, momentum=0.9),
        "lion": optax.lion(1e-3),
        "adafactor": optax.adafactor(1e-3),
    },
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
        "jamp.mixed_precision": (HALF, jamp.mixed_precision),
        "jamp.mixed_precision, disabled": (HALF, lambda tx: jamp.mixed_precision(tx, jamp.NoOpLossScale())),
    },
    "rounding": {
        "float32": (FULL, lambda tx: tx),
        "float32, again": (FULL, lambda tx: tx),
        "masters": (HALF, jamp.master_params),
        "stochastic": (HALF, jamp.stochastic_rounding),
        "stochastic, bfloat16 state": (HALF, partial(jamp.stochastic_rounding, state_dtype=jnp.bfloat16)),
        "loss_scaled(stochastic)": (HALF, lambda tx: jamp.loss_scaled(jamp.stochastic_rounding(tx))),
    },
}


def shapes(what: str, leaves: int, width: int) -> list[tuple[int, ...]]:
    if what == "rounding":
        return [(width, 512)] * leaves
    return [(width, width)] * (leaves // 2) + [(width,)] * (leaves // 2)


def cases(what: str, optimizer: str, leaves: int, width: int) -> list[Case]:
    def case(name: str, dtype: Any, tx: Tx) -> Case:
        full = lambda value: {f"p{i}": jnp.full(x, value, dtype) for i, x in enumerate(shapes(what, leaves, width))}

        def step(carry: Any, grads: Any) -> Any:
            params, state = carry
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return Case(name, step, (full(0.01), tx.init(full(0.01))), (full(1e-3),))

    return [case(name, dtype, wrap(OPTIMIZERS[what][optimizer])) for name, (dtype, wrap) in WAYS[what].items()]


def measure(what: str, optimizer: str, leaves: int, width: int, rounds: int) -> Rows:
    return compare(cases(what, optimizer, leaves, width), rounds)


def on_this_machine(what: str, quick: bool) -> Rows:
    rows = []
    sizes = [(4, 64)] if quick else [(40, 1024)] if what == "masters" else [(40, 1024), (48, 4096)]
    rounds, processes = (1, 1) if quick else (9 if what == "masters" else 7, PROCESSES)
    for optimizer in OPTIMIZERS[what] if what == "masters" else ("adamw",):
        for leaves, width in sizes:
            labels = {"optimizer": optimizer, "millions": millions(what, leaves, width)}
            print("\n{optimizer}, {millions:.2g} M parameters".format(**labels))
            for row in across(measure, what, optimizer, leaves, width, rounds, processes=processes):
                print(line(row), flush=True)
                rows.append(labels | row)
    return rows


def millions(what: str, leaves: int, width: int) -> float:
    return leaves * width * (512 if what == "rounding" else (width + 1) / 2) / 1e6


def ahead(what: str, target: str, quick: bool) -> Rows:
    """With the bytes of a parameter: stored, temporary and moved."""
    leaves, width = (4, 64) if quick else (40, 1024)
    rows, size = [], millions(what, leaves, width)
    for optimizer in OPTIMIZERS[what]:
        made = [case for case in cases(what, optimizer, leaves, width) if not case.name.endswith("again")]
        for case, row in zip(made, compile_for(target, made), strict=True):
            stored = sum(x.nbytes for x in jax.tree.leaves((case.carry, case.args))) / size / 1e6
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
    write(options.json, found | {"rows": run(options.quick)})
