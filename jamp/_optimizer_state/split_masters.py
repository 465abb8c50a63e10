"""Split masters: a bfloat16 parameter and 16 bits of optimizer state are together a float32 master.

    master    1.0012      f32[n]     bits 0x3F802752
    param     1.0         bf16[n]    bits 0x3F80        the master, rounded to nearest
    low_bits              u16[n]               2752     the lower half of its bits

A lower half of 0x8000 and more means that the parameter was rounded up, so its bits are one more than the upper half:

    master    1.0051      f32[n]     bits 0x3F80A71E
    param     1.0078125   bf16[n]    bits 0x3F81
    low_bits              u16[n]               A71E
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.tree_util import keystr, tree_map_with_path

from jamp._cast import to_float32
from jamp._loss_scale.scaler_state import check_kind
from jamp._optimizer_state.dtypes import keeping_dtypes
from jamp._optimizer_state.params import check_bfloat16, compute_update, rounds_params

_INF = np.uint32(0x7F800000)
_ADVICE = "Split masters are for bfloat16. Write jamp.master_params(tx)."
_CURE = "For whole masters: params, state = jamp.interop.split_masters(state, params)."


class MasterParamsState(NamedTuple):
    """State of `master_params`.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> jamp.master_params(optax.sgd(0.1)).init(jnp.ones(3, jnp.bfloat16)).master_params.dtype
      dtype('float32')
    """

    master_params: Any  # the parameters in full precision, the source of truth
    inner_state: Any


class SplitMasterParamsState(NamedTuple):
    """State of `master_params(..., split=True)`: the low 16 bits of the float32 masters.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> jamp.master_params(optax.sgd(0.1), split=True).init(jnp.ones(3, jnp.bfloat16)).low_bits.dtype
      dtype('uint16')
    """

    low_bits: Any  # u16 for each bfloat16 parameter, and optax.MaskedNode() for any other
    inner_state: Any

    @property
    def rounds_params(self) -> bool:
        """True: wrappers pass the parameters at their own dtypes."""
        return True


def with_split_masters(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Make `master_params(inner, split=True)`."""
    inner = keeping_dtypes(inner)

    def init(params: optax.Params) -> SplitMasterParamsState:
        check_bfloat16(params, _ADVICE)
        low_bits = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.uint16) if is_split(p) else optax.MaskedNode(), params)
        return SplitMasterParamsState(low_bits, check_inner(inner.init(to_float32(params))))

    def update(
        updates: optax.Updates, state: SplitMasterParamsState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, SplitMasterParamsState]:
        check_kind(state, SplitMasterParamsState, _CURE)
        check_given(params)
        check_bfloat16(params, _ADVICE)
        masters = _join(params, state.low_bits)
        steps, inner_state = inner.update(to_float32(updates), state.inner_state, masters, **extra_args)
        new, low_bits = _split(optax.apply_updates(masters, steps), params)

        def to_param(step: Any, p: Any, new: Any) -> Any:
            return compute_update(p.astype(jnp.float32), new) if is_split(p) else step

        return jax.tree.map(to_param, steps, params, new), SplitMasterParamsState(low_bits, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def split_masters(state: Any, like: Any) -> tuple[Any, SplitMasterParamsState]:
    """Convert the state of `jamp.master_params(tx)` to parameters and a state of `jamp.master_params(tx, split=True)`.

    Args:
      state: A `MasterParamsState` with float32 masters.
      like: A pytree of arrays or types, such as `jnp.bfloat16`, with the dtypes that the parameters are to have: the
        parameters, or `jax.eval_shape` of what makes them.

    Returns:
      The parameters: the masters, where `like` is bfloat16 rounded to nearest with ties away from zero. And the state.

    Raises:
      TypeError: If the state is not a `MasterParamsState`, or `like` holds other than arrays and types.
      ValueError: If a parameter is to be float16 or float8.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> masters = jnp.float32([1.001, 2.0])
      >>> state = jamp.master_params(optax.sgd(0.1)).init(masters)
      >>> params, state = jamp.interop.split_masters(state, masters.astype(jnp.bfloat16))
      >>> bool((jamp.interop.join_masters(state, params).master_params == masters).all())
      True
    """
    check_kind(state, MasterParamsState, _element(state, MasterParamsState, "master_params(tx)"))
    if wrong := [x for x in jax.tree.leaves(like) if not hasattr(x, "dtype")]:
        raise TypeError(f"like must hold arrays or their types, such as the parameters, got {wrong[0]!r}.")
    check_bfloat16(like, _ADVICE)
    params, low_bits = _split(state.master_params, like)
    params = jax.tree.map(lambda x, p: x.astype(p.dtype), params, like)
    return params, SplitMasterParamsState(low_bits, state.inner_state)


def join_masters(state: SplitMasterParamsState, params: Any) -> MasterParamsState:
    """Convert a state of `jamp.master_params(tx, split=True)` to one of `jamp.master_params(tx)`.

    Args:
      state: The `SplitMasterParamsState`.
      params: The parameters of the same step.

    Raises:
      TypeError: If the state is not a `SplitMasterParamsState`.
      ValueError: If a bfloat16 parameter has no low bits in the state, or a parameter of another dtype has some.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> params = jnp.ones(3, jnp.bfloat16)
      >>> state = jamp.master_params(optax.sgd(0.1), split=True).init(params)
      >>> jamp.interop.join_masters(state, params).master_params.dtype
      dtype('float32')
    """
    check_kind(state, SplitMasterParamsState, _element(state, SplitMasterParamsState, "master_params(tx, split=True)"))
    masters = _join(params, state.low_bits)
    # A wide parameter is its own master, and a step that donates both must not be given one buffer twice.
    is_shared = lambda master, p: master is p and isinstance(p, jax.Array)
    masters = jax.tree.map(lambda master, p: jnp.copy(master) if is_shared(master, p) else master, masters, params)
    return MasterParamsState(masters, state.inner_state)


def _element(state: Any, kind: Any, optimizer: str) -> str:
    """Say which element of a chain's state is of this type, or else which optimizer has such a state."""
    found = [i for i, x in enumerate(state) if isinstance(x, kind)] if type(state) is tuple else []
    return f"Pass the element of the chain: opt_state[{found[0]}]." if found else f"The optimizer is jamp.{optimizer}."


def _join(params: Any, low_bits: Any) -> Any:
    def join(path: Any, p: Any, low: Any) -> Any:
        _check_low_bits(keystr(path) or "array", p, low)
        return join_master(p, low) if is_split(p) else p

    return tree_map_with_path(join, params, low_bits)


def _check_low_bits(name: str, p: Any, low: Any) -> None:
    """Raise ValueError if a state does not have the low bits of this parameter, or TypeError if they are not bits."""
    dtype = jnp.result_type(p).name
    if is_split(p) and isinstance(low, optax.MaskedNode):
        raise ValueError(
            f"The parameter {name} must be wide as for init, got bfloat16. To go on in bfloat16: params, state = "
            "jamp.interop.split_masters(jamp.MasterParamsState(wide_params, state.inner_state), params)."
        )
    if not is_split(p) and not isinstance(low, optax.MaskedNode):
        raise ValueError(
            f"The parameter {name} must be bfloat16 as for init, got {dtype}. Write p.astype(jnp.bfloat16), or to go "
            "on in float32 jamp.interop.join_masters(state, bfloat16_params)."
        )
    if is_split(p) and (jnp.result_type(low) != jnp.uint16 or jnp.shape(low) != jnp.shape(p)):
        got = f"{jnp.result_type(low)}{list(jnp.shape(low))}"
        expected = f"The low bits of the parameter {name} must be uint16{list(jnp.shape(p))}"
        raise TypeError(f"{expected}, got {got}. Restore into tx.init(params).")


def _split(masters: Any, like: Any) -> tuple[Any, Any]:
    """Return the parameters, which bfloat16 represents, in f32, and their low bits."""
    treedef = jax.tree.structure(masters)
    leaves = zip(jax.tree.leaves(masters), jax.tree.leaves(like), strict=True)
    pairs = [split_master(m) if is_split(p) else (m, optax.MaskedNode()) for m, p in leaves]
    return jax.tree.unflatten(treedef, [p for p, _ in pairs]), jax.tree.unflatten(treedef, [low for _, low in pairs])


def split_master(master: Array) -> tuple[Array, Array]:
    """Return a float32 array rounded to bfloat16, ties away from zero, in f32, and its low 16 bits, u16.

    Ties go away from zero because the nearest even number would be the same for two masters with the same low bits.
    A NaN stays a NaN, with other bits.
    """
    bits = lax.bitcast_convert_type(master, jnp.uint32)
    # Inf and NaN have no low bits. The select is also there for ptxas 13.0, the assembler of CUDA 13.0, which stores 16
    # bits of a register that holds a float as the float rounded to an integer.
    low_bits = jnp.where(bits & np.uint32(0x7FFFFFFF) >= _INF, np.uint32(0), bits).astype(jnp.uint16)
    return upper_half(master, low_bits), low_bits


def upper_half(master: Array, low_bits: Array) -> Array:
    """Return the bfloat16, in f32, that together with these low bits is the master.

    It is computed from the low bits, for two reasons. XLA:TPU computes both in one kernel only if one needs the other
    (for a v5e, jaxlib 0.10.2). And XLA may compute the master twice, once for the bits and once for the parameter, and
    round it differently. The result is then some units in the last place off, and rounding it to bfloat16 makes it
    right.
    """
    bits, low = lax.bitcast_convert_type(master, jnp.uint32), low_bits.astype(jnp.uint32)
    carry = (low & np.uint32(0x8000)) << 1  # It moves to the exponent where it should.
    size = bits & np.uint32(0x7FFFFFFF)
    # XLA may have rounded the master of the bits to a number that is not 0 or inf. This one then stays 0 or inf.
    high = jnp.where(size < low, bits - size, jnp.where(size == _INF, bits, bits - low + carry))
    return lax.bitcast_convert_type(high, jnp.float32)


def join_master(param: Array, low_bits: Array) -> Array:
    """Return the float32 array that `split_master` was given.

    With other low bits the result is at most a spacing of bfloat16 away from `param`, or NaN if `param` is inf.
    """
    # All in 32 bits: a TPU packs arrays of 16 bits in pairs, and reads one as another type only by a copy.
    high, low = lax.bitcast_convert_type(param.astype(jnp.float32), jnp.uint32), low_bits.astype(jnp.uint32)
    # Low bits of a half and more mean that the bfloat16 was rounded up. No number is rounded up to 0: such a parameter
    # was flushed to 0, or is of another step, and to borrow from it would make a NaN.
    borrow = jnp.minimum(low & np.uint32(0x8000), high & np.uint32(0x7FFFFFFF)) << 1
    return lax.bitcast_convert_type(high + low - borrow, jnp.float32)


def is_split(p: Any) -> bool:
    """Whether a parameter has low bits."""
    return bool(getattr(p, "dtype", None) == jnp.bfloat16)


def check_given(params: Any) -> None:
    """Raise ValueError if `update` was called without the parameters."""
    if params is None:
        raise ValueError("Master parameters need params. Write tx.update(grads, state, params).")


def check_inner(inner_state: Any) -> Any:
    """Return the state of the optimizer inside. Raise ValueError if that optimizer rounds parameters itself."""
    if rounds_params(inner_state):
        raise ValueError(
            "The optimizer inside master_params rounds stochastically. Use one of jamp.stochastic_rounding(tx) and "
            "jamp.master_params(tx)."
        )
    return inner_state
