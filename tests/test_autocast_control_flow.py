"""What autocast enters and what it does not: jit, loops, branches, remat, custom derivatives, shard_map, kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import Mesh, PartitionSpec as P
from jaxprs import dtypes, equations, normal, products

import jamp
from jamp import _jaxpr

F16, BF16, F32 = jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


def agree(fun, *args, rtol=5e-3):
    """The results of a function are those of float32, to the rounding of float16."""
    mine, plain = jamp.autocast(fun)(*args), fun(*args)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(plain), strict=True):
        assert a.dtype == b.dtype
        assert jnp.linalg.norm(a - b) <= rtol * jnp.linalg.norm(b)


def step(w, x):
    return jnp.tanh(x @ w)


def by_scan(w, x):
    return lax.scan(lambda c, _: (step(w, c), c), x, None, length=3)


def by_scan_over_layers(w, x):
    return lax.scan(lambda c, w: (step(w, c), jnp.sum(c)), x, jnp.stack([w, w.T]))[0]


def by_reversed_scan(w, x):
    return lax.scan(lambda c, y: (c + step(w, y), y @ w), x, jnp.stack([x, 2 * x]), reverse=True, unroll=2)


def by_fori(w, x):
    return lax.fori_loop(0, 3, lambda i, c: step(w, c) * (i + 1), x)


def by_while(w, x):
    more = lambda c: (jnp.sum(c[1] @ w) < 1e4) & (c[0] < 3)
    return lax.while_loop(more, lambda c: (c[0] + 1, step(w, c[1]) + 1), (jnp.int32(0), x))[1]


def by_counting(w, x):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(w, c[1])), (0, x))[1]  # A weak count.


def by_cond(w, x):
    return lax.cond(x.sum() > 0, lambda x: step(w, x), lambda x: x * 2, x)


def by_switch(w, x):
    branches = [lambda x: x @ w, lambda x: (x @ w) * 2, lambda x: jnp.tanh(x @ w) + 1]
    return lax.switch(jnp.int32(2), branches, x)


def by_jit(w, x):
    return jax.jit(step)(w, jax.jit(step)(w, x))


def by_remat(w, x):
    return jax.checkpoint(lambda w, x: step(w, step(w, x)))(w, x)


def by_vmap(w, x):
    return jax.vmap(step, in_axes=(None, 0))(w, x)


def by_shard_map(w, x):
    mesh = Mesh(np.array(jax.devices()[:1]), ("i",))
    mapped = jax.shard_map(lambda w, x: lax.psum(x @ w, "i"), mesh=mesh, in_specs=(P(), P(None, "i")), out_specs=P())
    return mapped(w, x)


def by_associative_scan(w, x):
    return lax.associative_scan(lambda a, b: a @ b, jnp.stack([w, w, w])) @ x.T


def by_nesting(w, x):
    @jax.checkpoint
    def body(c, _):
        return lax.cond(c.sum() > 0, lambda c: jax.jit(step)(w, c), lambda c: jax.nn.relu(c @ w), c), None

    return lax.scan(body, x, None, length=2)[0]


ENTERED = [
    by_scan, by_scan_over_layers, by_reversed_scan, by_fori, by_while, by_counting, by_cond, by_switch, by_jit,
    by_remat, by_vmap, by_shard_map, by_associative_scan, by_nesting,
]  # fmt: skip
DIFFERENTIABLE = [fun for fun in ENTERED if fun not in (by_while, by_counting)]


@pytest.mark.parametrize("fun", ENTERED)
def test_every_product_inside_control_flow_is_16_bit(fun):
    w, x = normal(4, 4, scale=0.5), normal(3, 4, seed=1)
    assert products(jamp.autocast(fun), w, x) == {F16}
    agree(fun, w, x)


@pytest.mark.parametrize("fun", DIFFERENTIABLE)
def test_gradients_through_control_flow_are_float32_of_16_bit_products(fun):
    w, x = normal(4, 4, scale=0.5), normal(3, 4, seed=1)
    loss = lambda f: lambda w: sum(jnp.sum(y) for y in jax.tree.leaves(f(w, x)))
    mine = jax.grad(loss(jamp.autocast(fun)))
    assert products(mine, w) == {F16}
    assert mine(w).dtype == F32
    plain = jax.grad(loss(fun))(w)
    assert jnp.linalg.norm(mine(w) - plain) < 1e-2 * jnp.linalg.norm(plain)


@pytest.mark.parametrize("fun", [by_scan, by_fori, by_while])
def test_carries_of_loops_keep_their_dtypes(fun):
    eqns = equations(jax.make_jaxpr(jamp.autocast(fun))(normal(4, 4), normal(3, 4)))
    loops = [e for e in eqns if e.primitive.name in ("scan", "while")]
    assert loops
    for eqn in loops:
        carry = [v.aval.dtype for i, v in enumerate(eqn.invars) if i in _jaxpr.carry(eqn)]
        assert F16 not in carry
        assert carry == [v.aval.dtype for v in eqn.outvars][: len(carry)]


def test_a_carry_adds_up_in_float32():
    fun = lambda x: lax.fori_loop(0, 3000, lambda i, total: total + (x @ x)[0, 0], jnp.float32(0))
    assert jamp.autocast(fun)(jnp.eye(4)) == 3000.0


def test_what_a_scan_stacks_is_16_bit():
    fun = lambda w, x: lax.scan(lambda c, y: (c, y @ w), 0, x)[1] @ w
    eqns = equations(jax.make_jaxpr(jamp.autocast(fun))(normal(4, 4), normal(5, 3, 4)))
    (scan,) = [e for e in eqns if e.primitive.name == "scan"]
    assert scan.outvars[-1].aval.dtype == F16


def test_a_branch_gives_16_bit_only_if_all_branches_do():
    fun = lambda p, x: lax.cond(p, lambda h: h * 2, lambda h: h * 2, x @ x)
    other = lambda p, x: lax.cond(p, lambda h: h * 2, jnp.exp, x @ x)
    for f, expected in ((fun, F16), (other, F32)):
        eqns = equations(jax.make_jaxpr(jamp.autocast(f))(True, normal(4, 4)))
        (cond,) = [e for e in eqns if e.primitive.name == "cond"]
        assert cond.outvars[0].aval.dtype == expected
        agree(f, True, normal(4, 4))


def test_remat_keeps_its_policy_and_recomputes():
    def fun(policy, w, x):
        return jnp.sum(jax.checkpoint(lambda w, x: jnp.sin(jnp.sin(x @ w) @ w), policy=policy)(w, x))

    policies = jax.checkpoint_policies
    w, x = normal(4, 4), normal(3, 4)
    counts = {}
    for policy in (policies.everything_saveable, policies.nothing_saveable, policies.dots_saveable):
        grads = [jax.grad(f) for f in (functools.partial(fun, policy), jamp.autocast(functools.partial(fun, policy)))]
        grads.append(jamp.autocast(grads[0]))  # The gradient of a remat, transformed.
        found = [[e.primitive.name for e in equations(jax.make_jaxpr(g)(w, x))] for g in grads]
        assert len({(f.count("dot_general"), f.count("cos")) for f in found}) == 1
        assert len({f.count("remat2") for f in found}) == 1
        counts[policy] = found[0].count("dot_general")
    assert counts[policies.nothing_saveable] > counts[policies.dots_saveable]
    jaxpr = jax.make_jaxpr(jamp.autocast(functools.partial(fun, policies.dots_saveable)))(w, x)
    (remat,) = [e for e in equations(jaxpr) if e.primitive.name == "remat2"]
    assert remat.params["policy"] is not None


def test_a_jitted_layer_called_twice_stays_one_function():
    layer = jax.jit(lambda w, x: jnp.tanh(x @ w))
    fun = jamp.autocast(lambda w, x: layer(w, layer(w, x) * 1.0))
    eqns = equations(jax.make_jaxpr(fun)(normal(4, 4), normal(4, 4)))
    bodies = [e.params["jaxpr"] for e in eqns if e.primitive.name == "jit" and e.params["name"] == "<lambda>"]
    assert len(bodies) == 2


def test_shardings_of_a_jit_inside_are_kept():
    mesh = Mesh(np.array(jax.devices()[:1]), ("i",))
    sharding = jax.sharding.NamedSharding(mesh, P("i"))
    inner = jax.jit(lambda x: x @ x, out_shardings=sharding)
    (eqn,) = [e for e in equations(jax.make_jaxpr(jamp.autocast(inner))(normal(4, 4))) if e.primitive.name == "jit"]
    assert eqn.params["out_shardings"] == (sharding,)


def test_collectives_under_a_vmap_with_an_axis_name():
    fun = jax.vmap(jamp.autocast(lambda x: lax.pmean(x @ x, "i") + lax.axis_index("i")), axis_name="i")
    x = normal(2, 3, 3)
    plain = jax.vmap(lambda x: lax.pmean(x @ x, "i") + lax.axis_index("i"), axis_name="i")
    np.testing.assert_allclose(fun(x), plain(x), rtol=1e-2, atol=1e-2)


def test_autocast_inside_shard_map():
    mesh = Mesh(np.array(jax.devices()[:1]), ("i",))
    body = lambda x: lax.scan(lambda c, _: (jax.nn.relu(c @ x), None), x, None, length=2)[0]
    mapped = jax.shard_map(jamp.autocast(body), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    assert products(mapped, normal(4, 4)) == {F16}
    loss = lambda f: lambda x: jnp.sum(jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"))(x))
    plain = jax.grad(loss(body))(normal(4, 4))
    assert jnp.linalg.norm(jax.grad(loss(jamp.autocast(body)))(normal(4, 4)) - plain) < 1e-2 * jnp.linalg.norm(plain)


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
@pytest.mark.parametrize("before", [lambda x: x, lambda x: x @ x])
def test_a_custom_rule_is_kept_and_its_products_are_16_bit(rule, before):
    fun = tripled(rule)
    loss = lambda f: lambda x, y: jnp.sum(jnp.tanh(f(before(x), y)))
    x, y = normal(4, 4, scale=0.4), normal(4, 4, seed=1)
    mine, plain = (jax.grad(f, argnums=(0, 1)) for f in (jamp.autocast(loss(fun)), loss(fun)))
    assert products(mine, x, y) == products(jamp.autocast(loss(fun)), x, y) == {F16}
    for a, b in zip(mine(x, y), plain(x, y), strict=True):
        assert a.dtype == F32
        assert jnp.linalg.norm(a - b) < 1e-2 * jnp.linalg.norm(b)


def test_what_a_custom_forward_rule_saves_is_16_bit():
    fun = jax.custom_vjp(lambda x, w: x @ w)
    fun.defvjp(lambda x, w: (y := x @ w, (y, w)), lambda r, g: (g @ r[1].T * r[0].mean(), g * 0 + r[0]))
    loss = jamp.autocast(lambda x: jnp.sum(fun(x @ x, x) @ x))
    residuals = jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(loss, x)[1], normal(4, 4)))
    assert [r.dtype for r in residuals].count(F32) <= 1  # x itself
    assert F16 in {r.dtype for r in residuals}
    assert products(jax.grad(loss), normal(4, 4)) == {F16}


def test_custom_rules_work_with_integer_operands_batching_and_second_derivatives():
    scaled = jax.custom_jvp(lambda n, x: n * (x @ x))
    scaled.defjvp(lambda p, t: (scaled(*p), p[0] * (t[1] @ p[1] + p[1] @ t[1])))
    cut = jax.custom_vjp(lambda n, x: n * (x @ x))
    cut.defvjp(lambda n, x: (cut(n, x), (n, x)), lambda r, g: (None, r[0] * (g @ r[1].T + r[1].T @ g)))
    xs = normal(2, 3, 3, scale=0.5)
    for fun in (scaled, cut):
        loss = lambda f: lambda x: jnp.sum(jnp.tanh(f(jnp.int32(2), x)))
        for wrap in (
            lambda f: jax.vmap(jax.grad(f)),
            lambda f: jax.grad(lambda xs: jnp.sum(jax.grad(lambda y: jax.vmap(f)(y).sum())(xs) ** 2)),
        ):
            mine, plain = wrap(jamp.autocast(loss(fun)))(xs), wrap(loss(fun))(xs)
            assert jnp.linalg.norm(mine - plain) < 3e-2 * jnp.linalg.norm(plain)


ACTIVATIONS = "relu relu6 silu gelu elu softplus log_sigmoid leaky_relu"


@pytest.mark.parametrize("name", ACTIVATIONS.split())
def test_activations_agree_forward_and_backward(name):
    activation = getattr(jax.nn, name)
    x = normal(8, 8)
    agree(lambda x: activation(x @ x), x)
    loss = lambda f: lambda x: jnp.sum(f(x) ** 2)
    mine = jax.grad(loss(jamp.autocast(lambda x: activation(x @ x))))(x)
    plain = jax.grad(loss(lambda x: activation(x @ x)))(x)
    assert jnp.linalg.norm(mine - plain) < 1e-2 * jnp.linalg.norm(plain)


def test_relu_keeps_16_bit_and_saves_a_mask():
    fun = jamp.autocast(lambda x, w: jnp.sum(jax.nn.relu(x @ w) @ w))
    assert dtypes(fun, normal(4, 4), normal(4, 4), names=("max",)) == {F16}
    assert dtypes(jax.grad(fun), normal(4, 4), normal(4, 4), names=("select_n",)) == {F16}


# What is not entered.


def kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


def test_a_pallas_call_runs_in_the_dtypes_it_was_traced_with():
    double = lambda x: pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)
    fun = lambda x: double(x @ x)
    assert dtypes(jamp.autocast(fun), normal(4, 4), names=("pallas_call",)) == {F32}
    agree(fun, normal(4, 4))
    (row,) = [r for r in jamp.autocast_report(fun)(normal(4, 4)).rows if r.operation == "pallas_call"]
    assert (row.category, row.after) == ("no rule", "float32 -> float32")


def test_callbacks_see_the_dtypes_of_the_function(capsys):
    def fun(x):
        h = x @ x
        jax.debug.print("sum {}", h.sum(), ordered=True)
        return jax.pure_callback(lambda h: h * 2, jax.ShapeDtypeStruct(h.shape, F32), h)

    np.testing.assert_allclose(jax.jit(jamp.autocast(fun))(jnp.eye(3)), 2 * np.eye(3))
    jax.effects_barrier()
    assert capsys.readouterr().out == "sum 3.0\n"


def test_a_layout_that_is_not_known_is_run_unentered_and_reported(monkeypatch):
    monkeypatch.setitem(_jaxpr._LAYOUTS, "scan", ("jaxpr length reverse unroll parts",))
    args = normal(4, 4), normal(3, 4)
    assert products(jamp.autocast(by_scan), *args) == {F32}
    agree(by_scan, *args)
    (row,) = jamp.autocast_report(by_scan)(*args).rows
    assert (row.operation, row.category) == ("scan", "not entered")


def test_custom_rules_with_symbolic_zeros_or_integer_results_are_not_entered():
    is_zero = lambda t: type(t).__name__ == "SymbolicZero"
    asks = jax.custom_jvp(lambda x, y: x @ y)
    asks.defjvp(lambda p, t: (asks(*p), p[0] @ p[1] if is_zero(t[1]) else t[1]), symbolic_zeros=True)
    counts = jax.custom_vjp(lambda x, y: (x @ y, jnp.argmax(x)))
    counts.defvjp(lambda x, y: (counts(x, y), x), lambda x, g: (g[0] @ x, g[0]))
    x, y = normal(4, 4), normal(4, 4, seed=1)
    for fun in (lambda x: asks(x, y), lambda x: counts(x, y)[0]):
        assert products(jamp.autocast(fun), x) == {F32}
        grads = [jax.grad(lambda x, f=f: jnp.sum(f(x)))(x) for f in (fun, jamp.autocast(fun))]
        np.testing.assert_allclose(*grads)
        assert [r.category for r in jamp.autocast_report(fun)(x).rows] == ["not entered"]


def test_a_rule_keeps_autocast_out_of_a_construct():
    args = normal(4, 4), normal(3, 4)
    assert products(jamp.autocast(by_scan, rules={"scan": "float32"}), *args) == {F32}


def test_linear_algebra_is_float32():
    agree(lambda x: jnp.linalg.solve(x @ x + 4 * jnp.eye(4), x), normal(4, 4), rtol=2e-2)
    names = ("triangular_solve", "lu")
    assert dtypes(jamp.autocast(lambda x: jnp.linalg.solve(x @ x, x)), normal(4, 4), names=names) == {F32}


def test_a_ref_inside_a_function_is_left_alone():
    def fun(x):
        ref = jax.new_ref(jnp.zeros((4, 4)))
        ref[...] = x @ x
        return ref[...] + 1

    agree(fun, normal(4, 4))


# Regions.


def attention(q, k):
    return jax.nn.softmax(q @ k.T) @ k


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.vmap, jax.checkpoint, lambda f: lambda x: lax.map(f, x)])
def test_full_precision_is_a_region_that_autocast_does_not_touch(wrap):
    fun = lambda x: wrap(jamp.full_precision(lambda y: y @ y))(x @ x)
    x = normal(3, 4, 4)
    found = lambda f: [
        e.invars[0].aval.dtype for e in equations(jax.make_jaxpr(f)(x)) if e.primitive.name == "dot_general"
    ]
    assert found(jamp.autocast(fun)) == [F16, F32]
    for grad in (jax.grad(lambda x: jamp.autocast(fun)(x).sum()), jamp.autocast(jax.grad(lambda x: fun(x).sum()))):
        assert (found(grad).count(F16), found(grad).count(F32)) == (3, 3)  # A product, and two for its gradient.


def test_full_precision_is_a_decorator_that_changes_nothing_without_autocast():
    @jamp.full_precision
    def fun(x, power, *, scale=1.0):
        return scale * x**power

    assert fun.__name__ == "fun"
    assert fun(2.0, 3, scale=2.0) == 16.0


def test_full_precision_works_on_a_method_and_around_control_flow():
    class Head:
        @jamp.full_precision
        def __call__(self, x):
            return lax.fori_loop(0, 2, lambda i, c: jnp.tanh(c @ x), x)

    assert products(jamp.autocast(lambda x: Head()(x)), normal(4, 4)) == {F32}


def test_autocast_inside_autocast_keeps_the_inner_dtype():
    fun = jamp.autocast(lambda x: jamp.autocast(lambda y: y @ y, BF16)(x))
    assert products(fun, normal(4, 4)) == {BF16}
