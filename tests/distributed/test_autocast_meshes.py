"""autocast around shard_map and on meshes: what is traced outside has the mesh and the axes of what is inside."""

import itertools

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jamp

BF16 = jnp.bfloat16
mesh_of = lambda kind=AxisType.Auto: jax.make_mesh((8,), ("d",), axis_types=(kind,))
normal = lambda seed, *shape: jaxprs.normal(*shape, seed=seed)
X, W = normal(0, 512, 64), normal(1, 64, 64) / 8


def mapped(fun, vma=True):
    return lambda x, w: jax.shard_map(
        fun, mesh=mesh_of(), in_specs=(P("d"), P()), out_specs=P("d"), axis_names={"d"}, check_vma=vma
    )(x, w)


@jax.custom_vjp
def row_parallel(x, w):
    return lax.psum(x @ w, "d")


row_parallel.defvjp(
    lambda x, w: (row_parallel(x, w), (x, w)), lambda kept, g: (g @ kept[1].T, lax.psum(kept[0].T @ g, "d"))
)


@jax.custom_jvp
def dense(x, w):
    return x @ w


dense.defjvp(lambda p, t: (dense(*p), t[0] @ p[1] + p[0] @ t[1]))

MODELS = {
    "replicated parameters": mapped(lambda x, w: jnp.tanh(x @ w) @ w),
    "mean over devices": mapped(lambda x, w: lax.pmean(jnp.mean((jnp.tanh(x @ w) @ w) ** 2), "d") + 0 * x),
    "unchecked": mapped(lambda x, w: jnp.tanh(x @ w) @ w, vma=False),
    "all_gather": mapped(lambda x, w: jnp.tanh(lax.all_gather(x @ w, "d", tiled=True))[:64]),
    "custom_vjp with psum": mapped(row_parallel, vma=False),
    "custom_jvp": mapped(lambda x, w: jnp.tanh(dense(x, w))),
    "relu in a scan": mapped(lambda x, w: lax.scan(lambda c, _: (jax.nn.relu(c @ w), None), x, None, length=2)[0]),
}


REST = (
    "mean over devices",
    "all_gather",
    "custom_jvp",
    "unchecked",
    "relu in a scan",
)  # The others have the same types and collectives.


@pytest.mark.slow
@pytest.mark.parametrize("model", [pytest.param(x, marks=[pytest.mark.slow] * (x in REST)) for x in MODELS])
def test_a_shard_map_is_entered_with_its_axes_also_under_a_mesh(model):
    loss = lambda x, w: jnp.sum(MODELS[model](x, w) ** 2)
    formats = [(BF16, None, 0.05)]
    if "custom" not in model:  # which 8 bit does not reach
        formats.append((jamp.Float8(min_size=32), {"dot_general": "compute"}, 0.3))
    cases = list(itertools.product(formats, ({}, {"recompute": False})))

    def gradients():
        low = [jamp.autocast(loss, dtype, rules=rules, **way) for (dtype, rules, _), way in cases]
        return jax.jit(lambda x, w: [jax.value_and_grad(fun, (0, 1))(x, w) for fun in (loss, *low)])(X, W)

    truth, *found = gradients()
    with jax.set_mesh(mesh_of()):
        _, *again = gradients()
    for mine, same, ((*_, bound), _) in zip(found, again, cases, strict=True):
        for x, y, exact in zip(*map(jax.tree.leaves, (mine, same, truth)), strict=True):
            np.testing.assert_array_equal(x, y)
            assert np.linalg.norm(x - exact) <= bound * np.linalg.norm(exact)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("kind", "sizes", "vma"),
    [
        (AxisType.Auto, (4, 2), True),
        (AxisType.Explicit, (8, 1), False),
        pytest.param(AxisType.Auto, (4, 2), False, marks=pytest.mark.slow),
        pytest.param(AxisType.Explicit, (8, 1), True, marks=pytest.mark.slow),
    ],
)
def test_a_low_budget_gathers_the_weights_of_fsdp_again(kind, sizes, vma):
    mesh = jax.make_mesh(sizes, ("d", "m"), axis_types=(kind, kind))
    specs = P(None, "d"), P("d")
    args = [
        jax.device_put(y, NamedSharding(mesh, spec))
        for y, spec in zip((normal(3, 12, 128, 128) / 12, normal(4, 64, 128)), specs, strict=True)
    ]

    def loss(weights, x):
        layer = lambda x, w: (x + jnp.tanh(x @ lax.all_gather(w, "d", tiled=True)), None)
        return lax.pmean(jnp.mean(lax.scan(layer, x, weights)[0] ** 2), "d")

    names = {"d"} if kind is AxisType.Auto else {"d", "m"}
    fsdp = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P(), axis_names=names, check_vma=vma)
    with jax.set_mesh(mesh):
        compiled = {b: jax.jit(jax.grad(jamp.recompute(fsdp, b))).lower(*args).compile() for b in (1.0, 0.2)}
        exact = jax.jit(jax.grad(fsdp))(*args)
    temporary = {budget: step.memory_analysis().temp_size_in_bytes for budget, step in compiled.items()}
    assert temporary[0.2] < 0.5 * temporary[1.0]  # the 12 weights are not kept
    found = compiled[0.2](*args)
    assert np.linalg.norm(found - exact) < 1e-6 * np.linalg.norm(exact)
    assert {part.data.shape for part in found.addressable_shards} == {(12, 128 // sizes[0], 128)}


WAYS = {
    "autocast": (lambda fun: jamp.autocast(fun, BF16), 0.02),
    "budget": (lambda fun: jamp.autocast(fun, BF16, memory_budget=0.3), 0.02),
    "recompute": (lambda fun: jamp.recompute(fun, 0.3), 1e-6),
    "8 bit": (lambda fun: jamp.autocast(fun, jamp.Float8(min_size=8)), 0.2),
    "scaled": (lambda fun: jamp.scaled(jamp.autocast(fun, jnp.float16)), 0.005),
}


def check_ways(gradient, fun, *args, ways=WAYS):
    """Compare the gradients in each way with those of JAX, in one program."""
    wrapped = {"": fun} | {way: wrap(fun) for way, (wrap, _) in WAYS.items() if way in ways}
    found = jax.jit(lambda *args: {way: gradient(f)(*args) for way, f in wrapped.items()})(*args)
    want = found.pop("")
    for way, grads in found.items():
        for x, y in zip(*map(jax.tree.leaves, (grads, want)), strict=True):
            assert jnp.linalg.norm(x - y) <= WAYS[way][1] * jnp.linalg.norm(y), way


@pytest.mark.slow_after(1)
@pytest.mark.filterwarnings("ignore:The memory budget is")
@pytest.mark.parametrize(
    ("kind", "in_loop"),
    [
        (AxisType.Auto, False),
        (AxisType.Explicit, True),
        pytest.param(AxisType.Auto, True, marks=pytest.mark.slow),
        pytest.param(AxisType.Explicit, False, marks=pytest.mark.slow),
    ],
)
def test_a_gather_whose_gradient_is_summed_later_is_that_of_jax(kind, in_loop):
    """Of `to="reduced"`: all devices have the same array, and its gradient is a sum that is still to be taken."""
    mesh = mesh_of(kind)
    gather = lambda w: lax.all_gather(w, "d", tiled=True, to="reduced")
    layer = lambda x, w: (x + jnp.tanh(x @ gather(w)), None)

    def body(weights, x):
        for w in weights if not in_loop else ():
            x, _ = layer(x, w)
        if in_loop:
            x, _ = lax.scan(layer, x, weights)
        return lax.pmean(jnp.mean(x**2), "d")

    fun = jax.shard_map(body, mesh=mesh, in_specs=(P(None, "d"), P("d")), out_specs=P())
    args = [
        jax.device_put(normal(0, 2, 64, 64) / 8, NamedSharding(mesh, P(None, "d"))),
        jax.device_put(X, NamedSharding(mesh, P("d"))),
    ]
    with jax.set_mesh(mesh):
        check_ways(lambda f: jax.grad(f, (0, 1)), fun, *args)


@pytest.mark.filterwarnings("ignore:The memory budget is")
def test_parameters_whose_gradients_are_summed_later_are_those_of_jax():
    mesh = mesh_of(AxisType.Explicit)
    body = lambda w, x: lax.pmean(jnp.mean((jnp.tanh(x @ w) @ w) ** 2), "d")
    spec = P(None, None, reduced={"d"})
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(spec, P("d")), out_specs=P())
    gradient = lambda f: jax.grad(lambda w, x: f(jax.sharding.reshard(w, spec), x))
    with jax.set_mesh(mesh):
        w, x = jax.device_put(W, NamedSharding(mesh, P())), jax.device_put(X, NamedSharding(mesh, P("d")))
        # JAX cannot ask whether a sum to come is finite.
        check_ways(gradient, mapped, w, x, ways=WAYS.keys() - {"scaled"})
        report = jamp.autocast_report(mapped, BF16)(jax.sharding.reshard(w, spec), x)
    assert "no rule" not in str(report)


@pytest.mark.filterwarnings("ignore:The memory budget is")
def test_a_sum_over_devices_that_is_taken_later_is_that_of_jax():
    def body(weights, x):
        for w in weights:
            h = jnp.tanh(x @ w)
            sums = lax.psum(lax.pcast(h.sum(0, keepdims=True), "d", to="unreduced"), "d")
            x = x + h + jnp.sin(sums / len(X))
        return lax.pmean(jnp.mean(x**2), "d")

    fun = jax.shard_map(body, mesh=mesh_of(), in_specs=(P(), P("d")), out_specs=P())
    check_ways(jax.grad, fun, normal(0, 2, 64, 64) / 8, X)


def test_of_two_choices_with_the_same_peak_a_budget_takes_that_which_keeps_less():
    """14 layers with few weights: to keep the gathers, or to compute them again at once."""
    gather = lambda w: lax.all_gather(w, "d", tiled=True)

    def body(weights, x):
        shared = gather(weights[0])
        for i in range(14):
            x = x + jnp.tanh(x @ (shared if i % 2 else gather(weights[i % 6])))
        return lax.pmean(jnp.mean((x @ shared) ** 2), "d")

    specs = P(None, "d"), P("d")
    fun = jax.shard_map(body, mesh=mesh_of(), in_specs=specs, out_specs=P(), check_vma=False)
    report = jamp.memory_report(fun, 0.3)(normal(0, 6, 64, 64) / 8, normal(1, 256, 64))
    assert report.kept <= 0.3 * report.without_budget


def test_a_product_that_all_devices_read_has_float32_cotangents():
    y = normal(2, 8, 8, 8)
    y = y - y.mean(0) * (1 - 1e-3)  # The cotangents of the devices cancel.

    def loss(dot, x, w):
        inner = lambda h, y: jnp.sum(jnp.tanh(h) * y[0], keepdims=True)
        specs = {"in_specs": (P(), P("d")), "out_specs": P("d"), "check_vma": False}
        return jax.shard_map(inner, mesh=mesh_of(), **specs)(dot(x, w), y).sum()

    by_hand = lambda x, w: jnp.matmul(x.astype(BF16), w.astype(BF16)).astype(jnp.float32)
    grads = [
        jax.jit(jax.grad(fun))(X[:8], W[:, :8])
        for fun in (
            jamp.autocast(lambda x, w: loss(jnp.matmul, x, w), BF16),
            lambda x, w: loss(by_hand, x, w),
            lambda x, w: loss(jnp.matmul, x, w),
        )
    ]
    mine, hand, truth = map(np.float64, grads)
    assert np.linalg.norm(mine - truth) < 2 * np.linalg.norm(hand - truth)


@pytest.mark.parametrize("order", [(AxisType.Auto, AxisType.Explicit), (AxisType.Explicit, AxisType.Auto)])
def test_a_mesh_is_not_that_of_an_earlier_call(order):
    loss = lambda w, x: jnp.sum(jax.nn.gelu(x @ w) * (x @ w))
    grad = lambda w, x: jax.jit(jax.grad(jamp.autocast(loss, BF16)))(w, x)
    found = []
    for mesh in map(mesh_of, order):
        with jax.set_mesh(mesh):
            found.append(grad(jax.device_put(W, NamedSharding(mesh, P(None, "d"))), X))
    plain = grad(W, X)
    assert [np.linalg.norm(x - plain) < 0.01 * np.linalg.norm(plain) for x in found] == [True, True]


def test_weight_gradients_are_reduced_over_devices_in_float32():
    loss = lambda w, x: jnp.mean((jnp.tanh(x @ w) @ w) ** 2)
    x = jax.device_put(X, NamedSharding(mesh_of(), P("d")))
    text = jax.jit(jax.grad(jamp.autocast(loss, BF16))).lower(W, x).compile().as_text()
    reduced = [line.split(" all-reduce(")[0] for line in text.splitlines() if " all-reduce(" in line]
    assert any("f32[64,64]" in types for types in reduced)
    assert "bf16[64,64]" not in "".join(reduced)
    # XLA:CPU reduces in float32 whatever it is given, so this is what it is given.
    low = jax.jit(jax.grad(jamp.autocast(loss, BF16, rules={"dot_general[gradient]": "compute"}))).lower(W, x).as_text()
    assert "-> tensor<64x64xf32>" not in "".join(line for line in low.splitlines() if "dot_general" in line)


def mlps(weights, x):
    for up, down in weights:
        x = x + jax.nn.silu(x @ up) @ down
    return jnp.mean(x**2)


def fsdp():
    """Three layers whose weights are sharded, with a batch that is, too."""
    lies = NamedSharding(mesh_of(), P("d"))
    weights = [(normal(i, 64, 128) / 8, normal(i + 3, 128, 64) / 11) for i in range(3)]
    return jax.device_put((weights, X), lies)


def test_the_scales_of_all_weights_of_fsdp_add_at_most_one_all_reduce():
    def all_reduces(compute_dtype):
        low = jamp.autocast(mlps, compute_dtype, rules={"dot_general": "compute"})
        text = jax.jit(jax.grad(low)).lower(*fsdp()).compile().as_text()
        return sum(" all-reduce(" in line for line in text.splitlines())

    activations = gradients = 6  # Each waits for the product before.
    assert all_reduces(jamp.Float8(min_size=8)) <= all_reduces(BF16) + activations + gradients + 1


def test_on_several_gpus_8_bit_values_have_no_layout_for_which_xla_would_gather_them():
    low = jax.grad(jamp.autocast(mlps, jamp.Float8(min_size=8)))
    text = lambda args: jax.jit(low).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "@LayoutConstraint" not in text(fsdp())
    assert "@LayoutConstraint" in text(jax.tree.map(np.asarray, fsdp()))


@pytest.mark.slow_after(1)
@pytest.mark.filterwarnings("ignore:Float8 changes no product")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_convolutions_of_patches_are_8_bit_where_jax_can_split_an_axis(kind):
    conv = lambda x, w, n: lax.conv_general_dilated(x, w, (n, n), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    loss = lambda x, w, v: jnp.mean(conv(jnp.tanh(conv(x, w, 4)), v, 1) ** 2)
    args = normal(0, 16, 16, 16, 8), normal(1, 4, 4, 8, 32) / 11, normal(2, 1, 1, 32, 32) / 6
    low, mesh = jamp.autocast(loss, jamp.Float8(min_size=8)), mesh_of(kind)
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(a, NamedSharding(mesh, P("d") if i == 0 else P())) for i, a in enumerate(args)]
        is_low = jamp.autocast_report(loss, jamp.Float8(min_size=8))(*sharded).share_float8 > 0
        grads = jax.jit(jax.grad(low, (1, 2)))(*sharded)
    assert is_low == (kind is AxisType.Auto)  # The second convolution is the head.
    for found, exact in zip(grads, jax.grad(loss, (1, 2))(*args), strict=True):
        assert np.linalg.norm(found - exact) <= 0.15 * np.linalg.norm(exact)


@pytest.mark.parametrize(
    "dtype", [BF16, jamp.Float8(min_size=8), jamp.Int8(min_size=8)], ids=["bfloat16", "float8", "int8"]
)
def test_a_vmap_on_explicit_axes_shards_the_gradients_as_the_arguments(dtype):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    fun = lambda x, w: jnp.mean(jnp.tanh(x @ w) ** 2)
    low = jamp.autocast(fun, dtype, rules={"dot_general": "compute"})
    gradients = lambda f: jax.jit(jax.grad(lambda *xs: jax.vmap(f, (0, None))(*xs).sum(), (0, 1)))
    for of_x, of_w in ((P("a"), P()), (P(None, "a"), P(None, "b"))):
        with jax.set_mesh(mesh):
            args = jax.device_put((X.reshape(8, 64, 64), W), (NamedSharding(mesh, of_x), NamedSharding(mesh, of_w)))
            for mine, plain, x in zip(gradients(low)(*args), gradients(fun)(*args), args, strict=True):
                assert jax.typeof(mine).sharding == jax.typeof(x).sharding
                assert jnp.abs(mine - plain).max() < 0.1 * jnp.abs(plain).max()


@pytest.mark.parametrize("vma", [True, False])
def test_a_shard_map_over_explicit_axes_is_entered_too(vma):
    mesh = mesh_of(AxisType.Explicit)
    x, w = jax.device_put(X, NamedSharding(mesh, P("d"))), jax.device_put(W, NamedSharding(mesh, P()))
    fun = jax.shard_map(
        lambda x, w: jnp.tanh(x @ w) @ w, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"), check_vma=vma
    )
    loss = lambda f: lambda x, w: jnp.sum(f(x, w) ** 2)
    want = jax.jit(jax.grad(loss(fun), 1))(x, w)
    for grad in (jax.grad(loss(jamp.autocast(fun, BF16)), 1), jamp.autocast(jax.grad(loss(fun), 1), BF16)):
        found = jax.jit(grad)(x, w)
        assert jnp.linalg.norm(found - want) < 0.05 * jnp.linalg.norm(want)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("vma", [True, False])
def test_a_rule_raises_a_head_in_a_shard_map(vma):
    """What the shard_map returns in 16 bit is read in float32 outside."""
    x, w = X.astype(BF16), W.astype(BF16)

    def head(x, w):
        with jax.named_scope("head"):
            return x @ w

    loss = lambda fun: lambda x, w: jnp.sum(jax.nn.log_softmax(fun(x, w).astype(jnp.float32))[:, 0])
    low = lambda fun: jamp.autocast(loss(fun), BF16, rules={"dot_general[head]": "float32"})
    gradient = lambda fun: jax.jit(jax.value_and_grad(fun, (0, 1)))(x, w)
    (found, grads), (wanted, exact) = gradient(low(mapped(head, vma))), gradient(low(head))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert abs(found - gradient(loss(head))[0]) > 1e-4
    for mine, other in zip(grads, exact, strict=True):
        difference = jnp.linalg.norm((mine - other).astype(jnp.float32))
        assert difference < 1e-2 * jnp.linalg.norm(other.astype(jnp.float32))
