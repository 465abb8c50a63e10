"""`chunked_sum`: the value, the gradients and the auxiliary results of a sum over rows, beside the whole function."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jaxprs import equations, kept_by_jax, normal

import jamp

ROWS, WIDTH, VOCABULARY = 48, 16, 40
W, X = normal(WIDTH, VOCABULARY, scale=0.5, seed=1), normal(ROWS, WIDTH, seed=2)
Y = jnp.asarray(np.random.default_rng(3).integers(0, VOCABULARY, ROWS))
MASK = Y % 3 > 0
OLD = {"old": normal(ROWS, seed=4, scale=0.1) - 3.7, "reference": normal(ROWS, seed=5, scale=0.1) - 3.7}


def log_probabilities(w, x, y):
    logits = (x @ w).astype(jnp.float32)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1)[:, 0]


def cross_entropy(w, x, y):
    return -jnp.sum(log_probabilities(w, x, y))


def with_label_smoothing(w, x, y):
    targets = optax.smooth_labels(jax.nn.one_hot(y, VOCABULARY), 0.1)
    return jnp.sum(optax.softmax_cross_entropy((x @ w).astype(jnp.float32), targets))


def with_z_loss(w, x, y):
    logits = (x @ w).astype(jnp.float32)
    z = jax.nn.logsumexp(logits, -1)
    target = jnp.sum(jnp.where(jnp.arange(VOCABULARY) == y[:, None], logits, 0.0), -1)
    return jnp.sum(z - target) + 1e-3 * jnp.sum(z**2)


def of_soft_targets(w, x, p):
    return jnp.sum(optax.softmax_cross_entropy((x @ w).astype(jnp.float32), p))


def of_pairs(params, x, rejected, y):
    """DPO: a row is a pair, and its log-probabilities are sums over a sequence."""
    total = lambda w, x: jnp.sum(jax.vmap(log_probabilities, (None, 0, 0))(w, x, y), -1)
    margin = lambda w: total(w, x) - total(w, rejected)
    policy, reference = margin(params["w"]), margin(lax.stop_gradient(params["reference"]))
    return -jnp.sum(jax.nn.log_sigmoid(0.1 * (policy - reference)))


def of_ratios(w, x, y, advantage, old):
    """GRPO: clipped ratios, and a KL term."""
    logp = log_probabilities(w, x, y)
    ratio, kl = jnp.exp(logp - old["old"]), jnp.exp(old["reference"] - logp) - (old["reference"] - logp) - 1
    clipped = jnp.clip(ratio, 0.8, 1.2) * advantage
    return jnp.sum(0.04 * kl - jnp.minimum(ratio * advantage, clipped)), {
        "kl": jnp.sum(kl),
        "clipped": jnp.sum(jnp.abs(ratio - 1) > 0.2),
    }


def with_weights(w, x, y, mask):
    loss = -log_probabilities(w, x, y)
    return jnp.sum(jnp.where(mask, loss, 0.0)), (jnp.sum(mask), jnp.sum(jnp.where(mask, lax.stop_gradient(loss), 0.0)))


SEQUENCES = normal(6, 8, WIDTH, seed=6), normal(6, 8, WIDTH, seed=7), Y.reshape(6, 8)
LOSSES = {
    "cross entropy": (cross_entropy, W, (X, Y)),
    "label smoothing": (with_label_smoothing, W, (X, Y)),
    "z-loss": (with_z_loss, W, (X, Y)),
    "soft targets": (of_soft_targets, W, (X, jax.nn.softmax(normal(ROWS, VOCABULARY, seed=8)))),
    "DPO": (of_pairs, {"w": W, "reference": 0.9 * W}, SEQUENCES),
    "GRPO": (of_ratios, W, (X, Y, normal(ROWS, seed=9), OLD)),
    "weights": (with_weights, W, (X, Y, MASK)),
}


def differentiated(fun, params, rows, scale=1.0):
    """The value, the auxiliary results, and the gradients for params and floating rows, with another cotangent."""
    floating = [i for i, x in enumerate(rows) if all(jnp.issubdtype(y.dtype, jnp.floating) for y in jax.tree.leaves(x))]

    def loss(params, some):
        given = dict(zip(floating, some, strict=True))
        result = fun(params, *(given.get(i, x) for i, x in enumerate(rows)))
        total, aux = result if isinstance(result, tuple) else (result, ())
        return scale * total, aux

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, [rows[i] for i in floating])


def assert_close(found, wanted, rtol=2e-5):
    """Gradients are as close as sums in another order."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * float(jnp.max(jnp.abs(y), initial=0.0)))


def error(found, wanted):
    """The relative error of two pytrees of gradients, in float32."""
    square = lambda tree: sum(jnp.sum(jnp.float32(x) ** 2) for x in jax.tree.leaves(tree))
    difference = jax.tree.map(lambda x, y: jnp.float32(x) - jnp.float32(y), found, wanted)
    return float(jnp.sqrt(square(difference) / square(wanted)))


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("name", LOSSES)
def test_value_gradients_and_aux_are_those_of_the_whole(name):
    fun, params, rows = LOSSES[name]
    size = 2 if name == "DPO" else 16
    assert_close(differentiated(jamp.chunked_sum(fun, size), params, rows, 0.7), differentiated(fun, params, rows, 0.7))


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("size", [1, 7, 16, 20, 47, 48, 49, 1000])
def test_any_number_of_rows(size):
    fun, wanted = jamp.chunked_sum(cross_entropy, size), differentiated(cross_entropy, W, (X, Y))
    assert_close(differentiated(fun, W, (X, Y)), wanted)
    # One chunk's size, unless no number between half of `size` and `size` divides the rows.
    calls = lambda n: sum(e.primitive.name == "chunked_sum" for e in jax.make_jaxpr(fun)(W, X[:n], Y[:n]).eqns)
    assert (calls(48), calls(47)) == (1, 1 if size in (1, 47, 48, 49, 1000) else 2)
    assert_close(differentiated(fun, W, (X[:47], Y[:47])), differentiated(cross_entropy, W, (X[:47], Y[:47])))


def test_no_rows_and_none_without_params():
    fun = jamp.chunked_sum(cross_entropy, 16)
    value, grads = jax.value_and_grad(fun)(W, X[:0], Y[:0])
    assert value == 0
    assert not np.any(grads)
    assert grads.shape == W.shape
    assert_close(jamp.chunked_sum(lambda none, x: jnp.sum(x**2), 16)(None, X), jnp.sum(X**2))


def test_another_axis_and_a_tree_of_rows():
    fun = lambda w, rows: cross_entropy(w, rows["x"].T, rows["y"][0])
    rows = {"x": X.T, "y": Y[None]}
    for axis in (1, -1):
        found = jax.grad(jamp.chunked_sum(fun, 16, axis=axis), argnums=0)(W, rows)
        assert_close(found, jax.grad(cross_entropy)(W, X, Y))


def test_numbers_of_python_and_products_with_the_number_of_rows_are_sums():
    fun = lambda w, x, y: (cross_entropy(w, x, y) + 0.1 * len(x), len(x))
    total, count = jamp.chunked_sum(fun, 16)(W, X, Y)
    assert_close(total, cross_entropy(W, X, Y) + 0.1 * ROWS)
    assert count == ROWS
    scaled = lambda w, x, y: cross_entropy(w, x, y) * jnp.float32(0.5) + jnp.sum(x) * len(x) / len(x)
    with pytest.raises(ValueError, match="divides by their number"):
        jamp.chunked_sum(scaled, 16)(W, X, Y)


def test_what_the_function_prints_is_printed_for_each_chunk(capsys):
    def fun(w, x, y):
        jax.debug.print("chunk {}", jnp.sum(w))
        return cross_entropy(w, x, y)

    assert_close(jamp.autocast(jamp.chunked_sum(fun, 16), jnp.bfloat16)(W, X, Y), cross_entropy(W, X, Y), 1e-2)
    jax.effects_barrier()
    assert capsys.readouterr().out.count("chunk") == 3


def test_without_differentiation_nothing_of_the_gradient_is_computed():
    fun = jamp.chunked_sum(cross_entropy, 16)
    count = lambda f: lowered(f, W, X, Y).count("stablehlo.dot_general")
    assert (count(fun), count(jax.grad(fun)), count(jax.grad(fun, argnums=(0, 1)))) == (1, 2, 3)


def lowered(fun, *args):
    return jax.jit(fun).lower(*args).as_text()


def test_a_frozen_head_and_soft_targets_get_no_buffer():
    targets = jax.nn.softmax(normal(ROWS, VOCABULARY, seed=8))
    fun = jamp.chunked_sum(of_soft_targets, 16)
    assert kept_by_jax(lambda w: fun(w, X, targets), W) == W.nbytes
    assert kept_by_jax(lambda x: fun(W, x, targets), X) == X.nbytes


def test_tied_embeddings():
    def loss(fun, embedding, tokens):
        return fun(embedding, jnp.tanh(embedding[tokens]), Y) / ROWS

    fun = lambda embedding, x, y: cross_entropy(embedding.T, x, y)
    grad = lambda fun: jax.grad(lambda e: loss(fun, e, jnp.roll(Y, 1)))(W.T)
    assert_close(grad(jamp.chunked_sum(fun, 16)), grad(fun))


def test_what_the_function_closes_over_is_differentiated():
    def loss(w, chunked):
        fun = lambda params, x, y: cross_entropy(w * params, x, y)
        return (jamp.chunked_sum(fun, 16) if chunked else fun)(jnp.float32(2), X, Y)

    assert_close(jax.grad(loss)(W, True), jax.grad(loss)(W, False))


def test_keys_are_rows():
    """A key in the params would give each chunk the same mask."""
    keys = jax.random.split(jax.random.key(0), ROWS)

    def fun(w, x, y, keys):
        mask = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (WIDTH,)))(keys)
        return cross_entropy(w, jnp.where(mask, x, 0.0), y)

    assert_close(jax.grad(jamp.chunked_sum(fun, 16))(W, X, Y, keys), jax.grad(fun)(W, X, Y, keys))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_16_bit_params_and_rows_get_gradients_that_are_added_in_float32(dtype):
    w, x = W.astype(dtype), X.astype(dtype)
    exact = differentiated(cross_entropy, w.astype(jnp.float32), (x.astype(jnp.float32), Y))[1]
    found = differentiated(jamp.chunked_sum(cross_entropy, 4), w, (x, Y))[1]
    assert [x.dtype for x in jax.tree.leaves(found)] == [dtype, dtype]
    whole = differentiated(cross_entropy, w, (x, Y))[1]
    assert error(found, exact) < 1.6 * error(whole, exact)


FORMATS = [jnp.bfloat16, jnp.float16, jamp.Float8(min_size=8), jamp.Int8(min_size=8)]
FORMATS += [jamp.Float8(min_size=8, granularity="row"), jamp.MXFP8(min_size=8)]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_autocast_around_inside_and_around_the_gradient(format):
    rules = None if isinstance(format, type(jnp.float16)) else {"dot_general": "compute"}
    w, x = normal(32, 64, seed=1, scale=0.3), normal(64, 32, seed=2)
    y = jnp.arange(64)
    cast = lambda fun: jamp.autocast(fun, format, rules=rules)
    grad = lambda fun: jax.grad(lambda w, x: fun(w, x, y) / 64, argnums=(0, 1))
    around, inside = grad(cast(jamp.chunked_sum(cross_entropy, 32))), grad(jamp.chunked_sum(cast(cross_entropy), 32))
    outermost = cast(grad(jamp.chunked_sum(cross_entropy, 32)))
    exact, whole = grad(cross_entropy)(w, x), jax.jit(grad(cast(cross_entropy)))(w, x)
    limit = 1.3 * error(whole, exact) + 1e-4
    for fun in (around, inside, outermost):
        found = jax.jit(fun)(w, x)
        assert error(found, exact) < limit
        assert [x.dtype for x in found] == [jnp.float32, jnp.float32]
    report = jamp.autocast_report(jamp.chunked_sum(cross_entropy, 32), format, rules=rules)(w, x, y)
    (row,) = (row for row in report.rows if row.operation == "dot_general")
    assert (row.count, row.flops) == (2, 2 * 64 * 32 * 64)


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("scale", [1.0, 2.0**16, 2.0**24])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
def test_float16_loses_nothing_at_any_loss_scale(dtype, scale):
    """The loss scale multiplies after the sum. Inside, rows of little weight have cotangents beyond float16."""
    x = X * 1e-3
    weighted = lambda w, x, y: 1e-6 * cross_entropy(w, x, y)
    loss = lambda fun: lambda w, x: scale * fun(w, x, Y) / ROWS
    exact = jax.grad(loss(weighted), argnums=(0, 1))(W, x)
    for fun in (
        jamp.autocast(jamp.chunked_sum(weighted, 16), dtype),
        jamp.chunked_sum(jamp.autocast(weighted, dtype), 16),
    ):
        found = jax.jit(jax.grad(loss(fun), argnums=(0, 1)))(W, x)
        assert error(found, exact) < (1e-3 if dtype == jnp.float16 else 8e-3)


def test_a_float16_chunk_tries_again_with_a_smaller_scale_and_has_its_products_once():
    fun = jamp.autocast(lambda w, x: jnp.sum((x @ w) ** 2), jnp.float16)
    chunked = jax.grad(jamp.chunked_sum(fun, 16))
    large = X.at[5].multiply(30.0)
    assert error(chunked(W, large), jax.grad(lambda w: jnp.sum((large @ w) ** 2))(W)) < 2e-3
    assert len(re.findall(r"dot_general.*-> tensor<\d+x\d+x", lowered(chunked, W, X))) == 2


def test_the_cast_of_a_weight_is_computed_once_for_all_chunks():
    fun = jax.grad(jamp.autocast(jamp.chunked_sum(cross_entropy, 8), jnp.bfloat16))
    before, loop = lowered(fun, W, X, Y).split("stablehlo.while")
    casts = [re.findall(r"convert .*-> tensor<16x40xbf16>", text) for text in (before, loop)]
    assert (W.shape, *map(len, casts)) == ((16, 40), 1, 0)


@pytest.mark.slow
def test_float64():
    with jax.enable_x64(True):
        w, x = (jnp.asarray(np.float64(np.asarray(a))) for a in (W, X))
        fun = lambda w, x, y: jnp.sum(jax.nn.logsumexp(x @ w, -1)) + 0.0 * jnp.sum(y).astype(w.dtype)
        assert_close(
            jax.grad(jamp.chunked_sum(fun, 16), argnums=(0, 1))(w, x, Y), jax.grad(fun, argnums=(0, 1))(w, x, Y), 1e-12
        )


def test_vmap_scan_and_checkpoint_around():
    fun, stacked = jamp.chunked_sum(cross_entropy, 16), jnp.stack([W, -W])
    each = lambda fun: jax.jit(jax.vmap(jax.grad(fun, argnums=(0, 1)), (0, None, None)))(stacked, X, Y)
    assert_close(each(fun), each(cross_entropy))
    total = lambda fun: lambda w: jnp.sum(jax.vmap(fun, (0, None, None))(w, X, Y) * jnp.float32([1, 2]))
    assert_close(jax.jit(jax.grad(total(fun)))(stacked), jax.grad(total(cross_entropy))(stacked))

    def scanned(fun):
        return lambda w: lax.scan(lambda total, v: (total + fun(v, X, Y), None), 0.0, w)[0]

    assert_close(jax.jit(jax.grad(scanned(fun)))(stacked), jax.grad(scanned(cross_entropy))(stacked))
    again = jax.checkpoint(lambda w, x: fun(w, jnp.tanh(x), Y))
    assert_close(
        jax.jit(jax.grad(again, (0, 1)))(W, X), jax.grad(lambda w, x: cross_entropy(w, jnp.tanh(x), Y), (0, 1))(W, X)
    )


def test_the_sums_of_a_vmap_keep_no_logits_for_their_gradient():
    stacked = jnp.stack([W, -W])
    fun = lambda w: jnp.sum(jax.vmap(jamp.chunked_sum(cross_entropy, 4), (0, None, None))(w, X, Y))
    logits = 2 * ROWS * VOCABULARY * 4
    assert kept_by_jax(fun, stacked) < logits / 4


@pytest.mark.slow
def test_forward_mode_and_second_derivatives():
    fun = jamp.chunked_sum(cross_entropy, 16)
    tangents = jnp.cos(W), jnp.sin(X)
    assert_close(jax.jacfwd(fun)(W, X, Y), jax.grad(cross_entropy)(W, X, Y))  # a vmap that maps no operand
    pushed = lambda fun: jax.jvp(lambda w, x: fun(w, x, Y), (W, X), tangents)
    assert_close(pushed(fun), pushed(cross_entropy))
    grad = lambda fun: jax.grad(lambda w: fun(w, X, Y))
    forward = lambda fun: jax.jvp(grad(fun), (W,), tangents[:1])
    backward = lambda fun: jax.vjp(grad(fun), W)[1](tangents[0])
    assert_close(forward(fun), forward(cross_entropy))
    assert_close(backward(fun), backward(cross_entropy))
    assert error(backward(jamp.autocast(fun, jnp.float16)), backward(cross_entropy)) < 5e-3


@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
def test_a_row_that_is_not_finite_makes_its_own_gradients_not_finite(bad):
    fun = jamp.chunked_sum(cross_entropy, 16)
    x = X.at[20, 3].set(bad)
    (value, _), (of_w, (of_x,)) = differentiated(fun, W, (x, Y))
    wanted = differentiated(cross_entropy, W, (x, Y))
    assert not np.isfinite(value)
    assert not np.all(np.isfinite(of_w))
    np.testing.assert_array_equal(np.isfinite(of_x), np.isfinite(wanted[1][1][0]))


def test_find_nonfinite_names_the_line_in_a_chunk():
    def fun(w, x):
        return jnp.sum(jnp.log(jnp.abs(x @ w)))  # the line

    x = X.at[20].set(0.0)
    for grad in (False, True):
        found = str(jamp.debug.find_nonfinite(jamp.chunked_sum(fun, 16), grad=grad)(W, x))
        assert "log" in found
        assert "test_chunked_sum.py" in found
        assert "iteration" in found


@pytest.mark.filterwarnings("ignore:The memory budget")
def test_memory_report_counts_the_gradients_and_no_budget_computes_it_again():
    def loss(params, x, y):
        for w in params["layers"]:
            x = jnp.tanh(x @ w)
        return jamp.chunked_sum(cross_entropy, 16)(params["head"], x, y) / ROWS

    params = {"layers": [normal(WIDTH, WIDTH, seed=i) for i in range(4)], "head": W}
    report = jamp.memory_report(loss)(params, X, Y)
    rows = {row.type: row for row in report.rows if row.operation == "jamp.chunked_sum"}
    assert {row.nbytes for row in rows.values()} == {W.nbytes, X.nbytes}
    assert all(row.kept for row in rows.values())
    assert "test_chunked_sum.py" in str(report)
    fun = jax.grad(jamp.recompute(loss, 0.5))
    jaxpr = jax.make_jaxpr(fun)(params, X, Y)
    assert sum(e.primitive.name == "chunked_sum" for e in equations(jaxpr)) == 1
    assert_close(jax.jit(fun)(params, X, Y), jax.grad(loss)(params, X, Y))


def test_the_logits_of_one_chunk_are_in_memory():
    w, x, y = jnp.zeros((64, 4096)), jnp.zeros((1024, 64)), jnp.zeros(1024, jnp.int32)
    temporary = lambda f: (
        jax.jit(jax.grad(f, argnums=(0, 1))).lower(w, x, y).compile().memory_analysis().temp_size_in_bytes
    )
    logits = 1024 * 4096 * 4
    assert temporary(jamp.chunked_sum(cross_entropy, 128)) < temporary(cross_entropy) / 4 < logits


def test_outside_jit_it_is_compiled_once(caplog):
    fun = jax.value_and_grad(jamp.chunked_sum(cross_entropy, 16))
    counts = []
    for _ in range(2):
        caplog.clear()
        with jax.log_compiles():
            fun(W, X, Y)
        counts.append(caplog.text.count("Finished XLA compilation"))
    assert counts[0] > counts[1] == 0


def test_a_function_that_divides_by_the_number_of_rows_is_refused():
    mean = lambda w, x, y: jnp.mean(log_probabilities(w, x, y))
    for fun in (mean, jax.jit(mean), lambda w, x, y: cross_entropy(w, x, y) / len(x)):
        with pytest.raises(ValueError, match=r"divides by their number.*test_chunked_sum.*by 16 in a chunk of 16"):
            jamp.chunked_sum(fun, 16)(W, X, Y)
    with pytest.raises(TypeError, match=r"16 rows, got shape \(16,\)"):
        jamp.chunked_sum(lambda w, x, y: (cross_entropy(w, x, y), log_probabilities(w, x, y)), 16)(W, X, Y)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jamp.chunked_sum(cross_entropy, 16.0), "chunk_size"),
        (lambda: jamp.chunked_sum(cross_entropy, True), "chunk_size"),
        (lambda: jamp.chunked_sum(cross_entropy, 16)(W, X, Y[1:]), r"rows\[0\] has 48, rows\[1\] has 47"),
        (lambda: jamp.chunked_sum(cross_entropy, 16)(W, {"x": X, "t": jnp.float32(1)}, Y), r"rows\[0\]\['t'\]"),
        (lambda: jamp.chunked_sum(log_probabilities, 16)(W, X, Y), r"log_probabilities .*float32\[16\]"),
        (lambda: jamp.chunked_sum(lambda w, x: jnp.sum(x > 0), 16)(W, X), "got int32"),
        (lambda: jamp.chunked_sum(lambda w, x: (jnp.sum(x), jnp.any(x > 0)), 16)(W, X), "jnp.sum"),
    ],
)
def test_errors_name_the_cure(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
