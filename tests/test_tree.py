"""all_finite and cast_floating: exact, and total on every kind of leaf."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st

import jamp

NO_GRADIENTS = {
    "int": jnp.int32([3]),
    "uint": jnp.uint8([255]),
    "bool": jnp.array([True]),
    "key": jax.random.key(0),
    "float0": np.zeros(2, jax.dtypes.float0),
    "none": None,
    "masked": optax.MaskedNode(),
    "empty": jnp.zeros((0, 3)),
    "object": object(),
    "string": "inf",
}
DTYPES = {
    jnp.float16: [np.inf, -np.inf, np.nan],
    jnp.bfloat16: [np.inf, -np.inf, np.nan],
    jnp.float32: [np.inf, -np.inf, np.nan],
    jnp.complex64: [np.inf, -np.inf, np.nan, 1j * np.inf, complex(0, -math.inf), complex(0, math.nan)],
    jnp.float8_e5m2: [np.inf, -np.inf, np.nan],
    jnp.float8_e4m3fn: [np.nan],  # it has no inf
}
quick = settings(deadline=None, max_examples=60, derandomize=True, database=None)


def finite_leaf(shape, dtype, rng):
    """Every size that the dtype has, from its smallest subnormal to its largest number."""
    info = jnp.finfo(dtype)
    sizes = [float(x) for x in (info.max, -info.max, info.tiny, info.smallest_subnormal, 1.0, 0.0, -0.0)]
    return rng.choice(sizes, shape).astype(dtype)


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
def test_inf_minus_inf_or_nan_is_found_in_every_dtype(dtype):
    for value in DTYPES[dtype]:
        assert not jamp.all_finite([jnp.ones(3, dtype), jnp.array([1, value], dtype)])


@given(
    st.sampled_from(list(DTYPES)),
    st.lists(st.sampled_from([(), (1,), (5,), (2, 3)]), min_size=1, max_size=11),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
@quick
def test_inf_minus_inf_or_nan_anywhere_is_found_and_a_finite_gradient_of_any_size_is_finite(dtype, shapes, seed, spoil):
    rng = np.random.default_rng(seed)
    leaves = [finite_leaf(shape, dtype, rng) for shape in shapes]
    if spoil:
        leaf = leaves[rng.integers(len(leaves))]
        leaf[np.unravel_index(rng.integers(leaf.size), leaf.shape)] = DTYPES[dtype][rng.integers(len(DTYPES[dtype]))]
    assert bool(jamp.all_finite(leaves)) == all(np.isfinite(x.astype(np.complex128)).all() for x in leaves)


@given(
    st.lists(
        st.lists(st.floats(width=32, allow_subnormal=True), min_size=3, max_size=3).map(np.float32),
        min_size=1,
        max_size=4,
    )
)
@quick
def test_the_check_is_numpys_isfinite(leaves):
    assert bool(jamp.all_finite(leaves)) == all(np.isfinite(x).all() for x in leaves)


@pytest.mark.parametrize("shape", [(2**16,), (2**16 + 1,), (3, 2**15), (8, 2**13), (2**7, 3, 2**8), (65537, 2)])
def test_a_large_array_is_checked_to_its_last_element(shape):
    for number in (1, 3):
        for position in (0, 2**13, 12345, np.prod(shape) - 1):
            x = np.full(shape, 3e38, np.float32)
            assert jamp.all_finite([x] * number)
            x.flat[position] = np.nan
            assert not jamp.all_finite([np.ones(shape, np.float32)] * (number - 1) + [x])


def test_many_nonfinite_numbers_are_not_too_many():
    assert not jamp.all_finite([jnp.full(2**22, jnp.nan)] * 3)


def test_float64_is_checked_as_float64(x64):
    assert jamp.all_finite([jnp.array([1e300, 5e-324], jnp.float64)] * 9)
    assert not jamp.all_finite([jnp.ones(2), jnp.array([1e300, jnp.inf], jnp.float64)])


# Whatever XLA can move, merge or fold into the check: the values are what counts.
PRODUCERS = {
    "factor 8": lambda g: g * 8.0,
    "factor 3.5": lambda g: g * 3.5,
    "huge factor": lambda g: g * 3e38,
    "two factors": lambda g: (g * 1e3) * 1e3,
    "divisor": lambda g: g / 0.125,
    "odd divisor": lambda g: g / 3e-3,
    "sum": lambda g: g + 3e38,
    "sum with itself": lambda g: g + g + g + g,
    "square": lambda g: g * g,
    "negation": lambda g: -(g * 8.0),
    "cast": lambda g: (g * 1e-33).astype(jnp.float16),
    "selection": lambda g: jnp.where(g > 0, g * 8.0, 0.0),
    "outer product": lambda g: jnp.outer(g, jnp.full(3, 8.0)),
    "broadcast": lambda g: jnp.broadcast_to((g * 8.0)[:, None], (g.size, 3)),
    "reduction": lambda g: jnp.sum(jnp.stack([g] * 8), axis=0),
    "exponential": lambda g: jnp.exp(g * 1e-36),
}


@functools.partial(jax.jit, static_argnums=0)
def check_behind_every_producer(number, g):
    others = jnp.ones_like(g)
    return {name: jamp.all_finite([f(g)] + [f(others)] * (number - 1)) for name, f in PRODUCERS.items()}


@pytest.mark.parametrize(("number", "size"), [(1, 3), (2, 3), (8, 3), (11, 3), (1, 2**16)])
def test_the_check_is_exact_behind_an_overflowing_constant_factor_in_one_jit(number, size):
    for value, finite in ((1e38, False), (1e-3, True)):
        found = check_behind_every_producer(number, jnp.full(size, 1e-3, jnp.float32).at[size // 2].set(value))
        # 1e-3 * 3e38 and 1e-3 + 3e38 stay below the largest float32, 3.4e38; 1.0 * 8, squares and casts too.
        assert {name: bool(ok) for name, ok in found.items()} == dict.fromkeys(PRODUCERS, finite)


@pytest.mark.parametrize("name", NO_GRADIENTS)
def test_no_gradient_is_finite(name):
    assert jamp.all_finite({name: NO_GRADIENTS[name]})
    assert not jamp.all_finite({name: NO_GRADIENTS[name], "w": jnp.array([jnp.inf])})


@pytest.mark.parametrize("tree", [None, {}, [], (), optax.EmptyState(), {"a": {}, "b": [None]}])
def test_an_empty_tree_is_finite(tree):
    ok = jamp.all_finite(tree)
    assert ok
    assert ok.dtype == jnp.bool_
    assert ok.shape == ()


def test_python_numbers_and_scalars_are_checked():
    assert jamp.all_finite([1.0, 2, 3j, jnp.float32(1.0), np.float64(1.0)])
    for bad in (math.inf, complex(0, math.nan), jnp.float32(jnp.nan), np.float32(-np.inf)):
        assert not jamp.all_finite([1.0, bad])


@pytest.mark.parametrize("context", ["jit", "vmap", "scan"])
def test_the_check_works_under(context):
    rows = jnp.array([[1.0, 2.0], [jnp.nan, 2.0], [3.0, -jnp.inf], [3e38, 1.0]])
    over_rows = {
        "jit": jax.jit(lambda rows: jnp.stack([jamp.all_finite({"w": row}) for row in rows])),
        "vmap": jax.vmap(lambda row: jamp.all_finite({"w": row})),
        "scan": lambda rows: jax.lax.scan(lambda carry, row: (carry, jamp.all_finite({"w": row})), 0, rows)[1],
    }[context]
    assert over_rows(rows).tolist() == [True, False, False, True]


def test_axes_named_by_axis_name_agree():
    rows = jnp.array([[1.0, 2.0], [jnp.nan, 2.0]])
    check = jax.vmap(lambda row: jamp.all_finite({"w": row}, axis_name="i"), axis_name="i")
    assert check(rows).tolist() == [False, False]
    assert check(jnp.ones((2, 2))).tolist() == [True, True]
    both = jax.vmap(jax.vmap(lambda x: jamp.all_finite(x, axis_name=("i", "j")), axis_name="j"), axis_name="i")
    assert both(rows).tolist() == [[False, False]] * 2


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn])
def test_cast_floating_casts_floating_arrays_and_leaves_the_rest(dtype):
    tree = NO_GRADIENTS | {"w": jnp.float32([1.0]), "h": jnp.float16([1.0]), "c": jnp.complex64([1j]), "n": 2.0}
    cast = jamp.cast_floating(tree, dtype)
    assert jax.tree.structure(cast) == jax.tree.structure(tree)
    for name in ("w", "h", "empty"):
        assert cast[name].dtype == dtype
        assert cast.pop(name).shape == tree.pop(name).shape
    assert all(x is y for x, y in zip(jax.tree.leaves(cast), jax.tree.leaves(tree), strict=True))


def test_cast_floating_handles_float64(x64):
    assert jamp.cast_floating(jnp.ones(1, jnp.float64), jnp.float16).dtype == jnp.float16
    assert jamp.cast_floating(jnp.ones(1, jnp.float16), jnp.float64).dtype == jnp.float64


def test_large_leaves_are_combined_where_their_names_agree_for_others_may_lie_transposed():
    def additions(tree):
        return str(jax.make_jaxpr(jamp.all_finite)(tree)).count("= add ")

    leaf = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    blocks = {"layer_1": {"up": leaf}, "layer_2": {"up": leaf}, "layer_3": {"up": leaf}}
    assert additions(blocks) == 2
    assert additions({f"w{i}": leaf for i in range(3)}) == 2
    assert additions(blocks | {"embed": leaf}) == 2 + 7  # the embedding by itself, in eight slices
    small = jax.ShapeDtypeStruct((256,), jnp.float32)
    assert additions({"bias": small, "scale": small}) == 1
