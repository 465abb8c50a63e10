"""master_params, alone and under a loss scale: half-precision parameters with float32 masters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from steps import check_skips, stepper, with_masters
from trees import assert_equal

import jamp

promotes = pytest.mark.promotes("optax.apply_updates, which adds float32 to 16-bit parameters, and optax.MultiSteps")
WRAPPERS = {"alone": jamp.master_params, "loss_scaled": with_masters}
wrappers = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
SGD = optax.sgd(0.1, momentum=0.9)


def masters_of(state):
    return optax.tree.get(state, "master_params")


@promotes
@wrappers
def test_the_parameter_after_every_step_equals_the_rounded_master(wrap):
    tx, start = wrap(SGD), jax.random.normal(jax.random.key(0), (1000,))

    def compare(p, old, master):
        # Exact wherever the step is no longer than its result; elsewhere the sum is rounded twice.
        near, rounded = jnp.abs(master - old.astype(jnp.float32)) <= jnp.abs(master), master.astype(p.dtype)
        close = jnp.abs(p - rounded) <= jnp.finfo(p.dtype).eps * jnp.abs(rounded)
        return near.mean(), jnp.where(near, p == rounded, close).all()

    def step(carry, key):
        grads = jax.tree.map(lambda p: jax.random.normal(key, p.shape), carry[0])
        params, state = stepper(tx)(*carry, grads)
        return (params, state), jax.tree.map(compare, params, carry[0], masters_of(state))

    params = {name: start.astype(name) for name in ("bfloat16", "float16")}
    keys = jax.random.split(jax.random.key(1), 30)
    for near, equal in jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), keys)[1])(params).values():
        assert equal.all()
        assert near.min() > 0.8


@promotes
@wrappers
def test_the_next_step_corrects_a_step_far_larger_than_its_result(wrap):
    tx, target = wrap(optax.sgd(1.0)), jnp.array([1.0 + 2.0**-7])
    carry, step = (jnp.array([1e8], jnp.bfloat16), tx.init(target)), stepper(tx)
    first, second = (carry := step(*carry, jnp.zeros(1)) for _ in range(2))
    assert (first[0].tolist(), second[0].tolist()) == ([0.0], target.tolist())  # 1.0078 - 1e8 is -1e8 in float32


@promotes
@wrappers
def test_an_infinite_parameter_without_a_gradient_stays_and_so_does_minus_zero(wrap):
    w = jnp.array([0.0, -0.0, -jnp.inf, jnp.inf, jnp.nan, 1.0])
    for dtype in ("bfloat16", "float16", "float32"):
        tx, mask = wrap(optax.sgd(0.1)), w.astype(dtype)
        carry = (mask, tx.init(mask))
        for _ in range(3):
            carry = stepper(tx)(*carry, jnp.zeros_like(w))
        assert_equal(carry[0], mask)


@promotes
def test_a_skip_does_not_bring_a_parameter_back_to_its_master_either():
    w = jnp.array([1.0, -0.0, 0.0, 3e-5])
    params = {"b": jnp.array([-2.0]), "bf16": w.astype(jnp.bfloat16), "f16": w.astype(jnp.float16)}
    tx, grads = with_masters(SGD), jax.tree.map(jnp.ones_like, params)
    step = stepper(tx)
    params, state = step(params, tx.init(params), grads)
    for name in ("bf16", "f16"):
        params[name] = params[name].at[1].set(-0.0)  # off its master
        after, new = step(params, state, grads | {name: grads[name].at[2].set(-jnp.inf)})
        assert_equal((after, new.inner_state, new.grads_finite), (params, state.inner_state, jnp.array(False)))


@wrappers
def test_masters_start_as_the_float32_parameters_given_and_inner_sees_float32(wrap):
    seen, see = [], lambda *trees: seen.extend(trees) or (trees[0], optax.EmptyState())
    tx = wrap(optax.GradientTransformation(lambda params: see(params)[1], lambda g, _, params: see(g, params)))
    params = {"w": jnp.array([1.001, 2.0]), "b": jnp.ones(1, jnp.bfloat16)}
    state, half = tx.init(params), jamp.cast_floating(params, jnp.float16)
    updates, after = tx.update(jax.tree.map(jnp.zeros_like, half), state, half)
    assert_equal([masters_of(x)["w"] for x in (state, after)], [params["w"]] * 2)
    assert {x.dtype.name for x in jax.tree.leaves([updates, masters_of(after), seen])} == {"float32"}


@promotes
def test_float64_keeps_its_precision_and_integers_are_stepped_by_inner(x64):
    tx, params = jamp.master_params(optax.sgd(1e-12)), {"a": jnp.ones(1, jnp.float64), "b": jnp.ones(1, jnp.bfloat16)}
    params, state = stepper(tx)(params, tx.init(params), params)
    assert {k: x.dtype.name for k, x in masters_of(state).items()} == {"a": "float64", "b": "float32"}
    assert float(params["a"][0]) == 1 - 1e-12
    add_one = optax.stateless(lambda grads, params: jax.tree.map(jnp.ones_like, params))
    params = {"w": jnp.ones(2), "count": jnp.int32(3), "flag": jnp.zeros(2, bool)}
    grads = {name: np.zeros(x.shape, jax.dtypes.float0) for name, x in params.items()} | {"w": jnp.ones(2)}
    for wrap in WRAPPERS.values():
        tx = wrap(add_one)
        after = optax.apply_updates(params, tx.update(grads, tx.init(params), params)[0])
        assert {k: x.tolist() for k, x in after.items()} == {"w": [2.0, 2.0], "count": 4, "flag": [True, True]}


@promotes
def test_masters_compose_with_chain_multisteps_and_map_params_and_need_params():
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.MultiSteps(SGD, 2).gradient_transformation())
    params = {"w": jnp.ones(3), "b": jnp.zeros(2, jnp.bfloat16)}
    grads = jax.tree.map(jnp.ones_like, params)
    check_skips(jamp.master_params(inner), grads, [grads | {"b": grads["b"] * jnp.inf}], params)
    for wrap in WRAPPERS.values():
        tx = wrap(inner)
        named = optax.tree.map_params(tx, lambda x: "param", tx.init(params), transform_non_params=lambda x: "-")
        assert masters_of(named) == {"w": "param", "b": "param"}
        with pytest.raises(ValueError, match=r"tx\.update"):
            tx.update(grads, tx.init(params))
