"""How far results are from those of float32, as one number for all leaves of a pytree."""

import jax
import jax.numpy as jnp
import numpy as np
from trees import avals

import jamp


def distance(tree, other):
    """The norm of the difference, relative to that of `other`. Some gradients of a tree are zero but for rounding."""
    assert avals(tree) == avals(other)
    flat = [np.concatenate([np.ravel(np.float64(x)) for x in jax.tree.leaves(t)]) for t in (tree, other)]
    return np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1])


def total(tree):
    return sum(jnp.sum(x) for x in jax.tree.leaves(tree))


def with_and_without(fun, *args, dtype=jnp.float16):
    """The results of a function and their gradient, under autocast and without it. One compilation for all."""
    grad = lambda f: jax.grad(lambda *args: (total(results := f(*args)), results), has_aux=True)
    functions = jamp.autocast(fun, dtype), fun
    mine, plain = jax.jit(lambda *args: [grad(f)(*args)[::-1] for f in functions])(*args)
    return list(zip(mine, plain, strict=True))


def under_autocast(fun, *args, dtype=jnp.float16):
    """The distances of the results of a function, and of their gradient, from those without autocast."""
    return tuple(distance(mine, plain) for mine, plain in with_and_without(fun, *args, dtype=dtype))
