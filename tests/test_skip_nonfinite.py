"""jamp.skip_nonfinite: what its docstring says. The contract of all wrappers: test_contract.py."""

import jax
import jax.numpy as jnp
import optax
import pytest
from trees import assert_equal, avals, bits

import jamp

INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(optax.linear_schedule(0.1, 0.01, 5), momentum=0.9))
PARAMS = {"w": jnp.float32([0.5, -0.0, 4.0])}
GOOD, BAD = {"w": jnp.float32([1.0, 2.0, 3.0])}, {"w": jnp.float32([1.0, jnp.nan, 3.0])}
TX, LONG = jamp.skip_nonfinite(INNER), jamp.loss_scaled(INNER, jamp.StaticLossScale(1.0))


def run(tx, *all_grads):
    """The updates of the last step and the state after each."""
    state, update = tx.init(PARAMS), jax.jit(tx.update)
    for grads in all_grads:
        updates, state = update(grads, state, PARAMS)
    return updates, state


def test_it_is_loss_scaled_with_a_scale_of_1_and_a_checkpoint_of_one_continues_with_the_other():
    assert type(TX.init(PARAMS)) is jamp.LossScaledState
    assert avals(TX.init(PARAMS)) == avals(LONG.init(PARAMS))
    ours, theirs = run(TX, GOOD, BAD, GOOD), run(LONG, GOOD, BAD, GOOD)
    assert_equal(ours, theirs)
    assert_equal(TX.update(GOOD, theirs[1], PARAMS), LONG.update(GOOD, ours[1], PARAMS))
    jamp.interop.check_checkpoint_config(
        jamp.interop.checkpoint_config(ours[1], jamp.StaticLossScale(1.0)), theirs[1], jamp.StaticLossScale(1.0)
    )
    scaler = jamp.GradScaler(jamp.StaticLossScale(1.0))
    moved = optax.tree.set(ours[1], loss_scale_state=scaler.state)
    assert avals(moved) == avals(ours[1])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_step_that_is_not_finite_changes_nothing_in_any_precision(dtype):
    with jax.enable_x64(dtype == "float64"), jax.numpy_dtype_promotion("standard"):
        params, good = ({"w": jnp.array(x["w"], dtype)} for x in (PARAMS, GOOD))
        tx = jamp.skip_nonfinite(jamp.master_params(INNER) if "16" in dtype else INNER)
        _, before = tx.update(good, tx.init(params), params)
        for bad in (jnp.nan, jnp.inf, -jnp.inf):
            grads = {"w": good["w"].at[1].set(bad)}
            updates, after = tx.update(grads, before, params)
            assert bits(after.inner_state) == bits(before.inner_state)
            assert bits(optax.apply_updates(params, jax.tree.map(lambda u: u.astype(dtype), updates))) == bits(params)
            assert (bool(jamp.get_grads_finite(after)), int(jamp.metrics(after)["overflow_steps"])) == (False, 1)
        assert not jnp.all(tx.update(good, before, params)[0]["w"] == 0)


def test_apply_if_finite_applies_a_bad_step_after_its_limit_and_skip_nonfinite_never_does():
    theirs, ours = optax.apply_if_finite(INNER, 2), jamp.skip_nonfinite(INNER)
    assert jamp.all_finite(run(theirs, BAD, BAD)[0])
    assert not jamp.all_finite(run(theirs, BAD, BAD, BAD))  # the updates and the momentum
    updates, state = run(ours, *[BAD] * 51)
    assert jamp.all_finite((updates, state))
    with pytest.raises(jamp.LossScaleError, match="51 steps in a row"):
        jamp.check_health(state)


def test_the_check_reads_the_gradients_alone_unless_it_is_told_of_the_loss():
    state, nan = TX.init(PARAMS), jnp.float32(jnp.nan)
    assert jamp.get_grads_finite(TX.update(GOOD, state, PARAMS)[1])
    finite = jamp.all_finite((nan, GOOD))
    assert not jamp.get_grads_finite(TX.update(GOOD, state, PARAMS, grads_finite=finite)[1])


def test_what_is_no_optimizer_is_an_error_that_names_it():
    for wrong in (optax.adamw, 0.1, None, TX.init(PARAMS)):
        with pytest.raises(TypeError, match=r"jamp\.skip_nonfinite\("):
            jamp.skip_nonfinite(wrong)
    with pytest.raises(ValueError, match="already loss-scaled"):
        jamp.skip_nonfinite(LONG).init(PARAMS)


@pytest.mark.promotes("optax.adamw")
def test_the_step_count_of_the_inner_schedule_is_read_by_its_name():
    """docs/recipes.md, Schedules."""
    adamw = jamp.skip_nonfinite(optax.adamw(optax.linear_schedule(1e-3, 0.0, 100)))
    state, update = adamw.init(PARAMS), jax.jit(adamw.update)
    for grads in (GOOD, BAD, GOOD):
        _, state = update(grads, state, PARAMS)
    counts = optax.tree.get_all_with_path(state, "count")
    assert [int(count) for _, count in counts] == [2, 2]  # Adam's and the schedule's
    with pytest.raises(KeyError, match="Found multiple values"):
        optax.tree.get(state, "count")
    is_schedule = lambda path, _: path[-1].tuple_name == "ScaleByScheduleState"
    assert int(optax.tree.get(state, "count", filtering=is_schedule)) == 2
    assert int(jamp.get_stats(state).finite_steps) == 2


def test_an_optax_without_the_states_of_contrib_is_no_error(monkeypatch):
    monkeypatch.delattr(optax.contrib, "ScheduleFreeState")
    tx = jamp.skip_nonfinite(optax.adam(1e-3))
    assert tx.init(jnp.ones(2)).inner_state[0].count == 0
    averaged = optax.contrib.schedule_free(jamp.stochastic_rounding(optax.sgd(0.1)), 0.1)
    with pytest.raises(ValueError, match="averages"):
        jamp.skip_nonfinite(averaged).init(jnp.ones(2, jnp.bfloat16))


@pytest.mark.promotes("optax")
def test_moments_of_16_bit_parameters_are_float32_unless_inner_keeps_them_otherwise():
    adam, params = optax.adam(1e-3), jnp.ones((64, 128), jnp.bfloat16)
    in_16_bit = jamp.stochastic_rounding(adam, state_dtype=jnp.bfloat16)
    first = optax.adam(1e-3, mu_dtype=jnp.bfloat16)
    for inner, nbytes in ((adam, 8), (jamp.quantized_state(adam), 2.1), (in_16_bit, 4), (first, 6)):
        tx = jamp.skip_nonfinite(inner)
        updates, state = tx.update(params, tx.init(params), params)
        held = sum(x.nbytes for x in jax.tree.leaves(state.inner_state) if x.ndim)
        assert held / params.size == pytest.approx(nbytes, rel=0.03)
        assert updates.dtype == jnp.float32
        assert optax.apply_updates(params, updates).dtype == jnp.bfloat16
    assert sum(x.nbytes for x in jax.tree.leaves(adam.init(params)) if x.ndim) == 4 * params.size
