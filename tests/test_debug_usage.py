"""Reports of `jamp.debug` that end with a next step, and functions that fail for reasons of their own."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxprs import INTERNAL

import jamp
from jamp.debug import compare, find_nonfinite, memory_curve, nonfinite_report, rounding_report

PARAMS, BATCH = {"w": jnp.ones((4, 4))}, jnp.ones((2, 4))
TX = jamp.loss_scaled(optax.adam(1e-3))
STATE = TX.init(PARAMS)


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def test_a_function_that_fails_for_another_reason_keeps_its_error():
    for call in (lambda: find_nonfinite(loss_fn)(), lambda: find_nonfinite(loss_fn)({}, BATCH)):
        with pytest.raises((TypeError, KeyError), match=r"params|'w'"):
            call()
    of_state = lambda state, batch: jnp.sum(batch) * jamp.get_loss_scale(state)
    assert not find_nonfinite(of_state)(STATE, BATCH)  # It may be an argument.


def test_a_callable_model_with_parameters_is_a_function_and_a_tree():
    @jax.tree_util.register_pytree_node_class
    class Model:
        def __init__(self, w):
            self.w = w

        def __call__(self, x):
            return jnp.sum(x @ self.w)

        def tree_flatten(self):
            return (self.w,), None

        @classmethod
        def tree_unflatten(cls, _, leaves):
            return cls(*leaves)

    model = Model(jnp.full((4, 4), jnp.nan))
    assert nonfinite_report(model)
    assert find_nonfinite(model)(BATCH)


def test_of_parameters_that_are_nan_the_next_step_is_to_keep_the_last_finite_ones():
    bad = {"w": PARAMS["w"].at[0, 1].set(jnp.nan)}
    text = str(find_nonfinite(loss_fn, grad=True)(bad, BATCH))
    words = " ".join(text.split())
    assert "next if an earlier step made these, pass the parameters from before it" in words
    assert "tx = jamp.skip_nonfinite(tx)" in words
    assert "jamp.get_grads_finite(opt_state)" in words
    assert max(map(len, text.splitlines())) <= 100
    # Of inf, an operation makes NaN. What the report says of it does not hide where it comes from.
    masked = lambda params, batch: jax.nn.softmax(batch @ params["w"]).sum()
    text = str(find_nonfinite(masked)({"w": PARAMS["w"] * jnp.inf}, BATCH))
    assert "nan from inf - inf" in text
    assert "mask" not in text
    assert "skip_nonfinite" in text
    text = str(find_nonfinite(loss_fn, grad=True)(PARAMS, BATCH.at[1, 0].set(jnp.inf)))
    assert text.splitlines()[-1] == "  next    repair the example or leave it out of the batch"
    assert "skip_nonfinite" not in text


def test_what_the_next_step_says_is_true():
    """A step is skipped in float32 too, and donated parameters are the last finite ones."""
    tx, params = jamp.skip_nonfinite(optax.sgd(0.1, momentum=0.9)), jax.tree.map(jnp.copy, PARAMS)
    opt_state = tx.init(params)

    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    step = jax.jit(train_step, donate_argnums=(0, 1))
    params, opt_state, _ = step(params, opt_state, BATCH)
    assert jamp.get_grads_finite(opt_state)
    kept = jax.device_get((params, opt_state.inner_state))
    params, opt_state, loss = step(params, opt_state, BATCH * jnp.inf)
    assert not jnp.isfinite(loss)
    assert not jamp.get_grads_finite(opt_state)
    jax.tree.map(np.testing.assert_array_equal, (params, opt_state.inner_state), kept)


def test_the_hint_about_a_variance_is_given_where_there_is_one():
    x = jnp.float32([1000.0, 1000.0, 1000.1])
    variance = lambda x: jnp.mean(x**2) - jnp.mean(x) ** 2 - 1
    product = lambda x: jnp.mean(x * x) + 1e-6 - jnp.square(x.mean()) - 1
    for fun in (
        lambda x: jnp.sqrt(variance(x)),
        lambda x: jax.lax.rsqrt(product(x) + 1e-6),
        lambda x: jax.jit(jnp.sqrt)(jnp.maximum(variance(x), -1.0)),
    ):
        found = find_nonfinite(fun)(x).finding
        assert found.cause.endswith("a difference of squares")
        assert "jnp.var" in found.cure
    for fun in (
        lambda x: jnp.sqrt(x - 2000),
        lambda x: jnp.sqrt(1 - x**2),
        lambda x: jax.lax.rsqrt(x.min() - x.mean() ** 2),
        lambda x: jnp.log(variance(x)),
    ):
        found = find_nonfinite(fun)(x).finding
        assert "squares" not in found.cause
        assert "var" not in found.cure
        assert found.cure.startswith("clip it")


def scanned(ws, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(jnp.tanh(x @ w) @ w.T), None), x, ws)[0] ** 2)


def point(budget, temporary, flops, platform="cpu"):
    return jamp.debug.MemoryPoint(budget, temporary, temporary, flops, platform)


def test_a_curve_whose_rows_are_equal_says_why():
    text = lambda *points: str(jamp.debug.MemoryCurve(points))
    assert "XLA for CPUs often removes checkpoints outside jax.lax.scan" in text(point(1.0, 8, 1), point(0, 8, 2))
    assert "Is the budget passed on" in text(point(1.0, 8, 1), point(0, 8, 1))
    for points in (
        [point(1.0, 8, 1), point(0, 7, 2)],
        [point(1.0, 8, 1)],
        [point(1.0, 8, 1, "gpu"), point(0, 8, 2, "gpu")],
    ):
        assert "note" not in text(*points)
    shapes = jax.ShapeDtypeStruct((4, 16, 16), jnp.float32), jax.ShapeDtypeStruct((512, 16), jnp.float32)
    curve = memory_curve(lambda budget: jax.grad(jamp.recompute(scanned, budget)), (1.0, 0))(*shapes)
    assert {x.platform for x in curve.points} == {jax.default_backend()}
    assert "note" not in str(curve)
    ignored = memory_curve(lambda budget: jax.grad(scanned), (1.0, 0))(*shapes)
    assert "Is the budget passed on" in str(ignored)


def test_what_the_note_of_a_curve_says_is_true_of_xla_for_cpus():
    def loop(ws, x):
        for w in ws:
            x = jnp.tanh(jnp.tanh(x @ w) @ w.T)
        return jnp.mean(x**2)

    if jax.default_backend() != "cpu":
        pytest.skip("for CPUs")
    types = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32), jax.ShapeDtypeStruct((1024, 64), jnp.float32)
    bytes_of = lambda fun: jax.jit(jax.grad(fun)).lower(*types).compile().memory_analysis().temp_size_in_bytes
    scan = lambda ws, x: jnp.mean(jax.lax.scan(jax.checkpoint(lambda x, w: (loop([w], x) + x, None)), x, ws)[0])
    assert bytes_of(loop) == bytes_of(jax.checkpoint(loop))
    assert bytes_of(scan) > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float16, jamp.Float8(min_size=8), jamp.MXFP8(min_size=32)], ids=str)
def test_no_report_shows_the_name_of_an_internal_primitive(dtype):
    params = {"w": jnp.ones((32, 32)), "v": jnp.full((32, 32), 0.1)}
    two = lambda p, x: jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"]) ** 2)
    tangent = lambda fun: lambda p, x: jax.jvp(lambda p: fun(p, x), (p,), (p,))[1]
    cast, x = jamp.autocast(two, dtype), jnp.ones((32, 32))
    functions = [jax.grad(cast), cast]
    pairs = [(two, cast), (jax.grad(two), jax.grad(cast)), (cast, lambda p, x: 2 * cast(p, x.T + 1))]
    if dtype == jnp.float16:  # 8-bit products have no forward-mode derivative.
        functions.append(tangent(cast))
        pairs.append((tangent(two), tangent(cast)))
    searches = [
        find_nonfinite(fun)({name: p * jnp.float32(scale) for name, p in params.items()}, x)
        for fun in functions
        for scale in (1.0, 3000.0, 1e6, 3e38)
    ]
    compared = [compare(fun, other)(params, x) for fun, other in pairs]
    report = rounding_report(cast if dtype == jnp.float16 else two, jnp.bfloat16)(params, x)
    texts = list(map(str, [*searches, *compared, report]))
    for search in searches:
        texts += [y.primitive for y in search.findings] + [text for y in search.findings for text in y.path]
    for row in [row for found in compared for row in (*found.rows, *found.differences)] + list(report.rows):
        texts.append(row.operation)
    assert any(search.findings for search in searches)
    assert all(found.rows for found in compared)
    for text in texts:
        shown = text.replace("rounded to ", "")
        assert not re.findall(rf"(?<![\w.])({'|'.join(INTERNAL)})(?!\w)", shown)


def test_a_row_of_rounding_names_the_errors_that_there_are():
    report = rounding_report(lambda x: jnp.sin(x.astype(jnp.float16)).astype(jnp.float32), "float16")(jnp.ones(4) / 3)
    assert report.rows
    assert not [row for row in report.rows if re.search(r" ,| $", str(row))]
