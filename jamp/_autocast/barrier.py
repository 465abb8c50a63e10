"""`optimization_barrier` except on TPUs. The platform of the lowered program decides, not the one that traces it."""

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.interpreters import ad, batching, mlir

from jamp import _jaxpr

_unless_tpu = _jaxpr.core().Primitive("barrier_unless_tpu")
_unless_tpu.multiple_results = True


def unless_tpu(values: Sequence[Any]) -> list[Any]:
    """The values, behind a barrier except on TPUs."""
    found: list[Any] = _unless_tpu.bind(*values)
    return found


_barrier = mlir.lower_fun(lambda *xs: lax.optimization_barrier(list(xs)), multiple_results=True)
_unless_tpu.def_impl(lambda *xs: list(xs))
_unless_tpu.def_abstract_eval(lambda *avals: list(avals))
ad.primitive_jvps[_unless_tpu] = lambda xs, tangents: (_unless_tpu.bind(*xs), list(tangents))
batching.primitive_batchers[_unless_tpu] = lambda xs, dims: (_unless_tpu.bind(*xs), list(dims))
mlir.register_lowering(_unless_tpu, _barrier)
mlir.register_lowering(_unless_tpu, lambda ctx, *xs: list(xs), platform="tpu")
