"""Pytrees of arrays, total on empty trees, None, float0, `optax.MaskedNode` and leaves that are no arrays."""

import functools
import math
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType
from jax.typing import DTypeLike

# Flax's name for the collection of fp8 scales and histories, which the optimizer overwrites instead of descending.
OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"


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


def gradient_leaves(tree: Any) -> list[Any]:
    """The floating and complex leaves of a tree of gradients, without those that Flax overwrites."""
    return [x for path, x in jax.tree.leaves_with_path(tree) if is_gradient(path, x)]


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
    return leaves_finite(gradient_leaves(tree), axis_name)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def leaves_finite(leaves: list[Array], axis_name: Any) -> Array:
    """`all_finite` of a list of floating and complex arrays."""
    arrays = [widen(jnp.asarray(x)) for x in leaves]
    by_type = defaultdict(list)
    for i, x in enumerate(arrays):
        by_type[jax.typeof(x) if _may_combine(x) else i].append(x)
    counts = [_count_nonfinite(part) for group in by_type.values() for part in _parts(group)]
    if not counts:
        return jnp.bool_(True)
    # A dot of the counts with themselves is one materialised scalar. XLA:CPU would copy any plainer reduction of them
    # into every fusion that reads the predicate, which makes the compile time quadratic in the leaves.
    stacked = jnp.stack(counts)
    count = jnp.dot(stacked, stacked)
    return (count if axis_name is None else lax.psum(count, axis_name)) == 0


def _parts(group: list[Array], most: int = 32) -> list[list[Array]]:
    """A list in as few parts of at most `most` as possible, of equal length where it can be."""
    size = math.ceil(len(group) / math.ceil(len(group) / most))
    return [group[i : i + size] for i in range(0, len(group), size)]


def _count_nonfinite(group: list[Array]) -> Array:
    """0 if all of some arrays of one type are finite, else more, as f32[]."""
    # Combining arrays elementwise and reducing once is twice as fast on CPU as a reduction for each, and one kernel
    # instead of many on GPU. x - x is 0 where x is finite. Behind a product a compiler may contract it into a rounding
    # error or an infinity, so what counts is whether it is finite, not whether it is 0.
    group = _slices(group[0]) if len(group) == 1 else group
    combined = functools.reduce(jnp.add, [x - x for x in group]) if len(group) > 1 else group[0]
    return jnp.sum(jnp.where(jnp.isfinite(combined), jnp.float32(0), jnp.float32(1)))


def _slices(x: Array) -> list[Array]:
    """A large array as eight slices, if slicing it is sure not to move data between devices."""
    axis = next((i for i, n in enumerate(x.shape) if n % 8 == 0), None)
    if axis is None or x.size < 2**16 or not _may_combine(x):
        return [x]
    step = x.shape[axis] // 8
    return [lax.slice_in_dim(x, i * step, (i + 1) * step, axis=axis) for i in range(8)]


def _may_combine(x: Array) -> bool:
    """Whether an elementwise operation with an array of the same type is sure not to move data between devices."""
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty:  # A single device, or `jit(in_shardings=)`, of which the type knows nothing.
        return jax.device_count() == 1
    return all(size == 1 or kind != AxisType.Auto for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True))
