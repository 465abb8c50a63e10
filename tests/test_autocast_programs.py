"""autocast against its meaning: the same random program with each product cast by hand.

`python tests/test_autocast_programs.py 42 202` checks more of them.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import normal
from pairs import of_pair
from programs import LEAVES, WRAPS, N, by_hand, by_operation, program, reference

import jamp

X, W = normal(N, N), normal(N, N, seed=1, scale=N**-0.5)
# Of the reference's own error. After a sum in another order one element of 2048 is rounded the other way: about 0.07.
# If a whole array is rounded once more, or once less, it is 0.3 and more.
FLIPS = 0.15
ROUNDED = {"dot_general[gradient]": "compute"}
HALF = (jnp.bfloat16, jnp.float16)
SOME = (0, 2, 3, 7, 9, 12, 18, 19, 27, 30, 33, 36, 38, 41)  # They have every leaf and construct.


def gradient(fun):
    """The value and the gradient."""

    def both(x, w):
        cosines = jnp.cos(jnp.arange(N * N, dtype=x.dtype)).reshape(N, N)
        y, pull_back = jax.vjp(fun, x, w)
        return [y, *pull_back(cosines)]

    return both


def gradients(fun):
    """The value, the gradient, and the gradients of a batch."""
    one = gradient(fun)
    return lambda x, w: [*one(x, w), *jax.vmap(one, (0, None))(jnp.stack([x, x[::-1]]), w)[1:]]


def tangent(fun):
    return lambda x, w: [jax.jvp(fun, (x, w), (w, x))[1]]


def check_gradient(seed, dtype):
    """Operation by operation, because XLA:CPU leaves out roundings where it fuses."""
    fun, names = program(seed)
    plain, own = (functools.partial(fun, dot) for dot in (jnp.matmul, reference(dtype)))
    rounded = jamp.autocast(plain, dtype, rules=ROUNDED, recompute=seed % 4 > 0)
    mine, want, truth = (by_operation(gradient(f), X, W) for f in (rounded, own, plain))
    close(mine, want, truth, rounding_bound(str(names)), seed, names)


def rounding_bound(names):
    """Inside a custom_jvp, the backward rule of a custom_vjp stays float32."""
    return 2.0 if re.search(r"custom_jvp.*custom_vjp", names) else FLIPS


def check(seed, dtypes=HALF):
    """Also batches, tangents, rules, and gradients that are not rounded."""
    for dtype in dtypes:
        with of_pair(dtype) as cast:
            check_one(seed, dtype, cast(X), cast(W))


def check_one(seed, dtype, x, w):
    fun, names = program(seed)
    names = str(names)
    plain, own, hand = (functools.partial(fun, dot) for dot in (jnp.matmul, reference(dtype), by_hand(dtype)))
    rounded = jamp.autocast(plain, dtype, rules=ROUNDED, recompute=seed % 4 > 0)
    cast = jamp.autocast(plain, dtype, recompute=seed % 4 > 0)
    mine, want, truth = (by_operation(gradients(f), x, w) for f in (rounded, own, plain))
    close(mine, want, truth, rounding_bound(names), seed, names)
    is_nested = rounding_bound(names) > FLIPS
    if dtype == jnp.bfloat16 and seed % 3 == 0 and not is_nested:
        wide = jamp.autocast(plain, dtype, rules={"dot_general": "accumulate"} | ROUNDED)
        accumulated = functools.partial(fun, reference(dtype, accumulate=True))
        mine, theirs = (by_operation(gradients(f), x, w) for f in (wide, accumulated))
        # Products that the traced code has for a gradient (forces, a custom_vjp) are wide here and rounded there.
        if "forces" not in names:
            close(mine[:1], theirs[:1], truth[:1], FLIPS, seed, names)
        close(mine, truth, theirs, 1.5, seed, names)
    # Weight gradients that are not rounded are as near to float32.
    close(by_operation(gradients(cast), x, w), truth, want, 3.0 if is_nested else 1.5, seed, names)
    if "custom_vjp" not in names:
        # The tangent of a custom_jvp is what its rule computes: products that are rounded, and a sum that is not.
        bound = 1.0 if "custom_jvp" in names else FLIPS
        close(*(by_operation(tangent(f), x, w) for f in (cast, hand, plain)), bound, seed, names)


def close(mine, want, exact, bound, *about):
    """Equal up to the order of sums."""
    size = lambda x: np.linalg.norm(np.float64(x))
    for i, (x, y, truth) in enumerate(zip(mine, want, exact, strict=True)):
        assert not (np.isnan(x) & ~np.isnan(y)).any(), (i, *about)
        if np.isfinite(y).all() and np.isfinite(truth).all():
            own = size(y - truth) + (1e-4 if y.dtype == np.float32 else 1e-11) * size(y)
            assert size(x - y) <= bound * own, (i, size(x - y) / own, *about)


@pytest.mark.parametrize("seed", SOME)
def test_a_program_is_what_it_is_with_products_cast_by_hand(seed):
    check_gradient(seed, HALF[seed % 2])


@pytest.mark.slow
@pytest.mark.promotes("x64 makes Python numbers float64")
@pytest.mark.parametrize("seeds", [SOME[i::3] for i in range(3)], ids=str)
def test_programs_are_what_they_are_by_hand_in_every_derivative_and_in_float64(seeds):
    for seed in seeds:
        check(seed, (jnp.float32 if seed % 4 == 0 else HALF[seed % 2],))


def test_programs_have_every_leaf_and_construct():
    texts = [str(program(seed)[1]) for seed in SOME]
    assert not [name for name in (*LEAVES, *WRAPS) if not any(f"'{name}'" in text for text in texts)]


if __name__ == "__main__":
    import sys
    import time

    for seed in range(*map(int, sys.argv[1:])):
        start = time.time()
        try:
            check(seed, (*HALF, jnp.float32))
            print(seed, "is right", f"{time.time() - start:.1f} s", flush=True)
        except Exception as e:
            print(seed, type(e).__name__, str(e)[:300], flush=True)
