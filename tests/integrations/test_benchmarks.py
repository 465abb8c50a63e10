"""The benchmarks: every library's recipe steps as plain Optax does; the page says what the results say."""

import functools
import json
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trees import assert_close, bits

sys.path.append(str(Path(__file__).parents[2]))  # at the end: an installed jamp comes first

from benchmarks import accuracy_report, peers, train, whole_step

TX = optax.sgd(1e-3, momentum=0.9)  # not Adam, which does not see a forgotten division by the loss scale
PARAMS = {"b": jnp.array([0.5, -1.0]), "w": jnp.array([[1.0, 2.0], [3.0, -4.0]])}
GRADS = {"b": np.float32([0.1, -0.3]), "w": np.float32([[1.0, -2.0], [1e-3, 0.5]])}
LAYERS = [{"w": jnp.full((4, 3), 0.5).at[0, 1].set(1.0), "b": jnp.zeros(3)}]
X, LABELS = train.images(8, (4,))
RESULTS = Path(__file__).parents[2] / "docs" / "benchmarks" / "accuracy.json"


def run(recipe, *factors):
    """The parameters, flat, after a step on the gradients times each of some factors."""
    times = lambda factor: jax.tree.map(lambda g: g * np.float32(recipe.scale * factor), GRADS)
    params = recipe.params(functools.reduce(recipe.step, map(times, factors), recipe.carry))
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(params)])


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
    updates, _ = TX.update(jax.jit(jax.grad(train.mlp_loss))(LAYERS, X, LABELS), TX.init(LAYERS), LAYERS)
    assert_close(carry[0], optax.apply_updates(LAYERS, updates), rtol=0, atol=1e-6)
    if name != "optax":
        assert bits(step(carry, X * np.float32(np.inf), LABELS)[0]) == bits(carry[0])


def test_the_tables_of_the_accuracy_page_are_those_that_the_results_give(tmp_path):
    page, results = Path(shutil.copy(RESULTS.with_suffix(".md"), tmp_path)), json.loads(RESULTS.read_text())
    accuracy_report.write_page(page, results)
    assert page.read_text() == RESULTS.with_suffix(".md").read_text()
    page.write_text("# No marks\n")
    with pytest.raises(ValueError, match="has no marks <!-- about -->"):
        accuracy_report.write_page(page, results)


def test_the_measures_of_the_accuracy_study_are_what_they_are_called():
    assert accuracy_report.too_low({"lost_scaled": [0.5, 0.02, 0.01, 0.0]}) == 0.5  # of more than a hundredth
    row = {"steps": [10, 20, 30], "loss": [3.0, None, 1.0]}  # reached at the first evaluation at or below it
    assert [accuracy_report.steps_to(row, loss) for loss in (3.5, 1.0, 0.5)] == [10, 30, None]
    # The first step that is applied comes after the unbroken run of skipped ones.
    assert [accuracy_report.first_applied({"skipped": x}) for x in ([], [0, 1, 5], [3])] == [0, 2, 0]
