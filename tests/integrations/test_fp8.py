"""Flax's fp8 layers under a loss scale: their state is replaced, never unscaled, and skipped with the rest."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.core import freeze
from flax.training.dynamic_scale import DynamicScale

import jamp
import jamp.linen
from jamp._tree import OVERWRITE_WITH_GRADIENT as OWG

FP8 = {"dot_general_cls": nn.Fp8DirectDotGeneralOp}
MODEL = nn.Sequential([nn.Dense(16, **FP8), nn.relu, nn.Dense(4, **FP8)])
X = jax.random.normal(jax.random.key(1), (8, 16))
VARIABLES = MODEL.init(jax.random.key(0), X)
BAD = X * jnp.nan


def create(loss_scale, variables=VARIABLES):
    tx = optax.adam(1e-2)
    return jamp.linen.TrainState.create(apply_fn=MODEL.apply, params=variables, tx=tx, loss_scale=loss_scale)


def loss_fn(params, x):
    return jnp.sum(MODEL.apply(params, x) ** 2)


@jax.jit
def train_step(state, x):
    return state.apply_gradients(grads=state.value_and_grad(loss_fn)(state.params, x)[1])


def run(state, batches):
    """The state after some batches, and the loss scale that each was computed under."""
    scales = []
    for x in batches:
        scales.append(float(jamp.get_loss_scale(state)))
        state = train_step(state, x)
    return state, scales


def leaves(params):
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(params)}


LOSS_SCALES = [
    jamp.DynamicLossScale(init_scale=2.0**6, growth_interval=3),
    jamp.AdaptiveLossScale(init_scale=2.0**6, windows=(3, 10), initial_window=3),
]


@pytest.mark.parametrize("loss_scale", LOSS_SCALES)
def test_amax_histories_and_scales_are_those_without_loss_scaling_but_for_the_output_gradients(loss_scale):
    good = [X, X * 0.9, X * 0.8, X * 0.7, X * 0.6]
    plain, _ = run(create(jamp.NoOpLossScale()), good)
    saved, _ = run(create(loss_scale), [good[0], BAD])
    resumed = serialization.from_bytes(create(loss_scale), serialization.to_bytes(saved))
    (scaled, scales), (uninterrupted, _) = run(resumed, good[1:]), run(saved, good[1:])
    assert all(map(np.array_equal, leaves(scaled.params).values(), leaves(uninterrupted.params).values()))
    assert (int(scaled.step), scales) == (5, [2.0**5, 2.0**5, 2.0**5, 2.0**6])  # the skip moved the scale alone
    ours = leaves(scaled.params)
    for path, expected in leaves(plain.params).items():
        if "output_grad_amax_history" in path:  # each amax as many times larger as its loss was
            in_order = lambda history: np.roll(history, -1)[-5:]  # the newest is kept first, the others behind it
            np.testing.assert_allclose(in_order(ours[path]), in_order(expected) * [2.0**6, *scales], rtol=1e-4)
        elif "output_grad_scale" in path:  # the history's largest amax is the first
            np.testing.assert_allclose(ours[path], expected * 2.0**6, rtol=1e-6)
        else:
            np.testing.assert_allclose(ours[path], expected, rtol=1e-5, atol=1e-6)


def test_flax_dynamic_scale_divides_fp8_state_by_the_loss_scale_but_jamp_does_not():
    true = leaves(jax.grad(loss_fn)(VARIABLES, X)[OWG])
    theirs = leaves(DynamicScale(scale=2.0**6).value_and_grad(loss_fn)(VARIABLES, X).grad[OWG])
    ours = leaves(jamp.grad(loss_fn, jamp.StaticLossScale(2.0**6).init())(VARIABLES, X)[OWG])
    for path in (path for path in true if "output_grad" not in path):
        np.testing.assert_array_equal(ours[path], true[path])
        np.testing.assert_array_equal(theirs[path], true[path] / 2.0**6)


@pytest.mark.parametrize("kind", [dict, freeze])
def test_fp8_state_is_replaced_and_skipped_and_has_no_optimizer_state(kind):
    state = create(jamp.DynamicLossScale(), kind(VARIABLES))
    assert OWG not in str(jax.tree.structure(state.opt_state))
    grads = jax.tree.map(lambda x: x + 1, state.params)
    new = state.apply_gradients(grads=grads)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert all(map(np.array_equal, jax.tree.leaves(new.params[OWG]), jax.tree.leaves(grads[OWG])))
    skipped = state.apply_gradients(grads=grads, extra_args={"grads_finite": jnp.bool_(False)})
    assert all(map(np.array_equal, jax.tree.leaves(skipped.params), jax.tree.leaves(state.params)))


def test_fp8_layers_clip_an_infinite_batch_out_of_sight_but_the_histories_show_it():
    grads = jax.grad(loss_fn)(VARIABLES, X * jnp.inf)
    assert bool(jamp.all_finite(grads))
    assert not bool(jamp.all_finite(grads[OWG]))
