"""Eight bits an element, with a scale for each block: the largest magnitude in it.

An element is `scale * (code / 127)**2` with the sign of its code, an int8, or, if it is never negative,
`scale * (code / 255)**4`. Powers are close together near 0, where moments need digits, and take no table: a TPU has no
quick look-up. The powers were chosen by the error of Adam's update (docs/optimizer-memory.md).

Rounding is stochastic. With rounding to nearest, a second moment that decays by 0.1 % a step never changes its code.
The random bits are a hash of the step, the element, its scale and its place in its block, so that rounding needs no
communication. The step must be in it: where nothing else changes, the same bits would round the same way forever.
Elements that agree in all of these, such as those of equal rows, share their bits in a step. Each is still right on
average over the steps.

The block size is a power of two, so that the number of blocks tells it and every state can be read.
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
def encode(x: Array, block_size: int, never_negative: bool, word: Array, scales: Array | None = None) -> BlockCodes:
    """Round an array stochastically to eight bits. A value that a code represents exactly gets that code.

    Args:
      x: f32, at least one axis.
      block_size: The number of elements along the last axis that share a scale, a power of two. The last block may be
        shorter.
      never_negative: Whether no element is negative. A positive element then is never stored as 0.
      word: u32[], a hash of the step.
      scales: The largest magnitude in each block, if it is known, and inf where the block holds inf or NaN.
    """
    scales = _largest(x, block_size) if scales is None else scales
    # Everything else has the shape of `x`, so that XLA can fuse it with the step.
    scale, size = _spread(scales, x.shape[-1], min(block_size, x.shape[-1])), jnp.abs(x)
    # The inverse of a scale is finite and not subnormal, which a device may flush.
    factor = jnp.where(scale > 1, np.float32(2.0**-30), np.float32(2.0**30))
    shares = size * factor * (1 / jnp.maximum(scale * factor, _TINY))
    most = np.float32(_MOST[never_negative])
    position = most * (jnp.sqrt(jnp.sqrt(shares)) if never_negative else jnp.sqrt(shares))
    lower = jnp.floor(position)
    below, above = _share(lower, never_negative), _share(lower + 1, never_negative)
    order = lax.rem(lax.iota(jnp.uint32, x.shape[-1]), np.uint32(block_size)) * np.uint32(0x9E3779B9)
    order = order.reshape([1] * (x.ndim - 1) + [-1])
    bits = [lax.bitcast_convert_type(y, jnp.uint32) for y in (x, scale)]
    mixed = (bits[0] ^ (bits[1] * np.uint32(0x85EBCA6B)) ^ word) + order
    random = (hash_bits(mixed) >> 8).astype(jnp.float32) * np.float32(2.0**-24)
    code = lower + (shares - below > random * (above - below)).astype(jnp.float32)
    # Errors of the roots must not change a code, or a step without a change would change the state.
    nearest = jnp.round(position)
    code = jnp.minimum(jnp.where(jnp.abs(position - nearest) < 2.0**-11, nearest, code), most)
    signed = jnp.where(x > 0, jnp.maximum(code, 1), 0) if never_negative else jnp.where(x < 0, -code, code)
    return BlockCodes(signed.astype(jnp.uint8 if never_negative else jnp.int8), scales)


@jax.jit
def decode(stored: BlockCodes) -> Array:
    """The numbers that the codes stand for, f32. All numbers of a block that held inf or NaN are inf or NaN."""
    never_negative = stored.codes.dtype == jnp.uint8
    codes = stored.codes.astype(jnp.float32)
    scale = _spread(stored.scales, codes.shape[-1], _block_size(codes.shape[-1], stored.scales.shape[-1]))
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


def check_codes(name: str, stored: BlockCodes, block_size: int | None) -> None:
    """Raise TypeError or ValueError if arrays are not codes and scales, or their blocks have another size than this."""
    codes, scales = stored
    types = jnp.result_type(codes).name, jnp.result_type(scales).name
    if types[0] not in ("int8", "uint8") or types[1] != "float32":
        raise TypeError(
            f"{name} holds codes in {types[0]} with scales in {types[1]}, and codes are int8 or uint8 with float32 "
            "scales. A cast of a whole state changes what it stands for: restore it with the dtypes of tx.init(params)."
        )
    (*rows, n), (*same_rows, count) = codes.shape or [0], scales.shape or [0]
    own_size = _block_size(n, count) if count else 0
    if rows != same_rows or not own_size or count != -(-n // own_size):
        raise ValueError(
            f"{name} has codes of shape {codes.shape} and scales of shape {scales.shape}, which no state has. Restore "
            "both from one checkpoint."
        )
    if block_size is not None and count != -(-n // block_size):
        raise ValueError(
            f"{name} has blocks of {own_size} elements: {count} scales for {n}. This transformation has "
            f"block_size={block_size}. Pass the state's block size, or convert the state: "
            f"jamp.interop.quantize_state(jamp.interop.dequantize_state(state), {block_size})."
        )


def _block_size(n: int, count: int) -> int:
    """The block size of an axis of `n` elements in `count` blocks: the whole axis, or a power of two."""
    return n if count == 1 else 1 << (-(-n // count) - 1).bit_length()


def _largest(x: Array, block_size: int) -> Array:
    """The largest magnitude of each block of the last axis, inf if it holds inf or NaN."""
    n = x.shape[-1]
    size = min(block_size, n)
    x = jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.inf)  # XLA:CPU's maximum drops NaN in some shapes.
    if missing := -n % size:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    rows = _rows(x, size)
    # One axis at a time: JAX knows how that moves the names of explicit mesh axes.
    blocks = x.reshape(*rows, x.shape[-1]).reshape(*rows, -1, size)
    return jnp.max(blocks, -1).reshape(*x.shape[:-1], -1)


def _spread(scales: Array, n: int, size: int) -> Array:
    """The values of blocks, repeated for each of the `n` elements of the last axis."""
    rows, count = _rows(scales, size), scales.shape[-1]
    whole = jnp.broadcast_to(jnp.expand_dims(scales.reshape(*rows, count), -1), (*rows, count, size))
    whole = whole.reshape(*rows, count * size).reshape(*scales.shape[:-1], count * size)
    return whole if whole.shape[-1] == n else whole[..., :n]


def _rows(x: Array, size: int) -> tuple[int, ...]:
    """All axes but the last, with the one before it split in groups of 8 where that cuts no shard.

    A TPU stores an array in tiles of 8 by 128. With this split, blocks of 128 keep the layout. Without it, XLA:TPU
    copies the whole array, in float32 and more than once.
    """
    if x.ndim < 2 or size % 128 or x.shape[-2] % (8 * most_shards(x, -2)):
        return x.shape[:-1]
    return *x.shape[:-2], x.shape[-2] // 8, 8
