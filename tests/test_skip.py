"""The traps of the skip, which selects outputs where they are defined, and of the check that decides about it."""

import functools
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jamp

GRADS = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.array([0.25, 3.0])}
PARAMS = {"w": jnp.array([0.5, -0.0, 4.0]), "b": jnp.array([-0.0, 1.0])}
OVERFLOW = GRADS | {"b": jnp.array([0.25, jnp.inf])}


def bits(tree: Any) -> Any:
    data = lambda x: np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
    return jax.tree.map(lambda x: (str(x.dtype), x.shape, data(x).tobytes()), tree)


def inner(init: Any, update: Any) -> optax.GradientTransformation:
    """An inner optimizer from its initial state and `update(grads, state)`."""
    make = lambda params: jax.tree.map(lambda x: jnp.array(x, copy=True), init)
    return optax.GradientTransformation(make, lambda grads, state, params=None: update(grads, state))


def check_skip_and_step(tx: Any, grads: Any = GRADS, bad: Any = OVERFLOW, params: Any = PARAMS) -> None:
    """A finite step is the inner one; a skipped one moves nothing, from the first state or a later one."""
    wrapped = jamp.loss_scaled(tx)
    update, plain = jax.jit(wrapped.update), jax.jit(tx.update)
    state, expected = wrapped.init(params), tx.init(params)
    for _ in range(2):
        updates, skipped = update(bad, state, params)
        assert bits(optax.apply_updates(params, updates)) == bits(params)
        assert bits(skipped.inner_state) == bits(state.inner_state)
        assert not skipped.grads_finite
        updates, state = update(grads, skipped, params)
        expected_updates, expected = plain(grads, expected, params)
        got, wanted = (jax.tree.leaves(tree) for tree in ((updates, state.inner_state), (expected_updates, expected)))
        for x, y in zip(got, wanted, strict=True):
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                x, y = jax.random.key_data(x), jax.random.key_data(y)
            np.testing.assert_allclose(x, y, rtol=1e-6)
        assert state.grads_finite
    assert update._cache_size() == 1


def momentum(grads, state):
    return jax.tree.map(lambda g, m: 0.9 * m + g, grads, state)


ZEROS = jax.tree.map(jnp.zeros_like, GRADS)
COUNT = jnp.int32(0)
TRAPS = {
    "state that is also the update": inner(ZEROS, lambda g, m: (momentum(g, m),) * 2),
    "trace": optax.trace(0.9),
    "lars": optax.lars(0.1),
    "a literal output": inner((COUNT, jnp.array(True)), lambda g, s: (g, (s[0] + 1, False))),
    "optimistic_gradient_descent": optax.optimistic_gradient_descent(0.1),
    "a constant array as output": inner(jnp.zeros(2), lambda g, s: (g, jnp.array(np.float32([3.0, 4.0])))),
    "updates that are the gradients, state that is the state": inner(COUNT, lambda g, s: (g, s)),
    "state that is the gradients": inner(ZEROS, lambda g, s: (g, g)),
    "two state leaves that change places": inner((jnp.zeros(3), jnp.ones(3)), lambda g, s: (g, s[::-1])),
    "one value in two state leaves": inner((COUNT, COUNT + 5), lambda g, s: (g, (s[0] + 1,) * 2)),
    "an output that another output reads": inner(
        (jnp.ones(3), jnp.ones(3)), lambda g, s: (g, ((a := s[0] * 2 + s[1]), a + s[1]))
    ),
    "a jitted inner update": inner(ZEROS, jax.jit(lambda g, m: ((n := momentum(g, m)), n))),
    "a jit in a jit": inner(ZEROS, jax.jit(lambda g, m: jax.jit(lambda a, b: (b, a))(jax.jit(momentum)(g, m), g))),
    "a jit that returns its input": inner(ZEROS, lambda g, m: (g, jax.jit(lambda x: x)(m))),
    "a jit that returns its input in another place": inner(
        (COUNT, COUNT + 5), lambda g, s: (g, jax.jit(lambda a: a[::-1])(s))
    ),
    "a jit that returns one value twice and a literal": inner(
        (COUNT, COUNT, COUNT), lambda g, s: (g, jax.jit(lambda a: (a[0] + 1, a[0] + 1, 7))(s))
    ),
    "a jit whose output is read and returned": inner(
        (COUNT, COUNT), lambda g, s: (g, ((a := jax.jit(lambda x: x + 1)(s[0])), a * 3))
    ),
    "the same jit twice": inner((COUNT, COUNT), lambda g, s: (g, (twice(twice(s[0])), twice(s[1])))),
    "integer leaves in the state": inner(
        (jnp.arange(3), jnp.uint8([250]), jnp.array([True, False])), lambda g, s: (g, (s[0] - 1, s[1] + 3, ~s[2]))
    ),
    "a state without arrays": optax.sgd(0.1),
    "None and empty containers in the state": inner(
        {"a": None, "b": (), "c": COUNT}, lambda g, s: (g, s | {"c": s["c"] + 1})
    ),
    "a PRNG key in the state": optax.add_noise(0.1, 0.55, key=jax.random.key(0)),
    "an old-style PRNG key in the state": inner(
        jax.random.PRNGKey(0), lambda g, k: (g | {"b": jax.random.normal(k, 2)}, jax.random.split(k)[0])
    ),
    "a while loop": inner(COUNT, lambda g, s: (g, lax.while_loop(lambda i: i % 5 < 4, lambda i: i + 1, s + 1))),
    "a cond": inner(ZEROS, lambda g, m: (g, lax.cond(g["w"][0] > 0.5, lambda: momentum(g, m), lambda: m))),
    "a cond that returns its operand": inner(
        ZEROS, lambda g, m: (g, lax.cond(g["w"][0] > 5, momentum, lambda g, m: m, g, m))
    ),
    "a scan": inner(
        jnp.zeros(2), lambda g, s: (g, lax.scan(lambda c, x: (c + x, None), s, jnp.ones((3, 2)) * g["w"][0])[0])
    ),
    "a scan whose stacked outputs are state": inner(
        (COUNT, jnp.zeros(3, jnp.int32)), lambda g, s: (g, lax.scan(lambda c, x: (c + 1, c), s[0], length=3))
    ),
    "remat, custom_jvp and custom_vjp": inner(
        (jnp.ones(3), jnp.ones(3), jnp.ones(3)),
        lambda g, s: (g, (jax.checkpoint(jnp.sin)(s[0]), jax.nn.relu(s[1] - g["w"]), own_gradient(s[2]))),
    ),
    "a random operation": inner(jnp.zeros(3), lambda g, s: (g, s + jax.random.normal(jax.random.key(1), 3))),
}


@jax.jit
def twice(x):
    return 2 * x + 1


@jax.custom_vjp
def own_gradient(x):
    return x * 3


own_gradient.defvjp(lambda x: (x * 3, None), lambda _, ct: (ct,))


@pytest.mark.parametrize("trap", TRAPS)
def test_skip_leaves_params_and_inner_state_bit_identical_with(trap):
    check_skip_and_step(TRAPS[trap])


@pytest.mark.parametrize("seed", range(15))
def test_skip_holds_for_random_programs(seed):
    """Straight-line programs over the state, some of it under jit, with inputs, constants and repeats as outputs."""

    def update(grads, state):
        random = np.random.default_rng(seed)

        def program(*values):
            values = [*values, jnp.float32(0.5)]
            for _ in range(random.integers(1, 6)):
                a, b = (values[i] for i in random.integers(len(values), size=2))
                op = random.integers(5)
                if op == 0 and len(values) < 12:
                    values.extend(
                        jax.jit(lambda *xs: program(*xs))(a, b)
                    )  # a function of its own: jit refuses recursion
                else:
                    values.append((a + b, a * b, jnp.sin(a), jnp.float32(2.0), jnp.minimum(a, b))[op])
            return [values[i] for i in random.integers(len(values), size=4)]

        outputs = program(grads["w"][0], *state)
        return jax.tree.map(lambda g: g + outputs[0], grads), tuple(outputs[1:])

    check_skip_and_step(inner((jnp.float32(1.5), jnp.float32(-2.0), jnp.float32(0.25)), update))


@pytest.mark.parametrize("params", [{}, None, (), {"w": jnp.zeros((0, 3))}, {"w": None}])
def test_empty_params_are_stepped(params):
    wrapped = jamp.loss_scaled(optax.adam(0.1))
    updates, state = jax.jit(wrapped.update)(params, wrapped.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert state.grads_finite
    assert state.inner_state[0].count == 1


@pytest.mark.parametrize(
    ("update", "where"),
    [
        (lambda g, s: (g, s | {"a": s["a"].astype(jnp.float16)}), "['a'] from float32[3] to float16[3]"),
        (lambda g, s: (g, s | {"a": s["a"].astype(jnp.int32)}), "['a'] from float32[3] to int32[3]"),
        (lambda g, s: (g, s | {"a": s["a"][None]}), "['a'] from float32[3] to float32[1, 3]"),
        (lambda g, s: (g, s | {"b": {"c": s["a"].sum()}}), "['b']['c'] from int32[] to float32[]"),
        (lambda g, s: (g, s | {"b": {}}), "['b']['c']"),
        (lambda g, s: (g, s | {"b": {"c": s["b"]["c"], "d": s["a"]}}), "['b']['d']"),
        (lambda g, s: (g, s | {"a": (s["a"],)}), "['a']"),
    ],
)
def test_inner_optimizer_that_changes_its_state_is_an_error_that_names_the_leaf(update, where):
    wrapped = jamp.loss_scaled(inner({"a": jnp.zeros(3), "b": {"c": COUNT}}, update))
    with pytest.raises(ValueError, match=re.escape(where)):
        jax.jit(wrapped.update)(GRADS, wrapped.init(PARAMS), PARAMS)


def test_no_leaf_of_the_state_is_promoted_silently():
    """A weak type in the inner update stays what the state is."""
    wrapped = jamp.loss_scaled(inner((jnp.float16(1), jnp.int8(1)), lambda g, s: (g, (s[0] * 2.0, s[1] + 1))))
    _, state = jax.jit(wrapped.update)(GRADS, wrapped.init(PARAMS), PARAMS)
    assert [(x.dtype, x.weak_type) for x in state.inner_state] == [(jnp.float16, False), (jnp.int8, False)]


def test_inner_update_is_fed_zeros_not_nan_so_that_its_loops_end():
    never, rounds = 1000, []

    def halve_until_small(grads, count):
        # With nan or inf it would never end.
        halve = lambda c: (c[0] / 2, c[1] + 1)
        going_on = lambda c: ~(c[0] < 1.0) & (c[1] < never)
        _, n = lax.while_loop(going_on, halve, (jnp.max(jnp.abs(grads["b"])), COUNT))
        jax.debug.callback(lambda n: rounds.append(int(n)), n)
        return grads, count + n

    wrapped = jamp.loss_scaled(inner(COUNT, halve_until_small))
    update, state = jax.jit(wrapped.update), wrapped.init(PARAMS)
    for value in (3.0, jnp.inf, jnp.nan, 3.0):
        _, state = update(GRADS | {"b": jnp.array([0.25, value])}, state, PARAMS)
    jax.effects_barrier()
    assert rounds == [2, 0, 0, 2]
    assert int(state.inner_state) == 4


def test_gradients_are_read_without_a_selection_where_nothing_in_the_update_can_trip_over_nan():
    def selections(inner):
        tx, params = jamp.loss_scaled(inner, jamp.StaticLossScale()), jnp.ones(3)
        jaxpr = jax.make_jaxpr(tx.update)(params, tx.init(params), params)
        return [eqn.outvars[0].aval.shape for eqn in jaxpr.eqns if eqn.primitive.name == "select_n"].count((3,))

    plain = selections(optax.trace(0.9))
    loop = optax.stateless(lambda g, _: jax.lax.fori_loop(0, jnp.int32(g[0]), lambda i, g: g / 2, g))
    assert selections(optax.chain(loop, optax.trace(0.9))) == plain + 1


def test_inner_update_with_a_callback_sees_nothing_but_finite_gradients():
    seen = []
    spy = inner(COUNT, lambda g, s: (jax.debug.callback(lambda x: seen.append(x.tolist()), g["b"]), (g, s))[1])
    wrapped = jamp.loss_scaled(spy)
    for grads in (GRADS, OVERFLOW):
        jax.block_until_ready(jax.jit(wrapped.update)(grads, wrapped.init(PARAMS), PARAMS))
    jax.effects_barrier()
    # A callback runs on a skip too.
    assert seen == [[0.25, 3.0], [0.0, 0.0]]


@pytest.mark.parametrize("jit", [True, False])
def test_debug_nans_passes_a_float16_overflow_step(jit):
    def train_step(params, state, x):
        loss = lambda p: jnp.sum((p["w"].astype(jnp.float16) * x).astype(jnp.float32) ** 2)
        _, grads = jamp.value_and_grad(loss, state)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    tx = jamp.loss_scaled(optax.adamw(0.1))
    params = {"w": jnp.array([0.5, -0.0, 4.0])}
    with jax.debug_nans(True):
        new, state = (jax.jit(train_step) if jit else train_step)(params, tx.init(params), jnp.float16([1, 2, 100]))
        assert not state.grads_finite
        assert bits(new) == bits(params)


def test_gradient_through_an_applied_update_is_the_plain_one():
    def loss_after(tx, params, scale):
        def train_step(params, state):
            grads = jax.grad(lambda p: scale * jnp.sum(p["w"] ** 4))(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        params, _ = train_step(*train_step(params, tx.init(params)))
        return jnp.sum(params["w"] ** 2)

    params, tx = {"w": jnp.array([0.5, -1.0, 2.0])}, optax.adam(0.1, eps=0.1)
    derive = lambda tx: jax.jit(jax.grad(functools.partial(loss_after, tx), argnums=(0, 1)))(params, 1.0)
    got, expected = derive(jamp.loss_scaled(tx)), derive(tx)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), got, expected)
    assert got[1] != 0


def test_float0_none_and_masked_nodes_in_the_gradients_pass():
    params = {"w": jnp.ones(3), "n": jnp.arange(3), "none": None, "masked": optax.MaskedNode()}
    masks = {"w": True, "n": False, "none": True, "masked": True}
    wrapped = jamp.loss_scaled(optax.masked(optax.adam(0.1), masks))
    init = wrapped.init(params)

    def update(w: Any) -> Any:
        # float0, as of `jax.grad(allow_int=True)`, crosses no jit.
        updates, state = wrapped.update(params | {"w": w, "n": np.zeros(3, jax.dtypes.float0)}, init, params)
        return updates | {"n": None}, state

    for w, good in ((jnp.ones(3), True), (jnp.array([1.0, jnp.nan, 1.0]), False)):
        for updates, state in (update(w), jax.jit(update)(w)):
            assert updates["none"] is None
            assert updates["masked"] == optax.MaskedNode()
            assert bool(state.grads_finite) is good
            assert state.inner_state.inner_state[0].count == int(good)
            np.testing.assert_allclose(updates["w"], -0.1 if good else -0.0, rtol=1e-5)


def test_integer_and_complex_params_are_bit_identical_after_a_skip():
    params = {"z": jnp.array([complex(-0.0, -0.0), 1 - 2j], jnp.complex64), "w": jnp.array([-0.0])}
    grads = params | {"z": jnp.array([1j, 2], jnp.complex64)}
    for bad in (grads | {"z": jnp.array([1, complex(0, jnp.inf)], jnp.complex64)}, grads | {"w": jnp.array([jnp.nan])}):
        check_skip_and_step(optax.trace(0.9), grads, bad, params)
        integers = {"i": jnp.arange(2), "u": jnp.uint8([255, 0]), "flag": jnp.array([True, False])}
        check_skip_and_step(optax.identity(), grads | integers, bad | integers, params | integers)


def test_each_of_several_vmapped_replicas_skips_for_itself():
    wrapped = jamp.loss_scaled(optax.chain(optax.trace(0.9), optax.scale_by_adam()))
    params = jnp.ones((3, 2))
    grads = jnp.ones((3, 2)).at[1, 0].set(jnp.nan)
    state = jax.vmap(wrapped.init)(params)
    updates, state = jax.jit(jax.vmap(wrapped.update))(grads, state, params)
    assert state.grads_finite.tolist() == [True, False, True]
    assert state.inner_state[1].count.tolist() == [1, 0, 1]
    assert np.isfinite(state.inner_state[0].trace).all()
    assert updates[1].tolist() == [0.0, 0.0]


def test_jitted_inner_update_compiles_to_the_same_instructions_as_a_plain_one():
    """A call would hide the definitions, and a selection after the call needs a second buffer for each."""
    adam = optax.adamw(0.1)
    jitted = optax.GradientTransformation(adam.init, jax.jit(adam.update))
    assert instructions(jamp.loss_scaled(jitted)) == instructions(jamp.loss_scaled(adam))


def instructions(tx: Any) -> Counter:
    compiled = compile_step(tx, PARAMS)
    return Counter(re.findall(r" = (\S+ [\w-]+)\(", compiled.as_text()))


def compile_step(tx: Any, params: Any) -> Any:
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    shapes = jax.eval_shape(lambda p: (p, tx.init(p), p), params)
    return jax.jit(step, donate_argnums=(0, 1)).lower(*shapes).compile()


# The check.


def overflowing(dtype: Any) -> list[Any]:
    """Elementwise operations after which some of these elements are infinite, and their operands."""
    big = jnp.finfo(dtype).max
    third = lambda x: jnp.asarray(float(big) / 3, x.dtype)
    scale = lambda c: lambda x: x * jnp.asarray(c, x.dtype)
    return [
        scale(8.0),
        scale(7.3),
        scale(-3.5),
        scale(2.0**15 if dtype == jnp.float16 else 2.0**20),
        lambda x: x + x + x + x,
        lambda x: x + third(x) + third(x) + third(x),
        lambda x: x - jnp.asarray(-float(big), x.dtype),
        lambda x: x / jnp.asarray(1 / 8.0, x.dtype),
        lambda x: x / jnp.asarray(0.137, x.dtype),
        lambda x: x * x,
        lambda x: scale(0.25)(scale(8.0)(x)),
        lambda x: jnp.log(x - x),
        lambda x: 1 / (x - third(x) - jnp.asarray(1.0, x.dtype)),
    ]


@pytest.mark.parametrize("leaves", [1, 9])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16, jnp.float64, jnp.complex64])
def test_check_is_exact_behind_any_producer(dtype, leaves, request):
    """Whatever precedes it in one jit, the check says what the gradients returned by that jit are."""
    if dtype == jnp.float64:
        request.getfixturevalue("x64")
    producers = overflowing(dtype)

    @jax.jit
    def produce_and_check(trees):
        made = [jax.tree.map(op, tree) for op, tree in zip(producers, trees, strict=True)]
        return made, [jamp.all_finite(tree) for tree in made]

    third = float(jnp.finfo(dtype).max) / 3
    verdicts = []
    for element in (1.0, third):
        tree = {f"w{i}": jnp.ones(3, dtype) for i in range(leaves)}
        tree["w0"] = jnp.array([1.0, element, 1.0], dtype)
        made, finite = produce_and_check([tree] * len(producers))
        for gradients, verdict in zip(made, finite, strict=True):
            truth = all(np.isfinite(np.asarray(x).astype(wide(x))).all() for x in jax.tree.leaves(gradients))
            assert bool(verdict) == truth
            verdicts.append(truth)
    assert {True, False} == set(verdicts)
    assert verdicts.count(False) >= len(producers)


def wide(x: Any) -> Any:
    return np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64


@functools.cache
def jitted_check():
    return jax.jit(jamp.all_finite)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("count", [1, 2, 8, 9, 20, 33, 65])
def test_inf_or_nan_in_any_of_many_leaves_of_one_shape_is_found(count, value):
    leaves = [np.ones(5, np.float32) for _ in range(count)]
    assert jitted_check()(leaves)
    for i in range(count):
        for position in (0, 4):
            bad = [x.copy() for x in leaves]
            bad[i][position] = value
            assert not jitted_check()(bad), (i, position)


@pytest.mark.parametrize("shape", [(131072,), (16, 8192), (3, 43696), (65537,), (1, 65536)])
def test_inf_or_nan_anywhere_in_a_large_leaf_is_found(shape):
    x = np.ones(shape, np.float32)
    assert jitted_check()(x)
    for position in np.linspace(0, x.size - 1, 33, dtype=int):
        for value in (np.inf, -np.inf, np.nan):
            bad = x.copy()
            bad.flat[position] = value
            assert not jitted_check()(bad), (position, value)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_inf_or_nan_in_any_of_many_leaves_of_different_shapes_and_dtypes_is_found(value):
    shapes = [(), (1,), (3, 2), (0,), (2, 1, 2), (8, 16384)]
    for dtype in (jnp.float32, jnp.float16, jnp.bfloat16, jnp.complex64):
        leaves = [np.ones(s, dtype) for s in shapes] + [np.arange(3), np.array([True])]
        assert jitted_check()(leaves)
        for i, x in enumerate(leaves[: len(shapes)]):
            for position in {0, x.size // 2, x.size - 1} if x.size else ():
                bad = [*leaves]
                bad[i] = x.copy()
                bad[i].flat[position] = value
                assert not jitted_check()(bad), (dtype, i, position)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64])
def test_finite_gradient_of_any_size_is_finite(dtype):
    largest = float(jnp.finfo(dtype).max)
    for signs in ([1.0] * 20, [-1.0] * 20, [1.0, -1.0] * 10):
        leaves = [jnp.full(7, s * largest, dtype) for s in signs]
        assert jitted_check()(leaves)
        assert jax.jit(lambda t: jamp.all_finite(jax.tree.map(lambda x: -x, t)))(leaves)
    smallest = float(jnp.finfo(dtype).smallest_subnormal)
    assert jitted_check()([jnp.full(7, smallest, dtype)])
    assert jitted_check()([np.float32([3e38, -3e38])] * 20)


def lines_of_hlo(tx: Any, leaves: int) -> int:
    return compile_step(tx, {f"w{i:04d}": jnp.ones(2) for i in range(leaves)}).as_text().count("\n")


def test_compiled_lines_grow_linearly_from_10_to_100_leaves():
    adamw = optax.adamw(0.1)
    growth = {}
    for name, tx in {"plain": adamw, "jamp": jamp.loss_scaled(adamw)}.items():
        few, some, many = (lines_of_hlo(tx, n) for n in (10, 50, 100))
        assert (many - some) / 50 <= 1.2 * (some - few) / 40
        growth[name] = (many - few) / 90
    # A leaf costs at most twice the lines that it costs without the skip.
    assert growth["jamp"] <= 2 * growth["plain"]


@pytest.mark.slow
def test_compiled_lines_grow_linearly_from_10_to_1000_leaves():
    few, some, many = (lines_of_hlo(jamp.loss_scaled(optax.adamw(0.1)), n) for n in (10, 100, 1000))
    assert (many - some) / 900 <= 1.2 * (some - few) / 90
    assert many / 1000 <= 1.2 * some / 100
