"""Loss scales by dtype, from mappings, YAML and JSON and back, a user's own, and a run that goes on under another."""

import json
import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from hypothesis import given, settings, strategies as st
from loss_scales import adaptive, dynamic, static

import jamp
from jamp import AdaptiveLossScale, DynamicLossScale, NoOpLossScale, StaticLossScale

# By dtype


@pytest.mark.parametrize(
    ("dtype", "loss_scale"),
    [
        (jnp.float16, DynamicLossScale()),
        ("float16", DynamicLossScale()),
        (np.dtype(np.float16), DynamicLossScale()),
        (jnp.bfloat16, StaticLossScale(1.0)),
        ("bfloat16", StaticLossScale(1.0)),
        (jnp.float32, NoOpLossScale()),
        (jnp.float64, NoOpLossScale()),
        (jnp.float8_e4m3fn, AdaptiveLossScale()),
        (jnp.float8_e5m2, AdaptiveLossScale()),
        ("float8_e4m3b11fnuz", AdaptiveLossScale()),
    ],
)
def test_loss_scale_for_a_dtype(dtype, loss_scale):
    assert jamp.loss_scale_for(dtype) == loss_scale


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_loss_scale_for_a_dtype_that_is_not_floating_is_an_error(dtype):
    with pytest.raises(ValueError, match=f"dtype must be floating, such as jnp.float16, got dtype='{dtype}'"):
        jamp.loss_scale_for(dtype)


# From a mapping


@pytest.mark.parametrize(
    ("config", "loss_scale"),
    [
        ({"type": "none"}, NoOpLossScale()),
        ({"type": "static"}, StaticLossScale()),
        ({"type": "static", "scale": 8}, StaticLossScale(8)),
        ({"type": "dynamic"}, DynamicLossScale()),
        ({"type": "dynamic", "growth_interval": 5000}, DynamicLossScale.conservative()),
        ({"type": "dynamic", "growth_interval": 1000}, DynamicLossScale.aggressive()),
        (
            {"type": "dynamic", "hysteresis": 2, "hysteresis_refill": "finite"},
            DynamicLossScale(hysteresis=2, hysteresis_refill="finite"),
        ),
        ({"type": "adaptive"}, AdaptiveLossScale()),
        (
            {"type": "adaptive", "windows": [1, 5], "max_scale": 2.0**24},
            AdaptiveLossScale(windows=(1, 5), max_scale=2.0**24),
        ),
    ],
)
def test_a_mapping_with_a_type_and_fields_makes_the_loss_scale(config, loss_scale):
    assert jamp.loss_scale_from_config(config) == loss_scale


ADAPTIVE_CELL = {
    "type": "AdaptiveLossScaleUpdateCell",
    "loss_scale_value": 2**32,
    "scale_factor": 4,
    "scale_window": 30,
    "max_scale_window": 500,
    "min_scale_window": 10,
}
ADAPTIVE = AdaptiveLossScale(2**32, 4, min_window=10, max_window=500, initial_window=30)
CELLS = [
    (ADAPTIVE_CELL, ADAPTIVE),
    (
        {"type": "AdaptiveLossScaleUpdateCell", "loss_scale_value": 1, "scale_factor": 2, "scale_window": 20},
        AdaptiveLossScale(1, 2, initial_window=20),
    ),
    (
        {"type": "DynamicLossScaleUpdateCell", "loss_scale_value": 2**32, "scale_factor": 4, "scale_window": 1000},
        DynamicLossScale(2**32, 4, 0.25, 1000, min_scale=1.0, max_scale=math.inf),
    ),
    ({"type": "FixedLossScaleUpdateCell", "loss_scale_value": 2**33}, StaticLossScale(2**33)),
]


@pytest.mark.parametrize(("cell", "loss_scale"), CELLS)
def test_the_arguments_of_mindspores_cells_make_the_loss_scale(cell, loss_scale):
    wrapper = {"type": "MFTrainOneStepCell", "scale_sense": cell, "use_clip_grad": True}
    assert jamp.loss_scale_from_config(cell) == loss_scale
    assert jamp.loss_scale_from_config(wrapper) == loss_scale
    assert jamp.loss_scale_from_config({"runner_config": {"epochs": 3}, "runner_wrapper": wrapper}) == loss_scale


def test_a_plain_number_as_scale_sense_is_a_static_scale():
    config = yaml.safe_load("runner_wrapper: {type: MFTrainOneStepCell, scale_sense: 1.0, use_clip_grad: True}")
    assert jamp.loss_scale_from_config(config) == StaticLossScale(1.0)


def test_init_accepts_ints_above_2_to_the_31():
    for config, _ in CELLS:
        loss_scale = jamp.loss_scale_from_config(config)
        assert float(loss_scale.init().loss_scale) == config["loss_scale_value"]


def test_a_number_given_as_a_string_is_a_number():
    # PyYAML reads 1e9 as a string, and strict JSON cannot say infinity.
    config = yaml.safe_load("{type: dynamic, init_scale: 1e4, max_scale: inf, hysteresis_refill: finite}")
    assert config["init_scale"] == "1e4"
    assert jamp.loss_scale_from_config(config) == DynamicLossScale(1e4, max_scale=math.inf, hysteresis_refill="finite")
    with pytest.raises(ValueError, match=r"init_scale must be a finite Python number .* got init_scale='high'"):
        jamp.loss_scale_from_config({"type": "dynamic", "init_scale": "high"})


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.just(NoOpLossScale()) | static | dynamic() | adaptive())
def test_to_config_is_the_inverse_also_through_yaml_and_json(loss_scale):
    config = loss_scale.to_config()
    assert jamp.loss_scale_from_config(config) == loss_scale
    assert jamp.loss_scale_from_config(json.loads(json.dumps(config))) == loss_scale
    assert jamp.loss_scale_from_config(yaml.safe_load(yaml.safe_dump(config))) == loss_scale


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"type": "Dynamic"},
            r"Unknown type 'Dynamic'\. Did you mean 'dynamic'\? Valid: 'adaptive', 'dynamic', 'none'",
        ),
        ({"type": "AdaptiveLossScaleCell"}, r"Did you mean 'AdaptiveLossScaleUpdateCell'\?"),
        ({"type": "xyz"}, r"Unknown type 'xyz'\. Valid: 'adaptive', 'dynamic', 'none', 'static', 'Adaptive"),
        ({"type": ["dynamic"]}, r"Unknown type \['dynamic'\]\. Did you mean 'dynamic'\?"),
        ({"scale": 8.0}, "has no 'type', only 'scale'. Valid types: 'adaptive', 'dynamic', 'none', 'static'"),
        ({"runner_wrapper": {"type": "MFTrainOneStepCell"}}, "Unknown type 'MFTrainOneStepCell'.*Valid: 'adaptive'"),
        (
            {"type": "dynamic", "interval": 5},
            r"Unknown key for type 'dynamic': 'interval'\. Did you mean 'growth_interval'\? Valid: 'init_scale', 'g",
        ),
        ({"type": "none", "scale": 1.0}, r"Unknown key for type 'none': 'scale'\. Valid: none\."),
        ({"type": "adaptive", "loss_scale_value": 1}, r"Did you mean .*\? Valid: 'init_scale', 'scale_factor'"),
        (ADAPTIVE_CELL | {"max_window": 5}, r"Did you mean 'max_scale_window'\? Valid: 'loss_scale_value'"),
        (
            {"type": "AdaptiveLossScaleUpdateCell", "loss_scale_value": 1},
            r"Type 'AdaptiveLossScaleUpdateCell' needs 'scale_factor', 'scale_window'; got 'loss_scale_value'\.",
        ),
        (CELLS[2][0] | {"scale_factor": 0}, "scale_factor must be a finite Python number above 1"),
        ({"type": "static", "scale": True}, "scale must be a finite Python number above 0"),
    ],
)
def test_an_unknown_type_or_key_is_an_error_with_the_valid_ones_and_the_nearest_spelling(config, message):
    with pytest.raises(ValueError, match=message):
        jamp.loss_scale_from_config(config)


@pytest.mark.parametrize("config", ["dynamic", None, ["dynamic"], {"runner_wrapper": None}])
def test_what_is_no_mapping_is_an_error(config):
    with pytest.raises(TypeError, match="configured by a mapping with a 'type', got"):
        jamp.loss_scale_from_config(config)


# A run that goes on under another loss scale

PARAMS = {"w": jnp.ones(3)}


def trained(loss_scale, overflow="001"):
    """The parameters and the optimizer state after a few steps."""
    tx = jamp.loss_scaled(optax.adam(0.1), loss_scale)
    return steps(tx, PARAMS, tx.init(PARAMS), overflow)


def steps(tx, params, opt_state, overflow):
    for bit in overflow:
        grads = {"w": jnp.full(3, math.inf if bit == "1" else 0.5)}
        updates, opt_state = jax.jit(tx.update)(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return params, opt_state


def same_structure_and_types(a, b):
    kinds = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), jax.tree.map(jax.typeof, tree))
    return jax.tree.structure(a) == jax.tree.structure(b) and kinds(a) == kinds(b)


def test_a_run_goes_on_from_dynamic_to_adaptive_with_its_scale_statistics_and_inner_state():
    params, opt_state = trained(DynamicLossScale(2.0**20))
    adaptive = AdaptiveLossScale(initial_window=30)
    tx = jamp.loss_scaled(optax.adam(0.1), adaptive)
    converted = jamp.convert_loss_scale(opt_state, adaptive)
    assert same_structure_and_types(converted, tx.init(params))
    expected = adaptive.init()._replace(loss_scale=jnp.float32(2.0**19))
    assert [x.item() for x in converted.loss_scale_state] == [x.item() for x in expected]
    for old, new in zip(jax.tree.leaves(opt_state[1:]), jax.tree.leaves(converted[1:]), strict=True):
        np.testing.assert_array_equal(old, new)
    # The same steps as if nothing had been converted: the parameters are bit for bit those of the other run.
    went_on, _ = steps(tx, params, converted, "0100")
    dynamic_tx = jamp.loss_scaled(optax.adam(0.1), DynamicLossScale(2.0**20))
    np.testing.assert_array_equal(went_on["w"], steps(dynamic_tx, params, opt_state, "0100")[0]["w"])


@pytest.mark.parametrize(
    ("scale", "target", "converted"),
    [
        (2.0**30, DynamicLossScale(), 2.0**24),
        (2.0**-3, DynamicLossScale(), 1.0),
        (2.0**30, AdaptiveLossScale(), 2.0**30),
        (math.nan, AdaptiveLossScale(), 2.0**12),
        (math.inf, AdaptiveLossScale(), 2.0**12),
        (math.inf, DynamicLossScale(), 2.0**24),
        (0.0, AdaptiveLossScale(min_scale=0.5), 0.5),
        (2.0**30, StaticLossScale(8.0), 8.0),
        (2.0**30, NoOpLossScale(), 1.0),
    ],
)
def test_a_converted_scale_lies_inside_the_new_bounds_and_a_constant_one_is_the_constant(scale, target, converted):
    state = jamp.StaticLossScaleState(jnp.float32(scale))
    new = jamp.convert_loss_scale({"nested": (state, 1)}, target)
    assert type(new["nested"][0]) is type(target.init())
    assert float(jamp.get_loss_scale(new)) == converted
    assert new["nested"][1] == 1


def test_every_built_in_loss_scale_converts_to_every_other_and_trains_on():
    kinds = [NoOpLossScale(), StaticLossScale(), DynamicLossScale(), AdaptiveLossScale()]
    for source in kinds:
        params, opt_state = trained(source, "0")
        for target in kinds:
            tx = jamp.loss_scaled(optax.adam(0.1), target)
            converted = jamp.convert_loss_scale(opt_state, target)
            assert same_structure_and_types(converted, tx.init(params))
            assert steps(tx, params, converted, "0")[0]["w"][0] < params["w"][0]


def test_an_ensemble_is_converted_as_a_whole_and_inside_jit():
    states = jax.vmap(lambda _: DynamicLossScale().init())(jnp.arange(3))
    states = states._replace(loss_scale=jnp.array([1.0, 2.0, jnp.nan], jnp.float32))
    config = AdaptiveLossScale()
    whole = jax.jit(partial(jamp.convert_loss_scale, loss_scale=config))(states)
    each = jax.vmap(lambda state: jamp.convert_loss_scale(state, config))(states)
    assert whole.loss_scale.tolist() == [1.0, 2.0, 2.0**12]
    assert same_structure_and_types(whole, each)
    jax.tree.map(np.testing.assert_array_equal, whole, each)


# A loss scale written by a user


class WarmupState(NamedTuple):
    loss_scale: jax.Array  # f32[]
    step: jax.Array  # i32[]


class Warmup:
    """Doubles every third step up to a limit; an overflow halves it."""

    def init(self):
        return WarmupState(jnp.float32(4.0), jnp.int32(0))

    def update(self, state, grads_finite):
        step = state.step + 1
        grown = jnp.where(step % 3 == 0, jnp.minimum(state.loss_scale * 2, 64.0), state.loss_scale)
        return WarmupState(jnp.where(grads_finite, grown, state.loss_scale * 0.5), step)


def loss_fn(params, x):
    return jnp.mean((params["w"].astype(jnp.float16) * x).astype(jnp.float32) ** 2)


def test_a_users_own_loss_scale_works_everywhere_a_built_in_does():
    config = Warmup()
    assert isinstance(config, jamp.LossScale)
    tx = jamp.loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), config)

    @jax.jit
    def train(params, opt_state, xs):
        def step(carry, x):
            params, opt_state = carry
            loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, x)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), (loss, jamp.metrics(opt_state))

        return jax.lax.scan(step, (params, opt_state), xs)

    xs = jnp.ones(8, jnp.float16).at[3].set(jnp.inf)
    (_, opt_state), (loss, metrics) = train(PARAMS, tx.init(PARAMS), xs)
    assert metrics["loss_scale"].tolist() == [4, 4, 8, 4, 4, 8, 8, 8]
    assert metrics["grads_finite"].tolist() == [True, True, True, False, True, True, True, True]
    assert loss[-1] < loss[0]
    assert (int(jamp.get_stats(opt_state).increases), int(jamp.get_stats(opt_state).decreases)) == (2, 1)
    assert float(jamp.metrics(opt_state)["success_rate"]) == 7 / 8
    assert float(jamp.get_stats(opt_state).max_loss_scale) == 8.0
    jamp.check_health(opt_state, loss_scale=config)

    changed = jamp.set_loss_scale(opt_state, 32.0)
    assert [x.item() for x in changed.loss_scale_state] == [32.0, 8]
    assert float(jamp.scale_loss(jnp.float32(2.0), changed)) == 64.0
    grads, finite = jamp.unscale_and_check({"w": jnp.float16([64.0])}, changed)
    assert (grads["w"].item(), bool(finite)) == (2.0, True)
    reset = optax.tree.set(changed, loss_scale_state=config.init())
    assert float(optax.tree.get(reset, "loss_scale")) == 4.0

    assert jax.vmap(config.update)(jax.vmap(lambda _: config.init())(xs), jnp.arange(8) > 0).loss_scale[0] == 2.0
    to_own = jamp.convert_loss_scale(trained(DynamicLossScale())[1], config)
    assert [x.item() for x in to_own.loss_scale_state] == [2.0**15, 0]
    to_dynamic = jamp.convert_loss_scale(changed, DynamicLossScale())
    assert [x.item() for x in to_dynamic.loss_scale_state] == [32.0, 0, 1]
