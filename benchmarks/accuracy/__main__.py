"""Does training in 16 bit end where float32 ends? Two tasks, several seeds, every way to compute.

    XLA_FLAGS=--xla_cpu_multi_thread_eigen=false taskset -c 1 python -m benchmarks.accuracy --json FILE
    XLA_FLAGS=--xla_cpu_multi_thread_eigen=false taskset -c 1 python -m benchmarks.accuracy --overflow --json FILE

The study trains on one core for about half an hour, and writes its results after each configuration: started again, it
goes on. With --overflow the loss scale has to work during the run, on two other tasks (`benchmarks.accuracy.overflow`).
"""

import json
import os
from pathlib import Path
from typing import Any

import jax

from benchmarks.accuracy import overflow
from benchmarks.accuracy.setups import BAD_STARTS, SETUPS, SMALLER_BATCHES, Setup
from benchmarks.accuracy.study import SEEDS, run
from benchmarks.accuracy.tasks import Task, digits, language_model
from benchmarks.record import Rows, parser, record, write


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
    arguments = parser("benchmarks.accuracy", __doc__)
    arguments.add_argument("--overflow", action="store_true", help="tasks on which the loss scale overflows")
    options = arguments.parse_args()
    found = record("benchmarks.accuracy", options.quick, jax.devices()[0].device_kind)
    found["xla_flags"] = os.environ.get("XLA_FLAGS", "")
    rows, order = finished(options.json, found), []
    for task, setups, seeds in (overflow.plan if options.overflow else plan)(options.quick):
        for setup in setups:
            order.append((task.name, setup.name))
            if not any((row["task"], row["setup"]) == order[-1] for row in rows):
                rows += run(task, setup, range(seeds))
                write(options.json, found | {"rows": rows})
    rows.sort(key=lambda row: order.index((row["task"], row["setup"])))
    write(options.json, found | {"rows": rows})


if __name__ == "__main__":
    main()
