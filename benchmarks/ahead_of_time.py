"""What the compiler says of the step for a TPU v5e, without one: needs `pip install libtpu`."""

import os

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # before jax loads libtpu: there is no TPU to ask about
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.timing import Case


def compile_for_tpu(cases: list[Case]) -> list[dict[str, Any]]:
    """Bytes accessed, temporary memory, fusions and conditionals of each case, compiled for one TPU v5e core."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    sharding = NamedSharding(Mesh(np.array(topology.devices[:1]), ("x",)), PartitionSpec())
    rows = []
    for case in cases:
        on_tpu = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        carry, args = jax.tree.map(on_tpu, (case.carry, case.args))
        compiled = jax.jit(case.step, donate_argnums=0).lower(carry, *args).compile()
        text = compiled.as_text()
        rows.append(
            {
                "name": case.name,
                "megabytes_accessed": compiled.cost_analysis()["bytes accessed"] / 1e6,
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
