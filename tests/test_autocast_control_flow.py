"""What autocast enters and what it does not: jit, loops, branches, remat, custom derivatives, shard_map, kernels."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import linear_call
from jax.experimental import pallas as pl
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh, PartitionSpec as P
from jaxprs import carried, dtypes, equations, name_of, normal, operand_dtypes, params, products
from norms import distance, total, under_autocast
from pairs import of_pair
from programs import by_operation, reference

import jamp
from jamp._autocast.cast import cast
from jamp._autocast.rules import RULES
from jamp._autocast.target import Target
from jamp._jaxprs import constructs
from jamp._products.lower import lower

F16, BF16, F32 = jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
MESH = Mesh(np.array(jax.devices()[:1]), ("i",))
W, X, SQUARE = normal(16, 16, scale=0.25), normal(12, 16, seed=1), normal(16, 16, scale=0.5)


def found(name, fun, *args):
    """The equations of a primitive."""
    return [e for e in equations(jax.make_jaxpr(fun)(*args)) if name_of(e) == name]


def step(w, x):
    return jnp.tanh(x @ w)


def by_while(w, x):
    more = lambda c: (jnp.sum(c[1] @ w) < 1e4) & (c[0] < 3)
    return lax.while_loop(more, lambda c: (c[0] + 1, step(w, c[1]) + 1), (jnp.int32(0), x))[1]


LOOPS = {
    "scan": lambda w, x: lax.scan(lambda c, _: (step(w, c), c), x, None, length=3),
    "scan over layers": lambda w, x: lax.scan(lambda c, w: (step(w, c), jnp.sum(c)), x, jnp.stack([w, w.T]))[0],
    "reversed": lambda w, x: lax.scan(
        lambda c, y: (c + step(w, y), y @ w), x, jnp.stack([x, x]), reverse=True, unroll=2
    ),
    "while": by_while,
    # Its count is weakly typed.
    "counting": lambda w, x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(w, c[1])), (0, x))[1],
}
# What random programs do not hold: tests/programs.py.
ENTERED = LOOPS | {
    "cond": lambda w, x: lax.cond(x.sum() > -1e3, lambda x: step(w, x), lambda x: x * 2, x),
    "shard_map": jax.shard_map(
        lambda w, x: lax.psum(x @ w, "i"), mesh=MESH, in_specs=(P(), P(None, "i")), out_specs=P()
    ),
    "associative scan": lambda w, x: lax.associative_scan(lambda a, b: a @ b, jnp.stack([w, w, w])) @ x.T,
    "platform_dependent": lambda w, x: lax.platform_dependent(w, x, cpu=step, default=lambda w, x: 2 * step(w, x)),
    "linear_call": lambda w, x: linear_call(lambda x, w: x @ w, lambda x, ct: x.T @ ct, lax.stop_gradient(x), w),
    "ragged_dot": lambda w, x: lax.ragged_dot(x, jnp.stack([w, w]), jnp.int32([4, 8])),
    "a loop whose end is batched": lambda w, x: jax.vmap(
        lambda n, x: lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, step(w, c[1])), (jnp.int32(0), x))[1]
    )(jnp.arange(len(x)) % 3, x),
}


@pytest.mark.slow_after(12)
@pytest.mark.promotes("x64 makes Python numbers float64")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[pytest.mark.slow] * (dtype == F32 and i % 3 > 0))
        for i, name in enumerate(ENTERED)
        for dtype in (F16, F32)
    ],
)
def test_products_inside_control_flow_are_narrow_and_so_are_those_of_the_gradient(name, dtype):
    fun, eps = ENTERED[name], float(jnp.finfo(dtype).eps)
    with of_pair(dtype) as cast:
        args = cast(W), cast(X)
        low = jamp.autocast(fun, dtype)
        assert products(low, *args) == {dtype}, name
        loops = [e for kind in ("scan", "while") for e in found(kind, low, *args)]
        assert loops or name not in LOOPS
        assert dtype not in [v.aval.dtype for e in loops for v in e.outvars[: len(carried(e))]]
        if name in ("while", "counting", "a loop whose end is batched"):  # without a gradient
            assert distance(*jax.jit(lambda *args: (low(*args), fun(*args)))(*args)) < 5 * eps
        else:
            assert products(jax.grad(lambda *args: total(low(*args))), *args) == {dtype}
            results, grads = under_autocast(fun, *args, dtype=dtype)
            assert results < 5 * eps
            assert grads < 10 * eps


def test_a_carry_adds_up_in_float32_and_what_a_scan_stacks_is_16_bit():
    fun = lambda x: lax.fori_loop(0, 3000, lambda i, total: total + (x @ x)[0, 0], jnp.float32(0))
    assert jamp.autocast(fun, jnp.float16)(jnp.eye(16)) == 3000.0
    fun = lambda w, x: lax.scan(lambda c, y: (c, y @ w), 0, x)[1] @ w
    (scan,) = found("scan", jamp.autocast(fun, jnp.float16), W, normal(5, 3, 16))
    assert scan.outvars[-1].aval.dtype == F16


def test_a_branch_gives_16_bit_only_if_all_branches_do():
    for other, expected in ((lambda h: h, F16), (jnp.exp, F32)):
        fun = lambda x, p, other=other: lax.cond(p, jnp.transpose, other, x @ x) * 2
        (cond,) = found("cond", jamp.autocast(fun, jnp.float16), SQUARE, True)
        assert cond.outvars[0].aval.dtype == expected
        assert max(under_autocast(fun, SQUARE, True)) < 5e-3


def test_remat_keeps_its_policy_and_recomputes():
    policies, counts = jax.checkpoint_policies, []
    for policy in (policies.everything_saveable, policies.nothing_saveable, policies.dots_saveable):
        fun = lambda w, x, p=policy: jnp.sum(jax.checkpoint(lambda w, x: jnp.sin(jnp.sin(x @ w) @ w), policy=p)(w, x))
        # The last one is the gradient of a remat, transformed.
        grads = [jax.grad(fun), jax.grad(jamp.autocast(fun, jnp.float16)), jamp.autocast(jax.grad(fun), jnp.float16)]
        ops = [[len(found(name, grad, W, X)) for name in ("dot_general", "cos", "remat2")] for grad in grads]
        assert ops[0] == ops[1] == ops[2]
        counts.append(ops[0][0])
    assert counts[1] > counts[2]
    (remat,) = found("remat2", jamp.autocast(fun, jnp.float16), W, X)
    assert params(remat)["policy"] is not None


def test_a_jit_inside_stays_one_function_and_keeps_its_shardings():
    layer = jax.jit(lambda w, x: jnp.tanh(x @ w))
    calls = found("jit", jamp.autocast(lambda w, x: layer(w, layer(w, x) * 1.0), jnp.float16), W, SQUARE)
    assert len([e for e in calls if e.params["name"] == "<lambda>"]) == 2
    sharding = jax.sharding.NamedSharding(MESH, P("i"))
    (call,) = found("jit", jamp.autocast(jax.jit(lambda x: x @ x, out_shardings=sharding), jnp.float16), SQUARE)
    assert call.params["out_shardings"] == (sharding,)


def test_autocast_inside_a_map_with_an_axis_name():
    def body(x):
        x = lax.scan(lambda c, _: (jax.nn.relu(c @ x), None), x, None, length=2)[0]
        return lax.pmean(x, "i") + lax.axis_index("i").astype(x.dtype)

    on_mesh = functools.partial(jax.shard_map, mesh=MESH, in_specs=P("i"), out_specs=P("i"))
    for over, x in ((functools.partial(jax.vmap, axis_name="i"), normal(2, 16, 16, scale=0.5)), (on_mesh, SQUARE)):
        assert products(over(jamp.autocast(body, jnp.float16)), x) == {F16}
        totals = [
            jax.value_and_grad(lambda x, f=over(f): jnp.sum(f(x))) for f in (jamp.autocast(body, jnp.float16), body)
        ]
        assert distance(*jax.jit(lambda x, totals=totals: [f(x) for f in totals])(x)) < 1e-2


# Custom derivatives: the author's rule stays.


def tripled(rule):
    """x @ y, with a derivative that is three times the true one."""
    if rule == "jvp":
        fun = jax.custom_jvp(lambda x, y: x @ y)
        fun.defjvp(lambda p, t: (fun(*p), 3 * (t[0] @ p[1] + p[0] @ t[1])))
    else:
        fun = jax.custom_vjp(lambda x, y: x @ y)
        fun.defvjp(lambda x, y: (fun(x, y), (x, y)), lambda r, g: (3 * g @ r[1].T, 3 * r[0].T @ g))
    return fun


@pytest.mark.parametrize("rule", ["jvp", "vjp"])
@pytest.mark.parametrize("before", [lambda x: x, lambda x: x @ x], ids=["of float32", "of 16 bit"])
def test_a_custom_rule_is_kept_and_its_products_are_16_bit(rule, before):
    fun = lambda xy: jnp.sum(jnp.tanh(tripled(rule)(before(xy[0]), xy[1])))
    pair = 0.4 * SQUARE, W
    assert (
        products(jax.grad(jamp.autocast(fun, jnp.float16)), pair)
        == products(jamp.autocast(fun, jnp.float16), pair)
        == {F16}
    )
    results, grads = under_autocast(fun, pair)
    assert results < 5e-3
    assert grads < 1e-2


def test_a_custom_rule_may_ask_for_zeros_return_integers_and_close_over_arrays():
    is_zero = lambda t: type(t).__name__ == "SymbolicZero"
    asks = jax.custom_jvp(lambda x, y: x @ y)
    asks.defjvp(lambda p, t: (asks(*p), (3.0 if is_zero(t[1]) else 0.0) * (t[0] @ p[1])), symbolic_zeros=True)
    told = jax.custom_vjp(lambda x, y: x @ y)
    told.defvjp(
        lambda x, y: (told(x.value, y.value), (y.value, 0.0 if y.perturbed else 3.0)),
        lambda res, g: (res[1] * (g @ res[0].T), None),
        symbolic_zeros=True,
    )
    counts = jax.custom_vjp(lambda x, y: (x @ y, jnp.argmax(x)))
    counts.defvjp(lambda x, y: (counts(x, y), (x, y)), lambda res, g: (g[0] @ res[1].T, res[0].T @ g[0]))
    closes = jax.custom_vjp(lambda x: x @ x * W)
    closes.defvjp(lambda x: (closes(x), x), lambda x, g: ((g * W) @ x.T,))
    for fun in (lambda x: asks(x, W), lambda x: told(x, W), lambda x: counts(x, W)[0], closes):
        assert products(jax.grad(lambda x, fun=fun: total(jamp.autocast(fun, jnp.float16)(x))), SQUARE) == {F16}
        assert max(under_autocast(fun, SQUARE)) < 5e-3


def test_a_custom_rule_whose_forward_pass_may_be_computed_again_is_entered():
    own = jax.custom_vjp(lambda x, w: jnp.tanh(x @ w) @ w)
    rule = lambda r, g: (g @ r[1].T @ r[1].T, r[0].T @ g)
    own.defvjp(lambda x, w: (own(x, w), (x, w)), rule, optimize_remat=True)
    fun = lambda x, w: jnp.sum(own(x @ w, w) ** 2)
    for wrap in (lambda f: f, jax.checkpoint):
        grad = jax.grad(wrap(jamp.autocast(fun, jnp.float16)))
        assert products(grad, SQUARE, W) == {F16}
        assert distance(*jax.jit(lambda x, w, g=grad: (g(x, w), jax.grad(fun)(x, w)))(SQUARE, W)) < 1e-2


def test_what_a_custom_forward_rule_saves_is_16_bit():
    fun = jax.custom_vjp(lambda x, w: x @ w)
    fun.defvjp(lambda x, w: (y := x @ w, (y, w)), lambda r, g: (g @ r[1].T * r[0].mean(), g * 0 + r[0]))
    loss = jamp.autocast(lambda x: jnp.sum(fun(x @ x, x) @ x), jnp.float16)
    residuals = jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(loss, x)[1], SQUARE))
    assert [r.dtype for r in residuals].count(F32) <= 1  # x itself
    assert F16 in {r.dtype for r in residuals}
    assert products(jax.grad(loss), SQUARE) == {F16}


def test_custom_rules_with_integer_operands_batching_and_second_derivatives():
    number = lambda n: n.astype(jnp.float32)
    scaled = jax.custom_jvp(lambda n, x: number(n) * (x @ x))
    scaled.defjvp(lambda p, t: (scaled(*p), number(p[0]) * (t[1] @ p[1] + p[1] @ t[1])))
    cut = jax.custom_vjp(lambda n, x: number(n) * (x @ x))
    cut.defvjp(lambda n, x: (cut(n, x), (n, x)), lambda r, g: (None, number(r[0]) * (g @ r[1].T + r[1].T @ g)))

    def derivatives(f, xs):
        second = jax.grad(lambda xs: jnp.sum(jax.grad(lambda y: jax.vmap(f)(y).sum())(xs) ** 2))(xs)
        return jax.vmap(jax.grad(f))(xs), second

    for fun in (scaled, cut):
        loss = lambda x, fun=fun: jnp.sum(jnp.tanh(fun(jnp.int32(2), x)))
        both = jax.jit(lambda xs, f=loss: (derivatives(jamp.autocast(f, jnp.float16), xs), derivatives(f, xs)))
        for mine, plain in zip(*both(normal(2, 16, 16, scale=0.25)), strict=True):
            assert distance(mine, plain) < 3e-2


# What is not entered.


def test_a_pallas_call_runs_in_the_dtypes_it_was_traced_with():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    double = lambda x: pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)
    fun = lambda x: double(x @ x)
    assert dtypes(jamp.autocast(fun, jnp.float16), SQUARE, names=("pallas_call",)) == {F32}
    assert distance(jamp.autocast(fun, jnp.float16)(SQUARE), fun(SQUARE)) < 5e-3
    (row,) = [r for r in jamp.autocast_report(fun, jnp.float16)(SQUARE).rows if r.operation == "pallas_call"]
    assert (row.category, row.after) == ("no rule", "float32 -> float32")


def test_callbacks_see_the_dtypes_of_the_function(capsys):
    def fun(x):
        h = x @ x
        jax.debug.print("sum {}", h.sum(), ordered=True)
        return jax.pure_callback(lambda h: h * 2, jax.ShapeDtypeStruct(h.shape, F32), h)

    np.testing.assert_allclose(jax.jit(jamp.autocast(fun, jnp.float16))(jnp.eye(16)), 2 * np.eye(16))
    jax.effects_barrier()
    assert capsys.readouterr().out == "sum 16.0\n"


def test_a_construct_without_what_jamp_reads_is_not_entered_and_reported(monkeypatch):
    by_scan = LOOPS["scan"]
    assert products(jamp.autocast(by_scan, jnp.float16, rules={"scan": "float32"}), W, X) == {
        F32
    }  # A rule keeps it out, too.
    scan = constructs.CONSTRUCTS["scan"]._replace(parameters=(frozenset({"jaxpr", "a parameter that is gone"}),))
    monkeypatch.setitem(constructs.CONSTRUCTS, "scan", scan)
    with pytest.warns(UserWarning, match=r"scan at .* gives it parameters that autocast does not know; cast its"):
        assert products(jamp.autocast(by_scan, jnp.float16), W, X) == {F32}
    (row,) = jamp.autocast_report(by_scan, jnp.float16)(W, X).rows
    assert (row.operation, row.category) == ("scan", "not entered")


def test_a_parameter_that_a_later_release_invents_is_carried_through():
    for fun in (jax.jit(step), LOOPS["scan"], ENTERED["cond"], jax.checkpoint(step), ENTERED["shard_map"]):
        closed = jax.make_jaxpr(fun)(W, X)
        eqns = [e.replace(params={**e.params, "invented": 3}) if constructs.bodies(e) else e for e in closed.jaxpr.eqns]
        later = jax.extend.core.ClosedJaxpr(closed.jaxpr.replace(eqns=eqns), closed.consts)
        rewritten = lower(cast(later, Target(F16, RULES), None, lower)[0])
        assert operand_dtypes(rewritten, ["dot_general"]) == {F16}
        assert [e.params["invented"] for e in rewritten.jaxpr.eqns if "invented" in e.params] == [3]


def test_linear_algebra_and_a_ref_inside_a_function_are_float32():
    def fun(x):
        ref = jax.new_ref(jnp.zeros((16, 16)))
        ref[...] = jnp.linalg.solve(x @ x + 4 * jnp.eye(16), x)
        return ref[...] + 1

    assert distance(*jax.jit(lambda x: (jamp.autocast(fun, jnp.float16)(x), fun(x)))(SQUARE)) < 2e-2
    assert dtypes(jamp.autocast(fun, jnp.float16), SQUARE, names=("triangular_solve", "lu")) == {F32}


# Regions.


@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit, jax.vmap, jax.checkpoint, lambda f: functools.partial(lax.map, f)]
)
def test_full_precision_is_a_region_that_autocast_does_not_touch(wrap):
    fun = lambda x: wrap(jamp.full_precision(lambda y: y @ y))(x @ x)
    x = normal(3, 16, 16)
    operands = lambda f: [e.invars[0].aval.dtype for e in found("dot_general", f, x)]
    assert operands(jamp.autocast(fun, jnp.float16)) == [F16, F32]
    for grad in (
        jax.grad(lambda x: jamp.autocast(fun, jnp.float16)(x).sum()),
        jamp.autocast(jax.grad(lambda x: fun(x).sum()), jnp.float16),
    ):
        # A product, and two for its gradient.
        assert (operands(grad).count(F16), operands(grad).count(F32)) == (3, 3)


def test_full_precision_is_a_decorator_of_functions_and_methods_also_around_loops():
    @jamp.full_precision
    def fun(x, power, *, scale=1.0):
        return scale * x**power

    assert fun.__name__ == "fun"
    assert fun(2.0, 3, scale=2.0) == 16.0

    class Head:
        @jamp.full_precision
        def __call__(self, x):
            return lax.fori_loop(0, 2, lambda i, c: jnp.tanh(c @ x), x)

    assert products(jamp.autocast(lambda x: Head()(x), jnp.float16), SQUARE) == {F32}
    # Autocast inside autocast keeps the inner dtype.
    assert products(jamp.autocast(lambda x: jamp.autocast(lambda y: y @ y, BF16)(x), jnp.float16), SQUARE) == {BF16}


def test_a_product_that_a_loop_without_a_carry_reads_has_a_float32_cotangent():
    def loss(dot, x, w):
        h = dot(x, w)
        return lax.map(lambda y: jnp.sum(jnp.tanh(h * y)), jnp.linspace(0.5, 1.5, 500)).sum()

    x, w = normal(8, 16), normal(16, 8, seed=1, scale=0.25)
    ways = (jamp.autocast(lambda x, w: loss(jnp.matmul, x, w), BF16), functools.partial(loss, reference(BF16)))
    mine, hand, truth = (np.float64(jax.jit(jax.grad(f))(x, w)) for f in (*ways, functools.partial(loss, jnp.matmul)))
    assert np.linalg.norm(mine - truth) < 2 * np.linalg.norm(hand - truth)


def test_what_a_vmap_around_autocast_copies_has_a_float32_cotangent():
    prompt, tokens, w = normal(4, 16), normal(500, 4, 16, seed=1), normal(16, 16, seed=2, scale=0.25)
    goal = normal(500, 8, 16, seed=3)
    goal = goal - goal.mean(0) * (1 - 3e-2)

    def loss(dot, wrap, prompt):
        one = wrap(lambda prompt, w, y, g: jnp.sum(jnp.concatenate([dot(prompt, w), dot(y, w)]) * g))
        return jnp.sum(jax.vmap(one, (None, None, 0, 0))(prompt, w, tokens, goal))

    ways = (jnp.matmul, lambda f: jamp.autocast(f, BF16)), (reference(BF16), lambda f: f), (jnp.matmul, lambda f: f)
    mine, hand, truth = (np.float64(by_operation(jax.grad(functools.partial(loss, *way)), prompt)[0]) for way in ways)
    assert np.linalg.norm(mine - truth) < 2 * np.linalg.norm(hand - truth)


@pytest.mark.parametrize(
    "inner",
    [
        lambda x: lax.cond(x[0, 0] < 1e6, lambda x: jnp.sin(x) * x, lambda x: x, x),
        lambda x: lax.scan(lambda c, _: (jnp.sin(c) + c / 2, None), x, None, length=3)[0],
        jax.checkpoint(lambda x: jnp.sin(x) * x),
    ],
    ids=["cond", "scan", "checkpoint"],
)
def test_a_custom_rule_may_compute_value_and_tangent_in_one_construct(inner):
    fun = jax.custom_jvp(inner)
    fun.defjvp(lambda p, t: jax.jvp(inner, p, t))
    loss = lambda x, w: jnp.sum(jnp.tanh(fun(x @ w) @ w))
    args = normal(64, 64), normal(64, 64, seed=1, scale=0.125)
    mine, same, truth = (
        jax.grad(f)(*args) for f in (jamp.autocast(loss, BF16), jamp.autocast(loss, BF16, recompute=False), loss)
    )
    np.testing.assert_allclose(mine, same, rtol=0.02, atol=0.02)
    assert np.linalg.norm(mine - truth) < 0.05 * np.linalg.norm(truth)


def test_no_program_has_the_metadata_of_an_earlier_one():
    loss = lambda x, w: jnp.sum(jax.nn.gelu(x @ w) @ w)
    text = lambda: jax.jit(jax.grad(jamp.autocast(loss, BF16), 1)).lower(*[jnp.ones((64, 64))] * 2).as_text()
    with set_xla_metadata(who="first"):
        assert 'who = "first"' in text()
    assert 'who = "first"' not in text()


def test_layers_on_one_line_keep_the_metadata_of_each():
    def fun(x, w):
        for i in range(3):
            with set_xla_metadata(tag=f"layer{i}"):
                x = jnp.tanh(x @ w)
        return x

    for options in ({}, {"recompute": False}):
        text = jax.jit(jamp.autocast(fun, BF16, **options)).lower(*[jnp.ones((64, 64))] * 2).as_text()
        lines = [line for line in text.splitlines() if "dot_general" in line]
        assert ["layer0" in lines[0], "layer1" in lines[1], "layer2" in lines[2]] == [True] * 3


@pytest.mark.parametrize("dtype", [BF16, F16, jamp.Float8(min_size=1), jamp.Int8(min_size=1)], ids=str)
@pytest.mark.parametrize("operation", [jnp.matmul, jnp.multiply])
def test_calls_of_one_jaxpr_have_their_own_constants(operation, dtype):
    eye = jnp.eye(16)
    constants = [eye, 2 * eye, 2.0**17 * eye]  # The last is beyond float16.
    body = jax.make_jaxpr(lambda x: operation(x, eye))(SQUARE).jaxpr
    calls = [jax.jit(jax.extend.core.jaxpr_as_fun(jax.extend.core.ClosedJaxpr(body, [c]))) for c in constants]
    outer = jax.make_jaxpr(lambda x: [*(call(x)[0] for call in calls), x @ x])(SQUARE)
    given = iter(constants)
    of_one = lambda e: e.replace(params={**e.params, "jaxpr": jax.extend.core.ClosedJaxpr(body, [next(given)])})
    eqns = [of_one(e) if name_of(e) == "jit" else e for e in outer.jaxpr.eqns]
    made = jax.extend.core.ClosedJaxpr(outer.jaxpr.replace(eqns=eqns), outer.consts)
    fun = lambda x: jax.extend.core.jaxpr_as_fun(made)(x)
    rules = {} if isinstance(dtype, jnp.dtype) else {"dot_general": "compute"}  # Else they are the head.
    one, two, large, _ = jamp.autocast(fun, dtype, rules=rules, recompute=False)(SQUARE)
    np.testing.assert_array_equal(2 * one, two)
    np.testing.assert_allclose(2.0**17 * one, large, rtol=0.1)
