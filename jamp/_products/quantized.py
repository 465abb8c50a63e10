"""The arithmetic of products with operands of 8 bits, in any `Format`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jamp._compiler_hints import row_major
from jamp._jaxprs import ir
from jamp._jaxprs.define import batch_first, define
from jamp._jaxprs.ir import JaxprEqn
from jamp._products.arithmetic import cotangent
from jamp._products.formats.protocol import Axes, Encoded, Format
from jamp._products.formats.scaled import scaled_by
from jamp._products.formats.scales import no_derivative
from jamp._products.multiply import multiply
from jamp._products.product import Product
from jamp._rounded import as_stored

QUANTIZE = "jamp.quantize"  # the name scope of what quantizes operands


def packed(x: Array, format: Format, axes: Axes) -> list[Array]:
    """Return the codes and the scales of an operand, floats of 8 bits as bytes.

    JAX rounds floats that a checkpoint saves, which makes large E4M3 NaN.
    """
    codes, scales = format.encode(x, format.forward, axes)
    return [row_major(_as_bytes(codes)), _as_bytes(scales)]


def _as_bytes(x: Array) -> Array:
    if x.dtype.itemsize > 1:
        return x
    return lax.bitcast_convert_type(x, jnp.uint4 if x.dtype.name.startswith("float4") else jnp.uint8)


class Quantized(NamedTuple):
    """A product of encoded operands: two operands, the sizes of its groups if it is ragged, and both `packed`.

    Its value depends on the codes, and its derivative is with respect to the operands, in their dtypes.
    """

    format: Format

    def read(self, product: Product, operands: Sequence[Array]) -> list[Array]:
        return list(operands)

    def value(self, product: Product, operands: Sequence[Array]) -> Array:
        sizes, packs, params = operands[2 : product.arity], operands[product.arity :], dict(product.params)
        encoded = [self._unpacked(packs[:2]), self._unpacked(packs[2:])]
        out = self.format.multiply(multiply, product.primitive, params, encoded, sizes, product.dtype)
        is_wider = self.format.sums(encoded[0].codes, params, product.dtype).itemsize > product.dtype.itemsize
        return _as_result(out, params) if is_wider and product.primitive.name == "dot_general" else out

    def sums(self, product: Product, operands: Sequence[Array]) -> Array:
        """The product of the codes alone, in the dtype of the result: see `has_narrow_sums`."""
        sizes, (x, _, y, _) = operands[2 : product.arity], operands[product.arity :]
        values = [lax.bitcast_convert_type(v, self.format.forward) for v in (x, y)]
        return multiply(product.primitive, [*values, *sizes], dict(product.params), product.dtype)

    def residuals(self, product: Product, operands: Sequence[Array], perturbed: Sequence[int]) -> list[Array]:
        """What the backward products read: the packs of the other operands, or these operands, to encode them again.

        A scale cannot vary along an axis that is summed, and the backward products sum other axes.
        """
        sizes, others = operands[2 : product.arity], _others(perturbed)
        if self._is_encoded_again(product):
            return [*sizes, *(operands[j] for j in others)]
        start = product.arity
        return [*sizes, *(x for j in others for x in operands[start + 2 * j : start + 2 * j + 2])]

    def tangent(
        self, product: Product, perturbed: Sequence[int], residuals: Sequence[Array], tangents: Sequence[Any]
    ) -> Array:
        no_derivative()

    def cotangents(
        self, product: Product, perturbed: Sequence[int], types: Sequence[Any], residuals: Sequence[Array], g: Array
    ) -> list[Array]:
        def pull_back(g: Array, *residuals: Array) -> list[Array]:
            # What computed it may have more digits (see `_rounded.py`), and XLA:GPU would store those: in a float32
            # model, float32.
            g = as_stored(g)
            sizes, rest = residuals[: product.arity - 2], residuals[product.arity - 2 :]
            # Of each operand: its codes and scales, or, if it is encoded again, the operand and the dtype of its codes.
            of_g: Any = (g, self.format.backward)
            values: list[Any] = [(x, self.format.forward) for x in rest]
            if not self._is_encoded_again(product):
                of_g = self.format.encode(g, self.format.backward, None)
                values = [self._unpacked(rest[j : j + 2]) for j in range(0, len(rest), 2)]
            of = dict(zip(_others(perturbed), values, strict=True))
            return [
                self._cotangent(product, i, aval, of_g, of[1 - i], sizes)
                for i, aval in zip(perturbed, types, strict=True)
            ]

        if self.format.is_differentiable:
            return pull_back(g, *residuals)
        without_derivative = jax.custom_jvp(pull_back)
        without_derivative.defjvp(no_derivative)
        found: list[Array] = without_derivative(g, *residuals)
        return found

    def _cotangent(self, product: Product, i: int, aval: Any, of_g: Any, other: Any, sizes: Sequence[Array]) -> Array:
        low = lambda aval: aval.update(dtype=np.dtype(self.format.carrier))
        types = [low(jax.typeof(of_g[0])), low(jax.typeof(other[0])), *map(jax.typeof, sizes)]

        def run(eqn: JaxprEqn, operands: list[Any]) -> Array:
            params, (x, y, *rest) = ir.params(eqn), operands
            axes = self.format.axes(ir.name(eqn), params)
            encoded = [x, y]
            if axes[0] is not None:
                encoded = [self.format.encode(z, dtype, along) for (z, dtype), along in zip(encoded, axes, strict=True)]
            return self.format.multiply(multiply, eqn.primitive, params, encoded, rest, aval.dtype)

        return cotangent(product, i, low(aval), types, [of_g, other, *sizes], run)

    def _is_encoded_again(self, product: Product) -> bool:
        return self.format.axes(product.primitive.name, dict(product.params))[0] is not None

    def _unpacked(self, pack: Sequence[Array]) -> Encoded:
        codes, scales = pack
        is_as_it_was = lambda x, dtype: x.dtype == dtype or x.dtype.itemsize > 1
        as_dtype = lambda x, dtype: x if is_as_it_was(x, dtype) else lax.bitcast_convert_type(x, dtype)
        return Encoded(as_dtype(codes, self.format.forward), as_dtype(scales, self.format.scale_dtype))


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
    """Whether the sums of a product have the dtype of its result, and one scale for each operand."""
    is_by_tensor = isinstance(product.format, Format) and product.format.is_by_tensor
    return is_by_tensor and product.dtype == jnp.bfloat16


def _others(perturbed: Sequence[int]) -> list[int]:
    """Which of the two operands the tangents of the perturbed ones are multiplied with."""
    return [j for j in range(2) if 1 - j in perturbed]


def _scaled(sums: Array, x: Array, y: Array) -> Array:
    at_batch = lambda z: z.reshape(z.shape + (1,) * (sums.ndim - z.ndim))  # under vmap, a scale for each example
    return scaled_by(sums, at_batch(x), at_batch(y), sums.dtype)


# The result of a product from its sums, which have its derivative: its tangents and cotangents are not scaled. So the
# backward pass can keep the sums, as a GPU writes them, and scales them in what reads the result.
scaled_sums: Any = define(
    "scaled_sums",
    _scaled,
    lambda sums, *_: sums,
    jvp=lambda xs, tangents: (scaled_sums.bind(*xs), tangents[0]),
    transpose=lambda ct, *_: [ct, None, None],
    batch=lambda _, args, dims: (scaled_sums.bind(*batch_first(args, dims)), 0),
)
