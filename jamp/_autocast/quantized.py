"""Products of quantized operands, and their derivative."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad, batching, mlir

from jamp import _evaluate, _jaxpr
from jamp._autocast.float8 import Float8
from jamp._autocast.product import cotangent, value
from jamp._jaxpr import JaxprEqn

Pair = tuple[Array, Array]  # float8 values, and the scales that bring them back


def quantize(x: Array, dtype: Any, axes: tuple[int, ...] | None = None) -> Pair:
    """The float8 values of an array, and their scales: float32 powers of two, one or (with axes) one along these axes.

    The scale of an operand that holds inf or NaN is inf, so that the product is NaN and the step is skipped.
    """
    values = lax.stop_gradient(x)
    amax = jnp.max(jnp.abs(values), axes, keepdims=axes is not None, initial=0).astype(jnp.float32)
    # The smallest power of two with amax / scale <= the largest float8, which is 1.m * 2**k: the exponent of
    # amax * 2**-k, plus one if its mantissa is above m. It is kept above 0, whose inverse is inf.
    largest = np.float32(jnp.finfo(dtype).max)
    mantissa, k = int(largest.view(np.int32)) & 0x7FFFFF, int(np.frexp(largest)[1]) - 1
    bits = lax.bitcast_convert_type(amax * np.float32(2.0**-k), jnp.int32)
    powers = lax.bitcast_convert_type((bits + (0x7FFFFF - mantissa)) & 0x7F800000, jnp.float32)
    scale = jnp.maximum(powers, np.float32(2.0**-100))
    return (values.astype(jnp.float32) * (1 / scale)).astype(dtype), _derived(scale, x)


def packed(x: Array, dtype: Any, axes: tuple[int, ...] | None = None) -> Pair:
    """`quantize`, with the values as bytes: JAX rounds floats that a checkpoint saves, which makes large E4M3 NaN."""
    values, scale = quantize(x, dtype, axes)
    return lax.bitcast_convert_type(values, jnp.uint8), scale


@jax.custom_jvp
def _derived(scale: Array, x: Array) -> Array:
    """The scale of `x`. `quantized_product` ignores its tangent, and nothing else may use it."""
    return scale


def _derived_rule(primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[Array, Any]:
    scale, x = primals
    return _derived(scale, x), _tangent_of(scale, tangents[1:], _no_derivative)


_derived.defjvp(_derived_rule, symbolic_zeros=True)


def quantized_product(eqn: JaxprEqn, config: Float8) -> Callable[..., Array]:
    """A product as a function of its operands, and of the packed float8 values and scales of each.

    Its value depends on the latter, and its derivative is with respect to the former: in the carrier, and for a weight
    in float32.
    """
    carrier = np.dtype(config.carrier)
    eqn = _evaluate.with_result(eqn, carrier)
    unpack = lambda q, scale: (lax.bitcast_convert_type(q, config.forward), scale)

    @jax.custom_jvp
    def product(x: Array, y: Array, *quantized: Array) -> Array:
        return _dot(eqn, unpack(*quantized[:2]), unpack(*quantized[2:]), config, carrier)

    def rule(primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[Array, Any]:
        _, _, qx, sx, qy, sy = primals
        out = _dot(eqn, unpack(qx, sx), unpack(qy, sy), config, carrier)
        moving = [i for i in range(2) if not isinstance(tangents[i], SymbolicZero)]
        # The cotangent of an operand needs the other operand. A scale cannot vary along an axis that is summed, and the
        # backward products sum other axes, so with scales by row that operand is quantized again.
        whole, pairs = [[x] for x in primals[:2]], [primals[2:4], primals[4:]]
        others = [(pairs if config.granularity == "tensor" else whole)[1 - i] for i in moving]
        avals = [jax.typeof(x) for x in primals[:2]]
        pull_back = functools.partial(_pull_back, eqn, config, avals, moving)
        return out, _tangent_of(out, tangents[:2], pull_back, [x for other in others for x in other])

    product.defjvp(rule, symbolic_zeros=True)
    return product


def _pull_back(
    eqn: JaxprEqn, config: Float8, avals: Sequence[Any], moving: Sequence[int], g: Array, *kept: Array
) -> list[Array]:
    """The cotangents of some operands: products of a quantized cotangent and the other operand, which was kept."""
    low = [aval.update(dtype=np.dtype(config.carrier)) for aval in avals]

    @jax.custom_jvp
    def cotangents(g: Array, *kept: Array) -> list[Array]:
        values = iter(kept)
        # Of each operand: its 8-bit values and scales, or with scales by row, the operand and its 8-bit dtype.
        of_g = quantize(g, config.backward) if config.granularity == "tensor" else (g, config.backward)
        found = []
        for i in moving:
            other: Any = next(values)
            if config.granularity == "tensor":
                other = lax.bitcast_convert_type(other, config.forward), next(values)
            else:
                other = other, config.forward
            run = functools.partial(_run, config=config, dtype=avals[i].dtype)
            found.append(cotangent(eqn, i, low[i], [jax.typeof(g), low[1 - i]], [of_g, other], run))
        return found

    cotangents.defjvp(_no_derivative)
    found: list[Array] = cotangents(g, *kept)
    return found


def _run(eqn: JaxprEqn, operands: Sequence[Any], config: Float8, dtype: Any) -> Array:
    """A product of the backward pass."""
    if config.granularity == "row":
        operands = [quantize(x, low, axes) for (x, low), axes in zip(operands, _jaxpr.contracted(eqn), strict=True)]
    x, y = operands
    return _dot(eqn, x, y, config, dtype)


def _dot(eqn: JaxprEqn, x: Pair, y: Pair, config: Float8, dtype: Any) -> Array:
    """A product of quantized operands.

    With one scale for each operand, it is a product of the dequantized operands, which are exact in bfloat16. XLA:GPU
    compiles this form to a float8 product. Otherwise the scales are applied to the result.
    """
    carrier = np.dtype(config.carrier)
    if config.granularity == "tensor" and carrier == jnp.bfloat16:
        # XLA:GPU would merge products that share an operand (q, k and v) into one 16-bit product, because their scales
        # differ. One barrier around both scales of each product prevents the merge.
        scales = lax.optimization_barrier((x[1], y[1]))
        low = [q.astype(carrier) * scale.astype(carrier) for q, scale in zip((x[0], y[0]), scales, strict=True)]
        return value(_evaluate.with_result(eqn, dtype), low)
    options = _jaxpr.dot_options(eqn) | {"preferred_element_type": jnp.float32}
    scales = x[1] * y[1] if x[1].ndim == 0 else lax.dot_general(x[1], y[1], **options, precision="highest")
    return (lax.dot_general(x[0], y[0], **options) * scales).astype(dtype)


# The tangent of a product: a linear function of its last inputs, the tangents of operands. Only its transpose
# (`pull_back`) is known. Reverse-mode differentiation transposes it. Forward mode would evaluate it, which raises.
_tangent = _jaxpr.core().Primitive("float8_tangent")


def _no_derivative(*_: Any, **__: Any) -> Any:
    raise TypeError(
        "float8 products have no forward-mode derivative and no second one (jvp, jacfwd, hessian, a gradient of a "
        "gradient). Use a 16-bit compute dtype there: jamp.autocast(fun, carrier), such as jamp.autocast(fun, "
        "jnp.bfloat16)."
    )


def _tangent_of(out: Array, tangents: Sequence[Any], pull_back: Callable[..., Any], kept: Sequence[Array] = ()) -> Any:
    moving = [t for t in tangents if not isinstance(t, SymbolicZero)]
    if not moving:
        return SymbolicZero(jax.typeof(out).to_tangent_aval())
    return _tangent.bind(*kept, *moving, pull_back=pull_back, aval=jax.typeof(out), kept=len(kept))


def _transpose(g: Any, *args: Any, pull_back: Callable[..., Any], aval: Any, kept: int) -> list[Any]:
    if isinstance(g, ad.Zero):
        return [None] * len(args)
    return [None] * kept + list(pull_back(g, *args[:kept]))


def _batch(
    args: Sequence[Any], dims: Sequence[Any], *, pull_back: Callable[..., Any], aval: Any, kept: int
) -> tuple[Any, int]:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)

    def batched(g: Array, *values: Array) -> list[Array]:
        found = jax.vmap(pull_back, (0, *dims[:kept]))(g, *values)
        # An operand that all examples share gets the sum.
        return [x.sum(0) if d is None else jnp.moveaxis(x, 0, d) for x, d in zip(found, dims[kept:], strict=True)]

    aval = aval.update(shape=(size, *aval.shape))
    return _tangent.bind(*args, pull_back=batched, aval=aval, kept=kept), 0


_tangent.def_impl(_no_derivative)
_tangent.def_abstract_eval(lambda *_, pull_back, aval, kept: aval)
ad.primitive_jvps[_tangent] = _no_derivative
ad.primitive_transposes[_tangent] = _transpose
batching.primitive_batchers[_tangent] = _batch
mlir.register_lowering(_tangent, _no_derivative)
