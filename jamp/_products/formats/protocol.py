"""What a format is: all that the passes, the reports and the arithmetic of products ask of one."""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jamp._jaxprs.ir import JaxprEqn

Axes: TypeAlias = tuple[int, ...] | None


class Encoded(NamedTuple):
    """An operand of a product: codes of 8 bits or fewer, and the scales that bring them back."""

    codes: Array
    scales: Array


class Format(abc.ABC):
    """A format of matrix products. Operands are encoded just in time, so there is no state."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Its name in reports, such as "float8"."""

    @property
    def label(self) -> str:
        """Its name in warnings, such as "Float8"."""
        return type(self).__name__

    @property
    @abc.abstractmethod
    def forward(self) -> Any:
        """The dtype of the codes of operands."""

    @property
    @abc.abstractmethod
    def backward(self) -> Any:
        """The dtype of the codes of the gradient that the backward products read."""

    @property
    @abc.abstractmethod
    def carrier(self) -> Any:
        """The 16-bit dtype of the results of products, and of the products that do not qualify."""

    @property
    @abc.abstractmethod
    def scale_dtype(self) -> Any:
        """The dtype of the scales."""

    @property
    @abc.abstractmethod
    def min_size(self) -> int:
        """The smallest size of a product, in each of its three dimensions, that qualifies."""

    @property
    @abc.abstractmethod
    def is_by_tensor(self) -> bool:
        """Whether each operand has one scale, which multiplies the sums of its codes, and the backward products read
        the same codes."""

    @property
    def is_differentiable(self) -> bool:
        """Whether `encode` and `multiply` have a derivative, so that a second one exists. It does not if they round."""
        return False

    def why_not(self, eqn: JaxprEqn, sizes: Sequence[Any]) -> str:
        """Return why a matrix product of the sizes M, N and K cannot be in this format, or ""."""
        return ""

    @abc.abstractmethod
    def axes(self, primitive: str, params: Mapping[str, Any]) -> tuple[Axes, Axes]:
        """Return, for each operand of a product, the axes along which it is encoded. None encodes it as a whole."""

    @abc.abstractmethod
    def encode(self, x: Array, dtype: DTypeLike, axes: Axes) -> Encoded:
        """Return the codes and the scales of an operand, in the layout that `multiply` reads.

        An operand that holds inf or NaN must make the product NaN, so that the step is skipped. `scales.derived` goes
        around the scales, so that a second derivative is an error.

        Args:
          x: The operand, of any floating dtype.
          dtype: The dtype of the codes: `forward` or `backward`.
          axes: One of `axes`. Where it is not None, the backward products sum other axes and encode operands again.
        """

    @abc.abstractmethod
    def sums(self, codes: Array, params: dict[str, Any], dtype: DTypeLike) -> np.dtype[Any]:
        """Return the dtype of the sums that a product computes for a result of the given `dtype`.

        If it is wider, the result goes through a `dot_general` with 1, so that checkpoint policies keep the result.
        """

    @abc.abstractmethod
    def multiply(
        self,
        bind: Callable[..., Array],
        primitive: Any,
        params: dict[str, Any],
        operands: Sequence[Encoded],
        sizes: Sequence[Array],
        dtype: DTypeLike,
    ) -> Array:
        """Return the product of two encoded operands in a dtype.

        Args:
          bind: Evaluates a product of JAX (`multiply.multiply`), for formats that use one.
          primitive: The primitive of the product as it was traced.
          params: Its parameters.
          operands: The operands, each encoded along its `axes`.
          sizes: Those of the groups of a ragged product.
          dtype: The dtype of the result.
        """


def check_size(min_size: int) -> None:
    """Raise if `min_size` is not a positive int."""
    if isinstance(min_size, bool) or not isinstance(min_size, int) or min_size < 1:
        raise ValueError(f"min_size must be an int of at least 1, got {min_size!r}.")
