"""Instructions of a GPU for each element of an optimizer step, which limit it once an element takes more than about 60.

    python -m benchmarks.step.instructions [--quick] [--json FILE]      needs jax[cuda13], no GPU

XLA compiles AdamW on one array for an H200 and writes its kernels as PTX. Only kernels that load or store several
elements at once count, because the others compute scalars or one number for each block. A thread computes four
elements.
"""

import os
import re
import tempfile
from functools import partial
from pathlib import Path

import jax

from benchmarks.ahead_of_time import compiled, in_shapes
from benchmarks.record import Rows, parser, record, show, write
from benchmarks.step.parameters import WAYS, case

ELEMENTS = 4  # of a thread


def instructions(ptx: str) -> dict[str, float]:
    """The instructions for each element of the kernels that load or store several elements at once, by name."""
    found = {}
    for name, body in re.findall(r"\.visible \.entry (\S+?)\(.*?\n\{(.*?)\n\}", ptx, re.S):
        names = re.findall(r"^\s+(?:@%p\d+ )?([a-z][\w.]*)\s", body, re.M)
        if any(re.match(r"(ld|st)\.global.*\.v[24]", name) for name in names):
            found[name] = len(names) / ELEMENTS
    return found


def measure(width: int, folder: Path) -> Rows:
    rows: Rows = []
    for name in (name for name in WAYS if not name.endswith("again")):
        for file in folder.glob("*.ptx"):
            file.unlink()
        one = in_shapes(partial(case, name, 1, width))
        compiled("h200", one.step, one.carry, *one.args, donate=True)
        kernels: dict[str, float] = {}
        for file in folder.glob("*.ptx"):
            kernels |= instructions(file.read_text())
        if not kernels:
            raise RuntimeError(f"No kernel of {name!r} was counted.")
        rows.append({"name": name, "instructions": sum(kernels.values()), "kernels": kernels})
        show(rows[-1])
    return rows


if __name__ == "__main__":
    options = parser("benchmarks.step.instructions", __doc__).parse_args()
    jax.config.update("jax_platforms", "cpu")
    found = record("benchmarks.step.instructions", options.quick, "h200")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_gpu_autotune_level=0"  # before the first compilation
        rows = measure(512 if options.quick else 4096, Path(folder))
    write(options.json, found | {"instructions_h200": rows})
