"""Flax Linen: a train state in which nothing moves on an overflow."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax

from jamp import _scaling
from jamp._lookup import metrics
from jamp._loss_scale import DynamicLossScale, LossScale
from jamp._train_state import check_one_scaler, select, step_applied
from jamp._transforms import loss_scaled
from jamp._tree import OVERWRITE_WITH_GRADIENT

try:
    from flax import struct
    from flax.training import train_state
except ImportError as error:
    raise ImportError("jamp.linen needs Flax: pip install 'jax-amp[flax]'.") from error


class _Replace:
    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        del cls.replace  # Flax gives each of its dataclasses one, which knows fields only.

    def replace(self, **updates: Any) -> Self:
        """A copy with some fields or collections replaced."""
        state: Any = self
        known = state.collections
        collections = {name: updates.pop(name) for name in known if name in updates}
        if collections:
            updates["collections"] = known | collections
        return dataclasses.replace(state, **updates)


class TrainState(_Replace, train_state.TrainState):
    """Flax's `TrainState` with a loss scale: on an overflow nothing in it moves.

    Compute the gradients with `state.value_and_grad(loss_fn)(state.params, ...)` and step with `apply_gradients`. If
    the gradients are finite, that is Flax's step. If not, `params`, `opt_state.inner_state`, `step` and the collections
    stay as they are, bit for bit, and the loss scale backs off.

    Add state of your own, such as BatchNorm's statistics, as in Flax by a subclass with more fields, or give it to
    `create` by name. Either way it is an attribute, and `apply_gradients` and `replace` accept it by name.

    Parameters in Flax's collection `_overwrite_with_gradient` (the scales and histories of fp8 layers) are replaced by
    their gradients, neither unscaled nor checked.

    Attributes:
      step: i32[], the number of steps applied. Flax's own counts the skipped ones too.
      apply_fn: Usually `model.apply`.
      params: The parameters.
      tx: The optimizer, wrapped in `jamp.loss_scaled`.
      opt_state: Its state, a `jamp.LossScaledState`.
      collections: What was given to `create` by a name that is no field.

    Examples:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, optax, jamp.linen
      >>> model, x = nn.Dense(8, dtype=jnp.float16), jnp.ones((4, 2))
      >>> variables = model.init(jax.random.key(0), x)
      >>> state = jamp.linen.TrainState.create(
      ...     apply_fn=model.apply, params=variables["params"], tx=optax.adam(1e-3)
      ... )
      >>> def loss_fn(params):
      ...     return jnp.mean(state.apply_fn({"params": params}, x).astype(jnp.float32) ** 2)
      >>> loss, grads = state.value_and_grad(loss_fn)(state.params)
      >>> state = state.apply_gradients(grads=grads)
      >>> int(state.step), float(jamp.get_loss_scale(state))
      (1, 65536.0)
      >>> state = state.apply_gradients(grads=jax.tree.map(lambda g: g * jnp.inf, grads))
      >>> int(state.step), float(jamp.get_loss_scale(state))
      (1, 32768.0)
    """

    collections: dict[str, Any] = struct.field(default_factory=dict, kw_only=True)

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["collections"][name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no field, method or collection {name!r}.") from None

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any],
        params: Any,
        tx: optax.GradientTransformation,
        loss_scale: LossScale = DynamicLossScale(),
        axis_name: Any = None,
        **collections: Any,
    ) -> Self:
        """A train state at step 0.

        Args:
          apply_fn: Usually `model.apply`.
          params: The parameters.
          tx: The optimizer, without a loss scale of its own. `jamp.master_params(tx)` for half-precision parameters.
          loss_scale: A loss scale; `jamp.NoOpLossScale()` switches everything off.
          axis_name: Name(s) of the `shard_map`, `pmap` or `vmap` axes whose replicas must skip together.
          **collections: Fields of a subclass; any other name becomes a collection. Collections are copied, so that
            one that starts as the parameters (an EMA) can be donated with them.

        Raises:
          ValueError: If `tx` is already loss-scaled, or a collection has the name of a method.
        """
        scaled = loss_scaled(tx, loss_scale, axis_name=axis_name)
        opt_state = scaled.init(_with_optimizer(params))
        check_one_scaler(opt_state)
        names = {field.name for field in dataclasses.fields(cls)}
        fields = {name: collections.pop(name) for name in names if name in collections}
        taken = [name for name in collections if hasattr(cls, name)]
        if taken:
            raise ValueError(
                f"{cls.__name__} has an attribute {taken[0]!r} of its own: give the collection another name."
            )
        return cls(
            step=jnp.array(0, jnp.int32),
            apply_fn=apply_fn,
            params=params,
            tx=scaled,
            opt_state=opt_state,
            collections=jax.tree.map(jnp.copy, collections),
            **fields,
        )

    def value_and_grad(
        self, fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, **kwargs: Any
    ) -> Callable[..., Any]:
        """`jamp.value_and_grad(fun, self.opt_state, ...)`: the true loss and true float32 gradients.

        Args:
          fun: A function that returns a scalar loss, or `(loss, aux)` with `has_aux`.
          argnums: As for `jax.value_and_grad`.
          has_aux: As for `jax.value_and_grad`.
          **kwargs: `holomorphic` and `allow_int`, as for `jax.value_and_grad`.

        Returns:
          A function of the arguments of `fun` that returns `(value, grads)`.
        """
        return _scaling.value_and_grad(fun, self.opt_state, argnums, has_aux, **kwargs)

    def apply_gradients(self, *, grads: Any, extra_args: Mapping[str, Any] | None = None, **collections: Any) -> Self:
        """The state after a step, or after a skip if the gradients are not finite.

        Args:
          grads: The true gradients, of the structure of `params`.
          extra_args: Extra arguments for the optimizer's `update`, such as `{"value": loss}`; `grads_finite` (bool[])
            takes the place of the check.
          **collections: New values of fields and collections, such as `batch_stats=updates["batch_stats"]`. They keep
            their old values on a skip.

        Raises:
          TypeError: If a name is neither a field nor a collection.
          ValueError: If a collection changes its structure, a shape or a dtype.
        """
        for name in collections:
            if name not in vars(self) and name not in self.collections:
                raise TypeError(f"{name!r} is no field and no collection of this state: give it to `create` first.")
        params = _with_optimizer(self.params)
        updates, opt_state = self.tx.update(_with_optimizer(grads), self.opt_state, params, **(extra_args or {}))
        new_params = optax.apply_updates(params, updates)
        ok = step_applied(opt_state)
        if _overwrites(self.params):
            overwritten = {
                "params": new_params,
                OVERWRITE_WITH_GRADIENT: select(
                    ok, grads[OVERWRITE_WITH_GRADIENT], self.params[OVERWRITE_WITH_GRADIENT], OVERWRITE_WITH_GRADIENT
                ),
            }
            new_params = type(self.params)({**self.params, **overwritten})
        return self.replace(
            step=jnp.where(ok, optax.safe_increment(self.step), self.step),
            params=new_params,
            opt_state=opt_state,
            **{name: select(ok, new, getattr(self, name), name) for name, new in collections.items()},
        )

    def metrics(self) -> dict[str, jax.Array]:
        """What to log, as `jamp.metrics`: arrays on device, by name."""
        return metrics(self.opt_state)


def _overwrites(params: Any) -> bool:
    return isinstance(params, Mapping) and OVERWRITE_WITH_GRADIENT in params


def _with_optimizer(params: Any) -> Any:
    """The parameters (or gradients) that the optimizer steps, as Flax has it: the fp8 state needs none."""
    return params["params"] if _overwrites(params) else params
