"""Whole train loops beside float32 controls and recorded runs of torch.amp.GradScaler."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from loss_scales import recorded
from trees import assert_close, assert_equal

import jamp

RECORDED = recorded("torch_numerics.json")
OPTIMIZERS = {"sgd_momentum": jamp.optimizers.sgd, "adamw": jamp.optimizers.adamw}


array = lambda numbers, shape: np.array(numbers, np.float32).reshape(shape)  # It reads "inf" and "nan" too.


def mse(params, x, y, dtype=jnp.float32):
    params, x = jamp.cast_floating((params, x), dtype)
    return jnp.mean(((x @ params["W"] + params["b"]).astype(jnp.float32) - y) ** 2)


half_mse = functools.partial(mse, dtype=jnp.float16)


def problem(batches=1):
    rng = np.random.default_rng(0)
    draw = lambda *shape: np.float32(rng.normal(size=shape))
    return {"W": draw(4, 3), "b": draw(3)}, draw(batches, 5, 4), draw(batches, 5, 3)


def fit(differentiate, tx, params, *batches):
    """The params, the state and the losses, where `differentiate(state)(params, *batch)` gives loss and gradients."""

    def step(carry, batch):
        loss, grads = differentiate(carry[1])(carry[0], *batch)
        updates, state = tx.update(grads, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), loss

    (params, state), losses = jax.jit(lambda carry: jax.lax.scan(step, carry, batches))((params, tx.init(params)))
    return params, state, losses


@pytest.mark.parametrize("run", RECORDED["numerics"], ids=lambda r: f"{r['optimizer']}-clip={r['clip_grad_norm']}")
def test_a_recorded_run_with_injected_inf_and_nan_agrees_step_by_step(run):
    hparams, limit = dict(run["hparams"]), run["clip_grad_norm"]
    tx = OPTIMIZERS[run["optimizer"]](hparams.pop("lr"), **hparams)

    @jax.jit
    def step(scaler, params, opt_state, x, y, fault):
        """In torch's own order: scale, grad, unscale, clip, step, update."""
        scaled = jax.grad(lambda params: scaler.scale(mse(params, x, y)))(params)
        grads = scaler.unscale(jax.tree.map(lambda g, f: jnp.where(f == 0, g, f), scaled, fault))
        # torch.nn.utils.clip_grad_norm_, its 1e-6 included
        factor = 1.0 if limit is None else jnp.minimum(limit / (optax.tree.norm(grads) + 1e-6), 1.0)
        clipped = jax.tree.map(lambda g: g * factor, grads)
        result = scaler.step(tx, opt_state, params, grads=clipped, update_scale=False)
        return result._replace(scaler=scaler.update(grads_finite=result.stepped)), mse(params, x, y), grads

    params = {"W": array(run["W0"], (4, 3)), "b": array(run["b0"], (3,))}
    scaler, opt_state, n = jamp.GradScaler(**run["config"]), tx.init(params), len(run["W"])
    for i, (x, y) in enumerate(zip(array(run["X"], (n, 5, 4)), array(run["Y"], (n, 5, 3)), strict=True)):
        fault = jax.tree.map(np.zeros_like, params)
        for leaf, index, kind in [run["inject"][str(i)]] if str(i) in run["inject"] else []:
            fault[leaf].flat[index] = float(kind)
        assert float(scaler.get_scale()) == run["scale_used"][i]
        (params, opt_state, scaler, stepped), loss, grads = step(scaler, params, opt_state, x, y, fault)
        state = not stepped, float(scaler.get_scale()), int(scaler.state.growth_count)
        assert state == (run["found_inf"][i], run["scale_after"][i], run["growth_tracker_after"][i])
        told = lambda name, i=i, params=params: {k: array(run[name + k][i], p.shape) for k, p in params.items()}
        assert_close(params, told(""), rtol=2e-6, atol=1e-7)
        assert_close(grads, told("unscaled_grad_"), rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(loss, run["loss_micro"][i][0], rtol=2e-6)


@pytest.mark.parametrize("run", RECORDED["two_optimizers"], ids=["interval-2", "alternating"])
def test_a_recorded_run_of_two_optimizers_under_one_scaler_agrees_step_by_step(run):
    tx = optax.sgd(1.0)

    @jax.jit
    def step(carry, bad):
        (a, state_a), (b, state_b), scaler = carry
        scaled = jax.grad(lambda p: scaler.scale(p[0] + p[1]))((a, b))
        scaled_a, scaled_b = jnp.where(bad, jnp.nan, jnp.stack(scaled))
        # One is unscaled by hand, the other in its step.
        *first, _, a = scaler.step(tx, state_a, a, grads=scaler.unscale(scaled_a), update_scale=False)
        *second, _, b = scaler.step(tx, state_b, b, scaled_grads=scaled_b, update_scale=False)
        return (tuple(first), tuple(second), scaler.update(grads_finite=a & b)), (a, b)

    start = jnp.float32(0), tx.init(jnp.float32(0))
    carry = start, start, jamp.GradScaler(**run["config"], min_scale=2.0**-8)
    for i, nonfinite in enumerate(run["nonfinite"]):
        carry, stepped = step(carry, np.array([digit == "1" for digit in nonfinite]))
        (a, _), (b, _), scaler = carry
        got = *map(int, stepped), float(a), float(b), float(scaler.get_scale()), int(scaler.state.growth_count)
        assert got == tuple(run[k][i] for k in ("stepped_a", "stepped_b", "pa", "pb", "scale", "growth_tracker"))


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_float16_loop_equals_the_control_and_ends_at_init_growth_backoff(micro_batches):
    """With accumulation too: one check and one update for each effective batch."""
    tiny = 2.0**-30  # It makes the gradients too small for float16, and the learning rate makes up for it.

    def accumulated(value_and_grad, params, *batches):  # the mean over micro-batches, in a scan
        add = lambda total, batch: (jax.tree.map(jnp.add, total, value_and_grad(params, *batch)), None)
        total, _ = jax.lax.scan(add, (jnp.float32(0.0), jax.tree.map(jnp.zeros_like, params)), batches)
        return jax.tree.map(lambda x: x / micro_batches, total)

    params, x, y = problem(12)
    scaled, inner = lambda loss: lambda *args: loss(*args) * tiny, optax.sgd(0.1 / tiny, momentum=0.9)
    config = jamp.DynamicLossScale(2.0**26, backoff_factor=0.25, growth_interval=1, max_scale=2.0**40)
    x, y = (v.reshape(12 // micro_batches, micro_batches, *v.shape[1:]) for v in (x, y))
    good = np.delete(np.arange(len(x)), [1, 3])
    by_loss = lambda loss: lambda _: functools.partial(accumulated, jax.value_and_grad(scaled(loss)))
    control, unscaled = (fit(by_loss(loss), inner, params, x[good], y[good]) for loss in (mse, half_mse))
    x[[1, 3], -1, 0, 0] = np.inf
    ours = lambda state: functools.partial(accumulated, jamp.value_and_grad(scaled(half_mse), state))
    after, state, losses = fit(ours, jamp.loss_scaled(inner, config), params, x, y)
    assert_close((after, losses[good] / tiny), (control[0], control[2] / tiny), rtol=1e-2)
    assert [int(n) for n in jamp.get_stats(state)[:2]] == [len(good), 2]
    assert jamp.get_loss_scale(state) == 2.0**26 * 2.0 ** len(good) * 0.25**2
    assert_equal(unscaled[0], params)  # Without loss scaling the same loop stands still.


def test_grad_of_grad_and_remat_equal_the_float32_control():
    penalised = lambda loss, grad: lambda *args: loss(*args) + optax.tree.norm(grad(loss)(*args), squared=True)
    state, (params, x, y) = jamp.StaticLossScale(2.0**10).init(), problem()
    ours = lambda loss: jamp.value_and_grad(penalised(loss, lambda f: jamp.grad(f, state)), state)
    control = jax.jit(jax.value_and_grad(penalised(mse, jax.grad)))(params, x[0], y[0])
    functions = ours(mse), ours(jax.checkpoint(half_mse)), jax.checkpoint(ours(half_mse))
    for fun, rtol in zip(functions, (1e-5, 2e-2, 2e-2), strict=True):
        assert_close(jax.jit(fun)(params, x[0], y[0]), control, rtol)


def test_the_step_that_grows_the_scale_unscales_with_the_old_scale():
    tx, w = jamp.loss_scaled(optax.identity(), jamp.DynamicLossScale(4.0, growth_interval=2)), jnp.float32(2.0)

    def step(state, c):
        loss, grads = jamp.value_and_grad(lambda w: w * c, state)(w)
        updates, state = tx.update(grads, state)
        return state, (loss, updates, jamp.get_loss_scale(state))

    factors = jnp.array([1.0, 3.0, 5.0, 7.0, 9.0])
    found = jax.jit(lambda state: jax.lax.scan(step, state, factors)[1])(tx.init(w))
    assert_equal(found, (2 * factors, factors, jnp.array([4.0, 8.0, 8.0, 16.0, 16.0])))


def test_float16_duplicates_that_overflow_when_summed_are_found():
    fun = jax.jit(lambda scale, i: jamp.grad(lambda t: jnp.sum(t[i].astype(jnp.float32)), scale)(table))
    table = jnp.ones((4, 2), jnp.float16)
    for scale, i, expected in ((2.0**15, [0, 1, 2], 1), (2.0**14, [0, 1, 1], 2), (2.0**15, [0, 1, 1], None)):
        grads = fun(jamp.StaticLossScale(scale).init(), np.array(i))  # Each cotangent is the scale.
        assert (grads[1].tolist() == [expected] * 2) if expected else not jamp.all_finite(grads)


def mlp(params, x):
    return jnp.tanh(x @ params["first"]) @ params["last"]


def weights(seed, *sizes):
    draw = np.random.default_rng(seed).normal
    shapes = {"first": sizes[:2], "last": sizes[1:]}
    return {name: np.float32(draw(size=shape) / np.sqrt(shape[0])) for name, shape in shapes.items()}


@pytest.mark.slow
@pytest.mark.promotes("optax: adam, apply_updates")
def test_the_two_optimizers_of_a_gan_skip_and_adapt_each_on_its_own():
    tx = jamp.loss_scaled(optax.adam(1e-2), jamp.DynamicLossScale(init_scale=2.0**10))
    generator, critic = weights(0, 12, 16, 12), weights(1, 12, 16, 1)
    softplus = lambda x: jax.nn.softplus(x.astype(jnp.float32)).mean()
    critic_loss = jamp.autocast(
        lambda d, g, real, z: softplus(-mlp(d, real)) + softplus(mlp(d, mlp(g, z))), jnp.float16
    )
    generator_loss = jamp.autocast(lambda g, d, z: softplus(-mlp(d, mlp(g, z))), jnp.float16)

    @jax.jit
    def step(g, d, state_g, state_d, real, z):
        updates, state_d = tx.update(jamp.grad(critic_loss, state_d)(d, g, real, z), state_d, d)
        d = optax.apply_updates(d, updates)
        updates, state_g = tx.update(jamp.grad(generator_loss, state_g)(g, d, z), state_g, g)
        return optax.apply_updates(g, updates), d, state_g, state_d

    rng = np.random.default_rng(2)
    real, z = np.float32(rng.normal(size=(32, 12)) + 1), np.float32(rng.normal(size=(32, 12)))
    state = generator, critic, tx.init(generator), tx.init(critic)
    g, d, state_g, state_d = step(*state, real * np.float32(np.inf), z)
    assert_equal(d, critic)
    assert (int(jamp.metrics(state_d)["overflow_steps"]), int(jamp.metrics(state_g)["overflow_steps"])) == (1, 0)
    assert float(jamp.get_loss_scale(state_d)) < float(jamp.get_loss_scale(state_g))
    assert not np.array_equal(g["first"], generator["first"])
    losses = []
    for _ in range(20):
        g, d, state_g, state_d = step(g, d, state_g, state_d, real, z)
        losses.append(float(critic_loss(d, g, real, z)))
    assert np.isfinite(losses).all()
    assert int(jamp.metrics(state_d)["finite_steps"]) == 20


@pytest.mark.promotes("optax: adam, apply_updates")
def test_adapters_are_trained_and_the_frozen_weights_stay_in_16_bit():
    frozen = jamp.cast_floating(weights(0, 16, 32, 1), jnp.bfloat16)
    draw = lambda *shape: np.float32(np.random.default_rng(3).normal(size=shape))
    lora = {"down": draw(16, 2) / 4, "up": np.zeros((2, 32), np.float32)}

    def loss_fn(lora, frozen, x, y):
        params = jamp.cast_floating(frozen, jnp.float32)
        merged = params | {"first": params["first"] + lora["down"] @ lora["up"]}
        return jnp.mean((mlp(merged, x)[:, 0] - y) ** 2)

    x, y = draw(64, 16), draw(64)
    tx = jamp.loss_scaled(optax.adam(1e-2), jamp.DynamicLossScale(init_scale=2.0**10))

    def run(loss_fn):
        differentiate = lambda state: lambda lora, _: jamp.value_and_grad(loss_fn, state)(lora, frozen, x, y)
        return fit(differentiate, tx, lora, np.arange(40))

    (new, _, losses), (_, _, control) = run(jamp.autocast(loss_fn, jnp.float16)), run(loss_fn)
    assert losses[-1] < 0.9 * losses[0]
    np.testing.assert_allclose(losses, control, rtol=2e-2)
    assert {leaf.dtype for leaf in jax.tree.leaves(new)} == {np.dtype(np.float32)}


@pytest.mark.promotes("optax: adam, apply_updates")
def test_a_run_with_an_average_and_evaluations_in_between_is_the_run_without_them():
    params, x, y = problem(batches=6)
    tx = jamp.loss_scaled(optax.adamw(1e-2), jamp.DynamicLossScale(init_scale=2.0**10))
    x[3] = np.inf
    loss_fn = jamp.autocast(mse, jnp.float16)

    @jax.jit
    def step(params, state, ema, x, y):
        updates, state = tx.update(jamp.grad(loss_fn, state)(params, x, y), state, params)
        params = optax.apply_updates(params, updates)
        return params, state, optax.incremental_update(params, ema, jnp.where(jamp.get_grads_finite(state), 0.1, 0.0))

    evaluate = jax.jit(loss_fn)  # of the average, in the dtype of the training
    one = another = params, tx.init(params), params
    for i in range(6):
        before, one, another = one, step(*one, x[i], y[i]), step(*another, x[i], y[i])
        assert np.isfinite(evaluate(one[2], x[0], y[0]))
        if i == 3:
            assert_equal(one[2], before[2])
    assert_equal(one, another)
    assert int(jamp.metrics(one[1])["overflow_steps"]) == 1
