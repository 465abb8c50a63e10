"""Pytrees of arrays, total on empty trees, None, float0, `optax.MaskedNode` and leaves that are no arrays."""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr
from jax.typing import DTypeLike

# Flax's name for the collection of fp8 scales and histories, which the optimizer overwrites instead of descending.
OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"

_LARGE = 2**16  # elements: what does not stay in a cache
_NO_DIGITS = str.maketrans("", "", "0123456789")


def is_inexact(x: Any) -> bool:
    """Whether a leaf is a floating or complex array (or Python number)."""
    if isinstance(x, (float, complex)):
        return True
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def is_floating(x: Any) -> bool:
    """Whether a leaf is a floating array: no key, no float0, no complex number."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def widen(x: Any, dtype: DTypeLike = jnp.float32) -> Any:
    """A floating leaf of at most 32 bits as `dtype`; any other leaf as it is."""
    return jnp.asarray(x, dtype) if is_floating(x) and jnp.finfo(x.dtype).bits <= 32 else x


def widen_half(tree: Any) -> Any:
    """The floating leaves of fewer than 32 bits as float32; any other leaf as it is."""
    return jax.tree.map(widen, tree)


def cast_floating(tree: Any, dtype: DTypeLike) -> Any:
    """Cast the floating arrays of a tree.

    Args:
      tree: A pytree. Integers, bools, complex numbers, PRNG keys and leaves that are no arrays are left as they are.
      dtype: The floating dtype to cast to.

    Returns:
      The tree with its floating leaves in `dtype`.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> jamp.cast_floating({"w": jnp.ones(2), "step": jnp.int32(3)}, jnp.float16)["w"].dtype
      dtype('float16')
    """
    return jax.tree.map(lambda x: jnp.asarray(x, dtype) if is_floating(x) else x, tree)


def gradient_leaves(tree: Any) -> dict[tuple[Any, ...], Any]:
    """The floating and complex leaves of a tree of gradients by path, without those that Flax overwrites."""
    return {path: x for path, x in jax.tree.leaves_with_path(tree) if is_gradient(path, x)}


def is_gradient(path: tuple[Any, ...], x: Any) -> bool:
    """Whether a leaf is a gradient to unscale and check. The path decides before the dtype."""
    return is_inexact(x) and all(getattr(key, "key", None) != OVERWRITE_WITH_GRADIENT for key in path)


def all_finite(tree: Any, *, axis_name: Any = None) -> Array:
    """Whether no floating or complex leaf of a tree holds inf or nan.

    Exact: a finite value of any size is finite, behind any producer, on any backend. Compiled also when called
    outside `jit`; inside it, it dissolves into the caller's computation.

    Args:
      tree: A pytree of arrays. Integers, bools, PRNG keys, float0 and leaves that are no arrays are finite, and so
        is an empty tree.
      axis_name: Name(s) of the `shard_map`, `pmap` or `vmap` axes that must agree: finite on all or on none.

    Returns:
      bool[].

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> bool(jamp.all_finite({"w": jnp.array([1.0, jnp.inf])}))
      False
    """
    found = gradient_leaves(tree)
    return leaves_finite(list(found.values()), names(found), axis_name)


def names(paths: Iterable[tuple[Any, ...]]) -> tuple[str, ...]:
    """The last key of each path, without its digits: the same for what is the same in each layer of a model."""
    return tuple(keystr(path[-1:]).translate(_NO_DIGITS) for path in paths)


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def leaves_finite(leaves: list[Array], names: tuple[str, ...], axis_name: Any) -> Array:
    """`all_finite` of a list of floating and complex arrays with their `names`."""
    arrays = [lax.stop_gradient(widen(jnp.asarray(x))) for x in leaves]
    if not arrays:
        return jnp.bool_(True)
    count = _count(arrays, functools.partial(_count_locally, names))
    return (count if axis_name is None else _sum_over(count, axis_name)) == 0


def _sum_over(count: Array, axis_name: Any) -> Array:
    try:
        lax.axis_size(axis_name)  # psum itself fails without a message in a shard_map that checks vma
    except NameError as error:
        raise NameError(
            f"axis_name={axis_name!r} names an axis that is not mapped here ({error}). Name axes of the enclosing "
            "shard_map, pmap or vmap; under jit with sharded arrays leave axis_name out: the check covers all shards."
        ) from error
    return lax.psum(count, axis_name)


def _count(arrays: list[Array], local: Callable[..., Array]) -> Array:
    """0 if some arrays are finite, on all devices that the caller does not map over; else more, as f32[].

    Args:
      arrays: The arrays.
      local: The same for arrays on one device.
    """
    # Each device counts in what it holds, and the scalars are added. Who shards the arrays decides how that is said.
    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    axes = [axis for mesh in meshes for axis in zip(mesh.axis_sizes, mesh.axis_types, strict=True)]
    kinds = {kind for size, kind in axes if size > 1}
    if kinds == {AxisType.Manual} or (not kinds and (axes or jax.device_count() == 1)):
        return local(*arrays)
    if kinds == {AxisType.Explicit}:
        return _count_by_type(arrays, local)
    return _count_automatically(arrays, local) if kinds <= {AxisType.Auto} else _count_each(*arrays)


def _count_by_type(arrays: list[Array], local: Callable[..., Array]) -> Array:
    """The count where the types of the arrays say how they are sharded."""
    specs = tuple(jax.typeof(x).sharding.spec for x in arrays)
    mesh = next(mesh for x in arrays if not (mesh := jax.typeof(x).sharding.mesh).empty)
    named = [name for spec in specs for entry in spec for name in (entry if isinstance(entry, tuple) else [entry])]
    axes = tuple(dict.fromkeys(name for name in named if name is not None))
    summed = lambda *shards: lax.psum(local(*shards), axes) if axes else local(*shards)
    return jax.shard_map(summed, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())(*arrays)


def _count_automatically(arrays: list[Array], local: Callable[..., Array]) -> Array:
    """The count where only the compiler knows how the arrays are sharded, if at all.

    XLA:TPU and XLA:GPU move the sum over devices behind the additions: one scalar crosses between them. XLA:CPU would
    send one for each array, so it is told how to partition the whole. Not the others: programs with such a callback
    are not found again in JAX's persistent compilation cache, and cannot be exported.
    """

    def partition(mesh: Any, args: tuple[Any, ...], result: Any) -> tuple[Any, ...]:
        del mesh, result
        shardings = tuple(x.sharding for x in args)
        mesh = Mesh(np.array(sorted(shardings[0].device_set, key=lambda d: d.id)), "all")
        replicated = all(x.is_fully_replicated for x in shardings)
        summed = local if replicated else lambda *shards: lax.psum(local(*shards), "all")
        return mesh, summed, NamedSharding(mesh, PartitionSpec()), shardings

    factors = (f"d{i}" for i in itertools.count())
    operands = tuple(ArrayMapping(*itertools.islice(factors, x.ndim)) for x in arrays)
    partitioned = custom_partitioning(local)
    rule = SdyShardingRule(operands, (ArrayMapping(),))
    partitioned.def_partition(partition, decode_shardings=False, sharding_rule=rule)

    @jax.custom_batching.custom_vmap
    def count(*arrays: Array) -> Array:
        return lax.platform_dependent(*arrays, cpu=partitioned, default=_count_each_and_add)

    @count.def_vmap
    def _(axis_size: int, in_batched: list[bool], *arrays: Array) -> tuple[Array, bool]:
        del axis_size
        return jax.vmap(_count_each, in_axes=tuple(0 if b else None for b in in_batched))(*arrays), True

    return count(*arrays)


def _count_each_and_add(*arrays: Array) -> Array:
    """The count by a reduction for each array, and additions."""
    return functools.reduce(jnp.add, [_count_nonfinite([x]) for x in arrays])


def _count_each(*arrays: Array) -> Array:
    """The count by a reduction for each array: no operation on two that may be sharded differently."""
    return _one_scalar([_count_nonfinite([x]) for x in arrays])


def _count_locally(names: tuple[str, ...], *arrays: Array) -> Array:
    """The count of arrays that are whole on one device."""
    # Large arrays of one type and different names may come out of their operations transposed or not, and XLA:CPU would
    # read the transposed ones across the grain to combine them: a tied embedding among the matrices of the layers made
    # the check of a transformer twelve times as slow.
    groups = defaultdict(list)
    for name, x in zip(names, arrays, strict=True):
        groups[jax.typeof(x), name if x.size >= _LARGE else ""].append(x)
    parts = [part for group in groups.values() for part in _parts(group)]
    return _one_scalar([_count_nonfinite(part if len(part) > 1 else _slices(part[0])) for part in parts])


def _one_scalar(counts: list[Array]) -> Array:
    # A dot of the counts with themselves is one materialised scalar. XLA:CPU would copy any plainer reduction of them
    # into every fusion that reads the predicate, which makes the compile time quadratic in the leaves.
    stacked = jnp.stack(counts)
    return jnp.dot(stacked, stacked)


def _parts(group: list[Array], most: int = 32) -> list[list[Array]]:
    """A list in as few parts of at most `most` as possible, of equal length where it can be."""
    size = math.ceil(len(group) / math.ceil(len(group) / most))
    return [group[i : i + size] for i in range(0, len(group), size)]


def _slices(x: Array) -> list[Array]:
    """A large array as eight slices."""
    axis = next((i for i, n in enumerate(x.shape) if n % 8 == 0), None)
    if axis is None or x.size < _LARGE:
        return [x]
    step = x.shape[axis] // 8
    return [lax.slice_in_dim(x, i * step, (i + 1) * step, axis=axis) for i in range(8)]


def _count_nonfinite(group: list[Array]) -> Array:
    """0 if all of some arrays of one type are finite, else more, as f32[]."""
    # Combining arrays elementwise and reducing once is twice as fast on CPU as a reduction for each, and one kernel
    # instead of many on GPU. x - x is 0 where x is finite. Behind a product a compiler may contract it into a rounding
    # error or an infinity, so what counts is whether it is finite, not whether it is 0.
    combined = functools.reduce(jnp.add, [x - x for x in group]) if len(group) > 1 else group[0]
    return jnp.sum(jnp.where(jnp.isfinite(combined), jnp.float32(0), jnp.float32(1)))
