"""jamp.optimizers against recordings of torch.optim, and the learning rate in the state."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from loss_scales import recorded
from steps import with_masters
from trees import assert_equal

import jamp
from jamp.optimizers import adam, adamw, get_learning_rate, rmsprop, set_learning_rate, sgd

RECORDED = recorded("torch_optimizers.json")
BY_NAME, NAMES = {"SGD": sgd, "Adam": adam, "AdamW": adamw, "RMSprop": rmsprop}, {"lr": "learning_rate"}
PARAMS = {"W": np.float32(RECORDED["W0"]).reshape(4, 3), "b": np.float32(RECORDED["b0"])}
GRADS = {"W": np.float32(RECORDED["GW"]).reshape(25, 4, 3), "b": np.float32(RECORDED["Gb"]).reshape(25, 3)}


def trajectory(tx, params, grads):
    """The parameters after every step."""

    def step(carry, g):
        updates, state = tx.update(g, carry[1], carry[0])
        return ((params := optax.apply_updates(carry[0], updates)), state), params

    return jax.lax.scan(step, (params, tx.init(params)), grads)[1]


def test_every_recorded_run_agrees_to_2e_6_at_every_step_two_also_with_masters():
    runs = [*RECORDED["runs"], RECORDED["runs"][0], RECORDED["runs"][9]]
    assert [run["optimizer"] for run in runs[-2:]] == ["SGD", "AdamW"]
    txs = [BY_NAME[run["optimizer"]](**{NAMES.get(k, k): x for k, x in run["hparams"].items()}) for run in runs]
    txs[-2:] = map(with_masters, txs[-2:])
    found = jax.jit(lambda params, grads: [trajectory(tx, params, grads) for tx in txs])(PARAMS, GRADS)
    for run, got in zip(runs, found, strict=True):
        for k, p in got.items():
            # Near 0, a parameter keeps the rounding errors of its earlier values: 1e-7, one unit of a float32 at 1.
            want = np.float32(run[k]).reshape(p.shape)
            np.testing.assert_allclose(p, want, rtol=2e-6, atol=1e-7, err_msg=f"{run['optimizer']}, {run['hparams']}")


def test_centered_rmsprop_divides_by_the_standard_deviation():
    grads, square, mean, p, expected = np.random.default_rng(0).normal(size=(25, 5)), 0.0, 0.0, np.zeros(5), []
    for g in grads:  # torch's documentation, in float64
        square, mean = 0.9 * square + 0.1 * g * g, 0.9 * mean + 0.1 * g
        expected.append(p := p - 0.01 * g / (np.sqrt(square - mean**2) + 1e-3))
    got = trajectory(rmsprop(0.01, alpha=0.9, eps=1e-3, centered=True), jnp.zeros(5), jnp.float32(grads))
    np.testing.assert_allclose(got, np.stack(expected), rtol=1e-5, atol=1e-6)


def test_defaults_are_torchs_and_what_torch_refuses_is_refused():
    adams = {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False}
    for optimizer, expected in (
        (sgd, {"momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False}),
        (adam, {**adams, "weight_decay": 0}),
        (adamw, {**adams, "weight_decay": 0.01}),
        (rmsprop, {"alpha": 0.99, "eps": 1e-8, "weight_decay": 0, "momentum": 0, "centered": False}),
    ):
        parameters = inspect.signature(optimizer).parameters
        assert {k: p.default for k, p in parameters.items() if k != "learning_rate"} == expected
    for make, message in (
        *((lambda tx=tx: tx(-0.1), "learning_rate") for tx in BY_NAME.values()),
        (lambda: set_learning_rate(sgd(0.1).init(jnp.ones(2)), -1.0), "learning_rate"),
        (lambda: sgd(0.1, nesterov=True), "momentum"),
        (lambda: sgd(0.1, momentum=0.9, dampening=0.1, nesterov=True), "dampening"),
        (lambda: sgd(0.1, momentum=-0.9), "momentum"),
        (lambda: adam(0.1, betas=(1.0, 0.999)), "below 1"),
        (lambda: adamw(0.1, eps=-1e-8), "eps"),
        (lambda: rmsprop(0.1, weight_decay=-1.0), "weight_decay"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.parametrize("optimizer", [sgd, functools.partial(adamw, amsgrad=True)])
def test_the_learning_rate_is_read_and_set_without_a_second_compilation_or_buffer(optimizer):
    tx, params = jamp.loss_scaled(optimizer(0.5)), jnp.ones(3)
    step = jax.jit(lambda state: tx.update(jnp.ones(3), state, params), donate_argnums=0)
    assert float(get_learning_rate(tx.init(params))) == 0.5
    first, state = step(tx.init(params))
    assert float(get_learning_rate(state)) == 0.5
    state = set_learning_rate(tx.init(params), 0.25)
    assert float(get_learning_rate(state)) == 0.25
    second, state = step(state)
    np.testing.assert_allclose(second, first / 2, rtol=1e-6)
    assert step._cache_size() == 1
    assert float(get_learning_rate(jax.jit(set_learning_rate)(state, 0.125))) == 0.125
    whole = set_learning_rate(optimizer(1).init(params), 0.5)  # A whole number takes fractions.
    assert float(get_learning_rate(whole)) == 0.5


def test_a_schedule_is_followed_waits_on_a_skip_is_readable_and_cannot_be_set():
    tx = jamp.loss_scaled(sgd(optax.linear_schedule(1.0, 0.0, 4)))
    state, used, update = tx.init(jnp.ones(2)), [], jax.jit(tx.update)
    for grad in (1.0, jnp.inf, 1.0, 1.0):
        updates, state = update(jnp.full(2, grad), state)
        used.append((-float(updates[0]), float(get_learning_rate(state))))
    assert used == [(1.0, 1.0), (0.0, 1.0), (0.75, 0.75), (0.5, 0.5)]
    with pytest.raises(ValueError, match="schedule"):
        set_learning_rate(state, 0.5)


def test_any_injected_learning_rate_is_found_none_or_several_are_an_error():
    tx = optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.adam)(learning_rate=0.5))
    state = set_learning_rate((tx.init(jnp.ones(2)), "something else"), 0.25)
    assert float(get_learning_rate(state)) == 0.25
    for access in (get_learning_rate, lambda tree: set_learning_rate(tree, 0.1)):
        with pytest.raises(ValueError, match="inject_hyperparams"):
            access(optax.adamw(1e-3).init(jnp.ones(2)))
    both = {"a": sgd(0.1).init(jnp.ones(2)), "b": sgd(0.2).init(jnp.ones(2))}
    with pytest.raises(ValueError, match=r"found 2: at \['a'\].*\['b'\]"):
        get_learning_rate(both)
    assert float(get_learning_rate(both["b"])) == pytest.approx(0.2)


def test_eps_and_learning_rate_survive_half_precision_parameters():
    tx, params = jamp.loss_scaled(adam(1e-8)), jnp.ones(2, jnp.float16)
    with pytest.warns(UserWarning, match="master_params"):
        state = tx.init(params)
    updates, state = jax.jit(tx.update)(jnp.zeros(2, jnp.float16), state, params)
    assert updates.tolist() == [0.0, 0.0]  # 0 / (sqrt(0) + eps), not 0 / 0
    for found in (state, adam(1e-8).init(params), adam(1e-8).init(jnp.ones(2, jnp.bfloat16))):
        np.testing.assert_allclose(get_learning_rate(found), np.float32(1e-8), rtol=1e-6, strict=True)


@pytest.mark.parametrize("value", [-0.1, np.float32(-0.1), np.array([0.1, np.nan])])
def test_a_negative_learning_rate_is_an_error_also_in_an_array_of_numpy(value):
    state = sgd(0.5).init(PARAMS)
    with pytest.raises(ValueError, match="negative"):
        set_learning_rate(state, value)


@pytest.mark.promotes("optax")
@pytest.mark.parametrize(
    "name", ["loss_scaled", "skip_nonfinite", "quantized_state", "master_params", "split", "rounding"]
)
def test_update_takes_the_keywords_of_optax(name):
    wrap = {
        "split": lambda tx: jamp.master_params(tx, split=True),
        "rounding": jamp.stochastic_rounding,
    }.get(name) or getattr(jamp, name)
    tx, params = wrap(optax.adam(1e-3)), jnp.ones((64, 128), jnp.float32 if name == "quantized_state" else jnp.bfloat16)
    state = tx.init(params)
    updates, new = tx.update(updates=2 * params, state=state, params=params)
    assert_equal((updates, new), tx.update(2 * params, state, params))
    assert not jnp.array_equal(updates, 2 * params)
    assert list(inspect.signature(tx.update).parameters)[:3] == ["updates", "state", "params"]
