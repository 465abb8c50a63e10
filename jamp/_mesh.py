"""Meshes: put a scalar on the mesh of an array, and count the shards that a view must not cut."""

import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, get_abstract_mesh, reshard


def reshard_like(x: Array, scalar: Array) -> Array:
    """Reshard a scalar so that an operation can combine it with `x`.

    On Explicit and Manual axes the sharding is part of the type, and arrays on two meshes cannot be combined. The
    gradient of a `reduced` parameter is `unreduced`: its sum over devices is still to be taken. Only a `reduced` array
    may multiply it.
    """
    kind = jax.typeof(x)
    mesh, spec, own = kind.sharding.mesh, kind.sharding.spec, jax.typeof(scalar).sharding.mesh
    if AxisType.Manual in mesh.axis_types:
        axes = kind.manual_axis_type.unreduced | kind.manual_axis_type.reduced
        return lax.pcast(scalar, tuple(axes), to="reduced") if axes else scalar
    if axes := spec.unreduced | spec.reduced:
        # In the shape of `x`, because jax 0.10.0 does not broadcast a `reduced` array in a multiplication.
        return jnp.broadcast_to(reshard(scalar, NamedSharding(mesh, PartitionSpec(reduced=axes))), x.shape)
    if mesh.empty or own.empty or own == mesh:
        return scalar
    return reshard(scalar, NamedSharding(mesh, PartitionSpec()))


_SHARDS_WITHOUT_A_MESH = 32  # It divides an axis of 768 into shards that are multiples of 8.


def count_shards(x: Array, axis: int) -> int:
    """Return the largest number of shards of an axis: the devices of Auto mesh axes and of axes that its type names.

    Without a mesh in the context, as when only arguments of `jit` are sharded, tracing cannot know, and it is 32.
    """
    sharding = jax.typeof(x).sharding
    mesh = get_abstract_mesh() if sharding.mesh.empty else sharding.mesh
    if mesh.empty:
        return _SHARDS_WITHOUT_A_MESH
    auto = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto}
    return math.prod(mesh.shape[name] for name in {*auto, *_names(x, axis)})


def count_named_shards(x: Array, axis: int) -> int:
    """Return the number of shards of an axis over the mesh axes that its type names, which are Explicit."""
    return math.prod(jax.typeof(x).sharding.mesh.shape[name] for name in _names(x, axis))


def keep_sharding(x: Array, old: Array, *, of: tuple[Array, Array]) -> Array:
    """Reshard what belongs to an array like its old value, on Explicit axes, if the array lies as it did: `of`."""
    new, own = jax.typeof(x).sharding, jax.typeof(old).sharding
    is_settled = jax.typeof(of[0]).sharding == jax.typeof(of[1]).sharding
    return reshard(x, own) if is_settled and new.mesh == own.mesh and new != own else x


def whole_along_last_axis(x: Array) -> Array:
    """Reshard an array on Explicit axes so that each device has all of the last axis."""
    sharding = jax.typeof(x).sharding
    return reshard(x, sharding.update(spec=sharding.spec.update(partitions=(*sharding.spec[:-1], None))))


def _names(x: Array, axis: int) -> tuple[str, ...]:
    spec = jax.typeof(x).sharding.spec
    names = spec[axis] if len(spec) >= -axis else None
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)
