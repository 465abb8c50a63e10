"""`chunked_sum` of functions whose rows interact is an error at the user's line, and that of a sum over rows is not."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jaxprs import normal

import jamp

N, SEQ, WIDTH, VOCABULARY, CHUNK = 12, 6, 8, 10, 4
W, X = normal(WIDTH, VOCABULARY, seed=1, scale=0.5), normal(N, WIDTH, seed=2)
Y = jnp.asarray(np.random.default_rng(3).integers(0, VOCABULARY, N), jnp.int32)
A = normal(N, seed=4)
XS, XT = normal(N, SEQ, WIDTH, seed=5), normal(N, SEQ, WIDTH, seed=6)
YS = jnp.asarray(np.random.default_rng(7).integers(0, VOCABULARY, (N, SEQ)), jnp.int32)
ROW, TOKENS, PAIRED = (X, Y), (XS, YS), (XS, XT, YS)
SUMS, OTHERS = {}, {}


def sums(*rows, params=W, axis=0):
    """A function that is a sum over rows."""
    return lambda fun: SUMS.setdefault(fun.__name__, (fun, params, rows, axis))[0]


def interacts(*rows, params=W, axis=0, match=""):
    """A function that is not."""
    return lambda fun: OTHERS.setdefault(fun.__name__, (fun, params, rows, axis, match))[0]


def log_p(w, x, y):
    return jnp.take_along_axis(jax.nn.log_softmax(x @ w), y[..., None], -1)[..., 0]


# Cross entropy and its kin.


@sums(*ROW)
def where(w, x, y):
    logits = x @ w
    chosen = jnp.where(jnp.arange(VOCABULARY) == y[:, None], logits, 0).sum(-1)
    return jnp.sum(jax.nn.logsumexp(logits, -1) - chosen)


@sums(*ROW)
def take_along_axis(w, x, y):
    return -log_p(w, x, y).sum()


@sums(*ROW)
def one_hot(w, x, y):
    return -jnp.sum(jax.nn.one_hot(y, VOCABULARY) * jax.nn.log_softmax(x @ w))


@sums(*ROW)
def gather_by_arange(w, x, y):
    return -jax.nn.log_softmax(x @ w)[jnp.arange(len(x)), y].sum()


@sums(*ROW)
def gather_by_numpy_arange(w, x, y):
    return -jax.nn.log_softmax(x @ w)[np.arange(len(x)), y].sum()


@sums(*ROW)
def gather_by_flat_indices(w, x, y):
    return -jax.nn.log_softmax(x @ w).ravel()[jnp.arange(len(x), dtype=y.dtype) * VOCABULARY + y].sum()


@sums(*ROW)
def optax_integer_labels(w, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, y).sum()


@sums(*ROW)
def label_smoothing(w, x, y):
    targets = jnp.full((len(x), VOCABULARY), 0.1 / VOCABULARY).at[jnp.arange(len(x)), y].add(0.9)
    return optax.softmax_cross_entropy(x @ w, targets).sum()


@sums(*ROW)
def z_loss(w, x, y):
    z = jax.nn.logsumexp(x @ w, -1)
    return jnp.sum(z) + 1e-4 * jnp.sum(z**2) - jnp.sum(log_p(w, x, y))


@sums(*ROW)
def focal(w, x, y):
    p = jnp.exp(log_p(w, x, y))
    return -jnp.sum((1 - p) ** 2 * jnp.log(p)), jnp.sum(jnp.argmax(x @ w, -1) == y)


@sums(X, 0.9 * X)
def distillation(w, x, teacher):
    p = jax.nn.softmax(teacher @ w / 2.0)
    return 4.0 * jnp.sum(p * (jnp.log(p) - jax.nn.log_softmax(x @ w / 2.0)))


@sums(*PAIRED)
def dpo(w, x, rejected, y):
    margin = (log_p(w, x, y) - log_p(w, rejected, y)).sum(-1)
    return -jnp.sum(jax.nn.log_sigmoid(0.1 * margin)), (jnp.sum(margin > 0), jnp.sum(margin))


@sums(*PAIRED)
def dpo_of_a_concatenation(w, x, rejected, y):
    total = log_p(w, jnp.concatenate([x, rejected]), jnp.concatenate([y, y])).sum(-1)
    return -jnp.sum(jax.nn.log_sigmoid(0.1 * (total[: len(x)] - total[len(x) :])))


@sums(jnp.stack([XS, XT], 1), jnp.stack([YS, YS], 1))
def dpo_of_neighbours_in_a_row(w, x, y):
    total = log_p(w, x.reshape(-1, SEQ, WIDTH), y.reshape(-1, SEQ)).sum(-1)
    return -jnp.sum(jax.nn.log_sigmoid(0.1 * (total[::2] - total[1::2])))


@sums(*TOKENS, A, jnp.float32(YS % 3 > 0))
def grpo(w, x, y, advantage, mask):
    log = log_p(w, x, y)
    ratio = jnp.exp(log - lax.stop_gradient(log))
    loss = -jnp.minimum(ratio * advantage[:, None], jnp.clip(ratio, 0.8, 1.2) * advantage[:, None])
    return jnp.sum((loss * mask).sum(-1) / jnp.maximum(mask.sum(-1), 1)), jnp.sum(mask)


@sums(XS)
def contrastive_within_a_row(w, x):
    z = x @ w
    scores = jnp.einsum("nsd,ntd->nst", z, z)
    return -jnp.sum(jnp.diagonal(jax.nn.log_softmax(scores), axis1=1, axis2=2))


@sums(*TOKENS)
def ctc(w, x, y):
    return optax.ctc_loss(x @ w, jnp.zeros(x.shape[:2]), y[:, :3], jnp.zeros((len(x), 3))).sum()


# Rows and other axes.


@sums(*TOKENS, YS % 3 > 0)
def merged_with_the_sequence(w, x, y, mask):
    loss = -log_p(w, x.reshape(-1, WIDTH), y.reshape(-1))
    return jnp.sum(jnp.where(mask.reshape(-1), loss, 0.0)) + loss.reshape(-1, SEQ).mean(-1).sum(), jnp.sum(mask)


@sums(XS.swapaxes(0, 1), YS.T, axis=1)
def along_axis_1(w, x, y):
    return -log_p(w, x.reshape(-1, WIDTH), y.reshape(-1)).sum()


@sums(*TOKENS)
def the_next_token(w, x, y):
    return -log_p(w, x[:, :-1], y[:, 1:]).sum() + jnp.sum(jnp.cumsum(x @ w, 1) ** 2) + jnp.sum(x[:, ::-1] * x)


@sums(*ROW)
def normalized_features(w, x, y):
    x = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return where(w, x / x.std(1, keepdims=True), y) + jnp.linalg.norm(x, axis=-1).sum()


@sums(XS)
def attention(w, x):
    mask = jnp.where(jnp.tril(jnp.ones((SEQ, SEQ))) > 0, 0.0, -1e9)
    p = jax.nn.softmax(jnp.einsum("bsd,btd->bst", x, x) / np.sqrt(WIDTH).astype(np.float32) + mask)
    return jnp.sum((p @ x @ w) ** 2)


@sums(XS)
def convolution_and_pooling(w, x):
    y = lax.conv_general_dilated(x.swapaxes(1, 2), jnp.ones((4, WIDTH, 3)), (1,), "SAME")
    return jnp.sum(y**2) + lax.reduce_window(x @ w, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID").sum()


@sums(*ROW)
def order_within_a_row(w, x, y):
    logits = x @ w
    values, found = lax.top_k(logits, 3)
    total = values.sum() + (jnp.sort(logits, -1) * jnp.arange(VOCABULARY, dtype=jnp.float32)).sum()
    return total + jnp.median(logits, axis=-1).sum(), jnp.sum(jnp.any(found == y[:, None], -1))


@sums(*ROW)
def matrices_of_a_row(w, x, y):
    a = jnp.einsum("ni,nj->nij", x, x) + jnp.eye(WIDTH)
    factor = jnp.linalg.cholesky(w @ w.T + jnp.eye(WIDTH))
    columns = jax.scipy.linalg.solve_triangular(factor, x.T, lower=True)
    return jnp.linalg.slogdet(a)[1].sum() + jnp.sum(columns**2)


# Loops and calls.


@sums(*ROW)
def vmap_and_scan(w, x, y):
    mapped = jax.vmap(lambda x, y: -jax.nn.log_softmax(x @ w)[y])(x, y).sum()
    add = lambda total, row: (total - jax.nn.log_softmax(row[0] @ w)[row[1]], None)
    return mapped + lax.scan(add, jnp.float32(0), (x, y))[0]


@sums(*ROW)
def a_scan_that_counts(w, x, y):
    def add(carry, row):
        total, count = carry
        x, y = row
        return (jnp.where(y > 2, total + jnp.sum(x @ w), total), count + 1), None

    return lax.scan(add, (jnp.float32(0), 0), (x, y))[0]


@sums(*ROW)
def rows_by_number(w, x, y):
    loss = lambda i: -jax.nn.log_softmax(x[i] @ w)[y[i]]
    numbers = jnp.arange(len(x))
    total = lax.map(loss, numbers).sum() + lax.map(lambda x: jnp.tanh(x @ w), x, batch_size=2).sum()
    total = total + jax.vmap(loss)(numbers).sum()
    return total + lax.fori_loop(0, len(x), lambda i, total: total + loss(i), jnp.float32(0))


@sums(*ROW)
def a_loop_of_python(w, x, y):
    return sum(-jax.nn.log_softmax(x[i] @ w)[y[i]] for i in range(len(x)))


@sums(XS)
def recurrence_over_the_sequence(w, x):
    def step(state, token):
        state = jnp.tanh(state + token @ w)
        return state, state

    alone = jax.vmap(lambda row: lax.scan(step, jnp.zeros(VOCABULARY), row)[0].sum())(x)
    return alone.sum() + lax.scan(step, jnp.zeros((len(x), VOCABULARY)), x.swapaxes(0, 1))[1].sum()


@sums(*ROW)
def a_while_loop_for_each_row(w, x, y):
    halve = lambda c: (c[0] * 0.5, c[1] + jnp.abs(c[0]).sum() + 0.5)
    return jax.vmap(lambda x: lax.while_loop(lambda c: c[1] < 5, halve, (x, jnp.float32(0)))[0].sum())(x).sum()


@sums(*ROW)
def vocabulary_in_blocks(w, x, y):
    add = lambda z, part: (jnp.logaddexp(z, jax.nn.logsumexp(x @ part, -1)), None)
    return lax.scan(add, jnp.full(len(x), -jnp.inf), w.reshape(WIDTH, 2, 5).swapaxes(0, 1))[0].sum()


@sums(*ROW)
def checkpoint_jit_and_cond(w, x, y):
    total = jax.checkpoint(where)(w, x, y) + jax.jit(where)(w, x, y)
    return lax.cond(w[0, 0] > 0, lambda: total, lambda: 0 * total) + jnp.where(w[0, 0] > 0, total, -total)


@sums(*ROW)
def chunks_of_a_chunk(w, x, y):
    return jamp.chunked_sum(where, 2)(w, x, y)


@sums(*ROW)
def gradients_of_rows(w, x, y):
    of_row = lambda w, x, y: -jax.nn.log_softmax(x @ w)[y]
    return jnp.sum(jax.vmap(jax.grad(of_row), (None, 0, 0))(w, x, y) ** 2)


@sums(*ROW)
def experts_by_sorted_rows(w, x, y):
    order = jnp.argsort(jnp.argmax(x @ w[:, :4], -1))
    experts = jnp.stack([w, 2 * w, 3 * w, 4 * w])
    found = lax.ragged_dot(x[order], experts, jnp.bincount(jnp.argmax(x @ w[:, :4], -1), length=4))
    return jnp.sum(found[jnp.argsort(order)] ** 2)


@sums(*ROW)
def a_kernel(w, x, y):
    double = lambda x_ref, y_ref: y_ref.__setitem__(..., 2 * x_ref[...])
    return jnp.sum(pl.pallas_call(double, out_shape=jax.typeof(x), interpret=True)(x) @ w)


@sums(*ROW)
def a_callback(w, x, y):
    z = jax.pure_callback(lambda z: np.asarray(z) - 1, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    jax.debug.callback(lambda mean: None, jnp.mean(x))
    return jnp.sum(z @ w)


# Linear functions of sums, and terms.


@sums(*ROW, params={"w": W, "temperature": jnp.float32(2)})
def divided(params, x, y):
    total = where(params["w"], x, y)
    return (
        total / params["temperature"] + total / 4 + total * 0.25 + total / 12 + total / 3
    )  # a chunk has 4, all have 12


@sums(*ROW)
def linear_in_sums(w, x, y):
    second_moment = (x @ w).T @ x
    solved = jnp.linalg.solve(w @ w.T + jnp.eye(WIDTH), x.sum(0))
    return 2 * jnp.sum(second_moment * w.T) / 7 - jnp.sum(solved), second_moment


@sums(*ROW)
def terms_for_each_row(w, x, y):
    norm = jnp.sum(w**2)
    aux = (0.0, jnp.zeros(3), jnp.ones(len(x)).sum(), len(x))
    return jnp.sum(jnp.sum(x @ w, -1) + norm) + 0.5 * len(x) + len(x) * norm + 0.0 * norm, aux


@sums(*ROW)
def counts(w, x, y):
    return jnp.sum(jax.ops.segment_sum(x @ w, y, 10)), (jnp.bincount(y, length=10), jnp.zeros(10).at[y].add(1))


@sums(*ROW)
def a_product_with_ones(w, x, y):
    return jnp.ones(len(x)) @ (x @ w) @ jnp.ones(VOCABULARY)


@sums(*ROW)
def a_sum_that_is_replaced_if_it_is_not_finite(w, x, y):
    total = where(w, x, y)
    return jnp.where(jnp.isfinite(total), total, 0.0)


@sums(*ROW)
def guards(w, x, y):
    def fail(total):
        return jax.pure_callback(lambda total: total, jax.ShapeDtypeStruct((), total.dtype), total)

    total = lax.cond(jnp.any(jnp.isnan(x)), fail, lambda total: total, where(w, x, y))
    return jnp.where(jnp.isnan(total), 0.0, total)


@sums(*ROW)
def gradients_of_the_sum(w, x, y):
    total, gradient = jax.value_and_grad(gather_by_arange)(w, x, y)
    return total + jnp.sum(gradient), jax.grad(vmap_and_scan)(w, x, y)


@sums(*TOKENS)
def tokens_by_numbers(w, x, y):
    last = y[:, 0] % SEQ
    x = x.at[jnp.arange(len(x)), last].add(1.0)
    return jnp.sum((x[jnp.arange(len(x)), last] @ w) ** 2) + jnp.sum((jnp.repeat(x, 2, axis=0) @ w) ** 2)


@sums(*ROW)
def a_diagonal(w, x, y):
    return jnp.trace(x @ (2 * x).T) + jnp.sum(jnp.diag(x @ x.T) ** 2)


@sums(*ROW)
def any_order(w, x, y):
    first, second = x[: len(x) // 2], x[len(x) // 2 :]
    order = jax.random.permutation(jax.random.key(0), len(x))
    halves = jnp.sum(first**2) + jnp.sum(second**2) + jnp.sum(x * jnp.concatenate([first, second]))
    return jnp.sum(x[::-1] @ w) + jnp.sum(x[order] @ w) + halves


@sums(*ROW)
def rows_that_are_padded(w, x, y):
    return jnp.sum((jnp.pad(x, ((0, -len(x) % 8), (0, 0))) @ w)[: len(x)] ** 2)


@sums(X, jax.random.split(jax.random.key(0), N))
def dropout_with_keys(w, x, keys):
    mask = jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, (WIDTH,)))(keys)
    return jnp.sum(jnp.where(mask, x, 0.0) @ w)


def _dropout_with_one_key(w, x, y):
    keys = jax.random.split(jax.random.key(1), len(x))
    mask = jax.random.bernoulli(jax.random.key(0), 0.9, x.shape)
    return jnp.sum(jax.vmap(jax.random.normal)(keys)[:, None] * jnp.where(mask, x, 0.0) @ w)


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_over_rows_is_no_error(name):
    """It is a sum of what is computed from each row alone, or linear in such sums, or not followed: a kernel."""
    fun, params, rows, axis = SUMS[name]
    found = jax.eval_shape(jamp.chunked_sum(fun, CHUNK, axis=axis), params, *rows)
    assert jax.tree.map(np.shape, found) == jax.tree.map(np.shape, jax.eval_shape(fun, params, *rows))


@pytest.mark.slow
@pytest.mark.parametrize("name", SUMS)
def test_the_sum_of_the_chunks_is_the_sum_over_all_rows(name):
    fun, params, rows, axis = SUMS[name]
    found = jax.jit(jamp.chunked_sum(fun, CHUNK, axis=axis))(params, *rows)
    wanted = jax.jit(lambda *args: jax.tree.map(jnp.asarray, fun(*args)))(params, *rows)
    for x, y in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("size", [1, 2, 3, 4, N, 100])
def test_no_number_of_rows_makes_a_sum_an_error(size):
    for fun in (where, gather_by_arange, vmap_and_scan, terms_for_each_row):
        jax.eval_shape(jamp.chunked_sum(fun, size), W, *ROW)
    jax.eval_shape(jamp.chunked_sum(merged_with_the_sequence, size), W, *TOKENS, YS > 3)


def test_random_numbers_of_one_key_are_no_error():
    jax.eval_shape(jamp.chunked_sum(_dropout_with_one_key, CHUNK), W, *ROW)


@pytest.mark.parametrize("format", [jnp.bfloat16, jamp.Float8(min_size=8), jamp.Int8(min_size=8)], ids=str)
def test_autocast_inside_is_no_error(format):
    """The scale of a whole tensor in 8 bit is a maximum over rows."""
    fun = jamp.autocast(lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w.T), format)
    jaxpr = jax.make_jaxpr(jamp.chunked_sum(fun, 32))(normal(32, 64, seed=1), normal(128, 32, seed=2))
    assert ("float8" in str(jaxpr) or "int8" in str(jaxpr)) == (format != jnp.bfloat16)


def test_what_cannot_be_traced_with_more_rows_or_then_has_other_operations_is_not_followed():
    fixed = lambda w, x: jnp.sum((x.reshape(2, 2, WIDTH) @ w).max(0))
    loop = lambda w, x: sum(jnp.sum(x[i] @ w) for i in range(len(x))) + jnp.sum(jnp.max(x, 0))
    for fun in (fixed, loop):
        jax.eval_shape(jamp.chunked_sum(fun, CHUNK), W, X)


# Functions whose rows interact.

REDUCED, PAIRED_ROWS, NONLINEAR = "reduces rows by", "combines a row with other rows", "is not linear in a sum"
AVERAGE = f"divides by their number, as jnp.mean does.*by {CHUNK} in a chunk of {CHUNK}.*divide outside"
POSITION, TERM, CARRY = "the place of a row", "depends on no row, once for each chunk.*outside", "from row to row"


@interacts(*ROW, match=REDUCED)
def softmax_over_rows(w, x, y):
    return jnp.sum(jax.nn.softmax(x @ w, axis=0) ** 2)


@interacts(*ROW, match=REDUCED)
def logsumexp_over_rows(w, x, y):
    return jnp.sum(jax.nn.logsumexp(x @ w, axis=0))


@interacts(*TOKENS, match=REDUCED)
def maximum_over_tokens(w, x, y):
    return jnp.max((x @ w).reshape(-1, VOCABULARY), 0).sum()


@interacts(XS.swapaxes(0, 1), YS.T, axis=1, match=REDUCED)
def maximum_along_axis_1(w, x, y):
    return jnp.max(x @ w, 1).sum()


@interacts(*ROW, match=REDUCED)
def in_a_checkpoint_and_jit(w, x, y):
    return jax.jit(jax.checkpoint(lambda x: jnp.sum(jnp.min(x, 0))))(x @ w)


@interacts(*ROW, match=REDUCED)
def any_of_the_rows(w, x, y):
    return jnp.sum(jnp.where(jnp.any(x > 1, 0), 1.0, 0.0))


@interacts(*ROW, match=REDUCED)
def cumulative_sum(w, x, y):
    return jnp.sum(jnp.cumsum(x @ w, 0) ** 2)


@interacts(*ROW, match=REDUCED)
def sorted_rows(w, x, y):
    return jnp.sum(jnp.sort(x @ w, 0)[0])


@interacts(*ROW, match=POSITION)
def ranks(w, x, y):
    return jnp.sum(jnp.float32(jnp.argsort(x[:, 0])) * x[:, 1])


@interacts(*ROW, match=REDUCED)
def top_k_of_rows(w, x, y):
    return jnp.sum(lax.top_k((x @ w).T, 2)[0])


@interacts(*ROW, match=REDUCED)
def median(w, x, y):
    return jnp.sum(jnp.median(x @ w, 0))


@interacts(*ROW, match=REDUCED)
def product(w, x, y):
    return jnp.sum(jnp.prod(x @ w, 0))


@interacts(*ROW, match=REDUCED)
def nuclear_norm(w, x, y):
    return jnp.sum(jnp.linalg.svd(x @ w, compute_uv=False))


@interacts(*ROW, match=REDUCED)
def fourier_transform(w, x, y):
    return jnp.sum(jnp.abs(jnp.fft.fft(x, axis=0)))


@interacts(*ROW, match=AVERAGE)
def batch_norm(w, x, y):
    z = x @ w
    return jnp.sum((z - z.mean(0)) / jnp.sqrt(z.var(0) + 1e-5) * z)


@interacts(*ROW, match=AVERAGE)
def deviation(w, x, y):
    return jnp.sum(jnp.std(x @ w, 0))


@interacts(*ROW, match=AVERAGE)
def mean(w, x, y):
    return jnp.mean(log_p(w, x, y))


@interacts(*ROW, match=AVERAGE)
def average(w, x, y):
    return jnp.average(x @ w)


@interacts(*ROW, match=AVERAGE)
def average_with_ones(w, x, y):
    return jnp.average(x @ w, axis=0, weights=jnp.ones(len(x))).sum()


@interacts(*ROW, match=AVERAGE)
def mean_of_optax(w, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, y).mean()


@interacts(*ROW, match=AVERAGE)
def mean_after_arange(w, x, y):
    return -jax.nn.log_softmax(x @ w)[jnp.arange(len(x)), y].mean()


@interacts(*TOKENS, match=AVERAGE)
def mean_of_tokens(w, x, y):
    return -log_p(w, x.reshape(-1, WIDTH), y.reshape(-1)).mean()


@interacts(*PAIRED, match=AVERAGE)
def mean_of_a_concatenation(w, x, rejected, y):
    total = log_p(w, jnp.concatenate([x, rejected]), jnp.concatenate([y, y])).sum(-1)
    return -jnp.mean(jax.nn.log_sigmoid(0.1 * (total[: len(x)] - total[len(x) :])))


@interacts(*ROW, match=AVERAGE)
def mean_by_einsum(w, x, y):
    return jnp.einsum("ij,i->", x @ w, jnp.full(len(x), 1 / len(x)))


@interacts(*ROW, match=AVERAGE)
def mean_by_shape(w, x, y):
    return jnp.sum(x @ w) * (1 / x.shape[0])


@interacts(*ROW, match=AVERAGE)
def mean_before_the_sum(w, x, y):
    return jnp.sum((x @ w) / len(x))


@interacts(*ROW, match=AVERAGE)
def mean_by_an_argument(w, x, y):
    return jax.jit(lambda total, n: total / n)(jnp.sum(x @ w), len(x))


@interacts(*ROW, match=AVERAGE)
def mean_by_a_count(w, x, y):
    return jnp.sum(x @ w) / jnp.ones(len(x)).sum()


@interacts(*ROW, match=AVERAGE)
def one_less(w, x, y):
    return jnp.sum(x @ w) / (len(x) - 1)


@interacts(*ROW, match=AVERAGE)
def times_their_number(w, x, y):
    return jnp.sum(x @ w) * len(x)


@interacts(*ROW, jnp.float32(A > 0), match=NONLINEAR)
def mean_of_a_mask(w, x, y, mask):
    return jnp.sum(mask * log_p(w, x, y)) / mask.sum()


@interacts(*ROW, match=NONLINEAR)
def nanmean(w, x, y):
    return jnp.nanmean(x @ w)


@interacts(*ROW, match=NONLINEAR)
def gram_matrix(w, x, y):
    return jnp.sum(((x @ w).T @ (x @ w)) ** 2)


@interacts(*ROW, match=NONLINEAR)
def volume(w, x, y):
    return jnp.linalg.slogdet(x.T @ x + len(x) * jnp.eye(WIDTH))[1]


@interacts(*ROW, match=NONLINEAR)
def norm(w, x, y):
    return jnp.linalg.norm(x @ w)


@interacts(*ROW, match=NONLINEAR)
def square_of_the_sum(w, x, y):
    return jnp.sum(x @ w) ** 2


@interacts(*ROW, match=NONLINEAR)
def logarithm_of_the_sum(w, x, y):
    return jnp.log(jnp.sum(jnp.exp(x @ w)))


@interacts(*ROW, match=NONLINEAR)
def relu_of_the_sum(w, x, y):
    return jnp.sum(jax.nn.relu(jnp.sum(x @ w, 0)))


@interacts(*ROW, match=NONLINEAR)
def choice_by_the_sum(w, x, y):
    return lax.cond(jnp.sum(x) > 0, lambda: jnp.sum(x @ w), lambda: jnp.sum(x))


@interacts(*ROW, match=NONLINEAR)
def balance_of_experts(w, x, y):
    p = jax.nn.softmax(x @ w)
    return jnp.sum(jax.nn.one_hot(jnp.argmax(p, -1), VOCABULARY).sum(0) * p.sum(0))


@interacts(*ROW, match=NONLINEAR)
def squares_of_segments(w, x, y):
    return jnp.sum(jax.ops.segment_sum(x @ w, y, 10) ** 2)


@interacts(*ROW, match="reads a sum over the rows")
def sum_in_rows(w, x, y):
    return jnp.sum(x * x.sum(0))


@interacts(*ROW, match="reads a sum over the rows")
def sum_in_rows_by_a_collective(w, x, y):
    return jax.vmap(lambda x: jnp.sum(jnp.abs(x - lax.psum(x, "b"))), axis_name="b")(x).sum()


@interacts(*ROW, match=REDUCED)
def contrastive(w, x, y):
    z = x @ w
    return -jnp.sum(jnp.diag(jax.nn.log_softmax(z @ z.T)))


@interacts(*ROW, match=REDUCED)
def contrastive_by_optax(w, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(x @ x.T, jnp.arange(len(x))).sum()


@interacts(*ROW, match=PAIRED_ROWS)
def distances(w, x, y):
    return jnp.sum(jnp.abs(x[:, None] - x[None]))


@interacts(*ROW, match=PAIRED_ROWS)
def neighbours(w, x, y):
    return jnp.sum((x[1:] - x[:-1]) ** 2)


@interacts(*TOKENS, match=PAIRED_ROWS)
def neighbours_of_tokens(w, x, y):
    return -jnp.sum(log_p(w, x.reshape(-1, WIDTH)[:-1], y.reshape(-1)[1:]))


@interacts(*ROW, match=PAIRED_ROWS)
def neighbours_by_numbers(w, x, y):
    return -jnp.sum(jax.nn.log_softmax(x @ w)[jnp.arange(len(x) - 1), y[1:]])


@interacts(*ROW, match=PAIRED_ROWS)
def rolled(w, x, y):
    return jnp.sum(x * jnp.roll(x, 1, 0))


@interacts(*ROW, match=PAIRED_ROWS)
def rolled_by_numbers(w, x, y):
    return jnp.sum(x * x[(jnp.arange(len(x)) + 1) % len(x)])


@interacts(*ROW, match=PAIRED_ROWS)
def shifted_by_padding(w, x, y):
    return jnp.sum(x * jnp.pad(x, ((1, 0), (0, 0)))[:-1])


@interacts(*ROW, match=PAIRED_ROWS)
def window_over_rows(w, x, y):
    return jnp.sum(lax.conv_general_dilated(x.T[None], jnp.ones((4, WIDTH, 3)), (1,), "SAME") ** 2)


@interacts(*ROW, match=PAIRED_ROWS)
def reversed_rows(w, x, y):
    return jnp.sum(x * x[::-1])


@interacts(*ROW, match=PAIRED_ROWS)
def halves(w, x, y):
    return jnp.sum(jnp.tanh(x[: len(x) // 2] - x[len(x) // 2 :]))


@interacts(*ROW, match=PAIRED_ROWS)
def split_halves(w, x, y):
    first, second = jnp.split(x, 2)
    return jnp.sum(jnp.tanh(first - second))


@interacts(*ROW, match="reads the number of rows")
def rows_named_by_rows(w, x, y):
    return jnp.sum(jnp.abs(x - x[y]))


@interacts(*ROW, match="reads some rows")
def the_first_row(w, x, y):
    return jnp.sum(x[0] @ w)


@interacts(*ROW, match="reads some rows")
def all_but_the_last(w, x, y):
    return 2 * jnp.sum(log_p(w, x, y)[:-1])


@interacts(*ROW, match=PAIRED_ROWS)
def differences_from_the_first_row(w, x, y):
    return jnp.sum(jnp.abs(x - x[0]))


@interacts(*ROW, match=PAIRED_ROWS)
def shifted_by_concatenation(w, x, y):
    return jnp.sum(x * jnp.concatenate([jnp.zeros((1, WIDTH)), x[:-1]]))


@interacts(*ROW, match=POSITION)
def weights_by_position(w, x, y):
    return jnp.sum((x @ w) * jnp.arange(len(x), dtype=jnp.float32)[:, None])


@interacts(*ROW, match=POSITION)
def weights_of_numpy(w, x, y):
    return jnp.sum((x @ w) * np.linspace(0, 1, len(x), dtype=np.float32)[:, None])


@interacts(*ROW, match=POSITION)
def a_mask_of_padding(w, x, y):
    return jnp.sum(jnp.where(jnp.arange(len(x)) < 5, log_p(w, x, y), 0.0))


@interacts(*ROW, params=normal(N * 9, WIDTH), match=POSITION)
def a_table_of_positions(table, x, y):
    return jnp.sum(jnp.tanh(x + table[: len(x)]))


@interacts(*ROW, match=TERM)
def a_constant(w, x, y):
    return jnp.sum(x @ w) + 1.0


@interacts(*ROW, match=TERM)
def a_regularizer(w, x, y):
    return where(w, x, y) + 0.1 * jnp.sum(w**2)


@interacts(*ROW, match=TERM)
def an_aux_without_rows(w, x, y):
    return where(w, x, y), jnp.sum(w**2)


@interacts(*ROW, match=REDUCED)
def an_aux_that_is_a_maximum(w, x, y):
    return where(w, x, y), jnp.max(x)


@interacts(*ROW, match=CARRY)
def a_moving_average(w, x, y):
    return lax.scan(lambda total, x: (0.9 * total + x.sum(), None), jnp.float32(0), x)[0]


@interacts(*ROW, match=CARRY)
def a_recurrence(w, x, y):
    return lax.scan(lambda state, x: (jnp.tanh(state + x @ w), None), jnp.zeros(VOCABULARY), x)[0].sum()


@interacts(*ROW, match=CARRY)
def running_sums(w, x, y):
    return jnp.sum(lax.scan(lambda total, x: (total + x.sum(), total), jnp.float32(0), x)[1])


@interacts(*ROW, match=CARRY)
def the_last_row(w, x, y):
    return lax.scan(lambda last, x: (x.sum(), None), jnp.float32(0), x)[0]


@interacts(*ROW, match=CARRY)
def the_previous_row(w, x, y):
    return lax.scan(lambda last, x: (x, jnp.vdot(last, x)), jnp.zeros(WIDTH), x)[1].sum()


@interacts(*ROW, match=CARRY)
def a_scan_that_starts_at_1(w, x, y):
    return lax.scan(lambda total, x: (total + x.sum(), None), jnp.float32(1), x)[0]


@interacts(*ROW, match=AVERAGE)
def in_autocast(w, x, y):
    return jamp.autocast(lambda w, x: jnp.sum(jnp.var(x @ w, 0)), jnp.bfloat16)(w, x)


@pytest.mark.parametrize("name", OTHERS)
def test_rows_that_interact_are_an_error_that_names_the_line(name):
    """An average over rows, a function of a sum that is not linear, a maximum, softmax, sort or cumulative sum over
    rows, a row that reads other rows or its place among them, and a term that depends on no row.
    """
    fun, params, rows, axis, match = OTHERS[name]
    with pytest.raises(ValueError, match=match) as found:
        jax.eval_shape(jamp.chunked_sum(fun, CHUNK, axis=axis), params, *rows)
    (line,) = re.findall(r" at test_chunked_sum_rows\.py:(\d+)", str(found.value))
    lines = [{line for *_, line in f.__code__.co_lines() if line} for f in (fun, log_p)]
    assert any(min(x) < int(line) <= max(x) for x in lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_it_would_be_another_number(name):
    fun, params, rows, axis, _ = OTHERS[name]
    cut = lambda i: [x[i : i + CHUNK] if axis == 0 else x[:, i : i + CHUNK] for x in rows]
    chunks = [fun(params, *cut(i)) for i in range(0, N, CHUNK)]
    added = jax.tree.map(lambda *x: sum(x[1:], start=x[0]), *chunks)
    pairs = zip(*map(jax.tree.leaves, (added, fun(params, *rows))), strict=True)
    assert not all(np.allclose(x, y, rtol=1e-4) for x, y in pairs)


def test_the_line_is_that_of_the_call_also_if_jax_has_traced_the_function_before():
    def first(w, x):
        return jnp.sum(jax.nn.softmax(x @ w, 0))

    def second(w, x):
        return jnp.sum(jax.nn.softmax(x @ w, 0))

    for fun in (first, second):
        with pytest.raises(ValueError, match=rf"test_chunked_sum_rows\.py:{fun.__code__.co_firstlineno + 1} "):
            jax.eval_shape(jamp.chunked_sum(fun, CHUNK), W, X)


@pytest.mark.parametrize("size", [1, 2, 5, N, 100])
def test_a_mean_is_an_error_with_any_number_of_rows(size):
    with pytest.raises(ValueError, match="divides by their number"):
        jax.eval_shape(jamp.chunked_sum(mean, size), W, *ROW)


def test_what_reaches_no_result_is_no_error():
    def fun(w, x, y):
        jnp.max(x, 0), jnp.mean(x)
        return where(w, x, y)

    jax.eval_shape(jamp.chunked_sum(fun, CHUNK), W, *ROW)


def test_the_result_has_the_structure_that_the_function_returns_for_a_chunk():
    fun = lambda w, x, y: (where(w, x, y), {"rows": len(x)})
    for size in (1, CHUNK, N):
        assert jamp.chunked_sum(fun, size)(W, *ROW)[1] == {"rows": N}
