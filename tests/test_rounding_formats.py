"""`rounding_report` in formats of 8 bits: which products can run in them, and rules for the others."""

import dataclasses
import functools
import itertools

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
import jamp.debug
from jamp._jaxprs import ir, walk
from jamp._products.formats.protocol import Encoded, Format
from jamp.debug._program import RoundedProgram

KEYS = jax.random.split(jax.random.key(0), 3)
WEIGHTS = jax.random.normal(KEYS[0], (4, 64, 64)) / 8
X, Y = jax.random.normal(KEYS[1], (64, 64)), jax.random.normal(KEYS[2], (64, 64))
EXACT = {"xla_allow_excess_precision": False}


@dataclasses.dataclass(frozen=True)
class Unscaled(Format):
    """A format by the protocol alone: E5M2 in both passes, without scales."""

    name = "unscaled"
    forward = backward = np.dtype(jnp.float8_e5m2)
    carrier = np.dtype(jnp.bfloat16)
    scale_dtype = np.dtype(np.float32)
    min_size = 16
    is_by_tensor = True

    def axes(self, primitive, params):
        return None, None

    def encode(self, x, dtype, axes):
        return Encoded(lax.stop_gradient(x).astype(dtype), jnp.float32(1))

    def sums(self, codes, params, dtype):
        return np.dtype(np.float32)

    def multiply(self, bind, primitive, params, operands, sizes, dtype):
        return bind(primitive, [*(x.codes for x in operands), *sizes], params, np.dtype(np.float32)).astype(dtype)


FORMATS = {
    "float8": jamp.Float8(min_size=16),
    "float8 by row": jamp.Float8(min_size=16, granularity="row"),
    "int8": jamp.Int8(min_size=16),
    "mxfp8": jamp.MXFP8(min_size=32),
    "a stranger's": Unscaled(),
}
each_format = pytest.mark.parametrize("format", [pytest.param(x, id=name) for name, x in FORMATS.items()])
FLOAT8 = FORMATS["float8"]


def layers(weights, x, y):
    for i in range(3):
        with jax.named_scope(f"h_{i}"):
            x = x + jnp.tanh(x @ weights[i])
    with jax.named_scope("head"):
        return jnp.mean((x @ weights[3] - y) ** 2)


def scanned(weights, x, y):
    h, _ = lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, weights[:3])
    return jnp.mean((h @ weights[3] - y) ** 2)


@jax.custom_vjp
def custom(h, w):
    return jnp.tanh(h @ w)


custom.defvjp(lambda h, w: (custom(h, w), (h, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))


def with_custom_rule(weights, x, y):
    return jnp.mean((custom(jax.nn.relu(custom(x, weights[0])), weights[1]) @ weights[2] - y) ** 2)


def mapped(weights, x, y):
    h = jax.vmap(lambda x: jnp.tanh(x @ weights[0]))(x.reshape(2, 32, 64))
    return jnp.mean((jax.vmap(jnp.matmul)(h, weights[1:3]).reshape(64, 64) @ weights[3] - y) ** 2)


def by_hand(weights, x, y):
    """A model that is written in bfloat16."""
    return layers(weights.astype(jnp.bfloat16), x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)).astype(jnp.float32)


def patches(weights, x, y):
    with jax.named_scope("patch"):
        kernel = weights[0].reshape(64, 4, 4, 4)
        image = jnp.concatenate([x.reshape(1, 32, 32, 4) + 30] * 2)
        numbers = ("NHWC", "OHWI", "NHWC")
        h = lax.conv_general_dilated(image, kernel - kernel.mean(0), (4, 4), "VALID", dimension_numbers=numbers)
    return jnp.mean((jnp.tanh(h).reshape(-1, 64) @ weights[1] @ weights[2]) ** 2) + 0 * jnp.sum(y)


def norm(tree):
    return np.sqrt(sum(np.sum(np.float64(x) ** 2) for x in jax.tree.leaves(tree)))


def error_of(fun, format, rules, *args):
    """The relative error of the gradients, by `autocast` itself."""
    exact = jax.jit(jax.grad(fun))(*args)
    low = jax.jit(jax.grad(jamp.autocast(fun, format, rules=rules)), compiler_options=EXACT)(*args)
    return norm(jax.tree.map(jnp.subtract, low, exact)) / norm(exact)


CASES = [(layers, name) for name in FORMATS]
CASES += [(fun, "float8") for fun in (scanned, with_custom_rule, mapped, patches)]
CASES += [(fun, "mxfp8") for fun in (scanned, mapped)] + [(scanned, "int8")]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(("fun", "name"), CASES)
def test_the_errors_are_those_of_autocast(fun, name):
    report = jamp.debug.rounding_report(fun, FORMATS[name])(WEIGHTS, X, Y)
    assert report.gradient_error == pytest.approx(error_of(fun, FORMATS[name], {}, WEIGHTS, X, Y), rel=1e-3)
    assert report.compute_dtype == FORMATS[name].name
    eight = [row for row in report.rows if row.format]
    assert report.share == pytest.approx(sum(row.flops for row in eight))
    assert report.share > 0.2


@pytest.mark.slow_after(1)
@each_format
def test_each_pass_of_a_product_has_a_row_whose_prediction_is_near_to_the_measurement(format, monkeypatch):
    monkeypatch.setattr("jamp.debug._rounding_report._CHECKED", 99)
    report = jamp.debug.rounding_report(layers, format)(WEIGHTS, X, Y)
    eight = [row for row in report.rows if row.format]
    assert {(row.scope, row.backward, row.gradient_of) for row in eight} == {
        ("h_*", False, ""),
        ("h_*", True, "left"),
        ("h_*", True, "right"),
    }
    shares = {row.gradient_of: row.flops for row in eight}  # The first layer reads no computed value.
    assert shares[""] == pytest.approx(shares["right"]) == pytest.approx(1.5 * shares["left"])
    for row in eight:
        assert row.gradient_error == pytest.approx(row.measured[1], rel=0.4)
    assert report.rows[0].gradient_error > 2 * max(x.gradient_error for x in report.rows if not x.format)


def test_a_table_names_the_format_and_the_pass():
    report = jamp.debug.rounding_report(layers, FLOAT8)(WEIGHTS, X, Y)
    lines = str(report).replace("test_rounding_formats.py", "model.py").splitlines()
    assert lines[0].startswith(f"rounding to float8, {report.share:.1%} of the FLOPs in it: error of the value ")
    assert max(map(len, lines)) <= 100
    assert lines[4].split()[:3] == ["operation", "format", "pass"]
    assert any(line.startswith("dot_general  float8  d left ") for line in lines)
    assert str(next(row for row in report.rows if row.gradient_of == "left" and row.format)).startswith(
        "dot_general for the gradient of the left operand: rounded to bfloat16, float8_e4m3fn, float8_e5m2"
    )


def test_a_format_needs_no_more_than_fifteen_gradients(monkeypatch):
    """Each run is a gradient, and the backward pass over both is at most two for each of two probes."""
    runs, backward = [], []
    run, damages = RoundedProgram.run, RoundedProgram.damages
    monkeypatch.setattr(RoundedProgram, "run", lambda *args, **kw: runs.append(1) or run(*args, **kw))
    monkeypatch.setattr(RoundedProgram, "damages", lambda *args: backward.append(1) or damages(*args))
    jamp.debug.rounding_report(layers, FLOAT8)(WEIGHTS, X, Y)
    assert len(runs) + 4 * len(backward) <= 15


@pytest.mark.slow
def test_the_worst_step_of_a_scan_is_named():
    def fun(weights, x, offsets):
        step = lambda h, inputs: (jnp.tanh((h + inputs[1]) @ (inputs[0] - inputs[0].mean(0))), None)
        return jnp.mean((lax.scan(step, x, (weights, offsets))[0] @ weights[0]) ** 2)

    row = jamp.debug.rounding_report(fun, FLOAT8)(WEIGHTS, X, jnp.array([0.0, 0.0, 300.0, 0.0])).rows[0]
    assert (row.format, row.step, row.steps) == ("float8", (2,), (4,))


def sensitive(weights, x, y):
    """The second of three layers has a feature of 30 times the others."""
    for i in range(3):
        with jax.named_scope(f"h_{i}"):
            h = x.at[:, 3].set(30.0 * (i == 1))
            x = x + jnp.tanh(h @ weights[i] - 30.0 * (i == 1) * lax.stop_gradient(weights[i, 3]))
    with jax.named_scope("head"):
        return jnp.mean((x @ weights[3] - y) ** 2)


@pytest.mark.slow_after(1)
@each_format
def test_rules_keep_the_one_sensitive_product_in_16_bit(format):
    report = jamp.debug.rounding_report(sensitive, format)(WEIGHTS, X, Y)
    assert report.rows[0].worst == "h_1"
    bound = 0.5 * report.gradient_error
    assert report.rules(error=bound) == {"dot_general[h_1]": "accumulate"}
    assert error_of(sensitive, format, report.rules(error=bound), WEIGHTS, X, Y) <= bound * 1.01
    assert report.rules(error=2 * report.gradient_error) == {}


def test_a_bound_that_16_bit_does_not_reach_names_the_least_error_and_what_makes_it():
    report = jamp.debug.rounding_report(layers, FLOAT8)(WEIGHTS, X, Y)
    least = error_of(layers, FLOAT8, {"dot_general": "accumulate"}, WEIGHTS, X, Y)
    with pytest.raises(ValueError, match=r"With all of them in 16 bit it is .*dot_general at test_rounding") as caught:
        report.rules(error=1e-5)
    assert f"it is {least:.1e}, by the rounding to 16 bit of " in str(caught.value)
    curve = report.curve((1.0, 1e-5))
    assert [point.is_reached for point in curve.points] == [True, False]
    assert curve.points[0].share == report.share
    assert curve.points[1].share == 0
    assert curve.points[1].error == pytest.approx(least, rel=1e-3)


@pytest.mark.slow
def test_a_curve_has_fewer_flops_in_8_bits_for_a_smaller_error():
    report = jamp.debug.rounding_report(sensitive, FLOAT8)(WEIGHTS, X, Y)
    bounds = [x * report.gradient_error for x in (2, 0.5, 0.1, 0.08, 0.06)]
    curve = report.curve(bounds)
    shares = [point.share for point in curve.points]
    assert shares == sorted(shares, reverse=True)
    assert len(set(shares)) > 2
    for point in curve.points:
        assert point.error == pytest.approx(error_of(sensitive, FLOAT8, point.rules, WEIGHTS, X, Y), rel=0.01)
        assert point.is_reached == (point.error <= point.bound)
        assert point.share == pytest.approx(
            jamp.debug.rounding_report(sensitive, FLOAT8, rules=point.rules)(WEIGHTS, X, Y).share
        )
    first, second, *_ = str(curve).splitlines()
    assert first.split() == ["error", "at", "most", "error", "FLOPs", "in", "float8", "rules"]
    assert second.split()[-1] == "none"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_the_search_finds_the_most_flops_in_8_bits(seed):
    """As many as the best of all subsets of the rules that has a tenth less error. Layers have several sizes."""
    sizes = 64, 128, 32, 96, 64, 160, 32, 64
    keys = jax.random.split(jax.random.key(seed), len(sizes))
    weights = [jax.random.normal(k, (m, n)) / m**0.5 for k, m, n in zip(keys, sizes, sizes[1:], strict=False)]
    offsets = [float(x) for x in np.random.default_rng(seed).choice([0, 0, 0, 2, 5, 10, 20], len(weights))]

    def fun(weights, x):
        for i, (w, offset) in enumerate(zip(weights, offsets, strict=True)):
            with jax.named_scope(f"h_{i}"):
                x = jnp.tanh(x.at[:, 3].set(offset) @ w - offset * lax.stop_gradient(w[3]))
        return jnp.mean((x @ jnp.eye(64) - Y) ** 2)

    report = jamp.debug.rounding_report(fun, FLOAT8)(weights, X)
    search = report._search
    rules, flops = search._candidates[1], search._errors.program.flops
    subsets = [x for n in range(len(rules) + 1) for x in itertools.combinations(rules, n)]
    for target in (0.9, 0.8, 0.7, 0.6, 0.5, 0.4):
        bound = target * report.gradient_error
        error, share = jamp.debug._rules._TARGETS[0] * bound, search.find(bound).errors.share
        best = min(sum(x.flops for x in mine) for mine in subsets if search._error(mine) <= 0.9 * error)
        assert share >= report.share - best / flops - 0.004


def cancelling(w, x):
    """With a rule for "six" alone, its errors do not cancel those of the four others any more."""
    w, wide = w[:2], w[2]
    products = [("ten", 10, 0), ("six", 6, 1), *((name, -1.5, 1) for name in "abcd")]
    y = 0.0
    for name, factor, i in products:
        with jax.named_scope(name):
            y = y + factor * (x @ w[i])
    with jax.named_scope("head"):
        return y @ wide


def test_errors_that_cancel_do_not_hide_the_rule_that_is_enough():
    """The error rises with a second rule, and falls again with the fifth."""
    report = jamp.debug.rounding_report(cancelling, FLOAT8)(WEIGHTS, X)
    search = report._search
    by_key = {x.key: x for x in search._candidates[1]}
    ten, six, *others = (by_key[f"dot_general[{name}]"] for name in ("ten", "six", *"abcd"))
    bound = 0.5 * report.value_error
    errors = [search._error(x) for x in ([ten], [ten, six], [ten, six, *others[:3]])]
    assert errors[0] < 0.25 * bound
    assert errors[1] > bound
    assert errors[2] < 0.85 * bound
    assert report.rules(error=bound) == {"dot_general[ten]": "accumulate"}
    assert errors[0] < 0.3 * 0.85 * report.value_error  # but its prediction is not below this bound
    assert {six.key, *(x.key for x in others[:2])} & report.rules(error=0.3 * report.value_error).keys()


def attend(weights, x, y):
    """Scores have a large part in common, so that their 16-bit results lose the digits that the softmax reads."""
    offset = jnp.full((64, 1), 40.0)
    with jax.named_scope("query"):
        q = jnp.concatenate([x @ weights[0], offset], 1)
    with jax.named_scope("key"):
        k = jnp.concatenate([x @ weights[1], offset], 1)
    with jax.named_scope("scores"):
        scores = q @ k.T
    with jax.named_scope("out"):
        return jnp.mean((jax.nn.softmax(scores / 4) @ x @ weights[2] @ weights[3] - y) ** 2)


@pytest.mark.slow_after(1)
@each_format
def test_a_product_that_has_16_bit_may_need_a_rule_too(format):
    """Scores are not in 8 bits. A rule for them costs none of the FLOPs in 8 bits."""
    report = jamp.debug.rounding_report(attend, format)(WEIGHTS, X, Y)
    (point,) = report.curve([0.7 * report.gradient_error]).points
    assert point.rules == {"dot_general[scores]": "accumulate"}
    assert point.share == report.share


def test_rules_that_are_found_go_before_those_of_the_call():
    given = {"*[h_1]": "compute"}
    report = jamp.debug.rounding_report(sensitive, FLOAT8, rules=given)(WEIGHTS, X, Y)
    rules = report.rules(error=0.6 * report.gradient_error)
    assert rules == {"dot_general[h_1]": "accumulate"}
    assert error_of(sensitive, FLOAT8, rules | given, WEIGHTS, X, Y) <= 0.6 * report.gradient_error


@pytest.mark.slow
def test_a_rule_for_patches_is_for_their_convolution():
    report = jamp.debug.rounding_report(patches, FLOAT8)(WEIGHTS, X, Y)
    assert (report.rows[0].operation, report.rows[0].scope) == ("conv_general_dilated", "patch")
    bound = 0.5 * report.gradient_error
    rules = report.rules(error=bound)
    assert rules["conv_general_dilated[patch]"] == "accumulate"
    assert error_of(patches, FLOAT8, rules, WEIGHTS, X, Y) <= 1.01 * bound


@pytest.mark.slow
def test_a_model_that_is_written_in_bfloat16_has_rows_and_rules():
    report = jamp.debug.rounding_report(by_hand, FLOAT8)(WEIGHTS, X, Y)
    assert {row.gradient_of for row in report.rows if row.format} == {"", "left", "right"}
    rules = report.rules(error=0.7 * report.gradient_error)
    assert 0 < len(rules) < 4
    assert jamp.debug.rounding_report(by_hand, FLOAT8, rules=rules)(WEIGHTS, X, Y).share < report.share


def test_what_stays_in_16_bit_is_in_8_bits_by_a_rule():
    share = lambda rules: jamp.debug.rounding_report(layers, FLOAT8, rules=rules)(WEIGHTS, X, Y).share
    assert share({"dot_general": "compute"}) > 1.2 * share({})


@pytest.mark.slow
@pytest.mark.promotes("x64 makes Python numbers float64")
def test_the_reference_is_float64_if_x64_is_on():
    with jax.enable_x64(True):
        args = [jnp.float32(x) for x in (WEIGHTS, X, Y)]
        report = jamp.debug.rounding_report(layers, FLOAT8)(*args)
    usual = jamp.debug.rounding_report(layers, FLOAT8)(WEIGHTS, X, Y)
    assert report.gradient_error == pytest.approx(usual.gradient_error, rel=0.02)


def test_a_shard_map_in_a_format_is_one_operation():
    shard = jax.sharding.PartitionSpec("data")
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    layer = jax.shard_map(lambda x, w: jnp.tanh(x @ w), mesh=mesh, in_specs=(shard, None), out_specs=shard)
    fun = lambda w, x, y: jnp.mean((layer(layer(x, w[0]), w[1]) @ w[2] - y) ** 2)
    report = jamp.debug.rounding_report(fun, FLOAT8)(WEIGHTS, X, Y)
    assert "shard_map" in {row.operation for row in report.rows}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("dtype", [FLOAT8, jnp.bfloat16], ids=["float8", "bfloat16"])
def test_one_row_says_what_residuals_in_8_bits_add(dtype):
    report = jamp.debug.rounding_report(layers, dtype, residuals=jnp.int8)(WEIGHTS, X, Y)
    (row,) = [x for x in report.rows if x.operation == "residuals"]
    without, within = (
        jax.jit(jax.grad(jamp.autocast(layers, dtype, **more)), compiler_options=EXACT)(WEIGHTS, X, Y)
        for more in ({}, {"residuals": jnp.int8})
    )
    assert row.gradient_error == pytest.approx(norm(within - without) / norm(without), rel=1e-3)
    assert row.measured == (0.0, row.gradient_error)
    assert 1e-4 < row.gradient_error < 0.1
    assert any(line.split()[:2] == ["residuals", "backward"] for line in str(report).splitlines())
    usual = jamp.debug.rounding_report(layers, dtype)(WEIGHTS, X, Y)
    assert [x for x in report.rows if x is not row] == list(usual.rows)
    assert report.gradient_error == usual.gradient_error


def test_no_product_of_the_report_is_in_a_program_that_runs():
    jaxpr = jax.make_jaxpr(jax.grad(jamp.autocast(layers, FLOAT8)))(WEIGHTS, X, Y)
    names = {ir.name(eqn) for eqn in walk.all_equations(jaxpr.jaxpr)}
    assert "dot_general" in names
    assert "unencoded_product" not in names


PLANTED = [(5, "up"), (0, "down"), (3, "value"), (6, "key"), (7, "output"), (1, "query")]


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("planted", PLANTED[:2])
def test_a_planted_product_of_a_decoder_is_named_first(planted, name):
    layer, product = planted
    fun = functools.partial(decoders.loss_with, planted, 300.0)
    params, tokens = decoders.init(PLANTED.index(planted)), decoders.batch(PLANTED.index(planted))
    first, *rest = jamp.debug.rounding_report(fun, FORMATS[name])(params, tokens).rows
    assert (first.worst, first.format) == (f"h_{layer}/{product}", FORMATS[name].name)
    assert first.source.startswith(decoders.line(product))
    assert first.damage > 2 * max(row.damage for row in rest if row.source != first.source)


@pytest.mark.slow
@pytest.mark.parametrize("planted", PLANTED[2:])
def test_other_planted_products_of_a_decoder_are_named_too(planted):
    test_a_planted_product_of_a_decoder_is_named_first(planted, ("float8", "int8")[PLANTED.index(planted) % 2])


def with_feature(is_planted, product, h, w):
    """A product whose operand has a feature of 300 times the others, without the feature's part of the result."""
    if not is_planted:
        return product(h, w)
    large = jnp.zeros(h.shape[-1]).at[3].set(300.0)
    return product(h.at[..., 3].set(300.0), w) - product(jnp.broadcast_to(large, h.shape), lax.stop_gradient(w))


def vision(planted, weights, x, y):
    """Patches, and two blocks that look at all of them."""
    image = x.reshape(1, 32, 32, 4)
    with jax.named_scope("patches"):
        h = image.reshape(8, 4, 8, 4, 4).transpose(0, 2, 1, 3, 4).reshape(64, 64)
        h = with_feature(planted == "patches", jnp.matmul, h, weights[0])
    for i, w in enumerate(weights[1:3]):
        with jax.named_scope(f"block_{i}"):
            mixed = jax.nn.softmax(h @ h.T / 8) @ h
            with jax.named_scope("mlp"):
                h = h + jnp.tanh(with_feature(planted == f"block_{i}/mlp", jnp.matmul, mixed, w))
    with jax.named_scope("head"):
        return jnp.mean((h.mean(0) @ weights[3] - y[0]) ** 2)


def mixture(planted, weights, x, y):
    """Two experts of two layers, whose results a gate weights."""
    gate, many = jax.nn.softmax(x[:, :2]), jnp.broadcast_to(x, (2, *x.shape))
    with jax.named_scope("experts"):
        with jax.named_scope("up"):
            h = jax.nn.relu(with_feature(planted == "experts/up", jnp.matmul, many, weights[:2]))
        with jax.named_scope("down"):
            h = with_feature(planted == "experts/down", jnp.matmul, h, weights[2:])
    with jax.named_scope("head"):
        return jnp.mean((jnp.einsum("etd,te->td", h, gate) @ weights[0] - y) ** 2)


def pointwise(planted, weights, x, y):
    """1 x 1 convolutions, with a mean over neighbours between them."""
    numbers = ("NHWC", "HWIO", "NHWC")
    conv = lambda h, w: lax.conv_general_dilated(h, w[None, None], (1, 1), "SAME", dimension_numbers=numbers)
    h = x.reshape(1, 8, 8, 64)
    for i, w in enumerate(weights[:3]):
        with jax.named_scope(f"conv_{i}"):
            h = jnp.tanh(with_feature(planted == f"conv_{i}", conv, (h + jnp.roll(h, 1, 1)) / 2, w))
    with jax.named_scope("head"):
        return jnp.mean((h.reshape(64, 64) @ weights[3] - y) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float8", "int8"])
@pytest.mark.parametrize(
    ("model", "planted"),
    [
        (vision, "patches"),
        (vision, "block_1/mlp"),
        (mixture, "experts/up"),
        (mixture, "experts/down"),
        (pointwise, "conv_1"),
    ],
)
def test_planted_products_of_other_models_are_named_first(model, planted, name):
    report = jamp.debug.rounding_report(functools.partial(model, planted), FORMATS[name])(WEIGHTS, X, Y)
    first = report.rows[0]
    assert (first.worst or first.scope, first.format) == (planted, FORMATS[name].name)
    assert first.damage > 2 * max(row.damage for row in report.rows if planted not in (row.scope, row.worst))
    rules = report.rules(error=0.5 * report.gradient_error)
    assert [key for key in rules if f"[{planted}]" in key]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("float8", (0.5, 0.2, 0.1)),
        ("int8", (0.2, 0.06)),
        ("float8 by row", (0.12, 0.1)),
        ("mxfp8", (0.2, 0.09)),
        ("a stranger's", (0.5, 0.2)),
    ],
)
def test_rules_hold_their_bound_on_other_seeds_and_batches(name, bounds):
    fun, format = functools.partial(decoders.loss_with, (5, "up"), 300.0), FORMATS[name]
    report = jamp.debug.rounding_report(fun, format)(decoders.init(0), decoders.batch(0))
    exact = jax.jit(jax.grad(fun))
    for point in report.curve(bounds).points:
        assert point.is_reached
        assert 0.3 < point.share < report.share
        low = jax.jit(jax.grad(jamp.autocast(fun, format, rules=point.rules)), compiler_options=EXACT)
        for seed in range(3):
            for batch in range(1, 4):
                args = decoders.init(seed), decoders.batch(10 * seed + batch)
                grads = exact(*args)
                found = norm(jax.tree.map(jnp.subtract, low(*args), grads)) / norm(grads)
                assert found <= 1.3 * point.bound
