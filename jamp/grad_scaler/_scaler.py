"""`GradScaler`, an immutable pytree with the methods of `torch.amp.GradScaler`."""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, ParamSpec, Self, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from jamp._leaves import replace_leaves
from jamp._loss_scale.config import loss_scale_for, loss_scale_from_config
from jamp._loss_scale.dynamic import DynamicLossScale
from jamp._loss_scale.scaler_state import ScalerState
from jamp._loss_scale.static import LossScale, NoOpLossScale, StaticLossScale, check_loss_scale, is_noop
from jamp._loss_scale.stats import LossScaleStats
from jamp._step.accessors import convert_loss_scale, get_loss_scale, get_stats, reset
from jamp._step.find import read_scale
from jamp._step.finite import all_finite
from jamp._step.gradients import value_and_grad
from jamp._step.scale_unscale import scale_loss, true_gradients, unscale
from jamp.grad_scaler._plain import GradScalerStep, step_plain
from jamp.grad_scaler._pytree import Pytree
from jamp.grad_scaler._state_dict import from_state_dict, to_state_dict

P = ParamSpec("P")
R = TypeVar("R")

# The true gradients that a scaler returned, by id, as long as they exist.
_TRUE: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def _returned(true_grads: Any) -> Any:
    """True gradients, which are remembered."""
    _TRUE.update((id(x), x) for x in jax.tree.leaves(true_grads) if isinstance(x, jax.Array))
    return true_grads


@dataclass(frozen=True, init=False, eq=False)
class GradScaler(Pytree):
    """Loss scaling with the methods of `torch.amp.GradScaler`, for PyTorch users.

    An immutable pytree: the configuration is static, the state is in the leaves, and every method returns new values.
    `jamp.value_and_grad`, `jamp.metrics` and similar functions accept it. `jamp.loss_scaled(tx)` does the same without
    a second object to carry: do not use both. The methods of a subclass without fields of its own return the subclass.

    Args:
      loss_scale: Any loss scale. None means `DynamicLossScale` with the given keywords, such as `init_scale`.
      enabled: If False, nothing is scaled, checked, skipped or counted.
      axis_name: Name(s) of the `shard_map`, `pmap` or `vmap` axes whose replicas must skip together.

    Raises:
      TypeError: If `loss_scale` is not a loss scale.
      ValueError: If both `loss_scale` and keywords are given, or a number is out of range.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jamp
      >>> tx, params = optax.sgd(0.1), jnp.ones(2)
      >>> @jax.jit
      ... def train_step(params, opt_state, scaler):
      ...     loss, grads = scaler.value_and_grad(lambda w: jnp.sum(w**2))(params)
      ...     return loss, scaler.step(tx, opt_state, params, grads=grads)
      >>> loss, (params, opt_state, scaler, stepped) = train_step(params, tx.init(params), jamp.GradScaler())
      >>> params.tolist(), bool(stepped), float(scaler.get_scale())
      ([0.800000011920929, 0.800000011920929], True, 65536.0)
    """

    loss_scale: LossScale  # the configuration
    axis_name: Any
    _state: ScalerState  # while disabled, with a NoOpLossScaleState, so that no function scales
    _paused: tuple[Any, ...]  # while disabled: the leaves of the loss-scale state that `enable` restores

    _children: ClassVar = ("_state", "_paused")
    _static: ClassVar = ("loss_scale", "axis_name")

    def __init__(
        self, loss_scale: LossScale | None = None, *, init_scale: float | None = None,
        growth_factor: float | None = None, backoff_factor: float | None = None, growth_interval: int | None = None,
        min_scale: float | None = None, max_scale: float | None = None, enabled: bool = True, axis_name: Any = None,
    ) -> None:  # fmt: skip
        numbers = {
            "init_scale": init_scale, "growth_factor": growth_factor, "backoff_factor": backoff_factor,
            "growth_interval": growth_interval, "min_scale": min_scale, "max_scale": max_scale,
        }  # fmt: skip
        keywords: dict[str, Any] = {name: x for name, x in numbers.items() if x is not None}
        if loss_scale is not None and keywords:
            raise ValueError(f"Give {', '.join(keywords)} to the loss scale itself, not together with {loss_scale=}.")
        loss_scale = DynamicLossScale(**keywords) if loss_scale is None else loss_scale
        check_loss_scale(loss_scale, constant="jamp.GradScaler.static(scale)")
        vars(self).update(loss_scale=loss_scale, axis_name=axis_name, _state=ScalerState.init(loss_scale), _paused=())
        if not enabled:
            vars(self).update(vars(self.disable()))

    @classmethod
    def default(cls) -> Self:
        """Make a dynamic scaler with torch's defaults, and bounds of 1 and 2**24."""
        return cls()

    @classmethod
    def static(cls, scale: float = 2.0**16, *, enabled: bool = True) -> Self:
        """Make a scaler with a constant scale. An overflow skips the step and leaves the scale unchanged."""
        return cls(StaticLossScale(scale), enabled=enabled)

    @classmethod
    def conservative(cls) -> Self:
        """Make a dynamic scaler that grows every 5000 finite steps."""
        return cls(DynamicLossScale.conservative())

    @classmethod
    def aggressive(cls) -> Self:
        """Make a dynamic scaler that grows every 1000 finite steps."""
        return cls(DynamicLossScale.aggressive())

    @classmethod
    def for_fp16(cls) -> Self:
        """Make the scaler for float16, with a dynamic scale."""
        return cls(loss_scale_for(jnp.float16))

    @classmethod
    def for_bf16(cls) -> Self:
        """Make the scaler for bfloat16, with a scale of 1. It still skips steps that are not finite."""
        return cls(loss_scale_for(jnp.bfloat16))

    @classmethod
    def from_config(cls, config: LossScale | Mapping[str, Any]) -> Self:
        """Make a scaler from a loss scale, or a mapping for `loss_scale_from_config`. The default type is "dynamic"."""
        if not isinstance(config, Mapping):
            return cls(config)
        has_type = {"type", "runner_wrapper", "scale_sense"} & set(config)
        return cls(loss_scale_from_config(config if has_type else {"type": "dynamic", **config}))

    @property
    def state(self) -> Any:
        """The loss scale's state."""
        return self._state.loss_scale_state

    @property
    def stats(self) -> LossScaleStats:
        """The statistics of the steps so far."""
        return get_stats(self)

    def scale(self, loss: Any) -> Any:
        """Multiply a loss, or a pytree of them, by the scale. A loss that is not floating raises a TypeError."""
        return scale_loss(loss, self) if self.is_enabled() else loss

    def value_and_grad(
        self, fun: Callable[P, R], argnums: int | Sequence[int] = 0, has_aux: bool = False
    ) -> Callable[P, tuple[R, Any]]:
        """`jax.value_and_grad` with scaling inside: the true loss and the true gradients, for `step(grads=...)`."""
        differentiate = value_and_grad(fun, self, argnums, has_aux)

        @functools.wraps(fun)
        def with_true_gradients(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            value, grads = differentiate(*args, **kwargs)
            return value, _returned(grads)

        return with_true_gradients

    def unscale(self, scaled_grads: Any) -> Any:
        """Divide the gradients of a scaled loss by the scale. They come out float32, and as they are if disabled.

        Gradients that are true already, because `value_and_grad` or `unscale` returned them, raise a ValueError. It
        does not recognize the results of arithmetic with them, or of a `jit` of its own, and divides those again.
        """
        if not self.is_enabled():
            return scaled_grads
        if any(_TRUE.get(id(x)) is x for x in jax.tree.leaves(scaled_grads)):
            raise ValueError(
                "unscale takes scaled gradients, got true ones. Pass them to scaler.step(..., grads=grads)."
            )
        return _returned(unscale(scaled_grads, self.get_scale()))

    def check_overflow(self, grads: Any) -> Array:
        """Return whether gradients, scaled or true, hold inf or NaN, bool[]. It is False while disabled."""
        return ~all_finite(grads, axis_name=self.axis_name) if self.is_enabled() else jnp.bool_(False)

    def update(self, *, grads_finite: ArrayLike | None = None, overflow: ArrayLike | None = None) -> Self:
        """Return the scaler of the next step. Give one of the two keywords (bool[]). `step` calls it by default."""
        if (grads_finite is None) == (overflow is None):
            raise ValueError(
                "update() takes one of grads_finite= and overflow=. After `step` delete it, or write "
                "step(..., update_scale=False) and `scaler = result.scaler.update(grads_finite=result.stepped)`."
            )
        finite = ~jnp.asarray(overflow, bool) if grads_finite is None else jnp.asarray(grads_finite, bool)
        if not self.is_enabled():
            return self
        members = jnp.shape(self._state.grads_finite)  # of an ensemble
        if finite.shape not in ((), members):
            raise ValueError(f"update() takes one bool, got shape {finite.shape}. Write jnp.all(grads_finite).")
        return self._with(_state=self._state.advance(self.loss_scale, jnp.broadcast_to(finite, members)))

    def step(
        self, tx: optax.GradientTransformation, opt_state: Any, params: Any, *, grads: Any = None,
        scaled_grads: Any = None, optimizer_step: bool = True, check_overflow: bool = True, update_scale: bool = True,
        extra_args: Mapping[str, Any] | None = None,
    ) -> GradScalerStep:  # fmt: skip
        """Unscale, check, step the optimizer unless there was an overflow, and update the scale.

        On an overflow `params` and `opt_state` stay unchanged. It warns of float16 parameters without masters.

        Args:
          tx: The optimizer, not wrapped in `jamp.loss_scaled`.
          opt_state: Its state.
          params: The parameters.
          grads: True gradients, from `value_and_grad` or `unscale`, clipped or not.
          scaled_grads: Gradients of a scaled loss, from `jax.grad`. Give exactly one of the two.
          optimizer_step: If False, only check and update.
          check_overflow: If False, step without a check. The scale is then not updated.
          update_scale: If False, leave the scale unchanged. Call `update` once, after all optimizers have stepped.
          extra_args: Extra arguments for the optimizer's `update`, such as `{"value": loss}`.

        Raises:
          ValueError: If neither or both kinds of gradients are given, or `opt_state` has a loss scale of its own.
        """
        if (grads is None) == (scaled_grads is None):
            raise ValueError(
                "step takes one of grads=, from scaler.value_and_grad or scaler.unscale, and scaled_grads=, from "
                "jax.grad of scaler.scale(loss)."
            )
        given, scale = (scaled_grads, read_scale(self.state)) if grads is None else (grads, None)
        is_checked = check_overflow and self.is_enabled()
        true, finite = true_gradients(given, scale, check=is_checked, axis_name=self.axis_name)
        if optimizer_step:
            params, opt_state = step_plain(tx, opt_state, params, true, finite, extra_args or {})
        if finite is None:
            return GradScalerStep(params, opt_state, self, jnp.bool_(True))
        return GradScalerStep(params, opt_state, self.update(grads_finite=finite) if update_scale else self, finite)

    def get_scale(self) -> Array:
        """Return the scale of the next loss, f32[]. It is 1 while disabled."""
        return get_loss_scale(self)

    def get_inverse_scale(self) -> Array:
        """Return 1 / scale, f32[]. Above 2**126 it is subnormal, which XLA flushes to 0. `unscale` does not."""
        return 1.0 / self.get_scale()

    def get_stats(self) -> LossScaleStats:
        """Return the same as `stats`."""
        return self.stats

    def is_enabled(self) -> bool:
        """Whether anything is scaled."""
        return not is_noop(self.state)

    def enable(self) -> Self:
        """Return the scaler enabled, with the scale that it had when it was disabled."""
        if not self._paused:
            return self
        kept = replace_leaves(jax.eval_shape(self.loss_scale.init), self._paused)
        return self._with(_state=self._state._replace(loss_scale_state=kept), _paused=())

    def disable(self) -> Self:
        """Return the scaler disabled. It keeps its state for `enable`."""
        if not self.is_enabled():
            return self
        off = self._state._replace(loss_scale_state=NoOpLossScale().init())
        return self._with(_state=off, _paused=tuple(jax.tree.leaves(self.state)))

    def _converted(self, loss_scale: LossScale) -> Self:
        """Return the scaler with another loss scale, for `jamp.convert_loss_scale`."""
        state = convert_loss_scale(self.enable()._state, loss_scale)
        return self._with(loss_scale=loss_scale)._with_state(state)

    def reset(self) -> Self:
        """Return the scaler with the initial state and zero statistics."""
        return self._with_state(reset(self.enable()._state, self.loss_scale))

    def _with_state(self, state: ScalerState) -> Self:
        """Return the scaler with another state of its loss scale. It is disabled if this one is."""
        scaler = self._with(_state=state, _paused=())
        return scaler.disable() if self._paused else scaler

    def state_dict(self) -> dict[str, Any]:
        """Return the state, growth and backoff as Python numbers, with torch's keys. Empty while disabled.

        Bounds and hysteresis are not in it: load it into a scaler that was made with the same ones.
        """
        return to_state_dict(self.loss_scale, self._state) if self.is_enabled() else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Self:
        """Return the scaler with the state, growth and backoff of a `state_dict()`. A disabled scaler loads nothing."""
        if not self.is_enabled():
            return self
        loss_scale, state = from_state_dict(self.loss_scale, self._state, state_dict)
        return self._with(loss_scale=loss_scale, _state=state)
