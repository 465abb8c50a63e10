"""Which products qualify for 16 and 8 bit, by the source of their operands and the readers of their results.

A product that sums few terms stays float32. For 8 bit, attention does not qualify, because products compute both
operands, nor does the head, because no product follows, nor what must be differentiated or transposed once more.
"""

import math

import jax.numpy as jnp
import numpy as np

from jamp._autocast.rules import AXES_OF_A_POINT, COMPUTE, FEW_TERMS, RULES
from jamp._jaxprs import ir
from jamp._jaxprs.dataflow import Flags
from jamp._jaxprs.ir import JaxprEqn
from jamp._products.formats import Format
from jamp._products.matrix_product import as_matrix_product


def sums_few_terms(eqn: JaxprEqn) -> bool:
    """Whether a product sums at most `FEW_TERMS` terms. Memory bounds its time, so 16 bit would gain none.

    Convolutions count if they are matrix products. A depthwise one of width 4 would move 1.6 times the bytes in float32
    (compiled for an H200).
    """
    if ir.name(eqn) not in ("dot_general", "conv_general_dilated"):
        return False
    terms = ir.summed_terms(eqn)
    return isinstance(terms, int) and terms <= FEW_TERMS and as_matrix_product(eqn) is not None


def expands_products(eqn: JaxprEqn, follow_long_sums: Flags, are_stored: Flags) -> bool:
    """Whether a product of few terms is larger than both operands, and these are computed and longer than a point.

    Either both follow products that sum many terms, as queries and keys do, or one is the 16-bit result of a product,
    as in LoRA. In float32, attention with heads of 8 would move 1.5 times the bytes, and layers with LoRA of rank 8
    1.2 times (compiled for an H200).
    """
    known = lambda aval: math.prod(n for n in aval.shape if isinstance(n, int))
    is_larger = known(ir.avals(eqn.outvars)[0]) > max(map(known, ir.avals(eqn.invars)))
    is_computed = all(follow_long_sums) or any(are_stored)
    return is_larger and is_computed and ir.summed_terms(eqn) > AXES_OF_A_POINT


def is_candidate(eqn: JaxprEqn, category: str, in_16_bit: bool) -> bool:
    """Whether a product has 16-bit operands, by a rule or as traced, and a result that may be one of 8-bit operands."""
    if category != COMPUTE:
        return False
    if in_16_bit:
        return bool(ir.avals(eqn.outvars)[0].dtype == np.float32)
    dtypes = [aval.dtype for aval in ir.avals(eqn.invars[:2])]
    return all(dtype.itemsize == 2 and jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)


def why_not(
    eqn: JaxprEqn,
    format: Format,
    key: str,
    *,
    is_asked_for: bool,
    is_linear: bool,
    in_backward_rule: bool,
    in_gradient: bool,
    is_attention: bool,
    is_fed_on: bool,
) -> str:
    """Return why a product stays in the carrier, or "" if it qualifies."""
    carrier, matrix = np.dtype(format.carrier).name, as_matrix_product(eqn)
    if matrix is None:
        why = "its windows overlap or leave gaps, or it has padding, dilation or groups"
        return f"no compiler has {format.name} gradients of such a convolution: {why}"
    if is_linear:
        return f"it is linear in a tangent, which JAX transposes, and stays in {carrier}"
    if in_backward_rule:
        return f"it is in the backward pass that a derivative rule of the function defines, and stays in {carrier}"
    sizes = ir.product_sizes(matrix.eqn)
    if is_asked_for:
        return format.why_not(matrix.eqn, sizes)
    if in_gradient:
        return (
            f"it is part of a gradient that the function takes itself, and stays in {carrier}. If the loss depends "
            "on that gradient (forces), it must stay, because 8-bit products have no second derivative. If not, "
            "write jax.grad(jamp.autocast(f, format))"
        )
    if any(isinstance(n, int) and n < format.min_size for n in sizes):  # A symbolic size is not compared.
        return f"one of its sizes {sizes} is below min_size={format.min_size}"
    if why := format.why_not(matrix.eqn, sizes):
        return why
    force = f"rules={{{(ir.name(eqn) if key in RULES else key)!r}: 'compute'}} makes it {format.name}"
    if is_attention:
        return f"products compute both operands, as in attention; {force}"
    if not is_fed_on:
        return f"no product follows, so it is the head; {force}"
    return ""
