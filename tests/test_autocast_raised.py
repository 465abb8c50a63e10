"""Rules that raise the precision of 16-bit code: a float32 head in a bfloat16 model."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import equations, name_of, normal
from programs import evaluate, evaluated

import jamp

MOVES = {
    "concatenate",
    "convert_element_type",
    "reshape",
    "rev",
    "select_n",
    "slice",
    "squeeze",
    "stop_gradient",
    "transpose",
}
BF16, F32 = jnp.bfloat16, jnp.float32
HEAD = {"dot_general[head]": "float32"}
ALL = {"*[head]": "float32"}
W = {
    "layers": normal(4, 32, 32, seed=1, scale=0.3).astype(BF16),
    "head": normal(32, 64, seed=2, scale=0.3).astype(BF16),
    "bias": normal(64, seed=3).astype(BF16),
}
X = normal(16, 32, seed=4).astype(BF16)
Y = jnp.asarray(np.random.default_rng(5).integers(0, 64, 16))


def oracle(fun, names, scope="head"):
    """The meaning of a rule, for code without constructs: raised equations read and write float32.

    Casts to float32, moves of one array, and raised equations read what was written. Others read it rounded.
    """

    def run(*args):
        leaves, tree = jax.tree.flatten(args)
        closed, shape = jax.make_jaxpr(lambda *xs: fun(*jax.tree.unflatten(tree, xs)), return_shape=True)(*leaves)
        exact = {}  # the float32 values of 16-bit results, by the id of what others read

        def wide(x):
            return exact[id(x)][1] if id(x) in exact else x.astype(F32)

        def step(eqn, values):
            name, out = name_of(eqn), eqn.outvars[0].aval
            floats = [i for i, x in enumerate(values) if x.dtype == BF16]
            is_raised = (name in names or ("*" in names and name not in MOVES)) and scope in str(
                eqn.source_info.name_stack
            )
            is_move = name in MOVES and all(id(values[i]) in exact for i in floats)
            if not floats or not (is_raised or is_move):
                return evaluated(eqn, values)
            given = [wide(x) if i in floats else x for i, x in enumerate(values)]
            params = {k: np.dtype(F32) if v == BF16 and k != "new_dtype" else v for k, v in eqn.params.items()}
            params |= {"precision": (lax.Precision.HIGHEST,) * 2} if name == "dot_general" else {}
            found = eqn.primitive.bind(*given, **params)
            if out.dtype != BF16:
                return [found]
            read = found.astype(BF16)
            exact[id(read)] = read, found
            return [read]

        results = evaluate(closed.jaxpr, closed.consts, leaves, step)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return run


def loss_of(logits):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), Y[:, None], 1))


def plain(w, x):
    """A model whose logits are cast to float32 right away."""
    for i in range(4):
        x = jnp.tanh(x @ w["layers"][i])
    with jax.named_scope("head"):
        logits = x @ w["head"]
    return loss_of(logits.astype(F32))


def with_bias(w, x):
    for i in range(4):
        x = jnp.tanh(x @ w["layers"][i])
    with jax.named_scope("head"):
        logits = jnp.tanh(x @ w["head"] / jnp.asarray(8, BF16)) * jnp.asarray(8, BF16) + w["bias"]
    return loss_of(logits.astype(F32))


def moved(w, x):
    with jax.named_scope("head"):
        logits = (x @ w["head"]).reshape(4, 4, 64).transpose(2, 0, 1)
    return loss_of(logits.astype(F32).transpose(1, 2, 0).reshape(16, 64))


def read_twice(w, x):
    """One reader casts to float32, and one computes in 16 bit."""
    with jax.named_scope("head"):
        logits = x @ w["head"]
    return loss_of(logits.astype(F32)) + jnp.sum(jnp.tanh(logits)).astype(F32)


def joined(w, x):
    """The gradient splits a cotangent, and adds up the parts."""
    with jax.named_scope("head"):
        half = x @ w["head"][:, :32]
        logits = jnp.concatenate([half, half], -1)
    return loss_of(logits.astype(F32))


def products_in_a_row(w, x):
    with jax.named_scope("head"):
        hidden = x @ w["layers"][0]
        logits = hidden @ w["head"]
    return loss_of(logits.astype(F32))


def error(found, wanted):
    found, wanted = (jnp.concatenate([jnp.ravel(x).astype(F32) for x in jax.tree.leaves(t)]) for t in (found, wanted))
    return float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted))


def compiled(fun):
    """Without excess precision, XLA rounds each 16-bit value, in every program."""
    return jax.jit(fun, compiler_options={"xla_allow_excess_precision": False})(W, X)


def both(fun):
    return compiled(jax.value_and_grad(fun))


CASES = [(plain, HEAD), (moved, HEAD), (read_twice, HEAD), (products_in_a_row, HEAD), (with_bias, ALL), (plain, ALL)]
CASES += [(read_twice, ALL), (with_bias, HEAD), (joined, HEAD)]


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(("fun", "rules"), CASES, ids=lambda x: x.__name__ if callable(x) else next(iter(x)))
def test_value_and_gradients_are_those_of_the_oracle(fun, rules):
    names = {key.partition("[")[0] for key in rules}
    wanted = both(oracle(fun, names))
    around = both(jamp.autocast(fun, BF16, rules=rules))
    outside = compiled(jamp.autocast(jax.value_and_grad(fun), BF16, rules=rules))
    changed = error(both(fun), wanted)
    for value, grads in (around, outside):
        np.testing.assert_allclose(value, wanted[0], rtol=2e-6)
        assert error(grads, wanted[1]) < max(1e-4, 0.1 * changed)
        assert {x.dtype for x in jax.tree.leaves(grads)} == {np.dtype(BF16)}
    if fun is not with_bias:
        assert abs(float(both(fun)[0] - wanted[0])) > 1e-5  # the rule changes the loss


def head(w, x):
    with jax.named_scope("head"):
        return x @ w["head"]


def in_rows(over):
    """The head of each row of x, by a loop or a map, and the cast outside of it."""
    return lambda w, x: loss_of(over(lambda row: head(w, row[None])[0], x).astype(F32))


def in_cond(w, x):
    logits = lax.cond(x[0, 0] < 100, head, lambda w, x: jnp.zeros((16, 64), BF16), w, x)
    return loss_of(logits.astype(F32))


def as_operand_of_scan(w, x):
    """Logits are read in slices, as constants, and cast inside."""
    logits, (constant, _) = head(w, x), (head(w, x[:1]), None)
    step = lambda total, row: (total + jnp.sum(jax.nn.log_softmax(row.astype(F32)) * constant[0].astype(F32)), None)
    return lax.scan(step, jnp.float32(0), logits)[0]


def as_operand_inlined(w, x):
    logits, constant = head(w, x), head(w, x[:1])
    return jnp.sum(jax.nn.log_softmax(logits.astype(F32)) * constant.astype(F32))


def simple(w, x):
    return loss_of(head(w, x).astype(F32))


CONSTRUCTS = {
    "jit": (lambda w, x: loss_of(jax.jit(head)(w, x).astype(F32)), simple),
    "jit around": (jax.jit(simple), simple),
    "checkpoint": (lambda w, x: loss_of(jax.checkpoint(head)(w, x).astype(F32)), simple),
    "checkpoint around": (jax.checkpoint(simple), simple),
    "scan": (in_rows(lambda f, x: lax.scan(lambda c, row: (c, f(row)), None, x)[1]), simple),
    "map": (in_rows(lax.map), simple),
    "vmap": (in_rows(lambda f, x: jax.vmap(f)(x)), simple),
    "cond": (in_cond, simple),
    "operand of scan": (as_operand_of_scan, as_operand_inlined),
    "chunked_sum": (
        lambda w, x: (
            jamp.chunked_sum(
                lambda w, x, y: (
                    -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(head(w, x).astype(F32)), y[:, None], 1))
                ),
                8,
            )(w, x, Y)
            / 16
        ),
        simple,
    ),
}


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("name", CONSTRUCTS)
@pytest.mark.parametrize("category", ["float32", "accumulate"])
def test_a_construct_reads_and_returns_what_is_raised(name, category):
    fun, inlined = CONSTRUCTS[name]
    # A loop adds gradients in 16 bit. So does a vmap in JAX 0.12.
    bound = 8e-3 if name in ("scan", "map", "vmap", "operand of scan", "chunked_sum") else 1e-3
    rules = {"dot_general[head]": category}
    wanted = both(jamp.autocast(inlined, BF16, rules=rules))
    around, outside = (
        both(jamp.autocast(fun, BF16, rules=rules)),
        jamp.autocast(jax.value_and_grad(fun), BF16, rules=rules),
    )
    for value, grads in (around, compiled(outside)):
        np.testing.assert_allclose(value, wanted[0], rtol=2e-6)
        assert error(grads, wanted[1]) < bound
    assert abs(float(value - compiled(fun))) > 1e-5


@jax.custom_vjp
def identity(x):
    return x


identity.defvjp(lambda x: (x, None), lambda _, g: (g,))


def test_carries_and_custom_rules_read_it_rounded():
    def carried(w, x):
        return loss_of(lax.fori_loop(0, 1, lambda i, z: z * jnp.asarray(1, BF16), head(w, x)).astype(F32))

    for fun in (carried, lambda w, x: loss_of(identity(head(w, x)).astype(F32))):
        low = jamp.autocast(fun, BF16, rules=HEAD)
        np.testing.assert_allclose(compiled(low), compiled(fun), rtol=2e-6)


def test_accumulate_rounds_the_cotangent_and_float32_does_not():
    dots = lambda category: [
        [v.aval.dtype for v in (*e.invars, *e.outvars)]
        for e in equations(
            jax.make_jaxpr(jax.grad(jamp.autocast(simple, BF16, rules={"dot_general[head]": category})))(W, X)
        )
        if e.primitive.name == "dot_general" and e.outvars[0].aval.shape in ((64, 32), (32, 64))
    ]
    assert dots("accumulate") == [[BF16, BF16, BF16]] or dots("accumulate") == [[BF16, BF16, F32]]
    assert dots("float32") == [[F32, F32, F32]]


CONV = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
SIZES = jnp.int32([8, 4, 0, 4])
OTHERS = {
    "conv_general_dilated": (
        lambda w, x: lax.conv_general_dilated(x.reshape(2, 4, 8, 8), w["layers"].reshape(4, 4, 8, 32), **CONV)
    ),
    "ragged_dot_general": lambda w, x: lax.ragged_dot(x, w["layers"], SIZES),
}


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("category", ["float32", "accumulate"])
@pytest.mark.parametrize("dtype", [BF16, jnp.float16], ids=["bfloat16", "float16"])
def test_convolutions_and_grouped_products(name, category, dtype):
    def fun(w, x):
        with jax.named_scope("head"):
            out = OTHERS[name](w, x)
        return jnp.mean(jnp.sin(out.astype(F32)))

    args = jax.tree.map(lambda x: x.astype(dtype), (W, X))
    low = jamp.autocast(fun, dtype, rules={f"{name}[head]": category})
    value, grads = jax.jit(jax.value_and_grad(low))(*args)
    wanted, exact = jax.jit(jax.value_and_grad(fun))(*jax.tree.map(lambda x: x.astype(F32), args))
    assert abs(value - wanted) < 0.01 * abs(jax.jit(fun)(*args) - wanted) + 1e-7
    assert error(grads, exact) < 4e-3
    assert {x.dtype for x in jax.tree.leaves(grads)} == {np.dtype(dtype)}


def test_other_primitives_compute_in_float32():
    def fun(w, x):
        with jax.named_scope("head"):
            return jnp.sum(jnp.exp(x @ w["head"]).astype(F32))

    exact = jnp.sum(jnp.exp(X.astype(F32) @ W["head"].astype(F32)))
    low = compiled(jamp.autocast(fun, BF16, rules=ALL))
    np.testing.assert_allclose(low, exact, rtol=1e-5)
    rule = compiled(jamp.autocast(fun, BF16, rules={"exp[head]": "float32"}))
    assert abs(float(rule - exact)) > 10 * abs(float(low - exact))


@pytest.mark.slow
@pytest.mark.parametrize("format", [jamp.Float8(min_size=16), jamp.Int8(min_size=16)], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("budget", [1.0, 0.5])
@pytest.mark.filterwarnings("ignore:The memory budget")
def test_beside_8_bit_and_under_a_budget(format, budget):
    low = jamp.autocast(plain, format, rules=HEAD, memory_budget=budget)
    without = jamp.autocast(plain, format, memory_budget=budget)
    report = jamp.autocast_report(plain, format, rules=HEAD)(W, X)
    (row,) = (row for row in report.rows if row.operation == "dot_general[head]")
    assert (row.category, row.after) == ("float32", "bfloat16, bfloat16 -> float32")
    assert report.share_8_bit > 0.4
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning) if budget == 1.0 else None
        (value, grads), (other, _) = both(low), both(without)
    exact = both(oracle(plain, {"dot_general"}))
    assert error(grads, exact[1]) < 0.2
    assert abs(float(value - other)) > 1e-6
    jamp.memory_report(low, budget)(W, X)


def test_the_report_shows_what_is_raised_and_what_rounds_it_again():
    report = jamp.autocast_report(plain, BF16, rules=HEAD)(W, X)
    (row,) = (row for row in report.rows if row.operation == "dot_general[head]")
    assert (row.category, row.before, row.after, row.reason) == (
        "float32",
        "bfloat16, bfloat16 -> bfloat16",
        "bfloat16, bfloat16 -> float32",
        "a rule of yours",
    )
    report = jamp.autocast_report(with_bias, BF16, rules=HEAD)(W, X)
    (hint,) = (hint for hint in report.hints if "rounded" in hint)
    assert "its float32 result is rounded to bfloat16 by div at test_autocast_raised.py" in hint
    assert "A rule for '*[head]' raises that too" in hint
    report = jamp.autocast_report(with_bias, BF16, rules=ALL)(W, X)
    assert not [hint for hint in report.hints if "rounded" in hint]
    assert {row.after for row in report.rows if row.operation == "div[head]"} == {"float32, float32 -> float32"}


def test_a_maximum_that_is_not_raised_is_compared_with_rounded_operands():
    """Else no operand would equal it, and its gradient would be 0."""

    def fun(w, x):
        with jax.named_scope("head"):
            largest = jax.ops.segment_max(x @ w["head"], jnp.arange(16) // 2, 8)
        return jnp.sum(jnp.sin(largest.astype(F32)))

    grads = compiled(jamp.autocast(jax.grad(fun), BF16, rules=ALL))
    assert error(grads, compiled(jax.grad(fun))) < 1e-2


def test_a_cast_to_float64_reads_it_too():
    with jax.enable_x64(True):
        fun = lambda w, x: jnp.sum(head(w, x).astype(jnp.float64))
        exact = np.sum(np.float64(X) @ np.float64(W["head"]))
        np.testing.assert_allclose(jamp.autocast(fun, BF16, rules=HEAD)(W, X), exact, rtol=1e-5)
        assert abs(compiled(fun) - exact) > 1e-4 * abs(exact)


def test_a_rule_without_a_match_warns_and_16_bit_code_without_a_rule_is_left_alone():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jamp.autocast(plain, BF16, rules={"dot_general[tail]": "float32"})(W, X)
    unused, unchanged = sorted(str(x.message) for x in caught)
    assert "The rule for 'dot_general[tail]' matches no operation" in unused
    assert "changes no product" in unchanged
    with pytest.warns(UserWarning, match="changes no product"):
        low = jax.make_jaxpr(jamp.autocast(plain, BF16))(W, X)
    assert {e.outvars[0].aval.dtype for e in equations(low) if e.primitive.name == "dot_general"} == {np.dtype(BF16)}


def test_float32_parameters_in_a_model_that_casts_them():
    """`dtype=bfloat16` of a module: parameters are float32, and are cast where they are read."""
    wide = jax.tree.map(lambda x: x.astype(F32), W)

    def fun(w, x):
        return plain(jax.tree.map(lambda x: x.astype(BF16), w), x)

    options = {"xla_allow_excess_precision": False}
    low = jamp.autocast(fun, BF16, rules=HEAD)
    value, grads = jax.jit(jax.value_and_grad(low), compiler_options=options)(wide, X)
    wanted = both(oracle(plain, {"dot_general"}))
    np.testing.assert_allclose(value, wanted[0], rtol=1e-5)
    assert error(grads, wanted[1]) < 5e-3
    assert {x.dtype for x in jax.tree.leaves(grads)} == {np.dtype(F32)}


@pytest.mark.parametrize("category", ["float32", "accumulate"])
def test_a_raised_product_is_differentiated_in_both_modes_under_vmap(category):
    w, xs = normal(16, 16).astype(jnp.bfloat16), normal(5, 4, 16, seed=1).astype(jnp.bfloat16)
    fun = lambda w, x: jnp.sum(jnp.sin((x @ w).astype(jnp.float32)))
    raised = jamp.autocast(fun, jnp.bfloat16, rules={"dot_general": category})
    for derivative in (
        lambda f: lambda x: jax.jvp(lambda w: f(w, x), (w,), (w,))[1],
        lambda f: lambda x: jax.grad(f)(w, x),
    ):
        found, right = (jax.vmap(derivative(f))(xs).astype(jnp.float32) for f in (raised, fun))
        assert float(jnp.linalg.norm(found - right)) < 0.02 * float(jnp.linalg.norm(right))
