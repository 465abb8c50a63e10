"""`recompute`, and `autocast` with a budget, where `jax.checkpoint` stands: what JAX promises of it holds of them."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxprs import normal
from trees import assert_close, avals

import jamp

pytestmark = pytest.mark.filterwarnings("ignore:The memory budget is", "ignore:autocast changes no product")
W, X = normal(32, 32, scale=0.15), normal(32, 32, seed=1)
WAYS = {
    "recompute 1.0": lambda f: jamp.recompute(f, 1.0),
    "recompute 0.5": lambda f: jamp.recompute(f, 0.5),
    "recompute 0": lambda f: jamp.recompute(f, 0),
    "autocast 0.5": lambda f: jamp.autocast(f, jnp.bfloat16, memory_budget=0.5),
    "float32 0.5": lambda f: jamp.autocast(f, jnp.float32, memory_budget=0.5),
}


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


@jax.custom_batching.custom_vmap
def mapped(x):
    return jnp.sin(x)


@mapped.def_vmap
def _mapped_rule(size, batched, x):
    return jnp.sin(x), batched[0]


by_constants = jax.custom_jvp(lambda x: x * jnp.arange(32.0))
by_constants.defjvp(lambda p, t: (by_constants(p[0]), t[0] * jnp.arange(32.0)))
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
    "printed": lambda x, w: (y := x @ w, jax.debug.callback(lambda y: None, y))[0] @ w,
    "of no size": lambda x, w: block(x, w) + jnp.sum(x[:0] @ w),
    "convolution": lambda x, w: lax.conv(x[None, None], w[None, None, :3, :3], (1, 1), "SAME") + 1.0,
}
FIRST, REVERSE_ONLY = list(PROGRAMS)[:4], ("rules", "printed", "while")


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
        if "autocast" in way:
            assert apart(result[:2], expected[:2]) < 0.03
        else:
            assert_close(result, expected, rtol=1e-3, atol=1e-5)
