"""The optimizer step with bfloat16 parameters: with float32 masters, and without them by stochastic rounding.

    python -m benchmarks.step.parameters [--on tpu | h200] [--quick] [--json FILE]

`--on` compiles for a TPU v5e (needs libtpu) or an H200 (needs jax[cuda13]) in place of running. Gradients have the
dtype of the parameters.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jamp
from benchmarks.ahead_of_time import TARGETS, compile_for, in_shapes
from benchmarks.record import Rows, parser, record, write
from benchmarks.step.peers import plain
from benchmarks.step.update import like
from benchmarks.timing import Case, across, compare

Tx = optax.GradientTransformation
ADAMW = optax.adamw(1e-3)
HALF, FULL = jnp.bfloat16, jnp.float32
WAYS: dict[str, tuple[Any, Callable[[Tx], Tx]]] = {
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
}


def case(name: str, leaves: int, width: int) -> Case:
    dtype, wrap = WAYS[name]
    params = {f"p{i}": jnp.full((width, width), 0.01, dtype) for i in range(leaves)}
    recipe = plain(wrap(ADAMW), params)
    return Case(name, recipe.step, recipe.carry, (like(params, 1e-3),))


def measure(leaves: int, width: int, rounds: int) -> Rows:
    return compare([case(name, leaves, width) for name in WAYS], rounds)


def on_this_machine(quick: bool) -> Rows:
    rows = []
    for leaves, width in [(4, 64)] if quick else [(20, 1024)]:
        labels = {"optimizer": "adamw", "millions": leaves * width**2 / 1e6}
        rows += across(labels, measure, leaves, width, 1 if quick else 7, quick=quick)
    return rows


def ahead(target: str, quick: bool) -> Rows:
    """With the bytes of a parameter: stored, temporary and moved."""
    # Arrays that do not fit into the fast memory of a TPU, as a large model's do not.
    leaves, width = (4, 64) if quick else (8, 4096)
    rows, size = [], leaves * width**2 / 1e6
    made = [in_shapes(partial(case, name, leaves, width)) for name in WAYS if not name.endswith("again")]
    for one, row in zip(made, compile_for(target, made), strict=True):
        stored = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((one.carry, one.args))) / size / 1e6
        each = {"stored": stored, "temporary": row["temporary_megabytes"] / size, "moved": row["megabytes"] / size}
        rows.append({"optimizer": "adamw"} | row | each)
    return rows


if __name__ == "__main__":
    arguments = parser("benchmarks.step.parameters", __doc__)
    arguments.add_argument("--on", choices=TARGETS)
    options = arguments.parse_args()
    jax.config.update("jax_platforms", "cpu")
    found = record("benchmarks.step.parameters", options.quick, options.on or "cpu")
    rows = ahead(options.on, options.quick) if options.on else on_this_machine(options.quick)
    write(options.json, found | {f"rounding_{options.on}" if options.on else "rows": rows})
