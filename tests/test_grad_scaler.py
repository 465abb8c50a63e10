"""jamp.GradScaler: every constructor, method and error, eagerly, under jit, scan and donation."""

import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp

LOSS_SCALES = [
    jamp.DynamicLossScale(init_scale=8.0, growth_interval=3, hysteresis=2),
    jamp.StaticLossScale(8.0),
    jamp.AdaptiveLossScale(init_scale=8.0, windows=(2, 3)),
]
every_loss_scale = pytest.mark.parametrize("loss_scale", LOSS_SCALES, ids=lambda x: type(x).__name__)
OVERFLOWS = "001011100000000101000000"
TX = optax.sgd(0.5, momentum=0.5)


def small(**keywords):
    return jamp.GradScaler(init_scale=8.0, growth_interval=2, **keywords)


def loss_fn(w, x=1.0):
    return jnp.sum(w * w) * x


def values(tree):
    return [np.asarray(x).tolist() for x in jax.tree.leaves(tree)]


def sequence(scaler, overflows=OVERFLOWS):
    """The scaler after each step of a sequence of updates."""
    update = jax.jit(lambda scaler, overflow: scaler.update(overflow=overflow))
    return [scaler := update(scaler, digit == "1") for digit in overflows]


# Constructors.


MINDSPORE = {"runner_wrapper": {"scale_sense": {"type": "FixedLossScaleUpdateCell", "loss_scale_value": 4}}}


@pytest.mark.parametrize(
    ("scaler", "loss_scale"),
    [
        (jamp.GradScaler(), jamp.DynamicLossScale()),
        (jamp.GradScaler.default(), jamp.DynamicLossScale()),
        (jamp.GradScaler.static(), jamp.StaticLossScale(2.0**16)),
        (jamp.GradScaler.static(4.0), jamp.StaticLossScale(4.0)),
        (jamp.GradScaler.conservative(), jamp.DynamicLossScale(growth_interval=5000)),
        (jamp.GradScaler.aggressive(), jamp.DynamicLossScale(growth_interval=1000)),
        (jamp.GradScaler.for_fp16(), jamp.DynamicLossScale(growth_interval=2000)),
        (jamp.GradScaler.for_bf16(), jamp.StaticLossScale(1.0)),
        (jamp.GradScaler(jamp.AdaptiveLossScale()), jamp.AdaptiveLossScale()),
        (jamp.GradScaler(max_scale=2.0**20, min_scale=2.0), jamp.DynamicLossScale(max_scale=2.0**20, min_scale=2.0)),
        (jamp.GradScaler.from_config({"init_scale": 32768.0}), jamp.DynamicLossScale(init_scale=32768.0)),
        (jamp.GradScaler.from_config({"type": "static", "scale": 4.0}), jamp.StaticLossScale(4.0)),
        (jamp.GradScaler.from_config(MINDSPORE), jamp.StaticLossScale(4.0)),
    ],
)
def test_constructors_give_the_loss_scale_that_they_promise(scaler, loss_scale):
    assert scaler.loss_scale == loss_scale
    assert values(scaler.state) == values(loss_scale.init())
    assert scaler.is_enabled()


def test_a_loss_scale_together_with_keywords_is_an_error():
    with pytest.raises(ValueError, match=r"Give init_scale, min_scale to the loss scale itself"):
        jamp.GradScaler(jamp.DynamicLossScale(), init_scale=2.0, min_scale=1.0)


@pytest.mark.parametrize("wrong", [2.0**16, jamp.DynamicLossScale, "dynamic"])
def test_what_is_no_loss_scale_is_an_error_that_names_the_cure(wrong):
    with pytest.raises(TypeError, match=r"GradScaler\.static\(scale\) for a constant"):
        jamp.GradScaler(wrong)


def test_numbers_out_of_range_are_refused_as_by_the_loss_scale():
    with pytest.raises(ValueError, match="growth_factor must be a finite Python number above 1"):
        jamp.GradScaler(growth_factor=1.0)


# The pytree.


@every_loss_scale
def test_it_is_an_immutable_pytree_with_its_configuration_static_and_its_state_in_the_leaves(loss_scale):
    scaler = jamp.GradScaler(loss_scale)
    leaves, treedef = jax.tree.flatten(scaler)
    assert all(isinstance(x, jax.Array) and not x.weak_type for x in leaves)
    assert len(leaves) == len(jax.tree.leaves(loss_scale.init())) + 8
    assert jax.tree.unflatten(treedef, [object()] * len(leaves)).loss_scale == loss_scale  # nothing is validated
    assert hash(treedef) == hash(jax.tree.structure(jamp.GradScaler(loss_scale)))
    with pytest.raises(AttributeError):
        scaler.loss_scale = jamp.StaticLossScale()


@every_loss_scale
def test_it_passes_through_jit_scan_and_donation_with_one_compilation(loss_scale):
    traces = 0

    def step(scaler, overflow):
        nonlocal traces
        traces += 1
        return scaler.update(overflow=overflow)

    overflows = jnp.array([digit == "1" for digit in OVERFLOWS])
    expected = values(sequence(jamp.GradScaler(loss_scale))[-1])
    scanned = jax.jit(lambda s: jax.lax.scan(lambda s, o: (step(s, o), None), s, overflows)[0])(
        jamp.GradScaler(loss_scale)
    )
    assert values(scanned) == expected
    traces, jitted, scaler = 0, jax.jit(step, donate_argnums=0), jamp.GradScaler(loss_scale)
    for overflow in overflows:
        scaler = jitted(scaler, overflow)
    assert values(scaler) == expected
    assert traces == 1
    jitted(jamp.GradScaler(loss_scale), overflows[0])  # a second one shares no buffer with the donated first
    assert traces == 1


FIRST_STEPS = """
import jax, jax.numpy as jnp, optax, jamp
traces, tx, params = 0, optax.sgd(0.1), jnp.ones(3)
@jax.jit
def step(params, opt_state, scaler):
    global traces
    traces += 1
    grads = scaler.value_and_grad(lambda w: jnp.sum(w**2))(params)[1]
    return scaler.step(tx, opt_state, params, grads=grads)
opt_state, scaler = tx.init(params), jamp.GradScaler()
for _ in range(3):
    params, opt_state, scaler, _ = step(params, opt_state, scaler)
print(traces)
"""


def test_the_first_step_of_a_process_is_traced_once():
    env = os.environ | {"PYTHONPATH": str(pathlib.Path(jamp.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-W", "error", "-c", FIRST_STEPS], env=env, capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr


def test_every_lookup_finds_it():
    scaler = jamp.GradScaler().update(overflow=True)
    assert float(jamp.get_loss_scale(scaler)) == float(scaler.get_scale()) == 32768.0
    assert int(jamp.metrics(scaler)["overflow_steps"]) == 1
    assert not bool(jamp.get_grads_finite({"scaler": scaler}))
    changed = jamp.set_loss_scale(scaler, 4.0)
    assert isinstance(changed, jamp.GradScaler)
    assert float(changed.get_scale()) == 4.0
    _, grads = jamp.value_and_grad(loss_fn, changed)(jnp.ones(2))
    np.testing.assert_array_equal(grads, [2.0, 2.0])


# Scaling.


def test_scale_unscale_and_the_two_getters():
    scaler = small()
    assert float(scaler.scale(jnp.float32(0.5))) == 4.0
    assert [float(x) for x in scaler.scale([jnp.float32(1.0), jnp.bfloat16(2.0)])] == [8.0, 16.0]
    unscaled = scaler.unscale({"w": jnp.array([8.0, jnp.inf], jnp.float16)})["w"]
    assert unscaled.dtype == jnp.float32
    assert unscaled.tolist() == [1.0, np.inf]
    assert (float(scaler.get_scale()), float(scaler.get_inverse_scale())) == (8.0, 0.125)


def test_value_and_grad_gives_the_true_loss_and_the_true_gradients():
    loss, grads = small().value_and_grad(loss_fn)(jnp.ones(2), 3.0)
    assert (float(loss), grads.tolist()) == (6.0, [6.0, 6.0])
    (_, aux), grads = small().value_and_grad(lambda x, w: (loss_fn(w), x), argnums=1, has_aux=True)(7.0, jnp.ones(2))
    assert (aux, grads.tolist()) == (7.0, [2.0, 2.0])


@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
def test_check_overflow_sees_one_bad_number_scaled_or_true(bad):
    grads = {"w": jnp.zeros(5, jnp.float16).at[3].set(bad), "b": jnp.zeros(2)}
    assert bool(small().check_overflow(grads))
    assert bool(small().check_overflow(small().unscale(grads)))
    assert not bool(small().check_overflow({"b": grads["b"]}))


@pytest.mark.parametrize("loss", [jnp.int32(3), jnp.array([True]), 3], ids=["int32", "bool", "int"])
def test_scaling_a_loss_that_is_not_floating_is_an_error_that_names_the_cure(loss):
    with pytest.raises(TypeError, match=r"A loss must be floating.*compute it in float32"):
        small().scale(loss)


# Updates.


@every_loss_scale
def test_update_follows_the_loss_scale_and_counts(loss_scale):
    scalers, state = sequence(jamp.GradScaler(loss_scale)), loss_scale.init()
    for scaler, digit in zip(scalers, OVERFLOWS, strict=True):
        state = loss_scale.update(state, digit == "0")
        assert values(scaler.state) == values(state)
        assert bool(jamp.get_grads_finite(scaler)) == (digit == "0")
    stats = scalers[-1].get_stats()
    assert values(stats) == values(scalers[-1].stats)
    assert (int(stats.finite_steps), int(stats.overflow_steps)) == (OVERFLOWS.count("0"), OVERFLOWS.count("1"))
    change = np.diff([8.0, *(float(scaler.get_scale()) for scaler in scalers)])
    assert (int(stats.increases), int(stats.decreases)) == ((change > 0).sum(), (change < 0).sum())


def test_grads_finite_and_overflow_say_the_same():
    for overflow in (False, True):
        assert values(small().update(overflow=overflow)) == values(small().update(grads_finite=not overflow))


def test_both_grads_finite_and_overflow_are_an_error():
    with pytest.raises(ValueError, match="exactly one of grads_finite= and overflow="):
        small().update(grads_finite=True, overflow=True)


def test_torchs_habitual_update_after_a_step_is_an_error_that_says_so_in_a_loop_under_jit_and_in_scan():
    params, grads = jnp.ones(2), jnp.ones(2)

    def torch_habit(carry, _=None):
        scaler, params, opt_state = carry
        params, opt_state, scaler, _ = scaler.step(TX, opt_state, params, grads=grads)
        return (scaler.update(), params, opt_state), None

    carry = small(), params, TX.init(params)
    for run in (torch_habit, jax.jit(torch_habit), lambda carry: jax.lax.scan(torch_habit, carry, None, 2)):
        with pytest.raises(ValueError, match=r"the scale is updated already.*delete this call"):
            run(carry)


def test_reset_gives_the_scaler_as_it_was_constructed():
    for scaler in (small(), small(enabled=False)):
        assert values(sequence(scaler)[-1].reset()) == values(scaler)


# Steps.


@pytest.mark.parametrize("update_scale", [True, False])
@pytest.mark.parametrize("check_overflow", [True, False])
@pytest.mark.parametrize("optimizer_step", [True, False])
@pytest.mark.parametrize("overflow", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_all_combinations_of_optimizer_step_check_overflow_and_update_scale(
    scaled, overflow, optimizer_step, check_overflow, update_scale
):
    switches = {"optimizer_step": optimizer_step, "check_overflow": check_overflow, "update_scale": update_scale}
    scaler, params = small(), jnp.array([1.0, -0.0])
    opt_state = TX.init(params)
    true = jnp.array([1.0, jnp.inf if overflow else 0.0])
    given = {"scaled_grads": true * 8} if scaled else {"grads": true}
    result = scaler.step(TX, opt_state, params, **given, **switches)
    found = overflow and check_overflow
    assert bool(result.stepped) == (not found)
    if optimizer_step and not found:
        updates, moved_state = TX.update(true, opt_state, params)
        assert values(result.params) == values(optax.apply_updates(params, updates))
        assert values(result.opt_state) == values(moved_state)
    else:
        assert np.asarray(result.params).tobytes() == np.asarray(params).tobytes()
        assert values(result.opt_state) == values(opt_state)
    updated = scaler.update(overflow=overflow) if update_scale and check_overflow else scaler
    assert values(result.scaler) == values(updated)


def test_unscaling_comes_before_the_update_so_a_growth_step_has_whole_gradients():
    scaler, params = jamp.GradScaler(init_scale=8.0, growth_interval=1), jnp.ones(1)
    scaled = jax.grad(lambda w: scaler.scale(loss_fn(w)))(params)
    result = scaler.step(optax.sgd(0.25), optax.sgd(0.25).init(params), params, scaled_grads=scaled)
    assert (float(result.scaler.get_scale()), result.params.tolist()) == (16.0, [0.5])


@pytest.mark.parametrize("given", [{}, {"grads": jnp.ones(2), "scaled_grads": jnp.ones(2)}], ids=["neither", "both"])
def test_step_takes_exactly_one_of_grads_and_scaled_grads(given):
    with pytest.raises(ValueError, match=r"exactly one of grads= \(true gradients.*scaled_grads="):
        small().step(TX, TX.init(jnp.ones(2)), jnp.ones(2), **given)


@pytest.mark.parametrize("wrap", [jamp.loss_scaled, jamp.mixed_precision])
def test_two_scalers_on_one_optimizer_are_an_error_that_names_the_cure(wrap):
    tx, params = wrap(TX), jnp.ones(2)
    with pytest.raises(ValueError, match=r"Two scalers on one optimizer.*Step the plain optimizer with the GradScaler"):
        small().step(tx, tx.init(params), params, grads=params)


def test_float16_parameters_without_a_master_copy_warn_naming_master_params_and_still_step():
    params = jnp.ones(2, jnp.float16)
    opt_state = TX.init(params)
    with pytest.warns(UserWarning, match=r"float16 parameters without a master copy.*jamp\.master_params\(tx\)"):
        result = small().step(TX, opt_state, params, grads=jnp.ones(2))
    assert result.params.tolist() == [0.5, 0.5]
    assert {x.dtype for x in jax.tree.leaves((result.params, result.opt_state))} == {jnp.dtype(jnp.float16)}


@pytest.mark.parametrize(
    "make", [lambda: (optax.adam(0.1), jnp.bfloat16), lambda: (jamp.master_params(TX), jnp.float16)]
)
def test_bfloat16_parameters_and_parameters_with_masters_step_without_a_warning_and_keep_their_dtypes(make):
    tx, dtype = make()
    params = jnp.ones(2, dtype)
    opt_state = tx.init(params)
    result = small().step(tx, opt_state, params, grads=jnp.ones(2))
    assert jax.tree.map(lambda x: x.dtype, result.opt_state) == jax.tree.map(lambda x: x.dtype, opt_state)
    assert result.params.dtype == dtype
    assert float(result.params[0]) < 1


# Enabled and disabled.


def test_disabled_the_optimizer_steps_unconditionally_and_everything_else_is_the_identity():
    scaler, params = small(enabled=False), jnp.ones(2)
    loss, bad = object(), jnp.array([1.0, jnp.inf])
    assert scaler.scale(loss) is loss
    assert scaler.unscale(bad) is bad
    assert not bool(scaler.check_overflow(bad))
    assert scaler.update(overflow=True) is scaler
    assert (float(scaler.get_scale()), float(scaler.get_inverse_scale())) == (1.0, 1.0)
    assert float(jamp.get_loss_scale(scaler)) == 1.0
    assert not scaler.is_enabled()
    assert scaler.state_dict() == {}
    assert scaler.load_state_dict({}) is scaler
    result = scaler.step(TX, TX.init(params), params, grads=bad)
    assert bool(result.stepped)
    assert result.params.tolist() == [0.5, -np.inf]
    assert values(result.scaler) == values(scaler)


OFF = {
    "enabled=False": lambda: small(enabled=False),
    "disable": lambda: small().disable(),
    "NoOpLossScale": lambda: jamp.GradScaler(jamp.NoOpLossScale()),
}


@pytest.mark.parametrize("make", OFF.values(), ids=OFF)
def test_disabled_it_compiles_to_the_plain_step(make):
    tx = optax.adamw(1e-3)
    params = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
    predict = lambda p, x: jnp.mean((x @ p["w"] + p["b"]) ** 2)

    def plain():
        def step(params, opt_state, x):
            loss, grads = jax.value_and_grad(predict)(params, x)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        return step

    def scaled():
        scaler = make()

        def step(params, opt_state, x):
            loss, grads = scaler.value_and_grad(predict)(params, x)
            params, opt_state, _, _ = scaler.step(tx, opt_state, params, grads=grads)
            return params, opt_state, loss

        return step

    def manual():
        scaler = make()

        def step(params, opt_state, x):
            def scaled_loss(params):
                loss = predict(params, x)
                return scaler.scale(loss), loss

            scaled_grads, loss = jax.grad(scaled_loss, has_aux=True)(params)
            params, opt_state, _, _ = scaler.step(tx, opt_state, params, scaled_grads=scaled_grads)
            return params, opt_state, loss

        return step

    def hlo(step):
        text = jax.jit(step).lower(params, tx.init(params), jnp.ones((5, 4))).compile().as_text()
        text = re.sub(r", metadata=\{[^}]*\}|, frontend_attributes=\{[^}]*\}", "", text).split("\nFileNames")[0]
        return re.sub(r"[\w.-]+(?= = )|%[\w.-]+", "%", text)

    assert hlo(scaled()) == hlo(plain())
    assert hlo(manual()) == hlo(plain())


def test_disable_and_enable_keep_the_scale_and_the_counts():
    scaler = sequence(small())[-1]
    paused = scaler.disable()
    assert not paused.is_enabled()
    assert float(paused.get_scale()) == 1.0
    assert paused.disable() is paused
    resumed = jax.jit(lambda s: s.enable())(paused)
    assert values(resumed) == values(scaler)
    assert resumed.enable() is resumed
    assert values(small(enabled=False).enable()) == values(small())


def test_disabled_it_passes_through_jit_and_scan():
    def step(scaler, _):
        return scaler.step(TX, TX.init(jnp.ones(2)), jnp.ones(2), grads=jnp.ones(2)).scaler, None

    scaler = small(enabled=False)
    assert values(jax.lax.scan(step, scaler, None, 3)[0]) == values(scaler)


# State dicts.


@every_loss_scale
def test_a_run_restored_from_a_state_dict_at_any_point_goes_on_exactly(loss_scale):
    whole = sequence(jamp.GradScaler(loss_scale))
    for cut in range(1, len(OVERFLOWS)):
        saved = json.loads(json.dumps(whole[cut - 1].state_dict()))
        restored = jamp.GradScaler(loss_scale).load_state_dict(saved)
        assert jax.tree.structure(restored) == jax.tree.structure(whole[cut - 1])
        assert values(restored) == values(whole[cut - 1])
    assert values(sequence(restored, OVERFLOWS[cut:])[-1]) == values(whole[-1])


def test_the_state_dict_has_torchs_keys_and_values():
    torchs = {
        "scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 0,
    }
    assert torchs.items() <= jamp.GradScaler().state_dict().items()


def test_loading_brings_growth_and_backoff_along_as_in_torch():
    saved = jamp.GradScaler(growth_factor=4.0, backoff_factor=0.25, growth_interval=7).state_dict()
    loaded = jamp.GradScaler(min_scale=0.5).load_state_dict(saved).loss_scale
    assert loaded == jamp.DynamicLossScale(growth_factor=4.0, backoff_factor=0.25, growth_interval=7, min_scale=0.5)


def test_loading_an_empty_state_dict_is_an_error_that_names_the_cure():
    with pytest.raises(ValueError, match=r"empty, as that of a disabled scaler is. Use GradScaler\(enabled=False\)"):
        jamp.GradScaler().load_state_dict({})


def test_loading_a_foreign_state_dict_is_an_error_that_names_the_missing_keys():
    with pytest.raises(ValueError, match=r"lacks scale, _growth_tracker, hysteresis_count.*; it has loss_scaler, step"):
        jamp.GradScaler().load_state_dict({"loss_scaler": {}, "step": 3})
    with pytest.raises(ValueError, match=r"lacks window_index.*AdaptiveLossScale"):
        jamp.GradScaler(jamp.AdaptiveLossScale()).load_state_dict(jamp.GradScaler().state_dict())
    torchs = {"scale": 1.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0}
    with pytest.raises(ValueError, match=r"for one that torch wrote, use jamp\.interop\.from_torch"):
        jamp.GradScaler().load_state_dict(torchs)
