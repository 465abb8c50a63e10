"""`optimization_barrier`, for values of any types, and one that is none on TPUs.

JAX's own gives all its results the mesh axes along which any of its operands varies. Here each value keeps its type.
Where the platform matters, that of the lowered program decides, not the one that traces it.
"""

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir


def _primitive(name: str) -> core.Primitive:
    barrier = core.Primitive(name)
    barrier.multiple_results = True
    barrier.def_impl(lambda *xs: list(xs))
    barrier.def_abstract_eval(lambda *avals: list(avals))
    ad.primitive_jvps[barrier] = lambda xs, tangents: (barrier.bind(*xs), list(tangents))
    batching.primitive_batchers[barrier] = lambda xs, dims: (barrier.bind(*xs), list(dims))
    mlir.register_lowering(barrier, mlir.lower_fun(lambda *xs: lax.optimization_barrier(list(xs))))
    return barrier


_barrier, _barrier_unless_tpu = _primitive("barrier"), _primitive("barrier_unless_tpu")
mlir.register_lowering(_barrier_unless_tpu, lambda ctx, *xs: list(xs), platform="tpu")


def behind_barrier(values: Sequence[Any]) -> list[Any]:
    """The values, behind one barrier."""
    behind: list[Any] = _barrier.bind(*values)
    return behind


def unless_tpu(values: Sequence[Any]) -> list[Any]:
    """The values, behind one barrier except on TPUs."""
    behind: list[Any] = _barrier_unless_tpu.bind(*values)
    return behind
