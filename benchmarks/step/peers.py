"""The same optimizer step by jamp and by each of its peers, as their documentation writes it.

Each takes an optimizer and parameters and gives a step `(carry, grads) -> carry` to jit with a donated carry. A package
that is not installed is an ImportError.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jamp
from benchmarks.models import updated

Step = Callable[[Any, Any], Any]
SCALE = 2.0**16


class Recipe(NamedTuple):
    step: Step
    carry: Any
    params: Callable[[Any], Any] = lambda carry: carry[0]  # the parameters, in the order of the leaves of those given
    scale: float = 1.0  # of the gradients that the step takes


def plain(tx: optax.GradientTransformation, params: Any) -> Recipe:
    return Recipe(lambda carry, grads: updated(tx, grads, *carry), (params, tx.init(params)))


def loss_scaled(tx: optax.GradientTransformation, params: Any) -> Recipe:
    return plain(jamp.loss_scaled(tx), params)


def grad_scaler(tx: optax.GradientTransformation, params: Any) -> Recipe:
    """Unscales too: the gradients that it takes are those of a scaled loss."""

    def step(carry: Any, grads: Any) -> Any:
        params, state, scaler = carry
        return scaler.step(tx, state, params, scaled_grads=grads)[:3]

    return Recipe(step, (params, tx.init(params), jamp.GradScaler(init_scale=SCALE)), scale=SCALE)


def by_hand(choose: Callable[..., Any], tx: optax.GradientTransformation, params: Any) -> Recipe:
    """As an expert would: jamp's exact check, and a choice over parameters and optimizer state."""
    loss_scale = jamp.DynamicLossScale()

    def step(carry: Any, grads: Any) -> Any:
        *old, scale = carry
        finite = jamp.all_finite(grads)
        return *choose(finite, partial(updated, tx, grads), *old), loss_scale.update(scale, finite)

    return Recipe(step, (params, tx.init(params), loss_scale.init()))


def cond(finite: jax.Array, step: Callable[..., Any], *old: Any) -> Any:
    return jax.lax.cond(finite, step, lambda *kept: kept, *old)


def where(finite: jax.Array, step: Callable[..., Any], *old: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.where(finite, x, y), step(*old), old)


def linen(tx: optax.GradientTransformation, params: Any) -> Recipe:
    from jamp.linen import TrainState

    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    return Recipe(lambda state, grads: state.apply_gradients(grads=grads), state, lambda state: state.params)


def nnx(tx: optax.GradientTransformation, params: Any) -> Recipe:
    from flax import nnx

    import jamp.nnx

    class Model(nnx.Module):
        def __init__(self) -> None:
            for name, value in params.items():
                setattr(self, name, nnx.Param(value))

    model = Model()
    graph, state = nnx.split((model, jamp.nnx.Optimizer(model, tx, wrt=nnx.Param)))

    def step(state: Any, grads: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        structure = jax.tree.structure(nnx.state(model, nnx.Param))
        optimizer.update(model, jax.tree.unflatten(structure, jax.tree.leaves(grads)))
        return nnx.state((model, optimizer))

    return Recipe(step, state, lambda state: nnx.state(nnx.merge(graph, state)[0]))


def flax_dynamic_scale(tx: optax.GradientTransformation, params: Any) -> Recipe:
    """Flax's examples (wmt/train.py): select params and optimizer state by `where`."""
    from flax.training.dynamic_scale import DynamicScale

    def step(carry: Any, grads: Any) -> Any:
        params, state, scale, fin_steps = carry
        finite = jnp.array(True)  # from here on, what DynamicScale.value_and_grad does after the backward pass
        for g in jax.tree.leaves(grads):
            finite &= jnp.all(jax.lax.is_finite(g))
        grow = fin_steps == 2000
        grown = jnp.where(grow & finite, jnp.minimum(scale * 2.0, jnp.finfo(jnp.float32).max), scale)
        new_scale = jnp.where(finite, grown, jnp.maximum(scale * 0.5, jnp.finfo(jnp.float32).tiny))
        new_fin_steps = jnp.where(grow | ~finite, 0, fin_steps + 1)
        return *where(finite, partial(updated, tx, grads), params, state), new_scale, new_fin_steps

    defaults = DynamicScale()
    return Recipe(step, (params, tx.init(params), jnp.float32(defaults.scale), jnp.int32(defaults.fin_steps)))


def jmp_recipe(tx: optax.GradientTransformation, params: Any) -> Recipe:
    """The README's `train_step`: `all_finite`, `adjust`, `select_tree`."""
    import jmp

    def step(carry: Any, grads: Any) -> Any:
        params, state, scale, counter = carry  # not the DynamicLossScale itself, which `jit.lower` refuses
        finite = jmp.all_finite(grads)
        loss_scale = jmp.DynamicLossScale(scale, counter).adjust(finite)
        params, state = jmp.select_tree(finite, updated(tx, grads, params, state), (params, state))
        return params, state, loss_scale.loss_scale, loss_scale.counter

    return Recipe(step, (params, tx.init(params), jnp.float32(2.0**15), jnp.int32(0)))


def mpx_recipe(tx: optax.GradientTransformation, params: Any) -> Recipe:
    """The README's `make_step`: what `mpx.filter_value_and_grad` does after the pass, and `mpx.optimizer_update`."""
    import mpx

    # The loss scale has integers among its leaves, which are no arrays: the carry holds its two numbers.
    def step(carry: Any, grads: Any) -> Any:
        params, state, scale, counter = carry
        finite = mpx.all_finite(grads)
        scaling = mpx.DynamicLossScaling(scale, jnp.float32(1.0), counter=counter).adjust(finite)
        params, state = mpx.optimizer_update(params, tx, state, grads, finite)
        return params, state, scaling.loss_scaling, scaling.counter

    return Recipe(step, (params, tx.init(params), jnp.float32(mpx.FLOAT16_MAX), jnp.int32(0)))


AGAIN = "optax, again"  # the same program once more: how far two equal programs differ
JAX: dict[str, Callable[[optax.GradientTransformation, Any], Recipe]] = {
    "optax": plain,
    AGAIN: plain,
    "jamp": loss_scaled,
    "jamp, NoOpLossScale": lambda tx, params: plain(jamp.loss_scaled(tx, jamp.NoOpLossScale()), params),
    "jamp.GradScaler, unscales too": grad_scaler,
    "jamp.linen": linen,
    "jamp.nnx": nnx,
    "lax.cond by hand": partial(by_hand, cond),
    "where by hand": partial(by_hand, where),
    "optax.apply_if_finite": lambda tx, params: plain(optax.apply_if_finite(tx, 10), params),
    "flax DynamicScale recipe": flax_dynamic_scale,
    "jmp recipe": jmp_recipe,
    "mpx recipe": mpx_recipe,
}
UNCHECKED = ("optax", AGAIN, "jamp, NoOpLossScale")  # they do not look whether the gradients are finite


def installed(names: Any) -> list[str]:
    """Those of the names whose packages are there; of the others a line is printed to the standard error."""
    found = []
    for name in names:
        try:
            JAX[name](optax.sgd(1.0), {"w": jnp.ones(1)})
            found.append(name)
        except ImportError as error:
            print(f"left out: {name} ({error})", file=sys.stderr)
    return found
