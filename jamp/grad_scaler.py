"""A gradient scaler with the methods of `torch.amp.GradScaler`, as an immutable pytree."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.tree_util import GetAttrKey
from jax.typing import ArrayLike

from jamp import _jaxpr
from jamp._config import loss_scale_for, loss_scale_from_config
from jamp._loss_scale import DynamicLossScale, LossScale, NoOpLossScale, NoOpLossScaleState, StaticLossScale
from jamp._scaler_state import GradScalerState, from_state_dict, to_state_dict
from jamp._scaler_step import step_optimizer
from jamp._scaling import scale_loss, unscale_and_check, value_and_grad
from jamp._stats import LossScaleStats
from jamp._tree import all_finite

_KEYWORDS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "min_scale", "max_scale")


class GradScalerStep(NamedTuple):
    """What `GradScaler.step` returns.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> tx, params = optax.sgd(1.0), jnp.ones(1)
      >>> bool(jamp.GradScaler().step(tx, tx.init(params), params, grads=params * jnp.inf).stepped)
      False
    """

    params: Any
    opt_state: Any
    scaler: "GradScaler"
    stepped: Array  # bool[], False where an overflow was found


@dataclass(frozen=True, init=False, eq=False)
class GradScaler:
    """Loss scaling with the methods of `torch.amp.GradScaler`, for people who come from PyTorch.

    An immutable pytree, safe to pass through `jit`, `scan` and donation: the configuration is static, the state is in
    the leaves, and every method returns new values. `jamp.value_and_grad`, `jamp.metrics` and their like accept it.
    `jamp.loss_scaled(tx)` does the same with less to carry; use one or the other, not both.

    Args:
      loss_scale: Any loss scale. None: a `DynamicLossScale` of `init_scale`, `growth_factor`, `backoff_factor`,
        `growth_interval`, `min_scale` and `max_scale`, by default as it has them.
      enabled: If False, nothing is scaled, checked, skipped or counted, and a step compiles to the plain one.

    Raises:
      TypeError: If `loss_scale` is no loss scale.
      ValueError: If it is given together with keywords, or a number is out of its range.

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
      `torch.amp.GradScaler`; Micikevicius et al., Mixed Precision Training, ICLR 2018.
    """

    loss_scale: LossScale  # the configuration
    _state: GradScalerState
    _paused: tuple[Any, ...]  # while disabled: the leaves of the loss-scale state that `enable` brings back

    def __init__(
        self,
        loss_scale: LossScale | None = None,
        *,
        init_scale: float | None = None,
        growth_factor: float | None = None,
        backoff_factor: float | None = None,
        growth_interval: int | None = None,
        min_scale: float | None = None,
        max_scale: float | None = None,
        enabled: bool = True,
    ) -> None:
        _jaxpr.core()  # as in `loss_scaled`, which `step` calls in the middle of a trace
        numbers = init_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale
        keywords: dict[str, Any] = {k: v for k, v in zip(_KEYWORDS, numbers, strict=True) if v is not None}
        if loss_scale is not None and keywords:
            raise ValueError(f"Give {', '.join(keywords)} to the loss scale itself, got them beside {loss_scale=}.")
        loss_scale = DynamicLossScale(**keywords) if loss_scale is None else loss_scale
        if isinstance(loss_scale, type) or not isinstance(loss_scale, LossScale):
            raise TypeError(
                f"loss_scale must be a loss scale, got {loss_scale=}. Use jamp.GradScaler(init_scale=...), or "
                "jamp.GradScaler.static(scale) for a constant."
            )
        state = GradScalerState.init(loss_scale)
        _fill(self, loss_scale, state if enabled else state.silent(), () if enabled else _leaves(state))

    @classmethod
    def default(cls) -> Self:
        """A dynamic scaler with torch's defaults."""
        return cls()

    @classmethod
    def static(cls, scale: float = 2.0**16) -> Self:
        """A constant scale: an overflow skips the step and leaves it."""
        return cls(StaticLossScale(scale))

    @classmethod
    def conservative(cls) -> Self:
        """Grows every 5000 finite steps."""
        return cls(DynamicLossScale.conservative())

    @classmethod
    def aggressive(cls) -> Self:
        """Grows every 1000 finite steps."""
        return cls(DynamicLossScale.aggressive())

    @classmethod
    def for_fp16(cls) -> Self:
        """What float16 needs: a dynamic scale."""
        return cls(loss_scale_for(jnp.float16))

    @classmethod
    def for_bf16(cls) -> Self:
        """What bfloat16 needs: a scale of 1, and the check."""
        return cls(loss_scale_for(jnp.bfloat16))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The scaler of a mapping as `jamp.loss_scale_from_config` takes it; "dynamic" where it has no type."""
        typed = {"type", "runner_wrapper", "scale_sense"} & set(config)
        return cls(loss_scale_from_config(config if typed else {"type": "dynamic", **config}))

    @property
    def state(self) -> Any:
        """The loss scale's state."""
        return self._state.loss_scale_state

    @property
    def stats(self) -> LossScaleStats:
        """What happened so far."""
        return self._state.stats

    def scale(self, loss: Any) -> Any:
        """The loss, or a pytree of them, times the scale; as it is when disabled. Not floating: a TypeError."""
        return scale_loss(loss, self) if self.is_enabled() else loss

    def value_and_grad(self, fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Any:
        """`jax.value_and_grad` with the scaling inside: the true loss and the true gradients, for `step(grads=...)`."""
        return value_and_grad(fun, self, argnums, has_aux)

    def unscale(self, scaled_grads: Any) -> Any:
        """The true gradients of what `jax.grad` of a scaled loss gave, in float32; as they are when disabled."""
        return unscale_and_check(scaled_grads, self)[0] if self.is_enabled() else scaled_grads

    def check_overflow(self, grads: Any) -> Array:
        """bool[], whether gradients, scaled or true, hold inf or nan; False when disabled."""
        return ~all_finite(grads) if self.is_enabled() else jnp.bool_(False)

    def update(self, *, grads_finite: ArrayLike | None = None, overflow: ArrayLike | None = None) -> "GradScaler":
        """The scaler of the next step, with a new scale and new statistics.

        `step` calls it. Call it yourself after `step(..., update_scale=False)`, once for all optimizers of a step.

        Args:
          grads_finite: bool[], whether all gradients of the step were finite.
          overflow: bool[], the opposite. Exactly one of the two.

        Raises:
          ValueError: If neither or both are given.
        """
        if (grads_finite is None) == (overflow is None):
            raise ValueError(
                "update() takes exactly one of grads_finite= and overflow=. If `step` came before it, the scale is "
                "updated already and a second update would count the step twice: delete this call. To call it "
                "yourself, as in torch, write `result = scaler.step(..., update_scale=False)` and then "
                "`scaler = result.scaler.update(grads_finite=result.stepped)`."
            )
        finite = ~jnp.asarray(overflow, bool) if grads_finite is None else jnp.asarray(grads_finite, bool)
        return self._with(self._state.update(self.loss_scale, finite)) if self.is_enabled() else self

    def step(
        self,
        tx: optax.GradientTransformation,
        opt_state: Any,
        params: Any,
        *,
        grads: Any = None,
        scaled_grads: Any = None,
        optimizer_step: bool = True,
        check_overflow: bool = True,
        update_scale: bool = True,
    ) -> GradScalerStep:
        """Unscale, check, step the optimizer unless there was an overflow, and update the scale.

        On an overflow `params` and `opt_state` come back as they were, bit for bit. float16 parameters whose optimizer
        keeps no masters warn.

        Args:
          tx: The optimizer, not wrapped in `jamp.loss_scaled`.
          opt_state: Its state.
          params: The parameters.
          grads: True gradients, from `value_and_grad` or `unscale`, clipped or not.
          scaled_grads: Gradients of a scaled loss, from `jax.grad`. Exactly one of the two.
          optimizer_step: If False, only check and update.
          check_overflow: If False, step without a check. Nothing is known then, so the scale is not updated either.
          update_scale: If False, leave the scale; call `update` once all optimizers have stepped.

        Returns:
          The new `params`, `opt_state` and `scaler`, and `stepped` (bool[]): False where an overflow was found, True
          otherwise, also with `optimizer_step=False`.

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
        finite = all_finite(grads) if checked else jnp.bool_(True)
        if optimizer_step:
            loss_scale = self.loss_scale if checked else NoOpLossScale()
            params, opt_state = step_optimizer(loss_scale, self._state, tx, opt_state, params, grads, finite)
        scaler = self.update(grads_finite=finite) if update_scale and checked else self
        return GradScalerStep(params, opt_state, scaler, finite)

    def get_scale(self) -> Array:
        """f32[], the scale of the next loss; 1 when disabled."""
        return jnp.asarray(self.state.loss_scale)

    def get_inverse_scale(self) -> Array:
        """f32[], what `unscale` multiplies by; 1 when disabled."""
        return 1.0 / self.get_scale()

    def get_stats(self) -> LossScaleStats:
        """The same as `stats`."""
        return self.stats

    def is_enabled(self) -> bool:
        """Whether anything is scaled."""
        return not isinstance(self.state, NoOpLossScaleState)

    def enable(self) -> "GradScaler":
        """The scaler switched on, with the scale that it had when it was disabled."""
        if not self._paused:
            return self
        kept = jax.tree.unflatten(jax.tree.structure(jax.eval_shape(self.loss_scale.init)), self._paused)
        return self._with(self._state._replace(loss_scale_state=kept))

    def disable(self) -> "GradScaler":
        """The scaler switched off: its state waits for `enable`."""
        return self._with(self._state.silent(), _leaves(self._state)) if self.is_enabled() else self

    def reset(self) -> "GradScaler":
        """The scaler as it was constructed: the initial scale, no counts."""
        return GradScaler(self.loss_scale, enabled=self.is_enabled())

    def state_dict(self) -> dict[str, Any]:
        """All that a restored run needs, as Python numbers, torch's keys among them; empty when disabled."""
        return to_state_dict(self.loss_scale, self._state) if self.is_enabled() else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> "GradScaler":
        """The scaler with the state of a `state_dict()`; growth and backoff come with it, as in torch.

        A disabled scaler loads nothing. An empty dict, or one that lacks keys, is a ValueError that names them; for a
        dict that torch wrote, use `jamp.interop.from_torch`.
        """
        if not self.is_enabled():
            return self
        return _fill(object.__new__(GradScaler), *from_state_dict(self.loss_scale, self._state, state_dict), ())

    def _with(self, state: GradScalerState, paused: tuple[Any, ...] = ()) -> "GradScaler":
        return _fill(object.__new__(GradScaler), self.loss_scale, state, paused)


def _fill(scaler: GradScaler, loss_scale: LossScale, state: Any, paused: Any) -> GradScaler:
    """Set the fields, unchecked: a pytree may be made of anything."""
    for name, value in (("loss_scale", loss_scale), ("_state", state), ("_paused", paused)):
        object.__setattr__(scaler, name, value)
    return scaler


def _leaves(state: GradScalerState) -> tuple[Any, ...]:
    return tuple(jax.tree.leaves(state.loss_scale_state))


jax.tree_util.register_pytree_with_keys(
    GradScaler,
    lambda s: (((GetAttrKey("_state"), s._state), (GetAttrKey("_paused"), s._paused)), s.loss_scale),
    lambda loss_scale, children: _fill(object.__new__(GradScaler), loss_scale, *children),
)
