"""The arithmetic of products of 8-bit operands."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jamp._barrier import row_major
from jamp._jaxprs import ir
from jamp._jaxprs.ir import JaxprEqn
from jamp._jaxprs.manual_axes import partitions
from jamp._products.arithmetic import cotangent
from jamp._products.formats import Float8, Format
from jamp._products.product import Product
from jamp._products.wide_dot import multiply, multiply_back
from jamp._rounded import as_stored

QUANTIZE = "jamp.quantize"  # the name scope of what quantizes operands
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
    return row_major(lax.bitcast_convert_type(values, jnp.uint8)), scale


def summed(name: str, params: Mapping[str, Any], config: Format) -> tuple[Axes, Axes]:
    """The axes of each operand that share a scale: those that the product sums, or None for all of them."""
    is_by_row = config.granularity == "row" and name == "dot_general"  # A group of rows is not an axis.
    x, y = ir.contracted(params) if is_by_row else (None, None)
    return x, y


class Quantized(NamedTuple):
    """A product of 8-bit operands: two operands, the sizes of its groups if it is ragged, and a packed `Pair` for each.

    Its value depends on the pairs, and its derivative is with respect to the operands, in their dtypes.
    """

    config: Format

    def read(self, product: Product, operands: Sequence[Array]) -> list[Array]:
        return list(operands)

    def value(self, product: Product, operands: Sequence[Array]) -> Array:
        sizes, pairs = operands[2 : product.arity], operands[product.arity :]
        unpacked = [self._unpacked(pairs[:2]), self._unpacked(pairs[2:])]
        params = dict(product.params)
        out = self._dot(multiply, product.primitive, params, unpacked, sizes, product.dtype)
        is_wider = self._sums(params, unpacked, product.dtype).itemsize > product.dtype.itemsize
        return _as_result(out, params) if is_wider and product.primitive.name == "dot_general" else out

    def sums(self, product: Product, operands: Sequence[Array]) -> Array:
        """The product of the 8-bit values alone, in the dtype of the result: see `has_narrow_sums`."""
        sizes, (x, _, y, _) = operands[2 : product.arity], operands[product.arity :]
        values = [lax.bitcast_convert_type(v, self.config.forward) for v in (x, y)]
        return multiply(product.primitive, [*values, *sizes], dict(product.params), product.dtype)

    def residuals(self, product: Product, operands: Sequence[Array], perturbed: Sequence[int]) -> list[Array]:
        """The pairs of the operands that tangents are multiplied with, or with scales by row these operands.

        A scale cannot vary along an axis that is summed, and the backward products sum other axes. So with scales by
        row, operands are quantized again.
        """
        sizes, others = operands[2 : product.arity], _others(perturbed)
        if self._is_by_row(product):
            return [*sizes, *(operands[j] for j in others)]
        start = product.arity
        return [*sizes, *(x for j in others for x in operands[start + 2 * j : start + 2 * j + 2])]

    def tangent(
        self, product: Product, perturbed: Sequence[int], residuals: Sequence[Array], tangents: Sequence[Any]
    ) -> Array:
        _no_derivative()

    def cotangents(
        self, product: Product, perturbed: Sequence[int], types: Sequence[Any], residuals: Sequence[Array], g: Array
    ) -> list[Array]:
        @jax.custom_jvp
        def pull_back(g: Array, *residuals: Array) -> list[Array]:
            # What computed it may have more digits, and XLA:GPU would store those: in a float32 model, float32.
            g = as_stored(g)
            sizes, rest = residuals[: product.arity - 2], residuals[product.arity - 2 :]
            # Of each operand: its 8-bit values and scales, or with scales by row, the operand and its 8-bit dtype.
            if self._is_by_row(product):
                of_g, values = (g, self.config.backward), [(x, self.config.forward) for x in rest]
            else:
                of_g = quantize(g, self.config.backward)
                values = [self._unpacked(rest[j : j + 2]) for j in range(0, len(rest), 2)]
            of = dict(zip(_others(perturbed), values, strict=True))
            return [
                self._cotangent(product, i, aval, of_g, of[1 - i], sizes)
                for i, aval in zip(perturbed, types, strict=True)
            ]

        pull_back.defjvp(_no_derivative)
        found: list[Array] = pull_back(g, *residuals)
        return found

    def _cotangent(self, product: Product, i: int, aval: Any, of_g: Any, other: Any, sizes: Sequence[Array]) -> Array:
        low = lambda aval: aval.update(dtype=np.dtype(self.config.carrier))
        types = [low(jax.typeof(of_g[0])), low(jax.typeof(other[0])), *map(jax.typeof, sizes)]

        def run(eqn: JaxprEqn, operands: list[Any]) -> Array:
            params, (x, y, *rest) = ir.params(eqn), operands
            axes = summed(ir.name(eqn), params, self.config)
            pairs = [x, y]
            if axes[0] is not None:  # Of each: the array, and the 8-bit dtype.
                pairs = [quantize(array, dtype, along) for (array, dtype), along in zip(pairs, axes, strict=True)]
            return self._dot(multiply_back, eqn.primitive, params, pairs, rest, aval.dtype)

        return cotangent(product, i, low(aval), types, [of_g, other, *sizes], run)

    def _is_by_row(self, product: Product) -> bool:
        return summed(product.primitive.name, dict(product.params), self.config)[0] is not None

    def _unpacked(self, pair: Sequence[Array]) -> Pair:
        values, scale = pair
        return lax.bitcast_convert_type(values, self.config.forward), scale

    def _dot(
        self,
        multiply: Callable[..., Array],
        primitive: Any,
        params: dict[str, Any],
        pairs: Sequence[Pair],
        sizes: Sequence[Array],
        dtype: DTypeLike,
    ) -> Array:
        """The product of two quantized operands, and of the sizes of groups if it is a ragged one.

        The scales are applied to the result. A product of dequantized operands would be in 16 bit on GPUs: where Triton
        computes products, as it does by default, XLA removes a cast to float8 if a cast to bfloat16 follows.
        """
        (x, y), total = pairs, self._sums(params, pairs, dtype)
        is_int8 = self.config.forward == jnp.int8
        low = [q.astype(self.config.carrier) if is_int8 and total != jnp.int32 else q for q in (x[0], y[0])]
        sums = multiply(primitive, [*low, *sizes], params, total)
        of_x, of_y = (x[1], y[1]) if x[1].ndim == 0 else _spread(params, jax.typeof(sums), x[1], y[1])
        return _scaled_by(sums, of_x, of_y, dtype)

    def _sums(self, params: dict[str, Any], pairs: Sequence[Pair], dtype: DTypeLike) -> np.dtype[Any]:
        """The dtype of the sums of a product."""
        values, terms = pairs[0][0], ir.contracted(params)[0]
        n = math.prod(values.shape[i] for i in terms)
        if self.config.forward == jnp.int8:
            return np.dtype(np.int32 if isinstance(n, int) and n <= _INT8_TERMS else np.float32)
        # The scales are powers of two, and bfloat16 has the range of float32.
        return np.dtype(dtype if dtype == jnp.bfloat16 else np.float32)


def _spread(params: dict[str, Any], out: Any, x: Array, y: Array) -> list[Array]:
    """The scales of both operands at the places of the result, of type `out`: the batch, then the axes of each.

    By shapes. A checkpoint policy that keeps products would keep their products with ones.
    """
    (of_x, of_y), (batch_of_x, batch_of_y) = params["dimension_numbers"]
    rank, n = len(out.shape), len(batch_of_x)
    first = x.ndim - len(of_x)  # where the axes of y begin
    scales = [_moved(x, of_x, batch_of_x, range(first, rank)), _moved(y, of_y, batch_of_y, range(n, first))]
    if params["out_sharding"] is None:
        return scales
    spec = partitions(out.sharding.spec)
    lies = lambda z: PartitionSpec(*(axes if size != 1 else None for axes, size in zip(spec, z.shape, strict=True)))
    return [jax.sharding.reshard(z, NamedSharding(out.sharding.mesh, lies(z))) for z in scales]


def _moved(z: Array, summed: Sequence[int], batch: Sequence[int], others: Sequence[int]) -> Array:
    """A scale with its batch axes first, without those that are summed, and with the axes of the `others`."""
    free = [i for i in range(z.ndim) if i not in (*summed, *batch)]
    kept = lax.squeeze(z.transpose(*batch, *free, *summed), range(len(batch) + len(free), z.ndim))
    return lax.expand_dims(kept, others)


def _as_result(out: Array, params: dict[str, Any]) -> Array:
    """The result of a product as one of the primitive `dot_general`: its product with 1, which XLA removes.

    So a checkpoint policy that keeps products keeps this result, and not the sums in 32 bits that it is rounded from.
    Operands and result have equal batch axes, because a policy may look at those.
    """
    batch = tuple(range(len(params["dimension_numbers"][1][0])))
    one = jnp.ones(out.shape[: len(batch)], out.dtype)
    dimensions = ((), ()), (batch, batch)
    with jax.named_scope(QUANTIZE):
        return lax.dot_general(out, one, dimensions, precision=lax.Precision.DEFAULT, preferred_element_type=out.dtype)


def has_narrow_sums(product: Product) -> bool:
    """Whether the sums of an 8-bit product have the dtype of its result, and one scale for each operand."""
    is_by_tensor = isinstance(product.format, Float8) and product.format.granularity == "tensor"
    return is_by_tensor and product.dtype == jnp.bfloat16


def _scaled_by(sums: Array, x: Array, y: Array, dtype: DTypeLike) -> Array:
    """The result of a product from its sums and the scales of its operands."""
    # One after the other, because the product of two scales can be 0 or inf where the result is a number.
    return (sums.astype(jnp.float32) * jnp.minimum(x, y) * jnp.maximum(x, y)).astype(dtype)


def _others(perturbed: Sequence[int]) -> list[int]:
    """Which of the two operands the tangents of the perturbed ones are multiplied with."""
    return [j for j in range(2) if 1 - j in perturbed]


def _no_derivative(*_: Any, **__: Any) -> NoReturn:
    raise TypeError(
        "8-bit products have no forward-mode derivative and no second one (jvp, jacfwd, hessian, a gradient of a "
        "gradient). Use a 16-bit compute dtype there: jamp.autocast(fun, carrier), such as jamp.autocast(fun, "
        "jnp.bfloat16)."
    )


@jax.custom_jvp
def _derived(scale: Array, x: Array) -> Array:
    """The scale of `x`. Products ignore its tangent, and no other use of it has a derivative.

    Without it, the second derivative of a product would be zero where it is unknown.
    """
    return scale


def _derived_rule(primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[Array, Any]:
    (scale, x), t = primals, tangents[1]
    aval = jax.typeof(scale)
    is_zero = isinstance(t, SymbolicZero)
    return _derived(scale, x), SymbolicZero(aval.to_tangent_aval()) if is_zero else _scale_tangent.bind(t, aval=aval)


def _batch_scale_tangent(args: Sequence[Any], dims: Sequence[Any], *, aval: Any) -> tuple[Any, int]:
    return _scale_tangent.bind(*args, aval=aval.update(shape=(args[0].shape[dims[0]], *aval.shape))), 0


_derived.defjvp(_derived_rule, symbolic_zeros=True)
_scale_tangent = core.Primitive("scale_tangent")
_scale_tangent.def_impl(_no_derivative)
_scale_tangent.def_abstract_eval(lambda _, aval: aval)
ad.primitive_jvps[_scale_tangent] = _no_derivative
ad.primitive_transposes[_scale_tangent] = _no_derivative
batching.primitive_batchers[_scale_tangent] = _batch_scale_tangent
mlir.register_lowering(_scale_tangent, _no_derivative)


# The result of a product from its sums, which have its derivative: its tangents and cotangents are not scaled. So the
# backward pass can keep the sums, as a GPU writes them, and scales them in what reads the result.
scaled_sums = core.Primitive("scaled_sums")


def _scaled(sums: Array, x: Array, y: Array) -> Array:
    at_batch = lambda z: z.reshape(z.shape + (1,) * (sums.ndim - z.ndim))  # under vmap, a scale for each example
    return _scaled_by(sums, at_batch(x), at_batch(y), sums.dtype)


def _batch_scaled_sums(args: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, int]:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    first = lambda x, d: jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
    return scaled_sums.bind(*map(first, args, dims)), 0


scaled_sums.def_impl(_scaled)
scaled_sums.def_abstract_eval(lambda sums, *_: sums)
ad.primitive_jvps[scaled_sums] = lambda xs, tangents: (scaled_sums.bind(*xs), tangents[0])
ad.primitive_transposes[scaled_sums] = lambda ct, *_: [ct, None, None]
batching.primitive_batchers[scaled_sums] = _batch_scaled_sums
mlir.register_lowering(scaled_sums, mlir.lower_fun(_scaled, multiple_results=False))
