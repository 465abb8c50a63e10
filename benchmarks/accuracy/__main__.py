"""Does training in 16 bit end where float32 ends? Several seeds, every way to compute.

    export XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    taskset -c 1 python -m benchmarks.accuracy --json docs/benchmarks/accuracy.json
    taskset -c 1 python -m benchmarks.accuracy --overflow --json docs/benchmarks/accuracy_overflow.json
    taskset -c 1 python -m benchmarks.accuracy --text-model --json docs/benchmarks/text_model.json

The first trains a language model and a classifier of digits on one core for about half an hour. With --overflow the
loss scale has to work during the run. With --text-model a transformer of GPT-2's architecture trains in float32 and
under autocast to float16, for two hours.
"""

import os

import jax

from benchmarks.accuracy import study
from benchmarks.accuracy.tasks import Task, digits, language_model, overflowing, text_model
from benchmarks.record import parser, record, write


def plan(quick: bool, part: str | None) -> list[tuple[Task, list[study.Setup], int]]:
    if part == "overflow":
        return [(task, study.OVERFLOWING, 2 if quick else study.SEEDS) for task in overflowing(quick)]
    if part == "text_model":
        return [(text_model(quick), study.WITH_AUTOCAST, 2 if quick else 4)]
    large, small, batches = language_model(quick), digits(quick), digits(quick, batch=128)
    if quick:
        return [(small, [study.SETUPS[0], study.SETUPS[-1], study.BAD_STARTS[-1]], 1), (large, study.SETUPS[-3:-2], 1)]
    both = [(task, study.SETUPS, study.SEEDS) for task in (small, large)]
    smaller = large, [*study.SMALLER_BATCHES, *study.BAD_STARTS], 2
    return [*both, (batches, [*study.SETUPS, *study.BAD_STARTS], study.SEEDS), smaller]


if __name__ == "__main__":
    arguments = parser("benchmarks.accuracy", __doc__)
    for part in ("overflow", "text_model"):
        arguments.add_argument(f"--{part.replace('_', '-')}", dest="part", action="store_const", const=part)
    options = arguments.parse_args()
    found = record("benchmarks.accuracy", options.quick, jax.devices()[0].device_kind)
    found |= {"xla_flags": os.environ.get("XLA_FLAGS", ""), "rows": []}
    for task, setups, seeds in plan(options.quick, options.part):
        for setup in setups:
            found["rows"] += [{"name": setup.name} | row for row in study.run(task, setup, range(seeds))]
            write(options.json, found)
