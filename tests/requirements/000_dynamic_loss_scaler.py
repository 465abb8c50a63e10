"""A dynamic loss scale: scale the loss, check and unscale the gradients, step or skip, adapt, and count.

    python tests/requirements/000_dynamic_loss_scaler.py

The usage example of `DynamicLossScaler`, translated twice: with each operation written out, and with
`jamp.loss_scaled`, which does the same inside the optimizer. The products run in float16. One batch overflows there.
"""

import jax
import jax.numpy as jnp
import optax

import jamp

LOSS_SCALE = jamp.DynamicLossScale(init_scale=1024.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=4)
OPTIMIZER = jamp.optimizers.sgd(0.1)
PARAMS = {"w": jnp.zeros((4, 1))}
x = jax.random.normal(jax.random.key(0), (10, 8, 4)).at[5].multiply(1e5)  # larger than the largest float16
BATCHES = list(zip(x, x.sum(axis=2, keepdims=True).clip(-4, 4), strict=True))


def loss_fn(params, x, y):
    predictions = x.astype(jnp.float16) @ params["w"].astype(jnp.float16)
    return jnp.mean((predictions.astype(jnp.float32) - y) ** 2)


@jax.jit
def gradients(params, state, batch):
    scaled_grads = jax.grad(lambda params: jamp.scale_loss(loss_fn(params, *batch), state))(params)  # ScaleLoss
    return jamp.unscale_and_check(scaled_grads, state)  # UnscaleGradients, CheckOverflow


def written_out():
    params, opt_state, state = PARAMS, OPTIMIZER.init(PARAMS), LOSS_SCALE.init()
    stats = jamp.LossScaleStats.init(state.loss_scale)
    for iteration, batch in enumerate(BATCHES):
        # The original updates before it unscales, so after a growth its gradients are too small.
        grads, grads_finite = gradients(params, state, batch)
        old_scale, state = state.loss_scale, LOSS_SCALE.update(state, grads_finite)  # UpdateScale
        stats = stats.update(grads_finite, old_scale, state.loss_scale)
        if not grads_finite:
            print(f"Overflow detected, skipping step (scale: {state.loss_scale})")
            continue
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        if iteration % 4 == 0:
            print(f"Scale: {state.loss_scale}, Overflows: {stats.overflow_steps}")
    return params, state


def main():
    params, state = written_out()

    tx = jamp.loss_scaled(OPTIMIZER, LOSS_SCALE)
    wrapped, opt_state = PARAMS, tx.init(PARAMS)
    for batch in BATCHES:
        grads = jamp.grad(loss_fn, opt_state)(wrapped, *batch)
        updates, opt_state = tx.update(grads, opt_state, wrapped)
        wrapped = optax.apply_updates(wrapped, updates)
    # GetStats, CurrentScale and ToString
    print(f"Scale: {jamp.get_loss_scale(opt_state)}. {jamp.get_stats(opt_state)}")

    assert jnp.allclose(wrapped["w"], params["w"], atol=1e-6), "Both ways give the same parameters."
    assert jamp.get_loss_scale(opt_state) == state.loss_scale == 2048.0, "Two growths and a backoff."
    assert jamp.get_stats(opt_state).overflow_steps == 1
    fresh = jamp.reset(opt_state, LOSS_SCALE)  # Reset
    assert (jamp.get_loss_scale(fresh), jamp.get_stats(fresh).overflow_steps) == (1024.0, 0)


if __name__ == "__main__":
    main()
