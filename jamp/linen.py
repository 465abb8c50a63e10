"""Flax Linen: a train state that skips steps whose gradients overflowed."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, Self, TypeVar

import jax
import jax.numpy as jnp
import optax

from jamp._jaxprs.manual_axes import hashable
from jamp._leaves import OVERWRITE_WITH_GRADIENT
from jamp._loss_scale.dynamic import DynamicLossScale
from jamp._loss_scale.static import LossScale
from jamp._step import gradients
from jamp._step.accessors import metrics
from jamp._step.find import is_step_applied
from jamp._step.loss_scaled import loss_scaled
from jamp._step.skip import apply_or_keep, select_new

try:
    from flax import struct
    from flax.training import train_state
except ImportError as error:
    raise ImportError("jamp.linen needs Flax: pip install 'jamp-jax[flax]'.") from error

__all__ = ["TrainState"]
__dir__ = lambda: __all__


_P = ParamSpec("_P")
_R = TypeVar("_R")


class TrainState(train_state.TrainState, kw_only=True):  # so that fields of a subclass need no default
    """Flax's `TrainState` with a loss scale. It skips steps whose gradients overflowed.

    Compute the gradients with `state.value_and_grad(loss_fn)(state.params, ...)` and step with `apply_gradients`. If
    the gradients are finite, this is Flax's step. If not, `params`, `opt_state.inner_state`, `step` and your own fields
    stay unchanged, bit for bit, and the loss scale backs off.

    Add fields of your own, such as BatchNorm's statistics, with a subclass as in Flax, or pass them to `create` by
    name. They are then in the dict `collections`. In both cases they are attributes that `apply_gradients` and
    `replace` accept by name.

    Parameters in Flax's collection `_overwrite_with_gradient` (the scales and histories of fp8 layers) are replaced by
    their gradients, which are neither unscaled nor checked.

    `step` (i32[]) counts the steps applied. Flax's own `step` also counts skipped steps. `tx` is the optimizer wrapped
    in `jamp.loss_scaled`, and `opt_state` its state.

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

    collections: dict[str, Any] = struct.field(default_factory=dict)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.replace = _replace  # type: ignore[assignment]  # Flax gives each subclass its own.

    def __getattr__(self, name: str) -> Any:
        found = vars(self).get("collections", {})
        if name in found:
            return found[name]
        return super().__getattribute__(name)  # Raises. If a property raised, this is its own error.

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any],
        params: Any,
        tx: optax.GradientTransformation,
        loss_scale: LossScale = DynamicLossScale(),
        unscale: bool = False,
        axis_name: Any = None,
        **collections: Any,
    ) -> Self:
        """Make a train state at step 0.

        Args:
          apply_fn: Usually `model.apply`.
          params: The parameters.
          tx: The optimizer, without a loss scale of its own. `jamp.master_params(tx)` for 16-bit parameters.
          loss_scale: A loss scale. `jamp.NoOpLossScale()` switches scaling, checks and skips off.
          unscale: If True, `apply_gradients` takes the gradients of `jamp.scale_loss(loss, state)`.
          axis_name: Name(s) of the `shard_map`, `pmap` or `vmap` axes whose replicas must skip together.
          **collections: Pytrees of arrays of your own, which are copied, and values of fields of your subclass, of
            which parameters are copied: an EMA that starts as them can be donated with them.

        Raises:
          ValueError: If `tx` is already loss-scaled, or a collection has the name of a method.
        """
        scaled = _loss_scaled(tx, loss_scale, unscale, hashable(axis_name))
        opt_state = scaled.init(_with_optimizer(params))
        fields = {field.name: field for field in dataclasses.fields(cls)}
        strong_copy = lambda x: jnp.array(x, jnp.result_type(x))  # So that a Python number does not retrace the step.
        added = {name: jax.tree.map(strong_copy, x) for name, x in collections.items() if name not in fields}
        if taken := [name for name in added if hasattr(cls, name)]:
            raise ValueError(f"{cls.__name__} has an attribute {taken[0]!r} of its own. Rename the collection.")
        is_static = lambda name: not fields[name].metadata.get("pytree_node", True)
        shared = set(map(id, jax.tree.leaves(params)))
        copied = lambda x: jnp.copy(x) if id(x) in shared else x
        return cls(
            step=jnp.array(0, jnp.int32),
            apply_fn=apply_fn,
            params=params,
            tx=scaled,
            opt_state=opt_state,
            collections=added,
            **{
                name: x if is_static(name) else jax.tree.map(copied, x)
                for name, x in collections.items()
                if name in fields
            },
        )

    def value_and_grad(
        self, fun: Callable[_P, _R], argnums: int | Sequence[int] = 0, has_aux: bool = False, **kwargs: Any
    ) -> Callable[_P, tuple[_R, Any]]:
        """`jamp.value_and_grad(fun, self.opt_state, ...)`: the true loss and true float32 gradients."""
        return gradients.value_and_grad(fun, self.opt_state, argnums, has_aux, **kwargs)

    def apply_gradients(self, *, grads: Any, extra_args: Mapping[str, Any] | None = None, **collections: Any) -> Self:
        """Return the state after a step, which is skipped if the gradients are not finite.

        Args:
          grads: The true gradients (with `unscale=True`, gradients of the scaled loss), of the structure of `params`.
          extra_args: Extra arguments for the optimizer's `update`, such as `{"value": loss}`. `grads_finite` (bool[])
            replaces the check.
          **collections: New values of your fields, such as `batch_stats=updates["batch_stats"]`. On a skip the fields
            keep their old values.

        Raises:
          TypeError: If a name is not a field.
          ValueError: If a field changes its structure, a shape or a dtype.
        """
        for name in collections:
            if name not in vars(self) and name not in self.collections:
                raise TypeError(f"{name!r} is not a field of this state. Give it to `create` first.")
        params = _with_optimizer(self.params)
        updates, opt_state = self.tx.update(_with_optimizer(grads), self.opt_state, params, **(extra_args or {}))
        grads_finite = is_step_applied(opt_state)
        new_params = apply_or_keep(grads_finite, params, updates)
        if _overwrites(self.params):
            new, old = (tree[OVERWRITE_WITH_GRADIENT] for tree in (grads, self.params))
            overwritten = select_new(grads_finite, new, old, OVERWRITE_WITH_GRADIENT)
            new_params = type(self.params)({**self.params, "params": new_params, OVERWRITE_WITH_GRADIENT: overwritten})
        return self.replace(
            step=select_new(grads_finite, optax.safe_increment(self.step), self.step, "step"),
            params=new_params,
            opt_state=opt_state,
            **{name: select_new(grads_finite, new, getattr(self, name), name) for name, new in collections.items()},
        )

    def metrics(self) -> dict[str, jax.Array]:
        """The same as `jamp.metrics(self)`: the values to log, as arrays on the device by name."""
        return metrics(self.opt_state)


@dataclasses.dataclass(frozen=True)
class _Same:
    """A function that equals another one made of the same arguments."""

    function: Callable[..., Any] = dataclasses.field(compare=False)
    made_of: tuple[Any, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _loss_scaled(tx: Any, *args: Any) -> optax.GradientTransformationExtraArgs:
    """`loss_scaled`, equal for equal arguments: two states of one `tx` have one structure, as in Flax."""
    loss_scale, unscale, axis_name = args
    scaled = loss_scaled(tx, loss_scale, unscale=unscale, axis_name=axis_name)
    try:
        hash((tx, *args))
    except TypeError:  # Structures are hashed.
        return scaled
    return optax.GradientTransformationExtraArgs(
        _Same(scaled.init, ("init", tx, *args)), _Same(scaled.update, (tx, *args))
    )


def _overwrites(params: Any) -> bool:
    return isinstance(params, Mapping) and OVERWRITE_WITH_GRADIENT in params


def _with_optimizer(params: Any) -> Any:
    """The parameters or gradients for the optimizer. As in Flax, these exclude the fp8 state."""
    return params["params"] if _overwrites(params) else params


def _replace(self: TrainState, **updates: Any) -> TrainState:
    """Return the state with other values of fields, also of those in `collections`."""
    own = {name: updates.pop(name) for name in list(updates) if name in self.collections}
    if own:
        updates["collections"] = {**self.collections, **own}
    return dataclasses.replace(self, **updates)


TrainState.replace = _replace  # type: ignore[assignment]
