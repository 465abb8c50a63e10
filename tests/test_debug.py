"""jamp.debug: planted infs and NaNs, each found by primitive, line, cause and path; reports on trees; underflow."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jamp
from jamp.debug import find_nonfinite, nonfinite_report, underflow_report

F16, F32, INF, NAN = jnp.float16, jnp.float32, jnp.inf, jnp.nan
CASES = []


def plant(primitive, cause, fun, *args, inside="", grad=False, wrap=lambda fun: fun):
    """A function of which one line gives inf or NaN first: the one with the comment "planted", or that of a lambda."""
    CASES.append(pytest.param(primitive, cause, fun, wrap, args, inside, grad, id=f"{primitive}: {cause}"))


plant("exp", "exp overflow in float16: value would be 1.6e5, float16 ends at 65504", lambda x: jnp.exp(x), F16([1, 12]))
plant("exp", "exp overflow in float32: value would be 2.7e43, float32 ends at 3.4e38", lambda x: jnp.exp(x), F32(100))
plant("convert_element_type", "overflow in float16: value would be 7.1e4", lambda x: x.astype(F16), F32([1, 7.1e4]))
plant(
    "convert_element_type",
    "overflow in float8_e4m3fn: value would be 1e3, float8_e4m3fn ends at 448",
    lambda x: x.astype(jnp.float8_e4m3fn).astype(F32),
    F32(1000),
)
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
    def step(c, scale):
        return c * scale, c  # planted

    return lax.scan(step, x, F16([128, 256, 1, 1]))[1]


def scan_backward(x):
    return lax.scan(lambda c, x: (c + 1, jnp.exp(x + c)), x, F32([0, 0, 99, 0, 0]), reverse=True)  # planted


def loop_in_branch(x):
    @jax.jit
    def f(x):
        square = lambda x: x * x  # planted
        grow = lambda state: (lax.cond(state[1] >= 0, square, lambda x: x, state[0]), state[1] + 1)
        return lax.while_loop(lambda state: state[1] < 3, grow, (x, 0))[0]

    return f(x)


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


def gradient_of_scan(x):
    def step(c, w):
        return c * w, None  # planted

    return lax.scan(step, x / 1000, F16([300, 400]))[0].astype(F32)[0], {"aux": x}


def reads_what_autocast_casts(x):
    y = x + 0
    return (y @ y.T).sum()  # planted


def scaled_loss(x):
    return 2 * x.astype(F32).sum()  # planted


half = "overflow in float16: value would be"
scaled = lambda fun: jamp.value_and_grad(fun, jamp.StaticLossScale(2.0**16).init())
plant("gather", "an index is out of bounds", lambda x, i: jnp.take(x, i), F32([1, 1]), np.int32(7), inside="jit(_take)")
plant("cholesky", "not positive definite", lambda x: jnp.linalg.cholesky(x), -jnp.eye(2), inside="jit(cholesky)")
plant("cumsum", f"{half} 6.6e4", lambda x: jnp.cumsum(x), F16([60000, 6000]), inside="jit(cumsum)")
plant("mul", f"{half} 9.8e4", scan_forward, F16(3), inside="scan, iteration 1 of 4")
plant("exp", "exp overflow", scan_backward, F32(0), inside="scan, iteration 2 of 5")
inside = "jit(f) > while, iteration 1 > cond, branch 1"
plant("mul", "overflow in float32: value would be 1e40", loop_in_branch, F32(1e10), inside=inside)
plant("log", "log of a negative number", custom_jvp, F32(-1), inside="custom_jvp(own)")
plant("div", "division by zero: 1/0", custom_vjp, F32([0, 1]), grad=True)
plant("mul", f"{half} 1.2e5", gradient_of_scan, F16([200, 200]), grad=True, inside="scan, iteration 0 of 2")
plant("dot_general", f"{half} 8e4", reads_what_autocast_casts, jnp.full((2, 2), 200.0), wrap=jamp.autocast)
plant("convert_element_type", f"{half} 1e5", reads_what_autocast_casts, jnp.full((2, 2), 1e5), wrap=jamp.autocast)
plant("convert_element_type", f"{half} 1.3e5", scaled_loss, jnp.ones(2, F16), wrap=scaled)


def line_of(fun):
    lines, first = inspect.getsourcelines(fun)
    return first + next((i for i, line in enumerate(lines) if "# planted" in line), 0)


@pytest.mark.parametrize(("primitive", "cause", "fun", "wrap", "args", "inside", "grad"), CASES)
def test_a_planted_inf_or_nan_is_found_by_primitive_line_cause_and_path(
    primitive, cause, fun, wrap, args, inside, grad
):
    search = find_nonfinite(wrap(fun), grad=grad)(*args)
    found, text = search.finding, str(search)
    assert (found.primitive, bool(search)) == (primitive, True)
    assert f"test_debug.py:{line_of(fun)} (" in found.source
    assert cause in found.cause
    assert inside == " > ".join(found.path)
    assert found.backward == (grad or wrap is scaled)
    assert len(text.splitlines()) <= 10
    for part in (primitive, cause, found.source, inside, *map(str, found.inputs[:3])):
        assert part in text
    assert ("in the backward pass of" in text) == found.backward


def test_the_report_has_dtypes_and_ranges():
    found = find_nonfinite(lambda x, y: x / y)(F32([-3, 5]), F32([0, 2])).finding
    assert [str(x) for x in found.inputs] == ["float32[2] from -3 to 5", "float32[2] from 0 to 2"]
    assert str(found.outputs[0]) == "float32[2] all 2.5, 1 inf, first at [0]"


def test_nothing_found_is_false_and_says_so_also_of_an_inf_in_the_code():
    causal = np.tril(np.ones((2, 2), bool))
    search = find_nonfinite(lambda x: jax.nn.softmax(jnp.where(causal, x, -jnp.inf)), grad=True)(jnp.ones((2, 2)))
    assert (bool(search), search.finding, search.inputs) == (False, None, ())
    assert str(search).startswith("Found nothing: ")
    search = find_nonfinite(lambda x: x + jnp.inf)(1.0)
    assert not search
    assert "those in the results are in the code" in str(search)


def test_inputs_that_hold_inf_or_nan_are_named():
    fun = lambda params, x: x @ params["w"] * 2
    search = find_nonfinite(fun)({"w": F32([[1, np.nan], [np.inf, 1]]), "b": jnp.zeros(2)}, jnp.ones((2, 2)))
    assert (bool(search), search.finding) == (True, None)
    assert "the inputs hold them" in str(search)
    assert "params['w'] holds float32[2, 2] all 1, 1 inf, 1 nan, first at [0, 1]" in str(search)
    search = find_nonfinite(jnp.add)(F32(1), F32(jnp.nan))
    assert "holds float32[] nothing finite, 1 nan" in str(search)
    both = find_nonfinite(lambda x: (x - x.max()).sum())(F32([1, jnp.inf]))
    assert both.finding.cause == "nan from inf - inf"
    assert "the input x holds" in str(both)


def test_of_several_the_one_that_reaches_the_results_is_named():
    hidden = lambda x: jnp.where(x > 0, jnp.log(x), 0)
    search = find_nonfinite(lambda x: hidden(x) + jnp.exp(x * 0 + 99))(F32([0, 1]))
    assert (search.finding.primitive, search.reaches_results) == ("exp", True)
    both = find_nonfinite(lambda x: jnp.log(x) * 0 + jnp.exp(x + 99))(F32([0, 1]))
    assert both.finding.primitive == "log"  # the earlier one
    search = find_nonfinite(hidden)(F32([0, 1]))
    assert (search.finding.primitive, search.reaches_results) == ("log", False)
    assert "no result shows it" in str(search)


def test_a_forward_overflow_that_poisons_only_the_gradient_is_not_a_backward_finding():
    search = find_nonfinite(lambda x: jnp.where(x < 50, jnp.exp(x), 0).sum(), grad=True)(F32([1, 99]))
    assert (search.finding.primitive, search.finding.backward, search.reaches_results) == ("exp", False, True)


def test_what_it_does_not_enter_is_named_as_a_whole():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    fun = jax.shard_map(lambda x: jnp.log(x), mesh=mesh, in_specs=spec, out_specs=spec)
    assert find_nonfinite(fun)(jnp.zeros(2)).finding.primitive == "shard_map"


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
    tx, params = jamp.loss_scaled(optax.sgd(0.1)), {"w": F32([1.0, 0.0])}

    def step(params, state):
        loss, grads = jamp.value_and_grad(lambda p: jnp.sqrt(p["w"]).sum(), state)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    search = find_nonfinite(step)(params, tx.init(params))
    assert (search.finding.cause, search.reaches_results) == ("division by zero: 0.5/0", False)


# Reports on trees

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


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_nonfinite_report_has_paths_counts_and_the_first_index_by_leaf(wrap):
    report = wrap(nonfinite_report)(TREE)
    assert report.paths == ("['block'][0]", "['block'][1]", "['complex']", "['empty']", "['scalar']")
    counts = [x.tolist() for x in (report.inf, report.neg_inf, report.nan, report.first)]
    assert counts == [[1, 0, 1, 0, 0], [2, 0, 0, 0, 1], [2, 0, 1, 0, 0], [1, -1, 1, -1, 0]]
    assert all(x.dtype == jnp.int32 for x in jax.tree.leaves(report))
    assert (bool(report), str(report)) == (True, TEXT)


def test_nonfinite_report_of_a_finite_tree_is_false_and_scan_carries_one():
    for tree in ({"w": jnp.ones(3)}, {}, jnp.int32(1), [1.0]):
        assert (bool(nonfinite_report(tree)), str(nonfinite_report(tree))) == (False, "all leaves are finite")
    assert "the array: 1 nan of 1" in str(nonfinite_report(NAN))
    step = lambda _, x: (None, nonfinite_report({"x": x}))
    assert jax.lax.scan(step, None, jnp.array([[1.0, NAN], [1.0, 2.0]]))[1].nan.tolist() == [[1], [0]]


TINY, NORMAL, END = 2.0**-24, 2.0**-14, 65504.0  # of float16
EDGES = [0, TINY / 2, TINY * 0.6, TINY, NORMAL * 0.99, NORMAL, 1.0]


def test_underflow_shares_are_those_of_a_cast_to_float16():
    normal = np.random.default_rng(0).normal(size=(9, 99)) * 1e-6
    grads, jitted = {"edges": F32(EDGES), "normal": F32(normal)}, jax.jit(underflow_report)
    runs = [(scale, wrap) for scale in (1.0, 2.0**10, 2.0**-10) for wrap in (underflow_report, jitted)]
    for scale, wrap in runs:
        report = wrap({"w": grads}, jamp.StaticLossScale(scale).init())
        for i, x in enumerate(np.asarray(x, np.float64) for x in grads.values()):
            some = x[x != 0]
            unscaled, scaled = (1.0, "unscaled"), (scale, "scaled")
            for factor, name in (unscaled, scaled):
                cast = abs((some * factor).astype(np.float16))
                assert getattr(report, f"zero_{name}")[i] == pytest.approx(np.mean(cast == 0))
                share = np.mean((cast != 0) & (abs(some * factor) < NORMAL))
                assert getattr(report, f"subnormal_{name}")[i] == pytest.approx(share)
            assert report.smallest[i] == pytest.approx(abs(some).min())
            assert report.largest[i] == pytest.approx(abs(some).max())
            assert report.headroom[i] == pytest.approx(np.log2(END / (abs(some).max() * scale)), abs=1e-4)


def test_the_recommended_scale_is_the_largest_power_of_two_that_leaves_four():
    float16 = [("float16", *case) for case in ((1.0, 11), (2.0**-20, 31), (2.0, 10), (3e4, -3))]
    others = [("bfloat16", 1.0, 123), ("bfloat16", 1e-30, 127), ("float8_e4m3fn", 1.0, 4)]
    for dtype, largest, exponent in float16 + others:
        grads = [F32([largest, largest / 4]), jnp.zeros(3)]
        report = underflow_report(grads, jamp.StaticLossScale(8.0).init(), dtype)
        assert float(report.recommended_loss_scale) == 2.0**exponent
        end = float(jnp.finfo(dtype).max)
        assert largest * 2.0**exponent * 2**4 <= end
        assert largest * 2.0 ** (exponent + 1) * 2**4 > end or exponent == 127


def test_gradients_that_overflow_ask_for_half_the_scale_and_zeros_for_the_same():
    state = jamp.StaticLossScale(3000.0).init()
    report = underflow_report([F32([1e-9, INF]), jnp.full(3, 1e-6)], state)
    assert report.headroom.tolist()[0] == -INF
    assert float(report.recommended_loss_scale) == 1024.0  # half of 2048, the power of two below
    zeros = underflow_report([jnp.zeros(2), jnp.zeros(3)], state)
    assert (zeros.headroom.tolist(), float(zeros.recommended_loss_scale)) == ([INF, INF], 2048.0)
    assert "overflows" in str(report)
    assert "all are 0" in str(zeros)


def test_underflow_report_leaves_out_other_leaves_and_wants_a_floating_dtype():
    grads = {"w": F32([1e-8, 1e-3]), "n": jnp.int32([1]), "_overwrite_with_gradient": {"s": jnp.ones(1)}}
    tree = {"opt": jamp.StaticLossScale(2.0**10).init()}
    title, header, *rows = str(underflow_report(grads, tree)).splitlines()
    assert title == "float16 gradients at loss scale 1024; recommended: 2.09715e+06 (2**21)"
    assert header.split()[0] == "leaf"
    assert [row.split() for row in rows] == [["['w']", "50.0%", "0.0%", "0.0%", "50.0%", "2**16.0"]]
    assert str(underflow_report({}, tree)).startswith("float16 gradients")
    with pytest.raises(ValueError, match=r"dtype must be floating, such as jnp\.float16, got dtype='int8'"):
        underflow_report(jnp.ones(1), tree, jnp.int8)
    with pytest.raises(ValueError, match="loss-scale state"):
        underflow_report(jnp.ones(1), {})
