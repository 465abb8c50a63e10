"""docs/own-loops.md: each mistake of a loop written by hand, beside the same loop with jamp."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trees import assert_equal, bits

import jamp

PARAMS = {"w": jnp.float32([0.5, -1.0, 2.0])}
X = np.float32([[1, 2, 3], [3, 1, 2]])
BAD = X * np.float32(np.inf)
SCHEDULE = optax.linear_schedule(0.1, 0.0, 4)
INNER = optax.sgd(SCHEDULE, momentum=0.9)
CONFIG = jamp.DynamicLossScale()


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def choose(finite, new, old):
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)


def jamps_step(params, opt_state, x, tx=jamp.loss_scaled(INNER, CONFIG, unscale=True)):
    def scaled(params):
        loss = loss_fn(params, x)
        return jamp.scale_loss(loss, opt_state), loss

    grads, loss = jax.grad(scaled, has_aux=True)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


START = PARAMS, jamp.loss_scaled(INNER, CONFIG, unscale=True).init(PARAMS)


def test_a_schedule_and_moments_that_advance_on_a_skipped_step():
    def by_hand(params, opt_state, x):
        scale = jnp.float32(2.0**16)
        grads = jax.grad(lambda p: loss_fn(p, x) * scale)(params)
        grads = jax.tree.map(lambda g: g / scale, grads)
        finite = jamp.all_finite(grads)
        updates, opt_state = INNER.update(grads, opt_state, params)  # not selected
        return choose(finite, optax.apply_updates(params, updates), params), opt_state

    params, opt_state = jax.jit(by_hand)(PARAMS, INNER.init(PARAMS), BAD)
    assert_equal(params, PARAMS)
    assert int(optax.tree.get(opt_state, "count")) == 1
    assert not jamp.all_finite(opt_state)

    params, opt_state, _ = jax.jit(jamps_step)(*START, BAD)
    assert_equal(params, PARAMS)
    assert int(optax.tree.get(opt_state.inner_state, "count")) == 0
    assert bits(opt_state.inner_state) == bits(START[1].inner_state)


def test_statistics_outside_the_optimizer():
    def step(params, mean, opt_state, x):
        new_mean = 0.9 * mean + 0.1 * x.mean(axis=0)
        params, opt_state, _ = jamps_step(params, opt_state, x)
        return new_mean, choose(jamp.get_grads_finite(opt_state), new_mean, mean)

    wrong, right = jax.jit(step)(PARAMS, jnp.ones(3), START[1], BAD)
    assert not jamp.all_finite(wrong)
    assert_equal(right, jnp.ones(3))
    wrong, right = jax.jit(step)(PARAMS, jnp.ones(3), START[1], X)
    assert_equal(right, wrong)


def test_a_scaled_loss_in_the_log():
    scaled = jax.value_and_grad(lambda p: jamp.scale_loss(loss_fn(p, X), START[1]))(PARAMS)[0]
    assert scaled == loss_fn(PARAMS, X) * 2.0**16
    assert jamps_step(*START, X)[2] == loss_fn(PARAMS, X)
    state = jamp.loss_scaled(INNER, CONFIG).init(PARAMS)
    assert jamp.value_and_grad(loss_fn, state)(PARAMS, X)[0] == loss_fn(PARAMS, X)


def test_casts_before_unscaling_make_small_gradients_0():
    true = 1e-9  # below half of the smallest float16
    scaled = {"w": jnp.full(3, true * 2.0**16, jnp.float16)}
    by_hand = jax.tree.map(lambda g: g / jnp.float16(2.0**15), scaled)
    assert not jnp.any(by_hand["w"])
    for dtype in (jnp.float16, jnp.float32):
        grads, finite = jamp.unscale_and_check(jamp.cast_floating(scaled, dtype), CONFIG.init())
        assert finite
        assert grads["w"].dtype == jnp.float32
        np.testing.assert_allclose(grads["w"], true, rtol=1e-3)
    tx = jamp.loss_scaled(optax.sgd(1.0), CONFIG, unscale=True)
    updates, _ = tx.update(scaled, tx.init(PARAMS), PARAMS)
    np.testing.assert_allclose(updates["w"], -true, rtol=1e-3)


def test_a_decision_on_the_host_is_an_error_under_jit_and_jamps_is_made_on_the_device():
    def by_hand(params, x):
        grads = jax.grad(loss_fn)(params, x)
        return optax.apply_updates(params, grads) if bool(jamp.all_finite(grads)) else params

    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(by_hand)(PARAMS, X)

    def body(carry, x):
        *carry, loss = jamps_step(*carry, x)
        return tuple(carry), loss

    (_, opt_state), _ = jax.jit(lambda carry, xs: jax.lax.scan(body, carry, xs))(START, np.stack([X, BAD, X]))
    stats = jamp.get_stats(opt_state)
    assert (int(stats.finite_steps), int(stats.overflow_steps)) == (2, 1)


def test_a_scale_in_a_closure_never_changes_and_one_in_the_state_is_saved():
    scale = 2.0**16

    @jax.jit
    def by_hand(x):
        return scale * x

    by_hand(1.0)
    scale = 8.0
    assert by_hand(1.0) == 2.0**16

    step, carry = jax.jit(jamps_step), START
    for x in (X, BAD, BAD):
        *carry, _ = step(*carry, x)
    assert jamp.get_loss_scale(carry[1]) == 2.0**14
    saved = jax.device_get(jax.tree.leaves(carry))  # what a checkpoint of parameters and optimizer state holds
    restored = jax.tree.unflatten(jax.tree.structure(list(START)), saved)
    assert jamp.get_loss_scale(restored[1]) == 2.0**14
    assert_equal(step(*restored, X), step(*carry, X))


def test_a_float16_loss_is_multiplied_by_inf():
    half = lambda params: loss_fn(params, X).astype(jnp.float16)
    scale = CONFIG.init().loss_scale
    for dtype in (jnp.float16, jnp.float32):  # of the loss that is multiplied
        grads = jax.grad(lambda p, dtype=dtype: half(p).astype(dtype) * scale.astype(dtype))(PARAMS)
        assert not jamp.all_finite(grads)
    with pytest.warns(UserWarning, match="loss is float16"):
        scaled = jamp.scale_loss(half(PARAMS), CONFIG.init())
    assert scaled.dtype == jnp.float32
    assert jnp.isfinite(scaled)

    def computed_in_float16(params):
        return jamp.autocast(loss_fn, jnp.float16)(params, X)

    assert computed_in_float16(PARAMS).dtype == jnp.float32
    grads = jax.grad(lambda p: jamp.scale_loss(computed_in_float16(p), CONFIG.init()))(PARAMS)
    grads, finite = jamp.unscale_and_check(grads, CONFIG.init())
    assert finite
    np.testing.assert_allclose(grads["w"], jax.grad(loss_fn)(PARAMS, X)["w"], rtol=2e-3)
