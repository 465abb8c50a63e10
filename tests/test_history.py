"""History: the metrics of every step, recorded without waiting for one."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from jamp.history import History

GOOD, BAD = jnp.ones(2), jnp.array([1.0, jnp.inf])
STEPS = [GOOD, BAD, GOOD, BAD, BAD, GOOD, GOOD]
TX = jamp.loss_scaled(optax.sgd(0.1), jamp.DynamicLossScale(growth_interval=2))
UPDATE = jax.jit(lambda grads, state: TX.update(grads, state)[1], donate_argnums=1)


def train(*histories, steps=STEPS):
    """Train with a donated state, and return `metrics` of each step."""
    state, expected = TX.init(GOOD), []
    for i, grads in enumerate(steps):
        state = UPDATE(grads, state)
        expected.append(jax.device_get(jamp.metrics(state)))
        for history in histories:
            history.append(state, loss=jnp.float32(0.5) * i)
    return expected


def test_it_has_the_metrics_of_each_step_and_goes_on_after_it_was_read():
    partly_full, full = History(3), History(7, first_step=10)  # of a run that is resumed
    expected = train(partly_full, full)
    assert (partly_full.first_step, full.first_step) == (0, 10)
    for history in (partly_full, full):
        assert (len(history), set(history.names)) == (len(STEPS), {*expected[0], "loss"})
        for name in expected[0]:
            np.testing.assert_array_equal(history[name], np.array([row[name] for row in expected]), strict=True)
        np.testing.assert_array_equal(history["loss"], 0.5 * np.arange(len(STEPS), dtype=np.float32))
    for n in (10, 13):
        expected += train(partly_full, steps=STEPS[:3])
        assert partly_full["loss_scale"].tolist() == [row["loss_scale"] for row in expected]
        assert len(expected) == n


@pytest.mark.slow
def test_append_waits_for_no_step_nor_copy_and_hundreds_of_copies_slow_none_down():
    history, state, counts = History(1), TX.init(GOOD), []
    for i in range(300):
        calls = []  # of functions, built-in ones too
        sys.setprofile(lambda frame, event, arg, calls=calls: calls.append(event))
        try:
            history.append(state, i=np.int32(i))
        finally:
            sys.setprofile(None)
        counts.append(len(calls))
    np.testing.assert_array_equal(history["i"], np.arange(300))
    assert max(counts[250:]) < min(counts[5:50]) + 100
    products = 15 if jax.default_backend() == "cpu" else 10_000
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, products, lambda _, x: x @ x, x)[0, 0] > 1)
    slow = slow.lower(jnp.eye(800)).compile()
    history, state = History(2), TX.init(GOOD)
    history.append(state)  # compiled
    last = slow(jnp.eye(800))
    for _ in range(5):
        history.append(state._replace(grads_finite=last))
        if len(history) == 2:
            assert not last.is_ready()
    assert history["grads_finite"].tolist() == [True, *[False] * 5]


def test_the_state_is_found_anywhere_in_a_tree_and_may_move_to_another_place():
    history, adaptive, scaler, state = History(), History(), History(), TX.init(GOOD)
    for tree in (state, {"opt": state}, (1, 2, [state]), (state, GOOD), jax.tree_util.Partial(print, state), state):
        history.append(tree)
    assert history["loss_scale"].tolist() == [2.0**16] * 6
    adaptive.append(jamp.loss_scaled(optax.sgd(0.1), jamp.AdaptiveLossScale(initial_window=40)).init(GOOD))
    assert adaptive["window_index"].tolist() == [2]
    scaler.append(jamp.GradScaler())
    assert scaler["loss_scale"].tolist() == [2.0**16]
    assert "window_index" not in scaler.names


def test_errors_say_what_to_do():
    state, history = TX.init(GOOD), History()
    for error, message, call in (
        *((ValueError, "every must be an int from 1", lambda x=x: History(x)) for x in (0, 1.5, True)),
        (ValueError, "first_step must be an int from 0", lambda: History(first_step=-1)),
        (KeyError, "no steps yet", lambda: history["loss_scale"]),
        (ValueError, "found 2", lambda: history.append([state, state])),
    ):
        with pytest.raises(error, match=message):
            call()
    history.append(state, loss=1.0)
    with pytest.raises(ValueError, match=r"\['loss'\], got \[\]"):
        history.append(state)
    with pytest.raises(KeyError, match=r"only: .*loss"):
        history["lr"]


def test_its_counts_may_be_numbers_of_numpy():
    assert jamp.History(np.int64(3), first_step=np.array(2)).first_step == 2
    with pytest.raises(ValueError, match="every must be an int"):
        jamp.History(np.float32(3))
