"""A product of 16-bit operands whose derivative rounds no weight gradient.

The gradient of a weight is a sum over all examples, which a product accumulates in float32. JAX's transpose of a
product rounds it to the dtype of the operand. Here it is written in float32.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike

from jamp import _evaluate, _jaxpr
from jamp._autocast.wide_dot import wide_dot
from jamp._jaxpr import JaxprEqn
from jamp._primitives import PRODUCTS

Run = Callable[[JaxprEqn, list[Any]], Any]  # evaluates a product


def product(eqn: JaxprEqn, dtype: DTypeLike) -> Callable[..., Array]:
    """A 16-bit product as a function of its operands, of which some are weights in float32.

    `eqn` has the parameters of the product. Its result is 16 bit, or float32 for the category "accumulate".
    """

    @jax.custom_jvp
    def multiply(*operands: Array) -> Array:
        return value(eqn, [_to(x, dtype) for x in operands])

    def rule(primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[Array, Any]:
        low = [_to(x, dtype) for x in primals]
        out = value(eqn, low)
        found = SymbolicZero(jax.typeof(out).to_tangent_aval())
        for i, t in enumerate(tangents):
            if not isinstance(t, SymbolicZero):
                term = _tangent.bind(*low[:i], *low[i + 1 :], t, product=eqn, i=i, dtype=dtype, aval=jax.typeof(out))
                found = term if isinstance(found, SymbolicZero) else found + term
        return out, found

    multiply.defjvp(rule, symbolic_zeros=True)
    return multiply


def cotangent(eqn: JaxprEqn, i: int, aval: Any, types: Sequence[Any], values: Sequence[Any], run: Run) -> Any:
    """The cotangent of the i-th operand of a product: a product, evaluated by `run`, and moves.

    `types` and `values` are of the cotangent of the result, and of the other operands.
    """

    def transposed(g: Array, *others: Array) -> Array:
        found: Array = jax.linear_transpose(lambda x: value(eqn, [*others[:i], x, *others[i:]]), aval)(g)[0]
        return found

    closed = jax.make_jaxpr(transposed)(*types)
    evaluate = lambda e, args: [run(e, args)] if _jaxpr.name(e) in PRODUCTS else _moved(e, args)
    return _evaluate.interpret(closed.jaxpr, values, evaluate)[0]


def value(eqn: JaxprEqn, operands: Sequence[Array]) -> Array:
    """The result of a product for these operands."""
    types = [x.update(dtype=y.dtype) for x, y in zip(_jaxpr.avals(eqn.invars), operands, strict=True)]
    eqn = eqn.replace(invars=[_jaxpr.core().Var(aval) for aval in types])
    found: Array = _evaluate.bind(wide_dot(eqn), operands, _jaxpr.avals(eqn.outvars))[0]
    return found


def _moved(eqn: JaxprEqn, args: Sequence[Array]) -> list[Array]:
    """The results of an operation that moves data, for operands of another dtype."""
    types = [aval.update(dtype=args[0].dtype) for aval in _jaxpr.avals(eqn.outvars)]
    return _evaluate.bind(eqn, args, types)


def _to(x: Array, dtype: DTypeLike) -> Array:
    return x.astype(dtype) if x.dtype == jnp.float32 else x


# The tangent of a product: a linear function of its last input, the tangent of the i-th operand.
_tangent = _jaxpr.core().Primitive("product_tangent")


def _forward(*inputs: Array, product: JaxprEqn, i: int, dtype: DTypeLike, aval: Any) -> Array:
    *others, t = inputs
    return value(product, [*others[:i], _to(t, dtype), *others[i:]])


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    *others, t = primals
    out, found = _tangent.bind(*primals, **params), ad.Zero(params["aval"].to_tangent_aval())
    if not isinstance(tangents[-1], ad.Zero):
        found = _tangent.bind(*others, tangents[-1], **params)
    for j, x in enumerate(tangents[:-1]):
        if not isinstance(x, ad.Zero):
            fun = lambda y, j=j: _forward(*others[:j], y, *others[j + 1 :], t, **params)
            found = ad.add_tangents(found, jax.jvp(fun, [others[j]], [x])[1])
    return out, found


def _transpose(g: Any, *inputs: Any, product: JaxprEqn, i: int, dtype: DTypeLike, aval: Any) -> list[Any]:
    *others, t = inputs
    if isinstance(g, ad.Zero):
        return [None] * len(inputs)
    linear = next(j for j, x in enumerate(inputs) if ad.is_undefined_primal(x))
    if linear < len(others):
        fun = lambda y: _forward(
            *others[:linear], y, *others[linear + 1 :], t, product=product, i=i, dtype=dtype, aval=aval
        )
        found = jax.linear_transpose(fun, others[linear].aval)(g)[0]
        return [found if j == linear else None for j in range(len(inputs))]
    is_weight = t.aval.dtype == jnp.float32
    run = lambda e, args: value(_evaluate.with_result(e, jnp.float32) if is_weight else e, args)
    g = g.astype(dtype)  # float32, or a third dtype that the code asked for
    types = [jax.typeof(x) for x in (g, *others)]
    found = cotangent(_evaluate.with_result(product, dtype), i, t.aval.update(dtype=dtype), types, [g, *others], run)
    return [None] * len(others) + [found]


def _batch(
    inputs: Sequence[Any], dims: Sequence[Any], *, product: JaxprEqn, i: int, dtype: DTypeLike, aval: Any
) -> tuple[Any, int]:
    """The product of a batch is another product, with moves around it."""
    *others, t = inputs
    operands, axes = [*others[:i], _to(t, dtype), *others[i:]], [*dims[:i], dims[-1], *dims[i:-1]]
    closed = jax.make_jaxpr(jax.vmap(lambda *xs: value(product, xs), axes))(*operands)
    operands[i] = t

    def run(e: JaxprEqn, operands: list[Any]) -> list[Any]:
        args, flags = [x for x, _ in operands], [flag for _, flag in operands]
        if _jaxpr.name(e) not in PRODUCTS:
            return [(y, any(flags)) for y in _moved(e, args)]
        (j,) = [j for j, flag in enumerate(flags) if flag]
        args = [*args[:j], *args[j + 1 :], args[j]]
        return [(_tangent.bind(*args, product=e, i=j, dtype=dtype, aval=e.outvars[0].aval), False)]

    # Every value goes with a flag: whether it is a move of the tangent.
    values = [(x, j == i) for j, x in enumerate(operands)]
    return _evaluate.interpret(closed.jaxpr, values, run, lambda v: (_jaxpr.value(v), False))[0][0], 0


_tangent.def_impl(lambda *xs, **params: _forward(*xs, **params))
_tangent.def_abstract_eval(lambda *_, aval, **__: aval)
ad.primitive_jvps[_tangent] = _jvp
ad.primitive_transposes[_tangent] = _transpose
batching.primitive_batchers[_tangent] = _batch
mlir.register_lowering(_tangent, mlir.lower_fun(_forward, multiple_results=False))
