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
from jax.typing import DTypeLike

from jamp import _evaluate, _jaxpr
from jamp._autocast.formats import Format
from jamp._autocast.product import cotangent, value
from jamp._jaxpr import JaxprEqn

Pair = tuple[Array, Array]  # 8-bit values, and the scales that bring them back
Axes = tuple[int, ...] | None
_INT8_TERMS = 2**17  # of a sum that cannot leave int32: 127**2 * 2**17 < 2**31


def quantize(x: Array, dtype: DTypeLike, axes: Axes = None) -> Pair:
    """The 8-bit values of an array, and their scales: float32, one or (with axes) one along these axes.

    The scale of an operand that holds inf or NaN is inf, so that the product is NaN and the step is skipped.
    """
    values = lax.stop_gradient(x)
    # In two steps: one kernel of a GPU reduces the rows, and a second one computes the scale of each on the way to the
    # largest (`_power_of_two` is monotonic). After a reduction to one number, the scale would take a third kernel.
    rows = values.ndim - 1 if axes is None and values.ndim > 1 else axes
    largest = functools.partial(jnp.max, axis=rows, keepdims=axes is not None, initial=0)
    if dtype == jnp.int8:
        # An int has no inf or NaN, and 0 * inf is NaN. The bits of numbers that are not negative have their order, and
        # those of NaN are the largest: the maximum of floats loses NaN in some shapes on XLA:CPU.
        bits = lax.bitcast_convert_type(jnp.abs(values.astype(jnp.float32)), jnp.int32)
        amax = lax.bitcast_convert_type(largest(bits), jnp.float32)
        scales = jnp.where(jnp.isfinite(amax), amax * np.float32(1 / 127), jnp.inf)
    else:  # NaN has a code of its own
        scales = _power_of_two(largest(jnp.abs(values)).astype(jnp.float32), dtype)
    scale = jnp.maximum(scales, np.float32(2.0**-120 if dtype == jnp.int8 else 2.0**-100))  # not 0: its inverse is inf
    if axes is None and scale.size != 0:
        scale = lax.reduce_max(scale, tuple(range(scale.ndim)))  # without an initial value, which takes a kernel more
    elif axes is None:
        scale = jnp.float32(1)
    scaled = values.astype(jnp.float32) * (1 / scale)
    rounded = lax.round(scaled, lax.RoundingMethod.TO_NEAREST_EVEN) if dtype == jnp.int8 else scaled
    return rounded.astype(dtype), _derived(scale, x)


def _power_of_two(amax: Array, dtype: DTypeLike) -> Array:
    """The smallest power of two with amax / scale <= the largest number of a dtype."""
    # That is 1.m * 2**k: the exponent of amax * 2**-k, plus one if its mantissa is above m.
    largest = np.float32(jnp.finfo(dtype).max)
    mantissa, k = int(largest.view(np.int32)) & 0x7FFFFF, int(np.frexp(largest)[1]) - 1
    bits = lax.bitcast_convert_type(amax * np.float32(2.0**-k), jnp.int32)
    return lax.bitcast_convert_type((bits + (0x7FFFFF - mantissa)) & 0x7F800000, jnp.float32)


def packed(x: Array, dtype: DTypeLike, axes: Axes = None) -> Pair:
    """`quantize`, with the values as bytes: JAX rounds floats that a checkpoint saves, which makes large E4M3 NaN."""
    values, scale = quantize(x, dtype, axes)
    return lax.bitcast_convert_type(values, jnp.uint8), scale


def summed(eqn: JaxprEqn, config: Format) -> tuple[Axes, Axes]:
    """The axes of each operand that share a scale: those that the product sums, or None for all of them."""
    is_by_row = config.granularity == "row" and _jaxpr.name(eqn) == "dot_general"  # A group of rows is no axis.
    return _jaxpr.contracted(eqn) if is_by_row else (None, None)


@jax.custom_jvp
def _derived(scale: Array, x: Array) -> Array:
    """The scale of `x`. `quantized_product` ignores its tangent, and nothing else may use it."""
    return scale


def _derived_rule(primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[Array, Any]:
    scale, x = primals
    return _derived(scale, x), _tangent_of(scale, tangents[1:], _no_derivative)


_derived.defjvp(_derived_rule, symbolic_zeros=True)


def quantized_product(eqn: JaxprEqn, config: Format, dtype: DTypeLike) -> Callable[..., Array]:
    """A product as a function of its operands, and of the packed 8-bit values and scales of the first two.

    Its value depends on the latter, and its derivative is with respect to the former, in their dtypes. `dtype` is that
    of the result.
    """
    eqn, others = _evaluate.with_result(eqn, config.carrier), len(eqn.invars) - 2
    unpack = lambda q, scale: (lax.bitcast_convert_type(q, config.forward), scale)

    def forward(*args: Array) -> Array:
        sizes, (qx, sx, qy, sy) = args[2 : 2 + others], args[2 + others :]
        return _dot(eqn, [unpack(qx, sx), unpack(qy, sy), *sizes], config, dtype)

    product = jax.custom_jvp(forward)

    def rule(primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[Array, Any]:
        out = forward(*primals)
        moving = [i for i in range(2) if not isinstance(tangents[i], SymbolicZero)]
        # The cotangent of an operand needs the other operand. A scale cannot vary along an axis that is summed, and the
        # backward products sum other axes, so with scales by row that operand is quantized again.
        sizes, pairs = primals[2 : 2 + others], primals[2 + others :]
        is_by_row = summed(eqn, config)[0] is not None
        kept = [x for i in moving for x in ([primals[1 - i]] if is_by_row else pairs[2 - 2 * i : 4 - 2 * i])]
        pull_back = functools.partial(_pull_back, eqn, config, [jax.typeof(x) for x in primals[:2]], moving)
        return out, _tangent_of(out, tangents[:2], pull_back, [*sizes, *kept])

    product.defjvp(rule, symbolic_zeros=True)
    return product


def _pull_back(
    eqn: JaxprEqn, config: Format, avals: Sequence[Any], moving: Sequence[int], g: Array, *kept: Array
) -> list[Array]:
    """The cotangents of some operands: products of a quantized cotangent and the other operand, which was kept."""
    carrier = np.dtype(config.carrier)
    low = [aval.update(dtype=carrier) for aval in avals]
    is_by_row, others = summed(eqn, config)[0] is not None, len(eqn.invars) - 2

    @jax.custom_jvp
    def cotangents(g: Array, *kept: Array) -> list[Array]:
        sizes, values = kept[:others], iter(kept[others:])
        # Of each operand: its 8-bit values and scales, or with scales by row, the operand and its 8-bit dtype.
        of_g = (g, config.backward) if is_by_row else quantize(g, config.backward)
        found = []
        for i in moving:
            other: Any = next(values)
            if is_by_row:
                other = other, config.forward
            else:
                other = lax.bitcast_convert_type(other, config.forward), next(values)
            run = functools.partial(_run, config=config, dtype=avals[i].dtype)
            types = [jax.typeof(g).update(dtype=carrier), low[1 - i], *map(jax.typeof, sizes)]
            found.append(cotangent(eqn, i, low[i], types, [of_g, other, *sizes], run))
        return found

    cotangents.defjvp(_no_derivative)
    found: list[Array] = cotangents(g, *kept)
    return found


def _run(eqn: JaxprEqn, operands: Sequence[Any], config: Format, dtype: DTypeLike) -> Array:
    """A product of the backward pass."""
    axes = summed(eqn, config)
    if axes[0] is not None:
        operands = [quantize(x, low, along) for (x, low), along in zip(operands, axes, strict=True)]
    return _dot(eqn, operands, config, dtype)


def _dot(eqn: JaxprEqn, operands: Sequence[Any], config: Format, dtype: DTypeLike) -> Array:
    """A product of quantized operands, which for a ragged one are followed by the sizes of its groups.

    With one scale for each operand, it is a product of the dequantized operands, which are exact in bfloat16. XLA:GPU
    compiles this form to a float8 product. Otherwise the scales are applied to the result.
    """
    (x, y, *sizes), carrier = operands, np.dtype(config.carrier)
    if x[1].ndim == 0 and carrier == jnp.bfloat16 and config.forward != jnp.int8:
        # XLA:GPU would merge products that share an operand (q, k and v) into one 16-bit product, because their scales
        # differ. One barrier around both scales of each product prevents the merge.
        scales = lax.optimization_barrier((x[1], y[1]))
        low = [q.astype(carrier) * scale.astype(carrier) for q, scale in zip((x[0], y[0]), scales, strict=True)]
        return value(_evaluate.with_result(eqn, dtype), [*low, *sizes])
    terms, low = _jaxpr.summed_terms(eqn), [x[0], y[0]]
    total = jnp.float32
    if config.forward == jnp.int8 and isinstance(terms, int) and terms <= _INT8_TERMS:
        total = jnp.int32
    elif config.forward == jnp.int8:
        low = [q.astype(carrier) for q in low]
    sums = value(_evaluate.with_result(eqn, total), [*low, *sizes]).astype(jnp.float32)
    scale = (
        x[1] * y[1] if x[1].ndim == 0 else lax.dot_general(x[1], y[1], **_jaxpr.dot_options(eqn), precision="highest")
    )
    return (sums * scale).astype(dtype)


# The tangent of a product: a linear function of its last inputs, the tangents of operands. Only its transpose
# (`pull_back`) is known. Reverse-mode differentiation transposes it. Forward mode would evaluate it, which raises.
_tangent = _jaxpr.core().Primitive("quantized_tangent")


def _no_derivative(*_: Any, **__: Any) -> Any:
    raise TypeError(
        "8-bit products have no forward-mode derivative and no second one (jvp, jacfwd, hessian, a gradient of a "
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
