"""Trace a product in a format of 8 bits as one equation, whose operands are not encoded yet.

`autocast(fun, Unencoded(format))` decides about products as `autocast(fun, format)` does, and passes their operands on
as they are. So a report can compute each product without its rounding, and with the derivative of a product.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.interpreters import ad
from jax.typing import DTypeLike

from jamp._jaxprs import ir
from jamp._jaxprs.define import batch_first, define
from jamp._jaxprs.ir import JaxprEqn
from jamp._products.formats.protocol import Axes, Encoded, Format
from jamp._products.multiply import multiply


@dataclasses.dataclass(frozen=True)
class Encoding:
    """How the operands of a product are encoded.

    Attributes:
      format: The format.
      codes: The dtype of the codes of each operand.
      primitive, params: The product, with the dtype of its result.
    """

    format: Format
    codes: tuple[Any, ...]
    primitive: Any
    params: tuple[tuple[str, Any], ...]

    def product(self, operands: Sequence[Any]) -> Array:
        """The product of encoded operands in float32. It has no derivative."""
        x, y, *sizes = map(lax.stop_gradient, operands)
        params = dict(self.params)
        encoded = [
            self.format.encode(z, dtype, axes)
            for z, dtype, axes in zip((x, y), self.codes, self.format.axes(self.primitive.name, params), strict=True)
        ]
        return self.format.multiply(multiply, self.primitive, params, encoded, sizes, np.dtype(np.float32))

    def in_float32(self, operands: Sequence[Any]) -> Array:
        """The product without codes, in float32."""
        x, y, *sizes = operands
        params = {**dict(self.params), "precision": (lax.Precision.HIGHEST,) * 2}
        return multiply(self.primitive, [x.astype(jnp.float32), y.astype(jnp.float32), *sizes], params, jnp.float32)


def encoding_of(eqn: JaxprEqn) -> Encoding | None:
    """How the operands of an equation are encoded, if it is a product in a format."""
    return ir.params(eqn)["encoding"] if eqn.primitive is _unencoded_product else None


def without_codes(eqn: JaxprEqn, encoding: Encoding) -> JaxprEqn:
    """The product as an equation of its own primitive, whose operands may have several dtypes."""
    return eqn.replace(primitive=encoding.primitive, params=dict(encoding.params))


@dataclasses.dataclass(frozen=True)
class Unencoded(Format):
    """A format whose operands stay as they are, and whose products are equations with an `Encoding`."""

    format: Format

    name = property(lambda self: self.format.name)
    label = property(lambda self: self.format.label)
    forward = property(lambda self: self.format.forward)
    backward = property(lambda self: self.format.backward)
    carrier = property(lambda self: self.format.carrier)
    scale_dtype = property(lambda self: np.dtype(np.float32))
    min_size = property(lambda self: self.format.min_size)
    is_by_tensor = property(lambda self: self.format.is_by_tensor)
    is_differentiable = True

    def why_not(self, eqn: JaxprEqn, sizes: Sequence[Any]) -> str:
        return self.format.why_not(eqn, sizes)

    def axes(self, primitive: str, params: Mapping[str, Any]) -> tuple[Axes, Axes]:
        return self.format.axes(primitive, params)

    def encode(self, x: Array, dtype: DTypeLike, axes: Axes) -> Encoded:
        kind: Any = Encoded if dtype == self.forward else _Gradient
        as_it_is: Encoded = kind(x, jnp.ones((), self.scale_dtype))
        return as_it_is

    def sums(self, codes: Array, params: dict[str, Any], dtype: DTypeLike) -> np.dtype[Any]:
        return np.dtype(dtype)

    def multiply(
        self,
        bind: Callable[..., Array],
        primitive: Any,
        params: dict[str, Any],
        operands: Sequence[Encoded],
        sizes: Sequence[Array],
        dtype: DTypeLike,
    ) -> Array:
        codes = tuple(self.backward if isinstance(x, _Gradient) else self.forward for x in operands)
        params = {**params, "preferred_element_type": np.dtype(dtype)}
        encoding = Encoding(self.format, codes, primitive, tuple(params.items()))
        return _bind(encoding, [*(x.codes for x in operands), *sizes])


class _Gradient(NamedTuple):
    """An operand with the codes of a gradient. Any other is read from the residuals, and has the forward ones."""

    codes: Array
    scales: Array


def _bind(encoding: Encoding, operands: Sequence[Any]) -> Array:
    """The product as one equation. It has the parameters of the product too, by which its FLOPs are counted."""
    result: Array = _unencoded_product.bind(*operands, encoding=encoding, **dict(encoding.params))
    return result


def _result_dtype(encoding: Encoding) -> np.dtype[Any]:
    return np.dtype(dict(encoding.params)["preferred_element_type"])


def _run(*operands: Any, encoding: Encoding, **_: Any) -> Array:
    return encoding.product(operands).astype(_result_dtype(encoding))


def _type(*operands: Any, encoding: Encoding, **_: Any) -> Any:
    of_one_dtype = [x.update(dtype=_result_dtype(encoding)) for x in operands[:2]]
    result, _ = encoding.primitive.abstract_eval(*of_one_dtype, *operands[2:], **dict(encoding.params))
    return result.update(weak_type=False)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, encoding: Encoding, **_: Any) -> tuple[Any, Any]:
    """What a report does not enter, such as a shard_map, is differentiated with the derivative of the product."""
    given = [ad.instantiate_zeros(t) for t in tangents[:2]]
    fun = lambda x, y: encoding.in_float32([x, y, *primals[2:]]).astype(_result_dtype(encoding))
    return _bind(encoding, primals), jax.jvp(fun, list(primals[:2]), given)[1]


def _batch(axis: Any, args: Sequence[Any], dims: Sequence[Any], *, encoding: Encoding, **_: Any) -> tuple[Any, int]:
    del axis
    # Each example has scales of its own.
    return lax.map(lambda xs: _bind(encoding, xs), batch_first(args, dims)), 0


_unencoded_product: Any = define("unencoded_product", _run, _type, jvp=_jvp, batch=_batch)
