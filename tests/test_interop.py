"""jamp.interop: go on where torch, flax, jmp or MindFormers stopped, exactly as they would have."""

import dataclasses
import functools
import json
import math
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from loss_scales import run

import jamp
from jamp import interop

DATA = pathlib.Path(__file__).parent / "data"
ALL_TORCH = json.loads((DATA / "torch_updates.json").read_text())["traces"]
TORCH = [t for t in ALL_TORCH if "events" not in t]
MINDFORMERS = json.loads((DATA / "mindspore_adaptive.json").read_text())
TINY = float(np.finfo(np.float32).tiny)
STEPS = 6500  # the longest trace: the others are padded, so that each configuration is compiled once


def follow(scaler, overflow):
    """The loss-scale states after each step."""
    finite = np.array([digit == "0" for digit in overflow])
    # The initial scale is only what nan heals to: without it, scalers that differ in nothing else share a compilation.
    rule = dataclasses.replace(scaler.loss_scale, init_scale=1.0)
    states = run(rule, scaler.state, np.pad(finite, (0, STEPS - len(finite))))
    return jax.tree.map(lambda x: np.asarray(x)[: len(finite)], states)


def expand(rle):
    return np.repeat(np.float32([x for x, _ in rle]), [n for _, n in rle])


def trackers(trace):
    """The growth tracker by step, where it is recorded."""
    if "growth_tracker" in trace:
        return {i: int(digit, 36) for i, digit in enumerate(trace["growth_tracker"])}
    return {int(i): n for i, n in trace["growth_tracker_at"].items()}


def torch_state_dict(trace, step):
    """What torch's scaler had saved after a step."""
    config = {key: trace["config"][key] for key in ("growth_factor", "backoff_factor", "growth_interval")}
    return {"scale": float(expand(trace["scale_rle"])[step]), "_growth_tracker": trackers(trace)[step], **config}


@pytest.mark.parametrize("trace", TORCH, ids=lambda t: t["name"])
def test_a_scaler_loaded_from_torch_at_any_cut_goes_on_exactly_as_torch_does(trace):
    scales, recorded = expand(trace["scale_rle"]), trackers(trace)
    end = trace.get("first_subnormal_step") or len(scales)  # from there on torch's scale is 0
    steps = [i for i in recorded if i < end]
    for cut in {steps[0], steps[-1], *np.random.default_rng(len(scales)).choice(steps, 4)}:
        scaler = interop.from_torch(torch_state_dict(trace, cut))
        assert (scaler.loss_scale.min_scale, scaler.loss_scale.max_scale) == (TINY, math.inf)
        assert interop.to_torch(scaler) == torch_state_dict(trace, cut)
        if cut + 1 < end:
            states = follow(scaler, trace["overflow"][cut + 1 : end])
            np.testing.assert_array_equal(states.loss_scale, scales[cut + 1 : end])
            after = [i for i in steps if i > cut]
            got = states.growth_count[[i - cut - 1 for i in after]]
            np.testing.assert_array_equal(got, [recorded[i] for i in after])


def test_the_one_difference_is_that_a_tracker_past_the_interval_grows_at_the_next_finite_step():
    saved = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "_growth_tracker": 5}
    states = follow(interop.from_torch(saved), "000")  # torch: 8 8 8, for ever
    assert states.loss_scale.tolist() == [16.0, 16.0, 16.0]


def test_torchs_setters_are_a_changed_state_dict():
    scaler = jamp.GradScaler(growth_interval=4, max_scale=2.0**30)
    scales = []
    recorded = next(t for t in ALL_TORCH if t["name"] == "factors_changed_midway")
    for i, digit in enumerate(recorded["overflow"]):
        change = {5: {"growth_factor": 3.0}, 9: {"backoff_factor": 0.1}}.get(i, {})
        scaler = scaler.load_state_dict(scaler.state_dict() | change).update(overflow=digit == "1")
        scales.append(float(scaler.get_scale()))
    np.testing.assert_allclose(scales, expand(recorded["scale_rle"]), rtol=1e-7)


def test_what_torch_accepts_and_never_recovers_from_goes_on():
    saved = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2, "_growth_tracker": 0}
    no_backoff = interop.from_torch(saved | {"backoff_factor": 0.0})
    assert follow(no_backoff, "0100").loss_scale.tolist() == [8.0, 8 * TINY, 8 * TINY, 16 * TINY]
    no_growth = interop.from_torch(saved | {"growth_interval": 0})
    assert follow(no_growth, "000").loss_scale.tolist() == [8.0, 8.0, 8.0]
    assert float(interop.from_torch(saved | {"scale": 0.0}).get_scale()) == TINY


def test_a_scaler_goes_to_torch_and_back():
    scaler = jamp.GradScaler(init_scale=1024.0, growth_interval=3)
    for overflow in (False, False, True, False):
        scaler = scaler.update(overflow=overflow)
    saved = interop.to_torch(scaler)
    config = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
    assert saved == {"scale": 512.0, "_growth_tracker": 1, **config}
    back = interop.from_torch(json.loads(json.dumps(saved)))
    assert follow(back, "0010000").loss_scale.tolist() == follow(scaler, "0010000").loss_scale.tolist()


def test_a_disabled_scaler_goes_to_torch_as_its_empty_state_dict():
    assert interop.to_torch(jamp.GradScaler(enabled=False)) == {}


@pytest.mark.parametrize("loss_scale", [jamp.StaticLossScale(), jamp.AdaptiveLossScale()])
def test_a_loss_scale_that_torch_does_not_have_is_an_error(loss_scale):
    with pytest.raises(ValueError, match="torch has a dynamic loss scale only, got"):
        interop.to_torch(jamp.GradScaler(loss_scale))


def test_an_empty_or_foreign_state_dict_is_an_error_that_names_the_cure_or_the_missing_keys():
    with pytest.raises(ValueError, match=r"is empty: it comes from a disabled scaler\. Use jamp.GradScaler\(enabled=F"):
        interop.from_torch({})
    with pytest.raises(
        ValueError, match=r"lacks growth_factor, growth_interval, _growth_tracker and has scale, backoff"
    ):
        interop.from_torch({"scale": 8.0, "backoff_factor": 0.5})


# flax 0.12.8 and jmp 0.0.4, recorded by running them over this sequence: the scale's logarithm and the count.

SEQUENCE = "0000000100000110000000000100000001111100000000"
FLAX = (
    "10 10 10 11 11 11 11 10 10 10 10 11 11 10 9 9 9 9 10 10 10 10 11 11 11 10 10 10 10 11 11 11 11 "
    "10 9 8 7 6 6 6 6 7 7 7 7 8",
    "1230123012301001230123012012301230000012301230",
)
JMP = (
    "10 10 11 11 11 12 12 11 11 11 12 12 12 11 10 10 10 11 11 11 12 12 12 13 13 12 12 12 13 13 13 14 14 "
    "13 12 11 10 9 9 9 10 10 10 11 11 11",
    "1201201012012001201201201012012010000012012012",
)


def flax_scale(scale, fin_steps, **rule):
    fields = {"growth_factor": 2.0, "backoff_factor": 0.5, "minimum_scale": None} | rule
    try:
        from flax.training.dynamic_scale import DynamicScale
    except ImportError:  # the oldest environment has no flax: what is read are these attributes
        DynamicScale = types.SimpleNamespace
    return DynamicScale(growth_interval=3, scale=scale, fin_steps=fin_steps, **fields)


def jmp_scale(scale, counter, min_loss_scale=1.0):
    try:
        from jmp import DynamicLossScale
    except ImportError:
        DynamicLossScale = functools.partial(types.SimpleNamespace, factor=2)
    scale, counter, minimum = jnp.float32(scale), jnp.int32(counter), jnp.float32(min_loss_scale)
    return DynamicLossScale(loss_scale=scale, counter=counter, period=3, min_loss_scale=minimum)


@pytest.mark.parametrize(
    ("convert", "make", "recorded"),
    [(interop.from_flax, flax_scale, FLAX), (interop.from_jmp, jmp_scale, JMP)],
    ids=["flax", "jmp"],
)
def test_a_scaler_from_flax_or_jmp_at_any_cut_goes_on_exactly_as_they_do(convert, make, recorded):
    scales, counts = 2.0 ** np.array(recorded[0].split(), int), [int(n) for n in recorded[1]]
    for cut in range(len(SEQUENCE) - 1):
        states = follow(convert(make(scales[cut], counts[cut])), SEQUENCE[cut + 1 :])
        np.testing.assert_array_equal(states.loss_scale, scales[cut + 1 :])
        np.testing.assert_array_equal(states.growth_count, counts[cut + 1 :])


def test_the_floors_of_flax_and_jmp_are_kept():
    assert interop.from_flax(flax_scale(8.0, 0, minimum_scale=4.0)).loss_scale.min_scale == 4.0
    assert interop.from_flax(flax_scale(8.0, 0)).loss_scale.min_scale == TINY
    assert interop.from_jmp(jmp_scale(8.0, 0, min_loss_scale=2.0)).loss_scale.min_scale == 2.0


# MindFormers.


def expanded(text, number=int):
    pairs = (item.partition("*") for item in text.split())
    return [number(value) for value, _, count in pairs for _ in range(int(count or 1))]


def mindformers_parameters(trace, step):
    """What MindFormers' cell holds after a step."""
    runs = expanded(trace["last_overflow_iter"])
    starts = np.cumsum([0, *runs])
    last = int(np.searchsorted(starts, step, side="right")) - 1
    return {
        "scale_sense": expanded(trace["scale"], lambda x: float.fromhex(f"0x{x}"))[step],
        "scale_window": expanded(trace["scale_window"])[step],
        "list_index": expanded(trace["list_index"])[step],
        "scale_window_up_count": expanded(trace["up_count"])[step],
        "scale_window_down_count": expanded(trace["down_count"])[step],
        "current_iterator_step": step + 2,
        "last_overflow_iterator_step": 0 if last == 0 else int(starts[last]) + 1,
    }


@pytest.mark.parametrize("name", ["default_random_p0.01", "default_random_p0.05", "init1_random_p0.01"])
def test_a_state_from_mindformers_six_parameters_goes_on_exactly_and_back(name):
    trace = next(t for t in MINDFORMERS["traces"] if t["name"] == name)
    overflow = bin(int(trace["overflow_hex"], 16))[3:]
    loss_scale = jamp.AdaptiveLossScale()
    initial = loss_scale.init()._replace(loss_scale=jnp.float32(trace["config"]["loss_scale_value"]))
    whole = run(loss_scale, initial, np.array([digit == "0" for digit in overflow]))
    for step in (0, 7, 333, 1000, trace["steps"] - 1):
        parameters = mindformers_parameters(trace, step)
        state = interop.from_mindformers(parameters)
        for got, expected in zip(state, whole, strict=True):
            assert np.asarray(got).dtype == expected.dtype
            assert got == expected[step]
        back = interop.to_mindformers(state, loss_scale)
        elapsed = parameters["current_iterator_step"] - parameters["last_overflow_iterator_step"]
        assert back == parameters | {"current_iterator_step": elapsed, "last_overflow_iterator_step": 0}


def test_mindformers_parameters_may_be_arrays_and_the_state_may_lie_in_an_optimizer_state():
    parameters = interop.to_mindformers(jamp.AdaptiveLossScale(init_scale=8.0).init())
    state = interop.from_mindformers({name: np.array([x]) for name, x in parameters.items()})
    tx = jamp.loss_scaled(optax.sgd(0.1), jamp.AdaptiveLossScale())
    opt_state = optax.tree.set(tx.init(jnp.ones(2)), loss_scale_state=state)
    assert interop.to_mindformers(opt_state) == parameters


def test_the_hidden_window_of_mindformers_is_one_step():
    state = jamp.AdaptiveLossScale().init()._replace(window_index=jnp.int32(-1))
    assert interop.to_mindformers(state)["scale_window"] == 1


def test_a_missing_parameter_of_mindformers_is_an_error_that_names_it():
    parameters = interop.to_mindformers(jamp.AdaptiveLossScale().init())
    del parameters["list_index"]
    with pytest.raises(ValueError, match="it lacks list_index and has scale_sense, scale_window"):
        interop.from_mindformers(parameters)


# Optimizer states.


def test_a_plain_optimizer_state_is_wrapped_and_goes_on_under_a_loss_scale_and_unwrapped_again():
    plain, params, grads = optax.adam(0.1), jnp.ones(3), jnp.ones(3)
    _, opt_state = plain.update(grads, plain.init(params), params)
    loss_scale = jamp.DynamicLossScale(init_scale=8.0)
    tx, wrapped = jamp.loss_scaled(plain, loss_scale), interop.wrap_state(opt_state, loss_scale)
    assert jax.tree.structure(wrapped) == jax.tree.structure(tx.init(params))
    updates, wrapped = tx.update(grads, wrapped, params)
    expected, opt_state = plain.update(grads, opt_state, params)
    np.testing.assert_allclose(updates, expected, rtol=1e-6)
    for got, want in zip(jax.tree.leaves(interop.unwrap_state(wrapped)), jax.tree.leaves(opt_state), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_state_is_unwrapped_inside_a_tree():
    tx, params = optax.chain(jamp.loss_scaled(optax.sgd(0.1, momentum=0.9)), optax.identity()), jnp.ones(2)
    tree = {"opt_state": tx.init(params), "step": 3}
    plain = optax.chain(optax.sgd(0.1, momentum=0.9), optax.identity()).init(params)
    assert jax.tree.structure(interop.unwrap_state(tree)) == jax.tree.structure({"opt_state": plain, "step": 3})


def test_unwrapping_a_state_without_a_loss_scale_is_an_error():
    with pytest.raises(ValueError, match=r"Expected the state of `jamp\.loss_scaled`, found none in this tuple"):
        interop.unwrap_state(optax.adam(0.1).init(jnp.ones(2)))


def test_a_scaler_hands_its_configuration_and_state_to_an_optimizer():
    scaler = interop.from_torch(torch_state_dict(TORCH[0], 5))
    tx, params = jamp.loss_scaled(optax.sgd(0.1), scaler.loss_scale), jnp.ones(2)
    opt_state = optax.tree.set(tx.init(params), loss_scale_state=scaler.state)
    assert float(jamp.get_loss_scale(opt_state)) == 65536.0
    assert int(optax.tree.get(opt_state, "growth_count")) == 6
