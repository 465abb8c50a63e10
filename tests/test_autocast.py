"""autocast against float32: what is cast, what is not, numbers at the edges, and the same results as the function's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jaxprs import PRODUCTS, dtypes, equations, normal, products

import jamp
from jamp._autocast.rules import CATEGORIES, RULES

F16, BF16, F32 = jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
HALF = [F16, BF16]


@pytest.mark.parametrize("dtype", HALF)
def test_matrix_products_have_16_bit_operands_forward_and_backward(dtype):
    x, w = normal(4, 8), normal(8, 8, seed=1)
    fun = jamp.autocast(lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w), dtype)
    assert products(fun, w, x) == products(jax.grad(fun), w, x) == {dtype}
    assert fun(w, x).dtype == jax.grad(fun)(w, x).dtype == F32


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jnp.einsum("ij,kj->ik", x, x, preferred_element_type=jnp.float32),
        lambda x: jnp.dot(x, x, precision=lax.Precision.DEFAULT),
        lambda x: lax.dot_general(x, x, (((1,), (0,)), ((), ()))),
        lambda x: jnp.vdot(x, x),
        lambda x: lax.conv(x[None, None], x[None, None], (1, 1), "SAME"),
        lambda x: jax.vmap(jnp.matmul)(x[None], x[None]),
        lambda x: lax.batch_matmul(x[None], x[None]),
    ],
)
def test_every_way_to_write_a_product_has_16_bit_operands_and_results(fun):
    found = [e for e in equations(jax.make_jaxpr(jamp.autocast(fun))(normal(4, 4))) if e.primitive.name in PRODUCTS]
    assert [v.aval.dtype for e in found for v in (*e.invars, *e.outvars)] == [F16] * 3


UNARY = {
    "abs": jnp.abs,
    "ceil": jnp.ceil,
    "cos": jnp.cos,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "floor": jnp.floor,
    "neg": jnp.negative,
    "logistic": jax.nn.sigmoid,
    "round": jnp.round,
    "sign": jnp.sign,
    "sin": jnp.sin,
    "tanh": jnp.tanh,
    "atan": jnp.arctan,
    "cummax": lambda x: lax.cummax(x),
    "reduce_min": lambda x: x.min(0),
    "rev": lambda x: x[::-1],
    "transpose": lambda x: x.T,
    "reshape": lambda x: x.reshape(-1),
    "slice": lambda x: x[1:],
    "stop_gradient": lax.stop_gradient,
    "concatenate": lambda x: jnp.concatenate([x, x]),
    "pad": lambda x: jnp.pad(x, 1),
    "max": lambda x: jnp.maximum(x, x * 0.5),
    "gather": lambda x: x[jnp.array([1, 0])],
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (jnp.int32(1), 0), (1, 1)),
    "select_n": lambda x: jnp.where(x > 0.5, x, 0.0),
    "clamp": lambda x: lax.clamp(0.0, x, 1.0),
    "split": lambda x: jnp.split(x, 2),
    "mul": lambda x: x * 2.0,
    "div": lambda x: x / 4,
    "add": lambda x: x + x,
    "sub": lambda x: x - 1,
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, x[:1], (jnp.int32(0), 0)),
    "scatter": lambda x: x.at[0].set(x[1]),
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atanh": jnp.arctanh,
    "cbrt": jnp.cbrt,
    "cosh": jnp.cosh,
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "log": jnp.log,
    "log1p": jnp.log1p,
    "rsqrt": lax.rsqrt,
    "sinh": jnp.sinh,
    "sqrt": jnp.sqrt,
    "square": jnp.square,
    "tan": jnp.tan,
    "erf_inv": lax.erf_inv,
    "lgamma": lax.lgamma,
    "digamma": lax.digamma,
    "integer_pow": lambda x: x**3,
    "pow": lambda x: x**0.3,
    "cumsum": lambda x: jnp.cumsum(x, 0),
    "cumprod": lambda x: jnp.cumprod(x, 0),
    "reduce_sum": lambda x: x.sum(0),
    "reduce_prod": lambda x: x.prod(0),
    "reduce_max": lambda x: x.max(0),
    "sort": lambda x: jnp.sort(x, 0),
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x),
    "reduce_window_sum": lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "VALID"),
    "atan2": lambda x: jnp.arctan2(x, x),
    "cholesky": jnp.linalg.cholesky,
    "rem": lambda x: jnp.fmod(x, x),
    "scatter-add": lambda x: x.at[0].add(x[1]),
}


@pytest.mark.parametrize("name", UNARY)
def test_an_operation_of_the_table_runs_in_the_dtype_of_its_category(name):
    """After a matrix product: float32 operations in float32, those that keep the dtype they get in 16 bit."""
    low = jamp.autocast(lambda x: UNARY[name](x @ x))
    key = "div[constant]" if name == "div" else name
    expected = F32 if RULES[key][0] == "float32" else F16
    found = [e for e in equations(jax.make_jaxpr(low)(jnp.full((4, 4), 0.25))) if e.primitive.name == name]
    assert found
    assert {v.aval.dtype for e in found for v in e.invars if jnp.issubdtype(v.aval.dtype, jnp.floating)} == {expected}


def test_the_table_has_a_reason_for_every_rule_and_lists_names_of_primitives():
    from jax.extend.core import primitives

    known = {getattr(primitives, name).name for name in dir(primitives) if name.endswith("_p")}
    assert {category for category, _ in RULES.values()} == CATEGORIES.keys()
    assert all(reason for _, reason in RULES.values())
    # Names that only some releases have, or that no public module lists.
    elsewhere = {"log2", "split", "tile", "copy_p", "mesh_cast", "optimization_barrier", "pbroadcast", "pvary"}
    elsewhere |= {"reshard", "psum_invariant", "reduce_scatter", "all_gather_invariant", "collective_permute"}
    assert {key.split("[")[0] for key in RULES} - elsewhere <= known


def test_softmax_logsumexp_and_layer_norm_are_float32_throughout():
    def softmax_and_norm(x):
        h = x @ x
        mean = h.mean(-1, keepdims=True)
        norm = (h - mean) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-6)
        return jax.nn.softmax(h), jax.nn.logsumexp(h, -1), norm

    fun = jamp.autocast(softmax_and_norm)
    names = ("exp", "log", "sub", "reduce_sum", "reduce_max", "square", "rsqrt", "div", "mul")
    assert dtypes(fun, normal(4, 4), names=names) == {F32}


# Numbers at the edges.


@pytest.mark.parametrize(
    ("fun", "x"),
    [
        (lambda x: x + 70000.0, [1.0, 2.0]),
        (lambda x: x * 1e-7, [1.0, 2.0]),
        (lambda x: (x - 1e5) ** 2, [1.0, 2.0]),
        (jnp.var, [10000.0, 10001.0, 10002.0, 10003.0]),
        (jnp.mean, [60000.0] * 8),
        (jnp.sum, [1.0] * 5000),
        (lambda x: jnp.cumsum(x)[-1], [1.0] * 5000),
        (jax.nn.softmax, [70000.0, 69999.0, -70000.0]),
        (jax.nn.logsumexp, [90.0, 91.0, 80000.0]),
        (jax.nn.log_softmax, [1e5, -1e5, 0.0]),
        (jnp.linalg.norm, [3e4, 4e4]),
        (lambda x: 1 / (x + 1e-8), [0.0, 1.0]),
        (jnp.exp, [12.0, 20.0]),
    ],
)
@pytest.mark.parametrize("dtype", HALF)
def test_what_is_right_in_float32_is_right_under_autocast(fun, x, dtype):
    x = jnp.array(x)
    np.testing.assert_allclose(jamp.autocast(fun, dtype)(x), fun(x), rtol=1e-6)


LOSSES = {
    "logsumexp - take_along_axis": lambda x, y: jax.nn.logsumexp(x, -1) - jnp.take_along_axis(x, y[:, None], -1)[:, 0],
    "take_along_axis before logsumexp": lambda x, y: (
        -jnp.take_along_axis(x, y[:, None], 1)[:, 0] + jax.nn.logsumexp(x, 1)
    ),
    "an index": lambda x, y: jax.nn.logsumexp(x, -1) - x[jnp.arange(y.size), y],
    "where": lambda x, y: jax.nn.logsumexp(x, -1) - jnp.where(jax.nn.one_hot(y, 3, dtype=bool), x, 0).sum(-1),
    "one-hot": lambda x, y: jax.nn.logsumexp(x, -1) - (x * jax.nn.one_hot(y, 3)).sum(-1),
    "log_softmax": lambda x, y: -jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], -1)[:, 0],
    "optax": optax.softmax_cross_entropy_with_integer_labels,
    "transposed": lambda x, y: jax.nn.logsumexp(x, -1) - x.T[0],
    "sigmoid": lambda x, y: jnp.maximum(x, 0) - x * (1.0 - y[:, None]) + jnp.log1p(jnp.exp(-jnp.abs(x))),
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("loss", LOSSES)
def test_two_gradients_of_a_product_that_nearly_cancel_are_added_in_float32(loss, dtype):
    """The gradient of a class that is nearly certain is p - 1: in 16 bit that is 0."""
    x, w, y = jnp.ones((3, 1)), jnp.array([[12.0, 0.25, 0.125]]), jnp.zeros(3, int)
    fun = lambda w, y: LOSSES[loss](x @ w, y).sum()
    scaled = lambda w, y: 2.0**10 * jamp.autocast(fun, dtype)(w, y)
    np.testing.assert_allclose(jax.grad(scaled)(w, y) / 2.0**10, jax.grad(fun)(w, y), rtol=0.02, atol=1e-7)


def test_the_variance_of_10000_to_10003_is_1_25():
    assert jamp.autocast(jnp.var)(jnp.array([10000.0, 10001, 10002, 10003])) == 1.25


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (lambda h: h * 2.0, F16),
        (lambda h: 0.044715 * h, F16),
        (lambda h: h / 3, F16),
        (lambda h: jnp.where(h > 0, h, 0), F16),
        (lambda h: jnp.maximum(h, -jnp.inf), F16),
        (lambda h: h + jnp.zeros((4, 4)), F16),
        (lambda h: h + 70000.0, F32),
        (lambda h: h + 1e-8, F32),
        (lambda h: jnp.where(h > 0, h, -1e30), F32),
        (lambda h: h / h, F32),
        (lambda h: h + np.ones((4, 4), np.float32), F32),
    ],
)
def test_a_constant_that_16_bit_can_hold_does_not_promote_and_one_that_it_cannot_does(fun, expected):
    seen = jamp.autocast(lambda x: fun(x @ x) @ x)
    casts = [e for e in equations(jax.make_jaxpr(seen)(normal(4, 4))) if e.primitive.name == "convert_element_type"]
    widened = [e for e in casts if e.invars[0].aval.dtype == F16 and e.outvars[0].aval.shape == (4, 4)]
    assert (F32 if len(widened) > 1 else F16) == expected  # The result is widened in any case.


def test_a_product_of_positions_and_frequencies_is_not_rounded():
    positions, frequencies = jnp.arange(2000.0), 1e4 ** -jnp.linspace(0, 1, 8)
    fun = lambda p, f: jnp.sin(jnp.einsum("i,j->ij", p, f))
    np.testing.assert_array_equal(jamp.autocast(fun, BF16)(positions, frequencies), fun(positions, frequencies))


@pytest.mark.parametrize("precision", ["highest", lax.DotAlgorithmPreset.F32_F32_F32])
def test_a_product_whose_precision_was_asked_for_stays_float32(precision):
    fun = jamp.autocast(lambda x: jnp.matmul(x, x, precision=precision))
    assert products(fun, normal(4, 4)) == {F32}


def test_a_default_precision_for_the_whole_program_asks_for_nothing():
    with jax.default_matmul_precision("highest"):
        assert products(jamp.autocast(lambda x: x @ x), normal(4, 4)) == {F16}


def test_a_bias_is_added_in_16_bit_and_its_gradient_summed_in_float32():
    x, w = jnp.ones((4096, 2)), jnp.ones((2, 2))
    fun = jamp.autocast(lambda b, w, x: jnp.sum(jnp.tanh(x @ w + b)))
    assert dtypes(fun, jnp.zeros(2), w, x, names=("add", "tanh")) == {F16}
    grad = jax.grad(fun)(jnp.zeros(2), w, x)
    assert dtypes(jax.grad(fun), jnp.zeros(2), w, x, names=("reduce_sum",)) == {F32}
    np.testing.assert_allclose(grad, 4096 * (1 - np.tanh(2.0) ** 2), rtol=2e-2)


def test_a_mask_that_is_added_to_attention_logits_is_not_taken_for_a_bias():
    q = normal(2, 3, 4)
    mask = jnp.array([0.0, -1e9, -1e9])
    fun = lambda q, m: jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, q) + m)
    assert dtypes(jamp.autocast(fun), q, mask, names=("add",)) == {F32}


# What is left alone.


def test_float64_complex_integers_and_keys_are_never_cast(x64):
    def fun(d, c, i, key):
        return d @ d, c @ c, i @ i, jax.random.normal(key, (3,), jnp.float64), d.sum(), jnp.exp(c)

    args = np.eye(3) / 3, np.eye(3) * 1j, np.eye(3, dtype=int), jax.random.key(0)
    for mine, plain in zip(jamp.autocast(fun)(*args), fun(*args), strict=True):
        assert mine.dtype == plain.dtype
        np.testing.assert_array_equal(mine, plain)


@pytest.mark.parametrize("dtype", HALF)
def test_a_function_that_is_already_bf16_is_left_alone(dtype):
    def fun(x):
        h = jnp.dot(x, x, preferred_element_type=jnp.float32)
        return jax.nn.softmax(h.astype(jnp.bfloat16) @ x) + h.sum().astype(jnp.bfloat16)

    x = normal(4, 4).astype(jnp.bfloat16)
    assert str(jax.make_jaxpr(jamp.autocast(fun, dtype))(x)) == str(jax.make_jaxpr(fun)(x))


def test_a_function_without_products_is_left_alone():
    fun = lambda x: jax.nn.softmax(lax.fori_loop(0, 3, lambda i, y: jnp.tanh(y) * i, x)) + 1
    assert str(jax.make_jaxpr(jamp.autocast(fun))(normal(4))) == str(jax.make_jaxpr(fun)(normal(4)))


def test_random_numbers_are_the_same():
    fun = lambda key: jax.random.normal(key, (4,)) + jax.random.uniform(key, (4,))
    np.testing.assert_array_equal(jamp.autocast(fun)(jax.random.key(0)), fun(jax.random.key(0)))


def test_a_parameter_used_twice_is_cast_once():
    fun = jamp.autocast(lambda w, x: x @ w @ w @ w.T)
    jaxpr = jax.make_jaxpr(fun)(normal(4, 4), normal(4, 4))
    down = [e for e in equations(jaxpr) if e.primitive.name == "convert_element_type" and e.params["new_dtype"] == F16]
    assert len([e for e in down if e.invars[0] is jaxpr.jaxpr.invars[0]]) == 1


# Results.


def test_outputs_have_the_structure_dtypes_and_weak_types_of_the_function():
    def fun(x, n, scale=2.0):
        h = x @ x
        return {
            "h": h,
            "n": n,
            "pair": (h.astype(jnp.bfloat16), h > 0),
            "scalar": scale,
            "none": None,
            "weak": jnp.array(1.0) * 2,
        }

    args = normal(4, 4), jnp.int32(3)
    plain, mine = (jax.make_jaxpr(f, return_shape=True)(*args) for f in (fun, jamp.autocast(fun)))
    assert jax.tree.structure(plain[1]) == jax.tree.structure(mine[1])
    assert [str(v.aval) for v in plain[0].jaxpr.outvars] == [str(v.aval) for v in mine[0].jaxpr.outvars]
    weak = lambda closed: [a.weak_type for a in closed.out_avals]
    assert weak(plain[0]) == weak(mine[0])


def test_an_output_may_be_an_input_a_constant_or_returned_twice():
    x, constant = normal(4, 4), np.arange(3.0, dtype=np.float32)
    fun = lambda x: (x, (h := x @ x), h, constant, 1.0, h.T)
    out = jamp.autocast(fun)(x)
    np.testing.assert_array_equal(out[0], x)
    np.testing.assert_array_equal(out[1], out[2])
    np.testing.assert_array_equal(out[3], constant)
    assert out[4] == 1.0
    assert [jnp.result_type(o) for o in out[:4]] == [F32] * 4


def test_python_arguments_are_not_traced_and_keywords_pass_through():
    @jamp.autocast
    def fun(x, activation, *, training, power=2):
        assert training is True
        return activation(x @ x) ** power

    assert fun(jnp.ones((2, 2)), jnp.tanh, training=True, power=3).shape == (2, 2)
    assert fun.__name__ == "fun"


def test_closed_over_parameters_are_cast_and_differentiated():
    x = normal(4, 4)
    loss = lambda w: jamp.autocast(lambda y: jnp.sum((y @ w) ** 2))(x)
    w = normal(4, 4, seed=1)
    assert products(jax.grad(loss), w) == {F16}
    plain = jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)
    assert jnp.linalg.norm(jax.grad(loss)(w) - plain) < 2e-3 * jnp.linalg.norm(plain)


@pytest.mark.parametrize(
    ("wrap", "batched"),
    [
        (jax.jit, False),
        (jax.checkpoint, False),
        (lambda f: jax.vmap(f, in_axes=(None, 0)), True),
        (lambda f: lambda w, xs: lax.map(functools.partial(f, w), xs), True),
        (lambda f: lambda w, x: jax.value_and_grad(lambda w: f(w, x).sum())(w), False),
        (lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x)), False),
        (lambda f: lambda w, x: jax.hessian(lambda s: f(w * s, x).sum())(1.0), False),
    ],
)
def test_autocast_comes_before_or_after_other_transformations(wrap, batched):
    fun = lambda w, x: jnp.tanh(x @ w) @ w
    args = normal(4, 4, scale=0.5), normal(*((3, 2, 4) if batched else (2, 4)), seed=1)
    plain = wrap(fun)(*args)
    for mine in (wrap(jamp.autocast(fun))(*args), jamp.autocast(wrap(fun))(*args)):
        assert jax.tree.structure(mine) == jax.tree.structure(plain)
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(plain), strict=True):
            assert a.dtype == b.dtype
            assert jnp.linalg.norm(a - b) < 2e-2 * jnp.linalg.norm(b)


def test_jax_checks_pass_on_every_value():
    """`jax.enable_checks` compares each value with the type that its variable has."""

    def loss(w, b, x):
        x = jax.checkpoint(lambda x: jax.nn.relu(x @ w + b))(x)
        x, _ = lax.scan(lambda c, _: (c @ w, None), x, None, length=2)
        return jnp.sum(jax.nn.softmax(lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x * 2, x)))

    with jax.enable_checks(True):
        assert jax.jit(jax.grad(jamp.autocast(loss)))(normal(4, 4), jnp.ones(4), normal(4, 4)).dtype == F32


def test_arrays_that_are_sharded_in_their_types_keep_their_sharding():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    fun = lambda w, b, x: lax.scan(lambda c, _: (jax.nn.relu(c @ w + b), None), x, None, length=2)[0]
    with jax.set_mesh(mesh):
        x = jax.device_put(normal(4, 4), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i", None)))
        args = normal(4, 4), jnp.ones(4), x
        assert jax.jit(jamp.autocast(fun))(*args).sharding == jax.jit(fun)(*args).sharding
        assert jax.jit(jax.grad(lambda *a: jamp.autocast(fun)(*a).sum()))(*args).dtype == F32


def test_shapes_may_be_symbolic():
    rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 4"), F32)
    fun = jax.jit(jamp.autocast(lambda x, w, b: jax.nn.relu(x @ w + b)))
    exported = jax.export.export(fun)(rows, normal(4, 4), jnp.ones(4))
    assert exported.call(normal(3, 4), normal(4, 4), jnp.ones(4)).shape == (3, 4)


def test_it_is_compiled_once_and_ahead_of_time():
    traces = []

    @jax.jit
    @jamp.autocast
    def fun(x):
        traces.append(1)
        return x @ x

    x = normal(4, 4)
    assert fun.lower(jax.ShapeDtypeStruct((4, 4), F32)).compile()(x).dtype == F32
    fun(x), fun(x)
    assert len(traces) == 1
    assert jax.eval_shape(fun, x).dtype == F32


def test_value_and_grad_of_a_scaled_autocast_loss_gives_true_gradients():
    loss = lambda w, x: jnp.mean((x @ w) ** 2)
    w, x = normal(4, 4), normal(8, 4, seed=1)
    value, grads = jax.jit(jamp.value_and_grad(jamp.autocast(loss), jamp.StaticLossScale(2.0**12).init()))(w, x)
    plain = jax.value_and_grad(loss)(w, x)
    np.testing.assert_allclose(value, plain[0], rtol=2e-3)
    assert grads.dtype == F32
    assert jnp.linalg.norm(grads - plain[1]) < 2e-3 * jnp.linalg.norm(plain[1])


# Residuals.


def saved_bytes(loss, *args):
    """What the backward pass of a loss needs, beside its arguments."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(loss, *a)[1], *args))
    return sum(x.size * x.dtype.itemsize for x in leaves) - sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves(args)
    )


def test_residuals_kept_for_the_backward_pass_shrink():
    def loss(ws, x):
        for w, b in ws:
            x = jax.nn.relu(x @ w + b)
        return jnp.mean(x)

    ws = [(normal(8, 8, seed=i), jnp.zeros(8)) for i in range(4)]
    x = normal(2048, 8)
    assert saved_bytes(jamp.autocast(loss), ws, x) < 0.7 * saved_bytes(loss, ws, x)


# Rules and errors.


def test_rules_are_changed_by_name():
    fun = lambda x: jnp.tanh(x @ x)
    assert dtypes(jamp.autocast(fun), normal(4, 4), names=("tanh",)) == {F16}
    assert dtypes(jamp.autocast(fun, rules={"tanh": "float32"}), normal(4, 4), names=("tanh",)) == {F32}
    assert products(jamp.autocast(fun, rules={"dot_general": "float32"}), normal(4, 4)) == {F32}
    assert dtypes(jamp.autocast(jnp.exp, rules={"exp": "compute"}), normal(4), names=("exp",)) == {F16}


def test_a_rule_for_a_primitive_covers_its_special_cases():
    fun = lambda b, x: x @ x + b
    args = jnp.zeros(4), normal(4, 4)
    assert dtypes(jamp.autocast(fun), *args, names=("add",)) == {F16}
    for key in ("add", "add[bias]"):
        assert dtypes(jamp.autocast(fun, rules={key: "widest"}), *args, names=("add",)) == {F32}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"dot_generall": "compute"}, "no operation 'dot_generall' to give a rule. Did you mean 'dot_general'"),
        ({"exp": "float16"}, "The rule for 'exp' must be one of compute, float32, widest, got 'float16'"),
        ({"scan": "compute"}, "'scan' is entered, or with the rule 'float32' is not"),
    ],
)
def test_an_unknown_rule_is_an_error_that_says_what_there_is(rules, message):
    with pytest.raises(ValueError, match=message):
        jamp.autocast(jnp.exp, rules=rules)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64, jnp.int8, jnp.complex64])
def test_a_compute_dtype_that_is_not_a_16_bit_float_is_an_error(dtype):
    for make in (jamp.autocast, jamp.autocast_report):
        with pytest.raises(ValueError, match="compute_dtype must be float16 or bfloat16, got"):
            make(jnp.exp, dtype)


def test_float8_is_an_error_with_a_word_on_why():
    with pytest.raises(ValueError, match="float8 values need a scale for each tensor"):
        jamp.autocast(jnp.exp, jnp.float8_e4m3fn)


def test_an_output_that_cannot_be_traced_is_named():
    def describe(x):
        return {"x": x, "names": ["a", "b"]}

    with pytest.raises(TypeError, match=r"describe returns str 'a' at result\['names'\]\[0\], which cannot be traced"):
        jamp.autocast(describe)(jnp.ones(2))
