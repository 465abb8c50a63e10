"""Run the benchmarks: `python -m benchmarks [--quick] [--only NAME ...] [--json FILE]`."""

import argparse
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax

from benchmarks import accuracy, ahead_of_time, train, update
from benchmarks.record import record, write

Rows = list[dict[str, Any]]


def imports(quick: bool) -> Rows:
    """What `import jamp` adds to `import optax`."""
    code = "import time, optax; start = time.perf_counter(); import jamp; print(time.perf_counter() - start)"
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}  # A user's modules are compiled.
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        for _ in range(1 if quick else 7)
    ]
    seconds = sorted(float(run.stdout) for run in runs)[len(runs) // 2]
    print(f"\nimport jamp after import optax: {seconds * 1e3:.1f} ms")
    return [{"milliseconds": seconds * 1e3}]


BENCHMARKS: dict[str, Callable[[bool], Rows]] = {
    "step": update.step,
    "train": train.train,
    "imports": imports,
    "accuracy": accuracy.accuracy,
}
ON_ANY_MACHINE = list(BENCHMARKS)  # the compilers for other devices are packages of their own
BENCHMARKS |= {target: functools.partial(ahead_of_time.ahead, target) for target in ahead_of_time.TARGETS}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="every case once, small: does it run at all")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=ON_ANY_MACHINE)
    parser.add_argument("--json", metavar="FILE", help="write the results here too")
    options = parser.parse_args()
    found = record("benchmarks", options.quick, jax.devices()[0].device_kind)
    print(found)
    found |= {name: BENCHMARKS[name](options.quick) for name in options.only}
    write(options.json, found)


if __name__ == "__main__":
    main()
