"""A memory budget on a few layers written by hand: what its arguments mean, what it warns of, what its report says.

What it promises of any program is in test_memory_budget.py, on random programs. What it does with the models of Flax
and Equinox is in integrations/test_memory_budget.py, and that it behaves as `jax.checkpoint` in
test_recompute_as_checkpoint.py.
"""

import contextlib
import functools
import io
import re
import warnings

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxprs import PRODUCTS, equations, kept_by_jax, name_of as name, normal, params
from processes import run_python
from trees import assert_close

import jamp

WIDTH, HEADS, TOKENS, LAYERS = 32, 4, 32, 4
SHAPES = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
PARAMS = {name: normal(LAYERS, *shape, seed=i, scale=0.1) for i, (name, shape) in enumerate(SHAPES.items())}
X = normal(4, TOKENS, WIDTH, seed=9)
BF16 = jnp.bfloat16


def norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def attend(p, x, key=None):
    q, k, v = jnp.split((norm(x) @ p["qkv"]).reshape(*x.shape[:2], 3 * HEADS, -1), 3, 2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4
    scores = jax.nn.softmax(jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e9))
    if key is not None:
        scores = jnp.where(jax.random.bernoulli(key, 0.5, scores.shape), 2 * scores, 0)
    return jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape)


def block(p, x, key=None):
    x = x + attend(p, x, key) @ p["out"]
    return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]


def mlp(p, x):
    return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]


@jax.custom_vjp
def gated(x, w):
    return jnp.tanh(x @ w)


def gated_forward(x, w):
    y = jnp.tanh(x @ w)
    return y, (x, w, y, 1 - y * y)


gated.defvjp(
    gated_forward, lambda kept, g: ((g * kept[3]) @ kept[1].T, jnp.einsum("btd,bte->de", kept[0], g * kept[3]))
)


def recurrent(p, x):
    step = lambda state, token: (jnp.tanh(state + token @ p["out"]),) * 2
    states = lax.scan(step, jnp.zeros((len(x), WIDTH)), jnp.moveaxis(x, 1, 0))[1]
    return x + jax.nn.gelu((x + jnp.moveaxis(states, 0, 1)) @ p["up"]) @ p["down"]


layer = lambda p, i: jax.tree.map(lambda w: w[i], p)
SMALL = jax.tree.map(lambda w: w[:2], PARAMS), X[:, :8]  # two layers of eight tokens
KEYS = jax.random.split(jax.random.key(0), LAYERS)
mean = lambda x: jnp.mean(x**2)


def unrolled(block, p, x):
    return mean(functools.reduce(lambda x, i: block(layer(p, i), x), range(len(p["out"])), x))


def by_cond(p, x):
    branches = lambda x, p: block(p, x), lambda x, p: block(p, -x)
    return unrolled(lambda p, x: lax.cond(x.sum() > 0, *branches, x, p), p, x)


def with_dropout(p, x):
    layers = range(len(p["out"]))
    return mean(functools.reduce(lambda x, i: block(layer(p, i), x, KEYS[i]), layers, x))


def in_bfloat16(p, x):
    cast = lambda w: w.astype(BF16)
    return unrolled(lambda p, x: block(jax.tree.map(cast, p), x), p, cast(x)).astype(jnp.float32)


MODELS = {
    "unrolled": functools.partial(unrolled, block),
    "in jit calls": functools.partial(unrolled, jax.jit(block)),
    "scanned": lambda p, x: mean(lax.scan(lambda x, p: (block(p, x), None), x, p)[0]),
    "dropout": with_dropout,
    "dropout, scanned": lambda p, x: mean(lax.scan(lambda x, at: (block(at[0], x, at[1]), None), x, (p, KEYS))[0]),
    "cond": by_cond,
    "jax.checkpoint": functools.partial(unrolled, jax.checkpoint(block)),
    "custom_vjp": functools.partial(unrolled, lambda p, x: block(p, x + gated(x, p["out"]))),
    "a scan in each layer": functools.partial(unrolled, recurrent),
    "vmap": lambda p, x: mean(jax.vmap(lambda x: functools.partial(unrolled, block)(p, x[None]))(x)),
    "bfloat16 by hand": in_bfloat16,
}
BUDGETS = (1.0, 0.6, 0.3, 0)


def quietly(fun, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a budget that is too low
        return fun(*args)


@functools.cache
def report_of(model, budget):
    return quietly(jamp.memory_report(MODELS[model], budget), PARAMS, X)


def gradient_products(fun, *args):
    return sum(eqn.primitive.name in PRODUCTS for eqn in equations(quietly(jax.make_jaxpr(jax.grad(fun)), *args)))


SLOW = {"in jit calls", "dropout", "vmap"}  # They differ from other models by what is inlined or batched.
SOME = [pytest.param(model, marks=[pytest.mark.slow] * (model in SLOW)) for model in MODELS]


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("model", SOME)
def test_the_report_counts_the_bytes_that_jax_keeps(model):
    for budget in (1.0, 0.3):
        fun = jamp.recompute(MODELS[model], budget)
        report = report_of(model, budget)
        found = report.kept + report.end
        truth = quietly(kept_by_jax, fun, PARAMS, X)
        # JAX 0.12 keeps what a scan returns twice once, and does not copy all operands of a cond. Its next checkpoint
        # keeps a little less around all constructs.
        is_less = jax.__version_info__ > (0, 10, 2) and model in ("cond", "a scan in each layer")
        tolerance = 0.12 if is_less or getattr(jax.config, "jax_remat3", False) else 0.03
        np.testing.assert_allclose(found, truth, rtol=tolerance, err_msg=f"{model} at {budget}")


def check_budgets(model, budgets):
    reports = [report_of(model, budget) for budget in budgets]
    if model != "jax.checkpoint":  # The user has decided there.
        assert all(x.kept <= budget * reports[0].kept for x, budget in zip(reports, budgets, strict=True) if budget)
        assert reports[-1].kept <= 0.3 * reports[0].kept
    assert [x.flops for x in reports] == sorted(x.flops for x in reports)
    for x in reports:  # The rows add up. Branches of a cond share what they keep.
        total = sum(row.nbytes for row in x.rows if row.kept)
        np.testing.assert_allclose(total, x.kept, rtol=1e-9) if model != "cond" else None
        assert total >= x.kept * 0.999


@pytest.mark.parametrize("model", SOME)
def test_a_budget_is_kept_and_less_memory_takes_more_flops(model):
    check_budgets(model, (1.0, 0.3))


@pytest.mark.parametrize("model", [pytest.param(x, marks=[pytest.mark.slow] * (x != "scanned")) for x in MODELS])
def test_every_budget_is_kept_and_less_memory_takes_more_flops(model):
    check_budgets(model, BUDGETS)


@pytest.mark.parametrize(
    "model", ["custom_vjp", *(pytest.param(x, marks=pytest.mark.slow) for x in ("unrolled", "dropout"))]
)
def test_gradients_are_equal_bit_for_bit_where_operations_run_one_by_one(model):
    with jax.disable_jit():
        truth, found = (jax.grad(fun)(*SMALL) for fun in (MODELS[model], jamp.recompute(MODELS[model], 0)))
    jax.tree.map(np.testing.assert_array_equal, found, truth)


# Where all is dropped, and in every second model where something is.
@pytest.mark.slow
@pytest.mark.parametrize(("model", "budgets"), [(x, BUDGETS[3 - i % 2 :]) for i, x in enumerate(MODELS)])
def test_compiled_gradients_are_those_without_a_budget(model, budgets):
    step = lambda fun: jax.jit(jax.value_and_grad(fun))(PARAMS, X)
    truth = step(MODELS[model])
    tolerance = {"rtol": 0.02, "atol": 1e-3} if model == "bfloat16 by hand" else {"rtol": 1e-4, "atol": 1e-6}
    for budget in budgets:
        found = quietly(step, jamp.recompute(MODELS[model], budget))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), found, truth)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "dtype",
    [BF16, jamp.Float8(min_size=16), pytest.param(jamp.Int8(min_size=16), marks=pytest.mark.slow)],
    ids=["16", "float8", "int8"],
)
def test_autocast_has_the_same_gradients_at_every_budget(dtype):
    model = with_dropout if dtype == BF16 else functools.partial(unrolled, mlp)  # 8 bit differs in the products
    step = lambda budget: jax.grad(jamp.autocast(model, dtype, memory_budget=budget))(*SMALL)
    with jax.disable_jit():  # Bit for bit, because operations run one by one.
        jax.tree.map(np.testing.assert_array_equal, quietly(step, 0), step(1.0))


def test_the_outermost_budget_decides_and_opens_the_segments_inside():
    f = MODELS["scanned"]
    inside = quietly(kept_by_jax, jamp.autocast(f, BF16, memory_budget=0.3), PARAMS, X)
    outside = quietly(kept_by_jax, jamp.recompute(jamp.autocast(f, BF16), 0.3), PARAMS, X)
    twice = quietly(kept_by_jax, jamp.recompute(jamp.recompute(jamp.autocast(f, BF16), 0.1), 0.3), PARAMS, X)
    assert outside == twice
    np.testing.assert_allclose(outside, inside, rtol=0.02)


def convolutions(weights, x):
    conv = functools.partial(
        lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    skips = [x]
    for w in weights:
        x = x + conv(jax.nn.relu(norm(conv(jax.nn.relu(norm(x)), w))), w)
        skips.append(x)
    return jnp.mean((x + sum(skips)) ** 2)


IMAGES = [normal(3, 3, 8, 8, seed=i, scale=0.1) for i in range(8)], normal(2, 16, 16, 8, seed=8)


@pytest.mark.slow
def test_what_a_budget_computes_again_waits_for_its_cotangent_and_no_longer():
    """Else XLA:GPU computes it before the backward pass, or holds it until the cotangents of a skip are added."""
    fun = jamp.recompute(convolutions, 0.3)
    segments = [e for e in quietly(jax.make_jaxpr(fun), *IMAGES).eqns if e.primitive.name == "jit"]
    assert len(segments) > 1
    text = quietly(jax.jit(jax.grad(fun)).lower, *IMAGES).as_text()
    assert text.count("optimization_barrier") == 2 * len(segments)


def test_the_share_of_convolutions_is_of_what_is_kept_without_a_budget():
    without = jamp.memory_report(convolutions, 1.0)(*IMAGES).kept
    assert jamp.memory_report(convolutions, 0.7)(*IMAGES).kept <= 0.7 * without


def test_attention_scores_are_dropped_first():
    """Korthikanti et al. 2022 choose them by hand."""
    report = jamp.memory_report(MODELS["unrolled"], 0.75)(PARAMS, X)
    dropped = [row for row in report.rows if not row.kept and row.nbytes > 0.02 * report.without_budget]
    assert [(row.type, row.count) for row in dropped] == [("float32[4,4,32,32]", LAYERS)]


def test_a_product_is_computed_at_most_once_more():
    count = lambda fun: gradient_products(fun, PARAMS, X)
    forward = sum(eqn.primitive.name in PRODUCTS for eqn in equations(jax.make_jaxpr(MODELS["unrolled"])(PARAMS, X)))
    plain, none = count(MODELS["unrolled"]), count(jamp.recompute(MODELS["unrolled"], 0))
    assert plain < none <= plain + forward
    assert count(jamp.recompute(MODELS["unrolled"], 1.0)) == plain


@jax.jit
def repeating(x, w):
    y = jnp.tanh(x @ w)
    return y, y, jnp.float32(0.5), jnp.float32(2.0), x


@pytest.mark.slow
def test_a_call_that_returns_a_constant_an_input_or_a_value_twice():
    def layer(w, x):
        a, b, c, d, e = repeating(x, w)
        return lax.scan(lambda s, _: (jnp.sin(s @ w) + a * c, None), b / d + e, None, length=2)[0] + a * b

    fun = lambda w, x: mean(layer(w, layer(w, layer(w, x))))
    w, x = normal(WIDTH, WIDTH, scale=0.2), normal(64, WIDTH, seed=1)
    truth = jax.grad(fun)(w, x)
    for budget in (0.6, 0):
        found = quietly(jax.jit(jax.grad(jamp.recompute(fun, budget))), w, x)
        np.testing.assert_allclose(found, truth, rtol=1e-4, atol=1e-6)
        quietly(jamp.memory_report(fun, budget), w, x)


def test_a_row_of_a_jit_call_has_the_scopes_around_the_call():
    def loss(w, x):
        with jax.named_scope("outer"):
            x = jax.jit(jax.named_scope("inner")(lambda w, x: jnp.tanh(x @ w)))(w, x)
        return jnp.sum(jnp.tanh(x @ w) @ w)

    rows = jamp.memory_report(loss)(jnp.ones((64, 64)), jnp.ones((512, 64))).rows
    assert "outer/inner" in {row.scope for row in rows}


def test_a_row_of_a_function_of_jax_has_the_line_that_calls_it():
    def loss(w, x):
        return jnp.mean((jnp.tanh(x @ jnp.linalg.cholesky(w @ w.T + jnp.eye(64))) @ w) ** 2)

    rows = jamp.memory_report(loss)(jnp.eye(64), jnp.ones((512, 64))).rows
    assert {row.operation for row in rows} >= {"cholesky", "dot_general"}
    assert all(row.source.endswith("(loss)") for row in rows)


def test_a_small_function_is_not_wrapped():
    jaxpr = jax.make_jaxpr(jamp.recompute(lambda w, x: (x @ w).sum(), 0.5))(jnp.eye(4), jnp.ones((4, 4)))
    assert not [eqn for eqn in equations(jaxpr) if eqn.primitive.name in ("checkpoint", "remat2")]


@pytest.mark.slow
def test_a_budget_of_an_autocast_opens_the_segments_of_one_inside():
    f = MODELS["unrolled"]
    nested = jamp.autocast(jamp.autocast(f, BF16), BF16, memory_budget=0.3)
    kept = [quietly(kept_by_jax, fun, PARAMS, X) for fun in (nested, jamp.autocast(f, BF16, memory_budget=0.3))]
    np.testing.assert_allclose(*kept, rtol=0.1)


NAMES = ("qkv", "scores", "attended", "middle", "up")


def named_block(p, x):
    """`block`, in which the results of products and the stream have names."""
    q, k, v = jnp.split(checkpoint_name(norm(x) @ p["qkv"], "qkv").reshape(*x.shape[:2], 3 * HEADS, -1), 3, 2)
    scores = checkpoint_name(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4, "scores")
    weights = jax.nn.softmax(jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e9))
    attended = checkpoint_name(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape), "attended")
    x = checkpoint_name(x + attended @ p["out"], "middle")
    return x + jax.nn.gelu(checkpoint_name(norm(x) @ p["up"], "up")) @ p["down"]


def product_flops(fun, *args):
    """The FLOPs of the products of a gradient, those in a loop once."""
    found = [e for e in equations(quietly(jax.make_jaxpr(jax.grad(fun)), *args)) if e.primitive.name == "dot_general"]
    terms = lambda e: np.prod([e.invars[0].aval.shape[i] for i in e.params["dimension_numbers"][0][0]])
    return sum(2 * e.outvars[0].aval.size * terms(e) for e in found)


@pytest.mark.slow
def test_the_choices_of_a_budget_are_the_best_ones():
    """For a transformer's layer in a scan, beside every policy that saves some of its values by name."""
    scanned = lambda block: lambda p, x: mean(lax.scan(lambda x, p: (block(p, x), None), x, p)[0])
    measured = lambda fun: (quietly(kept_by_jax, fun, PARAMS, X), product_flops(fun, PARAMS, X))
    every = []
    for bits in range(2 ** len(NAMES)):
        names = [name for i, name in enumerate(NAMES) if bits >> i & 1]
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        every.append(measured(scanned(jax.checkpoint(named_block, policy=policy))))
    total, _ = measured(jamp.recompute(scanned(block), 1.0))
    for budget in (0.8, 0.6, 0.4, 0.2):
        kept, flops = measured(jamp.recompute(scanned(block), budget))
        assert kept <= budget * total
        assert flops <= 1.01 * min(other for size, other in every if size <= budget * total)


def test_collectives_and_the_bits_of_other_generators_are_not_computed_again():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))

    def body(w, x):
        for _ in range(3):
            x = jnp.tanh(lax.psum(x @ w, "d"))
            x = x @ lax.all_gather(w, "d", tiled=True)
            x = jnp.sin(lax.ppermute(lax.pmean(x, "d") @ w, "d", [(0, 0)]))
            x = jnp.sin(lax.all_to_all(x @ w, "d", 0, 0, tiled=True))
            x = jnp.sin(lax.psum_scatter(x @ w, "d", tiled=True))
        return lax.pmean(mean(x), "d")

    fun = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    args = normal(64, 64), normal(256, 64)
    names = ("psum", "psum_invariant", "all_gather", "all_to_all", "ppermute", "reduce_scatter")
    count = lambda fun: sum(
        eqn.primitive.name in names for eqn in equations(quietly(jax.make_jaxpr(jax.grad(fun)), *args))
    )
    assert count(jamp.recompute(fun, 0)) == count(fun)
    kept = [quietly(kept_by_jax, jamp.recompute(fun, budget), *args) for budget in (1.0, 0)]
    assert kept[1] < kept[0]

    def with_bits(key, w, x):
        for k in jax.random.split(key, 3):
            x = jnp.where(jax.random.bernoulli(k, 0.5, x.shape), jnp.tanh(x @ w), 0)
        return mean(x)

    for impl, is_repeated in (("rbg", False), ("threefry2x32", True)):
        fun = functools.partial(with_bits, jax.random.key(0, impl=impl))
        bits = lambda f: sum(
            e.primitive.name == "random_bits" for e in equations(quietly(jax.make_jaxpr(jax.grad(f)), *args))
        )
        assert (bits(jamp.recompute(fun, 0)) > bits(fun)) == is_repeated


@pytest.mark.slow
def test_an_all_gather_of_an_argument_alone_is_repeated_where_that_pays():
    """As in FSDP: a device has a part of each weight, and gathers the others for its layer."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    gather = functools.partial(lax.all_gather, axis_name="d", tiled=True)

    def of_arguments(weights, x):
        layer = lambda x, w: (jnp.tanh(x @ gather(w.astype(BF16)).astype(x.dtype)), None)
        return lax.pmean(mean(lax.scan(layer, x, weights)[0]), "d")

    def of_both(weights, x):
        layer = lambda x, w: (jnp.tanh(gather(x * x) @ gather(w)), None)
        return lax.pmean(mean(lax.scan(layer, x, weights)[0]), "d")

    def gathered(fun, budget, tokens):
        fun = jax.shard_map(fun, mesh=mesh, in_specs=(P(None, "d"), P("d")), out_specs=P())
        args = normal(8, 64, 64, scale=0.1), normal(tokens, 64)
        again = jamp.recompute(fun, budget)
        assert_close(quietly(jax.jit(jax.grad(again)), *args), jax.jit(jax.grad(fun))(*args))
        names = [eqn.primitive.name for eqn in equations(quietly(jax.make_jaxpr(jax.grad(again)), *args))]
        return names.count("all_gather"), quietly(kept_by_jax, again, *args)

    # Of 16 tokens, a layer keeps 4 KB of activations and as much of the stream, and 8 KB of gathered weights.
    (once, all_kept), (twice, least) = gathered(of_arguments, 1.0, 16), gathered(of_arguments, 0.1, 16)
    assert (once, twice) == (1, 2)
    assert least < 0.5 * all_kept
    # Of 32 tokens it keeps 8 KB of each. The products are cheaper to compute again: they have 64 terms.
    assert gathered(of_arguments, 0.7, 32)[0] == 1
    # Two equal gathers, of an activation and of an argument.
    assert [gathered(of_both, budget, 64)[0] for budget in (1.0, 0)] == [2, 3]


def test_an_all_gather_of_a_number_may_be_in_a_function_with_a_budget():
    """It is not a variable of the jaxpr."""
    fun = lambda x: mean(jnp.tanh(x @ x)) / lax.all_gather(1.0, "d").sum()
    over_replicas = lambda fun: jax.vmap(jax.grad(fun), axis_name="d")(normal(2, 64, 64))
    assert_close(over_replicas(jamp.recompute(fun, 0)), over_replicas(fun))


def test_your_own_checkpoints_and_their_policies_stay():
    policy = jax.checkpoint_policies.save_only_these_names("mine")

    def body(p, x):
        x = x + checkpoint_name(attend(p, x), "mine") @ p["out"]
        return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]

    fun = functools.partial(unrolled, jax.checkpoint(body, policy=policy))
    kept = [quietly(kept_by_jax, jamp.recompute(fun, budget), PARAMS, X) for budget in (1.0, 0)]
    assert kept == [kept_by_jax(fun, PARAMS, X)] * 2


@pytest.mark.slow
def test_a_name_that_no_checkpoint_of_yours_reads_holds_no_value_below_a_budget_of_1():
    def named(p, x):
        h = checkpoint_name(norm(checkpoint_name(x, "input")) @ p["up"], "up")
        return x + checkpoint_name(jax.nn.gelu(h) @ p["down"], "down")

    plain = lambda p, x: x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]
    scanned = lambda block, p, x: mean(lax.scan(lambda x, p: (block(p, x), None), x, p)[0])
    for loop in (unrolled, scanned):
        fun, control = functools.partial(loop, named), functools.partial(loop, plain)
        budget = f"{kept_by_jax(jamp.recompute(control, 1.0), PARAMS, X) // 2}B"
        bytes_of = lambda fun, budget=budget: quietly(kept_by_jax, jamp.recompute(fun, budget), PARAMS, X)
        assert bytes_of(fun) == bytes_of(control)
        report = quietly(jamp.memory_report(fun, budget), PARAMS, X)
        assert report.kept + report.end == bytes_of(fun)


def test_bytes_are_those_of_one_device_in_shard_map_and_on_explicit_axes():
    mesh = jax.sharding.AbstractMesh((4,), ("d",), axis_types=(AxisType.Explicit,))
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P("d")))
    layers = [layer(PARAMS, i) for i in range(LAYERS)]
    replicated = lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=NamedSharding(mesh, P()))
    step = lambda x, p: x + jnp.tanh(norm(x) @ p["up"]) @ p["down"]
    mlp = lambda layers, x: mean(functools.reduce(step, layers, x))
    whole = jamp.memory_report(mlp)(layers, X).kept
    with jax.sharding.use_abstract_mesh(mesh):
        assert jamp.memory_report(mlp)(jax.tree.map(replicated, layers), x).kept == whole / 4
    one = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(mlp, mesh=one, in_specs=(P(), P("d")), out_specs=P(), check_vma=False)
    np.testing.assert_allclose(jamp.memory_report(mapped)(layers, X).kept, whole, rtol=1e-6)


@pytest.mark.slow
def test_bytes_as_text():
    report = jamp.memory_report(MODELS["unrolled"], "1 MB")(PARAMS, X)
    assert 0.9e6 < report.kept <= 1e6
    for text in ("1GiB", ".5GiB", "1.GiB"):
        assert jamp.memory_report(MODELS["unrolled"], text)(PARAMS, X).kept == report.without_budget


@pytest.mark.slow
def test_a_budget_may_be_a_number_of_numpy():
    kept = lambda budget: jamp.memory_report(MODELS["unrolled"], budget)(PARAMS, X).kept
    assert len({kept(x) for x in (0.5, np.float16(0.5), np.float32(0.5), np.float64(0.5), np.array(0.5))}) == 1
    assert len({kept(x) for x in (1, np.int64(1), np.uint8(1), np.float32(1), np.array(1))}) == 1
    for budget in (np.float32(0.5), np.int64(1), np.array(0.5)):
        jamp.recompute(mean, budget)(X)
        jamp.autocast(mean, BF16, memory_budget=budget)(X)


@pytest.mark.parametrize(
    ("budget", "error", "message"),
    [
        (12, ValueError, 'write "12GiB"'),
        (1.5, ValueError, "from 0 to 1"),
        (-0.1, ValueError, "from 0 to 1"),
        (float("nan"), ValueError, "from 0 to 1"),
        (True, TypeError, "got True"),
        (None, TypeError, "got None"),
        ("12 parsec", ValueError, "12 parsec"),
        ("GiB", ValueError, "GiB"),
        (".GiB", ValueError, ".GiB"),
        (np.float32(12), ValueError, 'write "12GiB"'),
        (np.bool_(True), TypeError, "got True"),
        (np.ones(1), TypeError, "got array([1.])"),
        ("12gib", ValueError, "B, kB, MB, GB, TB, KiB, MiB, GiB, TiB"),
        ("-1GiB", ValueError, "-1GiB"),
    ],
)
def test_a_budget_that_is_none_is_an_error(budget, error, message):
    for make in (
        lambda: jamp.recompute(mean, budget),
        lambda: jamp.memory_report(mean, budget),
        lambda: jamp.autocast(mean, BF16, memory_budget=budget),
    ):
        with pytest.raises(error, match=re.escape(message)):
            make()


def test_ints_zero_and_one_are_shares():
    assert (
        jamp.memory_report(MODELS["unrolled"], 1)(PARAMS, X).flops
        < jamp.memory_report(MODELS["unrolled"], 0)(PARAMS, X).flops
    )


WAYS = {
    "recompute": jamp.recompute,
    "autocast": lambda fun, budget: jamp.autocast(fun, BF16, memory_budget=budget),
}
with_each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@pytest.mark.slow_after(1)
@with_each_way
def test_a_budget_below_the_least_warns_at_your_line_with_the_largest_values(way):
    with pytest.warns(UserWarning, match=r"at least 0\.\d+ of \d\.\d MB.* test_recompute\.py:\d+") as caught:
        jax.eval_shape(jax.grad(way(MODELS["scanned"], "1kB")), PARAMS, X)
    assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(jax.grad(way(MODELS["unrolled"], 0)), PARAMS, X)  # as little as possible


@with_each_way
def test_a_budget_that_your_own_checkpoints_exceed_warns_that_none_acts_inside(way):
    layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w) @ w.T)
    loss = lambda ws, x: jnp.mean(functools.reduce(layer, ws, x) ** 2)
    with pytest.warns(UserWarning, match=r"Your own jax\.checkpoint"):
        jax.eval_shape(jax.grad(way(loss, "1kB")), [jnp.ones((64, 128))] * 4, jnp.ones((256, 64)))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("way", "model"), [("recompute", "unrolled"), ("autocast", "scanned")])
def test_a_train_step_warns_at_your_line(way, model):
    step = lambda p, x: jax.tree.map(lambda p, g: p - g, p, jax.grad(MODELS[model])(p, x))
    with pytest.warns(UserWarning, match="loss inside") as caught:
        jax.eval_shape(WAYS[way](step, 0.5), PARAMS, X)
    assert {w.filename for w in caught} == {__file__}


def test_a_train_step_without_a_budget_does_not_warn(recwarn):
    step = lambda p, x: jax.tree.map(lambda p, g: p - g, p, jax.grad(MODELS["unrolled"])(p, x))
    jax.eval_shape(jamp.autocast(step, BF16), PARAMS, X)
    assert not recwarn.list


@with_each_way
def test_bytes_warn_where_arrays_are_sharded_automatically(way):
    mesh = jax.sharding.AbstractMesh((4,), ("d",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P("d")))
    with pytest.warns(UserWarning, match="all devices"):
        jax.eval_shape(way(MODELS["unrolled"], "1MB"), PARAMS, x)


@pytest.mark.slow
def test_a_program_is_the_same_on_every_host():
    """Also where the hashes of Python differ, as they do between this process and that one."""
    code = """
import jax, jax.numpy as jnp, jamp
def loss(w, x):
    for _ in range(9):
        x = x + jnp.tanh(jax.nn.softmax(x @ w) @ w)
    return x.sum()
print(jax.make_jaxpr(jax.grad(jamp.recompute(loss, 0.4)))(jnp.ones((64, 64)), jnp.ones((256, 64))))
"""
    here = io.StringIO()
    with contextlib.redirect_stdout(here):
        exec(code, {})
    first, second = (
        re.sub(r"0x\w+", "", text) for text in (here.getvalue(), run_python("-c", code, PYTHONHASHSEED="1"))
    )
    assert first == second


def test_integers_aux_results_static_arguments_and_second_derivatives():
    def loss(p, x, tokens, train):
        assert train is True
        x = x[:, tokens]
        for i in range(2):
            x = block(layer(p, i), x)
        return mean(x), {"tokens": tokens, "norm": jnp.max(x)}

    fun = functools.partial(quietly, jamp.recompute(loss, 0.2))
    args = *SMALL, jnp.arange(8), True
    (found, aux), (truth, other) = fun(*args), loss(*args)
    np.testing.assert_allclose(found, truth, rtol=1e-5)
    assert aux["tokens"].dtype == other["tokens"].dtype
    grad = lambda f: jax.grad(lambda p: f(p, *args[1:])[0])
    second = lambda f: jax.jit(lambda p: jax.jvp(grad(f), (p,), (p,))[1])(SMALL[0])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), second(fun), second(loss))


def test_a_function_without_a_derivative_is_unchanged():
    assert jamp.recompute(lambda n: n + 1, 0.5)(jnp.arange(3)).tolist() == [1, 2, 3]
    assert jamp.memory_report(lambda n: n + 1, 0.5)(jnp.arange(3)).kept == 0
    loop = lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ c[1]), (0, x))[1].sum()
    assert jamp.recompute(loop, 0.5)(jnp.eye(64)) == 64


def test_what_is_looked_up_in_a_table_is_kept():
    ids, ones = jnp.arange(256) % 64, jnp.ones((64, 64))
    embed = lambda table, w: jnp.sum(jnp.tanh(table[ids] @ w) @ w)
    assert ("gather", True) in [(x.operation, x.kept) for x in jamp.memory_report(embed)(ones, ones).rows]


@pytest.mark.slow
def test_the_report_fits_100_columns_and_says_what_to_do_next():
    for budget in (1.0, 0.4):
        text = str(jamp.memory_report(MODELS["unrolled"], budget)(PARAMS, X))
        assert max(map(len, text.splitlines())) <= 100
        assert "test_recompute.py" in text
        assert ("Dropped by the budget" in text) == (budget < 1)
        assert text.splitlines()[-1].startswith("To keep less: a memory_budget of ")
    by_hand = lambda p, x: lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, p)[0].sum()
    with pytest.warns(UserWarning, match=r"Your own jax\.checkpoint"):
        least = jamp.memory_report(by_hand, 0.1)(jnp.ones((4, 64, 64)), jnp.ones((256, 64)))
    assert str(least).endswith("This is the least that a budget can keep.")
    compiled = jax.jit(jax.grad(MODELS["unrolled"])).lower(PARAMS, X).compile()
    assert "temporary memory, as compiled" in jamp.memory_report(MODELS["unrolled"])(PARAMS, X).beside(compiled)


def test_compiled_memory_falls_with_the_budget():
    temporary = lambda budget: (
        jax.jit(jax.grad(jamp.recompute(MODELS["scanned"], budget)))
        .lower(PARAMS, X)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
    )
    assert temporary(0) < 0.7 * temporary(1.0)


@pytest.mark.slow
def test_choosing_does_not_differentiate_each_layer_again():
    wave, rules = jax.extend.core.Primitive("wave"), []
    wave.def_abstract_eval(lambda x: x)
    ad.primitive_jvps[wave] = lambda xs, tangents: (rules.append(1), (wave.bind(*xs), tangents[0] * xs[0]))[1]
    layer_of = lambda p, x: x + wave.bind(norm(x) @ p["up"]) @ p["down"]
    counts = []
    for layers in (24, 96):
        deep = lambda p, x, n=layers: mean(functools.reduce(lambda x, _: layer_of(p, x), range(n), x))
        rules.clear()
        jax.make_jaxpr(jax.grad(jamp.recompute(deep, 0.5)))(layer(PARAMS, 0), X)
        counts.append(len(rules))
    assert 0 < counts[1] <= 1.5 * counts[0]


def spectral(w, x):
    return jnp.fft.irfft(jnp.fft.rfft(jnp.tanh(x @ w)) * jnp.fft.rfft(w[0]), n=WIDTH)


def rotated(w, x):
    return jnp.abs(jnp.tanh(lax.complex(x @ w, x)) @ lax.complex(w, w))


COMPLEX = {
    "spectral convolution": spectral,
    "complex product": rotated,
    "jit": jax.jit(rotated),
    "cumprod": lambda w, x: jnp.real(jnp.cumprod(jnp.exp(1j * (x @ w)), axis=0)),
    "QR": lambda w, x: jnp.real(jnp.linalg.qr(lax.complex((w @ w) + jnp.eye(WIDTH), w))[1]),
    "scan": lambda w, x: jnp.abs(lax.scan(lambda z, _: (jnp.tanh(z @ w), None), lax.complex(x, x), None, 3)[0]),
    "cond": lambda w, x: lax.cond(x.sum() > 0, rotated, spectral, w, x),
    "custom_vjp": lambda w, x: jnp.abs(conjugated(lax.complex(x @ w, x)) * rotated(w, x)),
}


@jax.custom_vjp
def conjugated(z):
    return jnp.conj(z) * z.real


conjugated.defvjp(lambda z: (conjugated(z), z), lambda z, g: (jax.vjp(lambda z: jnp.conj(z) * z.real, z)[1](g)[0],))


@pytest.mark.slow
@pytest.mark.promotes("the programs, which multiply complex by real numbers")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=[pytest.mark.slow] * (x not in ("spectral convolution", "scan", "custom_vjp")))
        for x in COMPLEX
    ],
)
def test_complex_values_are_kept_which_jax_s_checkpoint_cannot_round(name):
    w, x = normal(WIDTH, WIDTH, scale=0.1), normal(2 * WIDTH, WIDTH, seed=1)
    loss = lambda w, x: mean(jnp.tanh(COMPLEX[name](w, x) @ w))
    truth = jax.grad(loss)(w, x)
    for budget in (1.0, 0):
        found = quietly(jax.jit(jax.grad(jamp.recompute(loss, budget))), w, x)
        np.testing.assert_allclose(found, truth, rtol=1e-3, atol=1e-6)
    assert quietly(jamp.memory_report(loss, 0.5), w, x).kept > 0
    found = jax.jit(jax.grad(jamp.autocast(loss, BF16)))(w, x)
    assert jnp.linalg.norm(found - truth) < 0.05 * jnp.linalg.norm(truth)


def undifferentiated(w, x):
    """Uses what JAX does not differentiate on values that the weights do not change, or whose gradient is stopped."""
    jax.experimental.io_callback(lambda x: None, None, x[0, 0])
    x = jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    x = x.at[0].multiply(x[1])
    x = lax.reduce_window(x, jnp.float32(0), lambda x, y: x + y, (1, 2), (1, 1), "SAME")
    x = x + jnp.real(jnp.linalg.eig(x[:WIDTH])[0])
    h = x @ w
    halved = lax.while_loop(lambda h: jnp.max(h) > 1e-3, lambda h: h / 2, h)
    return mean(jnp.tanh(jnp.tanh(h + lax.stop_gradient(halved)) @ w))


@jax.custom_jvp
def quantized_by_jvp(x, levels):
    return levels


@jax.custom_vjp
def quantized_by_vjp(x, levels):
    return levels


quantized_by_jvp.defjvp(lambda p, t: (p[1], t[0]))
quantized_by_vjp.defvjp(lambda x, levels: (levels, None), lambda _, g: (g, jnp.zeros_like(g)))


@pytest.mark.parametrize("rule", [quantized_by_jvp, quantized_by_vjp])
@pytest.mark.parametrize(
    "place", [lambda fun: fun, *(pytest.param(x, marks=pytest.mark.slow) for x in (jax.jit, jax.checkpoint))]
)
def test_a_rule_passes_on_the_tangents_of_operands_that_its_function_does_not_read(rule, place):
    """A straight-through estimator: the value is that of the levels, and the derivative that of the layers before."""

    def loss(ws, x, levels):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum((place(rule)(x, levels) @ ws[0]) ** 2)

    args = normal(4, WIDTH, WIDTH, scale=0.2), normal(64, WIDTH, seed=1), jnp.sign(normal(64, WIDTH, seed=2))
    want = jax.grad(loss)(*args)
    assert jnp.all(jnp.any(want != 0, axis=(1, 2)))
    for fun in (jamp.recompute(loss, 0.5), jamp.autocast(loss, BF16)):
        found = jax.jit(jax.grad(fun))(*args)
        assert jnp.linalg.norm(found - want) < 0.05 * jnp.linalg.norm(want)


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", ["straight", *(pytest.param(x, marks=pytest.mark.slow) for x in ("jit", "scan", "cond"))]
)
def test_a_budget_takes_what_jax_does_not_differentiate_where_no_gradient_goes(place):
    places = {
        "straight": lambda: undifferentiated,
        "jit": lambda: jax.jit(undifferentiated),
        "scan": lambda: lambda w, x: lax.scan(lambda _, x: (None, undifferentiated(w, x)), None, x[None])[1].sum(),
        "cond": lambda: lambda w, x: lax.cond(x[0, 0] > 9, lambda w, x: mean(x @ w), undifferentiated, w, x),
    }
    loss, w, x = places[place](), normal(WIDTH, WIDTH, scale=0.1), normal(2 * WIDTH, WIDTH, seed=1)
    truth = jax.grad(loss)(w, x)
    for budget in (1.0, 0):
        assert quietly(jamp.memory_report(loss, budget), w, x).kept > 0
        np.testing.assert_allclose(quietly(jamp.recompute(loss, budget), w, x), loss(w, x), rtol=1e-5)
        found = quietly(jax.jit(jax.grad(jamp.recompute(loss, budget))), w, x)
        np.testing.assert_allclose(found, truth, rtol=1e-3, atol=1e-6)


def scored(x, w):
    q = x @ w
    s = q @ q.T
    e = jnp.exp(s)
    p = e / jnp.sum(e, -1, keepdims=True)
    return jnp.tanh(p @ q), None


@pytest.mark.parametrize(
    ("budget", "kept", "nbytes", "flops"),
    [(1.0, [0, 2, 4, 7], 394_240, 164_096), (0.5, [0, 4, 7], 132_096, 8_552_704), (0.0, [], 0, 19_300_608)],
)
def test_the_program_at_the_top_of_segments_keeps_what_is_said_there(budget, kept, nbytes, flops):
    loss = lambda ws, head, x: jnp.sum(jnp.sin(lax.scan(scored, x, ws)[0] @ head))
    args = jnp.ones((3, 64, 64)), jnp.ones((64, 32)), jnp.ones((256, 64))
    calls = [e for e in equations(jax.make_jaxpr(jamp.recompute(loss, budget))(*args)) if name(e) == "remat2"]
    layer, end = (list(map(name, params(call)["jaxpr"].eqns)) for call in calls)
    # Each name follows the value that it keeps. The names before it are not values of the segment.
    numbers = lambda names: [i - 1 - n for n, i in enumerate(i for i, x in enumerate(names) if x == "name")]
    assert (numbers(layer), numbers(end)) == (kept, [0, 2])
    assert [x for x in layer if x != "name"] == list(map(name, jax.make_jaxpr(scored)(args[2], args[0][0]).eqns))
    report = jamp.memory_report(loss, budget)(*args)
    x = 256 * 64 * 4  # bytes: that of each layer, and of the end
    assert (report.kept, report.flops) == (4 * x + 3 * nbytes, 3 * flops + 256 * 32)
