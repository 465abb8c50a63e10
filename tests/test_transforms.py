"""The contract of `loss_scaled`: what it composes with, what it keeps, what it refuses, and what NoOp compiles to."""

import functools
import re
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax import lax

import jamp


def make_params(dtype: Any = jnp.float32) -> Any:
    return {"w": jnp.array([0.5, -0.0, 4.0], dtype), "b": jnp.array([-0.0, 1.0], dtype)}


GOOD = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.array([0.25, 3.0])}
BAD = GOOD | {"b": jnp.array([0.25, jnp.nan])}
LABELS = {"w": "x", "b": "y"}
SCHEDULE = optax.linear_schedule(0.1, 0.01, 5)


def bits(tree: Any) -> Any:
    return jax.tree.map(lambda x: (str(x.dtype), x.shape, np.asarray(x).tobytes()), tree)


def avals(tree: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)


def make_step(tx: Any, **extra_args: Any) -> Any:
    """A jitted and donated train step on given gradients."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1))


def check_against(
    plain: Any,
    tx: Any,
    inner_state: Any,
    dtype: Any = jnp.float32,
    grads_dtype: Any = jnp.float32,
    **extra_args: Any,
) -> Any:
    """`tx` skips bad batches to the bit, steps as `plain` does otherwise, and compiles once under donation."""
    step, plain_step = make_step(tx, **extra_args), make_step(plain, **extra_args)
    for _ in range(2):  # twice: init works again after its arrays were donated
        params, state = make_params(dtype), tx.init(make_params(dtype))
        expected, plain_state = make_params(), plain.init(make_params())
        for grads in (BAD, GOOD, GOOD, BAD, GOOD):
            before = bits((params, inner_state(state)))
            params, state = step(params, state, jax.tree.map(lambda g: g.astype(grads_dtype), grads))
            if grads is BAD:
                assert bits((params, inner_state(state))) == before
            else:
                expected, plain_state = plain_step(expected, plain_state, grads)
        assert avals(params) == avals(make_params(dtype))
        tolerance = 1e-5 if dtype == jnp.float32 else 3e-2
        got, wanted = (jax.tree.leaves(tree) for tree in ((params, inner_state(state)), (expected, plain_state)))
        for x, y in zip(got, wanted, strict=True):
            np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=tolerance, atol=tolerance)
    assert step._cache_size() == 1
    assert int(jamp.get_stats(state).overflow_steps) == 2
    assert int(jamp.get_stats(state).finite_steps) == 3
    assert float(jamp.get_loss_scale(state)) == 2.0**14
    return state


INSIDE = {
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE)),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(1.0)), ("adam", optax.adam(SCHEDULE))),
    "partition": lambda: optax.partition({"x": optax.adam(0.1), "y": optax.sgd(0.1, momentum=0.9)}, LABELS),
    "masked": lambda: optax.masked(optax.adam(0.1), {"w": True, "b": False}),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(SCHEDULE),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "MultiSteps, the object": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "flatten": lambda: optax.flatten(optax.adam(0.1)),
    "conditionally_mask": lambda: optax.conditionally_mask(optax.trace(0.9), lambda step: step % 2 == 0),
    "conditionally_transform": lambda: optax.conditionally_transform(optax.trace(0.9), lambda step: step % 2 == 0),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "mechanize": lambda: optax.contrib.mechanize(optax.sgd(0.1)),
}


@pytest.mark.parametrize("name", INSIDE)
def test_composition_inside_is_skipped_and_stepped_whole(name):
    inner = INSIDE[name]()
    check_against(inner, jamp.loss_scaled(inner), lambda state: state.inner_state)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("name", ["chain", "partition", "inject_hyperparams", "MultiSteps"])
def test_composition_inside_with_half_precision_params_has_no_dtype_drift(name, dtype):
    inner = INSIDE[name]()
    check_against(inner, jamp.loss_scaled(inner), lambda state: state.inner_state, dtype)


def test_inside_a_chain_of_stateless_transformations():
    inner = optax.adam(0.1)
    tx = optax.chain(optax.identity(), jamp.loss_scaled(inner))
    check_against(inner, tx, lambda state: state[1].inner_state)


def test_inside_a_named_chain():
    inner = optax.adam(0.1)
    tx = optax.named_chain(("first", optax.identity()), ("scaled", jamp.loss_scaled(inner)))
    check_against(inner, tx, lambda state: state["scaled"].inner_state)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_inject_hyperparams_around_a_factory_of_it(dtype):
    tx = optax.inject_hyperparams(lambda learning_rate: jamp.loss_scaled(optax.adam(learning_rate)))(0.1)
    # Old versions of inject_hyperparams give the hyperparameters the params' dtype at first, then the gradients'.
    state = check_against(optax.adam(0.1), tx, lambda state: state.inner_state.inner_state, dtype, grads_dtype=dtype)
    assert state.hyperparams["learning_rate"].dtype == dtype


def test_inject_hyperparams_around_it_leaves_the_configuration_one_object():
    # As a hyperparameter of its own, 2**16 would be cast to the params' dtype, where it is inf.
    injected = optax.inject_hyperparams(jamp.loss_scaled)(optax.adam(0.1), jamp.DynamicLossScale(2.0**20))
    state = injected.init(make_params(jnp.float16))
    assert float(jamp.get_loss_scale(state)) == 2.0**20
    _, state = make_step(injected)(make_params(jnp.float16), state, BAD)
    assert float(jamp.get_loss_scale(state)) == 2.0**19


def test_params_passed_by_keyword():
    tx = jamp.loss_scaled(optax.adamw(0.1))
    update, state = jax.jit(tx.update), tx.init(make_params())
    by_keyword, by_position = update(GOOD, state, params=make_params()), update(GOOD, state, make_params())
    assert bits(by_keyword[0]) == bits(by_position[0])


def test_params_may_be_left_out():
    tx = jamp.loss_scaled(optax.adam(0.1))
    updates, state = jax.jit(tx.update)(BAD, tx.init(make_params()))
    assert not any(np.any(x) for x in jax.tree.leaves(updates))
    updates, _ = tx.update(GOOD, state)
    assert all(np.all(x) for x in jax.tree.leaves(updates))


def test_skipped_updates_are_negative_zero():
    tx = jamp.loss_scaled(optax.adam(0.1))
    updates, _ = tx.update(BAD, tx.init(make_params()), make_params())
    for x in jax.tree.leaves(updates):
        np.testing.assert_array_equal(x, 0.0)
        assert np.signbit(x).all()


def test_unknown_extra_args_pass_through_to_an_inner_optimizer_that_takes_them():
    class Seen(NamedTuple):
        last: jax.Array

    def update(updates, state, params=None, *, temperature, **extra_args):
        assert set(extra_args) == {"unheard_of"}
        return updates, Seen(state.last + temperature)

    taking = optax.GradientTransformationExtraArgs(lambda params: Seen(jnp.float32(0)), update)
    extra_args = {"temperature": 2.0, "unheard_of": "of any type"}
    inner = optax.chain(optax.adam(0.1), taking)
    state = check_against(inner, jamp.loss_scaled(inner), lambda state: state.inner_state, **extra_args)
    assert float(state.inner_state[1].last) == 6.0


def test_unknown_extra_args_are_dropped_before_an_inner_optimizer_without_any():
    inner = optax.trace(0.9)
    tx = jamp.loss_scaled(inner)
    updates, _ = tx.update(GOOD, tx.init(make_params()), make_params(), unheard_of="of any type")
    assert bits(updates) == bits(inner.update(GOOD, inner.init(make_params()))[0])


def test_no_extra_arg_is_required():
    tx = jamp.loss_scaled(optax.adam(0.1))
    assert jax.tree.structure(tx.update(GOOD, tx.init(GOOD))[0]) == jax.tree.structure(GOOD)


def test_reduce_on_plateau_takes_its_value_and_does_not_count_a_skip():
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=2, rtol=0.0, atol=1e-6)
    tx = jamp.loss_scaled(optax.chain(optax.sgd(0.1), plateau))
    step = jax.jit(lambda g, s, value: tx.update(g, s, make_params(), value=value)[1], donate_argnums=1)
    state = tx.init(make_params())
    counts, scales = [], []
    for grads, value in [(GOOD, 1.0), (GOOD, 1.0), (BAD, np.nan), (BAD, 1.0), (GOOD, 1.0), (GOOD, 1.0)]:
        state = step(grads, state, jnp.float32(value))
        counts.append(int(state.inner_state[1].plateau_count))
        scales.append(float(state.inner_state[1].scale))
    assert counts == [0, 1, 1, 1, 0, 1]
    assert scales == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5]
    assert np.isfinite(state.inner_state[1].best_value)


def test_lbfgs_takes_value_grad_and_value_fn_ends_on_a_skip_and_compiles_once():
    def loss(params, offset):
        return sum(jnp.sum((x - 2) ** 2) for x in jax.tree.leaves(params)) + offset

    tx = jamp.loss_scaled(optax.lbfgs())

    def step(params, state, offset):
        # An offset of inf makes the value inf and, times 0, the gradients nan.
        value_fn = lambda p: loss(p, offset)
        value, grads = jax.value_and_grad(value_fn)(params)
        grads = jax.tree.map(lambda g: g + 0 * offset, grads)
        updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=value_fn)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step)
    params = make_params()
    params, state = step(params, tx.init(params), 0.0)
    after_skip = step(params, state, jnp.inf)
    assert bits((after_skip[0], after_skip[1].inner_state)) == bits((params, state.inner_state))
    assert not after_skip[1].grads_finite
    for _ in range(5):
        after_skip = step(*after_skip, 0.0)
        params, state = step(params, state, 0.0)
    assert bits((after_skip[0], after_skip[1].inner_state)) == bits((params, state.inner_state))
    assert loss(params, 0.0) < 1e-6
    assert step._cache_size() == 1


def test_polyak_sgd_takes_its_value():
    inner = optax.polyak_sgd()
    check_against(inner, jamp.loss_scaled(inner), lambda state: state.inner_state, value=jnp.float32(0.5))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_runs_in_a_scan(dtype):
    tx = jamp.loss_scaled(optax.adamw(SCHEDULE))

    def body(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), state.grads_finite

    grads = jax.tree.map(lambda *x: jnp.stack(x), GOOD, BAD, GOOD)
    run = jax.jit(lambda params, state: lax.scan(body, (params, state), grads))
    carry, finite = run(make_params(dtype), tx.init(make_params(dtype)))
    assert finite.tolist() == [True, False, True]
    run(*carry)
    assert run._cache_size() == 1


def test_runs_under_ahead_of_time_lowering_and_eval_shape():
    tx, params = jamp.loss_scaled(optax.adamw(SCHEDULE)), make_params()
    state = tx.init(params)
    shapes = jax.eval_shape(tx.update, GOOD, state, params)
    compiled = jax.jit(tx.update).lower(*jax.eval_shape(lambda: (GOOD, state, params))).compile()
    for grads in (GOOD, BAD):
        out = compiled(grads, state, params)
        assert avals(out) == avals(shapes)
        state = out[1]
    assert int(state.inner_state[0].count) == 1


def test_runs_under_remat_and_grad_of_grad():
    tx, params = jamp.loss_scaled(optax.adam(0.1, eps=0.1)), make_params()

    def loss_after(step, params):
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(step(params)))

    def step(params):
        grads = jax.grad(lambda p: sum(jnp.sum((x - 2) ** 2) for x in jax.tree.leaves(p)))(params)
        return optax.apply_updates(params, tx.update(grads, tx.init(params), params)[0])

    plain = jax.jit(jax.grad(functools.partial(loss_after, step)))(params)
    remat = jax.jit(jax.grad(functools.partial(loss_after, jax.checkpoint(step))))(params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), remat, plain)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_runs_without_any_implicit_promotion(dtype, strict):
    with jax.numpy_rank_promotion("raise"):
        tx, params = jamp.loss_scaled(optax.trace(0.9)), make_params(dtype)
        for update in (tx.update, jax.jit(tx.update)):
            _, state = update(BAD, tx.init(params), params)
            update(GOOD, state, params)


def test_runs_without_jit_and_leaks_no_tracer():
    tx, params = jamp.loss_scaled(optax.adam(0.1)), make_params()
    with jax.checking_leaks():
        updates, _ = jax.jit(tx.update)(GOOD, tx.init(params), params)
    with jax.disable_jit():
        without, state = tx.update(GOOD, tx.init(params), params)
        skipped, _ = tx.update(BAD, state, params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), without, updates)
    assert not any(np.any(x) for x in jax.tree.leaves(skipped))


def test_state_restored_as_numpy_arrays_goes_on():
    tx, params = jamp.loss_scaled(optax.adamw(SCHEDULE)), make_params()
    _, state = tx.update(GOOD, tx.init(params), params)
    restored = jax.tree.map(np.asarray, state)
    for grads in (GOOD, BAD):
        assert bits(tx.update(grads, restored, params)) == bits(tx.update(grads, state, params))


def test_vmap_keeps_one_scaler_per_replica():
    tx = jamp.loss_scaled(optax.adam(0.1), jamp.DynamicLossScale(growth_interval=2))
    stack = lambda *trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)
    params = stack(make_params(), make_params(), make_params())
    state = jax.vmap(tx.init)(params)
    step = jax.jit(jax.vmap(tx.update))
    _, state = step(stack(GOOD, BAD, GOOD), state, params)
    updates, state = step(stack(GOOD, BAD, BAD), state, params)
    assert state.loss_scale_state.loss_scale.tolist() == [2.0**17, 2.0**14, 2.0**15]
    assert state.stats.overflow_steps.tolist() == [0, 2, 1]
    assert state.inner_state[0].count.tolist() == [2, 0, 1]
    assert [bool(x.any()) for x in updates["w"]] == [True, False, False]


def test_replicas_that_share_an_axis_skip_together():
    tx = jamp.loss_scaled(optax.adam(0.1), axis_name="replicas")
    grads = jax.tree.map(lambda *x: jnp.stack(x), GOOD, BAD)
    state = tx.init(make_params())
    _, state = jax.vmap(lambda g: tx.update(g, state, make_params()), axis_name="replicas")(grads)
    assert state.grads_finite.tolist() == [False, False]
    assert state.inner_state[0].count.tolist() == [0, 0]


def test_initial_state_donates_each_buffer_once():
    tx = jamp.loss_scaled(optax.adam(0.1))
    leaves = jax.tree.leaves(tx.init(make_params()))
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)


def test_init_makes_its_arrays_and_only_maps_over_params():
    tx = jamp.loss_scaled(optax.adam(0.1))
    assert not [x for x in jax.tree.leaves(tx) if isinstance(x, jax.Array)]
    shapes = jax.eval_shape(tx.init, make_params())
    assert [x.shape for x in jax.tree.leaves(shapes)] == [x.shape for x in jax.tree.leaves(tx.init(make_params()))]


def test_tree_map_params_maps_the_params_like_leaves_only():
    tx = jamp.loss_scaled(optax.chain(optax.adam(SCHEDULE), optax.trace(0.9)))
    _, state = make_step(tx)(make_params(), tx.init(make_params()), GOOD)
    mapped = optax.tree.map_params(tx, lambda x: x * 0 + 7, state)
    assert set(np.unique(mapped.inner_state[0][0].mu["w"])) == {7.0}
    assert set(np.unique(mapped.inner_state[1].trace["b"])) == {7.0}
    assert bits(mapped.loss_scale_state) == bits(state.loss_scale_state)
    assert bits(mapped.stats) == bits(state.stats)
    assert int(mapped.inner_state[0][0].count) == 1
    specs = optax.tree.map_params(tx, lambda _: "params", state, transform_non_params=lambda _: "other")
    assert Counter(jax.tree.leaves(specs)) == {"params": 6, "other": 3 + 7 + 1 + 2}


def test_tree_get_and_set_reach_the_scale_and_the_inner_state():
    tx = jamp.loss_scaled(optax.inject_hyperparams(optax.adam)(0.1), jamp.DynamicLossScale(2.0**10))
    state = tx.init(make_params())
    assert float(optax.tree.get(state, "loss_scale")) == 2.0**10
    assert np.isclose(optax.tree.get(state, "learning_rate"), 0.1)
    state = optax.tree.set(state, loss_scale=jnp.float32(8.0), learning_rate=jnp.float32(0.5))
    assert float(jamp.get_loss_scale(state)) == 8.0
    updates, state = tx.update(GOOD, state, make_params())
    np.testing.assert_allclose(updates["b"], -0.5, rtol=1e-4)
    state = optax.tree.set(state, loss_scale_state=jamp.DynamicLossScale(2.0**4).init())
    assert float(optax.tree.get(state, "loss_scale")) == 2.0**4
    assert int(optax.tree.get(state, "growth_count")) == 0


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_params_and_gradients_reach_the_inner_optimizer_as_float32(dtype):
    seen = []

    def see(*trees):
        seen.append({x.dtype for x in jax.tree.leaves(trees)})

    def init(params):
        see(params)
        return {"mu": optax.tree.zeros_like(params)}

    def update(grads, state, params=None):
        see(grads, state, params)
        return grads, {"mu": grads}

    tx = jamp.loss_scaled(optax.GradientTransformation(init, update))
    half = lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree)
    updates, state = jax.jit(tx.update)(half(GOOD), tx.init(make_params(dtype)), make_params(dtype))
    assert seen == [{jnp.dtype(jnp.float32)}] * 2
    assert {x.dtype for x in jax.tree.leaves((updates, state.inner_state))} == {jnp.dtype(jnp.float32)}
    updates, _ = jax.jit(tx.update)(half(BAD), state, make_params(dtype))
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("make", [optax.adam, optax.lamb, lambda rate: optax.apply_if_finite(optax.adam(rate), 3)])
def test_half_precision_gradients_with_float32_params_are_stepped(make, dtype):
    """`optax.apply_if_finite` alone fails with them."""
    half = lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree)
    tx = jamp.loss_scaled(make(0.1))
    step = make_step(tx)
    params, state = step(make_params(), tx.init(make_params()), half(GOOD))
    expected, _ = step(make_params(), tx.init(make_params()), GOOD)
    jax.tree.map(np.testing.assert_array_equal, params, expected)  # these gradients are exact in 16 bit
    before = bits((params, state.inner_state))
    params, state = step(params, state, half(BAD))
    assert bits((params, state.inner_state)) == before


def test_float64_params_keep_their_dtype(x64):
    tx = jamp.loss_scaled(optax.adamw(0.1))
    to64 = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float64), tree)
    step, params = make_step(tx), to64(make_params())
    state = tx.init(params)
    first = avals((params, state))
    for grads in (GOOD, BAD, GOOD):
        params, state = step(params, state, to64(grads))
        assert avals((params, state)) == first
    assert step._cache_size() == 1
    assert params["w"].dtype == jnp.float64
    assert {x.dtype for x in jax.tree.leaves(state.stats)} == {jnp.dtype(jnp.int32), jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("jit", [True, False])
def test_no_leaf_of_the_state_changes_dtype_or_weak_type_over_steps(jit):
    for config in (jamp.DynamicLossScale(growth_interval=2), jamp.StaticLossScale(), jamp.NoOpLossScale()):
        tx = jamp.loss_scaled(optax.adamw(SCHEDULE), config)
        update = jax.jit(tx.update) if jit else tx.update
        state = tx.init(make_params())
        first = avals(state)
        assert not any(x.weak_type for x in jax.tree.leaves(state))
        for grads in (GOOD, BAD, GOOD, GOOD):
            _, state = update(grads, state, make_params())
            assert avals(state) == first


def test_stats_and_loss_scale_advance_on_a_skip():
    tx = jamp.loss_scaled(optax.adam(0.1), jamp.DynamicLossScale(8.0, growth_interval=2, min_scale=0.25))
    update, state = jax.jit(tx.update), tx.init(make_params())
    history = []
    for grads in (BAD, BAD, GOOD, GOOD, BAD):
        _, state = update(grads, state, make_params())
        history.append((float(jamp.get_loss_scale(state)), bool(state.grads_finite), int(state.inner_state[0].count)))
    assert history == [(4.0, False, 0), (2.0, False, 0), (2.0, True, 1), (4.0, True, 2), (2.0, False, 2)]
    stats = {k: float(v) for k, v in state.stats._asdict().items()}
    assert stats == {
        "finite_steps": 2,
        "overflow_steps": 3,
        "consecutive_overflows": 1,
        "increases": 1,
        "decreases": 3,
        "min_loss_scale": 2.0,
        "max_loss_scale": 8.0,
    }


def test_given_grads_finite_takes_the_place_of_the_check():
    tx = jamp.loss_scaled(optax.trace(0.9))
    update, state = jax.jit(tx.update), tx.init(make_params())
    updates, skipped = update(GOOD, state, make_params(), grads_finite=jnp.array(False))
    assert not skipped.grads_finite
    assert not any(np.any(x) for x in jax.tree.leaves(updates))
    updates, taken = update(BAD, state, make_params(), grads_finite=jnp.array(True))
    assert taken.grads_finite
    assert bits(updates) == bits(BAD)
    # A Python bool is a bool[] too, also outside jit.
    for given in (True, False, np.bool_(False), 1):
        _, state = tx.update(GOOD, tx.init(make_params()), make_params(), grads_finite=given)
        assert bool(state.grads_finite) == given
        assert state.grads_finite.dtype == jnp.bool_
    with pytest.raises(ValueError, match=r"grads_finite must be one bool, got an array of shape \(1,\).*jnp\.all"):
        tx.update(GOOD, tx.init(make_params()), make_params(), grads_finite=jnp.ones(1, bool))


def test_state_is_a_named_tuple_of_these_fields():
    state = jamp.loss_scaled(optax.sgd(0.1)).init(make_params())
    assert isinstance(state, jamp.LossScaledState)
    assert state._fields == ("loss_scale_state", "stats", "grads_finite", "inner_state")
    assert isinstance(state.stats, jamp.LossScaleStats)
    assert bool(state.grads_finite)


def test_it_is_a_gradient_transformation_with_extra_args():
    assert isinstance(jamp.loss_scaled(optax.sgd(0.1)), optax.GradientTransformationExtraArgs)


def test_a_users_own_loss_scale_serves():
    class HalvingState(NamedTuple):
        loss_scale: jax.Array

    class Halving:
        def init(self):
            return HalvingState(jnp.float32(64.0))

        def update(self, state, grads_finite):
            return HalvingState(jnp.where(grads_finite, 1.0, 0.5) * state.loss_scale)

    tx = jamp.loss_scaled(optax.sgd(0.1), Halving())
    _, state = jax.jit(tx.update)(BAD, tx.init(make_params()), make_params())
    assert float(jamp.get_loss_scale(state)) == 32.0


@pytest.mark.parametrize("inner", [None, 0.1, optax.adam, "adam", optax.GradientTransformation(None, None), SCHEDULE])
def test_inner_that_is_no_transformation_is_a_clear_error(inner):
    with pytest.raises(TypeError, match=r"inner must be an optax gradient transformation, got .*optax\.adamw"):
        jamp.loss_scaled(inner)


@pytest.mark.parametrize("loss_scale", [1024.0, 2**16, None, "dynamic", jamp.DynamicLossScale, jamp.NoOpLossScale])
def test_loss_scale_that_is_a_number_or_a_class_is_a_clear_error(loss_scale):
    with pytest.raises(TypeError, match=r"loss_scale must be a loss scale, got .*jamp\.DynamicLossScale\(\)"):
        jamp.loss_scaled(optax.sgd(0.1), loss_scale)


# NoOp.


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.mean(jax.nn.logsumexp(hidden, axis=-1) ** 2)


NETWORK = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE))


def noop_step(params, state, x):
    loss, grads = jamp.value_and_grad(loss_fn, state)(params, x)
    updates, state = jamp.loss_scaled(INNER, jamp.NoOpLossScale()).update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def plain_step(params, state, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    updates, state = INNER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def carrying_step(params, state, x):
    """The plain step, with the leaves of jamp's state that nothing touches carried along."""
    params, inner_state, loss = plain_step(params, state.inner_state, x)
    return params, state._replace(inner_state=inner_state), loss


def optimized_hlo(step: Any, state: Any, donate: bool) -> str:
    """The optimized module without what tells of the source: names of functions, files and lines."""

    def train_step(*args):
        return step(*args)

    jitted = jax.jit(train_step, donate_argnums=(0, 1) if donate else ())
    text = jitted.lower(NETWORK, state, jnp.ones((5, 4))).compile().as_text()
    text = re.sub(r", metadata=\{[^}]*\}", "", text)
    return re.sub(r"\n(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*", "", text)


@pytest.mark.parametrize("donate", [True, False])
def test_noop_compiles_to_exactly_the_plain_step(donate):
    tx = jamp.loss_scaled(INNER, jamp.NoOpLossScale())
    got = optimized_hlo(noop_step, tx.init(NETWORK), donate)
    # Letter for letter the plain step that carries the bookkeeping along ...
    assert got == optimized_hlo(carrying_step, tx.init(NETWORK), donate)
    # ... which is the plain step and, for each of the untouched scalars, a parameter that is returned.
    count = lambda text: Counter(re.findall(r" = (\S+ [\w-]+)\(", text))
    plain = count(optimized_hlo(plain_step, INNER.init(NETWORK), donate))
    carried = jax.tree.leaves(tx.init(NETWORK)._replace(inner_state=None))
    assert sum(plain.values()) > 30
    assert not plain - count(got)
    more = count(got) - plain
    assert {x.split()[1] for x in more} <= {"parameter", "copy"}
    assert sum(n for x, n in more.items() if x.endswith("parameter")) == len(carried)
    assert sum(n for x, n in more.items() if x.endswith("copy")) <= len(carried)


def test_another_loss_scale_does_not_compile_to_the_plain_step():
    """The comparison can fail."""
    static = jamp.loss_scaled(INNER, jamp.StaticLossScale(1.0))

    def static_step(params, state, x):
        loss, grads = jamp.value_and_grad(loss_fn, state)(params, x)
        updates, state = static.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = static.init(NETWORK)
    assert optimized_hlo(static_step, state, False) != optimized_hlo(carrying_step, state, False)


def test_noop_grads_finite_is_constantly_true_and_stats_stay_at_zero():
    tx = jamp.loss_scaled(optax.trace(0.9), jamp.NoOpLossScale())
    initial = tx.init(make_params())
    updates, state = jax.jit(tx.update)(BAD, initial, make_params())
    assert np.isnan(updates["b"][1])
    assert np.isnan(state.inner_state.trace["b"][1])
    assert bool(state.grads_finite)
    assert bits((state.stats, state.loss_scale_state)) == bits((initial.stats, initial.loss_scale_state))
    assert float(jamp.get_loss_scale(state)) == 1.0
    assert int(state.stats.finite_steps) == int(state.stats.overflow_steps) == 0


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_noop_with_half_precision_params_has_no_dtype_drift(dtype):
    tx = jamp.loss_scaled(optax.adamw(SCHEDULE), jamp.NoOpLossScale())
    step = make_step(tx)
    params, state = make_params(dtype), tx.init(make_params(dtype))
    first = avals((params, state))
    for _ in range(2):
        params, state = step(params, state, GOOD)
        assert avals((params, state)) == first
    assert step._cache_size() == 1
