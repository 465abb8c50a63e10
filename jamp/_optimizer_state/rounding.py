"""Random bits, and stochastic rounding of float32 to bfloat16, which is right on average.

The bits are a hash of the step, the leaf, and the index of the element in the whole array. There is no key to store,
and nothing to communicate, because each device computes the bits of the elements that it holds.
"""

import hashlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, PartitionSpec

from jamp._jaxprs import constructs, ir
from jamp._jaxprs.ir import JaxprEqn

Words = tuple[Array, Array]  # u32[] both: what the random bits of a step, or of a leaf in it, are a hash of


def next_count(count: Array) -> Array:
    """Return the step count after a step, i32[]. It wraps. If it saturated, the random bits would repeat."""
    return jnp.asarray(count) + 1


def random_words(seed: Any, count: Array) -> Words:
    """Return two random words for one step, u32[] both, from a seed (an int or i32[]) and the step count (i32[])."""
    start = jnp.uint32(seed & 0xFFFFFFFF) if isinstance(seed, int) else jnp.asarray(seed).astype(jnp.uint32)
    first = hash_bits(hash_bits(start) + count.astype(jnp.uint32))
    return first, hash_bits(first + start)


class RandomBits(NamedTuple):
    """Where an array takes its random bits from.

    Arrays of one leaf, such as a parameter and its moments, take three parts of one hash of 32 bits: a second hash
    would cost a step a fifth of its instructions. Where parts overlap, the highest bits of one are low bits of another.
    """

    words: Words  # of the step, mixed with the leaf's name
    part: int  # of the hash: 0, 1 or 2

    def draw(self, like: Array, bits: int, spec: PartitionSpec | None = None) -> Array:
        """Return an integer of so many random bits, at most 16, for each element of an array: u32, in its shape.

        Args:
          like: The array. Its values do not matter.
          bits: How many.
          spec: In `shard_map`, how the array is sharded.
        """
        # A thread of a GPU computes four elements in a row, and so one hash. It takes four multiples of it.
        fours, remainder = _index(like, spec)
        # Because the second word enters between the products, no two streams are permutations of each other.
        mixed = _product(_product(fours ^ self.words[0], 16, 0x7FEB352D) + self.words[1], 15, 0x846CA68B)
        mixed = mixed ^ (mixed >> 16)
        multiple = mixed * (np.uint32(0x846CA68B) + remainder * np.uint32(0x3C6EF372))
        end = (32, 16, 24)[self.part]
        return (multiple >> (end - bits)) & np.uint32((1 << bits) - 1)


def random_bits(words: Words, leaf: str, number: int = 0) -> RandomBits:
    """Return the source of the random bits of an array in a step.

    Args:
      words: The words of the step, from `random_words`.
      leaf: The name of its leaf. Leaves with different names get different bits.
      number: Which of the arrays of its leaf this is, from 0.
    """
    hashed, part = divmod(number, 3)
    # Constants, the same in every process. The kernel of the leaf combines them, so that it needs no second kernel.
    own = np.frombuffer(hashlib.blake2s(f"{leaf} {hashed}".encode(), digest_size=8).digest(), "<u4")
    return RandomBits((words[0] ^ own[0], words[1] + own[1]), part)


def round_stochastically(x: Array, random: RandomBits, spec: PartitionSpec | None = None) -> Array:
    """Round float32 values stochastically to bfloat16, and return them as float32.

    inf, quiet NaN and values that bfloat16 represents exactly stay what they are. No finite value becomes infinite.

    Args:
      x: f32.
      random: Its random bits in this step.
      spec: In `shard_map`, how `x` is sharded.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    # The discarded bits are a number below 2**16. Adding a uniform 16-bit number carries with the right probability.
    # What could carry to inf is cut off: the largest bfloat16 and more, inf, NaN. The shift drops the sign.
    carries = bits << 1 < np.uint32(0x7F7F0000 << 1)
    rounded = (bits + jnp.where(carries, random.draw(x, 16, spec), np.uint32(0))) & np.uint32(0xFFFF0000)
    return straight_through(x, lax.bitcast_convert_type(rounded, jnp.float32))


@jax.custom_jvp
def straight_through(x: Array, rounded: Array) -> Array:
    """Return `rounded`, with the derivative of `x`: a straight-through estimator (arXiv:1308.3432)."""
    del x
    return rounded


straight_through.defjvp(lambda primals, tangents: (primals[1], tangents[0]))


def is_straight_through(eqn: JaxprEqn) -> bool:
    """Whether an equation is a call of this module's `straight_through`. A user's function may have the same name."""
    infos = [body.debug_info for body, _ in constructs.inner(eqn)] if ir.name(eqn) == "custom_jvp_call" else []
    return any(info.func_name == "straight_through" and info.func_filename == __file__ for info in infos)


def hash_bits(x: Array) -> Array:
    """Map 32 bits to 32 bits, one to one, each of which depends on every bit of `x`: lowbias32 (Wellons, 2018)."""
    x = _product(_product(x, 16, 0x7FEB352D), 15, 0x846CA68B)
    return x ^ (x >> 16)


def _product(x: Array, shift: int, factor: int) -> Array:
    return (x ^ (x >> shift)) * np.uint32(factor)


def _index(x: Array, spec: PartitionSpec | None) -> tuple[Array, Array]:
    """Return the index of each element in the whole array, divided by four, u32 modulo 2**32, and the remainder."""
    sharding = jax.typeof(x).sharding
    is_explicit = not sharding.mesh.empty and AxisType.Explicit in sharding.mesh.axis_types
    rows, last, n = jnp.uint32(0), jnp.uint32(0), 1
    for axis, size in enumerate(x.shape):
        rows = rows * np.uint32(n) + last
        last = lax.broadcasted_iota(jnp.uint32, x.shape, axis, **({"out_sharding": sharding} if is_explicit else {}))
        names = spec[axis] if spec is not None and axis < len(spec) and spec[axis] is not None else ()
        names = (names,) if isinstance(names, str) else names
        if names:
            last = last + lax.axis_index(names).astype(jnp.uint32) * np.uint32(size)
        n = size * (lax.axis_size(names) if names else 1)
    if n % 4 == 0:  # The compiler sees that four in a row have one quotient.
        return rows * np.uint32(n // 4) + (last >> 2), last & np.uint32(3)
    index = rows * np.uint32(n) + last
    return index >> 2, index & np.uint32(3)
