"""autocast of float64 code: its products in float32, and everything else as it is."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
from jaxprs import PRODUCTS, equations, normal, operand_dtypes, products
from norms import distance
from pairs import of_pair

import jamp
import jamp.debug

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
EPS = float(np.finfo(np.float32).eps)
HIGHEST = (lax.Precision.HIGHEST,) * 2
pytestmark = [pytest.mark.usefixtures("x64"), pytest.mark.promotes("x64 makes Python numbers float64")]
autocast = functools.partial(jamp.autocast, compute_dtype=jnp.float32)
report = functools.partial(jamp.autocast_report, compute_dtype=jnp.float32)


def random(*shape, seed=0):
    with of_pair(jnp.float32) as cast:
        return np.asarray(cast(normal(*shape, seed=seed))) / shape[-1] ** 0.5


W, X = random(16, 16), random(8, 16, seed=1)
SPD = W @ W.T + np.eye(16)
energy = lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w.T) ** 2)


def loss(w, x):
    value, forces = jax.value_and_grad(energy, 1)(w, x)
    return value**2 / 64 + jnp.mean(forces**2)


def count(fun, *args):
    """How many products have operands of each dtype."""
    found = [e.invars[0].aval.dtype for e in equations(jax.make_jaxpr(fun)(*args)) if e.primitive.name in PRODUCTS]
    return {dtype: found.count(dtype) for dtype in dict.fromkeys(found)}


ORDERS = {
    "grad of autocast": lambda fun: jax.grad(autocast(fun)),
    "autocast of grad": lambda fun: autocast(jax.grad(fun)),
    "autocast of grad of jit": lambda fun: autocast(jax.grad(jax.jit(fun))),
}


def test_products_are_float32_at_the_highest_precision_and_the_rest_is_float64():
    def fun(x):
        y = jnp.einsum("ij,kj->ik", x, x) + jax.vmap(jnp.matmul)(x[None], x[None])[0] + x @ x
        return jnp.exp(y + lax.conv(x[None, None], x[None, None, :3, :3], (1, 1), "SAME")[0, 0]).sum(0)

    low = autocast(fun)
    found = list(equations(jax.make_jaxpr(low)(W)))
    dots = [e for e in found if e.primitive.name in PRODUCTS]
    assert {v.aval.dtype for e in dots for v in (*e.invars, *e.outvars)} == {F32}
    assert {e.params["precision"] for e in dots} == {HIGHEST}
    assert len(dots) == 4
    assert {v.aval.dtype for e in found if e.primitive.name in ("exp", "reduce_sum", "add") for v in e.invars} == {F64}
    assert low(W).dtype == F64
    assert 0 < distance(low(W), fun(W)) < 5 * EPS


@pytest.mark.parametrize("asked", [lax.Precision.DEFAULT, lax.Precision.HIGH])
def test_a_lower_precision_of_the_code_stays_and_highest_stays_float64(asked):
    dot = lambda precision: lambda x: jnp.dot(x, x, precision=precision)
    (eqn,) = [e for e in equations(jax.make_jaxpr(autocast(dot(asked)))(W)) if e.primitive.name == "dot_general"]
    assert (eqn.invars[0].aval.dtype, eqn.params["precision"]) == (F32, (asked, asked))
    assert products(autocast(dot(lax.Precision.HIGHEST)), W) == {F64}
    preset = jax.make_jaxpr(autocast(dot(lax.DotAlgorithmPreset.DEFAULT)))(W)  # states no precision
    assert [e.params["precision"] for e in equations(preset) if e.primitive.name == "dot_general"] == [HIGHEST]
    with jax.default_matmul_precision("highest"):  # a default for the whole program
        assert products(autocast(dot(None)), W) == {F32}


def test_other_dtypes_are_left_alone():
    fun = lambda c, h, i: (c @ c, h @ h, i @ i, jnp.sin(h))
    args = W + 1j * W, np.float32(W), np.arange(9).reshape(3, 3)
    assert str(jax.make_jaxpr(autocast(fun))(*args)) == str(jax.make_jaxpr(fun)(*args))
    mixed = lambda x, h: lax.dot_general(x, h, (((1,), (0,)), ((), ())), preferred_element_type=F64)
    (eqn,) = [e for e in equations(jax.make_jaxpr(autocast(mixed))(W, np.float32(W))) if e.primitive.name in PRODUCTS]
    assert [v.aval.dtype for v in eqn.invars] == [F32, F32]
    for result in (jnp.float16, jnp.bfloat16, jnp.float32):
        fun = lambda w, x, dtype=result: jnp.sum(lax.dot(x, w, preferred_element_type=dtype)).astype(F64)
        with jax.default_device(jax.devices("cpu")[0]):  # cuBLAS has no such products
            found, wanted = jax.grad(autocast(fun))(W, X), jax.grad(fun)(W, X)
        assert distance(found, wanted) < max(10 * EPS, 2 * jnp.finfo(result).eps)


def test_without_a_product_of_float64_nothing_changes_and_the_report_says_so():
    text = lambda fun, *args: re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(fun)(*args)))
    cholesky = lambda w, x: jnp.linalg.cholesky(w @ w.T) if w.dtype == np.float32 else jnp.sin(w)
    for x64, why in ((False, "x64 is off"), (True, "no product of float64 operands")):
        with jax.enable_x64(x64):
            for fun, args in ((energy, (np.float32(W), np.float32(X))), (cholesky, (np.float32(W), np.float32(X)))):
                assert text(autocast(fun), *args) == text(fun, *args)
                found = report(fun)(*args)
                assert why in found.unchanged
                assert "the function is unchanged" in str(found).splitlines()[0]
    assert text(autocast(jnp.sin), W) == text(jnp.sin, W)
    assert report(energy)(W, X).unchanged == ""


def test_gradients_of_weights_are_float32_products_that_are_added_in_float64():
    fun = lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w)
    for grad in (order(fun) for order in ORDERS.values()):
        found = list(equations(jax.make_jaxpr(grad)(W, X)))
        dots = [e for e in found if e.primitive.name == "dot_general"]
        assert {v.aval.dtype for e in dots for v in (*e.invars, *e.outvars)} == {F32}
        assert len(dots) == 5
        sums = [e for e in found if e.primitive.name == "add_any" and e.outvars[0].aval.shape == W.shape]
        assert {v.aval.dtype for e in sums for v in e.invars} == {F64}
        assert len(sums) == 1
        assert 0 < distance(grad(W, X), jax.grad(fun)(W, X)) < 10 * EPS


def of_matvec(solve):
    return lambda a: solve(lambda v: a @ v, a[0])


LINEAR_ALGEBRA = {
    "cholesky": jnp.linalg.cholesky,
    "eigh": lambda a: jnp.linalg.eigh(a)[0],
    "svd": lambda a: jnp.linalg.svd(a)[1],
    "qr": lambda a: jnp.linalg.qr(a)[1],
    "inv": jnp.linalg.inv,
    "pinv": jnp.linalg.pinv,
    "slogdet": lambda a: jnp.linalg.slogdet(a)[1],
    "solve": lambda a: jnp.linalg.solve(a, a[:2].T),
    "expm": jax.scipy.linalg.expm,
    "cho_solve": lambda a: jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(a), True), a[0]),
    "lu": lambda a: jax.scipy.linalg.lu(a)[1],
    "cg": lambda a: jax.scipy.sparse.linalg.cg(a, a[0], tol=1e-12)[0],
    "vdot": lambda a: jnp.vdot(a, a) * jnp.dot(a[0], a[1]) + jax.vmap(jnp.dot)(a, a).sum(),
    "fft": lambda a: jnp.abs(jnp.fft.fft(a)),
    "sums": lambda a: jnp.cumsum(a, 0) + a.sum(0),
}


@pytest.mark.slow_after(12)
@pytest.mark.parametrize("order", [lambda fun: autocast(fun), *ORDERS.values()], ids=["autocast", *ORDERS])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("cholesky", "solve", "expm", "cg", "vdot", "sums")))
        for name in LINEAR_ALGEBRA
    ],
)
def test_linear_algebra_products_of_vectors_and_their_derivatives_stay_float64(name, order):
    fun = lambda a: jnp.sum(LINEAR_ALGEBRA[name](a) ** 2)
    assert F32 not in count(order(fun), SPD)
    with jax.default_matmul_precision("highest"):  # which JAX's linear algebra asks for, too
        assert F32 not in count(order(fun), SPD)


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["cg", *(pytest.param(x, marks=pytest.mark.slow) for x in ("bicgstab", "gmres"))])
def test_a_solver_stays_float64_and_the_matrix_vector_products_passed_to_it_do_not(solver):
    solve = getattr(jax.scipy.sparse.linalg, solver)
    fun = lambda a: jnp.sum(solve(lambda v: a @ v, a[0], tol=1e-6)[0] ** 2)
    for order in (lambda f: autocast(f), *ORDERS.values()):
        found = count(order(fun), SPD)
        assert found[F32] >= 2
        assert found[F64] >= 3
    low = autocast(fun)
    assert distance(jax.value_and_grad(low)(SPD), jax.value_and_grad(fun)(SPD)) < 100 * EPS
    assert distance(jax.vmap(low)(SPD[None]), jax.vmap(fun)(SPD[None])) < 100 * EPS


def test_a_linear_solve_of_your_own_is_entered_with_aux_and_without_a_transpose():
    direct = lambda matvec, b: jnp.linalg.solve(jax.jacobian(matvec)(b), b)

    def fun(w, b, aux, transposed):
        solve = (lambda matvec, b: (direct(matvec, b), jnp.float32(1))) if aux else direct
        found = lax.custom_linear_solve(lambda v: w @ v, b, solve, solve if transposed else None, has_aux=aux)
        return jnp.sum((found[0] if aux else found) ** 2)

    for aux in (False, True):
        for transposed in (False, True):
            both = functools.partial(fun, aux=aux, transposed=transposed)
            low = autocast(both)
            assert F32 in count(low, SPD, W[0])
            assert distance(low(SPD, W[0]), both(SPD, W[0])) < 100 * EPS
            if transposed:
                assert distance(jax.grad(low)(SPD, W[0]), jax.grad(both)(SPD, W[0])) < 100 * EPS
    # The right-hand side is a constant, and the solution is not.
    ones = lambda w: lax.custom_linear_solve(
        lambda v: jnp.where(np.eye(16, dtype=bool)[0], w @ v, v), jnp.ones(16), direct, direct
    )
    (solve,) = [e for e in jax.make_jaxpr(autocast(ones))(SPD).eqns if e.primitive.name == "custom_linear_solve"]
    assert operand_dtypes(solve.params["jaxprs"].matvec, ["select_n"]) == {F64}


def test_a_solver_is_not_entered_by_16_bit():
    fun = lambda a: jax.scipy.sparse.linalg.cg(lambda v: a @ v, a[0])[0]
    with pytest.warns(UserWarning, match="solver"):
        assert F32 in count(jamp.autocast(fun, jnp.float16), np.float32(SPD))


own = jax.custom_vjp(lambda w, x: jnp.tanh(x @ w))
own.defvjp(lambda w, x: (own(w, x), (w, x)), lambda r, g: ((r[1].T @ g), g @ r[0].T))
MESH = Mesh(np.array(jax.devices()[:1]), ("i",))
FUNCTIONS = {
    "forces": loss,
    "scan": lambda w, x: lax.scan(lambda c, y: (jnp.tanh(c @ w) + y, c.sum()), x, jnp.stack([x, x]))[0].sum(),
    "cond": lambda w, x: lax.cond(x[0, 0] < 9, energy, lambda w, x: jnp.sum(x), w, x),
    "custom_vjp": lambda w, x: jnp.sum(own(w, own(w, x)) ** 2),
    "shard_map": lambda w, x: jax.shard_map(
        lambda w, x: lax.psum(energy(w, x), "i"), mesh=MESH, in_specs=(P(), P("i")), out_specs=P()
    )(w, x),
    "remat": jax.checkpoint(energy),
    "weak": lambda w, x: jnp.sum(jnp.sin(x @ (w * 2.0) + 1.0)) / 3,
    "layers": lambda w, x: energy(w, x) + jnp.sum(jax.nn.gelu(x @ w) @ jax.nn.softmax(w)),
}
TRANSFORMS = {
    "value": lambda f: f,
    "gradient": lambda f: jax.grad(f, (0, 1)),
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (w[::-1], x)),
    "vmap": lambda f: lambda w, x: jax.vmap(jax.grad(f), (0, None))(w[None], x),
    "second": lambda f: jax.grad(lambda w, x: jnp.sum(jnp.sin(jax.grad(f)(w, x)))),
    "hessian": lambda f: lambda w, x: jax.jvp(lambda w: jax.grad(f)(w, x), [w], [w.T])[1],
}
QUICK = {("value", "forces"), ("second", "scan"), ("hessian", "cond"), ("vmap", "remat"), ("jvp", "weak")}
QUICK |= {("gradient", name) for name in ("forces", "custom_vjp", "shard_map")}


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    ("transform", "name"),
    [
        pytest.param(t, n, marks=[pytest.mark.slow] * ((t, n) not in QUICK))
        for t in TRANSFORMS
        for n in FUNCTIONS
        if (t, n) not in {("jvp", "custom_vjp"), ("hessian", "custom_vjp")}
    ],
)
def test_every_derivative_is_right_to_float32_and_float64_in_its_dtypes(transform, name):
    fun = FUNCTIONS[name]
    derived = [TRANSFORMS[transform](f) for f in (autocast(fun), fun)]
    assert products(derived[0], W, X) <= {F32, F64}
    assert F32 in products(derived[0], W, X)
    inside = autocast(TRANSFORMS[transform](fun))
    assert F32 in products(inside, W, X)
    outside, exact, found = jax.jit(lambda w, x: [f(w, x) for f in (*derived, inside)])(W, X)
    assert distance(outside, exact) < 100 * EPS
    assert distance(found, exact) < 100 * EPS


def test_outputs_keep_weak_types_and_results_of_products_are_float64():
    fun = lambda x, s: (x @ x, (x @ x).T, s * 2, x[0] * s)
    for mine, plain in zip(jax.eval_shape(autocast(fun), W, 1.5), jax.eval_shape(fun, W, 1.5), strict=True):
        assert (mine.dtype, mine.weak_type) == (plain.dtype, plain.weak_type)


def test_full_precision_and_rules_keep_float64():
    def fun(x):
        with jax.named_scope("head"):
            return jnp.tanh(x @ x) @ x

    assert products(autocast(jamp.full_precision(fun)), W) == {F64}
    assert products(autocast(fun, rules={"dot_general[head]": "float64"}), W) == {F64}
    assert products(autocast(fun, rules={"dot_general": "float64"}), W) == {F64}
    assert products(autocast(jnp.linalg.cholesky, rules={"dot_general[linalg]": "compute"}), W) == set()
    grad = jax.grad(lambda a: jnp.linalg.cholesky(a).sum())
    assert products(autocast(grad, rules={"dot_general": "compute"}), SPD) == {F32}
    for category in ("compute", "accumulate"):  # the sums of float32 products are float32
        low = autocast(fun, rules={"dot_general": category})
        assert products(low, W) == {F32}
        np.testing.assert_array_equal(low(W), autocast(fun)(W))


def test_a_rule_for_a_scope_computes_its_arithmetic_in_float32_too():
    def fun(w, x, large=1e50):
        with jax.named_scope("network"):
            h = jax.nn.softplus(jnp.tanh(x @ w + 0.1) @ w) * large / large
            norms = jnp.cumsum(jnp.linalg.cholesky(h.T @ h + jnp.eye(16)), 0)
        return jnp.sum(jnp.exp(h)) + jnp.sum(norms)

    low = autocast(fun, rules={"*[network]": "compute"})
    found = list(equations(jax.make_jaxpr(low)(W, X)))
    of = lambda name: {v.aval.dtype for e in found if e.primitive.name == name for v in e.invars}
    assert of("tanh") == of("log1p") == of("dot_general") == {F32}
    assert of("cholesky") == of("cumsum") == of("mul") == of("reduce_sum") == {F64}  # 1e50 is not float32
    assert {v.aval.dtype for e in found if e.primitive.name == "exp" for v in e.invars} == {F32, F64}
    assert low(W, X).dtype == F64
    assert distance(jax.value_and_grad(low)(W, X), jax.value_and_grad(fun)(W, X)) < 100 * EPS
    names = {row.operation: row.category for row in report(fun, rules={"*[network]": "compute"})(W, X).rows}
    assert (names["tanh[network]"], names["exp"], names["mul"]) == ("compute", "float64", "float64")
    # Also where no product is cast, and in 16 bit.
    only = lambda x: jax.named_scope("network")(jnp.tanh)(x)
    assert autocast(only, rules={"*[network]": "compute"})(X).dtype == F64
    assert 0 < distance(autocast(only, rules={"*[network]": "compute"})(X), only(X)) < EPS
    with pytest.warns(UserWarning, match="network"):
        autocast(only, rules={"*[nerwork]": "compute"})(X)
    half = jamp.autocast(functools.partial(fun, large=1e5), jnp.bfloat16, rules={"*[network]": "float32"})
    assert products(half, np.float32(W), np.float32(X)) == {F32}


def test_stars_need_a_scope_and_categories_are_those_of_float64():
    with pytest.raises(ValueError, match=r"'\*'"):
        autocast(energy, rules={"*": "compute"})
    with pytest.raises(ValueError, match="float64, widest"):
        autocast(energy, rules={"*[network]": "float32"})


def test_the_report_counts_products_in_float32():
    found = report(loss)(W, X)
    assert found.share_float32 > 0.8
    assert found.share_16_bit == 0
    title, *_ = str(found).splitlines()
    assert re.fullmatch(r"autocast to float32: \d+\.\d% of the FLOPs are products in float32", title)
    dot = next(row for row in found.rows if row.operation == "dot_general")
    assert (dot.before, dot.after) == ("float64, float64 -> float64", "float32, float32 -> float32")
    assert {row.category for row in found.rows if row.operation in ("tanh", "reduce_sum")} == {"float64"}
    as_run = report(jax.grad(autocast(loss)))(W, X)
    assert as_run.as_run
    assert as_run.share_float32 > 0.8
    assert "unchanged" not in str(as_run)
    already = report(lambda w, x: energy(w, x) + jnp.sum(w.astype(F32) @ w.astype(F32)))(W, X)
    assert "are float32 already" in str(already)


@pytest.mark.parametrize(
    ("constant", "stays"), [(1e39, True), (1e-60, True), (1e30, False), (1e-30, False), (0.0, False)]
)
def test_the_report_names_constants_that_do_not_fit_float32(constant, stays):
    for make in (lambda: jnp.full((16, 16), constant), lambda: jnp.asarray(np.full((16, 16), constant))):
        fun = lambda x, make=make: x @ make()
        assert products(autocast(fun), W) == ({F64} if stays else {F32})
        hints = " ".join(report(fun)(W).hints)
        assert ("beyond the range of float32" in hints) == stays
    assert jnp.isfinite(autocast(fun)(W)).all()


def test_a_value_beyond_the_range_of_float32_is_found():
    fun = autocast(lambda x: jnp.sum(jnp.tanh((x * 1e40) @ W)))
    found = jamp.debug.find_nonfinite(fun)(X)
    assert "overflow in float32" in str(found)
    assert "test_autocast_float64.py" in str(found)


@pytest.mark.slow
def test_rules_of_a_rounding_report_keep_products_in_float64():
    def fun(w, x):
        with jax.named_scope("body"):
            h = jnp.tanh(x @ w)
        with jax.named_scope("head"):
            return jnp.mean(jax.nn.softmax((h + 1e4) @ (w - w.mean(0))) ** 2)

    found = jamp.debug.rounding_report(fun, jnp.float32)(W, X)
    assert found.compute_dtype == "float32"
    assert found.rows[0].scope == "head"
    rules = found.rules(error=found.gradient_error / 50)
    assert rules == {"dot_general[head]": "float64"}
    exact, low = jax.grad(fun)(W, X), jax.grad(autocast(fun, rules=rules))(W, X)
    assert distance(low, exact) <= found.gradient_error / 50
    with jax.enable_x64(False):
        none = jamp.debug.rounding_report(fun, jnp.float32)(np.float32(W), np.float32(X))
    assert "no operation rounds" in str(none)


@pytest.mark.parametrize("budget", [pytest.param(0.5, marks=pytest.mark.slow), 0.3])
def test_a_memory_budget_bounds_float64_code(budget):
    def fun(w, x):
        for _ in range(6):
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    x = random(512, 16)

    def nbytes(**options):
        kept = jax.eval_shape(lambda w: jax.vjp(autocast(fun, **options), w, x)[1], W)
        return sum(v.size * v.dtype.itemsize for v in jax.tree.leaves(kept))

    assert nbytes(memory_budget=budget) < nbytes()
    ways = {"memory_budget": budget}, {}
    grads = jax.jit(lambda w: [jax.grad(autocast(fun, **options))(w, x) for options in ways])(W)
    assert distance(*grads) < 1e-14
    assert jamp.memory_report(autocast(fun), budget)(W, x) is not None


def test_autocast_to_float32_keeps_what_is_between_products_because_it_is_for_time():
    deep, x = lambda w, x: jnp.sum(jax.nn.softmax(jnp.sin(x @ w) ** 2) @ w), random(64, 16)

    def nbytes(**options):
        kept = jax.eval_shape(lambda w: jax.vjp(autocast(deep, **options), w, x)[1], W)
        return sum(v.size * v.dtype.itemsize for v in jax.tree.leaves(kept))

    assert nbytes() == nbytes(recompute=False) > 1.5 * nbytes(recompute=True)
    assert nbytes(memory_budget=0.5) <= nbytes(recompute=True)  # a budget computes again
    program = lambda **options: str(
        jax.make_jaxpr(jax.grad(jamp.autocast(deep, jnp.bfloat16, **options)))(np.float32(W), np.float32(x))
    )
    assert program() == program(recompute=True) != program(recompute=False)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jamp.Float8(min_size=1)])
def test_16_bit_of_float64_code_is_a_warning(dtype):
    with pytest.warns(
        UserWarning, match=r"changes no product.*float64.*jamp\.cast_floating\(params, jnp\.float32\)"
    ) as caught:
        jax.eval_shape(jamp.autocast(energy, dtype), W, X)
    assert [w.filename for w in caught] == [__file__]
    one_is_float32 = lambda w, x: jnp.sum(jnp.float32(x) @ jnp.float32(w) @ jnp.float32(w)) + jnp.sum(x @ w)
    jax.eval_shape(jamp.autocast(one_is_float32, dtype), W, X)


def test_nested_autocast_composes():
    inner = lambda w, x: jamp.autocast(energy, jnp.bfloat16)(np.float32(1) * w.astype(F32), x.astype(F32)).astype(F64)
    assert products(autocast(lambda w, x: inner(w, x) + energy(w, x)), W, X) == {jnp.dtype(jnp.bfloat16), F32}
