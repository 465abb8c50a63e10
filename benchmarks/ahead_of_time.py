"""What the compilers for a TPU v5e and an H200 say of a step, without either.

The TPU needs `pip install libtpu`; the GPU, `pip install "jax[cuda13]"` (5 GB).
"""

import os

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # before jax loads libtpu: there is no TPU to ask about
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.timing import Case

# What XLA has to know of a GPU that is not there.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 151397597184 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 patch: 0 } device_description_str: "NVIDIA H200"
"""
TARGETS: dict[str, dict[str, str]] = {
    "tpu": {"platform": "tpu", "topology_name": "v5e:2x2"},
    "h200": {"topology_name": "one", "platform": "cuda", "target_config": H200, "topology": "1x1x1"},
}


def on_device(target: str, tree: Any) -> Any:
    """The shapes of a tree of arrays, on one device of a target."""
    topology = topologies.get_topology_desc(**TARGETS[target])
    sharding = NamedSharding(Mesh(np.array(topology.devices[:1]), ("x",)), PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def compile_for(target: str, cases: list[Case]) -> list[dict[str, Any]]:
    """Bytes accessed, temporary memory, fusions and conditionals of each case, compiled for one device of a target."""
    rows = []
    for case in cases:
        carry, args = on_device(target, (case.carry, case.args))
        compiled = jax.jit(case.step, donate_argnums=0).lower(carry, *args).compile()
        text, cost = compiled.as_text(), compiled.cost_analysis() or {}  # XLA:GPU has no analysis without a GPU
        rows.append(
            {
                "name": case.name,
                "megabytes_accessed": cost.get("bytes accessed", float("nan")) / 1e6,
                "temporary_megabytes": compiled.memory_analysis().temp_size_in_bytes / 1e6,
                "fusions": text.count(" fusion("),
                "conditionals": text.count(" conditional("),
            }
        )
        print(
            "{name:28s} {megabytes_accessed:8.1f} MB accessed {temporary_megabytes:8.1f} MB temporary "
            "{fusions:4d} fusions {conditionals:2d} conditionals".format(**rows[-1]),
            flush=True,
        )
    return rows
