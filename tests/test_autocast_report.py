"""autocast_report: what it says of each operation, its sums, its text, and the hints."""

import functools
import math
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jaxprs import INTERNAL

import jamp
import jamp.debug


def rows(fun, *args, **kwargs):
    report = jamp.autocast_report(fun, **{"compute_dtype": jnp.float16} | kwargs)
    return {row.operation: row for row in report(*args).rows}


def layer(w, b, x):
    return jax.nn.softmax(jnp.tanh(x @ w + b))


def conv(x, w):
    return lax.conv(x, w, (1, 1), "SAME")


ARGS = jnp.ones((12, 16)), jnp.ones(16), jnp.ones((10, 12))
SQUARE = jnp.ones((16, 16))


def test_each_operation_has_its_category_dtypes_count_and_source_line():
    found = rows(layer, *ARGS)
    product = found["dot_general"]
    assert (product.category, product.count) == ("compute", 1)
    assert (product.before, product.after) == ("float32, float32 -> float32", "float16, float16 -> float16")
    assert product.source == f"test_autocast_report.py:{layer.__code__.co_firstlineno + 1} (layer)"
    assert {row.source for row in found.values()} == {product.source}
    assert (found["tanh"].category, found["tanh"].after) == ("float32", "float32 -> float32")
    assert (found["exp"].category, found["exp"].after) == ("float32", "float32 -> float32")
    found = rows(layer, *ARGS, compute_dtype=jnp.bfloat16, rules={"tanh": "float32"})
    assert found["dot_general"].after == "bfloat16, bfloat16 -> bfloat16"
    assert (found["tanh"].category, found["tanh"].reason) == ("float32", "a rule of yours")


@pytest.mark.parametrize(
    ("fun", "shapes", "flops"),
    [
        (jnp.matmul, [(3, 5), (5, 7)], 2 * 3 * 5 * 7),
        (jnp.matmul, [(2, 3, 5), (2, 5, 7)], 2 * 2 * 3 * 5 * 7),
        (conv, [(2, 3, 8, 8), (4, 3, 5, 5)], 2 * (2 * 4 * 64) * (3 * 25)),
        (jnp.tanh, [(3, 5)], 15),
        (jnp.sum, [(3, 5)], 15),
        (jnp.transpose, [(3, 5)], 0),
    ],
)
def test_flops_are_counted(fun, shapes, flops):
    assert sum(row.flops for row in rows(fun, *map(jnp.ones, shapes)).values()) == flops


def test_linear_algebra_counts_as_a_cube():
    found = rows(
        lambda a, b: jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(a), b), *map(jnp.ones, [(6, 6), (6, 2)])
    )
    assert found["cholesky"].flops == pytest.approx(6**3 / 3)
    assert found["triangular_solve"].flops == 6**2 * 2


def test_the_body_of_a_scan_counts_for_every_step_and_a_call_for_each_call():
    call = jax.jit(lambda x: x @ x)
    fun = lambda x: lax.scan(lambda c, _: (call(call(c)), None), x, None, length=5)[0]
    assert rows(fun, SQUARE)["dot_general"].count == 10
    grad = jax.grad(lambda w, b, x: layer(w, b, x).max())
    assert (
        sum(r.count for r in jamp.autocast_report(grad, jnp.float16)(*ARGS).rows if "dot_general" in r.operation) == 2
    )


def test_the_share_in_16_bit_is_that_of_the_flops():
    share = lambda fun, n: jamp.autocast_report(fun, jnp.float16)(jnp.ones((n, n))).share_16_bit
    assert share(lambda x: jnp.exp(x @ x), 16) == pytest.approx(8192 / (8192 + 256))
    assert share(jnp.exp, 3) == 0.0
    assert math.isnan(share(jnp.transpose, 2))


def test_an_operation_inside_an_installed_package_has_the_line_that_calls_it():
    def mine(x):
        return jax.nn.logsumexp(jnp.var(x, 0))

    sources = {row.source for row in jamp.autocast_report(mine, jnp.float16)(SQUARE).rows}
    assert sources == {f"test_autocast_report.py:{mine.__code__.co_firstlineno + 1} (mine)"}


def test_what_stays_float32_has_a_reason_and_a_hint_if_it_is_big():
    def fun(x):
        h = jamp.full_precision(jnp.matmul)(x, x)
        return jnp.matmul(h, h, precision="highest") @ x

    report = jamp.autocast_report(fun, jnp.float16)(jnp.ones((64, 64)))
    assert len(report.hints) == 2
    assert "dot_general (33.3% of the FLOPs) stays float32: it is inside jamp.full_precision" in report.hints[0]
    assert "its precision (HIGHEST, or an algorithm) was asked for in the code" in report.hints[1]
    assert report.share_16_bit == pytest.approx(1 / 3)
    masked = lambda x: jnp.where(x > 0, x @ x, 0.1)
    assert rows(masked, SQUARE)["select_n"].reason.endswith("a constant that 16 bit cannot hold")
    product = lambda x: lax.dot(x, x, preferred_element_type=jnp.float32)
    row = rows(product, SQUARE.astype(jnp.bfloat16))["dot_general"]
    assert row.before == row.after == "bfloat16, bfloat16 -> float32"
    assert "other dtypes" in row.reason


def test_nothing_is_computed_and_the_text_is_a_table_with_aligned_columns():
    texts = []
    jax.eval_shape(lambda *args: texts.append(str(jamp.autocast_report(layer, jnp.float16)(*args))), *ARGS)
    title, empty, header, *lines = texts[0].split("Hints")[0].rstrip().splitlines()
    assert title.startswith("autocast to float16: ")
    assert title.endswith("% of the FLOPs in 16 bit")
    assert not empty
    assert header.split() == ["operation", "category", "count", "FLOPs", "before", "after", "source"]
    assert lines.pop() == "next: jamp.debug.rounding_report(fun, dtype)(*args) measures the error that each row causes"
    assert not lines.pop()
    assert lines.pop() == "... and 1 rows of operations that only move data, in `.rows`"
    starts = [header.index(name) for name in header.split()]
    assert all(line[start - 1] == " " != line[start] for line in lines for start in starts[1:])
    assert str(jamp.autocast_report(lambda x: x, jnp.float16)(1.0)).startswith("autocast to float16: no FLOPs counted")


def test_the_table_of_a_large_model_has_30_rows_of_at_most_100_columns():
    names = "sin cos tan sinh cosh tanh asin acos atan asinh acosh atanh exp exp2 expm1 log log1p sqrt rsqrt cbrt"
    names += " logistic erf erfc erf_inv lgamma digamma square neg abs sign floor ceil"

    def deep(w):
        with jax.named_scope("layers/that_have_a_long_name/and_another_scope/that_is_inside/in"):
            for name in names.split():
                w = getattr(lax, name)(optax.losses.l2_loss(w @ w, w))
        return jamp.full_precision(lambda w: w @ w)(w)

    lines = str(jamp.autocast_report(deep, jnp.float16)(jnp.ones((16, 16)))).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[33].endswith("rows with fewer FLOPs, in `.rows`")
    assert "  layers.../in  test_autocast_report.py:" in lines[3]
    assert "test_autocast_report.py:" in lines[3]


def ten_products(w):
    return lax.scan(lambda c, _: (c @ w, None), w @ w, None, length=9)[0]


@jax.custom_vjp
def own_product(w):
    return w @ w


def kernel_product(w):
    rows, whole = pl.BlockSpec((8, 16), lambda i: (i, 0)), pl.BlockSpec((16, 16), lambda i: (0, 0))

    def kernel(x, w, y):
        y[...] = x[...] @ w[...]

    shape = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    return pl.pallas_call(kernel, shape, grid=(2,), in_specs=(rows, whole), out_specs=rows)(w, w)


def solution(w):
    return lax.custom_linear_solve(lambda x: w @ x, w, lambda matvec, b: matvec(b), lambda vecmat, b: vecmat(b))


own_product.defvjp(lambda w: (w @ w, w), lambda w, g: (w @ g,))


@pytest.mark.parametrize(
    ("fun", "rules", "share"),
    [
        (ten_products, {"scan": "float32"}, 0.1),
        (lambda w: jamp.full_precision(jax.jit(ten_products))(w @ w), {}, 1 / 11),
        (lambda w: own_product(w) @ w, {"custom_vjp_call": "float32"}, 0.5),
        (lambda w: kernel_product(w) @ w, {}, 0.5),
        (lambda w: solution(w) @ w, {}, 0.5),
    ],
)
def test_what_is_not_entered_counts_with_the_flops_of_what_is_inside(fun, rules, share):
    report = jamp.autocast_report(fun, jnp.float16, rules=rules)(SQUARE)
    assert report.share_16_bit == pytest.approx(share)
    assert f"({1 - share:.1%} of the FLOPs) stays float32" in report.hints[0]


PARAMS = {f"h_{i}": {"q": jnp.ones((16, 16)), "k": jnp.ones((16, 16))} for i in range(12)}


def layers(params, x, scale):
    for name, kernels in params.items():
        for part, w in kernels.items():
            with jax.named_scope(name), jax.named_scope(part):
                x = jax.checkpoint(jax.jit(lambda w, x: x @ w.T))(w, x)
    return (optax.l2_loss(x) * scale).sum()


def test_layers_on_one_line_are_one_row_with_the_scopes_and_parameters_of_all():
    args = PARAMS, jnp.ones((12, 16)), 2
    for fun in (layers, jax.grad(layers), jax.vmap(layers, (None, 0, None)), jax.checkpoint(layers, static_argnums=2)):
        row, *others = (r for r in jamp.autocast_report(fun, jnp.float16)(*args).rows if r.operation == "dot_general")
        assert (row.scope, row.parameter) == ("h_*/{k,q}", "params['h_*']['{k,q}']")
    assert not others
    report = jamp.autocast_report(layers, jnp.float16)(*args)
    inside = next(row for row in report.rows if "optax" in row.source)
    assert f"test_autocast_report.py:{layers.__code__.co_firstlineno + 5} (layers) > optax/losses/" in inside.source
    assert (inside.scope, inside.parameter) == ("", "")
    header, product = str(report).splitlines()[2:4]
    assert product[header.index("where") :].startswith("h_*/{k,q} ")
    one = jamp.autocast_report(layers, jnp.float16)({"h_3": PARAMS["h_3"]}, *args[1:]).rows[0]
    assert (one.scope, one.parameter) == ("h_3/{k,q}", "params['h_3']['{k,q}']")


def test_a_scanned_or_nameless_layer_is_known_by_its_parameter():
    def scanned(model, x):
        return lax.scan(lambda x, w: (x @ w.astype(jnp.float32), None), x, model["stack"])[0]

    args = {"stack": jnp.ones((3, 16, 16))}, jnp.ones((2, 16))
    report = jamp.autocast_report(scanned, jnp.float16)(*args)
    assert [(row.scope, row.parameter, row.count) for row in report.rows] == [("", "model['stack']", 3)]
    assert "  model['stack']  test_" in str(report)
    report = jamp.autocast_report(jamp.full_precision(scanned), jnp.float16)(*args)
    assert "scan with model['stack'] (100.0% of the FLOPs) stays float32" in report.hints[0]


def test_shapes_will_do_for_arguments():
    shapes = jax.eval_shape(lambda: (PARAMS, jnp.ones((2, 16))))
    assert jamp.autocast_report(layers, jnp.float16)(*shapes, 2) == jamp.autocast_report(layers, jnp.float16)(
        PARAMS, jnp.ones((2, 16)), 2
    )


def test_the_report_of_a_gradient_is_of_what_runs_or_says_that_it_differs():
    rules = {"custom_vjp_call": "float32"}
    loss = lambda w: own_product(w).sum()
    before = jamp.autocast_report(jax.grad(loss), jnp.float16, rules=rules)(SQUARE)
    assert before.share_16_bit > 0.8  # the rule is gone once it is differentiated
    assert "autocast_report(jax.grad(jamp.autocast(f, dtype)), dtype) shows it" in before.hints[-1]
    for wrap in (lambda f: f, jax.jit):
        runs = jamp.autocast_report(wrap(jax.grad(jamp.autocast(loss, jnp.float16, rules=rules))), jnp.float16)(SQUARE)
        assert (runs.share_16_bit, runs.backward) == (0, False)
    mixed = jamp.autocast(lambda w: loss(w @ w), jnp.float16, rules=rules)
    runs = jamp.autocast_report(lambda w: jax.grad(mixed)(w), jnp.float16)(SQUARE)
    products = [(row.category, row.after.split()[-1], row.count) for row in runs.rows if "dot_general" in row.operation]
    assert sorted(products) == [("accumulate", "float32", 2), ("compute", "float16", 1), ("float32", "float32", 2)]
    assert {row.after for row in runs.rows} == {row.before for row in runs.rows}


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_row_has_its_dtypes_also_as_a_text(dtype):
    """Products that run in the other dtype of 16 bit are not called float32."""
    fun = lambda x: jnp.exp(x @ x)
    row = rows(fun, SQUARE, compute_dtype=dtype)["dot_general"]
    assert (row.traced.operands, row.runs.results) == ((jnp.float32, jnp.float32), (dtype,))
    assert (str(row.runs), repr(row.runs)) == (row.after, row.after)
    for low in (jnp.float16, jnp.bfloat16):
        both = lambda x, low=low: jnp.sum(fun(x)) + jnp.sum(fun(x.astype(low)), dtype=jnp.float32)
        found = rows(jax.grad(jamp.autocast(both, dtype)), SQUARE, compute_dtype=dtype)
        assert {row.category for name, row in found.items() if "dot_general" in name} == {"compute", "accumulate"}


def test_operands_that_a_rule_casts_are_float32_before():
    fun = lambda table, i: jnp.sum(table[i] + table[i])
    rules = {"gather": "compute", "add": "compute"}
    rows = jamp.autocast_report(fun, jnp.bfloat16, rules=rules)(jnp.ones((8, 4)), jnp.array([1, 2])).rows
    assert {row.operation: (row.before, row.after) for row in rows if row.category == "compute"} == {
        "gather": ("float32, int32 -> float32", "float32, int32 -> bfloat16"),
        "add": ("float32, float32 -> float32", "bfloat16, bfloat16 -> bfloat16"),
    }
    low = lambda table, i: fun(table.astype(jnp.bfloat16), i)
    rows = jamp.autocast_report(low, jnp.bfloat16, rules=rules)(jnp.ones((8, 4)), jnp.array([1, 2])).rows
    assert {row.before == row.after for row in rows} == {True}


def test_the_title_counts_what_was_asked_for_and_says_what_was_16_bit_already():
    low = lambda x: (x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16)).astype(jnp.float32)
    title = lambda f, dtype: str(jamp.autocast_report(f, dtype)(jnp.ones((64, 64)))).splitlines()[0]
    assert title(low, jnp.float16).endswith(": 0.0% of the FLOPs in float16, and 100.0% in 16 bit already")
    assert title(lambda x: low(x) + x @ x, jnp.bfloat16).endswith("in bfloat16, and 49.8% in 16 bit already")
    assert title(lambda x: x @ x, jnp.bfloat16).endswith(": 100.0% of the FLOPs in 16 bit")
    both = lambda x: low(jnp.tanh(x @ x) @ x)
    assert title(both, jamp.Float8(min_size=8)).endswith("in 16 bit or less, of which 33.2% as it was")
    run = str(
        jamp.autocast_report(jax.grad(lambda x: jamp.autocast(both, jnp.float16)(x).sum()), jnp.float16)(
            jnp.ones((64, 64))
        )
    )
    assert "already" not in run


def test_hints_lead_nowhere_that_is_an_error():
    """A loss of a gradient (forces) stays in the carrier, because 8-bit products have no second derivative."""
    energy = lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w).sum()
    loss = lambda w, x: (jax.grad(energy, 1)(w, x) ** 2).mean()
    (hint,) = {
        h.partition(": it is")[2]
        for h in jamp.autocast_report(loss, jamp.Float8(min_size=8))(*ARGS8).hints
        if "forces" in h
    }
    assert "it must stay, because 8-bit products have no second derivative" in hint
    solve = lambda x: jnp.linalg.solve(x @ x + jnp.eye(64), x).sum()
    reasons = [
        r.reason for r in jamp.autocast_report(solve, jnp.float16)(jnp.ones((64, 64))).rows if "solve" in r.operation
    ]
    assert all("a solver needs the digits of float32" in reason for reason in reasons)


ARGS8 = jnp.ones((64, 64)), jnp.ones((64, 64))


def test_a_report_of_nothing_but_unknown_operations_can_be_printed():
    fun = lambda x: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((2, 2), jnp.float32), x)
    assert "no FLOPs counted" in str(jamp.autocast_report(fun, jnp.float16)(jnp.ones((2, 2))))


LAYERS = [jnp.eye(32)] * 3
mlp = lambda ws, x: jnp.mean(functools.reduce(lambda x, w: jnp.tanh(x @ w), ws, x) ** 2)
convolutions = lambda ws, x: jnp.mean(functools.reduce(lambda x, w: conv(x, w[None, None, :3, :3]), ws, x[None, None]))
TRANSFORMED = {
    "autocast": jamp.autocast(mlp, jnp.bfloat16),
    "a budget": jamp.autocast(mlp, jnp.bfloat16, memory_budget=0),
    "float8": jamp.autocast(mlp, jamp.Float8(min_size=1)),
    "convolutions": jamp.autocast(convolutions, jnp.bfloat16),
    "recompute": jamp.recompute(mlp, 0),
    "scaled": jamp.scaled(jamp.autocast(mlp, jnp.float16)),
}
DERIVED = {
    "value": lambda f: f,
    "grad": jax.grad,
    "jvp": lambda f: lambda ws, x: jax.jvp(f, (ws, x), (ws, x)),
}


@pytest.mark.slow_after(9)
@pytest.mark.parametrize("derived", DERIVED)
@pytest.mark.parametrize("name", TRANSFORMED)
def test_no_report_names_a_primitive_of_jamp(name, derived):
    if (name, derived) == ("float8", "jvp"):
        return  # It has none.
    fun, x = DERIVED[derived](TRANSFORMED[name]), jnp.ones((32, 32))
    report = jamp.autocast_report(fun, jnp.bfloat16)(LAYERS, x)
    assert not INTERNAL & {row.operation.partition("[")[0] for row in report.rows}
    assert "it is a kernel" not in " ".join(report.hints)
    if derived == "jvp":
        found = jamp.debug.find_nonfinite(fun)(LAYERS, x * jnp.inf).findings
        assert found
        assert not INTERNAL & {finding.primitive for finding in found}


def test_a_rule_for_a_scope_names_a_product_as_the_user_does():
    scoped = jax.named_scope("head")(lambda x, w: jnp.tanh(x @ w))
    found = rows(scoped, SQUARE, SQUARE, rules={"*[head]": "compute"})
    assert set(found) == {"dot_general[head]", "tanh[head]"}
    cut = lambda x, w: lax.conv(x, w, (1, 1), "VALID")
    patches = jnp.ones((2, 4, 8, 8)), jnp.ones((4, 4, 1, 1))
    found = rows(cut, *patches, compute_dtype=jamp.Float8(min_size=1), rules={"conv_general_dilated": "compute"})
    assert set(found) == {"conv_general_dilated"}


def test_products_in_derivative_rules_keep_their_scope_and_line():
    product = jax.custom_jvp(lambda w, x: x @ w)
    product.defjvp(lambda p, t: (product(*p), p[1] @ t[0] + t[1] @ p[0]))
    fun = jax.named_scope("head")(lambda w, x: jnp.sum(jnp.tanh(product(w, x))))
    for rules in ({}, {"dot_general[other]": "float32"}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The rule matches nothing.
            rows = jamp.autocast_report(fun, jnp.bfloat16, rules=rules)(SQUARE, SQUARE).rows
            traced = jax.make_jaxpr(jamp.autocast(fun, jnp.bfloat16, rules=rules))(SQUARE, SQUARE)
        (row,) = [row for row in rows if row.operation == "dot_general"]
        assert (row.scope, "test_autocast_report.py" in row.source) == ("head", True)
        calls = [e for e in traced.jaxpr.eqns if e.primitive.name == "custom_jvp_call"]
        assert all("head" in str(e.source_info.name_stack) for e in calls)


def test_a_budget_around_autocast_warns_as_autocast_does():
    low = jamp.autocast(lambda x: x @ x, jnp.bfloat16, rules={"dot_general[nowhere]": "float32"})
    for call in (jamp.recompute(low, 1.0), jamp.memory_report(low)):
        with pytest.warns(UserWarning, match="The rule for 'dot_general.nowhere.' matches no operation"):
            call(SQUARE)
