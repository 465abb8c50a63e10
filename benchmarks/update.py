"""`tx.update` and `optax.apply_updates` on true gradients: plain optax, jamp and its peers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jamp
from benchmarks.timing import Case

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "sgd momentum": lambda: optax.sgd(1e-3, momentum=0.9),
    "clip + adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
}


def parameters(leaves: int, width: int) -> dict[str, jax.Array]:
    """Half the leaves are square matrices, half are biases, as in a stack of dense layers."""
    matrices = {f"w{i}": jnp.full((width, width), 0.01) for i in range(leaves // 2)}
    return matrices | {f"b{i}": jnp.zeros((width,)) for i in range(leaves // 2)}


def cases(optimizer: str, leaves: int, width: int) -> list[Case]:
    """One case a library; the gradients are finite, as in nearly every step."""
    params = parameters(leaves, width)
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 1e-3), params)
    make = OPTIMIZERS[optimizer]
    found = [plain(make(), params), loss_scaled(make(), params), no_op(make(), params)]
    if leaves < 1000:  # XLA:CPU copies the predicates of flax's and jmp's recipes into every fusion: 1000 leaves take
        # it more than 6 minutes and 10 GB to compile
        found += [flax_dynamic_scale(make(), params), if_finite(make(), params), jmp_recipe(make(), params)]
    return [Case(name, step, carry, (grads,)) for name, step, carry in found if step is not None]


Peer = tuple[str, Any, Any]


def optax_step(name: str, tx: optax.GradientTransformation, params: Any) -> Peer:
    def step(carry: Any, grads: Any) -> Any:
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return name, step, (params, tx.init(params))


def plain(tx: optax.GradientTransformation, params: Any) -> Peer:
    return optax_step("optax", tx, params)


def loss_scaled(tx: optax.GradientTransformation, params: Any) -> Peer:
    return optax_step("jamp", jamp.loss_scaled(tx), params)


def no_op(tx: optax.GradientTransformation, params: Any) -> Peer:
    return optax_step("jamp, NoOpLossScale", jamp.loss_scaled(tx, jamp.NoOpLossScale()), params)


def if_finite(tx: optax.GradientTransformation, params: Any) -> Peer:
    return optax_step("optax.apply_if_finite", optax.apply_if_finite(tx, 10), params)


def flax_dynamic_scale(tx: optax.GradientTransformation, params: Any) -> Peer:
    """The documented recipe: check, update the scale, then select params and optimizer state by `where`."""
    name = "flax DynamicScale recipe"
    try:
        from flax.training.dynamic_scale import DynamicScale
    except ImportError:
        return name, None, None

    def step(carry: Any, grads: Any) -> Any:
        params, state, scale, fin_steps = carry
        finite = jnp.array(True)
        for g in jax.tree.leaves(grads):
            finite &= jnp.all(jax.lax.is_finite(g))
        grow = fin_steps == 2000  # what DynamicScale.value_and_grad does after the backward pass
        grown = jnp.where(grow & finite, jnp.minimum(scale * 2.0, jnp.finfo(jnp.float32).max), scale)
        new_scale = jnp.where(finite, grown, jnp.maximum(scale * 0.5, jnp.finfo(jnp.float32).tiny))
        new_fin_steps = jnp.where(grow | ~finite, 0, fin_steps + 1)
        updates, new_state = tx.update(grads, state, params)
        new_params = optax.apply_updates(params, updates)
        select = lambda new, old: jnp.where(finite, new, old)
        params, state = jax.tree.map(select, (new_params, new_state), (params, state))
        return params, state, new_scale, new_fin_steps

    defaults = DynamicScale()
    return name, step, (params, tx.init(params), jnp.float32(defaults.scale), jnp.int32(defaults.fin_steps))


def jmp_recipe(tx: optax.GradientTransformation, params: Any) -> Peer:
    """The README's recipe: `all_finite`, `adjust`, `select_tree`."""
    name = "jmp recipe"
    try:
        import jmp
    except ImportError:
        return name, None, None

    def step(carry: Any, grads: Any) -> Any:
        params, state, scale, counter = carry  # not the DynamicLossScale itself, which `jit.lower` refuses
        finite = jmp.all_finite(grads)
        loss_scale = jmp.DynamicLossScale(scale, counter).adjust(finite)
        updates, new_state = tx.update(grads, state, params)
        new_params = optax.apply_updates(params, updates)
        params, state = jmp.select_tree(finite, (new_params, new_state), (params, state))
        return params, state, loss_scale.loss_scale, loss_scale.counter

    return name, step, (params, tx.init(params), jnp.float32(2.0**15), jnp.int32(0))
