"""One GPU timed in at most five minutes: all that the pages say of GPUs.

    python -m benchmarks.gpu                                 writes docs/benchmarks/gpu_<card>.json
    python -m benchmarks.gpu --only llama linen              replaces these parts of that file, and keeps the others
    python -m benchmarks.gpu --device cpu --quick            rehearse, tiny

Each part is a process with a time-out. A row is written when it arrives, so a part that is stopped keeps its earlier
rows. Within a part, programs take turns, and the baseline is measured twice (A/A). The peak of memory is what XLA
allocates for a call: arguments, results and temporaries. Peers that are not installed are left out.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # this process and that of a part share the GPU

import jax

from benchmarks.gpu.processes import Part, run
from benchmarks.record import parser, record, show, write

# The time-outs are what keeps all parts below five minutes. Most of the time is compilation.
PARTS = {
    "llama": Part(42, "benchmarks.gpu.gradients", "llama"),
    "llama_float8": Part(29, "benchmarks.gpu.gradients", "llama_float8"),
    "linen": Part(34, "benchmarks.gpu.linen", "linen"),
    "optimizers": Part(42, "benchmarks.gpu.optimizers", "optimizers"),
    "loop": Part(15, "benchmarks.gpu.loop", "loop"),
    "gpt2": Part(80, "benchmarks.gpu.gradients", "gpt2"),
    "vocabulary": Part(33, "benchmarks.gpu.gradients", "vocabulary"),
    "llama_float8_default_flags": Part(24, "benchmarks.gpu.gradients", "llama_float8_default_flags"),
}
PACKAGES = ("qwix",)
ABOUT = ("date", "command", "versions", "commit")  # parts of one file may be of several runs


def card(device_kind: str) -> str:
    """ "h200" of "NVIDIA H200", "h100" of "NVIDIA H100 80GB HBM3"."""
    words = device_kind.lower().split()
    return next((word for word in words if re.search(r"\d", word)), words[-1])


def earlier(file: Path | None, found: dict[str, Any]) -> dict[str, Any]:
    """The parts that a file holds already, if they are of the same kind of device, and as large."""
    if not file or not file.exists():
        return {}
    before = json.loads(file.read_text())
    same = before["machine"]["device"] == found["machine"]["device"] and before["quick"] == found["quick"]
    return before["parts"] if same else {}


def measure(parts: dict[str, Part], quick: bool, file: Path | None, found: dict[str, Any]) -> dict[str, Any]:
    """The results with these parts, which are written whenever a row arrives."""
    found["parts"] = earlier(file, found)
    about = {key: found[key] for key in ABOUT}
    for name, part in parts.items():

        def save(results: dict[str, Any], name: str = name) -> None:
            found["parts"][name] = about | results
            write(file, found)

        print(f"\n{name}", flush=True)
        run(part, quick, save)
        for row in found["parts"][name]["rows"]:
            show(row)
        print("{outcome}, {seconds} s".format(**found["parts"][name]))
    return found


def main() -> None:
    arguments = parser("benchmarks.gpu", __doc__)
    arguments.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    arguments.add_argument(
        "--only", nargs="+", metavar="PART", default=list(PARTS), choices=PARTS, help=", ".join(PARTS)
    )
    options = arguments.parse_args()
    if options.device == "cpu":
        if not options.quick:
            raise SystemExit("--device cpu is a rehearsal: add --quick. Times of a CPU say nothing about a GPU.")
        os.environ["JAX_PLATFORMS"] = "cpu"  # of the processes
        os.environ.setdefault(
            "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        )
        jax.config.update("jax_platforms", "cpu")
    device = jax.devices()[0]
    if device.platform != options.device:
        install = "Install it with `pip install 'jax[cuda13]'`, or rehearse with --device cpu --quick."
        raise SystemExit(f"JAX sees no GPU but {device.device_kind!r}. {install}")
    file = options.json
    if not options.quick:
        file = file or Path(f"docs/benchmarks/gpu_{card(device.device_kind)}.json")
    slower = 10 if options.quick else 1  # a rehearsal is not what the time-outs are for
    parts = {name: part._replace(seconds=slower * part.seconds) for name, part in PARTS.items() if name in options.only}
    found = measure(parts, options.quick, file, record("benchmarks.gpu", options.quick, device.device_kind, PACKAGES))
    if options.quick and (failures := failed(found)):
        raise SystemExit("\n".join(failures))


def failed(found: dict[str, Any]) -> list[str]:
    """What did not run, of parts and of their programs. On a GPU that is a result, in a rehearsal an error."""
    parts = [f"{name}: {part['outcome']}" for name, part in found["parts"].items() if part["outcome"] != "complete"]
    rows = [(name, row) for name, part in found["parts"].items() for row in part["rows"]]
    return parts + [f"{name}, {row['name']}: {row['outcome']}" for name, row in rows if "outcome" in row]


if __name__ == "__main__":
    main()
