"""What docs/nan.md says of jax_debug_nans, of losses that are NaN, of updates that overflow and of shard_map."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from processes import run_python

import jamp
from jamp.debug import find_nonfinite

PAGE = (Path(__file__).resolve().parents[1] / "docs/nan.md").read_text()

DEBUG_NANS = """
import traceback
import jax, jax.numpy as jnp

def found(fun, *args):
    try:
        return fun(*args) is None
    except FloatingPointError as error:
        line = [x.line for x in traceback.extract_tb(error.__traceback__) if "claims.py" in x.filename][-1]
        return str(error).split()[-1], line

x = jnp.array([0.0, -1.0, 2.0])
def hidden(x):
    a = jnp.where(x > 0, jnp.log(x), 0.0)  # hidden
    return jnp.sum(a) + jnp.sum(x * 0 / jnp.sum(x * 0))
def scanned(x):
    step = lambda c, _: (jnp.log(c - 1), None)
    return jnp.sum(jax.lax.scan(step, x, None, length=4)[0])  # scan
def masked(x):
    a = jax.nn.softmax(jnp.where(x > 0, x, -jnp.inf))  # mask
    return jnp.sum(a) + jnp.sum(jnp.exp(1000 * x))
log = jax.jit(lambda x: jnp.log(x))
bad = -jnp.ones(3)
donated = jnp.ones(3)
jax.config.update("jax_debug_nans", True)
log(jnp.ones(3))
print("before", bool(found(log, bad)))
jax.jit(jnp.var)(jnp.arange(3.0))
print("after", bool(found(log, bad)))
jax.config.update("jax_debug_nans", False)
with jax.debug_nans(True):
    print("where", found(jax.jit(hidden), x))
    print("backward", found(jax.jit(jax.grad(jnp.std)), jnp.ones(3)))
    print("scan", found(jax.jit(scanned), jnp.full(3, 20.0)))
    jax.jit(lambda x: x + 1, donate_argnums=0)(donated)
    print("kept", not donated.is_deleted())
with jax.debug_infs(True):
    print("mask", found(jax.jit(masked), x))
with jax.debug_nans(True):
    print("context", bool(found(log, bad)))
"""


@pytest.mark.slow
def test_what_the_page_says_of_jax_debug_nans(tmp_path):
    (tmp_path / "claims.py").write_text(DEBUG_NANS)
    lines = [x for x in run_python(tmp_path / "claims.py").splitlines() if not x.startswith("Invalid")]
    said = dict(line.split(maxsplit=1) for line in lines)
    assert "# hidden" in said["where"]
    assert said["scan"].startswith("('scan'")
    assert said["backward"] == "('mul', 'return fun(*args) is None')"  # the line of the call
    assert "# mask" in said["mask"]
    assert said["kept"] == said["before"] == said["context"] == "True"
    if jax.__version__ in ("0.10.2", "0.12.0.1"):
        assert f"JAX {jax.__version__} and" in PAGE or f"and {jax.__version__}" in PAGE
        assert said["after"] == "False"


@pytest.mark.promotes("Optax")
def test_a_loss_that_is_nan_with_finite_gradients_is_seen_if_the_flag_includes_it():
    tx, params = jamp.skip_nonfinite(optax.sgd(0.1)), jnp.ones(3)
    loss_fn = lambda params, x: jnp.sum(params * x) + jax.lax.stop_gradient(jnp.log(x.min()))
    batch, opt_state = jnp.float32([-1, 2, 3]), tx.init(params)
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    assert jnp.isnan(loss)
    _, applied = tx.update(grads, opt_state, params)
    assert jamp.get_grads_finite(applied)
    _, skipped = tx.update(grads, opt_state, params, grads_finite=jamp.all_finite((loss, grads)))
    assert not jamp.get_grads_finite(skipped)
    assert find_nonfinite(loss_fn, grad=True)(params, batch).finding.primitive == "log"


def test_an_update_that_overflows_is_found():
    tx, params = jamp.skip_nonfinite(optax.sgd(1e30)), {"w": jnp.ones(3)}
    opt_state, grads = tx.init(params), {"w": jnp.full(3, 1e20)}
    search = find_nonfinite(lambda grads: tx.update(grads, opt_state, params)[0])(grads)
    assert search.finding.primitive == "mul"
    assert "overflow in float32" in search.finding.cause


def test_optax_wrapper_skips_applies_after_its_limit_and_does_not_see_the_loss():
    tx, params = optax.apply_if_finite(optax.sgd(0.1), max_consecutive_errors=1), jnp.ones(2)
    opt_state, bad = tx.init(params), jnp.float32([jnp.nan, 1])
    updates, opt_state = tx.update(bad, opt_state, params)
    assert (bool(opt_state.last_finite), updates.tolist()) == (False, [0, 0])
    updates, opt_state = tx.update(bad, opt_state, params)
    assert np.isnan(updates[0])


def test_inside_shard_map_the_report_says_to_search_what_it_maps():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    body = lambda x: jax.lax.pmean(jnp.mean(jnp.log(x)), "data")
    mapped = jax.shard_map(body, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
    text = " ".join(str(find_nonfinite(mapped)(jnp.zeros(8))).split())
    assert text.startswith("shard_map gave inf: made inside it, where the search does not look")
    assert "find_nonfinite(jax.vmap(body, axis_name=...))" in text
    in_its_place = jax.vmap(body, axis_name="data")
    assert find_nonfinite(in_its_place)(jnp.zeros((8, 1))).finding.primitive == "log"


def test_the_flag_of_replicas_is_one():
    """All replicas skip if the gradient of one is not finite."""
    tx, params = jamp.skip_nonfinite(optax.sgd(0.1)), jnp.ones(3)
    opt_state = tx.init(params)

    def step(x):
        loss, grads = jax.value_and_grad(lambda p: jnp.sum(jnp.sqrt(p * x)))(params)
        finite = jamp.all_finite((loss, grads), axis_name="data")
        updates, state = tx.update(grads, opt_state, params, grads_finite=finite)
        return optax.apply_updates(params, updates), jamp.get_grads_finite(state)

    after, finite = jax.vmap(step, axis_name="data")(jnp.float32([1, 2, 0, 4]))
    assert not finite.any()
    np.testing.assert_array_equal(after, jnp.ones((4, 3)))
