"""float8: where training ends, its gradients, and what the compiler for an H200 makes of the products.

    python -m benchmarks.float8 accuracy --json docs/benchmarks/float8_accuracy.json     about an hour on one core
    python -m benchmarks.float8 gradients --json docs/benchmarks/float8_gradients.json   about five minutes
    python -m benchmarks.float8 h200 --json docs/benchmarks/float8_h200.json   with equinox, flax, dm-haiku and qwix
    python -m benchmarks.float8 micro-batches

accuracy: the tasks of `benchmarks.accuracy`, five seeds, and the loss on data that are never trained on.
gradients: the cosine between the first gradient and float32's by layer, on the same tasks, and the memory that a block
of a transformer keeps for the backward pass.
h200: the gradients of `benchmarks.float8.models`, and those of other float8 libraries, compiled ahead of time.
micro-batches: the kernels of gradient accumulation with and without `jamp.precompute`, in the loop and before it.
The last two need `pip install "jax[cuda13]"`.
"""

import os

# As in `benchmarks.memory`.
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false")

import jax
from jax.experimental import topologies

from benchmarks.ahead_of_time import TARGETS
from benchmarks.float8 import compiled, training
from benchmarks.record import parser, record, write

TRAINED = {"accuracy": training.accuracy, "gradients": training.gradients}
COMPILED = {"h200": compiled.h200, "micro-batches": compiled.micro_batches}


def main() -> None:
    arguments = parser("benchmarks.float8", __doc__)
    arguments.add_argument("what", choices=[*TRAINED, *COMPILED])
    arguments.add_argument("--only", nargs="+", default=[], help="parts of the names of models for h200, or peers")
    options = arguments.parse_args()
    if options.what in TRAINED:
        about = record("benchmarks.float8", options.quick, "cpu")
        return write(options.json, about | TRAINED[options.what](options.quick))
    jax.config.update("jax_platforms", "cpu")
    try:
        topologies.get_topology_desc(**TARGETS["h200"])
    except NotImplementedError:
        return print('The compiler for the H200 is not installed: pip install "jax[cuda13]"')
    about = record("benchmarks.float8", options.quick, "h200, which was not there", compiled.PACKAGES)
    return write(options.json, about | COMPILED[options.what](options.quick, options.only))


if __name__ == "__main__":
    main()
