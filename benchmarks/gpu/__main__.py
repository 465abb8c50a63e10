"""One GPU timed: gradients of whole models at several memory budgets, and the optimizer step.

    python -m benchmarks.gpu --json docs/benchmarks/gpu.json
    python -m benchmarks.gpu --only steps "ViT-B/16, batch 64"
    python -m benchmarks.gpu --device cpu --quick            rehearse, tiny

Unlike on a CPU, several steps are started and only the last one is waited for, and a table is measured in one process:
the range is that of its nine rounds.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # each table is measured in processes of its own

import jax

from benchmarks.memory.timed import GPU, timed
from benchmarks.record import Rows, parser, record, write
from benchmarks.report import tables
from benchmarks.step import update

NAMES = (*update.FEW, "where by hand", "flax DynamicScale recipe")
TABLES = [  # 100 M parameters
    *(update.Table(optimizer, 40, 2240, NAMES, steps=20) for optimizer in update.SCALED),
    update.Table("adamw", 40, 2240, update.HALF, grads="float16", steps=20),
]


def steps(quick: bool) -> Rows:
    small = [table._replace(width=16, rounds=1, steps=2) for table in (TABLES[0], TABLES[-1])]
    return update.step(quick, small if quick else TABLES, processes=1)


def main() -> None:
    arguments = parser("benchmarks.gpu", __doc__)
    arguments.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    arguments.add_argument("--only", nargs="+", default=[*GPU, "steps"], choices=[*GPU, "steps"])
    options = arguments.parse_args()
    if options.device == "cpu":
        if not options.quick:
            raise SystemExit("--device cpu is a rehearsal: add --quick. Times of a CPU say nothing about a GPU.")
        os.environ["JAX_PLATFORMS"] = "cpu"  # of the processes
        jax.config.update("jax_platforms", "cpu")
    device = jax.devices()[0]
    if device.platform != options.device:
        install = "Install it with `pip install 'jax[cuda13]'`, or rehearse with --device cpu --quick."
        raise SystemExit(f"JAX sees no GPU but {device.device_kind!r}. {install}")
    found = record("benchmarks.gpu", options.quick, device.device_kind)
    if chosen := [name for name in GPU if name in options.only]:
        found["gpu_models"] = timed(chosen, options.quick, processes=1)
        print(f"\n{tables.models(found['gpu_models'])}")
        write(options.json, found)
    if "steps" in options.only:
        found["gpu_steps"] = steps(options.quick)
        print(f"\n{tables.step(found['gpu_steps'])}\n")
        write(options.json, found)


if __name__ == "__main__":
    main()
