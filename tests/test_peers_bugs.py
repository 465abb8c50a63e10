"""The loss-scaling bugs of other systems, one test each: jamp has none of them."""

import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jamp

PARAMS = {"w": jnp.float32([1.0, -2.0, 3.0]), "b": jnp.float32(0.5)}
GOOD, BAD = jnp.float32([0.1, 0.2, 0.3]), jnp.float32([0.1, jnp.nan, 0.3])


def loss_fn(params, x):
    return jnp.sum((params["w"] * x + params["b"]) ** 2)


def make_step(tx, loss_fn=loss_fn):
    """A compiled train step, and the list of its traces."""
    traces = []

    @jax.jit
    def step(params, opt_state, x):
        traces.append(1)
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, traces


def run(step, params, opt_state, batches):
    for x in batches:
        params, opt_state, _ = step(params, opt_state, x)
    return params, opt_state


def scales_of(config, finite):
    """The loss scale after each step of a sequence."""
    update = lambda state, ok: (new := config.update(state, ok), new.loss_scale)
    return jax.jit(lambda s, f: jax.lax.scan(update, s, f)[1])(config.init(), jnp.array(finite)).tolist()


def assert_equal(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


# --- jmp ---


def test_jmp_min_scale_survives_a_pytree_round_trip():
    config = jamp.DynamicLossScale(init_scale=8.0, min_scale=4.0)
    state = config.init()
    for _ in range(3):
        leaves, treedef = jax.tree.flatten(state)
        state = config.update(jax.tree.unflatten(treedef, leaves), jnp.bool_(False))
        state = pickle.loads(pickle.dumps(state))
    assert state.loss_scale == 4.0


@pytest.mark.parametrize("leaf", [None, object(), "x", -1.0, jax.ShapeDtypeStruct((3,), jnp.int8), PartitionSpec("x")])
def test_jmp_nothing_is_validated_when_a_pytree_is_unflattened(leaf):
    for state in (
        *(config.init() for config in (jamp.NoOpLossScale(), jamp.StaticLossScale(), jamp.DynamicLossScale())),
        jamp.AdaptiveLossScale().init(),
        jamp.loss_scaled(optax.adam(1e-3)).init(PARAMS),
    ):
        leaves, treedef = jax.tree.flatten(state)
        assert type(jax.tree.unflatten(treedef, [leaf] * len(leaves))) is type(state)


def test_jmp_ahead_of_time_lowering_works():
    tx = jamp.loss_scaled(optax.adam(1e-3))
    step, _ = make_step(tx)
    args = PARAMS, tx.init(PARAMS), GOOD
    for lowered in (step.lower(*args), step.lower(*jax.eval_shape(lambda *a: a, *args))):
        assert_equal(lowered.compile()(*args), step(*args))


def test_jmp_trees_of_partition_specs_work():
    tx = jamp.loss_scaled(optax.adam(1e-3))
    step, _ = make_step(tx)
    args = PARAMS, tx.init(PARAMS), GOOD
    specs = jax.tree.map(lambda _: PartitionSpec(), args)
    mesh = Mesh(np.array(jax.devices()[:1]), "x")
    is_spec = lambda x: isinstance(x, PartitionSpec)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)
    sharded = jax.jit(step, in_shardings=shardings, out_shardings=(*shardings[:2], None))
    assert_equal(sharded(*args), step(*args))


@pytest.mark.parametrize(
    "config",
    [jamp.NoOpLossScale(), jamp.StaticLossScale(), jamp.DynamicLossScale(growth_interval=2), jamp.AdaptiveLossScale()],
    ids=lambda c: type(c).__name__,
)
def test_jmp_and_flax_compile_once(config):
    tx = jamp.loss_scaled(optax.adam(1e-3), config)
    step, traces = make_step(tx)
    _, opt_state = run(step, PARAMS, tx.init(PARAMS), [GOOD, BAD, GOOD, GOOD, GOOD])
    assert len(traces) == 1
    assert jax.eval_shape(lambda: opt_state) == jax.eval_shape(lambda: tx.init(PARAMS))
    assert not any(x.weak_type for x in jax.tree.leaves(opt_state))


def test_jmp_and_flax_compile_once_but_jamp_once_also_for_the_first_step_of_a_process():
    """What is imported inside the first trace may change JAX's configuration, which traces everything again."""
    code = """
import jax, jax.numpy as jnp, optax, jamp
tx, traces = jamp.loss_scaled(optax.sgd(0.1)), []

@jax.jit
def step(params, opt_state):
    traces.append(1)
    loss, grads = jamp.value_and_grad(lambda w: jnp.sum(w**2), opt_state)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

args = jnp.ones(3), tx.init(jnp.ones(3))
for _ in range(3):
    args = step(*args)
print(len(traces))
"""
    env = os.environ | {"PYTHONPATH": str(Path(jamp.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "1\n", done.stderr


@pytest.mark.parametrize("lost", [math.inf, math.nan, 0.0])
@pytest.mark.parametrize("max_scale", [2.0**24, math.inf])
def test_jmp_and_keras_an_inf_scale_recovers(lost, max_scale):
    tx = jamp.loss_scaled(optax.sgd(0.1), jamp.DynamicLossScale(max_scale=max_scale))
    step, _ = make_step(tx)
    opt_state = jamp.set_loss_scale(tx.init(PARAMS), lost)
    params, opt_state = run(step, PARAMS, opt_state, [GOOD])
    assert_equal(params, PARAMS)  # such a scale gives no gradient
    assert 1.0 <= jamp.get_loss_scale(opt_state) <= 2.0**24
    params, opt_state = run(step, params, opt_state, [GOOD] * 20)
    assert jamp.get_grads_finite(opt_state)
    assert not jnp.array_equal(params["w"], PARAMS["w"])


def test_jmp_ints_stay_ints():
    state = jamp.StaticLossScale(4.0).init()
    tree = {"n": jnp.int32([3]), "w": jnp.float32([8.0])}
    assert_equal(jamp.unscale_and_check(tree, state)[0], {"n": jnp.int32([3]), "w": jnp.float32([2.0])})
    for config in (jamp.DynamicLossScale(growth_interval=2), jamp.AdaptiveLossScale()):
        updated = config.update(config.update(config.init(), jnp.bool_(True)), jnp.bool_(False))
        assert [x.dtype for x in updated] == [x.dtype for x in config.init()]
        assert {x.dtype for x in updated[1:]} == {jnp.dtype("int32")}


# --- jaxamp, Flax's DynamicScale, mpx, DeepSpeed ---


def test_jaxamp_flax_and_deepspeed_grow_late_but_jamp_after_exactly_n_finite_steps():
    config = jamp.DynamicLossScale(init_scale=4.0, growth_interval=3)
    assert scales_of(config, [True] * 7) == [4.0, 4.0, 8.0, 8.0, 8.0, 16.0, 16.0]
    finite = [True, True, False, True, True, True]  # an overflow restarts the count
    assert scales_of(config, finite) == [4.0, 4.0, 2.0, 2.0, 2.0, 4.0]


def test_jaxamp_the_scale_is_clamped_above_and_below():
    config = jamp.DynamicLossScale(init_scale=6.0, growth_interval=1, min_scale=2.5, max_scale=20.0)
    assert scales_of(config, [True] * 3 + [False] * 4) == [12.0, 20.0, 20.0, 10.0, 5.0, 2.5, 2.5]


@pytest.mark.parametrize("bad_steps", [142, 200])
def test_flax_half_gradients_are_not_all_zero_after_many_bad_steps(bad_steps):
    """There the floor is 1e-38, and a float16 gradient under that scale is 0 and called finite."""
    config = jamp.DynamicLossScale()
    state, _ = jax.lax.scan(lambda s, ok: (config.update(s, ok), None), config.init(), jnp.zeros(bad_steps, bool))
    assert state.loss_scale == 1.0
    w = jnp.float16([1.0, 2.0])
    grads = jamp.grad(lambda w: jnp.sum(w.astype(jnp.float32) ** 2), state)(w)
    assert_equal(grads, jnp.float32([2.0, 4.0]))


def test_jaxamp_a_nan_batch_costs_one_forward_and_backward_pass():
    calls = []

    def counted(params, x):
        jax.debug.callback(lambda: calls.append(1))
        return loss_fn(params, x)

    tx = jamp.loss_scaled(optax.sgd(0.1))
    step, _ = make_step(tx, counted)
    jax.block_until_ready(run(step, PARAMS, tx.init(PARAMS), [GOOD, BAD, GOOD]))
    jax.effects_barrier()
    assert len(calls) == 3


def test_mpx_and_deepspeed_8588_wrong_gradients_on_every_growth_step():
    config = jamp.DynamicLossScale(init_scale=2.0**4, growth_interval=1)
    plain, scaled = optax.sgd(0.1), jamp.loss_scaled(optax.sgd(0.1), config)
    step, _ = make_step(scaled)
    params, opt_state = run(step, PARAMS, scaled.init(PARAMS), [GOOD] * 8)
    assert jamp.get_stats(opt_state).increases == 8
    control, plain_state = PARAMS, plain.init(PARAMS)
    for _ in range(8):
        updates, plain_state = plain.update(jax.grad(loss_fn)(control, GOOD), plain_state)
        control = optax.apply_updates(control, updates)
    for name in PARAMS:
        np.testing.assert_allclose(params[name], control[name], rtol=1e-6)


# --- Keras, TensorFlow, torch ---


def test_keras_200_nan_steps_then_a_good_step():
    tx = jamp.loss_scaled(optax.adam(1e-2))
    step, _ = make_step(tx)
    params, opt_state = run(step, PARAMS, tx.init(PARAMS), [BAD] * 200)
    assert_equal(params, PARAMS)
    assert jamp.get_loss_scale(opt_state) == 1.0
    params, opt_state = run(step, params, opt_state, [GOOD])
    assert all(jnp.isfinite(p).all() for p in jax.tree.leaves(params))
    # The 200 steps left no trace in the moments or the count.
    fresh, _ = run(step, PARAMS, tx.init(PARAMS), [GOOD])
    for name in PARAMS:
        np.testing.assert_allclose(params[name], fresh[name], rtol=1e-6)


def test_torch_has_no_floor_and_its_scale_reaches_zero_for_ever():
    scales = scales_of(jamp.DynamicLossScale(growth_interval=2), [False] * 300 + [True] * 4)
    assert min(scales) == 1.0
    assert scales[-4:] == [1.0, 2.0, 2.0, 4.0]


def test_torch_an_interval_lowered_below_the_tracker_still_grows():
    state = jamp.DynamicLossScale(init_scale=4.0, growth_interval=100).init()
    for _ in range(50):
        state = jamp.DynamicLossScale(init_scale=4.0, growth_interval=100).update(state, jnp.bool_(True))
    state = jamp.DynamicLossScale(init_scale=4.0, growth_interval=10).update(state, jnp.bool_(True))
    assert (state.loss_scale, state.growth_count) == (8.0, 0)


def test_torch_a_finite_scaled_gradient_that_is_infinite_unscaled_is_not_applied():
    """With scale 2**-140 torch's check passes and the params become -inf."""
    config = jamp.DynamicLossScale(init_scale=2.0**-100, min_scale=2.0**-120)
    tx = jamp.loss_scaled(optax.sgd(0.1), config)
    opt_state = tx.init(jnp.ones(2))
    grads, finite = jamp.unscale_and_check(jnp.full(2, 2.0**40), opt_state)
    assert not finite
    updates, opt_state = tx.update(grads, opt_state)
    assert_equal(optax.apply_updates(jnp.ones(2), updates), jnp.ones(2))
    assert jamp.get_loss_scale(opt_state) == 2.0**-101
    subnormal = jamp.set_loss_scale(opt_state, 2.0**-140)
    updates, opt_state = tx.update(jamp.grad(jnp.sum, subnormal)(jnp.ones(2)), subnormal)
    assert_equal(optax.apply_updates(jnp.ones(2), updates), jnp.ones(2))
    assert 2.0**-120 <= jamp.get_loss_scale(opt_state) <= 2.0**-100


def test_tensorflow_scales_below_1_are_legal():
    """tensorflow#38357: gradients that overflow at scale 1 are finite at 2**-4."""
    tx = jamp.loss_scaled(optax.sgd(1e-6), jamp.DynamicLossScale(init_scale=1.0, min_scale=2.0**-10))
    step, _ = make_step(tx, lambda w, x: jnp.sum(w.astype(jnp.float32) * x))
    w, opt_state = jnp.ones(3, jnp.float16), tx.init(jnp.ones(3, jnp.float16))
    x = jnp.full(3, 1e6)  # its float16 cotangent overflows
    params, opt_state = run(step, w, opt_state, [x] * 6)
    assert jamp.get_loss_scale(opt_state) == 2.0**-4
    assert jamp.get_stats(opt_state).finite_steps == 2
    assert jnp.isfinite(params).all()


# --- Optax ---


def test_apply_if_finite_applies_the_nan_after_its_limit_but_jamp_never():
    theirs, ours = optax.apply_if_finite(optax.sgd(0.1), 3), jamp.loss_scaled(optax.sgd(0.1))
    updates = {}
    for name, tx in (("optax", theirs), ("jamp", ours)):
        update, state = jax.jit(tx.update), tx.init(PARAMS)
        for _ in range(10):
            updates[name], state = update(jax.tree.map(lambda p: p * jnp.nan, PARAMS), state, PARAMS)
    assert jnp.isnan(updates["optax"]["w"]).all()
    assert_equal(optax.apply_updates(PARAMS, updates["jamp"]), PARAMS)


@pytest.mark.parametrize("inner", [optax.adam(1e-2), optax.sgd(0.1, momentum=0.9)], ids=["adam", "momentum"])
def test_apply_if_finite_fails_with_float16_gradients_and_float32_params(inner):
    tx = jamp.loss_scaled(inner)
    state = tx.init(PARAMS)
    update = jax.jit(tx.update)
    for value in (1.0, jnp.inf, 1.0):
        grads = jax.tree.map(lambda p, value=value: jnp.full(p.shape, value, jnp.float16), PARAMS)
        updates, state = update(grads, state, PARAMS)
    assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype("float32")}
    assert jamp.get_stats(state).finite_steps == 2
    assert jax.eval_shape(lambda: state) == jax.eval_shape(lambda: tx.init(PARAMS))


def test_multi_steps_is_not_poisoned_by_one_inf():
    tx = jamp.loss_scaled(optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation())
    step, _ = make_step(tx)
    opt_state = tx.init(PARAMS)
    params, opt_state = run(step, PARAMS, opt_state, [GOOD, BAD, 2 * GOOD, GOOD, GOOD])
    control, _ = run(step, PARAMS, tx.init(PARAMS), [GOOD, 2 * GOOD, GOOD, GOOD])
    for name in PARAMS:
        assert jnp.isfinite(params[name]).all()
        np.testing.assert_allclose(params[name], control[name], rtol=1e-6)
        assert not jnp.array_equal(params[name], PARAMS[name])


def test_adam_on_a_float16_zero_gradient_is_not_nan():
    """optax#1754, #1784: in float16 eps is 0, so 0 / (sqrt(0) + eps) is nan."""
    params = jnp.ones(3, jnp.float16)
    tx = jamp.loss_scaled(optax.adam(1e-2))
    updates, state = jax.jit(tx.update)(jnp.zeros(3, jnp.float16), tx.init(params), params)
    assert_equal(updates, jnp.zeros(3, jnp.float32))
    assert jamp.get_grads_finite(state)


def test_schedules_do_not_advance_on_a_skip():
    seen = []
    schedule = lambda count: (seen.append(count), optax.linear_schedule(1.0, 0.0, 4)(count))[1]
    tx = jamp.loss_scaled(optax.sgd(schedule))
    update, state, params, path = jax.jit(tx.update), tx.init(jnp.float32(0.0)), jnp.float32(0.0), []
    for g in (1.0, jnp.nan, 1.0, jnp.inf, -jnp.inf, 1.0):
        updates, state = update(jnp.float32(g), state, params)
        params = optax.apply_updates(params, updates)
        path.append(float(params))
    assert path == [-1.0, -1.0, -1.75, -1.75, -1.75, -2.25]
    assert len(seen) == 1
    assert optax.tree.get(state, "count") == 3


# --- What users of other systems ask for ---


@pytest.mark.parametrize("grads", [None, {"w": None, "b": None}, optax.MaskedNode(), {}])
def test_all_none_gradients_are_harmless(grads):
    tx = jamp.loss_scaled(optax.sgd(0.1))
    opt_state = tx.init(grads)
    out, finite = jamp.unscale_and_check(grads, opt_state)
    assert jax.tree.structure(out) == jax.tree.structure(grads)
    assert finite
    for update in (tx.update, jax.jit(tx.update)):
        updates, new = update(out, opt_state, grads)
        assert jax.tree.structure(updates) == jax.tree.structure(grads)
        assert jamp.get_stats(new).finite_steps == 1


def test_was_the_step_skipped_is_answered_without_a_device_sync():
    tx = jamp.loss_scaled(optax.sgd(0.1))
    step, _ = make_step(tx)

    @jax.jit
    def log(opt_state, x):
        """Runs on device: nothing is converted to a Python bool."""
        _, opt_state, _ = step(PARAMS, opt_state, x)
        skipped = ~jamp.get_grads_finite(opt_state)
        return jax.lax.cond(skipped, lambda: 1, lambda: 0), jamp.metrics(opt_state)["consecutive_overflows"]

    opt_state = tx.init(PARAMS)
    assert [log(opt_state, x)[0].item() for x in (GOOD, BAD)] == [0, 1]
    assert [log(opt_state, x)[1].item() for x in (GOOD, BAD)] == [0, 1]
    assert jax.eval_shape(jamp.get_grads_finite, opt_state) == jax.ShapeDtypeStruct((), jnp.bool_)


def test_apex_several_losses_each_under_its_own_scaler():
    config = jamp.DynamicLossScale(init_scale=2.0**4, growth_interval=1)
    tx = optax.sgd(0.1)

    @jax.jit
    def step(params, opt_state, scalers, x, y):
        """Two losses of one model. One that overflows backs off alone, and the step is skipped."""
        checked = [
            jamp.unscale_and_check(jax.grad(scaled)(params, s, b), s) for s, b in zip(scalers, (x, y), strict=True)
        ]
        scalers = tuple(config.update(s, ok) for s, (_, ok) in zip(scalers, checked, strict=True))
        ok = checked[0][1] & checked[1][1]
        updates, new = tx.update(jax.tree.map(jnp.add, checked[0][0], checked[1][0]), opt_state)
        return jax.tree.map(lambda p, u: jnp.where(ok, p + u, p), params, updates), new, scalers

    scaled = lambda params, state, x: jamp.scale_loss(loss_fn(params, x), state)
    params, opt_state, scalers = PARAMS, tx.init(PARAMS), (config.init(), config.init())
    params, opt_state, scalers = step(params, opt_state, scalers, GOOD, BAD)
    assert_equal(params, PARAMS)
    assert [float(s.loss_scale) for s in scalers] == [2.0**5, 2.0**3]
    params, opt_state, scalers = step(params, opt_state, scalers, GOOD, 2 * GOOD)
    assert [float(s.loss_scale) for s in scalers] == [2.0**6, 2.0**4]
    both = jax.grad(lambda p: loss_fn(p, GOOD) + loss_fn(p, 2 * GOOD))(PARAMS)
    for name in PARAMS:
        np.testing.assert_allclose(params[name], PARAMS[name] - 0.1 * both[name], rtol=1e-5)


def test_a_resumed_run_continues_exactly():
    """metaseq#3 loses its counters, MindFormers' checkpoint all but the scale."""
    tx = jamp.loss_scaled(optax.adam(1e-2), jamp.DynamicLossScale(growth_interval=3, hysteresis=2))
    step, _ = make_step(tx)
    batches = [GOOD, BAD, GOOD, GOOD, GOOD, BAD, GOOD, BAD]
    through = run(step, PARAMS, tx.init(PARAMS), batches)
    params, opt_state = run(step, PARAMS, tx.init(PARAMS), batches[:4])
    saved = jax.tree.map(np.asarray, (params, opt_state))
    resumed = run(step, *jax.tree.map(jnp.asarray, saved), batches[4:])
    assert_equal(resumed, through)
