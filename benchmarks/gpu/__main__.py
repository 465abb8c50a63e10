"""What `benchmarks.step` times, on one GPU: the optimizer step, and training steps of ViT-B/16 and GPT-2 124 M.

    python -m benchmarks.gpu --json docs/benchmarks/gpu.json
    python -m benchmarks.gpu --steps-only                    or --models-only
    python -m benchmarks.gpu --device cpu --quick            rehearse, tiny

Unlike on a CPU, 20 steps are started and only the last one is waited for.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # each table is measured in processes of its own

import jax

from benchmarks.models import SHAPES, SMALL
from benchmarks.record import Rows, parser, record, write
from benchmarks.report import step as report
from benchmarks.step import autocast, update

STEPS = 20
NAMES = (*update.FEW, "where by hand", "flax DynamicScale recipe")
TABLES = [
    *(update.Table(optimizer, 40, 2240, NAMES, steps=STEPS) for optimizer in update.SCALED),  # 100 M
    *(update.Table("adamw", 40, width, update.FEW, steps=STEPS) for width in (1120, 4480)),  # 25 M and 400 M
    *(update.Table("adamw", 40, 2240, update.HALF, grads=dtype, steps=STEPS) for dtype in ("float16", "bfloat16")),
]


def steps(quick: bool) -> Rows:
    small = [table._replace(width=16, rounds=1, steps=2) for table in (TABLES[0], TABLES[-1])]
    return update.step(quick, small if quick else TABLES)


def whole(quick: bool) -> Rows:
    batches = {"ViT-B/16": 128, "GPT-2 124 M": 16}
    shapes = {name: (SMALL[name], 2) if quick else (SHAPES[name], batch) for name, batch in batches.items()}
    return autocast.timed({name: autocast.transformer(*x) for name, x in shapes.items()}, 1 if quick else 5, STEPS)


def main() -> None:
    arguments = parser("benchmarks.gpu", __doc__)
    arguments.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    for part in ("steps", "models"):
        arguments.add_argument(f"--{part}-only", dest="only", action="store_const", const=part)
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
    if options.only != "models":
        found["gpu_steps"] = steps(options.quick)
        print(f"\n{report.step(found['gpu_steps'])}\n")
        write(options.json, found)
    if options.only != "steps":
        found["gpu_models"] = whole(options.quick)
        print(f"\n{report.models(found['gpu_models'])}")
        write(options.json, found)


if __name__ == "__main__":
    main()
