"""Weight gradients under autocast: float32 as they are accumulated, whatever stands around the product."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxprs import PRODUCTS, equations, normal, operand_dtypes
from programs import by_operation, reference

import jamp

BF16, F16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32)
N = 32
W, X = normal(N, N, scale=N**-0.5), normal(4, 8, N, seed=1)
MESH = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
layer = lambda w, x: jnp.tanh(x @ w)


@jax.custom_vjp
def own(w, x):
    return layer(w, x)


own.defvjp(lambda w, x: jax.vjp(layer, w, x), lambda pull_back, g: pull_back(g))


AROUND = {
    "nothing": layer,
    "jit": jax.jit(layer),
    "twice": lambda w, x: layer(w, layer(w, x)),
    "moved": lambda w, x: layer(w.T.reshape(4, 8, N).reshape(N, N), x),
    "stacked": lambda w, x: lax.scan(lambda c, v: (layer(v, c), None), x, jnp.stack([w, w]))[0],
    "constant of a loop": lambda w, x: lax.scan(lambda c, _: (layer(w, c), None), x, None, length=2)[0],
    "micro-batches": lambda w, x: lax.map(lambda y: layer(w, y), x),
    "cond": lambda w, x: lax.cond(x[0, 0, 0] < 9, layer, lambda w, x: x, w, x),
    "checkpoint": jax.checkpoint(layer),
    "policy": jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable),
    "vmap": lambda w, x: jax.vmap(functools.partial(layer, w))(x),
    "shard_map": lambda w, x: jax.shard_map(layer, mesh=MESH, in_specs=(P(), P("i")), out_specs=P("i"))(w, x),
    "custom_vjp": own,
    "einsum": lambda w, x: jnp.tanh(jnp.einsum("abi,io->oab", x, w)),
    "convolution": lambda w, x: lax.conv(x[:, None], w[None, None, :3, :3], (1, 1), "SAME"),
    "ragged": lambda w, x: jnp.tanh(lax.ragged_dot(x[0], jnp.stack([w, w]), jnp.int32([3, 5]))),
}


def loss_of(fun):
    return lambda w, x: jnp.sum(fun(w, x) ** 2)


def gradient_products(fun, *args):
    """The result dtypes of the products that compute gradients of weights: no operand is a weight."""
    found = [eqn for eqn in equations(jax.make_jaxpr(fun)(*args)) if eqn.primitive.name in PRODUCTS]
    return [eqn.outvars[0].aval.dtype for eqn in found]


def test_the_values_and_cotangents_of_two_products_have_these_dtypes():
    """Those of the program at the top of `jamp/_autocast/cast.py`, which read its first product twice."""

    def loss(x, w, u):
        y = x @ w
        return jnp.sum(jnp.tanh(y) + y @ u)

    grad = jax.make_jaxpr(jax.grad(jamp.autocast(loss, BF16), (0, 1, 2)))(W, W, W)
    results = lambda *names: [e.outvars[0].aval.dtype for e in equations(grad) if e.primitive.name in names]
    assert results("dot_general") == [BF16, BF16, BF16, F32, F32, F32]  # y, v and db; du, dx and dw
    assert {*results("tanh", "add_any", "mul")} == {F32}
    assert operand_dtypes(grad, PRODUCTS) == {BF16}
    alone = jax.make_jaxpr(jamp.autocast(lambda x, w, u: x @ w @ u, BF16))(W, W, W)
    casts = [v.aval.dtype for e in equations(alone) if e.primitive.name == "convert_element_type" for v in e.outvars]
    assert casts == [BF16, BF16, BF16, F32]  # x, w and u, and the result


BOTH = {"nothing", "constant of a loop", "vmap", "custom_vjp"}  # The other constructs are slow without recompute.
CASES = [(x, True) for x in AROUND] + [
    pytest.param(x, False, marks=[pytest.mark.slow] * (x not in BOTH)) for x in AROUND
]


@pytest.mark.slow_after(10)
@pytest.mark.parametrize(("around", "recompute"), CASES)
def test_the_gradient_of_a_weight_is_float32_and_has_no_rounding_of_its_own(around, recompute):
    loss = loss_of(AROUND[around])
    way = functools.partial(jamp.autocast, recompute=recompute)
    wide = {"conv_general_dilated[gradient]": "accumulate"} if around == "convolution" else None
    rounded = {f"{name}[gradient]": "compute" for name in PRODUCTS}
    grads = [jax.grad(loss)]
    for grad in (
        lambda **options: jax.grad(way(loss, BF16, **options)),
        lambda **options: way(jax.grad(loss), BF16, **options),
    ):
        assert F32 in gradient_products(grad(rules=wide), W, X)
        assert set(gradient_products(grad(rules=rounded), W, X)) == {BF16}
        grads += [grad(rules=wide), grad(rules=rounded)]
    truth, *found = np.float64(jax.jit(lambda w, x: [f(w, x) for f in grads])(W, X))
    for mine, low in (found[:2], found[2:]):
        assert np.linalg.norm(mine - truth) <= 1.1 * np.linalg.norm(low - truth) + 1e-6
        assert np.linalg.norm(mine - low) <= 0.01 * np.linalg.norm(truth)


def test_no_product_is_computed_twice_and_none_is_cast_after_it():
    grad = jax.grad(jamp.autocast(loss_of(AROUND["twice"]), BF16))
    found = equations(jax.make_jaxpr(grad)(W, X))
    assert sorted(str(d) for d in gradient_products(grad, W, X)) == ["bfloat16"] * 3 + ["float32"] * 2
    made = {eqn.outvars[0]: eqn for eqn in found}
    casts = [eqn for eqn in found if eqn.primitive.name == "convert_element_type"]
    wide = [made[eqn.invars[0]] for eqn in casts if eqn.invars[0] in made]
    assert not [eqn for eqn in wide if eqn.primitive.name in PRODUCTS and eqn.outvars[0].aval.dtype == F32]


def test_float16_gradients_of_many_examples_do_not_overflow():
    x, g = jnp.full((4096, 16), 8.0), 8.0
    grad = lambda **options: jax.grad(jamp.autocast(lambda w: g * jnp.sum(x @ w), F16, **options))(jnp.ones((16, 16)))
    assert jnp.isinf(grad(rules={"dot_general[gradient]": "compute"})).all()
    assert (grad() == 4096 * 64).all()


SLOW = [pytest.param(around, marks=pytest.mark.slow) for around in ("vmap", "stacked", "convolution")]


@pytest.mark.slow
@pytest.mark.parametrize("around", ["nothing", "checkpoint", *SLOW])
def test_forward_mode_and_second_derivatives_are_those_of_rounded_gradients(around):
    loss = loss_of(AROUND[around])
    ways = (jamp.autocast(loss, BF16), jamp.autocast(loss, BF16, rules={f"{n}[gradient]": "compute" for n in PRODUCTS}))
    along = lambda f: jax.jvp(lambda w: f(w, X), [W], [W.T])[1]
    for derive in (
        along,
        lambda f: jax.grad(lambda w: along(lambda v, x: f(v * w, x)))(W),
        lambda f: jax.jvp(lambda w: jax.grad(f)(w, X), [W], [W.T])[1],
        lambda f: jax.grad(lambda w: jnp.sum(jnp.sin(jax.grad(f)(w, X))))(W),
        lambda f: jax.vmap(jax.grad(f), (0, None))(jnp.stack([W, W.T]), X),
        lambda f: jax.grad(lambda w: jnp.sum(jax.vmap(lambda v, x: f(v, x[None]))(jnp.stack([w] * 4), X)))(W),
    ):
        mine, low, truth = np.float64(jax.jit(lambda d=derive: [d(f) for f in (*ways, loss)])())
        assert np.linalg.norm(mine - truth) <= 2 * np.linalg.norm(low - truth) + 1e-5


def test_accumulate_keeps_a_result_in_float32_with_a_16_bit_backward_pass():
    def head(w, h):
        with jax.named_scope("head"):
            return jax.nn.log_softmax(h @ w)[..., 0]

    model = lambda w, x: jnp.sum(head(w, layer(w, x)))
    rules = {"dot_general[head]": "accumulate"}
    grad = jax.grad(jamp.autocast(model, BF16, rules=rules))
    products = [eqn for eqn in equations(jax.make_jaxpr(grad)(W, X)) if eqn.primitive.name == "dot_general"]
    assert {v.aval.dtype for eqn in products for v in eqn.invars} == {BF16}
    assert sorted(str(eqn.outvars[0].aval.dtype) for eqn in products) == ["bfloat16"] * 2 + ["float32"] * 3
    row = {row.operation: row for row in jamp.autocast_report(model, BF16, rules=rules)(W, X).rows}["dot_general[head]"]
    assert (row.category, row.after) == ("accumulate", "bfloat16, bfloat16 -> float32")
    exact = [x.astype(BF16).astype(F32) for x in (W, X)]  # operands that lose nothing
    wide, low = (jamp.autocast(head, BF16, **options)(*exact) for options in ({"rules": rules}, {}))
    np.testing.assert_allclose(wide, head(*exact), atol=1e-5)
    assert np.abs(low - head(*exact)).max() > 1e-3
    whole = jamp.autocast(lambda w, x: x @ w, BF16, rules={"dot_general": "accumulate"})(W, X)
    exact = jnp.matmul(X.astype(BF16).astype(F32), W.astype(BF16).astype(F32))
    np.testing.assert_allclose(whole, exact, atol=1e-5)


def test_a_table_that_is_looked_up_and_multiplied_gets_the_sum():
    def model(table, tokens):
        return jnp.sum(jax.nn.log_softmax(jnp.tanh(table[tokens]) @ table.T)[..., 3])

    tokens = jnp.arange(24).reshape(4, 6) % N
    mine, truth = (jax.grad(f)(W, tokens) for f in (jamp.autocast(model, BF16), model))
    assert np.linalg.norm(mine - truth) < 0.01 * np.linalg.norm(truth)


def test_float8_writes_weight_gradients_in_float32_too():
    loss = lambda w, x: jnp.mean((jnp.tanh(x @ w[0]) @ w[1] @ w[0]) ** 2)
    for granularity in ("tensor", "row"):
        grad = jax.grad(jamp.autocast(loss, jamp.Float8(granularity=granularity, min_size=8)))
        found = gradient_products(grad, jnp.stack([W, W]), X)
        assert found.count(F32) >= 3
        value = jax.jit(grad)(jnp.stack([W, W]), X)
        assert value.dtype == F32
        assert jnp.isfinite(value).all()


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("fill", "dtype"), [(float(np.finfo(np.float32).min), BF16), (-np.inf, F16), (-1e9, F16), (-1e30, BF16)]
)
def test_masked_logits_give_the_probabilities_and_the_largest_of_float32(dtype, fill):
    mask = np.tri(N, dtype=bool)
    mask[3] = False  # a row that is masked whole

    def model(x, w, dot=jnp.matmul):
        logits = jnp.where(mask, dot(x, w), fill)
        return jax.nn.softmax(logits), jnp.where(mask, dot(x, w), jnp.finfo(jnp.float32).min).max()

    x = normal(N, N, seed=4)
    mine, want = (
        by_operation(f, x, W) for f in (jamp.autocast(model, dtype), functools.partial(model, dot=reference(dtype)))
    )
    assert mine[0].dtype == F32
    np.testing.assert_allclose(mine[0], want[0], atol=1e-6)
    selects = [
        e for e in equations(jax.make_jaxpr(jamp.autocast(model, dtype))(x, W)) if e.primitive.name == "select_n"
    ]
    exact = fill == -np.inf  # stored in 16 bit; finfo.min is not exact there
    assert {e.outvars[0].aval.dtype for e in selects} == ({dtype, F32} if exact else {F32})
    grads = [jax.grad(lambda x, w, f=f: jnp.sum(f(x, w)[0][:, 0]))(x, W) for f in (jamp.autocast(model, dtype), model)]
    assert np.isnan(grads[0]).sum() == np.isnan(grads[1]).sum()


@pytest.mark.parametrize("result", [F16, BF16, F32])
def test_a_product_may_ask_for_a_result_of_another_dtype(result):
    def fun(w):
        return jnp.sum(lax.dot(X[0], w, preferred_element_type=result).astype(F32) ** 2)

    grads, exact = jax.grad(jamp.autocast(fun, BF16))(W), jax.grad(fun)(W)
    assert grads.dtype == F32
    np.testing.assert_allclose(grads, exact, atol=0.03 * float(jnp.abs(exact).max()))


def test_a_product_with_a_constant_beyond_the_range_stays_float32_with_its_reason():
    constants = [jnp.full((N, N), 1e6), np.full((N, N), 1e6, np.float32), jnp.full((2, N, N), 1e6)[0].T]
    into = [
        lambda x: lax.scan(lambda h, _: (h @ constants[1] / 1e6, None), x, None, length=2)[0],
        lambda x: lax.cond(x[0, 0] < 9, lambda x: x @ constants[0], lambda x: x, x),
        lambda x: jax.checkpoint(lambda x: x @ constants[1])(x),
        lambda x: jnp.full((N, N), -1e6).T @ x,
    ]
    for fun in [lambda x, c=c: x @ c for c in constants] + into:
        np.testing.assert_array_equal(jamp.autocast(fun, F16)(W), fun(W))
        (row,) = (r for r in jamp.autocast_report(fun, F16)(W).rows if r.operation.startswith("dot"))
        assert (row.operation, row.category) == ("dot_general[range]", "float32")
        assert "beyond the range" in row.reason
    factors = np.full((N, N), 1e6 + 1j, np.complex64)  # a complex constant is not an operand of a 16-bit product
    report = jamp.autocast_report(lambda x: jnp.real(lax.complex(x @ x, x) * factors) @ x, F16)(W)
    assert [(r.operation, r.count) for r in report.rows if r.category == "compute"] == [("dot_general", 2)]
    low = lambda dtype: jnp.full((N, N), -1, jnp.int32).astype(dtype).astype(F32)  # 65535, and 2**32
    for dtype, integer in ((BF16, jnp.uint16), (F16, jnp.uint32)):
        fun = lambda x, y=integer: jnp.where(x > 9, x @ x, low(y))
        np.testing.assert_array_equal(jamp.autocast(fun, dtype)(W), fun(W))
    for fun, dtype in ((lambda x: x @ jnp.full((N, N), 1e6), BF16), (lambda x: x @ jnp.full((N, N), jnp.inf), F16)):
        (row,) = (r for r in jamp.autocast_report(fun, dtype)(W).rows if r.operation.startswith("dot"))
        assert row.operation == "dot_general"
    forced = jamp.autocast(lambda x: x @ jnp.full((N, N), 1e6), F16, rules={"dot_general": "compute"})
    assert not np.isfinite(forced(W)).any()


@pytest.mark.parametrize("which", ["both", "first", "second"])
def test_a_batch_of_tangents_of_one_operand_and_one_tangent_of_the_other(which):
    fun = jamp.autocast(lambda w, x: jnp.sum(x @ w, 0), BF16)
    tangents = [jnp.stack([y, 2 * y]) if which in ("both", name) else y for y, name in ((W, "first"), (X, "second"))]
    axes = [0 if t.ndim > y.ndim else None for t, y in zip(tangents, (W, X), strict=True)]
    push = lambda dw, dx: jax.jvp(fun, (W, X), (dw, dx))[1]
    one_by_one = [push(*(t if a is None else t[i] for t, a in zip(tangents, axes, strict=True))) for i in range(2)]
    np.testing.assert_allclose(jax.vmap(push, axes)(*tangents), jnp.stack(one_by_one), rtol=1e-2)


def test_a_transposed_function_is_differentiated_like_any_other():
    """`jax.linear_transpose` meets products that no derivative has gone through."""
    loss = lambda way: lambda w, g: jnp.sum(jax.linear_transpose(lambda x: way(w, x), X)(g)[0] ** 2)
    low, plain = jamp.autocast(lambda w, x: x @ w, BF16), lambda w, x: x @ w
    mine, truth = jax.grad(loss(low), (0, 1))(W, X @ W), jax.grad(loss(plain), (0, 1))(W, X @ W)
    for x, y in zip(mine, truth, strict=True):
        assert np.linalg.norm(x - y) < 2e-2 * np.linalg.norm(y)


@pytest.mark.parametrize("dtype", [BF16, F16, jamp.Float8(carrier=F16, min_size=1)], ids=["bf16", "f16", "f8"])
@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.grad])
def test_a_function_may_close_over_a_ref_or_get_one(around, dtype):
    def add(x, sums):
        h = x @ W
        sums[...] += lax.stop_gradient(h).sum(0)
        return jnp.sum(h @ W)

    sums, want = jax.new_ref(jnp.zeros(N)), jax.new_ref(jnp.zeros(N))
    add(X[0], want)
    around(jamp.autocast(lambda x: add(x, sums), dtype))(X[0])
    around(jamp.autocast(add, dtype))(X[0], sums)
    np.testing.assert_allclose(sums[...] / 2, want[...], atol=0.3)


TRANSFORMED = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda x: jnp.sum(f(x))),
    "vmap": lambda f: jax.vmap(f, axis_size=2, in_axes=None),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=1),
    "shard_map": lambda f: jax.shard_map(f, mesh=MESH, in_specs=P(), out_specs=P()),
    "jit of shard_map": lambda f: jax.jit(jax.shard_map(f, mesh=MESH, in_specs=P(), out_specs=P())),
    "disable_jit": lambda f: jax.disable_jit()(f),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_closed_over_array_beyond_the_range_of_float16_is_found(name):
    tiny = jnp.full((N, N), 1e-9).at[0, 0].set(jnp.nan)  # becomes 0, but for the NaN
    large = jnp.ones((N, N)).at[0, 1].set(1e6).at[1, 0].set(-jnp.inf)
    for constant, key in ((tiny, ""), (tiny.at[0, 0].set(0.0), "[range]"), (large, "[range]"), (jnp.ones((N, N)), "")):
        keys = set()

        def fun(x, c=constant, keys=keys):
            report = jamp.autocast_report(lambda x: x @ c, F16)(x)
            keys.update(row.operation for row in report.rows)
            return jamp.autocast(lambda x: x @ c, F16)(x)

        TRANSFORMED[name](fun)(W)
        assert keys == {f"dot_general{key}"}, (key, keys)


def test_arrays_of_other_processes_are_not_read_and_the_report_says_so(monkeypatch):
    constant = jnp.full((N, N), 1e6)
    monkeypatch.setattr(type(constant), "is_fully_addressable", False)
    report = jamp.autocast_report(lambda x: x @ constant, F16)(W)
    assert [row.operation for row in report.rows] == ["dot_general"]
    assert report.unread == ("float32[32,32]",)
    assert "a closed-over float32[32,32] was not searched for values beyond the range of float16" in " ".join(
        str(report).split()
    )
    assert not jamp.autocast_report(lambda x: x @ constant, BF16)(W).unread


@pytest.mark.parametrize("name", ["transpose(jvp)", "transpose", "jvp(transpose)", "a/transpose(jvp(b))/c"])
def test_no_scope_of_the_user_is_taken_for_a_backward_pass(name):
    scoped = jax.named_scope(name)(jnp.matmul)
    (row,) = jamp.autocast_report(scoped, jnp.bfloat16)(X, W).rows
    assert (row.operation, row.category, row.after) == ("dot_general", "compute", "bfloat16, bfloat16 -> bfloat16")
    inside = jax.jit(jax.named_scope(name)(jax.jit(jnp.matmul)))
    (row,) = jamp.autocast_report(inside, jnp.bfloat16)(X, W).rows
    assert row.category == "compute"
    assert not jamp.autocast_report(scoped, jnp.bfloat16)(X, W).backward


def without_metadata(closed):
    """A jaxpr whose equations have no name stack and no traceback."""
    strip = lambda x: without_metadata(x) if hasattr(x, "jaxpr") else x
    (empty,) = jax.make_jaxpr(lax.neg)(0.0).eqns
    source = empty.source_info.replace(traceback=None)
    eqns = [
        e.replace(
            source_info=source,
            params={k: jax.tree.map(strip, v, is_leaf=lambda x: hasattr(x, "jaxpr")) for k, v in e.params.items()},
        )
        for e in closed.jaxpr.eqns
    ]
    return jax.extend.core.ClosedJaxpr(closed.jaxpr.replace(eqns=eqns), closed.consts)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jamp.Float8(min_size=8)], ids=["bfloat16", "Float8"])
def test_without_metadata_the_products_that_jamp_transposes_are_the_same(dtype):
    custom = jax.custom_vjp(lambda x, w: x @ w)
    custom.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))

    def fun(w, x):
        with jax.named_scope("layer"):
            x = jax.jit(lambda x: jnp.tanh(x @ w[0]))(x)
        x = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]
        return jnp.sum((custom(x, w[1]) @ w[0]) ** 2)

    w, x = normal(2, 16, 16, scale=0.3), normal(32, 16)
    bare = without_metadata(jax.make_jaxpr(fun)(w, x))
    results, dtypes = [], []
    for f in (fun, lambda w, x: jax.extend.core.jaxpr_as_fun(bare)(w, x)[0]):
        grad = jax.grad(jamp.autocast(f, dtype))
        found = [e for e in equations(jax.make_jaxpr(grad)(w, x)) if e.primitive.name in PRODUCTS]
        dtypes.append([[str(v.aval.dtype) for v in (*e.invars, *e.outvars)] for e in found])
        results.append(grad(w, x))
    assert dtypes[0] == dtypes[1]
    np.testing.assert_array_equal(*results)


def test_a_scope_may_have_the_name_of_a_special_case():
    for name in ("range", "gradient", "vector", "few", "precision"):
        fun = jax.named_scope(name)(jnp.matmul)
        (row,) = jamp.autocast_report(fun, jnp.bfloat16, rules={f"*[{name}]": "compute"})(X, W).rows
        assert (row.category, row.after) == ("compute", "bfloat16, bfloat16 -> bfloat16")
        with jax.enable_x64(True):
            low = jamp.autocast(fun, jnp.float32, rules={f"*[{name}]": "compute"})
            assert low(np.float64(X), np.float64(W)).dtype == np.float64


def test_weights_that_change_places_in_a_loop_have_float32_gradients():
    """Each step's gradient of a weight is added in float32, also if the weight comes from the carry."""

    def ring(w, x):
        swap = lambda c, _: ((c[1], c[0], jnp.tanh(c[2] @ c[0])), None)
        return jnp.sum(lax.scan(swap, (w[0], w[1], x), None, length=4)[0][2] ** 2)

    w, x = normal(2, 16, 16, scale=0.3), normal(64, 16)
    found = [
        e
        for e in equations(jax.make_jaxpr(jax.grad(jamp.autocast(ring, jnp.bfloat16)))(w, x))
        if e.primitive.name == "dot_general"
    ]
    shapes = [(e.outvars[0].aval.shape, str(e.outvars[0].aval.dtype)) for e in found]
    assert ((16, 16), "float32") in shapes
    assert ((16, 16), "bfloat16") not in shapes


def test_the_gradient_of_a_computed_16_bit_value_is_16_bit():
    """An up-cast makes no argument of it."""

    def fun(x, w, v):
        h = x.astype(jnp.bfloat16) @ w
        return jnp.sum((h.astype(jnp.float32) @ v) ** 2)

    args = normal(8, 16), normal(16, 16).astype(jnp.bfloat16), normal(16, 16)
    jaxpr = jax.make_jaxpr(jax.grad(jamp.autocast(fun, jnp.bfloat16), 1))(*args)
    of_h = [e for e in equations(jaxpr) if e.primitive.name == "dot_general" and e.outvars[0].aval.shape == (8, 16)]
    assert {str(e.outvars[0].aval.dtype) for e in of_h} == {"bfloat16"}
