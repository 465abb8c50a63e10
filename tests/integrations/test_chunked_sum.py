"""`chunked_sum` of modules: their parameters are shared by all chunks."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jaxprs import normal

import jamp

X, Y = normal(48, 16), jnp.asarray(np.random.default_rng(1).integers(0, 40, 48))


def loss(model, x, y):
    logits = model(x).astype(jnp.float32)
    return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, y))


def assert_close(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for x, y in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.promotes("flax.nnx")
def test_nnx():
    model = nnx.Linear(16, 40, rngs=nnx.Rngs(0))
    grad = lambda fun: nnx.jit(nnx.grad(lambda model, x: fun(model, x, Y), argnums=(0, 1)))(model, X)
    assert_close(grad(jamp.chunked_sum(loss, 16)), grad(loss))
    low = jamp.autocast(jamp.chunked_sum(loss, 16), jnp.bfloat16)
    for x, y in zip(*map(jax.tree.leaves, (grad(low), grad(loss))), strict=True):
        assert jnp.linalg.norm(x - y) < 0.02 * jnp.linalg.norm(y)


@pytest.mark.promotes("flax.nnx")
def test_a_module_that_changes_is_refused():
    """Each chunk would start from the old state."""
    model = nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nnx.Linear(16, 40, rngs=nnx.Rngs(1)))
    with pytest.raises(ValueError, match="changes a Variable of its params"):
        jamp.chunked_sum(loss, 16)(model, X, Y)
    model.eval()
    assert_close(jamp.chunked_sum(loss, 16)(model, X, Y), loss(model, X, Y))


def test_equinox():
    head = eqx.nn.Linear(16, 40, key=jax.random.key(0))
    fun = lambda head, x, y: loss(jax.vmap(head), x, y)
    grad = lambda fun: eqx.filter_jit(eqx.filter_grad(fun))(head, X, Y)
    assert_close(grad(jamp.chunked_sum(fun, 16)), grad(fun))


def test_linen_with_tied_embeddings():
    embed = nn.Embed(40, 16)
    params = embed.init(jax.random.key(0), Y)

    def of_head(params, x, y):
        return loss(lambda x: embed.apply(params, x, method="attend"), x, y)

    def total(head):
        return lambda params: head(params, jnp.tanh(embed.apply(params, jnp.roll(Y, 1))), Y)

    assert_close(jax.grad(total(jamp.chunked_sum(of_head, 16)))(params), jax.grad(total(of_head))(params))
