"""autocast on models of linen, nnx and equinox, whose code it does not change."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxprs import products

import jamp

F16, F32 = jnp.dtype(jnp.float16), jnp.dtype(jnp.float32)


def assert_close(mine, plain, tolerance=5e-3):
    """Two trees agree by the norm of all their leaves together: some gradients are zero but for rounding."""
    assert [x.dtype for x in jax.tree.leaves(mine)] == [x.dtype for x in jax.tree.leaves(plain)]
    mine, plain = (jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (mine, plain))
    assert jnp.linalg.norm(mine - plain) <= tolerance * jnp.linalg.norm(plain)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(8, (3, 3))(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.relu(x).reshape(x.shape[0], -1, 8)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
        x = nn.Dropout(0.5, deterministic=not train)(nn.gelu(nn.Dense(16)(x)))
        return nn.Dense(3)(x.mean(1))


def test_a_linen_model_with_its_statistics_and_dropout():
    model, x = LinenNet(), jax.random.normal(jax.random.key(0), (4, 4, 4, 3))
    variables = model.init(jax.random.key(1), x, train=False)

    def loss(params, stats, x):
        variables = {"params": params, "batch_stats": stats}
        out, new = model.apply(variables, x, train=True, mutable=["batch_stats"], rngs={"dropout": jax.random.key(2)})
        return jnp.mean(out**2), new

    args = variables["params"], variables["batch_stats"], x
    assert products(jax.grad(jamp.autocast(loss), has_aux=True), *args) == {F16}
    mine, plain = (jax.jit(jax.value_and_grad(f, has_aux=True))(*args) for f in (jamp.autocast(loss), loss))
    assert_close(mine, plain, 1e-2)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.again = self.drop
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = self.drop(nnx.relu(self.norm(self.conv(x))))
        return self.head(self.again(x).mean((1, 2)))


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit])
def test_an_nnx_model_gets_its_statistics_and_its_dropout_moves_on(wrap):
    x = jax.random.normal(jax.random.key(0), (4, 4, 4, 3))
    loss = lambda model, x: jnp.mean(model(x) ** 2)
    results = []
    for fun in (jamp.autocast(loss), loss):
        model = NnxNet(nnx.Rngs(0))
        step = wrap(nnx.value_and_grad(fun))
        losses = [step(model, x) for _ in range(2)]
        results.append((losses, model.norm.mean[...], model.norm.var[...], nnx.state(model, nnx.RngCount)))
        assert losses[0][0] != losses[1][0]  # Another dropout mask.
    assert_close(results[0][:3], results[1][:3], 2e-2)
    assert jax.tree.leaves(results[0][3]) == jax.tree.leaves(results[1][3])
    assert not jnp.allclose(results[0][1], 0)


def test_an_nnx_model_runs_its_products_in_16_bit():
    model, x = NnxNet(nnx.Rngs(0)), jnp.ones((4, 4, 4, 3))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    model_loss = jamp.autocast(lambda model, x: jnp.mean(model(x) ** 2))
    loss = lambda params: model_loss(nnx.merge(graph, params, rest, copy=True), x)
    assert products(jax.grad(loss), params) == {F16}


def test_an_equinox_model_with_functions_among_its_leaves():
    model = eqx.nn.MLP(4, 2, 8, 2, activation=jax.nn.relu, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (16, 4))
    loss = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
    mine, plain = (eqx.filter_jit(eqx.filter_value_and_grad(f))(model, x) for f in (jamp.autocast(loss), loss))
    assert_close(mine[0], plain[0])
    assert_close(eqx.filter(mine[1], eqx.is_array), eqx.filter(plain[1], eqx.is_array))
    params, static = eqx.partition(model, eqx.is_array)
    fun = lambda p: jamp.autocast(loss)(eqx.combine(p, static), x)
    assert products(jax.grad(fun), params) == {F16}


def test_full_precision_on_the_method_of_a_module():
    class Head(eqx.Module):
        linear: eqx.nn.Linear

        @jamp.full_precision
        def __call__(self, x):
            return self.linear(x)

    head = Head(eqx.nn.Linear(4, 2, key=jax.random.key(0)))
    assert products(jamp.autocast(lambda x: head(x)), jnp.ones(4)) == {F32}
    np.testing.assert_array_equal(jamp.autocast(lambda h, x: h(x))(head, jnp.ones(4)), head(jnp.ones(4)))
