"""Hints to the compiler, as primitives that return their operands.

`behind_barrier`, `unless_tpu` and `cotangents_behind_barrier` keep it from moving a computation across a place.
`in_one_kernel_on_tpu` asks for one kernel, and `row_major` for a layout in memory.

JAX's own barrier gives all its results the mesh axes along which any of its operands varies. Here each value keeps its
type. Where the platform matters, the platform of the lowered program decides, not the one that traces it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.interpreters import ad, mlir

from jamp._jaxprs.define import define
from jamp._jaxprs.manual_axes import is_partial


def _by_jax(*values: Any) -> list[Any]:
    """JAX's barrier. It takes a sum over devices that is still to be taken only by itself."""
    alone = [is_partial(jax.typeof(x)) for x in values]
    together = iter(lax.optimization_barrier([x for x, is_alone in zip(values, alone, strict=True) if not is_alone]))
    return [
        lax.optimization_barrier(x) if is_alone else next(together) for x, is_alone in zip(values, alone, strict=True)
    ]


def _needing(x: Array, *codes: Array) -> list[Array]:
    """The value, computed from codes of 8 bits, none of which is 1000, and the codes."""
    for code in codes:
        x = jnp.where(code.astype(jnp.int32) == 1000, jnp.zeros_like(x), x)
    return [x, *codes]


def _as_they_are(*values: Any) -> list[Any]:
    return list(values)


def _identity(name: str, lowered: Any = _as_they_are, **options: Any) -> Any:
    """A primitive that returns its operands. `lowered` may tell the compiler something about them."""
    same = lambda xs, tangents: (primitive.bind(*xs), list(tangents))
    types = lambda *avals: list(avals)
    transpose = lambda cotangents, *xs: [
        ct if ad.is_undefined_primal(x) else None for ct, x in zip(_behind(cotangents), xs, strict=True)
    ]
    rules = {"jvp": same, "transpose": transpose, **options}
    primitive: Any = define(name, lowered, types, **rules, multiple_results=True)
    primitive.def_impl(_as_they_are)
    return primitive


_barrier = _identity("barrier", _by_jax)
_barrier_unless_tpu = _identity("barrier_unless_tpu", _by_jax, platforms={"tpu": _as_they_are})
_barrier_of_cotangents = _identity("cotangents_behind_barrier", jvp=lambda xs, tangents: (list(xs), _behind(tangents)))
_one_kernel = _identity("in_one_kernel_on_tpu", platforms={"tpu": _needing})
_row_major = _identity("row_major")


def _lower_row_major(ctx: Any, x: Any) -> Any:
    """A constraint on the layout, if the program is for one device.

    On several, XLA would gather the value for it (for H200s, jaxlib 0.10.2).
    """
    is_alone = getattr(ctx.module_context.axis_context, "num_devices", None) == 1
    return _lower_constraint(ctx, x) if is_alone else [x]


_lower_constraint = mlir.lower_fun(lambda x: [with_layout_constraint(x, Layout(tuple(range(x.ndim))))])
mlir.register_lowering(_row_major, _lower_row_major, platform="cuda")


def _behind(values: Sequence[Any]) -> list[Any]:
    """Tangents or cotangents behind one barrier, but for symbolic zeros."""
    places = [i for i, x in enumerate(values) if type(x) is not ad.Zero]
    behind = list(values)
    for i, x in zip(places, behind_barrier([values[i] for i in places]) if places else [], strict=True):
        behind[i] = x
    return behind


def behind_barrier(values: Sequence[Any]) -> list[Any]:
    """The values, behind one barrier."""
    behind: list[Any] = _barrier.bind(*values)
    return behind


def unless_tpu(values: Sequence[Any]) -> list[Any]:
    """The values, behind one barrier except on TPUs."""
    behind: list[Any] = _barrier_unless_tpu.bind(*values)
    return behind


def in_one_kernel_on_tpu(x: Array, codes: Sequence[Array]) -> Array:
    """The value, on a TPU computed in one kernel with such codes as lie as it does (for a v5e, jaxlib 0.10.2)."""
    kind = lambda y: (jnp.shape(y), jax.typeof(y).sharding)
    codes = [code for code in codes if kind(code) == kind(x)]
    same: Array = _one_kernel.bind(x, *codes)[0]
    return same if codes else x


def cotangents_behind_barrier(values: Sequence[Any]) -> list[Any]:
    """The values. In reverse mode their cotangents, in forward mode their tangents, are behind one barrier."""
    same: list[Any] = _barrier_of_cotangents.bind(*values)
    return same


def row_major(x: Array) -> Array:
    """The value. A GPU stores it with its last axis innermost.

    The two products that read an 8-bit operand want different layouts. Left alone, XLA:GPU computes the value in that
    of the first one, for which it transposes the source, in 16 or 32 bits, and copies the result to the other layout
    (for an H200, jaxlib 0.10.2). With the layout of the source, one kernel writes both.
    """
    same: Array = _row_major.bind(x)[0]
    return same
