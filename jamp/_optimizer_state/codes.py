"""Eight bits an element, with a unit for each block.

    x         f32[64, 256]    a moment, in blocks of 128 along the last axis
    scales    u32[64, 2]      the unit of each block, its largest magnitude over 8064, as the bits of a float32
    codes     i8[64, 256]     x is about the share of its code times the unit of its block

A code is an int8, or a uint8 if the element is never negative. It stands for so many units:

    int8     0  1  2  4  8  12  16  24  32  40  48 ...  8064 for 127: about half the square of the code, with its sign
    uint8    0  1  2  3  4   8  16  32  64  96 128 ...  66060288 for 255: about a 64th of its fourth power

Powers are close together near 0, where moments need digits. They were chosen by the error of Adam's update
(docs/benchmarks/codes.json). Between two powers of two these are straight lines: a float's bits are an integer that
grows like its logarithm, so shifting them by one or two takes a power or a root of it. Both ways take a few integer
instructions, and a code stands for the same number on every device. On a GPU an optimizer's step is bound by
instructions, not by memory, once an element takes more than about sixty.

The unit of a block is its largest magnitude over 8064 or 66060288, with 18 significant bits, so that every code times
its unit is exact. What is stored is the unit's bits, u32: a cast of a whole state to another float leaves them alone.

Rounding is stochastic. With rounding to nearest, a second moment that decays by 0.1 % a step never changes its code.

The block size is a power of two, so that the number of blocks tells it and every state can be read.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jamp._mesh import count_named_shards, count_shards, whole_along_last_axis
from jamp._optimizer_state.rounding import RandomBits, Words

_U32 = np.uint32
_INF, _SMALLEST_NORMAL, _SIGN = _U32(0x7F800000), _U32(0x00800000), _U32(0x80000000)
_FRACTION = 13  # bits of a place behind the point


class _Map(NamedTuple):
    """How places and shares belong together: codes before they are rounded, and the multiples of the unit.

    Up to 2**power a place is its share. Beyond, the logarithm of the share grows 2**power times as fast.
    """

    power: int  # of two
    largest: int  # the share of the largest code
    # A place plus this is a float32 from 1024 to 2048, with 13 bits behind the point. The 8 before it are the code.
    shift: int

    def share(self, place: Array) -> Array:
        """Return the share of a place, f32 both, with its sign."""
        size = jnp.abs(place) if self.is_signed else place
        times = 2**self.power  # as far from the bits of 2**power
        bits = _bits(place) + _U32(times - 1) * _bits(size) - _U32((times - 1) * self._start % 2**32)
        return jnp.where(size < times, place, _float(bits))

    def place(self, share: Array) -> Array:
        """Return the place of a share that is not negative, f32 both, at most the place of the largest code."""
        # The two passes of a step may round a share differently. A code that wraps around would be another number.
        share = jnp.minimum(share, np.float32(self.largest))
        root = (_bits(share) >> self.power) + _U32(self._start - (self._start >> self.power))
        return jnp.minimum(share, _float(root))

    def code(self, place: Array, random: Array) -> Array:
        """Round a place by 13 random bits, to i32, of which a code is the last byte."""
        return lax.bitcast_convert_type((_bits(place + np.float32(self.shift)) + random) >> _FRACTION, jnp.int32)

    @property
    def zero(self) -> int:
        """The result of `code` for 0."""
        return int(np.float32(self.shift).view(np.int32) >> _FRACTION)

    @property
    def is_signed(self) -> bool:
        return self.power == 1

    @property
    def _start(self) -> int:
        """The bits of 2**power, a float32."""
        return (127 + self.power) << 23


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _float(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


_SIGNED, _NEVER_NEGATIVE = _Map(1, 8064, 1536), _Map(2, 66060288, 1024)

# The codes of older versions stand for other numbers.
OLDER = "Start with tx.init(params), or convert it with that version's jamp.interop.dequantize_state."


class BlockCodes(NamedTuple):
    """An array in eight bits an element, or, in the state of `quantized_state`, a tree of arrays like the parameters.

    There, an array that stays whole is in `codes` as it is, and `scales` holds booleans in its place, all False: one
    for each element of a small array, and for each row of a large one.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> state = jamp.quantized_state(optax.sgd(0.1, momentum=0.9)).init(jnp.ones((64, 256)))
      >>> moment = state.inner_state[0].trace
      >>> moment.codes.dtype, moment.codes.shape, moment.scales.shape
      (dtype('int8'), (64, 256), (64, 2))
    """

    codes: Any  # i8, or u8 for arrays that are never negative, in the array's shape
    scales: Any  # u32[..., blocks], the bits of the units in float32


def encode(
    x: Array, block_size: int, never_negative: bool, random: RandomBits, scales: Array | None = None
) -> BlockCodes:
    """Round an array stochastically to eight bits. A value that a code represents exactly gets that code.

    Args:
      x: f32, at least one axis.
      block_size: The number of elements along the last axis that share a unit, a power of two. The last block may be
        shorter.
      never_negative: Whether no element is negative, nor -0. A positive normal number then is never stored as 0.
      random: Its random bits in this step.
      scales: The scales of `x`, if they are known.
    """
    return _encode(x, block_size, never_negative, random.part, random.words, scales)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))  # traced once for arrays of the same shape
def _encode(
    x: Array, block_size: int, never_negative: bool, part: int, words: Words, scales: Array | None
) -> BlockCodes:
    scales = _scales(x, block_size, never_negative) if scales is None else scales
    # Everything else has the shape of `x`, so that XLA can fuse it with the step.
    inverse = _spread(1 / _float(scales), x.shape[-1], min(block_size, x.shape[-1]))
    random = RandomBits(words, part).draw(x, _FRACTION)
    if not never_negative:
        place = _bits(_SIGNED.place(jnp.abs(x) * inverse)) | (_bits(x) & _SIGN)
        return BlockCodes(_SIGNED.code(_float(place), random).astype(jnp.int8), scales)
    code = _NEVER_NEGATIVE.code(_NEVER_NEGATIVE.place(x * inverse), random)
    # A positive normal number has larger bits than the first code.
    first = jnp.minimum(lax.bitcast_convert_type(x, jnp.int32), _NEVER_NEGATIVE.zero + 1)
    return BlockCodes(jnp.maximum(code, first).astype(jnp.uint8), scales)


@jax.jit
def decode(stored: BlockCodes) -> Array:
    """Return the numbers that the codes stand for, f32. All numbers of a block that held inf or NaN are inf or NaN."""
    codes, scales = stored
    unit = _spread(_float(scales), codes.shape[-1], _block_size(codes.shape[-1], scales.shape[-1]))
    return (_NEVER_NEGATIVE if codes.dtype == jnp.uint8 else _SIGNED).share(codes.astype(jnp.float32)) * unit


def _scales(x: Array, block_size: int, never_negative: bool) -> Array:
    """Return the bits of the unit of each block, u32[..., blocks]. It is inf if a block holds inf or NaN, never 0."""
    n, largest = x.shape[-1], (_NEVER_NEGATIVE if never_negative else _SIGNED).largest
    size = min(block_size, n)
    # Floats that are not negative have the order of their bits, with inf and NaN at the end. XLA:CPU's maximum of
    # floats drops NaN in some shapes (openxla/xla#21461; f32[64, 64] in jaxlib 0.10.2 and 0.12.0, not in 0.10.0).
    bits = _bits(x if never_negative else jnp.abs(x))
    if _are_cut(x, n, size):  # Each device takes the largest numbers of its parts of blocks, and all get them.
        part = math.gcd(size, n // count_named_shards(x, -1))
        bits = _largest(bits.reshape(*x.shape[:-1], n // part, part))
        bits, n, size = whole_along_last_axis(bits), n // part, size // part
    if missing := -n % size:
        bits = jnp.pad(bits, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    rows = _rows(bits, size)
    # One axis at a time: JAX knows how that moves the names of explicit mesh axes.
    blocks = bits.reshape(*rows, bits.shape[-1]).reshape(*rows, -1, size)
    most = jnp.minimum(_largest(blocks), _INF)
    # Rounded up, but for what the division adds to a unit that has 18 bits. The largest finite number stays finite.
    unit = (_bits(_float(most) * np.float32(1 / largest)) + _U32(60)) & _U32(0xFFFFFFC0)
    limit = (np.finfo(np.float32).max / np.float32(largest)).view(_U32) & _U32(0xFFFFFFC0)
    return jnp.where(most == _INF, _INF, jnp.clip(unit, _SMALLEST_NORMAL, limit)).reshape(*x.shape[:-1], -1)


def _largest(blocks: Array) -> Array:
    """Return the largest number along the last axis."""
    if blocks.shape[-1] % 32:
        return jnp.max(blocks, -1)
    # XLA:CPU takes a maximum along the last axis one number at a time, and along another in vectors: the scales take
    # two to eight times as long without this (jaxlib 0.10.0 to 0.12.0). XLA:TPU would copy an array that is cut so.
    cut = lambda blocks: blocks.reshape(*blocks.shape[:-1], -1, 32)
    return lax.platform_dependent(blocks, cpu=lambda x: jnp.max(cut(x), (-2, -1)), default=lambda x: jnp.max(x, -1))


def check_codes(name: str, stored: BlockCodes, block_size: int | None) -> None:
    """Raise TypeError or ValueError if arrays are not codes and scales, or their blocks have another size than this."""
    codes, scales = stored
    types = jnp.result_type(codes).name, jnp.result_type(scales).name
    if types[0] not in ("int8", "uint8") or types[1] != "uint32":
        older = f" Float32 scales are of an older jamp. {OLDER}" if types[1] == "float32" else ""
        raise TypeError(
            f"{name} must hold int8 or uint8 codes and uint32 scales, got {types[0]} and {types[1]}. Restore into "
            f"tx.init(params).{older}"
        )
    (*rows, n), (*same_rows, count) = codes.shape or [0], scales.shape or [0]
    own_size = _block_size(n, count) if count else 0
    if rows != same_rows or not own_size or count != -(-n // own_size):
        shapes = f"codes of shape {codes.shape} and scales of shape {scales.shape}"
        raise ValueError(f"{name} has {shapes}, which do not fit. Restore both from one checkpoint.")
    if block_size is not None and count != -(-n // block_size):
        raise ValueError(
            f"{name} must have blocks of block_size={block_size}, got {own_size}. Pass that size, or write "
            f"jamp.interop.quantize_state(jamp.interop.dequantize_state(state), {block_size})."
        )


def _block_size(n: int, count: int) -> int:
    """Return the block size of an axis of `n` elements in `count` blocks: the whole axis, or a power of two."""
    return n if count == 1 else 1 << (-(-n // count) - 1).bit_length()


def _spread(scales: Array, n: int, size: int) -> Array:
    """Repeat the values of blocks for each of the `n` elements of the last axis."""
    if _are_cut(scales, n, size):
        scales = whole_along_last_axis(scales)
    rows, count = _rows(scales, size), scales.shape[-1]
    whole = jnp.broadcast_to(jnp.expand_dims(scales.reshape(*rows, count), -1), (*rows, count, size))
    whole = whole.reshape(*rows, count * size).reshape(*scales.shape[:-1], count * size)
    return whole if whole.shape[-1] == n else whole[..., :n]


def _are_cut(x: Array, n: int, size: int) -> bool:
    """Whether the shards of the last axis, on Explicit axes, cut blocks of `n` elements: its elements or its scales."""
    shards = count_named_shards(x, -1)
    return shards > 1 and n % (shards * size) > 0


def _rows(x: Array, size: int) -> tuple[int, ...]:
    """Return all axes but the last, with the one before it split in groups of 8 where that cuts no shard.

    A TPU stores an array in tiles of 8 by 128. With this split, blocks of 128 keep the layout. Without it, XLA:TPU
    copies the whole array, in float32 and more than once (for a v5e, jaxlib 0.10.2).
    """
    if x.ndim < 2 or size % 128 or x.shape[-2] % (8 * count_shards(x, -2)):
        return x.shape[:-1]
    return *x.shape[:-2], x.shape[-2] // 8, 8
