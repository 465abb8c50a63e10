"""all_finite: exact for every dtype, size and producer, and total on every kind of leaf."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxprs import equations
from steps import NO_GRADIENTS
from trees import assert_equal

import jamp

BAD = [np.inf, -np.inf, np.nan]
DTYPES = [jnp.float32, jnp.float16, jnp.bfloat16, jnp.float64, jnp.complex64]
OTHERS = [jnp.complex128, jnp.float8_e5m2, jnp.float8_e4m3fn]


@pytest.fixture
def dtype(request):
    with jax.enable_x64(request.param in (jnp.float64, jnp.complex128)):
        yield request.param


def every(dtypes):
    return pytest.mark.parametrize("dtype", dtypes, ids=lambda dtype: dtype.__name__, indirect=True)


@every(DTYPES + OTHERS)
def test_inf_or_nan_in_any_leaf_is_found_and_finite_numbers_of_any_size_are_finite(dtype):
    info = jnp.finfo(dtype)
    finite = np.array([info.max, -info.max, info.tiny, info.smallest_subnormal, 1, 0, -0.0, info.max], dtype)
    # 70 leaves of one shape make nine groups.
    shapes = [(8,)] * (70 if dtype == jnp.float32 else 3) + [(), (1,), (3, 2), (0,), (2, 1, 2)]
    leaves = [np.resize(np.roll(finite, i), shape).astype(dtype) for i, shape in enumerate(shapes)]
    check = jax.jit(jamp.all_finite)
    assert check([*leaves, np.arange(3), np.array([True])])
    assert check([np.full_like(x, info.max) for x in leaves])
    for i, x in enumerate(leaves):
        for position in {0, x.size - 1} if x.size else ():
            for value in [*BAD, *(complex(0, v) for v in BAD if np.iscomplexobj(x))]:
                bad = [*leaves]
                bad[i] = x.copy()
                bad[i].flat[position] = value  # In a float8 without inf, this is NaN.
                assert not check(bad), (i, position, value)


def test_the_check_is_numpys_isfinite_for_every_bit_pattern():
    random = np.random.default_rng(0)
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float8_e5m2, jnp.float8_e4m3fn, jnp.float32):
        bits = 8 * np.dtype(dtype).itemsize
        x = np.arange(2 ** min(bits, 16), dtype=f"uint{bits}")
        if bits == 32:  # every sign, exponent and beginning of a mantissa, with some end
            x = x << 16 | random.integers(2**16, size=x.size, dtype=x.dtype)
        x = x.view(dtype)
        np.testing.assert_array_equal(jax.vmap(jamp.all_finite)(x), np.isfinite(x.astype(np.float32)))


def test_inf_or_nan_anywhere_in_a_large_leaf_is_found():
    shapes = [(131072,), (16, 8192), (3, 43696), (65537,), (1, 65536), (2**7, 3, 2**8), (65537, 2)]
    leaves, check = [np.full(s, 3e38, np.float32) for s in shapes], jax.jit(jamp.all_finite)
    for x in leaves:
        for position in {0, 2**13, 12345, *np.linspace(0, x.size - 1, 9, dtype=int)}:
            for value, finite in [*((bad, False) for bad in BAD), (3e38, True)]:
                x.flat[position] = value
                assert check(leaves) == finite, (x.shape, position, value)
    assert not check([np.full_like(x, np.nan) for x in leaves])


def producers(dtype):
    """What XLA can move, merge or fold into the check. It overflows at a third of the largest number and not at 1."""
    largest = float(jnp.finfo(dtype).max)
    third = largest / 3
    return {
        "factor 8": lambda x: x * 8.0,
        "odd factor": lambda x: x * 7.3,
        "negative factor": lambda x: x * -3.5,
        "negation": lambda x: -(x * 8.0),
        "large factor": lambda x: x * (largest / 2),
        "two factors": lambda x: (x * 20.0) * 20.0,
        "divisor": lambda x: x / 0.125,
        "odd divisor": lambda x: x / 0.137,
        "sum": lambda x: x + (largest - third / 2),
        "difference": lambda x: x - -largest,
        "sum with itself": lambda x: x + x + x + x,
        "sum with thirds": lambda x: x + third * 0.9 + third + third,
        "square": lambda x: x * x,
        "cast": lambda x: (x * (1e6 / third)).real.astype(jnp.float16),
        "selection": lambda x: jnp.where(x != 0, x * 8.0, x),
        "outer product": lambda x: jnp.outer(x, jnp.full(3, 8.0, dtype)),
        "broadcast": lambda x: jnp.broadcast_to((x * 8.0)[:, None], (x.size, 3)),
        "reduction": lambda x: jnp.sum(jnp.stack([x] * 8), axis=0),
        "exponential": lambda x: jnp.exp(x * (1000 / third)),
    }


# What these produce depends on how XLA folds them.
FOLDED = {
    "factors that cancel": lambda x: (x * 8.0) * 0.25,
    "logarithm of 0": lambda x: jnp.log(x - x),
    "reciprocal of a difference": lambda x: 1.0 / (x - x + 0.0),
}


@pytest.mark.slow_after(3)
@every(DTYPES)
def test_check_is_exact_behind_any_producer(dtype):
    """Whatever precedes it in one jit, and whether or not that jit returns the gradients too."""

    @functools.partial(jax.jit, static_argnums=1)
    def check(x, returned):
        made = {name: [f(x), f(jnp.ones_like(x))] for name, f in (producers(dtype) | FOLDED).items()}
        return made if returned else None, {name: jamp.all_finite(tree) for name, tree in made.items()}

    for size, returned in ((3, True), (3, False), (2**16, False)) if dtype == jnp.float32 else ((3, True),):
        for value, finite in ((1.0, True), (float(jnp.finfo(dtype).max) / 3, False)):
            made, found = check(jnp.ones(size, dtype).at[size // 2].set(value), returned)
            assert {name: bool(found[name]) for name in producers(dtype)} == dict.fromkeys(producers(dtype), finite)
            for name, leaves in (made or {}).items():
                assert found[name] == all(np.isfinite(np.asarray(x).astype(np.complex128)).all() for x in leaves), name


def test_leaves_of_one_type_and_name_are_combined_before_they_are_reduced():
    found = lambda tree: [e.primitive.name for e in equations(jax.make_jaxpr(jamp.all_finite)(tree))]
    leaf, reductions = jnp.ones((4, 4)), lambda tree: found(tree).count("reduce_max")
    blocks = {f"layer_{i}": {"up": leaf} for i in range(3)}
    assert reductions(blocks) == reductions({f"w{i}": leaf for i in range(8)}) == 1
    assert reductions({f"w{i}": leaf for i in range(9)}) == 2
    assert reductions(blocks | {"embed": leaf}) == 2  # It may lie transposed to the others in memory.
    assert reductions([leaf, leaf.astype(jnp.complex64)]) == reductions([leaf, leaf[0]]) == 2


def test_the_program_does_not_depend_on_the_devices_of_the_process_that_traces_it(monkeypatch):
    tree = {k: {"w": jnp.ones((4, 4))} for k in "abc"}
    programs = {str(jax.make_jaxpr(jamp.all_finite)(tree))}
    for count in (1, 2, 8):
        monkeypatch.setattr(jax, "device_count", lambda n=count: n)
        jax.clear_caches()
        programs.add(str(jax.make_jaxpr(jamp.all_finite)(tree)))
    assert len(programs) == 1


@pytest.mark.parametrize("precision", ["BF16_BF16_F32_X3", "F16_F16_F16", "TF32_TF32_F32"])
def test_the_check_compiles_under_a_default_precision_that_products_do_not(precision):
    """XLA:CPU compiles no product of two vectors inside a fusion in the first two, and no product in the third."""
    with jax.default_matmul_precision(precision):
        keep_if_finite = jax.jit(lambda x: jnp.where(jamp.all_finite(2 * x), x, 0.0))
        assert [keep_if_finite(jnp.float32([x, 1.0])).sum() for x in (3.0, np.nan)] == [4.0, 0.0]


def test_sizes_may_be_symbolic():
    rows, columns = jax.export.symbolic_shape("rows, columns")
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, columns), (columns, rows), (columns,), (3,))]
    exported = jax.export.export(jax.jit(jamp.all_finite))(shapes)
    for x in (1.0, np.nan):
        given = [np.full(s, 1.0, np.float32) for s in ((2, 5), (5, 2), (5,), (3,))]
        given[1][4, 1] = x
        assert exported.call(given) == np.isfinite(x)


def test_what_is_not_a_gradient_is_finite_and_python_numbers_are_checked():
    for tree in (None, {}, [], (), optax.EmptyState(), {"a": {}, "b": [None]}, NO_GRADIENTS, jnp.zeros((0, 3))):
        assert_equal(jamp.all_finite(tree), jnp.array(True))
        assert jamp.all_finite([tree, 1.0, 2, 3j, np.float64(1.0)])
        for bad in (math.inf, complex(0, math.nan), jnp.float32(jnp.nan), np.float32(-np.inf)):
            assert not jamp.all_finite([tree, 1.0, bad])
