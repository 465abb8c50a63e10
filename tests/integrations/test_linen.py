"""jamp.linen.TrainState: Flax's, in which nothing moves on an overflow."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.core import freeze
from flax.training import train_state

import jamp
import jamp.linen

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
INF = np.full_like(X, np.inf)


class Net(nn.Module):
    dtype: Any = jnp.float16

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, dtype=self.dtype)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
        return nn.Dense(3, dtype=self.dtype)(x).astype(jnp.float32)


class WithFields(jamp.linen.TrainState):
    batch_stats: Any
    ema: Any
    key: Any


VARIABLES = Net().init(jax.random.key(0), X)
ADAM = optax.adam(optax.linear_schedule(1e-2, 1e-3, 10))


@functools.cache  # one optimizer and so one compilation for all that ask for the same state
def created(cls=jamp.linen.TrainState, tx=ADAM, model=Net(), **kwargs):
    params, stats = VARIABLES["params"], VARIABLES["batch_stats"]
    collections = {"batch_stats": stats, "ema": params, "key": jax.random.key(1)}
    return cls.create(apply_fn=model.apply, params=params, tx=tx, **collections | kwargs)


def create(*args, **kwargs):
    return jax.tree.map(jnp.copy, created(*args, **kwargs))


def loss_fn(params, state, x):
    out, updates = state.apply_fn({"params": params, "batch_stats": state.batch_stats}, x, mutable=["batch_stats"])
    return jnp.mean(out**2), updates["batch_stats"]


def train_step(state, x, wrap=lambda f: f):
    (loss, batch_stats), grads = state.value_and_grad(wrap(loss_fn), has_aux=True)(state.params, state, x)
    ema = optax.incremental_update(state.params, state.ema, 0.1)
    key = jax.random.split(state.key)[0]
    return state.apply_gradients(grads=grads, batch_stats=batch_stats, ema=ema, key=key), loss


STEP = jax.jit(train_step)


def numbers(tree):
    is_key = lambda x: jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key)
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(tree)]


def same(a, b):
    """Bit for bit, dtypes included, for each leaf."""
    return [x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in zip(numbers(a), numbers(b), strict=True)]


def what_trains(state):
    return state.params, state.opt_state.inner_state, state.step, state.batch_stats, state.ema, state.key


@pytest.mark.parametrize("cls", [jamp.linen.TrainState, WithFields])
def test_on_an_overflow_nothing_moves(cls):
    state, _ = STEP(create(cls), X)
    skipped, loss = STEP(state, INF)
    assert np.isnan(loss)
    assert all(same(what_trains(skipped), what_trains(state)))
    assert jamp.get_loss_scale(skipped) == jamp.get_loss_scale(state) / 2
    applied, _ = STEP(skipped, X)
    assert not any(all(same(*parts)) for parts in zip(what_trains(applied), what_trains(skipped), strict=True))
    assert int(applied.step) == 2


def test_float16_trains_as_float32_does():
    run = jax.jit(lambda state: jax.lax.scan(lambda state, _: train_step(state, X), state, length=20)[1])
    half = run(create(loss_scale=jamp.DynamicLossScale(init_scale=256.0)))
    np.testing.assert_allclose(half, run(create(model=Net(jnp.float32))), rtol=2e-2)
    assert half[-1] < half[0] / 2


def test_step_counts_applied_steps_and_that_of_flaxs_own_state_with_a_loss_scaled_optimizer_counts_skips():
    theirs = train_state.TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=jamp.loss_scaled(ADAM))
    ours = jamp.linen.TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=ADAM)
    for target in (1.0, jnp.inf, 2.0):
        loss = lambda params, target: jnp.sum((params["w"] * target) ** 2)
        theirs = theirs.apply_gradients(grads=jamp.grad(loss, theirs)(theirs.params, target))
        ours = ours.apply_gradients(grads=jamp.grad(loss, ours)(ours.params, target))
    assert all(same((theirs.params, theirs.opt_state), (ours.params, ours.opt_state)))
    assert (int(theirs.step), int(ours.step)) == (3, 2)


@pytest.mark.parametrize(
    "tx", [jamp.loss_scaled(ADAM), jamp.mixed_precision(ADAM), optax.chain(jamp.loss_scaled(ADAM))]
)
def test_an_already_scaled_optimizer_is_an_error_that_says_two_scalers(tx):
    with pytest.raises(ValueError, match=r"Two scalers: .* the plain optimizer"):
        create(tx=tx)


def test_jamps_functions_read_and_set_a_train_state():
    state, _ = STEP(create(), INF)
    metrics = state.metrics()
    assert metrics.keys() == jamp.metrics(state).keys()
    assert (metrics["loss_scale"], metrics["overflow_steps"], metrics["grads_finite"]) == (2**15, 1, False)
    assert jamp.get_stats(state).overflow_steps == 1
    assert not jamp.get_grads_finite(state)
    assert jamp.get_loss_scale(jamp.set_loss_scale(state, 8.0)) == 8
    with pytest.raises(jamp.LossScaleError, match="1 steps in a row"):
        jamp.check_health(state, max_consecutive_overflows=0)


def test_under_jit_with_donation_there_is_one_compilation_even_with_the_parameters_as_ema():
    traces = []
    step = jax.jit(lambda state, x: (traces.append(1), train_step(state, x))[1], donate_argnums=0)
    state = create()
    for x in (X, INF, X):
        state, _ = step(state, x)
    assert (len(traces), int(state.step)) == (1, 2)
    params = jax.tree.map(jnp.copy, VARIABLES["params"])
    state = jamp.linen.TrainState.create(apply_fn=None, params=params, tx=ADAM, ema=params)
    jax.jit(lambda state: state.apply_gradients(grads=state.params), donate_argnums=0)(state)


def test_scan_is_the_loop_and_eval_shape_keeps_every_type():
    batches = np.stack([X, INF, X, X])
    state = looped = create()
    for x in batches:
        looped, _ = STEP(looped, x)
    scanned, _ = jax.jit(lambda state: jax.lax.scan(train_step, state, batches))(state)
    np.testing.assert_array_equal(scanned.step, looped.step)
    for a, b in zip(numbers(what_trains(scanned)), numbers(what_trains(looped)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    abstract = jax.eval_shape(train_step, state, X)[0]
    assert jax.tree.map(jax.typeof, abstract) == jax.tree.map(jax.typeof, state)


def test_multi_steps_inside_accumulates_without_the_overflowed_micro_batch():
    state = create(tx=optax.MultiSteps(optax.sgd(0.1), 2))
    after = [state := STEP(state, x)[0] for x in (X, INF, X)]
    assert all(same(after[1].params, create().params))
    assert not any(same(after[2].params, create().params))
    assert (int(state.step), int(state.opt_state.inner_state.gradient_step)) == (2, 1)


def test_flax_serialization_restores_a_state_that_goes_on_bit_for_bit():
    state = STEP(STEP(create(), X)[0], INF)[0]
    plain = lambda state: state.replace(key=jax.random.key_data(state.key))  # flax serialises no typed keys
    restored = serialization.from_bytes(plain(create()), serialization.to_bytes(plain(state)))
    restored = restored.replace(key=jax.random.wrap_key_data(restored.key))
    assert all(same(STEP(restored, X), STEP(state, X)))


def test_replicas_under_an_axis_name_skip_together():
    def step(state, x):
        (_, stats), grads = state.value_and_grad(loss_fn, has_aux=True)(state.params, state, x)
        return state.apply_gradients(grads=grads, batch_stats=stats)

    batches, state = np.stack([X, INF]), create(axis_name="replicas")
    out = jax.jit(jax.vmap(step, in_axes=(None, 0), axis_name="replicas"))(state, batches)
    assert out.step.tolist() == [0, 0]
    assert all(same(jax.tree.map(lambda x: x[0], out.batch_stats), state.batch_stats))


def test_a_skip_costs_nothing_on_the_parameters_beyond_that_of_loss_scaled():
    params = {"w": jnp.ones((256, 256)), "b": jnp.ones(256)}
    tx, stats = jamp.loss_scaled(ADAM), {"mean": jnp.zeros(16)}
    state = jamp.linen.TrainState.create(apply_fn=None, params=params, tx=ADAM, batch_stats=stats)

    def bare(params, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    mine = jax.jit(lambda state, grads, stats: state.apply_gradients(grads=grads, batch_stats=stats))
    cost = lambda f, *args: f.lower(*args).compile().cost_analysis()["bytes accessed"]
    extra = cost(mine, state, params, stats) - cost(jax.jit(bare), params, tx.init(params), params)
    assert 0 <= extra <= 6 * stats["mean"].nbytes  # two statistics read, one written; the parameters are 263168 bytes


def test_without_a_loss_scale_the_step_is_flaxs():
    theirs = train_state.TrainState.create(apply_fn=None, params={"w": jnp.ones(8)}, tx=ADAM)
    ours = jamp.linen.TrainState.create(
        apply_fn=None, params={"w": jnp.ones(8)}, tx=ADAM, loss_scale=jamp.NoOpLossScale(), seen=jnp.zeros(8)
    )
    step = jax.jit(lambda state, grads, new: state.apply_gradients(grads=grads, **new))
    mine, plain = (
        step.lower(ours, ours.params, {"seen": jnp.ones(8)}).compile(),
        step.lower(theirs, theirs.params, {}).compile(),
    )
    assert mine.as_text().count(" select(") == plain.as_text().count(" select(") + 1  # the saturating `step`
    assert mine.cost_analysis()["flops"] - plain.cost_analysis()["flops"] <= 2


@pytest.mark.parametrize("wrap", [jamp.autocast, lambda f: lambda p, *a: f(POLICY.cast_to_compute(p), *a)])
def test_autocast_and_policy_combine_with_a_train_state(wrap):
    state = create(model=Net(None))
    step = jax.jit(lambda state: train_step(state, X, wrap)[0]).trace(state)
    assert "f16[" in str(step.jaxpr)
    state = step.lower().compile()(state)
    assert int(state.step) == 1
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}


POLICY = jamp.get_policy("params=float32,compute=float16,output=float32")


def test_extra_args_reach_the_optimizer_and_replace_knows_collections():
    tx = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    state = create(tx=tx)
    for _ in range(4):
        state = state.apply_gradients(grads=state.params, extra_args={"value": 1.0})
    assert optax.tree.get(state.opt_state, "scale") < 1
    state = state.apply_gradients(grads=state.params, extra_args={"value": 1.0, "grads_finite": jnp.bool_(False)})
    assert int(state.step) == 4
    assert state.replace(batch_stats=7, step=5).batch_stats == 7


def test_mistakes_with_collections_are_named():
    state = create()
    with pytest.raises(TypeError, match="'batchstats' is no field and no collection"):
        state.apply_gradients(grads=state.params, batchstats=state.batch_stats)
    for wrong in (
        {"batch_stats": state.batch_stats},
        freeze(state.batch_stats),
        jax.tree.map(jnp.int32, state.batch_stats),
    ):
        with pytest.raises(ValueError, match=r"batch_stats\S* changed from .* to .*updates\['batch_stats'\]"):
            state.apply_gradients(grads=state.params, batch_stats=wrong)
    with pytest.raises(ValueError, match=r"attribute 'metrics' of its own"):
        create(metrics=0)
    with pytest.raises(AttributeError, match="no field, method or collection 'missing'"):
        _ = state.missing
