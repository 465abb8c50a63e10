"""The axes of a shard_map: which arrays vary along them, and tracing inside a shard_map that was traced already."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jamp._jaxprs import ir
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn


def trace_inside(inside: JaxprEqn | None, fun: Callable[..., Any], avals: Sequence[Any]) -> ClosedJaxpr:
    """The jaxpr of a function of arrays of these types, with the mesh and the named axes of a shard_map, if any.

    A tracer knows along which axes it varies, and a collective needs its axis, only inside the shard_map.
    """
    if inside is None or _manual_axes(inside) <= _manual():  # a derivative is traced inside
        return jax.make_jaxpr(fun)(*avals)
    params, mesh = inside.params, inside.params["mesh"]
    names = [name for name in mesh.axis_names if name in _manual_axes(inside)]
    ordered = lambda axes: tuple(name for name in names if name in axes)
    unreduced = [ordered(aval.manual_axis_type.unreduced) for aval in avals]
    reduced = [ordered(aval.manual_axis_type.reduced) for aval in avals]
    axes_of = [ordered({*varying(aval), *axes}) for aval, axes in zip(avals, unreduced, strict=True)]
    # Each array gets a first axis, over which a shard_map can split it, so that it varies as it should. On a mesh with
    # explicit axes it must be sharded so already.
    specs = [PartitionSpec(axes or None) for axes in axes_of]
    outside = [
        jax.ShapeDtypeStruct(
            (math.prod(mesh.shape[name] for name in axes), *aval.shape),
            aval.dtype,
            weak_type=aval.weak_type,
            sharding=NamedSharding(mesh, PartitionSpec(*spec, *partitions(aval.sharding.spec))),
        )
        for aval, axes, spec in zip(avals, axes_of, specs, strict=True)
    ]
    inner = jax.jit(fun)

    def body(*xs: Array) -> tuple[()]:
        arrays = [lax.pcast(x[0], axes, to="unreduced") for x, axes in zip(xs, unreduced, strict=True)]
        inner(*(lax.pcast(x, axes, to="reduced") for x, axes in zip(arrays, reduced, strict=True)))
        return ()

    call = jax.shard_map(
        body, mesh=mesh, in_specs=tuple(specs), out_specs=(), axis_names=set(names), check_vma=params["check_vma"]
    )
    (eqn,) = (eqn for eqn in jax.make_jaxpr(call)(*outside).eqns if ir.name(eqn) == "shard_map")
    found: ClosedJaxpr = [eqn for eqn in eqn.params["jaxpr"].eqns if ir.name(eqn) == "jit"][-1].params["jaxpr"]
    return found


def splits(eqn: JaxprEqn) -> list[bool]:
    """Which operands a shard_map splits over all its axes. The cotangent of another one is a sum over devices."""
    names = _manual_axes(eqn)
    axes = lambda entry: set(entry) if isinstance(entry, tuple) else {entry}
    return [names <= set().union(*map(axes, partitions(spec))) for spec in eqn.params["in_specs"]]


def partitions(spec: PartitionSpec) -> tuple[Any, ...]:
    """The mesh axes that split each axis of an array. JAX does not iterate over a spec with `reduced` axes."""
    return tuple(spec.partitions if hasattr(spec, "partitions") else spec)  # jax 0.10.0 does


def shards_of(aval: Any) -> list[int]:
    """The number of shards of each axis of an array over the mesh axes that its type names."""
    mesh, found = aval.sharding.mesh, [1] * len(aval.shape)
    for i, part in enumerate(partitions(aval.sharding.spec)):
        names = part if isinstance(part, tuple) else (part,)
        found[i] = math.prod(mesh.shape[name] for name in names if name in mesh.axis_names)
    return found


def hashable(axis_name: Any) -> Any:
    """The name or names of axes, of which JAX also takes a list."""
    return tuple(axis_name) if isinstance(axis_name, list) else axis_name


def by_kind(axis_name: Any) -> list[tuple[Any, ...]]:
    """The axes of the enclosing shard_maps among these, and the others."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    groups = tuple(x for x in names if x in _manual()), tuple(x for x in names if x not in _manual())
    return [group for group in groups if group]


def varying_over(x: Array, axis_name: Any) -> Array:
    """`x` for a collective over these axes. It takes no array that varies along some of them and not along others."""
    names = axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,)
    own = varying(jax.typeof(x))
    if own.isdisjoint(names):
        return x
    missing = tuple(name for name in names if name in _manual() and name not in own)
    return lax.pcast(x, missing, to="varying") if missing else x


def varying_together(arrays: Sequence[Array], axes: frozenset[str] = frozenset()) -> list[Array]:
    """Return the arrays, each varying along `axes` and every axis along which one of them does."""
    axes = axes.union(*(varying(jax.typeof(x)) for x in arrays))
    missing = [tuple(axes - varying(jax.typeof(x))) for x in arrays]
    return [lax.pcast(x, names, to="varying") if names else x for x, names in zip(arrays, missing, strict=True)]


def zeros(aval: Any, dtype: Any = None) -> Array:
    """Zeros of a type, perhaps of another dtype: sharded and varying alike, as the carry of a loop must be."""
    mesh = aval.sharding.mesh
    is_explicit = not mesh.empty and AxisType.Explicit in mesh.axis_types
    array = jnp.zeros(aval.shape, dtype or aval.dtype, device=aval.sharding if is_explicit else None)
    axes = tuple(varying(aval))
    return lax.pcast(array, axes, to="varying") if axes else array


def _manual() -> set[str]:
    """The axes of the enclosing shard_maps."""
    mesh = jax.sharding.get_abstract_mesh()
    return {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Manual}


def _manual_axes(eqn: JaxprEqn) -> frozenset[str]:
    names: frozenset[str] = eqn.params["newly_manual_axes" if "newly_manual_axes" in eqn.params else "manual_axes"]
    return names  # jax 0.10.0 has the other name


def varying(aval: Any) -> frozenset[str]:
    """The axes of the enclosing shard_map along which an array of this type varies. Without check_vma: none."""
    names: frozenset[str] = aval.manual_axis_type.varying
    return names


def is_partial(aval: Any) -> bool:
    """Whether an array is a sum over devices that is still to be taken, `unreduced`, or its gradient is, `reduced`."""
    kind = getattr(aval, "manual_axis_type", None)
    return kind is not None and bool(kind.unreduced | kind.reduced)
