"""`underflow_report`: the gradients that a 16-bit dtype loses, with and without the loss scale."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.tree_util import keystr
from jax.typing import DTypeLike

from jamp import _table
from jamp._arguments import describe
from jamp._cast import check_floating
from jamp._leaves import leaves_and_gradients
from jamp._loss_scale.dynamic import DynamicLossScale
from jamp._step.accessors import get_loss_scale
from jamp.debug._usage import called_as, is_state

_STATIC: Any = {"static": True}
_SHOWN = 20  # leaves
_HEADROOM = 4  # powers of two below overflow. Gradients of activations are often larger than gradients of parameters.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UnderflowReport:
    """The effect of the loss scale on each leaf of the gradients, from `underflow_report`.

    It is a pytree, so `jit` can return it. Shares are fractions of the nonzero gradients of a leaf, or 0 if all are 0.
    """

    paths: tuple[str, ...] = dataclasses.field(metadata=_STATIC)
    dtype: str = dataclasses.field(metadata=_STATIC)
    loss_scale: Array  # f32[]
    zero_unscaled: Array  # f32[leaves], share that would be 0 in `dtype` without the loss scale
    subnormal_unscaled: Array  # f32[leaves], share that would be subnormal, with few digits left
    zero_scaled: Array  # f32[leaves], the same with the loss scale
    subnormal_scaled: Array  # f32[leaves]
    smallest: Array  # f32[leaves], the smallest magnitude of a true gradient that is not 0, or inf
    largest: Array  # f32[leaves], the largest magnitude of a true gradient. inf if one is inf or NaN
    headroom: Array  # f32[leaves], powers of two from the largest scaled gradient to overflow, or inf
    recommended_loss_scale: Array  # f32[], a power of two

    def __str__(self) -> str:
        if isinstance(self.loss_scale, jax.core.Tracer):
            return repr(self)
        scale, best = float(self.loss_scale), float(self.recommended_loss_scale)
        title = f"{self.dtype} gradients at loss scale {scale:g}; recommended: {best:g} ({_power(best)})"
        at = f"at {scale:g}"
        header = ("leaf", "lost at 1", f"lost {at}", "subnormal at 1", f"subnormal {at}", "room")
        columns = (self.zero_unscaled, self.zero_scaled, self.subnormal_unscaled, self.subnormal_scaled)
        shares, rooms = np.stack([np.asarray(x) for x in columns], -1), np.asarray(self.headroom)
        # Overflows first, then what is lost with the scale, subnormal with it, and lost without it.
        order = np.lexsort((-shares[:, 0], -shares[:, 3], -shares[:, 1], rooms >= 0)).tolist()
        cells = lambda i: (self.paths[i] or "the array", *(f"{x:.1%}" for x in shares[i]), _room(float(rooms[i])))
        table = _table.with_header(header, [cells(i) for i in order[:_SHOWN]], ("leaf",))
        more = [f"... and {len(order) - _SHOWN} leaves that lose less"] if len(order) > _SHOWN else []
        return "\n".join([title, *table, *more, self._next()])

    def _next(self) -> str:
        scale, best = float(self.loss_scale), float(self.recommended_loss_scale)
        if np.any(np.asarray(self.headroom) < 0):
            return "next: if gradients overflow in many steps in a row, jamp.debug.find_nonfinite(loss_fn, grad=True)"
        if _is_wide(self.dtype) and np.any(np.asarray(self.largest) > 0):
            return f"next: nothing. {self.dtype} has the range of float32, so it needs no loss scale"
        if self.paths and np.all(np.asarray(self.largest) == 0):
            return "next: all gradients are 0. Look for a stop_gradient or a masked batch, or compare with float32"
        is_lossy = np.any(np.asarray(self.zero_scaled) > 0) or np.any(np.asarray(self.subnormal_scaled) > 0)
        if best > scale and is_lossy:
            step = "next: opt_state = jamp.set_loss_scale(opt_state, report.recommended_loss_scale)"
            # A finite step brings a scale above the ceiling back to it.
            default = DynamicLossScale.max_scale
            ceiling = f"with max_scale={_power(best)} or more in the loss scale, whose default is {_power(default)}"
            return f"{step}\n      {ceiling}" if best > default else step
        return "next: nothing, " + ("no loss scale loses less" if is_lossy else "this loss scale loses nothing")


def _is_wide(dtype: DTypeLike) -> bool:
    """Whether a dtype has the range of float32."""
    return bool(jnp.finfo(dtype).minexp <= -126)


def _power(x: float) -> str:
    return f"2**{np.log2(x):.0f}"


def _room(room: float) -> str:
    return "all are 0" if room == np.inf else "overflows" if room < 0 else f"2**{room:.1f}"


_CALL = "jamp.debug.underflow_report(grads, opt_state)"


@called_as(_CALL, trees=1)
def underflow_report(grads: Any, state: Any, dtype: DTypeLike = jnp.float16) -> UnderflowReport:
    """Measure how many gradients a 16-bit dtype loses, with and without the loss scale.

    A gradient counts as lost if `dtype` rounds it to 0, and as subnormal if `dtype` has fewer digits for it. Gradients
    that underflowed in the backward pass are 0 already and do not count. To see those too, pass the gradients of a
    float32 model. It is cheap enough to call every hundred steps, inside `jit` or outside.

    Args:
      grads: The true gradients, as `jamp.value_and_grad` gives them.
      state: A loss-scale state, or any pytree that holds exactly one.
      dtype: The floating dtype of the backward pass.

    Returns:
      An `UnderflowReport`. The recommended loss scale is the largest power of two that leaves the largest gradient 4
      powers of two below overflow. If a gradient is inf or NaN, it is at most half the current one. For bfloat16,
      which has the range of float32, it is 1.

    Raises:
      TypeError: If `grads` is a function or the state of an optimizer.
      ValueError: If `state` holds no loss-scale state or several, or `dtype` is not floating.

    Examples:
      >>> import jax.numpy as jnp, jamp, jamp.debug
      >>> print(jamp.debug.underflow_report({"w": jnp.array([1e-8, 1e-3])}, jamp.StaticLossScale(2.0**10).init()))
      float16 gradients at loss scale 1024; recommended: 2.09715e+06 (2**21)
      leaf   lost at 1  lost at 1024  subnormal at 1  subnormal at 1024  room
      ['w']  50.0%      0.0%          0.0%            50.0%              2**16.0
      next: opt_state = jamp.set_loss_scale(opt_state, report.recommended_loss_scale)
    """
    if is_state(grads):
        raise TypeError(f"jamp.debug.underflow_report takes gradients first, got {describe(grads)}. Write {_CALL}.")
    checked = check_floating("dtype", dtype)
    flat = [(keystr(path), x) for path, x, is_gradient in leaves_and_gradients(grads) if is_gradient]
    scale = get_loss_scale(state)
    paths = tuple(path for path, _ in flat)
    return UnderflowReport(paths, checked.name, scale, *_measure([jnp.asarray(x) for _, x in flat], scale, checked))


@functools.partial(jax.jit, static_argnums=2, inline=True)
def _measure(grads: list[Array], scale: Array, dtype: DTypeLike) -> list[Array]:
    info = jnp.finfo(dtype)
    least, normal, end = (float(x) for x in (info.smallest_subnormal, info.smallest_normal, info.max))
    columns = [_measure_leaf(jnp.abs(g).astype(jnp.float32), scale, least, normal, end) for g in grads]
    rows = [jnp.stack(row) for row in zip(*columns, strict=True)] or [jnp.zeros(0, jnp.float32)] * 7
    best = jnp.float32(1) if _is_wide(dtype) else _recommend(rows[5], scale, end)
    return [*rows, best]


def _recommend(largest: Array, scale: Array, end: float) -> Array:
    """The recommended loss scale, f32[], from the largest gradient of each leaf."""
    (end_digits, end_exponent), (_, exponent) = math.frexp(end), jnp.frexp(scale)
    digits, finite_exponent = jnp.frexp(jnp.max(largest, initial=0.0, where=jnp.isfinite(largest)))
    best = end_exponent - finite_exponent - (digits > end_digits).astype(jnp.int32) - _HEADROOM
    best = jnp.where(digits > 0, best, exponent - 1)
    best = jnp.where(jnp.any(jnp.isinf(largest)), jnp.minimum(best, exponent - 2), best)
    return jnp.ldexp(jnp.float32(1), jnp.clip(best, -126, 127))


def _measure_leaf(size: Array, scale: Array, least: float, normal: float, end: float) -> list[Array]:
    some = (size > 0) & jnp.isfinite(size)
    kinds = [some]
    for x in (size, size * scale):
        # Half the smallest subnormal rounds to even, which is 0.
        zero = some & (x <= least / 2)
        kinds += [zero, some & ~zero & (x < normal)]
    # One pass over the leaf. On CPU it is five times as fast as seven reductions.
    operands = [kind.astype(jnp.int32) for kind in kinds]
    operands += [jnp.where(some, size, jnp.inf), jnp.where(jnp.isfinite(size), size, jnp.inf)]
    start = [*[jnp.int32(0)] * len(kinds), jnp.float32(jnp.inf), jnp.float32(0)]
    *counts, smallest, largest = lax.reduce(operands, start, _combine, tuple(range(size.ndim)))
    total, *parts = (count.astype(jnp.float32) for count in counts)
    shares = [part / jnp.maximum(total, 1) for part in parts]
    return [*shares, smallest, largest, math.log2(end) - jnp.log2(largest) - jnp.log2(scale)]


def _combine(left: Sequence[Array], right: Sequence[Array]) -> list[Array]:
    counts = [x + y for x, y in zip(left[:-2], right[:-2], strict=True)]
    return [*counts, jnp.minimum(left[-2], right[-2]), jnp.maximum(left[-1], right[-1])]
