"""autocast on every public function of arrays that is found in JAX and optax, of a product in 16 bit."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, nn
from programs import by_hand
from trees import avals

import jamp

N = 32  # of N * N elements, a run is computed again by the backward pass
STATS = ["beta", "gamma", "norm", "vonmises"]  # the others are made of the same operations
# The modules, and at least how many functions are found in each.
MODULES = {
    "jax.numpy": 160,
    "jax.numpy.linalg": 15,
    "jax.numpy.fft": 10,
    "jax.nn": 20,
    "jax.scipy.special": 40,
    "jax.scipy.linalg": 10,
    **dict.fromkeys((f"jax.scipy.stats.{name}" for name in STATS), 2),
    "optax.losses": 15,
}
# Not for arrays, without a derivative that is a number, or large.
SKIPPED = "array_str cond diagflat dlpack empty file hankel kron load outer pinv print repr save stage svd tensordot"
SKIPPED += " expn"  # JAX's own rule for it leaks a tracer if its jaxpr is traced before it is differentiated
SKIPPED += " toeplitz circulant lstsq matrix_norm"
ITERATIVE = ("exp1", "expi")  # loops that take ten seconds for all elements: they are given one row
SHAPE = jax.ShapeDtypeStruct((N, N), jnp.float32)


def is_traceable(fun, *args):
    """Whether the results of a function are arrays, some of them floating."""
    try:
        results = jax.tree.leaves(jax.eval_shape(fun, *args))
    except Exception:
        return False
    dtypes = [getattr(x, "dtype", None) for x in results]
    return None not in dtypes and any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)


def functions(module):
    """The functions of a module that take one, two or three arrays, as functions of two matrices."""
    found = {}
    for name in sorted(dir(module)):
        fun = None if name.startswith("_") or any(s in name for s in SKIPPED.split()) else getattr(module, name, None)
        of_a_library = str(getattr(fun, "__module__", None)).startswith(("jax", "optax"))
        if callable(fun) and of_a_library and not isinstance(fun, type):
            count = next((n for n in (1, 2, 3) if is_traceable(fun, *[SHAPE] * n)), 0)
            given = (lambda *xs, fun=fun: fun(*(x[:1] for x in xs))) if name in ITERATIVE else fun
            found |= {f"{module.__name__}.{name}": of_products(given, count)} if count else {}
    return found


def of_products(fun, count):
    # A Python bool among the results (cho_factor) is an array under autocast.
    return lambda dot, x, w: jax.tree.map(jnp.asarray, fun(*(dot(x, w), dot(x[::-1], w), x)[:count]))


def matrices():
    """Products x @ w in three domains: (0.1, 0.9), normal numbers, and (1.1, 3). The columns of w sum to 1."""
    rng = np.random.default_rng(0)
    x = np.stack([rng.uniform(0.1, 0.9, (N, N)), rng.normal(size=(N, N)), rng.uniform(1.1, 3, (N, N))])
    w = np.exp(8 * rng.normal(size=(N, N)))
    return np.float32(x), np.float32(w / w.sum(0))


def weighed(results):
    """A number that depends on every floating result."""
    leaves = [x.real + x.imag for x in jax.tree.leaves(results) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return sum((x * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)).sum() for x in leaves)


def traced(fun, *args):
    """The results in each domain and, if there is one, the gradient. Traced once, because that takes longest."""
    loss = lambda x, w: (weighed(results := fun(x, w)), results)
    grad = jax.grad(loss, (0, 1), has_aux=True)
    in_each_domain = lambda f: jax.jit(jax.vmap(f, (0, None))).trace(*args)
    try:
        return in_each_domain(grad)
    except Exception:
        assert not is_traceable(grad, SHAPE, SHAPE)
        return in_each_domain(lambda x, w: (fun(x, w),))


def evaluate(found, dtype, change):
    """Of functions by name, the results and gradients as float64 or complex128.

    Each is compiled by itself: XLA:CPU deadlocks in the execution of programs of dozens of independent functions.
    """
    args = [dtype(x) for x in matrices()]
    wide = lambda x: np.asarray(x).astype(np.complex128 if np.iscomplexobj(x) else np.float64)
    run = lambda fun: traced(fun, *args).lower().compile()(*args)
    return {name: jax.tree.map(wide, run(change(fun))) for name, fun in found.items()}


def check(found, dtype):
    """The same types, and values and gradients like those of careful casts, or as far from the truth."""
    plain = lambda fun: functools.partial(fun, jnp.matmul)
    for name, fun in found.items():
        mine = jax.eval_shape(jamp.autocast(plain(fun), dtype), SHAPE, SHAPE)
        assert avals(mine) == avals(jax.eval_shape(plain(fun), SHAPE, SHAPE)), name
    careful = evaluate(found, np.float32, lambda fun: functools.partial(fun, by_hand(dtype)))
    mine = evaluate(found, np.float32, lambda fun: jamp.autocast(plain(fun), dtype))
    failed = {name: fun for name, fun in found.items() if not is_close(mine[name], careful[name], careful[name], dtype)}
    with jax.enable_x64(True):
        true = evaluate(failed, np.float64, plain)
    return [name for name in failed if not is_close(mine[name], careful[name], true[name], dtype)]


def error(found, true, known):
    return np.abs(np.where(known, found, 0) - np.where(known, true, 0)).max(initial=0)


def is_close(mine, careful, true, dtype):
    """In each domain, the error is at most four times that of careful casts and two roundings of the largest number."""
    leaves = zip(*map(jax.tree.leaves, (mine, careful, true)), strict=True)
    for m, c, t in [domain for leaf in leaves for domain in zip(*leaf, strict=True)]:
        # A gradient beyond float16's range overflows: the loss scale is for that.
        known = np.isfinite(c) & np.isfinite(t) & (np.abs(t) < float(jnp.finfo(dtype).max) / 4)
        largest = error(t, 0, known)
        if not error(m, t, known) <= 4 * error(c, t, known) + jnp.finfo(dtype).eps * largest:
            return False
    return True


@pytest.mark.slow
@pytest.mark.promotes("jnp")
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("module", MODULES)
def test_every_function_is_as_accurate_as_careful_casts_by_hand(module, dtype):
    found = functions(importlib.import_module(module))
    assert len(found) >= MODULES[module]
    assert not check(dict([*found.items()][dtype == jnp.bfloat16 :: 2]), dtype)  # the other half in the other dtype


QUICK = {"softmax": (nn.softmax, 1), "power": (jnp.power, 2), "cumsum": (jnp.cumsum, 1), "clamp": (lax.clamp, 3)}


@pytest.mark.slow
@pytest.mark.promotes("jnp")
def test_some_functions_are_as_accurate_as_careful_casts_and_compose():
    found = {name: of_products(*args) for name, args in QUICK.items()}
    assert not check(found, jnp.bfloat16)
    cast = {name: jamp.autocast(functools.partial(fun, jnp.matmul), jnp.float16) for name, fun in found.items()}
    batched = {name: jax.vmap(fun, (0, None)) for name, fun in cast.items()}
    inner = jax.jit(lambda x, w: {name: jax.vmap(jax.jit(fun), (0, None))(x, w) for name, fun in cast.items()})
    outer = jax.jit(lambda x, w: {name: fun(x, w) for name, fun in batched.items()})
    jax.tree.map(np.testing.assert_array_equal, inner(*matrices()), outer(*matrices()))
