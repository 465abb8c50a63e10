"""check_health: when it speaks, what it says, and to whom."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import jamp
from jamp import DynamicLossScale, LossScaleError, StaticLossScale
from jamp.history import History

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


def problems(tree, **kwargs):
    """Everything that is said, as one string."""
    messages = []
    jamp.check_health(tree, policy=messages.append, **kwargs)
    return " ".join(messages)


def train(tx, steps, history=None, params=jnp.ones(2)):
    state = tx.init(params)
    for grads in steps:
        state = tx.update(grads, state, params)[1]
        if history is not None:
            history.append(state)
    return state


GOOD, BAD, ZERO = jnp.ones(2), jnp.array([1.0, jnp.nan]), jnp.zeros(2)


def test_a_scale_that_has_come_to_its_ceiling_is_told_and_one_that_began_there_is_not():
    config = DynamicLossScale(8.0, max_scale=16.0, growth_interval=1)
    state = train(jamp.loss_scaled(optax.sgd(0.1), config), [GOOD])
    with pytest.raises(LossScaleError, match=r"come to its ceiling, max_scale=16: .* Raise max_scale"):
        jamp.check_health(state, loss_scale=config)
    assert not problems(state)
    fixed = DynamicLossScale(16.0, max_scale=16.0)
    assert not problems(train(jamp.loss_scaled(optax.sgd(0.1), fixed), [GOOD]), loss_scale=fixed)


@pytest.mark.parametrize("before", [optax.ema(0.9), optax.trace(0.9), optax.scale_by_adam()])
def test_a_chain_poisoned_by_a_stateful_transform_before_the_wrapper_is_told(before):
    chain = optax.chain(before, jamp.loss_scaled(optax.sgd(0.1)))
    assert not problems(train(chain, [GOOD, GOOD]))
    state = train(chain, [jnp.array([1.0, jnp.inf]), GOOD])
    assert "inf or nan. If it is the state of a transform before the wrapper" in problems(state)
    assert "wrap the whole chain" in problems({"params": GOOD, "opt": state})
    whole = jamp.loss_scaled(optax.chain(before, optax.sgd(0.1)))
    assert not problems(train(whole, [BAD, GOOD]))


def test_nan_parameters_are_told_and_a_mask_or_a_best_value_of_inf_is_not():
    state = skipped(0)
    assert problems({"params": {"w": BAD}, "opt": state}).startswith("['params']['w'] holds inf or nan")
    assert not problems({"mask": -jnp.inf * GOOD, "opt": state})
    assert not problems((optax.contrib.reduce_on_plateau().init(GOOD), state))


@pytest.mark.parametrize("tx", [optax.adam(0.1), optax.chain(optax.clip(1.0), optax.sgd(0.1, 0.9))])
def test_gradients_that_are_all_zero_are_told_by_the_moments(tx):
    params = {"w": GOOD, "b": GOOD}
    steps = lambda *grads: [{"w": ZERO, "b": g} for g in grads]
    tx = jamp.mixed_precision(tx)
    zeros = problems(train(tx, steps(ZERO, ZERO), params=params))
    assert "the moments of the optimizer are all zero after 2 steps" in zeros
    assert not problems(train(tx, steps(ZERO, GOOD), params=params))
    assert not problems(tx.init(params))


def test_with_a_history_an_oscillating_scale_and_zero_gradients_are_told():
    wild = jamp.loss_scaled(optax.sgd(0.1), DynamicLossScale(growth_interval=2))
    history = History()
    state = train(wild, [GOOD, GOOD, BAD] * 5, history)
    text = problems(state, history=history)
    assert "The loss scale oscillates between 65536 and 131072: in the last 15 steps it rose 5 times and fell" in text
    assert "raise growth_interval" in text
    calm = History()
    assert not problems(train(wild, [GOOD] * 30, calm), history=calm)
    assert not problems(state, history=History())
    norms = History()
    for norm in (0.0, 0.0):
        norms.append(state, grad_norm=norm)
    assert "grad_norm is 0 in the last 2 steps" in problems(state, history=norms)


def test_inside_jit_the_two_lines_of_the_docstring_work_and_the_plain_call_names_them():
    messages = []

    @jax.jit
    def step(state):
        check = lambda s: jamp.check_health(s, max_consecutive_overflows=1, policy=messages.append)
        jax.debug.callback(check, state._replace(inner_state=()))
        return jamp.get_loss_scale(state)

    step(skipped(2))
    step(skipped(1))
    jax.effects_barrier()
    assert len(messages) == 1
    with pytest.raises(TypeError, match=r"Inside `jit`: jax\.debug\.callback"):
        jax.jit(jamp.check_health)(skipped(0))
