"""Formats with a scale for each block of consecutive elements along the summed axis: `MXFP8`."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType
from jax.typing import DTypeLike

from jamp._jaxprs import ir
from jamp._jaxprs.ir import JaxprEqn
from jamp._jaxprs.manual_axes import varying_together
from jamp._numbers import with_numbers
from jamp._products.formats.protocol import Axes, Encoded, Format, check_size
from jamp._products.formats.scales import derived, power_of_two


@dataclasses.dataclass(frozen=True)
class MXFP8(Format):
    """Matrix products in float8 E4M3 with a scale for each block of 32, for `autocast(fun, jamp.MXFP8())`.

    For GPUs that multiply block scales in hardware (B200, RTX 50), by `jax.lax.scaled_dot`. Elsewhere XLA computes the
    same numbers in 16 or 32 bits, which takes longer than bfloat16. It is experimental, and was not timed.

    The scale of a block is a power of two that brings its largest absolute value just below the largest E4M3. The
    blocks lie along the axis that a product sums. The two backward products sum other axes, so their operands are
    encoded again, from 16-bit values. Scales are computed just in time, so there is no state. Other products run in
    bfloat16, also those whose three sizes are not all multiples of 32, ragged products, and products on explicit mesh
    axes.

    Args:
      min_size: The smallest size of a product, in each of its three dimensions, that runs in MXFP8.

    Raises:
      ValueError: If `min_size` is not a positive int.

    Examples:
      >>> import jax, jax.numpy as jnp, jamp
      >>> loss = jamp.autocast(lambda w, x: jnp.mean((jax.nn.relu(x @ w[0]) @ w[1]) ** 2), jamp.MXFP8())
      >>> jax.grad(loss)(jnp.ones((2, 128, 128)), jnp.ones((128, 128))).dtype
      dtype('float32')

    References:
      Rouhani et al., OCP Microscaling Formats (MX) Specification 1.0, 2023. Mishra et al., Recipes for Pre-training
      LLMs with MXFP8, arXiv:2506.08027.
    """

    min_size: int = 128

    name: ClassVar[str] = "mxfp8"
    forward: ClassVar[np.dtype[Any]] = np.dtype(jnp.float8_e4m3fn)
    backward: ClassVar[np.dtype[Any]] = np.dtype(jnp.float8_e4m3fn)
    carrier: ClassVar[np.dtype[Any]] = np.dtype(jnp.bfloat16)
    scale_dtype: ClassVar[np.dtype[Any]] = np.dtype(jnp.float8_e8m0fnu)
    block: ClassVar[int] = 32
    is_by_tensor: ClassVar[bool] = False

    def __post_init__(self) -> None:
        with_numbers(self)
        check_size(self.min_size)

    def why_not(self, eqn: JaxprEqn, sizes: Sequence[Any]) -> str:
        params = ir.params(eqn)
        if ir.name(eqn) != "dot_general":
            return f"{self.name} has no ragged products"
        meshes = [aval.sharding.mesh for aval in ir.avals(eqn.invars)]
        if params["out_sharding"] is not None or any(AxisType.Explicit in mesh.axis_types for mesh in meshes):
            return f"{self.name} has no products on explicit mesh axes"
        if any(not isinstance(n, int) or n == 0 or n % self.block for n in sizes):
            return f"its sizes {list(sizes)} are not all multiples of the block of {self.block}"
        return ""

    def axes(self, primitive: str, params: Mapping[str, Any]) -> tuple[Axes, Axes]:
        return ir.contracted(params)

    def encode(self, x: Array, dtype: DTypeLike, axes: Axes) -> Encoded:
        """Return codes with the summed axes flattened and last: of [32, 64, 3] along axis 1, codes [32, 3, 64].

        The scales are [32, 3, 2].
        """
        assert axes is not None
        rest = [i for i in range(x.ndim) if i not in axes]
        values = lax.stop_gradient(x).transpose(*rest, *axes).astype(jnp.float32)
        terms = math.prod(x.shape[i] for i in axes)
        blocks = values.reshape(*(x.shape[i] for i in rest), terms // self.block, self.block)
        amax = jnp.max(jnp.abs(blocks), -1)
        scales = jnp.maximum(power_of_two(amax, dtype), np.float32(2.0**-100))  # not 0: its inverse is inf
        # E8M0 has a code for NaN, and none for inf. If XLA:CPU's maximum drops a NaN (openxla/xla#21461), the code of
        # the element is NaN.
        scales = jnp.where(jnp.isfinite(amax), scales, jnp.nan)
        codes = (blocks * (1 / scales)[..., None]).astype(dtype)
        shape = (*codes.shape[:-2], codes.shape[-2] * self.block)
        return Encoded(codes.reshape(shape), derived(scales, x).astype(self.scale_dtype))

    def sums(self, codes: Array, params: dict[str, Any], dtype: DTypeLike) -> np.dtype[Any]:
        return np.dtype(np.float32)

    def multiply(
        self,
        bind: Callable[..., Array],
        primitive: Any,
        params: dict[str, Any],
        operands: Sequence[Encoded],
        sizes: Sequence[Array],
        dtype: DTypeLike,
    ) -> Array:
        # `scaled_dot` takes [batch, rows, summed] of both.
        contracting, batch = params["dimension_numbers"]
        flat, free = list[Array](), list[int]()
        for operand, summed, batched in zip(operands, contracting, batch, strict=True):
            n = operand.codes.ndim - 1
            first = [i - sum(j < i for j in summed) for i in batched]  # where `encode` put the batch axes
            rest = [i for i in range(n) if i not in first]
            batches = [operand.codes.shape[i] for i in first]
            free += [operand.codes.shape[i] for i in rest]
            rows = math.prod(operand.codes.shape[i] for i in rest)
            flat += [z.transpose(*first, *rest, n).reshape(math.prod(batches), rows, z.shape[-1]) for z in operand]
        x, x_scale, y, y_scale = varying_together(flat)
        sums = lax.scaled_dot(
            x,
            y,
            lhs_scale=x_scale,
            rhs_scale=y_scale,
            dimension_numbers=(((2,), (2,)), ((0,), (0,))),
            preferred_element_type=np.dtype(np.float32),
        )
        sums, _ = varying_together([sums, x])  # JAX forgets along which axes of a shard_map the result varies.
        return sums.reshape(*batches, *free).astype(dtype)
