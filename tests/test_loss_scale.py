"""Loss scales: recorded runs of other systems, a plain reference, the rules in words, bad input, what states are."""

import dataclasses
import json
import math
import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from loss_scales import adaptive, dynamic, run

import jamp
from jamp import AdaptiveLossScale, DynamicLossScale, NoOpLossScale, StaticLossScale

INT32_MAX = 2**31 - 1
TINY = float(np.finfo(np.float32).tiny)
FLOAT32_MAX = float(np.finfo(np.float32).max)
DATA = Path(__file__).parent / "data"
TORCH = json.loads((DATA / "torch_updates.json").read_text())["traces"]
PEERS = json.loads((DATA / "peers_hysteresis.json").read_text())
LONGEST = max(map(len, PEERS["sequences"].values()))
CONFIGS = [
    NoOpLossScale(),
    StaticLossScale(1024.0),
    DynamicLossScale(growth_interval=2, hysteresis=2),
    AdaptiveLossScale(2**32),
]
EACH_CONFIG = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)


def flags(overflow):
    return jnp.array([c == "0" for c in overflow])


def expand(rle):
    return np.repeat([x for x, _ in rle], [n for _, n in rle])


def digits(text):
    return [int(c, 36) for c in text]


def scales(config, overflow, state=None):
    """The scale after every step, one update at a time."""
    state, result = config.init() if state is None else state, []
    for c in overflow:
        state = config.update(state, jnp.bool_(c == "0"))
        result.append(float(state.loss_scale))
    return result


# Recorded runs of other systems


def check_torch(trace, loss_scale, growth_count):
    # torch has no floor: from the first subnormal scale on there is nothing to compare but the floor itself.
    stop = trace.get("first_subnormal_step", len(trace["overflow"]))
    recorded = expand(trace["scale_rle"]).astype(np.float32)
    np.testing.assert_array_equal(loss_scale[:stop], recorded[:stop])
    assert set(np.asarray(loss_scale[stop:])) <= {np.float32(TINY)}
    tracker = trace.get("growth_tracker_at") or dict(enumerate(digits(trace["growth_tracker"])))
    assert {step: int(growth_count[int(step)]) for step in tracker} == tracker


def torch_config(trace):
    return DynamicLossScale(**trace["config"], min_scale=TINY, max_scale=math.inf)


@pytest.mark.parametrize("trace", [t for t in TORCH if "events" not in t], ids=lambda t: t["name"])
def test_torch_traces_are_reproduced_exactly_in_one_scan(trace):
    config = torch_config(trace)
    states = run(config, config.init(), flags(trace["overflow"]))
    check_torch(trace, states.loss_scale, states.growth_count)


@pytest.mark.parametrize("trace", [t for t in TORCH if "events" in t], ids=lambda t: t["name"])
def test_torch_traces_with_settings_changed_midway_are_reproduced_exactly(trace):
    # A setter is another configuration for the same state; `update(new_scale)` replaces the scale and nothing else.
    config = torch_config(trace)
    state, states = config.init(), []
    for step, ok in enumerate(flags(trace["overflow"])):
        for setter, value in trace["events"].get(str(step), []):
            config = dataclasses.replace(config, **{setter.removeprefix("set_"): value})
        for _, value in trace["events"].get(f"{step}:update", []):
            state = state._replace(loss_scale=jnp.float32(value))
            break
        else:
            state = config.update(state, ok)
        states.append(state)
    states = jax.tree.map(lambda *xs: np.stack(xs), *states)
    check_torch(trace, states.loss_scale, states.growth_count)


def peer_config(recorded):
    """The configuration of Megatron-LM, Colossal-AI or apex in jamp's words."""
    get = recorded.get
    return DynamicLossScale(
        init_scale=get("initial_scale", get("init_scale")),
        growth_factor=get("growth_factor", 2.0),
        backoff_factor=get("backoff_factor", 0.5),
        growth_interval=get("growth_interval", get("scale_window")),
        min_scale=get("min_scale", get("min_loss_scale")) or TINY,
        max_scale=get("max_scale", get("max_loss_scale")) or math.inf,
        hysteresis=get("hysteresis", 1),
    )


@pytest.mark.parametrize("system", ["megatron", "colossalai", "apex"])
def test_hysteresis_floor_and_ceiling_of_other_systems_are_reproduced_exactly(system):
    for trace in PEERS["traces"]:
        if trace["system"] != system:
            continue
        config = peer_config(trace["config"])
        overflow = PEERS["sequences"][trace["sequence"]]
        states = run(config, config.init(), flags(overflow.ljust(LONGEST, "0")))  # one compilation a configuration
        states = jax.tree.map(lambda x, n=len(overflow): x[:n], states)
        np.testing.assert_array_equal(states.loss_scale, expand(trace["scale_rle"]).astype(np.float32))
        growth = {"megatron": "growth_tracker", "colossalai": "growth_step", "apex": "unskipped"}[system]
        np.testing.assert_array_equal(states.growth_count, digits(trace[growth]))
        if system == "megatron":  # its tracker goes on below 0
            np.testing.assert_array_equal(
                states.hysteresis_count, np.maximum(expand(trace["hysteresis_tracker_rle"]), 0)
            )
        if system == "colossalai":  # it counts the overflows, not what is left of them
            left = config.hysteresis - expand(trace["hysteresis_step_rle"])
            np.testing.assert_array_equal(states.hysteresis_count, np.maximum(left, 0))


# A plain reference


def reference(config, overflow, loss_scale):
    """Scale, finite steps in a row and overflows left before a backoff after every step, in plain Python."""
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


STEPS = 40
SEQUENCES = st.lists(
    st.integers(0, 2**STEPS - 1).map(lambda bits: [bool(bits >> i & 1) for i in range(STEPS)]), min_size=4, max_size=4
)
# None is the initial scale; subnormals are left out, for XLA may flush them and numpy does not.
FOUND = st.sampled_from([None, None, math.nan, math.inf, -math.inf, 0.0, -0.0, -3.0, -FLOAT32_MAX, TINY, FLOAT32_MAX])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(dynamic(), SEQUENCES, FOUND)
def test_any_configuration_and_sequence_agree_with_plain_python(config, sequences, found):
    start = config.init()
    if found is not None:
        start = start._replace(loss_scale=jnp.float32(found))
    states = jax.vmap(partial(run, config, start))(~jnp.array(sequences))
    with np.errstate(all="ignore"):
        expected = [list(reference(config, s, config.init_scale if found is None else found)) for s in sequences]
    for got, want in zip(states, np.moveaxis(np.array(expected, np.float64), -1, 0), strict=True):
        np.testing.assert_array_equal(got, want)
    # Inside [min_scale, max_scale] and never nan, whatever came in; the counts stay in range.
    assert np.all((states.loss_scale >= np.float32(config.min_scale)) & (states.loss_scale <= config.max_scale))
    assert np.all(np.isfinite(states.loss_scale))
    assert np.all((states.growth_count >= 0) & (states.growth_count < config.growth_interval))
    assert np.all((states.hysteresis_count >= 0) & (states.hysteresis_count <= config.hysteresis))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(dynamic() | adaptive(), SEQUENCES)
def test_scan_equals_step_by_step_with_the_state_restored_at_every_step(config, sequences):
    scanned = run(config, config.init(), ~jnp.array(sequences[0]))
    state = config.init()
    for step, overflow in enumerate(sequences[0]):
        state = config.update(jax.tree.map(jnp.asarray, jax.device_get(state)), jnp.bool_(not overflow))
        assert [x.item() for x in state] == [x[step].item() for x in scanned]


# The rules in words


def test_growth_comes_on_exactly_the_nth_finite_step():
    assert scales(DynamicLossScale(8.0, growth_interval=3), "0000000") == [8, 8, 16, 16, 16, 32, 32]


@pytest.mark.parametrize(
    ("overflow", "expected"),
    [
        ("0010001", [8, 8, 4, 4, 4, 8, 4]),  # the N-th step that overflows backs off, and the count restarts
        ("1000", [4, 4, 4, 8]),  # on the first step
        ("11111", [4, 2, 1, 1, 1]),  # on every step, down to the floor
        ("0101010", [8, 4, 4, 2, 2, 1, 1]),  # alternating: never a growth
        ("1110001", [4, 2, 1, 1, 1, 2, 1]),  # at the floor: stays, grows again from there
        ("0000001001", [8, 8, 16, 16, 16, 16, 8, 8, 8, 4]),  # at the ceiling: stays, and the count goes on
    ],
)
def test_overflow_backs_off_wherever_it_comes(overflow, expected):
    assert scales(DynamicLossScale(8.0, growth_interval=3, max_scale=16.0), overflow) == expected


def test_a_growth_past_max_scale_gives_max_scale():
    assert scales(DynamicLossScale(8.0, growth_interval=1, max_scale=10.0), "0010") == [10, 10, 5, 10]


def test_a_backoff_past_min_scale_gives_min_scale():
    assert scales(DynamicLossScale(8.0, growth_interval=1, min_scale=3.0), "1110") == [4, 3, 3, 6]


def test_without_ceiling_a_growth_that_would_be_infinite_is_refused_and_the_count_restarts():
    config = DynamicLossScale(2.0**126, growth_interval=2, max_scale=math.inf)
    states = run(config, config.init(), flags("0000001"))
    assert states.loss_scale.tolist() == [2.0**126] + [2.0**127] * 5 + [2.0**126]
    assert states.growth_count.tolist() == [1, 0, 1, 0, 1, 0, 0]


def test_the_first_overflows_since_the_last_refill_leave_the_scale():
    config = DynamicLossScale(8.0, growth_interval=3, hysteresis=3)
    assert scales(config, "1101") == [8, 8, 8, 4]  # a finite step does not refill it
    assert scales(config, "1111001") == [8, 8, 4, 2, 2, 2, 1]  # once spent every overflow backs off
    assert scales(config, "1110001101") == [8, 8, 4, 4, 4, 8, 8, 8, 8, 4]  # the growth refills it


def test_hysteresis_refill_finite_refills_at_every_finite_step():
    config = DynamicLossScale(8.0, growth_interval=9, hysteresis=2, hysteresis_refill="finite")
    assert scales(config, "101011101") == [8, 8, 8, 8, 8, 4, 2, 2, 2]


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize(
    ("found", "max_scale", "healed"),
    [
        (math.nan, 2.0**24, 8.0),
        (math.nan, math.inf, 8.0),
        (math.inf, 2.0**24, 2.0**24),
        (math.inf, math.inf, 8.0),
        (-math.inf, math.inf, 0.5),
        (0.0, math.inf, 0.5),
        (-1.0, 2.0**24, 0.5),
        (1e-40, 2.0**24, 0.5),
        (2.0**30, 2.0**24, 2.0**24),
        (2.0**-30, 2.0**24, 0.5),
    ],
)
def test_a_scale_found_inf_nan_zero_negative_or_out_of_range_heals_at_the_next_update(found, max_scale, healed, ok):
    config = DynamicLossScale(8.0, min_scale=0.5, max_scale=max_scale)
    state = config.init()._replace(loss_scale=jnp.float32(found))
    assert float(config.update(state, jnp.bool_(ok)).loss_scale) == healed


def test_a_growth_interval_of_the_largest_int32_is_reached_by_the_saturating_count():
    config = DynamicLossScale(8.0, growth_interval=INT32_MAX)
    state = config.init()._replace(growth_count=jnp.int32(INT32_MAX - 2))
    state = config.update(state, jnp.bool_(True))
    assert (float(state.loss_scale), int(state.growth_count)) == (8.0, INT32_MAX - 1)
    state = config.update(state, jnp.bool_(True))
    assert (float(state.loss_scale), int(state.growth_count)) == (16.0, 0)


def test_a_growth_count_beyond_a_lowered_interval_grows_at_the_next_finite_step():
    config = DynamicLossScale(8.0, growth_interval=3)
    assert scales(config, "0", config.init()._replace(growth_count=jnp.int32(INT32_MAX))) == [16]


def test_noop_and_static_keep_their_scale():
    assert scales(NoOpLossScale(), "0101") == [1, 1, 1, 1]
    assert scales(StaticLossScale(3.0), "0101") == [3, 3, 3, 3]


@EACH_CONFIG
@pytest.mark.parametrize("flag", [bool, int, np.bool_, jnp.bool_], ids=["bool", "int", "numpy", "jax"])
def test_update_takes_any_truth_value(config, flag):
    for ok in (True, False):
        jax.tree.map(
            np.testing.assert_array_equal,
            config.update(config.init(), flag(ok)),
            config.update(config.init(), jnp.bool_(ok)),
        )


# Bad input

POSITIVE = ("above 0", "such as 2.0**16")
ABOVE_1 = ("above 1", "such as 2.0")
BETWEEN = ("between 0 and 1", "such as 0.5")
NORMAL = ("normal float32",)
REFILL = ("'growth' or 'finite'",)
COUNT = ("must be an int",)


@pytest.mark.parametrize(
    ("make", "name", "value", "cure"),
    [
        *[(DynamicLossScale, "init_scale", x, POSITIVE) for x in (0, 0.0, -1.0, math.nan, math.inf, True, "x", None)],
        (DynamicLossScale, "init_scale", 2**128, NORMAL),
        (DynamicLossScale, "growth_factor", 1, ABOVE_1),
        (DynamicLossScale, "growth_factor", math.inf, ABOVE_1),
        (DynamicLossScale, "growth_factor", math.nan, ABOVE_1),
        (DynamicLossScale, "growth_factor", True, ABOVE_1),
        (DynamicLossScale, "backoff_factor", 0, BETWEEN),
        (DynamicLossScale, "backoff_factor", 1.0, BETWEEN),
        (DynamicLossScale, "backoff_factor", -0.5, BETWEEN),
        (DynamicLossScale, "min_scale", 0, POSITIVE),
        (DynamicLossScale, "min_scale", -1.0, POSITIVE),
        (DynamicLossScale, "min_scale", math.nan, POSITIVE),
        (DynamicLossScale, "min_scale", math.inf, POSITIVE),
        (DynamicLossScale, "min_scale", 1e-40, NORMAL),
        (DynamicLossScale, "max_scale", 0.0, POSITIVE),
        (DynamicLossScale, "max_scale", math.nan, POSITIVE),
        (DynamicLossScale, "max_scale", -math.inf, POSITIVE),
        (DynamicLossScale, "max_scale", True, POSITIVE),
        (DynamicLossScale, "max_scale", 1e39, NORMAL),
        *[(DynamicLossScale, "growth_interval", x, COUNT) for x in (0, -1, 2.5, 2000.0, True, "x", 2**31)],
        *[(DynamicLossScale, "hysteresis", x, COUNT) for x in (0, -1, 1.5, True, 2**31)],
        (DynamicLossScale, "hysteresis_refill", "x", REFILL),
        (DynamicLossScale, "hysteresis_refill", None, REFILL),
        *[(StaticLossScale, "scale", x, POSITIVE) for x in (0, -1.0, math.nan, math.inf, True, "x")],
        (StaticLossScale, "scale", 1e-40, NORMAL),
        # What float32 makes 1, 0 or inf is no factor: it would never back off, never grow, or ruin the scale at once.
        (DynamicLossScale, "growth_factor", 1 + 1e-9, ABOVE_1),
        (DynamicLossScale, "growth_factor", 1e39, ABOVE_1),
        (DynamicLossScale, "backoff_factor", 1 - 1e-12, BETWEEN),
        (DynamicLossScale, "backoff_factor", 1e-50, BETWEEN),
    ],
    ids=lambda x: x.__name__ if isinstance(x, type) else "" if isinstance(x, tuple) else repr(x),
)
def test_bad_input_names_the_argument_the_value_and_the_cure(make, name, value, cure):
    with pytest.raises(ValueError, match=f"^{name} must ") as error:
        make(**{name: value})
    assert f"got {name}={value!r}" in str(error.value)
    for part in cure:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("kwargs", "parts"),
    [
        ({"min_scale": 4.0, "max_scale": 2.0}, ["min_scale=4.0", "max_scale=2.0", "must not exceed"]),
        ({"init_scale": 2.0**30}, ["init_scale=1073741824.0", "max_scale=16777216.0", "max_scale=math.inf removes"]),
        ({"init_scale": 0.5}, ["init_scale=0.5", "min_scale=1.0", "widen the bounds"]),
    ],
)
def test_scales_out_of_order_are_an_error_that_shows_them(kwargs, parts):
    with pytest.raises(ValueError, match=r"^(init_scale|min_scale) must ") as error:
        DynamicLossScale(**kwargs)
    for part in parts:
        assert part in str(error.value)


def test_an_array_is_no_configuration():
    # It would be made at construction, and a traced one would leak.
    with pytest.raises(ValueError, match=r"^init_scale must be a .*Python number"):
        DynamicLossScale(init_scale=jnp.float32(8.0))


@pytest.mark.parametrize("init_scale", [TINY, 2**16, FLOAT32_MAX])
def test_any_normal_float32_is_an_initial_scale(init_scale):
    config = DynamicLossScale(init_scale, min_scale=TINY, max_scale=FLOAT32_MAX)
    assert float(config.init().loss_scale) == init_scale


# What configurations and states are


@EACH_CONFIG
def test_configurations_are_frozen_hashable_and_equal_by_value(config):
    twin = pickle.loads(pickle.dumps(config))
    assert twin == config
    assert hash(twin) == hash(config)
    assert len({config, twin, *CONFIGS}) == len(CONFIGS)
    assert isinstance(config, jamp.LossScale)
    for field in [*(f.name for f in dataclasses.fields(config)), "loss_scale"]:
        with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
            setattr(config, field, 1.0)


def test_replacing_a_field_checks_it():
    with pytest.raises(ValueError, match="growth_interval"):
        dataclasses.replace(DynamicLossScale(), growth_interval=0)


def test_equal_configurations_share_one_compilation_and_so_do_all_states():
    traces = []

    @partial(jax.jit, static_argnums=0)
    def update(config, state, ok):
        traces.append(config)
        return config.update(state, ok)

    state = DynamicLossScale().init()
    for ok in (True, False, jnp.bool_(True)):
        state = update(DynamicLossScale(), state, ok)
        state = jamp.set_loss_scale(state, 8)
    update(DynamicLossScale(), DynamicLossScale().update(state, True), True)
    assert len(traces) == 1


def check_strong(state):
    for name, x in state._asdict().items():
        assert isinstance(x, jax.Array), name
        dtype = jnp.float32 if name == "loss_scale" else jnp.int32
        assert (x.shape, x.dtype, x.weak_type) == ((), dtype, False), name


def check_states(config):
    update = jax.jit(config.update)
    check_strong(config.init())
    check_strong(jax.jit(config.init)())
    for ok in (True, jnp.bool_(False)):
        check_strong(config.update(config.init(), ok))
        check_strong(update(config.init(), ok))
    check_strong(jamp.set_loss_scale(config.init(), 8))
    check_strong(jamp.set_loss_scale(config.init(), 8.0))
    check_strong(jax.jit(jamp.set_loss_scale)(config.init(), 8))


@EACH_CONFIG
@pytest.mark.usefixtures("strict")
def test_states_are_strongly_typed(config):
    check_states(config)


@EACH_CONFIG
@pytest.mark.usefixtures("x64")
def test_states_are_strongly_typed_under_x64(config):
    check_states(config)


@EACH_CONFIG
@pytest.mark.parametrize("init", ["eager", "jit"])
def test_every_array_is_its_own_buffer_so_that_a_whole_state_can_be_donated_twice(config, init):
    init = config.init if init == "eager" else jax.jit(config.init)
    state = init()
    assert len({x.unsafe_buffer_pointer() for x in state}) == len(state)
    update = jax.jit(config.update, donate_argnums=0)
    state = update(update(state, False), True)
    if isinstance(config, DynamicLossScale):
        assert [x.item() for x in state] == [65536, 1, 1]
    update(update(init(), False), True)  # the donated state was nobody else's


@EACH_CONFIG
def test_init_has_the_shapes_it_says_without_running(config):
    shapes = jax.eval_shape(config.init)
    assert type(shapes) is type(config.init())
    same = lambda s, x: (s.shape, s.dtype, s.weak_type) == (x.shape, x.dtype, x.weak_type)
    assert all(jax.tree.leaves(jax.tree.map(same, shapes, config.init())))
    assert jax.eval_shape(config.update, shapes, jax.ShapeDtypeStruct((), bool)) == shapes


@settings(max_examples=10, deadline=None, derandomize=True)
@given(SEQUENCES)
def test_final_scale_is_init_times_growth_per_applied_and_backoff_per_skipped_step(sequences):
    config = DynamicLossScale(1.0, growth_interval=1, min_scale=TINY, max_scale=math.inf)
    states = run(config, config.init(), ~jnp.array(sequences[0]))
    skipped = sum(sequences[0])
    assert float(states.loss_scale[-1]) == 2.0 ** (STEPS - skipped) * 0.5**skipped


def test_hysteresis_one_backs_off_at_every_overflow():
    assert scales(DynamicLossScale(8.0, hysteresis=1), "101") == [4, 4, 2]


def test_scales_below_1_are_legal():
    config = DynamicLossScale(0.5, growth_interval=2, min_scale=2.0**-3)
    assert scales(config, "11100") == [0.25, 0.125, 0.125, 0.125, 0.25]


def test_presets():
    assert DynamicLossScale.conservative() == DynamicLossScale(growth_interval=5000)
    assert DynamicLossScale.aggressive() == DynamicLossScale(growth_interval=1000)


@EACH_CONFIG
def test_states_survive_being_trees_of_anything(config):
    # Nothing is checked when a pytree is unflattened.
    state = config.init()
    for leaf in (PartitionSpec(), jax.ShapeDtypeStruct((), jnp.float32), None, "name", object()):
        tree = jax.tree.map(lambda _, leaf=leaf: leaf, state)
        assert type(tree) is type(state)
        assert tuple(tree) == (leaf,) * len(state)
        is_leaf = lambda x, leaf=leaf: x is leaf
        assert jax.tree.structure(tree, is_leaf=is_leaf) == jax.tree.structure(state)


@EACH_CONFIG
def test_states_compile_ahead_of_time_and_with_shardings(config):
    state = config.init()
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    shardings = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), state)
    update = jax.jit(config.update, in_shardings=(shardings, None), out_shardings=shardings)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    compiled = update.lower(shapes, jax.ShapeDtypeStruct((), bool)).compile()
    jax.tree.map(np.testing.assert_array_equal, compiled(state, jnp.bool_(True)), config.update(state, True))


def test_nothing_is_allocated_at_import_or_construction():
    # With a backend that does not exist, whatever touches a device fails.
    program = """
import jamp, optax
config = jamp.DynamicLossScale()
jamp.StaticLossScale(), jamp.NoOpLossScale(), jamp.loss_scaled(optax.adam(1e-3), config)
print("constructed")
config.init()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"JAX_PLATFORMS": "no_such_backend"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "constructed\n", done.stderr
    assert "no_such_backend" in done.stderr
