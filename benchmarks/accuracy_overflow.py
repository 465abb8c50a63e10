"""Does training end where float32 ends when the loss scale has to work? Overflows during the run, five seeds.

    XLA_FLAGS=--xla_cpu_multi_thread_eigen=false taskset -c 1 python -m benchmarks.accuracy_overflow \\
        --json docs/benchmarks/accuracy_overflow.json --page docs/benchmarks/accuracy.md
    python -m benchmarks.accuracy_overflow --from docs/benchmarks/accuracy_overflow.json --page ...

Two tasks with an interval of 50, so that the scale grows until it overflows, again and again: the digits in batches of
which one in a hundred has its pixels multiplied by 64, and a network of 16 hidden layers.

Equivalence is decided by a margin that was set before the runs. From each seed's accuracy on held-out digits, that of
float32 is subtracted. The 90 % confidence interval of the mean has to lie within plus and minus one percentage point
(two one-sided t-tests at 5 %).
"""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jamp
from benchmarks.accuracy import run
from benchmarks.accuracy_report import Row, about, deviation, last, names, scales, select
from benchmarks.accuracy_setups import FLOAT32, NONE, Setup
from benchmarks.accuracy_tasks import Task, digits, init_digits
from benchmarks.markdown import fill, table
from benchmarks.record import record

SEEDS = 5
MARGIN = 0.01  # of accuracy
T = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132}  # of Student's distribution: 95 % lie below, by the number of seeds
SPIKE, EVERY = 64.0, 100  # a batch in a hundred is so many times as large
INTERVAL = 50
SETUPS = [
    FLOAT32,
    Setup("float16, unscaled", loss_scale=NONE),
    Setup("float16, static", loss_scale=jamp.StaticLossScale()),
    Setup("float16, dynamic", loss_scale=jamp.DynamicLossScale(growth_interval=INTERVAL, max_scale=math.inf)),
    Setup("float16, adaptive", loss_scale=jamp.AdaptiveLossScale()),
]


def spikes(quick: bool) -> Task:
    task = digits(quick, batch=128)

    def get_batch(data: Any, key: jax.Array) -> Any:
        x, y = task.get_batch(data, key)
        return x * jnp.where(jax.random.randint(jax.random.fold_in(key, 1), (), 0, EVERY) == 0, SPIKE, 1.0), y

    return replace(task, name="digits with spikes", get_batch=get_batch)


def deep(quick: bool) -> Task:
    sizes = (64, *[128] * (2 if quick else 16), 10)
    init = lambda key: init_digits(key, sizes)
    return replace(digits(quick, batch=128), name="16 hidden layers", init=init, learning_rate=1e-3)


def section(found: dict[str, Any]) -> str:
    """A table of each task."""
    parts = []
    for task in names(found["rows"], "task"):
        rows = select(found["rows"], task=task)
        base = last(select(rows, setup="float32"), "accuracy")
        head = [task, "accuracy", "minus float32's, 90 % interval", "equivalent", "skipped, by seed", "final scale"]
        body = []
        for setup in names(rows, "setup"):
            chosen = select(rows, setup=setup)
            accuracy, skipped = last(chosen, "accuracy"), ", ".join(str(len(row["skipped"])) for row in chosen)
            spread = f"{100 * accuracy.mean():.2f} ± {100 * deviation(accuracy):.2f} %"
            compared = ["", ""]
            if setup != "float32":
                low, high = interval(accuracy - base)
                compared = [
                    f"{100 * low:+.2f} to {100 * high:+.2f} points",
                    "yes" if is_within(low, high) else "**no**",
                ]
            body.append([setup, spread, *compared, skipped, scales(chosen)])
        parts.append(table(head, body))
    return "\n\n".join([*parts, about(found)])


def interval(differences: np.ndarray) -> tuple[float, float]:
    """The 90 % confidence interval of a mean."""
    half = T[len(differences)] * deviation(differences) / len(differences) ** 0.5
    return float(differences.mean() - half), float(differences.mean() + half)


def is_within(low: float, high: float) -> bool:
    return low > -MARGIN and high < MARGIN


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy_overflow",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a few steps of each: does it run at all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="given", help="results that are there: train nothing")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the tables between the marks of this page")
    options = parser.parse_args()
    if options.given:
        found = json.loads(options.given.read_text())
    else:
        found = record("benchmarks.accuracy_overflow", options.quick, jax.devices()[0].device_kind)
        seeds = 2 if options.quick else SEEDS
        rows: list[Row] = []
        for task in (spikes(options.quick), deep(options.quick)):
            for setup in SETUPS:
                rows += run(task, setup, seeds)
        found["rows"] = rows
        if options.json:
            options.json.write_text(json.dumps(found).replace('{"task"', '\n{"task"') + "\n")
    print(section(found))
    if options.page:
        options.page.write_text(fill(options.page.read_text(), "overflow", section(found)))


if __name__ == "__main__":
    main()
