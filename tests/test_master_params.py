"""master_params and mixed_precision: half-precision parameters with float32 masters, and check_castable."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trees import bits

import jamp

HALF = [jnp.bfloat16, jnp.float16]
WRAPPERS = {"master_params": jamp.master_params, "mixed_precision": jamp.mixed_precision}
wrappers = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


def masters_of(state):
    return optax.tree.get(state, "master_params")


def stepper(tx):
    @jax.jit
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


@wrappers
def test_bf16_1_plus_a_thousand_1e_4_arrives_at_1_1(wrap):
    tx, params = wrap(optax.sgd(1e-4)), jnp.ones(3, jnp.bfloat16)
    step = stepper(tx)
    carry, _ = jax.lax.scan(lambda c, _: (step(-jnp.ones(3), c[1], c[0]), None), (params, tx.init(params)), None, 1000)
    np.testing.assert_array_equal(carry[0], jnp.full(3, 1.1, jnp.bfloat16))
    np.testing.assert_allclose(masters_of(carry[1]), 1.1, rtol=2e-5)  # a thousand roundings of a float32
    # Without masters it stays where it was.
    plain = params
    for _ in range(3):
        plain = optax.apply_updates(plain, jnp.full(3, 1e-4))
    np.testing.assert_array_equal(plain, params)


@pytest.mark.parametrize("dtype", HALF)
@wrappers
def test_the_parameter_after_every_step_equals_the_rounded_master(wrap, dtype):
    tx = wrap(optax.adam(1e-2))
    params = jax.random.normal(jax.random.key(0), (1000,)).astype(dtype)

    def step(carry, key):
        before, state = carry
        updates, state = tx.update(jax.random.normal(key, (1000,)), state, before)
        params = optax.apply_updates(before, updates)
        masters = masters_of(state)
        # Exact wherever the step is no longer than its result; elsewhere the sum is rounded twice.
        near = jnp.abs(masters - before.astype(jnp.float32)) <= jnp.abs(masters)
        rounded = masters.astype(dtype)
        close = jnp.abs(params - rounded) <= jnp.finfo(dtype).eps * jnp.abs(rounded)
        return (params, state), (near.mean(), jnp.where(near, params == rounded, close).all())

    keys = jax.random.split(jax.random.key(1), 50)
    near, equal = jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), keys)[1])(params)
    assert equal.all()
    assert near.min() > 0.9


@wrappers
def test_the_next_step_corrects_a_step_far_larger_than_its_result(wrap):
    tx, target = wrap(optax.sgd(1.0)), jnp.array([1.0 + 2.0**-7])
    state, step = tx.init(target), stepper(tx)
    params, state = step(jnp.zeros(1), state, jnp.array([1e8], jnp.bfloat16))
    np.testing.assert_array_equal(params, [0.0])  # 1.0078 - 1e8 is -1e8 in float32
    params, state = step(jnp.zeros(1), state, params)
    np.testing.assert_array_equal(params, target)


@pytest.mark.parametrize("dtype", HALF)
def test_a_skip_leaves_masters_and_parameters_untouched_bit_for_bit(dtype):
    tx = jamp.mixed_precision(optax.adamw(1e-2))
    params = {"w": jnp.array([1.0, -0.0, 0.0, 3e-5], dtype), "b": jnp.array([-2.0])}
    grads = jax.tree.map(jnp.ones_like, params)
    step = stepper(tx)
    params, state = step(grads, tx.init(params), params)
    params["w"] = params["w"].at[1].set(-0.0)  # off its master: a skip does not bring it back either
    for bad in (jnp.inf, -jnp.inf, jnp.nan):
        after, new = step(grads | {"w": grads["w"].at[2].set(bad)}, state, params)
        assert bits(after) == bits(params)
        assert bits(new.inner_state) == bits(state.inner_state)
        assert not bool(jamp.get_grads_finite(new))


@wrappers
def test_masters_start_as_the_float32_parameters_that_init_was_given(wrap):
    tx, params = wrap(optax.sgd(0.0)), jnp.array([1.001])
    state = tx.init(params)
    params, state = stepper(tx)(jnp.ones(1), state, params.astype(jnp.bfloat16))
    np.testing.assert_array_equal(masters_of(state), jnp.float32([1.001]))
    assert params.dtype == jnp.bfloat16


@wrappers
def test_masters_are_float32_and_inner_sees_float32(wrap):
    seen = []
    spy = optax.GradientTransformation(
        lambda params: seen.append(params) or optax.EmptyState(),
        lambda grads, state, params: seen.extend([grads, params]) or (grads, state),
    )
    tx, params = wrap(spy), {"w": jnp.ones(2, jnp.float16), "b": jnp.ones(1, jnp.bfloat16)}
    state = tx.init(params)
    tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    assert {x.dtype for x in jax.tree.leaves([masters_of(state), seen])} == {jnp.dtype(jnp.float32)}


def test_grad_dtype_is_what_inner_sees():
    seen = []
    spy = optax.stateless(lambda grads, params: seen.append(grads.dtype) or grads)
    for grad_dtype in (jnp.float32, jnp.bfloat16):
        tx = jamp.mixed_precision(spy, grad_dtype=grad_dtype)
        params = jnp.ones(2, jnp.bfloat16)
        tx.update(jnp.ones(2), tx.init(params), params)
    assert set(seen[: len(seen) // 2]) == {jnp.dtype(jnp.float32)}
    assert set(seen[len(seen) // 2 :]) == {jnp.dtype(jnp.bfloat16)}


def test_param_dtype_gives_the_parameters_its_values_whatever_dtype_holds_them():
    tx, params = jamp.mixed_precision(optax.sgd(1e-3), param_dtype=jnp.bfloat16), jnp.ones(2)
    params, state = stepper(tx)(jnp.ones(2), tx.init(params), params)
    np.testing.assert_array_equal(masters_of(state), jnp.float32(1) - jnp.float32([1e-3, 1e-3]))
    np.testing.assert_array_equal(params, masters_of(state).astype(jnp.bfloat16).astype(jnp.float32))


def test_without_param_dtype_float32_parameters_are_not_rounded():
    tx, params = jamp.mixed_precision(optax.sgd(1e-3)), jnp.ones(2)
    params, state = stepper(tx)(jnp.ones(2), tx.init(params), params)
    np.testing.assert_array_equal(params, masters_of(state))


@wrappers
def test_float32_parameters_follow_plain_optax(wrap):
    params = jax.random.normal(jax.random.key(0), (50,))
    tx, plain = wrap(optax.adam(1e-2)), optax.adam(1e-2)
    state, expected, plain_state = tx.init(params), params, plain.init(params)
    step, plain_step = stepper(tx), stepper(plain)
    for key in jax.random.split(jax.random.key(1), 5):
        grads = jax.random.normal(key, (50,))
        params, state = step(grads, state, params)
        expected, plain_state = plain_step(grads, plain_state, expected)
    np.testing.assert_allclose(params, expected, rtol=1e-6, atol=1e-7)


@wrappers
def test_leaves_that_are_not_floating_are_stepped_by_inner(wrap):
    add_one = optax.stateless(lambda grads, params: jax.tree.map(jnp.ones_like, params))
    params = {"w": jnp.ones(2, jnp.bfloat16), "count": jnp.int32(3), "flag": jnp.zeros(2, bool)}
    no_grad = lambda x: np.zeros(x.shape, jax.dtypes.float0)
    grads = {"w": jnp.ones(2), "count": no_grad(params["count"]), "flag": no_grad(params["flag"])}
    tx = wrap(add_one)
    updates, _ = tx.update(grads, tx.init(params), params)
    after = jax.tree.map(lambda x: x.tolist(), optax.apply_updates(params, updates))
    assert after == {"w": [2.0, 2.0], "count": 4, "flag": [True, True]}


def test_float64_parameters_keep_their_precision(x64):
    tx, params = jamp.master_params(optax.sgd(1e-12)), {"a": jnp.ones(1, jnp.float64), "b": jnp.ones(1, jnp.bfloat16)}
    state = tx.init(params)
    updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    assert {k: x.dtype.name for k, x in masters_of(state).items()} == {"a": "float64", "b": "float32"}
    assert float(optax.apply_updates(params, updates)["a"][0]) == 1 - 1e-12


@wrappers
def test_update_without_params_is_an_error_that_names_the_cure(wrap):
    tx = wrap(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"tx\.update\(grads, state, params\)"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


@wrappers
def test_masters_compose_with_scan_donation_chain_multisteps_and_map_params(wrap):
    tx = wrap(
        optax.chain(optax.clip_by_global_norm(1.0), optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation())
    )
    params = {"w": jnp.ones(3), "b": jnp.zeros(2, jnp.bfloat16)}
    grads = jax.tree.map(jnp.ones_like, params)

    def train(params, state):
        return jax.lax.scan(lambda c, _: (stepper(tx)(grads, c[1], c[0]), None), (params, state), None, 4)[0]

    after, state = jax.jit(train, donate_argnums=(0, 1))(params, tx.init(params))
    assert all(bool(jnp.all(x < 1)) for x in jax.tree.leaves(after))
    named = optax.tree.map_params(tx, lambda x: "param", state, transform_non_params=lambda x: "-")
    assert masters_of(named) == {"w": "param", "b": "param"}


def test_mixed_precision_finds_its_scale_and_does_without_one():
    tx = jamp.mixed_precision(optax.sgd(0.1), jamp.StaticLossScale(8.0))
    assert float(jamp.get_loss_scale(tx.init(jnp.ones(2, jnp.float16)))) == 8.0
    none = jamp.mixed_precision(optax.sgd(0.1), jamp.NoOpLossScale())
    params = jnp.ones(2, jnp.bfloat16)
    params, _ = stepper(none)(jnp.full(2, jnp.nan), none.init(params), params)
    assert bool(jnp.isnan(params).all())  # nothing is checked


def test_mixed_precision_refuses_what_loss_scaled_refuses():
    with pytest.raises(TypeError, match="loss_scale must be a loss scale"):
        jamp.mixed_precision(optax.sgd(0.1), 2.0**16)


def test_replicas_that_share_an_axis_skip_together():
    tx, params = jamp.mixed_precision(optax.sgd(0.1), axis_name="batch"), jnp.ones(2, jnp.bfloat16)
    state = tx.init(params)
    update = lambda g: tx.update(g, state, params)[0]
    updates = jax.vmap(update, axis_name="batch")(jnp.array([[1.0, 1.0], [jnp.inf, 1.0]]))
    np.testing.assert_array_equal(updates, np.zeros((2, 2)))


SHARDED = """
import jax, jax.numpy as jnp, optax, jamp
from jax.sharding import NamedSharding, PartitionSpec
mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = NamedSharding(mesh, PartitionSpec("x"))
tx = jamp.mixed_precision(optax.sgd(0.1))
for dtype in (jnp.bfloat16, jnp.float32):
    params = jax.device_put(jnp.ones((8, 2), dtype), sharding)
    for init in (tx.init, jax.jit(tx.init)):
        state = init(params)
        assert optax.tree.get(state, "master_params").sharding.is_equivalent_to(sharding, 2)
updates, state = jax.jit(tx.update)(params, state, params)
for x in (updates, optax.tree.get(state, "master_params")):
    assert x.sharding.is_equivalent_to(sharding, 2)
print("sharded")
"""


def test_the_state_is_sharded_like_the_parameters():
    paths = {"PYTHONPATH": str(pathlib.Path(jamp.__file__).parents[1])}  # the jamp that is tested, be it a wheel
    env = os.environ | paths | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-W", "error", "-c", SHARDED], env=env, capture_output=True, text=True)
    assert done.stdout == "sharded\n", done.stderr


def test_check_castable_names_the_leaves_that_are_not_floating_or_would_become_inf():
    params = {
        "fits": jnp.array([1.0, -65504.0, 1e-30, jnp.inf, jnp.nan]),  # what is inf already does not become it
        "large": [jnp.zeros(2), jnp.array([0.0, -7e4])],
        "count": jnp.int32(3),
        "none": None,
    }
    assert jamp.check_castable(params, jnp.float16) == ["['count']", "['large'][1]"]
    assert jamp.check_castable(params, jnp.bfloat16) == ["['count']"]
    assert jamp.check_castable({"w": jnp.array([1e3])}, jnp.float8_e4m3fn) == ["['w']"]  # nan there: it has no inf
    assert jamp.check_castable({}, jnp.float16) == []


def test_check_castable_to_a_dtype_that_is_not_floating_is_an_error():
    with pytest.raises(ValueError, match=r"dtype must be floating, such as jnp\.float16, got dtype='int8'"):
        jamp.check_castable(jnp.ones(2), jnp.int8)
