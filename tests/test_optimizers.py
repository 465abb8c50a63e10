"""jamp.optimizers against recordings of torch.optim, and the learning rate in the state."""

import inspect
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from jamp.optimizers import adam, adamw, get_learning_rate, rmsprop, set_learning_rate, sgd

RECORDED = json.loads((pathlib.Path(__file__).parent / "data" / "torch_optimizers.json").read_text())
BY_NAME = {"SGD": sgd, "Adam": adam, "AdamW": adamw, "RMSprop": rmsprop}


def make(run):
    hparams = dict(run["hparams"])
    return BY_NAME[run["optimizer"]](hparams.pop("lr"), **hparams)


def trajectory(tx, params, grads):
    """The parameters after every step."""

    def step(carry, g):
        params, state = carry
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    return jax.jit(lambda p, g: jax.lax.scan(step, (p, tx.init(p)), g)[1])(params, grads)


PARAMS = {"W": np.float32(RECORDED["W0"]).reshape(4, 3), "b": np.float32(RECORDED["b0"])}
GRADS = {"W": np.float32(RECORDED["GW"]).reshape(25, 4, 3), "b": np.float32(RECORDED["Gb"]).reshape(25, 3)}


def name_of(run):
    return "-".join([run["optimizer"], *(f"{k}={v}" for k, v in run["hparams"].items() if v)])


def assert_agrees(got, run):
    for k, p in got.items():
        # Near 0, a parameter keeps the rounding errors of its earlier values: 1e-7, one unit of a float32 at 1.
        np.testing.assert_allclose(p, np.float32(run[k]).reshape(p.shape), rtol=2e-6, atol=1e-7, err_msg=k)


@pytest.mark.parametrize("run", RECORDED["runs"], ids=name_of)
def test_every_recorded_run_agrees_to_2e_6_at_every_step(run):
    assert_agrees(trajectory(make(run), PARAMS, GRADS), run)


@pytest.mark.parametrize("run", RECORDED["runs"][:1] + RECORDED["runs"][9:10], ids=name_of)
def test_a_run_agrees_under_loss_scaled_and_with_masters(run):
    assert_agrees(trajectory(jamp.mixed_precision(make(run)), PARAMS, GRADS), run)


def test_the_first_momentum_is_the_undampened_gradient():
    got = trajectory(sgd(1.0, momentum=0.5, dampening=0.75), jnp.zeros(1), jnp.ones((3, 1)))
    momenta = [1.0, 0.5 + 0.25, 0.375 + 0.25]
    np.testing.assert_array_equal(got[:, 0], -np.cumsum(momenta))


def test_centered_rmsprop_divides_by_the_standard_deviation():
    grads = np.random.default_rng(0).normal(size=(25, 5))
    square, mean, p, expected = 0.0, 0.0, np.zeros(5), []
    for g in grads:  # torch's documentation, in float64
        square, mean = 0.9 * square + 0.1 * g * g, 0.9 * mean + 0.1 * g
        p = p - 0.01 * g / (np.sqrt(square - mean**2) + 1e-3)
        expected.append(p)
    got = trajectory(rmsprop(0.01, alpha=0.9, eps=1e-3, centered=True), jnp.zeros(5), jnp.asarray(grads, jnp.float32))
    np.testing.assert_allclose(got, np.stack(expected), rtol=1e-5, atol=1e-6)


def test_defaults_are_torchs():
    defaults = {
        sgd: {"momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False},
        adam: {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "amsgrad": False},
        adamw: {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False},
        rmsprop: {"alpha": 0.99, "eps": 1e-8, "weight_decay": 0, "momentum": 0, "centered": False},
    }
    for optimizer, expected in defaults.items():
        parameters = inspect.signature(optimizer).parameters
        assert {k: p.default for k, p in parameters.items() if k != "learning_rate"} == expected


@pytest.mark.parametrize("optimizer", BY_NAME.values(), ids=BY_NAME)
def test_the_learning_rate_can_be_read_and_set_without_a_second_compilation(optimizer):
    tx, params, traces = jamp.loss_scaled(optimizer(0.5)), jnp.ones(3), 0

    @jax.jit
    def step(params, state):
        nonlocal traces
        traces += 1
        updates, state = tx.update(jnp.ones(3), state, params)
        return updates, state

    state = tx.init(params)
    assert float(get_learning_rate(state)) == 0.5
    first, state = step(params, state)
    state = set_learning_rate(state, 0.25)
    assert float(get_learning_rate(state)) == 0.25
    second, state = step(params, set_learning_rate(tx.init(params), 0.25))
    np.testing.assert_allclose(second, first / 2, rtol=1e-6)
    assert traces == 1


def test_the_learning_rate_can_be_set_inside_jit():
    state = jax.jit(set_learning_rate)(sgd(0.5).init(jnp.ones(2)), 0.125)
    assert float(get_learning_rate(state)) == 0.125


def test_a_whole_number_is_a_learning_rate_that_takes_fractions():
    assert float(get_learning_rate(set_learning_rate(sgd(1).init(jnp.ones(2)), 0.5))) == 0.5


def test_a_schedule_is_followed_and_readable_and_waits_on_a_skip():
    tx, params = jamp.loss_scaled(sgd(optax.linear_schedule(1.0, 0.0, 4))), jnp.ones(2)
    state = tx.init(params)
    used = []
    for grad in (1.0, jnp.inf, 1.0, 1.0):
        updates, state = tx.update(jnp.full(2, grad), state, params)
        used.append((-float(updates[0]), float(get_learning_rate(state))))
    assert used == [(1.0, 1.0), (0.0, 1.0), (0.75, 0.75), (0.5, 0.5)]


def test_setting_a_scheduled_learning_rate_is_an_error_that_says_why():
    with pytest.raises(ValueError, match="follows a schedule, which would replace the value at the next step"):
        set_learning_rate(sgd(optax.constant_schedule(0.1)).init(jnp.ones(2)), 0.5)


@pytest.mark.parametrize("access", [get_learning_rate, lambda tree: set_learning_rate(tree, 0.1)], ids=["get", "set"])
def test_a_tree_without_a_learning_rate_is_an_error_that_names_the_cure(access):
    with pytest.raises(ValueError, match=r"inject_hyperparams\(optax\.adamw, hyperparam_dtype=jnp\.float32\)"):
        access(optax.adamw(1e-3).init(jnp.ones(2)))


def test_two_learning_rates_are_an_error_that_names_their_places():
    both = {"a": sgd(0.1).init(jnp.ones(2)), "b": sgd(0.2).init(jnp.ones(2))}
    with pytest.raises(ValueError, match=r"found 2: at \['a'\].*\['b'\]"):
        get_learning_rate(both)
    assert float(get_learning_rate(both["b"])) == pytest.approx(0.2)


def test_any_injected_learning_rate_is_found():
    tx = optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.adam)(learning_rate=0.5))
    state = set_learning_rate((tx.init(jnp.ones(2)), "something else"), 0.25)
    assert float(get_learning_rate(state)) == 0.25


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_eps_and_learning_rate_survive_half_precision_parameters(dtype):
    tx, params = jamp.loss_scaled(adam(1e-8)), jnp.ones(2, dtype)
    state = tx.init(params)
    updates, state = tx.update(jnp.zeros(2, dtype), state, params)
    np.testing.assert_array_equal(updates, [0.0, 0.0])  # 0 / (sqrt(0) + eps), not 0 / 0
    for found in (state, adam(1e-8).init(params)):
        assert get_learning_rate(found).dtype == jnp.float32
        np.testing.assert_allclose(get_learning_rate(found), 1e-8, rtol=1e-6)


@pytest.mark.parametrize("optimizer", BY_NAME.values(), ids=BY_NAME)
def test_a_negative_learning_rate_is_an_error(optimizer):
    with pytest.raises(ValueError, match=r"learning_rate must not be negative, got learning_rate=-0\.1"):
        optimizer(-0.1)
    with pytest.raises(ValueError, match="learning_rate must not be negative"):
        set_learning_rate(optimizer(0.1).init(jnp.ones(2)), -1.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sgd(0.1, nesterov=True), "nesterov needs a momentum and no dampening"),
        (lambda: sgd(0.1, momentum=0.9, dampening=0.1, nesterov=True), "nesterov needs a momentum and no dampening"),
        (lambda: sgd(0.1, momentum=-0.9), "momentum must not be negative"),
        (lambda: adam(0.1, betas=(1.0, 0.999)), "betas must be at least 0 and below 1"),
        (lambda: adamw(0.1, eps=-1e-8), "eps must not be negative"),
        (lambda: rmsprop(0.1, weight_decay=-1.0), "weight_decay must not be negative"),
    ],
)
def test_what_torch_refuses_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_two_initial_states_and_donation_share_no_buffer():
    tx, params = jamp.loss_scaled(adamw(0.1, amsgrad=True)), jnp.ones(3)
    step = jax.jit(lambda state: tx.update(jnp.ones(3), state, params)[1], donate_argnums=0)
    step(tx.init(params))
    assert float(get_learning_rate(step(tx.init(params)))) == pytest.approx(0.1)
