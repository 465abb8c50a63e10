"""find_nonfinite: of several independent causes the one that ran first is first. One that no result shows is not."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from jamp.debug import find_nonfinite

F16, BF16, F32, INF = jnp.float16, jnp.bfloat16, jnp.float32, jnp.inf
LARGE = [100.0, 88.5, 88.5, 88.5]  # exp of the first is inf, and so is the sum of the others
MASK = np.tril(np.ones((4, 4), bool))
CASES = []


def case(primitive, *args, grad=False, path="", others=None, x64=False):
    """A program whose first cause is `primitive` in the line with the comment "first"."""

    def add(fun):
        CASES.append(pytest.param((fun, args, primitive, grad, path, others, x64), id=fun.__name__))
        return fun

    return add


@case("exp", F32(LARGE), others=["reduce_sum"])
def then_a_sum_overflows(x):
    return jnp.mean(jnp.exp(x))  # first


@case("exp", F16([12, 11, 11, 11]), others=["reduce_sum"])
def then_a_sum_overflows_in_float16(x):
    return jnp.sum(jnp.exp(x), dtype=F16)  # first


@case("exp", BF16(LARGE), others=["reduce_sum"])
def then_a_sum_overflows_in_bfloat16(x):
    return jnp.sum(jnp.exp(x))  # first


@case("exp", np.float64([1000, 709.7, 709.7, 709.7]), others=["reduce_sum"], x64=True)
def then_a_sum_overflows_in_float64(x):
    return jnp.mean(jnp.exp(x))  # first


@case("log", F32([-1, *LARGE[1:]]))
def negative_log_then_a_product_overflows(x):
    return jnp.sum(jnp.exp(x) * jnp.log(x))  # first


@case("div", jnp.eye(4), jnp.zeros((9, 4)).at[1:].set(5), others=["reduce_sum"])
def zero_by_zero_then_a_sum_overflows(w, x):
    h = x @ w
    p = h / jnp.linalg.norm(h, axis=-1, keepdims=True)  # first
    return jnp.sum(p * 1e38) + jnp.sum(h)


@case("div", jnp.zeros(3), others=["mul"])
def zero_by_zero_then_a_product_overflows(x):
    p = x / jnp.sum(x)  # first
    return jnp.sum(p) + jnp.sum((x + 1e30) * 1e30)


@case("exp", F32([[100, 88], [1, 2]]), others=["dot_general"])
def then_a_matmul_overflows(x):
    y = jnp.exp(x)  # first
    return jnp.sum(y @ y.T)


@case("exp", F32(LARGE), others=["cumsum"])
def then_a_cumsum_overflows(x):
    return jnp.cumsum(jnp.exp(x))[-1]  # first


@case("exp", F32(LARGE), others=["scatter-add"])
def then_a_scatter_overflows(x):
    return jax.ops.segment_sum(jnp.exp(x), jnp.zeros(4, int), 2)[0]  # first


@case("exp", F32(LARGE), others=["fft"])
def then_a_transform_overflows(x):
    return jnp.abs(jnp.fft.fft(jnp.exp(x))).sum()  # first


@case("exp", F32([-1, 2, 3]), others=["reduce_sum"])
def then_huge_finite_values_are_added(x):
    y = jnp.exp(x * 100)  # first
    return jnp.sum(jnp.concatenate([y, jnp.full(7, 3e38) * (1 + 0 * x[0])]))


@case("exp", F32([100, 1]))
def overflow_to_minus_inf_then_a_root(x):
    return jnp.sum(jnp.sqrt(-jnp.exp(x)))  # first


@case("log", F32([-1, 0, 3]), others=["div"])
def negative_log_then_inf_times_zero(x):
    y = jnp.log(x - 0.5)  # first
    return jnp.sum(y) + jnp.sum((1 / x) * x)


@case("exp", F32([-1, 2, 3]), others=[])
def a_where_swallows_an_earlier_one(x):
    y = jnp.where(x > 0, jnp.log(x), 0)
    return jnp.sum(y) + jnp.sum(jnp.exp(x * 100))  # first


@case("sqrt", F32([-1, 2, 3]), others=[])
def isfinite_replaces_an_earlier_one(x):
    y = jnp.exp(x * 100)
    return jnp.sum(jnp.sqrt(jnp.where(jnp.isfinite(y), y, 0) - 1))  # first


@case("sqrt", F32([[100, 88.5], [1, 2]]), others=[])
def nan_to_num_replaces_an_earlier_one(x):
    y = jnp.nan_to_num(jnp.exp(x), posinf=0)
    return jnp.mean(jnp.sqrt(y - 50))  # first


@case("gather", F32([300, 1, 2]), np.int32([7]), others=[], path="jit(_take)")
def an_index_beside_an_earlier_one(x, i):
    y = jnp.exp(x)
    return jnp.sum(jnp.take(y, i)) + jnp.sum(y[1:])  # first


@case("div", F32([[-1, 1], [0, 0], [2, 3]]), others=[])
def a_row_beside_an_earlier_one_in_another_row(x):
    y = x + 0 * jnp.log(x[:, :1] + 0.5)
    p = y / jnp.sum(y, -1, keepdims=True)  # first
    return jnp.sum(p[1:])


@case("exp", F32([-1, 2, 3]), others=["log"])
def an_earlier_one_in_an_auxiliary_result(x):
    y = jnp.log(x)
    return jnp.sum(jnp.exp(x * 100)), y  # first


@case("exp", F32([100, 101, 88.5]), others=["exp", "exp"])
def two_only_together_and_a_later_one(x):
    y = jnp.exp(x[0])  # first
    z = jnp.exp(x[1])
    return jnp.exp(-jnp.abs(y - z)) + jnp.exp(2 * x[2])


@case("exp", jnp.ones((4, 4)))
def after_a_mask_of_logs(x):
    p = jax.nn.softmax(x + jnp.log(F32(MASK)))
    return jnp.mean(jnp.exp(p * 100) * 1e38)  # first


@case("exp", jnp.ones((4, 4)), others=["reduce_sum"])
def after_a_mask_of_constants(x):
    p = jnp.max(x + jnp.where(MASK, 0, -INF), -1)
    return jnp.sum(jnp.exp(p * 88.5 + F32([20, 0, 0, 0])))  # first


@case("log", F32([-1, 2]), F32([0, -INF]))
def after_a_mask_among_the_arguments(x, mask):
    p = jax.nn.softmax(jnp.ones(2) + mask)
    return jnp.sum(p * jnp.log(x)) + jnp.sum(jnp.exp(x * 400))  # first


@case("sub", jnp.ones((2, 3)))
def an_overflow_beside_a_masked_row_in_one_operation(x):
    y = F32([[3e38] * 3, [-INF] * 3]) * x - F32([[-3e38], [-INF]])  # first
    return jnp.sum(y[1])


@case("log", F32([3, 2, 1, 0, -1, -2]), path="scan, iteration 4 of 6", others=["exp"])
def in_a_scan(xs):
    def step(c, x):
        y = jnp.log(x + 0.5)  # first
        return c + y, jnp.exp(-50 * x)

    c, ys = lax.scan(step, F32(0), xs)
    return c + jnp.sum(ys)


@case("log", F32([3, -2, 1, -3, -1, -2]), path="scan, iteration 3 of 6", others=[])
def in_a_scan_after_a_step_that_is_hidden(xs):
    def step(c, x):
        y = jnp.log(x + 0.5)  # first
        return c + 1, jnp.where(c < 3, 0, y)

    return jnp.sum(lax.scan(step, 0, xs)[1])


@case("log", jnp.linspace(3, -1, 150), path="scan, iteration 146 of 150", others=[])
def in_a_scan_after_many_that_are_hidden(xs):
    def step(c, x):
        y = jnp.where(x > -0.9, 0, jnp.log(x))  # first
        return c + y, None

    return lax.scan(step, F32(0), xs)[0]


@case("exp", F32(LARGE), others=["reduce_sum"], path="while, iteration 0")
def in_a_while_loop(x):
    def body(state):
        i, c = state
        return i + 1, c + jnp.mean(jnp.exp(x))  # first

    return lax.while_loop(lambda state: state[0] < 3, body, (0, F32(0)))[1]


@case("exp", F32(LARGE), others=["reduce_sum"], path="cond, branch 1")
def in_a_cond(x):
    return lax.cond(x[0] > 0, lambda x: jnp.mean(jnp.exp(x)), lambda x: F32(0), x)  # first


@case("exp", jnp.tile(F32(LARGE), (3, 1)), others=["reduce_sum"])
def under_vmap(x):
    return jnp.mean(jax.vmap(lambda row: jnp.mean(jnp.exp(row)))(x))  # first


@case("exp", F32(LARGE), grad=True, path="remat(inner)")
def in_a_checkpoint(x):
    def inner(x):
        return jnp.mean(jnp.exp(x))  # first

    return jax.checkpoint(inner)(x)


@case("exp", F32(LARGE), grad=True, path="custom_vjp(own)")
def in_a_custom_vjp(x):
    @jax.custom_vjp
    def own(x):
        return jnp.mean(jnp.exp(x))  # first

    own.defvjp(lambda x: (own(x), x), lambda x, g: (g * x,))
    return own(x)


@case("div", F32([0, 1e-3, 1e-3]), grad=True, others=["reduce_sum"])
def in_the_backward_pass(x):
    copies = jnp.broadcast_to(x, (8, 3))  # its transpose adds 8 times 1e38
    root = jnp.sqrt(x)  # first
    return jnp.sum(copies * 1e38) * 1e-3 * 1e3 + jnp.sum(root)


@case("exp", F32([100, 88.5, 88.5]), grad=True)
def that_only_the_gradient_shows(x):
    y = jnp.exp(x)  # first
    return jnp.sum(jnp.where(x > 99, 0, y) * 1e-38)


@case("dot_general", jnp.ones((8, 8)), jnp.ones((8, 8)), others=[])
def after_more_hidden_layers_than_there_are_streams(w, x):
    for i in range(12):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.where(x > 2, jnp.log(x - 2), x * 0.5 + 0.5)
    return jnp.mean((x * 1e20) @ (w * 1e20))  # first


@case("div", jnp.eye(16), jnp.zeros((3, 16)).at[1:].set(300), others=["dot_general"])
def under_autocast(w, x):
    p = x / x  # first

    def attend(w, p, x):
        return jnp.sum((x @ w.T) * (p @ w))

    return jamp.autocast(attend, F16)(w * 300, p, x)


@pytest.mark.slow_after(20)
@pytest.mark.parametrize("case", CASES)
def test_the_first_cause_is_first(case):
    fun, args, primitive, grad, path, others, x64 = case
    lines, start = inspect.getsourcelines(fun)
    line = start + next(i for i, text in enumerate(lines) if "# first" in text)
    with jax.enable_x64(x64):
        search = find_nonfinite(fun, grad=grad)(*args)
    found = search.finding
    assert search.reaches_results
    assert (found.primitive, " > ".join(found.path)) == (primitive, path)
    assert f"test_debug_first_cause.py:{line} (" in found.source
    assert others is None or [x.primitive for x in search.findings[1:]] == others
    of_loss = [x.order for x in search.findings if x.reaches == found.reaches]
    assert of_loss == sorted(of_loss)


def test_causes_that_no_result_shows_have_the_order_in_which_they_first_ran():
    log = lambda x: jnp.where(x > 0, jnp.log(x), 0)
    hidden = lambda x: log(x) + jnp.where(x > 0, 1 / x, 0) + log(x + 0.5)
    search = find_nonfinite(lambda x: jnp.sum(hidden(x)))(F32([-1, 0, 3]))
    assert not search
    assert [x.primitive for x in search.findings] == ["log", "div"]
