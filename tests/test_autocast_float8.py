"""jamp.Float8: quantization against NumPy, which products are float8, their derivatives, and what is not promised."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.custom_derivatives import linear_call
from jax.extend.core import Var
from jaxprs import equations, name_of, normal

import jamp
from jamp._products.formats.scaled import quantize

E4, E5, BF16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16
F8 = jamp.Float8(min_size=8)
ROW = dataclasses.replace(F8, granularity="row")
N = 32  # large enough to be computed again by the backward pass
X, W, V = normal(N, N), normal(N, N, seed=1, scale=0.25), normal(N, N, seed=2, scale=0.25)
error = lambda found, true: float(jnp.linalg.norm(found - true) / jnp.linalg.norm(true))


def reference(x, dtype, axis=None):
    """The scale by trial, the rounding by ml_dtypes."""
    scale, amax = np.float32(2.0**-100), np.abs(np.float64(x)).max(axis, keepdims=axis is not None)
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    scales = np.full(amax.shape, scale)
    while (amax / scales > largest).any():
        scales = np.where(amax / scales > largest, 2 * scales, scales)
    return (np.float32(x) / scales).astype(dtype), np.float32(scales)


@pytest.mark.parametrize("config", [F8, ROW], ids=["tensor", "row"])
def test_products_read_float8_and_not_a_cast_of_it_which_xla_gpu_takes_out(config):
    loss = lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ V) @ V)
    low = jamp.autocast(loss, config, rules={"dot_general": "compute"})
    for fun, count in ((low, 3), (jax.grad(low), 3 + 3)):
        dots = [eqn for eqn in equations(jax.make_jaxpr(fun)(W, X)) if eqn.primitive.name == "dot_general"]
        found = [{v.aval.dtype for v in eqn.invars} for eqn in dots]
        found = [dtypes for dtypes in found if jnp.dtype(jnp.float32) not in dtypes]  # not the product of the scales
        assert len(found) == count
        assert all(dtypes <= {jnp.dtype(E4), jnp.dtype(E5)} for dtypes in found)


@pytest.mark.parametrize("config", [F8, ROW, jamp.Int8(min_size=8)], ids=["tensor", "row", "int8"])
def test_a_product_is_right_also_if_that_of_its_scales_is_0_or_inf(config):
    product = jax.jit(jamp.autocast(jnp.matmul, config, rules={"dot_general": "compute"}))
    tiny = product(X * 2.0**-70, W * 2.0**-50)
    assert error(tiny * 2.0**120, X @ W) < 0.1
    large = product((X * 2.0**115).at[0].set(0), W * 2.0**35)
    assert bool((large[0] == 0).all() & jnp.isinf(large[1:]).any())


@settings(deadline=None, max_examples=40)
@given(st.integers(-70, 90), st.integers(0, 99), st.sampled_from([E4, E5, jnp.float8_e4m3fnuz]))
def test_quantization_equals_numpys_to_the_bit_and_commutes_with_powers_of_two(exponent, seed, dtype):
    x = np.random.default_rng(seed).normal(size=(3, 8)).astype(np.float32) * np.float32(2.0**exponent)
    for axis in (None, 1):
        found, want = quantize(jnp.asarray(x), dtype, axis and (axis,)), reference(x, dtype, axis)
        np.testing.assert_array_equal(np.asarray(found[0]).view(np.uint8), want[0].view(np.uint8))
        np.testing.assert_array_equal(found[1], want[1])
        shuffled = quantize(jnp.asarray(x[::-1, ::-1]), dtype, axis and (axis,))
        np.testing.assert_array_equal(np.asarray(shuffled[0])[::-1, ::-1], found[0])
        doubled = quantize(jnp.asarray(4 * x), dtype, axis and (axis,))
        np.testing.assert_array_equal(doubled[0], found[0])
        np.testing.assert_array_equal(doubled[1], 4 * found[1])


def test_scales_are_finite_unless_an_operand_is_not_and_then_the_product_is_nan():
    for x in (0.0, 1e-45, 1e-38, 448.0, 449.0, 3e38):
        values, scale = quantize(jnp.float32([x, -x]), E4)
        assert np.isfinite(scale)
        assert np.isfinite(np.float32(values)).all()
        assert abs(float(values[0].astype(jnp.float32) * scale) - x) <= max(x / 16, 1e-30)


BAD = [jnp.inf, -jnp.inf, jnp.nan, -jnp.nan]
FORMATS = {"float16": jnp.float16, "bfloat16": jnp.bfloat16, "tensor": F8, "row": ROW, "int8": jamp.Int8(min_size=8)}


@pytest.mark.parametrize("dtype", [E4, jnp.float8_e5m2, jnp.int8])
def test_inf_and_nan_are_seen_wherever_they_are_in_an_array_of_any_shape(dtype):
    """XLA:CPU's maximum of floats loses NaN in some shapes, 128 by 128 for one."""
    sizes = (1, 7, 8, 16, 33, 64, 100, 127, 128, 129)
    shapes = [shape for n in sizes for shape in ((n, 128), (128, n), (2, n, 64))]
    axes = [(None, (0,), (len(shape) - 1,))[i % 3] for i, shape in enumerate(shapes)]
    arrays = [np.float32(np.random.default_rng(0).normal(size=shape)) for shape in shapes]
    product = lambda x, axis: jnp.multiply(*map(jnp.float32, quantize(x, dtype, axis)))
    products = jax.jit(lambda arrays: list(map(product, arrays, axes)))
    assert all(np.isfinite(x).all() for x in products(arrays))
    for place, bad in zip((lambda n: 0, lambda n: n // 2, lambda n: n - 1, lambda n: n // 3), BAD, strict=True):
        spoilt = [x.copy() for x in arrays]
        for x in spoilt:
            x.flat[place(x.size)] = bad
        for x, found in zip(spoilt, products(spoilt), strict=True):
            assert not np.isfinite(found).flat[place(x.size)], (x.shape, bad)


@pytest.mark.parametrize("config", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("n", [pytest.param(32, marks=pytest.mark.slow), 128])
def test_a_bad_value_forward_or_backward_ends_in_a_skipped_step(config, n):
    tx, w, x, g = jamp.loss_scaled(optax.sgd(0.1)), *(normal(n, n, seed=i, scale=n**-0.5) for i in range(3))
    product = jamp.autocast(lambda w, x: (x @ w) @ w, config)

    @jax.jit
    def step(w, x, g):
        """One step with the cotangent `g`, and whether it was applied."""
        new = tx.update(jax.vjp(product, w, x)[1](g)[0], tx.init(w), w)
        return *new, jamp.get_grads_finite(new[1])

    assert step(w, x, g)[2]
    for bad, place in zip(BAD, ((0, 0), (n // 2, 3), (n - 1, n - 1), (1, 0)), strict=True):
        for args in ((w.at[place].set(bad), x, g), (w, x.at[place].set(bad), g), (w, x, g.at[place].set(bad))):
            updates, state, is_applied = step(*args)
            assert not is_applied
            np.testing.assert_array_equal(np.asarray(updates).view(np.uint32), 0x80000000)  # -0.0
            assert state.inner_state == tx.init(w).inner_state


@pytest.mark.parametrize("config", [F8, ROW], ids=["tensor", "row"])
def test_a_product_and_its_gradients_equal_numpys_to_the_bit(config):
    """All sums are exact: the values lie within one binade."""
    one_binade = lambda seed: jnp.float32(np.random.default_rng(seed).uniform(1, 2, (N, N)) * (-1) ** np.eye(N))
    x, w, g = (one_binade(seed).astype(BF16).astype(jnp.float32) for seed in range(3))
    fun = jamp.autocast(lambda x, w: x @ w, config, rules={"dot_general": "compute"})

    def both(x, w, g):
        found, pull_back = jax.vjp(fun, x, w)
        return found, pull_back(g)

    found, cotangents = jax.jit(both)(x, w, g)  # XLA's default flags leave out no rounding of a gradient.

    def product(a, a_dtype, b, b_dtype):
        row = config.granularity == "row"
        (qa, sa), (qb, sb) = reference(a, a_dtype, 1 if row else None), reference(b, b_dtype, 0 if row else None)
        return np.float32((np.float64(qa) * sa) @ (np.float64(qb) * sb))

    x, w, g = np.asarray(x), np.asarray(w), np.asarray(g)
    np.testing.assert_array_equal(found, product(x, E4, w, E4).astype(ml_dtypes.bfloat16))
    for cotangent, want in zip(cotangents, (product(g, E5, w.T, E4), product(x.T, E4, g, E5)), strict=True):
        np.testing.assert_array_equal(cotangent, want)


def model(params, x):
    """A block with attention, a router, and a head."""
    q, k, v = (x @ params[name] for name in "qkv")
    x = x + (jax.nn.softmax(q @ k.T) @ v) @ params["out"]
    with jax.named_scope("router"):
        gates = jax.nn.softmax(x @ params["router"])
    x = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))
    hidden = jax.nn.gelu(x @ params["up"] * gates[:, :1])
    x = x + jnp.matmul(hidden, params["down"], precision="highest")
    with jax.named_scope("head"):
        return jnp.sum(jax.nn.log_softmax(x @ params["head"]) ** 2)


PARAMS = {name: normal(N, N, seed=i, scale=0.25) for i, name in enumerate([*"qkv", "out", "up", "down", "head"])}
PARAMS["router"] = normal(N, 4, seed=9)


def float8_products(fun, *args, config=F8, **options):
    """The parameters that float8 products read, and why the others stay in 16 or 32 bit."""
    report = jamp.autocast_report(fun, config, **options)(*args)
    rows = [row for row in report.rows if "dot_general" in row.operation]
    low = {row.parameter for row in rows if row.after.startswith("float8_e4m3fn, float8_e4m3fn -> bfloat16")}
    return ",".join(sorted(low)), {row.parameter: row.reason for row in rows if row.parameter not in low}


def test_what_is_not_a_head_attention_a_router_or_stated_is_float8():
    low, others = float8_products(model, PARAMS, X)
    assert low == "params['out'],params['up'],params['{q,k,v}']"
    assert "no product follows, so it is the head; rules={'dot_general': 'compute'}" in others["params['head']"]
    assert "one of its sizes [32, 4, 32] is below min_size=8" in others["params['router']"]
    assert "was asked for in the code" in others["params['down']"]
    assert "products compute both operands, as in attention" in others[""]
    low, others = float8_products(
        model, PARAMS, X, rules={"dot_general[head]": "compute", "dot_general[router]": "float32"}
    )
    assert "params['head']" in low
    last = lambda w, x: lax.scan(layer, x, jnp.stack([w, w]))[0].sum()  # A carry is read by the next step.
    assert jamp.autocast_report(last, F8)(W, X).share_float8 > 0.9
    assert others["params['router']"] == "a rule of yours"
    low, others = float8_products(model, PARAMS, X, rules={"dot_general": "compute"})
    assert set(others) == set()
    report = jamp.autocast_report(model, F8)(PARAMS, X)
    assert report.share_float8 == pytest.approx(0.52, abs=0.01)
    assert str(report).startswith("autocast to bfloat16: 52.4% of the FLOPs in float8, 85.1% in 16 bit or less")
    assert any("with params['head']" in hint and "stays bfloat16: no product follows" in hint for hint in report.hints)
    reasons = {row.reason for row in jamp.autocast_report(jax.grad(model), F8)(PARAMS, X).rows}
    assert any("a gradient that the function takes itself, and stays in bfloat16" in why for why in reasons)


def test_a_value_is_quantized_once_and_no_product_is_computed_twice():
    fun = jamp.autocast(model, F8)

    def quantizations(f):
        eqns = equations(jax.make_jaxpr(f)(PARAMS, X))
        return sum(e.primitive.name == "convert_element_type" and e.params["new_dtype"] == E4 for e in eqns)

    assert quantizations(fun) == 8  # x for q, k and v; what out and up read; five weights
    assert quantizations(jax.grad(fun)) == 10  # what two products read is rounded again, weights are not
    count = lambda f: sum(e.primitive.name == "dot_general" for e in equations(jax.make_jaxpr(jax.grad(f))(PARAMS, X)))
    assert count(fun) == count(jamp.autocast(model, BF16))
    kept = lambda f: sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(lambda: jax.vjp(f, PARAMS)[1]))
    )
    assert kept(lambda p: fun(p, X)) <= kept(lambda p: jamp.autocast(model, BF16)(p, X))


def stack(body):
    """A scan over three layers, and a product after it, so that the last layer is not the head."""
    return lambda w, x: jnp.sum((lax.scan(body, x, jnp.stack([w, w, w]))[0] @ w) ** 2)


layer = lambda x, w: (jax.nn.relu(x @ w), None)
CONSTRUCTS = {
    "scan": stack(layer),
    "remat": stack(jax.checkpoint(layer)),
    "policy": stack(jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)),
    "jit": stack(lambda x, w: (jax.jit(lambda x, w: jax.nn.relu(x @ w))(x, w), None)),
    "cond": stack(lambda x, w: lax.cond(x[0, 0] > -1e9, layer, lambda x, w: (x, None), x, w)),
    "vmap": lambda w, x: jnp.sum((jax.vmap(lambda row: jax.nn.relu(w.T @ row))(x) @ w) ** 2),
    "batched": lambda w, x: jnp.sum((jnp.einsum("eij,ejk->ik", jnp.stack([x, 2 * x]), jnp.stack([w, w.T])) @ w) ** 2),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "granularity"),
    [
        pytest.param(name, kind, marks=[pytest.mark.slow] * ((name, kind) not in (("scan", "tensor"), ("vmap", "row"))))
        for name, kind in zip(CONSTRUCTS, ("tensor", "row") * 4, strict=False)
    ],
)
def test_inside_every_construct_the_gradients_are_those_of_float32(name, granularity):
    fun, config = CONSTRUCTS[name], dataclasses.replace(F8, granularity=granularity)
    low = jamp.autocast(fun, config)
    found = lambda f: jax.jit(jax.value_and_grad(f, (0, 1)))(W, X)
    assert jamp.autocast_report(fun, config)(W, X).share_float8 > 0.3
    for mine, plain in zip(*(jax.tree.leaves(found(f)) for f in (low, fun)), strict=True):
        assert mine.dtype == jnp.float32
        assert error(mine, plain) < 0.25
    each = jax.jit(jax.vmap(jax.grad(low), (None, 0)))(W, jnp.stack([X, 8 * X]))  # Each has scales of its own.
    alone = jnp.stack([jax.jit(jax.grad(low))(W, x) for x in (X, 8 * X)])
    assert error(each, alone) < 5e-2
    together = lambda w: jax.vmap(low, (None, 0))(w, jnp.stack([X, 8 * X])).sum()
    assert error(jax.jit(jax.grad(together))(W), alone.sum(0)) < 5e-2


@pytest.mark.parametrize("config", [F8, ROW, jamp.Int8(min_size=8)], ids=["tensor", "row", "int8"])
def test_in_nested_vmaps_each_example_has_scales_of_its_own_in_the_gradient(config):
    fun = lambda x, w: jnp.sum(jnp.tanh(x @ w) ** 2)
    low = jamp.autocast(fun, config, rules={"dot_general": "compute"})
    x = jnp.stack([jnp.stack([X, 2.0**-30 * X, 3 * X], -1), jnp.stack([X[::-1], -X, 2.0**-30 * X], -1)])
    w = jnp.stack([W, W.T, -W], 1)
    nested = lambda f: lambda x, w: jax.vmap(jax.vmap(f, (2, 1)), (0, None))(x, w).sum()
    gradients = lambda f: jax.jit(jax.grad(f, (0, 1)))
    of_x, of_w = gradients(nested(low))(x, w)
    assert of_x.shape == x.shape
    assert of_w.shape == w.shape
    for j in range(3):
        alone = [gradients(low)(x[i, :, :, j], w[:, j]) for i in range(2)]
        assert error(of_w[:, j], alone[0][1] + alone[1][1]) < 1e-2
        for i in range(2):
            assert jnp.any(alone[i][0])
            assert error(of_x[i, :, :, j], alone[i][0]) < 1e-2


def test_a_float16_carrier_and_a_scaled_loss_train_too():
    fun = jamp.autocast(CONSTRUCTS["scan"], dataclasses.replace(F8, carrier="fp16"))
    state = jamp.StaticLossScale(16.0).init()
    grads = jax.jit(lambda w: jamp.grad(fun, state)(w, X))(W)
    assert error(grads, jax.grad(CONSTRUCTS["scan"])(W, X)) < 0.15
    assert jamp.loss_scale_for(F8) == jamp.StaticLossScale(1.0)
    assert jamp.loss_scale_for(dataclasses.replace(F8, carrier="fp16")) == jamp.DynamicLossScale()


SLOW = [pytest.param(policy, marks=pytest.mark.slow) for policy in ("dots_saveable", "nothing_saveable")]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["everything_saveable", *SLOW])
def test_a_users_checkpoint_may_save_what_it_likes_inside_and_outside(policy):
    remat = functools.partial(jax.checkpoint, policy=getattr(jax.checkpoint_policies, policy))
    fun = lambda w: jnp.sum(((jnp.tanh(X @ w) @ w) @ w) ** 2)
    inside = lambda w: jnp.sum((remat(lambda w: jnp.tanh(X @ w) @ w)(w) @ w) ** 2)
    for dtype, atol in ((F8, 0.25), (ROW, 0.25), (BF16, 0.02)):
        for low in (jamp.autocast(inside, dtype), remat(jamp.autocast(fun, dtype))):
            assert error(jax.jit(jax.grad(low))(W), jax.grad(fun)(W)) < atol


def test_rules_for_a_name_reach_into_every_construct_below_it():
    def named(wrap):
        def fun(x):
            with jax.named_scope("multi_head"):
                x = x @ V
            with jax.named_scope("head"):
                return wrap(lambda x: jnp.sum(jnp.tanh(x @ V) @ W))(x)

        return fun

    steps = lambda f: lambda x: lax.scan(lambda c, _: (c + f(x), None), 0.0, None, 2)[0]
    branch = lambda f: lambda x: lax.cond(True, f, lambda x: 0.0, x)
    for wrap in (lambda f: f, jax.jit, jax.checkpoint, steps, branch):
        report = jamp.autocast_report(named(wrap), F8, rules={"dot_general[head]": "float32"})(X)
        products = {row.scope: row.after for row in report.rows if "dot_general" in row.operation}
        assert products.pop("multi_head").startswith("float8")
        assert set(products.values()) == {"float32, float32 -> float32"}
    with pytest.raises(ValueError, match=r"scan\[head\]"):
        jamp.autocast(model, jnp.float16, rules={"scan[head]": "float32"})


def test_before_a_loss_in_a_loop_or_written_as_a_product_stands_a_head():
    chunked = lambda w, x: lax.scan(lambda c, h: (c + jnp.sum(jnp.exp(h @ w)), None), 0.0, jnp.stack([x @ w, x]))[0]
    contracted = lambda w, x: jnp.vdot(x @ w @ w, x @ w @ w)
    for fun in (chunked, contracted):
        products = [
            r for r in jamp.autocast_report(fun, F8)(W, X).rows if r.operation == "dot_general" and r.flops > 5000
        ]
        assert {"no product follows" in row.reason for row in products if row.after.startswith("bfloat16")} == {True}
        assert any(row.after.startswith("float8") for row in products)


def test_asked_dtypes_symbolic_sizes_and_empty_batches_are_as_in_16_bit():
    for asked in (BF16, jnp.float16):
        fun = lambda x, w, asked=asked: lax.dot(x, w, preferred_element_type=asked)
        both = [jamp.autocast(fun, dtype, rules={"dot_general": "compute"})(X, W) for dtype in (F8, BF16)]
        np.testing.assert_array_equal(*both)
    low = jamp.autocast(lambda x: jnp.sum((x @ W) @ V), F8)
    symbolic = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("b"), N), jnp.float32)
    assert "f8E4M3FN" in str(jax.export.export(jax.jit(low))(symbolic).mlir_module())
    empty = jamp.autocast(lambda x: jnp.sum(jnp.einsum("bij,bjk->bik", x, x) @ W), F8)
    assert empty(jnp.zeros((0, N, N))) == 0


def test_forward_mode_and_second_derivatives_are_errors_that_name_the_carrier():
    fun = lambda w: jnp.sum(jamp.autocast(lambda w: X @ w @ W, F8)(w) ** 2)
    forward = lambda w: jax.jvp(fun, (w,), (w,))
    for call in (
        forward,
        jax.jit(forward),
        jax.jacfwd(fun),
        jax.grad(lambda w: jax.grad(fun)(w).sum()),
        jax.hessian(fun),
    ):
        with pytest.raises(TypeError, match="carrier"):
            call(W)


def by_custom_vjp():
    product = jax.custom_vjp(lambda x, w: x @ w)
    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))
    return product


def by_custom_jvp():
    product = jax.custom_jvp(lambda x, w: x @ w)
    product.defjvp(lambda primals, tangents: (product(*primals), tangents[0] @ primals[1] + primals[0] @ tangents[1]))
    return product


def by_linear_call():
    return lambda x, w: linear_call(lambda w, x: x @ w, lambda w, g: g @ w.T, lax.stop_gradient(w), x)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("make", [by_custom_vjp, by_custom_jvp, by_linear_call])
def test_products_in_custom_rules_are_8_bit_where_they_qualify(make):
    """The value is the same with and without a gradient. What the rule multiplies with a cotangent is 16 bit."""
    custom = make()
    fun, by_jax = (lambda w, product=product: product(jnp.tanh(X @ w), w) @ w for product in (custom, jnp.matmul))
    low, plain = (jamp.autocast(f, F8) for f in (fun, by_jax))
    value, pull_back = jax.vjp(low, W)
    np.testing.assert_array_equal(value, plain(W))
    np.testing.assert_array_equal(value, low(W))
    is_8_bit = lambda e: name_of(e) == "dot_general" and e.invars[0].aval.dtype == E4
    count = lambda f: sum(map(is_8_bit, equations(jax.make_jaxpr(f)(W))))
    assert count(low) == count(plain) == 2  # The head is in 16 bit.
    rows = [r for r in jamp.autocast_report(fun, F8)(W).rows if r.operation == "dot_general"]
    assert sum(r.count for r in rows if r.after.startswith("float8")) == 2
    (wanted,), (by_plain,) = (jax.vjp(f, W)[1](value) for f in (fun, plain))
    within_budget = jax.vjp(jamp.autocast(fun, F8, memory_budget=0.7), W)[1]
    for back in (pull_back, within_budget):
        assert error(back(value)[0], wanted) < 1.1 * error(by_plain, wanted)


def test_no_product_in_the_backward_pass_of_a_custom_rule_is_8_bit():
    """A rule that asks for it reaches the forward pass alone."""
    custom = by_custom_vjp()
    fun = lambda w: (custom(custom(X, w), w)).sum()
    low = jamp.autocast(fun, F8, rules={"dot_general": "compute", "dot_general[gradient]": "compute"})
    grads = [e for e in equations(jax.make_jaxpr(jax.grad(low))(W)) if name_of(e) == "dot_general"]
    assert sum(e.invars[0].aval.dtype == E4 for e in grads) == 2
    assert sum(e.invars[0].aval.dtype == BF16 for e in grads) == 4


def test_a_float8_that_changes_no_product_says_why():
    convolution = lambda x: lax.conv(x, jnp.ones((8, 8, 3, 3)), (1, 1), "SAME")
    small, asked = lambda w: X @ w, lambda w: jnp.matmul(X, w, precision="highest")
    cases = [
        (small, jamp.Float8(), W, r"below min_size=128"),
        (convolution, F8, jnp.ones((2, 8, 8, 8)), "windows overlap"),
    ]
    for fun, config, x, why in cases:
        with pytest.warns(UserWarning, match=rf"Float8 changes no product of this function\. .*{why}"):
            jamp.autocast(fun, config)(x)
    jamp.autocast(asked, F8)(W)  # The code asked for float32.


FLOAT4 = "float4_e2m1fn"


def test_a_configuration_is_hashable_and_what_it_cannot_be_is_an_error():
    assert hash(jamp.Float8()) == hash(jamp.Float8(jnp.float8_e4m3fn, "float8_e5m2", "bf16", "tensor", 128))
    for match, options in (
        ("8 bits", {"forward": jnp.float16}),
        ("forward=jnp.float8_e4m3fn", {"forward": FLOAT4}),
        ("backward=jnp.float8_e5m2", {"backward": FLOAT4}),
        ("8 bits", {"forward": "float6_e2m3fn"}),
        ("floating", {"forward": jnp.int8}),
        ("16 bits", {"carrier": "float32"}),
        ("8 bits", {"backward": "float8_e8m0fnu"}),
        ("'row'", {"granularity": "column"}),
        ("min_size", {"min_size": 0}),
    ):
        with pytest.raises(ValueError, match=match):
            jamp.Float8(**options)


@pytest.mark.parametrize("name", [name for name in dir(jnp) if name.startswith("float8") and "e8m0" not in name])
def test_every_signed_float_of_8_bits_is_a_format(name):
    assert jamp.Float8(forward=name, backward=name).forward == name
    product = jamp.autocast(jnp.matmul, jamp.Float8(name, name, min_size=1), rules={"dot_general": "compute"})
    np.testing.assert_allclose(product(jnp.eye(4), jnp.eye(4)), jnp.eye(4))


def test_numbers_of_numpy_are_numbers_in_a_configuration():
    for make in (jamp.Float8, jamp.Int8):
        config = make(min_size=np.int64(64))
        assert config == make(min_size=64)
        assert hash(config) == hash(make(min_size=64))
        assert type(config.min_size) is int
        with pytest.raises(ValueError, match="min_size"):
            make(min_size=np.float32(64))


def test_elements_below_1e_32_lose_digits_in_a_float8_product_and_those_below_7e_34_become_0():
    product = jamp.autocast(jnp.matmul, jamp.Float8(min_size=1), rules={"dot_general": "compute"})
    error = lambda x: abs(float(product(jnp.full((4, 4), x), jnp.eye(4))[0, 0]) / x - 1)
    assert max(error(x) for x in (1e-30, 2e-32, 1.3e-32)) < 0.07
    assert error(1.1e-33) > 0.3
    assert {error(x) for x in (7e-34, 1e-34, 1e-37)} == {1.0}


def test_the_backward_pass_keeps_bytes_of_operands_and_no_float32_copy():
    x, w = normal(256, 128), normal(128, 128, seed=1)
    loss = jamp.autocast(lambda w: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w.T) @ w), F8)
    jaxpr = jax.make_jaxpr(lambda w: jax.tree.leaves(jax.vjp(loss, w)[1]))(w).jaxpr
    kept = [v.aval for v in jaxpr.outvars if v not in jaxpr.invars]
    assert {str(aval.dtype) for aval in kept if aval.size > 1} == {"bfloat16", "uint8"}


FORMATS = {
    "Float8": F8,
    "Float8 by row": jamp.Float8(granularity="row"),
    "Float8, float16": jamp.Float8(carrier=jnp.float16),
    "Float8 by row, float16": jamp.Float8(granularity="row", carrier=jnp.float16),
    "Int8": jamp.Int8(),
}
POLICIES = jax.checkpoint_policies
# Three layers, the last of which is the head: 2-D, in a batch, as a convolution that cuts patches, and in a scan.
LAYERS = {
    "matrices": (lambda w, x: functools.reduce(lambda x, v: jax.nn.relu(x @ v), w, x), (3, 128, 128), (256, 128)),
    "batch": (lambda w, x: functools.reduce(lambda x, v: jax.nn.relu(x @ v), w, x), (3, 2, 128, 128), (2, 128, 128)),
    "patches": (
        lambda w, x: functools.reduce(
            lambda x, v: jax.nn.relu(jax.lax.conv(x, v[:, :, None, None], (1, 1), "VALID")), w, x
        ),
        (3, 128, 128),
        (2, 128, 8, 16),
    ),
    "scan": (lambda w, x: jax.lax.scan(lambda x, v: (jax.nn.relu(x @ v), None), x, w)[0], (3, 128, 128), (256, 128)),
}


def kept_by(policy, layers, w, x, compute_dtype):
    """The bytes that a user's policy keeps around layers under autocast, or inside of it, for the gradient of `w`."""
    loss = lambda w: jnp.mean(layers(w, x) ** 2)
    around = jax.checkpoint(jamp.autocast(loss, compute_dtype, recompute=False), policy=policy)
    inside = jamp.autocast(jax.checkpoint(loss, policy=policy), compute_dtype, recompute=False)
    found = []
    for fun in (around, inside):
        jaxpr = jax.make_jaxpr(lambda w, fun=fun: jax.tree.leaves(jax.vjp(fun, w)[1]))(w).jaxpr
        kept = {v for v in jaxpr.outvars if isinstance(v, Var)} - {*jaxpr.invars}
        found.append(sum(v.aval.size * v.aval.dtype.itemsize for v in kept))
    return found


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *((name, "dots_saveable") for name in LAYERS),
        # In 8 bit, a convolution that cuts patches is a matrix product, and this policy keeps those.
        *((name, "dots_with_no_batch_dims_saveable") for name in LAYERS if name != "patches"),
    ],
)
def test_a_policy_that_keeps_products_keeps_the_bytes_of_16_bit_ones(name, policy):
    layers, *shapes = LAYERS[name]
    w, x = (normal(*shape, seed=i, scale=0.1) for i, shape in enumerate(shapes))
    kept = functools.partial(kept_by, getattr(POLICIES, policy), layers, w, x)
    wanted = kept(BF16)
    assert min(wanted) > 0
    for format_name, config in FORMATS.items():
        assert kept(config) == wanted, (format_name, kept(config), wanted)


def test_xla_removes_what_names_a_result_for_policies():
    layers, *shapes = LAYERS["matrices"]
    args = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    for config in (jamp.Int8(), FORMATS["Float8, float16"]):
        lowered = jax.jit(jamp.autocast(layers, config)).lower(*args)
        assert lowered.as_text().count("stablehlo.dot_general") == 3 + 2  # of the two 8-bit products
        assert lowered.compile().as_text().count(" dot(") == 3


def test_scales_by_row_are_at_the_places_of_the_result():
    x, w = normal(2, 128, 3, 128), normal(128, 2, 128, seed=1)
    powers = np.exp2(np.arange(-32, 32, 0.5, np.float32))  # no row has the scale of another
    x, w = x * powers[:, None, None], w * powers[::-1, None, None]
    dimensions = ((3,), (2,)), ((0,), (1,))
    fun = lambda x, w: jax.lax.dot_general(x, w, dimensions)  # [2, 128, 3, 128]
    wanted = np.float64(fun(x, w))
    size = np.float64(fun(np.linalg.norm(x, axis=3, keepdims=True), np.linalg.norm(w, axis=2, keepdims=True)))
    for config in (jamp.Float8(granularity="row", min_size=1), jamp.Int8(min_size=1)):
        found = np.float64(jamp.autocast(fun, config, rules={"dot_general": "compute"})(x, w))
        assert np.abs((found - wanted) / size).max() < 0.02  # a wanted result is about 0.09 of its size


def test_the_report_of_a_program_as_it_runs_has_each_8_bit_product_once():
    fun = lambda x, w: jax.nn.relu(x @ w) @ w
    x, w = normal(128, 128), normal(128, 128, seed=1)
    for name, config in FORMATS.items():
        rows = jamp.autocast_report(jamp.autocast(fun, config), BF16)(x, w).rows
        assert sum(row.count for row in rows if row.operation == "dot_general") == 2, name


def test_an_8_bit_product_has_the_scopes_of_the_traced_one_once():
    with_scope = jax.named_scope("layer")(lambda x, w: x @ w)
    fun = jamp.autocast(lambda x, w: with_scope(with_scope(x, w), w), F8, recompute=False)
    stacks = [
        str(eqn.source_info.name_stack)
        for eqn in equations(jax.make_jaxpr(fun)(normal(256, 128), normal(128, 128)))
        if eqn.primitive.name == "attach"
    ]
    assert stacks
    assert all(stack.count("layer") == 1 for stack in stacks)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("config", [F8, ROW, jamp.Int8(min_size=8)], ids=["tensor", "row", "int8"])
def test_the_layout_of_8_bit_values_is_stated_to_a_compiler_for_one_gpu_alone(config):
    """On several devices, XLA would gather the values for it: test_autocast_meshes.py."""
    loss = jamp.autocast(lambda w, x: jnp.sum((jnp.tanh(x @ w) @ w) ** 2), config, rules={"dot_general": "compute"})
    stacked = lambda w, x: jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.stack([w, w]))[0])
    in_loop = jamp.autocast(stacked, config, rules={"dot_general": "compute"})
    each = jax.vmap(jax.grad(loss), (None, 0), out_axes=1)
    for fun, x in ((jax.grad(loss), X), (jax.grad(in_loop), X), (each, jnp.stack([X, 2 * X]))):
        for platform in ("cuda", "cpu", "tpu"):
            text = jax.jit(fun).trace(W, x).lower(lowering_platforms=(platform,)).as_text()
            assert ("@LayoutConstraint" in text) == (platform == "cuda")


@pytest.mark.parametrize("config", [F8, ROW], ids=["tensor", "row"])
def test_8_bit_gradients_are_made_of_16_bit_ones_under_any_flags(config):
    """By default XLA leaves out roundings of bfloat16 arithmetic. That shows where both roundings meet a tie."""
    factor = jnp.full((N, N), 1.0625, BF16)  # Its square is rounded to 1.125, between 1 and 1.25 of E5M2.
    eye = jnp.eye(N, dtype=BF16)
    fun = jamp.autocast(lambda x, w: (x @ w) * factor, config, rules={"dot_general": "compute"})
    gradient = lambda g: jax.vjp(fun, eye, eye)[1](g)[0]
    for options in (None, {"xla_allow_excess_precision": False}):
        np.testing.assert_array_equal(jax.jit(gradient, compiler_options=options)(factor), 1.0)


@pytest.mark.slow
def test_the_backward_pass_keeps_the_sums_of_a_product_and_scales_them_as_the_forward_pass_does():
    loss = lambda w, x: jnp.sum(jnp.sin(jnp.tanh(x @ w) @ V) @ W)
    low = [jamp.autocast(loss, F8, recompute=again, rules={"dot_general": "compute"}) for again in (True, False)]
    saved = jax.make_jaxpr(lambda w: jax.tree.leaves(jax.vjp(low[0], w, X)[1]))(W)
    names = [eqn for eqn in equations(saved) if name_of(eqn) == "name" and eqn.outvars[0].aval.dtype == BF16]
    made_by = {v: eqn for eqn in equations(saved) for v in eqn.outvars}
    sources = [made_by[eqn.invars[0]] for eqn in names]
    sources = [made_by[eqn.invars[0]] if eqn.primitive.name == "rounded" else eqn for eqn in sources]
    assert sum(eqn.primitive.name == "attach" for eqn in sources) == 2  # sums, before the scales
    assert not any(eqn.primitive.name == "scaled_sums" for eqn in sources)
    args = W, jnp.stack([X, 2.0**9 * X])  # Each example has a scale of its own.
    for each in (lambda f: jax.vmap(f, (None, 0)), lambda f: jax.vmap(f, (None, 0), 1)):
        found = [jax.jit(each(jax.grad(f, (0, 1))))(*args) for f in low]
        for x, y in zip(*found, strict=True):
            np.testing.assert_array_equal(x, y)
    tiny = jax.jit(jax.grad(lambda x: low[0](W * 2.0**-50, x * 2.0**-70)))(X)
    np.testing.assert_array_equal(tiny, jax.jit(jax.grad(lambda x: low[1](W * 2.0**-50, x * 2.0**-70)))(X))
