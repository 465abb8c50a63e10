"""History and its writers."""

import csv
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from jamp.history import CsvWriter, History, JsonLinesWriter, TensorBoardWriter

GOOD, BAD = jnp.ones(2), jnp.array([1.0, jnp.inf])
STEPS = [GOOD, BAD, GOOD, BAD, BAD, GOOD, GOOD]
TX = jamp.loss_scaled(optax.sgd(0.1), jamp.DynamicLossScale(growth_interval=2))


@functools.cache
def updater(tx):
    return jax.jit(lambda grads, state: tx.update(grads, state)[1], donate_argnums=1)


def train(history, tx=TX, steps=STEPS, wrap=lambda state: state, **scalars):
    """Train with a donated state, and return `metrics` of each step."""
    state, expected = tx.init(jnp.ones(2)), []
    for i, grads in enumerate(steps):
        state = updater(tx)(grads, state)
        expected.append(jax.device_get(jamp.metrics(state)))
        history.append(wrap(state), **{name: x * i for name, x in scalars.items()})
    return expected


class Ring:
    def __init__(self):
        self.rows, self.flushes = [], []

    def __call__(self, step, row):
        self.rows.append((step, row))

    def flush(self):
        self.flushes.append(len(self.rows))


@pytest.mark.parametrize("every", [1, 2, 3, 7, 100])
def test_it_has_the_metrics_of_each_step_whatever_the_ring_holds(every):
    history = History(every)
    expected = train(history, loss=jnp.float32(0.5))
    assert len(history) == len(STEPS)
    assert set(history.names) == {*expected[0], "loss"}
    for name in expected[0]:
        values = np.array([row[name] for row in expected])
        np.testing.assert_array_equal(history[name], values)
        assert history[name].dtype == values.dtype
    np.testing.assert_array_equal(history["loss"], 0.5 * np.arange(len(STEPS), dtype=np.float32))


def test_rows_are_written_in_order_when_the_next_ring_is_full_and_at_flush():
    writer = Ring()
    history = History(2, writer, first_step=10)
    expected = train(history, loss=jnp.float32(1))
    assert [step for step, _ in writer.rows] == [10, 11, 12, 13]  # of seven steps six are sent, two still on their way
    history.flush()
    history.flush()
    assert [step for step, _ in writer.rows] == [10, 11, 12, 13, 14, 15, 16]
    assert writer.flushes[-1] == 7
    for (_, row), metrics in zip(writer.rows, expected, strict=True):
        assert {name: row[name] for name in metrics} == {name: x.item() for name, x in metrics.items()}
        assert all(type(x) in (int, float) for x in row.values())


def test_it_goes_on_after_it_was_read():
    history = History(4)
    lengths = []
    for _ in range(3):
        train(history, steps=STEPS[:3])
        lengths.append(len(history["loss_scale"]))
    assert lengths == [3, 6, 9]


def test_append_does_not_wait_for_the_step_nor_for_the_copy_of_a_full_ring():
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 150, lambda _, x: x @ x, x)[0, 0] > 1).lower(jnp.eye(800)).compile()
    history, state = History(2), TX.init(GOOD)
    history.append(state)  # compiled
    last = slow(jnp.eye(800))
    for _ in range(5):
        history.append(state._replace(grads_finite=last))
        if len(history) == 2:
            assert not last.is_ready()
    assert history["grads_finite"].tolist() == [True, *[False] * 5]


@pytest.mark.parametrize(
    "wrap", [lambda s: {"opt": [s]}, lambda s: (s, jnp.ones(1)), lambda s: jax.tree_util.Partial(print, s)]
)
def test_the_state_is_found_anywhere_in_a_tree(wrap):
    history = History()
    expected = train(history, wrap=wrap)
    np.testing.assert_array_equal(history["loss_scale"], [row["loss_scale"] for row in expected])


def test_the_state_may_move_to_another_place():
    history, state = History(), TX.init(GOOD)
    for tree in (state, {"opt": state}, (1, 2, [state]), state):
        history.append(tree)
    assert history["loss_scale"].tolist() == [2.0**16] * 4


def test_an_adaptive_loss_scale_has_its_window_and_a_grad_scaler_is_recorded_too():
    history = History()
    train(history, jamp.loss_scaled(optax.sgd(0.1), jamp.AdaptiveLossScale(windows=(1, 9))))
    assert history["window_index"].tolist()[0] == 0
    scaler = History()
    scaler.append(jamp.GradScaler())
    assert scaler["loss_scale"].tolist() == [2.0**16]


def test_csv_and_json_lines_hold_the_steps_and_go_on_in_an_existing_file(tmp_path):
    tables, lines = tmp_path / "new" / "scale.csv", tmp_path / "scale.jsonl"
    for start in (0, 7):
        for writer in (CsvWriter(tables), JsonLinesWriter(str(lines))):
            history = History(3, writer, first_step=start)
            train(history, loss=jnp.float32(jnp.inf))
            history.flush()
    with tables.open() as file:
        rows = list(csv.DictReader(file))
    objects = [json.loads(line, parse_constant=None) for line in lines.read_text().splitlines()]
    for row, found in zip(rows, objects, strict=True):
        assert {name: float(x) for name, x in row.items() if x != "nan"} == {
            name: float(x) for name, x in found.items() if x != "nan"
        }
    assert [row["step"] for row in objects] == list(range(14))
    assert [row["grads_finite"] for row in objects[:3]] == [1, 0, 1]
    assert (objects[0]["loss"], objects[1]["loss"]) == ("nan", "inf")


def test_tensorboard_takes_a_writer_of_yours():
    calls = []

    class Writer:
        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def flush(self):
            calls.append("flush")

    history = History(write=TensorBoardWriter(Writer()))
    train(history, steps=STEPS[:2])
    history.flush()
    assert ("loss_scale", 2.0**15, 1) in calls
    assert calls[-1] == "flush"


def test_errors_say_what_to_do():
    state = TX.init(GOOD)
    for every in (0, 1.5, True):
        with pytest.raises(ValueError, match="every must be an int of at least 1"):
            History(every)
    history = History()
    with pytest.raises(KeyError, match="no steps yet"):
        history["loss_scale"]
    with pytest.raises(ValueError, match=r"use `tx = jamp.loss_scaled\(tx\)`"):
        history.append(optax.sgd(0.1).init(GOOD))
    with pytest.raises(ValueError, match="found 2"):
        history.append([state, state])
    with pytest.raises(ValueError, match=r"grads must be a scalar, got float32\[2\]"):
        history.append(state, grads=GOOD)
    with pytest.raises(ValueError, match="loss_scale is recorded in any case"):
        history.append(state, loss_scale=1.0)
    history.append(state, loss=1.0)
    with pytest.raises(ValueError, match=r"names must stay \['loss'\], as at the first step; got \[\]"):
        history.append(state)
    with pytest.raises(KeyError, match=r"'lr' was recorded, only: .*loss"):
        history["lr"]
    with pytest.raises(TypeError, match="outside `jit`"):
        jax.jit(history.append)(state)
