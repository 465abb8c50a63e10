"""`torch.cuda.amp.GradScaler`: why the loss is scaled, the loop in torch's order, and the rule of the scale.

    python tests/requirements/003_torch_grad_scaler.py

examples/from_pytorch.py is the same training loop, translated line by line and shorter.
"""

from functools import partial

import jax
import jax.numpy as jnp

import jamp

OPTIMIZER = jamp.optimizers.sgd(1e-3)


@partial(jamp.autocast, compute_dtype=jnp.float16)  # with autocast(device_type="cuda", dtype=torch.float16):
def loss_fn(params, x, y):
    return jnp.mean((x @ params["weight"] + params["bias"] - y) ** 2)


@jax.jit
def train_step(params, opt_state, scaler, x, y):
    scaled_grads = jax.grad(lambda params: scaler.scale(loss_fn(params, x, y)))(params)  # scaler.scale(loss).backward()
    params, opt_state, scaler, stepped = scaler.step(  # scaler.step(optimizer)
        OPTIMIZER, opt_state, params, scaled_grads=scaled_grads, update_scale=False
    )
    return params, opt_state, scaler.update(grads_finite=stepped)  # scaler.update()


def underflow():
    """A gradient of 1e-9 is 0 in float16. Scaled by S = 65536 it is not, and dividing by S restores it."""
    scaler = jamp.GradScaler(init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000)
    loss = lambda w: 1e-9 * w.astype(jnp.float16).astype(jnp.float32)  # its gradient passes through float16
    lost, scaled = jax.grad(loss)(1.0), jax.grad(lambda w: scaler.scale(loss(w)))(1.0)
    print(f"Gradient {lost}, scaled {scaled:.3g}, unscaled {scaler.unscale(scaled):.3g}")
    assert lost == 0
    assert jnp.allclose(scaler.unscale(scaled), 1e-9, rtol=1e-2)


def rule():
    """An overflow multiplies the scale by the backoff factor, and the growth interval by the growth factor."""
    scaler, scales = jamp.GradScaler(growth_interval=3), []
    for overflow in (True, False, False, True, False, False, False):
        scaler = scaler.update(overflow=overflow)
        scales.append(float(scaler.get_scale()))
    print(f"Scales: {scales}")
    assert scales == [2.0**15] * 3 + [2.0**14] * 3 + [2.0**15], "The second overflow restarts the count."
    off = jamp.GradScaler(enabled=False)
    assert off.update(overflow=True) is off, "Disabled, all methods do nothing."


def main(num_epochs=3):
    underflow()
    rule()
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"weight": 0.3 * jax.random.normal(keys[0], (10, 1)), "bias": jnp.zeros(1)}
    opt_state, scaler = OPTIMIZER.init(params), jamp.GradScaler()
    x, y = jax.random.normal(keys[1], (10, 8, 10)), jax.random.normal(keys[2], (10, 8, 1))
    before = loss_fn(params, x, y)
    for _ in range(num_epochs):
        for batch in zip(x, y, strict=True):
            params, opt_state, scaler = train_step(params, opt_state, scaler, *batch)
    print(f"Loss {before:.3f} -> {loss_fn(params, x, y):.3f}. {scaler.get_stats()}")
    assert loss_fn(params, x, y) < before
    assert scaler.stats.finite_steps > 20 > scaler.stats.overflow_steps


if __name__ == "__main__":
    main()
