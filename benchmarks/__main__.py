"""Run the benchmarks: `python -m benchmarks [--quick] [--only NAME ...] [--json FILE]`."""

import argparse
import functools
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import optax

import jamp
from benchmarks import ahead_of_time, transformer, update
from benchmarks.timing import Case, compare

Rows = list[dict[str, Any]]


SIZES = [(40, 512), (40, 1024), (1000, 96)]  # leaves and width: 5, 21 and 5 M parameters


def step(quick: bool) -> Rows:
    """`tx.update` and `apply_updates`."""
    rows = []
    for optimizer in update.OPTIMIZERS:
        for leaves, width in [(10, 64)] if quick else SIZES:
            cases = update.cases(optimizer, leaves, width)
            labels = {"optimizer": optimizer, "leaves": leaves, "millions": millions(cases)}
            print("\n{optimizer}, {millions:.2g} M float32 parameters in {leaves} leaves".format(**labels))
            rows += report(cases, quick, **labels)
    return rows


def train(quick: bool) -> Rows:
    """The whole train step of a transformer."""
    cases = transformer.cases(layers=1, width=64) if quick else transformer.cases()
    print(f"\nfloat16 transformer of {millions(cases):.2g} M parameters, batch 2 x 64 tokens, whole step with AdamW")
    return report(cases, quick, millions=millions(cases))


def ahead(target: str, quick: bool) -> Rows:
    """The step compiled for a device that is not there."""
    rows = []
    for optimizer in update.OPTIMIZERS:
        print(f"\n{optimizer}, compiled for {target}")
        cases = update.cases(optimizer, 4 if quick else 40, 1024)
        rows += [{"optimizer": optimizer, **row} for row in ahead_of_time.compile_for(target, cases)]
    return rows


def imports(quick: bool) -> Rows:
    """What `import jamp` adds to `import optax`."""
    code = "import time, optax; start = time.perf_counter(); import jamp; print(time.perf_counter() - start)"
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(1 if quick else 7)
    ]
    seconds = sorted(float(run.stdout) for run in runs)[len(runs) // 2]
    print(f"\nimport jamp after import optax: {seconds * 1e3:.1f} ms")
    return [{"milliseconds": seconds * 1e3}]


def millions(cases: list[Case]) -> float:
    """Parameters in millions; each carry begins with them."""
    return sum(x.size for x in jax.tree.leaves(cases[0].carry[0])) / 1e6


def report(cases: list[Case], quick: bool, **labels: Any) -> Rows:
    results = compare(cases, rounds=1 if quick else 15)
    for result in results:
        print(result.row(), flush=True)
    return [labels | result.as_dict() for result in results]


BENCHMARKS: dict[str, Callable[[bool], Rows]] = {"step": step, "train": train, "imports": imports}
ON_ANY_MACHINE = list(BENCHMARKS)  # the compilers for other devices are packages of their own
BENCHMARKS |= {target: functools.partial(ahead, target) for target in ahead_of_time.TARGETS}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="every case once, small: does it run at all")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=ON_ANY_MACHINE)
    parser.add_argument("--json", metavar="FILE", help="write the results here too")
    options = parser.parse_args()
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": {
            "processor": platform.machine(),
            "device": jax.devices()[0].device_kind,
            "devices": jax.device_count(),
        },
        "versions": {"python": platform.python_version()} | {m.__name__: m.__version__ for m in (jax, optax, jamp)},
        "quick": options.quick,
    }
    print(found)
    found |= {name: BENCHMARKS[name](options.quick) for name in options.only}
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
