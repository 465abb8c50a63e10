"""autocast against float32: what is cast, what is not, numbers at the edges, and the same results as the function's."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.lax.linalg import cholesky
from jaxprs import PRODUCTS, dtypes, equations, normal, operand_dtypes, products
from norms import distance

import jamp

F16, BF16, F32 = jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
HALF = [F16, BF16]


def test_every_way_to_write_a_product_has_16_bit_operands_and_results():
    def fun(x):
        products = jnp.einsum("ij,kj->ik", x, x, preferred_element_type=jnp.float32), jnp.dot(x, x[0])
        products += jnp.dot(x, x, precision=lax.Precision.DEFAULT), lax.dot_general(x, x, (((1,), (0,)), ((), ())))
        products += jax.vmap(jnp.matmul)(x[None], x[None]), lax.batch_matmul(x[None], x[None])
        return *products, lax.conv(x[None, None], x[None, None], (1, 1), "SAME")

    found = [
        e
        for e in equations(jax.make_jaxpr(jamp.autocast(fun, jnp.float16))(normal(16, 16)))
        if e.primitive.name in PRODUCTS
    ]
    assert [v.aval.dtype for e in found for v in (*e.invars, *e.outvars)] == [F16] * 3 * 7


def test_a_product_of_two_vectors_is_a_sum_and_stays_float32():
    mean = lambda losses, mask: jnp.vdot(losses, mask) / mask.sum()
    losses = jnp.full(5000, 10.3), jnp.ones(5000)
    assert jamp.autocast(mean, jnp.bfloat16)(*losses) == mean(*losses)
    norm, w = lambda w: jnp.vdot(w, w), jnp.full((1000, 1000), 0.5)
    assert jamp.autocast(norm, jnp.float16)(w) == 250_000  # beyond float16
    for fun in (
        jnp.vdot,
        jax.vmap(jnp.dot),
        lambda a, b: jnp.einsum("ij,ij->", a, b),
        lambda a, b: jnp.dot(a[0], b[0]),
    ):
        loss = lambda a, b, fun=fun: jnp.sum(fun(a, b))
        for grad in (
            jax.grad(jamp.autocast(loss, jnp.float16), (0, 1)),
            jamp.autocast(jax.grad(loss, (0, 1)), jnp.float16),
        ):
            given = normal(4, 8) * 1e5, normal(4, 8) * 1e-9  # each beyond float16
            jax.tree.map(np.testing.assert_array_equal, grad(*given), jax.grad(loss, (0, 1))(*given))
        asked = jamp.autocast(loss, jnp.float16, rules={"dot_general": "compute"})
        assert dtypes(asked, normal(4, 8), normal(4, 8), names=PRODUCTS) == {F16}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("category", [None, "compute", "widest"])
def test_the_gradient_of_an_element_that_is_copied_is_a_float32_sum(dtype, category):
    """Of a token that is used 5,000 times, and of a bias that is added to 5,000 rows."""
    ids = jnp.zeros(5000, int)
    embed = jax.named_scope("net")(lambda table: jnp.sum(table[ids] * 1.0))
    bias = jax.named_scope("net")(lambda b: jnp.sum(jnp.broadcast_to(b, (5000, 4)) * 1.0))
    for name, fun, given in (("gather", embed, jnp.zeros((8, 4))), ("broadcast_in_dim", bias, jnp.zeros(4))):
        for rules in [{name: category}, {"*[net]": category}] if category else [None]:
            found = jax.grad(jamp.autocast(fun, dtype, rules=rules))(given)
            assert (found.dtype, found.ravel()[0]) == (F32, 5000)
    low = jamp.autocast(lambda t: jnp.tanh(t[ids]), dtype, rules={"gather": "compute", "tanh": "compute"})
    assert dtypes(low, jnp.zeros((8, 4)), names=("tanh",)) == {dtype}


SAME_NAME = (  # in lax as the primitive
    "abs ceil cos erf erfc floor neg logistic round sign sin tanh atan stop_gradient acos acosh asin asinh "
    "atanh cbrt cosh exp exp2 expm1 log log1p rsqrt sinh sqrt square tan erf_inv lgamma digamma cumsum cumprod "
    "cumlogsumexp cummax sort"
)
OPERATIONS = {name: getattr(lax, name) for name in SAME_NAME.split()} | {
    "reduce_min": lambda x: x.min(0),
    "reduce_max reduce_sum reduce_prod": lambda x: (x.max(0), x.sum(0), x.prod(0)),
    "rev transpose reshape slice split": lambda x: jnp.split(x[::-1].T.reshape(-1)[4:], 2),
    "concatenate pad": lambda x: jnp.pad(jnp.concatenate([x, jnp.zeros((16, 16))]), 1),
    "gather": lambda x: x[jnp.array([1, 0])],
    "broadcast_in_dim": lambda x: jnp.broadcast_to(x, (2, 16, 16)),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (jnp.int32(1), 0), (1, 1)),
    "clamp": lambda x: lax.clamp(0.0, x, 1.0),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, jnp.zeros((1, 16)), (jnp.int32(0), 0)),
    "max mul add sub": lambda x: (jnp.maximum(x, x * 0.5), x + x, x - 1),
    "select_n": lambda x: jnp.where(np.eye(16, dtype=bool), x, -jnp.inf),
    "integer_pow pow atan2 rem cholesky": lambda x: (x**3, x**0.3, lax.atan2(x, x), lax.rem(x, x), cholesky(x)),
    "scatter": lambda x: x.at[0].set(x[1]),
    "scatter-add": lambda x: x.at[0].add(x[1]),
    "div": lambda x: x / 4,
    "reduce_window_sum": lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "VALID"),
}


def stored(fun, **kwargs):
    """The dtypes in which the results of a function of a product are stored, and the jaxpr that it becomes."""
    inner = jax.jit(lambda x: fun(x @ x))
    low = jax.make_jaxpr(jamp.autocast(lambda x: inner(x), jnp.float16, **kwargs))(jnp.full((16, 16), 0.0625))
    [call] = [eqn for eqn in low.jaxpr.eqns if eqn.primitive.name == "jit"]
    return {v.aval.dtype for v in call.outvars}, low


@pytest.mark.parametrize("names", OPERATIONS)
def test_an_operation_of_the_table_runs_and_is_stored_as_its_rule_says(names):
    found, low = stored(OPERATIONS[names])
    fun = lambda x: OPERATIONS[names](x @ x)
    report = jamp.autocast_report(fun, jnp.float16)(jnp.full((16, 16), 0.0625))
    categories = {row.operation: row.category for row in report.rows}
    for name in names.split():
        expected = F16 if categories[name] == "widest" else F32
        assert operand_dtypes(low, [name]) == found == {expected}, name


# Numbers.


MASK = np.eye(16, dtype=bool)


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (lambda h: h, F16),
        (lambda h: h.reshape(8, 32).T, F16),
        (lambda h: jnp.where(MASK, h, 0.0), F16),
        (lambda h: jnp.where(MASK, -jnp.inf, h.T), F16),
        (lambda h: jnp.where(MASK, h, jnp.zeros((16, 16))), F16),
        (lambda h: jnp.where(MASK, h, 1e-8), F32),  # 16 bit do not hold it
        (lambda h: jnp.where(MASK, h, jnp.arange(16.0)), F32),
        (lambda h: h * 2.0, F32),
        (lambda h: jnp.maximum(h, 0.0), F32),
        (lambda h: jnp.where(h > 0, h, 0.0), F32),  # Its cotangents come from one reader, but it has two.
        (lambda h: h[jnp.array([1, 1])], F32),  # The transpose is a sum.
    ],
)
def test_a_product_is_stored_in_16_bit_while_it_is_only_moved(fun, expected):
    assert stored(fun)[0] == {expected}


def test_a_product_of_positions_and_frequencies_is_not_rounded():
    positions, frequencies = jnp.arange(2000.0), 1e4 ** -jnp.linspace(0, 1, 8)
    fun = lambda p, f: jnp.sin(jnp.einsum("i,j->ij", p, f))
    np.testing.assert_array_equal(jamp.autocast(fun, BF16)(positions, frequencies), fun(positions, frequencies))


def test_a_product_whose_precision_was_asked_for_stays_float32():
    for precision in ("highest", lax.DotAlgorithmPreset.F32_F32_F32):
        fun = jamp.autocast(lambda x, precision=precision: jnp.matmul(x, x, precision=precision), jnp.float16)
        assert products(fun, normal(16, 16)) == {F32}
        with jax.default_matmul_precision("bfloat16"):
            assert products(fun, normal(16, 16)) == {F32}
    default = functools.partial(jnp.matmul, precision=lax.DotAlgorithmPreset.DEFAULT)  # states no precision
    assert products(jamp.autocast(lambda x: default(x, x), jnp.float16), normal(16, 16)) == {F16}
    with jax.default_matmul_precision("highest"):  # A default for the whole program asks for nothing.
        assert products(jamp.autocast(lambda x: x @ x, jnp.float16), normal(16, 16)) == {F16}


IN_RANGE = {
    "a square": (lambda x, y: (x @ y) * (x @ y), (300 * jnp.ones((16, 16)), jnp.eye(16))),
    "what is added to a product": (lambda x, y: x @ x + y, (normal(16, 16), jnp.full((16, 16), 1e5))),
    "an axis of length 1": (lambda x, y: (x @ x)[:, None] + y, (normal(16, 16), normal(1, 16))),
    "scatters": (
        lambda x, y: (x @ y).at[0].max(0.5).at[2].mul(2.0) + jax.ops.segment_max(x @ y, jnp.arange(16), 16),
        (normal(16, 16), normal(16, 16)),
    ),
}


@pytest.mark.parametrize("name", IN_RANGE)
def test_what_stands_between_two_products_has_the_range_and_digits_of_float32(name):
    fun, args = IN_RANGE[name]
    loss = lambda fun: lambda x, y: jnp.sum(fun(x, y) * 1e-3)
    both = jax.jit(
        lambda *args: [
            jax.value_and_grad(f, argnums=(0, 1))(*args) for f in (loss(jamp.autocast(fun, jnp.float16)), loss(fun))
        ]
    )
    mine, plain = both(*args)
    assert distance(mine, plain) < 5e-3


# What is left alone.


def test_float64_complex_integers_and_keys_are_never_cast(x64):
    def fun(d, c, i, key):
        return d @ d, c @ c, i @ i, jax.random.normal(key, (3,), jnp.float64), d.sum(), jnp.exp(c)

    args = np.eye(3) / 3, np.eye(3) * 1j, np.eye(3, dtype=int), jax.random.key(0)
    with pytest.warns(UserWarning, match="float64"):
        cast = jamp.autocast(fun, jnp.float16)(*args)
    for mine, plain in zip(cast, fun(*args), strict=True):
        assert mine.dtype == plain.dtype
        np.testing.assert_array_equal(mine, plain)


def already_bf16(x):
    h = jnp.dot(x, x, preferred_element_type=jnp.float32)
    return jax.nn.softmax(h.astype(jnp.bfloat16) @ x) + h.sum().astype(jnp.bfloat16)


ALONE = [lambda x: x + 70000.0, lambda x: x * 1e-7, lambda x: (x - 1e5) ** 2, lambda x: 1 / (x + 1e-8), jnp.exp]
ALONE += [jnp.var, jnp.mean, jnp.sum, jnp.cumsum, jnp.linalg.norm, jax.nn.softmax, jax.nn.logsumexp, jax.nn.log_softmax]
ALONE += [lambda x: lax.fori_loop(0, 3, lambda i, y: jnp.tanh(y) * 2, x)]


@pytest.mark.parametrize("dtype", HALF)
def test_a_function_in_which_there_is_nothing_to_cast_is_left_alone(dtype):
    random = lambda key: jax.random.normal(key, (4,)) + jax.random.uniform(key, (4,))
    text = lambda fun, x: str(jax.make_jaxpr(fun)(x))
    for fun, x in [(random, jax.random.key(0)), *((f, jnp.ones(4)) for f in ALONE)]:
        assert text(jamp.autocast(fun, dtype), x) == text(fun, x)
    x = jnp.ones((4, 4), BF16)
    with pytest.warns(UserWarning, match=r"\(already_bf16\).* 16 bit"):
        assert text(jamp.autocast(already_bf16, dtype), x) == text(already_bf16, x)
    layers = lambda x: functools.reduce(lambda x, _: jnp.tanh(x.astype(BF16) @ x.astype(BF16).T), range(4), x)
    with pytest.warns(UserWarning, match=r"jamp\.recompute"):
        jamp.autocast(layers, dtype, memory_budget=0.5)(jnp.ones((64, 64)))


def test_casts_of_a_parameter_are_merged_and_their_cotangents_are_added_in_float32():
    fun, args = jamp.autocast(lambda w, x: x @ w + jnp.tanh(x) @ w, BF16), (normal(16, 16), normal(16, 16))
    text = jax.jit(fun, compiler_options={"xla_disable_hlo_passes": "fusion"}).lower(*args).compile().as_text()
    assert len(re.findall(r"= bf16\[16,16\]\S* \w+\(%w\b", text)) == 1  # both products read one cast of w
    sums = [
        e for e in equations(jax.make_jaxpr(jax.grad(lambda *a: fun(*a).sum()))(*args)) if "add_any" in str(e.primitive)
    ]
    assert {v.aval.dtype for e in sums for v in e.invars} == {F32}


# Results.


def test_outputs_have_the_structure_dtypes_and_weak_types_of_the_function():
    constant = np.arange(3.0, dtype=np.float32)

    def fun(x, n, scale=2.0):
        h = x @ x
        kept = {"x": x, "n": n, "constant": constant, "scalar": scale, "none": None, "weak": jnp.array(1.0) * 2}
        return kept | {"h": h, "again": h, "transposed": h.T, "pair": (h.astype(BF16), h > 0)}

    args = normal(16, 16), jnp.int32(3)
    plain, mine = (jax.make_jaxpr(f, return_shape=True)(*args) for f in (fun, jamp.autocast(fun, jnp.float16)))
    assert jax.tree.structure(plain[1]) == jax.tree.structure(mine[1])
    assert [str(v.aval) for v in plain[0].jaxpr.outvars] == [str(v.aval) for v in mine[0].jaxpr.outvars]
    assert [a.weak_type for a in plain[0].out_avals] == [a.weak_type for a in mine[0].out_avals]
    out = jamp.autocast(fun, jnp.float16)(*args)
    for name, expected in {"x": args[0], "n": 3, "constant": constant, "scalar": 2.0, "again": out["h"]}.items():
        np.testing.assert_array_equal(out[name], expected)


def test_outside_jit_results_are_arrays_of_jax():
    constants = np.ones(2, np.float32), 1.0, 2, True
    for fun in (lambda x: (x @ x, jnp.zeros(()), *constants), lambda x: constants):
        assert all(isinstance(x, jax.Array) for x in jamp.autocast(fun, jnp.float16)(normal(16, 16)))


def test_python_arguments_are_not_traced_and_keywords_pass_through():
    @functools.partial(jamp.autocast, compute_dtype=jnp.float16)
    def fun(x, activation, *, training, power=2):
        assert training is True
        return activation(x @ x) ** power

    assert fun(jnp.ones((16, 16)), jnp.tanh, training=True, power=3).shape == (16, 16)
    assert fun.__name__ == "fun"


def test_integers_and_flags_of_numpy_are_not_traced():
    fun = jamp.autocast(lambda x, flag, axis: (x @ x).sum(axis) if flag else x, jnp.float16)
    assert fun(normal(16, 16), np.bool_(True), np.int64(1)).shape == (16,)


def test_a_type_that_is_an_argument_reaches_the_function():
    given, like = [], jax.ShapeDtypeStruct((2, 2), jnp.float32)
    sin = lambda x, like: given.append(like) or jax.pure_callback(np.sin, like, x @ x)
    found = jamp.autocast(sin, jnp.float16)(jnp.eye(2), like)
    np.testing.assert_array_equal(found, np.sin(np.eye(2, dtype=np.float32)))
    assert given
    assert all(x is like for x in given)


def test_closed_over_parameters_are_cast_and_differentiated_under_a_loss_scale():
    w, x = normal(16, 16), normal(32, 16, seed=1)
    loss = lambda w: jnp.mean((x @ w) ** 2)
    closed = lambda w: jamp.autocast(lambda y: jnp.mean((y @ w) ** 2), jnp.float16)(x)
    scaled = jamp.value_and_grad(closed, jamp.StaticLossScale(2.0**12).init())
    assert products(scaled, w) == {F16}
    assert distance(*jax.jit(lambda w: (scaled(w), jax.value_and_grad(loss)(w)))(w)) < 2e-3


def layers(w, b, x):
    x = jax.checkpoint(lambda x: jax.nn.relu(x @ w + b))(x)
    return lax.scan(lambda c, _: (c @ w, None), x, None, length=2)[0]


LAYERS = normal(16, 16, scale=0.5), jnp.ones(16), normal(16, 16, scale=0.5)


def test_jax_checks_pass_on_every_value():
    """`jax.enable_checks` compares each value with the type that its variable has."""

    def loss(*args):
        x = layers(*args)
        return jnp.sum(jax.nn.softmax(lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x * 2, x)))

    with jax.enable_checks(True):
        assert jax.jit(jax.grad(jamp.autocast(loss, jnp.float16)))(*LAYERS).dtype == F32


def test_arrays_that_are_sharded_in_their_types_keep_their_sharding():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        specs = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("i", None)
        args = [
            jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)) for x, spec in zip(LAYERS, specs, strict=True)
        ]
        mine, plain = jax.jit(lambda *args: (jamp.autocast(layers, jnp.float16)(*args), layers(*args)))(*args)
        assert mine.sharding == plain.sharding
        assert jax.jit(jax.grad(lambda *args: jamp.autocast(layers, jnp.float16)(*args).sum()))(*args).dtype == F32


def test_shapes_may_be_symbolic():
    rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 16"), F32)
    exported = jax.export.export(jax.jit(jamp.autocast(layers, jnp.float16)))(*LAYERS[:2], rows)
    assert exported.call(*LAYERS[:2], normal(3, 16)).shape == (3, 16)
    grad = jax.grad(jamp.autocast(lambda w, x: jnp.sum(jax.nn.softmax(x @ w, axis=0) @ w), jnp.float16))  # sums n terms
    assert jax.export.export(jax.jit(grad))(LAYERS[0], rows).call(LAYERS[0], normal(3, 16)).shape == (16, 16)


def test_it_is_compiled_once_and_ahead_of_time():
    traces, x = [], normal(16, 16)
    fun = jax.jit(jamp.autocast(lambda x: (traces.append(1), x @ x)[1], jnp.float16))
    assert fun.lower(jax.ShapeDtypeStruct((16, 16), F32)).compile()(x).dtype == fun(x).dtype == fun(x).dtype == F32
    assert len(traces) == 1
    assert jax.eval_shape(fun, x).dtype == F32


def test_residuals_kept_for_the_backward_pass_shrink():
    def loss(ws, x):
        for w, b in ws:
            x = jax.nn.relu(x @ w + b)
        return jnp.mean(x)

    count = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    args = [(jnp.ones((16, 16)), jnp.zeros(16))] * 4, jnp.ones((2048, 16))
    saved = lambda loss: count(jax.eval_shape(lambda *a: jax.vjp(loss, *a)[1], *args)) - count(args)
    assert saved(jamp.autocast(loss, jnp.float16)) < 0.7 * saved(loss)


def test_an_operation_that_is_not_computed_again_keeps_nothing_of_its_call():
    count = lambda fun: sum(x.nbytes for x in jax.tree.leaves(jax.vjp(fun, normal(64, 64), normal(64, 64))[1]))
    layer = lambda x: jnp.tanh(jnp.exp(jnp.sin(lax.cumsum(x, 0))))
    plain, called = (lambda x, w, f=f: jnp.sum(f(x @ w) @ w) for f in (layer, jax.jit(layer)))
    assert count(jamp.autocast(called, BF16)) == count(jamp.autocast(plain, BF16)) < 0.7 * count(plain)


def test_what_is_computed_again_holds_no_product_no_callback_and_nothing_of_yours():
    seen = []

    def layer(x, w):
        return jax.nn.gelu(x @ w - jnp.mean(x @ w)) @ w

    def loss(x, w):
        h = layer(x, w)
        jax.debug.callback(seen.append, h[0, 0])
        return jnp.sum(jnp.tanh(h @ w) ** 2)

    def count(fun, names):
        return sum(e.primitive.name in names for e in equations(jax.make_jaxpr(fun)(normal(64, 64), normal(64, 64))))

    assert count(jax.grad(jamp.autocast(loss, jnp.float16)), PRODUCTS) == count(jax.grad(loss), PRODUCTS)
    jax.block_until_ready(jax.jit(jax.grad(jamp.autocast(loss, jnp.float16)))(normal(64, 64), normal(64, 64)))
    jax.effects_barrier()
    assert len(seen) == 1
    softmax = jamp.autocast(lambda x, w: jnp.sum(jax.nn.softmax(x @ w) @ w), jnp.float16)
    assert count(jax.grad(softmax), ["reduce_max"]) == 1  # the statistics of rows are kept
    total = lambda fun: jax.grad(lambda x, w: jnp.sum(fun(x, w)))
    # The policy of the user's checkpoint decides, not jamp.
    segments = lambda fun, **options: [
        eqn
        for eqn in equations(jax.make_jaxpr(total(jamp.autocast(fun, jnp.float16, **options)))(*[normal(64, 64)] * 2))
        if "jamp.segment" in str(eqn.source_info.name_stack)
    ]
    assert not segments(jax.checkpoint(layer))
    assert segments(layer)
    assert not segments(layer, recompute=False)


def test_a_sort_is_not_computed_again_for_the_order_that_its_derivative_needs():
    loss = lambda x, w: jnp.sum(jnp.cos(jnp.sort(jnp.sin(x @ w), -1)) @ w)
    args = normal(64, 64), normal(64, 64)
    count = lambda f: sum(eqn.primitive.name == "sort" for eqn in equations(jax.make_jaxpr(jax.grad(f))(*args)))
    assert count(jamp.autocast(loss, jnp.bfloat16)) == count(loss) == 1


def test_the_products_of_a_custom_jvp_are_not_computed_again():
    @jax.custom_jvp
    def gated(x, w):
        return jnp.tanh(x @ w) * (x @ w.T)

    @gated.defjvp
    def rule(primals, tangents):
        (x, w), (dx, _) = primals, tangents
        a, b, da, db = x @ w, x @ w.T, dx @ w, dx @ w.T
        return jnp.tanh(a) * b, (1 - jnp.tanh(a) ** 2) * b * da + jnp.tanh(a) * db

    def loss(x, w):
        return jnp.sum(jnp.cos(gated(jnp.sin(x @ w), w)) @ w)

    def count(fun):
        jaxpr = jax.make_jaxpr(jax.grad(fun))(normal(64, 64), normal(64, 64))
        return sum(eqn.primitive.name in PRODUCTS for eqn in equations(jaxpr))

    assert count(jamp.autocast(loss, jnp.bfloat16)) == count(loss)


def test_equal_layers_share_a_segment_but_not_if_their_constants_differ_in_a_sign():
    def fun(x, w):
        for zero in (0.0, 0.0, 0.0, 0.0, -0.0, 0.0, 0.0):
            for _ in range(6):
                x = x + jnp.tanh(1 / (zero * (1 + jnp.abs(x @ w))))  # 1 or -1
        return x

    args = normal(64, 64), normal(64, 64)
    np.testing.assert_array_equal(jamp.autocast(fun, jnp.float16)(*args), fun(*args))
    jaxpr = jax.make_jaxpr(jamp.autocast(fun, jnp.float16))(*args)
    found = [eqn.params["jaxpr"] for eqn in jaxpr.jaxpr.eqns if eqn.params.get("name") == "segment"]
    assert len(found) > len(set(map(id, found))) > 1


def test_what_is_broadcast_is_computed_again():
    """A scale that is broadcast to the size of the activations, as in Haiku's norms, is not kept."""
    kept = lambda fun: sum(x.size for x in jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(fun, *a)[1], *args)))
    args = normal(512, 64), normal(64, 64), normal(64)
    broadcast = lambda x, w, s: jnp.sum(jnp.tanh(x @ w * jnp.broadcast_to(s, x.shape)) @ w)
    assert (
        kept(jamp.autocast(broadcast, jnp.float16))
        < kept(jamp.autocast(lambda x, w, s: jnp.sum(jnp.tanh(x @ w * s) @ w), jnp.float16)) + 512
    )


# Rules and errors.


def test_rules_are_changed_by_name_and_cover_the_special_cases_of_a_primitive():
    fun, args = lambda b, x: jnp.exp(jnp.tanh(x @ x + b)), (jnp.zeros(16), normal(16, 16))
    found = lambda name, rules=None: dtypes(jamp.autocast(fun, jnp.float16, rules=rules), *args, names=(name,))
    assert found("dot_general") == found("exp", {"exp": "compute"}) == {F16}
    assert found("exp") == found("tanh") == found("dot_general", {"dot_general": "float32"}) == {F32}
    assert stored(jnp.exp, rules={"exp": "compute"})[0] == stored(jnp.exp, rules={"exp": "widest"})[0] == {F16}
    assert stored(jnp.transpose, rules={"transpose": "float32"})[0] == stored(jnp.exp)[0] == {F32}


@pytest.mark.parametrize(
    ("dtype", "rules", "message"),
    [
        (F16, {"dot_generall": "compute"}, "Did you mean 'dot_general'"),
        *((F16, {key: "float32"}, "'dot_general'") for key in ("matmul", "einsum")),
        *((name, None, "jamp.Float8") for name in ("float8", "FP8_e4m3", jnp.float8_e4m3fn, jamp.Float8)),
        (F16, {"exp": "float16"}, "compute, accumulate, float32, widest"),
        (F16, {"scan": "compute"}, "'float32'"),
        *((x, None, x) for x in ["int8", "complex64"]),
        ("float64", None, "leave"),
        (jnp.float32, {"exp": "float32"}, "compute, accumulate, float64, widest"),
        (jnp.float32, {"scan": "compute"}, "'float64'"),
    ],
)
def test_an_unknown_rule_or_compute_dtype_is_an_error_that_says_what_there_is(dtype, rules, message):
    for make in (jamp.autocast, jamp.autocast_report):
        with pytest.raises(ValueError, match=message):
            make(jnp.exp, dtype, rules=rules)


def test_the_compute_dtype_has_no_default_and_the_error_names_the_missing_argument():
    for make in (jamp.autocast, jamp.autocast_report, jamp.debug.rounding_report):
        with pytest.raises(TypeError, match="compute_dtype"):
            make(jnp.exp)


def test_an_output_that_cannot_be_traced_is_named():
    def describe(x):
        return {"x": x, "names": ["a", "b"]}

    with pytest.raises(TypeError, match=r"describe .* 'a' at result\['names'\]\[0\]"):
        jamp.autocast(describe, jnp.float16)(jnp.ones(2))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_layer_that_is_called_with_different_constant_weights_is_cast_once(dtype):
    layer, weights = jax.jit(lambda x, w: jnp.tanh(x @ w)), [normal(16, 16, seed=i) for i in range(6)]
    fun = lambda x: functools.reduce(layer, weights, x)
    jaxpr = jax.make_jaxpr(jamp.autocast(fun, dtype, recompute=False))(normal(4, 16))
    calls = [id(eqn.params["jaxpr"].jaxpr) for eqn in jaxpr.jaxpr.eqns if eqn.params.get("name") == "<lambda>"]
    # The first reads an argument, and no operation reads the result of the last.
    assert len(calls) == 6
    assert len(set(calls[1:-1])) == 1


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_random_key_that_the_function_closes_over_is_left_alone(dtype):
    key, w = jax.random.key(0), normal(16, 16)
    fun = lambda x: jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x @ w, 0)
    assert distance(jamp.autocast(fun, dtype)(w), fun(w)) < 2e-2


class Setting:
    """A user's object that has the methods of an NNX Variable."""

    def get_value(self):
        return 2.0

    def set_value(self, value):
        raise AssertionError(value)


@pytest.mark.parametrize(
    "wrap",
    [functools.partial(jamp.autocast, compute_dtype=jnp.float16), jamp.scaled, jamp.debug.find_nonfinite, lambda f: f],
)
def test_arguments_that_jax_grad_takes_are_taken(wrap):
    names, times = np.array(["a", "b"]), np.array(["2026-01-01"], "M8[D]")
    records = np.zeros(2, [("x", np.float32)])
    fun = wrap(lambda w, *others: jnp.sum(w @ w) * len(others[0]) * others[-1].get_value())
    for others in ((names, Setting()), (times, records, np.array([object()]), Setting())):
        found = fun(jnp.ones((2, 2)), *others)
        assert not found if wrap is jamp.debug.find_nonfinite else found == 16 * len(others[0])
