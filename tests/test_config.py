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
from trees import assert_equal, avals, bits

import jamp
from jamp import AdaptiveLossScale, DynamicLossScale, NoOpLossScale, StaticLossScale


def test_loss_scale_for_a_dtype():
    for loss_scale, dtypes in (
        (DynamicLossScale(), (jnp.float16, "float16", np.dtype(np.float16))),
        (StaticLossScale(1.0), (jnp.bfloat16, "bfloat16")),
        (NoOpLossScale(), (jnp.float32, jnp.float64)),
        (AdaptiveLossScale(), (jnp.float8_e4m3fn, jnp.float8_e5m2, "float8_e4m3b11fnuz")),
    ):
        assert [jamp.loss_scale_for(dtype) for dtype in dtypes] == [loss_scale] * len(dtypes)
    for dtype in ("int32", "bool", "complex64"):
        with pytest.raises(ValueError, match=f"floating.*'{dtype}'"):
            jamp.loss_scale_for(dtype)


ADAPTIVE = {"type": "AdaptiveLossScaleUpdateCell", "loss_scale_value": 2**32, "scale_factor": 4, "scale_window": 30}
BOUNDED = ADAPTIVE | {"max_scale_window": 500, "min_scale_window": 10}
DYNAMIC = ADAPTIVE | {"type": "DynamicLossScaleUpdateCell"}
REFILLED = {"hysteresis": 2, "hysteresis_refill": "finite"}
# PyYAML reads 1e4 as a string, and strict JSON cannot say infinity.
STRINGS = yaml.safe_load("{type: dynamic, init_scale: 1e4, max_scale: inf, hysteresis_refill: finite}")
STRINGS |= {"growth_interval": "2e3", "hysteresis": "2", "growth_factor": "4.0"}
assert STRINGS["init_scale"] == "1e4"
QUOTED = {"type": "adaptive", "windows": ["1", "5"], "initial_window": "5", "min_window": " 2", "max_scale": "inf"}
CLIPPED = r"scale_sense.*clip_by_global_norm\(1\.0\)"


@pytest.mark.parametrize(
    ("config", "loss_scale"),
    [
        ({"type": "none"}, NoOpLossScale()),
        ({"type": "static"}, StaticLossScale()),
        ({"type": "static", "scale": 8}, StaticLossScale(8)),
        (1.0, StaticLossScale(1.0)),
        ("1e5", StaticLossScale(1e5)),
        ({"type": "dynamic"}, DynamicLossScale()),
        ({"type": "dynamic", "growth_interval": 5000}, DynamicLossScale.conservative()),
        ({"type": "dynamic", "growth_interval": 1000}, DynamicLossScale.aggressive()),
        ({"type": "dynamic", **REFILLED}, DynamicLossScale(**REFILLED)),
        (STRINGS, DynamicLossScale(1e4, growth_factor=4.0, max_scale=math.inf, **REFILLED)),
        (QUOTED, AdaptiveLossScale(windows=(1, 5), initial_window=5, min_window=2)),
        (dict(zip(ADAPTIVE, map(str, ADAPTIVE.values()), strict=True)), AdaptiveLossScale(2**32, 4, initial_window=30)),
        ({"type": "adaptive"}, AdaptiveLossScale()),
        ({"type": "adaptive", "windows": [1, 5], "max_scale": 9e9}, AdaptiveLossScale(windows=(1, 5), max_scale=9e9)),
        # MindSpore's, with ints above 2**31
        (ADAPTIVE, AdaptiveLossScale(2**32, 4, initial_window=30)),
        (BOUNDED, AdaptiveLossScale(2**32, 4, min_window=10, max_window=500, initial_window=30)),
        (DYNAMIC, DynamicLossScale(2**32, 4, 0.25, 30, min_scale=1.0, max_scale=math.inf)),
        ({"type": "FixedLossScaleUpdateCell", "loss_scale_value": 2**33}, StaticLossScale(2**33)),
    ],
)
def test_a_mapping_makes_the_loss_scale_also_inside_a_document_of_mindformers(config, loss_scale):
    wrapper = {"type": "MFTrainOneStepCell", "scale_sense": config, "use_clip_grad": False}
    for mapping in (config, wrapper, {"runner_config": {"epochs": 3}, "runner_wrapper": wrapper}):
        assert jamp.loss_scale_from_config(mapping) == loss_scale
    for mapping in (wrapper | {"use_clip_grad": True}, {"runner_wrapper": wrapper | {"use_clip_grad": True}}):
        with pytest.warns(UserWarning, match=CLIPPED) as caught:
            assert jamp.loss_scale_from_config(mapping) == loss_scale
        assert caught[0].filename == __file__
    value = getattr(loss_scale, "init_scale", getattr(loss_scale, "scale", 1.0))
    assert float(loss_scale.init().loss_scale) == value


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.just(NoOpLossScale()) | static | dynamic() | adaptive())
def test_to_config_is_the_inverse_also_through_yaml_and_json(loss_scale):
    config = loss_scale.to_config()
    for read in (config, json.loads(json.dumps(config)), yaml.safe_load(yaml.safe_dump(config))):
        assert jamp.loss_scale_from_config(read) == loss_scale


def test_numbers_of_numpy_are_numbers_and_become_those_of_python():
    for make, fields in (
        (jamp.StaticLossScale, {"scale": 1024}),
        (jamp.DynamicLossScale, {"init_scale": 1024, "growth_factor": 2, "growth_interval": 5, "hysteresis": 2}),
        (jamp.AdaptiveLossScale, {"init_scale": 1024, "min_window": 10, "initial_window": 1, "max_scale": 2**20}),
        (jamp.GradScaler, {"init_scale": 1024, "growth_interval": 7}),
    ):
        for number in (np.int64, np.array):
            made = make(**{name: number(value) for name, value in fields.items()})
            assert repr(made) == repr(make(**fields))
            if make is not jamp.GradScaler:
                assert (made, hash(made)) == (make(**fields), hash(make(**fields)))
                json.dumps(made.to_config())
    windows = jamp.AdaptiveLossScale(windows=[np.int32(20), np.int64(100)])
    assert windows == jamp.AdaptiveLossScale(windows=(20, 100))
    assert jamp.loss_scale_from_config(np.float32(8)) == jamp.StaticLossScale(8.0)
    assert jamp.DynamicLossScale(np.float32(1024)) == jamp.DynamicLossScale(1024.0)
    with pytest.raises(ValueError, match="int"):
        jamp.DynamicLossScale(growth_interval=np.float32(5))
    with pytest.raises(ValueError, match="normal"):
        jamp.StaticLossScale(np.bool_(True))


NUMBER, NOT_A_MAPPING = "scale must be a normal float32 above 0", "mapping"
CELL = "AdaptiveLossScaleUpdateCell"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"type": "Dynamic"}, "mean 'dynamic'"),
        ({"type": "AdaptiveLossScaleCell"}, "mean 'AdaptiveLossScaleUpdateCell'"),
        ({"type": "xyz"}, r"'xyz'\. Valid: 'adaptive'"),
        ({"type": ["dynamic"]}, "mean 'dynamic'"),
        ({"scale": 8.0}, "'scale'. Valid: 'adaptive'"),
        ({"runner_wrapper": {"type": "MFTrainOneStepCell"}}, "Valid: 'adaptive'"),
        ({"type": "dynamic", "interval": 5}, "mean 'growth_interval'"),
        ({"type": "dynamic", "interval": 5}, "Valid: 'init_scale'"),
        ({"type": "none", "scale": 1.0}, "Valid: none"),
        ({"type": "adaptive", "loss_scale_value": 1}, "Valid: 'init_scale'"),
        (ADAPTIVE | {"max_window": 5}, "mean 'max_scale_window'"),
        ({"type": CELL, "loss_scale_value": 1}, "'scale_factor', 'scale_window'"),
        (DYNAMIC | {"scale_factor": 0}, "scale_factor must be a normal float32 above 1"),
        ({"type": "static", "scale": True}, NUMBER),
        ({"scale_sense": "inf"}, NUMBER),
        *(({"type": "dynamic", "growth_interval": x}, "growth_interval") for x in ("20.5", "inf", "ten")),
        ({"type": "dynamic", "init_scale": "high"}, rf"init_{NUMBER}.*'high'"),
        *((config, NOT_A_MAPPING) for config in ("dynamic", None, ["dynamic"], {"runner_wrapper": None})),
    ],
)
def test_a_wrong_configuration_is_an_error_with_what_is_valid_and_nearest(config, message):
    with pytest.raises(TypeError if message == NOT_A_MAPPING else ValueError, match=message):
        jamp.loss_scale_from_config(config)


PARAMS = {"w": jnp.ones(3)}
SGD = optax.sgd(0.1, momentum=0.9)


def steps(loss_scale, overflow, params=PARAMS, opt_state=None):
    """The parameters and the optimizer state after a few steps."""
    tx = jamp.loss_scaled(SGD, loss_scale)
    opt_state = tx.init(params) if opt_state is None else opt_state
    for bit in overflow:
        updates, opt_state = tx.update({"w": jnp.full(3, math.inf if bit == "1" else 0.5)}, opt_state, params)
        params = optax.apply_updates(params, updates)
    return params, opt_state


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("source", [NoOpLossScale(), StaticLossScale(), DynamicLossScale(2.0**20), AdaptiveLossScale()])
def test_every_loss_scale_converts_to_every_other_and_the_run_goes_on(source):
    params, opt_state = steps(source, "00" if source == NoOpLossScale() else "01")
    for target in (NoOpLossScale(), StaticLossScale(), DynamicLossScale(), AdaptiveLossScale(initial_window=30)):
        converted = jamp.convert_loss_scale(opt_state, target)
        assert avals(converted) == avals(jamp.loss_scaled(SGD, target).init(params))
        assert_equal(converted[1:], opt_state[1:])  # the statistics and the inner state
        expected = target.init()
        if isinstance(target, (DynamicLossScale, AdaptiveLossScale)):
            expected = expected._replace(loss_scale=opt_state.loss_scale_state.loss_scale)
        assert_equal(converted.loss_scale_state, expected)
        # The parameters are bit for bit those of a run in which nothing was converted.
        assert_equal(steps(target, "0", params, converted)[0], steps(source, "0", params, opt_state)[0])


def test_a_converted_scale_lies_inside_the_new_bounds_also_of_an_ensemble_and_in_jit():
    adaptive_to = {2.0**30: 2.0**30, math.nan: 2.0**12, math.inf: 2.0**12, 0.0: 0.5}
    for target, converted in (
        (DynamicLossScale(), {2.0**30: 2.0**24, 2.0**-3: 1.0, math.inf: 2.0**24}),
        (AdaptiveLossScale(min_scale=0.5), adaptive_to),
        (StaticLossScale(8.0), {2.0**30: 8.0}),
        (NoOpLossScale(), {2.0**30: 1.0}),
    ):
        for scale, expected in converted.items():
            new = jamp.convert_loss_scale({"nested": (jamp.StaticLossScaleState(jnp.float32(scale)), 1)}, target)
            assert type(new["nested"][0]) is type(target.init())
            assert (float(jamp.get_loss_scale(new)), new["nested"][1]) == (expected, 1)
    states = jax.vmap(lambda scale: DynamicLossScale().init()._replace(loss_scale=scale))(jnp.float32([1, 2, jnp.nan]))
    convert = partial(jamp.convert_loss_scale, loss_scale=AdaptiveLossScale())
    whole, each = jax.jit(lambda states: (convert(states), jax.vmap(convert)(states)))(states)
    assert (whole.loss_scale.tolist(), avals(whole), bits(whole)) == ([1.0, 2.0, 2.0**12], avals(each), bits(each))


class WarmupState(NamedTuple):
    loss_scale: jax.Array  # f32[]
    step: jax.Array  # i32[]


class Warmup:
    """Doubles every third step; an overflow halves it."""

    def init(self):
        return WarmupState(jnp.float32(4.0), jnp.int32(0))

    def update(self, state, grads_finite):
        grown = jnp.where((state.step + 1) % 3 == 0, state.loss_scale * 2, state.loss_scale)
        return WarmupState(jnp.where(grads_finite, grown, state.loss_scale * 0.5), state.step + 1)


def test_a_users_own_loss_scale_works_everywhere_a_built_in_does():
    """Every function that finds a state finds Halving's: test_state.py."""
    config = Warmup()
    assert isinstance(config, jamp.LossScale)
    carry, found = steps(config, ""), []
    for bit in "00010000":
        carry = steps(config, bit, *carry)
        found.append({name: x.item() for name, x in jamp.metrics(carry[1]).items()})
    assert [metrics["loss_scale"] for metrics in found] == [4, 4, 8, 4, 4, 8, 8, 8]
    assert [metrics["grads_finite"] for metrics in found] == [True, True, True, False, True, True, True, True]
    assert {"increases": 2, "decreases": 1, "max_loss_scale": 8.0, "success_rate": 7 / 8}.items() <= found[-1].items()
    jamp.check_health(carry[1], loss_scale=config)
    changed = jamp.set_loss_scale(carry[1], 32.0)
    assert [x.item() for x in changed.loss_scale_state] == [32.0, 8]
    assert float(jamp.get_loss_scale(optax.tree.set(changed, loss_scale_state=config.init()))) == 4.0
    assert jax.vmap(config.update)(WarmupState(jnp.ones(2), jnp.arange(2)), jnp.arange(2) > 0).loss_scale[0] == 0.5
    to_own = jamp.convert_loss_scale(steps(DynamicLossScale(), "1")[1], config)
    assert [x.item() for x in to_own.loss_scale_state] == [2.0**15, 0]
    to_dynamic = jamp.convert_loss_scale(changed, DynamicLossScale())
    assert [x.item() for x in to_dynamic.loss_scale_state] == [32.0, 0, 1]
