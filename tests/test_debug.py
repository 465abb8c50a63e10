"""jamp.debug.find_nonfinite: planted infs and nans, each found by primitive, line, cause and path."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jamp
import jamp.debug
from jamp.debug import find_nonfinite

F16, F32 = jnp.float16, jnp.float32
CASES = []


def plant(primitive, cause, *args, inside="", grad=False, wrap=lambda fun: fun):
    """A function whose line with the comment "planted" gives inf or nan first."""

    def register(fun):
        CASES.append(pytest.param(fun, wrap(fun), args, primitive, cause, inside, grad, id=fun.__name__))
        return fun

    return register


@plant("exp", "exp overflow in float16: value would be 1.6e5, float16 ends at 65504", F16([1, 12]))
def exp_in_float16(x):
    y = x + 0
    return jnp.exp(y)  # planted


@plant("exp", "exp overflow in float32: value would be 2.7e43, float32 ends at 3.4e38", F32(100))
def exp_in_float32(x):
    return jnp.exp(x).sum()  # planted


@plant("convert_element_type", "overflow in float16: value would be 7.1e4, float16 ends at 65504", F32([1, 7.1e4]))
def cast(x):
    return x.astype(F16)  # planted


@plant("convert_element_type", "overflow in float8_e4m3fn: value would be 1e3, float8_e4m3fn ends at 448", F32(1000))
def cast_to_float8(x):
    return x.astype(jnp.float8_e4m3fn).astype(F32)  # planted


@plant("dot_general", "overflow in float16: value would be 9e4", jnp.full((2, 9), 100, F16))
def product(x):
    scores = x @ x.T  # planted
    return jax.nn.softmax(scores)


@plant("cumsum", "overflow in float16: value would be 6.6e4", jnp.full(100, 1000, F16), inside="jit(cumsum)")
def sum_in_float16(x):
    return jnp.cumsum(x)[-1]  # planted


@plant("add", "overflow in bfloat16: value would be 6e38, bfloat16 ends at 3.4e38", jnp.bfloat16(3e38))
def sum_in_bfloat16(x):
    return x + x  # planted


@plant("div", "nan from 0/0", jnp.zeros(3))
def normalise(x):
    return x / x.sum()  # planted


@plant("div", "division by zero: 2/0, and in float16 all below 6e-8 is 0", F16([2.0]))
def epsilon_too_small_for_float16(x):
    return x / (0 * x + 1e-8)  # planted


@plant("log", "log of a negative number: log(-3)", F32([1, -3]))
def log_of_negative(x):
    return jnp.log(x)  # planted


@plant("log", "log of 0", jnp.eye(2))
def cross_entropy_of_hard_probabilities(p):
    return -jnp.mean(jnp.log(p))  # planted


@plant("sqrt", "sqrt of a negative number: sqrt(-1)", F32([4, 1]))
def variance_by_difference(x):
    return jnp.sqrt(x.min() - 2)  # planted


@plant("rsqrt", "division by zero: 1/sqrt(0)", jnp.ones((2, 3)))
def norm_without_epsilon(x):
    wide = x - x.mean(-1, keepdims=True)
    return wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True))  # planted


@plant("pow", "a negative number to a fractional power: (-8)**0.25", F32(-8), F32(0.25))
def power(x, y):
    return x**y  # planted


@plant("integer_pow", "division by zero: 0**-2", F32(0))
def integer_power(x):
    return x**-2  # planted


@plant("acos", "acos of a number outside [-1, 1]: 1.5", F32(1.5))
def angle(x):
    return jnp.arccos(x)  # planted


@plant("atanh", "atanh of a number that is not between -1 and 1: 1", F32(1))
def inverse_tanh(x):
    return jnp.arctanh(x)  # planted


@plant("sub", "nan from inf - inf", jnp.zeros((2, 3)), np.zeros((2, 3), bool))
def softmax_of_a_row_that_is_all_masked(x, mask):
    return jax.nn.softmax(jnp.where(mask, x, -jnp.inf))  # planted


@plant("gather", "an index is out of bounds", jnp.ones(3), np.int32(7), inside="jit(_take)")
def index_out_of_bounds(x, i):
    return jnp.take(x, i)  # planted


@plant("cholesky", "not positive definite", -jnp.eye(2), inside="jit(cholesky)")
def decomposition(x):
    return jnp.linalg.cholesky(x)  # planted


@plant("mul", "overflow in float16: value would be 9.8e4", F16(3), inside="scan, iteration 1 of 4")
def in_a_scan(x):
    def step(c, scale):
        return c * scale, c  # planted

    return lax.scan(step, x, F16([128, 256, 1, 1]))[1]


@plant("exp", "exp overflow", F32(0), inside="scan, iteration 2 of 5")
def in_a_scan_that_runs_backwards(x):
    xs = F32([0, 0, 99, 0, 0])
    return lax.scan(lambda c, x: (c + 1, jnp.exp(x + c)), x, xs, reverse=True)  # planted


@plant(
    "mul", "overflow in float32: value would be 1e40", F32(1e10), inside="jit(f) > while, iteration 1 > cond, branch 1"
)
def in_a_loop_in_a_branch(x):
    @jax.jit
    def f(x):
        square = lambda x: x * x  # planted
        grow = lambda state: (lax.cond(state[1] >= 0, square, lambda x: x, state[0]), state[1] + 1)
        return lax.while_loop(lambda state: state[1] < 3, grow, (x, 0))[0]

    return f(x)


@plant("log", "log of 0", F32(0), inside="remat(f)")
def in_remat(x):
    @jax.checkpoint
    def f(x):
        return jnp.log(x)  # planted

    return f(x)


@plant("log", "log of a negative number", F32(-1), inside="custom_jvp(own)")
def in_custom_jvp(x):
    @jax.custom_jvp
    def own(x):
        return jnp.log(x)  # planted

    own.defjvp(lambda primals, tangents: (own(*primals), tangents[0]))
    return own(x)


@plant("div", "division by zero: 1/0", jnp.ones(3), grad=True)
def in_the_backward_rule_of_custom_vjp(x):
    @jax.custom_vjp
    def own(x):
        return 2 * x

    def backward(x, g):
        return (g / (x - x),)

    own.defvjp(lambda x: (own(x), x), backward)
    return own(x).sum()  # planted: JAX gives the operations of the rule the line of the call


@plant("div", "division by zero: 0.5/0", F32([0, 1]), grad=True)
def gradient_of_a_masked_sqrt(x):
    return jnp.where(x > 0, jnp.sqrt(x), 0).sum()  # planted


@plant("mul", "overflow in float16: value would be 1.2e5", F16([200]), grad=True, inside="scan, iteration 0 of 2")
def backward_through_a_scan(x):
    def step(c, w):
        return c * w, None  # planted

    return lax.scan(step, x / 1000, F16([300, 400]))[0].astype(F32)[0], {"aux": x}


@plant("dot_general", "overflow in float16: value would be 9e4", jnp.full((1, 9), 100.0), wrap=jamp.autocast)
def product_under_autocast(x):
    return (x @ x.T).sum()  # planted


@plant("convert_element_type", "overflow in float16: value would be 1e5", jnp.full((1, 2), 1e5), wrap=jamp.autocast)
def what_autocast_casts(x):
    y = x + 0
    return (y @ y.T).sum()  # planted


def scaled(fun):
    return jamp.value_and_grad(fun, jamp.StaticLossScale(2.0**16).init())


@plant("convert_element_type", "overflow in float16: value would be 1.3e5", jnp.ones(2, F16), wrap=scaled)
def backward_under_a_loss_scale(x):
    return 2 * x.astype(F32).sum()  # planted


def line_of(fun):
    lines, first = inspect.getsourcelines(fun)
    (offset,) = (i for i, line in enumerate(lines) if "# planted" in line)
    return first + offset


@pytest.mark.parametrize(("source", "fun", "args", "primitive", "cause", "inside", "grad"), CASES)
def test_a_planted_inf_or_nan_is_found_by_primitive_line_cause_and_path(
    source, fun, args, primitive, cause, inside, grad
):
    search = find_nonfinite(fun, grad=grad)(*args)
    text = str(search)
    assert (search.finding.primitive, bool(search)) == (primitive, True)
    assert f"test_debug.py:{line_of(source)} (" in search.finding.source
    assert cause in search.finding.cause
    assert inside == " > ".join(search.finding.path)
    assert search.finding.backward == (grad or source is backward_under_a_loss_scale)
    assert len(text.splitlines()) <= 10
    for part in (primitive, cause, search.finding.source, inside, *map(str, search.finding.inputs[:3])):
        assert part in text
    assert ("in the backward pass of" in text) == search.finding.backward


def test_the_report_has_dtypes_and_ranges():
    found = find_nonfinite(lambda x, y: x / y)(F32([[-3, 5]]), F32([[0, 2]])).finding
    assert [str(x) for x in found.inputs] == ["float32[1, 2] from -3 to 5", "float32[1, 2] from 0 to 2"]
    assert str(found.outputs[0]) == "float32[1, 2] all 2.5, 1 inf, first at [0, 0]"


def test_nothing_found_is_false_and_says_so():
    causal = jnp.tril(jnp.ones((3, 3), bool))
    attend = lambda x: jax.nn.softmax(jnp.where(causal, x @ x.T, -jnp.inf)) @ x
    search = find_nonfinite(attend, grad=True)(jnp.ones((3, 2)))
    assert not search
    assert (search.finding, search.inputs) == (None, ())
    assert str(search).startswith("Found nothing: ")


def test_an_inf_in_the_code_is_no_finding():
    search = find_nonfinite(lambda x: x + jnp.inf)(1.0)
    assert not search
    assert "those in the results are in the code" in str(search)


def test_inputs_that_hold_inf_or_nan_are_named():
    fun = lambda params, x: x @ params["w"] * 2
    search = find_nonfinite(fun)({"w": F32([[1, np.nan], [np.inf, 1]]), "b": jnp.zeros(2)}, jnp.ones((1, 2)))
    assert search
    assert search.finding is None
    assert "the inputs hold them" in str(search)
    assert "params['w'] holds float32[2, 2] all 1, 1 inf, 1 nan, first at [0, 1]" in str(search)
    search = find_nonfinite(jnp.add)(F32(1), F32(jnp.nan))
    assert "holds float32[] nothing finite, 1 nan" in str(search)
    both = find_nonfinite(lambda x: (x - x.max()).sum())(F32([1, jnp.inf]))
    assert both.finding.cause == "nan from inf - inf"
    assert "the input x holds" in str(both)


def test_of_several_the_one_that_reaches_the_results_is_named():
    def fun(x):
        hidden = jnp.where(x > 0, jnp.log(x), 0)
        return hidden + jnp.exp(x * 0 + 99)

    search = find_nonfinite(fun)(F32([0, 1]))
    assert (search.finding.primitive, search.reaches_results) == ("exp", True)
    both = find_nonfinite(lambda x: jnp.log(x) * 0 + jnp.exp(x + 99))(F32(0))
    assert both.finding.primitive == "log"  # the earlier one
    hidden = find_nonfinite(lambda x: jnp.where(x > 0, jnp.log(x), 0))(F32([0, 1]))
    assert (hidden.finding.primitive, hidden.reaches_results) == ("log", False)
    assert "no result shows it" in str(hidden)


def test_a_forward_overflow_that_poisons_only_the_gradient_is_no_backward_finding():
    fun = lambda x: jnp.where(x < 50, jnp.exp(x), 0).sum()
    search = find_nonfinite(fun, grad=True)(F32([1, 99]))
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
        noise = jax.random.normal(key, x.shape)
        y, rows = lax.scan(lambda c, r: (c + r, (c * 2, n)), x[0], noise, reverse=True)
        y = lax.fori_loop(0, n, lambda i, y: lax.switch(i % 3, [jnp.sin, jnp.cos, jax.nn.relu], y), y)
        out = lax.scan(lambda c, _: (c, c), y, None, length=0)[1], rows, jax.checkpoint(jnp.tanh)(y)
        jax.debug.callback(lambda *x: results.append(x), out)
        return out

    args = jax.random.key(0), jnp.ones((3, 2)), np.int32(5)
    assert not find_nonfinite(fun)(*args)
    fun(*args)
    jax.effects_barrier()
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_a_train_step_with_its_skip_can_be_searched():
    tx = jamp.loss_scaled(optax.adam(0.1))
    params = {"w": F32([1.0, 0.0])}

    def step(params, state):
        loss, grads = jamp.value_and_grad(lambda p: jnp.sqrt(p["w"]).sum(), state)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    search = find_nonfinite(step)(params, tx.init(params))
    assert (search.finding.cause, search.reaches_results) == ("division by zero: 0.5/0", False)
