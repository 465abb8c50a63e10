"""`recompute`, and `autocast` with a budget, where `jax.checkpoint` stands: what JAX promises of it holds of them."""

import functools
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import linear_call
from jaxprs import normal
from trees import assert_close, avals

import jamp

pytestmark = pytest.mark.filterwarnings("ignore:The memory budget is", "ignore:autocast (changes no product|leaves)")
W, X = normal(32, 32, scale=0.15), normal(32, 32, seed=1)
WAYS = {
    "recompute 1.0": lambda f: jamp.recompute(f, 1.0),
    "recompute 0.5": lambda f: jamp.recompute(f, 0.5),
    "recompute 0": lambda f: jamp.recompute(f, 0),
    "autocast 0.5": lambda f: jamp.autocast(f, jnp.bfloat16, memory_budget=0.5),
    "float32 0.5": lambda f: jamp.autocast(f, jnp.float32, memory_budget=0.5),
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@jax.custom_jvp
def sine(x):
    return jnp.sin(x)


@sine.defjvp
def _sine_jvp(primals, tangents):
    y, derivative = jax.jit(lambda x: (jnp.sin(x), jnp.cos(x)))(*primals)
    return y, derivative * tangents[0]


@jax.custom_vjp
def rule(x, w):
    return jnp.tanh(x @ w)


def _backward(kept, g):
    x, w, y = kept
    return (g * (1 - y * y)) @ w.T, x.T @ (g * (1 - y * y))


rule.defvjp(lambda x, w: ((y := rule(x, w)), (x, w, y)), _backward)


by_constants = jax.custom_jvp(lambda x: x * jnp.linspace(0.0, 1.0, 32))
by_constants.defjvp(lambda p, t: (by_constants(p[0]), t[0] * jnp.linspace(0.0, 1.0, 32)))
by_name = jax.checkpoint_policies.save_only_these_names("b")
block = lambda x, w: jnp.sin(jnp.tanh(x @ w) @ w)
sum_of_scan = lambda step, x, n=2: lax.scan(lambda c, _: (step(c), jnp.sum(c)), x, None, length=n)


def unused_output(x, w):
    """The output of each step is used in the step alone."""

    def step(c, a):
        b = jnp.mean(jnp.sin(a @ w)) + jnp.mean(jnp.sin(c))
        return jnp.sin(c * b), b

    return lax.scan(step, x[0], x[1:4])[0]


# Programs of x and w, for each of which JAX's own tests ask something of `jax.checkpoint`.
PROGRAMS = {
    "blocks": lambda x, w: block(block(x, w), w),
    "scan": lambda x, w: sum_of_scan(lambda c: block(c, w), x),
    "rules": lambda x, w: rule(sine(rule(x, w)), w),
    "names and policies": lambda x, w: jax.checkpoint(
        lambda x: jnp.sin(checkpoint_name(jnp.sin(checkpoint_name(x @ w, "a") @ w), "b")), policy=by_name
    )(x),
    "structures": lambda x, w: {"y": [x @ w, None, (x, x)], "n": jnp.arange(3), "c": 2.0, "k": jax.random.key(0)},
    "cond": lambda x, w: lax.cond(x[0, 0] < 9, lambda x: block(x, w), lambda x: x, x @ w),
    "switch": lambda x, w: lax.switch(1, [lambda x: x, lambda x: block(x, w), lambda x: x @ w], x),
    "while": lambda x, w: lax.fori_loop(0, 2, lambda i, x: block(x, w), x),
    "scan in scan": lambda x, w: sum_of_scan(lambda c: sum_of_scan(lambda c: block(c, w), c)[0], x),
    "no steps": lambda x, w: sum_of_scan(lambda c: block(c, w), x, 0),
    "unused output": unused_output,
    "a rule in scan": lambda x, w: sum_of_scan(lambda c: sine(c @ w), x),
    "a rule in cond": lambda x, w: lax.cond(x[0, 0] < 9, sine, lambda x: x, x @ w),
    "constants of a rule in scan": lambda x, w: sum_of_scan(by_constants, (x @ w)[0], 1),
    "constants of a rule in cond": lambda x, w: lax.cond(x[0, 0] < 9, by_constants, lambda x: x, (x @ w)[0]),
    "checkpoint in scan": lambda x, w: sum_of_scan(jax.checkpoint(lambda c: block(c, w)), x),
    "itself": lambda x, w: jamp.recompute(lambda x: block(block(x, w), w), 0.5)(x @ w) @ w,
    "dropped results": lambda x, w: jax.jit(lambda: (x @ w, block(x, w)))()[1],
    "a constant": lambda x, w: jax.jit(lambda: 3.0)() * (x @ w),
    "closed over": lambda x, w: block(x, 2 * W),
    "no products": lambda x, w: jnp.sin(jnp.sin(x)) * w,
    "nothing": lambda x, w: (x, (), w),
    "sorted": lambda x, w: jnp.sort(x @ w) + lax.top_k(x @ w, 32)[0],
    "random": lambda x, w: jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, x.shape), x @ w, 0.0) @ w,
    "solved": lambda x, w: jnp.linalg.solve(w @ w.T + jnp.eye(32), x @ w),
    "in 16 bit": lambda x, w: block(x.astype(jnp.float16), w.astype(jnp.float16)).astype(jnp.float32),
    "printed": lambda x, w: (y := x @ w, jax.debug.callback(lambda y: None, y))[0] @ w,
    "of no size": lambda x, w: block(x, w) + jnp.sum(x[:0] @ w),
    "convolution": lambda x, w: lax.conv(x[None, None], w[None, None, :3, :3], (1, 1), "SAME") + 1.0,
}
FIRST, REVERSE_ONLY = list(PROGRAMS)[:3], ("rules", "printed", "while")


def loss_of(fun):
    def loss(x, w):
        arrays = [y for y in map(jnp.asarray, jax.tree.leaves(fun(x, w))) if jnp.issubdtype(y.dtype, jnp.floating)]
        return functools.reduce(jnp.add, (jnp.mean(jnp.sin(y)) for y in arrays), jnp.float32(0))

    return loss


def asked(fun, forward):
    """The results of a function and of its derivatives. A custom_vjp has none in `forward` mode."""
    grad = jax.grad(loss_of(fun), (0, 1))

    def all_of(x, w):
        along = lambda f: jax.jvp(lambda x: f(x, w), (x,), (jnp.ones_like(x),))
        found = along(grad) if forward else grad(x, w)
        second = jax.grad(lambda x: jnp.sum(jnp.sin(1e3 * grad(x, w)[0])))(x)
        return fun(x, w), found, second, jax.vmap(grad, (0, None))(jnp.stack([x, x[::-1]]), w)

    return all_of


def apart(tree, other):
    """How far floating-point arrays are apart, in the norm of all of them."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    pairs = [(x, y) for x, y in pairs if jnp.issubdtype(x.dtype, jnp.floating)]
    norm = lambda arrays: float(jnp.sqrt(sum(jnp.sum(jnp.float32(x) ** 2) for x in arrays)))
    return norm(x - y for x, y in pairs) / norm(y for _, y in pairs)


@pytest.mark.parametrize(
    "name", [*FIRST, *(pytest.param(x, marks=pytest.mark.slow) for x in PROGRAMS if x not in FIRST)]
)
def test_values_derivatives_structures_dtypes_and_weak_types_are_those_of_a_checkpoint(name):
    ways = [jax.checkpoint, *WAYS.values()]
    of_all = jax.jit(lambda x, w: [asked(way(PROGRAMS[name]), name not in REVERSE_ONLY)(x, w) for way in ways])
    first, *types = map(avals, jax.eval_shape(of_all, X, W))
    assert types == [first] * len(types)
    expected, *found = of_all(X, W)
    for way, result in zip(WAYS, found, strict=True):
        if "autocast" in way or name == "in 16 bit":
            assert apart(result[:2], expected[:2]) < 0.03
        else:
            assert_close(result[0], expected[0], rtol=1e-3, atol=1e-5)
            assert apart(result[1:], expected[1:]) < 1e-3


loss = loss_of(lambda x, w: block(block(x, w), w))


def compiled(f):
    return jax.jit(f).lower(X, W).compile()(X, W)


def exported(f):
    return jax.export.export(jax.jit(f), platforms=["cpu", "cuda", "tpu"])(X, W).call(X, W)


def within(context):
    def run(f):
        with context:
            return f(X, W)

    return run


SETTINGS = {
    "no leak": lambda f: within(jax.checking_leaks())(jax.jit(f)),
    "exported": exported,
    "compiled ahead of time": compiled,
    "no jit": lambda f: within(jax.disable_jit())(f),
    "no leak without jit": lambda f: within(jax.checking_leaks())(f),
    "no NaN": lambda f: within(jax.debug_nans(True))(jax.jit(f)),
    "no inf": lambda f: within(jax.debug_infs(True))(f),
    "no key twice": lambda f: within(jax.debug_key_reuse(True))(jax.jit(f)),
    "no rank promotion": lambda f: within(jax.numpy_rank_promotion("raise"))(jax.jit(f)),
    "donated": lambda f: jax.jit(f, donate_argnums=0)(jnp.copy(X), W),
    "of NumPy": lambda f: f(np.asarray(X), np.asarray(W)),
    "under a checkpoint": lambda f: jax.jit(jax.checkpoint(f))(X, W),
    "under vmap with a name": lambda f: jax.vmap(f, (None, 0), axis_name="i")(X, W[None]),
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("setting", SETTINGS)
def test_gradients_are_the_same_in_every_setting_of_jax(setting):
    expected = jax.jit(jax.grad(loss, (0, 1)))(X, W)
    for name, way in WAYS.items():
        found = SETTINGS[setting](jax.grad(way(loss), (0, 1)))
        found = jax.tree.map(lambda x, y: jnp.reshape(x, y.shape), found, expected)
        assert apart(found, expected) < (0.03 if "autocast" in name else 1e-5), name


def test_a_compiled_gradient_traces_the_function_once():
    traced = []
    for way in WAYS.values():
        traced.clear()
        grad = jax.jit(jax.grad(way(lambda x, w: (traced.append(1), loss(x, w))[1])))
        for _ in range(3):
            grad(X, W)
        assert len(traced) == 1
        assert grad._cache_size() == 1


def with_a_print(seen):
    def fun(x, w):
        x = jnp.tanh(x @ w)
        jax.debug.callback(lambda _: seen.append("outside"), x[0, 0])

        def step(c, _):
            jax.debug.callback(lambda _: seen.append("in a loop"), c[0, 0], ordered=True)
            return jnp.sin(c @ w), None

        return jnp.sum(lax.scan(step, x, None, length=2)[0])

    return fun


@every_way
def test_a_print_is_printed_once_for_each_time_that_the_function_runs(way):
    """`jax.checkpoint` prints again in the backward pass."""
    seen = []
    jax.block_until_ready(jax.jit(jax.grad(way(with_a_print(seen))))(X, W))
    jax.effects_barrier()
    assert sorted(seen) == ["in a loop"] * 2 + ["outside"]


def raises(x, w):
    raise KeyError("mine")


def branches(x, w):
    return x @ w if x[0, 0] > 0 else x


def misfits(x, w):
    return x @ w[1:]


@pytest.mark.parametrize(
    ("fun", "error"), [(raises, KeyError), (branches, jax.errors.TracerBoolConversionError), (misfits, TypeError)]
)
def test_an_error_in_the_function_is_the_user_s_with_its_line(fun, error):
    for f in (f for way in WAYS.values() for f in (way(fun), jax.jit(way(fun)), jax.grad(loss_of(way(fun))))):
        with pytest.raises(error) as caught:
            f(X, W)
        assert f"in {fun.__name__}\n" in "".join(traceback.format_exception(caught.value))


@every_way
def test_a_tracer_that_the_function_stores_is_an_error(way):
    stored = [jnp.zeros(())]

    def fun(x, w):
        stored[0] += jnp.sum(x @ w)
        return stored[0]

    with pytest.raises(jax.errors.UnexpectedTracerError):
        jax.jit(lambda x, w: (way(fun)(x, w), way(lambda x, w: fun(x, w))(x, w)))(X, W)


class Unhashable:
    __hash__ = None
    power = 2


@every_way
def test_other_arguments_are_what_they_are_and_a_float0_stays_one(way):
    def fun(i, w, n, other, *, flag, name="tanh", none=None):
        assert (n, flag, none) == (3, False, None)
        for _ in range(n):
            w = getattr(jnp, name)(w @ w) ** other.power
        return jnp.sum(w[i])

    arguments = (jnp.array([1, 2]), W, 3, Unhashable())
    grad = lambda f: jax.grad(f, (0, 1), allow_int=True)(*arguments, flag=False, name="sin")
    (of_ints, found), (_, expected) = grad(way(fun)), grad(fun)
    assert of_ints.dtype == jax.dtypes.float0
    assert apart([found], [expected]) < 0.1


def reads_and_writes(x, w, ref):
    y = jnp.tanh(x @ w)
    ref[...] += lax.stop_gradient(jnp.sum(y))
    return jnp.sin(y @ w) @ w


def in_a_loop(x, w, ref):
    def step(c, _):
        ref[...] += lax.stop_gradient(jnp.sum(c))
        return jnp.sin(jnp.tanh(c @ w) @ w), None

    return lax.scan(step, x, None, length=2)[0]


def in_a_branch(x, w, ref):
    def branch(x):
        ref[...] += 1.0
        return jnp.tanh(x @ w) @ w

    return lax.cond(x[0, 0] < 9, branch, lambda x: x, x) @ w


def in_a_call(x, w, ref):
    def call(x, ref):
        ref[...] *= 2.0
        return jnp.tanh(x @ w) * ref[...]

    return jax.jit(call)(x, ref) @ w


def passes_on(x, w, ref):
    """The backward pass of a rule writes what it gets to the Ref."""

    def backward(ref, g):
        ref[...] = jnp.sum(g)
        return None, g

    passed = jax.custom_vjp(lambda ref, x: x)
    passed.defvjp(lambda ref, x: (x, ref), backward)
    return jnp.sin(passed(ref, jnp.tanh(x @ w)) @ w) @ w


def holds_a_tangent(x, w, ref):
    """The Ref is made outside of the function, and holds a value that depends on the arguments."""
    ref = jax.new_ref(jnp.tanh(x @ w))

    def inner(w, ref):
        ref[...] = jnp.sin(ref[...] @ w)
        return jnp.tanh(ref[...] @ w) @ w

    return holds_a_tangent.way(inner)(w, ref) + ref[...]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("fun", [reads_and_writes, passes_on, in_a_loop, in_a_branch, in_a_call, holds_a_tangent])
@pytest.mark.parametrize("closed_over", [False, True])
def test_a_ref_that_is_given_is_read_and_written_once(fun, closed_over):
    def gradient(way):
        ref = jax.new_ref(jnp.ones(()))
        holds_a_tangent.way = way
        way = (lambda f: f) if fun is holds_a_tangent else way
        f = way(lambda x, w: loss_of(lambda x, w: fun(x, w, ref))(x, w))
        of_ref = way(lambda x, w, ref: loss_of(lambda x, w: fun(x, w, ref))(x, w))
        found = jax.jit(jax.grad(f, (0, 1)))(X, W) if closed_over else jax.jit(jax.grad(of_ref, (0, 1)))(X, W, ref)
        return found, ref[...]

    expected, after = gradient(lambda f: f)
    for name, way in WAYS.items():
        found, ref = gradient(way)
        tolerance = 0.03 if "autocast" in name else 1e-5
        assert apart(found, expected) < tolerance, name
        np.testing.assert_allclose(ref, after, rtol=tolerance)


LINEAR = {
    "products": lambda x: (2 * (x @ W)) @ W,
    "no product": lambda x: 2 * x + x.T,
    "large": lambda x: jnp.sum(x[:, :, None] * W @ W, 1),
    "scan": lambda x: sum_of_scan(lambda c: c @ W, x)[0],
    "cond": lambda x: lax.cond(W[0, 0] < 9, lambda x: x @ W, lambda x: x, x),
}


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_function_can_be_transposed(name):
    transposed = lambda f: jax.jit(lambda y: jax.linear_transpose(f, X)(y))(X)
    for way in WAYS.values():
        assert apart(transposed(way(LINEAR[name])), transposed(LINEAR[name])) < 0.03


by_rule = lambda x, w: linear_call(lambda w, x: x @ w, lambda w, g: g @ w.T, w, x)
as_composite = lambda x, w: lax.composite(jnp.sin, "tests.sine")(block(x, w))


@pytest.mark.parametrize(
    ("fun", "asked"),
    [
        (lambda x, w: block(by_rule(block(x, w), w), w), jax.grad),
        (lambda x, w: sum_of_scan(lambda c: by_rule(block(c, w), w), x)[0], jax.grad),
        (as_composite, lambda f: f),
    ],
    ids=["linear_call", "linear_call in scan", "composite"],
)
def test_a_budget_takes_what_jax_does_not_differentiate_in_all_arguments(fun, asked):
    for way in WAYS.values():
        found, expected = (jax.jit(asked(loss_of(f)))(X, W) for f in (way(fun), fun))
        assert apart([found], [expected]) < 0.03


def transformer(weights, x):
    """Layers of attention and an MLP in a scan."""

    def normed(x):
        return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)

    def layer(x, w):
        q, k, v = jnp.split(normed(x) @ w[0], 3, -1)
        x = x + jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k) / 8) @ v
        return x + jax.nn.gelu(normed(x) @ w[1]) @ w[2], None

    return jnp.mean(lax.scan(layer, x, weights)[0] ** 2)


@pytest.mark.parametrize("budget", [1.0, 0.5, 0])
def test_in_float64_gradients_differ_from_jax_checkpoints_in_the_last_digit_at_most(budget):
    with jax.enable_x64(True):
        key = jax.random.key(0)
        of_shape = lambda *shape: jax.random.normal(key, shape, jnp.float64) / shape[1] ** 0.5
        weights, x = (of_shape(8, 64, 192), of_shape(8, 64, 256), of_shape(8, 256, 64)), of_shape(2, 128, 64)
        found, expected = (
            np.concatenate([np.ravel(g) for g in jax.jit(jax.grad(fun))(weights, x)])
            for fun in (jamp.recompute(transformer, budget), jax.checkpoint(transformer))
        )
    assert found.dtype == np.float64
    assert np.linalg.norm(found - expected) < 1e-15 * np.linalg.norm(expected)


def test_a_scan_over_steps_keeps_every_carry_and_of_two_nested_scans_only_the_outer_carries():
    step = lambda h, x: (jnp.tanh(h @ W + x), None)
    once = lambda h, xs: jnp.mean(lax.scan(step, h, xs)[0] ** 2)
    nested = lambda h, xs: jnp.mean(lax.scan(lambda h, xs: lax.scan(step, h, xs), h, xs)[0] ** 2)
    h, xs = normal(4, 32), normal(100, 4, 32, seed=1)

    kept = lambda fun, xs: round(jamp.memory_report(fun, 0)(h, xs).kept / h.nbytes)  # carries
    assert kept(once, xs) == 100
    assert kept(nested, xs.reshape(5, 20, 4, 32)) == 5
