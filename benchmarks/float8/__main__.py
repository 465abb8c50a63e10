"""float8: where training ends, its gradients, and what the compiler for an H200 makes of the products.

    python -m benchmarks.float8 training --json docs/benchmarks/float8_training.json   half an hour, with qwix
    python -m benchmarks.float8 h200 --json docs/benchmarks/float8_h200.json   with equinox, flax, dm-haiku and qwix
    python -m benchmarks.float8 tpu --json docs/benchmarks/int8_tpu.json

training: a language model, three seeds, and the loss on data that are never trained on.
h200: the gradients of `benchmarks.float8.models`, and those of other float8 libraries, compiled ahead of time.
tpu: the same gradients in int8, compiled for a TPU v5e.
They need `pip install "jax[cuda13]"`, for the TPU `pip install libtpu`.
"""

import os

# There is no GPU to tune products on. Triton's products stay on, as they are by default: they decide which casts to
# float8 XLA keeps.
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")

import jax

from benchmarks.ahead_of_time import is_installed
from benchmarks.float8 import compiled, training
from benchmarks.record import parser, record, write

COMPILED = {"h200": compiled.h200, "tpu": compiled.tpu}


def main() -> None:
    arguments = parser("benchmarks.float8", __doc__)
    arguments.add_argument("what", choices=["training", *COMPILED])
    arguments.add_argument("--only", nargs="+", default=[], help="parts of the names of models for h200, or peers")
    options = arguments.parse_args()
    if options.what == "training":
        return training.training(options.json, options.quick)
    jax.config.update("jax_platforms", "cpu")
    if not is_installed(options.what):
        return
    about = record("benchmarks.float8", options.quick, f"{options.what}, which was not there", compiled.PACKAGES)
    return write(options.json, about | COMPILED[options.what](options.quick, options.only))


if __name__ == "__main__":
    main()
