"""jamp.GradScaler: every constructor, method and error. The contract suite and recorded runs of torch step it."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trees import assert_equal

import jamp

STATIC = jamp.StaticLossScale(8.0)
LOSS_SCALES = [
    jamp.DynamicLossScale(init_scale=8.0, growth_interval=3, hysteresis=2),
    STATIC,
    jamp.AdaptiveLossScale(init_scale=8.0, windows=(2, 3)),
]
every_loss_scale = pytest.mark.parametrize("loss_scale", LOSS_SCALES, ids=lambda x: type(x).__name__)
OVERFLOWS = "001011100000000101000000"
TORCHS = {"scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0}
TX = optax.sgd(0.5, momentum=0.5)
ONES = jnp.ones(2)
update = jax.jit(lambda scaler, overflow: scaler.update(overflow=overflow))


def small(**keywords):
    return jamp.GradScaler(init_scale=8.0, growth_interval=2, **keywords)


def sequence(scaler, overflows=OVERFLOWS):
    """The scaler after each step of a sequence of updates."""
    return [scaler := update(scaler, digit == "1") for digit in overflows]


def test_constructors_give_the_loss_scale_that_they_promise():
    mindspore = {"runner_wrapper": {"scale_sense": {"type": "FixedLossScaleUpdateCell", "loss_scale_value": 4}}}
    dynamic, static, scaler = jamp.DynamicLossScale, jamp.StaticLossScale, jamp.GradScaler
    for made, loss_scale in (
        (scaler(), dynamic()),
        (scaler.default(), dynamic()),
        (scaler.static(), static(2.0**16)),
        (scaler.static(4.0), static(4.0)),
        (scaler.conservative(), dynamic(growth_interval=5000)),
        (scaler.aggressive(), dynamic(growth_interval=1000)),
        (scaler.for_fp16(), dynamic(growth_interval=2000)),
        (scaler.for_bf16(), static(1.0)),
        (scaler(jamp.AdaptiveLossScale()), jamp.AdaptiveLossScale()),
        (scaler(max_scale=2.0**20, min_scale=2.0), dynamic(max_scale=2.0**20, min_scale=2.0)),
        (scaler.from_config({"init_scale": 32768.0}), dynamic(init_scale=32768.0)),
        (scaler.from_config({"type": "static", "scale": 4.0}), static(4.0)),
        (scaler.from_config(mindspore), static(4.0)),
    ):
        assert (made.loss_scale, made.is_enabled()) == (loss_scale, True)
        assert_equal(made.state, loss_scale.init())


def test_errors_name_the_cure():
    def error(exception, match, call, *args, **kwargs):
        with pytest.raises(exception, match=match):
            call(*args, **kwargs)

    error(ValueError, "Give init_scale, min_scale to the loss", jamp.GradScaler, STATIC, init_scale=2.0, min_scale=1.0)
    error(ValueError, "growth_factor must be a finite Python number above 1", jamp.GradScaler, growth_factor=1.0)
    for wrong in (2.0**16, jamp.DynamicLossScale, "dynamic"):
        error(TypeError, r"GradScaler\.static\(scale\) for a constant", jamp.GradScaler, wrong)
    for loss in (jnp.int32(3), jnp.array([True]), 3):
        error(TypeError, r"A loss must be floating.*compute it in float32", small().scale, loss)
    both = {"grads_finite": True, "overflow": True}
    error(ValueError, "exactly one of grads_finite= and overflow=", small().update, **both)
    for given in ({}, {"grads": ONES, "scaled_grads": ONES}):
        match = r"exactly one of grads= \(true gradients.*scaled_grads="
        error(ValueError, match, small().step, TX, TX.init(ONES), ONES, **given)
    for tx in (jamp.loss_scaled(TX), jamp.mixed_precision(TX)):
        match = r"Two scalers on one optimizer.*Step the plain optimizer with the GradScaler"
        error(ValueError, match, small().step, tx, tx.init(ONES), ONES, grads=ONES)

    def torch_habit(carry, _=None):
        result = carry[0].step(TX, carry[2], carry[1], grads=ONES)
        return (result.scaler.update(), *result[:2]), None

    for run in (torch_habit, jax.jit(torch_habit), lambda carry: jax.lax.scan(torch_habit, carry, None, 2)):
        error(ValueError, r"the scale is updated already.*delete this call", run, (small(), ONES, TX.init(ONES)))
    for scaler, saved, match in (
        (small(), {}, r"empty, as that of a disabled scaler is. Use GradScaler\(enabled=False\)"),
        (small(), {"step": 3}, r"lacks scale, _growth_tracker, hysteresis_count.*; it has step"),
        (small(), TORCHS, r"for one that torch wrote, use jamp\.interop\.from_torch"),
        (jamp.GradScaler(LOSS_SCALES[2]), small().state_dict(), r"lacks window_index.*AdaptiveLossScale"),
    ):
        error(ValueError, match, scaler.load_state_dict, saved)


@every_loss_scale
def test_it_is_an_immutable_pytree_that_follows_its_loss_scale_and_counts(loss_scale):
    first = jamp.GradScaler(loss_scale)
    leaves, treedef = jax.tree.flatten(first)
    assert all(isinstance(x, jax.Array) and not x.weak_type for x in leaves)
    assert len(leaves) == len(jax.tree.leaves(loss_scale.init())) + 8
    assert jax.tree.unflatten(treedef, [object()] * len(leaves)).loss_scale == loss_scale  # Nothing is validated.
    assert hash(treedef) == hash(jax.tree.structure(jamp.GradScaler(loss_scale)))
    with pytest.raises(AttributeError):
        first.loss_scale = jamp.StaticLossScale()
    scalers, state = sequence(first), loss_scale.init()
    for scaler, digit in zip(scalers, OVERFLOWS, strict=True):
        state = loss_scale.update(state, digit == "0")
        assert_equal(scaler.state, state)
        assert bool(jamp.get_grads_finite(scaler)) == (digit == "0")
    assert_equal(scalers[-1].get_stats(), jamp.get_stats(scalers[-1]))
    assert [int(n) for n in scalers[-1].stats[:2]] == [OVERFLOWS.count("0"), OVERFLOWS.count("1")]
    # A run restored from a state dict at any point goes on exactly.
    for whole in scalers:
        assert_equal(jamp.GradScaler(loss_scale).load_state_dict(json.loads(json.dumps(whole.state_dict()))), whole)


def test_scale_value_and_grad_unscale_check_update_and_reset():
    scaler = small()
    assert [float(x) for x in scaler.scale([jnp.float32(1.0), jnp.bfloat16(2.0)])] == [8.0, 16.0]
    assert_equal(scaler.unscale({"w": jnp.array([8.0, jnp.inf], jnp.float16)}), {"w": jnp.float32([1.0, jnp.inf])})
    assert (float(scaler.get_scale()), float(scaler.get_inverse_scale())) == (8.0, 0.125)
    for bad in (jnp.inf, -jnp.inf, jnp.nan):
        grads = {"w": jnp.zeros(5, jnp.float16).at[3].set(bad), "b": jnp.zeros(2)}
        assert bool(scaler.check_overflow(grads))
        assert bool(scaler.check_overflow(scaler.unscale(grads)))
    assert not bool(scaler.check_overflow({"b": grads["b"]}))
    loss_fn = lambda x, w: (jnp.sum(w * w) * 3.0, x)
    (loss, aux), grads = scaler.value_and_grad(loss_fn, argnums=1, has_aux=True)(7.0, ONES)
    assert (float(loss), aux, grads.tolist()) == (6.0, 7.0, [6.0, 6.0])
    for overflow in (False, True):
        assert_equal(scaler.update(overflow=overflow), scaler.update(grads_finite=not overflow))
    for start in (scaler, small(enabled=False)):
        assert_equal(sequence(start)[-1].reset(), start)


def test_all_combinations_of_optimizer_step_check_overflow_and_update_scale():
    scaler, params = jamp.GradScaler(init_scale=8.0, growth_interval=1), jnp.array([1.0, -0.0])
    opt_state, names = TX.init(params), ("optimizer_step", "check_overflow", "update_scale")
    for scaled, overflow, *switches in itertools.product([True, False], repeat=5):
        optimizer_step, check_overflow, update_scale = switches
        true = jnp.array([1.0, jnp.inf if overflow else 0.0])
        # Where the scale grows in the same step, the old one unscales.
        given = {"scaled_grads": true * 8} if scaled else {"grads": true}
        result = scaler.step(TX, opt_state, params, **given, **dict(zip(names, switches, strict=True)))
        found = overflow and check_overflow
        assert bool(result.stepped) == (not found)
        expected = params, opt_state
        if optimizer_step and not found:
            updates, moved_state = TX.update(true, opt_state, params)
            expected = optax.apply_updates(params, updates), moved_state
        assert_equal(result[:2], expected)
        assert_equal(result.scaler, scaler.update(overflow=overflow) if update_scale and check_overflow else scaler)


@pytest.mark.promotes("optax.apply_updates")
def test_16_bit_parameters_keep_their_dtypes_and_float16_without_masters_warns():
    def step(tx, dtype):
        params = jnp.ones(2, dtype)
        opt_state = tx.init(params)
        result = small().step(tx, opt_state, params, grads=ONES)
        assert result.params.tolist() == [0.5, 0.5]
        for new, old in ((result.params, params), (result.opt_state, opt_state)):
            assert jax.tree.map(lambda x: x.dtype, new) == jax.tree.map(lambda x: x.dtype, old)

    with pytest.warns(UserWarning, match=r"float16 parameters without a master copy.*jamp\.master_params\(tx\)"):
        step(TX, jnp.float16)
    step(TX, jnp.bfloat16)
    step(jamp.master_params(TX), jnp.float16)


def test_disabled_it_steps_unconditionally_and_all_else_is_the_identity():
    """That it compiles to the plain step is in test_loss_scaled.py."""
    scaler, loss, bad = small(enabled=False), object(), jnp.array([1.0, jnp.inf])
    assert scaler.scale(loss) is loss
    assert scaler.unscale(bad) is bad
    assert not bool(scaler.check_overflow(bad))
    assert scaler.update(overflow=True) is scaler.load_state_dict({}) is scaler
    assert [float(x) for x in (scaler.get_scale(), scaler.get_inverse_scale(), jamp.get_loss_scale(scaler))] == [1] * 3
    assert not scaler.is_enabled()
    assert scaler.state_dict() == {}
    result = jax.jit(lambda scaler: scaler.step(TX, TX.init(ONES), ONES, grads=bad))(scaler)
    assert (bool(result.stepped), result.params.tolist()) == (True, [0.5, -np.inf])
    assert_equal(result.scaler, scaler)


def test_the_state_dict_has_torchs_keys_and_brings_growth_and_backoff_along():
    assert TORCHS.items() <= jamp.GradScaler().state_dict().items()
    changed = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 7}
    loaded = jamp.GradScaler(min_scale=0.5).load_state_dict(jamp.GradScaler(**changed).state_dict()).loss_scale
    assert loaded == jamp.DynamicLossScale(**changed, min_scale=0.5)


def test_disable_and_enable_keep_the_scale_and_the_counts():
    scaler = sequence(small())[-1]
    paused = scaler.disable()
    assert not paused.is_enabled()
    assert float(paused.get_scale()) == 1.0
    assert paused.disable() is paused
    resumed = jax.jit(lambda s: s.enable())(paused)
    assert_equal(resumed, scaler)
    assert resumed.enable() is resumed
    assert_equal(small(enabled=False).enable(), small())
