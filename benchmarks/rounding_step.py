"""The optimizer step with bfloat16 parameters and without masters, beside float32 and beside masters.

    python -m benchmarks.rounding_step [--quick] [--json FILE]       21 M and 100 M parameters on this machine
    python -m benchmarks.rounding_step tpu [--json FILE]             compiled for a TPU v5e: needs libtpu
    python -m benchmarks.rounding_step h200 [--json FILE]            compiled for an H200: needs jax[cuda13]

Gradients have the dtype of the parameters. Bytes a parameter are those of the arguments (parameters, state, gradients)
and of the temporaries, and those that a step reads and writes.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jamp
from benchmarks.ahead_of_time import compiled
from benchmarks.hlo import count
from benchmarks.master_params import train_step
from benchmarks.processes import PROCESSES, across, line
from benchmarks.record import record, write
from benchmarks.timing import Case, compare

ADAMW = optax.adamw(1e-3)
OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "adamw": ADAMW,
    "sgd with momentum": optax.sgd(1e-3, momentum=0.9),
    "lion": optax.lion(1e-3),
    "adafactor": optax.adafactor(1e-3),
}
Wrap = Callable[[optax.GradientTransformation], optax.GradientTransformation]
WAYS: dict[str, tuple[Any, Wrap]] = {
    "float32": (jnp.float32, lambda tx: tx),
    "float32, again": (jnp.float32, lambda tx: tx),
    "masters": (jnp.bfloat16, jamp.master_params),
    "stochastic": (jnp.bfloat16, jamp.stochastic_rounding),
    "stochastic, bfloat16 state": (jnp.bfloat16, partial(jamp.stochastic_rounding, state_dtype=jnp.bfloat16)),
    "loss_scaled(stochastic)": (jnp.bfloat16, lambda tx: jamp.loss_scaled(jamp.stochastic_rounding(tx))),
}


def cases(tx: optax.GradientTransformation, leaves: int, width: int) -> list[Case]:
    def case(name: str, dtype: Any, wrap: Wrap) -> Case:
        full = lambda value: {f"p{i}": jnp.full((width, 512), value, dtype) for i in range(leaves)}
        params, wrapped = full(0.01), wrap(tx)
        return Case(name, train_step(wrapped), (params, wrapped.init(params)), (full(1e-3),))

    return [case(name, *way) for name, way in WAYS.items()]


def measure(leaves: int, width: int, rounds: int) -> list[dict[str, Any]]:
    return [result.as_dict() for result in compare(cases(ADAMW, leaves, width), rounds)]


def on_this_machine(quick: bool) -> list[dict[str, Any]]:
    rows = []
    for leaves, width in [(4, 8)] if quick else [(40, 1024), (48, 4096)]:
        millions = leaves * width * 512 / 1e6
        print(f"\nadamw, {millions:.0f} M parameters in {leaves} leaves")
        rounds, processes = (1, 1) if quick else (7, PROCESSES)
        for row in across(measure, leaves, width, rounds, processes=processes):
            print(line(row), flush=True)
            rows.append({"millions": millions, **row})
    return rows


def ahead(target: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    leaves, width = 40, 1024
    for optimizer, tx in OPTIMIZERS.items():
        first = 0.0
        for case in cases(tx, leaves, width):
            if case.name.endswith("again"):
                continue
            size = leaves * width * 512
            text, temporary = compiled(target, case)
            counts = count(text)
            first = first or counts.bytes
            stored = sum(x.nbytes for x in jax.tree.leaves((case.carry, case.args)))
            rows.append(
                {
                    "optimizer": optimizer,
                    "name": case.name,
                    "stored": stored / size,
                    "temporary": temporary * 1e6 / size,
                    "moved": counts.bytes / size,
                    "ratio": counts.bytes / first,
                    "kernels": counts.kernels,
                }
            )
            print(
                "{optimizer:18s} {name:28s} bytes a parameter: {stored:5.2f} stored, {temporary:5.3f} temporary, "
                "{moved:5.2f} moved ({ratio:.2f})  {kernels:.0f} kernels".format(**rows[-1]),
                flush=True,
            )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", choices=["tpu", "h200"])
    parser.add_argument("--quick", action="store_true", help="every case once, small: does it run at all")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    found = record("benchmarks.rounding_step", options.quick, options.target or "cpu")
    write(options.json, found | {"rows": ahead(options.target) if options.target else on_this_machine(options.quick)})
