"""AdaptiveLossScale: runs recorded from MindFormers, a plain reference, and the windows in words."""

import dataclasses
import itertools
import math

import jax.numpy as jnp
import loss_scales as ls
import numpy as np
import pytest
from hypothesis import Phase, given, settings, strategies as st
from loss_scales import INT32_MAX

import jamp
from jamp import AdaptiveLossScale

RECORDED = ls.recorded("mindspore_adaptive.json")


def test_every_mindspore_trace_is_reproduced_exactly_in_all_fields():
    runs, names = [], ("loss_scale_value", "scale_factor", "scale_window")
    for trace in RECORDED["traces"]:
        scale, factor, initial = (trace["config"][name] for name in names)
        # With its own window list, which may have the quirks that jamp's does not have.
        config = AdaptiveLossScale(scale, factor, initial_window=initial, windows=trace["window_list"])
        runs.append(ls.from_start(config, ls.mindspore_finite(trace)))
    assert (len(runs), sum(len(finite) for *_, finite in runs)) == (30, 61583)
    for trace, (config, *_), states in zip(RECORDED["traces"], runs, ls.replay(runs), strict=True):
        want = ls.mindspore_counts(trace)
        got = {
            "scale_window": np.array([1, *config.windows])[states.window_index + 1],
            "list_index": states.window_index,
            "scale_window_up_count": states.up_count,
            "scale_window_down_count": states.down_count,
            "last_overflow_iterator_step": want.pop("current_iterator_step") - states.steps_since_change,
        }
        assert {name: x.tolist() for name, x in got.items()} == {name: x.tolist() for name, x in want.items()}
        # MindFormers' scale may grow to inf, where it stays. Here such a growth is refused, and all counts still agree.
        scale = ls.expand(trace["scale"], float.fromhex)
        stop = np.count_nonzero(np.isfinite(scale))
        np.testing.assert_array_equal(states.loss_scale[:stop], scale[:stop], trace["name"])
        assert (stop == len(scale)) == (trace["name"] != "no_ceiling_reaches_inf")


def test_our_window_list_has_no_quirk_and_is_mindformers_where_theirs_has_none():
    ours = lambda low, high: AdaptiveLossScale(min_window=low, max_window=high).window_list
    quirk = lambda low, windows: windows[0] != low or any(b <= a for a, b in itertools.pairwise(windows))
    for high, low, theirs in RECORDED["window_lists"]:
        windows = ours(low, high)
        assert (windows[0], windows[-1], quirk(low, windows)) == (low, high, False)
        assert set(windows) == {w for w in theirs if low <= w <= high} | {low}
        assert windows == tuple(theirs) or quirk(low, theirs)
    assert [quirk(low, theirs) for _, low, theirs in RECORDED["window_lists"]].count(True) == 146
    assert ours(20, 1000) == (20, 30, 40, 50, 100, 200, 500, 1000)
    # MindFormers: 0, 150; 15, 25; from 100 on; 1, 1, 2, 2, 3
    quirks = ours(20, 150), ours(20, 25), ours(120, 1000), ours(1, 3)
    assert quirks == ((20, 150), (20, 25), (120, 200, 500, 1000), (1, 2, 3))


def test_a_run_restored_from_the_scale_alone_goes_on_as_mindformers():
    """One restored from the state goes on exactly: test_contract.py, test_checkpoints.py."""
    resume, config = RECORDED["resume"], AdaptiveLossScale()
    finite, saved = ls.mindspore_finite(resume), resume["saved_after_steps"]
    [whole] = ls.replay([ls.from_start(config, finite)])
    start = jamp.set_loss_scale(config.init(), whole.loss_scale[saved - 1])
    [resumed] = ls.replay([(config, start, finite[saved:])])
    first = np.flatnonzero(resumed.loss_scale != whole.loss_scale[saved:])[0]
    assert saved + first == resume["with_scale_only_first_differs_at_step"]


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
# Overflows come alone, often, or in spells.
SEQUENCE = st.lists(st.tuples(st.booleans(), st.integers(1, 12)), min_size=1, max_size=STEPS).map(
    lambda spells: (list(itertools.chain(*([bad] * n for bad, n in spells))) * STEPS)[:STEPS]
)
FOUND = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -3.0, 1e-40, 3e38])
STATE = st.tuples(FOUND.map(np.float32), *[st.integers(-(2**31), INT32_MAX).map(np.int32)] * 4)
EXAMPLES = st.lists(st.tuples(ls.adaptive(), STATE, *[SEQUENCE] * 4), min_size=16, max_size=16)


# Each example is sixteen configurations, which share a compilation. A smaller one would not say more.
@settings(max_examples=2, deadline=None, derandomize=True, phases=[Phase.generate])
@given(EXAMPLES)
def test_any_configuration_and_sequence_agree_with_plain_python(examples):
    cases = [(config, sequence) for config, _, *sequences in examples for sequence in sequences]
    runs = [ls.from_start(config, ~np.array(sequence)) for config, sequence in cases]
    found = [(config, type(config.init())(*state), ~np.array(sequence)) for config, state, sequence, *_ in examples]
    states = ls.replay(runs + found)
    for (config, sequence), got in zip(cases, states, strict=False):
        with np.errstate(all="ignore"):
            expected = np.array(list(reference(config, sequence)), np.float64)
        np.testing.assert_array_equal(np.stack(got, -1).astype(np.float64), expected, str(config))
    # Whatever a state holds when it is found, every update ends inside the bounds, with counts in their range.
    for (config, *_), got in zip(found, states[len(runs) :], strict=True):
        low, high = np.float32(config.min_scale), np.float32(config.max_scale)
        assert np.all((got.loss_scale >= low) & (got.loss_scale <= high) & np.isfinite(got.loss_scale))
        assert np.all((got.window_index >= -1) & (got.window_index < len(config.window_list)))
        assert np.all((got.up_count >= 0) & (got.up_count <= 3) & (got.down_count >= 0) & (got.down_count <= 3))


SHORT = AdaptiveLossScale(64.0, windows=(2, 3, 4))
FROM_FIRST = AdaptiveLossScale(64.0, windows=(1, 2, 3), initial_window=2)
BOUNDED = AdaptiveLossScale(8.0, min_scale=3.0, max_scale=10.0, windows=(1,))
LONG, HUGE = AdaptiveLossScale(8.0, windows=(INT32_MAX,)), AdaptiveLossScale(2.0**126, windows=(1, 5))
SECOND, LATE = {"window_index": 1}, {"steps_since_change": INT32_MAX - 1}


@pytest.mark.parametrize(
    ("config", "overflow", "start", "expected"),
    [
        (SHORT, "0" * 15, {}, {"window_index": [0] * 5 + [1] * 9 + [2]}),  # three growths move to the next window
        (SHORT, "0" * 9, {}, {"loss_scale": [64, 128, 128, 256, 256, 512, 512, 512, 1024]}),
        # Three overflows without a growth between lead to the hidden window, in which every finite step grows.
        (SHORT, "100110000", SECOND, {"window_index": [1, 1, 1, 1, -1, -1, -1, 0, 0]}),
        (SHORT, "100110000", SECOND, {"loss_scale": [32, 32, 32, 16, 8, 16, 32, 64, 64]}),
        # A growth between overflows starts their count anew.
        (SHORT, "1100011", SECOND, {"down_count": [1, 2, 2, 2, 0, 1, 2], "window_index": [1] * 7}),
        (SHORT, "1" * 12, {}, {"window_index": [0] * 12}),  # the hidden window is never entered from the first
        # With a window of 1 before the initial one, three overflows lead from that to windows of 1.
        (FROM_FIRST, "11100000000", {}, {"window_index": [1, 1, -1, -1, -1, 0, 0, 0, 1, 1, 1]}),
        (FROM_FIRST, "11100000000", {}, {"loss_scale": [32, 16, 8, 16, 32, 64, 128, 256, 512, 512, 1024]}),
        (SHORT, "0100", {}, {"loss_scale": [64, 32, 32, 64]}),  # an overflow on the step where a growth was due wins
        # An index beyond the list is taken for the last window.
        (SHORT, "0000", {"window_index": 7}, {"window_index": [2] * 4, "loss_scale": [64, 64, 64, 128]}),
        (AdaptiveLossScale(1.0, windows=[0]), "0010", {}, {"loss_scale": [2, 4, 2, 4]}),  # 0: at every finite step
        # A growth to infinity is refused, and the counts move as for a growth.
        (HUGE, "000", {}, {"loss_scale": [2.0**127] * 3, "up_count": [1, 2, 0], "window_index": [0, 0, 1]}),
        (BOUNDED, "00111", {}, {"loss_scale": [10, 10, 5, 3, 3]}),  # past max_scale and min_scale
        (LONG, "000", LATE, {"steps_since_change": [INT32_MAX, 1, 2], "loss_scale": [8, 16, 16]}),  # the largest
    ],
)
def test_a_rule_in_words(config, overflow, start, expected):
    state = config.init()._replace(**{name: jnp.int32(x) for name, x in start.items()})
    states = ls.step_by_step(config, state, ls.flags(overflow))
    assert {name: getattr(states, name).tolist() for name in expected} == expected


def test_an_illegal_max_window_warns_and_uses_1000_if_that_is_above_min_window():
    for high in (20, 10, 0, -5):
        with pytest.warns(UserWarning, match=f"max_window={high} .* using 1000") as caught:
            assert AdaptiveLossScale(max_window=high) == AdaptiveLossScale()
        assert caught[0].filename == __file__
    above = {"min_window": 1000}
    for illegal, least in ((above, 1001), (above | {"max_window": 9}, 1001), ({"max_window": 50.0}, 21)):
        with pytest.raises(ValueError, match=f"from {least} to"):
            AdaptiveLossScale(**illegal)


def test_windows_are_hashable_and_set_loss_scale_keeps_the_window_but_not_its_steps():
    config = AdaptiveLossScale(windows=[5, 3, 3])
    assert config.window_list == config.windows == (5, 3, 3)
    assert hash(config) == hash(AdaptiveLossScale(windows=(5, 3, 3)))
    assert dataclasses.replace(AdaptiveLossScale(), max_window=200).window_list == (20, 30, 40, 50, 100, 200)
    for initial, index in [(None, 0), (20, 0), (77, 0), (30, 1), (1000, 7)]:
        assert int(AdaptiveLossScale(initial_window=initial).init().window_index) == index
    state = type(SHORT.init())(jnp.float32(32.0), *map(jnp.int32, (1, 1, 1, 3)))
    changed = [[x.item() for x in found] for found in (jamp.set_loss_scale(state, 4.0), state)]
    assert changed == [[4.0, 1, 1, 1, 1], [32.0, 1, 1, 1, 3]]
