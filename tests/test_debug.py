"""jamp.debug: planted infs and NaNs, each found by primitive, line, cause and path; reports on trees; underflow."""

import functools
import inspect
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from steps import OVERWRITTEN, stepper

import jamp
from jamp.debug import find_nonfinite, nonfinite_report, underflow_report

F16, F32, F8, INF, NAN = jnp.float16, jnp.float32, jnp.float8_e4m3fn, jnp.inf, jnp.nan
CASES, cast = [], "convert_element_type"


def plant(primitive, cause, fun, *args, inside="", grad=False, wrap=lambda fun: fun):
    """A function of which one line gives inf or NaN first: the one with the comment "planted", or that of a lambda."""
    CASES.append(pytest.param((primitive, cause, fun, wrap, args, inside, grad), id=f"{primitive}: {cause}"))


plant("exp", "exp overflow in float16: value would be 1.6e5, float16 ends at 65504", lambda x: jnp.exp(x), F16([1, 12]))
plant("exp", "exp overflow in float32: value would be 2.7e43, float32 ends at 3.4e38", lambda x: jnp.exp(x), F32(100))
plant(cast, "overflow in float16: value would be 7.1e4", lambda x: x.astype(F16), F32([1, 7.1e4]))
plant(cast, "in float8_e4m3fn: value would be 1e3, float8_e4m3fn ends at 448", lambda x: x.astype(F8), F32(1000))
plant("dot_general", "overflow in float16: value would be 8e4", lambda x: x @ x.T - jnp.inf, jnp.full((2, 2), 200, F16))
plant("add", "overflow in bfloat16: value would be 6e38, bfloat16 ends at 3.4e38", lambda x: x + x, jnp.bfloat16(3e38))
plant("div", "nan from 0/0", lambda x: x / x.sum(), jnp.zeros(2))
plant("div", "division by zero: 2/0, and in float16 all below 3e-8 is 0", lambda x: x / (0 * x + 1e-8), F16([2, 2]))
plant("log", "log of a negative number: log(-3)", lambda x: jnp.log(x), F32([1, -3]))
plant("log", "log of 0", lambda p: -jnp.mean(jnp.log(p)), jnp.eye(2))
plant("sqrt", "sqrt of a negative number: sqrt(-1)", lambda x: jnp.sqrt(x.min() - 2), F32([4, 1]))
plant("rsqrt", "division by zero: 1/sqrt(0)", lambda x: x * lax.rsqrt(jnp.mean((x - x.mean()) ** 2)), jnp.ones(2))
plant("pow", "a negative number to a fractional power: (-8)**0.25", lambda x, y: x**y, F32(-8), F32(0.25))
plant("integer_pow", "division by zero: 0**-2", lambda x: x**-2, F32(0))
plant("acos", "acos of a number outside [-1, 1]: 1.5", lambda x: jnp.arccos(x), F32(1.5))
plant("atanh", "atanh of a number that is not between -1 and 1: 1", lambda x: jnp.arctanh(x), F32(1))
plant("sub", "nan from inf - inf", lambda x: jax.nn.softmax(jnp.where(x > 9, x, -jnp.inf)), jnp.zeros((2, 2)))
plant("log", "log of 0", lambda x: jax.checkpoint(jnp.log)(x), F32(0), inside="remat(log)")
plant("div", "division by zero: 0.5/0", lambda x: jnp.where(x > 0, jnp.sqrt(x), 0).sum(), F32([0, 1]), grad=True)


def scan_forward(x):
    step = lambda c, scale: (c * scale, c)  # planted
    return lax.scan(step, x, F16([128, 256, 1, 1]))[1]


@jax.jit
def loop(x):
    square = lambda x: x * x  # planted
    grow = lambda state: (lax.cond(state[1] >= 0, square, lambda x: x, state[0]), state[1] + 1)
    return lax.while_loop(lambda state: state[1] < 3, grow, (x, 0))[0]


def custom_jvp(x):
    @jax.custom_jvp
    def own(x):
        return jnp.log(x)  # planted

    own.defjvp(lambda primals, tangents: (own(*primals), tangents[0]))
    return own(x)


def custom_vjp(x):
    own = jax.custom_vjp(lambda x: 2 * x)
    own.defvjp(lambda x: (own(x), x), lambda x, g: (g / (x - x),))
    return own(x).sum()  # planted: JAX gives the operations of the rule the line of the call


def forward_rule(x):
    def forward(x):
        return own(x), jnp.log(x)  # planted

    own = jax.custom_vjp(lambda x: 2 * x)
    own.defvjp(forward, lambda kept, g: (g * kept,), optimize_remat=True)
    return own(x)


def gradient_of_scan(x):
    step = lambda c, w: (c * w, None)  # planted
    return lax.scan(step, x / 1000, F16([300, 400]))[0].astype(F32)[0], {"aux": x}


scan_backward = lambda x: lax.scan(lambda c, x: (c + 1, jnp.exp(x + c)), x, F32([0, 0, 99, 0, 0]), reverse=True)
read_after_a_cast = lambda x: ((y := x + 0) @ y.T).sum()
scaled_loss = lambda x: 2 * x.astype(F32).sum()
in_float16 = functools.partial(jamp.autocast, compute_dtype=jnp.float16)
half = "overflow in float16: value would be"
scaled = lambda fun: jamp.value_and_grad(fun, jamp.StaticLossScale(2.0**16).init())
plant("gather", "an index is out of bounds", lambda x, i: jnp.take(x, i), F32([1, 1]), np.int32(7), inside="jit(_take)")
plant("cholesky", "not positive definite", lambda x: jnp.linalg.cholesky(x), -jnp.eye(2), inside="jit(cholesky)")
plant("cumsum", f"{half} 6.6e4", lambda x: jnp.cumsum(x), F16([60000, 6000]), inside="jit(cumsum)")
plant("mul", f"{half} 9.8e4", scan_forward, F16(3), inside="scan, iteration 1 of 4")
plant("exp", "exp overflow", scan_backward, F32(0), inside="scan, iteration 2 of 5")
inside = "jit(loop) > while, iteration 1 > cond, branch 1"
plant("mul", "overflow in float32: value would be 1e40", loop, F32(1e10), inside=inside)
plant("log", "log of a negative number", custom_jvp, F32(-1), inside="custom_jvp(own)")
plant("div", "division by zero: 1/0", custom_vjp, F32([0, 1]), grad=True)
plant("log", "log of a negative number", forward_rule, F32(-1), grad=True, inside="custom_vjp(forward)")
plant("mul", f"{half} 1.2e5", gradient_of_scan, F16([200, 200]), grad=True, inside="scan, iteration 0 of 2")
plant("dot_general", f"{half} 8e4", read_after_a_cast, jnp.zeros((2, 16)).at[:, :2].set(200.0), wrap=in_float16)
plant(cast, f"{half} 1e5", read_after_a_cast, jnp.full((2, 16), 1e5), wrap=in_float16)
plant(cast, f"{half} 1.3e5", scaled_loss, jnp.ones(2, F16), wrap=scaled)


@pytest.mark.slow_after(20)
@pytest.mark.parametrize("case", CASES)
def test_a_planted_inf_or_nan_is_found_by_primitive_line_cause_and_path(case):
    primitive, cause, fun, wrap, args, inside, grad = case
    search = find_nonfinite(wrap(fun), grad=grad)(*args)
    found, text, (lines, first) = search.finding, str(search), inspect.getsourcelines(fun)
    line = first + next((i for i, line in enumerate(lines) if "# planted" in line), 0)
    assert f"test_debug.py:{line} (" in found.source
    assert (found.primitive, bool(search), " > ".join(found.path)) == (primitive, True, inside)
    assert cause in found.cause
    assert len(text.splitlines()) <= 12
    assert max(map(len, text.splitlines())) <= 100
    words = " ".join(text.split())
    parts = primitive, cause, found.source, inside, found.cure, *map(str, found.inputs[:3])
    assert not [x for x in parts if x not in words]
    assert not found.cure.startswith("look at the inputs")  # what is said if no cure is known
    assert wrap is not scaled or "jamp.set_loss_scale" in text
    assert found.backward == (grad or wrap is scaled) == ("in the backward pass of" in text)


def log_density(w, x):
    return jnp.sum(jnp.log(jnp.exp(-((x @ w) ** 2))))


def distances(w, x):
    return jnp.sum(jnp.linalg.norm(x[:, None] * w - x * w, axis=-1))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_the_cause_does_not_depend_on_the_dtype(dtype):
    with jax.enable_x64(True):
        w, x = jnp.ones(3, dtype), jnp.arange(12.0, dtype=dtype).reshape(4, 3)
        search = find_nonfinite(log_density, grad=True)(w, 10 * x)
        assert [(finding.primitive, finding.cause) for finding in search.findings] == [("log", "log of 0")]
        assert search.reaches_results
        search = find_nonfinite(distances, grad=True)(w, x)
        assert [(finding.primitive, finding.backward) for finding in search.findings] == [("div", True)]
        assert search.finding.cause.startswith("division by zero")


def test_nothing_found_is_false_and_says_so_and_inputs_with_inf_or_nan_are_named():
    causal = np.tril(np.ones((2, 2), bool))
    search = find_nonfinite(lambda x: jax.nn.softmax(jnp.where(causal, x, -jnp.inf)), grad=True)(jnp.ones((2, 2)))
    assert (bool(search), search.finding, search.inputs, str(search)[:15]) == (False, None, (), "Found nothing: ")
    search = find_nonfinite(lambda x: x + jnp.inf)(1.0)
    assert (bool(search), "those in the results are constants" in str(search)) == (False, True)
    search = find_nonfinite(lambda x: jnp.where(x > 0, x, jnp.nan).sum())(F32([1, -1]))
    assert (bool(search), search.finding.title) == (True, "select_n gave nan: nan is a constant in the code")
    pair = np.float32([np.nan, 1])
    for fun in (lambda x: x + jnp.nan, lambda x: x * pair, lambda x: x @ pair):  # in the range of float32
        cause = find_nonfinite(fun)(F32([2, -1])).finding.cause
        assert cause == "nan is a constant in the code"
    cause = find_nonfinite(lambda x: x @ F32([1, 1, -1]))(F32([3e38] * 3)).finding.cause
    assert "overflow in float32 on the way" in cause
    search = find_nonfinite(lambda x: (x - x.mean()) / jnp.std(x, ddof=1))(F32([1]))  # JAX gives its own NaN there too
    assert (bool(search), search.finding.title) == (True, "div gave nan: nan from 0/0")
    found = find_nonfinite(lambda x, y: x / y)(F32([-3, 5]), F32([0, 2])).finding
    assert [str(x) for x in found.inputs] == ["float32[2] from -3 to 5", "float32[2] from 0 to 2"]
    assert str(found.outputs[0]) == "float32[2] all 2.5, 1 inf, first at [0]"
    fun = lambda params, x: x @ params["w"] * 2
    search = find_nonfinite(fun)({"w": F32([[1, np.nan], [np.inf, 1]]), "b": jnp.zeros(2)}, jnp.ones((2, 2)))
    assert (bool(search), search.finding, "the inputs hold them" in str(search)) == (True, None, True)
    assert "params['w'] holds float32[2, 2] all 1, 1 inf, 1 nan, first at [0, 1]" in str(search)
    assert "holds float32[] nothing finite, 1 nan" in str(find_nonfinite(jnp.add)(F32(1), F32(jnp.nan)))
    in_the_batch = find_nonfinite(lambda w, x: (w + x).sum(), grad=True)(F32([1, 2]), F32([1, np.nan]))
    assert (bool(in_the_batch), "the inputs hold them" in str(in_the_batch)) == (True, True)
    both = find_nonfinite(lambda x: (x - x.max()).sum())(F32([1, jnp.inf]))
    assert (both.finding.cause, "the input x holds" in str(both)) == ("nan from inf - inf", True)


def test_of_several_the_one_that_reaches_the_results_is_named_or_what_is_not_entered():
    mesh, spec = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)), jax.sharding.PartitionSpec("x")
    hidden, poisons = lambda x: jnp.where(x > 0, jnp.log(x), 0), lambda x: jnp.where(x > 0, 0, jnp.exp(99 * x)).sum()
    for fun, grad, primitive, reaches_results in (
        (lambda x: hidden(x) + jnp.exp(x * 0 + 99), False, "exp", True),
        (lambda x: jnp.log(x) * 0 + jnp.exp(x + 99), False, "log", True),  # the earlier one
        (poisons, True, "exp", True),  # forward, and only the gradient shows it
        (jax.shard_map(lambda x: jnp.log(x), mesh=mesh, in_specs=spec, out_specs=spec), False, "shard_map", True),
        (hidden, False, "log", False),
    ):
        search = find_nonfinite(fun, grad=grad)(F32([0, 1]))
        found = search.finding.primitive, search.finding.backward, search.reaches_results
        assert found == (primitive, False, reaches_results)
    assert "no result shows it" in str(search)


def test_values_are_those_of_the_function_through_every_construct():
    """Loops, branches, keys and integers: the evaluation is exact, so that what it finds is what happens."""
    results = []

    def fun(key, x, n):
        noise = jax.random.bits(key, x.shape).astype(F32) / 2.0**32
        y, rows = lax.scan(lambda c, r: (c + r, (c * 2, n)), x[0], noise, reverse=True)
        y = lax.fori_loop(0, n, lambda i, y: lax.switch(i % 3, [jnp.sin, jnp.cos, jax.nn.relu], y), y)
        out = lax.scan(lambda c, _: (c, c), y, None, length=0)[1], rows, jax.checkpoint(jnp.tanh)(y)
        jax.debug.callback(lambda *x: results.append(x), out)
        return out

    args = jax.random.key(0), jnp.ones((2, 2)), np.int32(5)
    assert not find_nonfinite(fun)(*args)
    fun(*args)
    jax.effects_barrier()
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_a_train_step_with_its_skip_can_be_searched():
    tx, params = jamp.loss_scaled(optax.sgd(0.1)), F32([1.0, 0.0])
    step = lambda p, state: stepper(tx)(p, state, jamp.grad(lambda p: jnp.sqrt(p).sum(), state)(p))
    search = find_nonfinite(step)(params, tx.init(params))
    assert (search.finding.cause, search.reaches_results) == ("division by zero: 0.5/0", False)


TREE = {
    "block": [F32([[1, NAN, NAN], [INF, -INF, -INF]]), F16([1, 2]), jnp.int32([3])],
    "scalar": jnp.bfloat16(-INF),
    "complex": jnp.complex64([1, complex(0, INF), complex(NAN, INF)]),
    "key": jax.random.key(0),
    "empty": jnp.zeros((0, 2)),
    "none": None,
}
TEXT = """\
inf or nan in 3 of 5 leaves
  ['block'][0]: 1 inf, 2 -inf, 2 nan of 6, first at [0, 1]
  ['complex']: 1 inf, 1 nan of 3, first at [1]
  ['scalar']: 1 -inf of 1"""


def test_nonfinite_report_has_paths_counts_and_the_first_index_by_leaf_or_is_false():
    for report in (nonfinite_report(TREE), jax.jit(nonfinite_report)(TREE)):
        assert report.paths == ("['block'][0]", "['block'][1]", "['complex']", "['empty']", "['scalar']")
        counts = [x.tolist() for x in (report.inf, report.neg_inf, report.nan, report.first)]
        assert counts == [[1, 0, 1, 0, 0], [2, 0, 0, 0, 1], [2, 0, 1, 0, 0], [1, -1, 1, -1, 0]]
        assert all(x.dtype == jnp.int32 for x in jax.tree.leaves(report))
        assert (bool(report), str(report)) == (True, TEXT)
    for tree in ({"w": jnp.ones(3)}, {}, jnp.int32(1), [1.0]):
        assert (bool(nonfinite_report(tree)), str(nonfinite_report(tree))) == (False, "all leaves are finite")
    assert "the array: 1 nan of 1" in str(nonfinite_report(NAN))
    step = lambda _, x: (None, nonfinite_report({"x": x}))
    assert jax.lax.scan(step, None, jnp.array([[1.0, NAN], [1.0, 2.0]]))[1].nan.tolist() == [[1], [0]]


def test_underflow_shares_are_those_of_a_cast_to_float16():
    tiny, least, end = 2.0**-24, 2.0**-14, 65504.0  # of float16
    normal = np.random.default_rng(0).normal(size=(9, 99)) * 1e-6
    grads = {"edges": F32([0, tiny / 2, tiny * 0.6, tiny, least * 0.99, least, 1.0]), "normal": F32(normal)}
    for scale, wrap in itertools.product((1.0, 2.0**10, 2.0**-10), (underflow_report, jax.jit(underflow_report))):
        report = wrap({"w": grads}, jamp.StaticLossScale(scale).init())
        for i, x in enumerate(np.abs(x, dtype=np.float64) for x in grads.values()):
            some = x[x != 0]
            for factor, name in ((1.0, "unscaled"), (scale, "scaled")):
                zero = (some * factor).astype(np.float16) == 0
                subnormal = ~zero & (some * factor < least)
                assert getattr(report, f"zero_{name}")[i] == pytest.approx(np.mean(zero))
                assert getattr(report, f"subnormal_{name}")[i] == pytest.approx(np.mean(subnormal))
            assert (report.smallest[i], report.largest[i]) == pytest.approx((some.min(), some.max()))
            assert report.headroom[i] == pytest.approx(np.log2(end / (some.max() * scale)), abs=1e-4)


def test_the_recommended_scale_leaves_four_powers_of_two_or_half_after_an_overflow():
    float16 = [("float16", *case) for case in ((1.0, 11), (2.0**-20, 31), (2.0, 10), (3e4, -3))]
    others = [("bfloat16", 1.0, 0), ("bfloat16", 1e-30, 0), ("float8_e4m3fn", 1.0, 4)]
    for dtype, largest, exponent in float16 + others:
        grads = [F32([largest, largest / 4]), jnp.zeros(3)]
        report = underflow_report(grads, jamp.StaticLossScale(8.0).init(), dtype)
        assert float(report.recommended_loss_scale) == 2.0**exponent
        room = float(jnp.finfo(dtype).max) / (largest * 2.0**exponent * 2**4)
        assert 1 <= room < (math.inf if dtype == "bfloat16" else 2)
    state = jamp.StaticLossScale(3000.0).init()
    report = underflow_report([F32([1e-9, INF]), jnp.full(3, 1e-6)], state)
    assert (report.headroom.tolist()[0], "overflows" in str(report)) == (-INF, True)
    assert float(report.recommended_loss_scale) == 1024.0  # half of 2048, the power of two below
    zeros = underflow_report([jnp.zeros(2), jnp.zeros(3)], state)
    assert (zeros.headroom.tolist(), "all are 0" in str(zeros)) == ([INF, INF], True)
    assert float(zeros.recommended_loss_scale) == 2048.0


def test_underflow_report_leaves_out_other_leaves_and_wants_a_floating_dtype():
    grads = {"w": F32([1e-8, 1e-3]), "n": jnp.int32([1]), "_overwrite_with_gradient": {"s": jnp.ones(1)}}
    grads["nnx"] = OVERWRITTEN(jnp.ones(1))
    tree = {"opt": jamp.StaticLossScale(2.0**10).init()}
    title, header, row, last = str(underflow_report(grads, tree)).splitlines()
    assert last == "next: opt_state = jamp.set_loss_scale(opt_state, report.recommended_loss_scale)"
    assert title == "float16 gradients at loss scale 1024; recommended: 2.09715e+06 (2**21)"
    assert [header.split()[0], *row.split()] == ["leaf", "['w']", "50.0%", "0.0%", "0.0%", "50.0%", "2**16.0"]
    assert str(underflow_report({}, tree)).startswith("float16 gradients")
    with pytest.raises(ValueError, match="floating"):
        underflow_report(jnp.ones(1), tree, jnp.int8)
    with pytest.raises(ValueError, match="loss-scale state"):
        underflow_report(jnp.ones(1), {})


def test_a_report_out_of_scan_or_vmap_adds_its_steps_and_names_the_first():
    batches = jnp.ones((4, 3)).at[1, 2].set(NAN).at[3, 0].set(INF)
    report = lax.scan(lambda c, x: (c, nonfinite_report({"w": x, "b": x[:1] * 0})), 0, batches)[1]
    assert str(jax.vmap(lambda x: nonfinite_report({"w": x, "b": x[:1] * 0}))(batches)) == str(report)
    title, *rows = str(report).splitlines()
    assert title == "inf or nan in 2 of 2 leaves, in 2 of 4 steps"
    assert rows == [
        "  ['b']: 1 nan of 4, first in step [3] at [0]",
        "  ['w']: 1 inf, 1 nan of 12, first in step [1] at [2]",
    ]


@pytest.mark.slow
def test_the_tables_of_many_leaves_are_sorted_cut_and_at_most_100_columns_wide():
    name = lambda i: {"attention": {"self_attention": {"query_projection": {"kernel": np.float32([10.0**-i] * 3)}}}}
    grads = {f"layer_{i:02d}": name(i) for i in range(30)}
    report = underflow_report(grads, jamp.StaticLossScale(2.0).init())
    lines = str(report).splitlines()
    assert (len(lines), max(map(len, lines)) <= 100) == (24, True)
    assert "layer_00" not in str(report)
    assert "100.0%" in lines[2]
    assert lines[-2:] == [
        "... and 10 leaves that lose less",
        "next: opt_state = jamp.set_loss_scale(opt_state, report.recommended_loss_scale)",
    ]
    lines = str(nonfinite_report(jax.tree.map(lambda x: x * np.inf, grads))).splitlines()
    assert (len(lines), max(map(len, lines)) <= 100) == (22, True)
    lost = jamp.debug.lost_updates(jamp.cast_floating(grads, jnp.bfloat16), jax.tree.map(lambda x: x / 1e4, grads))
    lines = str(lost).splitlines()
    assert (len(lines), max(map(len, lines)) <= 100, lines[-1][:5]) == (24, True, "next:")


def test_bfloat16_needs_no_loss_scale_and_an_overflow_asks_for_a_search():
    state = jamp.StaticLossScale(2.0**16).init()
    assert "next: nothing. bfloat16 has the range" in str(underflow_report([F32([1e-6])], state, "bfloat16"))
    assert "next: if gradients overflow" in str(underflow_report([F32([INF])], state))
    assert "next: all gradients are 0" in str(underflow_report([jnp.zeros(2)], state))
    *_, step, ceiling = str(underflow_report([F32([1e-12, 1e-5])], state)).splitlines()
    assert step.startswith("next: opt_state = jamp.set_loss_scale(")
    assert ceiling.strip() == "with max_scale=2**28 or more in the loss scale, whose default is 2**24"
    assert "next: nothing, this loss scale loses nothing" in str(underflow_report([F32([1e-3])], state))


def test_lost_updates_say_nan_and_accept_masked_leaves():
    params = {"a": jnp.ones(4, jnp.bfloat16), "b": jnp.ones(2, jnp.bfloat16), "c": None, "d": jnp.ones(2)}
    updates = {"a": F32([0, 1e-3, 1e-2, 0.1]), "b": optax.MaskedNode(), "c": None, "d": F32([NAN, 1])}
    lost = jax.jit(jamp.debug.lost_updates)(params, updates)
    assert (float(lost["a"]), float(lost["b"]), math.isnan(lost["d"])) == (pytest.approx(1 / 3), 0, True)
    title, header, first, second, last = str(lost).splitlines()
    assert (title, header.split()[0]) == ("rounding loses updates of 1 of 3 leaves; 1 hold inf or nan", "leaf")
    assert (first.split(), second.split()) == (["['d']", "inf", "or", "nan"], ["['a']", "33.3%"])
    assert "find_nonfinite" in last
    assert "jamp.master_params" in str(jamp.debug.lost_updates(params["a"], updates["a"])).splitlines()[-1]
    assert str(jamp.debug.lost_updates(jnp.ones(2), jnp.ones(2))) == "rounding loses updates of 0 of 1 leaves"


def test_inside_a_transformation_a_search_says_to_call_it_outside():
    with pytest.raises(TypeError, match="outside"):
        jax.jit(lambda x: find_nonfinite(jnp.log)(x).operations)(jnp.zeros(3))
    with pytest.raises(TypeError, match="outside"):
        jax.jit(lambda x: jamp.debug.rounding_report(jnp.sum, F16)(x).value_error)(jnp.zeros(3))
    texts = []
    jax.jit(lambda x: texts.append(str(nonfinite_report(x))))(jnp.zeros(3))
    assert texts[0].startswith("NonfiniteReport(")


def test_equal_layers_and_a_second_search_compile_nothing_again(caplog):
    def deep(layers, w, x):
        for _ in range(layers):
            x = jnp.tanh(x @ w + x)
        return jnp.mean(x**2)

    args, sizes = (jnp.eye(5) / 2, jnp.ones((3, 5))), []
    for layers in (2, 8, 8):
        caplog.clear()
        with jax.log_compiles():
            search = find_nonfinite(functools.partial(deep, layers), grad=True)(*args)
        sizes.append((search.operations, sum("XLA compilation" in text for text in caplog.messages)))
    assert sizes[0][0] < sizes[1][0] == sizes[2][0]
    assert sizes[0][1] > sizes[1][1] == sizes[2][1] == 0
