"""Convolutions that are matrix products: their windows do not overlap, as those that cut an image into patches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType

from jamp._jaxprs import ir
from jamp._jaxprs.ir import JaxprEqn, avals

Move = Callable[[Any], Any]


class MatrixProduct(NamedTuple):
    """A dot_general or ragged_dot_general, what moves each operand into its place, and what moves the result back."""

    eqn: JaxprEqn
    moves: tuple[Move | None, Move | None, Move | None]


def as_matrix_product(eqn: JaxprEqn) -> MatrixProduct | None:
    """Write a product as a matrix product. None for a convolution that is not one, or that JAX cannot compute so."""
    if ir.name(eqn) != "conv_general_dilated":
        return MatrixProduct(eqn, (None, None, None))
    params, (x, w), (out,) = ir.params(eqn), avals(eqn.invars), avals(eqn.outvars)
    dimensions, strides = params["dimension_numbers"], params["window_strides"]
    windows = [w.shape[i] for i in dimensions.rhs_spec[2:]]
    sizes = [out.shape[i] for i in dimensions.out_spec[2:]]
    ones = params["feature_group_count"], params["batch_group_count"], *params["lhs_dilation"], *params["rhs_dilation"]
    is_apart = all(n in (1, stride) for n, stride in zip(windows, strides, strict=True))
    is_empty = any(isinstance(n, int) and n == 0 for v in (x, w, out) for n in v.shape)
    # With explicit axes, JAX does not split an axis into windows.
    is_explicit = AxisType.Explicit in (*x.sharding.mesh.axis_types, *w.sharding.mesh.axis_types)
    is_apart &= not is_empty and not (is_explicit and any(n != 1 for n in windows))
    if not is_apart or any(n != 1 for n in ones) or any(n for pair in params["padding"] for n in pair):
        return None
    spatial = len(sizes)

    def patches(x: Any) -> Any:  # [batch, *sizes, features * windows]
        x = x.transpose(dimensions.lhs_spec)
        for i, (size, stride, n) in enumerate(zip(sizes, strides, windows, strict=True), 2):
            step = stride if n == 1 else 1
            x = jax.lax.slice_in_dim(x, 0, (size * n - 1) * step + 1, step, i)
        x = x.reshape(*x.shape[:2], *(n for pair in zip(sizes, windows, strict=True) for n in pair))
        x = x.transpose(0, *range(2, 2 + 2 * spatial, 2), 1, *range(3, 3 + 2 * spatial, 2))
        return x.reshape(*x.shape[: 1 + spatial], -1)

    def weights(w: Any) -> Any:  # [features of the result, features * windows]
        return w.transpose(dimensions.rhs_spec).reshape(w.shape[dimensions.rhs_spec[0]], -1)

    def back(y: Any) -> Any:  # from [batch, *sizes, features]
        place = [0, 1 + spatial, *range(1, 1 + spatial)]
        return y.transpose([place[dimensions.out_spec.index(i)] for i in range(y.ndim)])

    dot = lambda x, w: jax.lax.dot_general(
        x, w, (((1 + spatial,), (1,)), ((), ())), precision=params["precision"], preferred_element_type=out.dtype
    )
    types = [jax.eval_shape(move, jax.ShapeDtypeStruct(v.shape, v.dtype)) for move, v in ((patches, x), (weights, w))]
    return MatrixProduct(jax.make_jaxpr(dot)(*types).eqns[0], (patches, weights, back))
