"""Does training in 16 bit end where float32 ends? Several seeds, every way to compute.

    export XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    taskset -c 1 python -m benchmarks.accuracy --json docs/benchmarks/accuracy.json
    taskset -c 1 python -m benchmarks.accuracy --overflow --json docs/benchmarks/accuracy_overflow.json

The first trains a language model and a classifier of digits on one core for about half an hour. With --overflow the
loss scale has to work during the run. `benchmarks.accuracy.text_model` trains longer.
"""

import os

import jax

from benchmarks.accuracy import study
from benchmarks.accuracy.tasks import Task, digits, language_model, overflowing
from benchmarks.record import parser, record, write


def plan(quick: bool, overflow: bool) -> list[tuple[Task, list[study.Setup], int]]:
    if overflow:
        return [(task, study.OVERFLOWING, 2 if quick else study.SEEDS) for task in overflowing(quick)]
    large, small, batches = language_model(quick), digits(quick), digits(quick, batch=128)
    if quick:
        return [(small, [study.SETUPS[0], study.SETUPS[-1], study.BAD_STARTS[-1]], 1), (large, study.SETUPS[-3:-2], 1)]
    both = [(task, study.SETUPS, study.SEEDS) for task in (small, large)]
    smaller = large, [*study.SMALLER_BATCHES, *study.BAD_STARTS], 2
    return [*both, (batches, [*study.SETUPS, *study.BAD_STARTS], study.SEEDS), smaller]


if __name__ == "__main__":
    arguments = parser("benchmarks.accuracy", __doc__)
    arguments.add_argument("--overflow", action="store_true")
    options = arguments.parse_args()
    found = record("benchmarks.accuracy", options.quick, jax.devices()[0].device_kind)
    found |= {"xla_flags": os.environ.get("XLA_FLAGS", ""), "rows": []}
    for task, setups, seeds in plan(options.quick, options.overflow):
        for setup in setups:
            found["rows"] += [{"name": setup.name} | row for row in study.run(task, setup, range(seeds))]
            write(options.json, found)
