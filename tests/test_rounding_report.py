"""`rounding_report`: which operation needs its digits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults import FAULTS, planted
from jax import lax
from jax.custom_derivatives import linear_call
from pairs import of_pair

import jamp
import jamp.debug

KEYS = jax.random.split(jax.random.key(0), 3)
WEIGHTS = jax.random.normal(KEYS[0], (4, 16, 16)) / 4
X, Y = jax.random.normal(KEYS[1], (2, 8, 16)), jax.random.normal(KEYS[2], (2, 8, 16))


def loss_with(fault, weights, x, y):
    h = jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1])
    h = jnp.tanh(fault(h) @ weights[2])
    return jnp.mean((h @ weights[3] - y) ** 2)


def healthy(weights, x, y):
    with jax.named_scope("body"):
        h = jnp.tanh(x @ weights[0])
    with jax.named_scope("head"):
        return jnp.mean((h @ weights[1] - y) ** 2)


def relative_error(tree, exact):
    pairs = [(np.float64(x), np.float64(y)) for x, y in zip(*map(jax.tree.leaves, (tree, exact)), strict=True)]
    return np.sqrt(sum(np.sum((x - y) ** 2) for x, y in pairs) / sum(np.sum(y**2) for _, y in pairs))


@pytest.mark.parametrize("fault", [FAULTS[0], *(pytest.param(x, marks=pytest.mark.slow) for x in FAULTS[1:])])
def test_a_planted_fault_is_the_first_row(fault):
    first, *rest = jamp.debug.rounding_report(functools.partial(loss_with, fault), jnp.bfloat16)(WEIGHTS, X, Y).rows
    assert first.source.startswith(planted(fault))
    assert first.damage > 2 * max(row.damage for row in rest if planted(fault) not in row.source)


def scanned(weights, x, y):
    return jnp.mean((lax.scan(lambda h, w: (jnp.tanh(h @ w + h), None), x, weights)[0] - y) ** 2)


def branched(weights, x, y):
    f = jax.checkpoint(jax.jit(lambda h, w: lax.cond(h[0, 0, 0] < 9, lambda: jnp.tanh(h @ w), lambda: h)))
    return jnp.mean((f(f(x, weights[0]), weights[1]) - y) ** 2)


@jax.custom_vjp
def custom(h, w):
    return jnp.tanh(h @ w)


custom.defvjp(lambda h, w: (custom(h, w), (h, w)), lambda r, g: (g @ r[1].T, jnp.einsum("bti,btj->ij", r[0], g)))


def with_custom_rule(weights, x, y):
    return jnp.mean((custom(jax.nn.relu(custom(x, weights[0])), weights[1]) - y) ** 2)


def with_linear_call(weights, x, y):
    product = lambda w, h: linear_call(lambda w, h: h @ w, lambda w, g: g @ w.T, lax.stop_gradient(w), h)
    return jnp.mean((product(weights[1], jnp.tanh(x @ weights[0])) - y) ** 2)


@pytest.mark.slow_after(1)
@pytest.mark.promotes("the loss scale is float32")
@pytest.mark.parametrize(
    ("fun", "dtype"),
    [
        pytest.param(fun, dtype, marks=[pytest.mark.slow] * (fun in (branched, scanned) or dtype is not usual))
        for fun, usual in (
            (healthy, jnp.bfloat16),
            (scanned, jnp.float32),
            (branched, jnp.bfloat16),
            (with_custom_rule, jnp.bfloat16),
            (with_linear_call, jnp.bfloat16),
        )
        for dtype in (jnp.bfloat16, jnp.float32, jnp.float16)
        if fun in (healthy, scanned) or dtype is usual  # Branches and rules are run as they are in every dtype.
    ],
)
def test_the_errors_are_those_of_autocast(fun, dtype):
    """XLA may leave out roundings. Without that, the report computes what autocast computes, digit for digit."""
    with of_pair(dtype) as cast:
        args = [cast(x) for x in (WEIGHTS, X, Y)]
        report = jamp.debug.rounding_report(fun, dtype)(*args)
        scale = 2.0**15 if dtype == jnp.float16 else 1.0
        low = jax.value_and_grad(lambda *args: scale * jamp.autocast(fun, dtype)(*args))
        low = jax.jit(low, compiler_options={"xla_allow_excess_precision": False})
        value, grads = jax.tree.map(lambda x: x / scale, low(*args))
        exact, exact_grads = jax.value_and_grad(fun)(*args)
    # Rounding errors of sums in float32 depend on the order, which fusion changes.
    rel, least = (0.5, 1e-7) if dtype == jnp.float32 else (0.05, 1e-6)
    assert report.value_error == pytest.approx(relative_error(value, exact), rel=rel, abs=least)
    assert report.gradient_error == pytest.approx(relative_error(grads, exact_grads), rel=rel)
    assert report.gradient_error < 50 * jnp.finfo(dtype).eps


def test_the_prediction_is_near_to_the_measurement():
    report = jamp.debug.rounding_report(healthy, jnp.bfloat16)(WEIGHTS, X, Y)
    for row in report.rows[:2]:
        assert row.gradient_error == pytest.approx(row.measured[1], rel=0.5)
    assert [row.measured for row in report.rows[2:]] == [None] * len(report.rows[2:])


def test_every_error_of_a_row_is_what_it_says():
    """One product of which only the weights are inexact: its own error is that of the weights and of its result."""
    w, x = jnp.full((16, 16), 1 + 2.0**-9), jnp.eye(16)
    (row,) = jamp.debug.rounding_report(lambda w, x: (x @ w,), jnp.bfloat16)(w, x).rows
    expected = 2.0**-9 / (1 + 2.0**-9)
    assert row.own_error == pytest.approx(expected, rel=1e-3)
    assert row.value_error == pytest.approx(expected, rel=1e-3)  # 256 errors that depend on each other
    assert np.isnan(row.gradient_error)


@pytest.mark.slow
def test_the_worst_step_of_a_scan_is_named():
    def fun(weights, x, offsets):
        step = lambda h, inputs: (jnp.tanh((h + inputs[1]) @ (inputs[0] - inputs[0].mean(0))), None)
        return jnp.mean(lax.scan(step, x, (weights, offsets))[0] ** 2)

    offsets = jnp.array([0.0, 0.0, 300.0, 0.0])
    row = jamp.debug.rounding_report(fun, jnp.bfloat16)(WEIGHTS, X[0], offsets).rows[0]
    assert (row.step, row.steps, row.backward) == ((2,), (4,), False)
    assert "step 2 of 4" in str(row)


@pytest.mark.slow
def test_rules_name_the_one_product_that_needs_its_digits():
    def fun(weights, x, y):
        with jax.named_scope("body"):
            h = jnp.tanh(x @ weights[0])
        with jax.named_scope("attention"):
            h = FAULTS[0](h)
        with jax.named_scope("head"):
            return jnp.mean((h @ weights[1] - y) ** 2)

    report = jamp.debug.rounding_report(fun, jnp.bfloat16)(WEIGHTS, X, Y)
    assert report.rules(error=1.0) == {}
    rules = report.rules(error=0.05)
    assert rules == {"dot_general[attention]": "float32"}
    assert jamp.debug.rounding_report(fun, jnp.bfloat16, rules=rules)(WEIGHTS, X, Y).gradient_error <= 0.05
    with pytest.warns(UserWarning, match="No smaller set than all products"):
        assert report.rules(error=1e-6) == {"dot_general": "float32"}


@pytest.mark.slow
def test_a_harmless_product_without_a_scope_costs_no_other_its_16_bit():
    def fun(weights, x, y):
        out = y
        for i, factor in enumerate((100.0, 10.0, 1.0)):
            with jax.named_scope(f"layer_{i}"):
                out = out + factor * jnp.sin(x @ weights[i])
        return jnp.mean((out + 0.01 * (x @ weights[3])) ** 2)

    report = jamp.debug.rounding_report(fun, jnp.bfloat16)(WEIGHTS, X, Y)
    assert report.rules(error=0.03 * report.gradient_error).keys() == {"dot_general[layer_0]", "dot_general[layer_1]"}


@pytest.mark.slow
def test_rules_that_others_make_needless_are_left_out():
    def fun(weights, x, y):
        with jax.named_scope("small"):  # much damage for its few FLOPs, but not enough to need it
            out = 30 * jnp.sin(x @ weights[0, :, :2]).mean(-1, keepdims=True)
        with jax.named_scope("large"):
            return jnp.mean((out + 100 * jnp.sin(x @ weights[1]) - y) ** 2)

    report = jamp.debug.rounding_report(fun, jnp.bfloat16)(WEIGHTS, X, Y)
    assert report.rules(error=0.57 * report.gradient_error).keys() == {"dot_general[large]"}


def test_rules_need_an_error_and_a_bound():
    report = jamp.debug.rounding_report(lambda w, x: jnp.argmax(x @ w), jnp.bfloat16)(WEIGHTS[0], X)
    with pytest.raises(ValueError, match="no floating result"):
        report.rules(error=1e-3)
    with pytest.raises(ValueError, match="got error=-1"):
        report.rules(error=-1)


@pytest.mark.slow
def test_an_empty_scan_has_no_worst_step():
    fun = lambda w, x: jnp.sum(lax.scan(lambda c, y: (c @ w, c), x, x[:0])[0])
    assert jamp.debug.rounding_report(fun, jnp.bfloat16)(WEIGHTS[0], X[0]).value_error == 0


def test_rules_accumulate_where_the_result_alone_is_rounded_too_much():
    def fun(w, x):
        with jax.named_scope("logits"):
            logits = x @ w  # 257 to 272, of operands that 16 bit holds
        return (jnp.cos(logits),)

    w = jnp.zeros((16, 16)).at[0].set(256.0).at[1].set(jnp.arange(1.0, 17.0))
    report = jamp.debug.rounding_report(fun, jnp.bfloat16)(w, jnp.ones((4, 16)))
    assert report.value_error > 0.1
    assert report.rules(error=1e-3) == {"dot_general[logits]": "accumulate"}


@pytest.mark.slow
def test_products_without_a_name_scope_are_named_in_a_warning():
    def fun(weights, x, y):
        with jax.named_scope("body"):
            h = jnp.tanh(x @ weights[0])
        return jnp.mean((FAULTS[0](h) - y) ** 2)

    report = jamp.debug.rounding_report(fun, jnp.bfloat16)(WEIGHTS, X, Y)
    with pytest.warns(UserWarning, match=r"faults\.py:\d+ \(large_logits\).*named_scope"):
        assert report.rules(error=0.01) == {"dot_general": "float32"}


@pytest.mark.slow
def test_no_rule_helps_code_that_computes_in_16_bit():
    fun = lambda w, x: jnp.mean((x * w.astype(jnp.bfloat16).astype(jnp.float32)) ** 2)
    report = jamp.debug.rounding_report(fun, jnp.bfloat16)(WEIGHTS[0, 0], X)
    assert report.rows[0].operation == "convert_element_type"
    with pytest.raises(ValueError, match="other operations round"):
        report.rules(error=1e-6)


@pytest.mark.slow
def test_float16_is_reported_at_a_loss_scale_that_fits():
    large = lambda weights, x, y: 1e4 * healthy(weights, x, y)  # overflows at 2**15
    report = jamp.debug.rounding_report(large, jnp.float16)(WEIGHTS, X, Y)
    assert report.gradient_error < 1e-2
    assert not any(row.overflows for row in report.rows)
    row = jamp.debug.rounding_report(lambda w, x: x @ w, jnp.float16)(
        jnp.full((16, 16), 300.0), jnp.full((16, 16), 300.0)
    )
    assert row.rows[0].overflows
    assert row.rows[0].damage == np.inf
    assert "overflows" in str(row)


def test_only_the_first_argument_has_gradients():
    report = jamp.debug.rounding_report(lambda x, w: jnp.mean((x @ w) ** 2), jnp.bfloat16)(X[0], WEIGHTS[0])
    backward = [row for row in report.rows if row.backward]
    (forward,) = (row for row in report.rows if not row.backward)
    assert sum(row.flops for row in backward) == pytest.approx(forward.flops)  # of one operand


def test_a_loss_with_other_results_and_arguments_that_are_no_arrays():
    fun = lambda params, x, kind: (jnp.mean((x @ params["w"]) ** 2), {"kind": 3 if kind == "a" else 4})
    report = jamp.debug.rounding_report(fun, "bfloat16")({"w": WEIGHTS[0], "name": "layer"}, X[0], kind="a")
    assert report.gradient_error > 0
    assert report.rows[0].parameter == "params['w']"


def test_errors_say_what_to_do():
    fun = lambda w, x: jnp.log(x @ w - 1e9).mean()
    with pytest.raises(ValueError, match="find_nonfinite"):
        jamp.debug.rounding_report(fun, jnp.float16)(WEIGHTS[0], X)
    with pytest.raises(ValueError, match=r"Pass jamp.Float8\(\)"):
        jamp.debug.rounding_report(fun, jamp.Float8)
    with pytest.raises(ValueError, match="compute_dtype must be float16, bfloat16 or float32, got int8"):
        jamp.debug.rounding_report(fun, jnp.int8)


def test_what_jax_cannot_differentiate_twice_is_named():
    fun = lambda w, x: jnp.mean(lax.ragged_dot(x, w, jnp.array([2, 2, 2, 2])) ** 2)
    report = jamp.debug.rounding_report(fun, jnp.bfloat16)(WEIGHTS, X[0])
    assert len(report.opaque) == 1
    assert "is not counted" in str(report)


def test_a_while_loop_is_measured_but_not_predicted():
    def fun(w, x):
        h = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ lax.stop_gradient(w))), (0, x))[1]
        return jnp.mean((lax.stop_gradient(h) @ w) ** 2)

    report = jamp.debug.rounding_report(fun, jnp.bfloat16)(WEIGHTS[0], X[0])
    assert report.value_error > 0
    assert any(np.isnan(row.gradient_error) for row in report.rows)
    assert "has no derivative" in str(report)


def test_a_shard_map_is_one_operation_of_which_several_results_round():
    shard = jax.sharding.PartitionSpec("data")
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(lambda x: (jnp.sin(x), jnp.cos(x)), mesh=mesh, in_specs=shard, out_specs=(shard, shard))
    product = lambda w, x: jnp.mean(sum(mapped((x @ w).astype(jnp.bfloat16))).astype(jnp.float32))
    report = jamp.debug.rounding_report(product, jnp.bfloat16)(WEIGHTS[0], X[0])
    assert {"shard_map", "dot_general"} <= {row.operation for row in report.rows}


@pytest.mark.slow
@pytest.mark.promotes("x64 makes Python numbers float64")
def test_the_reference_is_float64_if_x64_is_on():
    with jax.enable_x64(True):
        w, x = (jnp.float32(v) for v in (WEIGHTS[0], X[0]))
        report = jamp.debug.rounding_report(lambda w, x: jnp.mean(jnp.sin(x @ w)), jnp.bfloat16)(w, x)
    assert 1e-5 < report.gradient_error < 1e-1


@pytest.mark.slow
def test_equal_segments_are_compiled_once(caplog):
    def deep(layers, w, x):
        for i in range(layers):
            with jax.named_scope(f"h_{i}"):
                x = jnp.tanh(x @ w[0] + x)
        return jnp.mean(x**2)

    compiled = []
    for layers in (4, 12):
        caplog.clear()
        with jax.log_compiles():
            jamp.debug.rounding_report(functools.partial(deep, layers), jnp.bfloat16)(WEIGHTS, X)
        compiled.append(sum("XLA compilation" in text for text in caplog.messages))
    assert compiled[0] >= compiled[1]


def test_a_mask_of_minus_infinity_does_not_overflow():
    def attend(weights, x, y):
        scores = (x @ weights[0]) @ jnp.swapaxes(x @ weights[1], 1, 2)
        scores = jnp.where(jnp.tril(jnp.ones((8, 8), bool)), scores, -jnp.inf)
        return jnp.mean((jax.nn.softmax(scores) @ x @ weights[2] - y) ** 2)

    report = jamp.debug.rounding_report(attend, jnp.bfloat16)(WEIGHTS, X, Y)
    assert not any(row.overflows for row in report.rows)
    assert all(np.isfinite(row.own_error) for row in report.rows)


def test_the_table_fits_100_columns_and_says_what_to_do_next():
    def deep(w, x):
        for name in "abcdefgh":
            with jax.named_scope(f"h_{name}/a_layer_with_quite_a_long_name"), jax.named_scope("and_parts/in"):
                x = jnp.tanh(x @ w[0] + x)
        return jnp.mean(x**2)

    report = jamp.debug.rounding_report(deep, jnp.bfloat16)(WEIGHTS, X)
    lines = str(report).splitlines()
    assert lines[0].startswith("rounding to bfloat16: error of the value ")
    assert max(map(len, lines)) <= 100
    assert all(any(f"  h_{name}.../in  " in line for line in lines) for name in "abc")
    *_, rest, last = lines
    assert rest == f"... and {len(report.rows) - 12} rows with less damage, in `.rows`"
    assert last == (
        f"next: report.rules(error={report.gradient_error / 10:.0e}) finds rules for autocast that bound the error of "
        "the gradients"
    )


def summed(layers, w, x):
    for i in range(layers):
        with jax.named_scope(f"h_{i}"):
            x = x + jnp.tanh(x @ w[i % 4]) / 8
            x = x.astype(jnp.bfloat16).astype(jnp.float32)  # planted
    return jnp.mean((x @ w[0]) ** 2)


@pytest.mark.slow
def test_equal_layers_are_one_row_with_the_error_of_all():
    """The sum of the residual stream, in 16 bit by hand: each layer's cast is small, and together they are first."""
    first, *rest = jamp.debug.rounding_report(functools.partial(summed, 8), jnp.bfloat16)(WEIGHTS, X).rows
    assert (first.operation, first.scope[-3:], first.worst) == ("convert_element_type", "h_*", "")
    assert all(row.damage < 0.8 * first.damage for row in rest)
    assert first.gradient_error == pytest.approx(first.measured[1], rel=0.7)
    assert len({(row.operation, row.source, row.backward, row.gradient_of) for row in (first, *rest)}) == len(rest) + 1


@pytest.mark.slow
def test_the_one_layer_that_does_most_damage_is_named():
    def fun(w, x):
        for i in range(6):
            with jax.named_scope(f"h_{i}"):
                x = jnp.tanh((x + (300 if i == 4 else 0)) @ (w[0] - w[0].mean(0)))
        return jnp.mean(x**2)

    report = jamp.debug.rounding_report(fun, jnp.bfloat16)(WEIGHTS, X)
    assert (report.rows[0].scope, report.rows[0].worst) == ("h_*", "h_4")
    assert "h_*, most in h_4" in str(report)


def cumulative(w, x):
    h = jnp.cumsum(jnp.abs(x @ w).astype(jnp.bfloat16), 0).astype(jnp.float32)  # planted
    return jnp.mean(jnp.sin(h))


@pytest.mark.slow
def test_a_row_names_the_operation_that_rounds_and_not_the_product_beside_it():
    w, x = jax.random.normal(KEYS[0], (32, 8)) / 6, jax.random.normal(KEYS[1], (256, 32))
    report = jamp.debug.rounding_report(cumulative, jnp.bfloat16)(w, x)
    assert report.rows[0].operation == "cumsum"
    with pytest.raises(ValueError, match=r"other operations round .*cumsum at test_rounding_report\.py:\d+"):
        report.rules(error=1e-2)
    assert "itself casts to 16 bit, no rule helps" in str(report)


@pytest.mark.slow
def test_rows_are_sorted_by_the_error_that_rules_bound():
    def fun(w, x):
        with jax.named_scope("constant"):  # a large error of the value, and none of the gradients
            value = jnp.mean(jnp.tanh((x + 300) @ lax.stop_gradient(w[0] - w[0].mean(0))))
        return value + jnp.mean(jnp.tanh(x @ w[1]) ** 2)

    report = jamp.debug.rounding_report(fun, jnp.bfloat16)(WEIGHTS, X)
    (constant,) = (row for row in report.rows if row.scope == "constant" and row.flops)
    assert constant.value_error > 10 * max(row.damage for row in report.rows if row is not constant)
    assert constant is report.rows[-1]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_numbers_are_rounded_as_a_cast_does(dtype):
    from jamp.debug._run_steps import round_to

    rng, wide = np.random.default_rng(0), np.float64 if dtype == jnp.float32 else np.float32
    x = wide(rng.normal(size=20_000) * 2.0 ** rng.integers(-30, 20, 20_000))  # subnormal and too large ones, too
    ties = wide(2.0**-24) * np.arange(0, 64, dtype=wide) / 2
    ends = [0, -0.0, np.inf, -np.inf, 65519, 65520, *[1e39, -1e300] * (wide is np.float64)]
    x = np.concatenate([x, ties, wide(ends)])
    with np.errstate(over="ignore"):
        expected = x.astype(dtype).astype(wide)
    with jax.enable_x64(wide is np.float64):
        found = np.asarray(round_to(jnp.asarray(x), np.dtype(dtype)))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_the_gradients_are_those_of_the_first_argument_that_holds_floating_arrays():
    loss = lambda config, w, x: config["times"] * jnp.mean((x @ w) ** 2)
    report = jamp.debug.rounding_report(loss, jnp.bfloat16)({"times": 2}, WEIGHTS[0], X)
    assert report.gradient_error > 0
