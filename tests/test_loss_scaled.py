"""loss_scaled: what may stand inside, before and after it, what it keeps and refuses, and what NoOp compiles to."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from steps import GOOD, INF, NAN, PARAMS, check_skips, runner, skipped, stepper, together
from trees import assert_close, assert_equal, avals, bits

import jamp

promotes = pytest.mark.promotes("optax: ema, adam, MultiSteps, inject_hyperparams, apply_updates")
SGD = optax.sgd(0.1, momentum=0.9)
SCALED = jamp.loss_scaled(SGD)
SCHEDULE = optax.linear_schedule(0.1, 0.01, 5)
INSIDE = {
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE)),
    "named_chain": optax.named_chain(("clip", optax.clip(1.0)), ("adam", optax.adam(SCHEDULE))),
    "partition": optax.partition({"x": optax.adam(0.1), "y": SGD}, {"w": "x", "b": "y"}),
    "masked": optax.masked(optax.adam(0.1), {"w": True, "b": False}),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(SCHEDULE),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "MultiSteps, the object": optax.MultiSteps(optax.adam(0.1), 2),
    "flatten": optax.flatten(optax.adam(0.1)),
    "conditionally_mask": optax.conditionally_mask(optax.trace(0.9), lambda step: step % 2 == 0),
    "conditionally_transform": optax.conditionally_transform(optax.trace(0.9), lambda step: step % 2 == 0),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "mechanize": optax.contrib.mechanize(SGD),
    "add_decayed_weights": optax.chain(SGD, optax.add_decayed_weights(-0.1)),
    "scale_by_schedule": optax.chain(SGD, optax.scale_by_schedule(lambda count: 0.1)),
    "clip": optax.clip(1.0),
    "scale_by_sign": optax.scale_by_sign(),
    "zero_nans": optax.zero_nans(),
}
STATEFUL = {"ema": optax.ema(0.9), "trace": optax.trace(0.9), "scale_by_rms": optax.scale_by_rms()}


def cast(tree, dtype):
    return jamp.cast_floating(tree, dtype)


@promotes
def test_compositions_inside_are_skipped_and_stepped_whole_in_any_precision():
    inside, each = together(INSIDE | STATEFUL), lambda x: dict.fromkeys(INSIDE | STATEFUL, x)
    check_skips(inside, each(GOOD), [each(INF), each(NAN), each(GOOD) | {"mechanize": NAN}], each(PARAMS), rtol=1e-5)
    tx = jamp.loss_scaled(inside)
    for dtype in (jnp.float16, jnp.bfloat16):
        carry = each(cast(PARAMS, dtype)), tx.init(each(cast(PARAMS, dtype)))
        assert avals(jax.eval_shape(stepper(tx), *carry, each(GOOD))) == avals(carry)


@promotes
def test_compositions_outside_skip_and_step_as_the_plain_optimizer():
    injected = optax.inject_hyperparams(lambda rate: jamp.loss_scaled(optax.sgd(rate, 0.9)))(0.1)
    named = optax.named_chain(("first", optax.identity()), ("scaled", SCALED))
    run = runner({"named": named, "injected": injected, "plain": SGD})
    expected = run(GOOD, GOOD)["plain"][-1][0]
    histories = run(INF, GOOD, NAN, GOOD)
    for history in (histories["named"], histories["injected"]):
        assert skipped(history) == "1010"
        assert bits([params for params, _ in history[::2]]) == bits([PARAMS, history[1][0]])
        assert_close(history[-1][0], expected)
    # Old versions of inject_hyperparams give the hyperparameters the dtype of the params at first, then the gradients'.
    params = cast(PARAMS, jnp.float16)
    _, state = stepper(injected)(params, injected.init(params), cast(GOOD, jnp.float16))
    assert state.hyperparams["rate"].dtype == jnp.float16
    # As a hyperparameter of its own, 2**20 would be cast to the dtype of the params, where it is inf.
    around = optax.inject_hyperparams(jamp.loss_scaled)(SGD, jamp.DynamicLossScale(2.0**20))
    _, state = stepper(around)(params, around.init(params), INF)
    assert float(jamp.get_loss_scale(state)) == 2.0**19


def test_extra_args_reach_an_inner_optimizer_that_takes_them_and_params_are_optional():
    def update(updates, state, params=None, *, temperature, **extra_args):
        assert set(extra_args) == {"unheard_of"}
        return updates, state + temperature

    taking = optax.GradientTransformationExtraArgs(lambda params: jnp.float32(0), update)
    tx, extra_args = jamp.loss_scaled(taking), {"temperature": 2.0, "unheard_of": "of any type"}
    _, state = tx.update(GOOD, tx.init(PARAMS), PARAMS, **extra_args)
    assert state.inner_state == 2.0
    assert tx.update(INF, state, PARAMS, **extra_args)[1].inner_state == 2.0
    first = SCALED.init(PARAMS)
    expected = SCALED.update(GOOD, first, PARAMS)
    assert_equal(SCALED.update(GOOD, first, PARAMS, **extra_args), expected)
    assert_equal(SCALED.update(GOOD, first, params=PARAMS), expected)
    assert_equal(SCALED.update(GOOD, first), expected)


def test_given_grads_finite_takes_the_place_of_the_check():
    tx = jamp.loss_scaled(optax.trace(0.9))
    state = tx.init(PARAMS)
    updates, after = jax.jit(tx.update)(INF, state, grads_finite=jnp.array(True))
    assert_equal((updates, after.grads_finite), (INF, jnp.array(True)))
    for given in (jnp.array(False), True, False, np.bool_(False), 1):  # outside jit a bool[] too
        updates, after = tx.update(GOOD, state, grads_finite=given)
        assert_equal(after.grads_finite, jnp.array(bool(given)))
        assert_equal(updates, GOOD if given else jax.tree.map(lambda x: jnp.full_like(x, -0.0), GOOD))
    with pytest.raises(ValueError, match=r"grads_finite must be one bool, got an array of shape \(1,\).*jnp\.all"):
        tx.update(GOOD, state, grads_finite=jnp.ones(1, bool))


def test_tree_map_params_maps_the_leaves_that_are_like_params_only():
    tx = jamp.loss_scaled(optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(SCHEDULE), optax.trace(0.9)))
    state = tx.init(PARAMS)
    mapped = optax.tree.map_params(tx, lambda x: x * 0 + 7, state)
    assert {float(v) for x in jax.tree.leaves(mapped.inner_state) if x.ndim for v in x} == {7.0}
    assert_equal(mapped.scaler_state, state.scaler_state)
    specs = optax.tree.map_params(tx, lambda _: "params", state, transform_non_params=lambda _: "other")
    assert Counter(jax.tree.leaves(specs)) == {"params": 6, "other": 3 + 7 + 1 + 2}


@promotes
def test_half_precision_reaches_the_inner_optimizer_as_float32():
    seen = []

    def see(*trees):
        seen.append({x.dtype.name for x in jax.tree.leaves(trees)})
        return {"mu": trees[0]}

    spy = optax.GradientTransformation(see, lambda grads, state, params=None: (grads, see(grads, state, params)))
    tx, params = jamp.loss_scaled(spy), {"f16": jnp.ones(2, jnp.float16), "bf16": jnp.ones(2, jnp.bfloat16)}
    updates, state = tx.update(params, tx.init(params), params)
    assert [*seen, {x.dtype.name for x in jax.tree.leaves((updates, state.inner_state))}] == [{"float32"}] * 3
    # 16-bit gradients of float32 params, with which `optax.apply_if_finite` alone fails. These are exact.
    tx = jamp.loss_scaled(together({"f16": optax.adam(0.1), "bf16": optax.apply_if_finite(optax.adam(0.1), 3)}))
    params, good = {"f16": PARAMS, "bf16": PARAMS}, {"f16": GOOD, "bf16": GOOD}
    half = {"f16": cast(GOOD, jnp.float16), "bf16": cast(GOOD, jnp.bfloat16)}
    step, start = stepper(tx), (params, tx.init(params))
    assert_equal(step(*start, half), step(*start, good))


def test_no_leaf_of_the_carry_changes_its_type_under_any_loss_scale_or_jax_mode(x64):
    for config in (jamp.StaticLossScale(), jamp.NoOpLossScale(), jamp.AdaptiveLossScale()):
        tx = jamp.loss_scaled(optax.chain(SGD, optax.scale_by_schedule(SCHEDULE)), config)
        for params in (PARAMS, cast(PARAMS, jnp.float64)):
            carry = params, tx.init(params)
            assert not any(x.weak_type for x in jax.tree.leaves(carry))
            with jax.numpy_rank_promotion("raise"):
                assert avals(jax.eval_shape(stepper(tx), *carry, params)) == avals(carry)
            assert {x.dtype for x in jax.tree.leaves(carry[1].stats)} == {jnp.dtype("int32"), jnp.dtype("float32")}


def test_runs_without_jit_and_leaks_no_tracer():
    with jax.checking_leaks():
        updates, _ = jax.jit(SCALED.update)(GOOD, SCALED.init(PARAMS), PARAMS)
    with jax.disable_jit():
        without, state = SCALED.update(GOOD, SCALED.init(PARAMS), PARAMS)
        nothing, _ = SCALED.update(INF, state, PARAMS)
    assert_close(without, updates)
    assert not any(np.any(x) for x in jax.tree.leaves(nothing))


def test_noop_compiles_to_exactly_the_plain_step():
    """Letter for letter, but for what tells of the source. The contract suite has the gradients in the step too."""
    inner = optax.chain(optax.clip_by_global_norm(1.0), jamp.optimizers.adamw(0.1))
    noop, static = (jamp.loss_scaled(inner, x) for x in (jamp.NoOpLossScale(), jamp.StaticLossScale(1.0)))

    def carrying(grads, state, params):
        """The plain update, with the leaves of jamp's state that nothing touches carried along."""
        updates, inner_state = inner.update(grads, state.inner_state, params)
        return updates, state._replace(inner_state=inner_state)

    def hlo(step, tx):
        text = step.lower(PARAMS, tx.init(PARAMS), GOOD).compile().as_text()
        text = re.sub(r", (metadata|frontend_attributes)=\{[^}]*\}", "", text)
        return re.sub(
            r"\n(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*|[\w.-]+(?= = )|%[\w.-]+", "", text
        )

    plain = hlo(stepper(optax.GradientTransformation(noop.init, carrying)), noop)
    assert hlo(stepper(noop), noop) == plain != hlo(stepper(static), static)  # The comparison can fail.
    off = jamp.GradScaler(enabled=False), jamp.GradScaler().disable(), jamp.GradScaler(jamp.NoOpLossScale())
    for scaler, given in zip(off, ("grads", "scaled_grads", "grads"), strict=True):

        def step(params, state, grads, scaler=scaler, given=given):
            return scaler.step(inner, state, params, **{given: grads})[:2]

        assert hlo(jax.jit(step), inner) == hlo(stepper(inner), inner)


def test_what_it_is_and_what_it_refuses():
    assert isinstance(SCALED, optax.GradientTransformationExtraArgs)
    assert not [x for x in jax.tree.leaves(SCALED) if isinstance(x, jax.Array)]
    state = SCALED.init(PARAMS)
    assert (type(state), type(state.stats)) == (jamp.LossScaledState, jamp.LossScaleStats)
    assert state._fields == ("loss_scale_state", "stats", "grads_finite", "inner_state")
    assert avals(jax.eval_shape(SCALED.init, PARAMS)) == avals(state)
    for inner in (None, 0.1, optax.adam, "adam", optax.GradientTransformation(None, None), SCHEDULE):
        with pytest.raises(TypeError, match=r"inner must be an optax gradient transformation, got .*optax\.adamw"):
            jamp.loss_scaled(inner)
    for loss_scale in (1024.0, 2**16, None, "dynamic", jamp.DynamicLossScale, jamp.NoOpLossScale):
        with pytest.raises(TypeError, match=r"loss_scale must be a loss scale, got .*jamp\.DynamicLossScale\(\)"):
            jamp.loss_scaled(SGD, loss_scale)


# What may stand before and after it: each case of the documentation.

LABELS = {"w": "left", "b": "right"}
W_ONLY = {"w": True, "b": False}

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
    "masked outside": (optax.masked(SCALED, W_ONLY), "0010", "1101"),
    "partition outside": (optax.partition({"left": SCALED, "right": optax.sgd(0.1)}, LABELS), "0010", "1101"),
    # What has state keeps the inf.
    **{f"{name} before": (optax.chain(tx, SCALED), "0111", "1000") for name, tx in STATEFUL.items()},
    # A skip is undone, or counted.
    "add_decayed_weights after": (optax.chain(SCALED, optax.add_decayed_weights(-0.1)), "0110", "1111"),
    "trace after": (optax.chain(SCALED, optax.trace(0.9)), "0110", "1111"),
    "scale_by_schedule after": (optax.chain(SCALED, optax.scale_by_schedule(lambda count: 0.1)), "0110", "1001"),
}


def kept(carry):
    """The parameters and the state without what `loss_scaled` itself counts."""
    is_scaled = lambda x: isinstance(x, jamp.LossScaledState)
    return bits(jax.tree.map(lambda x: x.inner_state if is_scaled(x) else x, carry, is_leaf=is_scaled))


@functools.cache
def histories():
    run = runner(EXACT | {name: tx for name, (tx, *_) in OTHERS.items()})
    return run(GOOD, INF, NAN, GOOD), run(GOOD, GOOD)


@promotes
def test_a_skip_changes_nothing_in_these_chains():
    for name in EXACT:
        history, undisturbed = (found[name] for found in histories())
        assert skipped(history) == "0110", name
        first, inf, nan, last = map(kept, history)
        assert inf == first == nan, name
        assert last == kept(undisturbed[1]) != first, name


@promotes
def test_a_skip_does_not_come_or_changes_something_in_these_chains():
    for name, (_, skips, moves) in OTHERS.items():
        history = histories()[0][name]
        w = [bits(x) for x in (PARAMS["w"], *(params["w"] for params, _ in history))]
        assert (skipped(history), "".join("01"[w[i] != w[i + 1]] for i in range(4))) == (skips, moves), name
        assert not kept(history[0]) == kept(history[1]) == kept(history[2]), name
    assert not jamp.all_finite(histories()[0]["partition outside"][1][0])  # An inf in another part is applied.


def test_one_scaler_for_each_part_skips_half_of_a_step():
    run = runner({"": optax.partition({"left": SCALED, "right": SCALED}, LABELS)})
    (params, _) = run(INF)[""][0]
    assert [bits(params[k]) == bits(PARAMS[k]) for k in ("w", "b")] == [False, True]


def test_clip_by_global_norm_turns_finite_gradients_of_1e20_into_zeros():
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
    for bad in (INF, NAN):
        scaled = jax.tree.map(lambda g: g * 2.0**16, bad)
        grads, finite = jamp.unscale_and_check(scaled, SCALED.init(PARAMS))
        for params, state in (history[0] for history in run(grads, grads_finite=finite).values()):
            assert not jamp.get_grads_finite(state)
            assert_equal((params, state[1].inner_state), (PARAMS, SCALED.init(PARAMS).inner_state))
            assert float(jamp.get_loss_scale(state)) == 2.0**15


@promotes
def test_around_multisteps_an_inf_micro_batch_is_left_out_of_the_accumulation():
    run = runner({"": jamp.loss_scaled(optax.MultiSteps(SGD, 2))})
    other = jax.tree.map(lambda g: 2 * g, GOOD)
    history = run(GOOD, INF, other, NAN, GOOD, other)[""]
    assert skipped(history) == "010100"
    undisturbed = run(GOOD, other, GOOD, other)[""]
    assert [kept(history[i]) for i in (0, 2, 4, 5)] == [kept(carry) for carry in undisturbed]
    assert int(history[-1][1].inner_state.gradient_step) == 2


@promotes
def test_inside_multisteps_one_inf_micro_batch_poisons_the_accumulator():
    history = runner({"": optax.MultiSteps(SCALED, 2)})(INF, *[GOOD] * 5)[""]
    assert skipped(history)[1::2] == "111"
    assert_equal(history[-1][0], PARAMS)
    assert not jamp.all_finite(history[-1][1].acc_grads)


@promotes
def test_a_skip_does_not_advance_a_schedule_inside_and_does_advance_one_outside():
    injected, schedule = optax.inject_hyperparams, optax.linear_schedule(1.0, 0.0, 10)
    inside = jamp.loss_scaled(injected(optax.sgd)(schedule))
    outside = injected(lambda rate: jamp.loss_scaled(optax.sgd(rate)))(schedule)
    found = runner({"inside": inside, "outside": outside})(GOOD, INF, INF)
    assert [skipped(history) for history in found.values()] == ["011", "011"]
    assert [int(s.count) for s in (found["inside"][-1][1].inner_state, found["outside"][-1][1])] == [1, 3]
