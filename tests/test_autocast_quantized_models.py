"""jamp.Float8 and jamp.Int8 on models as they are: in bfloat16 by hand, with experts, with convolutions."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from jaxprs import equations, normal

import jamp
from benchmarks import mixture

BF16 = jnp.bfloat16
F8, I8 = jamp.Float8(min_size=8), jamp.Int8(min_size=8)
ROW = dataclasses.replace(F8, granularity="row")
N = 32
W = {name: normal(N, N, seed=i, scale=N**-0.5) for i, name in enumerate("qkvoudh")}
X = normal(N, N, seed=9)
error = lambda found, true: float(jnp.linalg.norm(jnp.float32(found) - true) / jnp.linalg.norm(true))


def block(params, x):
    """Attention and an MLP, with a norm in float32, as models in bfloat16 have it."""

    def norm(x):
        wide = x.astype(jnp.float32)
        return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)

    h = norm(x)
    q, k, v = (h @ params[name] for name in "qkv")
    x = x + (jax.nn.softmax((q @ k.T).astype(jnp.float32)).astype(x.dtype) @ v) @ params["o"]
    x = x + jax.nn.gelu(norm(x) @ params["u"]) @ params["d"]
    return x @ params["h"]


loss = lambda params, x: jnp.mean(block(params, x).astype(jnp.float32) ** 2)
by_hand = lambda params, x: loss(jamp.cast_floating(params, BF16), x.astype(BF16))
in_scan = lambda f: lambda params, x: lax.scan(lambda c, y: (c + f(params, y), None), 0.0, jnp.stack([x, 2 * x]))[0]


SLOW = [
    pytest.param(jax.checkpoint, id="remat", marks=pytest.mark.slow),
    pytest.param(in_scan, id="scan", marks=pytest.mark.slow),
]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("config", [F8, pytest.param(ROW, marks=pytest.mark.slow), I8], ids=["tensor", "row", "int8"])
@pytest.mark.parametrize("around", [pytest.param(lambda f: f, id="plain"), *SLOW])
def test_a_model_in_bfloat16_by_hand_has_the_same_8_bit_products_as_in_float32(config, around):
    reports = [jamp.autocast_report(around(f), config)(W, X) for f in (loss, by_hand)]
    assert reports[0].share_8_bit == pytest.approx(reports[1].share_8_bit, abs=0.01)
    assert reports[1].share_8_bit > 0.5
    reasons = [
        {(row.parameter, row.reason) for row in r.rows if row.operation == "dot_general" and "bf" in row.after}
        for r in reports
    ]
    assert [why for _, why in sorted(reasons[0])] == [why for _, why in sorted(reasons[1])]
    funs = loss, *(jamp.autocast(f, config) for f in (loss, by_hand))
    plain, *low = jax.jit(lambda w, x: [jax.grad(around(f))(w, x) for f in funs])(W, X)
    for name in W:
        errors = [error(grads[name], plain[name]) for grads in low]
        assert errors[1] < min(1.5 * errors[0], 0.12 if config is I8 else 0.45)


def test_what_such_a_model_computes_between_products_stays_as_it_was():
    kinds = lambda f: sorted(
        f"{e.primitive} {[str(v.aval) for v in e.invars]}"
        for e in jax.make_jaxpr(f)(W, X).eqns
        if e.primitive.name in ("add", "tanh", "exp", "rsqrt", "reduce_sum") and "float" in str(e.outvars[0].aval)
    )
    assert kinds(jamp.autocast(by_hand, F8, recompute=False)) == kinds(by_hand)
    low = jamp.cast_floating(W, BF16)
    grads = jax.grad(jamp.autocast(loss, F8))(low, X.astype(BF16))
    assert {g.dtype for g in grads.values()} == {jnp.dtype(BF16)}
    none = jamp.Float8(min_size=64)
    with pytest.warns(UserWarning, match=r"Float8 changes no product .* is below min_size=64"):
        assert str(jax.make_jaxpr(jamp.autocast(by_hand, none))(W, X)) == str(jax.make_jaxpr(by_hand)(W, X))
    wide = lambda w, x: lax.dot(x, w, preferred_element_type=jnp.float32)  # accumulated as it asked
    low = jamp.autocast(wide, F8, rules={"dot_general": "compute"})
    eqns = equations(jax.make_jaxpr(low)(*jamp.cast_floating((W["q"], X), BF16)))
    assert {e.outvars[0].aval.dtype for e in eqns if e.primitive.name == "dot_general"} == {jnp.dtype(jnp.float32)}


@pytest.mark.slow
def test_a_product_of_16_bit_operands_is_that_of_the_same_numbers_in_float32():
    x, w = (v.astype(BF16) for v in (X, W["q"]))
    product = lambda x, w: (x @ w).astype(jnp.float32)
    for config in (F8, ROW, I8):
        fun = jamp.autocast(product, config, rules={"dot_general": "compute"})
        both = [jax.vjp(fun, *args) for args in ((x, w), (x.astype(jnp.float32), w.astype(jnp.float32)))]
        np.testing.assert_array_equal(both[0][0], both[1][0])
        cotangents = [pull_back(jnp.float32(X.astype(BF16))) for _, pull_back in both]
        for low, wide in zip(*cotangents, strict=True):
            np.testing.assert_array_equal(low, wide.astype(BF16))


def test_int8_values_and_scales_are_numpys_and_inf_and_nan_end_in_a_skipped_step():
    x = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32) * np.float32([[1e-20], [1], [1e20], [0], [7]])
    # A product with the identity gives the quantized numbers.
    product = jamp.autocast(jnp.matmul, jamp.Int8(min_size=1), rules={"dot_general": "compute"})
    found = np.asarray(product(jnp.asarray(x), jnp.eye(16)))
    scale = np.maximum(np.abs(x).max(1, keepdims=True) * np.float32(1 / 127), np.float32(2.0**-120))
    np.testing.assert_allclose(found, np.rint(x / scale) * scale, rtol=2.0**-8)  # to bfloat16
    tx, fun = jamp.loss_scaled(optax.sgd(0.1)), lambda w: jnp.sum((X @ jax.nn.relu(X @ w) @ w) ** 2)
    for bad in (jnp.inf, jnp.nan):
        grads = jax.jit(jax.grad(jamp.autocast(fun, I8)))(W["q"].at[3, 4].set(bad))
        assert not jamp.get_grads_finite(tx.update(grads, tx.init(W["q"]), W["q"])[1])
    products = [e for e in equations(jax.make_jaxpr(jax.grad(jamp.autocast(loss, I8)))(W, X)) if "dot" in str(e)]
    low = [e for e in products if e.invars[0].aval.dtype == jnp.int8]
    assert len(low) == 15  # six of weights, their gradients, and those of what three of them read
    assert {e.outvars[0].aval.dtype for e in low} == {jnp.dtype(jnp.int32)}


@pytest.mark.slow
@pytest.mark.parametrize("form", [mixture.ragged, pytest.param(mixture.einsums, marks=pytest.mark.slow)])
def test_experts_are_8_bit_also_those_that_get_no_token(form):
    experts = {"router": normal(N, 8, seed=1), "gate": normal(8, N, 2 * N, seed=2, scale=0.2)}
    experts |= {"up": normal(8, N, 2 * N, seed=3, scale=0.2), "down": normal(8, 2 * N, N, seed=4, scale=0.2)}
    experts["router"] = experts["router"].at[:, 5:].set(-100 * jnp.sign(X.sum(0))[:, None])  # hardly ever chosen
    tokens = jnp.abs(normal(64, N, seed=5)) * jnp.sign(X.sum(0))
    fun = lambda p, x: jnp.sum(form({k: p[k] for k in p} | {"router": lax.stop_gradient(p["router"])}, x) ** 2)
    chosen, _ = mixture.route(experts, tokens)
    assert (np.bincount(chosen.ravel(), minlength=8) == 0).any()
    names = "ragged_dot_general" if form is mixture.ragged else "dot_general"
    rules = {names: "compute", "dot_general[router]": "float32"}
    funs = fun, *(jamp.autocast(fun, config, rules=rules) for config in (F8, ROW, I8))
    plain, *found = jax.jit(lambda p, x: [jax.grad(f)(p, x) for f in funs])(experts, tokens)
    for grads, bound in zip(found, (0.15, 0.15, 0.05), strict=True):
        for name in ("gate", "up", "down"):
            assert error(grads[name], plain[name]) < bound
            assert (np.asarray(grads[name])[np.bincount(chosen.ravel(), minlength=8) == 0] == 0).all()
    rows = [row for row in jamp.autocast_report(fun, F8)(experts, tokens).rows if "up" in row.parameter]
    assert {row.after.startswith("float8") for row in rows if "dot_general" in row.operation} == {True}


LAYOUTS = [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("NHWC", "OIHW", "NCHW")]


@settings(deadline=None, max_examples=6)
@given(st.sampled_from(LAYOUTS), st.sampled_from([(1, 1), (1, 2), (2, 2), (4, 4)]), st.sampled_from([(1, 1), (3, 3)]))
def test_a_convolution_whose_windows_are_apart_is_a_matrix_product(layout, across, down):
    (n, m), (k, stride) = (3, 5), zip(across, down, strict=True)
    order = lambda shape, names, usual: [dict(zip(usual, shape, strict=True))[c] for c in names]
    # Numbers that eight bits hold exactly.
    x, w = (
        jnp.sign(normal(*order(shape, *names), seed=i))
        for i, (shape, names) in enumerate([((2, 13, 9, n), (layout[0], "NHWC")), ((*k, n, m), (layout[1], "HWIO"))])
    )
    fun = lambda x, w: lax.conv_general_dilated(x, w, stride, "VALID", dimension_numbers=layout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        low = jamp.autocast(fun, jamp.Int8(min_size=1), rules={"conv_general_dilated": "compute"})
        np.testing.assert_allclose(low(x, w), fun(x, w), rtol=1e-2)
        is_8_bit = "i8[" in str(jax.make_jaxpr(low)(x, w))
    assert is_8_bit == all(a in (1, b) for a, b in zip(k, stride, strict=True))


@pytest.mark.slow
def test_patches_and_1_by_1_convolutions_are_8_bit_and_other_ones_say_why_not():
    conv = lambda x, w, stride=1, padding="SAME", **options: lax.conv_general_dilated(
        x, w, (stride, stride), padding, dimension_numbers=LAYOUTS[0], **options
    )

    def net(p, x):
        x = jax.nn.gelu(conv(x, p["patches"], 4, "VALID"))
        x = jax.nn.gelu(conv(x, p["point"]))
        x = jax.nn.gelu(conv(x, p["window"]))
        x = jax.nn.gelu(conv(x, p["groups"], feature_group_count=2))
        return jnp.sum((x.mean((1, 2)) @ p["head"]) ** 2)

    sizes = {"patches": (4, 4, 3, 16), "point": (1, 1, 16, 32), "window": (3, 3, 32, 32), "groups": (1, 1, 16, 32)}
    params = {name: normal(*shape, seed=i, scale=0.1) for i, (name, shape) in enumerate(sizes.items())}
    params["head"], images = normal(32, 10), normal(8, 18, 17, 3)
    for config, network in ((F8, net), (I8, lambda p, x: net(*jamp.cast_floating((p, x), BF16)))):
        rows = [r for r in jamp.autocast_report(network, config)(params, images).rows if "conv" in r.operation]
        low = {row.parameter for row in rows if row.after.startswith(("float8", "int8"))}
        others = {row.parameter for row in rows if "windows overlap or leave gaps" in row.reason}
        assert (low, others) == ({"p['{patches,point}']"}, {"p['{window,groups}']"})
        ways = jamp.autocast(network, config), net
        found, plain = jax.jit(lambda p, x, ways=ways: [jax.grad(f)(p, x) for f in ways])(params, images)
        assert all(error(found[name], plain[name]) < (0.05 if config is I8 else 0.15) for name in params)


def test_what_int8_cannot_be_is_an_error_that_says_what_to_pass():
    for wrong in (jamp.Int8, jnp.int8, "int8"):
        with pytest.raises(ValueError, match=r"[Pp]ass.* jamp\.Int8\(\)"):
            jamp.autocast(loss, wrong)
    with pytest.raises(ValueError, match="min_size"):
        jamp.Int8(min_size=True)
    assert jamp.loss_scale_for(I8) == jamp.StaticLossScale(1.0)


def test_a_jitted_function_has_other_decisions_at_each_of_its_calls():
    product = jax.jit(lambda x, w: x @ w)
    x, w = X.astype(BF16), W["q"].astype(BF16)

    def fun(x, w):
        exact = jamp.full_precision(product)(x, w)
        with jax.named_scope("first"):
            x = product(x, w)
        return exact, x, jnp.tanh(product(jnp.tanh(x), w)) @ w

    low = jamp.autocast(fun, F8, rules={"dot_general[first]": "float32"})(x, w)
    assert [bool((a == b).all()) for a, b in zip(low, fun(x, w), strict=True)] == [True, True, False]
    head = jamp.autocast_report(lambda x, w: product(product(x, w), w), F8, rules={"dot_general[none]": "float32"})(
        x, w
    )
    assert {row.after.startswith("float8") for row in head.rows} == {True, False}


@pytest.mark.slow
def test_sums_of_int8_do_not_overflow_and_other_values_are_not_taken_for_a_cast():
    terms, rules = 140_000, {"dot_general": "compute"}
    mean = jamp.autocast(lambda w, x: jnp.mean(x @ w), jamp.Int8(min_size=1), rules=rules)
    np.testing.assert_allclose(jax.jit(jax.grad(mean))(jnp.ones((8, 8)), jnp.ones((terms, 8))), 1 / 8, rtol=1e-2)
    fun = lambda x, w: x.astype(jnp.int32).astype(jnp.float32) @ w + x @ w.T
    narrow = lambda x, w: (x.astype(jnp.float16) @ w.astype(jnp.float16), x @ w)  # float16 ends at 65504
    for config in (F8, I8):
        assert error(jax.jit(jamp.autocast(fun, config, rules=rules))(3 * X, W["q"]), fun(3 * X, W["q"])) < 0.1
        low = jax.jit(jamp.autocast(narrow, config, rules=rules))(jnp.full((8, 8), 1e5, BF16), jnp.eye(8, dtype=BF16))
        assert [bool(np.isfinite(x).all()) for x in low] == [False, True]
    tiny = jax.jit(jax.grad(jamp.autocast(lambda w: jnp.sum(jnp.cos(X) * (X @ w)) * 1e-32, I8, rules=rules)))(W["q"])
    assert error(tiny * 1e32, X.T @ jnp.cos(X)) < 0.05


@pytest.mark.filterwarnings("ignore:Float8 changes no product")
def test_empty_convolutions_and_equations_without_results_are_left_alone():
    conv = lambda x, w: lax.conv_general_dilated(x, w, (4, 4), "VALID", dimension_numbers=LAYOUTS[0])
    for shapes in (((0, 8, 8, 3), (4, 4, 3, 16)), ((2, 4, 8, 8), (4, 4, 8, 0)), ((2, 0, 8, 8), (1, 4, 8, 16))):
        args = [jnp.zeros(shape) for shape in shapes]
        assert jax.eval_shape(jamp.autocast(conv, F8), *args).shape == jax.eval_shape(conv, *args).shape

    def with_a_barrier(x, w):
        x = jnp.tanh(x @ w) * 2
        lax.optimization_barrier(())
        return jnp.sum((jnp.sin(x) @ w) @ w)

    assert jax.grad(jamp.autocast(with_a_barrier, BF16))(X, W["q"]).shape == X.shape


def test_the_backward_pass_keeps_results_in_16_bit_and_less_of_a_model_by_hand():
    def kept(fun):
        residuals = jax.eval_shape(lambda params, x: jax.vjp(lambda p: fun(p, x), params)[1], W, jnp.tile(X, (32, 1)))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(residuals) if x.size > N * N)  # no weights

    for config in (ROW, I8):
        assert kept(jamp.autocast(loss, config)) <= kept(jamp.autocast(loss, BF16))
    for config in (F8, ROW, I8):
        assert kept(jamp.autocast(by_hand, config)) < 0.6 * kept(by_hand)
