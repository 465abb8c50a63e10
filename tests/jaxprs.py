"""What a traced function consists of."""

import jax
import jax.numpy as jnp
import numpy as np

from jamp._jaxprs.ir import name as name, params as params

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def equations(jaxpr):
    """Every equation of a jaxpr and of those inside it. Of `lax.platform_dependent`, those of the default platform."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        given = params(eqn)
        if given.get("branches_platforms"):
            given = given["branches"][-1:]
        for param in jax.tree.leaves(given, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(param, "eqns"):
                yield from equations(param)


def operand_dtypes(jaxpr, names):
    """The dtypes of the inexact operands of the named operations."""
    found = [eqn for eqn in equations(jaxpr) if eqn.primitive.name in names]
    return {v.aval.dtype for eqn in found for v in eqn.invars if jnp.issubdtype(v.aval.dtype, jnp.inexact)}


def dtypes(fun, *args, names):
    return operand_dtypes(jax.make_jaxpr(fun)(*args), names)


def products(fun, *args):
    """The operand dtypes of matrix products and convolutions."""
    return dtypes(fun, *args, names=PRODUCTS)


def normal(*shape, seed=0, scale=1.0):
    """Random numbers of NumPy, because `jax.random` compiles a program for each shape."""
    return jnp.asarray(np.float32(scale * np.random.default_rng(seed).normal(size=shape)))


def kept_by_jax(fun, *args):
    """The bytes that JAX keeps for the backward pass of a function, without its arguments."""
    jaxpr = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(fun, *args)[1]))(*args).jaxpr
    outvars = {v for v in jaxpr.outvars if not isinstance(v, jax.extend.core.Literal)}
    outvars -= {*jaxpr.invars, *jaxpr.constvars}
    return sum(v.aval.size * v.aval.dtype.itemsize for v in outvars if v.aval.dtype != jax.dtypes.float0)
