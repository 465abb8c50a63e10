"""Stochastic rounding of float32 to bfloat16, which is right on average.

The random bits are a hash of the step, the leaf, and the index of the element in the whole array. There is no key to
store, and nothing to communicate, because each device computes the bits of the elements that it holds.
"""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, PartitionSpec

from jamp import _jaxpr
from jamp._jaxpr import ClosedJaxpr, JaxprEqn


def next_count(count: Array) -> Array:
    """The step count after a step, i32[]. It wraps around: with one that saturates, the random bits would repeat."""
    return jnp.asarray(count) + 1


def random_words(seed: Any, count: Array) -> tuple[Array, Array]:
    """Two random words for one step, u32[] both, from a seed (an int or i32[]) and the step count (i32[])."""
    start = jnp.uint32(seed & 0xFFFFFFFF) if isinstance(seed, int) else jnp.asarray(seed).astype(jnp.uint32)
    first = hash_bits(hash_bits(start) + count.astype(jnp.uint32))
    return first, hash_bits(first + start)


def round_stochastically(x: Array, name: str, words: tuple[Array, Array], spec: PartitionSpec | None = None) -> Array:
    """Round float32 values stochastically to bfloat16, and return them as float32.

    inf, NaN and values that bfloat16 represents exactly stay unchanged. No finite value becomes infinite.

    Args:
      x: f32.
      name: Leaves with different names get different random bits.
      words: Those of the step, from `random_words`.
      spec: In `shard_map`, how `x` is sharded.
    """
    # The words of a leaf are constants, the same in every process. The rounding kernel combines them with the words of
    # the step, so that a leaf needs no second kernel.
    leaf = np.frombuffer(hashlib.blake2s(name.encode(), digest_size=8).digest(), "<u4")
    index = _index(x, spec) ^ (words[0] ^ leaf[0])
    # Because the second word enters between the products, no two streams are permutations of each other.
    random = _product(_product(index, 16, 0x7FEB352D) + (words[1] + leaf[1]), 15, 0x846CA68B) >> 16
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    # The discarded bits are a number below 2**16. Adding a uniform 16-bit number carries with the right probability.
    raised = bits + random
    is_finite = lambda u: (u & jnp.uint32(0x7F800000)) != jnp.uint32(0x7F800000)
    rounded = jnp.where(is_finite(raised), raised, bits) & jnp.uint32(0xFFFF0000)
    return straight_through(x, lax.bitcast_convert_type(jnp.where(is_finite(bits), rounded, bits), jnp.float32))


@jax.custom_jvp
def straight_through(x: Array, rounded: Array) -> Array:
    """`rounded`, with the derivative of `x`: a straight-through estimator (arXiv:1308.3432)."""
    del x
    return rounded


straight_through.defjvp(lambda primals, tangents: (primals[1], tangents[0]))


def check_not_scaled(closed: ClosedJaxpr, updates: int) -> None:
    """Raise ValueError if any of the first outputs, the `updates`, is a rounded update times a number other than 1.

    What may leave a rounded update as it is, such as a mask of its shape or a selection, is not an error.
    """
    rounded, scaled = set[Any](), set[Any]()
    for eqn in closed.jaxpr.eqns:
        if _is_straight_through(eqn):
            rounded.update(eqn.outvars)
        elif _jaxpr.name(eqn) in ("mul", "div"):
            others = [x for x in eqn.invars if _jaxpr.is_literal(x) or x not in rounded | scaled]
            is_number = [jnp.shape(x.aval) == () and getattr(x, "val", None) != 1 for x in others]
            scaled.update(eqn.outvars if is_number == [True] else [])
    if any(v in scaled for v in closed.jaxpr.outvars[:updates] if not _jaxpr.is_literal(v)):
        raise ValueError(
            "The updates are multiplied by a number after stochastic_rounding, so that the new parameters are rounded "
            "to nearest again. Put the rounding last: jamp.stochastic_rounding(optax.chain(tx, optax.scale(0.1)))."
        )


def _is_straight_through(eqn: JaxprEqn) -> bool:
    """Whether an equation is a call of this module's `straight_through`. A user's function may have the same name."""
    infos = [body.debug_info for body, _ in _jaxpr.inner(eqn)] if _jaxpr.name(eqn) == "custom_jvp_call" else []
    return any(info.func_name == "straight_through" and info.func_filename == __file__ for info in infos)


def hash_bits(x: Array) -> Array:
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
