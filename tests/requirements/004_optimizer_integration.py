"""Optimizers with mixed precision: wrapped ones, steps that tell whether they were applied, bfloat16 parameters.

    python tests/requirements/004_optimizer_integration.py

The usage examples of `AmpOptimizerHelper`, `AmpOptimizerWrapper` and `AmpOptimizerExtensions`, translated.
"""

import jax
import jax.numpy as jnp
import optax

import jamp

LOSS_SCALE = jamp.DynamicLossScale()
PARAMS = {"w": jnp.full((4, 1), 0.5), "b": jnp.zeros(1)}
x = jax.random.normal(jax.random.key(0), (3, 8, 4)).at[1, 0, 0].set(jnp.inf)  # The second batch overflows.
BATCHES = list(zip(x, x.sum(axis=2, keepdims=True), strict=True))


@jax.jit
def loss_fn(params, x, y):
    return jnp.mean((x @ params["w"].astype(x.dtype) + params["b"].astype(x.dtype) - y) ** 2)


def train(tx, params, opt_state):
    """The basic loop, with any wrapped optimizer."""

    @jax.jit
    def train_step(params, opt_state, batch):
        grads = jamp.grad(loss_fn, opt_state)(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates), opt_state

    applied = []
    for batch in BATCHES:
        params, opt_state = train_step(params, opt_state, batch)
        applied.append(bool(jamp.get_grads_finite(opt_state)))  # what Step returns
    assert applied == [True, False, True]
    return params, opt_state


def main():
    wrapped = {
        "WrapOptimizer": jamp.loss_scaled(jamp.optimizers.adam(1e-3), LOSS_SCALE),
        "CreateSgd": jamp.loss_scaled(jamp.optimizers.sgd(1e-3, momentum=0.9), LOSS_SCALE),
        "CreateAdam": jamp.loss_scaled(jamp.optimizers.adam(1e-3), LOSS_SCALE),
        "CreateAdamW": jamp.loss_scaled(jamp.optimizers.adamw(1e-3, weight_decay=0.01), LOSS_SCALE),
        "CreateRmsprop": jamp.loss_scaled(jamp.optimizers.rmsprop(1e-3, alpha=0.99), LOSS_SCALE),
    }
    for name, tx in wrapped.items():
        params, opt_state = train(tx, PARAMS, tx.init(PARAMS))
        print(f"{name}: loss {loss_fn(PARAMS, *BATCHES[0]):.4f} -> {loss_fn(params, *BATCHES[0]):.4f}")
        assert loss_fn(params, *BATCHES[0]) < loss_fn(PARAMS, *BATCHES[0])
    opt_state = jamp.optimizers.set_learning_rate(opt_state, 5e-4)
    assert jamp.optimizers.get_learning_rate(opt_state) == jnp.float32(5e-4)

    optimizer, scaler = jamp.optimizers.adam(1e-3), jamp.GradScaler()  # a plain optimizer and a scaler
    params, state = PARAMS, optimizer.init(PARAMS)

    @jax.jit
    def step_amp(params, state, scaler, batch):
        loss, grads = scaler.value_and_grad(loss_fn)(params, *batch)
        return loss, scaler.step(optimizer, state, params, grads=grads)

    for batch in BATCHES:
        loss, (params, state, scaler, stepped) = step_amp(params, state, scaler, batch)
        print(f"StepAmp: loss {loss:.4f}, {'applied' if stepped else 'skipped'}")
    assert scaler.stats.overflow_steps == 1

    # ConvertParametersDtype, with float32 masters in the optimizer state
    tx = jamp.loss_scaled(jamp.master_params(jamp.optimizers.adam(1e-3)), LOSS_SCALE)
    assert jamp.check_castable(PARAMS, jnp.bfloat16) == [], "All parameters are compatible."
    half, opt_state = train(tx, jamp.cast_floating(PARAMS, jnp.bfloat16), tx.init(PARAMS))
    print(f"Parameters: {half['w'].dtype}, masters: {optax.tree.get(opt_state, 'master_params')['w'].dtype}")
    assert {p.dtype for p in jax.tree.leaves(half)} == {jnp.dtype(jnp.bfloat16)}


if __name__ == "__main__":
    main()
