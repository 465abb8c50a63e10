"""Products by JAX's own primitives, among them one that XLA:CPU lacks: a dot_general from bfloat16 to float32.

For some layouts of the result, XLA:CPU has no such product ("Unsupported element type for DotThunk"), so there its
operands are cast to float32, which gives the same sums. The platform of the lowered program decides.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from jamp._jaxprs import interpret, ir
from jamp._jaxprs.primitives import PRODUCTS


def multiply(primitive: Any, operands: Sequence[Array], params: dict[str, Any], dtype: Any) -> Array:
    """A product in a forward pass, by the primitive of JAX, so that checkpoint policies recognize it."""
    bind = functools.partial(primitive.bind, **{**params, "preferred_element_type": np.dtype(dtype)})
    if _is_wide(primitive, operands, dtype):
        cpu = lambda *xs: bind(*(x.astype(jnp.float32) for x in xs))
        found: Array = lax.platform_dependent(*operands, cpu=cpu, default=bind)
    else:
        found = bind(*operands)
    return found


def multiply_back(primitive: Any, operands: Sequence[Array], params: dict[str, Any], dtype: Any) -> Array:
    """A product in a backward pass: one equation on every platform, which traces faster. No policy looks there."""
    primitive = _wide_dot if _is_wide(primitive, operands, dtype) else primitive
    found: Array = primitive.bind(*operands, **{**params, "preferred_element_type": np.dtype(dtype)})
    return found


def _is_wide(primitive: Any, operands: Sequence[Array], dtype: Any) -> bool:
    return primitive.name == "dot_general" and dtype == jnp.float32 and operands[0].dtype == jnp.bfloat16


# It has the name and the parameters of JAX's own.
_wide_dot = core.Primitive("dot_general")


def _plain(x: Array, y: Array, **params: Any) -> Array:
    found: Array = core.primitives.dot_general_p.bind(x, y, **params)
    return found


def _on_cpu(x: Array, y: Array, **params: Any) -> Array:
    return _plain(x.astype(jnp.float32), y.astype(jnp.float32), **params)


def _run(x: Array, y: Array, **params: Any) -> Array:
    with jax.disable_jit(False):  # Without it, a program under `jax.disable_jit` would call this again.
        found: Array = _compiled(**params)(x, y)
    return found


@functools.cache
def _compiled(**params: Any) -> Any:
    return jax.jit(functools.partial(_wide_dot.bind, **params))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    (x, y), (dx, dy) = primals, tangents
    out = _wide_dot.bind(x, y, **params)
    found = ad.Zero(jax.typeof(out).to_tangent_aval())
    for operands, t in (((dx, y), dx), ((x, dy), dy)):
        if not isinstance(t, ad.Zero):
            found = ad.add_tangents(found, _wide_dot.bind(*operands, **params))
    return out, found


def _transpose(g: Any, x: Any, y: Any, **params: Any) -> list[Any]:
    if isinstance(g, ad.Zero):
        return [None, None]
    low = params | {"preferred_element_type": jnp.dtype(jnp.bfloat16)}
    linear = ad.is_undefined_primal(x)
    fun = (lambda x: _plain(x, y, **low)) if linear else (lambda y: _plain(x, y, **low))
    (found,) = jax.linear_transpose(fun, (x if linear else y).aval)(g.astype(jnp.bfloat16))
    return [found, None] if linear else [None, found]


def _batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, int]:
    """The product of a batch is another product, with moves around it."""
    closed = jax.make_jaxpr(jax.vmap(functools.partial(_plain, **params), dims))(*args)

    def run(eqn: Any, operands: list[Any]) -> list[Any]:
        given = ir.params(eqn)
        if ir.name(eqn) in PRODUCTS:
            return [multiply_back(eqn.primitive, operands, given, given["preferred_element_type"])]
        return interpret.bind(eqn, operands, ir.avals(eqn.outvars))

    return interpret.interpret(closed.jaxpr, args, run)[0], 0


_wide_dot.def_impl(_run)
_wide_dot.def_abstract_eval(lambda *avals, **params: core.primitives.dot_general_p.abstract_eval(*avals, **params)[0])
ad.primitive_jvps[_wide_dot] = _jvp
ad.primitive_transposes[_wide_dot] = _transpose
batching.primitive_batchers[_wide_dot] = _batch
mlir.register_lowering(_wide_dot, mlir.lower_fun(_plain, multiple_results=False))
mlir.register_lowering(_wide_dot, mlir.lower_fun(_on_cpu, multiple_results=False), platform="cpu")
