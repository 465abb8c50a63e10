"""The optimizer step and whole training steps: `python -m benchmarks [--quick] [--only NAME ...] [--json FILE]`."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import jax

from benchmarks.ahead_of_time import TARGETS
from benchmarks.record import Rows, parser, record, write
from benchmarks.step import train, update


def imports(quick: bool) -> Rows:
    """What `import jamp` adds to `import optax`, and the part of `jax.extend`, which it needs."""
    code = (
        "import time, optax; times = [time.perf_counter()]; import jax.extend.core; times.append(time.perf_counter()); "
        "import jamp; print(time.perf_counter() - times[0], times[1] - times[0])"
    )
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}  # A user's modules are compiled.
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        for _ in range(1 if quick else 7)
    ]
    all_of_it, extend = sorted([float(x) * 1e3 for x in run.stdout.split()] for run in runs)[len(runs) // 2]
    print(f"\nimport jamp after import optax: {all_of_it:.1f} ms, of which jax.extend {extend:.1f} ms")
    return [{"milliseconds": all_of_it, "jax_extend_milliseconds": extend}]


BENCHMARKS: dict[str, Callable[[bool], Rows]] = {"step": update.step, "train": train.train, "imports": imports}
ON_ANY_MACHINE = list(BENCHMARKS)  # the compilers for other devices are packages of their own
BENCHMARKS |= {target: partial(update.ahead, target) for target in TARGETS}

if __name__ == "__main__":
    arguments = parser("benchmarks", __doc__)
    arguments.add_argument("--only", nargs="+", choices=BENCHMARKS, default=ON_ANY_MACHINE)
    options = arguments.parse_args()
    about = record("benchmarks", options.quick, jax.devices()[0].device_kind)
    write(options.json, about | {name: BENCHMARKS[name](options.quick) for name in options.only})
