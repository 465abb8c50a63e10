"""Products that sum few terms carry coordinates and positions: autocast keeps them in float32, and no other product."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, nn
from jax.custom_derivatives import linear_call
from jaxprs import equations, normal, products
from norms import distance

import jamp
import jamp.debug

F16, BF16, F32 = jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
HALF = pytest.mark.parametrize("dtype", [F16, BF16])
FEW_TERMS = 8
FEW = range(1, FEW_TERMS + 1)
REASON = "it sums at most 8 terms, as products of coordinates or positions do, and 16 bit would gain no time"


def kinds(fun, *args):
    """The operand and result dtypes of each product, in their order."""
    found = [
        e for e in equations(jax.make_jaxpr(fun)(*args)) if e.primitive.name in ("dot_general", "conv_general_dilated")
    ]
    return [{v.aval.dtype for v in (*e.invars, *e.outvars)} for e in found]


# What carries coordinates, at the scale at which 16 bit would be wrong, and the size of its results.

ANGLES = np.stack(np.meshgrid(np.arange(4.0) + 300, np.arange(8.0), np.arange(8.0), indexing="ij"), -1).reshape(-1, 3)
CAMERA = np.float32([[1000, 0, 512], [0, 1000, 512], [0, 0, 1]])
ROTATION = np.float32(np.linalg.qr(np.random.default_rng(5).normal(size=(3, 3)))[0])
MOVE = np.block(
    [[ROTATION, np.float32([[100], [-50], [800]])], [np.zeros((1, 3), np.float32), np.ones((1, 1), np.float32)]]
)
QUATERNION = normal(4, seed=3) / np.linalg.norm(normal(4, seed=3))
POINTS = jnp.abs(normal(6, 3, seed=7)) + jnp.array([0, 0, 2.0])


def left(q):
    """The matrix of a product with a quaternion from the left."""
    a, b, c, d = q
    return jnp.stack([jnp.stack(row) for row in ([a, -b, -c, -d], [b, a, -d, c], [c, d, a, -b], [d, -c, b, a])])


def homogeneous(points):
    return jnp.concatenate([points, jnp.ones((len(points), 1))], -1)


def all_pairs(points):
    """Distances by the product of all points with all others."""
    square = jnp.sum(points**2, -1)
    return jnp.sqrt(jnp.maximum(square[:, None] + square[None] - 2 * points @ points.T, 0) + 1e-6)


COORDINATES = {
    "rotary angles on three axes": (lambda f: jnp.cos(jnp.float32(ANGLES) @ f), jnp.abs(normal(3, 16, seed=1)), 1.0),
    "pixels of a camera": (lambda p: (lambda h: h[:, :2] / h[:, 2:])(p @ CAMERA.T), POINTS, 1e3),
    "a rotation": (lambda v: v @ ROTATION.T, normal(5, 3, seed=6) * 1000, 1e3),
    "a rotation for each point": (
        lambda v: jnp.einsum("nij,nj->ni", jnp.stack([ROTATION, ROTATION.T, ROTATION]), v),
        normal(3, 3, seed=6) * 1000,
        1e3,
    ),
    "homogeneous transforms, composed": (
        lambda p: homogeneous(p) @ (jnp.float32(MOVE) @ jnp.float32(MOVE)).T,
        normal(5, 3, seed=6) * 1000,
        1e3,
    ),
    "one quaternion after another": (
        lambda v: functools.reduce(lambda v, _: left(QUATERNION) @ v, range(10), v),
        normal(4, seed=2)[:, None] * 1000,
        1e3,
    ),
    "Fourier features": (lambda p: jnp.sin(200 * p @ normal(3, 16, seed=1)), POINTS, 1.0),
    "a grid by an affine map": (lambda p: p[:, :2] @ jnp.array([[640.0, 3], [-2, 480]]) + 0.5, POINTS, 1e3),
    "a polynomial by its powers": (lambda p: jnp.vander(p[:, 0], 4) @ normal(4, 2, seed=8), POINTS * 100, 1e6),
    "distances": (all_pairs, POINTS + 100, 1.0),
}


@HALF
@pytest.mark.parametrize("name", COORDINATES)
def test_coordinates_and_positions_are_those_of_float32(name, dtype):
    fun, x, size = COORDINATES[name]
    for wrap in (lambda f: f, jax.jit, jax.checkpoint):
        assert products(jamp.autocast(wrap(fun), dtype), x) == {F32}
        np.testing.assert_allclose(jamp.autocast(wrap(fun), dtype)(x), wrap(fun)(x), atol=1e-6 * size, rtol=1e-6)
    loss = lambda f: lambda x: jnp.sum(jnp.sin(f(x) / size))
    truth = jax.grad(loss(fun))(x)
    np.testing.assert_allclose(jax.grad(jamp.autocast(loss(fun), dtype))(x), truth, rtol=1e-5, atol=1e-8)
    if name != "distances":  # Their gradient is a difference of two products that sum over all points.
        assert distance(jamp.autocast(jax.grad(loss(fun)), dtype)(x), truth) < 4 * jnp.finfo(dtype).eps


WRITTEN = {
    "@": (lambda x, w: x @ w, lambda k: (normal(12, k), normal(k, 16))),
    "jnp.dot": (jnp.dot, lambda k: (normal(12, k), normal(k, 16))),
    "a vector": (lambda x, w: x @ w, lambda k: (normal(k), normal(k, 16))),
    "tensordot": (lambda x, w: jnp.tensordot(x, w, ((1,), (0,))), lambda k: (normal(12, k, 2), normal(k, 16))),
    "einsum": (functools.partial(jnp.einsum, "ij,kj->ik"), lambda k: (normal(12, k), normal(16, k))),
    "einsum with batch axes": (
        functools.partial(jnp.einsum, "bhij,bhjk->bhik"),
        lambda k: (normal(2, 3, 12, k), normal(2, 3, k, 16)),
    ),
    "dot_general": (
        lambda x, w: lax.dot_general(x, w, (((0,), (0,)), ((), ()))),
        lambda k: (normal(k, 12), normal(k, 16)),
    ),
    "vmap": (jax.vmap(jnp.matmul), lambda k: (normal(2, 12, k), normal(2, k, 16))),
    "vmap of one operand": (jax.vmap(jnp.matmul, (None, 0)), lambda k: (normal(12, k), normal(2, k, 16))),
    "jit": (jax.jit(jnp.matmul), lambda k: (normal(12, k), normal(k, 16))),
    "checkpoint": (jax.checkpoint(jnp.matmul), lambda k: (normal(12, k), normal(k, 16))),
    "scan": (
        lambda x, w: lax.scan(lambda c, y: (c + 1, y @ w), 0, x)[1],
        lambda k: (normal(2, 12, k), normal(k, 16)),
    ),
    "map": (lambda x, w: lax.map(lambda y: y @ w, x), lambda k: (normal(2, 12, k), normal(k, 16))),
    "cond": (
        lambda x, w: lax.cond(x[0, 0] < 9, jnp.matmul, lambda x, w: jnp.zeros((12, 16)), x, w),
        lambda k: (normal(12, k), normal(k, 16)),
    ),
    "linear_call": (
        lambda x, w: linear_call(lambda w, x: x @ w, lambda w, g: g @ w.T, w, x),
        lambda k: (normal(12, k), normal(k, 16)),
    ),
    "a convolution of one pixel": (
        lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        lambda k: (normal(2, 5, 5, k), normal(1, 1, k, 16)),
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_product_of_up_to_eight_terms_is_float32_and_one_of_nine_is_not(name):
    fun, given = WRITTEN[name]
    for k in (*FEW, FEW_TERMS + 1):
        x, w = given(k)
        for dtype in (F16, BF16):
            low = jamp.autocast(fun, dtype)
            assert products(low, x, w) == {F32 if k in FEW else dtype}, k
        if k in (1, FEW_TERMS):
            np.testing.assert_array_equal(low(x, w), fun(x, w))


@pytest.mark.parametrize("k", [1, 3, FEW_TERMS])
def test_derivative_rules_keep_products_of_few_terms_in_float32(k):
    by_jvp, by_vjp = jax.custom_jvp(jnp.matmul), jax.custom_vjp(jnp.matmul)
    by_jvp.defjvp(lambda p, t: (by_jvp(*p), p[0] @ t[1] + t[0] @ p[1]))
    by_vjp.defvjp(lambda x, w: (by_vjp(x, w), (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))
    x, w = 1000 * normal(12, k), normal(k, 16)
    for own in (by_jvp, by_vjp):
        low = jamp.autocast(lambda x, w, own=own: own(x, w), BF16)
        np.testing.assert_array_equal(low(x, w), x @ w)
        # Its gradients sum 12 and 16 terms.
        assert products(low, x, w) == {F32}
        kept, _ = jax.vjp(low, x, w)
        np.testing.assert_array_equal(kept, x @ w)


@HALF
def test_the_products_around_one_of_few_terms_stay_16_bit(dtype):
    def fun(ws, positions, x):
        angles = positions @ ws[0]
        h = jnp.tanh(x @ ws[1])
        h = jnp.concatenate([h * jnp.cos(angles), h * jnp.sin(angles)], -1)
        return jnp.tanh(h @ ws[2]) @ ws[3]

    ws = normal(3, 16), normal(24, 16, scale=0.2), normal(32, 16, seed=1, scale=0.2), normal(16, 12, seed=2, scale=0.2)
    args = ws, jnp.float32(ANGLES), normal(len(ANGLES), 24)
    assert kinds(jamp.autocast(fun, dtype), *args) == [{F32}, *[{dtype}] * 3]
    loss = lambda ws, *args: jnp.mean(fun(ws, *args) ** 2)
    truth = jax.value_and_grad(loss)(*args)
    for grad in (jax.value_and_grad(jamp.autocast(loss, dtype)), jamp.autocast(jax.value_and_grad(loss), dtype)):
        assert distance(grad(*args), truth) < 4 * jnp.finfo(dtype).eps
        reads = [operands for operands in kinds(grad, *args) if dtype in operands]
        assert len(reads) >= 3 * 3 - 1  # no input gradient of the first layer


def heads(width, bias=0.0):
    """Attention whose heads have this width."""

    def fun(x, w):
        q, k, v = (y.reshape(len(x), -1, width) for y in jnp.split(x @ w + bias, 3, -1))
        scores = nn.softmax(jnp.einsum("thd,shd->hts", q * width**-0.5, k))
        return jnp.einsum("hts,shd->thd", scores, v).reshape(len(x), -1)

    return fun, (normal(32, 16), normal(16, 48))


def adapter(rank):
    """A layer with LoRA."""
    fun = lambda x, w, a, b: jnp.tanh(x @ w + x @ a @ b)
    return fun, (normal(32, 16), normal(16, 24), normal(16, rank), normal(rank, 24))


def depthwise(width):
    def fun(x, w, filters):
        h = (x @ w).reshape(2, 16, 24)
        return lax.conv_general_dilated(
            h, filters, (1,), [(width - 1, 0)], dimension_numbers=("NHC", "HIO", "NHC"), feature_group_count=24
        )

    return fun, (normal(32, 16), normal(16, 24), normal(width, 1, 24))


@HALF
@pytest.mark.parametrize(
    ("fun", "args"),
    [heads(4), heads(8), heads(8, bias=0.1), adapter(4), adapter(8), depthwise(4)],
    ids=[
        "heads of 4",
        "heads of 8",
        "heads with a bias",
        "LoRA of rank 4",
        "LoRA of rank 8",
        "a depthwise convolution",
    ],
)
def test_what_would_move_more_bytes_in_float32_stays_16_bit(fun, args, dtype):
    loss = lambda *args: jnp.sum(fun(*args) ** 2)
    for f in (fun, loss, jax.checkpoint(fun), jax.jit(fun), jax.vmap(fun, axis_size=2, in_axes=None)):
        assert products(jamp.autocast(f, dtype), *args) == {dtype}
    for grad in (jax.grad(jamp.autocast(loss, dtype)), jamp.autocast(jax.grad(loss), dtype)):
        assert products(grad, *args) == {dtype}


def test_both_rules_of_an_attention_with_its_own_derivative_compute_the_same_scores():
    """The statistics of the forward rule are of the scores that the backward rule computes again."""

    def rule(q, k, v):
        scores = q @ k.T
        total = nn.logsumexp(scores, -1, keepdims=True)
        return jnp.exp(scores - total) @ v, (q, k, v, total)

    def back(residuals, g):
        q, k, v, total = residuals
        p = jnp.exp(q @ k.T - total)
        dp = g @ v.T
        ds = p * (dp - jnp.sum(dp * p, -1, keepdims=True))
        return ds @ k, ds.T @ q, p.T @ g

    attend = jax.custom_vjp(lambda q, k, v: rule(q, k, v)[0])
    attend.defvjp(rule, back)
    by_network = lambda x, w: jnp.sum(attend(*jnp.split(x @ w * 1.5, 3, -1)) ** 2)
    given = lambda q, k: jnp.sum(attend(q, k, q) ** 2)
    scores = lambda grad, *args: [
        {v.aval.dtype for v in (*e.invars, *e.outvars)}
        for e in equations(jax.make_jaxpr(grad)(*args))
        if e.primitive.name == "dot_general" and [v.aval.shape for v in e.invars] == [(64, 8), (8, 64)]
    ]
    for fun, args, expected in (
        (by_network, (normal(64, 32), normal(32, 24, scale=0.2)), BF16),
        (given, (normal(64, 8), normal(64, 8, seed=1)), F32),
    ):
        found = scores(jax.grad(jamp.autocast(fun, BF16)), *args)
        assert found[0] == found[1] == {expected}
        assert distance(jax.grad(jamp.autocast(fun, BF16))(*args), jax.grad(fun)(*args)) < 0.05


def test_points_that_a_network_computes_are_multiplied_in_float32():
    """Also where the result is larger, because points have at most three coordinates."""

    def fun(x, w):
        points = (100 + x @ w).reshape(len(x), -1, 3)
        near = jnp.einsum("nij,npj->npi", points[:, :3] / 100, points)
        return jnp.sqrt(jnp.abs(jnp.einsum("npi,nqi->npq", near, near))), jnp.sin(points @ normal(3, 64))

    args = normal(20, 16), normal(16, 36)
    assert kinds(jamp.autocast(fun, BF16), *args) == [{BF16}, {F32}, {F32}, {F32}]
    moved = lambda p: homogeneous(p) @ jnp.float32(MOVE).T  # follows a product of few terms
    gram = lambda p: moved(p) @ moved(p).T
    assert products(jamp.autocast(gram, BF16), normal(64, 3)) == {F32}


def test_the_report_names_the_reason():
    def fun(x, w):
        h = jnp.tanh(x[:, :3] @ w[:3])
        return h @ w

    x, w = normal(32, 16), normal(16, 16)
    for dtype in (F16, BF16, jamp.Float8(min_size=1), jamp.Int8(min_size=1)):
        rows = {row.operation: row for row in jamp.autocast_report(fun, dtype)(x, w).rows}
        few, other = rows["dot_general[few]"], rows["dot_general"]
        assert (few.category, few.after, few.reason) == ("float32", "float32, float32 -> float32", REASON)
        assert other.category == "compute"
    conv = lambda x, w: lax.conv(x, w, (1, 1), "VALID")
    (row,) = jamp.autocast_report(conv, BF16)(normal(2, 3, 8, 8), normal(16, 3, 1, 1)).rows
    assert (row.operation, row.category, row.reason) == ("conv_general_dilated[few]", "float32", REASON)


@pytest.mark.filterwarnings("ignore:.* changes no product")
@pytest.mark.parametrize("dtype", [jamp.Float8(), jamp.Int8(), jamp.Float8(min_size=1), jamp.Int8(min_size=1)], ids=str)
@pytest.mark.parametrize("name", COORDINATES)
def test_coordinates_are_those_of_float32_in_eight_bit_formats(name, dtype):
    fun, x, size = COORDINATES[name]
    np.testing.assert_allclose(jamp.autocast(fun, dtype)(x), fun(x), atol=1e-6 * size, rtol=1e-6)


def test_a_rule_of_the_user_decides_otherwise():
    low = lambda fun, rules: products(jamp.autocast(fun, BF16, rules=rules), normal(12, 3), normal(3, 16))
    scoped = jax.named_scope("camera")(jnp.matmul)
    assert low(jnp.matmul, {"dot_general": "compute"}) == {BF16}
    assert low(jnp.matmul, {"dot_general[few]": "compute"}) == {BF16}
    assert low(jnp.matmul, {"dot_general": "accumulate"}) == {BF16}
    assert low(scoped, {"dot_general[camera]": "compute"}) == low(scoped, {"*[camera]": "compute"}) == {BF16}
    assert low(scoped, {"dot_general[camera]": "float32"}) == {F32}
    conv = lambda x, w: lax.conv(x[:, :, None, None], w.T[:, :, None, None], (1, 1), "VALID")
    assert low(conv, {}) == {F32}
    assert low(conv, {"conv_general_dilated": "compute"}) == {BF16}
    # A rule of the user for gradients alone is not about this product.
    assert low(jnp.matmul, {"dot_general[gradient]": "compute"}) == {F32}


def test_a_float64_model_keeps_its_coordinates_in_float64(x64):
    points, w = np.float64(POINTS), np.random.default_rng(0).normal(size=(16, 16))
    fun = lambda p, w: jnp.pad(p @ np.float64(ROTATION).T, ((0, 0), (0, 13))) @ w
    found = [
        e.invars[0].aval.dtype
        for e in equations(jax.make_jaxpr(jamp.autocast(fun, F32))(points, w))
        if e.primitive.name == "dot_general"
    ]
    assert found == [np.float64, np.float32]
    moved = lambda p: p @ np.float64(ROTATION).T
    np.testing.assert_array_equal(jamp.autocast(moved, F32)(points), moved(points))


def test_the_gradient_of_a_weight_may_sum_few_examples():
    """It is kept as it was accumulated, from 16-bit operands. That of one example is an outer product."""
    loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    for rows, expected in ((1, F32), (2, BF16), (8, BF16)):
        grad = jamp.autocast(jax.grad(loss), BF16)
        found = jax.make_jaxpr(grad)(normal(16, 16), normal(rows, 16))
        last = [e for e in equations(found) if e.primitive.name == "dot_general"][-1]
        assert ({v.aval.dtype for v in last.invars}, last.outvars[0].aval.dtype) == ({expected}, F32)


def test_shapes_may_be_symbolic():
    rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 3"), F32)
    exported = jax.export.export(jax.jit(jamp.autocast(lambda p: p @ ROTATION.T, BF16)))(rows)
    np.testing.assert_array_equal(exported.call(POINTS), jax.jit(lambda p: p @ ROTATION.T)(POINTS))
    both = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, k"), F32)
    exported = jax.export.export(jax.jit(jamp.autocast(lambda p: p.T @ p, BF16)))(both)
    assert exported.call(normal(16, 16)).shape == (16, 16)


# What it does not solve: sums of many terms that are positions all the same.

WEIGHTS = [normal(64, 64, seed=i, scale=0.125) for i in range(3)]


def network(h):
    return functools.reduce(lambda h, w: jnp.tanh(h @ w), WEIGHTS, h)


def an_index(x):
    entries = nn.one_hot(jnp.arange(len(x)) * 7 + 501, 1000)
    return network(x) * jnp.sin(entries @ jnp.arange(1000.0))[:, None]


def running_positions(x):
    below = jnp.tril(jnp.ones((len(x), len(x))))
    return network(x) * jnp.sin(8 * (below @ jnp.abs(x[:, :1])))


def a_spectrum(x):
    n = np.arange(x.shape[-1])
    waves = jnp.float32(np.cos(2 * np.pi * np.outer(n, n) / len(n)))
    return network(jnp.log1p(jnp.abs((x + 100) @ waves)))


def a_coupling(x):
    differences = jnp.eye(64) - 0.999 / 64
    return network((x + 100) @ differences)


@pytest.mark.parametrize(
    ("fun", "line"),
    [
        (an_index, "entries @"),
        (running_positions, "below @"),
        (a_spectrum, "@ waves"),
        (a_coupling, "@ differences"),
    ],
)
def test_rounding_report_names_the_line_of_a_long_sum_that_is_a_position(fun, line):
    first, second = jamp.debug.rounding_report(fun, jnp.bfloat16)(normal(256, 64, seed=9)).rows[:2]
    number = int(first.source.partition(":")[2].split()[0])
    with open(__file__) as file:
        assert line in file.read().splitlines()[number - 1]
    assert f"({fun.__name__})" in first.source
    assert first.damage > 10 * second.damage
