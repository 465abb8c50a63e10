"""`compare`: the first operation where two programs part."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

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


@pytest.mark.parametrize("fun", [unrolled, scanned, in_micro_batches])
@pytest.mark.parametrize("other", [unrolled, scanned, in_micro_batches])
def test_programs_that_compute_the_same_agree(fun, other):
    found = jamp.debug.compare(fun, other)(WEIGHTS, X)
    assert not found
    assert found.first is None
    assert "agree" in str(found)
    assert len(found.rows) >= 15  # Of each layer the product, the sum and tanh.
    assert max(row.difference for row in found.rows if row.reaches_results) < 1e-6


@pytest.mark.parametrize("fun", [unrolled, scanned, in_micro_batches, jax.grad(unrolled)])
def test_the_first_operation_that_differs_is_named(fun):
    mistaken = jax.grad(with_a_mistake) if fun(WEIGHTS, X).ndim else with_a_mistake
    found = jamp.debug.compare(fun, mistaken)(WEIGHTS, X)
    assert found
    assert found.first.operation == "add"
    assert 0.01 < found.first.difference < 0.1
    assert found.first.operands < 1e-6
    assert any(name.startswith("mul at test_compare.py") for name in found.only_there)
    text = str(found)
    assert "part at add" in text
    assert "(with_a_mistake)" in text
    rows = [row.difference for row in found.rows]
    assert max(rows[:9]) < 1e-6  # three layers


@pytest.mark.slow
def test_a_difference_that_is_masked_is_no_difference():
    def fun(x, other):
        scores = x @ (x + other).T
        return jax.nn.softmax(jnp.where(jnp.tri(8, dtype=bool), scores, -1e9) * 1.0) @ x

    tail = jnp.where(jnp.arange(8) < 7, 0.0, 3.0)[:, None]
    mask = lambda x: fun(x, tail)[:7]  # The last key is masked for all rows but the last.
    found = jamp.debug.compare(lambda x: fun(x, 0 * tail)[:7], mask)(X)
    assert not found
    assert any(row.difference > 0.01 and not row.reaches_results for row in found.rows)


def test_float32_and_16_bit_differ_by_rounding():
    found = jamp.debug.compare(unrolled, jamp.autocast(unrolled, jnp.bfloat16))(WEIGHTS, X)
    assert not found
    assert {(row.dtype, row.other_dtype) for row in found.rows if row.operation == "dot_general"} == {
        ("float32", "bfloat16")
    }
    assert 1e-3 < max(row.difference for row in found.rows) < 2e-2


def test_the_difference_is_the_compilers_if_the_operations_agree():
    """XLA may leave out the rounding of a product whose result is cast back to float32."""
    low = [jamp.autocast(f, jnp.bfloat16) for f in (unrolled, scanned)]
    found = jamp.debug.compare(*low)(WEIGHTS, X)
    assert not found
    assert found.results == (0.0,)
    whole = jax.jit(low[0], compiler_options={"xla_allow_excess_precision": False})(WEIGHTS, X)
    expected = abs(jax.jit(low[0])(WEIGHTS, X) - whole) / whole  # 0 on some releases
    assert found.compiled[0] == pytest.approx(float(expected), rel=0.1, abs=2e-7)
    assert "the compiler's difference" in str(dataclasses.replace(found, compiled=(1e-3, 0.0)))


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
    assert late.first.operation == "add"
    assert "(at_once)" in late.first.other_source


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
    assert "agree:" not in str(found)
    if name == "a factor at the end":
        assert any(text.startswith("mul at test_compare.py") for text in found.only_there)


def test_results_of_other_structures_are_an_error():
    with pytest.raises(ValueError, match="the same results"):
        jamp.debug.compare(lambda x: x, lambda x: (x, x))(X)


def test_inserted_and_removed_operations_are_left_out():
    extra = lambda w, x: unrolled(w, jnp.abs(x) * jnp.sign(x))
    found = jamp.debug.compare(unrolled, extra)(WEIGHTS, X)
    assert not found
    assert len(found.rows) >= 15
    assert jamp.debug.compare(unrolled, lambda w, x: jnp.sum(w) + 0 * jnp.sum(x))(WEIGHTS, X)
