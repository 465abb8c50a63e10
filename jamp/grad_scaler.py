"""`GradScaler`, an immutable pytree with the methods of `torch.amp.GradScaler`."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.tree_util import GetAttrKey
from jax.typing import ArrayLike

from jamp import _jaxpr
from jamp._scale.dynamic import DynamicLossScale
from jamp._scale.static import LossScale, NoOpLossScale, NoOpLossScaleState, check_loss_scale
from jamp._scale.stats import LossScaleStats
from jamp._step.finite import all_finite
from jamp._step.lookup import get_loss_scale, get_stats
from jamp._step.plain import GradScalerStep as GradScalerStep, step_plain
from jamp._step.presets import Presets
from jamp._step.scaling import scale_loss, unscale, value_and_grad
from jamp._step.state import ScalerState
from jamp._step.state_dict import from_state_dict, to_state_dict

_KEYWORDS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "min_scale", "max_scale")


@dataclass(frozen=True, init=False, eq=False)
class GradScaler(Presets):
    """Loss scaling with the methods of `torch.amp.GradScaler`, for PyTorch users.

    An immutable pytree: the configuration is static, the state is in the leaves, and every method returns new values.
    `jamp.value_and_grad`, `jamp.metrics` and similar functions accept it. `jamp.loss_scaled(tx)` does the same without
    a second object to carry. Use one or the other, not both.

    Args:
      loss_scale: Any loss scale. None means `DynamicLossScale` with the given keywords, such as `init_scale`.
      enabled: If False, nothing is scaled, checked, skipped or counted.
      axis_name: Name(s) of the `shard_map`, `pmap` or `vmap` axes whose replicas must skip together.

    A subclass without fields of its own is a pytree too, and its methods return the subclass.

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

    References:
      `torch.amp.GradScaler`.
    """

    loss_scale: LossScale  # the configuration
    axis_name: Any
    _state: ScalerState  # while disabled, with a NoOpLossScaleState, so that no function scales
    _paused: tuple[Any, ...]  # while disabled: the leaves of the loss-scale state that `enable` restores

    def __init__(
        self, loss_scale: LossScale | None = None, *, init_scale: float | None = None,
        growth_factor: float | None = None, backoff_factor: float | None = None, growth_interval: int | None = None,
        min_scale: float | None = None, max_scale: float | None = None, enabled: bool = True, axis_name: Any = None,
    ) -> None:  # fmt: skip
        _jaxpr.core()  # as in `loss_scaled`
        numbers = init_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale
        keywords: dict[str, Any] = {k: v for k, v in zip(_KEYWORDS, numbers, strict=True) if v is not None}
        if loss_scale is not None and keywords:
            raise ValueError(f"Give {', '.join(keywords)} to the loss scale itself, not together with {loss_scale=}.")
        loss_scale = DynamicLossScale(**keywords) if loss_scale is None else loss_scale
        check_loss_scale(loss_scale, constant="jamp.GradScaler.static(scale)")
        vars(self).update(loss_scale=loss_scale, axis_name=axis_name, _state=ScalerState.init(loss_scale), _paused=())
        if not enabled:
            vars(self).update(vars(self.disable()))

    def __init_subclass__(cls) -> None:
        bases = cls.__mro__[: cls.__mro__.index(GradScaler)]
        if not any(map(inspect.get_annotations, bases)):  # With fields of its own, its author registers it.
            _register(cls)

    def _with(self, **fields: Any) -> Self:
        """The scaler with other fields. JAX may unflatten a pytree with any leaves, so they are not checked."""
        scaler = object.__new__(type(self))
        vars(scaler).update(vars(self) | fields)
        return scaler

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

    def value_and_grad(self, fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Any:
        """`jax.value_and_grad` with scaling inside: the true loss and the true gradients, for `step(grads=...)`."""
        return value_and_grad(fun, self, argnums, has_aux)

    def unscale(self, scaled_grads: Any) -> Any:
        """Divide the gradients of a scaled loss by the scale. They come out float32."""
        return unscale(scaled_grads, self.get_scale()) if self.is_enabled() else scaled_grads

    def check_overflow(self, grads: Any) -> Array:
        """bool[], whether gradients, scaled or true, hold inf or NaN. It is False while disabled."""
        return ~all_finite(grads, axis_name=self.axis_name) if self.is_enabled() else jnp.bool_(False)

    def update(self, *, grads_finite: ArrayLike | None = None, overflow: ArrayLike | None = None) -> Self:
        """Return the scaler of the next step, given exactly one of `grads_finite` and `overflow`, bool[].

        `step` calls it. Call it yourself after `step(..., update_scale=False)`, once for all optimizers of a step.
        """
        if (grads_finite is None) == (overflow is None):
            raise ValueError(
                "update() takes exactly one of grads_finite= and overflow=. If `step` came before it, the scale is "
                "updated already and a second update would count the step twice: delete this call. To call it "
                "yourself, as in torch, write `result = scaler.step(..., update_scale=False)` and then "
                "`scaler = result.scaler.update(grads_finite=result.stepped)`."
            )
        finite = ~jnp.asarray(overflow, bool) if grads_finite is None else jnp.asarray(grads_finite, bool)
        return self._with(_state=self._state.advance(self.loss_scale, finite)) if self.is_enabled() else self

    def step(
        self, tx: optax.GradientTransformation, opt_state: Any, params: Any, *, grads: Any = None,
        scaled_grads: Any = None, optimizer_step: bool = True, check_overflow: bool = True, update_scale: bool = True,
        extra_args: Mapping[str, Any] | None = None,
    ) -> GradScalerStep:  # fmt: skip
        """Unscale, check, step the optimizer unless there was an overflow, and update the scale.

        On an overflow it returns `params` and `opt_state` unchanged. It warns of float16 parameters without masters.

        Args:
          tx: The optimizer, not wrapped in `jamp.loss_scaled`.
          opt_state: Its state.
          params: The parameters.
          grads: True gradients, from `value_and_grad` or `unscale`, clipped or not.
          scaled_grads: Gradients of a scaled loss, from `jax.grad`. Give exactly one of the two.
          optimizer_step: If False, only check and update. To use the unscaled gradients yourself, call `unscale` first
            and pass them as `grads`.
          check_overflow: If False, step without a check. The scale is then not updated.
          update_scale: If False, leave the scale unchanged. Call `update` after all optimizers have stepped.
          extra_args: Extra arguments for the optimizer's `update`, such as `{"value": loss}`.

        Returns:
          The new `params`, `opt_state` and `scaler`, and `stepped`, a bool[] that is False if an overflow was found.

        Raises:
          ValueError: If neither or both kinds of gradients are given, or `opt_state` has a loss scale of its own.
        """
        if (grads is None) == (scaled_grads is None):
            raise ValueError(
                "step takes exactly one of grads= (true gradients, from scaler.value_and_grad or scaler.unscale) and "
                "scaled_grads= (from jax.grad of a loss that went through scaler.scale)."
            )
        grads = self.unscale(scaled_grads) if grads is None else grads
        checked = check_overflow and self.is_enabled()
        finite = all_finite(grads, axis_name=self.axis_name) if checked else jnp.bool_(True)
        if optimizer_step:
            verdict = finite if checked else None
            params, opt_state = step_plain(tx, opt_state, params, grads, verdict, extra_args or {})
        scaler = self.update(grads_finite=finite) if update_scale and checked else self
        return GradScalerStep(params, opt_state, scaler, finite)

    def get_scale(self) -> Array:
        """f32[], the scale of the next loss. It is 1 while disabled."""
        return get_loss_scale(self)

    def get_inverse_scale(self) -> Array:
        """f32[], 1 / scale. It is 1 while disabled.

        Above 2**126 the inverse is subnormal, which XLA flushes to 0. There `unscale` divides in two steps.
        """
        return 1.0 / self.get_scale()

    def get_stats(self) -> LossScaleStats:
        """The same as `stats`."""
        return self.stats

    def is_enabled(self) -> bool:
        """Whether anything is scaled."""
        return not isinstance(self.state, NoOpLossScaleState)

    def enable(self) -> Self:
        """Return the scaler enabled, with the scale that it had when it was disabled."""
        if not self._paused:
            return self
        kept = jax.tree.unflatten(jax.tree.structure(jax.eval_shape(self.loss_scale.init)), self._paused)
        return self._with(_state=self._state._replace(loss_scale_state=kept), _paused=())

    def disable(self) -> Self:
        """Return the scaler disabled. It keeps its state for `enable`."""
        if not self.is_enabled():
            return self
        off = self._state._replace(loss_scale_state=NoOpLossScale().init())
        return self._with(_state=off, _paused=tuple(jax.tree.leaves(self.state)))

    def reset(self) -> Self:
        """Return the scaler with the initial state and zero statistics."""
        new = self._with(_state=ScalerState.init(self.loss_scale), _paused=())
        return new if self.is_enabled() else new.disable()

    def state_dict(self) -> dict[str, Any]:
        """Everything that a restored run needs, as Python numbers, with torch's keys. Empty while disabled."""
        return to_state_dict(self.loss_scale, self._state) if self.is_enabled() else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Self:
        """Return the scaler with the state of a `state_dict()`, including growth and backoff, as in torch.

        A disabled scaler loads nothing. For a dict that torch wrote, use `jamp.interop.from_torch`.
        """
        if not self.is_enabled():
            return self
        loss_scale, state = from_state_dict(self.loss_scale, self._state, state_dict)
        return self._with(loss_scale=loss_scale, _state=state)


def _register(cls: type[GradScaler]) -> None:
    def unflatten(static: tuple[Any, Any], children: Any) -> GradScaler:
        scaler = object.__new__(cls)
        names = "loss_scale", "axis_name", "_state", "_paused"
        vars(scaler).update(zip(names, (*static, *children), strict=True))
        return scaler

    jax.tree_util.register_pytree_with_keys(
        cls,
        lambda s: (
            ((GetAttrKey("_state"), s._state), (GetAttrKey("_paused"), s._paused)),
            (s.loss_scale, s.axis_name),
        ),
        unflatten,
    )


_register(GradScaler)
