"""GradScaler: the basic loop, a scope in place of the context manager, manual control, and the constructors.

    python tests/requirements/001_grad_scaler.py

The usage examples of `GradScaler`, `GradScalerContext` and `GradScalerFactory`, translated.
"""

import jax
import jax.numpy as jnp
import optax

import jamp

OPTIMIZER = jamp.optimizers.sgd(0.1)
x = jax.random.normal(jax.random.key(0), (4, 8, 4)).at[1, 0, 0].set(jnp.inf)  # The second batch overflows.
BATCHES = list(zip(x, x.sum(axis=2, keepdims=True), strict=True))


def loss_fn(params, x, y):
    return jnp.mean((x @ params["w"] - y) ** 2)


@jax.jit
def train_step(params, opt_state, scaler, batch):
    scaled_grads = jax.grad(lambda params: scaler.scale(loss_fn(params, *batch)))(params)
    return scaler.step(OPTIMIZER, opt_state, params, scaled_grads=scaled_grads)


@jax.jit
def step_in_a_scope(params, opt_state, scaler, batch):
    """In place of `using (context)`: the loss is scaled inside `value_and_grad`, and nothing scaled leaves it."""
    loss, grads = scaler.value_and_grad(loss_fn)(params, *batch)
    return loss, scaler.step(OPTIMIZER, opt_state, params, grads=grads)


def manual_control(params, opt_state, scaler, batch):
    grads = scaler.unscale(jax.grad(lambda params: scaler.scale(loss_fn(params, *batch)))(params))
    overflow = scaler.check_overflow(grads)
    if not overflow:
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return params, scaler.update(overflow=overflow)  # on an overflow too: that is what lowers the scale


@jax.jit
def own_step(params, scaler, batch):
    """`optimizer_step=False` only checks and updates the scale. `unscale` gives the gradients for your own step."""
    grads = scaler.unscale(jax.grad(lambda params: scaler.scale(loss_fn(params, *batch)))(params))
    _, _, scaler, finite = scaler.step(OPTIMIZER, None, params, grads=grads, optimizer_step=False)
    return jax.tree.map(lambda p, g: jnp.where(finite, p - 0.1 * g, p), params, grads), scaler


def main():
    params = {"w": jnp.zeros((4, 1))}
    opt_state, scaler = OPTIMIZER.init(params), jamp.GradScaler()  # dynamic by default
    for batch in BATCHES:
        params, opt_state, scaler, stepped = train_step(params, opt_state, scaler, batch)
    print(f"Basic usage. Scale: {scaler.get_scale()}. {scaler.get_stats()}")
    assert (int(scaler.stats.overflow_steps), float(scaler.get_scale())) == (1, 2.0**15)

    loss, (_, _, _, stepped) = step_in_a_scope(params, opt_state, scaler, BATCHES[1])
    if not stepped:
        print(f"Skipped step due to overflow, loss {loss}")
    assert not stepped

    for batch in BATCHES[:2]:
        (manual, after), (own, same) = manual_control(params, opt_state, scaler, batch), own_step(params, scaler, batch)
        assert jnp.allclose(manual["w"], own["w"], atol=1e-6)
        assert after.get_scale() == same.get_scale()

    config = jamp.DynamicLossScale(init_scale=32768.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=3000)
    assert jamp.GradScaler.from_config(config).loss_scale == config  # or a mapping with these names
    assert (jamp.GradScaler.for_fp16().get_scale(), jamp.GradScaler.for_bf16().get_scale()) == (65536.0, 1.0)
    off = jamp.GradScaler.static(1024.0, enabled=False)
    print(f"Disabled: scale {off.get_scale()}; enabled: {off.enable().get_scale()}")
    assert (float(off.scale(3.0)), float(off.enable().get_scale())) == (3.0, 1024.0)


if __name__ == "__main__":
    main()
