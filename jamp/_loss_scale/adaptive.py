"""`AdaptiveLossScale`, whose growth interval adapts to how often the gradients overflow."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jamp._loss_scale.checks import check_count, check_number, check_range
from jamp._loss_scale.dynamic import change_scale, heal, increment
from jamp._loss_scale.static import Configuration
from jamp._numbers import with_numbers

_HIDDEN = -1  # the index of the hidden window, in which every finite step grows
_FALLBACK = 1000  # replaces an illegal max_window


class AdaptiveLossScaleState(NamedTuple):
    """State of `AdaptiveLossScale`. A run restored from it continues exactly as the uninterrupted one.

    Examples:
      >>> import jamp
      >>> state = jamp.AdaptiveLossScale(initial_window=30).init()
      >>> int(state.window_index), int(state.steps_since_change)
      (1, 1)
    """

    loss_scale: Array  # f32[]
    window_index: Array  # i32[], the position in the window list; -1 is the hidden window of one step
    up_count: Array  # i32[], growths since the window last changed, modulo 4
    down_count: Array  # i32[], overflows since the last growth or change of the window, modulo 4
    steps_since_change: Array  # i32[], steps since the last growth or overflow, the next step included: starts at 1

    def with_loss_scale(self, loss_scale: Array) -> Self:
        """Return this state with another scale, and no steps counted toward the next growth.

        The window and its two counts stay. They record how often the gradients have overflowed, which a scale set by
        hand does not change.
        """
        return self._replace(loss_scale=loss_scale, steps_since_change=jnp.ones_like(self.steps_since_change))


@dataclass(frozen=True)
class AdaptiveLossScale(Configuration):
    """A loss scale whose growth interval adapts.

    The growth interval, here called the window, comes from a list such as 20, 30, 40, 50, 100, 200, 500, 1000. An
    overflow divides the scale. A finite step grows it if at least `window` steps have passed since the last growth or
    overflow. Three growths move to the next longer window. Three overflows with no growth between them move from any
    window but the first to a hidden window of one step. Three growths lead from there back to the first window.

    MindFormers' `AdaptiveLossScaleUpdateCell` has the same scale at every step, with two exceptions. A growth to
    infinity is refused here. A window list that is made here contains no 0, no value below `min_window` and no
    duplicates.

    Args:
      init_scale: The initial scale.
      scale_factor: The factor by which a growth multiplies and an overflow divides, above 1.
      min_window: The first window, at least 1.
      max_window: The last window. If it is not above `min_window`, jamp warns and uses 1000. If that is not above
        `min_window` either, it is an error.
      initial_window: The initial window. None, or a number that is not in the window list, means the first window.
      windows: A window list, ints of at least 0, to use instead of the one made from `min_window` and `max_window`.
      min_scale: The smallest scale, a normal float32 above 0. It may be below 1.
      max_scale: The largest scale. It may be inf.

    Raises:
      ValueError: If a value is out of its range. The message names it and says what to do.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> config = jamp.AdaptiveLossScale(initial_window=30)
      >>> config.window_list
      (20, 30, 40, 50, 100, 200, 500, 1000)
      >>> state = config.update(config.init(), jnp.bool_(False))
      >>> float(state.loss_scale), int(state.window_index), int(state.down_count)
      (2048.0, 1, 1)

    References:
      MindSpore, Adaptive loss scaling; MindFormers, `mindformers/wrapper/adaptive_loss_scale.py`.
    """

    _kind: ClassVar = "adaptive"
    init_scale: float = 2.0**12
    scale_factor: float = 2.0
    min_window: int = 20
    max_window: int = 1000
    initial_window: int | None = None
    windows: Sequence[int] | None = None
    min_scale: float = 1.0
    max_scale: float = math.inf

    def __post_init__(self) -> None:
        with_numbers(self)
        check_range(self.init_scale, self.min_scale, self.max_scale)
        check_number("scale_factor", self.scale_factor, above=1, hint="such as 2.0")
        if self.initial_window is not None:
            check_count("initial_window", self.initial_window, least=0)
        if self.windows is None:
            check_count("min_window", self.min_window)
            if type(self.max_window) is int and self.max_window <= self.min_window < _FALLBACK:
                got = f"got max_window={self.max_window} and min_window={self.min_window}"
                # The third frame is the caller of the constructor.
                warnings.warn(f"max_window must be above min_window, {got}; using {_FALLBACK}.", stacklevel=3)
                object.__setattr__(self, "max_window", _FALLBACK)
            check_count("max_window", self.max_window, least=self.min_window + 1)
            return
        if not isinstance(self.windows, (list, tuple)) or not self.windows:
            raise ValueError(f"windows must be a tuple of ints, such as (20, 100), got windows={self.windows!r}.")
        for i, window in enumerate(self.windows):
            check_count(f"windows[{i}]", window, least=0)
        object.__setattr__(self, "windows", tuple(self.windows))  # a list is not hashable

    @property
    def window_list(self) -> tuple[int, ...]:
        """The windows: `windows` if given, else strictly increasing from `min_window` to `max_window`."""
        return _window_list(self.min_window, self.max_window) if self.windows is None else tuple(self.windows)

    def init(self) -> AdaptiveLossScaleState:
        """Make the initial state."""
        windows = self.window_list
        index = windows.index(self.initial_window) if self.initial_window in windows else 0
        counts = [jnp.array(x, jnp.int32) for x in (index, 0, 0, 1)]  # one buffer each
        return AdaptiveLossScaleState(jnp.array(self.init_scale, jnp.float32), *counts)

    def update(self, state: AdaptiveLossScaleState, grads_finite: ArrayLike) -> AdaptiveLossScaleState:
        """Return the next state, given the state that scaled the loss and whether its gradients were finite, bool[]."""
        windows = jnp.array((1, *self.window_list), jnp.int32)  # the hidden window comes before the first
        last = len(self.window_list) - 1
        index = jnp.clip(state.window_index, _HIDDEN, last)  # the state may come from a longer list
        finite = jnp.asarray(grads_finite, bool)
        overflow = ~finite
        due = state.steps_since_change >= windows[index - _HIDDEN]
        grow = due & finite
        up = (state.up_count + grow.astype(jnp.int32)) & 3
        down = jnp.where(grow, 0, (state.down_count + overflow.astype(jnp.int32)) & 3)
        lengthen = grow & (up == 3) & (index < last)
        hide = overflow & (down == 3) & (index > 0)
        scale = change_scale(state.loss_scale, grow, self.scale_factor, overflow, 1 / self.scale_factor, self.max_scale)
        return AdaptiveLossScaleState(
            loss_scale=heal(scale, self.init_scale, self.min_scale, self.max_scale),
            window_index=jnp.where(hide, _HIDDEN, jnp.where(lengthen, index + 1, index)),
            up_count=jnp.where(hide | lengthen, 0, up),
            down_count=jnp.where(hide, 0, down),
            steps_since_change=jnp.where(grow | overflow, 1, increment(state.steps_since_change)),
        )


def _window_list(min_window: int, max_window: int) -> tuple[int, ...]:
    """Return MindFormers' window list, restricted to [min_window, max_window] and starting at min_window."""
    current: float = max_window
    windows = {min_window, max_window}
    while current > min_window:
        if current > 100:
            current = int(current / 2 / 100) * 100
        elif current == 100:
            current = 50
        else:
            current -= min_window / 2
        windows.add(int(current))
    return tuple(sorted(w for w in windows if w >= min_window))
