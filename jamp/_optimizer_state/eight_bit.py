"""`quantized_state`: the moments of an Optax optimizer in eight bits."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.tree_util import keystr, tree_map_with_path

from jamp._cast import is_float32, is_floating
from jamp._compiler_hints import in_one_kernel_on_tpu
from jamp._jaxprs.source import users_stacklevel
from jamp._leaves import contains, find_nodes
from jamp._loss_scale.scaler_state import check_holds_no_scaler, check_kind, check_optimizer
from jamp._mesh import keep_sharding
from jamp._numbers import as_number
from jamp._optimizer_state.codes import OLDER, BlockCodes, check_codes, decode, encode
from jamp._optimizer_state.dtypes import keeping_dtypes
from jamp._optimizer_state.moments import map_moments, unknown_fields
from jamp._optimizer_state.rounding import next_count, random_bits, random_words

LeafPredicate = Callable[[Any, Any], bool | None]  # of the path and the array. None leaves the choice to jamp
_Scales = dict[str, list[Array]]  # of the arrays of each leaf
_Stored = dict[tuple[Any, ...], bool]  # the paths of arrays with codes, and whether they are never negative


class _Options(NamedTuple):
    """What `quantized_state` was asked for."""

    block_size: int
    keep: LeafPredicate | None
    never_negative: LeafPredicate | None


# The scale of a block, four bytes, must be smaller than the saving of its codes. Small arrays save nothing.
_MIN_SIZE, _MIN_AXIS = 4096, 16

_SEED = 0x6D6F6D73  # A `stochastic_rounding` around it has other random bits.

_CURE = "For the inner optimizer's: jamp.interop.quantize_state(state, block_size)."


class QuantizedState(NamedTuple):
    """State of `quantized_state`, with `BlockCodes` in place of the trees of moments in the inner state.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> state = jamp.quantized_state(optax.adamw(1e-3)).init(jnp.ones((64, 256)))
      >>> state.inner_state[0].mu.codes.dtype, state.inner_state[0].nu.codes.dtype
      (dtype('int8'), dtype('uint8'))
    """

    rounding_count: Array  # i32[], steps so far modulo 2**32, on which the random bits depend
    inner_state: Any


def quantized_state(
    inner: optax.GradientTransformation,
    *,
    block_size: int = 128,
    keep: LeafPredicate | None = None,
    never_negative: LeafPredicate | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Keep the moments of an optimizer in eight bits between its steps.

    AdamW's moments take 2.06 bytes a parameter in place of 8. A step decodes them, runs `inner` in float32, and rounds
    the new ones stochastically, so that slow averages keep moving.

    It stores in eight bits the float32 moments of Optax's and `optax.contrib`'s states that have at least 4096
    elements and a last axis of at least 16. Everything else stays as it is: sums of gradients, copies of parameters,
    masters, and the states of other libraries. For bfloat16 parameters Optax makes bfloat16 moments, which stay too:
    put `stochastic_rounding` or `master_params` around, as `inner` then sees float32. `init` warns
    if there are arrays that are large enough, and none is stored in eight bits. It also warns if one of Optax's states
    has a field with such arrays that this version of jamp does not know.

    `inner` is called twice in a step, for the scales and for the codes, and must have no side effects.

    Args:
      inner: The optimizer.
      block_size: The number of elements along the last axis that share a scale, a power of two. Where that axis is
        sharded, make its shards multiples of it. If shards cut blocks, devices communicate in each step to find the
        scales, and inside `shard_map` each shard has blocks of its own.
      keep: A function of the path in the inner state and the array. An array for which it returns True stays as it is.
      never_negative: For states that jamp does not know: a function of the path and the array, for each float32 array
        that is in none of Optax's moments. True and False store it in eight bits. True is for an array that is never
        negative, such as a second moment. None leaves it as it is.

    Returns:
      An Optax transformation. Its state is a `QuantizedState`, whose codes have the shapes of the parameters.

    Raises:
      TypeError: From `update`, if the state is not a `QuantizedState`, or the dtypes of its codes or scales changed.
      ValueError: If `block_size` is not a power of two. From `init`, if `inner` is loss-scaled or quantized. From
        `update`, if the state has another block size.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> tx, params = jamp.quantized_state(optax.adam(1e-3)), jnp.ones((64, 256))
      >>> state = tx.init(params)
      >>> updates, state = tx.update(params, state, params)
      >>> round(float(updates[0, 0]), 6)
      -0.001

    References:
      Dettmers et al., 8-bit Optimizers via Block-wise Quantization, ICLR 2022 (arXiv:2110.02861): blocks.
    """
    check_optimizer(inner, "jamp.quantized_state({})")
    options = _Options(_check_block_size(block_size), keep, never_negative)
    inner = keeping_dtypes(inner)

    def init(params: optax.Params) -> QuantizedState:
        state = inner.init(params)
        check_holds_no_scaler(
            state,
            "The optimizer inside is loss-scaled. Wrap the whole: jamp.loss_scaled(jamp.quantized_state(tx)).",
        )
        if contains(state, lambda x: isinstance(x, QuantizedState)):
            raise ValueError("quantized_state inside quantized_state rounds twice. Pass the plain optimizer.")
        # The barrier keeps XLA from folding the codes of zeros while it compiles `init`: 6 s for Adam's moments of
        # f32[512, 4096], and 0.2 s with it (openxla/xla#1652; jaxlib 0.10.0 to 0.12.0).
        state = jax.tree.map(lambda x: lax.optimization_barrier(x) if is_float32(x) else x, state)
        new = QuantizedState(jnp.array(0, jnp.int32), _encode_moments(state, jnp.array(0, jnp.int32), options)[0])
        if keep is None:
            _warn_if_none_is_stored(new)
        if keep is None and never_negative is None and contains(new, _holds_scales):
            _warn_of_unknown(unknown_fields(state, lambda x: is_float32(x) and _is_large(x)))
        return new

    def update(
        updates: optax.Updates, state: QuantizedState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, QuantizedState]:
        check_kind(state, QuantizedState, _CURE)
        count = next_count(state.rounding_count)
        step = lambda state: inner.update(updates, _decode_moments(state, options.block_size), params, **extra_args)
        # The scales come from one pass and the codes from another, which XLA must not merge. Else XLA:GPU writes the
        # new moments to memory in float32 to read them again: up to 8 bytes a parameter, of all arrays at once (for an
        # H200, jaxlib 0.10.2).
        steps, new = step(state)
        # The old state says which arrays have codes. Shapes do not: in a shard_map they may differ from `init`'s.
        stored = _stored(state.inner_state)
        _, scales = _encode_moments(new, count, options, stored)
        if scales:
            # One barrier for the arrays of a leaf, or XLA:GPU makes kernels of a part of each pass. Not one for all
            # leaves, which XLA:TPU would then read from its main memory in each pass.
            scales = {leaf: lax.optimization_barrier(of_leaf) for leaf, of_leaf in scales.items()}
            barrier = lambda tree: jax.tree.map(lax.optimization_barrier, tree)
            separate = lambda x: x._replace(codes=barrier(x.codes)) if _is_codes(x) else x
            steps, new = step(jax.tree.map(separate, state, is_leaf=_is_codes))
        inner_state, _ = _encode_moments(new, count, options, stored, scales)
        inner_state = jax.tree.map(_with_scales_like, inner_state, state.inner_state, is_leaf=_is_codes)
        return _in_kernels_of_codes(steps, inner_state), QuantizedState(count, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_large(x: Any) -> bool:
    return bool(x.ndim and x.size >= _MIN_SIZE and x.shape[-1] >= _MIN_AXIS)


def _warn_of_unknown(fields: Sequence[str]) -> None:
    if fields:
        warnings.warn(
            f"quantized_state leaves {', '.join(dict.fromkeys(fields))} in float32, which this version of jamp does "
            "not know. To store it in eight bits, pass never_negative.",
            stacklevel=users_stacklevel(),
        )


def _warn_if_none_is_stored(state: QuantizedState) -> None:
    large = [x for x in jax.tree.leaves(state) if is_floating(x) and _is_large(x)]
    if not large or contains(state, _holds_scales):
        return
    why = (
        "knows no moment in this state. Pass never_negative=lambda path, x: False, or True where it is never negative."
    )
    if all(x.dtype.itemsize == 2 for x in large):
        wrapped = "jamp.master_params(jamp.quantized_state(tx), split=True)"
        why = f"found {large[0].dtype.name} moments. Write {wrapped}, or leave mu_dtype out."
    warnings.warn(f"quantized_state stores nothing in eight bits, because it {why}", stacklevel=users_stacklevel())


def quantize_state(
    state: Any, block_size: int = 128, keep: LeafPredicate | None = None, never_negative: LeafPredicate | None = None
) -> QuantizedState:
    """Convert a state of `tx` to one of `jamp.quantized_state(tx)`, with the same other arguments.

    Raises:
      ValueError: If `block_size` is not a power of two, or the state is quantized already.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> state = jamp.interop.quantize_state(optax.adam(1e-3).init(jnp.ones((64, 256))))
      >>> state.inner_state[0].nu.codes.dtype
      dtype('uint8')
    """
    options = _Options(_check_block_size(block_size), keep, never_negative)
    if contains(state, _is_codes):
        raise ValueError("The state is quantized already. Pass it to jamp.quantized_state(tx).update.")
    count = jnp.array(0, jnp.int32)
    return QuantizedState(count, _encode_moments(state, count, options)[0])


def dequantize_state(state: QuantizedState) -> Any:
    """Convert a state of `jamp.quantized_state(tx)`, of any block size, to one of `tx`.

    Raises:
      TypeError: If the state is not a `QuantizedState`, or the dtypes of its codes or scales changed.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> state = jamp.quantized_state(optax.adam(1e-3)).init(jnp.ones((64, 256)))
      >>> jamp.interop.dequantize_state(state)[0].nu.dtype
      dtype('float32')
    """
    check_kind(state, QuantizedState, "The optimizer is jamp.quantized_state(tx).")
    return _decode_moments(state, None)


def _encode_moments(
    state: Any, count: Array, options: _Options, stored: _Stored | None = None, scales: _Scales | None = None
) -> tuple[Any, _Scales]:
    """Encode the moments of the inner optimizer after `count` steps. Return its state with codes, and their scales.

    `stored` are the arrays with codes in the state from which the optimizer computed this one just now, and `scales`
    the scales of this one, if they are known.
    """
    words, new_scales = random_words(_SEED, count), _Scales()

    def choose(path: Any, x: Any, is_square: bool | None) -> bool | None:
        if not (is_float32(x) and _is_large(x)):
            return None
        if is_square is None and options.never_negative is not None:
            is_square = options.never_negative(path, x)
        is_kept = is_square is not None and options.keep is not None and options.keep(path, x)
        return None if is_kept else is_square

    def encode_array(path: Any, leaf: str, x: Any, is_square: bool | None) -> BlockCodes:
        is_given = is_square is None or stored is None
        is_square = choose(path, x, is_square) if stored is None else stored.get(path)
        if is_square is None or not is_float32(x):
            return BlockCodes(x, _make_placeholder(x))
        if is_square and is_given:  # Optax computes no -0, which has the bits of a negative number.
            x = jnp.where(x <= 0, 0, x)
        so_far = new_scales.setdefault(leaf, [])
        known = None if scales is None else scales[leaf][len(so_far)]
        codes = encode(x, options.block_size, is_square, random_bits(words, leaf, len(so_far)), known)
        so_far.append(codes.scales)
        return codes

    def encode_field(start: Any, tree: Any, is_square: bool | None) -> Any:
        new = lambda path, x: encode_array((*start, *path), keystr(path or start), x, is_square)
        pairs = tree_map_with_path(new, tree)
        if is_square is None:  # an array of another state
            return pairs if _is_scales(pairs.scales) else tree
        # Two trees like the parameters and not a tree of pairs: `optax.tree.map_params` maps those, and Flax NNX keeps
        # each leaf of one in a Variable.
        part = lambda name: jax.tree.map(lambda x: getattr(x, name), pairs, is_leaf=_is_codes)
        return BlockCodes(part("codes"), part("scales"))

    return map_moments(encode_field, state), new_scales


def _in_kernels_of_codes(updates: Any, inner_state: Any) -> Any:
    """Return the updates, each in one TPU kernel with the codes of the moments at its path.

    XLA:TPU computes both in one kernel only if one needs the other (for a v5e, jaxlib 0.10.2). Apart, they read and
    decode the state twice.
    """
    codes: dict[str, list[Array]] = {}
    for _, path, x in _codes(inner_state):
        codes.setdefault(keystr(path), []).append(x)
    return tree_map_with_path(lambda path, u: in_one_kernel_on_tpu(u, codes.get(keystr(path), ())), updates)


def _stored(inner_state: Any) -> _Stored:
    """Return which arrays of a state have codes."""
    return {(*start, *path): x.dtype == jnp.uint8 for start, path, x in _codes(inner_state)}


def _codes(inner_state: Any) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...], Array]]:
    """Yield the path of each moment in the state, and in it the path and the codes of each array that has some."""
    for start, moment in find_nodes(inner_state, _is_codes):
        arrays = jax.tree.leaves_with_path(moment.codes)
        for (path, x), scales in zip(arrays, jax.tree.leaves(moment.scales), strict=True):
            if _is_scales(scales):
                yield start, path, x


def _decode_moments(state: QuantizedState, block_size: int | None) -> Any:
    """Return the state of the inner optimizer. `block_size` is checked unless it is None."""

    def decode_array(path: Any, codes: Any, scales: Any) -> Any:
        if not _is_scales(scales):
            return codes
        check_codes(f"The state{keystr(path)}", BlockCodes(codes, scales), block_size)
        return decode(BlockCodes(codes, scales))

    def decode_field(start: Any, x: Any) -> Any:
        if not _is_codes(x):
            return x
        structures = list[Any](map(jax.tree.structure, x))
        if structures[0] != structures[1]:
            raise TypeError(f"The state{keystr(start)} lacks scales of some arrays, as in an older jamp. {OLDER}")
        return tree_map_with_path(lambda path, *y: decode_array((*start, *path), *y), *x)

    return tree_map_with_path(decode_field, state.inner_state, is_leaf=_is_codes)


def _check_block_size(given: Any) -> int:
    block_size = as_number(given)
    if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 1 or block_size.bit_count() > 1:
        raise ValueError(f"block_size must be a power of two, got block_size={block_size!r}.")
    return block_size


def _is_codes(x: Any) -> bool:
    return isinstance(x, BlockCodes)


def _make_placeholder(x: Any) -> Array:
    """Make the array in the place of the scales of an array that stays whole.

    It is not empty, because Orbax does not save empty arrays. A small one has the array's shape, so that its sharding
    fits.
    """
    shape = jnp.shape(x)
    return jnp.zeros(shape if math.prod(shape) < _MIN_SIZE else (*shape[:-1], 1), jnp.bool_)


def _with_scales_like(new: Any, old: Any) -> Any:
    """Return new codes with the placeholders of an old state, and with new scales on the devices of the old ones.

    A new constant would lie on every device. On Explicit axes a `scan` demands that a state keeps its types.
    """
    if not _is_codes(new):
        return new

    def scales(x: Array, own: Array, codes: Array, own_codes: Array) -> Array:
        return keep_sharding(x, own, of=(codes, own_codes)) if _is_scales(x) else own

    return new._replace(scales=jax.tree.map(scales, new.scales, old.scales, new.codes, old.codes))


def _holds_scales(x: Any) -> bool:
    return _is_codes(x) and any(map(_is_scales, jax.tree.leaves(x.scales)))


def _is_scales(x: Any) -> bool:
    """Whether these are scales, and not a placeholder of `_make_placeholder`."""
    return bool(jnp.result_type(x) != jnp.bool_)
