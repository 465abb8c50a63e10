"""A float32 head in a bfloat16 model of a library, by a rule."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxprs import normal

import jamp

X, Y = normal(16, 32).astype(jnp.bfloat16), jnp.asarray(np.random.default_rng(1).integers(0, 64, 16))
RULES = {"dot_general[head]": "float32"}


def loss_of(logits):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32)), Y[:, None], 1))


def check(loss, exact, *args):
    """The rule brings the loss and its gradients near those with an exact head."""
    low = jamp.autocast(loss, jnp.bfloat16, rules=RULES)
    options = {
        "xla_allow_excess_precision": False
    }  # else XLA leaves out roundings of 16-bit code, in each program others
    run = lambda fun: jax.jit(jax.value_and_grad(fun), compiler_options=options)(*args)
    found, before, wanted = map(run, (low, loss, exact))
    assert abs(found[0] - wanted[0]) < 0.05 * abs(before[0] - wanted[0])
    norm = lambda x, y: sum(
        jnp.sum((a.astype(jnp.float32) - b.astype(jnp.float32)) ** 2)
        for a, b in zip(*map(jax.tree.leaves, (x, y)), strict=True)
    )
    assert norm(found[1], wanted[1]) < 0.7 * norm(before[1], wanted[1])


def test_linen():
    class Model(nn.Module):
        head: object = jnp.bfloat16

        @nn.compact
        def __call__(self, x):
            x = nn.tanh(nn.Dense(32, dtype=jnp.bfloat16)(x))
            return nn.Dense(64, dtype=self.head, use_bias=False, name="head")(x)

    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), Model().init(jax.random.key(0), X))
    loss = lambda dtype: lambda params: loss_of(Model(head=dtype).apply(params, X))
    with jax.default_matmul_precision("highest"):
        check(loss(jnp.bfloat16), loss(jnp.float32), params)


@pytest.mark.promotes("flax.nnx")
def test_nnx():
    class Model(nnx.Module):
        def __init__(self, rngs):
            options = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": rngs}
            self.hidden, self.out = nnx.Linear(32, 32, **options), nnx.Linear(32, 64, use_bias=False, **options)

        def __call__(self, x):
            x = nnx.tanh(self.hidden(x))
            with jax.named_scope("head"):
                return self.out(x)

    graph, state = nnx.split(Model(nnx.Rngs(0)))

    def exact(state):
        model = nnx.merge(graph, state)
        hidden = nnx.tanh(model.hidden(X)).astype(jnp.float32)
        return loss_of(jnp.matmul(hidden, model.out.kernel[...].astype(jnp.float32), precision="highest"))

    check(lambda state: loss_of(nnx.merge(graph, state)(X)), exact, state)


def test_equinox():
    keys = jax.random.split(jax.random.key(0))
    layers = eqx.nn.Linear(32, 32, key=keys[0]), eqx.nn.Linear(32, 64, use_bias=False, key=keys[1])
    layers = jax.tree.map(lambda x: x.astype(jnp.bfloat16), layers)

    def loss(layers):
        x = jnp.tanh(jax.vmap(layers[0])(X))
        with jax.named_scope("head"):
            return loss_of(jax.vmap(layers[1])(x))

    def exact(layers):
        x = jnp.tanh(jax.vmap(layers[0])(X)).astype(jnp.float32)
        return loss_of(jnp.matmul(x, layers[1].weight.astype(jnp.float32).T, precision="highest"))

    check(loss, exact, layers)
