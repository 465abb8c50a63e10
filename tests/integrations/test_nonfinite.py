"""find_nonfinite in Linen, NNX, Equinox and plain models: the cause, not what follows from it, and no false alarms."""

import inspect

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jaxprs import normal

import jamp
from jamp.debug import find_nonfinite

FRAMEWORKS = "plain", "linen", "nnx", "equinox"
CAUSAL = jnp.tril(jnp.ones((8, 8), bool))


class Linen(nn.Module):
    body: object

    @nn.compact
    def __call__(self, x):
        with jax.named_scope("head"):
            return self.body(nn.Dense(16, use_bias=False, kernel_init=nn.initializers.constant(0.25))(x))


class Nnx(nnx.Module):
    def __init__(self, body):
        self.body = body
        self.dense = nnx.Linear(16, 16, use_bias=False, kernel_init=nn.initializers.constant(0.25), rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.body(self.dense(x))


class Equinox(eqx.Module):
    dense: eqx.nn.Linear
    body: object = eqx.field(static=True)

    def __init__(self, body):
        dense = eqx.nn.Linear(16, 16, use_bias=False, key=jax.random.key(0))
        self.dense, self.body = eqx.tree_at(lambda x: x.weight, dense, jnp.full((16, 16), 0.25)), body

    def __call__(self, x):
        return self.body(jax.vmap(self.dense)(x))


def modelled(framework, body, size=1.0):
    """A loss with a linear layer of weights 1/4, its parameters and its batch of 8 rows of 16 equal numbers."""
    x = jnp.full((8, 16), size)
    if framework == "linen":
        return (lambda params, x: Linen(body).apply(params, x)), Linen(body).init(jax.random.key(0), x), x
    if framework == "plain":
        return (lambda params, x: body(x @ params["w"])), {"w": jnp.full((16, 16), 0.25)}, x
    return (lambda model, x: model(x)), (Nnx if framework == "nnx" else Equinox)(body), x


def planted(body, comment="planted"):
    lines, first = inspect.getsourcelines(body)
    line = first + next(i for i, line in enumerate(lines) if f"# {comment}" in line)
    return f"test_nonfinite.py:{line} ({body.__name__})"


def below_a_constant_mask(q):
    scores = jnp.where(CAUSAL, q @ q.T, -jnp.inf)
    scores = scores.astype(jnp.float16) * jnp.float16(2000)  # planted
    return jnp.mean(jax.nn.softmax(scores.astype(jnp.float32)) @ q)


def below_a_mask_of_log(q):
    bias = jnp.log(CAUSAL.astype(jnp.float32))
    scores = (20 * q) @ (20 * q).T  # planted
    return jnp.mean(jax.nn.softmax(scores + bias) @ q)


def absorbed(h):
    z = jnp.exp(50 * h)  # planted
    gate = 1 / (1 + z)
    return jnp.mean(h * gate / jnp.sum(gate, -1, keepdims=True))


def beside_an_auxiliary_result(h):
    log_probabilities = jnp.log(jax.nn.softmax(jnp.where(CAUSAL[:, :1], h, -1e30) * CAUSAL[0, :1] - 1e30 * (h > 9)))
    mask = jnp.zeros(8)
    return jnp.sum(h[:, 0] * mask) / jnp.sum(mask), {"log": log_probabilities, "inf": jnp.log(mask)}  # planted


def in_the_gradient(h):
    distance = jnp.sqrt(jnp.sum(h * 0, -1))  # planted
    return jnp.mean(h**2) + jnp.mean(distance)


def overflow_before_a_norm(h):
    energy = jnp.sum((100 * h).astype(jnp.float16) ** 2, -1, keepdims=True)  # planted
    return jnp.mean((h * jax.lax.rsqrt(energy.astype(jnp.float32))) / (1 / energy.astype(jnp.float32)))


def beside_an_inf_of_another_row(h):
    rows = jnp.where(jnp.arange(8)[:, None] == 0, -jnp.inf, 300 * h).astype(jnp.float16)
    sums = rows @ jnp.full((16, 4), 30, jnp.float16)  # planted
    return jnp.mean(jnp.maximum(sums, 0).astype(jnp.float32))


CASES = {
    beside_an_inf_of_another_row: ("dot_general", "overflow in float16: value would be 5.8e5", False, 1.0),
    below_a_constant_mask: ("mul", "overflow in float16", False, 1.0),
    below_a_mask_of_log: ("dot_general", "overflow in float16", False, 1.0),
    absorbed: ("exp", "exp overflow in float32", False, 1.0),
    beside_an_auxiliary_result: ("div", "nan from 0/0", False, 1.0),
    in_the_gradient: ("div", "division by zero", True, 1.0),
    overflow_before_a_norm: (None, "overflow in float16", False, 1.0),
}


# Every case in a plain function, and two in each framework.
QUICK = {
    "linen": (below_a_constant_mask, beside_an_auxiliary_result),
    "nnx": (absorbed, in_the_gradient),
    "equinox": (beside_an_inf_of_another_row, overflow_before_a_norm),
}


@pytest.mark.slow_after(6)
@pytest.mark.parametrize(
    ("framework", "body"),
    [
        pytest.param(x, body, marks=[pytest.mark.slow] * (body not in QUICK.get(x, CASES)))
        for x in FRAMEWORKS
        for body in CASES
    ],
)
def test_the_cause_is_named_first(framework, body):
    primitive, cause, grad, size = CASES[body]
    fun, params, x = modelled(framework, body, size)
    fun = jamp.autocast(fun, jnp.float16) if "mask" in body.__name__ else fun
    search = find_nonfinite(fun, grad=grad)(params, x)
    assert search
    assert search.finding.source.startswith(planted(body))
    assert search.finding.primitive == (primitive or search.finding.primitive)
    assert cause in search.finding.cause
    assert search.finding.backward == grad
    assert len([x for x in search.findings if planted(body) in x.source]) <= 2


def sigmoid_by_hand(h):
    return jnp.mean(1 / (1 + jnp.exp(100 * h)))


def where_around_log(h):
    return jnp.mean(jnp.where(h > 4, jnp.log(h - 4), 0.0) + h)


def masked_softmax(h):
    scores = jnp.where(CAUSAL, h @ h.T, -jnp.inf) + jnp.log(CAUSAL.astype(jnp.float32))
    return jnp.mean(jax.nn.softmax(scores) @ h)


def batch_with_zeros(h):
    return jnp.mean(h**2)


HEALTHY = sigmoid_by_hand, where_around_log, masked_softmax


@pytest.mark.parametrize(
    ("framework", "body"),
    [
        pytest.param(x, body, marks=[pytest.mark.slow] * (x != "plain" and body is not masked_softmax))
        for x in FRAMEWORKS
        for body in HEALTHY
    ],
)
def test_an_inf_that_no_result_shows_is_no_alarm(framework, body):
    fun, params, x = modelled(framework, body)
    search = find_nonfinite(fun)(params, x)
    assert (bool(search), search.reaches_results) == (False, False)
    assert search.finding is None or "no result shows it" in str(search)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_gradient_is_that_of_the_parameters_and_not_of_the_batch(framework):
    fun, params, x = modelled(framework, batch_with_zeros)
    of_root = lambda params, x: fun(params, jnp.sqrt(x))  # a spectrogram: its derivative at 0 is inf
    search = find_nonfinite(of_root, grad=True)(params, x.at[1, 2].set(0))
    assert (bool(search), search.findings) == (False, ())
    by_keyword = find_nonfinite(of_root, grad=True)(params=params, x=x.at[1, 2].set(0))
    assert not by_keyword


@pytest.mark.parametrize("framework", ["plain", "equinox"])
def test_of_two_independent_faults_both_are_printed_and_the_one_in_the_loss_first(framework):
    def body(h):
        unused = jnp.log(h[:, 0] - h[:, 1])  # first
        return jnp.mean(jnp.exp(100 * h)), unused  # second

    fun, params, x = modelled(framework, body)
    search = find_nonfinite(fun)(params, x)
    sources = [x.source for x in search.findings]
    assert [planted(body, "second"), planted(body, "first")] == sources
    assert [x.reaches for x in search.findings] == ["the loss", "a result"]
    lines = str(search).splitlines()
    assert "and independent of it, in a result" in lines
    assert [line.split()[0] for line in lines if " gave " in line] == ["exp", "log"]
    assert len([line for line in lines if line.startswith("  next ")]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_flax_attention_is_healthy_in_both_directions(masked):
    x = normal(8, 16)
    linen, mask = nn.MultiHeadDotProductAttention(2), nn.make_causal_mask(jnp.ones(8)) if masked else None
    params = jax.jit(linen.init)(jax.random.key(1), x, mask=mask)
    loss = lambda params, x: jnp.mean(linen.apply(params, x, mask=mask) ** 2)
    assert not find_nonfinite(jamp.autocast(loss, jnp.float16), grad=True)(params, x).findings


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_equinox_attention_is_healthy_in_both_directions(masked):
    attention = eqx.filter_jit(eqx.nn.MultiheadAttention)(2, 16, key=jax.random.key(2))
    of_module = lambda module, x: jnp.mean(module(x, x, x, mask=CAUSAL if masked else None) ** 2)
    assert not find_nonfinite(jamp.autocast(of_module, jnp.float16), grad=True)(attention, normal(8, 16)).findings


@pytest.mark.parametrize("framework", ["plain", "linen"])
def test_two_that_only_together_make_a_nan_are_both_named(framework):
    def body(h):
        first = jnp.exp(100 * h)  # planted
        second = jnp.exp(200 * h)  # second
        return jnp.mean(jnp.exp(-jnp.abs(first - second)))

    fun, params, x = modelled(framework, body)
    found = [(x.source, x.reaches) for x in find_nonfinite(fun)(params, x).findings]
    assert found == [(planted(body), "the loss"), (planted(body, "second"), "the loss")]


@pytest.mark.parametrize("framework", ["nnx", "equinox"])
def test_an_operation_that_reaches_a_gradient_and_another_result_is_named_once(framework):
    def body(h):
        large = jnp.exp(100 * h)  # planted
        return jnp.mean(jnp.where(h < 0, large, h)), large

    fun, params, x = modelled(framework, body)
    (finding,) = find_nonfinite(fun, grad=True)(params, x).findings
    assert (finding.source, finding.backward, finding.reaches) == (planted(body), False, "a gradient")
