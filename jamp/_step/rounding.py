"""Round float32 to bfloat16, up or down with the probability that makes it right on average.

The random bits are a hash of a counter: the step, the leaf, and the index of the element in the whole array. There is
no key to keep, and nothing to communicate, because each device computes the bits of the elements that it holds.
"""

import hashlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, PartitionSpec

from jamp._cast import to_float32
from jamp._step.state import contains


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> int(jamp.stochastic_rounding(optax.sgd(0.1)).init(jnp.ones(3, jnp.bfloat16)).rounding_count)
      0
    """

    rounding_count: Array  # i32[], steps so far, on which the random bits depend
    inner_state: Any


def rounds_stochastically(opt_state: Any) -> bool:
    """Whether an optimizer of this state rounds parameters, so that it has to see them at their own dtypes."""
    return contains(opt_state, lambda x: isinstance(x, StochasticRoundingState))


def params_for(opt_state: Any, params: Any) -> Any:
    """The parameters as the optimizer of this state takes them: float32, unless it rounds them itself."""
    return params if rounds_stochastically(opt_state) else to_float32(params)


def random_words(seed: Any, count: Array) -> tuple[Array, Array]:
    """Two random words for one step, u32[] both, from a seed (an int or i32[]) and the number of the step (i32[])."""
    start = jnp.uint32(seed & 0xFFFFFFFF) if isinstance(seed, int) else jnp.asarray(seed).astype(jnp.uint32)
    first = _hash(_hash(start) + count.astype(jnp.uint32))
    return first, _hash(first + start)


def round_stochastically(x: Array, name: str, words: tuple[Array, Array], spec: PartitionSpec | None = None) -> Array:
    """Round float32 numbers to numbers of bfloat16, as float32.

    inf and NaN stay what they are, numbers of bfloat16 too, and no finite number becomes infinite.

    Args:
      x: f32.
      name: Leaves with different names get different random bits.
      words: Those of the step, from `random_words`.
      spec: In `shard_map`, how `x` is sharded.
    """
    # The words of a leaf are constants, the same in every process. A kernel adds them to those of the step, so that no
    # leaf needs a kernel of its own for its numbers.
    leaf = np.frombuffer(hashlib.blake2s(name.encode(), digest_size=8).digest(), "<u4")
    index = _index(x, spec) ^ (words[0] ^ leaf[0])
    # The second word enters between the products. So two streams never hold the same numbers in another order.
    random = _product(_product(index, 16, 0x7FEB352D) + (words[1] + leaf[1]), 15, 0x846CA68B) >> 16
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    # What is cut off is below 2**16. A uniform number of 16 bits, added to it, carries with the right probability.
    raised = bits + random
    is_finite = lambda u: (u & jnp.uint32(0x7F800000)) != jnp.uint32(0x7F800000)
    rounded = jnp.where(is_finite(raised), raised, bits) & jnp.uint32(0xFFFF0000)
    return lax.bitcast_convert_type(jnp.where(is_finite(bits), rounded, bits), jnp.float32)


def _hash(x: Array) -> Array:
    """A bijection of 32 bits, each of which depends on every bit of `x`: lowbias32 (Wellons, 2018)."""
    x = _product(_product(x, 16, 0x7FEB352D), 15, 0x846CA68B)
    return x ^ (x >> 16)


def _product(x: Array, shift: int, factor: int) -> Array:
    return (x ^ (x >> shift)) * np.uint32(factor)


def _index(x: Array, spec: PartitionSpec | None) -> Array:
    """The index of each element in the whole array, u32, modulo 2**32."""
    index = jnp.uint32(0)
    sharding = jax.typeof(x).sharding
    is_explicit = not sharding.mesh.empty and AxisType.Explicit in sharding.mesh.axis_types
    for axis, n in enumerate(x.shape):
        here = lax.broadcasted_iota(jnp.uint32, x.shape, axis, **({"out_sharding": sharding} if is_explicit else {}))
        names = spec[axis] if spec is not None and axis < len(spec) and spec[axis] is not None else ()
        names = (names,) if isinstance(names, str) else names
        if names:
            here = here + lax.axis_index(names).astype(jnp.uint32) * jnp.uint32(n)
        index = index * jnp.uint32(n * (lax.axis_size(names) if names else 1)) + here
    return index
