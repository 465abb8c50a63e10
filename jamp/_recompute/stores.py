"""The stores of a value between the passes: itself, or 8 bits. A value without a store is computed again.

A block of numbers along the last axis has one scale, its largest magnitude over 126. Code n + 1 is for the multiple
n + 1/64 of it, so that the codes 1 and -1 are left for numbers that are nearly zero:

    block of x      2.52    -1.00    0.004     0.00
    scale           0.02
    codes            127      -51        1        0
    decoded       2.5203  -1.0003   0.0003     0.00

A number that is not zero is decoded as zero only if it underflows: in float16, beside numbers of at most 2e-4. It keeps
its sign. So the mask `x > 0` is the same after decoding, and a division stays finite.
"""

import enum
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jamp._cast import as_dtype, is_floating
from jamp._compiler_hints import row_major
from jamp._jaxprs.manual_axes import is_partial, shards_of

_LARGE = 4096  # elements: smaller values stay as they are
BLOCK, _LEAST_BLOCK = 16, 8
_MOST = 126  # the largest multiple of a scale
_NEARLY_ZERO = 1 / 64  # what the codes 1 and -1 stand for, in scales


class Store(enum.Enum):
    """How a value is kept for the backward pass."""

    ITSELF = "itself"
    INT8 = "int8"

    def nbytes(self, aval: Any) -> float:
        """The bytes of a value of a type. A symbolic dimension counts as 1."""
        size = float(math.prod(n for n in aval.shape if isinstance(n, int)))
        if self is Store.ITSELF:
            return size * float(getattr(aval.dtype, "itemsize", 4))
        return size * (1 + 2 / _block_shape(aval)[-1])

    def encode(self, x: Array) -> list[Array]:
        """The arrays that are kept: the value, or its codes and the scales of their blocks."""
        if self is Store.ITSELF:
            return [x]
        aval: Any = jax.typeof(x)
        # Else XLA:GPU encodes in the layout of another reader, in three kernels with float32 in between (for an H200,
        # jaxlib 0.12.0: 10 % of the bytes that the gradient of a ViT moves).
        x = row_major(x)
        blocks = x.reshape(_block_shape(aval)).astype(jnp.float32)
        # With an inf or NaN, all of a block is decoded as NaN: the derivative of a tanh at inf would be 0, which is
        # finite. A finite number is decoded as one. A `where` took five more kernels (GPT-2, for an H200, jaxlib 0.12).
        exact = jnp.max(jnp.abs(blocks), -1, keepdims=True) / _MOST
        nan_or_zero = exact - exact
        scales = (jnp.minimum(exact, _largest_scale(x.dtype)) + nan_or_zero).astype(jnp.bfloat16)
        scale = scales.astype(jnp.float32)
        is_known = (scale >= _TINY) & jnp.isfinite(scale)
        inverse = jnp.where(is_known, 1 / jnp.where(is_known, scale, 1), 0)
        finite = jnp.clip(blocks, -_LARGEST, _LARGEST)  # because inf times an inverse of 0 is NaN
        signs = jnp.sign(finite)
        multiples = jnp.clip(jnp.round(finite * inverse - signs * _NEARLY_ZERO), -_MOST, _MOST)
        codes = (multiples + signs).astype(jnp.int8)
        return [codes.reshape(x.shape), scales[..., 0]]

    def decode(self, kept: Sequence[Array], aval: Any) -> Array:
        """The value of a type, from what is kept of it."""
        if self is Store.ITSELF:
            return kept[0]
        codes, scales = kept
        blocks = codes.reshape(_block_shape(aval)).astype(jnp.float32)
        multiples = blocks - jnp.clip(blocks, _NEARLY_ZERO - 1, 1 - _NEARLY_ZERO)
        decoded: Array = (multiples * scales[..., None].astype(jnp.float32)).reshape(aval.shape).astype(aval.dtype)
        return decoded


class Stores(NamedTuple):
    """What a segment keeps: its values, by their numbers, with their stores, and which inputs it reads in 8 bits."""

    values: frozenset[tuple[int, Store]]
    inputs: frozenset[int]

    @property
    def is_coded(self) -> bool:
        """Whether something is in 8 bits."""
        return bool(self.inputs) or any(store is Store.INT8 for _, store in self.values)


_TINY, _LARGEST = float(jnp.finfo(jnp.float32).tiny), float(jnp.finfo(jnp.float32).max)


def _largest_scale(dtype: Any) -> np.float32:
    """A bfloat16 number of which no multiple that is decoded becomes inf in a dtype, and nearly the largest."""
    bits = np.float32(float(jnp.finfo(dtype).max) / (_MOST + 1)).view(np.uint32)
    return np.uint32(bits & np.uint32(0xFFFF0000)).view(np.float32)


def as_store(residuals: Any) -> Store:
    """The store that the argument `residuals` of a user names."""
    if residuals is None:
        return Store.ITSELF
    if as_dtype(residuals) == jnp.int8:
        return Store.INT8
    got = residuals if as_dtype(residuals) is None else as_dtype(residuals)
    raise ValueError(f"residuals must be jnp.int8 or None, got {got!r}.")


def fits_8_bits(aval: Any) -> bool:
    """Whether a value of a type may be stored in 8 bits: a large array of floats of 16 or 32 bits."""
    is_known = isinstance(aval, jax.core.ShapedArray) and all(isinstance(n, int) for n in aval.shape)
    if not is_known or not is_floating(aval) or aval.dtype.itemsize not in (2, 4) or is_partial(aval):
        return False
    return bool(aval.size >= _LARGE and _block_shape(aval))


def _block_shape(aval: Any) -> tuple[int, ...]:
    """The shape of a value with blocks along its last axis, or along several where no block divides the last.

    A block crosses no shard of an Explicit axis. The shape is empty if no block divides the value.
    """
    shape, shards = tuple(aval.shape), shards_of(aval)
    for axis in reversed(range(len(shape))):
        if axis + 1 < len(shape) and set(shards[axis:]) != {1}:
            break
        n = math.prod(shape[axis:])
        for block in range(BLOCK, _LEAST_BLOCK - 1, -1):
            if n // shards[axis] % block == 0:
                return (*shape[:axis], n // block, block)
    return ()
