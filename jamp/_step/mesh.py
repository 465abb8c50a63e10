"""Resharding of a scalar onto the mesh of an array."""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard


def on_mesh_of(x: Array, scalar: Array) -> Array:
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
