"""A whole train step, forward, backward and AdamW, by jamp and by its peers as their documentation writes it."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jamp
from benchmarks.peers import AGAIN, step_if
from benchmarks.timing import Case

Loss = Callable[..., jax.Array]


def plain(loss: Loss, tx: optax.GradientTransformation, params: Any) -> tuple[Any, Any]:
    def step(carry: Any, *batch: Any) -> Any:
        params, state = carry
        _, grads = jax.value_and_grad(loss)(params, *batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step, (params, tx.init(params))


def with_jamp(loss: Loss, tx: optax.GradientTransformation, params: Any) -> tuple[Any, Any]:
    scaled = jamp.loss_scaled(tx)

    def step(carry: Any, *batch: Any) -> Any:
        params, state = carry
        _, grads = jamp.value_and_grad(loss, state)(params, *batch)
        updates, state = scaled.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step, (params, scaled.init(params))


def with_cond(loss: Loss, tx: optax.GradientTransformation, params: Any) -> tuple[Any, Any]:
    """By hand, as an expert would: `lax.cond` around update and apply_updates, and jamp's exact check."""
    loss_scale = jamp.DynamicLossScale()

    def step(carry: Any, *batch: Any) -> Any:
        params, state, scale = carry
        _, grads = jamp.value_and_grad(loss, scale)(params, *batch)

        finite = jamp.all_finite(grads)
        return *step_if(finite, tx, grads, params, state), loss_scale.update(scale, finite)

    return step, (params, tx.init(params), loss_scale.init())


def with_flax(loss: Loss, tx: optax.GradientTransformation, params: Any) -> tuple[Any, Any]:
    """Flax's examples (wmt/train.py): select params and optimizer state by `where`."""
    from flax.training.dynamic_scale import DynamicScale

    def step(carry: Any, *batch: Any) -> Any:
        params, state, scale = carry
        scale, finite, _, grads = scale.value_and_grad(loss)(params, *batch)
        updates, new_state = tx.update(grads, state, params)
        new_params = optax.apply_updates(params, updates)
        select = lambda new, old: jnp.where(finite, new, old)
        params, state = jax.tree.map(select, (new_params, new_state), (params, state))
        return params, state, scale

    return step, (params, tx.init(params), DynamicScale(scale=jnp.float32(2.0**16), fin_steps=jnp.int32(0)))


def with_jmp(loss: Loss, tx: optax.GradientTransformation, params: Any) -> tuple[Any, Any]:
    """The README's `train_step`."""
    import jmp

    def step(carry: Any, *batch: Any) -> Any:
        params, state, scale, counter = carry  # not the DynamicLossScale itself, which `jit.lower` refuses
        loss_scale = jmp.DynamicLossScale(scale, counter)
        scaled = lambda params: (lambda value: (loss_scale.scale(value), value))(loss(params, *batch))
        grads, _ = jax.grad(scaled, has_aux=True)(params)
        grads = loss_scale.unscale(grads)
        finite = jmp.all_finite(grads)
        loss_scale = loss_scale.adjust(finite)
        updates, new_state = tx.update(grads, state, params)
        new_params = optax.apply_updates(params, updates)
        params, state = jmp.select_tree(finite, (new_params, new_state), (params, state))
        return params, state, loss_scale.loss_scale, loss_scale.counter

    return step, (params, tx.init(params), jnp.float32(2.0**15), jnp.int32(0))


def with_mpx(loss: Loss, tx: optax.GradientTransformation, params: Any) -> tuple[Any, Any]:
    """The README's `make_step`."""
    import mpx

    def step(carry: Any, *batch: Any) -> Any:
        params, state, scale, counter = carry  # the loss scale has integers among its leaves, which are no arrays
        scaling = mpx.DynamicLossScaling(scale, jnp.float32(1.0), counter=counter)
        _, scaling, finite, grads = mpx.filter_value_and_grad(loss, scaling=scaling)(params, *batch)
        params, state = mpx.optimizer_update(params, tx, state, grads, finite)
        return params, state, scaling.loss_scaling, scaling.counter

    return step, (params, tx.init(params), jnp.float32(mpx.FLOAT16_MAX), jnp.int32(0))


RECIPES = {
    "optax": plain,
    AGAIN: plain,
    "jamp": with_jamp,
    "lax.cond by hand": with_cond,
    "flax DynamicScale recipe": with_flax,
    "jmp recipe": with_jmp,
    "mpx recipe": with_mpx,
}


def installed() -> list[str]:
    """Those of the recipes whose packages are there; of the others a line is printed."""
    found = []
    for name, recipe in RECIPES.items():
        try:
            recipe(jnp.sum, optax.sgd(1.0), jnp.ones(1))
            found.append(name)
        except ImportError as error:
            print(f"left out: {name} ({error})")
    return found


def cases(loss: Loss, params: Any, batch: tuple[Any, ...], names: Iterable[str] = ("optax", "jamp")) -> list[Case]:
    """One case a library.

    Args:
      loss: `loss(params, *batch)`, f32[], which computes in float16 from parameters of float32.
      params: The parameters, float32.
      batch: The arrays of the batch.
      names: Which of `RECIPES`.
    """
    made = {name: RECIPES[name](loss, optax.adamw(1e-3), params) for name in names}
    return [Case(name, step, carry, batch) for name, (step, carry) in made.items()]
