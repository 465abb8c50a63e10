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
    with pytest.raises(ValueError, match="changes a Variable"):
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


class Block(nn.Module):
    norm: str = "layer"

    @nn.compact
    def __call__(self, x, train=False):
        norm = nn.LayerNorm() if self.norm == "layer" else nn.BatchNorm(use_running_average=not train)
        y = norm(x)
        x = x + nn.MultiHeadDotProductAttention(2)(y, y, mask=nn.make_causal_mask(x[..., 0]))
        return nn.Dense(40)(x + nn.Dropout(0.1, deterministic=not train)(nn.RNN(nn.GRUCell(16))(x)))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, 16, rngs=rngs, decode=False)
        self.norm, self.head = nnx.BatchNorm(16, use_running_average=True, rngs=rngs), nnx.Linear(16, 40, rngs=rngs)

    def __call__(self, x):
        return self.head(x + self.attention(self.norm(x)))


SEQUENCES, TOKENS = normal(12, 6, 16, seed=2), Y[:12, None] + jnp.zeros((12, 6), jnp.int32)


@pytest.mark.promotes("flax.linen")
@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_rows_of_linen_that_do_not_interact(norm):
    model = Block(norm)
    variables = model.init(jax.random.key(0), SEQUENCES)
    fun = lambda variables, x, y: loss(lambda x: model.apply(variables, x), x, y)
    jax.eval_shape(jamp.chunked_sum(fun, 4), variables, SEQUENCES, TOKENS)
    rngs = {"dropout": jax.random.key(1)}
    train = lambda variables, x, y: loss(
        lambda x: model.apply(variables, x, True, rngs=rngs, mutable="batch_stats")[0], x, y
    )
    if norm == "layer":
        jax.eval_shape(jamp.chunked_sum(train, 4), variables, SEQUENCES, TOKENS)
    else:  # It normalizes by the statistics of the chunk.
        with pytest.raises(ValueError, match=r"divides by their number.*test_chunked_sum.*flax/linen/normalization"):
            jamp.chunked_sum(train, 4)(variables, SEQUENCES, TOKENS)


@pytest.mark.promotes("flax.nnx")
def test_rows_of_nnx_that_do_not_interact():
    model = NnxBlock(nnx.Rngs(0))
    assert_close(jamp.chunked_sum(loss, 4)(model, SEQUENCES, TOKENS), loss(model, SEQUENCES, TOKENS))


def test_rows_of_equinox_that_do_not_interact():
    attention = eqx.nn.MultiheadAttention(2, 16, key=jax.random.key(0))

    def checked(attention, row):
        row = eqx.error_if(row, jnp.any(jnp.isnan(row)), "NaN")
        return attention(row, row, row)

    def fun(attention, x):
        x = eqx.error_if(x, jnp.any(jnp.isnan(x)), "NaN")
        return jnp.sum(jax.vmap(checked, (None, 0))(attention, x) ** 2)

    jax.eval_shape(lambda x: jamp.chunked_sum(fun, 4)(attention, x), SEQUENCES)
