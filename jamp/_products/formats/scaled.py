"""Formats with one scale for each operand, or one for each of its rows: `Float8` and `Int8`."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jamp._cast import check_floating
from jamp._jaxprs import ir
from jamp._jaxprs.manual_axes import partitions
from jamp._numbers import with_numbers
from jamp._products.formats.protocol import Axes, Encoded, Format, check_size
from jamp._products.formats.scales import derived, power_of_two

_INT8_TERMS = 2**17  # of a sum that cannot leave int32: 127**2 * 2**17 < 2**31


class _Scaled(Format):
    """A format whose scales multiply the result of a product.

    A product of dequantized operands would be in 16 bit on GPUs: where Triton computes products, as it does by default,
    XLA removes a cast to float8 if a cast to bfloat16 follows (for an H200, jaxlib 0.10.2; compare openxla/xla#41605).
    """

    scale_dtype: ClassVar[Any] = np.dtype(np.float32)

    def axes(self, primitive: str, params: Mapping[str, Any]) -> tuple[Axes, Axes]:
        if self.is_by_tensor or primitive != "dot_general":  # A group of rows is not an axis.
            return None, None
        return ir.contracted(params)

    def encode(self, x: Array, dtype: DTypeLike, axes: Axes = None) -> Encoded:
        return quantize(x, dtype, axes)

    def multiply(
        self,
        bind: Callable[..., Array],
        primitive: Any,
        params: dict[str, Any],
        operands: Sequence[Encoded],
        sizes: Sequence[Array],
        dtype: DTypeLike,
    ) -> Array:
        x, y = operands
        total = self.sums(x.codes, params, dtype)
        is_int8 = self.forward == jnp.int8
        low = [q.astype(self.carrier) if is_int8 and total != jnp.int32 else q for q in (x.codes, y.codes)]
        sums = bind(primitive, [*low, *sizes], params, total)
        of_x, of_y = x.scales, y.scales
        if of_x.ndim:
            of_x, of_y = _spread(params, jax.typeof(sums), of_x, of_y)
        return scaled_by(sums, of_x, of_y, dtype)

    def sums(self, codes: Array, params: dict[str, Any], dtype: DTypeLike) -> np.dtype[Any]:
        n = math.prod(codes.shape[i] for i in ir.contracted(params)[0])
        if self.forward == jnp.int8:
            return np.dtype(np.int32 if isinstance(n, int) and n <= _INT8_TERMS else np.float32)
        # The scales are powers of two, and bfloat16 has the range of float32.
        return np.dtype(dtype if dtype == jnp.bfloat16 else np.float32)


@dataclasses.dataclass(frozen=True)
class Float8(_Scaled):
    """Matrix products in float8, for `autocast(fun, jamp.Float8())`. Other products run in `carrier`.

    On a GPU, compile with `jax.jit(step, compiler_options={"xla_gpu_enable_triton_gemm": False})`, an option of the
    outermost `jit`, or set `XLA_FLAGS=--xla_gpu_enable_triton_gemm=false`. Without it, a step of two layers did not
    compile in 70 s on an H200 with JAX 0.10.2, because XLA tries many Triton kernels for each float8 product. Products
    that stay in 16 bit may take longer with it.

    The operands of a product are divided by a scale, a power of two that brings the largest absolute value of the
    tensor just below the largest float8, and rounded. Scales are computed just in time, so there is no state. Products
    of float32 and of 16-bit operands are quantized, also in a model that was written in bfloat16 by hand.
    [Some products](../8-bit.md#which-products) stay in the carrier. The smallest scale is 2**-100, so in a product,
    elements below 1e-32 lose digits, and those below 7e-34 become 0.

    Args:
      forward: The dtype of the operands of a product. E4M3 has more digits.
      backward: The dtype of the gradient that the two backward products read. E5M2 has more range.
      carrier: The dtype of the results of products and of all other 16-bit values: bfloat16 or float16.
      granularity: "tensor" for one scale for each operand, or "row" for one for each row or column of the product. The
        latter helps if rows differ much in size. It keeps 16-bit operands for the backward pass, and quantizes them
        again there.
      min_size: The smallest size of a product, in each of its three dimensions, that runs in float8.

    Raises:
      ValueError: If a dtype, `granularity` or `min_size` is not one of these.

    Examples:
      >>> import jax, jax.numpy as jnp, jamp
      >>> loss = jamp.autocast(lambda w, x: jnp.mean((jax.nn.relu(x @ w[0]) @ w[1]) ** 2), jamp.Float8())
      >>> step = jax.jit(jax.grad(loss), compiler_options={"xla_gpu_enable_triton_gemm": False})
      >>> step(jnp.ones((2, 128, 128)), jnp.ones((128, 128))).dtype
      dtype('float32')

    References:
      Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433.
    """

    forward: DTypeLike = jnp.float8_e4m3fn
    backward: DTypeLike = jnp.float8_e5m2
    carrier: DTypeLike = jnp.bfloat16
    granularity: Literal["tensor", "row"] = "tensor"
    min_size: int = 128

    name: ClassVar[str] = "float8"

    @property
    def is_by_tensor(self) -> bool:
        """Whether each operand has one scale."""
        return self.granularity == "tensor"

    def __post_init__(self) -> None:
        with_numbers(self)
        usual = {"forward": (8, "float8_e4m3fn"), "backward": (8, "float8_e5m2"), "carrier": (16, "bfloat16")}
        for name, (bits, example) in usual.items():
            dtype = check_floating(name, getattr(self, name))
            # Of fewer bits, a dtype of NumPy has a byte too. And e8m0 is for scales: it has no sign and no 0.
            if jnp.finfo(dtype).bits != bits or dtype == jnp.float8_e8m0fnu:
                cure = f"Write jamp.Float8({name}=jnp.{example})."
                raise ValueError(f"{name} must be a signed float of {bits} bits, got {dtype.name}. {cure}")
            object.__setattr__(self, name, dtype)
        if self.granularity not in ("tensor", "row"):
            raise ValueError(f"granularity must be 'tensor' or 'row', got {self.granularity!r}.")
        check_size(self.min_size)


@dataclasses.dataclass(frozen=True)
class Int8(_Scaled):
    """Matrix products in int8, for `autocast(fun, jamp.Int8())`. Other products run in bfloat16.

    For TPUs v5e and v6e, which have no float8, and int8 at twice the rate of bfloat16. Each row or column of an operand
    is divided by a scale, its largest absolute value over 127, and rounded to nearest. The sums are int32. The backward
    products are int8 too, and quantize their operands again, because they sum other axes. Scales are computed just in
    time, so there is no state. [Some products](../8-bit.md#which-products) stay in bfloat16.

    Args:
      min_size: The smallest size of a product, in each of its three dimensions, that runs in int8.

    Raises:
      ValueError: If `min_size` is not a positive int.

    Examples:
      >>> import jax, jax.numpy as jnp, jamp
      >>> loss = jamp.autocast(lambda w, x: jnp.mean((jax.nn.relu(x @ w[0]) @ w[1]) ** 2), jamp.Int8())
      >>> jax.grad(loss)(jnp.ones((2, 128, 128)), jnp.ones((128, 128))).dtype
      dtype('float32')

    References:
      Wortsman et al., Stable and low-precision training for large-scale vision-language models, arXiv:2304.13013.
    """

    min_size: int = 128

    name: ClassVar[str] = "int8"
    forward: ClassVar[np.dtype[Any]] = np.dtype(np.int8)
    backward: ClassVar[np.dtype[Any]] = np.dtype(np.int8)
    carrier: ClassVar[np.dtype[Any]] = np.dtype(jnp.bfloat16)
    is_by_tensor: ClassVar[bool] = False

    def __post_init__(self) -> None:
        with_numbers(self)
        check_size(self.min_size)


def quantize(x: Array, dtype: DTypeLike, axes: Axes = None) -> Encoded:
    """Return the 8-bit values of an array, and their scales: float32, one or (with axes) one along these axes.

    The scale of an operand that holds inf or NaN is inf, so that the product is NaN and the step is skipped.
    """
    values = lax.stop_gradient(x)
    # In two steps: one kernel of a GPU reduces the rows, and a second one computes the scale of each on the way to the
    # largest (`power_of_two` is monotonic). After a reduction to one number, the scale would take a third kernel.
    rows = values.ndim - 1 if axes is None and values.ndim > 1 else axes
    largest = functools.partial(jnp.max, axis=rows, keepdims=axes is not None, initial=0)
    if dtype == jnp.int8:
        # An int has no inf or NaN, and 0 * inf is NaN. The bits of numbers that are not negative have their order, and
        # the bits of NaN are the largest. XLA:CPU's maximum of floats drops NaN in some shapes (openxla/xla#21461).
        bits = lax.bitcast_convert_type(jnp.abs(values.astype(jnp.float32)), jnp.int32)
        amax = lax.bitcast_convert_type(largest(bits), jnp.float32)
        scales = jnp.where(jnp.isfinite(amax), amax * np.float32(1 / 127), jnp.inf)
    else:  # NaN has a code of its own
        scales = power_of_two(largest(jnp.abs(values)).astype(jnp.float32), dtype)
    scale = jnp.maximum(scales, np.float32(2.0**-120 if dtype == jnp.int8 else 2.0**-100))  # not 0: its inverse is inf
    if axes is None and scale.size != 0:
        scale = lax.reduce_max(scale, tuple(range(scale.ndim)))  # without an initial value, which takes a kernel more
    elif axes is None:
        scale = jnp.float32(1)
    scaled = values.astype(jnp.float32) * (1 / scale)
    rounded = lax.round(scaled, lax.RoundingMethod.TO_NEAREST_EVEN) if dtype == jnp.int8 else scaled
    return Encoded(rounded.astype(dtype), derived(scale, x))


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


def scaled_by(sums: Array, x: Array, y: Array, dtype: DTypeLike) -> Array:
    """Return the result of a product from its sums and the scales of its operands."""
    # One after the other, because the product of two scales can be 0 or inf where the result is a number.
    return (sums.astype(jnp.float32) * jnp.minimum(x, y) * jnp.maximum(x, y)).astype(dtype)
