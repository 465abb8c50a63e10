"""check_health: when it speaks, what it says, and to whom."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from steps import OVERWRITTEN

import jamp
from jamp import DynamicLossScale, LossScaleError, StaticLossScale
from jamp.history import History

CONFIG = DynamicLossScale(8.0, min_scale=2.0)
GOOD, BAD, ZERO = jnp.ones(2), jnp.array([1.0, jnp.nan]), jnp.zeros(2)
SGD, TRACE = optax.sgd(0.1), optax.trace(0.9)


def skipped(steps, loss_scale=8.0):
    """An optimizer state whose last `steps` steps were skipped."""
    state = jamp.loss_scaled(SGD, CONFIG).init(GOOD)
    stats = state.stats._replace(consecutive_overflows=jnp.int32(steps), overflow_steps=jnp.int32(steps))
    return jamp.set_loss_scale(state._replace(stats=stats), loss_scale)


def problems(tree, **kwargs):
    """Everything that is said, as one string."""
    messages = []
    jamp.check_health(tree, policy=messages.append, **kwargs)
    assert len(messages) <= 1
    return "".join(messages)


def train(tx, steps, history=None, params=GOOD):
    state = tx.init(params)
    for grads in steps:
        state = tx.update(grads, state, params)[1]
        if history is not None:
            history.append(state)
    return state


def test_more_than_max_consecutive_overflows_raise_an_error_that_names_the_cure():
    with pytest.raises(LossScaleError, match=r"^51 steps in a row") as error:
        jamp.check_health(skipped(51))
    assert isinstance(error.value, FloatingPointError)
    assert [x in str(error.value) for x in ("a loss scale of 8", "floor")] == [True, False]
    for config in (None, CONFIG, StaticLossScale(8.0), jamp.NoOpLossScale()):
        assert jamp.check_health(skipped(0), loss_scale=config) is None
        assert not problems({"opt": skipped(50)}, loss_scale=config)
    for limit in (0, 3):
        assert not problems(skipped(limit), max_consecutive_overflows=limit)
        text = problems(skipped(limit + 1), max_consecutive_overflows=limit)
        assert text.startswith(f"{limit + 1} steps in a row were skipped")
        assert "jamp.debug.find_nonfinite(loss_fn, grad=True)(params, batch)" in text  # no import first


def test_a_skip_at_the_floor_is_told_and_a_ceiling_that_was_reached_during_the_run():
    for min_scale in (2.0, 0.1, 1e-4, 1 / 3):
        state = skipped(1, np.float32(min_scale))
        text = problems(state, loss_scale=DynamicLossScale(8.0, min_scale=min_scale))
        assert re.search(rf"^((?!in a row).)*at its floor, min_scale={min_scale:g}\. .*lower min_scale", text)
        assert not problems(state)  # without the configuration nobody knows the floor
    assert re.match("51 steps in a row .* at its floor, min_scale=2", problems(skipped(51, 2.0), loss_scale=CONFIG))
    # A floor without a skip or a skip without a floor is healthy.
    for state, config in ((skipped(0, 2.0), CONFIG), (skipped(1, 2.5), CONFIG), (skipped(1), StaticLossScale(8.0))):
        assert not problems(state, loss_scale=config)
    config, fixed = DynamicLossScale(8.0, max_scale=16.0, growth_interval=1), DynamicLossScale(16.0, max_scale=16.0)
    state = train(jamp.loss_scaled(SGD, config), [GOOD])
    assert re.search("ceiling, max_scale=16,.*raise max_scale", problems(state, loss_scale=config))
    assert not problems(state)
    assert not problems(train(jamp.loss_scaled(SGD, fixed), [GOOD]), loss_scale=fixed)


def test_nan_in_parameters_or_in_a_transform_before_the_wrapper_is_told():
    chain, whole = optax.chain(TRACE, jamp.loss_scaled(SGD)), jamp.loss_scaled(optax.chain(TRACE, SGD))
    poisoned, state = train(chain, [jnp.array([1.0, jnp.inf]), GOOD]), skipped(0)
    assert "wrap the whole chain" in problems(poisoned)
    assert "wrap the whole chain" in problems({"params": GOOD, "opt": poisoned})
    assert problems({"params": {"w": BAD}, "opt": state}).startswith("['params']['w'] holds inf or NaN")
    assert problems({"params": [BAD, BAD], "opt": state}).startswith("['params'][0] and 1 more hold inf or NaN")
    # A mask or a best value may be inf.
    infinite = {"mask": -jnp.inf * GOOD, "best": optax.contrib.reduce_on_plateau().init(GOOD), "opt": state}
    histories = {
        "params": [GOOD, {"_overwrite_with_gradient": BAD}, OVERWRITTEN(BAD)],
        "opt": state,
    }  # replaced each step
    for healthy in (train(chain, [GOOD]), train(whole, [BAD, GOOD]), infinite, histories):
        assert not problems(healthy)


@pytest.mark.slow
def test_of_an_ensemble_every_member_is_checked_and_the_first_sick_one_is_named():
    tx, params = jamp.loss_scaled(optax.sgd(0.1, momentum=0.9), CONFIG), jnp.ones((4, 2))
    state, update = jax.vmap(tx.init)(params), jax.vmap(tx.update)
    grads = [jnp.array([GOOD, BAD, ZERO, GOOD])] * 3
    for g in grads:
        state = update(g, state)[1]
    limit = {"max_consecutive_overflows": 2}
    told = problems({"params": params, "opt": state}, **limit, loss_scale=CONFIG)
    assert told.startswith("Member 1 of the ensemble (and 1 more): 3 steps in a row were skipped")
    assert "at its floor, min_scale=2" in told
    assert problems(state).startswith("Member 2 of the ensemble: The gradients have all been zero")
    of = lambda i: jax.tree.map(lambda x: x[i], state)
    assert [bool(problems(of(i), **limit)) for i in range(4)] == [False, True, True, False]
    assert not problems(of(jnp.array([0, 3])), **limit)
    assert problems(jax.tree.map(lambda x: x[None], state), **limit).startswith("Member 0, 1 of the ensemble (and 1")


WITH_MOMENTS = [
    jamp.optimizers.adam(0.1),
    optax.chain(optax.clip(1.0), optax.sgd(0.1, 0.9)),
    pytest.param(optax.adan(0.1), marks=pytest.mark.promotes("optax.adan")),
]


@pytest.mark.parametrize("tx", WITH_MOMENTS)
def test_gradients_that_are_all_zero_are_told_by_the_moments(tx):
    tx, params = jamp.loss_scaled(jamp.master_params(tx)), {"w": GOOD, "b": GOOD}
    for last, told in ((ZERO, True), (GOOD, False)):
        state = train(tx, [{"w": ZERO, "b": g} for g in (ZERO, last)], params=params)
        assert ("the moments of the optimizer are all zero after 2 steps" in problems(state)) == told
        assert bool(problems(state)) == told
    assert not problems(tx.init(params))


def test_with_a_history_an_oscillating_scale_and_zero_gradients_are_told():
    wild, history, calm, norms = jamp.loss_scaled(SGD, DynamicLossScale(growth_interval=2)), *(History() for _ in "abc")
    state = train(wild, [GOOD, GOOD, BAD] * 5, history)
    told = "oscillates between 65536 and 131072: in the last 15 steps it rose 5 times and fell.*growth_interval"
    assert re.search(told, problems(state, history=history))
    assert not problems(train(wild, [GOOD] * 30, calm), history=calm)
    assert not problems(state, history=History())
    for _ in range(2):
        norms.append(state, grad_norm=0.0)
    assert "grad_norm is 0 in the last 2 steps" in problems(state, history=norms)


def test_at_the_ceiling_unscale_is_told_that_the_loss_may_not_be_scaled():
    config = DynamicLossScale(8.0, max_scale=16.0, growth_interval=1)
    for unscale in (True, False):
        state = train(jamp.loss_scaled(SGD, config, unscale=unscale), [GOOD])
        assert ("jamp.scale_loss" in problems(state, loss_scale=config)) == unscale
        assert not problems(state)


def recorded(norm, steps=110, factor=2.0, **kwargs):
    """What is said of a run whose scale grows every 25 finite steps, and whose `grad_norm` is `norm(step, scale)`.

    Where that is NaN, the step is skipped.
    """
    config, history, random = DynamicLossScale(8.0, factor, growth_interval=25), History(), np.random.default_rng(0)
    tx = jamp.loss_scaled(SGD, config, **kwargs)
    state, update = tx.init(GOOD), jax.jit(lambda state, finite: tx.update(GOOD, state, grads_finite=finite)[1])
    for step in range(steps):
        grad_norm = norm(step, float(state.loss_scale_state.loss_scale)) * np.exp(random.normal(scale=0.02))
        state = update(state, not np.isnan(grad_norm))
        history.append(state, grad_norm=np.float32(grad_norm))
    return problems(state, history=history)


def test_gradients_that_grow_with_the_loss_scale_are_told_by_grad_norm():
    scaled = lambda step, scale: scale
    told = r"^grad_norm has grown with the loss scale, 3 times, .* unscale=True\.$"
    assert re.search(told, recorded(scaled, steps=100))
    assert re.search(told, recorded(scaled, factor=4.0))
    assert re.search(told, recorded(lambda step, scale: np.nan if step == 3 else scale))
    assert not recorded(scaled, steps=90)  # two growths may be chance
    assert not recorded(scaled, unscale=True)


@pytest.mark.parametrize(
    "norm",
    [
        lambda step, scale: 1.0,
        lambda step, scale: 1e-30 * 0.9**step,  # convergence, in twenty steps by more than the scale grows
        lambda step, scale: 2 ** (step / 25),  # divergence, at the pace of the scale
        lambda step, scale: 2.0 ** (step // 20),  # a batch that doubles at other steps
        lambda step, scale: 2.0 ** min(step // 25, 2),  # twice at the same ones
        lambda step, scale: 1 / scale,  # a learning rate that halves with them
        lambda step, scale: 0.0,
        lambda step, scale: np.inf,  # beyond float32, of finite gradients
        lambda step, scale: np.nan if step % 23 == 22 else 0.5 ** (step // 23),  # at each overflow, with the scale
        lambda step, scale: scale if step < 120 else scale * 2 ** (step / 25),  # most of the time another trend
    ],
)
def test_true_gradients_are_silent_however_their_norm_changes(norm):
    assert "has grown" not in recorded(norm, steps=260)


def test_policy_warn_warns_at_the_caller_inside_jit_works_and_misuse_is_an_error():
    with pytest.warns(UserWarning, match="51 steps") as record:
        jamp.check_health(skipped(51), policy="warn")
    assert [w.filename for w in record] == [__file__]
    jamp.check_health(skipped(0), policy="warn")
    for policy in ("ignore", None, 3, ""):
        with pytest.raises(ValueError, match=f"'warn'.*{policy!r}"):
            jamp.check_health(skipped(0), policy=policy)
    for tree in (CONFIG.init(), SGD.init(GOOD), [skipped(0), skipped(0)]):
        with pytest.raises(ValueError, match="loss-scaled optimizer state"):
            jamp.check_health(tree)
    messages = []
    check = lambda state: jamp.check_health(state, max_consecutive_overflows=1, policy=messages.append)
    step = jax.jit(lambda state: jax.debug.callback(check, state._replace(inner_state=())))
    step(skipped(2))
    step(skipped(1))
    jax.effects_barrier()
    assert len(messages) == 1


def test_gradients_that_are_zero_are_said_once():
    tx, history = jamp.loss_scaled(optax.trace(0.9)), jamp.History(every=10)
    params, texts = jnp.ones(3), []
    state = tx.init(params)
    for _ in range(20):
        state = tx.update(jnp.zeros(3), state, params)[1]
        history.append(state, grad_norm=jnp.float32(0))
    jamp.check_health(state, history=history, policy=texts.append)
    assert texts[0].count("The gradients have all been zero") == 1
