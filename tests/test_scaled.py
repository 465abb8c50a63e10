"""`scaled`: the function and its derivatives are as before, and its backward pass scales itself and tries again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import equations, normal, products
from programs import program
from trees import assert_close, assert_equal, avals

import jamp

W, X = normal(4, 4) / 2, normal(8, 4, seed=1)


def jit(fun):
    """Compiled so that float16 is rounded to. Else XLA:GPU leaves casts out, and fewer gradients overflow."""
    is_cpu = jax.default_backend() == "cpu"
    return jax.jit(fun, compiler_options=None if is_cpu else {"xla_allow_excess_precision": False})


COMPILED = [pytest.param(jit, id="jit"), pytest.param(lambda fun: fun, id="eager")]


def loss_fn(w, x):
    return jnp.mean((jnp.tanh(x @ w) @ w) ** 2)


def through_float16(gain, dtype=jnp.float16):
    """The mean of w. Its cotangents pass through float16 multiplied by `gain`; all calls are counted in `forward`."""

    @jax.custom_vjp
    def identity(w):
        return w

    def backward(_, g):
        return ((gain * g).astype(dtype).astype(jnp.float32) / gain,)

    def fun(w):
        jax.debug.callback(lambda: fun.forward.append(1))
        return jnp.mean(identity(w))

    identity.defvjp(lambda w: (w, None), backward)
    fun.forward = []
    return fun


def runs(fun, *args):
    """A result, and how often the function was evaluated for it."""
    fun, counted = fun
    counted.forward.clear()
    result = jax.block_until_ready(fun(*args))
    jax.effects_barrier()
    return result, len(counted.forward)


def test_the_scale_and_the_retries_may_be_numbers_of_numpy():
    for scale in (np.float32(2.0**10), np.int64(2**10), np.array(2.0**10)):
        grad = jax.grad(jamp.scaled(lambda w: jnp.sum(w**2), scale, retries=np.int64(0)))
        np.testing.assert_array_equal(grad(jnp.ones(2)), 2.0)


def test_results_are_those_of_the_function_whatever_their_types():
    def fun(w, *, x, name):
        return {"loss": loss_fn(w, x), name: (x.astype(jnp.float16), jnp.arange(3), 2, True, None, lax.complex(w, w))}

    args = {"x": X, "name": "aux"}
    for wrap in (lambda f: f, jax.jit):
        found, expected = (wrap(lambda w, f=f: f(w, **args))(W) for f in (jamp.scaled(fun), fun))
        assert_equal(*(jax.tree.map(jnp.asarray, tree) for tree in (found, expected)))
        assert avals(wrap(lambda w: jamp.scaled(fun)(w, **args))(W)) == avals(jax.jit(lambda w: fun(w, **args))(W))
    (value, aux), grads = jax.value_and_grad(jamp.scaled(lambda w: (loss_fn(w, X), {"n": 3, "w": w})), has_aux=True)(W)
    assert_equal((value, aux["w"], int(aux["n"])), (loss_fn(W, X), W, 3))
    assert_equal(grads, jax.grad(loss_fn)(W, X))
    assert jamp.scaled(fun).__name__ == "fun"


def inside(fun):
    """A loss in which the function is a part."""
    return lambda w: jnp.sum(jnp.sin(fun(jnp.cos(w), X)) * 3.0) + jnp.sum(w)


KEY = jax.random.key(3)
TRANSFORMED = {
    "grad": lambda f: jax.grad(f)(W, X),
    "argnums": lambda f: jax.grad(f, (0, 1))(W, X),
    "second": lambda f: jax.grad(f, 1)(W, X),
    "jit": lambda f: jax.jit(jax.grad(jax.jit(f)))(W, X),
    "vmap of nothing": lambda f: jax.vmap(lambda _: f(W, X), out_axes=None)(jnp.ones(2)),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f), (None, 0))(W, X[:, None]),
    "grad of vmap": lambda f: jax.grad(lambda w: jax.vmap(f, (None, 0))(w, X[:, None]).mean())(W),
    "vmap of both": lambda f: jax.grad(lambda w: jax.vmap(f)(w, jnp.stack([X, 2 * X])).sum())(jnp.stack([W, -W])),
    "scan": lambda f: jax.grad(lambda w: lax.scan(lambda c, x: (c + f(w + c, x[None]), None), 0.0, X)[0])(W),
    "map": lambda f: jax.grad(lambda w: lax.map(lambda x: f(w, x[None]), X).sum())(W),
    "cond": lambda f: jax.grad(lambda w: lax.cond(w[0, 0] < 9, f, lambda w, x: 0.0, w, X))(W),
    "remat": lambda f: jax.grad(jax.checkpoint(f))(W, X),
    "of remat": lambda f: jax.grad(jamp.scaled(jax.checkpoint(loss_fn)) if f is not loss_fn else f)(W, X),
    "value of remat": lambda f: jamp.scaled(jax.checkpoint(loss_fn))(W, X) if f is not loss_fn else f(W, X),
    "inside": lambda f: jax.grad(inside(f))(W),
    "closed over": lambda f: (
        jax.grad(lambda w: jamp.scaled(lambda x: loss_fn(jnp.sin(w), x), retries=0)(X))(W)
        if f is not loss_fn
        else jax.grad(lambda w: loss_fn(jnp.sin(w), X))(W)
    ),
    "jvp": lambda f: jax.jvp(f, (W, X), (W + 1, X)),
    "jvp of jvp": lambda f: jax.jvp(lambda w: jax.jvp(lambda w: f(w, X), (w,), (W,))[1], (W,), (W + 1,)),
    "linearize": lambda f: jax.linearize(lambda w: f(w, X), W)[1](W),
    "hessian": lambda f: jax.jacfwd(jax.grad(f))(W, X),
    "vmap of jvp": lambda f: jax.vmap(lambda t: jax.jvp(lambda w: f(w, X), (W,), (t,))[1])(jnp.stack([W, X[:4]])),
    "random": lambda f: jax.grad(lambda w, key: f(w + jax.random.normal(key, w.shape), X))(W, KEY),
}


@pytest.mark.slow_after(12)
@pytest.mark.parametrize("name", TRANSFORMED)
def test_derivatives_are_those_of_the_function_under_every_transformation(name):
    both = lambda: [TRANSFORMED[name](f) for f in (jamp.scaled(loss_fn), loss_fn)]
    found, expected = both() if name == "grad" else jax.jit(both)()  # "grad" runs operation by operation
    assert_close(found, expected, 1e-5)


@pytest.mark.slow
def test_two_reverse_passes_need_a_backward_pass_without_retries():
    penalty = lambda f: jax.jit(jax.grad(lambda w: jnp.sum(jax.grad(f)(w, X) ** 2)))(W)
    assert_close(penalty(jamp.scaled(loss_fn, retries=0)), penalty(loss_fn), 1e-5)
    eager = lambda f: jax.grad(lambda w: jnp.sum(jax.grad(f)(w, X) ** 2))(W)
    vmapped = lambda f: jax.vmap(lambda c: jax.grad(lambda w: jnp.sum(c * jax.grad(f)(w, X)))(W))(jnp.ones(2))
    for twice in (penalty, eager, vmapped, lambda f: jax.jit(jax.jacrev(jax.grad(f)))(W, X)):
        with pytest.raises(ValueError, match="retries=0"):
            twice(jamp.scaled(loss_fn))


def test_a_backward_rule_that_is_not_linear_gets_scaled_cotangents():
    clip_gradient = jax.custom_vjp(lambda x: x)
    clip_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-2, 1e-2),))
    fun, w, state = lambda w: jnp.sum(clip_gradient(w) * 1e-3), jnp.ones(2), jamp.StaticLossScale(2.0**10).init()
    for grad, expected in (
        (jax.grad(fun), 1e-3),
        (jax.grad(jamp.scaled(fun)), 1e-2 / 2**15),
        (jamp.grad(fun, state), 1e-2 / 2**10),
        (lambda w: jax.grad(lambda w: jamp.scale_loss(fun(w), state))(w) / 2**10, 1e-2 / 2**10),
    ):
        np.testing.assert_allclose(grad(w), [expected] * 2, rtol=1e-6)


SEEDS = [pytest.param(seed, marks=[pytest.mark.slow] * (seed != 30)) for seed in range(6, 60, 12)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_of_random_programs_are_equal(seed):
    fun = lambda x, w: jnp.sum(jnp.sin(program(seed)[0](jnp.matmul, x, w)))
    args = normal(32, 32, seed=seed), normal(32, 32, seed=seed + 1) / 4
    gradients = [jax.jit(jax.grad(f, (0, 1)))(*args) for f in (fun, jamp.scaled(fun), jamp.scaled(jax.jit(fun)))]
    for found in gradients[1:]:
        for x, y in zip(found, gradients[0], strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * np.abs(y).max())


@pytest.mark.parametrize("size", [0.0, 3e-37, 1e-30, 1e-5, 1.0, 3e5, 1e30, np.inf, np.nan])
def test_cotangents_of_any_size_are_brought_to_the_scale(size):
    """Gradients that float16 would lose are exact, and those of a cotangent that is not finite are not."""
    fun = jamp.scaled(lambda w: (through_float16(1.0)(w), through_float16(2.0**-10)(w)), retries=2)
    (found,) = jax.jit(lambda g: jax.vjp(fun, jnp.ones(2))[1]((g, g / 8)))(jnp.float32(size))
    np.testing.assert_allclose(found, [size * 1.125 / 2] * 2, rtol=2e-3)


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize(
    ("gain", "retries", "expected", "tries"),
    [
        (1.0, 2, 0.5, 1),
        (2.0**3, 2, 0.5, 2),  # repaired at the second try
        (2.0**12, 2, 0.5, 3),  # at the last
        (2.0**12, 1, np.inf, 2),
        (2.0**30, 2, np.inf, 3),  # never
        (2.0**30, 4, 0.5, 4),
        (2.0**3, 0, np.inf, 1),
    ],
)
def test_an_overflow_is_repaired_by_as_many_tries_as_it_needs(compiled, gain, retries, expected, tries):
    fun = through_float16(gain)
    gradient = compiled(jax.grad(jamp.scaled(fun, retries=retries)))
    assert_equal(*map(np.float32, ([expected] * 2, runs((gradient, fun), jnp.ones(2))[0])))
    assert runs((gradient, fun), jnp.ones(2))[1] == tries


def test_each_member_of_a_vmap_has_its_own_scale_and_tries():
    def fun(w, gain):
        return jnp.mean(lax.switch(gain, [through_float16(g) for g in (1.0, 2.0**12, 2.0**30)], w))

    found = jit(jax.vmap(jax.grad(jamp.scaled(fun)), (None, 0)))(jnp.ones(2), jnp.arange(3))
    assert_equal(found, jnp.array([[0.5, 0.5], [0.5, 0.5], [np.inf, np.inf]], jnp.float32))


def test_what_no_scale_repairs_is_not_tried_again():
    fun = through_float16(1.0)
    for size in (np.inf, np.nan, 0.0):
        pull_back = lambda w, size=size: jax.vjp(jamp.scaled(fun), w)[1](jnp.float32(size))
        assert runs((jax.jit(pull_back), fun), jnp.ones(2))[1] == 1


def test_the_scale_is_the_largest_cotangent_and_a_power_of_two():
    seen = []

    @jax.custom_vjp
    def watched(w):
        return w

    watched.defvjp(lambda w: (w, None), lambda _, g: (jax.debug.callback(lambda g: seen.append(g.max()), g), (g,))[1])
    for scale in (2.0**15, 3.0, 1, 0.3):
        for size in (1.0, 1e-7, 5.0):
            jax.grad(lambda w, c=scale, size=size: size * jamp.scaled(lambda w: watched(w).sum(), c)(w))(jnp.ones(2))
            jax.effects_barrier()
            assert scale / 2 < seen[-1] < 2 * scale
            assert np.log2(seen[-1] / np.float32(size)) % 1 == 0


def test_only_what_is_differentiated_is_and_16_bit_gradients_keep_their_dtype():
    gradient = jax.grad(jamp.scaled(lambda w, frozen, n: jnp.sum((X @ frozen @ w) ** n)))
    assert len(products(lambda: gradient(W, W, 2))) == 1
    dots = [eqn for eqn in equations(jax.make_jaxpr(gradient)(W, W, 2)) if eqn.primitive.name == "dot_general"]
    plain = jax.make_jaxpr(jax.grad(lambda w, frozen: jnp.sum((X @ frozen @ w) ** 2)))(W, W)
    once = sum(eqn.primitive.name == "dot_general" for eqn in equations(plain))
    assert len(dots) == 2 * once + 2  # and in the loop, with a dot of the check in each
    assert jax.grad(jamp.scaled(loss_fn))(W.astype(jnp.bfloat16), X.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    with pytest.warns(UserWarning, match="in float32"):
        jax.grad(jamp.scaled(lambda w: jnp.sum(w.astype(jnp.float32))))(W.astype(jnp.float16))


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("order", ["scaled(autocast)", "autocast(scaled)", "autocast(grad(scaled))"])
def test_with_autocast_in_either_order_products_are_16_bit_and_digits_stay(order):
    tiny = lambda w, x: 1e-6 * loss_fn(w, x)
    auto = jamp.autocast(tiny, jnp.float16)
    fun = {
        "scaled(autocast)": jax.grad(jamp.scaled(auto)),
        "autocast(scaled)": jax.grad(jamp.autocast(jamp.scaled(tiny), jnp.float16)),
        "autocast(grad(scaled))": jamp.autocast(jax.grad(jamp.scaled(tiny)), jnp.float16),
    }[order]
    args = normal(64, 64) / 8, normal(64, 64, seed=1)
    dots = [eqn for eqn in equations(jax.make_jaxpr(fun)(*args)) if eqn.primitive.name == "dot_general"]
    large = [eqn for eqn in dots if eqn.invars[0].aval.size > 2]
    assert {v.aval.dtype for eqn in large for v in eqn.invars} == {jnp.dtype(jnp.float16)}
    found, expected = jax.jit(fun)(*args), jax.grad(tiny)(*args)
    apart = lambda x: np.linalg.norm(x - expected) / np.linalg.norm(expected)
    assert apart(found) < 3e-3
    assert apart(jax.jit(jax.grad(auto))(*args)) > 0.05  # Without a scale digits are lost.


@pytest.mark.slow
def test_an_8_bit_format_and_a_memory_budget_around_reach_the_products_inside():
    """They do not reach the rules of a `custom_vjp`, which is why `scaled` has primitives of its own."""
    args = normal(128, 128) / 8, normal(256, 128, seed=1)
    fun = lambda w, x: deep(w, x, layers=4)
    quantized = lambda f: jamp.autocast(f, jamp.Float8(), rules={"dot_general": "compute"})
    found, expected = (jax.grad(quantized(f)) for f in (jamp.scaled(fun, retries=0), fun))
    eight = products(expected, *args)
    assert eight == {jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)}
    assert products(found, *args) - {jnp.dtype(jnp.float32)} == eight  # float32 is the check
    assert_close(jax.jit(found)(*args), jax.jit(expected)(*args), 0.02)
    report = jamp.memory_report(jamp.scaled(fun), 0.5)(*args)
    assert 0 < report.kept <= 0.5 * report.without_budget
    recomputed = jax.jit(jax.grad(jamp.recompute(jamp.scaled(fun), 0.5)))
    assert_close(recomputed(*args), jax.jit(jax.grad(fun))(*args), 1e-5)


@pytest.mark.parametrize("retries", [0, 2])
def test_auxiliary_results_take_no_part_in_the_backward_pass(retries):
    def fun(w, x):
        h = x @ w
        return jnp.mean(h**2), {"other": jnp.sin(jnp.tanh(h) @ w) @ w, "n": 3}

    def dots(f):
        jaxpr = jax.make_jaxpr(jax.value_and_grad(f, has_aux=True))(W, X)
        wide = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "dot_general" and eqn.outvars[0].aval.ndim]
        return len(wide)

    assert dots(jamp.scaled(fun, retries=retries)) == dots(fun) + (3 + 1) * (retries > 0)
    (_, aux), grads = jax.value_and_grad(jamp.scaled(fun, retries=retries), has_aux=True)(W, X)
    assert_equal((aux["other"], grads), (fun(W, X)[1]["other"], jax.grad(fun, has_aux=True)(W, X)[0]))
    with_zero = jax.vjp(jamp.scaled(lambda w: fun(w, X)[0]), W)[1](jnp.float32(0.0))
    assert_equal(with_zero[0], jnp.zeros_like(W))


def deep(w, x, layers=12):
    """A chain of products and nonlinearities that keeps an array for each."""
    for _ in range(layers):
        x = jnp.sin(x @ w)
    return jnp.mean(x**2)


def test_retries_need_no_memory():
    args = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    program = lambda f: jax.jit(jax.grad(f)).lower(*args).compile()
    memory = lambda f: program(f).memory_analysis().temp_size_in_bytes
    plain, once = memory(deep), memory(jamp.scaled(deep, retries=0))
    assert plain > 12 * 4096 * 64 * 4
    assert once <= plain * 1.01
    assert memory(jamp.scaled(deep)) <= plain * 1.05


@pytest.mark.parametrize("gains", [(2.0**3,) * 4, (1.0, 1.0, 2.0**12, 2.0**3)])
def test_replicas_that_communicate_scale_alike_and_try_again_together(gains):
    """Each has a cotangent of another size, and the gradients of some overflow."""

    @jax.custom_vjp
    def through(w, gain):
        return jnp.mean(w)

    half = lambda x: x.astype(jnp.float16).astype(jnp.float32)
    backward = lambda gain, g: (jnp.full(2, half(g * gain) / gain / 2), jnp.zeros_like(gain))
    through.defvjp(lambda w, gain: (jnp.mean(w), gain), backward)
    fun = jamp.scaled(lambda w, gain: lax.pmean(through(w, gain), "i"))
    pull_back = jax.vmap(lambda w, gain, g: jax.vjp(fun, w, gain)[1](g)[0], axis_name="i")
    sizes = jnp.array([1.0, 1e-3, 7.0, 1e4])
    found = jax.jit(pull_back)(jnp.ones((4, 2)), jnp.array(gains), sizes)
    np.testing.assert_allclose(found, np.full((4, 2), float(sizes.mean()) / 2), rtol=1e-3)


def test_outside_jit_no_loop_is_compiled(monkeypatch):
    monkeypatch.setattr(lax, "while_loop", None)
    assert_equal(jax.grad(jamp.scaled(loss_fn))(W, X), jax.grad(loss_fn)(W, X))


def test_a_state_of_numbers_or_objects_among_the_arguments_is_not_traced():
    def fun(w, options, axis):
        assert options == {"power": 2, "name": "x"}
        return jnp.sum(w.sum(axis) ** options["power"])

    options = {"power": 2, "name": "x"}
    assert_equal(jax.grad(jamp.scaled(fun))(W, options, np.int64(0)), jax.grad(fun)(W, options, 0))
    assert functools.partial(jamp.scaled(fun), W)(options, 1) == fun(W, options, 1)


def test_a_container_that_the_function_changes_is_changed():
    def fun(state, w):
        state["inner"]["seen"][0] = state["inner"]["seen"][0] + jnp.sum(w)
        return jnp.sum(w**2)

    for transform in (jamp.scaled, functools.partial(jamp.autocast, compute_dtype=jnp.float16)):
        state = {"inner": {"seen": [jnp.float32(1.0), 3]}}
        transform(fun)(state, W)
        assert_equal(state["inner"]["seen"][0], 1.0 + jnp.sum(W))


@jax.tree_util.register_pytree_node_class
class Rebuilt:
    """A class that makes new arrays whenever it is flattened, and does not name its parts."""

    def __init__(self, x):
        self.x = x

    def tree_flatten(self):
        return (self.x + 0,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_an_argument_that_is_rebuilt_is_not_taken_for_a_changed_one():
    for transform in (jamp.scaled, functools.partial(jamp.autocast, compute_dtype=jnp.float16)):
        assert_equal(transform(lambda a: jnp.sum(a.x))(Rebuilt(W)), jnp.sum(W))
