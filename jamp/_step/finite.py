"""The check that all gradients in a tree are finite."""

import functools
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType

from jamp._jaxprs.manual_axes import by_kind, hashable, varying_over
from jamp._leaves import split_gradients
from jamp._mesh import reshard_like

# The most arrays that are combined before they are reduced. With more, XLA needs a second kernel for a clip's norm (for
# an H200, jaxlib 0.10.2).
_MOST = 8


def all_finite(tree: Any, *, axis_name: Any = None) -> Array:
    """Return whether no floating or complex leaf of a tree holds inf or NaN.

    The check is exact for values of any size, from any computation, on any backend. Outside `jit` it is one dispatch.

    Args:
      tree: A pytree of arrays and Python numbers. Integers, bools, PRNG keys, float0 and all other leaves count as
        finite, and so do an empty tree and Flax's collection `_overwrite_with_gradient`, which holds no gradients.
      axis_name: Name(s) of `shard_map`, `pmap` or `vmap` axes. The result is True only if all replicas are finite.

    Returns:
      bool[].

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> bool(jamp.all_finite({"w": jnp.array([1.0, jnp.inf])}))
      False
    """
    return are_leaves_finite(*split_gradients(tree)[:2], hashable(axis_name))


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def are_leaves_finite(leaves: list[Array], labels: tuple[str, ...], axis_name: Any) -> Array:
    """Return whether floating and complex arrays hold no inf or NaN, bool[]. `labels` are for `_groups`."""
    groups = _groups([lax.stop_gradient(jnp.asarray(x)) for x in leaves], labels)
    if not groups:
        return jnp.bool_(True)
    # The maxima are combined before XLA reduces over devices, so that it communicates one scalar per device.
    counts = map(_any_nonfinite, groups)
    count = _materialize(functools.reduce(lambda x, y: jnp.maximum(x, reshard_like(x, y)), counts))
    return (count if axis_name is None else _sum_over(count, axis_name)) == 0


def _sum_over(count: Array, axis_name: Any) -> Array:
    try:
        lax.axis_size(axis_name)  # In a shard_map with check_vma, psum raises an error without a message.
    except NameError as error:
        raise NameError(
            f"axis_name must be an axis of the enclosing shard_map, pmap or vmap, got {axis_name!r} ({error}). Under "
            "jit with sharded arrays, leave it out."
        ) from error
    # An axis of `vmap` and one of `shard_map` cannot be in one sum.
    for names in by_kind(axis_name):
        count = lax.psum(varying_over(count, names), names)
    return count


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
    """Whether arrays of the type of `x` are sharded alike.

    An array whose type has no mesh counts as on one device, however many devices the tracing process sees.
    """
    mesh = jax.typeof(x).sharding.mesh
    kinds = {kind for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True) if size > 1}
    return AxisType.Auto not in kinds


def _any_nonfinite(group: list[Array]) -> Array:
    """Return whether some arrays of one type hold inf or NaN, as 0 or 1, f32[].

    It is a float because XLA:TPU computes only float reductions in the same pass as a clip's norm (for a v5e, jaxlib
    0.10.2). On GPU, arrays that are combined before they are reduced take one kernel instead of many. XLA:CPU writes
    the operand of a reduction to memory. Here that is one array for a whole group. With a sum of `x - x` it would be
    every unscaled gradient.
    """
    is_nonfinite = functools.reduce(jnp.logical_or, [~jnp.isfinite(x) for x in group])
    return jnp.max(is_nonfinite.astype(jnp.float32))


def _materialize(count: Array) -> Array:
    """Return a scalar that is 0 if and only if `count` is, and that XLA keeps in memory.

    XLA:CPU copies a plain reduction, but not a dot product, into every fusion that reads it: quadratic compile time.
    """
    pair = jnp.stack([count, count])
    return jnp.dot(pair, pair, precision=lax.Precision.DEFAULT)
