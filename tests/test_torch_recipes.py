"""The recipes of PyTorch's AMP examples page under jamp.GradScaler, and recorded runs of torch.amp.GradScaler."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp

RECORDED = json.loads((pathlib.Path(__file__).parent / "data" / "torch_numerics.json").read_text())
OPTIMIZERS = {"sgd_momentum": jamp.optimizers.sgd, "adamw": jamp.optimizers.adamw}


def array(numbers, shape=()):
    return np.array(numbers, np.float32).reshape(shape)  # it reads "inf" and "nan" too


def mse(params, x, y):
    return jnp.mean((x @ params["W"] + params["b"] - y) ** 2)


def problem(seed=0, micro_batches=1):
    rng = np.random.default_rng(seed)
    params = {"W": array(rng.normal(size=12), (4, 3)), "b": array(rng.normal(size=3), (3,))}
    x, y = rng.normal(size=(micro_batches, 5, 4)), rng.normal(size=(micro_batches, 5, 3))
    return params, array(x, x.shape), array(y, y.shape)


def same(a, b):
    return all(
        np.array_equal(x, y, equal_nan=True) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


# Recorded runs.


def name_of(run):
    return f"{run['optimizer']}-clip={run['clip_grad_norm']}"


@pytest.mark.parametrize("run", RECORDED["numerics"], ids=name_of)
def test_a_recorded_run_with_injected_inf_and_nan_agrees_step_by_step(run):
    hparams = dict(run["hparams"])
    tx = OPTIMIZERS[run["optimizer"]](hparams.pop("lr"), **hparams)

    @jax.jit
    def step(scaler, params, opt_state, x, y, fault):
        def scaled_loss(params):
            loss = mse(params, x, y)
            return scaler.scale(loss), loss

        scaled, loss = jax.grad(scaled_loss, has_aux=True)(params)
        grads = scaler.unscale(jax.tree.map(lambda g, f: jnp.where(f == 0, g, f), scaled, fault))
        clipped = grads
        if run["clip_grad_norm"] is not None:  # torch.nn.utils.clip_grad_norm_, its 1e-6 included
            factor = run["clip_grad_norm"] / (optax.tree.norm(grads) + 1e-6)
            clipped = jax.tree.map(lambda g: g * jnp.minimum(factor, 1.0), grads)
        return scaler.step(tx, opt_state, params, grads=clipped), loss, grads

    params = {"W": array(run["W0"], (4, 3)), "b": array(run["b0"], (3,))}
    scaler, opt_state = jamp.GradScaler(**run["config"]), tx.init(params)
    n = len(run["W"])
    x, y = array(run["X"], (n, 5, 4)), array(run["Y"], (n, 5, 3))
    for i in range(n):
        fault = jax.tree.map(np.zeros_like, params)
        if str(i) in run["inject"]:
            leaf, index, kind = run["inject"][str(i)]
            fault[leaf].flat[index] = float(kind)
        assert float(scaler.get_scale()) == run["scale_used"][i]
        (params, opt_state, scaler, stepped), loss, grads = step(scaler, params, opt_state, x[i], y[i], fault)
        assert bool(stepped) == (not run["found_inf"][i])
        assert float(scaler.get_scale()) == run["scale_after"][i]
        assert int(scaler.state.growth_count) == run["growth_tracker_after"][i]
        recorded = {k: array(run[k][i], p.shape) for k, p in params.items()}
        for k in params:
            np.testing.assert_allclose(params[k], recorded[k], rtol=2e-6, atol=1e-7)
            expected = array(run[f"unscaled_grad_{k}"][i], params[k].shape)
            np.testing.assert_allclose(grads[k], expected, rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(loss, run["loss_micro"][i][0], rtol=2e-6)


@pytest.mark.parametrize("run", RECORDED["two_optimizers"], ids=["interval-2", "alternating"])
def test_a_recorded_run_of_two_optimizers_under_one_scaler_agrees_step_by_step(run):
    tx = optax.sgd(1.0)

    @jax.jit
    def step(scaler, a, b, state_a, state_b, bad_a, bad_b):
        scaled = jax.grad(lambda p: scaler.scale(p[0] + p[1]))((a, b))
        scaled_a, scaled_b = (jnp.where(bad, jnp.nan, g) for bad, g in zip((bad_a, bad_b), scaled, strict=True))
        # One is unscaled by hand, the other in its step.
        first = scaler.step(tx, state_a, a, grads=scaler.unscale(scaled_a), update_scale=False)
        second = scaler.step(tx, state_b, b, scaled_grads=scaled_b, update_scale=False)
        return first, second, scaler.update(grads_finite=first.stepped & second.stepped)

    scaler, a, b = jamp.GradScaler(**run["config"], min_scale=2.0**-8), jnp.float32(0), jnp.float32(0)
    state_a, state_b = tx.init(a), tx.init(b)
    for i, nonfinite in enumerate(run["nonfinite"]):
        first, second, scaler = step(scaler, a, b, state_a, state_b, *(digit == "1" for digit in nonfinite))
        (a, state_a), (b, state_b) = first[:2], second[:2]
        got = int(first.stepped), int(second.stepped), float(a), float(b), float(scaler.get_scale())
        assert got == tuple(run[k][i] for k in ("stepped_a", "stepped_b", "pa", "pb", "scale"))
        assert int(scaler.state.growth_count) == run["growth_tracker"][i]


# The recipes.


def test_a_scaled_run_equals_the_float32_control_and_ends_at_the_scale_that_its_steps_give():
    params, x, y = problem(micro_batches=20)
    tx, scaler = jamp.optimizers.sgd(0.1, momentum=0.9), jamp.GradScaler(init_scale=128.0, growth_interval=1)
    bad = np.isin(np.arange(20), [3, 4, 11])

    def scaled(carry, batch):
        scaler, params, opt_state = carry
        x, y, bad = batch
        grads = jax.grad(lambda p: scaler.scale(mse(p, x, y)))(params)
        grads = jax.tree.map(lambda g: jnp.where(bad, jnp.inf, g), grads)
        params, opt_state, scaler, stepped = scaler.step(tx, opt_state, params, scaled_grads=grads)
        return (scaler, params, opt_state), stepped

    def control(carry, batch):
        params, opt_state = carry
        updates, opt_state = tx.update(jax.grad(mse)(params, *batch), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    (scaler, got, _), stepped = jax.lax.scan(scaled, (scaler, params, tx.init(params)), (x, y, bad))
    (expected, _), _ = jax.lax.scan(control, (params, tx.init(params)), (x[~bad], y[~bad]))
    for k in got:
        np.testing.assert_allclose(got[k], expected[k], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(stepped, ~bad)
    assert float(scaler.get_scale()) == 128.0 * 2.0**17 * 0.5**3


def test_torchs_own_order_scale_grad_unscale_clip_step_update_works():
    params, x, y = problem()
    tx, scaler = optax.sgd(0.1), jamp.GradScaler(init_scale=1024.0, growth_interval=1)
    scaled_grads = jax.grad(lambda p: scaler.scale(mse(p, x[0], y[0])))(params)
    grads = scaler.unscale(scaled_grads)
    clipped, _ = optax.clip_by_global_norm(0.1).update(grads, None)
    result = scaler.step(tx, tx.init(params), params, grads=clipped, update_scale=False)
    assert float(result.scaler.get_scale()) == 1024.0
    scaler = result.scaler.update(grads_finite=result.stepped)
    assert float(scaler.get_scale()) == 2048.0
    moved = optax.tree.norm(jax.tree.map(lambda p, q: p - q, params, result.params))
    np.testing.assert_allclose(moved, 0.1 * 0.1, rtol=1e-5)  # the true gradients were clipped, not the scaled ones


@pytest.mark.parametrize("bad_micro_batch", [None, 1])
def test_accumulation_has_one_scale_one_check_and_one_update_within_the_effective_batch(bad_micro_batch):
    params, x, y = problem(micro_batches=3)
    tx, scaler = optax.sgd(0.1), jamp.GradScaler(init_scale=1024.0, growth_interval=1)
    if bad_micro_batch is not None:
        x[bad_micro_batch, 0, 0] = np.inf

    @jax.jit
    def step(scaler, params, opt_state):
        def add(total, batch):
            scaled = jax.grad(lambda p: scaler.scale(mse(p, *batch) / 3))(params)
            return jax.tree.map(jnp.add, total, scaled), scaler.get_scale()

        total, scales = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), (x, y))
        return scaler.step(tx, opt_state, params, scaled_grads=total), scales

    result, scales = step(scaler, params, tx.init(params))
    np.testing.assert_array_equal(scales, [1024.0] * 3)
    assert int(result.scaler.stats.finite_steps + result.scaler.stats.overflow_steps) == 1
    if bad_micro_batch is None:
        grads = jax.grad(lambda p: mse(p, x.reshape(15, 4), y.reshape(15, 3)))(params)
        for k in params:
            np.testing.assert_allclose(result.params[k], params[k] - 0.1 * grads[k], rtol=1e-5, atol=1e-6)
        assert float(result.scaler.get_scale()) == 2048.0
    else:
        assert same(result.params, params)
        assert float(result.scaler.get_scale()) == 512.0


def test_a_gradient_penalty_differentiates_through_the_true_gradients_written_shortly_or_as_in_torch():
    params, x, y = problem()
    scaler = jamp.GradScaler(init_scale=2.0**10)

    def penalized(value_and_grad):
        def loss_fn(params):
            loss, grads = value_and_grad(mse)(params, x[0], y[0])
            return loss + optax.tree.norm(grads)

        return value_and_grad(loss_fn)(params)

    def as_in_torch(params):
        scaled = jax.grad(lambda p: scaler.scale(mse(p, x[0], y[0])))(params)
        grads = jax.tree.map(lambda g: g * scaler.get_inverse_scale(), scaled)
        return scaler.scale(mse(params, x[0], y[0]) + optax.tree.norm(grads))

    loss, grads = penalized(scaler.value_and_grad)
    expected_loss, expected = penalized(jax.value_and_grad)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    for got in (grads, scaler.unscale(jax.grad(as_in_torch)(params))):
        for k in expected:
            np.testing.assert_allclose(got[k], expected[k], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_several_models_losses_and_optimizers_share_one_scaler_and_each_skips_for_itself(bad):
    one, x, y = problem(0)
    two, _, _ = problem(1)
    txs = jamp.optimizers.sgd(0.1), jamp.optimizers.adam(0.1)
    scaler = jamp.GradScaler(init_scale=4.0, growth_interval=1)

    @jax.jit
    def step(scaler, models, opt_states):
        losses = [
            lambda one, two: mse(one, x[0], y[0]) + mse(two, x[0], 2 * y[0]),
            lambda one, two: 0.1 * mse(one, x[0], y[0]) + mse(two, x[0], -y[0]),
        ]
        # As loss.backward() twice: the gradients of both losses add up in both models.
        scaled = [jax.grad(lambda m, f=f: scaler.scale(f(*m)))(models) for f in losses]
        total = list(jax.tree.map(jnp.add, *scaled))
        if bad is not None:
            total[bad]["W"] = total[bad]["W"].at[1, 1].set(jnp.inf)
        steps = [
            scaler.step(tx, s, p, scaled_grads=g, update_scale=False)
            for tx, s, p, g in zip(txs, opt_states, models, total, strict=True)
        ]
        ok = steps[0].stepped & steps[1].stepped
        return [(r.params, r.opt_state, r.stepped) for r in steps], scaler.update(grads_finite=ok)

    models, opt_states = (one, two), tuple(tx.init(p) for tx, p in zip(txs, (one, two), strict=True))
    results, scaler = step(scaler, models, opt_states)
    for i, (params, opt_state, stepped) in enumerate(results):
        assert bool(stepped) == (i != bad)
        assert same(params, models[i]) == (i == bad)
        assert same(opt_state, opt_states[i]) == (i == bad)
    assert float(scaler.get_scale()) == (8.0 if bad is None else 2.0)


def test_one_scaler_per_loss_keeps_the_scales_apart():
    params, x, y = problem()
    tx, scalers = optax.sgd(0.1), [jamp.GradScaler(init_scale=8.0, growth_interval=1) for _ in range(2)]

    @jax.jit
    def step(scalers, params, opt_state):
        losses = [lambda p: mse(p, x[0], y[0]), lambda p: mse(p, x[0], y[0]) * jnp.float32(1e38)]
        grads = [s.value_and_grad(f)(params)[1] for s, f in zip(scalers, losses, strict=True)]
        overflows = [s.check_overflow(g) for s, g in zip(scalers, grads, strict=True)]
        total = jax.tree.map(jnp.add, *grads)  # inf in one is inf in the sum: the step is skipped
        result = scalers[0].step(tx, opt_state, params, grads=total, update_scale=False)
        scalers = [s.update(overflow=o) for s, o in zip(scalers, overflows, strict=True)]
        return result, scalers

    result, scalers = step(scalers, params, tx.init(params))
    assert not bool(result.stepped)
    assert same(result.params, params)
    assert [float(s.get_scale()) for s in scalers] == [16.0, 4.0]


def test_replicas_with_averaged_gradients_skip_and_back_off_together():
    params, x, y = problem(micro_batches=2)
    x[1, 0, 0] = np.inf
    tx, scaler = optax.sgd(0.1), jamp.GradScaler(init_scale=1024.0)

    def step(x, y):
        _, grads = scaler.value_and_grad(mse)(params, x, y)
        return scaler.step(tx, tx.init(params), params, grads=jax.lax.pmean(grads, "replica"))

    result = jax.vmap(step, axis_name="replica")(x, y)
    assert result.stepped.tolist() == [False, False]
    assert result.scaler.get_scale().tolist() == [512.0, 512.0]


def test_all_none_gradients_are_harmless():
    tx, scaler = optax.sgd(0.1), jamp.GradScaler(growth_interval=1)
    result = scaler.step(tx, tx.init({"w": None}), {"w": None}, grads={"w": None})
    assert bool(result.stepped)
    assert result.params == {"w": None}
