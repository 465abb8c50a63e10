"""`compare`: the first operation where two programs part."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jaxprs import normal

import jamp
import jamp.debug

KEYS = jax.random.split(jax.random.key(0), 2)
WEIGHTS, X = jax.random.normal(KEYS[0], (5, 16, 16)) / 4, jax.random.normal(KEYS[1], (8, 16))


def unrolled(w, x):
    for i in range(5):
        x = jnp.tanh(x @ w[i] + x)
    return jnp.mean(x**2)


def scanned(w, x):
    return jnp.mean(lax.scan(lambda h, wi: (jnp.tanh(h @ wi + h), None), x, w)[0] ** 2)


def in_micro_batches(w, x):
    return jnp.mean(lax.map(lambda part: 16 * unrolled(w, part), x.reshape(4, 2, 16))) / 16


def with_a_mistake(w, x):
    for i in range(5):
        h = x @ w[i]
        if i == 3:
            h = h * 1.05  # here
        x = jnp.tanh(h + x)
    return jnp.mean(x**2)


HERE = 1 + next(i for i, line in enumerate(Path(__file__).read_text().splitlines()) if line.endswith("# here"))


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("fun", "other"),
    [
        pytest.param(fun, other, marks=[pytest.mark.slow] * ((i - j) % 3 != 1))
        for i, fun in enumerate([unrolled, scanned, in_micro_batches])
        for j, other in enumerate([unrolled, scanned, in_micro_batches])
    ],
)
def test_programs_that_compute_the_same_agree(fun, other):
    found = jamp.debug.compare(fun, other)(WEIGHTS, X)
    assert not found
    assert found.first is None
    assert "agree" in str(found)
    assert len(found.rows) >= 15  # Of each layer the product, the sum and tanh.
    assert max(row.difference for row in found.rows) < 1e-6


@pytest.mark.parametrize(
    "fun",
    [*(pytest.param(f, marks=pytest.mark.slow) for f in (scanned, in_micro_batches)), unrolled, jax.grad(unrolled)],
)
def test_the_first_operation_that_differs_is_named(fun):
    mistaken = jax.grad(with_a_mistake) if fun(WEIGHTS, X).ndim else with_a_mistake
    found = jamp.debug.compare(fun, mistaken)(WEIGHTS, X)
    assert found
    difference = found.differences[0]
    assert difference.operation == "mul(_, 1.05) only there"
    assert difference.other_source == f"test_compare.py:{HERE} (with_a_mistake)"
    assert found.first.operation == "add"
    assert 0.01 < found.first.difference < 0.1
    rows = [row.difference for row in found.rows]
    assert max(rows[:9]) < 1e-6  # three layers


def test_a_failed_assertion_names_the_line_and_a_report_has_100_columns():
    found = jamp.debug.compare(unrolled, with_a_mistake)(WEIGHTS, X)
    with pytest.raises(AssertionError) as error:
        assert not found
    assert f"test_compare.py:{HERE} (with_a_mistake)" in str(error.value)
    assert len(repr(found)) <= 240
    *_, last = lines = str(found).splitlines()
    assert max(map(len, lines)) <= 100
    assert last == "Make the first difference equal, and compare again."
    assert str(jamp.debug.compare(unrolled, unrolled)(WEIGHTS, X)).count("\n") == 0


@pytest.mark.slow
def test_a_difference_that_is_masked_is_no_difference():
    def fun(x, other):
        scores = x @ (x + other).T
        return jax.nn.softmax(jnp.where(jnp.tri(8, dtype=bool), scores, -1e9) * 1.0) @ x

    tail = jnp.where(jnp.arange(8) < 7, 0.0, 3.0)[:, None]
    mask = lambda x: fun(x, tail)[:7]  # The last key is masked for all rows but the last.
    assert not jamp.debug.compare(lambda x: fun(x, 0 * tail)[:7], mask)(X)


def test_float32_and_16_bit_differ_by_rounding():
    found = jamp.debug.compare(unrolled, jamp.autocast(unrolled, jnp.bfloat16))(WEIGHTS, X)
    assert not found
    assert {(row.dtype, row.other_dtype) for row in found.rows if row.operation == "dot_general"} == {
        ("float32", "bfloat16")
    }
    assert 1e-3 < max(row.difference for row in found.rows) < 2e-2
    assert found.dtype == "bfloat16"
    assert str(found).startswith("The functions agree to bfloat16: ")
    assert str(found).endswith("call jamp.debug.rounding_report(fun, jnp.bfloat16).")


def decoded(params, tokens):
    """Attention over a cache of keys and values, one token at a time."""

    def step(caches, inputs):
        place, token = inputs
        h = params["embed"][token] + params["place"][place]
        q, k, v = (h @ params[name] for name in "qkv")
        caches = tuple(c.at[:, place].set(new) for c, new in zip(caches, (k, v), strict=True))
        scores = jnp.einsum("bd,bkd->bk", q, caches[0])
        scores = jnp.where(jnp.arange(scores.shape[1]) <= place, scores, -jnp.inf)
        return caches, h + jnp.einsum("bk,bkd->bd", jax.nn.softmax(scores), caches[1])

    empty = jnp.zeros((*tokens.shape, 16))
    return lax.scan(step, (empty, empty), (jnp.arange(tokens.shape[1]), tokens.T))[1].swapaxes(0, 1)


def at_once(params, tokens, start=0):
    h = params["embed"][tokens] + params["place"][start + jnp.arange(tokens.shape[1])]
    q, k, v = (h @ params[name] for name in "qkv")
    scores = jnp.einsum("bqd,bkd->bqk", q, k)
    scores = jnp.where(jnp.tri(scores.shape[1], dtype=bool), scores, -jnp.inf)
    return h + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v)


@pytest.mark.slow
def test_a_cached_decode_and_a_full_forward_pass():
    keys = iter(jax.random.split(jax.random.key(2), 6))
    shapes = {"embed": (11, 16), "place": (8, 16), "q": (16, 16), "k": (16, 16), "v": (16, 16)}
    params = {name: jax.random.normal(next(keys), shape) / 4 for name, shape in shapes.items()}
    tokens = jax.random.randint(next(keys), (3, 6), 0, 11)
    found = jamp.debug.compare(decoded, at_once)(params, tokens)
    assert not found
    assert sum(row.operation == "dot_general" for row in found.rows) >= 4
    late = jamp.debug.compare(decoded, lambda p, t: at_once(p, t, 1))(params, tokens)  # Positions begin at 1.
    assert late
    assert late.differences[0].operation == "add(1, _) only there"
    assert "(at_once)" in late.differences[0].other_source


def attention(params, x):
    q, k, v = x @ params["q"], x @ params["k"] + params["bias"], x @ params["v"]
    return jnp.sum((jax.nn.softmax(q @ k.T) @ v) ** 2)


@pytest.mark.slow
def test_gradients_that_are_zero_but_for_rounding_are_no_difference():
    """That of a bias of the keys: a constant changes no softmax."""
    names = zip("qkv", jax.random.split(KEYS[0], 3), strict=True)
    params = {name: jax.random.normal(key, (16, 16)) / 4 for name, key in names} | {"bias": jnp.ones(16)}
    assert not jamp.debug.compare(jax.grad(attention), jax.grad(jamp.autocast(attention, jnp.bfloat16)))(params, X)
    batch = jax.random.normal(KEYS[1], (4, 8, 16))
    of_batch = lambda params, x: jnp.sum(jax.vmap(lambda x: attention(params, x))(x))
    add = lambda sums, x: (jax.tree.map(jnp.add, sums, jax.grad(of_batch)(params, x)), None)
    parts = lambda params, x: lax.scan(add, jax.tree.map(jnp.zeros_like, params), x.reshape(2, 2, 8, 16))[0]
    assert not jamp.debug.compare(jax.grad(of_batch), parts)(params, batch)


PAIRS = {
    "NaN": (lambda w, x: x @ x.T, lambda w, x: (x @ x.T) * jnp.nan),
    "NaN behind a value": (lambda w, x: jnp.log(x).at[0].set(5.0), lambda w, x: jnp.log(x).at[0].set(7.0)),
    "an index": (lambda w, x: jnp.argmax(x), lambda w, x: jnp.argmin(x)),
    "a shape": (lambda w, x: x @ x.T, lambda w, x: (x @ x.T)[:3]),
    "complex": (lambda w, x: jnp.fft.fft(x) * 2.0, lambda w, x: jnp.fft.fft(x) * 3.0),
    "a factor at the end": (lambda w, x: jnp.tanh(x @ w[0]), lambda w, x: jnp.tanh(x @ w[0]) * 1.5),
}


@pytest.mark.parametrize("name", PAIRS)
def test_results_that_differ_are_never_called_equal(name):
    found = jamp.debug.compare(*PAIRS[name])(WEIGHTS, X)
    assert found
    assert "agree" not in str(found)
    assert "differ" in repr(found)
    if name == "a factor at the end":
        assert found.differences[0].operation == "mul(_, 1.5) only there"


@pytest.mark.slow
def test_random_numbers_are_those_of_the_function():
    draw = lambda x, factor=1.0: jax.random.gamma(jax.random.key(0), jnp.exp(x * factor))
    assert not jamp.debug.compare(draw, draw)(X)
    assert jamp.debug.compare(draw, lambda x: draw(x, 1.02))(X)


def test_results_of_other_structures_are_an_error():
    with pytest.raises(ValueError, match="same part"):
        jamp.debug.compare(lambda x: x, lambda x: (x, x))(X)


def test_inserted_and_removed_operations_are_left_out():
    extra = lambda w, x: unrolled(w, jnp.abs(x) * jnp.sign(x))
    found = jamp.debug.compare(unrolled, extra)(WEIGHTS, X)
    assert not found
    assert len(found.rows) >= 15
    assert jamp.debug.compare(unrolled, lambda w, x: jnp.sum(w) + 0 * jnp.sum(x))(WEIGHTS, X)


NEGATIVE = {"finite": -1e9, "smallest": float(jnp.finfo(jnp.float32).min), "inf": -jnp.inf}


def masked(params, x, fill, base=1e4, scale=0.25, is_added=False):
    """An attention with rotary positions."""
    half = 8
    angles = jnp.arange(8.0)[:, None] / base ** (jnp.arange(half) / half)  # base
    turn = lambda z: jnp.concatenate(
        [z[:, :half] * jnp.cos(angles) - z[:, half:] * jnp.sin(angles), z[:, :half] * jnp.sin(angles)], -1
    )
    scores = turn(x @ params["q"]) @ turn(x @ params["k"]).T * scale  # scale
    is_seen = jnp.tri(8, dtype=bool)
    scores = scores + jnp.where(is_seen, 0, fill) if is_added else jnp.where(is_seen, scores, fill)
    return jax.nn.softmax(scores) @ (x @ params["v"])


PARAMS = {
    name: jax.random.normal(key, (16, 16)) / 4 for name, key in zip("qkv", jax.random.split(KEYS[0], 3), strict=True)
}


CHANGES = [
    ({"base": 5e3}, "pow(10000, _) here, pow(5000, _) there"),
    ({"scale": 0.2}, "mul(_, 0.25) here, mul(_, 0.2) there"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fill", "is_added", "change", "text"),
    [
        pytest.param(fill, bool(j), *change, marks=[pytest.mark.slow] * ((i % 2, j) != (k, 1 - k)))
        for i, fill in enumerate(NEGATIVE.values())
        for j in range(2)
        for k, change in enumerate(CHANGES)
    ],
)
def test_a_mask_hides_no_constant_behind_it(fill, is_added, change, text):
    fun = lambda params, x, **change: masked(params, x, fill, is_added=is_added, **change)
    assert not jamp.debug.compare(fun, fun)(PARAMS, X)
    found = jamp.debug.compare(fun, lambda params, x: fun(params, x, **change))(PARAMS, X)
    assert found.differences[0].operation == text
    assert (
        found.differences[0].source
        == found.differences[0].other_source
        == f"test_compare.py:{line('# ' + next(iter(change)))} (masked)"
    )


def line(end):
    return 1 + next(i for i, text in enumerate(Path(__file__).read_text().splitlines()) if text.endswith(end))


@pytest.mark.slow
def test_programs_that_only_round_differently_agree_to_a_dtype():
    def narrow(params, x):
        scores = (x @ params["q"] @ x.T).astype(jnp.bfloat16)
        return jax.nn.softmax(scores).astype(jnp.float32) @ x

    wide = lambda params, x: jax.nn.softmax(x @ params["q"] @ x.T) @ x
    found = jamp.debug.compare(wide, narrow)(PARAMS, X)
    assert not found
    assert (found.dtype, found.differences) == ("bfloat16", ())
    assert found.results[0] > 1e-4
    assert (
        jamp.debug.compare(wide, lambda params, x: jax.nn.softmax(x @ params["q"] @ x.T, -1) @ x)(PARAMS, X).dtype
        == "float32"
    )
    worse = lambda params, x: narrow(params, x * 1.0001)  # less than the rounding of bfloat16
    assert jamp.debug.compare(wide, worse)(PARAMS, X)


@pytest.mark.slow
def test_two_forms_of_one_norm_agree_and_an_epsilon_does_not():
    def fast(x, eps=1e-6):
        mean, square = jnp.mean(x, -1, keepdims=True), jnp.mean(x * x, -1, keepdims=True)
        return (x - mean) * lax.rsqrt(jnp.maximum(0, square - mean**2) + eps)

    def exact(x, eps=1e-6):
        shifted = x - jnp.mean(x, -1, keepdims=True)
        return shifted / jnp.sqrt(jnp.mean(jnp.square(shifted), -1, keepdims=True) + eps)

    loss = lambda norm: lambda x: jnp.sum(jnp.tanh(norm(x)) ** 2)
    assert not jamp.debug.compare(fast, exact)(X + 5)
    assert not jamp.debug.compare(jax.grad(loss(fast)), jax.grad(loss(exact)))(X)
    found = jamp.debug.compare(fast, lambda x: exact(x, 1e-5))(X)
    assert "1e-05" in found.differences[0].operation


@pytest.mark.slow
def test_the_order_of_a_badly_conditioned_sum_is_rounding():
    x = jnp.concatenate([1e6 * X.ravel(), -1e6 * X.ravel(), X.ravel()])
    assert not jamp.debug.compare(jnp.sum, lambda x: jnp.sum(x[::-1].reshape(3, -1).sum(0)))(x)
    assert jamp.debug.compare(jnp.sum, lambda x: jnp.sum(x) + 50)(x)


@pytest.mark.slow
def test_a_value_that_is_0_but_for_rounding_is_rounding():
    total = lambda x: jnp.sum(jax.nn.softmax(x), -1) - 1
    parts = lambda x: jnp.sum(jax.nn.softmax(x)[:, ::-1].reshape(8, 4, 4).sum(1), -1) - 1
    found = jamp.debug.compare(total, parts)(X)
    assert not found
    assert found.without_rounding[0] > 0.1
    assert not jamp.debug.compare(total, jamp.autocast(lambda x: (jax.nn.softmax(x) @ jnp.ones(16)) - 1, jnp.bfloat16))(
        X
    )


@pytest.mark.slow
def test_a_loss_that_cancels_in_16_bit_hides_no_difference():
    """A policy gradient at its first step: all ratios are 1, and the advantages have the mean 0."""

    def log_probs(w, x, eps, dtype):
        h = (x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + eps)).astype(dtype)
        return jax.nn.log_softmax((h @ w.astype(dtype)).astype(jnp.float32))[:, 0]

    def loss(w, x, old, advantages, eps, dtype):
        return jnp.mean(jnp.exp(log_probs(w, x, eps, dtype) - old) * advantages)

    w, x = normal(64, 64) / 8, 0.02 * normal(256, 64, seed=1)
    old, advantages = log_probs(w, x, 1e-6, jnp.float32), jnp.linspace(-1, 1, 256)
    ways = {
        (eps, dtype): lambda *a, how=(eps, dtype): loss(*a, *how)
        for eps in (1e-6, 1e-5)
        for dtype in (jnp.bfloat16, jnp.float32)
    }
    for (eps, here), fun in ways.items():
        for (other_eps, there), other in ways.items():
            found = jamp.debug.compare(fun, other)(w, x, old, advantages)
            assert bool(found) == (eps != other_eps), (eps, here, other_eps, there)
            if found and here == there:  # Neither `old` nor the advantages are taken for what equals them.
                assert found.differences[0].operation == f"add(_, {eps:g}) here, add(_, {other_eps:g}) there"


@pytest.mark.slow
def test_float64_is_compared_with_the_rounding_of_float64(x64):
    x = jnp.asarray(X, jnp.float64)
    found = jamp.debug.compare(
        lambda x: jnp.sum(x @ x.T / 3), lambda x: jnp.sum(x.T @ x * (1 / 3)) * 0 + jnp.sum(x @ x.T) / 3
    )(x)
    assert not found
    assert found.dtype == "float64"
    assert jamp.debug.compare(lambda x: x / 3, lambda x: x * np.float64(0.3333333333))(x)


def test_products_in_float32_of_float64_code_show_in_the_difference(x64):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)))
    fun = lambda x: jnp.sum(jnp.tanh(x @ x) @ x, axis=0)
    found = jamp.debug.compare(fun, jamp.autocast(fun, jnp.float32))(x)
    assert not found
    assert found.dtype == "float64"
    assert 1e-9 < found.results[0] < 1e-5
    assert f"differ by {found.results[0]:.1e}" in str(found)


def test_a_nan_in_float32_is_no_nan_in_float64(x64):
    """The rounding of float64 is estimated from a run in float32, in which this variance is negative or 0."""
    x = 1e5 + jax.random.normal(jax.random.key(0), (1000,), jnp.float64)
    fun = lambda x: jnp.log(jnp.mean(x**2) - jnp.mean(x) ** 2)
    found = jamp.debug.compare(fun, lambda x: jnp.log(jnp.var(x)))(x)
    assert found
    assert found.dtype == "float64"
    assert found.results == found.without_rounding
    assert 0 < found.results[0] < 1e-4
    assert "What rounding explains of it is unknown" in str(found)
    assert "so not by rounding" not in str(found)
    agreeing = jamp.debug.compare(lambda x: jnp.sum(x) / 3, lambda x: jnp.sum(x / 3))(x)
    assert not agreeing
    assert agreeing.results[0] < 1e-12


def test_an_overflow_of_one_program_is_a_difference_of_its_own():
    found = jamp.debug.compare(lambda x: x * 300, lambda x: (x.astype(jnp.float16) * 300).astype(jnp.float32))(
        jnp.full(3, 300.0)
    )
    assert found
    assert math.isinf(found.results[0])
    assert str(found).splitlines() == [
        "The results differ in shape, or in where they are inf or NaN.",
        "In float64 they agree. Call jamp.debug.find_nonfinite of both functions.",
    ]


FAULTS = {
    "another argument": (
        lambda p, x: x @ p["q"],
        lambda p, x: x @ p["k"],
        "dot_general(x, p['q']) here, dot_general(x, p['k']) there",
    ),
    "an axis": (
        lambda p, x: jnp.cumsum(x @ p["q"], 0),
        lambda p, x: jnp.cumsum(x @ p["q"], 1),
        "cumsum with axis=0 here, 1 there",
    ),
    "a slice": (
        lambda p, x: jnp.tanh(x @ p["q"])[:-1] * 2,
        lambda p, x: jnp.tanh(x @ p["q"])[1:] * 2,
        "slice with start_indices=(0, 0) here, (1, 0) there",
    ),
    "other operands": (lambda p, x: jnp.sin(x) - jnp.tanh(x), lambda p, x: jnp.tanh(x) - jnp.sin(x), "sub of sin at"),
    "a permutation": (
        lambda p, x: (x @ p["q"]).T @ x,
        lambda p, x: (x @ p["q"])[:, ::-1].T @ x,
        "an operand of dot_general has the same elements in another order",
    ),
    "a missing operation": (lambda p, x: jax.nn.relu(x @ p["q"]), lambda p, x: x @ p["q"], "max(_, 0) only here"),
    "another operation": (
        lambda p, x: jnp.tanh(x @ p["q"]) + x,
        lambda p, x: lax.erf(x @ p["q"]) + x,
        "tanh only here",
    ),
    "random bits": (
        lambda p, x: x * jax.random.normal(jax.random.key(0), (8, 16)),
        lambda p, x: x * jax.random.normal(jax.random.key(1), (8, 16)),
        "",
    ),
    "another result": (
        lambda p, x: (jnp.sin(x), jnp.cos(x)),
        lambda p, x: (jnp.cos(x), jnp.sin(x)),
        "the results are other values",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_difference_is_read_from_the_operations(name):
    fun, other, text = FAULTS[name]
    assert not jamp.debug.compare(fun, fun)(PARAMS, X)
    found = jamp.debug.compare(fun, other)(PARAMS, X)
    assert found.differences[0].operation.startswith(text)
    assert {"test_compare.py:"} == {
        x[:16] for x in (found.differences[0].source, found.differences[0].other_source) if x
    }


def softmax_kernel(x_ref, o_ref):
    """A softmax in blocks of columns, with a running maximum and sum."""
    top, total = jnp.full((8, 1), -jnp.inf, x_ref.dtype), jnp.zeros((8, 1), x_ref.dtype)
    for i in range(0, 16, 4):
        block = x_ref[:, i : i + 4]
        new = jnp.maximum(top, jnp.max(block, -1, keepdims=True))
        total = total * jnp.exp(top - new) + jnp.sum(jnp.exp(block - new), -1, keepdims=True)
        top = new
    o_ref[...] = jnp.exp(x_ref[...] - top) / total


def test_a_kernel_agrees_with_its_reference_and_its_line_is_named_if_not():
    kernel = lambda x, body=softmax_kernel: pl.pallas_call(
        body, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
    )(x)
    assert not jamp.debug.compare(kernel, jax.nn.softmax)(10 * X)
    low = lambda f: lambda x: f(x.astype(jnp.bfloat16)).astype(jnp.float32)
    assert not jamp.debug.compare(low(kernel), jax.nn.softmax)(X)

    def wrong(x_ref, o_ref):
        softmax_kernel(x_ref, o_ref)
        o_ref[0, 0] *= 1.001

    found = jamp.debug.compare(lambda x: kernel(x, wrong), jax.nn.softmax)(X)
    assert "pallas_call" in " ".join(x.operation for x in found.differences[:2])


def test_inside_jit_it_says_to_call_it_outside():
    with pytest.raises(TypeError, match="outside"):
        jax.jit(lambda x: jamp.debug.compare(jnp.sin, jnp.cos)(x))(X)
