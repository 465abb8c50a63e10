"""The gradients in a tree, and the check that all of them are finite."""

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard
from jax.tree_util import keystr

from jamp._cast import is_inexact

# Flax's name for the collection of fp8 scales and histories. A step replaces their values by their "gradients".
OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"

# Arrays that are combined before they are reduced. With more, XLA does not compute a clip's norm in the same kernel.
_MOST = 8
_NO_DIGITS = str.maketrans("", "", "0123456789")


def all_finite(tree: Any, *, axis_name: Any = None) -> Array:
    """Return whether no floating or complex leaf of a tree holds inf or NaN.

    The check is exact for values of any size, from any computation, on any backend. Outside `jit` it is one dispatch.

    Args:
      tree: A pytree of arrays. Integers, bools, PRNG keys, float0 and leaves that are not arrays count as finite, and
        so does an empty tree.
      axis_name: Name(s) of `shard_map`, `pmap` or `vmap` axes. The result is True only if all replicas are finite.

    Returns:
      bool[].

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> bool(jamp.all_finite({"w": jnp.array([1.0, jnp.inf])}))
      False
    """
    return leaves_finite(*split_gradients(tree)[:2], axis_name)


def is_gradient(path: tuple[Any, ...], x: Any) -> bool:
    """Whether a leaf is a gradient to unscale and check. Leaves of Flax's fp8 collection are not."""
    return is_inexact(x) and all(getattr(key, "key", None) != OVERWRITE_WITH_GRADIENT for key in path)


def split_gradients(tree: Any) -> tuple[list[Any], tuple[str, ...], Callable[[list[Any]], Any]]:
    """Take the gradients out of a tree.

    Returns:
      The gradients, a label for each (the last key of the path without its digits, so the same parameter of each layer
      has the same label), and a function that puts other leaves in their places.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    chosen = [i for i, (path, x) in enumerate(flat) if is_gradient(path, x)]

    def merge(gradients: list[Any]) -> Any:
        new = dict(zip(chosen, gradients, strict=True))
        return jax.tree.unflatten(treedef, [new.get(i, x) for i, (_, x) in enumerate(flat)])

    labels = tuple(keystr(flat[i][0][-1:]).translate(_NO_DIGITS) for i in chosen)
    return [flat[i][1] for i in chosen], labels, merge


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def leaves_finite(leaves: list[Array], labels: tuple[str, ...], axis_name: Any) -> Array:
    """`all_finite` of a list of floating and complex arrays with their `labels`."""
    groups = _groups([lax.stop_gradient(jnp.asarray(x)) for x in leaves], labels)
    if not groups:
        return jnp.bool_(True)
    # Combined here, because XLA then reduces over devices after these maxima, with one scalar per device.
    found = map(_any_nonfinite, groups)
    count = _materialize(functools.reduce(lambda x, y: jnp.maximum(x, on_mesh_of(x, y)), found))
    return (count if axis_name is None else _sum_over(count, axis_name)) == 0


def on_mesh_of(x: Array, scalar: Array) -> Array:
    """A scalar, where an operation can combine it with `x`.

    On Explicit and Manual axes the sharding is part of the type, and arrays on two meshes cannot be combined. The
    gradient of a `reduced` parameter is `unreduced`, which means that its sum over devices is still to be taken. Only
    what is `reduced` may multiply it.
    """
    kind = jax.typeof(x)
    mesh, spec, own = kind.sharding.mesh, kind.sharding.spec, jax.typeof(scalar).sharding.mesh
    if AxisType.Manual in mesh.axis_types:
        axes = kind.manual_axis_type.unreduced | kind.manual_axis_type.reduced
        return lax.pcast(scalar, tuple(axes), to="reduced") if axes else scalar
    if axes := spec.unreduced | spec.reduced:
        # In the shape of `x`, because jax 0.10.0 does not broadcast what is `reduced` in the multiplication.
        return jnp.broadcast_to(reshard(scalar, NamedSharding(mesh, PartitionSpec(reduced=axes))), x.shape)
    if mesh.empty or own.empty or own == mesh:
        return scalar
    return reshard(scalar, NamedSharding(mesh, PartitionSpec()))


def _sum_over(count: Array, axis_name: Any) -> Array:
    try:
        lax.axis_size(axis_name)  # psum itself fails without a message in a shard_map that checks vma
    except NameError as error:
        raise NameError(
            f"axis_name={axis_name!r} names an axis that is not mapped here ({error}). Name axes of the enclosing "
            "shard_map, pmap or vmap; under jit with sharded arrays leave axis_name out: the check covers all shards."
        ) from error
    return lax.psum(count, axis_name)


def _groups(arrays: list[Array], labels: tuple[str, ...]) -> list[list[Array]]:
    """Divide arrays that are not empty into groups of one type that can be combined without moving data.

    Arrays of one type but different labels may have transposed layouts in memory, such as a tied embedding and a matrix
    of a layer. Arrays whose sharding only the compiler knows are not grouped.
    """
    groups = defaultdict(list)
    for i, (label, x) in enumerate(zip(labels, arrays, strict=True)):
        if 0 not in x.shape:
            groups[(jax.typeof(x), label) if _type_tells_sharding(x) else i].append(x)
    return [group[i : i + _MOST] for group in groups.values() for i in range(0, len(group), _MOST)]


def _type_tells_sharding(x: Array) -> bool:
    mesh = jax.typeof(x).sharding.mesh
    kinds = {kind for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True) if size > 1}
    return jax.device_count() == 1 if mesh.empty else AxisType.Auto not in kinds


def _any_nonfinite(group: list[Array]) -> Array:
    """Whether some arrays of one type hold inf or NaN, as 0 or 1, f32[].

    A float, because XLA:TPU computes only float reductions in the same pass as a clip's norm. Arrays that are combined
    before they are reduced take one kernel instead of many on GPU. XLA:CPU writes what it reduces to memory: here the
    answers for a whole group, while a sum of `x - x` made it write every unscaled gradient.
    """
    found = functools.reduce(jnp.logical_or, [~jnp.isfinite(x) for x in group])
    return jnp.max(found.astype(jnp.float32))


def _materialize(count: Array) -> Array:
    """A scalar that is 0 if and only if `count` is, and that XLA keeps in memory.

    XLA:CPU copies a plain reduction, but not a dot product, into every fusion that reads it: compile time is quadratic.
    """
    pair = jnp.stack([count, count])
    return jnp.dot(pair, pair, precision=lax.Precision.DEFAULT)
