"""`optimization_barrier` on some platforms. The platform of the lowered program decides, not the one that traces it."""

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.interpreters import ad, batching, mlir

from jamp import _jaxpr


def _make(name: str, platform: str, *, is_exception: bool) -> Any:
    """A barrier on one platform, or on all others."""
    primitive = _jaxpr.core().Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *xs: list(xs))
    primitive.def_abstract_eval(lambda *avals: list(avals))
    ad.primitive_jvps[primitive] = lambda xs, tangents: (primitive.bind(*xs), list(tangents))
    batching.primitive_batchers[primitive] = lambda xs, dims: (primitive.bind(*xs), list(dims))
    barrier = mlir.lower_fun(lambda *xs: lax.optimization_barrier(list(xs)), multiple_results=True)
    nothing = lambda ctx, *xs: list(xs)
    mlir.register_lowering(primitive, barrier if is_exception else nothing)
    mlir.register_lowering(primitive, nothing if is_exception else barrier, platform=platform)
    return primitive


_unless_tpu = _make("barrier_unless_tpu", "tpu", is_exception=True)
_on_cpu = _make("barrier_on_cpu", "cpu", is_exception=False)


def unless_tpu(values: Sequence[Any]) -> list[Any]:
    """The values, behind a barrier but on TPUs."""
    found: list[Any] = _unless_tpu.bind(*values)
    return found


def on_cpu(value: Any) -> Any:
    """A value, behind a barrier on CPUs."""
    return _on_cpu.bind(value)[0]
