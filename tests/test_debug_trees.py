"""jamp.debug.nonfinite_report and underflow_report: what they count, inside jit and outside, and their text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from jamp.debug import nonfinite_report, underflow_report

INF, NAN = jnp.inf, jnp.nan
TREE = {
    "block": [jnp.float32([[1, NAN, NAN], [INF, -INF, -INF]]), jnp.float16([1, 2]), jnp.int32([3])],
    "scalar": jnp.bfloat16(-INF),
    "complex": jnp.complex64([1, complex(0, INF), complex(NAN, INF)]),
    "key": jax.random.key(0),
    "empty": jnp.zeros((0, 2)),
    "none": None,
}
TEXT = """\
inf or nan in 3 of 5 leaves
  ['block'][0]: 1 inf, 2 -inf, 2 nan of 6, first at [0, 1]
  ['complex']: 1 inf, 1 nan of 3, first at [1]
  ['scalar']: 1 -inf of 1"""


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_nonfinite_report_has_paths_counts_and_the_first_index_by_leaf(wrap):
    report = wrap(nonfinite_report)(TREE)
    assert report.paths == ("['block'][0]", "['block'][1]", "['complex']", "['empty']", "['scalar']")
    assert report.inf.tolist() == [1, 0, 1, 0, 0]
    assert report.neg_inf.tolist() == [2, 0, 0, 0, 1]
    assert report.nan.tolist() == [2, 0, 1, 0, 0]
    assert report.first.tolist() == [1, -1, 1, -1, 0]
    assert all(x.dtype == jnp.int32 for x in jax.tree.leaves(report))
    assert str(report) == TEXT
    assert report


def test_nonfinite_report_of_a_finite_tree_is_false():
    for tree in ({"w": jnp.ones(3)}, {}, jnp.int32(1), [1.0]):
        assert not nonfinite_report(tree)
        assert str(nonfinite_report(tree)) == "all leaves are finite"
    assert "the array: 1 nan of 1" in str(nonfinite_report(NAN))


def test_nonfinite_report_can_be_carried_through_a_scan():
    step = lambda _, x: (None, nonfinite_report({"x": x}))
    reports = jax.lax.scan(step, None, jnp.array([[1.0, NAN], [1.0, 2.0]]))[1]
    assert reports.nan.tolist() == [[1], [0]]


TINY, NORMAL, END = 2.0**-24, 2.0**-14, 65504.0  # of float16
EDGES = [0, TINY / 2, TINY * 0.6, TINY, NORMAL * 0.99, NORMAL, 1.0]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
@pytest.mark.parametrize("scale", [1.0, 2.0**10, 2.0**-10])
def test_underflow_shares_are_those_of_a_cast_to_float16(wrap, scale):
    state = jamp.StaticLossScale(scale).init()
    grads = {"edges": jnp.float32(EDGES), "normal": jax.random.normal(jax.random.key(0), (9, 99)) * 1e-6}
    report = wrap(underflow_report)({"w": grads}, state)
    for i, x in enumerate(np.asarray(grads[name], np.float64) for name in ("edges", "normal")):
        some = x[x != 0]
        columns = (
            (1.0, report.zero_unscaled, report.subnormal_unscaled),
            (scale, report.zero_scaled, report.subnormal_scaled),
        )
        for factor, zero, subnormal in columns:
            cast = abs((some * factor).astype(np.float16))
            assert zero[i] == pytest.approx(np.mean(cast == 0))
            assert subnormal[i] == pytest.approx(np.mean((cast != 0) & (abs(some * factor) < NORMAL)))
        assert report.smallest[i] == pytest.approx(abs(some).min())
        assert report.largest[i] == pytest.approx(abs(some).max())
        assert report.headroom[i] == pytest.approx(np.log2(END / (abs(some).max() * scale)), abs=1e-4)


@pytest.mark.parametrize(
    ("dtype", "largest", "exponent"),
    [
        ("float16", 1.0, 11),
        ("float16", 2.0**-20, 31),
        ("float16", 2.0, 10),
        ("float16", 3e4, -3),
        ("bfloat16", 1.0, 123),
        ("bfloat16", 1e-30, 127),
        ("float8_e5m2", 1.0, 11),
        ("float8_e4m3fn", 1.0, 4),
    ],
)
def test_the_recommended_scale_is_the_largest_power_of_two_that_leaves_four_powers_of_two(dtype, largest, exponent):
    state = jamp.StaticLossScale(8.0).init()
    report = underflow_report([jnp.float32([largest, largest / 4]), jnp.zeros(3)], state, dtype)
    assert float(report.recommended_loss_scale) == 2.0**exponent
    end = float(jnp.finfo(dtype).max)
    assert largest * 2.0**exponent * 2**4 <= end
    assert largest * 2.0 ** (exponent + 1) * 2**4 > end or exponent == 127


def test_gradients_that_overflow_ask_for_half_the_scale_and_zeros_for_the_same():
    state = jamp.StaticLossScale(3000.0).init()
    report = underflow_report({"a": jnp.float32([1e-9, INF]), "b": jnp.ones(2) * 1e-6}, state)
    assert report.headroom.tolist()[0] == -INF
    assert float(report.recommended_loss_scale) == 1024.0  # half of 2048, the power of two below
    zeros = underflow_report(jnp.zeros(3), state)
    assert (zeros.headroom.tolist(), float(zeros.recommended_loss_scale)) == ([INF], 2048.0)
    assert "overflows" in str(report)
    assert "all are 0" in str(zeros)


def test_the_text_is_a_table_and_other_leaves_are_left_out():
    grads = {"w": jnp.float32([1e-8, 1e-3]), "n": jnp.int32([1]), "_overwrite_with_gradient": {"s": jnp.ones(1)}}
    tree = {"opt": jamp.StaticLossScale(2.0**10).init()}
    title, header, *rows = str(underflow_report(grads, tree)).splitlines()
    assert title == "float16 gradients at loss scale 1024; recommended: 2.09715e+06 (2**21)"
    assert header.split()[0] == "leaf"
    assert [row.split() for row in rows] == [["['w']", "50.0%", "0.0%", "0.0%", "50.0%", "2**16.0"]]
    assert str(underflow_report({}, tree)).startswith("float16 gradients")


def test_underflow_report_wants_a_floating_dtype_and_a_state():
    with pytest.raises(ValueError, match=r"dtype must be floating, such as jnp\.float16, got dtype='int8'"):
        underflow_report(jnp.ones(1), jamp.StaticLossScale().init(), jnp.int8)
    with pytest.raises(ValueError, match="loss-scale state"):
        underflow_report(jnp.ones(1), {})
