"""Each wrong use is an error that says what to write instead."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import pallas as pl
from steps import GOOD, PARAMS, with_masters
from trees import assert_equal

import jamp
from jamp._staging import is_recorded

SGD, MOMENTUM = optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)
SCALED, UNSCALING = jamp.loss_scaled(MOMENTUM), jamp.loss_scaled(MOMENTUM, unscale=True)
STATIC = jamp.loss_scaled(MOMENTUM, jamp.StaticLossScale(8.0))
EIGHT, LARGE = jamp.StaticLossScale(8.0), jamp.DynamicLossScale()
GRAD_SCALER = jamp.GradScaler()
LEFT = {"w": True, "b": False}
state = lambda tx: tx.init(PARAMS)
update = lambda tx, state: tx.update(GOOD, state, PARAMS)
step = lambda tx, scaler: scaler.step(MOMENTUM, state(tx), PARAMS, grads=GOOD)
loss_fn = lambda params: jnp.sum(params["w"] ** 2)
LOW = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
ROUNDING = jamp.stochastic_rounding(optax.sgd(1.0))
TENTH = optax.chain(ROUNDING, optax.scale(0.1))
UNROUNDED = {
    "scale": (
        optax.chain(TENTH, optax.scale(0.1)),
        r"multiplied by a number.*rounding\(optax\.chain\(tx",
    ),
    "jit": (optax.GradientTransformationExtraArgs(TENTH.init, jax.jit(TENTH.update)), "by a number"),
    "schedule": (optax.chain(ROUNDING, optax.scale_by_schedule(optax.linear_schedule(0.1, 0.0, 4))), "by a number"),
    "schedule_free": (optax.contrib.schedule_free(ROUNDING, 0.1), r"averages.*rounding\(optax\.contrib\.schedule_free"),
}

MISUSE = {
    # Wrappers in the wrong place, as far as `init` can see it.
    "twice": (ValueError, r"Two scalers.*Pass the plain optimizer", lambda: state(jamp.loss_scaled(SCALED))),
    "masters of a wrapper": (ValueError, r"Two scalers.*master_params", lambda: state(with_masters(SCALED))),
    "masked": (ValueError, r"sees only some.*loss_scaled\(optax\.masked", lambda: state(optax.masked(SCALED, LEFT))),
    "partition": (
        ValueError,
        r"an inf in the others would be applied.*loss_scaled\(optax\.partition",
        lambda: state(optax.partition({True: SCALED, False: SGD}, LEFT)),
    ),
    # Scaled twice.
    "scaled twice": (
        ValueError,
        r"jamp\.scaled inside jamp\.scaled: .*twice.*Use one of them",
        lambda: jamp.scaled(lambda p: jamp.scaled(loss_fn)(p))(PARAMS),
    ),
    "value_and_grad of scaled": (
        ValueError,
        r"jamp\.scaled inside jamp\.value_and_grad.*Where you compute the gradients",
        lambda: jamp.value_and_grad(jamp.scaled(loss_fn), state(SCALED))(PARAMS),
    ),
    "grad of scaled": (
        ValueError,
        r"jamp\.scaled inside jamp\.value_and_grad",
        lambda: jamp.grad(jax.jit(lambda p: jamp.scaled(loss_fn)(p)), state(STATIC))(PARAMS),
    ),
    "GradScaler of scaled": (
        ValueError,
        r"jamp\.scaled inside",
        lambda: jamp.GradScaler().value_and_grad(jamp.scaled(loss_fn))(PARAMS),
    ),
    "scaled's scale": (ValueError, r"scale must be a positive number.*got scale=0", lambda: jamp.scaled(loss_fn, 0)),
    "scaled's inf": (ValueError, r"got scale=inf", lambda: jamp.scaled(loss_fn, np.inf)),
    "scaled's retries": (ValueError, r"got retries=-1", lambda: jamp.scaled(loss_fn, retries=-1)),
    "scaled's function": (
        TypeError,
        r"scaled takes a function, got 3\. Write jamp\.scaled\(loss_fn\)",
        lambda: jamp.scaled(3),
    ),
    "scale_loss in value_and_grad": (
        ValueError,
        r"jamp\.scale_loss inside jamp\.value_and_grad: .*twice.*jamp\.value_and_grad\(loss_fn, opt_state\) alone",
        lambda: jamp.grad(lambda p, s=state(SCALED): jamp.scale_loss(loss_fn(p), s), state(SCALED))(PARAMS),
    ),
    "scale_loss in scaled": (
        ValueError,
        r"jamp\.scale_loss inside jamp\.scaled",
        lambda: jamp.scaled(lambda p, s=state(UNSCALING): jamp.scale_loss(loss_fn(p), s))(PARAMS),
    ),
    "scale in value_and_grad": (
        ValueError,
        r"jamp\.scale_loss inside jamp\.value_and_grad",
        lambda: jamp.grad(lambda p: jamp.GradScaler().scale(loss_fn(p)) / 2, state(SCALED))(PARAMS),
    ),
    "scale in place of the optimizer": (
        TypeError,
        r"inner must be an optimizer, got DynamicLossScale\(.*\)\. Pass the loss scale as loss_scale=",
        lambda: jamp.loss_scaled(jamp.DynamicLossScale(), SGD),
    ),
    # The state of another optimizer.
    "plain state": (
        TypeError,
        r"got a tuple of 2\..*jamp\.interop\.wrap_state",
        lambda: update(SCALED, state(MOMENTUM)),
    ),
    "restored dict": (TypeError, r"got a dict.*into tx\.init", lambda: update(SCALED, state(SCALED)._asdict())),
    "other scale": (
        TypeError,
        r"holds a DynamicLossScaleState, and this .* StaticLossScale.*jamp\.convert_loss_scale\(state, Static",
        lambda: update(STATIC, state(SCALED)),
    ),
    "other unscale": (
        TypeError,
        r"with unscale=False, and this one has unsc",
        lambda: update(UNSCALING, state(SCALED)),
    ),
    # An overflow that never reaches the loss scale.
    "apply_if_finite": (
        ValueError,
        r"the loss scale stays too high.*jamp\.loss_scaled\(optax\.apply_if_finite",
        lambda: jamp.grad(loss_fn, state(optax.apply_if_finite(SCALED, 5))),
    ),
    "apply_if_finite, unscale": (
        ValueError,
        "the loss scale stays too high",
        lambda: jamp.scale_loss(1.0, state(optax.chain(optax.apply_if_finite(UNSCALING, 5), optax.scale(0.5)))),
    ),
    "MultiSteps that skips": (
        ValueError,
        r"should_skip_update_fn of optax\.MultiSteps.*the loss scale stays too high",
        lambda: jamp.grad(loss_fn, state(optax.MultiSteps(SCALED, 4, should_skip_update_fn=optax.skip_not_finite))),
    ),
    # Gradients that would be unscaled twice.
    "value_and_grad": (
        ValueError,
        r"value_and_grad returns true gradients.*jamp\.scale_loss\(loss_fn",
        lambda: jamp.value_and_grad(loss_fn, state(UNSCALING)),
    ),
    "unscale_and_check": (
        ValueError,
        "would unscale them again",
        lambda: jamp.unscale_and_check(GOOD, state(UNSCALING)),
    ),
    "GradScaler": (ValueError, "Two scalers on one optimizer", lambda: step(UNSCALING, jamp.GradScaler())),
    "disabled": (ValueError, "Two scalers on one", lambda: step(SCALED, jamp.GradScaler(enabled=False))),
    "a scaler as scale": (TypeError, r"scaler\.loss_scale", lambda: jamp.loss_scaled(SGD, jamp.GradScaler())),
    "reset": (
        ValueError,
        r"holds a DynamicLossScaleState.*jamp\.convert_loss_scale",
        lambda: jamp.reset(state(SCALED), jamp.StaticLossScale()),
    ),
    # torch's ways of writing.
    "with": (
        TypeError,
        r"got the dtype float16.*not a context.*jamp\.autocast\(loss_fn",
        lambda: jamp.autocast(jnp.float16, jnp.float16),
    ),
    "with NumPy's": (TypeError, "got the dtype float16", lambda: jamp.autocast(np.float16, jnp.float16)),
    "with a device": (TypeError, "got a str", lambda: jamp.autocast("cuda", jnp.float16)),
    "parameters": (TypeError, r"got a dict.*jamp\.cast_floating\(params", lambda: jamp.autocast(PARAMS, jnp.float16)),
    "a model with functions": (
        TypeError,
        r"Argument 0 has no gradient: it holds .*jamp\.equinox\.filter_value_and_grad",
        lambda: jamp.grad(lambda m: m["w"].sum(), state(SCALED))({"w": jnp.ones(2), "act": jax.nn.relu}),
    ),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_an_error_that_names_the_cure(name):
    error, match, call = MISUSE[name]
    with pytest.raises(error, match=match):
        call()


def test_what_is_no_misuse_passes():
    whole = optax.masked(SCALED, dict.fromkeys(LEFT, True))
    update(whole, state(whole))
    numbers = {"w": 1.0}
    assert SCALED.update(numbers, SCALED.init(numbers), numbers)[1].grads_finite
    assert jamp.grad(lambda x, y: x * y, state(SCALED), argnums=np.int64(1))(2.0, 3.0) == 2.0

    class Own(jamp.LossScaledState):
        pass

    assert type(SCALED.update(GOOD, Own(*state(SCALED)), PARAMS)[1]) is Own


def rounded_step(tx, params, loss_scale=jamp.StaticLossScale(1.0)):
    tx = jamp.loss_scaled(tx, loss_scale)
    return jax.eval_shape(lambda p: tx.update(p, tx.init(p), p)[0], params)


@pytest.mark.promotes("optax")
@pytest.mark.parametrize("name", UNROUNDED)
def test_updates_that_change_after_their_rounding_are_an_error(name):
    tx, match = UNROUNDED[name]
    with pytest.raises(ValueError, match=match):
        rounded_step(tx, LOW)
    with pytest.raises(ValueError, match=match):
        rounded_step(optax.partition({True: tx, False: SGD}, LEFT), LOW)
    with pytest.warns(UserWarning, match="stochastic_rounding does nothing"):
        rounded_step(tx, PARAMS)  # float32 parameters are not rounded
    rounded_step(optax.partition({True: SGD, False: tx}, LEFT), LOW | {"b": PARAMS["b"]})


@pytest.mark.promotes("optax")
def test_what_leaves_rounded_updates_as_they_are_passes():
    masking = optax.stateless(lambda updates, p: jax.tree.map(lambda u, x: u * (x > 0), updates, p))

    @jax.custom_jvp
    def straight_through(x, rounded):
        return rounded

    straight_through.defjvp(lambda primals, tangents: (primals[1], tangents[0]))
    own = optax.stateless(lambda updates, _: jax.tree.map(lambda u: 0.1 * straight_through(u, jnp.round(u)), updates))
    rounded_step(own, PARAMS)
    rounded_step(jamp.stochastic_rounding(own), LOW)
    for after in (optax.identity(), optax.keep_params_nonnegative(), masking, optax.scale(1.0)):
        rounded_step(optax.chain(ROUNDING, after), LOW)
    around = optax.apply_if_finite(ROUNDING, 5), optax.inject_hyperparams(optax.sgd)(0.1)
    for tx in (*around, jamp.stochastic_rounding(optax.contrib.schedule_free(SGD, 0.1)), optax.scale(0.5)):
        same = rounded_step(tx, LOW), rounded_step(tx, LOW, jamp.NoOpLossScale())
        assert jax.tree.structure(same[0]) == jax.tree.structure(same[1])


def test_a_clip_or_a_decay_before_unscale_in_a_chain_warns_at_the_caller():
    match = (
        r"stands before loss_scaled\(\.\.\., unscale=True\).*jamp\.loss_scaled\(optax\.chain\(clip, tx\), unscale=True"
    )
    for before in (optax.clip_by_global_norm(1.0), optax.clip(1.0), optax.add_decayed_weights(0.1)):
        for chain in (optax.chain(before, UNSCALING), optax.chain(optax.scale(2.0), optax.chain(before, UNSCALING))):
            with pytest.warns(UserWarning, match=match) as caught:
                jax.jit(lambda s: jamp.scale_loss(1.0, s))({"opt": state(chain)})
            assert [w.filename for w in caught] == [__file__]


def test_multisteps_around_loss_scaled_warns_at_the_caller():
    match = r"overflow of one micro-batch.*stays forever.*jamp\.loss_scaled\(optax\.MultiSteps"
    for tx in (optax.MultiSteps(STATIC, 4), optax.chain(optax.MultiSteps(SCALED, 4), optax.scale(0.5))):
        with pytest.warns(UserWarning, match=match) as caught:
            jax.jit(lambda s: jamp.scale_loss(1.0, {"opt": s}))(state(tx))
        assert [w.filename for w in caught] == [__file__]
        jamp.metrics(state(tx))


def test_zero_nans_before_or_an_optimizer_after_loss_scaled_warns_at_the_caller():
    adam, before, after = optax.adam(0.1), "makes a NaN finite", "changes its moments"
    no_state = [jamp.loss_scaled(x, scale) for x in (optax.identity(), optax.clip(1.0)) for scale in (LARGE, EIGHT)]
    chains = {optax.chain(optax.zero_nans(), tx): before for tx in (SCALED, STATIC, optax.chain(SCALED, SGD))}
    chains |= {optax.chain(tx, then): after for tx in no_state for then in (adam, MOMENTUM, optax.ema(0.9))}
    chains |= {optax.chain(optax.scale(2.0), optax.zero_nans(), optax.chain(jamp.loss_scaled(SGD), SGD)): before}
    for chain, match in chains.items():
        for look_up in (lambda s: jamp.grad(loss_fn, s), lambda s: jamp.scale_loss(1.0, s)):
            with pytest.warns(UserWarning, match=match + r".*Put it inside: jamp\.loss_scaled\(optax\.chain") as caught:
                jax.eval_shape(lambda s, f=look_up: jax.tree.leaves(f({"opt": s})) and None, state(chain))
            assert {w.filename for w in caught} == {__file__}


@pytest.mark.promotes("optax.apply_updates")
def test_float16_parameters_without_masters_warn_at_the_caller():
    half, match = jamp.cast_floating(PARAMS, "float16"), r"lose updates.*jamp\.master_params\(tx\)"
    for call in (lambda: SCALED.init(half), lambda: GRAD_SCALER.step(SGD, SGD.init(half), half, grads=GOOD)):
        with pytest.warns(UserWarning, match=match) as caught:
            call()
        assert [w.filename for w in caught] == [__file__]
    jamp.loss_scaled(jamp.master_params(MOMENTUM)).init(half)
    jamp.loss_scaled(MOMENTUM, jamp.NoOpLossScale()).init(half)
    SCALED.init(half | {"b": PARAMS["b"]})  # such as frozen float16 weights with float32 adapters
    SCALED.init(LOW)


def test_scale_loss_and_value_and_grad_are_silent_in_correct_chains():
    clip = optax.clip(1.0)
    inside = jamp.loss_scaled(optax.chain(clip, optax.add_decayed_weights(0.1), SGD), unscale=True)
    unscaled, skipping = jamp.loss_scaled(SGD, jamp.NoOpLossScale()), {"should_skip_update_fn": optax.skip_not_finite}
    for tx in (
        inside,
        optax.chain(inside, clip),
        optax.chain(SCALED, clip, optax.scale(0.5)),
        # The norm of an overflow is inf or NaN, so these hand it on.
        *(optax.chain(x, SCALED) for x in (optax.clip_by_global_norm(1.0), optax.scale(2.0), optax.identity())),
        optax.chain(jamp.loss_scaled(optax.adam(0.1)), optax.scale_by_schedule(lambda _: 0.5)),
        jamp.loss_scaled(optax.MultiSteps(SGD, 2)),
        optax.chain(clip, unscaled, optax.adam(0.1)),
        optax.MultiSteps(unscaled, 2),
        optax.MultiSteps(STATIC, 2, **skipping),
    ):
        jamp.scale_loss(1.0, (PARAMS, state(SGD), state(tx)))
    jamp.scale_loss(1.0, (state(jamp.loss_scaled(SGD)), PARAMS, jnp.ones(2)))
    jamp.scale_loss(1.0, (state(jamp.loss_scaled(SGD)), state(optax.ema(0.9))))  # a user's tuple
    jamp.scale_loss(1.0, state(optax.chain(clip, jamp.loss_scaled(SGD, jamp.NoOpLossScale(), unscale=True))))
    fixed = [jamp.loss_scaled(SGD, x) for x in (jamp.NoOpLossScale(), jamp.StaticLossScale(8.0))]
    for tx in (jamp.loss_scaled(optax.apply_if_finite(SGD, 5)), *(optax.apply_if_finite(x, 5) for x in fixed)):
        assert jamp.grad(loss_fn, {"frozen": state(optax.apply_if_finite(SGD, 5)), "opt": state(tx)})


CONSTANT = state(SCALED)
FROZEN = {
    "value_and_grad": jax.jit(jamp.value_and_grad(loss_fn, CONSTANT)),
    "grad, called in a step": jax.jit(lambda p, f=jamp.grad(loss_fn, CONSTANT): f(p)),
    "scale_loss": jax.jit(jax.grad(lambda p, s=state(UNSCALING): jamp.scale_loss(loss_fn(p), {"opt": s}))),
    "of autocast": jax.jit(jamp.autocast(jamp.grad(loss_fn, CONSTANT), jnp.float16)),
    "GradScaler.value_and_grad": jax.jit(lambda p, f=jamp.GradScaler().value_and_grad(loss_fn): f(p)),
    "GradScaler.scale": jax.jit(jax.grad(lambda p, scaler=jamp.GradScaler(): scaler.scale(loss_fn(p)))),
    "another loss scale": jax.jit(jamp.grad(loss_fn, jamp.AdaptiveLossScale().init())),
    "numbers of a checkpoint": jax.jit(jamp.grad(loss_fn, jax.tree.map(np.asarray, CONSTANT))),
}


@pytest.mark.parametrize("name", FROZEN)
def test_a_loss_scale_that_is_a_constant_of_a_jitted_function_warns_at_the_caller(name):
    match = (
        r"constant of the function that is being traced.*keeps the first scale forever.*Pass the state to the jitted"
    )
    with pytest.warns(UserWarning, match=match) as caught:
        FROZEN[name].lower(PARAMS)
    assert [w.filename for w in caught] == [__file__]


def test_a_loss_scale_that_is_traced_or_read_at_each_call_or_never_changes_is_silent():
    grad = jamp.grad(loss_fn, CONSTANT)
    jax.jit(lambda p, s: jamp.grad(loss_fn, s)(p)).lower(PARAMS, CONSTANT)
    jax.jit(lambda p: jamp.grad(loss_fn, state(SCALED))(p)).lower(PARAMS)  # a state that the step itself makes
    jax.jit(lambda p: lax.scan(lambda s, _: (s, jamp.grad(loss_fn, s)(p)), CONSTANT, length=2)).lower(PARAMS)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), (PARAMS, CONSTANT))
    jax.vmap(lambda p, s: jax.jit(jamp.grad(loss_fn, s))(p))(*stacked)
    grad(PARAMS)
    jax.vmap(grad)(stacked[0])
    jax.jvp(grad, (PARAMS,), (PARAMS,))
    jax.grad(lambda p: jamp.scale_loss(loss_fn(p), CONSTANT))(PARAMS)
    jamp.autocast(grad, jnp.float16)(PARAMS)  # outside jit it is traced at each call
    jamp.autocast_report(grad, jnp.float16)(PARAMS)
    with jax.disable_jit():
        jax.jit(grad)(PARAMS)
    for fixed in (jamp.NoOpLossScale(), jamp.StaticLossScale(8.0), jamp.GradScaler.static().loss_scale):
        jax.jit(jamp.grad(loss_fn, jamp.loss_scaled(SGD, fixed).init(PARAMS))).lower(PARAMS)
    jax.jit(lambda: jamp.scale_loss(jnp.float32(1.0), state(SCALED))).lower()


def test_short_names_of_dtypes_are_dtypes_everywhere():
    w = jnp.ones(2)
    assert jamp.cast_floating(w, "fp16").dtype == jnp.float16
    assert jamp.autocast_report(lambda x: x @ x, "half")(w).compute_dtype == "float16"
    assert jamp.loss_scale_for("bf16") == jamp.StaticLossScale(1.0)
    assert jamp.autocast("bfloat16")(lambda x: x @ x)(w).dtype == jnp.float32
    assert jamp.Float8(carrier="fp16").carrier == jnp.float16
    assert jamp.Float8(forward="float8_e5m2") == jamp.Float8(forward=jnp.float8_e5m2)
    assert jamp.check_castable({"w": w * 1e5}, "fp16") == ["['w']"]
    assert jamp.unscale_and_check(w, state(SCALED), dtype="bf16")[0].dtype == jnp.bfloat16
    assert jamp.master_params(SGD, "f32").init(w.astype(jnp.float16)).master_params.dtype == jnp.float32
    rounded = jamp.stochastic_rounding(optax.adam(0.1), state_dtype="bf16").init(w.astype(jnp.bfloat16))
    assert rounded.inner_state[0].mu.dtype == jnp.bfloat16
    for call in (lambda x: jamp.cast_floating(w, x), jamp.loss_scale_for, lambda x: jamp.autocast(jnp.sin, x)):
        for wrong in ("fp17", "int8"):
            with pytest.raises(ValueError, match="dtype must be float"):
                call(wrong)
    for call in (lambda x: jamp.cast_floating(w, x), jamp.loss_scale_for):
        with pytest.raises(ValueError, match="dtype must be float"):
            call(None)
    with pytest.raises(TypeError, match="autocast takes a function and a compute_dtype, got sin alone"):
        jamp.autocast(jnp.sin, None)


def test_products_that_are_not_entered_warn_once_with_their_share():
    def kernel(x, y, o):
        o[...] = (x[...] @ y[...]).astype(jnp.float32)

    product = pl.pallas_call(kernel, jax.ShapeDtypeStruct((16, 16), jnp.float32), interpret=True)
    fun = jamp.autocast(lambda x: product(x, x) @ x, jnp.float16)
    match = r"^autocast leaves 50.0% of the FLOPs in float32: pallas_call at test_misuse.py:.*pass it functions that"
    with pytest.warns(UserWarning, match=match) as caught:
        jax.jit(fun)(jnp.ones((16, 16)))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        low = jnp.ones((16, 16), jnp.bfloat16)
        jamp.autocast(lambda x, y: jnp.float32(product(x, x).sum()) + (y @ y).sum(), jnp.float16)(
            low, jnp.ones((16, 16))
        )


def test_what_is_logged_outlives_a_donated_state_and_transfers_nothing():
    @jax.jit
    def train(params, opt_state):
        grads = jamp.grad(loss_fn, opt_state)(params)
        updates, opt_state = SCALED.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jamp.metrics(opt_state)

    donating = jax.jit(train, donate_argnums=(0, 1))
    params, opt_state = jax.tree.map(jnp.copy, PARAMS), state(SCALED)
    kept, scaler = [], jamp.GradScaler()
    with jax.transfer_guard("disallow"):
        for _ in range(2):
            params, opt_state, inside = donating(params, opt_state)
            reads = jamp.metrics, jamp.get_loss_scale, jamp.get_stats, jamp.get_grads_finite
            kept += [inside, *(read(opt_state) for read in reads)]
        kept += [scaler.get_scale(), scaler.stats]
        jax.jit(lambda x: x, donate_argnums=0)(scaler)
    assert [int(metrics["finite_steps"]) for metrics in kept[0::5][:2]] == [1, 2]
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(kept))


def test_reset_gives_the_initial_scale_and_statistics_where_they_were():
    _, after = update(SCALED, SCALED.update(GOOD, state(SCALED), grads_finite=False)[1])
    for tree in (after, {"deep": (after, 3)}):
        fresh = jamp.reset(tree, jamp.DynamicLossScale())
        assert (float(jamp.get_loss_scale(fresh)), int(jamp.get_stats(fresh).finite_steps)) == (2.0**16, 0)
        assert jax.tree.structure(fresh) == jax.tree.structure(tree)
    assert_equal(fresh["deep"][0].inner_state, after.inner_state)
    members = jax.vmap(SCALED.init)(jax.tree.map(lambda x: jnp.stack([x] * 3), PARAMS))
    assert jamp.get_loss_scale(jax.jit(lambda s: jamp.reset(s, jamp.DynamicLossScale(8.0)))(members)).shape == (3,)
    scaler = jamp.reset(jamp.GradScaler(init_scale=4.0).update(overflow=True), jamp.DynamicLossScale(4.0))
    assert float(scaler.get_scale()) == 4.0


FUNCTIONS = {
    "grad_fn": optax.contrib.sam(optax.sgd(0.01), optax.sgd(0.05), opaque_mode=True),
    "value_fn": optax.lbfgs(),
    "obj_fn": optax.sgd(0.1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_for_the_inner_optimizer_and_unscale_are_an_error(name):
    tx, w = jamp.loss_scaled(FUNCTIONS[name], unscale=True), jnp.zeros(4)
    with pytest.raises(ValueError, match=rf"update got {name}=, .* with gradients from jamp\.grad"):
        tx.update(w, tx.init(w), w, **{name: lambda w: jnp.sum(w)})


@pytest.mark.slow
def test_a_line_search_skips_a_batch_that_overflows_if_its_gradient_is_new():
    loss_fn = lambda w, x: jnp.mean((x @ w - 1.0) ** 2)
    x = jax.random.normal(jax.random.key(0), (32, 8))
    tx, w = jamp.loss_scaled(optax.lbfgs(), jamp.StaticLossScale(1.0)), jnp.zeros(8)

    def step(w, state, x):
        value, grad = jamp.value_and_grad(loss_fn, state)(w, x)
        search = {"value": value, "grad": grad, "value_fn": lambda w: loss_fn(w, x)}
        updates, state = tx.update(grad, state, w, **search)
        return optax.apply_updates(w, updates), state

    w, state = step(w, tx.init(w), x)
    same, state = step(w, state, x.at[0, 0].set(jnp.inf))
    assert_equal(same, w)
    assert not jamp.get_grads_finite(state)
    w, state = step(w, state, x)
    assert jamp.get_grads_finite(state)
    assert loss_fn(w, x) < loss_fn(same, x)


def test_a_rule_that_matches_no_operation_is_a_warning_that_names_scopes_like_it():
    def fun(w, x):
        with jax.named_scope("body"):
            h = jnp.tanh(x @ w)
        with jax.named_scope("head"):
            return lax.scan(lambda c, _: (c @ w, None), h, None, length=2)[0]

    w, x = jnp.ones((16, 16)), jnp.ones((2, 16))
    for rules in (
        {"dot_general[head]": "float32"},
        {"tanh": "float32", "scan": "float32"},
        {"dot_general[gradient]": "compute", "dot_general[precision]": "compute"},
    ):
        jamp.autocast(fun, jnp.bfloat16, rules=rules)(w, x)
    for key, hint in {
        "dot_general[haed]": " Scopes with a similar name: head.",
        "dot_general[bdoy]": " Scopes with a similar name: body.",
        "conv_general_dilated[head]": " The scope has no such operation, or an earlier rule",
        "dot_general[zzz]": r" A name in brackets is a scope, of jax.named_scope\('zzz'\) or of a Linen module.",
        "exp": "",
        "while": "",
    }.items():
        with pytest.warns(UserWarning, match=rf"^The rule for '{re.escape(key)}' matches no operation of.*{hint}"):
            jamp.autocast(fun, jnp.bfloat16, rules={key: "float32"})(w, x)
    # The derivative of a custom rule is traced later, so that nobody knows yet.
    own = jax.custom_jvp(lambda w, x: x @ w)
    own.defjvp(lambda p, t: (own(*p), jnp.exp(t[1] @ p[0])))
    jamp.autocast(own, jnp.bfloat16, rules={"exp": "float32"})(w, x)
    by_hand = jax.custom_vjp(lambda w, x: x @ w)
    back = jax.named_scope("back")(lambda kept, g: (kept[1].T @ g, g @ kept[0].T))
    by_hand.defvjp(lambda w, x: (x @ w, (w, x)), back)
    jax.grad(lambda w: jamp.autocast(by_hand, jnp.bfloat16, rules={"dot_general[back]": "float32"})(w, x).sum())(w)
    # The derivatives of JAX's own functions have no scopes.
    with_relu = lambda w, x: jax.nn.relu(fun(w, x))
    jamp.autocast(with_relu, jnp.bfloat16, rules={"exp": "float32"})(w, x)
    with pytest.warns(UserWarning, match=r"^The rule for 'dot_general\[zzz\]' matches no operation"):
        jamp.autocast(with_relu, jnp.bfloat16, rules={"dot_general[zzz]": "float32"})(w, x)
    with pytest.raises(ValueError, match="Did you mean 'dot_general'"):
        jamp.autocast(fun, jnp.bfloat16, rules={"dot_genral": "float32"})


class Setting:
    """A user's object that has the methods of an NNX Variable."""

    def get_value(self):
        return 2.0

    def set_value(self, value):
        raise AssertionError(value)


@pytest.mark.parametrize(
    "wrap",
    [functools.partial(jamp.autocast, compute_dtype=jnp.float16), jamp.scaled, jamp.debug.find_nonfinite, lambda f: f],
)
def test_arguments_that_jax_grad_takes_are_taken(wrap):
    names, times = np.array(["a", "b"]), np.array(["2026-01-01"], "M8[D]")
    records = np.zeros(2, [("x", np.float32)])
    fun = wrap(lambda w, *others: jnp.sum(w @ w) * len(others[0]) * others[-1].get_value())
    for others in ((names, Setting()), (times, records, np.array([object()]), Setting())):
        found = fun(jnp.ones((2, 2)), *others)
        assert not found if wrap is jamp.debug.find_nonfinite else found == 16 * len(others[0])


def test_whether_operations_are_recorded_is_known_and_leaves_no_trace():
    found = []
    see = lambda x: found.append(is_recorded()) or x
    one, ones = jnp.float32(1), jnp.ones(2)
    see(one), jax.grad(see)(one), jax.vmap(see)(ones), jax.vmap(jax.grad(see))(ones)
    assert found == [False] * 4
    jaxpr = jax.make_jaxpr(see)(one)
    jax.jit(jax.grad(see))(one), jax.jit(jax.vmap(jax.grad(see)))(ones), lax.map(jax.grad(see), ones)
    assert found[4:] == [True] * len(found[4:])
    assert len(found) >= 8
    assert not jaxpr.eqns
