"""check_health: when it speaks, what it says, and to whom."""

import warnings

import jax.numpy as jnp
import optax
import pytest

import jamp
from jamp import DynamicLossScale, LossScaleError, StaticLossScale

CONFIG = DynamicLossScale(8.0, min_scale=2.0)


def skipped(steps, loss_scale=8.0):
    """An optimizer state whose last `steps` steps were skipped."""
    state = jamp.loss_scaled(optax.sgd(0.1), CONFIG).init(jnp.ones(2))
    stats = state.stats._replace(consecutive_overflows=jnp.int32(steps), overflow_steps=jnp.int32(steps))
    return jamp.set_loss_scale(state._replace(stats=stats), loss_scale)


def test_a_healthy_state_says_nothing():
    for config in (None, CONFIG, StaticLossScale(8.0), jamp.NoOpLossScale()):
        assert jamp.check_health(skipped(0), loss_scale=config) is None
        assert jamp.check_health({"opt": skipped(50)}, loss_scale=config) is None


def test_more_than_max_consecutive_overflows_raise_and_the_message_names_the_cause_and_the_cure():
    with pytest.raises(LossScaleError, match=r"^51 steps in a row were skipped \(the limit is 50\)") as error:
        jamp.check_health(skipped(51))
    assert isinstance(error.value, FloatingPointError)
    assert "the loss scale is 8" in str(error.value)
    assert "look for nan" in str(error.value)
    assert "floor" not in str(error.value)


def test_the_limit_is_the_callers():
    jamp.check_health(skipped(3), max_consecutive_overflows=3)
    with pytest.raises(LossScaleError, match=r"^4 steps in a row were skipped \(the limit is 3\)"):
        jamp.check_health(skipped(4), max_consecutive_overflows=3)
    with pytest.raises(LossScaleError, match=r"^1 steps in a row"):
        jamp.check_health(skipped(1), max_consecutive_overflows=0)


def test_real_steps_are_counted():
    tx = jamp.loss_scaled(optax.sgd(0.1), CONFIG)
    state = tx.init(jnp.ones(2))
    bad, good = jnp.array([1.0, jnp.nan]), jnp.ones(2)
    for grads in (bad, good, bad, bad):
        state = tx.update(grads, state)[1]
    jamp.check_health(state, max_consecutive_overflows=2)
    with pytest.raises(LossScaleError, match="2 steps in a row"):
        jamp.check_health(state, max_consecutive_overflows=1)
    jamp.check_health(tx.update(good, state)[1], max_consecutive_overflows=1)


@pytest.mark.parametrize("min_scale", [2.0, 0.1, 1e-4, 1 / 3])
def test_a_skipped_step_at_the_floor_raises_and_the_message_says_to_lower_it(min_scale):
    config = DynamicLossScale(8.0, min_scale=min_scale)
    state = skipped(1, config.update(config.init()._replace(loss_scale=jnp.float32(0)), True).loss_scale)
    with pytest.raises(LossScaleError, match=f"at its floor, min_scale={min_scale:g}") as error:
        jamp.check_health(state, loss_scale=config)
    assert "lower min_scale (values below 1 are legal)" in str(error.value)
    assert "in a row" not in str(error.value)
    jamp.check_health(state)  # without the configuration nobody knows the floor


def test_lying_at_the_floor_without_a_skip_is_healthy():
    jamp.check_health(skipped(0, 2.0), loss_scale=CONFIG)
    jamp.check_health(skipped(1, 2.5), loss_scale=CONFIG)


def test_a_static_scale_has_no_floor():
    jamp.check_health(skipped(1), loss_scale=StaticLossScale(8.0))


def test_both_problems_are_told_together():
    with pytest.raises(LossScaleError, match=r"^51 steps in a row .* at its floor, min_scale=2"):
        jamp.check_health(skipped(51, 2.0), loss_scale=CONFIG)


def test_policy_warn_warns_at_the_caller():
    with pytest.warns(UserWarning, match="51 steps in a row were skipped") as record:
        jamp.check_health(skipped(51), policy="warn")
    assert [w.filename for w in record] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jamp.check_health(skipped(0), policy="warn")


def test_policy_may_be_a_function_that_is_called_once_with_the_message():
    messages = []
    jamp.check_health(skipped(51, 2.0), loss_scale=CONFIG, policy=messages.append)
    jamp.check_health(skipped(0), policy=messages.append)
    assert len(messages) == 1
    assert messages[0].startswith("51 steps in a row were skipped")


@pytest.mark.parametrize("policy", ["ignore", None, 3, ""])
def test_an_unknown_policy_is_an_error_also_while_all_is_well(policy):
    with pytest.raises(ValueError, match="policy must be 'raise', 'warn' or a function") as error:
        jamp.check_health(skipped(0), policy=policy)
    assert f"got policy={policy!r}" in str(error.value)


@pytest.mark.parametrize("tree", [CONFIG.init(), optax.sgd(0.1).init(jnp.ones(2)), [skipped(0), skipped(0)]])
def test_a_tree_without_exactly_one_loss_scaled_state_is_an_error(tree):
    with pytest.raises(ValueError, match="loss-scaled optimizer state"):
        jamp.check_health(tree)
