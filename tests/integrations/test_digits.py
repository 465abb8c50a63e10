"""`rounding_report` and `compare` on models of Linen, NNX and Equinox. For functions see test_rounding_report.py."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults import FAULTS, planted
from flax import nnx

import jamp.debug

WIDTH = 16
KEYS = jax.random.split(jax.random.key(0), 8)
X, Y = (jax.random.normal(key, (2, 8, WIDTH)) for key in KEYS[:2])


class LinenBlock(nn.Module):
    fault: callable
    approximate: bool = True

    @nn.compact
    def __call__(self, x):
        h = self.fault(nn.tanh(nn.Dense(WIDTH, name="up")(nn.LayerNorm(name="norm")(x))))
        return x + nn.Dense(WIDTH, name="down")(nn.gelu(h, approximate=self.approximate))


class NnxBlock(nnx.Module):
    def __init__(self, fault, rngs):
        self.up, self.down = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm, self.fault = nnx.LayerNorm(WIDTH, rngs=rngs), fault

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.fault(nnx.tanh(self.up(self.norm(x))))))


class EquinoxBlock(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    fault: callable = eqx.field(static=True)

    def __init__(self, fault, up, down):
        linear = lambda p: eqx.tree_at(
            lambda m: (m.weight, m.bias), eqx.nn.Linear(WIDTH, WIDTH, key=KEYS[0]), (p["kernel"].T, p["bias"])
        )
        self.up, self.down, self.norm, self.fault = linear(up), linear(down), eqx.nn.LayerNorm(WIDTH, eps=1e-6), fault

    def __call__(self, x):
        each = lambda layer, x: jax.vmap(jax.vmap(layer))(x)
        return x + each(self.down, jax.nn.gelu(self.fault(jnp.tanh(each(self.up, each(self.norm, x))))))


def linen(fault, **options):
    block = LinenBlock(fault, **options)
    return lambda params, x, y: jnp.mean((block.apply(params, x) - y) ** 2), LinenBlock(fault).init(KEYS[2], X)


def nnx_model(fault):
    return lambda model, x, y: jnp.mean((model(x) - y) ** 2), NnxBlock(fault, nnx.Rngs(0))


def equinox(fault):
    params = linen(fault)[1]["params"]
    return lambda model, x, y: jnp.mean((model(x) - y) ** 2), EquinoxBlock(fault, params["up"], params["down"])


@pytest.mark.slow
@pytest.mark.parametrize(("make", "fault"), [*zip([linen, nnx_model, equinox] * 3, FAULTS, strict=True)])
def test_a_planted_fault_in_a_model_is_the_first_row(make, fault):
    loss, model = make(fault)
    first = jamp.debug.rounding_report(loss, jnp.bfloat16)(model, X, Y).rows[0]
    assert first.source.startswith(planted(fault))


@pytest.mark.slow
def test_a_layer_and_its_parameter_are_named():
    loss, params = linen(lambda h: h)
    rows = jamp.debug.rounding_report(loss, jnp.bfloat16)(params, X, Y).rows
    (row,) = (row for row in rows if row.scope == "LinenBlock/up" and not row.backward)
    assert row.parameter == "params['params']['up']['kernel']"
    assert "flax/linen/linear.py" in row.source


@pytest.mark.slow
def test_linen_and_equinox_compute_the_same_until_one_is_changed():
    here, params = linen(lambda h: h)
    there, model = equinox(lambda h: h)
    in_equinox = lambda params, x, y: there(
        EquinoxBlock(lambda h: h, params["params"]["up"], params["params"]["down"]), x, y
    )
    del model
    found = jamp.debug.compare(here, in_equinox)(params, X, Y)
    assert not found
    assert sum(row.operation == "dot_general" for row in found.rows) == 2
    exact = linen(lambda h: h, approximate=False)[0]
    found = jamp.debug.compare(exact, in_equinox)(params, X, Y)
    assert found
    assert "LinenBlock" in found.first.scope
    assert any("erf" in x.operation for x in found.differences)


@pytest.mark.slow
def test_one_call_finds_the_head_of_a_classifier():
    """The gradient of few logits is nearly all that a small head gets, and it is rounded."""

    class Classifier(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(10, name="head")(LinenBlock(lambda h: h)(x).mean(1))

    model = Classifier()
    params = jax.jit(model.init)(KEYS[3], X)
    labels = np.array([3, 5])
    loss = lambda params, x: -jnp.mean(jax.nn.log_softmax(model.apply(params, x))[jnp.arange(2), labels])
    report = jamp.debug.rounding_report(loss, jnp.bfloat16)(params, X)
    head = max(row.gradient_error for row in report.rows if row.scope.endswith("head"))
    assert head == max(row.gradient_error for row in report.rows)


@pytest.mark.slow
def test_a_model_with_state_is_left_as_it_is():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.drop = nnx.BatchNorm(WIDTH, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return jnp.mean(self.drop(self.norm(x)) ** 2)

    model = nnx.jit(Net)(nnx.Rngs(0))
    before = [np.array(x) for x in jax.tree.leaves(nnx.state(model, nnx.BatchStat, nnx.RngCount))]
    assert not jamp.debug.compare(lambda m, x: m(x), lambda m, x: m(x))(model, 3 * X + 1)
    after = jax.tree.leaves(nnx.state(model, nnx.BatchStat, nnx.RngCount))
    assert all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))
