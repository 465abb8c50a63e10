"""The benchmarks compare the same step: every library's recipe steps as plain Optax does, and skips an overflow."""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

sys.path.append(str(Path(__file__).parents[2]))  # at the end: an installed jamp comes first

from benchmarks import peers, train, whole_step

TX = optax.sgd(1e-3, momentum=0.9)  # not Adam, which does not see a forgotten division by the loss scale
PARAMS = {"b": jnp.array([0.5, -1.0]), "w": jnp.array([[1.0, 2.0], [3.0, -4.0]])}
GRADS = {"b": jnp.array([0.1, -0.3]), "w": jnp.array([[1.0, -2.0], [1e-3, 0.5]])}
LAYERS = [{"w": jnp.full((4, 3), 0.5).at[0, 1].set(1.0), "b": jnp.zeros(3)}]
X, LABELS = train.images(8, (4,))


def run(recipe, *factors):
    """The parameters, flat, after a step on the gradients times each of some factors."""
    carry = recipe.carry
    for factor in factors:
        carry = recipe.step(carry, jax.tree.map(lambda g, f=factor: g * recipe.scale * f, GRADS))
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(recipe.params(carry))])


@functools.cache
def compiled(name):
    recipe = peers.JAX[name](TX, PARAMS)
    return recipe._replace(step=jax.jit(recipe.step))


@pytest.mark.parametrize("name", peers.installed(peers.JAX))
def test_every_step_is_plain_optax_s_and_skips_an_overflow(name):
    plain, recipe = compiled("optax"), compiled(name)
    np.testing.assert_allclose(run(recipe, 1.0, 0.5), run(plain, 1.0, 0.5), rtol=1e-6)
    if name in peers.UNCHECKED:
        assert not np.isfinite(run(recipe, 1.0, np.inf)).any()
        return
    np.testing.assert_array_equal(run(recipe, 1.0, np.inf), run(recipe, 1.0))
    halved = 1.0 if recipe.scale == 1.0 else 0.5  # the scale, and so the gradients of the next loss
    np.testing.assert_allclose(run(recipe, 1.0, np.inf, halved), run(plain, 1.0, 1.0), rtol=1e-6)


@pytest.mark.parametrize("name", whole_step.installed())
def test_every_whole_step_is_plain_optax_s_and_skips_an_overflow(name):
    step, carry = whole_step.RECIPES[name](train.mlp_loss, TX, LAYERS)
    step = jax.jit(step)
    carry = step(carry, X, LABELS)
    grads = jax.grad(train.mlp_loss)(LAYERS, X, LABELS)
    updates, _ = TX.update(grads, TX.init(LAYERS), LAYERS)
    same = functools.partial(jax.tree.map, functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6))
    same(carry[0], optax.apply_updates(LAYERS, updates))
    if name != "optax":
        jax.tree.map(np.testing.assert_array_equal, step(carry, X * jnp.inf, LABELS)[0], carry[0])
