"""The optimizer step: `python -m benchmarks [--quick] [--only NAME ...] [--json FILE]`.

`step` times it on this machine. The others compile it for a TPU v5e or an H200.
"""

from collections.abc import Callable
from functools import partial

import jax

from benchmarks.ahead_of_time import TARGETS
from benchmarks.record import Rows, parser, record, write
from benchmarks.step import update

BENCHMARKS: dict[str, Callable[[bool], Rows]] = {"step": update.step}
BENCHMARKS |= {target: partial(update.ahead, target) for target in TARGETS}

if __name__ == "__main__":
    arguments = parser("benchmarks", __doc__)
    arguments.add_argument("--only", nargs="+", choices=BENCHMARKS, default=["step"])
    options = arguments.parse_args()
    about = record("benchmarks", options.quick, jax.devices()[0].device_kind)
    write(options.json, about | {name: BENCHMARKS[name](options.quick) for name in options.only})
