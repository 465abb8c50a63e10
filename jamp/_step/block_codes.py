"""Eight bits an element, with a scale for each block: the largest magnitude in it.

An element is `scale * (code / 127)**2` with the sign of its code, an int8, or, if it is never negative,
`scale * (code / 255)**4`. Powers are close together near 0, where moments need digits, and take no table: a TPU has no
quick look-up. The powers were chosen by the error of Adam's update (docs/optimizer-memory.md).

Rounding is stochastic. With rounding to nearest, a second moment that decays by 0.1 % a step never changes its code.
The random bits are a hash of the element, its scale and its place in its block. So rounding needs no state and no
communication.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jamp._step.mesh import most_shards
from jamp._step.rounding import hash_bits

_TINY = np.finfo(np.float32).tiny
_MOST = {False: 127, True: 255}  # the largest code, by whether an array is never negative


class BlockCodes(NamedTuple):
    """An array in eight bits an element, or, in the state of `quantized_state`, a tree of arrays like the parameters.

    There, an array that stays whole is in `codes` as it is, and `scales` has an `optax.MaskedNode()` in its place.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> state = jamp.quantized_state(optax.sgd(0.1, momentum=0.9)).init(jnp.ones((64, 256)))
      >>> moment = state.inner_state[0].trace
      >>> moment.codes.dtype, moment.codes.shape, moment.scales.shape
      (dtype('int8'), (64, 256), (64, 2))
    """

    codes: Any  # i8, or u8 for arrays that are never negative, in the array's shape
    scales: Any  # f32[..., blocks]


@functools.partial(jax.jit, static_argnums=(1, 2))  # traced once for arrays of the same shape
def encode(x: Array, block_size: int, never_negative: bool, scales: Array | None = None) -> BlockCodes:
    """Round an array stochastically to eight bits. A value that a code represents exactly gets that code.

    Args:
      x: f32, at least one axis.
      block_size: The number of elements along the last axis that share a scale. The last block may be shorter.
      never_negative: Whether no element is negative. A positive element then is never stored as 0.
      scales: The largest magnitude in each block, if it is known.
    """
    scales = _largest(x, block_size) if scales is None else scales
    # Everything else in the shape of `x`, so that a compiler can fuse it with the step.
    scale, size = _spread(scales, x.shape[-1], block_size), jnp.abs(x)
    # The inverse of a scale is finite and not subnormal, which a device may flush.
    factor = jnp.where(scale > 1, np.float32(2.0**-30), np.float32(2.0**30))
    shares = size * factor * (1 / jnp.maximum(scale * factor, _TINY))
    most = np.float32(_MOST[never_negative])
    place = most * (jnp.sqrt(jnp.sqrt(shares)) if never_negative else jnp.sqrt(shares))
    low = jnp.floor(place)
    below, above = _share(low, never_negative), _share(low + 1, never_negative)
    order = lax.rem(lax.iota(jnp.uint32, x.shape[-1]), np.uint32(block_size)) * np.uint32(0x9E3779B9)
    words = [lax.bitcast_convert_type(y, jnp.uint32) for y in (x, scale)]
    bits = words[0] ^ (words[1] * np.uint32(0x85EBCA6B))
    random = (hash_bits(bits + order) >> 8).astype(jnp.float32) * np.float32(2.0**-24)
    code = low + (shares - below > random * (above - below)).astype(jnp.float32)
    # Errors of the roots must not change a code, or a step without a change would change the state.
    nearest = jnp.round(place)
    code = jnp.minimum(jnp.where(jnp.abs(place - nearest) < 2.0**-11, nearest, code), most)
    signed = jnp.where(x > 0, jnp.maximum(code, 1), 0) if never_negative else jnp.where(x < 0, -code, code)
    return BlockCodes(signed.astype(jnp.uint8 if never_negative else jnp.int8), scales)


@functools.partial(jax.jit, static_argnums=1)
def decode(stored: BlockCodes, block_size: int) -> Array:
    """The numbers that the codes stand for, f32. Of a block that held inf or NaN, all are inf or NaN."""
    never_negative = stored.codes.dtype == jnp.uint8
    codes = stored.codes.astype(jnp.float32)
    scale = _spread(stored.scales, codes.shape[-1], block_size)
    # The largest is exactly the scale, in whatever order XLA multiplies.
    is_largest = jnp.abs(codes) == _MOST[never_negative]
    values = jnp.where(is_largest, scale, scale * _share(codes, never_negative))
    if never_negative:
        return jnp.where(codes > 0, jnp.maximum(values, _TINY), values)
    return jnp.where(codes < 0, -values, values)


def _share(code: Array, never_negative: bool) -> Array:
    """The value of a code, as a share of the scale."""
    root = code * code * np.float32(1 / _MOST[never_negative] ** 2)
    return root * root if never_negative else root


def _largest(x: Array, block_size: int) -> Array:
    """The largest magnitude of each block of the last axis."""
    n = x.shape[-1]
    size = min(block_size, n)
    if missing := -n % size:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    rows = _rows(x, size)
    # One axis at a time: JAX knows how that moves the names of explicit mesh axes.
    blocks = jnp.abs(x).reshape(*rows, x.shape[-1]).reshape(*rows, -1, size)
    return jnp.max(blocks, -1).reshape(*x.shape[:-1], -1)


def _spread(scales: Array, n: int, block_size: int) -> Array:
    """The values of blocks, repeated for each of the `n` elements of the last axis."""
    size = min(block_size, n)
    rows, count = _rows(scales, size), scales.shape[-1]
    whole = jnp.broadcast_to(jnp.expand_dims(scales.reshape(*rows, count), -1), (*rows, count, size))
    whole = whole.reshape(*rows, count * size).reshape(*scales.shape[:-1], count * size)
    return whole if whole.shape[-1] == n else whole[..., :n]


def _rows(x: Array, size: int) -> tuple[int, ...]:
    """All axes but the last, with the one before it split in groups of 8 where that cuts no shard.

    A TPU keeps an array in tiles of 8 by 128. Split like this, an axis of blocks of 128 is the same memory seen
    otherwise. Without it, XLA:TPU copies the whole array for it, in float32 and more than once.
    """
    if x.ndim < 2 or size % 128 or x.shape[-2] % (8 * most_shards(x, -2)):
        return x.shape[:-1]
    return *x.shape[:-2], x.shape[-2] // 8, 8
