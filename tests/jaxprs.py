"""What a traced function consists of."""

import jax
import jax.numpy as jnp
import numpy as np

# The names of jamp's own primitives, which are no words of a user's program.
INTERNAL = {
    *("attach", "detached", "product", "product_tangent", "rounded", "scale_tangent", "scaled_sums", "row_major"),
    *("barrier", "barrier_unless_tpu", "cotangents_behind_barrier", "in_one_kernel_on_tpu"),
    *("differentiated", "with_tangents_of"),
}
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


# Under `jax_remat3`, a checkpoint and a name are objects in the parameters of one primitive.
_HIGH = {"RematTraced": "remat2", "CheckpointName": "name", "CheckpointNameFwd": "name"}


def params(eqn):
    """The parameters of an equation."""
    high = eqn.params.get("_prim")
    return eqn.params if high is None else high.params


def name_of(eqn):
    """The name of the primitive of an equation."""
    high = eqn.params.get("_prim")
    return eqn.primitive.name if high is None else _HIGH.get(type(high).__name__, type(high).__name__)


def carried(eqn):
    """Which operands of a scan or a while are its carry."""
    if "body_nconsts" in eqn.params:
        return range(eqn.params["cond_nconsts"] + eqn.params["body_nconsts"], len(eqn.invars))
    if "num_carry" in eqn.params:
        return range(eqn.params["num_consts"], eqn.params["num_consts"] + eqn.params["num_carry"])
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return range(len(consts), len(consts) + len(carry))


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
