"""A program does not depend on the platform of the process that traces it, only on the one it is lowered for."""

import re
from unittest import mock

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jaxprs import normal

import jamp

PLATFORMS = ["cpu", "cuda", "tpu"]
W, X, IMAGES, FILTERS = normal(64, 64), normal(64, 64, seed=1), normal(2, 3, 16, 16), normal(3, 3, 3, 3)


def dense(w, x):
    return jnp.sum(jax.nn.softmax(jax.nn.gelu(x @ w) @ w) @ w)


def convolved(w, x):
    for _ in range(3):
        x = jax.nn.gelu(lax.conv(x, w, (1, 1), "SAME"))
    return jnp.sum(lax.conv(x, w, (1, 1), "SAME"))


def stepped(tx):
    def step(w, x):
        state = tx.init(w)
        loss_fn = lambda w, x: dense(w.astype(jnp.float32), x)
        loss, grads = jamp.value_and_grad(jamp.autocast(loss_fn, jnp.float16), state)(w, x)
        return optax.apply_updates(w, tx.update(grads, state, w)[0]), loss

    return step


PROGRAMS = {
    "autocast": (jax.grad(jamp.autocast(dense, jnp.bfloat16)), W, X),
    "recompute=False": (jax.grad(jamp.autocast(dense, jnp.float16, recompute=False)), W, X),
    "convolutions": (jax.grad(jamp.autocast(convolved, jnp.float16)), FILTERS, IMAGES),
    "in a loop": (
        jax.grad(
            lambda w, x: lax.scan(lambda c, _: (c * jamp.autocast(dense, jnp.float16)(w, x), None), 1.0, None, 2)[0]
        ),
        W,
        X,
    ),
    "Float8": (jax.grad(jamp.autocast(dense, jamp.Float8(min_size=8))), W, X),
    "full_precision": (jamp.autocast(jamp.full_precision(dense), jnp.float16), W, X),
    "loss_scaled": (stepped(jamp.loss_scaled(optax.adam(0.1))), W, X),
    "master_params": (stepped(jamp.loss_scaled(jamp.master_params(optax.adam(0.1)))), W, X),
    "stochastic_rounding": (
        stepped(jamp.loss_scaled(jamp.stochastic_rounding(optax.adam(0.1)))),
        W.astype(jnp.bfloat16),
        X,
    ),
}


@pytest.mark.slow_after(2)
@pytest.mark.promotes("optax.adam its count")
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (i % 3 > 0)) for i, x in enumerate(PROGRAMS)]
)
def test_every_transformation_is_the_same_program_whatever_platform_traces_it(name):
    fun, *args = PROGRAMS[name]
    jaxprs, texts = set(), {}
    for platform in ("cpu", "gpu", "tpu"):
        with mock.patch("jax.default_backend", return_value=platform):
            jax.clear_caches()
            traced = jax.jit(fun).trace(*args)
            jaxprs.add(re.sub("0x[0-9a-f]+", "", str(traced.jaxpr)))
    assert len(jaxprs) == 1
    for platforms in (*[(platform,) for platform in PLATFORMS], tuple(PLATFORMS)):
        texts[platforms] = traced.lower(lowering_platforms=platforms).as_text()
    if name == "convolutions":  # XLA:TPU gets no barrier
        barriers = [texts[platform,].count("optimization_barrier") > 0 for platform in PLATFORMS]
        assert barriers == [True, True, False]
