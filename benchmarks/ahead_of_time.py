"""What the compilers for a TPU v5e and an H200 say of a step, without either.

The TPU needs `pip install libtpu`; the GPU, `pip install "jax[cuda13]"` (5 GB).
"""

import os
import time

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # before jax loads libtpu: there is no TPU to ask about
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks import peers, update
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


def on_device(target: str, tree: Any) -> Any:
    """The shapes of a tree of arrays, on one device of a target."""
    sharding = SingleDeviceSharding(topologies.get_topology_desc(**TARGETS[target]).devices[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def ahead(target: str, quick: bool) -> list[dict[str, Any]]:
    """Each optimizer's step by each library at 21 M parameters in 40 leaves, and in 16 leaves of two shapes."""
    there = peers.installed(peers.JAX)
    rows = []
    for optimizer in update.SCALED[:1] if quick else update.OPTIMIZERS:
        for leaves, width in [(4, 16)] if quick else [(40, 1024), (16, 1024)]:
            labels = {"optimizer": optimizer, **update.size(leaves, width)}
            print(
                "\n{optimizer}, {millions:.3g} M parameters in {leaves} leaves, compiled for {0}".format(
                    target, **labels
                )
            )
            # libtpu takes minutes for each of the others.
            cases = update.cases(optimizer, leaves, width, there if optimizer in update.SCALED else update.FEW[:2])
            for row in compile_for(target, cases):
                again = optimizer == "clip + adamw" or row["name"] not in peers.UNCHECKED
                read = sum(x.nbytes for x in jax.tree.leaves(cases[0].args)) / 1e6
                limit = row.pop("argument_and_result_megabytes") + read * again
                rows.append(labels | row | {"limit_megabytes": limit})
    return rows


def compile_for(target: str, cases: list[Case]) -> list[dict[str, Any]]:
    """Bytes accessed, memory, kernels and conditionals of each case, compiled for one device of a target."""
    rows = []
    for case in cases:
        carry, args = on_device(target, (case.carry, case.args))
        start = time.perf_counter()
        compiled = jax.jit(case.step, donate_argnums=0).lower(carry, *args).compile()
        seconds = time.perf_counter() - start
        text, cost = compiled.as_text(), compiled.cost_analysis() or {}  # XLA:GPU has no analysis without a GPU
        accessed = cost.get("bytes accessed")
        memory = compiled.memory_analysis()
        rows.append(
            {
                "name": case.name,
                "megabytes_accessed": None if accessed is None else accessed / 1e6,
                "argument_and_result_megabytes": (memory.argument_size_in_bytes + memory.output_size_in_bytes) / 1e6,
                "temporary_megabytes": memory.temp_size_in_bytes / 1e6,
                "fusions": text.count(" fusion("),
                "kernels": kernels(text),
                "conditionals": text.count(" conditional("),
                "compile_seconds": seconds,
            }
        )
        print(
            f"{case.name:32s} {(accessed or float('nan')) / 1e6:8.1f} MB accessed "
            "{temporary_megabytes:8.1f} MB temporary {kernels:4d} kernels {conditionals:2d} conditionals".format(
                **rows[-1]
            ),
            flush=True,
        )
    return rows


def kernels(text: str) -> int:
    """Fusions, calls of libraries and copies that the program starts itself, not counting those in a branch."""
    entry = text[text.index("\nENTRY ") :].partition("\n}")[0]
    return sum(entry.count(f" {kind}(") for kind in ("fusion", "custom-call", "copy", "copy-start"))
