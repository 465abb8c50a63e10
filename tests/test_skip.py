"""The traps of the skip, which selects each output where it is defined."""

import functools
import re
from collections import Counter, OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jaxprs import equations
from steps import GOOD, INF, PARAMS, check_skips, stepper, together
from trees import assert_close, assert_equal, bits

import jamp

ADAMW = jamp.optimizers.adamw(0.1)
COUNT, ONES, ZEROS = jnp.int32(0), jnp.ones(3), jax.tree.map(jnp.zeros_like, GOOD)


def inner(init, update):
    """An inner optimizer from its initial state and `update(grads, state)`."""
    make = lambda params: jax.tree.map(lambda x: jnp.array(x, copy=True), init)
    return optax.GradientTransformation(make, lambda grads, state, params=None: update(grads, state))


momentum = lambda grads, state: jax.tree.map(lambda g, m: 0.9 * m + g, grads, state)
noise = lambda grads, key: grads | {"b": jax.random.normal(key, 2)}
increment, twice = jax.jit(lambda x: x + 1), jax.jit(lambda x: 2 * x + 1)
own_gradient = jax.custom_vjp(lambda x: x * 3)
second, counting = lambda g, m: m, lambda c, x: (c + 1, c)
custom_rules = lambda s, w: (jax.checkpoint(jnp.sin)(s[0]), jax.nn.relu(s[1] - w), own_gradient(s[2]))
own_gradient.defvjp(lambda x: (x * 3, None), lambda _, ct: (ct,))

# Each is an optimizer's initial state and its update. These read gradients that hold NaN on a skip ...
SAFE_ON_NAN = {
    "state that is also the update": (ZEROS, lambda g, m: (momentum(g, m),) * 2),
    "a literal output": ((COUNT, jnp.array(True)), lambda g, s: (g, (s[0] + 1, False))),
    "a constant array as output": (jnp.zeros(2), lambda g, s: (g, jnp.array(np.float32([3.0, 4.0])))),
    "updates that are the gradients, state that is the state": (COUNT, lambda g, s: (g, s)),
    "state that is the gradients": (ZEROS, lambda g, s: (g, g)),
    "two state leaves that change places": ((ONES, 2 * ONES), lambda g, s: (g, s[::-1])),
    "one value in two state leaves": ((COUNT, COUNT + 5), lambda g, s: (g, (s[0] + 1,) * 2)),
    "an output that another reads": ((ONES, ONES), lambda g, s: (g, ((a := s[0] * 2 + s[1]), a + s[1]))),
    "a jitted inner update": (ZEROS, jax.jit(lambda g, m: ((n := momentum(g, m)), n))),
    "a jit in a jit": (ZEROS, jax.jit(lambda g, m: jax.jit(lambda a, b: (b, a))(jax.jit(momentum)(g, m), g))),
    "a jit that returns its input elsewhere": ((COUNT, COUNT + 5), lambda g, s: (g, jax.jit(lambda a: a[::-1])(s))),
    "a jit that returns a value twice": ((COUNT,) * 3, lambda g, s: (g, jax.jit(lambda a: (a[0] + 1, a[0] + 1, 7))(s))),
    "a jit whose output is read and returned": ((COUNT, COUNT), lambda g, s: (g, ((a := increment(s[0])), a * 3))),
    "the same jit twice": ((COUNT, COUNT), lambda g, s: (g, (twice(twice(s[0])), twice(s[1])))),
    "integers": ((jnp.arange(3), jnp.uint8([250]), ONES > 1), lambda g, s: (g, (s[0] - 1, s[1] + 3, ~s[2]))),
    "a state without arrays": (optax.EmptyState(), lambda g, s: (jax.tree.map(lambda x: -0.1 * x, g), s)),
    "None and empty containers": ({"a": None, "b": (), "c": COUNT}, lambda g, s: (g, s | {"c": s["c"] + 1})),
}
# ... and these zeros.
UNSAFE_ON_NAN = {
    "a PRNG key in the state": (jax.random.key(0), lambda g, k: (noise(g, k), jax.random.split(k)[0])),
    "an old-style PRNG key": (jax.random.PRNGKey(0), lambda g, k: (noise(g, k), jax.random.split(k)[0])),
    "a while loop": (COUNT, lambda g, s: (g, lax.while_loop(lambda i: i % 5 < 4, lambda i: i + 1, s + 1))),
    "a cond": (ZEROS, lambda g, m: (g, lax.cond(g["w"][0] > 0.5, lambda: momentum(g, m), lambda: m))),
    "a cond that returns its operand": (ZEROS, lambda g, m: (g, lax.cond(g["w"][0] > 5, momentum, second, g, m))),
    "a scan": (ONES, lambda g, s: (g, lax.scan(lambda c, x: (c + x, None), s, jnp.ones((2, 3)) * g["w"][0])[0])),
    "a scan with stacked outputs": ((COUNT, jnp.arange(3)), lambda g, s: (g, lax.scan(counting, s[0], length=3))),
    "remat, custom_jvp and custom_vjp": ((ONES,) * 3, lambda g, s: (g, custom_rules(s, g["w"]))),
    "a random operation": (ONES, lambda g, s: (g, s + jax.random.normal(jax.random.key(1), 3))),
}


def random_program(seed):
    """A straight-line program over the state, some of it under jit, with inputs, constants and repeats as outputs."""

    def update(grads, state):
        random = np.random.default_rng(seed)
        chosen = lambda values, n: [values[i] for i in random.integers(len(values), size=n)]

        def program(*values):
            values = [*values, jnp.float32(0.5)]
            for _ in range(random.integers(1, 6)):
                (a, b), op = chosen(values, 2), random.integers(5)
                if op == 0 and len(values) < 12:  # a function of its own, because jit refuses recursion
                    values.extend(jax.jit(lambda *xs: program(*xs))(a, b))
                else:
                    values.append((a + b, a * b, -a, jnp.float32(2.0), jnp.minimum(a, b))[op])
            return chosen(values, 4)

        first, *rest = program(grads["w"][0], *state)
        return jax.tree.map(lambda g: g + first, grads), tuple(rest)

    return (jnp.float32(1.5), jnp.float32(-2.0), jnp.float32(0.25)), update


@pytest.mark.parametrize("traps", [SAFE_ON_NAN, UNSAFE_ON_NAN, {seed: random_program(seed) for seed in range(15)}])
def test_skip_leaves_params_and_inner_state_bit_identical_with(traps):
    each = lambda x: dict.fromkeys(traps, x)
    optimizers = together({name: inner(*trap) for name, trap in traps.items()})
    check_skips(optimizers, each(GOOD), [each(INF), each(GOOD) | {next(iter(traps)): INF}], each(PARAMS))


@pytest.mark.promotes("optax.apply_updates")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_skip_keeps_all_parameters_but_subnormal_ones_and_a_selection_those_too(dtype):
    numbers = [0.0, -0.0, 1.0, -3e38, jnp.finfo(dtype).tiny, jnp.inf, -jnp.inf, 1e-40, -1e-40, 1e-38]
    numbers = np.asarray(numbers, np.float32).astype(dtype)
    is_normal = np.abs(numbers.astype(np.float32)) >= np.float32(jnp.finfo(dtype).tiny)
    wraps = [lambda tx: tx] if dtype == jnp.float32 else [
        jamp.master_params, functools.partial(jamp.master_params, split=True), jamp.stochastic_rounding,
    ]  # fmt: skip
    for wrap in wraps:
        inner, params = wrap(optax.adam(0.1)), jnp.asarray(numbers)
        tx = jamp.loss_scaled(inner)

        def step(params, state, tx=tx):
            updates, state = tx.update(jnp.full_like(params, jnp.nan), state, params)
            new = optax.apply_updates(params, updates)
            return new, jnp.where(jamp.get_grads_finite(state), new, params)

        for run in (step, jax.jit(step)):
            new, selected = run(params, tx.init(params))
            stepped = jamp.GradScaler().step(inner, inner.init(params), params, grads=jnp.full_like(params, jnp.nan))
            assert bits(selected) == bits(stepped.params) == bits(numbers)
            rows = [np.asarray(x).view(np.uint8).reshape(len(numbers), -1) for x in (new, numbers)]
            is_same = np.all(rows[0] == rows[1], 1)
            assert np.all(is_same | ~is_normal & (np.asarray(new) == 0))
            assert_equal(np.signbit(new), np.signbit(numbers))


def test_integers_complex_float0_none_and_empty_trees_are_skipped_too():
    params = {"z": jnp.array([complex(-0.0, -0.0), 1 - 2j], jnp.complex64), "w": jnp.array([-0.0])}
    good = params | {"z": jnp.array([1j, 2], jnp.complex64)}
    infinite = params | {"z": jnp.array([1, complex(0, jnp.inf)], jnp.complex64)}
    integers = {"i": jnp.arange(2), "u": jnp.uint8([255, 0]), "flag": jnp.array([True, False])}
    both = lambda x: {"trace": x, "none": x | integers}
    tx = together({"trace": optax.trace(0.9), "none": optax.identity()})
    check_skips(tx, both(good), [both(infinite), both(good | {"w": jnp.array([jnp.nan])})], both(params))
    count = optax.scale_by_schedule(lambda count: -0.1)
    params = {"w": ONES, "n": jnp.arange(3), "none": None}
    tx = jamp.loss_scaled(optax.masked(count, {"w": True, "n": False, "none": True}))

    def update(w):
        grads = params | {"w": w, "n": np.zeros(3, jax.dtypes.float0)}  # As of `jax.grad(allow_int=True)`.
        updates, state = tx.update(grads, tx.init(params), params)
        return updates | {"n": None}, state  # float0 crosses no jit.

    for function, good in ((update, False), (jax.jit(update), False), (jax.jit(update), True)):
        updates, state = function(jnp.array([1.0, 1.0 if good else jnp.nan, 1.0]))
        assert updates["none"] is None
        assert (bool(state.grads_finite), int(state.inner_state.inner_state.count)) == (good, good)
        np.testing.assert_allclose(updates["w"], -0.1 if good else -0.0, rtol=1e-5)
    for empty in ({}, None, (), {"w": jnp.zeros((0, 3))}, {"w": None}):
        updates, state = jamp.loss_scaled(count).update(empty, jamp.loss_scaled(count).init(empty), empty)
        assert jax.tree.structure(updates) == jax.tree.structure(empty)
        assert (bool(state.grads_finite), int(state.inner_state.count)) == (True, 1)


def test_inner_state_that_changes_is_an_error_that_names_the_leaf_a_weak_type_is_not():
    def updated(init, update):
        wrapped = jamp.loss_scaled(inner(init, lambda g, s: (g, update(s))))
        return jax.eval_shape(wrapped.update, GOOD, wrapped.init(PARAMS), PARAMS)[1].inner_state

    for update, message in (
        (lambda s: s | {"a": s["a"].astype(jnp.int32)}, "['a'] must stay float32[3], got int32[3]"),
        (lambda s: s | {"a": s["a"][None]}, "['a'] must stay float32[3], got float32[1, 3]"),
        (lambda s: s | {"b": {"c": s["a"].sum()}}, "['b']['c'] must stay int32[], got float32[]"),
        (lambda s: s | {"b": {}}, "['b']['c'] must stay int32[], got None"),
        (lambda s: s | {"b": s["b"] | {"d": s["a"]}}, "['b']['d'] must stay None, got float32[3]"),
        (lambda s: s | {"a": (s["a"],)}, "['a'] must stay float32[3], got None"),
        (OrderedDict, ".structure must stay PyTreeDef({"),
    ):
        with pytest.raises(ValueError, match="zeros_like") as error:
            updated({"a": ONES, "b": {"c": COUNT}}, update)
        assert message in str(error.value)
    found = updated((jnp.float16(1), jnp.int8(1)), lambda s: (s[0] * 2.0, s[1] + 1))
    assert [(x.dtype, x.weak_type) for x in found] == [(jnp.float16, False), (jnp.int8, False)]
    # Another floating dtype than that of `init` is cast back.
    found = updated((jnp.float16(1), ONES), lambda s: (s[0].astype(jnp.float32), s[1].astype(jnp.bfloat16)))
    assert [x.dtype for x in found] == [jnp.float16, jnp.float32]


def test_wide_and_complex_state_keeps_its_dtypes_too(x64):
    made = (jnp.complex64(1j), jnp.float32(1), jnp.float64(1), jnp.complex128(1))
    update = lambda s: (s[0].astype(jnp.complex128), s[1].astype(jnp.float64), s[2].astype(jnp.float32), s[3] + 1)
    for params in (PARAMS, None):
        tx = jamp.loss_scaled(inner(made, lambda g, s: (g, update(s))))
        state = tx.update(GOOD, tx.init(PARAMS), params)[1].inner_state
        assert [x.dtype for x in state] == [x.dtype for x in made]


@pytest.mark.promotes("optax")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("inner", [optax.adamw(1e-3), optax.adamw(1e-3, mu_dtype=jnp.bfloat16)])
@pytest.mark.parametrize("wrap", [lambda tx: tx, jamp.master_params, jamp.stochastic_rounding])
def test_a_state_at_other_dtypes_than_those_of_init_is_an_error_whose_cure_is_right(inner, wrap, dtype):
    tx, params = jamp.loss_scaled(wrap(inner)), jnp.ones(3, jnp.bfloat16)
    state, grads = tx.init(params), jnp.ones(3)
    moments = lambda state, dtype: optax.tree.set(state, mu=jnp.zeros(3, dtype))
    made = optax.tree.get(state, "mu").dtype
    expected = jax.eval_shape(tx.update, grads, state, params)
    if dtype == made:
        return
    with pytest.raises(ValueError, match=rf"mu must stay {dtype.__name__}") as error:
        tx.update(grads, moments(state, dtype), params)
    cure = re.search(r"state = (optax\..*)\.$", str(error.value)).group(1)
    cured = eval(cure, {"optax": optax, "tx": tx, "params": params, "state": moments(state, dtype)})
    assert jax.eval_shape(tx.update, grads, cured, params) == expected


def test_inner_update_is_fed_zeros_not_nan_where_it_loops_or_calls_back():
    seen = []

    def halve_until_small(grads, count):
        going_on = lambda c: ~(c[0] < 1.0) & (c[1] < 1000)  # With NaN or inf it would never end.
        start = jnp.max(jnp.abs(grads["b"])), COUNT
        _, n = lax.while_loop(going_on, lambda c: (c[0] / 2, c[1] + 1), start)
        jax.debug.callback(lambda *x: seen.append([v.tolist() for v in x]), n, grads["b"])
        return grads, count + n

    wrapped = jamp.loss_scaled(inner(COUNT, halve_until_small))
    update, state = jax.jit(wrapped.update), wrapped.init(PARAMS)
    for value in (3.0, jnp.inf, jnp.nan, 3.0):
        _, state = update(GOOD | {"b": jnp.array([0.25, value])}, state, PARAMS)
    jax.effects_barrier()
    assert seen == [[2, [0.25, 3.0]], [0, [0.0, 0.0]], [0, [0.0, 0.0]], [2, [0.25, 3.0]]]  # A skip calls back too.
    assert int(state.inner_state) == 4


def test_gradients_are_selected_only_where_the_update_can_trip_over_nan():
    loop = optax.stateless(lambda g, _: lax.fori_loop(0, g[0].astype(int), lambda i, g: g / 2, g))
    for plain, expected in ((optax.trace(0.9), 2), (optax.chain(loop, optax.trace(0.9)), 3)):
        tx = jamp.loss_scaled(plain, jamp.StaticLossScale())
        found = equations(jax.make_jaxpr(tx.update)(ONES, tx.init(ONES), ONES))
        selected = sum((e.primitive.name, e.outvars[0].aval.shape) == ("select_n", (3,)) for e in found)
        assert selected == expected  # Of the momentum, which is also the update, two.


def test_debug_nans_passes_a_float16_overflow_step():
    tx, params = jamp.loss_scaled(optax.sgd(0.1, momentum=0.9)), PARAMS["w"]
    loss_fn = lambda w: jnp.sum((w.astype(jnp.float16) * jnp.float16([1, 2, 100])).astype(jnp.float32) ** 2)
    train_step = lambda state: tx.update(jamp.grad(loss_fn, state)(params), state, params)
    for step in (train_step, jax.jit(train_step)):
        with jax.debug_nans(True):
            updates, state = step(tx.init(params))
            assert_equal((optax.apply_updates(params, updates), state.grads_finite), (params, jnp.array(False)))


def test_gradient_through_applied_updates_is_the_plain_one_also_under_remat():
    def derivatives(tx, wrap=lambda step: step):
        grads = lambda p, scale: jax.grad(lambda p: scale * jnp.sum(p**4))(p)
        step = wrap(lambda p, state, scale: stepper(tx)(p, state, grads(p, scale)))
        loss_after_two = lambda p, scale: jnp.sum(step(*step(p, tx.init(p), scale), scale)[0] ** 2)
        return jax.jit(jax.grad(loss_after_two, argnums=(0, 1)))(jnp.array([0.5, -1.0, 2.0]), 1.0)

    plain = optax.chain(optax.trace(0.9), optax.scale(-0.1))
    expected, scaled = derivatives(plain), jamp.loss_scaled(plain)
    assert expected[1] != 0
    assert_close([derivatives(scaled), derivatives(scaled, jax.checkpoint)], [expected] * 2)


def compiled_text(tx, params):
    return jax.jit(stepper(tx), donate_argnums=(0, 1)).lower(params, tx.init(params), params).compile().as_text()


def test_jitted_inner_update_compiles_to_the_instructions_of_a_plain_one():
    """A call would hide the definitions, and a selection after the call needs a second buffer for each."""
    jitted = optax.GradientTransformation(ADAMW.init, jax.jit(ADAMW.update))
    texts = [compiled_text(jamp.loss_scaled(tx), PARAMS) for tx in (ADAMW, jitted)]
    first, second = (Counter(re.findall(r" = (\S+ [\w-]+)\(", text)) for text in texts)
    assert first == second


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(8, 16, 32), pytest.param((10, 40, 160), marks=pytest.mark.slow)], ids=max)
def test_compiled_lines_grow_linearly_with_the_leaves(counts):
    # No two names differ in digits alone, so that each leaf is checked by itself.
    names = ["".join(chr(97 + i // 26**k % 26) for k in range(3)) for i in range(max(counts))]

    def lines(tx, leaves):
        with jax.default_device(jax.devices("cpu")[0]):  # a GPU's text has a computation for each kernel
            return compiled_text(tx, dict.fromkeys(names[:leaves], jnp.ones(2))).count("\n")

    few, some, many = counts
    a, b, c = (lines(jamp.loss_scaled(ADAMW), n) for n in counts)
    assert (c - b) / (many - some) <= 1.2 * (b - a) / (some - few)
    # A leaf costs at most twice the lines that it costs without the skip.
    assert c - a <= 2 * (lines(ADAMW, many) - lines(ADAMW, few))
