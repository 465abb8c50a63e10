"""What a memory budget promises, on random programs with loops, branches, calls, checkpoints and rules in each other.

What `jax.vjp` keeps is what the report says, it is within the budget or there is a warning, it falls with the budget,
and no product runs more than once more. Its arguments and warnings are in test_recompute.py, the models of libraries in
integrations/test_memory_budget.py.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import PRODUCTS, equations, kept_by_jax, name_of, normal
from programs import N, program

import jamp

X, W = normal(N, N), normal(N, N, seed=1, scale=N**-0.5)
BUDGETS = (1.0, 0.5, 0)
# Bytes: a mask of N x N, and scalars. JAX's next checkpoint keeps the 8-bit weights of one more step of a scan.
SMALL_CHANGE = 2200 if getattr(jax.config, "jax_remat3", False) else 1100
FORMATS = {
    "float32": None,
    "bfloat16": (jnp.bfloat16, {}),
    "float8": (jamp.Float8(), {"rules": {"dot_general": "compute"}}),
}
SEEDS = range(40)
QUICK = {
    1: "bfloat16",
    5: "float8",
    9: "float32",
    18: "float8",
    20: "bfloat16",
    31: "bfloat16",
    35: "bfloat16",
    43: "float8",
}


def count_of_products(fun):
    return sum(eqn.primitive.name in PRODUCTS for eqn in equations(jax.make_jaxpr(fun)(X, W)))


def check(seed, name):
    fun, names = program(seed)
    loss = lambda x, w: jnp.mean(fun(jnp.matmul, x, w) ** 2)
    if FORMATS[name] is None:
        bounded, reported = jamp.recompute, loss
    else:
        dtype, options = FORMATS[name]
        bounded = lambda loss, budget: jamp.autocast(loss, dtype, memory_budget=budget, **options)
        reported = jamp.autocast(loss, dtype, **options)
    last = np.inf
    for budget in BUDGETS:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kept = kept_by_jax(bounded(loss, budget), X, W)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = jamp.memory_report(reported, budget)(X, W)
        where = f"program {seed}, {names}, in {name} at {budget}"
        counted, few = report.kept + report.end, 0.02 * kept + SMALL_CHANGE
        assert abs(counted - kept) <= few, where
        is_within = kept <= budget * report.without_budget + report.end + 0.02 * kept + SMALL_CHANGE
        assert is_within or not budget or any(issubclass(x.category, UserWarning) for x in caught), where
        assert kept <= last + SMALL_CHANGE, where
        last = kept
    return loss, bounded


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(("seed", "name"), QUICK.items())
def test_a_budget_bounds_what_jax_keeps_and_the_report_counts_it(seed, name):
    check(seed, name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The memory budget is", "ignore:This function takes a gradient itself")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_budget_bounds_what_jax_keeps_of_random_programs(seed):
    name = list(FORMATS)[seed % 3]
    loss, bounded = check(seed, name)
    first, last = (jax.grad(bounded(loss, budget), (0, 1)) for budget in (1.0, 0))
    # Each product of the forward pass runs once more at most.
    assert count_of_products(last) - count_of_products(first) <= count_of_products(bounded(loss, 1.0))
    if seed % 4:
        return  # Compilation takes longest.
    rtol = 1e-4 if name == "float32" else 0.1  # XLA may round values that are not products differently
    for x, y in zip(jax.jit(first)(X, W), jax.jit(last)(X, W), strict=True):
        assert np.linalg.norm(x - y) <= rtol * np.linalg.norm(x)


D = 32
U, V = normal(128, D), normal(D, D, seed=3, scale=0.2)


def kept_at(fun, budget, *args):
    """What JAX keeps under a budget, and the report. Warnings are errors, but of a budget that is too low."""
    return kept_by_jax(jamp.recompute(fun, budget), *args), jamp.memory_report(fun, budget)(*args)


def of_scans(v, u):
    for _ in range(6):
        u = lax.scan(lambda h, _: (jnp.tanh(jnp.sin(h @ v) @ v.T), None), u, None, length=3)[0]
    return jnp.mean(u**2)


@jax.custom_vjp
def kernel(u, v):
    return kernel_forward(u, v)[0]


def kernel_forward(u, v):
    a = u @ v
    b = jnp.sin(a) @ v.T
    return jnp.tanh(b), (u, v, a, b)


def kernel_backward(kept, g):
    u, v, a, b = kept
    d = g / jnp.cosh(b) ** 2
    return ((d @ v) * jnp.cos(a)) @ v.T, d.T @ jnp.sin(a) + u.T @ ((d @ v) * jnp.cos(a))


kernel.defvjp(kernel_forward, kernel_backward)


def of_kernels(v, u):
    for _ in range(6):
        u = kernel(u, v)
    return jnp.mean(u**2)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("fun", [of_scans, of_kernels])
def test_whole_constructs_that_are_computed_again_keep_nothing_of_their_inside(fun):
    """At 0.3 they had no checkpoint. They kept 1.7 times what no budget keeps, and the report said that it fits."""
    sizes = []
    for budget in (1.0, 0.5, 0.3):
        kept, report = kept_at(fun, budget, V, U)
        sizes.append(kept)
        assert abs(report.kept + report.end - kept) < 100
    assert sizes[0] > sizes[1] >= sizes[2]
    assert sizes[2] <= 0.3 * sizes[0] + report.end


def test_branches_share_what_has_one_type_as_the_cond_returns_it():
    """A value in a scan is stacked: it shares nothing with a value of the other branch that is not."""

    def of_branches(v, u):
        scanned = lambda u: lax.scan(lambda h, _: (jnp.tanh(jnp.sin(h @ v) @ v), None), u, None, length=4)[0]
        unrolled = lambda u: jnp.tanh(jnp.cos(jnp.tanh(jnp.cos(u @ v) @ v) @ v) @ v)
        for _ in range(2):
            u = lax.cond(u[0, 0] > 0, scanned, unrolled, u)
        return jnp.mean(u**2)

    for budget in (1.0, 0.5):
        kept, report = kept_at(of_branches, budget, V, U)
        assert abs(report.kept + report.end - kept) < 100


def test_the_end_holds_no_value_that_a_budget_could_drop():
    """Twelve layers without a product between the last two products were part of the end."""

    def mixer(v, u):
        u = u @ v
        for _ in range(12):
            u = u + jnp.tanh(jnp.cumsum(u, 0) / 8)
        return jnp.mean((u @ v) ** 2)

    (first, report), (last, _) = kept_at(mixer, 1.0, V, U), kept_at(mixer, 0, V, U)
    assert report.end == U.nbytes
    assert last < 0.2 * first


@pytest.mark.slow
def test_code_without_products_is_jax_s_at_1_and_cut_by_bytes_below():
    def pde(u):
        for _ in range(40):
            u = u + 0.01 * jnp.sin(u) * jnp.roll(u, 1, 0) - 0.1 * u**3
        return jnp.mean(u**2)

    plain = kept_at(pde, 1.0, U)[0]
    assert "remat2" not in {name_of(eqn) for eqn in equations(jax.make_jaxpr(jamp.recompute(pde, 1.0))(U))}
    kept, report = kept_at(pde, 0.2, U)
    assert kept <= 0.2 * plain
    assert abs(report.kept - kept) < 100
    # What a segment computes again and holds at once is counted, and is a part of the whole.
    assert 0 < report.largest < 0.2 * plain
    with jax.disable_jit():  # XLA:CPU compiles such a chain for half a minute
        np.testing.assert_array_equal(jax.grad(jamp.recompute(pde, 0.2))(U), jax.grad(pde)(U))


def student(v, u):
    for _ in range(4):
        u = u + jnp.tanh(u @ v)
    return u


BEHIND = {
    "a teacher": lambda v, u: jnp.mean((student(v, u) - lax.stop_gradient(student(v, u + 0.1))) ** 2),
    "factors": lambda v, u: jnp.mean((u * lax.stop_gradient(jnp.tanh(u @ v)) * lax.stop_gradient(jnp.sin(u @ v))) ** 2),
    "in a scan": lambda v, u: jnp.mean(
        lax.scan(lambda h, v: (lax.stop_gradient(h @ v) * h, None), u, jnp.stack([v] * 4))[0] ** 2
    ),
}


@pytest.mark.parametrize("name", BEHIND)
def test_what_reaches_a_result_only_through_stop_gradient_is_not_kept(name):
    sizes = []
    for budget in (1.0, 0.5, 0.25):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kept, report = kept_at(BEHIND[name], budget, V, U)
        sizes.append(kept)
        assert abs(report.kept + report.end - kept) < 100
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("dtype", [jamp.Float8(), jamp.Float8(granularity="row"), jamp.Int8()], ids=str)
def test_the_flops_of_an_8_bit_plan_are_those_of_its_products(dtype):
    loss = lambda w, x: jnp.mean(functools.reduce(lambda x, v: jax.nn.relu(x @ v), w, x) ** 2)
    w, x = normal(3, 64, 64, scale=0.1), normal(256, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = jamp.memory_report(jamp.autocast(loss, dtype), 0.3)(w, x)
    assert 0 < report.flops < 3 * 2 * 256 * 64 * 64


def made_straight(u):
    ref = jax.new_ref(jnp.zeros_like(u))
    ref[...] = jnp.tanh(u @ V)
    return jnp.mean((jnp.sin(ref[...]) @ V) ** 2)


def made_in_a_loop(u):
    ref = jax.new_ref(jnp.zeros_like(u))

    def body(i, h):
        ref[...] += h @ V
        return jnp.tanh(h @ V)

    return jnp.mean((lax.fori_loop(0, 3, body, jnp.tanh(u @ V)) + ref[...]) ** 2)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("fun", [made_straight, made_in_a_loop])
def test_a_function_that_makes_a_ref_has_a_budget(fun):
    for budget in (1.0, 0):
        kept, report = kept_at(fun, budget, U)
        assert abs(report.kept + report.end - kept) < 100
        np.testing.assert_allclose(jax.grad(jamp.recompute(fun, budget))(U), jax.grad(fun)(U), rtol=1e-5, atol=1e-8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the least that a budget can keep, and of a loop that is not cast
        jax.grad(jamp.autocast(fun, jnp.bfloat16, memory_budget=0.5))(U)
    np.testing.assert_allclose(jax.grad(jamp.scaled(fun))(U), jax.grad(fun)(U), rtol=1e-5, atol=1e-8)


def test_an_error_in_a_rule_of_the_users_is_raised():
    @jax.custom_vjp
    def broken(x):
        return x * 2

    def forward(x):
        raise RuntimeError("a bug of the user's")

    broken.defvjp(forward, lambda _, g: (g,))
    with pytest.raises(RuntimeError, match="a bug of the user's"):
        jamp.memory_report(lambda w, x: jnp.sum(broken(jnp.tanh(x @ w)) @ w), 0.5)(V, U)


def of_layers(v, u):
    for _ in range(6):
        u = jnp.tanh(u @ v)
    return jnp.mean(u**2)


def rescaled(v, u):
    return jnp.mean(jax.jit(functools.partial(functools.reduce, lambda u, _: jnp.tanh(u @ v), range(6)))(u) ** 2)


@pytest.mark.parametrize("fun", [jax.jit(of_layers), rescaled], ids=["the loss", "the model"])
def test_a_budget_enters_a_model_that_is_one_jit_call(fun):
    """The call was "the last product and what follows", of which nothing is dropped."""
    for budget in (1.0, 0.3):
        kept, report = kept_at(fun, budget, V, U)
        assert kept == report.kept + report.end == kept_at(of_layers, budget, V, U)[0]
    assert report.kept < 0.3 * report.without_budget


def test_convolutions_keep_no_copy_of_what_is_given():
    """A barrier around what they keep made other arrays of the weights."""
    conv = functools.partial(lax.conv_general_dilated, window_strides=(1, 1), padding="SAME")
    layers = lambda ws, x: jnp.mean(functools.reduce(lambda x, w: jax.nn.silu(conv(x, w)), ws, x) ** 2)
    kept, report = kept_at(layers, 1.0, [normal(16, 16, 3, 3)] * 3, normal(1, 16, 8, 8))
    assert abs(report.kept + report.end - kept) < 100


def test_what_is_the_same_in_each_step_of_an_inner_scan_is_counted_once():
    """The casts of the weights of a recurrent layer."""

    def layer(x, w):
        step = lambda h, x: (jnp.tanh(x @ w[0] + h @ w[1]),) * 2
        return x + lax.scan(step, jnp.zeros((8, D)), x)[1], None

    loss = lambda ws, x: jnp.mean(lax.scan(layer, x, ws)[0] ** 2)
    ws, x = normal(3, 2, D, D), normal(20, 8, D)
    cast = jamp.autocast(loss, jnp.bfloat16)
    report = jamp.memory_report(cast)(ws, x)
    assert abs(report.kept + report.end - kept_by_jax(cast, ws, x)) < 100


def test_a_value_of_which_the_gradient_is_stopped_is_kept_once():
    def siamese(v, u):
        one, two = (functools.reduce(lambda x, _: jnp.tanh(x @ v), range(4), x) for x in (u, u + 0.1))
        unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        return -jnp.mean(unit(jnp.tanh(one @ v)) * lax.stop_gradient(unit(two)))

    for budget in (1.0, 0.5, 0):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kept, report = kept_at(siamese, budget, V, U)
        assert abs(report.kept + report.end - kept) < 100


@pytest.mark.parametrize("residuals", [None, jnp.int8], ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jamp.Float8(), jamp.Int8()], ids=lambda x: getattr(x, "__name__", ""))
def test_a_budget_around_the_call_of_an_autocast_function_is_as_in_it(dtype, residuals):
    x, ws = normal(128, 128), normal(3, 128, 128, scale=128**-0.5)

    def loss(x, ws):
        return jnp.sum(lax.scan(lambda x, w: (jax.nn.gelu(x + jnp.tanh(x @ w) @ w) @ w, None), x, ws)[0] ** 2)

    cast = jamp.autocast(loss, dtype)
    around = lambda x, ws: 2 * cast(x, ws)
    for budget in (1.0, 0.8, 0):
        inside = jamp.autocast(loss, dtype, memory_budget=budget, residuals=residuals)
        outside = jamp.recompute(around, budget, residuals=residuals)
        assert kept_by_jax(outside, x, ws) == kept_by_jax(inside, x, ws)
        expected, found = (jax.jit(jax.value_and_grad(fun))(x, ws) for fun in (inside, outside))
        np.testing.assert_allclose(found[0], 2 * expected[0], rtol=1e-6)
        np.testing.assert_allclose(found[1], 2 * expected[1], rtol=0.01, atol=0.01 * abs(expected[1]).max())


def test_autocast_opens_a_budget_inside_and_the_report_is_of_that_program():
    """They kept 2.2 times as much as the report said."""
    block = jamp.recompute(lambda u: jnp.tanh(jnp.sin(u @ V) @ V), 0)
    loss = jamp.autocast(lambda u: jnp.mean(block(block(block(u))) ** 2), jnp.bfloat16)
    report = jamp.memory_report(loss)(U)
    assert abs(report.kept + report.end - kept_by_jax(loss, U)) < 100


@pytest.mark.slow
def test_a_cond_that_is_computed_again_needs_no_operand_of_its_results_alone():
    def of_conds(v, u):
        for _ in range(4):
            h = jnp.tanh(u) @ v
            u = lax.cond(u[0, 0] < 1e9, lambda h, u: jnp.tanh(jnp.sin(u @ v) @ v) + h, lambda h, u: h - u, h, u)
            u = u / (1 + jnp.sqrt(jnp.mean(u * u)))
        return jnp.mean(u**2)

    for budget in (0.5, 0.3):
        kept, report = kept_at(of_conds, budget, V, U)
        assert abs(report.kept + report.end - kept) < 100


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_an_identity_with_a_derivative_rule_ends_no_segment(dtype):
    """Such as a clip of cotangents in each layer."""
    clip = jax.custom_vjp(lambda x: x)
    clip.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))

    def of(identity):
        def loss(w, x):
            for v in w:
                x = identity(x + jax.nn.gelu(jax.nn.standardize(x) @ v))
            return jnp.mean(x**2)

        return jamp.autocast(loss, dtype) if dtype else loss

    w, x = normal(4, 64, 64, scale=0.1), normal(64, 64)
    for budget in (1.0, 0.5):
        kept, plain = (jamp.memory_report(of(f), budget)(w, x).kept for f in (clip, lambda x: x))
        assert kept <= 1.01 * plain
        bounded = jamp.recompute(of(clip), budget)
        np.testing.assert_allclose(jax.grad(bounded)(w, x), jax.grad(of(clip))(w, x), rtol=1e-4, atol=1e-7)
