"""What the compilers for a TPU v5e and an H200 say of a program, without either.

The TPU needs `pip install libtpu`; the GPU, `pip install "jax[cuda13]"` (5 GB).
"""

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks import hlo
from benchmarks.record import Rows, show
from benchmarks.timing import Case

# What XLA has to know of a GPU that is not there. Without the versions and the feature extension, it computes float8
# products in 16 bit.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 151397597184 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 patch: 0 } device_description_str: "NVIDIA H200"
"""
TARGETS: dict[str, dict[str, str]] = {
    "tpu": {"platform": "tpu", "topology_name": "v5e:2x2"},
    "h200": {"topology_name": "one", "platform": "cuda", "target_config": H200, "topology": "1x1x1"},
}


def is_installed(target: str) -> bool:
    """Whether the compiler for a target is there. If not, print what to install."""
    try:
        topologies.get_topology_desc(**TARGETS[target])
    except NotImplementedError:
        print('The compiler is not installed: pip install "jax[cuda13]", or for a TPU pip install libtpu')
        return False
    return True


def in_shapes(make: Callable[[], Case]) -> Case:
    """The case that `make` makes of arrays, with their shapes in place of them."""
    made: list[Case] = []

    def arrays() -> Any:
        made.append(make())
        return made[0].carry, made[0].args

    carry, args = jax.eval_shape(arrays)
    return dataclasses.replace(made[0], carry=carry, args=args)


def compile_for(target: str, cases: Iterable[Case]) -> Rows:
    """What the program of each case does, compiled for one device of a target, and the time that this predicts."""
    rows: Rows = []
    for case in cases:
        program = compiled(target, case.step, case.carry, *case.args, donate=True)
        text = program.as_text()
        found = hlo.count(text)
        rows.append(
            {
                "name": case.name,
                "megabytes": found.bytes / 1e6,
                "kernels": int(found.kernels),
                "temporary_megabytes": program.memory_analysis().temp_size_in_bytes / 1e6,
                "conditionals": text.count(" conditional("),
                "predicted_milliseconds": hlo.DEVICES[target].milliseconds(found),
            }
        )
        rows[-1]["bytes_ratio"] = rows[-1]["megabytes"] / rows[0]["megabytes"]
        rows[-1]["predicted_ratio"] = rows[-1]["predicted_milliseconds"] / rows[0]["predicted_milliseconds"]
        show(rows[-1])
    return rows


def compiled(target: str, fun: Any, *args: Any, donate: bool = False, options: Any = None) -> Any:
    """The program of a function of arrays or shapes, compiled for one device of a target."""
    return lowered(target, fun, *args, donate=donate).compile(compiler_options=options)


def lowered(target: str, fun: Any, *args: Any, donate: bool = False) -> Any:
    """What the compiler is given."""
    sharding = SingleDeviceSharding(topologies.get_topology_desc(**TARGETS[target]).devices[0])
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    return jax.jit(fun, donate_argnums=0 if donate else ()).lower(*args)


def does_not_fit(error: Exception) -> float:
    """The bytes of temporary memory that the compiler for a TPU names when they are more than it has."""
    if not (found := re.search(r"HLO temporaries \((\d+\.\d+)G\)", str(error))):
        raise error
    return float(found[1]) * 2**30


def digest(program: Any) -> str:
    """A hash of the text of a lowered program, which holds no lines of the source."""
    return hashlib.sha256(program.as_text().encode()).hexdigest()[:16]


def facts(program: Any) -> dict[str, float | None]:
    """Memory, and what XLA counts itself: only on a TPU, because without a GPU, XLA:GPU has no analysis of costs."""
    cost = program.cost_analysis() or {}
    counts = {"gigabytes_accessed": "bytes accessed", "gigaflops": "flops"}
    found = {key: cost[name] / 1e9 if name in cost else None for key, name in counts.items()}
    return {"temporary_megabytes": program.memory_analysis().temp_size_in_bytes / 1e6} | found


def kept(loss: Any, params: Any, batch: Any) -> float:
    """The megabytes that `jax.vjp` keeps from the forward pass: of what it keeps, all that is not an argument."""
    residuals = lambda p, b: jax.tree.leaves(jax.vjp(lambda p: loss(p, b), p)[1])
    jaxpr = jax.make_jaxpr(residuals)(params, batch).jaxpr
    arguments = set(jaxpr.invars)
    made = [v.aval for v in jaxpr.outvars if not hasattr(v, "val") and v not in arguments]
    return float(sum(x.size * x.dtype.itemsize for x in made) / 1e6)
