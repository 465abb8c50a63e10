"""`optimization_barrier`, for values of any types, and one that is none on TPUs.

JAX's own gives all its results the mesh axes along which any of its operands varies. Here each value keeps its type.
Where the platform matters, that of the lowered program decides, not the one that traces it.
"""

import functools
from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.interpreters import ad, batching, mlir

from jamp import _jaxpr


def behind_barrier(values: Sequence[Any]) -> list[Any]:
    """The values, behind one barrier."""
    found: list[Any] = primitive("barrier").bind(*values)
    return found


def unless_tpu(values: Sequence[Any]) -> list[Any]:
    """The values, behind one barrier except on TPUs."""
    found: list[Any] = primitive("barrier_unless_tpu").bind(*values)
    return found


@functools.cache
def primitive(name: str) -> Any:
    """The primitive of `behind_barrier` or of `unless_tpu`. Make it before a trace: see `_jaxpr.core`."""
    barrier = _jaxpr.core().Primitive(name)
    barrier.multiple_results = True
    barrier.def_impl(lambda *xs: list(xs))
    barrier.def_abstract_eval(lambda *avals: list(avals))
    ad.primitive_jvps[barrier] = lambda xs, tangents: (barrier.bind(*xs), list(tangents))
    batching.primitive_batchers[barrier] = lambda xs, dims: (barrier.bind(*xs), list(dims))
    mlir.register_lowering(barrier, mlir.lower_fun(lambda *xs: lax.optimization_barrier(list(xs))))
    if name == "barrier_unless_tpu":
        mlir.register_lowering(barrier, lambda ctx, *xs: list(xs), platform="tpu")
    return barrier
