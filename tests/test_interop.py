"""jamp.interop: go on where torch, flax, jmp or MindFormers stopped, exactly as they would have."""

import functools
import json
import math
import types

import jax
import jax.numpy as jnp
import loss_scales as ls
import numpy as np
import optax
import pytest
from loss_scales import TINY
from trees import assert_close, assert_equal

import jamp
from jamp import interop

SAVED = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2, "_growth_tracker": 0}


@pytest.mark.slow
def test_a_scaler_loaded_from_torch_at_any_cut_goes_on_exactly_as_torch_does():
    runs, expected, generator = [], [], np.random.default_rng(0)
    for trace in (trace for trace in ls.TORCH if "events" not in trace):
        scale, tracker = ls.expand(trace["scale_rle"]), ls.torch_tracker(trace)
        end = trace.get("first_subnormal_step") or len(scale)  # from there on torch's scale is 0
        steps = [i for i in tracker if i < end - 1]
        for cut in {steps[0], generator.choice(steps)}:
            config = {key: trace["config"][key] for key in ("growth_factor", "backoff_factor", "growth_interval")}
            saved = {"scale": scale[cut].item(), "_growth_tracker": tracker[cut], **config}  # as torch saves it
            scaler = interop.from_torch(saved)
            assert json.loads(json.dumps(interop.to_torch(scaler))) == saved
            assert (scaler.loss_scale.min_scale, scaler.loss_scale.max_scale) == (TINY, math.inf)
            runs.append((scaler.loss_scale, scaler.state, ls.flags(trace["overflow"][cut + 1 : end])))
            expected.append((scale[cut + 1 : end], {i - cut - 1: n for i, n in tracker.items() if cut < i < end}))
    for states, (scale, tracker) in zip(ls.replay(runs), expected, strict=True):
        np.testing.assert_array_equal(states.loss_scale, scale)
        np.testing.assert_array_equal(states.growth_count[[*tracker]], [*tracker.values()])


def test_what_torch_lacks_is_an_error_and_what_it_never_recovers_from_goes_on():
    assert interop.to_torch(jamp.GradScaler(enabled=False)) == {}
    assert interop.to_torch(jamp.GradScaler(init_scale=8.0, growth_interval=2)) == SAVED
    for loss_scale in (jamp.StaticLossScale(), jamp.AdaptiveLossScale()):
        with pytest.raises(ValueError, match="dynamic"):
            interop.to_torch(jamp.GradScaler(loss_scale))
    with pytest.raises(ValueError, match="lacks growth_factor, growth_interval, _growth_tracker"):
        interop.from_torch({"scale": 8.0, "backoff_factor": 0.5})
    for change, overflow, expected in (
        ({"backoff_factor": 0.0}, "0100", [8.0, 8 * TINY, 8 * TINY, 16 * TINY]),
        ({"growth_interval": 0}, "000", [8.0, 8.0, 8.0]),
        ({"_growth_tracker": 5}, "000", [16.0, 16.0, 32.0]),  # past the interval. torch: 8 8 8, and so on
    ):
        scaler = interop.from_torch(SAVED | change)
        states = ls.step_by_step(scaler.loss_scale, scaler.state, ls.flags(overflow))
        assert states.loss_scale.tolist() == expected
    assert float(interop.from_torch(SAVED | {"scale": 0.0}).get_scale()) == TINY


def flax_scale(scale, fin_steps, minimum_scale=None):
    try:
        from flax.training.dynamic_scale import DynamicScale
    except ImportError:  # the oldest environment has no flax: what is read are these attributes
        DynamicScale = functools.partial(types.SimpleNamespace, growth_factor=2.0, backoff_factor=0.5)
    return DynamicScale(growth_interval=3, scale=scale, fin_steps=fin_steps, minimum_scale=minimum_scale)


def jmp_scale(scale, counter, min_loss_scale=1.0):
    try:
        from jmp import DynamicLossScale
    except ImportError:
        DynamicLossScale = functools.partial(types.SimpleNamespace, factor=2)
    scale, counter, minimum = jnp.float32(scale), jnp.int32(counter), jnp.float32(min_loss_scale)
    return DynamicLossScale(loss_scale=scale, counter=counter, period=3, min_loss_scale=minimum)


@pytest.mark.parametrize(("library", "make"), [("flax", flax_scale), ("jmp", jmp_scale)])
def test_a_scaler_from_flax_or_jmp_at_any_cut_goes_on_exactly_as_they_do(library, make):
    recorded, convert = ls.recorded("flax_jmp.json"), getattr(interop, f"from_{library}")
    scales, counts = np.exp2(recorded[library]["log2_scale"]), [int(n) for n in recorded[library]["count"]]
    scalers = [convert(make(*cut)) for cut in zip(scales[:-1], counts[:-1], strict=True)]
    runs = [(x.loss_scale, x.state, ls.flags(recorded["overflow"][i + 1 :])) for i, x in enumerate(scalers)]
    for i, states in enumerate(ls.replay(runs)):
        np.testing.assert_array_equal(states.loss_scale, scales[i + 1 :])
        np.testing.assert_array_equal(states.growth_count, counts[i + 1 :])
    assert convert(make(8.0, 0, 4.0)).loss_scale.min_scale == 4.0
    assert interop.from_flax(flax_scale(8.0, 0)).loss_scale.min_scale == TINY


def test_a_state_from_mindformers_six_parameters_goes_on_exactly_and_back():
    names, loss_scale = {"default_random_p0.05", "init1_random_p0.01"}, jamp.AdaptiveLossScale()
    traces = [trace for trace in ls.recorded("mindspore_adaptive.json")["traces"] if trace["name"] in names]
    configs = [jamp.AdaptiveLossScale(trace["config"]["loss_scale_value"]) for trace in traces]
    runs = [ls.from_start(*run) for run in zip(configs, map(ls.mindspore_finite, traces), strict=True)]
    for trace, whole in zip(traces, ls.replay(runs), strict=True):
        held = {"scale_sense": ls.expand(trace["scale"], float.fromhex)} | ls.mindspore_counts(trace)
        for step in (0, 7, 333, 1000, trace["steps"] - 1):
            parameters = {name: x[step].item() for name, x in held.items()}
            state = interop.from_mindformers(parameters)
            assert_equal(state, jax.tree.map(lambda x, i=step: x[i], whole))
            elapsed = parameters["current_iterator_step"] - parameters["last_overflow_iterator_step"]
            back = parameters | {"current_iterator_step": elapsed, "last_overflow_iterator_step": 0}
            assert interop.to_mindformers(state, loss_scale) == back
    parameters = interop.to_mindformers(jamp.AdaptiveLossScale(init_scale=8.0).init())
    state = interop.from_mindformers({name: np.array([x]) for name, x in parameters.items()})
    opt_state = jamp.loss_scaled(optax.sgd(0.1), jamp.AdaptiveLossScale()).init(jnp.ones(2))
    assert interop.to_mindformers(optax.tree.set(opt_state, loss_scale_state=state)) == parameters
    assert interop.to_mindformers(state._replace(window_index=jnp.int32(-1)))["scale_window"] == 1
    del parameters["list_index"]
    with pytest.raises(ValueError, match="lacks list_index"):
        interop.from_mindformers(parameters)


def test_an_optimizer_state_is_wrapped_goes_on_and_is_unwrapped_also_inside_a_tree():
    plain, params, loss_scale = optax.sgd(0.1, momentum=0.9), jnp.ones(3), jamp.DynamicLossScale(init_scale=8.0)
    _, opt_state = plain.update(params, plain.init(params))
    tx, wrapped = jamp.loss_scaled(plain, loss_scale), interop.wrap_state(opt_state, loss_scale)
    assert jax.tree.structure(wrapped) == jax.tree.structure(tx.init(params))
    assert_equal(interop.unwrap_state({"opt_state": (wrapped, 1), "step": 3}), {"opt_state": (opt_state, 1), "step": 3})
    updates, wrapped = tx.update(params, wrapped)
    assert_close((updates, interop.unwrap_state(wrapped)), plain.update(params, opt_state), rtol=1e-6)


def test_a_checkpoint_of_mindformers_is_read_and_another_loss_scale_an_error():
    state = jamp.AdaptiveLossScale().init()
    checkpoint = interop.to_mindformers(state) | {"model.weight": np.ones((3, 4))}
    assert_equal(interop.from_mindformers(checkpoint), state)
    with pytest.raises(ValueError, match="convert_loss_scale"):
        interop.to_mindformers(jamp.DynamicLossScale().init())
    with pytest.raises(ValueError, match="window 7"):
        interop.to_mindformers(state._replace(window_index=jnp.int32(7)), jamp.AdaptiveLossScale(windows=(1, 2)))


@pytest.mark.promotes("optax.adam")
def test_the_state_of_a_plain_optimizer_goes_on_for_16_bit_parameters_too():
    params, plain = {"w": jnp.ones(4, jnp.bfloat16)}, optax.adam(0.1)
    _, state = plain.update(params, plain.init(params), params)
    tx = jamp.loss_scaled(plain)
    wrapped = interop.wrap_state(state)
    with pytest.raises(ValueError, match="cast_like"):
        tx.update(params, wrapped, params)
    wrapped = optax.tree.cast_like(wrapped, tx.init(params))
    assert int(tx.update(params, wrapped, params)[1].inner_state[0].count) == 2
