"""A 16-bit value that is stored for the backward pass is the one that the forward pass read.

By default XLA leaves out a cast to 16 bit that a cast back follows (`--xla_allow_excess_precision`). If the forward
pass takes a maximum and a sum of scores that were never rounded, and the backward pass computes the exponentials again
from the scores that were stored, the rows of a softmax sum to 0.89 to 1.13.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import linear_call
from jaxprs import normal

import jamp

N = 64
Q, K, V = 2 * normal(N, N), normal(N, N, seed=1), normal(N, N, seed=2)  # scores up to 60
COTANGENT = normal(N, N, seed=3)
BF16 = jnp.bfloat16
KEEP = np.float32(np.random.default_rng(4).random((N, N)) < 0.8)
NOISE = np.random.default_rng(5).gumbel(size=(N, N)).astype(np.float32)


def by_hand(x, y):
    """The product of autocast, with casts. XLA leaves the last rounding out."""
    return (x.astype(BF16) @ y.astype(BF16)).astype(jnp.float32)


def rounded_by_hand(x, y):
    """The same with its rounding carried out."""
    return lax.reduce_precision(by_hand(x, y), 8, 7)


def exponentials(z):
    e = jnp.exp(z - lax.stop_gradient(z.max(-1, keepdims=True)))
    return e / e.sum(-1, keepdims=True)


def sinkhorn(z):
    z = z / 8
    for _ in range(3):
        z = z - jax.nn.logsumexp(z, -1, keepdims=True)
        z = z - jax.nn.logsumexp(z, -2, keepdims=True)
    return jnp.exp(z)


# What is computed from scores. All take a statistic of them, and read them again.
WEIGHTS = {
    "softmax": jax.nn.softmax,
    "temperature": lambda z: jax.nn.softmax(z / 0.7),
    "dropout": lambda z: jax.nn.softmax(z) * KEEP / 0.8,
    "Gumbel": lambda z: jax.nn.softmax(z + NOISE),
    "exponentials over their sum": exponentials,
    "cumulative sums": lambda z: jnp.cumsum(jax.nn.softmax(z), -1),
    "the largest": lambda z: jnp.where(z == z.max(-1, keepdims=True), z, 0.0),
    "a mask by the tenth largest": lambda z: jax.nn.softmax(jnp.where(z < lax.top_k(z, 10)[0][:, -1:], -1e9, z)),
    "Sinkhorn": sinkhorn,
    "in a checkpoint that keeps statistics": lambda z: jax.checkpoint(named, policy=BY_NAME)(z),
    "a custom rule that keeps statistics": lambda z: with_rule(z),
}


def named(z):
    """A softmax whose maximum and sum a policy keeps by their name."""
    largest = checkpoint_name(lax.stop_gradient(z.max(-1, keepdims=True)), "statistic")
    total = checkpoint_name(jnp.exp(z - largest).sum(-1, keepdims=True), "statistic")
    return jnp.exp(z - largest) / total


BY_NAME = jax.checkpoint_policies.save_only_these_names("statistic")


@jax.custom_vjp
def with_rule(z):
    return forward(z)[0]


def forward(z):
    largest = z.max(-1, keepdims=True)
    total = jnp.exp(z - largest).sum(-1, keepdims=True)
    return jnp.exp(z - largest) / total, (z, largest, total)


def backward(residuals, g):
    z, largest, total = residuals
    p = jnp.exp(z - largest) / total
    return (p * (g - (g * p).sum(-1, keepdims=True)),)


with_rule.defvjp(forward, backward)


def attention(weights, dot, q, k, v):
    return dot(weights(dot(q, k.T)), v)


def projected(weights, dot, q, k, v):
    """Two products in a row before the scores, which a budget computes again."""
    return dot(weights(dot(dot(q, jnp.eye(N)), dot(k, jnp.eye(N)).T)), v)


def flash(dot):
    """Attention with a rule of its own, which keeps the scores, their maximum and their sum."""

    @jax.custom_vjp
    def attend(q, k, v):
        return attend_forward(q, k, v)[0]

    def attend_forward(q, k, v):
        p, statistics = forward(dot(q, k.T))
        return dot(p, v), (q, k, v, *statistics)

    def attend_backward(residuals, g):
        q, k, v, z, largest, total = residuals
        p = jnp.exp(z - largest) / total
        (ds,) = backward((z, largest, total), dot(g, v.T))
        return dot(ds, k), dot(ds.T, q), dot(p.T, g)

    attend.defvjp(attend_forward, attend_backward)
    return attend


AROUND = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda q, k, v: lax.cond(q[0, 0] < 1e6, f, lambda q, k, v: q, q, k, v),
    "scan": lambda f: lambda q, k, v: lax.scan(lambda c, x: (c, f(*x)), 0.0, (q[None], k[None], v[None]))[1][0],
    "vmap": lambda f: lambda q, k, v: jax.vmap(f)(q[None], k[None], v[None])[0],
}
WAYS = {
    "recompute=False": lambda f: jamp.autocast(functools.partial(f, jnp.matmul), BF16, recompute=False),
    "autocast": lambda f: jamp.autocast(functools.partial(f, jnp.matmul), BF16),
    "budget 0.5": lambda f: jamp.autocast(functools.partial(f, jnp.matmul), BF16, memory_budget=0.5),
    "budget 0": lambda f: jamp.autocast(functools.partial(f, jnp.matmul), BF16, memory_budget=0),
    "recompute by hand": lambda f: jamp.recompute(functools.partial(f, by_hand), 1.0),
    "recompute by hand, 0": lambda f: jamp.recompute(functools.partial(f, by_hand), 0),
}


def check(fun, around, ways):
    """The gradients are at most twice as far from float32's as those of casts by hand.

    The flags of XLA are its own ones: with `--xla_allow_excess_precision=false` all values agree.
    """

    def gradients(f):
        return jax.grad(lambda *args: jnp.sum(AROUND[around](f)(*args) * COTANGENT), (0, 1, 2))

    funs = [functools.partial(fun, dot) for dot in (jnp.matmul, rounded_by_hand)] + [WAYS[way](fun) for way in ways]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a budget that is too low
        exact, hand, *found = jax.jit(lambda *args: [gradients(f)(*args) for f in funs])(Q, K, V)
    distance = lambda x, y: float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y))
    apart = lambda grads: max(map(distance, grads, exact))
    for way, grads in zip(ways, found, strict=True):
        assert apart(grads) <= 2 * apart(hand), (way, apart(grads), apart(hand))


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_gradients_are_as_near_to_float32_as_those_of_casts_by_hand(weights):
    check(functools.partial(attention, WEIGHTS[weights]), "nothing", ["autocast"])


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("around", [x for x in AROUND if x != "nothing"])
def test_so_they_are_in_every_construct(around):
    check(functools.partial(attention, jax.nn.softmax), around, ["autocast"])


@pytest.mark.parametrize(
    "weights", [pytest.param(x, marks=[pytest.mark.slow] * (x not in ("softmax", "the largest"))) for x in WEIGHTS]
)
def test_so_they_are_where_a_budget_computes_products_again_also_of_code_in_16_bit(weights):
    check(functools.partial(projected, WEIGHTS[weights]), "nothing", WAYS)


@pytest.mark.parametrize("around", ["nothing", "scan"])
def test_so_they_are_in_a_custom_rule_that_keeps_scores_and_their_statistics(around):
    check(lambda dot, *args: flash(dot)(*args), around, ["autocast", "recompute=False"])


def test_plain_jax_has_the_fault_where_a_checkpoint_keeps_a_statistic_and_the_page_has_the_cure():
    """`lax.reduce_precision` behind the product."""
    low = lambda q, k: q.astype(BF16) @ k.astype(BF16).T
    softmax = jax.checkpoint(lambda z: named(z.astype(jnp.float32)), policy=BY_NAME)
    plain = lambda q, k, v: by_hand(softmax(low(q, k)), v)
    cured = lambda q, k, v: by_hand(softmax(lax.reduce_precision(low(q, k), 8, 7)), v)
    exact = lambda q, k, v: jax.nn.softmax(q @ k.T) @ v
    gradient = lambda f: jax.grad(lambda *args: jnp.sum(f(*args) * COTANGENT))
    first, *found = jax.jit(lambda *args: [gradient(f)(*args) for f in (exact, plain, cured)])(Q, K, V)
    wrong, right = (float(jnp.linalg.norm(x - first) / jnp.linalg.norm(first)) for x in found)
    assert right < 0.05 < 0.2 < wrong


def low(q, k):
    return q.astype(BF16) @ k.astype(BF16).T


def passed_in(budget, q, k, v):
    weighed = lambda z, v: by_hand(jax.nn.softmax(z.astype(jnp.float32)), v)
    return jamp.recompute(weighed, budget)(low(q, k), v)


def closed_over(budget, q, k, v):
    z = low(q, k)
    weighed = lambda q: by_hand(jax.nn.softmax(z.astype(jnp.float32) + q), v)
    return jamp.recompute(weighed, budget)(q)


def through_a_call(budget, q, k, v):
    """The call is no part of a segment, because of the name in it."""
    call = jax.jit(lambda z: checkpoint_name(jax.nn.softmax(z.astype(jnp.float32)), "weights"))
    return jamp.recompute(lambda q, k, v: by_hand(call(low(q, k)), v), budget)(q, k, v)


def out_of_a_call(budget, q, k, v):
    scores = jax.jit(lambda q, k: low(checkpoint_name(q, "q"), k))
    weights = lambda q, k: jax.nn.softmax(scores(q, k).astype(jnp.float32))
    return jamp.recompute(lambda q, k, v: by_hand(weights(q, k), v), budget)(q, k, v)


def out_of_a_segment(budget, q, k, v):
    """The name cuts the code behind the product."""
    weights = lambda q, k: jax.nn.softmax(checkpoint_name(low(jnp.tanh(q) * 8, k), "z").astype(jnp.float32))
    return jamp.recompute(lambda q, k, v: by_hand(weights(q, k), v), budget)(q, k, v)


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("way", [passed_in, closed_over, through_a_call, out_of_a_call, out_of_a_segment])
def test_a_value_in_16_bit_is_rounded_wherever_it_comes_from(way):
    gradient = lambda f: jax.grad(lambda *args: jnp.sum(f(*args) * COTANGENT), (0, 1, 2))
    ways = [functools.partial(way, budget) for budget in (1.0, 0)]
    found = jax.jit(lambda *args: [gradient(f)(*args) for f in ways])(Q, K, V)
    with jax.disable_jit():  # operation by operation, every rounding is carried out
        rounded = gradient(ways[0])(Q, K, V)
    for grads in found:
        for x, y in zip(grads, rounded, strict=True):
            assert float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y)) < 0.02


@pytest.mark.slow
def test_the_gradient_of_a_deep_model_in_16_bit_is_the_same_at_every_budget():
    def model(q, k, v):
        for _ in range(6):
            q = by_hand(jax.nn.softmax(low(jnp.sin(3 * q) * 4, k).astype(jnp.float32)), v) + q
        return jnp.sum(q * COTANGENT)

    grads = [jax.grad(jamp.recompute(model, budget), (0, 1, 2)) for budget in (1.0, 0.5, 0)]
    first, *found = jax.jit(lambda *args: [grad(*args) for grad in grads])(Q, K, V)
    for x in found:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3 * np.abs(y).max()), x, first)


def widen(x, probe):
    """A rule whose gradient of `probe` is the value that its backward rule read."""
    return x.astype(jnp.float32) + probe


def with_vjp(**options):
    rule = jax.custom_vjp(widen)
    rule.defvjp(lambda x, probe: (widen(x, probe), x), lambda x, g: (jnp.zeros_like(x), g * widen(x, 0.0)), **options)
    return rule


def linear(x, probe):
    x = lax.stop_gradient(x)
    return widen(x, linear_call(lambda x, probe: probe, lambda x, g: g * widen(x, 0.0), x, probe))


RULES = {
    "custom_vjp": with_vjp(),
    "optimize_remat": with_vjp(optimize_remat=True),
    "in a jit": jax.jit(with_vjp()),
    "closed over": lambda x, probe: jax.jit(lambda probe: with_vjp()(x, probe))(probe),
    "in a checkpoint": jax.checkpoint(with_vjp()),
    "linear_call": linear,
}
PRODUCERS = {
    "product": lambda x: x @ x,
    "multiplication": lambda x: x * x,
    "cast": lambda x: jnp.square(x.astype(jnp.float32)).astype(x.dtype),
    "transposed": lambda x: (x @ x).T,
    "joined and cut": lambda x: jnp.concatenate([x @ x, x])[: len(x)],
    "named": lambda x: checkpoint_name(x @ x, "v"),
    "in a jit": jax.jit(lambda x: x @ x),
    "in a checkpoint": jax.checkpoint(lambda x: x @ x),
    "in a branch": lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x),
    "carry": lambda x: lax.scan(lambda c, _: (x @ x, None), x, None, length=2)[0],
    "relu": lambda x: jax.nn.relu(x @ x),
}
PLACES = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "scan": lambda f: lambda x, probe: lax.scan(lambda c, x: (c, f(x, probe)), 0.0, x[None])[1][0],
    "carry": lambda f: lambda x, probe: lax.scan(lambda c, _: (c, f(c, probe)), x, None, length=2)[1][0],
    "cond": lambda f: lambda x, probe: lax.cond(x[0, 0] > 0, f, lambda x, probe: probe, x, probe),
    "vmap": lambda f: lambda x, probe: jax.vmap(f)(x[None], probe[None])[0],
}
TRANSFORMED = {
    "recompute": lambda f: jamp.recompute(f, 1.0),
    "recompute 0": lambda f: jamp.recompute(f, 0),
    "autocast": lambda f: jamp.autocast(f, BF16),
    "autocast 0.5": lambda f: jamp.autocast(f, BF16, memory_budget=0.5),
    "recompute=False": lambda f: jamp.autocast(f, BF16, recompute=False),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # autocast changes no product of a model in 16 bit
@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("rule", "producer", "place"),
    [
        *((rule, "product", "nothing") for rule in RULES),
        *(
            pytest.param("custom_vjp", x, "nothing", marks=[pytest.mark.slow] * (i > 4))
            for i, x in enumerate(PRODUCERS)
        ),
        *(pytest.param("custom_vjp", "product", x, marks=[pytest.mark.slow] * (i > 2)) for i, x in enumerate(PLACES)),
    ],
)
def test_a_derivative_rule_of_a_model_in_16_bit_reads_what_its_forward_rule_read(rule, producer, place, dtype):
    f = PLACES[place](lambda x, probe: RULES[rule](PRODUCERS[producer](x), probe))
    x = (1 + jnp.finfo(dtype).eps) * jnp.eye(2, dtype=dtype)  # its square is no number of 16 bit

    for way, transformed in TRANSFORMED.items():
        # The passes are two programs, between which a residual is stored in 16 bit.
        y, pull_back = jax.vjp(jax.jit(transformed(f)), x, jnp.zeros((2, 2)))
        np.testing.assert_array_equal(y, pull_back(jnp.ones_like(y))[1], err_msg=way)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("way", TRANSFORMED)
def test_a_statistic_outside_of_a_rule_is_of_the_scores_that_the_rule_reads(way):
    @jax.custom_vjp
    def loss(z, total, probe):
        return jnp.sum(jnp.exp(z.astype(jnp.float32) - total)) + 0 * probe

    loss.defvjp(
        lambda z, total, probe: (loss(z, total, probe), (z, total)),
        lambda r, g: (None, None, jnp.sum(jnp.exp(r[0].astype(jnp.float32) - r[1]), -1).max()),
    )

    def f(q, k, probe):
        z = low(q, k)
        return loss(z, jax.nn.logsumexp(z.astype(jnp.float32), -1, keepdims=True), probe)

    _, pull_back = jax.vjp(jax.jit(TRANSFORMED[way](f)), Q, K, 0.0)
    largest_sum = pull_back(jnp.float32(1))[2]
    np.testing.assert_allclose(largest_sum, 1, rtol=1e-5)


@pytest.mark.parametrize("budget", [1.0, 0.5])
def test_a_16_bit_argument_is_kept_as_it_came_and_not_a_rounded_copy_of_it(budget):
    """A frozen base of LoRA: XLA:TPU would keep the copies of all its weights."""

    def fun(adapter, weights, x):
        for w in weights:
            x = jnp.tanh(x @ w.astype(jnp.float32) + (x @ adapter) @ adapter.T)
        return jnp.sum(x**2)

    weights = [jax.random.normal(jax.random.key(i), (32, 32)).astype(jnp.bfloat16) for i in range(3)]
    mixed = jamp.autocast(fun, jnp.bfloat16, memory_budget=budget)
    residuals = lambda adapter, weights: jax.vjp(lambda a: mixed(a, weights, jnp.ones((64, 32))), adapter)[1]
    jaxpr = jax.make_jaxpr(residuals)(jnp.ones((32, 16)), weights).jaxpr
    kept = [v for v in jaxpr.outvars if v.aval.shape == (32, 32)]
    assert len(kept) >= 2  # the gradient of the adapter needs no product with the first
    assert set(kept) <= set(jaxpr.invars)
