"""AdaptiveLossScale: runs recorded from MindFormers, a plain reference, the windows; statistics of any loss scale."""

import dataclasses
import itertools
import json
import math
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from loss_scales import adaptive, run

import jamp
from jamp import AdaptiveLossScale

RECORDED = json.loads((Path(__file__).parent / "data" / "mindspore_adaptive.json").read_text())
INT32_MAX = 2**31 - 1


def finite_steps(recorded):
    """What the recorded hexadecimal number says: bool[steps], True where the gradients were finite."""
    return np.array([bit == "0" for bit in bin(int(recorded["overflow_hex"], 16))[3:]])


def expand(text, number=int):
    """The values of a run-length string such as '20*59 30 1*3'."""
    runs = [run.split("*") for run in text.split()]
    return np.repeat([number(value) for value, *_ in runs], [int(*n) if n else 1 for _, *n in runs])


def config_of(trace):
    """The trace's configuration; `windows` is its own list, which may have the quirks that jamp's mends."""
    config = trace["config"]
    return AdaptiveLossScale(
        config["loss_scale_value"],
        config["scale_factor"],
        initial_window=config["scale_window"],
        windows=trace["window_list"],
    )


# What MindFormers does


@pytest.mark.parametrize("trace", RECORDED["traces"], ids=lambda trace: trace["name"])
def test_every_mindspore_trace_is_reproduced_exactly_in_all_fields_at_every_step(trace):
    config, finite = config_of(trace), finite_steps(trace)
    states = run(config, config.init(), finite)
    iteration = np.arange(trace["steps"]) + 2
    windows = np.array([1, *trace["window_list"]])
    lengths = expand(trace["last_overflow_iter"])
    starts = np.cumsum(lengths)[:-1] + 1
    got = {
        "scale_window": windows[states.window_index + 1],
        "list_index": states.window_index,
        "up_count": states.up_count,
        "down_count": states.down_count,
        "last_overflow_iter": iteration - states.steps_since_change,
    }
    recorded = {name: expand(trace[name]) for name in got if name != "last_overflow_iter"}
    recorded["last_overflow_iter"] = np.repeat([0, *starts], lengths)
    for name, values in got.items():
        np.testing.assert_array_equal(values, recorded[name], name)
    # MindFormers' scale may grow to inf, where it stays; a growth to inf is refused here, and all counts still agree.
    scale = expand(trace["scale"], float.fromhex)
    stop = np.count_nonzero(np.isfinite(scale))
    np.testing.assert_array_equal(states.loss_scale[:stop], scale[:stop])
    assert (stop == trace["steps"]) == (trace["name"] != "no_ceiling_reaches_inf")


def test_the_recorded_traces_are_all_there():
    assert len(RECORDED["traces"]) == 30
    assert sum(trace["steps"] for trace in RECORDED["traces"]) == 61583


def quirk(low, windows):
    return windows[0] != low or any(b <= a for a, b in itertools.pairwise(windows))


def test_every_recorded_window_list_without_a_quirk_equals_ours():
    rows = [row for row in RECORDED["window_lists"] if not quirk(row[1], row[2])]
    assert len(rows) == 85
    for high, low, windows in rows:
        assert AdaptiveLossScale(min_window=low, max_window=high).window_list == tuple(windows)


def test_our_window_list_mends_the_quirks_and_changes_nothing_else():
    rows = [row for row in RECORDED["window_lists"] if quirk(row[1], row[2])]
    assert len(rows) == 146
    for high, low, windows in rows:
        ours = AdaptiveLossScale(min_window=low, max_window=high).window_list
        assert ours[0] == low
        assert ours[-1] == high
        assert not quirk(low, ours)
        assert set(ours) == {w for w in windows if low <= w <= high} | {low}


@pytest.mark.parametrize(
    ("low", "high", "windows"),
    [
        (20, 1000, (20, 30, 40, 50, 100, 200, 500, 1000)),
        (20, 5000, (20, 30, 40, 50, 100, 300, 600, 1200, 2500, 5000)),
        (2, 10, (2, 3, 4, 5, 6, 7, 8, 9, 10)),
        (20, 150, (20, 150)),  # MindFormers: 0, 150
        (20, 25, (20, 25)),  # MindFormers: 15, 25
        (120, 1000, (120, 200, 500, 1000)),  # MindFormers starts at 100
        (1, 3, (1, 2, 3)),  # MindFormers: 1, 1, 2, 2, 3
    ],
)
def test_the_window_list_is_strictly_increasing_from_min_window_to_max_window(low, high, windows):
    assert AdaptiveLossScale(min_window=low, max_window=high).window_list == windows


def through_a_file(state, path):
    """The state saved and loaded again."""
    np.savez(path, *map(np.asarray, state))
    with np.load(path) as saved:
        return type(state)(*(jnp.asarray(saved[name]) for name in saved.files))


def test_a_run_restored_from_a_saved_state_goes_on_exactly_as_the_uninterrupted_one(tmp_path):
    finite = finite_steps(RECORDED["resume"])
    config = AdaptiveLossScale()
    whole = run(config, config.init(), finite)
    for step in (1, 30, RECORDED["resume"]["saved_after_steps"]):
        saved = through_a_file(jax.tree.map(lambda x, i=step: x[i - 1], whole), tmp_path / f"{step}.npz")
        for resumed, uninterrupted in zip(run(config, saved, finite[step:]), whole, strict=True):
            np.testing.assert_array_equal(resumed, uninterrupted[step:])


def test_a_run_restored_from_the_scale_alone_differs_where_mindformers_own_does():
    recorded, config = RECORDED["resume"], AdaptiveLossScale()
    step, finite = recorded["saved_after_steps"], finite_steps(recorded)
    whole = run(config, config.init(), finite).loss_scale
    resumed = run(config, jamp.set_loss_scale(config.init(), whole[step - 1]), finite[step:]).loss_scale
    assert step + np.flatnonzero(resumed != whole[step:])[0] == recorded["with_scale_only_first_differs_at_step"]


# A plain reference


def reference(config, overflow):
    """Scale, window index, both counts and the step counter after every step, in plain Python."""
    windows, scale, index, up, down, since = config.window_list, np.float32(config.init_scale), 0, 0, 0, 1
    if config.initial_window in windows:
        index = windows.index(config.initial_window)
    for bad in overflow:
        due = since >= (1 if index == -1 else windows[index])
        since += 1
        if bad or due:
            since = 1
        if bad:
            scale = scale * np.float32(1 / config.scale_factor)
            down = (down + 1) % 4
            if down == 3 and index not in (-1, 0):
                index, up, down = -1, 0, 0
        elif due:
            grown = scale * np.float32(config.scale_factor)
            if np.isfinite(grown) or config.max_scale < math.inf:
                scale = grown
            up, down = (up + 1) % 4, 0
            if up == 3 and index + 1 < len(windows):
                index, up = index + 1, 0
        scale = min(max(scale, np.float32(config.min_scale)), np.float32(config.max_scale))
        yield scale, index, up, down, since


STEPS = 60
# Overflows come alone, often, or in spells; each a list of bools.
SEQUENCES = st.lists(
    st.tuples(st.booleans(), st.integers(1, 12)).map(lambda spell: [spell[0]] * spell[1]), min_size=1, max_size=STEPS
).map(lambda spells: (list(itertools.chain(*spells)) * STEPS)[:STEPS])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(adaptive(), st.lists(SEQUENCES, min_size=4, max_size=4))
def test_any_configuration_and_sequence_agree_with_plain_python(config, sequences):
    states = jax.vmap(partial(run, config, config.init()))(~jnp.array(sequences))
    with np.errstate(all="ignore"):
        expected = [list(reference(config, sequence)) for sequence in sequences]
    for got, want in zip(states, np.moveaxis(np.array(expected, np.float64), -1, 0), strict=True):
        np.testing.assert_array_equal(got, want)


FOUND = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -3.0, 1e-40, 3e38])
COUNTS = st.integers(-(2**31), INT32_MAX)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(adaptive(), SEQUENCES, FOUND, st.tuples(COUNTS, COUNTS, COUNTS, COUNTS))
def test_whatever_state_is_found_every_update_ends_inside_the_bounds_with_consistent_counts(
    config, sequence, found, counts
):
    state = type(config.init())(jnp.float32(found), *map(jnp.int32, counts))
    states = run(config, state, ~jnp.array(sequence))
    low, high = np.float32(config.min_scale), np.float32(config.max_scale)
    assert np.all((states.loss_scale >= low) & (states.loss_scale <= high) & np.isfinite(states.loss_scale))
    assert np.all((states.window_index >= -1) & (states.window_index < len(config.window_list)))
    assert np.all((states.up_count >= 0) & (states.up_count <= 3))
    assert np.all((states.down_count >= 0) & (states.down_count <= 3))


# The rules in words


def follow(config, overflow, **fields):
    """The states after each step of a string of 0 (finite) and 1 (overflow), from the given initial counts."""
    start = config.init()._replace(**{name: jnp.int32(value) for name, value in fields.items()})
    return run(config, start, jnp.array([bit == "0" for bit in overflow]))


SHORT = AdaptiveLossScale(64.0, windows=(2, 3, 4))


def test_three_growths_move_to_the_next_window():
    states = follow(SHORT, "0" * 18)
    assert states.window_index.tolist() == [0] * 5 + [1] * 9 + [2] * 4
    assert np.log2(states.loss_scale).tolist() == [6, 7, 7, 8, 8, 9, 9, 9, 10, 10, 10, 11, 11, 11, 12, 12, 12, 12]


def test_three_overflows_without_a_growth_between_lead_to_the_hidden_window_in_which_every_finite_step_grows():
    states = follow(SHORT, "100110000", window_index=1)
    assert states.window_index.tolist() == [1, 1, 1, 1, -1, -1, -1, 0, 0]
    assert states.loss_scale.tolist() == [32, 32, 32, 16, 8, 16, 32, 64, 64]


def test_a_growth_between_overflows_starts_their_count_anew():
    states = follow(SHORT, "1100011", window_index=1)
    assert states.down_count.tolist() == [1, 2, 2, 2, 0, 1, 2]
    assert states.window_index.tolist() == [1] * 7


def test_the_hidden_window_is_never_entered_from_the_first():
    assert set(follow(SHORT, "1" * 12).window_index.tolist()) == {0}


def test_an_overflow_on_the_step_where_a_growth_was_due_wins():
    assert follow(SHORT, "0100").loss_scale.tolist() == [64, 32, 32, 64]


def test_a_window_of_0_grows_at_every_finite_step():
    assert follow(AdaptiveLossScale(1.0, windows=[0]), "0010").loss_scale.tolist() == [2, 4, 2, 4]


def test_a_growth_that_would_be_infinite_is_refused_and_the_counts_move_as_for_a_growth():
    states = follow(AdaptiveLossScale(2.0**127, windows=(1, 5)), "000")
    assert states.loss_scale.tolist() == [2.0**127] * 3
    assert states.up_count.tolist() == [1, 2, 0]
    assert states.window_index.tolist() == [0, 0, 1]


def test_a_growth_past_max_scale_gives_max_scale_and_a_backoff_past_min_scale_gives_min_scale():
    config = AdaptiveLossScale(8.0, min_scale=3.0, max_scale=10.0, windows=(1,))
    assert follow(config, "00111").loss_scale.tolist() == [10, 10, 5, 3, 3]


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize(
    ("found", "max_scale", "healed"),
    [(math.nan, 16.0, 8.0), (math.inf, 16.0, 16.0), (math.inf, math.inf, 8.0), (0.0, 16.0, 0.5), (-1.0, 16.0, 0.5)],
)
def test_a_scale_found_inf_nan_or_not_positive_heals_at_the_next_update(found, max_scale, healed, ok):
    config = AdaptiveLossScale(8.0, min_scale=0.5, max_scale=max_scale)
    state = config.init()._replace(loss_scale=jnp.float32(found))
    assert float(config.update(state, jnp.bool_(ok)).loss_scale) == healed


def test_an_index_beyond_the_list_is_taken_for_the_last_window():
    states = follow(SHORT, "0000", window_index=7)
    assert states.window_index.tolist() == [2] * 4
    assert states.loss_scale.tolist() == [64, 64, 64, 128]


def test_steps_since_change_saturates():
    config = AdaptiveLossScale(8.0, windows=(INT32_MAX,))
    states = follow(config, "000", steps_since_change=INT32_MAX - 1)
    assert states.steps_since_change.tolist() == [INT32_MAX, 1, 2]
    assert states.loss_scale.tolist() == [8, 16, 16]


def test_initial_window_none_or_not_in_the_list_is_the_first():
    for initial, index in [(None, 0), (20, 0), (77, 0), (30, 1), (1000, 7)]:
        assert int(AdaptiveLossScale(initial_window=initial).init().window_index) == index


def test_set_loss_scale_keeps_the_window_and_restarts_the_steps_to_the_next_growth():
    state = jax.tree.map(lambda x: x[-1], follow(SHORT, "00100", window_index=1, up_count=1))
    new = jamp.set_loss_scale(state, 4.0)
    assert [x.item() for x in new] == [4.0, 1, 1, 1, 1]
    assert [x.item() for x in state] == [32.0, 1, 1, 1, 3]


# Configuration


@pytest.mark.parametrize("high", [20, 10, 0, -5])
def test_an_illegal_max_window_warns_and_uses_1000(high):
    with pytest.warns(UserWarning, match=f"above min_window=20, got max_window={high}; using 1000") as caught:
        config = AdaptiveLossScale(max_window=high)
    assert config == AdaptiveLossScale()
    assert caught[0].filename == __file__


def test_an_error_where_even_1000_is_not_above_min_window():
    with pytest.raises(ValueError, match=r"max_window must be an int .*1001.* got max_window=1000"):
        AdaptiveLossScale(min_window=1000)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"init_scale": 0.5}, "init_scale must lie in"),
        ({"init_scale": math.inf}, "init_scale must be a finite"),
        ({"min_scale": 0.0}, "min_scale must be a finite"),
        ({"scale_factor": 1.0}, "scale_factor must be a finite Python number above 1"),
        ({"scale_factor": True}, "scale_factor must be a finite Python number above 1"),
        ({"min_window": 0}, "min_window must be an int of at least 1, got min_window=0"),
        ({"min_window": 20.0}, "min_window must be an int"),
        ({"min_window": True}, "min_window must be an int"),
        ({"max_window": 1000.0}, "max_window must be an int"),
        ({"max_window": True}, "max_window must be an int"),
        ({"max_window": 2**31}, "max_window must be an int"),
        ({"initial_window": 20.0}, "initial_window must be an int"),
        ({"windows": ()}, "windows must be a tuple of ints"),
        ({"windows": 20}, "windows must be a tuple of ints"),
        ({"windows": (20, -1)}, r"windows\[1\] must be an int of at least 0, got windows\[1\]=-1"),
        ({"windows": (20, 30.0)}, r"windows\[1\] must be an int"),
        ({"windows": (2**31,)}, r"windows\[0\] must be an int"),
    ],
)
def test_a_value_out_of_range_is_an_error_that_names_it(kwargs, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveLossScale(**kwargs)


def test_a_configuration_is_frozen_and_hashable_also_with_windows_from_a_list():
    config = AdaptiveLossScale(windows=[5, 3, 3])
    assert config.window_list == config.windows == (5, 3, 3)
    assert hash(config) == hash(AdaptiveLossScale(windows=(5, 3, 3)))
    with pytest.raises(AttributeError):
        config.windows = (1,)


def test_replacing_max_window_makes_a_new_window_list():
    assert dataclasses.replace(AdaptiveLossScale(), max_window=200).window_list == (20, 30, 40, 50, 100, 200)


# States


# Statistics, of any loss scale
