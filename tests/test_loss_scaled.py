"""loss_scaled: what may stand inside, before and after it, what it keeps and refuses, and what NoOp compiles to."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from steps import GOOD, INF, NAN, PARAMS, check_skips, runner, skipped, stepper, together, with_masters
from trees import assert_close, assert_equal, avals, bits

import jamp

promotes = pytest.mark.promotes("optax: ema, adam, MultiSteps, inject_hyperparams, apply_updates")
SGD = optax.sgd(0.1, momentum=0.9)
SCALED = jamp.loss_scaled(SGD)
SCHEDULE = optax.linear_schedule(0.1, 0.01, 5)
INSIDE = {  # Each transformation by itself: test_optax_optimizers.py.
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE)),
    "named_chain": optax.named_chain(("clip", optax.clip(1.0)), ("adam", optax.adam(SCHEDULE))),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(SCHEDULE),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "MultiSteps, the object": optax.MultiSteps(optax.adam(0.1), 2),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "add_decayed_weights": optax.chain(SGD, optax.add_decayed_weights(-0.1)),
}
STATEFUL = {"ema": optax.ema(0.9), "trace": optax.trace(0.9), "scale_by_rms": optax.scale_by_rms()}


@promotes
@pytest.mark.filterwarnings("ignore:float16 parameters without a master copy")
def test_compositions_inside_are_skipped_and_stepped_whole_in_any_precision():
    inside, each = together(INSIDE | STATEFUL), lambda x: dict.fromkeys(INSIDE | STATEFUL, x)
    check_skips(inside, each(GOOD), [each(INF), each(NAN), each(GOOD) | {"chain": NAN}], each(PARAMS), rtol=1e-5)
    tx = jamp.loss_scaled(inside)
    for dtype in (jnp.float16, jnp.bfloat16):
        carry = each(jamp.cast_floating(PARAMS, dtype)), tx.init(each(jamp.cast_floating(PARAMS, dtype)))
        assert avals(jax.eval_shape(stepper(tx), *carry, each(GOOD))) == avals(carry)


@promotes
@pytest.mark.filterwarnings("ignore:float16 parameters without a master copy")
def test_compositions_outside_skip_and_step_as_the_plain_optimizer():
    injected = optax.inject_hyperparams(lambda rate: jamp.loss_scaled(optax.sgd(rate, 0.9)))(0.1)
    named = optax.named_chain(("first", optax.identity()), ("scaled", SCALED))
    run = runner({"named": named, "injected": injected, "plain": SGD})
    expected, histories = run(GOOD, GOOD)["plain"][-1][0], run(INF, GOOD, NAN, GOOD)
    for history in (histories["named"], histories["injected"]):
        assert skipped(history) == "1010"
        assert bits([params for params, _ in history[::2]]) == bits([PARAMS, history[1][0]])
        assert_close(history[-1][0], expected)
    # Old versions of inject_hyperparams give the hyperparameters the dtype of the params at first, then the gradients'.
    params = jamp.cast_floating(PARAMS, jnp.float16)
    _, state = stepper(injected)(params, injected.init(params), jamp.cast_floating(GOOD, jnp.float16))
    assert state.hyperparams["rate"].dtype == jnp.float16
    # As a hyperparameter of its own, 2**20 would be cast to the dtype of the params, where it is inf.
    around = optax.inject_hyperparams(jamp.loss_scaled)(SGD, jamp.DynamicLossScale(2.0**20))
    _, state = stepper(around)(params, around.init(params), INF)
    assert float(jamp.get_loss_scale(state)) == 2.0**19


def test_a_flag_of_python_reaches_inner_as_it_is_outside_jit():
    def update(updates, state, params=None, *, is_last=False, **extra_args):
        return jax.tree.map(lambda x: 2 * x if is_last else x, updates), state

    tx = jamp.skip_nonfinite(optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update))
    state = tx.init(PARAMS)
    once, twice = (tx.update(GOOD, state, PARAMS, is_last=flag)[0] for flag in (False, True))
    assert_equal(twice, jax.tree.map(lambda x: 2 * x, once))


def test_extra_args_reach_inner_params_are_optional_and_grads_finite_may_be_given():
    update = lambda updates, state, params=None, *, given, **others: (updates, state + given * (len(others) == 1))
    tx = jamp.loss_scaled(optax.GradientTransformationExtraArgs(lambda params: jnp.float32(0), update))
    state, extra_args = tx.init(PARAMS), {"given": 2.0, "unheard_of": "of any type"}
    for grads in (GOOD, INF):
        _, state = tx.update(grads, state, PARAMS, **extra_args)
        assert state.inner_state == 2.0
    found = [SCALED.update(GOOD, SCALED.init(PARAMS), **kwargs) for kwargs in ({}, {"params": PARAMS}, extra_args)]
    assert_equal(found, [SCALED.update(GOOD, SCALED.init(PARAMS), PARAMS)] * 3)
    tx = jamp.loss_scaled(optax.trace(0.9))
    state = tx.init(PARAMS)
    updates, after = jax.jit(tx.update)(INF, state, grads_finite=jnp.array(True))
    assert_equal((updates, after.grads_finite), (INF, jnp.array(True)))
    for given in (jnp.array(False), True, np.bool_(False), 1):  # outside jit a bool[] too
        updates, after = tx.update(GOOD, state, grads_finite=given)
        assert_equal(after.grads_finite, jnp.array(bool(given)))
        assert_equal(updates, GOOD if given else jax.tree.map(lambda x: jnp.full_like(x, -0.0), GOOD))
    with pytest.raises(ValueError, match=r"\(1,\).*jnp\.all"):
        tx.update(GOOD, state, grads_finite=jnp.ones(1, bool))


@promotes
def test_a_step_that_the_optimizer_inside_skips_leaves_the_loss_scale_and_itself_as_they_were():
    """With `grads_finite=False` the loss scale backs off."""
    skips = lambda updates, step, params: optax.skip_large_updates(updates, step, params, max_squared_norm=100.0)
    adam, loss_scale = optax.adamw(1e-3), jamp.DynamicLossScale(growth_interval=6)
    tx = jamp.loss_scaled(optax.MultiSteps(adam, 1, should_skip_update_fn=skips), loss_scale)
    update = jax.jit(tx.update)
    updates, state = update(GOOD, tx.init(PARAMS), PARAMS)
    assert_close(updates, adam.update(GOOD, adam.init(PARAMS), PARAMS)[0])
    inner = lambda state: state.inner_state.inner_opt_state
    large, before = jax.tree.map(lambda g: 1e3 * g, GOOD), inner(state)
    for _ in range(5):
        updates, state = update(large, state, PARAMS)
        assert_equal((updates, inner(state)), (jax.tree.map(jnp.zeros_like, GOOD), before))
        assert optax.tree.get(state, "should_skip")
    assert (float(jamp.get_loss_scale(state)), int(jamp.get_stats(state).overflow_steps)) == (
        2.0**17,
        0,
    )  # it has grown
    _, state = update(INF, state, PARAMS)
    assert (float(jamp.get_loss_scale(state)), int(jamp.get_stats(state).overflow_steps)) == (2.0**16, 1)
    for _ in range(5):
        _, state = update(GOOD, state, PARAMS, grads_finite=False)
    assert float(jamp.get_loss_scale(state)) == 2.0**11


@promotes
def test_outside_jit_a_step_is_traced_once_for_arguments_of_the_same_types():
    traces = []
    spy = optax.stateless(lambda updates, params: traces.append(1) or updates)
    inner = optax.chain(spy, optax.adam(0.1), optax.scale_by_schedule(SCHEDULE))
    tx = jamp.loss_scaled(inner)
    state, compiled, params = tx.init(PARAMS), jax.jit(tx.update), PARAMS
    for n, grads in enumerate((GOOD, INF, GOOD, NAN)):
        traces.clear()
        wanted = compiled(grads, state, params)
        updates, state = tx.update(grads, state, params)
        assert_equal((updates, state), wanted)
        params = optax.apply_updates(params, updates)
        assert len(traces) == (2 if n == 0 else 0)  # for the step of jit, and this one
    traces.clear()
    for value in (1.0, 2.0, np.float32(3)):  # an argument, and no constant
        tx.update(GOOD, state, params, value=value)
    tx.update(jamp.cast_floating(GOOD, jnp.float16), state, params)
    assert len(traces) == 3  # of a Python number, of one of NumPy, of float16
    # A function cannot be an argument of a compiled step. Each call is another function.
    search = jamp.loss_scaled(optax.chain(spy, optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)))
    loss, state = lambda p: sum(jnp.sum(x**2) for x in jax.tree.leaves(p)), search.init(PARAMS)
    for times in (2.0, 3.0):
        fun = lambda p, times=times: times * loss(p)
        value, grads = jax.value_and_grad(fun)(PARAMS)
        updates, state = search.update(grads, state, PARAMS, value=value, grad=grads, value_fn=fun)
        assert fun(optax.apply_updates(PARAMS, updates)) < value
    # Without scaling, checks and skips, it is the optimizer.
    traces.clear()
    plain = jamp.loss_scaled(inner, jamp.NoOpLossScale())
    plain.update(GOOD, plain.init(PARAMS), PARAMS)
    assert len(traces) == 1


@promotes
def test_half_precision_reaches_the_inner_optimizer_as_float32():
    seen, see = [], lambda *trees: seen.extend(trees) or {"mu": trees[0]}
    spy = optax.GradientTransformation(see, lambda grads, state, params=None: (grads, see(grads, state, params)))
    tx, params = jamp.loss_scaled(spy), {"f16": jnp.ones(2, jnp.float16), "bf16": jnp.ones(2, jnp.bfloat16)}
    updates, state = tx.update(params, tx.init(params), params)
    assert {x.dtype.name for x in jax.tree.leaves((seen, updates, state.inner_state))} == {"float32"}
    # 16-bit gradients of float32 params, with which `optax.apply_if_finite` alone fails. These are exact.
    tx = jamp.loss_scaled(optax.apply_if_finite(optax.adam(0.1), 3))
    step, start = stepper(tx), (PARAMS, tx.init(PARAMS))
    for dtype in (jnp.float16, jnp.bfloat16):
        assert_equal(step(*start, jamp.cast_floating(GOOD, dtype)), step(*start, GOOD))


def test_no_leaf_of_the_carry_changes_its_type_under_any_loss_scale_or_jax_mode(x64):
    for config in (jamp.StaticLossScale(), jamp.NoOpLossScale(), jamp.AdaptiveLossScale()):
        tx = jamp.loss_scaled(optax.chain(SGD, optax.scale_by_schedule(SCHEDULE)), config)
        for params in (PARAMS, jamp.cast_floating(PARAMS, jnp.float64)):
            carry = params, tx.init(params)
            with jax.numpy_rank_promotion("raise"):
                assert avals(jax.eval_shape(stepper(tx), *carry, params)) == avals(carry)
            assert not any(x.weak_type for x in jax.tree.leaves(carry))
    with jax.checking_leaks():
        expected, state = jax.jit(SCALED.update)(GOOD, SCALED.init(PARAMS))
    with jax.disable_jit():
        assert_close(SCALED.update(GOOD, SCALED.init(PARAMS))[0], expected)
        assert not any(np.any(x) for x in jax.tree.leaves(SCALED.update(INF, state)[0]))


def test_noop_compiles_to_exactly_the_plain_step():
    """Letter for letter, but for what tells of the source."""
    inner = optax.chain(optax.clip_by_global_norm(1.0), jamp.optimizers.adamw(0.1))
    noop, static = (jamp.loss_scaled(inner, x) for x in (jamp.NoOpLossScale(), jamp.StaticLossScale(1.0)))
    told = r", (metadata|frontend_attributes)=\{[^}]*\}|\n(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*"

    def carrying(grads, state, params):  # along the leaves of jamp's state that nothing touches
        updates, inner_state = inner.update(grads, state.inner_state, params)
        return updates, state._replace(inner_state=inner_state)

    def hlo(step, tx):
        text = step.lower(PARAMS, tx.init(PARAMS), GOOD).compile().as_text()
        return re.sub(r"[\w.-]+(?= = )|%[\w.-]+", "", re.sub(told, "", text))

    plain = hlo(stepper(optax.GradientTransformation(noop.init, carrying)), noop)
    assert hlo(stepper(noop), noop) == plain != hlo(stepper(static), static)  # The comparison can fail.
    off = jamp.GradScaler(enabled=False), jamp.GradScaler().disable(), jamp.GradScaler(jamp.NoOpLossScale())
    for scaler, given in zip(off, ("grads", "scaled_grads", "grads"), strict=True):

        def step(params, state, grads, scaler=scaler, given=given):
            return scaler.step(inner, state, params, **{given: grads})[:2]

        assert hlo(jax.jit(step), inner) == hlo(stepper(inner), inner)


def test_what_it_is_what_it_refuses_and_which_leaves_are_like_params():
    state = SCALED.init(PARAMS)
    kinds = optax.GradientTransformationExtraArgs, jamp.LossScaledState, jamp.LossScaleStats
    assert (type(SCALED), type(state), type(state.stats)) == kinds
    assert not [x for x in jax.tree.leaves(SCALED) if isinstance(x, jax.Array)]
    assert state._fields == ("loss_scale_state", "stats", "grads_finite", "inner_state")
    assert avals(jax.eval_shape(SCALED.init, PARAMS)) == avals(state)
    for inner in (None, 0.1, optax.adam, "adam", optax.GradientTransformation(None, None), SCHEDULE):
        with pytest.raises(TypeError, match=r"optax\.adamw"):
            jamp.loss_scaled(inner)
    for loss_scale, cure in (
        (1024.0, "jamp.StaticLossScale(1024.0)"),
        (2**16, "jamp.StaticLossScale(65536.0)"),
        (None, "jamp.DynamicLossScale()"),
        ("dynamic", "jamp.DynamicLossScale()"),
        (jamp.DynamicLossScale, "jamp.DynamicLossScale()"),
        (jamp.NoOpLossScale, "jamp.NoOpLossScale()"),
    ):
        with pytest.raises(TypeError, match=re.escape(cure)):
            jamp.loss_scaled(SGD, loss_scale)
    tx = jamp.loss_scaled(optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(SCHEDULE), optax.trace(0.9)))
    state = tx.init(PARAMS)
    mapped = optax.tree.map_params(tx, lambda x: x * 0 + 7, state)
    assert {float(v) for x in jax.tree.leaves(mapped.inner_state) if x.ndim for v in x} == {7.0}
    assert_equal(mapped[:3], state[:3])
    specs = optax.tree.map_params(tx, lambda _: "params", state, transform_non_params=lambda _: "other")
    assert Counter(jax.tree.leaves(specs)) == {"params": 6, "other": 3 + 7 + 1 + 2}


# A skip is exact: it changes neither the parameters nor the state of any transformation.
EXACT = {
    # What hands inf and NaN on may stand before.
    "clip_by_global_norm before": optax.chain(optax.clip_by_global_norm(1.0), SCALED),
    "scale before": optax.chain(optax.scale(2.0), SCALED),
    "centralize before": optax.chain(optax.centralize(), SCALED),
    "add_decayed_weights before": optax.chain(optax.add_decayed_weights(0.1), SCALED),
    "clip_by_block_rms before": optax.chain(optax.clip_by_block_rms(1.0), SCALED),
    # What has no state and reads no parameters may stand after.
    "scale and clip after": optax.chain(SCALED, optax.scale(0.5), optax.clip(1.0)),
}
# After a good batch, one with an inf in b, one with a NaN in w and a good one: which were skipped, and whether w moved.
OTHERS = {
    # An overflow is hidden from the check.
    "clip before": (optax.chain(optax.clip(1.0), SCALED), "0010", "1101"),
    "scale_by_sign before": (optax.chain(optax.scale_by_sign(), SCALED), "0010", "1101"),
    "zero_nans before": (optax.chain(optax.zero_nans(), SCALED), "0100", "1011"),
    # What has state keeps the inf.
    **{f"{name} before": (optax.chain(tx, SCALED), "0111", "1000") for name, tx in STATEFUL.items()},
    # A skip is undone, or counted. A link in front cannot stop those behind it.
    "adamw after": (optax.chain(jamp.loss_scaled(optax.identity()), optax.adamw(0.1)), "0110", "1111"),
    "add_decayed_weights after": (optax.chain(SCALED, optax.add_decayed_weights(-0.1)), "0110", "1111"),
    "trace after": (optax.chain(SCALED, optax.trace(0.9)), "0110", "1111"),
    "scale_by_schedule after": (optax.chain(SCALED, optax.scale_by_schedule(lambda count: 0.1)), "0110", "1001"),
}


def kept(carry):
    """The parameters and the state without what `loss_scaled` itself counts."""
    is_scaled = lambda x: isinstance(x, jamp.LossScaledState)
    return bits(jax.tree.map(lambda x: x.inner_state if is_scaled(x) else x, carry, is_leaf=is_scaled))


@promotes
def test_a_skip_is_exact_in_some_chains_and_in_others_partial_undone_or_missing():
    run = runner(EXACT | {name: tx for name, (tx, *_) in OTHERS.items()})
    histories, undisturbed = run(GOOD, INF, NAN, GOOD), run(GOOD, GOOD)
    for name in EXACT:
        first, inf, nan, last = map(kept, histories[name])
        assert (skipped(histories[name]), inf, nan) == ("0110", first, first), name
        assert first != last == kept(undisturbed[name][1]), name
    for name, (_, skips, moves) in OTHERS.items():
        history = histories[name]
        w = [bits(x) for x in (PARAMS["w"], *(params["w"] for params, _ in history))]
        assert (skipped(history), "".join("01"[w[i] != w[i + 1]] for i in range(4))) == (skips, moves), name
        assert not kept(history[0]) == kept(history[1]) == kept(history[2]), name
    clip, sgd = optax.clip_by_global_norm(1.0), optax.sgd(0.1)
    run = runner({"before": optax.chain(clip, jamp.loss_scaled(sgd)), "in": jamp.loss_scaled(optax.chain(clip, sgd))})
    for history in run(jax.tree.map(lambda g: g * 1e20, GOOD)).values():
        assert skipped(history) == "0"  # They are finite, the square of their norm is not.
        jax.tree.map(np.testing.assert_array_equal, history[0][0], PARAMS)


@promotes
def test_the_verdict_of_the_manual_path_is_not_hidden_by_what_stands_before():
    """`unscale_and_check` sees the gradients before a transformation clips or zeroes an overflow."""
    hiding = {"clip": optax.clip(1.0), "zero_nans": optax.zero_nans(), "clip_norm": optax.clip_by_global_norm(1.0)}
    run = runner({name: optax.chain(tx, SCALED) for name, tx in (hiding | STATEFUL).items()})
    first = SCALED.init(PARAMS)
    for bad in (INF, NAN):
        grads, finite = jamp.unscale_and_check(jax.tree.map(lambda g: g * 2.0**16, bad), first)
        for [(params, state)] in run(grads, grads_finite=finite).values():
            assert (bool(jamp.get_grads_finite(state)), float(jamp.get_loss_scale(state))) == (False, 2.0**15)
            assert_equal((params, state[1].inner_state), (PARAMS, first.inner_state))


@promotes
def test_around_multisteps_an_inf_micro_batch_is_left_out_of_the_accumulation():
    run, other = runner({"": jamp.loss_scaled(optax.MultiSteps(SGD, 2))}), jax.tree.map(lambda g: 2 * g, GOOD)
    history = run(GOOD, INF, other, NAN, GOOD, other)[""]
    assert [kept(history[i]) for i in (0, 2, 4, 5)] == [kept(x) for x in run(GOOD, other, GOOD, other)[""]]
    assert (skipped(history), int(history[-1][1].inner_state.gradient_step)) == ("010100", 2)
    # Inside it poisons the accumulator.
    history = runner({"": optax.MultiSteps(SCALED, 2)})(INF, *[GOOD] * 5)[""]
    applied = "".join("01"[not state.inner_opt_state.grads_finite] for _, state in history)
    assert (applied[1::2], bool(jamp.all_finite(history[-1][1].acc_grads))) == ("111", False)
    assert_equal(history[-1][0], PARAMS)


@promotes
def test_with_unscale_the_updates_are_those_of_the_manual_path_bit_for_bit():
    inner = {
        "alone": SGD,
        "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
        "accumulate": optax.MultiSteps(SGD, 2).gradient_transformation(),
    }
    scales = jamp.DynamicLossScale(2.0**127, growth_interval=1, max_scale=2.0**127), jamp.NoOpLossScale()
    dynamic = [(jamp.loss_scaled, tx, scales[0]) for tx in inner.values()]
    for wrap, tx, scale in (*dynamic, (with_masters, SGD, scales[0]), (jamp.loss_scaled, SGD, scales[1])):
        manual, auto = wrap(tx, scale), optax.chain(wrap(tx, scale, unscale=True), optax.scale(0.5))
        (params, state), (p, s) = (PARAMS, manual.init(PARAMS)), (PARAMS, auto.init(PARAMS))
        for grads in (GOOD, INF, GOOD, NAN, GOOD):
            scaled = optax.tree.scale(jamp.get_loss_scale(state) * 2.0**-20, grads)
            true, finite = jamp.unscale_and_check(scaled, state)
            updates, state = manual.update(true, state, params, grads_finite=finite)
            params = optax.apply_updates(params, jax.tree.map(lambda u: 0.5 * u, updates))
            again, given = (auto.update(scaled, s, p, **extra) for extra in ({}, {"grads_finite": finite}))
            assert_equal(again, given)
            p, s = optax.apply_updates(p, again[0]), again[1]
            assert bits((p, tuple(s[0]))) == bits((params, tuple(state)))


@promotes
def test_a_skip_does_not_advance_a_schedule_inside_and_does_advance_one_outside():
    injected, scaled = optax.inject_hyperparams, jamp.loss_scaled
    outside = injected(lambda rate: scaled(optax.sgd(rate)))(SCHEDULE)
    found = runner({"inside": scaled(injected(optax.sgd)(SCHEDULE)), "outside": outside})(GOOD, INF, INF)
    assert [skipped(history) for history in found.values()] == ["011", "011"]
    assert [int(s.count) for s in (found["inside"][-1][1].inner_state, found["outside"][-1][1])] == [1, 3]
