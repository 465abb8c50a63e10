"""autocast_report: what it says of each operation, its sums, its text, and the hints."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp


def rows(fun, *args, **kwargs):
    return {row.operation: row for row in jamp.autocast_report(fun, **kwargs)(*args).rows}


def layer(w, b, x):
    return jax.nn.softmax(jnp.tanh(x @ w + b))


def conv(x, w):
    return lax.conv(x, w, (1, 1), "SAME")


ARGS = jnp.ones((8, 16)), jnp.ones(16), jnp.ones((4, 8))
SQUARE = jnp.ones((4, 4))


def test_each_operation_has_its_category_dtypes_count_and_source_line():
    found = rows(layer, *ARGS)
    product = found["dot_general"]
    assert (product.category, product.count) == ("compute", 1)
    assert (product.before, product.after) == ("float32, float32 -> float32", "float16, float16 -> float16")
    assert product.source == f"test_autocast_report.py:{layer.__code__.co_firstlineno + 1} (layer)"
    assert {row.source for row in found.values()} == {product.source}
    assert (found["tanh"].category, found["tanh"].after) == ("widest", "float32 -> float32")
    assert (found["exp"].category, found["exp"].after) == ("float32", "float32 -> float32")
    found = rows(layer, *ARGS, compute_dtype=jnp.bfloat16, rules={"tanh": "float32"})
    assert found["dot_general"].after == "bfloat16, bfloat16 -> bfloat16"
    assert (found["tanh"].category, found["tanh"].reason) == ("float32", "a rule of yours")


@pytest.mark.parametrize(
    ("fun", "shapes", "flops"),
    [
        (jnp.matmul, [(3, 5), (5, 7)], 2 * 3 * 5 * 7),
        (jnp.matmul, [(2, 3, 5), (2, 5, 7)], 2 * 2 * 3 * 5 * 7),
        (conv, [(2, 3, 8, 8), (4, 3, 5, 5)], 2 * (2 * 4 * 64) * (3 * 25)),
        (jnp.tanh, [(3, 5)], 15),
        (jnp.sum, [(3, 5)], 15),
        (jnp.transpose, [(3, 5)], 0),
    ],
)
def test_flops_are_counted(fun, shapes, flops):
    assert sum(row.flops for row in rows(fun, *map(jnp.ones, shapes)).values()) == flops


def test_the_body_of_a_scan_counts_for_every_step_and_a_call_for_each_call():
    call = jax.jit(lambda x: x @ x)
    fun = lambda x: lax.scan(lambda c, _: (call(call(c)), None), x, None, length=5)[0]
    assert rows(fun, SQUARE)["dot_general"].count == 10
    grad = jax.grad(lambda w, b, x: layer(w, b, x).max())
    assert sum(r.count for r in jamp.autocast_report(grad)(*ARGS).rows if r.operation == "dot_general") == 2


def test_the_share_in_16_bit_is_that_of_the_flops():
    share = lambda fun, n: jamp.autocast_report(fun)(jnp.ones((n, n))).share_16_bit
    assert share(lambda x: jnp.exp(x @ x), 8) == pytest.approx(1024 / (1024 + 64))
    assert share(jnp.exp, 3) == 0.0
    assert math.isnan(share(jnp.transpose, 2))


def test_an_operation_inside_an_installed_package_has_the_line_that_calls_it():
    def mine(x):
        return jax.nn.logsumexp(jnp.var(x, 0))

    sources = {row.source for row in jamp.autocast_report(mine)(SQUARE).rows}
    assert sources == {f"test_autocast_report.py:{mine.__code__.co_firstlineno + 1} (mine)"}


def test_what_stays_float32_has_a_reason_and_a_hint_if_it_is_big():
    def fun(x):
        h = jamp.full_precision(jnp.matmul)(x, x)
        return jnp.matmul(h, h, precision="highest") @ x

    report = jamp.autocast_report(fun)(jnp.ones((64, 64)))
    assert len(report.hints) == 2
    assert "dot_general (33.3% of the FLOPs) stays float32: it is inside jamp.full_precision" in report.hints[0]
    assert "its precision (HIGHEST, or an algorithm) was asked for in the code" in report.hints[1]
    assert report.share_16_bit == pytest.approx(1 / 3)
    assert rows(lambda x: (x @ x) + 70000.0, SQUARE)["add"].reason.endswith("a constant that 16 bit cannot hold")
    product = lambda x: lax.dot(x, x, preferred_element_type=jnp.float32)
    row = rows(product, SQUARE.astype(jnp.bfloat16))["dot_general"]
    assert row.before == row.after == "bfloat16, bfloat16 -> float32"
    assert "other dtypes" in row.reason


def test_nothing_is_computed_and_the_text_is_a_table_with_aligned_columns():
    texts = []
    jax.eval_shape(lambda *args: texts.append(str(jamp.autocast_report(layer)(*args))), *ARGS)
    title, empty, header, *lines = texts[0].split("Hints")[0].rstrip().splitlines()
    assert title.startswith("autocast to float16: ")
    assert title.endswith("% of the FLOPs in 16 bit")
    assert not empty
    assert header.split() == ["operation", "category", "count", "FLOPs", "before", "after", "source"]
    assert lines.pop() == "... and 2 rows of operations that only move data, in `.rows`"
    starts = [header.index(name) for name in header.split()]
    assert all(line[start - 1] == " " != line[start] for line in lines for start in starts[1:])
    assert str(jamp.autocast_report(lambda x: x)(1.0)).startswith("autocast to float16: no FLOPs counted")
