"""Lower: products become JAX's own primitives, with the derivative of their format.

    product(x, w)   becomes   low = cast(w)
                              attach(dot_general(detached(x), detached(low)), x, low, x, w)

`attach` returns its first operand, and has the derivative of the product. So the value is computed by a primitive of
JAX in plain sight, and the user's checkpoint policies recognize it, in a `jax.checkpoint` inside the function and in
one around it. A `jax.custom_jvp` would hide the product. `dots_saveable` keeps its result only if the rule multiplies
itself, and only with the default checkpoint, which asks the policy about the differentiated program. It keeps nothing
if the rule calls the function, or under `jax_remat3` (JAX 0.10.2 and 0.12.0), which asks before it differentiates.

A 16-bit product without weights is JAX's own, with JAX's derivative. A 16-bit result is `rounded` for all its readers.

The tangent of a product is a primitive that is linear in the tangents of its operands. Its rules are in `Arithmetic`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad, batching, mlir

from jamp._jaxprs import build, inline, interpret, ir
from jamp._jaxprs.define import Vmap, batched_type, define, no_tangent, with_tangents
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn
from jamp._jaxprs.manual_axes import trace_inside
from jamp._jaxprs.primitives import PRODUCTS
from jamp._jaxprs.rewrite import Body, Replaced, Rewriter
from jamp._products.arithmetic import Arithmetic, Raised, Rounded, moved, others_of
from jamp._products.formats import Format
from jamp._products.product import Product, equation, of, product_p
from jamp._products.quantized import Quantized, scaled_sums
from jamp._rounded import as_stored, rounded


def lower(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return the same function without the primitive `product`. Equal products are traced once."""
    traced: dict[Any, ClosedJaxpr] = {}

    def rule(eqn: JaxprEqn, body: Body) -> list[JaxprEqn] | None:
        product = of(eqn)
        if product is None:
            return None
        avals, inside = ir.avals(eqn.invars), body.context.shard_map
        key = product, *avals, eqn.ctx, inside
        if key not in traced:
            traced[key] = trace_inside(inside, ir.in_trace_context(eqn, multiplied(product)), avals)
        return [build.located(item, eqn) for item in inline.inline(traced[key], eqn.invars, eqn.outvars)]

    return Rewriter(rule, reads=lambda context: context.shard_map)(closed)


def with_products(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The inverse of `lower`: products of a function that was lowered are one equation each again.

    A vmap of a product stays as it is. So do products of 16-bit operands without weights, which are JAX's own.
    """

    def rule(eqn: JaxprEqn, body: Body) -> list[JaxprEqn] | Replaced | None:
        if eqn.primitive is scaled_sums or (eqn.primitive is rounded and id(eqn.invars[0]) in body.shared):
            return Replaced([], eqn.invars[:1])  # The product is scaled and rounded.
        if eqn.primitive is not _attach or ir.params(eqn).get("vmaps"):
            return None
        product: Product = dataclasses.replace(ir.params(eqn)["product"], kept_as="")
        read, operands = _parts(product, eqn.invars[1:])
        body.shared[id(eqn.outvars[0])] = product
        of_codes = isinstance(product.format, Format)
        return [equation(product, read if of_codes else operands, eqn.outvars[0], eqn)]

    found = Rewriter(rule)(closed)
    return closed if found is closed else build.without_dead_code(found)


def multiplied(product: Product) -> Callable[..., Array]:
    """A product as a function of its operands."""
    if product.format is None:
        return lambda *operands: product.primitive.bind(*operands, **dict(product.params))
    arithmetic = _arithmetic(product)
    is_rounded = isinstance(arithmetic, Rounded) and not product.is_raised
    if is_rounded and product.dtype == product.format and not any(product.arguments):
        return functools.partial(_by_jax, product, arithmetic)

    def multiply(*operands: Array) -> Array:
        read = arithmetic.read(product, operands)
        detached = list(map(_detached.bind, read))
        attached = lambda out: _attach.bind(out, *read, *operands[: product.arity], product=product)
        if product.kept_as and isinstance(arithmetic, Quantized):
            sums = checkpoint_name(attached(arithmetic.sums(product, detached)), product.kept_as)
            result: Array = scaled_sums.bind(sums, *detached[product.arity + 1 :: 2])
        else:
            result = attached(arithmetic.value(product, detached))
        return as_stored(result)

    return multiply


def _differentiated(primals: Sequence[Any], tangents: Sequence[Any], *, product: Product) -> tuple[Any, Any]:
    places = with_tangents(tangents)
    if not places:
        out = product_p.bind(*primals, product=product)
        return out, no_tangent(out)
    fun = lambda *xs: multiplied(product)(*build.replaced(primals, places, xs))
    found: tuple[Any, Any] = jax.jvp(fun, [primals[i] for i in places], [tangents[i] for i in places])
    return found


def _batched(args: Sequence[Any], dims: Sequence[Any], *, product: Product) -> tuple[Any, int]:
    return jax.vmap(multiplied(product), tuple(dims))(*args), 0


# `recompute` asks for the derivatives of code whose products are not lowered yet.
ad.primitive_jvps[product_p] = _differentiated
batching.primitive_batchers[product_p] = _batched
mlir.register_lowering(product_p, mlir.lower_fun(lambda *xs, product: multiplied(product)(*xs), multiple_results=False))


def _by_jax(product: Product, arithmetic: Arithmetic, *operands: Array) -> Array:
    result: Array = as_stored(arithmetic.value(product, arithmetic.read(product, operands)))
    return result


def _arithmetic(product: Product) -> Arithmetic:
    assert product.format is not None
    if isinstance(product.format, Format):
        return Quantized(product.format)
    return (Raised if product.is_raised else Rounded)(product.format)


# `lax.stop_gradient`, but a function that is linear as it stands, such as the rule of a custom_jvp, can be transposed.
_detached: Any = define(
    "detached",
    lambda x: x,
    lambda x: x,
    jvp=lambda xs, _: (_detached.bind(*xs), no_tangent(xs[0])),
    transpose=lambda g, _: [g],
)


def _parts(product: Product, inputs: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """What the product read, and its operands."""
    return inputs[: -product.arity], inputs[-product.arity :]


def _pushed(product: Product, perturbed: tuple[int, ...], out: Any, inputs: Sequence[Any], given: Sequence[Any]) -> Any:
    """The tangent of a product, whose value has the type `out`, from those `given` of its perturbed operands."""
    residuals = _arithmetic(product).residuals(product, _parts(product, inputs)[0], perturbed)
    types = tuple(map(jax.typeof, given))
    return _tangent.bind(*residuals, *given, product=product, perturbed=perturbed, types=types, aval=out)


def _attach_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, product: Product) -> tuple[Any, Any]:
    out = _attach.bind(*primals, product=product)
    given = dict(enumerate(_parts(product, tangents[1:])[1]))
    perturbed = with_tangents(list(given.values()))
    if not perturbed:
        return out, no_tangent(out)
    return out, _pushed(product, perturbed, jax.typeof(out), primals[1:], [given[i] for i in perturbed])


def _attach_transpose(g: Any, *inputs: Any, product: Product) -> list[Any]:
    """The cotangents if a product is linear in an operand as it stands, without having been differentiated."""
    _, operands = _parts(product, inputs[1:])
    perturbed = tuple(i for i, x in enumerate(operands) if ad.is_undefined_primal(x))
    none = [None] * len(inputs)
    if isinstance(g, ad.Zero) or not perturbed:
        return none
    push = lambda *given: _pushed(product, perturbed, jax.typeof(g), inputs[1:], given)
    found = jax.linear_transpose(push, *(operands[i].aval for i in perturbed))(g)
    return build.replaced(none, [len(inputs) - product.arity + i for i in perturbed], found)


def _attach_batch(
    axis: Any, inputs: Sequence[Any], axes: Sequence[Any], *, product: Product, vmaps: Sequence[Vmap] = ()
) -> tuple[Any, int]:
    out = inputs[0] if axes[0] is not None else jnp.broadcast_to(inputs[0], (axis.size, *inputs[0].shape))
    batch = jnp.moveaxis(out, axes[0] or 0, 0), *inputs[1:]
    return _attach.bind(*batch, product=product, vmaps=(Vmap.of(batch, (0, *axes[1:])), *vmaps)), 0


# `attach(value, *read, *operands)` returns `value` and has the derivative of the product. It has `vmaps`, because a
# batch of 8-bit products is not another product: each example has scales of its own. For `attach(out, x16, w16, x, w)`
# and 8 rows of x they are (Vmap(8, None, (0, 0, None, 0, None)),).
_attach = define(
    "attach",
    lambda out, *_, **__: out,
    lambda out, *_, **__: out,
    jvp=_attach_jvp,
    transpose=_attach_transpose,
    batch=_attach_batch,
    has_vmaps=True,
)


def reads_without_derivative(eqn: JaxprEqn) -> list[bool]:
    """Which operands of an equation have no cotangent, because another operand of a product has it."""
    if eqn.primitive is _detached:
        return [True]
    if eqn.primitive is not _attach:
        return [False] * len(eqn.invars)
    n = ir.params(eqn)["product"].arity
    return [True] * (len(eqn.invars) - n) + [False] * n


def _forward(*inputs: Array, product: Product, perturbed: tuple[int, ...], **_: Any) -> Array:
    n = len(inputs) - len(perturbed)
    return _arithmetic(product).tangent(product, perturbed, inputs[:n], inputs[n:])


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    n = len(primals) - len(params["perturbed"])
    out, tangent = _tangent.bind(*primals, **params), ad.Zero(params["aval"].to_tangent_aval())
    if not all(isinstance(t, ad.Zero) for t in tangents[n:]):
        tangent = _tangent.bind(*primals[:n], *map(ad.instantiate_zeros, tangents[n:]), **params)
    of_kept = [i for i, t in enumerate(tangents[:n]) if not isinstance(t, ad.Zero)]
    if of_kept:
        fun = lambda *xs: _forward(*build.replaced(primals, of_kept, xs), **params)
        term = jax.jvp(fun, [primals[i] for i in of_kept], [tangents[i] for i in of_kept])[1]
        tangent = ad.add_tangents(tangent, term)
    return out, tangent


def _transpose(g: Any, *inputs: Any, **params: Any) -> list[Any]:
    linear = [i for i, x in enumerate(inputs) if ad.is_undefined_primal(x)]
    n, cotangents = len(inputs) - len(params["perturbed"]), list[Any]([None] * len(inputs))
    if isinstance(g, ad.Zero):
        return cotangents
    if linear[0] >= n:
        product, perturbed, types = params["product"], params["perturbed"], params["types"]
        every = _arithmetic(product).cotangents(product, perturbed, types, inputs[:n], g)
        found = [every[i - n] for i in linear]
    else:  # A second derivative: it is linear in a residual, too.
        fun = lambda *xs: _forward(*build.replaced(inputs, linear, xs), **params)
        found = jax.linear_transpose(fun, *(inputs[i].aval for i in linear))(g)
    return build.replaced(cotangents, linear, found)


def _batch(axis: Any, inputs: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[Any, int]:
    product, perturbed = params["product"], params["perturbed"]
    n, arithmetic = len(inputs) - len(perturbed), _arithmetic(product)
    if isinstance(arithmetic, Rounded):
        values = dict(zip(others_of(product, perturbed), zip(inputs[:n], axes[:n], strict=True), strict=True))
        tangents = zip(perturbed, zip(inputs[n:], axes[n:], strict=True), strict=True)
        terms = [_batch_one(product, arithmetic, i, {**values, i: x}, axis.size) for i, x in tangents]
        return functools.reduce(ad.add_tangents, terms), 0
    vmaps = Vmap.of(inputs, axes), *params.get("vmaps", ())
    return _tangent.bind(*inputs, **{**params, "vmaps": vmaps}), 0


def _batch_one(product: Product, arithmetic: Rounded, i: int, operands: dict[int, tuple[Any, Any]], size: int) -> Any:
    """The tangent of a batch, linear in the i-th operand: another product, with moves around it.

    So the gradient of a weight that a batch shares is one product that sums over the batch.
    """
    xs, axes = zip(*(operands[j] for j in sorted(operands)), strict=True)
    multiply = lambda *ys: arithmetic.value(product, ys)
    closed = jax.make_jaxpr(jax.vmap(multiply, axes, axis_size=size))(
        *(arithmetic.rounded(x) if j == i else x for j, x in enumerate(xs))
    )

    def run(eqn: JaxprEqn, given: list[Any]) -> list[Any]:
        args, flags = [x for x, _ in given], [flag for _, flag in given]
        if ir.name(eqn) not in PRODUCTS:
            return [(y, any(flags)) for y in moved(eqn, args)]
        (j,) = [j for j, flag in enumerate(flags) if flag]
        new = dataclasses.replace(product, primitive=eqn.primitive, params=tuple(ir.params(eqn).items()))
        residuals, result = [*args[:j], *args[j + 1 :]], eqn.outvars[0].aval
        types = (jax.typeof(args[j]),)
        tangent = _tangent.bind(*residuals, args[j], product=new, perturbed=(j,), types=types, aval=result)
        return [(tangent, False)]

    # Every value goes with a flag: whether it is a move of the tangent.
    values = [(x, j == i) for j, x in enumerate(xs)]
    return interpret.interpret(closed.jaxpr, values, run, lambda v: (ir.value(v), False))[0][0]


# The tangent of a product: from the residuals, and the tangents of the perturbed operands, in which it is linear.
# `types` are the types of the perturbed operands, and `aval` is the type of the result, both of one example. Only 8-bit
# products have `vmaps`, as in `_attach`. The product of a 16-bit batch is another product.
_tangent = define(
    "product_tangent",
    _forward,
    lambda *_, aval, vmaps=(), **__: batched_type(aval, vmaps),
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
    has_vmaps=True,
)
