"""MXFP8: products with a scale for each block of 32 along the summed axis."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec as P
from jaxprs import equations, name_of, normal

import jamp

MX = jamp.MXFP8(min_size=32)
BF16, E4 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float8_e4m3fn)
W, X = normal(2, 64, 64, scale=0.2), normal(96, 64, seed=1)


def mlp(w, x):
    return jnp.tanh(x @ w[0]) @ w[1] @ w[0]


def loss(w, x):
    return jnp.mean(mlp(w, x) ** 2)


def error(x, y):
    return float(jnp.linalg.norm(jnp.float32(x) - y) / jnp.linalg.norm(y))


def scaled_dots(fun, *args):
    return [e for e in equations(jax.make_jaxpr(fun)(*args)) if name_of(e) == "scaled_dot"]


def encoded(x):
    """The numbers that MXFP8 has for an array: each block of 32 of the last axis by itself, in NumPy."""
    blocks = np.float64(x).reshape(-1, 32)
    amax = np.abs(blocks).max(1, keepdims=True)
    # The smallest power of two that brings the largest element to 448 or below.
    scales = 2.0 ** np.ceil(np.log2(np.maximum(amax, 1e-30) / 448))
    return ((blocks / scales).astype(E4).astype(np.float64) * scales).reshape(x.shape)


def test_a_product_is_that_of_the_encoded_operands():
    x, w = X, jnp.asarray(W[0])
    product = jamp.autocast(lambda x, w: x @ w, MX, rules={"dot_general": "compute"})
    wanted = encoded(x) @ encoded(w.T).T
    np.testing.assert_allclose(product(x, w), jnp.bfloat16(wanted).astype(jnp.float32), rtol=1e-2, atol=1e-3)
    # A block of large numbers takes no digits from the others.
    spread = x.at[:, :32].multiply(2.0**20)
    small = product(spread, w.at[:32].set(0))
    np.testing.assert_allclose(small, product(x.at[:, :32].set(0), w), rtol=1e-2, atol=1e-3)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "equation", ["ij,jk->ik", "ji,kj->ik", "bij,bjk->bik", "bij,jk->bik", "ibj,bkj->bik", "abj,jc->abc"]
)
def test_values_and_both_gradients_are_close_in_any_layout(equation):
    """Each backward product sums another axis, and encodes its operands along it."""
    left, right = equation.partition("->")[0].split(",")
    sizes = dict(zip("abcijk", (2, 2, 64, 64, 96, 64), strict=True)) | {"a": 32}
    x = normal(*(sizes[i] for i in left), seed=1)
    w = normal(*(sizes[i] for i in right), scale=0.2, seed=2)
    fun = lambda x, w: jnp.einsum(equation, x, w)
    low = jamp.autocast(fun, MX, rules={"dot_general": "compute"})
    value, pull_back = jax.vjp(low, x, w)
    wanted, true_pull_back = jax.vjp(fun, x, w)
    assert error(value, wanted) < 0.05
    g = normal(*value.shape, seed=3)
    for got, want in zip(pull_back(g), true_pull_back(g), strict=True):
        assert got.dtype == jnp.float32
        assert error(got, want) < 0.05
    assert len(scaled_dots(lambda x, w: jax.vjp(low, x, w)[1](g), x, w)) == 3


@pytest.mark.slow
def test_explicit_axes_and_empty_operands_stay_in_the_carrier():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Explicit,))
    forced = jamp.autocast(lambda x, w: x @ w, MX, rules={"dot_general": "compute"})
    with jax.set_mesh(mesh), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = jax.device_put(X, P("i"))
        grads = jax.jit(jax.grad(lambda w, x: jnp.sum(forced(x, w) ** 2)))(W[0], x)
    assert error(grads, jax.grad(lambda w: jnp.sum((X @ w) ** 2))(W[0])) < 0.02
    with pytest.warns(UserWarning, match="multiples"):
        assert forced(jnp.zeros((0, 64)), W[0]).shape == (0, 64)
    batched = jamp.autocast(lambda x, w: jnp.einsum("bij,bjk->bik", x, w), MX, rules={"dot_general": "compute"})
    assert batched(jnp.zeros((0, 64, 64)), jnp.zeros((0, 64, 32))).shape == (0, 64, 32)


@pytest.mark.parametrize(
    "format", [MX, jamp.Int8(min_size=32), jamp.Float8(min_size=32)], ids=["MXFP8", "Int8", "Float8"]
)
def test_the_report_of_a_function_that_is_under_autocast_already_shows_its_products(format):
    report = jamp.autocast_report(jamp.autocast(mlp, format), format)(W, X)
    assert report.share_8_bit > 0.6
    assert not [row for row in report.rows if "kernel" in row.reason]


@pytest.mark.filterwarnings("ignore:MXFP8 changes no product")
def test_shapes_that_are_no_multiple_of_32_stay_in_the_carrier_with_the_reason():
    for m, k, n in ((95, 64, 64), (96, 48, 64), (96, 64, 80)):
        x, w, v = normal(m, k), normal(k, n), normal(n, 64)
        fun = lambda x, w, v=v: jnp.sum((x @ w) @ v)
        report = jamp.autocast_report(fun, jamp.MXFP8(min_size=8))(x, w)
        reasons = [row.reason for row in report.rows if row.operation == "dot_general"]
        assert f"its sizes {[m, n, k]} are not all multiples of the block of 32" in reasons
        assert not scaled_dots(jamp.autocast(lambda x, w: x @ w, MX, rules={"dot_general": "compute"}), x, w)
    ragged = jamp.autocast(
        lambda x, w: lax.ragged_dot(x, w, jnp.array([32, 64])), MX, rules={"ragged_dot_general": "compute"}
    )
    with pytest.warns(UserWarning, match="ragged"):
        assert not scaled_dots(ragged, X, W)


def test_the_report_names_the_format_and_counts_its_flops():
    report = jamp.autocast_report(mlp, MX)(W, X)
    assert "66.5% of the FLOPs in mxfp8" in str(report)
    assert report.share_8_bit == report.share_float8 > 0.6
    (head,) = [row for row in report.rows if "no product follows" in row.reason]
    assert "makes it mxfp8" in head.reason
    assert [hint for hint in report.hints if "stays" in hint] == [h for h in report.hints if "it is the head" in h]


def kept(fun, *args):
    """The bytes of what JAX keeps for the backward pass, without the arguments."""
    jaxpr = jax.make_jaxpr(lambda *xs: jax.tree.leaves(jax.vjp(fun, *xs)[1]))(*args).jaxpr
    return sum(v.aval.size * v.aval.dtype.itemsize for v in {*jaxpr.outvars} - {*jaxpr.invars, *jaxpr.constvars})


def test_dots_saveable_keeps_the_16_bit_result_of_each_product():
    policy = jax.checkpoint_policies.dots_saveable
    of = lambda dtype: kept(jax.checkpoint(jamp.autocast(loss, dtype, recompute=False), policy=policy), W, X)
    assert of(MX) == of(jnp.bfloat16)
    inside = lambda dtype: kept(jamp.autocast(jax.checkpoint(loss, policy=policy), dtype, recompute=False), W, X)
    assert inside(MX) == inside(jnp.bfloat16)


@pytest.mark.slow
def test_budgets_and_the_memory_report_count_what_is_kept():
    def deep(w, x):
        for _ in range(4):
            x = jnp.tanh(x @ w[0]) @ w[1]
        return jnp.mean(x**2)

    plain, full = jax.grad(deep)(W, X), jax.grad(jamp.autocast(deep, MX))(W, X)
    for budget in (0.6, 0.3):
        report = jamp.memory_report(jamp.autocast(deep, MX), budget)(W, X)
        assert report.kept <= budget * report.without_budget
        assert 0 < report.flops < 1e9
        grads = jax.grad(jamp.autocast(deep, MX, memory_budget=budget))(W, X)
        assert error(grads, plain) < 1.1 * error(full, plain)
    in_bfloat16 = jamp.memory_report(jamp.autocast(deep, jnp.bfloat16))(W, X).without_budget
    assert jamp.memory_report(jamp.autocast(deep, MX))(W, X).without_budget <= 1.05 * in_bfloat16


@pytest.mark.slow
def test_it_works_under_jit_scan_vmap_remat_and_shard_map():
    low = jamp.autocast(loss, MX)
    wanted = jax.grad(low)(W, X)
    ways = {
        "jit": jax.jit(jax.grad(low)),
        "remat": jax.grad(jax.checkpoint(low)),
        "vmap": lambda w, x: jax.vmap(jax.grad(low), (0, None))(w[None], x)[0],
        "scan": lambda w, x: lax.scan(lambda c, _: (c, jax.grad(low)(w, x)), 0, None, length=1)[1][0],
    }
    for name, way in ways.items():
        assert scaled_dots(way, W, X), name
        np.testing.assert_allclose(way(W, X), wanted, rtol=2e-2, atol=2e-4, err_msg=name)
    mesh = Mesh(np.array(jax.devices()[:1]), ("i",))
    of_shard = lambda w, x: lax.pmean(low(w, x), "i")
    sharded = jax.shard_map(of_shard, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    np.testing.assert_allclose(jax.grad(sharded)(W, X), wanted, rtol=2e-2, atol=2e-4)
    of_each = jax.vmap(low, (None, 0))(W, jnp.stack([X, 2 * X]))
    np.testing.assert_allclose(of_each, [low(W, X), low(W, 2 * X)], rtol=1e-2)


def test_inf_and_nan_make_the_product_nan():
    product = jamp.autocast(lambda x, w: x @ w, MX, rules={"dot_general": "compute"})
    for bad in (jnp.inf, -jnp.inf, jnp.nan):
        out, pull_back = jax.vjp(product, X.at[3, 40].set(bad), W[0])
        assert np.isnan(out[3]).all()
        assert np.isfinite(np.delete(out, 3, 0)).all()
        assert np.isnan(pull_back(jnp.ones_like(out))[1]).any()
        assert np.isnan(jax.vjp(product, X, W[0])[1](jnp.ones_like(out).at[0, 0].set(bad))[0]).any()
    assert (product(jnp.zeros_like(X), W[0]) == 0).all()


@pytest.mark.slow
def test_second_derivatives_are_refused():
    low = jamp.autocast(loss, MX)
    for call in (jax.jacfwd(low), jax.grad(lambda w, x: jnp.sum(jax.grad(low)(w, x) ** 2))):
        with pytest.raises(TypeError, match="forward-mode"):
            call(W, X)


def test_a_class_and_a_bad_size_are_errors_that_show_the_right_line():
    with pytest.raises(ValueError, match=r"jamp\.MXFP8\(\)"):
        jamp.autocast(loss, jamp.MXFP8)
    with pytest.raises(ValueError, match="min_size must be an int of at least 1, got 0"):
        jamp.MXFP8(min_size=0)
