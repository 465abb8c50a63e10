"""Mixed precision on a GPU: whole models beside PyTorch, the optimizer step, and float8 products.

    python -m benchmarks.gpu --json docs/benchmarks/gpu.json    as much as fits into 8 minutes: repeat until all is done
    python -m benchmarks.gpu --json docs/benchmarks/gpu.json --steps-only    the optimizer step alone
    python -m benchmarks.report docs/benchmarks/gpu.json                     fill the page
    python -m benchmarks.gpu --device cpu --quick                            rehearse, tiny

Each measurement has a process of its own, and is written as soon as it is there. Started again, the command goes on
with what is missing, and then tries again what failed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import kernels, models
from benchmarks.record import Rows, parser, record, show, write

Unit = dict[str, Any]  # what identifies a measurement
ROOT = Path(__file__).parents[2]
PARTS = {"steps": kernels.steps, "products": kernels.products, "models": models.rows}


def probe(unit: Unit, quick: bool) -> Rows:
    del unit, quick
    import jax

    device = jax.devices()[0]
    return [{"platform": device.platform, "kind": device.device_kind}]


def apart(unit: Unit, device: str, quick: bool, timeout: float) -> Rows:
    """The rows of a measurement in a process of its own, on the GPU or on the CPU."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--unit", json.dumps(unit), *(["--quick"] if quick else [])]
    platform = {"JAX_PLATFORMS": "cpu"} if device == "cpu" else {}
    # PyTorch's process and JAX's must not hold each other's memory, and the peak must be what a program needs.
    environment = os.environ | platform | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def find_device(device: str, quick: bool) -> str:
    """Its name; an error if JAX does not see a GPU where one is asked for."""
    if device == "cpu" and not quick:
        raise SystemExit("--device cpu is a rehearsal: add --quick. Times of a CPU say nothing about a GPU.")
    (found,) = apart({"part": "probe"}, device, quick, 300)
    if device == "gpu" and found["platform"] != "gpu":
        raise SystemExit(
            f"JAX sees no GPU but {found['kind']!r}. Install it with `pip install 'jax[cuda13]'`, or rehearse with "
            "--device cpu --quick."
        )
    return found["kind"]


def plan(options: argparse.Namespace) -> list[Unit]:
    """Everything that is asked for, the most telling first."""
    parts = [options.only] if options.only else list(PARTS)
    makes = {"steps": kernels.step_units, "products": kernels.product_units, "models": models.units}
    units = [{"part": part} | unit for part in parts for unit in makes[part](options.quick)]
    chosen = {"model": options.model, "library": options.library}
    return [u for u in units if all(wanted is None or u.get(key) == wanted for key, wanted in chosen.items())]


def resumed(file: Path | None, about: dict[str, Any]) -> list[dict[str, Any]]:
    """The measurements that the file holds."""
    if not file or not file.exists():
        return []
    old = json.loads(file.read_text())
    differ = [key for key in ("versions", "quick") if old[key] != about[key]]
    if differ or old["machine"]["device"] != about["machine"]["device"]:
        raise SystemExit(f"{file} was measured elsewhere or with other versions: name another file, or remove it.")
    return old["gpu"]


def measure(options: argparse.Namespace) -> None:
    end = time.monotonic() + 60 * options.minutes
    about = record("benchmarks.gpu", options.quick, find_device(options.device, options.quick))
    found = {json.dumps(entry["unit"]): entry for entry in resumed(options.json, about)}
    keys = {json.dumps(unit): unit for unit in plan(options)}
    failed = [key for key in keys if "error" in found.get(key, {})]
    todo = [key for key in keys if key not in found] + failed
    for i, key in enumerate(todo):
        left = end - time.monotonic()
        longest = max((e["seconds"] for e in found.values() if e["unit"]["part"] == keys[key]["part"]), default=30.0)
        if left < longest:
            print(f"{len(todo) - i} measurements are left. The same command goes on with them.")
            return
        start = time.monotonic()
        entry: dict[str, Any] = {"unit": keys[key]}
        try:
            entry["rows"] = apart(keys[key], options.device, options.quick, left)
        except subprocess.TimeoutExpired:
            entry["error"] = f"not done after {left:.0f} s"
        except RuntimeError as error:
            entry["error"] = str(error)[:300]
        found[key] = entry | {"seconds": time.monotonic() - start}
        write(options.json, about | {"gpu": list(found.values())})
        for row in [{"error": entry["error"]}] if "error" in entry else entry["rows"]:
            show(keys[key] | row)
    print("Nothing is left to measure.")


def main() -> None:
    arguments = parser("benchmarks.gpu", __doc__)
    arguments.add_argument("--minutes", type=float, default=8.0, help="start nothing that may not end in this time")
    for part in PARTS:
        arguments.add_argument(f"--{part}-only", dest="only", action="store_const", const=part)
    arguments.add_argument("--model", choices=models.BATCH, help="this model alone")
    arguments.add_argument("--library", choices=("jax", "torch"), help="its models alone")
    arguments.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    arguments.add_argument("--unit", type=json.loads, help=argparse.SUPPRESS)  # one measurement, in this process
    options = arguments.parse_args()
    if options.unit:
        part = PARTS.get(options.unit["part"], probe)
        print(json.dumps(part(options.unit, options.quick)))
    else:
        measure(options)


if __name__ == "__main__":
    main()
