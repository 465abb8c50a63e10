"""The `LossScale` protocol, and the loss scales that never change: `NoOpLossScale` and `StaticLossScale`."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jamp._cast import is_dtype
from jamp._loss_scale.checks import check_scale
from jamp._numbers import as_number, with_numbers

_State = TypeVar("_State")


@runtime_checkable
class LossScale(Protocol):
    """An object with these two methods is a loss scale.

    Examples:
      A loss scale that halves on an overflow and never grows:

      >>> from typing import NamedTuple
      >>> import jax, jax.numpy as jnp, jamp
      >>> class HalvingState(NamedTuple):
      ...     loss_scale: jax.Array  # f32[]
      >>> class Halving:
      ...     def init(self):
      ...         return HalvingState(jnp.float32(2.0**16))
      ...     def update(self, state, grads_finite):
      ...         return HalvingState(jnp.where(grads_finite, 1.0, 0.5) * state.loss_scale)
      >>> isinstance(Halving(), jamp.LossScale)
      True
    """

    def init(self) -> Any:
        """Make the initial state, a NamedTuple of arrays with a field `loss_scale`, f32[]."""

    def update(self, state: Any, grads_finite: ArrayLike) -> Any:
        """Return the next state, given whether the gradients were finite (bool[]). Pure and traceable by `jit`."""


def check_loss_scale(loss_scale: Any, constant: str = "jamp.StaticLossScale(scale)") -> None:
    """Raise TypeError unless `loss_scale` is a loss scale. The message suggests `constant` for a constant scale."""
    is_optimizer = hasattr(loss_scale, "_fields") and hasattr(loss_scale, "update")
    if isinstance(loss_scale, type) or is_optimizer or not isinstance(loss_scale, LossScale):
        number, use = as_number(loss_scale), "jamp.DynamicLossScale()"
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        got = repr(number) if is_number or is_dtype(number) else f"a {type(loss_scale).__name__}"
        if isinstance(getattr(loss_scale, "loss_scale", None), LossScale):
            use = "scaler.loss_scale"
        elif is_number:
            use = constant.replace("(scale)", f"({float(number)!r})")
        elif isinstance(loss_scale, type) and isinstance(loss_scale, LossScale):
            got, use = f"the class {loss_scale.__name__}", f"jamp.{loss_scale.__name__}()"
        elif is_dtype(loss_scale):
            use += " or jamp.loss_scale_for(dtype)"
        elif isinstance(loss_scale, Mapping):
            use = "jamp.loss_scale_from_config(mapping)"
        raise TypeError(f"loss_scale must be a loss scale, got {got}. Write {use}.")


def is_noop(state: Any) -> bool:
    """Whether a loss scale's state switches scaling, checks and skips off. A user's own state needs no `is_noop`."""
    return getattr(state, "is_noop", False)


class Configuration:
    """Base class of jamp's loss scales, dataclasses that are written to configuration files."""

    _kind: ClassVar[str]  # the "type" in a file

    def to_config(self) -> dict[str, Any]:
        """Return the mapping from which `loss_scale_from_config` makes this loss scale."""
        fields = dataclasses.asdict(cast(Any, self))
        return {"type": self._kind} | {name: list(x) if isinstance(x, tuple) else x for name, x in fields.items()}


class _Constant(Configuration):
    """Base class of loss scales that never change."""

    is_constant: ClassVar[bool] = True  # `jamp.convert_loss_scale` does not replace the scale

    def update(self, state: _State, grads_finite: ArrayLike) -> _State:
        """Return the state unchanged."""
        del grads_finite
        return state


class NoOpLossScaleState(NamedTuple):
    """State of `NoOpLossScale`.

    Examples:
      >>> import jamp
      >>> float(jamp.NoOpLossScale().init().loss_scale)
      1.0
    """

    loss_scale: Array  # f32[], 1

    @property
    def is_noop(self) -> bool:
        """True: nothing is scaled, checked or skipped."""
        return True


@dataclass(frozen=True)
class NoOpLossScale(_Constant):
    """No loss scaling: nothing is scaled, checked or skipped, and the step compiles to the plain optimizer's.

    It replaces a flag such as `enabled=False`, for float32, float64 and most bfloat16 training.

    Examples:
      >>> import optax, jamp
      >>> tx = jamp.loss_scaled(optax.adamw(1e-3), jamp.NoOpLossScale())
    """

    _kind: ClassVar = "none"

    def init(self) -> NoOpLossScaleState:
        """Make the state: a loss scale of 1."""
        return NoOpLossScaleState(jnp.array(1.0, jnp.float32))


class StaticLossScaleState(NamedTuple):
    """State of `StaticLossScale`.

    Examples:
      >>> import jamp
      >>> float(jamp.StaticLossScale(1024.0).init().loss_scale)
      1024.0
    """

    loss_scale: Array  # f32[]


@dataclass(frozen=True)
class StaticLossScale(_Constant):
    """A constant loss scale. An overflow skips the step and leaves the scale unchanged.

    Args:
      scale: The loss scale, a positive float32.

    Raises:
      ValueError: If `scale` is not a positive number that a normal float32 holds.

    Examples:
      >>> import optax, jamp
      >>> tx = jamp.loss_scaled(optax.adamw(1e-3), jamp.StaticLossScale(1024.0))

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2.
    """

    _kind: ClassVar = "static"
    scale: float = 2.0**16

    def __post_init__(self) -> None:
        with_numbers(self)
        check_scale("scale", self.scale)

    def init(self) -> StaticLossScaleState:
        """Make the state: the constant scale."""
        return StaticLossScaleState(jnp.array(self.scale, jnp.float32))
