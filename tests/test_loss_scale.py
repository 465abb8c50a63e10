"""Loss scales: recorded runs of other systems, a plain reference, the rules in words, bad input, what states are."""

import collections
import dataclasses
import itertools
import math
import pickle
import re

import jax
import jax.numpy as jnp
import loss_scales as ls
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from loss_scales import FLOAT32_MAX, INT32_MAX, TINY
from trees import avals, bits

import jamp
from jamp import AdaptiveLossScale, DynamicLossScale, NoOpLossScale, StaticLossScale

CONFIGS = [NoOpLossScale(), StaticLossScale(1024.0), DynamicLossScale(growth_interval=2, hysteresis=2)]
CONFIGS += [AdaptiveLossScale(2**32, windows=(1, 3))]
EACH_CONFIG = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)


def scales(config, overflow, **fields):
    """The scale after every step, one update at a time, from an initial state with other fields."""
    return ls.step_by_step(config, config.init()._replace(**fields), ls.flags(overflow)).loss_scale.tolist()


def test_torch_traces_are_reproduced_exactly_in_one_scan():
    plain = [trace for trace in ls.TORCH if "events" not in trace]
    assert len(plain) == 95
    found = ls.replay([ls.from_start(ls.torch_config(trace), ls.flags(trace["overflow"])) for trace in plain])
    for trace in (trace for trace in ls.TORCH if "events" in trace):  # settings changed midway
        # A setter is another configuration for the same state; `update(new_scale)` replaces the scale alone.
        config, states = ls.torch_config(trace), []
        state = config.init()
        for step, ok in enumerate(ls.flags(trace["overflow"])):
            for setter, value in trace["events"].get(str(step), []):
                config = dataclasses.replace(config, **{setter.removeprefix("set_"): value})
            given = [jnp.float32(value) for _, value in trace["events"].get(f"{step}:update", [])]
            state = state._replace(loss_scale=given[0]) if given else config.update(state, ok)
            states.append(state)
        plain.append(trace)
        found.append(jax.tree.map(lambda *xs: np.stack(xs), *states))
    for trace, states in zip(plain, found, strict=True):
        # torch has no floor: from the first subnormal scale on there is nothing to compare but the floor itself.
        stop, tracker = trace.get("first_subnormal_step", len(trace["overflow"])), ls.torch_tracker(trace)
        np.testing.assert_array_equal(states.loss_scale[:stop], ls.expand(trace["scale_rle"])[:stop], trace["name"])
        assert set(states.loss_scale[stop:]) <= {np.float32(TINY)}
        np.testing.assert_array_equal(states.growth_count[[*tracker]], [*tracker.values()], trace["name"])


PEERS = {
    "megatron": {"initial_scale": "init_scale", "count": "growth_tracker"},
    "colossalai": {"initial_scale": "init_scale", "count": "growth_step"},
    "apex": {"scale_window": "growth_interval", "min_loss_scale": "min_scale", "max_loss_scale": "max_scale"},
}


def test_hysteresis_floor_and_ceiling_of_other_systems_are_reproduced_exactly():
    recorded, runs = ls.recorded("peers_hysteresis.json"), []
    for trace in recorded["traces"]:
        names = PEERS[trace["system"]]
        config = {names.get(key, key): x for key, x in trace["config"].items() if key != "loss_scale" and x is not None}
        config = DynamicLossScale(**{"min_scale": TINY, "max_scale": math.inf} | config)
        runs.append(ls.from_start(config, ls.flags(recorded["sequences"][trace["sequence"]])))
    assert len(runs) == 75
    for trace, (config, *_), states in zip(recorded["traces"], runs, ls.replay(runs), strict=True):
        np.testing.assert_array_equal(states.loss_scale, ls.expand(trace["scale_rle"]))
        count = trace[PEERS[trace["system"]].get("count", "unskipped")]
        np.testing.assert_array_equal(states.growth_count, [int(c, 36) for c in count])
        left = states.hysteresis_count
        if "hysteresis_tracker_rle" in trace:  # Megatron's, which goes on below 0
            left = ls.expand(trace["hysteresis_tracker_rle"])
        elif "hysteresis_step_rle" in trace:  # Colossal-AI's: the overflows, not what is left of them
            left = config.hysteresis - ls.expand(trace["hysteresis_step_rle"])
        np.testing.assert_array_equal(states.hysteresis_count, np.maximum(left, 0))


def reference(config, overflow, loss_scale):
    """Scale, finite steps in a row and overflows left before a backoff, all in range, after every step."""
    scale, in_a_row, spent = np.float32(loss_scale), 0, 0
    for bad in overflow:
        if bad:
            in_a_row, spent = 0, spent + 1
            if spent >= config.hysteresis:
                scale = scale * np.float32(config.backoff_factor)
        else:
            in_a_row += 1
            if config.hysteresis_refill == "finite":
                spent = 0
            if in_a_row == config.growth_interval:
                in_a_row = spent = 0
                grown = scale * np.float32(config.growth_factor)
                if np.isfinite(grown) or config.max_scale < math.inf:
                    scale = grown
        if np.isnan(scale) or scale == config.max_scale == math.inf:
            scale = np.float32(config.init_scale)
        scale = min(max(scale, np.float32(config.min_scale)), np.float32(config.max_scale))
        yield scale, in_a_row, max(config.hysteresis - spent, 0)


SEQUENCES = st.tuples(*[st.integers(0, 2**40 - 1).map(lambda bits: [c == "1" for c in f"{bits:040b}"])] * 4)
# None is the initial scale; subnormals are left out, for XLA may flush them and NumPy does not.
FOUND = st.sampled_from([None, None, math.nan, math.inf, -math.inf, 0.0, -0.0, -3.0, -FLOAT32_MAX, TINY, FLOAT32_MAX])


@settings(max_examples=20, deadline=None, derandomize=True)
@given(ls.dynamic(), SEQUENCES, FOUND)
def test_any_configuration_and_sequence_agree_with_plain_python(config, sequences, found):
    start = config.init_scale if found is None else found
    state = jax.tree.map(lambda x: jnp.full(4, x), config.init()._replace(loss_scale=jnp.float32(start)))
    states = ls.step_by_step(config, state, ~np.array(sequences).T)
    with np.errstate(all="ignore"):
        expected = np.array([list(reference(config, sequence, start)) for sequence in sequences], np.float64)
    np.testing.assert_array_equal(np.stack(states).T.astype(np.float64), expected)
    assert np.all(np.isfinite(states.loss_scale))


def test_growth_comes_on_exactly_the_nth_finite_step():
    assert scales(DynamicLossScale(8.0, growth_interval=3), "0000000") == [8, 8, 16, 16, 16, 32, 32]


def test_a_growth_past_max_scale_gives_max_scale():
    assert scales(DynamicLossScale(8.0, growth_interval=1, max_scale=10.0), "0010") == [10, 10, 5, 10]


def test_a_backoff_past_min_scale_gives_min_scale():
    assert scales(DynamicLossScale(8.0, growth_interval=1, min_scale=3.0), "1110") == [4, 3, 3, 6]


def test_a_growth_count_beyond_a_lowered_interval_grows_at_the_next_finite_step():
    assert scales(DynamicLossScale(8.0, growth_interval=3), "0", growth_count=jnp.int32(INT32_MAX)) == [16]
    # The count saturates, and still comes to the largest interval.
    config, count = DynamicLossScale(8.0, growth_interval=INT32_MAX), jnp.int32(INT32_MAX - 2)
    assert scales(config, "000", growth_count=count) == [8, 16, 16]
    assert scales(HELD, "1101", hysteresis_count=jnp.int32(INT32_MAX)) == [8, 8, 8, 4]  # one that is too large is full


CAPPED = DynamicLossScale(8.0, growth_interval=3, max_scale=16.0)
CAPPED = DynamicLossScale(8.0, growth_interval=3, max_scale=16.0)
HELD = DynamicLossScale(8.0, growth_interval=3, hysteresis=3)
REFILLED = DynamicLossScale(8.0, growth_interval=9, hysteresis=2, hysteresis_refill="finite")


RULES = [
    # The N-th step that overflows backs off, and the count restarts. At the ceiling it stays, and the count goes on.
    (CAPPED, "0010000000001001", [8, 8, 4, 4, 4, 8, 8, 8, 16, 16, 16, 16, 8, 8, 8, 4]),
    (HELD, "1110001101", [8, 8, 4, 4, 4, 8, 8, 8, 8, 4]),  # the growth refills it
    (REFILLED, "101011101", [8, 8, 8, 8, 8, 4, 2, 2, 2]),  # every finite step refills it
    (DynamicLossScale(0.5, growth_interval=2, min_scale=0.125), "11100", [0.25, 0.125, 0.125, 0.125, 0.25]),
    # Without a ceiling a growth to infinity is refused, and the count restarts.
    (DynamicLossScale(2.0**126, growth_interval=2, max_scale=math.inf), "00000", [2.0**126, *[2.0**127] * 4]),
    (NoOpLossScale(), "0101", [1, 1, 1, 1]),
    (StaticLossScale(3.0), "0101", [3, 3, 3, 3]),
]


@pytest.mark.parametrize(("config", "overflow", "expected"), RULES)
def test_a_rule_in_words(config, overflow, expected):
    assert scales(config, overflow) == expected


@pytest.mark.parametrize("kind", [DynamicLossScale, AdaptiveLossScale])
def test_a_scale_found_inf_nan_not_positive_or_out_of_range_heals_at_the_next_update(kind):
    nan, inf = math.nan, math.inf
    bounded = {nan: 8.0, inf: 16.0, -1.0: 0.5, 2.0**30: 16.0, 2.0**-30: 0.5, 1e-40: 0.5}
    for max_scale, healed in ((16.0, bounded), (inf, {nan: 8.0, inf: 8.0, -inf: 0.5, 0.0: 0.5, -1.0: 0.5})):
        config = kind(8.0, min_scale=0.5, max_scale=max_scale)
        for found, overflow in itertools.product(healed, "01"):
            assert scales(config, overflow, loss_scale=jnp.float32(found)) == [healed[found]], (found, max_scale)


POSITIVE, ABOVE_1, BETWEEN = ["above 0", "such as 2.0**16"], ["above 1", "such as 2.0"], ["between 0 and 1", "as 0.5"]
NO_SCALES = (0, 0.0, -1.0, math.nan, -math.inf, True, "x", None, 1e-40, 1e39, 2**128)
AT_LEAST_1, AT_MOST = ["from 1 to"], ["to 2147483647"]
NO_COUNTS = (0, -1, 2.5, 2000.0, True, "x")
BAD_INPUT = [
    (StaticLossScale, "scale", (*NO_SCALES, math.inf), POSITIVE),
    # An array would be made at construction, and a traced one would leak.
    (DynamicLossScale, "init_scale", (*NO_SCALES, math.inf, jnp.float32(8.0)), POSITIVE),
    (DynamicLossScale, "min_scale", (*NO_SCALES, math.inf), [*POSITIVE, "normal float32"]),
    (DynamicLossScale, "max_scale", NO_SCALES, POSITIVE),
    # What float32 makes 1, 0 or inf is not a factor: it never backs off, never grows, or ruins the scale at once.
    (DynamicLossScale, "growth_factor", (1, math.inf, math.nan, True, 1 + 1e-9, 1e39), ABOVE_1),
    (DynamicLossScale, "backoff_factor", (0, 1.0, -0.5, 1 - 1e-12, 1e-50), BETWEEN),
    *((DynamicLossScale, name, NO_COUNTS, AT_LEAST_1) for name in ("growth_interval", "hysteresis")),
    *((DynamicLossScale, name, [2**31], AT_MOST) for name in ("growth_interval", "hysteresis")),
    (DynamicLossScale, "hysteresis_refill", ["x", None], ["'growth' or 'finite'"]),
    (AdaptiveLossScale, "init_scale", [math.inf], POSITIVE),
    (AdaptiveLossScale, "min_scale", [0.0], POSITIVE),
    (AdaptiveLossScale, "scale_factor", [1.0, True], ABOVE_1),
    (AdaptiveLossScale, "min_window", [0, 20.0, True], AT_LEAST_1),
    (AdaptiveLossScale, "max_window", [1000.0, True], ["from 21 to"]),
    (AdaptiveLossScale, "initial_window", [20.0, -1], ["from 0 to"]),
    (AdaptiveLossScale, "windows", [(), 20], ["(20, 100)"]),
    (AdaptiveLossScale, "windows[1]", [-1, 30.0], ["from 0 to"]),
    *((AdaptiveLossScale, name, [2**31], AT_MOST) for name in ("max_window", "windows[1]")),
]


def test_bad_input_names_the_argument_the_value_and_the_cure():
    out_of_order = [
        ({"min_scale": 4.0, "max_scale": 2.0}, ["min_scale=4.0", "max_scale=2.0", "must not exceed"]),
        ({"init_scale": 2.0**30, "max_scale": 16.0}, ["=1073741824.0", "max_scale=16.0"]),
        ({"init_scale": 0.5}, ["init_scale=0.5", "min_scale=1.0"]),
    ]
    both = itertools.product((DynamicLossScale, AdaptiveLossScale), out_of_order)
    wrong = [(kind, "(init|min)_scale", *case) for kind, case in both]
    for kind, name, values, parts in BAD_INPUT:
        for value in values:
            given = {"windows": (20, value)} if name == "windows[1]" else {name: value}
            wrong.append((kind, re.escape(name), given, [*parts, "got ", repr(value)]))
    for kind, name, arguments, parts in wrong:
        with pytest.raises(ValueError, match=f"^{name} must ") as error:
            kind(**arguments)
        assert [part for part in parts if part not in str(error.value)] == []


@EACH_CONFIG
def test_configurations_are_frozen_hashable_and_equal_by_value(config):
    twin = pickle.loads(pickle.dumps(config))
    assert (twin, hash(twin), len({config, twin, *CONFIGS})) == (config, hash(config), len(CONFIGS))
    assert isinstance(config, jamp.LossScale)
    for field in [*(f.name for f in dataclasses.fields(config)), "loss_scale"]:
        with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
            setattr(config, field, 1.0)
    for init_scale in (TINY, 2**16, FLOAT32_MAX):  # any normal float32
        config = DynamicLossScale(init_scale, min_scale=TINY, max_scale=FLOAT32_MAX)
        assert float(config.init().loss_scale) == init_scale


@pytest.mark.parametrize("x64", [False, True])
@EACH_CONFIG
def test_states_are_strongly_typed_own_their_buffers_and_take_any_truth_value(config, x64):
    with jax.enable_x64(x64):
        state = config.init()
        pointers = {x.unsafe_buffer_pointer() for x in (*state, *config.init(), *jax.jit(config.init)())}
        assert len(pointers) == 3 * len(state)  # What is donated is nobody else's.
        dtypes = [jnp.dtype("float32" if name == "loss_scale" else "int32") for name in state._fields]
        assert avals(tuple(state))[1] == [((), dtype, False) for dtype in dtypes]
        states = [jax.eval_shape(config.init), jamp.set_loss_scale(state, 8), jamp.set_loss_scale(state, 8.0)]
        states.append(jax.eval_shape(jamp.set_loss_scale, state, 8))
        states += [jax.eval_shape(config.update, x, ok) for x in states for ok in (True, jnp.bool_(False))]
        assert all(avals(x) == avals(state) for x in states)
        for ok in (True, False):
            first, *others = (bits(config.update(state, kind(ok))) for kind in (jnp.bool_, bool, int, np.bool_))
            assert others == [first] * 3


LooseState = collections.namedtuple("LooseState", "loss_scale count average")


@dataclasses.dataclass
class Loose:
    """A user's loss scale of Python numbers and weak types."""

    initial: LooseState

    def init(self):
        return self.initial

    def update(self, state, grads_finite):
        return LooseState(jnp.where(grads_finite, 8.0, 0.5), state.count + 1, 2.5)


WEAK = [jnp.asarray(x) for x in (8.0, 0, 0.0)]


# A step that makes a float of an integer compiles twice, but truncates nothing.
@pytest.mark.parametrize(
    ("initial", "compilations"),
    [((8, 0, 0.0), 1), ((np.float64(8), np.int64(0), np.float16(0)), 1), (WEAK, 1), ((8.0, 0, 0), 2)],
)
def test_a_users_state_of_python_numbers_or_weak_types_compiles_once(initial, compilations):
    tx, w = jamp.loss_scaled(optax.identity(), Loose(LooseState(*initial))), jnp.ones(2)
    step, states = jax.jit(tx.update), [tx.init(w)]
    for grads in (w, w, jnp.inf * w):
        states.append(step(grads, states[-1])[1])
    assert step._cache_size() == compilations
    assert avals(states[compilations - 1]) == avals(states[-1])
    assert states[-1].loss_scale_state == (0.5, 3, 2.5)
    assert jamp.get_loss_scale(states[0]).dtype == jnp.float32
