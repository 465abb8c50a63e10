"""The loss-scaling bugs of other systems: jamp has none of them. Growth, floor and ceiling: test_loss_scale.py."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from contract import BATCHES, loss_fn, params, run, wrapper
from processes import run_python
from trees import assert_close, assert_equal

import jamp

X = BATCHES["good"]
CARRY, _step, kept = wrapper(jamp.loss_scaled)
STEP = jax.jit(_step)


FIRST_STEPS = """
import sys, jax
sys.path.append(sys.argv[1])
from contract import ADAPTERS, run
carry, step, _ = ADAPTERS[sys.argv[2]].make()
step = jax.jit(step)
run(step, carry, "good", "good", "good")
print(step._cache_size())
"""


@pytest.mark.slow
@pytest.mark.parametrize("which", ["loss_scaled", pytest.param("GradScaler", marks=pytest.mark.slow)])
def test_a_train_step_compiles_once(which):
    """Once too at the first step of a process, where an import inside the trace may change JAX's configuration."""
    assert run_python("-c", FIRST_STEPS, Path(__file__).parent, which) == "1\n"


def test_jmp_and_keras_an_inf_scale_recovers():
    for max_scale in (2.0**24, math.inf):
        start, step, _ = wrapper(jamp.loss_scaled, jamp.DynamicLossScale(max_scale=max_scale))
        step = jax.jit(step)
        for lost in (math.inf, math.nan, 0.0):
            first, *_, last = run(step, jamp.set_loss_scale(start, lost), *["good"] * 20)
            assert_equal(first[0], start[0])  # Such a scale gives no gradient.
            assert 1.0 <= jamp.get_loss_scale(first) <= 2.0**24
            assert jamp.get_grads_finite(last)
            assert not jnp.array_equal(last[0]["w"], start[0]["w"])


def test_jaxamp_a_nan_batch_costs_one_forward_and_backward_pass():
    calls, tx = [], jamp.loss_scaled(optax.sgd(0.1))

    @jax.jit
    def step(state, x):
        counted = lambda p: (jax.debug.callback(lambda: calls.append(1)), loss_fn(p, x))[1]
        return tx.update(jamp.grad(counted, state)(params()), state)[1]

    jax.block_until_ready(run(step, tx.init(params()), "good", "nan", "good"))
    jax.effects_barrier()
    assert len(calls) == 3


def test_keras_flax_and_torch_200_nan_steps_then_a_good_step():
    """There the scale reaches 0 and the weights NaN, or 1e-38, and float16 gradients are 0 and called finite."""
    after = run(STEP, CARRY, *["nan"] * 200)[-1]
    assert_equal(kept(after), kept(CARRY))
    assert jamp.get_loss_scale(after) == 1.0
    half = jamp.grad(lambda w: jnp.sum(w.astype(jnp.float32) ** 2), after)(jnp.float16([1.0, 2.0]))
    assert_equal(half, jnp.float32([2.0, 4.0]))
    assert_close(*(kept(run(STEP, carry, "good", "good")[-1]) for carry in (after, CARRY)))


def test_torch_a_finite_scaled_gradient_that_is_infinite_unscaled_is_not_applied():
    """With scale 2**-140 torch's check passes and the params become -inf."""
    tx, w = jamp.loss_scaled(optax.sgd(0.1), jamp.DynamicLossScale(2.0**-100, min_scale=2.0**-120)), jnp.ones(2)
    state = tx.init(w)
    grads, finite = jamp.unscale_and_check(jnp.full(2, 2.0**40), state)
    assert not finite
    updates, state = tx.update(grads, state)
    assert_equal(optax.apply_updates(w, updates), w)
    assert jamp.get_loss_scale(state) == 2.0**-101
    subnormal = jamp.set_loss_scale(state, 2.0**-140)
    assert not jamp.unscale_and_check(w, subnormal)[1]
    updates, state = tx.update(jamp.grad(jnp.sum, subnormal)(w), subnormal)
    assert_equal(optax.apply_updates(w, updates), w)
    assert 2.0**-120 <= jamp.get_loss_scale(state) <= 2.0**-100


@pytest.mark.promotes("optax.apply_updates")
@pytest.mark.filterwarnings("ignore:float16 parameters without a master copy")
def test_tensorflow_scales_below_1_are_legal():
    """tensorflow#38357: gradients that overflow at scale 1 are finite at 2**-4."""
    tx, w = jamp.loss_scaled(optax.sgd(1e-6), jamp.DynamicLossScale(1.0, min_scale=2.0**-10)), jnp.ones(3, jnp.float16)
    state = tx.init(w)
    for _ in range(6):
        grads = jamp.grad(lambda w: jnp.sum(w.astype(jnp.float32) * 1e6), state)(w)  # a float16 cotangent overflows
        updates, state = tx.update(grads, state)
        w = optax.apply_updates(w, updates)
    assert (jamp.get_loss_scale(state), jamp.get_stats(state).finite_steps) == (2.0**-4, 2)
    assert jnp.isfinite(w).all()


def test_apply_if_finite_applies_the_nan_after_its_limit_but_jamp_never():
    for tx, applied in ((optax.apply_if_finite(optax.sgd(0.1), 3), True), (jamp.loss_scaled(optax.sgd(0.1)), False)):
        update, state, nan = jax.jit(tx.update), tx.init(params()), jax.tree.map(lambda p: p * jnp.nan, params())
        for _ in range(10):
            updates, state = update(nan, state, params())
        assert jnp.isnan(updates["w"]).all() == applied
    assert_equal(optax.apply_updates(params(), updates), params())


@pytest.mark.promotes("optax.adam")
@pytest.mark.filterwarnings("ignore:float16 parameters without a master copy")
def test_adam_on_a_float16_zero_gradient_is_not_nan():
    """optax#1754, #1784: in float16 eps is 0, so 0 / (sqrt(0) + eps) is NaN."""
    w, tx = jnp.ones(3, jnp.float16), jamp.loss_scaled(optax.adam(1e-2))
    updates, state = jax.jit(tx.update)(jnp.zeros(3, jnp.float16), tx.init(w), w)
    assert (updates.tolist(), bool(jamp.get_grads_finite(state))) == ([0.0] * 3, True)


def test_a_key_in_the_state_is_kept_by_a_skip_and_jax_sees_no_reuse():
    def add_noise(grads, key, params=None):
        key, used = jax.random.split(key)
        return grads + jax.random.normal(used, grads.shape), key

    with jax.debug_key_reuse(True):
        tx = jamp.loss_scaled(optax.GradientTransformation(lambda _: jax.random.key(0), add_noise))
        update = jax.jit(tx.update)
        state = [tx.init(X)]
        for factor in (1, jnp.nan, 1):
            state.append(update(factor * X, state[-1])[1])
    _, first, skipped, third = ([*jax.random.key_data(x.inner_state)] for x in state)
    assert first == skipped != third


def test_was_the_step_skipped_is_answered_without_a_device_sync():
    @jax.jit
    def log(x):
        """Runs on device: nothing is converted to a Python bool."""
        after = STEP(CARRY, x)
        return jnp.where(jamp.get_grads_finite(after), 0, 1), jamp.metrics(after)["consecutive_overflows"]

    assert [[int(n) for n in log(BATCHES[name])] for name in ("good", "nan")] == [[0, 0], [1, 1]]


def test_apex_several_losses_each_under_its_own_scaler():
    """Two losses of one model. One that overflows backs off alone, and the step is skipped."""
    tx, scalers = optax.sgd(0.1), [jamp.GradScaler(init_scale=2.0**4, growth_interval=1)] * 2

    @jax.jit
    def step(scalers, p, x, y):
        grads = [s.value_and_grad(loss_fn)(p, x)[1] for s, x in zip(scalers, (x, y), strict=True)]
        scalers = [s.update(overflow=s.check_overflow(g)) for s, g in zip(scalers, grads, strict=True)]
        total = jax.tree.map(jnp.add, *grads)  # An inf in one is an inf in the sum.
        result = scalers[0].step(tx, tx.init(p), p, grads=total, update_scale=False)
        return result.params, [s.get_scale() for s in scalers]

    p = params()
    assert_equal(step(scalers, p, X, BATCHES["nan"]), (p, [jnp.float32(2.0**5), jnp.float32(2.0**3)]))
    both = jax.grad(lambda p: loss_fn(p, X) + loss_fn(p, 2 * X))(p)
    assert_close(step(scalers, p, X, 2 * X)[0], jax.tree.map(lambda p, g: p - 0.1 * g, p, both))
