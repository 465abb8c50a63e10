"""Flax NNX: an optimizer and a `value_and_grad` that leave a model unchanged on an overflow."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax

from jamp._leaves import is_overwritten
from jamp._loss_scale.dynamic import DynamicLossScale
from jamp._loss_scale.scaler_state import check_optimizer
from jamp._loss_scale.static import LossScale
from jamp._step.find import find_state_to_unscale, is_step_applied, read_scale
from jamp._step.finite import all_finite
from jamp._step.loss_scaled import loss_scaled
from jamp._step.scale_unscale import unscale, with_scaled_loss
from jamp._step.skip import select_new

try:
    from flax import nnx
except ImportError as error:
    raise ImportError("jamp.nnx needs Flax: pip install 'jamp-jax[flax]'.") from error

__all__ = ["Optimizer", "value_and_grad"]
__dir__ = lambda: __all__


class Optimizer(nnx.Optimizer[Any]):
    """`nnx.Optimizer` with a loss scale. It skips a step whose gradients overflowed.

    Compute the gradients with `jamp.nnx.value_and_grad(loss_fn, optimizer)(model, ...)`. If they are finite, `update`
    is NNX's. If not, the model's parameters and the optimizer stay unchanged, bit for bit, and the loss scale backs
    off. `step` (u32[]) counts the steps applied. NNX's own `step` also counts skipped steps.

    Variables of Flax's collection `_overwrite_with_gradient` (the scales and histories of fp8 layers, in a Linen module
    that `nnx.bridge` converted) are replaced by their gradients, which are neither unscaled nor checked. `tx` does not
    see them. Select them with `wrt=nnx.Any(nnx.Param, nnx.variable_type_from_name("_overwrite_with_gradient"))`.

    Args:
      model: The module to optimize.
      tx: The optimizer, without a loss scale of its own. `jamp.master_params(tx)` for 16-bit parameters.
      wrt: The filter of the variables to optimize, such as `nnx.Param`.
      loss_scale: A loss scale. `jamp.NoOpLossScale()` switches scaling, checks and skips off.
      unscale: If True, `update` takes the gradients of `jamp.scale_loss(loss, optimizer)`, from `nnx.grad`.
      axis_name: Name(s) of the `shard_map`, `pmap` or `vmap` axes whose replicas must skip together.

    Raises:
      ValueError: If `tx` is already loss-scaled.

    Examples:
      >>> from flax import nnx
      >>> import jax.numpy as jnp, optax, jamp.nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> optimizer = jamp.nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
      >>> @nnx.jit
      ... def train_step(model, optimizer, x):
      ...     loss_fn = lambda model: jnp.mean(model(x) ** 2)
      ...     loss, grads = jamp.nnx.value_and_grad(loss_fn, optimizer)(model)
      ...     optimizer.update(model, grads)
      ...     return loss
      >>> loss = train_step(model, optimizer, jnp.ones((4, 2)))
      >>> loss = train_step(model, optimizer, jnp.full((4, 2), jnp.inf))
      >>> int(optimizer.step[...]), float(jamp.get_loss_scale(optimizer))
      (1, 32768.0)
    """

    undoes_skips = True  # Distinguishes it from a plain `nnx.Optimizer`, which jamp's look-ups reject.

    def __init__(
        self,
        model: Any,
        tx: optax.GradientTransformation,
        *,
        wrt: Any,
        loss_scale: LossScale = DynamicLossScale(),
        unscale: bool = False,
        axis_name: Any = None,
    ) -> None:
        check_optimizer(tx, "jamp.nnx.Optimizer(model, {}, wrt=nnx.Param)")
        stepped = nnx.All(wrt, nnx.Not(_is_overwritten)) if _overwritten(nnx.state(model, wrt)) else wrt
        super().__init__(model, loss_scaled(tx, loss_scale, unscale=unscale, axis_name=axis_name), wrt=stepped)
        self.differentiated = wrt
        self.axis_name = axis_name

    def update(self, model: Any, grads: Any, /, **kwargs: Any) -> Any:
        """Step the model and the optimizer in place, or skip the step if the true gradients are not finite.

        Other keywords, such as `value=loss`, are passed to the optimizer's `update`. `grads_finite` (bool[]) replaces
        the check. The method returns the updates that it added to the parameters.
        """
        if isinstance(grads, nnx.Module) and not isinstance(model, nnx.Module):
            raise TypeError("The model comes first: optimizer.update(model, grads).")
        before = nnx.as_pure((nnx.state(model, self.wrt), self.step))
        updates = super().update(model, grads, **kwargs)
        after = nnx.as_pure((nnx.state(model, self.wrt), self.step))
        applied = is_step_applied(nnx.as_pure(self.opt_state))
        kept = select_new(applied, after, before, "The model")
        nnx.update(model, kept[0])
        self.step[...] = kept[1]
        if overwritten := _overwritten(grads):
            own = {path: x for path, x in _overwritten(model).items() if path in overwritten}
            nnx.update(model, nnx.from_flat_state(select_new(applied, overwritten, own, "The model")))
        return updates


def value_and_grad(
    fun: Callable[..., Any], optimizer: Any, argnums: Any = None, has_aux: bool = False
) -> Callable[..., Any]:
    """`nnx.value_and_grad` with loss scaling inside. On an overflow it also restores the state that `fun` changed.

    The state is BatchNorm statistics, RNG counts and anything else that `fun` changes in its arguments. A variable that
    `fun` creates, or whose structure it changes (such as the Variables of `sow`), is not restored.

    Args:
      fun: A function of NNX objects and arrays that returns a scalar loss, or `(loss, aux)` with `has_aux`.
      optimizer: A `jamp.nnx.Optimizer`. Its loss scale is read when the returned function is called.
      argnums: As for `nnx.value_and_grad`. None means the variables of the first argument that the optimizer's
        `wrt` selects.
      has_aux: As for `nnx.value_and_grad`.

    Returns:
      A function of the arguments of `fun` that returns `(value, grads)`, the true loss and the true float32 gradients.

    Raises:
      ValueError: If `optimizer` is a plain `nnx.Optimizer`, or holds no loss-scale state, for example because it was
        split. Merge it first.

    Examples:
      >>> from flax import nnx
      >>> import jax.numpy as jnp, optax, jamp.nnx
      >>> model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
      >>> optimizer = jamp.nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
      >>> grad_fn = jamp.nnx.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2), optimizer)
      >>> loss, grads = grad_fn(model, jnp.array([[jnp.inf, 1.0], [2.0, 3.0]]))
      >>> model.mean[...].tolist()
      [0.0, 0.0]
    """

    @functools.wraps(fun)
    def with_true_gradients(*args: Any, **kwargs: Any) -> Any:
        holder = optimizer.opt_state if isinstance(optimizer, nnx.Optimizer) else optimizer
        try:
            loss_scale_state = find_state_to_unscale(nnx.as_pure(holder), "jamp.nnx.value_and_grad")
        except ValueError as error:
            if not isinstance(optimizer, nnx.Optimizer) or isinstance(optimizer, Optimizer):
                raise
            cure = "An nnx.Optimizer that scales and skips is a jamp.nnx.Optimizer(model, tx, wrt=nnx.Param)."
            raise ValueError(f"{error} {cure}") from error
        if argnums is None and not hasattr(optimizer, "wrt"):
            got, cure = type(optimizer).__name__, "Pass one, or argnums=nnx.DiffState(0, nnx.Param)"
            raise TypeError(f"value_and_grad takes a jamp.nnx.Optimizer, got a {got}. {cure}.")
        if argnums is None and args and isinstance(args[0], jax.Array):
            raise TypeError("The model comes first: jamp.nnx.value_and_grad(loss_fn, optimizer)(model, batch).")
        scale, scaled = read_scale(loss_scale_state), with_scaled_loss(fun, loss_scale_state, has_aux)
        if argnums is None:  # An nnx.Optimizer around a loss-scaled tx has no `differentiated`.
            differentiated: Any = nnx.DiffState(0, getattr(optimizer, "differentiated", optimizer.wrt))
        else:
            differentiated = argnums
        before = _values((args, kwargs))
        differentiate = nnx.value_and_grad(scaled, argnums=differentiated, has_aux=True)
        (_, (loss, aux)), scaled_grads = differentiate(*args, **kwargs)
        grads = unscale(scaled_grads, scale)
        if scale is not None:
            grads_finite = all_finite(grads, axis_name=getattr(optimizer, "axis_name", None))
            _restore_unless(grads_finite, (args, kwargs), before)
        return ((loss, aux) if has_aux else loss), grads

    return with_true_gradients


def _is_overwritten(path: Any, x: Any) -> bool:
    """A filter of the Variables that their gradients replace."""
    del path
    return is_overwritten(x)


def _overwritten(nodes: Any) -> dict[Any, Any]:
    """The value of each Variable in NNX objects that its gradient replaces, by path."""
    return {path: nnx.as_pure(x) for path, x in nnx.to_flat_state(nnx.state(nodes, _is_overwritten))}


def _values(nodes: Any) -> dict[Any, Any]:
    """The value of each variable and array in NNX objects, by path."""
    return {path: nnx.as_pure(value) for path, value in nnx.to_flat_state(nnx.state(nodes))}


def _restore_unless(grads_finite: jax.Array, nodes: Any, before: dict[Any, Any]) -> None:
    """Restore the earlier values of the variables and arrays in NNX objects unless `grads_finite`."""
    changed = {}
    for path, new in _values(nodes).items():
        old = before.get(path)
        structure: Any = jax.tree.structure(new)
        if new is not old and jax.tree.structure(old) == structure:
            changed[path] = select_new(grads_finite, new, old, ".".join(map(str, path)))
    nnx.update(nodes, nnx.from_flat_state(changed))
