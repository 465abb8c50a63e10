"""How the operands of 8-bit products are quantized: `Float8` and `Int8`."""

import dataclasses
from typing import Any, ClassVar, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jamp._cast import check_floating
from jamp._numbers import with_numbers


@dataclasses.dataclass(frozen=True)
class Float8:
    """Matrix products in float8, for `autocast(fun, jamp.Float8())`. Everything else runs in `carrier`.

    On a GPU, compile with `jax.jit(step, compiler_options={"xla_gpu_enable_triton_gemm": False})`, an option of the
    outermost `jit`, or set `XLA_FLAGS=--xla_gpu_enable_triton_gemm=false`. Without it XLA compiles for minutes, because
    it tries many Triton kernels for each float8 product. Products that stay in 16 bit may take longer with it.

    The operands of a product are divided by a scale, a power of two that brings the largest absolute value of the
    tensor just below the largest float8, and rounded. Scales are computed just in time, so there is no state. Products
    of float32 and of 16-bit operands are quantized, so also those of a model that was written in bfloat16 by hand.
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

    def __post_init__(self) -> None:
        with_numbers(self)
        usual = {"forward": (8, "float8_e4m3fn"), "backward": (8, "float8_e5m2"), "carrier": (16, "bfloat16")}
        for name, (bits, example) in usual.items():
            dtype = check_floating(name, getattr(self, name))
            # Of fewer bits, a dtype of NumPy has a byte too. And e8m0 is for scales: it has no sign and no 0.
            if jnp.finfo(dtype).bits != bits or dtype == jnp.float8_e8m0fnu:
                what = "which holds scales alone" if dtype == jnp.float8_e8m0fnu else f"of {jnp.finfo(dtype).bits} bits"
                raise ValueError(
                    f"{name} must be a float of {bits} bits, got {name}={dtype.name!r}, {what}. Write "
                    f"jamp.Float8({name}=jnp.{example}), or leave {name} out."
                )
            object.__setattr__(self, name, dtype)
        if self.granularity not in ("tensor", "row"):
            raise ValueError(f"granularity must be 'tensor' or 'row', got {self.granularity!r}.")
        _check_size(self.min_size)


@dataclasses.dataclass(frozen=True)
class Int8:
    """Matrix products in int8, for `autocast(fun, jamp.Int8())`. Everything else runs in bfloat16.

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
    granularity: ClassVar[str] = "row"

    def __post_init__(self) -> None:
        with_numbers(self)
        _check_size(self.min_size)


Format: TypeAlias = Float8 | Int8


def _check_size(min_size: int) -> None:
    if isinstance(min_size, bool) or not isinstance(min_size, int) or min_size < 1:
        raise ValueError(f"min_size must be an int of at least 1, got {min_size!r}.")
