"""Residuals in 8 bits: `jamp.recompute(fun, 1.0, residuals=jnp.int8)`. What is kept, and what gradients it gives.

`test_recompute.py` and `test_memory_budget.py` are for what is kept as it is, or computed again.
"""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from configurations import next_checkpoint
from jax import lax
from jaxprs import equations, kept_by_jax, normal

import jamp

I8, BF16, F32 = jnp.int8, jnp.bfloat16, jnp.float32
N, D = 64, 128
W, X = normal(D, D, seed=1, scale=D**-0.5), normal(N, D)
BUDGETS = (1.0, 0.5, 0.3, 0.1, 0)


@jax.custom_vjp
def silu(x):
    return x * jax.nn.sigmoid(x)


def _silu_backward(x, g):
    s = jax.nn.sigmoid(x)
    return (g * s * (1 + x * (1 - s)),)


silu.defvjp(lambda x: (silu(x), x), _silu_backward)


def attention(w, x):
    q, k, v = x @ w, x @ w.T, x @ (w * w * 9)
    return jax.nn.softmax(q @ k.T / 8) @ v


def norm(x):
    return (x - jnp.mean(x, -1, keepdims=True)) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-6)


def norm_over(axis, x):
    return (x - jnp.mean(x, axis, keepdims=True)) * lax.rsqrt(jnp.var(x, axis, keepdims=True) + 1e-6)


SIZES = jnp.where(jnp.arange(D) // 4 % 4 == 1, 1000, 1).astype(F32)  # large channels beside small ones


def block(w, x):
    x = x + attention(w, norm(x))
    return x + jax.nn.gelu(norm(x) @ w) @ w.T


def top_1(w, x):
    """A mixture of experts: each row is sent to one of four weights."""
    probabilities = jax.nn.softmax((norm(x) @ w)[:, :4] * 3)
    chosen = jax.nn.one_hot(jnp.argmax(probabilities, -1), 4)
    every = jnp.stack([x @ w * (i + 1) for i in range(4)], 1)
    return jnp.sum(every * (chosen * probabilities)[..., None], 1)


LAYERS = {
    "tanh": lambda w, x: jnp.tanh(x @ w),
    "relu": lambda w, x: jax.nn.relu(x @ w) @ w,
    "block": block,
    "custom_vjp": lambda w, x: silu(x @ w) @ w,
    "mixture": top_1,
    "top_k": lambda w, x: jnp.repeat(lax.top_k(jax.nn.softmax(x @ w), D // 4)[0], 4, -1) @ w,
    "dropout": lambda w, x: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.8, (N, D)), jnp.tanh(x @ w), 0) @ w,
    "max": lambda w, x: jnp.tanh(jnp.max((x @ w).reshape(N, D // 4, 4), -1).repeat(4, -1)),
    "stop_gradient": lambda w, x: jnp.tanh(x @ w) * lax.stop_gradient(x @ w),
    "checkpoint": lambda w, x: jax.checkpoint(lambda x: jnp.tanh(jnp.tanh(x @ w) @ w))(x),
    "cond": lambda w, x: lax.cond(x[0, 0] > 9, lambda x: x, lambda x: jnp.tanh(jnp.tanh(x @ w) @ w), x),
    "logarithm": lambda w, x: jnp.log(0.01 + jnp.square(x @ w)) @ w,
    "relu of a sum": lambda w, x: jax.nn.relu(x @ w + x @ w.T + w[0]) @ w,
    "batch norm": lambda w, x: norm_over(0, (x @ (w * SIZES))) @ w,
    "group norm": lambda w, x: norm_over(-1, (x @ (w * SIZES)).reshape(N, D // 4, 4)).reshape(N, D) @ w,
    "convolution": lambda w, x: jnp.tanh(
        lax.conv(x.reshape(1, 8, 32, 32), w.ravel()[: 8 * 8 * 9].reshape(8, 8, 3, 3), (1, 1), "SAME")
    ).reshape(N, D),
}


def unrolled(layer):
    return lambda w, x: jnp.sum(functools.reduce(lambda x, _: layer(w, x), range(4), x) ** 2)


def scanned(layer):
    return lambda w, x: jnp.sum(lax.scan(lambda x, w: (layer(w, x), None), x, jnp.stack([w] * 4))[0] ** 2)


# They keep nothing in 8 bits: what they keep is precise, or the user has decided about it.
AS_THEY_ARE = {unrolled: ("max", "checkpoint"), scanned: ("checkpoint",)}


def quietly(fun, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fun(*args)


def error(a, b):
    return float(jnp.linalg.norm((a - b).astype(F32)) / jnp.linalg.norm(b.astype(F32)))


def grads(fun, *args, argnums=(0, 1)):
    return quietly(jax.jit(jax.value_and_grad(fun, argnums)), *args)


def holds_codes(fun, *args):
    jaxpr = quietly(jax.make_jaxpr(jax.grad(fun, (0, 1))), *args)
    return any(v.aval.dtype == I8 for eqn in equations(jaxpr) for v in eqn.outvars if hasattr(v.aval, "dtype"))


@pytest.mark.parametrize("way", [unrolled, scanned], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_are_those_without_residuals_up_to_rounding_and_the_forward_pass_is_unchanged(layer, way):
    loss = way(LAYERS[layer])
    value, expected = grads(loss, W, X)
    assert holds_codes(jamp.recompute(loss, 1.0, residuals=I8), W, X) == (layer not in AS_THEY_ARE[way])
    # A mask of values that are computed again differs where these are small: more so in bfloat16.
    bound = 0.02 + 2 * max(map(error, grads(jamp.autocast(loss, BF16), W, X)[1], expected))
    for budget in (1.0, 0.4):
        found, mine = grads(jamp.recompute(loss, budget, residuals=I8), W, X)
        np.testing.assert_allclose(found, value, rtol=1e-5)  # XLA fuses the sum of the loss differently
        assert max(map(error, mine, expected)) < (0.012 if budget == 1.0 else bound)
    hidden = lambda w, x: LAYERS[layer](w, LAYERS[layer](w, x))
    ways = {r: jamp.recompute(hidden, 1.0, residuals=r) for r in (None, I8)}
    assert (ways[None](W, X) == ways[I8](W, X)).all()


@pytest.mark.parametrize("way", [unrolled, scanned], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("layer", ["tanh", "block", "custom_vjp", "cond", "mixture"])
def test_the_report_counts_the_bytes_that_jax_keeps_and_they_are_fewer(layer, way):
    loss = way(LAYERS[layer])
    for budget in BUDGETS:
        report = quietly(jamp.memory_report(loss, budget, residuals=I8), W, X)
        kept = quietly(kept_by_jax, jamp.recompute(loss, budget, residuals=I8), W, X)
        assert 0 <= kept - report.kept - report.end <= 16  # the index of a branch for each layer
        assert report.kept <= max(budget * report.without_budget, quietly(jamp.memory_report(loss, 0), W, X).kept)
        if budget == 1.0:
            assert kept < 0.8 * quietly(kept_by_jax, jamp.recompute(loss, budget), W, X)
        assert {row.store for row in report.rows} <= {"itself", "int8", "again"}


def squares(w, x):
    return jnp.mean((x @ w) ** 2)


@jax.custom_vjp
def of_kernel(w, x):
    return jnp.tanh(x @ w)


of_kernel.defvjp(
    lambda w, x: (jnp.tanh(x @ w), (w, x, x @ w)),
    lambda kept, g: (kept[1].T @ (g / jnp.cosh(kept[2]) ** 2), (g / jnp.cosh(kept[2]) ** 2) @ kept[0].T),
)
layer = lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w)
three_times = lambda step, x: lax.scan(lambda x, _: (step(x), None), x, length=3)[0]
mask = lambda shape: jax.random.bernoulli(jax.random.key(1), 0.5, shape)
CORNERS = {  # losses of what is the same in each step of a loop, of constants, and of rules that read their results
    "a rule of a user": lambda w, x: squares(w, of_kernel(w, of_kernel(w, layer(w, x)))),
    "an exponential, no product": lambda w, x: jnp.mean(jnp.sin(jnp.exp(jnp.sin(x)) * jnp.cos(x))),
    "a closed-over constant, in a vmap of a jit call": lambda w, x: jnp.sum(
        jax.vmap(lambda x: jax.jit(lambda w, x: squares(w, layer(w, layer(w, x) * CONSTANT)))(w, x))(jnp.stack([x, -x]))
    ),
    "an input that is the same": lambda w, x: squares(
        w, three_times(lambda c: jnp.tanh(x / 9 + jnp.sort(layer(w, c), -1)), x)
    ),
    "a product that is the same": lambda w, x: squares(w, three_times(lambda c: layer(w, c * jnp.tanh(x @ w)), x)),
    "a mask that is the same": lambda w, x: squares(
        w, three_times(lambda c: jnp.where(mask(x.shape), layer(w, c), 0), x)
    ),
    "a loop without a derivative": lambda w, x: squares(
        w, layer(w, lax.stop_gradient(lax.while_loop(lambda c: c[0, 0] > 9, lambda c: layer(w, c), x)) + layer(w, x))
    ),
    "linear algebra": lambda w, x: squares(w, layer(jnp.linalg.cholesky(w @ w.T + jnp.eye(D)), layer(w, x))),
}
CONSTANT = normal(N, D, seed=5)


@pytest.mark.parametrize("residuals", [None, I8])
@pytest.mark.parametrize("dtype", [None, BF16])
@pytest.mark.parametrize("corner", CORNERS)
def test_the_report_counts_the_bytes_that_jax_keeps_in_corners(corner, dtype, residuals):
    fun = CORNERS[corner]
    decided = fun if dtype is None else jamp.autocast(fun, dtype)
    for budget in (1.0, 0.5):
        report = quietly(jamp.memory_report(decided, budget, residuals=residuals), W, X)
        if dtype is None:
            fun_at = jamp.recompute(fun, budget, residuals=residuals)
        else:
            fun_at = jamp.autocast(fun, dtype, memory_budget=budget, residuals=residuals)
        truth = quietly(kept_by_jax, fun_at, W, X)
        if corner == "an exponential, no product" and dtype is not None and residuals is None and budget == 1.0:
            continue  # Autocast leaves a function without a product as it is.
        if corner == "an input that is the same" and residuals is not None and getattr(jax.config, "jax_remat3", False):
            continue  # JAX's next checkpoint keeps its results in each step.
        np.testing.assert_allclose(report.kept + report.end, truth, rtol=0.01, err_msg=str(budget))


def test_a_result_that_is_kept_as_it_is_is_kept_once():
    mix = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])

    def loss(w, x):
        sums = lax.associative_scan(mix, (jax.nn.sigmoid(x @ w), x @ w[::-1]), axis=0)[1]
        return squares(w, sums * lax.rsqrt(jnp.mean(sums * sums, -1, keepdims=True) + 1e-6))

    args = normal(96, 96, scale=96**-0.5), normal(64, 96)
    report = jamp.memory_report(loss, 0.5, residuals=I8)(*args)
    assert "int8" in {row.store for row in report.rows}
    assert kept_by_jax(jamp.recompute(loss, 0.5, residuals=I8), *args) == report.kept + report.end


@pytest.mark.parametrize("factor", [jnp.linalg.cholesky, jnp.linalg.qr, jnp.linalg.eigh, jnp.linalg.svd])
@pytest.mark.parametrize("residuals", [None, I8])
def test_linear_algebra_is_computed_once(factor, residuals):
    def loss(w, x):
        return squares(w, layer(jax.tree.leaves(factor(w @ w.T + jnp.eye(D)))[-1].reshape(-1, D), layer(w, x)))

    names = {"cholesky", "qr", "geqrf", "householder_product", "eigh", "svd"}
    trace = lambda fun: quietly(jax.make_jaxpr(jax.grad(fun)), W, X)
    runs = lambda fun: sum(eqn.primitive.name in names for eqn in equations(trace(fun)))
    assert runs(loss) > 0
    for budget in (1.0, 0.3):
        assert runs(jamp.recompute(loss, budget, residuals=residuals)) == runs(loss)


def test_a_report_says_what_is_kept_in_8_bits():
    report = jamp.memory_report(scanned(block), residuals=I8)(W, X)
    stores = {(row.operation, row.store): row.nbytes for row in report.rows}
    assert stores["scan", "int8"] == 4 * N * D * (1 + 2 / 16)
    assert "f32[64,128] in int8 dot_general" in str(report)


# What is computed from activations, and a number that it has whatever these are.
FACTS = {
    "rows of a softmax sum to 1": (lambda h: jax.nn.softmax(h), lambda y: y.sum(-1), 1),
    "rows of attention sum to 1": (
        lambda h: jax.nn.softmax(h @ h.T) @ jnp.eye(N, D, dtype=h.dtype),
        lambda y: y.sum(-1),
        1,
    ),
    "normalised rows have length 1": (norm, lambda y: jnp.mean(y**2, -1), 1),
    "normalised rows have mean 0": (lambda h: norm(h + 1), lambda y: jnp.mean(y, -1), 0),
    "a maximum is one of the values": (lambda h: h - jnp.max(h, -1, keepdims=True), lambda y: y.max(-1), 0),
    "a mask fits its values": (lambda h: jnp.where(h <= 0, jnp.where(h > 0, h, 0), 0), lambda y: abs(y).max(-1), 0),
}


@pytest.mark.parametrize("fact", FACTS)
def test_what_is_computed_from_a_decoded_value_is_computed_from_it_alone(fact):
    made, number, expected = FACTS[fact]

    def loss(c, w, x):
        y = made(jnp.tanh(x @ w) @ w) * c
        return jnp.sum(((y @ jnp.eye(D)) @ jnp.eye(D)).astype(F32))

    ways = {
        "float32": lambda budget: jamp.recompute(loss, budget, residuals=I8),
        "bfloat16": lambda budget: jamp.autocast(loss, BF16, memory_budget=budget, residuals=I8),
        "float16": lambda budget: jamp.autocast(loss, jnp.float16, memory_budget=budget, residuals=I8),
        "Int8": lambda budget: jamp.autocast(loss, jamp.Int8(), memory_budget=budget, residuals=I8),
    }
    for dtype, way in ways.items():
        for budget in BUDGETS:
            # The loss is linear in c, so its gradient with respect to c is y, as the backward pass reads it.
            y = quietly(jax.jit(jax.grad(way(budget))), jnp.ones((N, D)), 3 * W, X)
            np.testing.assert_allclose(number(y), expected, atol=1e-2 if "attention" in fact else 1e-5, err_msg=dtype)


def test_a_mask_and_a_divisor_are_never_zero_where_the_value_is_not():
    x = jnp.where(jnp.arange(N * D).reshape(N, D) % 3 == 0, 0, X * 10.0 ** jnp.round(-3 * abs(normal(N, D, seed=5))))
    loss = lambda c, x: jnp.sum((c * jnp.sign(x @ jnp.eye(D))) @ jnp.eye(D) @ jnp.eye(D))
    signs = jax.jit(jax.grad(jamp.recompute(loss, 1.0, residuals=I8)))(jnp.ones((N, D)), x)
    assert (signs == jnp.sign(x)).all()


@pytest.mark.parametrize(("largest", "underflows"), [(3e-4, False), (2e-4, True)])
def test_in_float16_a_number_that_is_not_zero_is_decoded_as_zero_only_beside_2e_4(largest, underflows):
    eye = jnp.eye(D, dtype=jnp.float16)
    x = jnp.where(jnp.arange(D) % 16 == 0, largest, largest / 300).astype(jnp.float16) * jnp.ones((N, 1), jnp.float16)
    loss = lambda c, x: jnp.sum((c * (x @ eye)) @ eye @ eye)
    found = in_8_bits(loss, jnp.ones((N, D), jnp.float16), x)
    assert bool((found == 0).any()) == underflows


def test_an_error_is_at_most_half_a_code_of_the_largest_magnitude_in_its_block():
    x = X * jnp.where(jnp.arange(D) == 5, 300, 1)  # a feature that is larger than the others
    loss = lambda c, x: jnp.sum((c * (x @ jnp.eye(D))) @ jnp.eye(D) @ jnp.eye(D))
    decoded = jax.jit(jax.grad(jamp.recompute(loss, 1.0, residuals=I8)))(jnp.ones((N, D)), x)
    blocks = lambda x: x.reshape(N, -1, 16)
    bound = 0.51 * jnp.max(abs(blocks(x)), -1) / 126
    assert (jnp.max(abs(blocks(decoded - x)), -1) <= bound).all()
    assert (decoded != x).any()
    assert error(jnp.delete(decoded, slice(16), axis=1), jnp.delete(x, slice(16), axis=1)) < 0.006


def in_8_bits(loss, *args):
    """The gradient of a loss, some of whose values are kept in 8 bits."""
    assert "int8" in {row.store for row in jamp.memory_report(loss, residuals=I8)(*args).rows}
    return jax.jit(jax.grad(jamp.recompute(loss, 1.0, residuals=I8)))(*args)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", [F32, BF16, jnp.float16], ids=str)
@pytest.mark.parametrize("layer", [lambda x: x, jnp.tanh, jax.nn.sigmoid], ids=["identity", "tanh", "sigmoid"])
def test_of_an_inf_no_gradient_of_its_block_is_finite(sign, dtype, layer):
    eye = jnp.eye(D, dtype=dtype)
    w = eye.at[20, 20].set(jnp.finfo(dtype).max)
    x = X.astype(dtype).at[:, 20].set(0).at[3, 20].set(2 * sign)  # one element of x @ w is inf
    loss = lambda c, x, w: jnp.sum(layer(c * (x @ w)) @ eye @ eye)
    found = in_8_bits(loss, jnp.ones((N, D), dtype), x, w)
    assert jnp.isfinite(found[:3]).all()
    assert jnp.isfinite(jnp.delete(found[3], slice(16, 32))).all()
    assert not jnp.isfinite(found[3, 16:32]).any()


def test_of_a_nan_no_gradient_of_its_block_is_finite():
    loss = lambda c, x: jnp.sum(jnp.tanh(c * (x @ jnp.eye(D))) @ jnp.eye(D) @ jnp.eye(D))
    found = in_8_bits(loss, jnp.ones((N, D)), X.at[3, 20].set(np.nan))
    assert jnp.isfinite(found[:3]).all()
    assert not jnp.isfinite(found[3]).any()


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(F32, 0.0), (F32, 1e-38), (F32, 1e-30), (F32, 1e30), (F32, 3.4e38), (jnp.float16, 65504), (BF16, 3.38e38)],
    ids=str,
)
def test_blocks_of_zeros_and_of_very_small_or_large_numbers(dtype, scale):
    eye = jnp.eye(D, dtype=dtype)
    x = (jnp.clip(X, -1, 1) * F32(scale)).astype(dtype)
    loss = lambda c, x: jnp.sum((c * (x @ eye)) @ eye @ eye)
    found = in_8_bits(loss, jnp.ones((N, D), dtype), x)
    # No scale is so large that a multiple becomes inf: numbers near 65504 lose 1.5 % in float16.
    np.testing.assert_allclose(found.astype(F32), x.astype(F32), rtol=0, atol=max(scale / 64, 1e-37))


SHAPES = {(64, 197): True, (4, 16, 7, 7, 8): True, (512, 8): True, (48, 100, 1): True, (32, 3, 64): True}
SHAPES |= {(61, 197): False, (5003,): False}  # no number from 8 to 16 divides their size


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_shape_has_blocks_if_some_divide_its_size(shape):
    a, w, c = normal(*shape[:-1], 4, seed=9), normal(4, shape[-1]), jnp.ones(shape)

    def loss(c, w):
        y = jnp.tanh(jnp.einsum("...k,kn->...n", a, w) * c)
        return jnp.sum(y.reshape(-1, 1) @ jnp.ones((1, 1)) @ jnp.ones((1, 1)))

    expected, found = (grads(jamp.recompute(loss, 1.0, residuals=r), c, w)[1] for r in (None, I8))
    assert max(map(error, found, expected)) < 0.02
    assert ("int8" in {row.store for row in jamp.memory_report(loss, residuals=I8)(c, w).rows}) == SHAPES[shape]


def test_what_is_chosen_by_an_integer_stays_chosen():
    """The gradient goes to the same experts and elements."""
    ties = jnp.round(X * 2) / 2 + 1e-4 * normal(N, D, seed=7)  # equal in 8 bits
    for layer in ("mixture", "top_k", "max"):
        loss = lambda w, x, layer=layer: jnp.sum(LAYERS[layer](w, LAYERS[layer](w, x @ jnp.eye(D))) @ w)
        expected, found = (
            grads(jamp.recompute(loss, 1.0, residuals=residuals), W, ties)[1] for residuals in (None, I8)
        )
        assert max(map(error, found, expected)) < 0.02


def apart(w, *values):
    """The values, and a number of a loop behind which code is another segment, which keeps what it reads of others."""
    return *values, lax.scan(lambda k, _: (k * 2, None), w[0, 0], None, 2)[0]


def centred(c, w, x):
    h = x @ w
    h, mean, k = apart(w, h, jnp.mean(h, -1, keepdims=True))
    return (h - mean) * c @ jnp.eye(D) * (1 + 0 * k)


def centred_in_a_loop(c, w, x):
    h = x @ w
    mean = jnp.mean(h, -1, keepdims=True)
    return lax.scan(lambda k, _: (k + (h - mean) * c @ jnp.eye(D), None), jnp.zeros((N, D)), None, 1)[0]


@pytest.mark.parametrize("made", [centred, centred_in_a_loop])
def test_a_statistic_of_other_code_and_what_it_belongs_to_are_of_the_same_values(made):
    loss = lambda *args: jnp.sum(made(*args) @ jnp.eye(D) @ jnp.eye(D))
    y = jax.jit(jax.grad(jamp.recompute(loss, 1.0, residuals=I8)))(jnp.ones((N, D)), W, X)
    np.testing.assert_allclose(y.mean(-1), 0, atol=1e-5)


INDICES = {
    "floor": lambda h: jnp.floor(20 * h).astype(jnp.int32) % 64,
    "a sum of comparisons": lambda h: jnp.searchsorted(jnp.linspace(-1, 1, 63), h, method="compare_all"),
}


@pytest.mark.parametrize("index", INDICES)
def test_an_index_that_is_computed_from_activations_is_computed_once(index):
    def loss(table, w, x):
        h = jnp.tanh(x @ w)
        return jnp.sum(table[INDICES[index](h)] * (h @ w)[..., None])

    for budget in (1.0, 0.5):
        expected, found = (
            quietly(jax.jit(jax.grad(jamp.recompute(loss, budget, residuals=r))), jnp.ones((64, 2)), W, X)
            for r in (None, I8)
        )
        # Of another index, a row of the table would get a part of the gradient of another one.
        assert error(found, expected) < 0.005


def by_cond(is_odd, w, h):
    return lax.cond(is_odd, lambda h: jnp.tanh(h) @ w.T, lambda h: -jax.nn.gelu(h @ w), h)


def by_where(is_odd, w, h):
    return jnp.where(is_odd, jnp.tanh(h) @ w.T, -jax.nn.gelu(h @ w))


@pytest.mark.parametrize("branch", [by_cond, by_where])
def test_the_backward_pass_takes_the_branch_that_the_forward_pass_took(branch):
    def loss(w, x):
        for i in range(8):
            h = x @ w
            x = x + branch(jnp.sum(h[i]) * 100 % 2 > 1, w, h)
        return jnp.mean((x @ w) ** 2)

    for budget in (1.0, 0.5, 0):
        expected, found = (grads(jamp.recompute(loss, budget, residuals=r), W, X)[1] for r in (None, I8))
        assert max(map(error, found, expected)) < 0.02


def test_factors_of_a_matrix_stay_as_they_are():
    def loss(w, x):
        h = (x @ w).reshape(-1, 16, 16)
        values, vectors = jnp.linalg.eigh(h + jnp.swapaxes(h, -1, -2))
        y = vectors * jnp.tanh(values)[:, None] @ jnp.swapaxes(vectors, -1, -2)
        return jnp.sum((y.reshape(N, D) @ w) ** 2)

    expected, found = (grads(jamp.recompute(loss, 1.0, residuals=r), W, X)[1] for r in (None, I8))
    assert max(map(error, found, expected)) < 0.02


def test_no_more_bytes_than_without_residuals():
    def dropout(w, x):
        for i in range(4):
            h = jax.nn.gelu(x @ w)
            x = x + jnp.where(jax.random.bernoulli(jax.random.key(i), 0.9, h.shape), h / 0.9, 0) @ w.T
        return jnp.mean(x**2)

    def of_channels(w, x):
        for _ in range(3):
            x = jax.nn.relu(norm_over(0, x @ w))
        return jnp.mean(x**2)

    for loss, budgets in ((dropout, (0.1, 0, "10kB")), (of_channels, (1.0,))):
        for budget in budgets:
            kept = [quietly(kept_by_jax, jamp.recompute(loss, budget, residuals=r), W, X) for r in (I8, None)]
            assert kept[0] <= kept[1]


@pytest.mark.parametrize(("exponentials", "is_coded"), [(1, True), (4, False), (20, False)])
def test_nothing_is_in_8_bits_where_more_than_seven_eighths_of_the_bytes_would_be_left(exponentials, is_coded):
    def loss(w, x):
        h = jnp.tanh(x @ w)
        arguments = (h @ (w * i) for i in range(1, exponentials + 1))  # which stay as they are
        return jnp.mean((sum(map(jnp.exp, arguments)) * h) @ w)

    report = jamp.memory_report(loss, 1.0, residuals=I8)(W, X)
    assert any(row.store == "int8" for row in report.rows) == is_coded
    assert ("Nothing is kept in 8 bits" in str(report)) == (not is_coded)
    assert report.kept < report.without_budget * (7 / 8 if is_coded else 1.001)
    assert ("less than an eighth" in str(report)) == (not is_coded)
    if exponentials == 1:  # at 0, all is computed again
        assert quietly(jamp.memory_report(loss, 0, residuals=I8), W, X).uncoded == "Nothing is kept in 8 bits."


WIDE = {
    "exponentials": lambda h: jnp.exp(6 * h),
    "scaled exponentials": lambda h: jnp.exp(6 * h) * 3,
    "masked values": lambda h: jnp.where(jnp.arange(D) % 3 == 0, -1e9, h),
    "cumulative sums": lambda h: jnp.cumsum(jnp.where(jnp.arange(D) < 16, 1e-3 * h, 100 * h), -1),
}


@pytest.mark.parametrize("made", WIDE)
def test_small_values_beside_very_large_ones_keep_their_digits(made):
    def loss(c, w, x):
        value, k = apart(w, WIDE[made](x @ w))
        return jnp.sum((value * c) @ jnp.eye(D) @ jnp.eye(D)) * (1 + 0 * k)

    ones = jnp.ones((N, D))
    found = jax.jit(jax.grad(jamp.recompute(loss, 1.0, residuals=I8)))(ones, W, X)
    np.testing.assert_allclose(found, WIDE[made](X @ W), rtol=0.01, atol=1e-4)


def test_a_ref_between_layers_with_constants():
    """The variance of a row has a number of Python for a result of its derivative."""

    def loss(w, x):
        total = jax.new_ref(jnp.zeros((N, D)))
        for _ in range(3):
            x = x + jnp.tanh(x * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5) @ w) @ w
            total[...] = total[...] + x
        return jnp.mean((jnp.tanh(total[...] @ w) @ w) ** 2)

    for budget in (1.0, 0.5):
        for residuals in (None, I8):
            expected, found = (
                quietly(grads, fun, W, X)[1] for fun in (loss, jamp.recompute(loss, budget, residuals=residuals))
            )
            assert max(map(error, found, expected)) < 0.02


def test_forward_mode_is_right_and_a_second_derivative_says_what_to_leave_out():
    loss = unrolled(block)
    fun = jamp.recompute(loss, 1.0, residuals=I8)
    value, tangent = jax.jvp(fun, (W, X), (W, X))
    assert abs(tangent - jax.jvp(loss, (W, X), (W, X))[1]) < 0.02 * abs(tangent)
    np.testing.assert_allclose(value, loss(W, X), rtol=1e-5)
    again = {
        "reverse over reverse": lambda: jax.grad(lambda w: jnp.sum(jax.grad(fun)(w, X) ** 2))(W),
        "forward over reverse": lambda: jax.jvp(jax.grad(fun), (W, X), (W, X)),
        "reverse over forward": lambda: jax.grad(lambda w: jax.jvp(fun, (w, X), (W, X))[1])(W),
        "of another argument": lambda: jax.grad(lambda x: jnp.sum(jax.grad(fun)(W, x) ** 2))(X),
        "of a custom_vjp": lambda: jax.grad(
            lambda w: jnp.sum(jax.grad(jamp.recompute(scanned(LAYERS["custom_vjp"]), 1.0, residuals=I8))(w, X))
        )(W),
    }
    for take in again.values():
        with pytest.raises(NotImplementedError, match="residuals"):
            take()


def test_under_vmap_in_loops_of_steps_and_with_donation():
    loss, fun = unrolled(block), jamp.recompute(unrolled(block), 1.0, residuals=I8)
    expected, found = (jax.vmap(jax.grad(f), (None, 0))(W, jnp.stack([X, 2 * X])) for f in (loss, fun))
    assert error(found, expected) < 0.02
    trained = [
        jax.jit(
            lambda w, f=f: lax.scan(lambda w, _: (w - 1e-6 * jax.grad(f)(w, X), None), w, None, length=3)[0],
            donate_argnums=0,
        )(W + 0)
        for f in (loss, fun)
    ]
    assert error(trained[1] - W, trained[0] - W) < 0.05


def test_the_outermost_call_decides():
    loss = unrolled(LAYERS["custom_vjp"])
    text = lambda fun: re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(jax.grad(fun))(W, X)))
    in_8_bits = jamp.recompute(loss, 1.0, residuals=I8)
    assert "i8[" in text(in_8_bits)
    assert "i8[" not in text(jamp.recompute(in_8_bits, 1.0))
    for inner in (jamp.recompute(loss, 0.5), in_8_bits):
        assert text(jamp.recompute(inner, 1.0, residuals=I8)) == text(in_8_bits)
    kept = lambda fun: kept_by_jax(fun, W, X)
    both = jamp.autocast(loss, BF16, residuals=I8)
    assert kept(jamp.recompute(jamp.autocast(loss, BF16), 1.0, residuals=I8)) == kept(both)
    assert "i8[" not in text(jamp.autocast(in_8_bits, BF16))


def test_what_the_users_checkpoint_keeps_is_not_changed():
    policy = jax.checkpoint_policies.dots_saveable
    loss = unrolled(lambda w, x: jax.checkpoint(lambda x: jnp.tanh(jnp.tanh(x @ w) @ w), policy=policy)(x))
    products = kept_by_jax(loss, W, X)
    assert kept_by_jax(jamp.recompute(loss, 1.0, residuals=I8), W, X) == products


def test_weights_and_small_arrays_and_wider_floats_stay_as_they_are():
    loss = unrolled(LAYERS["tanh"])
    report = jamp.memory_report(lambda w, x: loss(w, x[:16]), residuals=I8)(W, X)  # 2,048 elements
    assert {row.store for row in report.rows} == {"itself"}
    with jax.enable_x64(True):
        wide = jnp.asarray(np.float64(W)), jnp.asarray(np.float64(X))
        assert {row.store for row in jamp.memory_report(loss, residuals=I8)(*wide).rows} == {"itself"}


@pytest.mark.parametrize("flag", [False, True])
def test_both_checkpoints_of_jax(flag):
    if flag and not hasattr(jax.config, "jax_remat3"):
        pytest.skip("this JAX has no next checkpoint")
    with next_checkpoint(flag):
        loss = scanned(block)
        found = grads(jamp.recompute(loss, 1.0, residuals=I8), W, X)[1]
        assert max(map(error, found, grads(loss, W, X)[1])) < 0.02


def test_float16_with_a_loss_scale_trains_as_without_residuals():
    loss = lambda w, x: 1e-4 * unrolled(block)(w, x)
    tx = jamp.loss_scaled(optax.sgd(1e-3, momentum=0.9), jamp.DynamicLossScale())
    trained = {}
    for residuals in (None, I8):
        w, state = W, tx.init(W)
        fun = jamp.autocast(loss, jnp.float16, residuals=residuals)

        @jax.jit
        def step(w, state, fun=fun):
            value, gradient = jamp.value_and_grad(fun, state)(w, X)
            updates, state = tx.update(gradient, state, w)
            return w + updates, state, value

        for _ in range(20):
            w, state, value = step(w, state)
        trained[residuals] = float(value)
    assert trained[I8] < 0.9 * float(loss(W, X))
    assert abs(trained[I8] - trained[None]) < 0.02 * trained[None]


def test_a_recurrent_net_of_three_thousand_steps():
    cell = lambda w, h, x: 0.9 * h + 0.1 * jnp.tanh(x + h @ w)
    xs = normal(3000, 32, D, seed=8)

    def loss(w, h):
        return jnp.mean(lax.scan(lambda h, x: (cell(w, h, x), None), h, xs)[0] ** 2)

    h = jnp.zeros((32, D))
    found, expected = (jax.jit(jax.grad(jamp.recompute(loss, 1.0, residuals=r)))(2 * W, h) for r in (I8, None))
    assert error(found, expected) < 0.02


@pytest.mark.parametrize("bad", [jnp.float8_e4m3fn, "int4", 8, True, jnp.bfloat16])
def test_other_residuals_are_an_error(bad):
    for make in (
        lambda: jamp.recompute(unrolled(block), 1.0, residuals=bad),
        lambda: jamp.autocast(unrolled(block), BF16, residuals=bad),
        lambda: jamp.memory_report(unrolled(block), residuals=bad),
    ):
        with pytest.raises(ValueError, match=r"jnp\.int8"):
            make()
    with pytest.raises(ValueError, match="recompute=False"):
        jamp.autocast(unrolled(block), BF16, recompute=False, residuals=I8)
