"""jamp.GradScaler: every constructor, method and error. The contract suite and recorded runs of torch step it."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from steps import with_masters
from trees import assert_equal, avals

import jamp

STATIC = jamp.StaticLossScale(8.0)
DYNAMIC = jamp.DynamicLossScale(init_scale=8.0, growth_interval=3, hysteresis=2)
LOSS_SCALES = [DYNAMIC, STATIC, jamp.AdaptiveLossScale(init_scale=8.0, windows=(2, 3))]
OVERFLOWS = "001011100000000101000000"
TORCHS = {"scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0}
CHANGED = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 7}
WRONG = {  # saved values of another shape or type
    ("scale", "a number, float32"): ([8.0], [[1], [2, 3]], "1e4", None, True, {"scale": 8.0}),
    ("_growth_tracker", "an int, int32"): ([0, 1], 0.5, "7", 2**40, True),
    ("grads_finite", "a bool, bool"): ([True], 1, "False"),
}
TX = optax.sgd(0.5, momentum=0.5)
ONES = jnp.ones(2)


def small(**keywords):
    return jamp.GradScaler(init_scale=8.0, growth_interval=2, **keywords)


def sequence(scaler):
    """The scaler after each step of a sequence of updates."""
    update = jax.jit(lambda scaler, overflow: scaler.update(overflow=overflow))
    return [scaler := update(scaler, digit == "1") for digit in OVERFLOWS]


def test_constructors_and_state_dicts_give_the_loss_scale_that_they_promise():
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
    assert TORCHS.items() <= jamp.GradScaler().state_dict().items()
    loaded = jamp.GradScaler(min_scale=0.5).load_state_dict(jamp.GradScaler(**CHANGED).state_dict())
    assert loaded.loss_scale == jamp.DynamicLossScale(**CHANGED, min_scale=0.5)


def test_errors_name_the_cure():
    def torch_habit(carry, _=None):
        result = carry[0].step(TX, carry[2], carry[1], grads=ONES)
        return (result.scaler.update(), *result[:2]), None

    steps = torch_habit, jax.jit(torch_habit), lambda carry: jax.lax.scan(torch_habit, carry, None, 2)
    scaler, adaptive = jamp.GradScaler, jamp.GradScaler(LOSS_SCALES[2])
    step = lambda tx, **given: lambda: small().step(tx, tx.init(ONES), ONES, **given)
    load = lambda given: lambda: small().load_state_dict(given)
    both, wrapped = {"grads": ONES, "scaled_grads": ONES}, (jamp.loss_scaled(TX), with_masters(TX))
    swapped = lambda tx: lambda: small().step(tx, ONES, tx.init(ONES), grads=ONES)
    for match, call in (
        *(("before params", swapped(tx)) for tx in (TX, optax.sgd(0.1), optax.lion(0.1))),
        ("init_scale, min_scale", lambda: scaler(STATIC, init_scale=2.0, min_scale=1.0)),
        ("above 1", lambda: scaler(growth_factor=1.0)),
        ("overflow=", lambda: small().update(grads_finite=True, overflow=True)),
        ("scaled_grads=", step(TX, **both)),
        *(("plain", step(tx, grads=ONES)) for tx in wrapped),
        *(("delete it", lambda f=f: f((small(), ONES, TX.init(ONES)))) for f in steps),
        ("scale, _growth_tracker, hysteresis_.* got step", load({"step": 3})),
        ("from_torch", load(TORCHS)),
        ("StaticLossScale.*growth_factor", lambda: scaler.static(8.0).load_state_dict(small().state_dict())),
        ("AdaptiveLossScale needs window_index", lambda: adaptive.load_state_dict(small().state_dict())),
        *(("mapping", load(x)) for x in (None, [1], 8.0)),
        *(
            (rf"{name} must be {own}\[\]", load(small().state_dict() | {name: x}))
            for (name, own), values in WRONG.items()
            for x in values
        ),
    ):
        with pytest.raises(ValueError, match=match):
            call()


@pytest.mark.parametrize("loss_scale", LOSS_SCALES, ids=lambda x: type(x).__name__)
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
        assert_equal((scaler.state, jamp.get_grads_finite(scaler)), (state, jnp.array(digit == "0")))
        # A run restored from a state dict at any point goes on exactly.
        saved = json.loads(json.dumps(scaler.state_dict()))
        assert_equal(jamp.GradScaler(loss_scale).load_state_dict(saved), scaler)
    ensemble = jax.tree.map(lambda x: jnp.stack([x, x]), scaler)  # its state dict has lists
    assert_equal(ensemble.load_state_dict(ensemble.state_dict()), ensemble)
    assert_equal(scaler.get_stats(), jamp.get_stats(scaler))
    assert [int(n) for n in scaler.stats[:2]] == [OVERFLOWS.count("0"), OVERFLOWS.count("1")]


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
        true, expected = jnp.array([1.0, jnp.inf if overflow else 0.0]), (params, opt_state)
        # Where the scale grows in the same step, the old one unscales.
        given = {"scaled_grads": true * 8} if scaled else {"grads": true}
        result = scaler.step(TX, opt_state, params, **given, **dict(zip(names, switches, strict=True)))
        assert bool(result.stepped) == (not (overflow and check_overflow))
        if optimizer_step and result.stepped:
            updates, moved_state = TX.update(true, opt_state, params)
            expected = optax.apply_updates(params, updates), moved_state
        assert_equal(result[:2], expected)
        assert_equal(result.scaler, scaler.update(overflow=overflow) if update_scale and check_overflow else scaler)


@pytest.mark.promotes("optax.apply_updates")
def test_16_bit_parameters_keep_their_dtypes_and_float16_without_masters_warns():
    def step(tx, dtype):
        carry = jnp.ones(2, dtype), tx.init(jnp.ones(2, dtype))
        result = small().step(tx, carry[1], carry[0], grads=ONES)
        assert result.params.tolist() == [0.5, 0.5]
        assert avals(result[:2]) == avals(carry)

    with pytest.warns(UserWarning, match=r"float16 parameters without a master copy.*jamp\.master_params\(tx\)"):
        step(TX, jnp.float16)
    step(TX, jnp.bfloat16)
    step(jamp.master_params(TX), jnp.float16)


@pytest.mark.promotes("optax.add_noise")
def test_an_optimizer_whose_state_holds_a_random_key_is_stepped():
    tx = optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(0)), optax.scale(-0.5))
    state = small().step(tx, tx.init(ONES), ONES, grads=ONES).opt_state
    assert list(map(jax.typeof, jax.tree.leaves(state))) == list(map(jax.typeof, jax.tree.leaves(tx.init(ONES))))
    assert state[0].rng_key != tx.init(ONES)[0].rng_key


def test_disabled_it_steps_unconditionally_and_all_else_is_the_identity():
    """That it compiles to the plain step is in test_loss_scaled.py."""
    scaler, loss, bad = small(enabled=False), object(), jnp.array([1.0, jnp.inf])
    assert scaler.scale(loss) is loss
    assert scaler.unscale(bad) is bad
    assert scaler.update(overflow=True) is scaler.load_state_dict({}) is scaler
    assert [float(x) for x in (scaler.get_scale(), scaler.get_inverse_scale(), jamp.get_loss_scale(scaler))] == [1] * 3
    assert (bool(scaler.check_overflow(bad)), scaler.is_enabled(), scaler.state_dict()) == (False, False, {})
    result = jax.jit(lambda scaler: scaler.step(TX, TX.init(ONES), ONES, grads=bad))(scaler)
    assert (bool(result.stepped), result.params.tolist()) == (True, [0.5, -np.inf])
    assert_equal(result.scaler, scaler)
    # On and off again it keeps the scale and the counts.
    assert_equal(scaler.enable(), small())
    counted = sequence(small())[-1]
    paused = counted.disable()
    resumed = jax.jit(lambda s: s.enable())(paused)
    assert (paused.is_enabled(), float(paused.get_scale())) == (False, 1.0)
    assert (paused.disable() is paused, resumed.enable() is resumed) == (True, True)
    assert_equal(resumed, counted)


def test_a_subclass_without_fields_is_a_pytree_whose_methods_return_it():
    class Scaler(jamp.GradScaler):
        def backed_off(self):
            return self.update(overflow=True)

    made = Scaler.static(8.0), Scaler.from_config(jamp.DynamicLossScale(8.0)), Scaler(STATIC, axis_name="replica")
    for scaler in (*made, made[1].backed_off(), made[1].reset(), made[1].disable().enable(), made[0].disable()):
        again = jax.jit(lambda s: jax.tree.map(jnp.copy, s))(scaler)
        assert (type(again), again.loss_scale, again.axis_name) == (Scaler, scaler.loss_scale, scaler.axis_name)
    stepped = made[1].load_state_dict(made[1].state_dict()).step(TX, TX.init(ONES), ONES, grads=ONES).scaler
    assert type(stepped) is Scaler
    assert not jamp.GradScaler.static(8.0, enabled=False).is_enabled()


@pytest.mark.slow
@pytest.mark.promotes("optax: reduce_on_plateau")
def test_extra_args_reach_the_optimizer_and_replicas_skip_together():
    tx = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(patience=1, cooldown=0))
    params, opt_state, scaler = ONES, tx.init(ONES), small()
    for _ in range(4):
        params, opt_state, scaler, _ = scaler.step(tx, opt_state, params, grads=ONES, extra_args={"value": 1.0})
    assert float(optax.tree.get(opt_state, "scale")) < 1
    scaler = jamp.GradScaler(axis_name="replica")
    both = jnp.stack([ONES, ONES * jnp.inf])
    stepped = jax.vmap(lambda g: scaler.step(TX, TX.init(ONES), ONES, grads=g).stepped, axis_name="replica")(both)
    alone = jax.vmap(lambda g: jamp.GradScaler().step(TX, TX.init(ONES), ONES, grads=g).stepped)(both)
    assert (stepped.tolist(), alone.tolist()) == ([False, False], [True, False])


@pytest.mark.parametrize("enabled", [True, False])
def test_a_converted_scaler_steps_with_the_new_loss_scale(enabled):
    tx, params = optax.sgd(0.1), jnp.ones(2)
    overflow = lambda scaler: scaler.step(tx, tx.init(params), params, grads=params * jnp.inf)
    scaler = jamp.GradScaler(jamp.StaticLossScale(1024.0), enabled=enabled)
    dynamic = jamp.convert_loss_scale({"scaler": scaler}, jamp.DynamicLossScale())["scaler"]
    assert dynamic.is_enabled() == enabled
    assert dynamic.loss_scale == jamp.DynamicLossScale()
    stepped = overflow(dynamic.enable())
    assert float(stepped.scaler.get_scale()) == 512
    adaptive = jamp.convert_loss_scale(stepped.scaler, jamp.AdaptiveLossScale())
    assert float(overflow(adaptive).scaler.get_scale()) == 256
    off = jamp.convert_loss_scale(adaptive, jamp.NoOpLossScale())
    assert not off.is_enabled()
    assert not np.isfinite(overflow(off).params).any()
    assert jamp.convert_loss_scale(off, jamp.DynamicLossScale()).is_enabled()


def test_flags_of_another_shape_are_an_error_and_an_ensemble_is_reset_whole():
    with pytest.raises(ValueError, match="one bool"):
        jamp.GradScaler().update(overflow=jnp.array([False, True]))
    ensemble = jax.vmap(lambda _: jamp.GradScaler())(jnp.arange(3))
    overflowed = ensemble.update(overflow=jnp.array([False, True, False]))
    np.testing.assert_array_equal(overflowed.get_scale(), np.float32([65536, 32768, 65536]))
    np.testing.assert_array_equal(overflowed.reset().get_scale(), np.full(3, 65536, np.float32))
    np.testing.assert_array_equal(ensemble.update(overflow=True).update(overflow=[True] * 3).get_scale(), [16384] * 3)
    assert not jamp.GradScaler(enabled=False).reset().is_enabled()


def test_a_scale_that_scales_nothing_stays_1():
    for tree in (jamp.NoOpLossScale().init(), jamp.GradScaler(enabled=False)):
        assert float(jamp.get_loss_scale(jamp.set_loss_scale(tree, 1024.0))) == 1


def test_16_bit_parameters_are_stepped_under_strict_promotion():
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    tx = optax.sgd(0.1)
    with jax.numpy_dtype_promotion("strict"):
        stepped = jamp.GradScaler().step(tx, tx.init(params), params, grads=params)
    assert stepped.params["w"].dtype == jnp.bfloat16


def test_true_gradients_are_unscaled_once():
    """As in torch. What arithmetic, or a `jit` of its own, makes of true gradients is not recognized."""
    scaler, loss = jamp.GradScaler(), lambda w: jnp.sum(w**2)
    scaled = jax.grad(lambda w: scaler.scale(loss(w)))(jnp.ones(2))
    for twice in (
        lambda s: s.unscale(s.value_and_grad(loss)(jnp.ones(2))[1]),
        lambda s: s.unscale(s.unscale(jax.grad(lambda w: s.scale(loss(w)))(jnp.ones(2)))),
    ):
        for step in (twice, jax.jit(twice)):
            with pytest.raises(ValueError, match=r"grads=grads"):
                step(scaler)
    np.testing.assert_array_equal(scaler.unscale(scaled), scaler.unscale(scaled))  # of two optimizers
    off = scaler.disable()
    assert off.unscale(off.unscale(scaled)) is scaled
