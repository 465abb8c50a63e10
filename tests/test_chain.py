"""What may stand before and after `loss_scaled`, outside it and inside it: each case of the documentation, shown."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trees import bits

import jamp

PARAMS = {"w": jnp.array([1.0, -2.0, 3.0]), "b": jnp.array([-0.0, 0.5])}
GOOD = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.array([0.25, 3.0])}
INF = GOOD | {"b": jnp.array([0.25, jnp.inf])}
NAN = GOOD | {"b": jnp.array([jnp.nan, 3.0])}
SCALED = jamp.loss_scaled(optax.sgd(0.1, momentum=0.9))


@functools.cache
def make_step(tx: Any) -> Any:
    @jax.jit
    def step(params, state, grads, extra_args):
        updates, state = tx.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    return step


def run(tx: Any, *batches: Any, **extra_args: Any) -> list[tuple[Any, Any]]:
    """The params and the state after each batch."""
    history, carry = [], (PARAMS, tx.init(PARAMS))
    for grads in batches:
        carry = make_step(tx)(*carry, grads, extra_args)
        history.append(carry)
    return history


def skipped(history: list[tuple[Any, Any]]) -> list[bool]:
    return [not jamp.get_grads_finite(state) for _, state in history]


# Before it.


@pytest.mark.parametrize("bad", [INF, NAN])
def test_clip_by_global_norm_before_hands_the_nan_on_and_the_step_is_skipped(bad):
    tx = optax.chain(optax.clip_by_global_norm(1.0), SCALED)
    history = run(tx, GOOD, bad, GOOD)
    assert skipped(history) == [False, True, False]
    assert bits(history[1][0]) == bits(history[0][0])
    assert bits(history[1][1][1].inner_state) == bits(history[0][1][1].inner_state)
    assert bits(history[2][0]) == bits(run(tx, GOOD, GOOD)[1][0])


def test_clip_by_global_norm_turns_finite_gradients_of_1e20_into_zeros():
    huge = jax.tree.map(lambda g: g * 1e20, GOOD)
    for tx in (
        optax.chain(optax.clip_by_global_norm(1.0), jamp.loss_scaled(optax.sgd(0.1))),
        jamp.loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))),
    ):
        history = run(tx, huge)
        assert skipped(history) == [False]  # they are finite, the square of their norm is not
        jax.tree.map(np.testing.assert_array_equal, history[0][0], PARAMS)


@pytest.mark.parametrize(
    ("before", "bad"),
    [(optax.clip(1.0), INF), (optax.scale_by_sign(), INF), (optax.zero_nans(), NAN)],
    ids=["clip", "scale_by_sign", "zero_nans"],
)
def test_elementwise_clip_or_scale_by_sign_or_zero_nans_before_hides_the_overflow(before, bad):
    tx = optax.chain(before, SCALED)
    history = run(tx, bad)
    assert skipped(history) == [False]
    assert bits(history[0][0]) != bits(PARAMS)
    # Inside it they come after the check, and with the manual path's verdict they hide nothing.
    assert skipped(run(jamp.loss_scaled(before), bad)) == [True]
    history = run(tx, bad, grads_finite=jnp.array(False))
    assert skipped(history) == [True]
    assert bits(history[0][0]) == bits(PARAMS)


@pytest.mark.parametrize(
    "before", [optax.ema(0.9), optax.trace(0.9), optax.scale_by_adam()], ids=["ema", "trace", "adam"]
)
def test_transformation_with_state_before_keeps_the_inf_for_ever(before):
    assert all(skipped(run(optax.chain(before, SCALED), INF, *[GOOD] * 20)))
    # Inside it never sees the inf.
    assert skipped(run(jamp.loss_scaled(before), INF, GOOD, GOOD)) == [True, False, False]


def test_stateless_transformations_that_hand_inf_and_nan_on_may_stand_before():
    for before in (optax.scale(2.0), optax.centralize(), optax.add_decayed_weights(0.1), optax.clip_by_block_rms(1.0)):
        tx = optax.chain(before, SCALED)
        history = run(tx, INF, NAN, GOOD)
        assert skipped(history) == [True, True, False]
        assert bits(history[1][0]) == bits(PARAMS)
        assert bits(history[2][0]) == bits(run(tx, GOOD)[0][0])


# After it.


def test_add_decayed_weights_after_moves_params_on_a_skip():
    tx = optax.chain(SCALED, optax.add_decayed_weights(-0.1))
    history = run(tx, INF)
    assert skipped(history) == [True]
    np.testing.assert_allclose(history[0][0]["w"], 0.9 * PARAMS["w"])
    inside = jamp.loss_scaled(optax.chain(optax.sgd(0.1), optax.add_decayed_weights(-0.1)))
    assert bits(run(inside, INF)[0][0]) == bits(PARAMS)


@pytest.mark.parametrize(
    "after", [optax.trace(0.9), optax.scale_by_schedule(lambda count: 0.1)], ids=["trace", "count"]
)
def test_transformation_with_state_after_advances_on_a_skip(after):
    history = run(optax.chain(SCALED, after), GOOD, INF)
    assert skipped(history) == [False, True]
    assert bits(history[1][1][1]) != bits(history[0][1][1])
    history = run(jamp.loss_scaled(optax.chain(optax.sgd(0.1, momentum=0.9), after)), GOOD, INF)
    assert bits(history[1][1].inner_state) == bits(history[0][1].inner_state)


def test_stateless_transformation_that_reads_no_params_may_stand_after():
    history = run(optax.chain(SCALED, optax.scale(0.5), optax.clip(1.0)), GOOD, INF)
    assert skipped(history) == [False, True]
    assert bits(history[1][0]) == bits(history[0][0])


# The manual path.


@pytest.mark.parametrize(
    "before", [optax.clip(1.0), optax.clip_by_global_norm(1.0), optax.zero_nans(), optax.trace(0.9), optax.identity()]
)
def test_manual_path_through_a_chain_skips_the_inf_and_does_not_clip_it(before):
    tx = optax.chain(before, jamp.loss_scaled(optax.adam(0.1), jamp.DynamicLossScale(2.0**10)))

    @jax.jit
    def train_step(params, state, x):
        loss = lambda p: jnp.sum((p["w"].astype(jnp.float16) * x).astype(jnp.float32) ** 2) + jnp.sum(p["b"] ** 2)
        scaled = jax.grad(lambda p: jamp.scale_loss(loss(p), state))(params)
        grads, ok = jamp.unscale_and_check(scaled, state)
        updates, state = tx.update(grads, state, params, grads_finite=ok)
        return optax.apply_updates(params, updates), state, ok

    state = tx.init(PARAMS)
    params, after, ok = train_step(PARAMS, state, jnp.float16([0.5, 1.0, 100.0]))
    assert not ok
    assert bits(params) == bits(PARAMS)
    assert bits(after[1].inner_state) == bits(state[1].inner_state)
    assert not jamp.get_grads_finite(after)
    assert float(jamp.get_loss_scale(after)) == 2.0**9
    params, after, ok = train_step(PARAMS, tx.init(PARAMS), jnp.float16([0.5, 1.0, 0.25]))
    assert ok
    assert bits(params) != bits(PARAMS)
    assert int(after[1].inner_state[0].count) == 1


# Around it.


def test_around_multisteps_an_inf_micro_batch_is_left_out_of_the_accumulation():
    tx = jamp.loss_scaled(optax.MultiSteps(optax.adam(0.1), 2))
    other = jax.tree.map(lambda g: 2 * g, GOOD)
    history = run(tx, GOOD, INF, other, NAN, GOOD, other)
    assert skipped(history) == [False, True, False, True, False, False]
    undisturbed = run(tx, GOOD, other, GOOD, other)
    applied = [history[i] for i in (0, 2, 4, 5)]
    for (params, state), (expected, expected_state) in zip(applied, undisturbed, strict=True):
        assert bits((params, state.inner_state)) == bits((expected, expected_state.inner_state))
    assert int(history[-1][1].inner_state.gradient_step) == 2


def test_inside_multisteps_one_inf_micro_batch_poisons_the_accumulator():
    tx = optax.MultiSteps(jamp.loss_scaled(optax.adam(0.1)), 2)
    history = run(tx, INF, *[GOOD] * 9)
    assert all(skipped(history)[1::2])
    assert bits(history[-1][0]) == bits(PARAMS)
    assert not jamp.all_finite(history[-1][1].acc_grads)


def test_inside_a_partition_that_gives_it_only_some_leaves_an_inf_in_the_others_is_applied():
    labels = {"w": "scaled", "b": "plain"}
    history = run(optax.partition({"scaled": SCALED, "plain": optax.sgd(0.1)}, labels), INF)
    assert skipped(history) == [False]
    assert not jamp.all_finite(history[0][0])
    # Around the partition the whole step is skipped.
    whole = jamp.loss_scaled(optax.partition({"scaled": optax.sgd(0.1), "plain": optax.sgd(0.1)}, labels))
    assert bits(run(whole, INF)[0][0]) == bits(PARAMS)


def test_inside_a_partition_with_one_for_each_half_of_a_step_is_skipped():
    labels = {"w": "left", "b": "right"}
    history = run(optax.partition({"left": SCALED, "right": SCALED}, labels), INF)
    assert bits(history[0][0]["b"]) == bits(PARAMS["b"])
    assert bits(history[0][0]["w"]) != bits(PARAMS["w"])


def test_inside_masked_an_inf_in_the_masked_leaves_is_not_seen():
    history = run(optax.masked(SCALED, {"w": True, "b": False}), INF)
    assert skipped(history) == [False]
    assert skipped(run(jamp.loss_scaled(optax.masked(optax.sgd(0.1), {"w": True, "b": False})), INF)) == [True]


def test_a_skip_does_not_advance_a_schedule_inside_and_does_advance_one_outside():
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    inside = run(jamp.loss_scaled(optax.inject_hyperparams(optax.sgd)(schedule)), GOOD, INF, INF)
    assert int(inside[-1][1].inner_state.count) == 1
    outside = run(optax.inject_hyperparams(lambda rate: jamp.loss_scaled(optax.sgd(rate)))(schedule), GOOD, INF, INF)
    assert skipped(outside) == [False, True, True]
    assert int(outside[-1][1].count) == 3
