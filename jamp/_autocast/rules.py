"""The tables of rules: which category an operation has.

There is one for 16 bit, and one for products of float64 operands in float32. A key is the name of a JAX primitive. With
brackets, it is a special case of the primitive before it, which `Target.rule_key` recognizes. A user's rule for the
primitive alone covers its special cases too. If that rule is "compute", only the gradients of weights keep their own.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.typing import DTypeLike

from jamp._jaxprs.primitives import ARITHMETIC, COPIES, EXPENSIVE, GATHERS, MOVES, PRODUCTS, TRANSFERS
from jamp._products.product import ANY as ANY, GRADIENT as GRADIENT

COMPUTE = "compute"
ACCUMULATE = "accumulate"
FLOAT32 = "float32"
FLOAT64 = "float64"
WIDEST = "widest"
CATEGORIES = {
    COMPUTE: "float32 operands are cast to the compute dtype, and the result has it",
    ACCUMULATE: "float32 operands are cast to the compute dtype, and the result is float32, as it was accumulated",
    FLOAT32: "16-bit operands are cast to float32, and the result is float32",
    WIDEST: "the result is 16 bit if the only operand that is an array is stored in 16 bit, else float32",
}


class Rule(NamedTuple):
    """The category of a primitive, and the reason for it."""

    category: str
    reason: str


YOURS = "a rule of yours"
ROUNDED_AGAIN = "a rule of yours, and its float32 result is rounded to"  # of a product that is raised in vain
# Products in linear algebra, of two vectors, and with sums of at most `FEW_TERMS` terms.
LINALG, VECTOR, FEW = "linalg", "vector", "few"
FEW_TERMS, AXES_OF_A_POINT = 8, 3


def _table(wide: str, low: str, products: str) -> dict[str, Rule]:
    """Return the rules for a pair of dtypes. `products` is the reason for the rule of products."""
    product = Rule(COMPUTE, products)
    gradient = Rule(
        ACCUMULATE, "the gradient of a weight is a sum over all examples, and is kept as it was accumulated"
    )
    precise = Rule(wide, "its precision (HIGHEST, or an algorithm) was asked for in the code")
    few = f"it sums at most {FEW_TERMS} terms, as products of coordinates or positions do, and {low} would gain no time"
    out_of_range = Rule(wide, "an operand is a constant beyond the range of the compute dtype")
    move = Rule(WIDEST, f"moves data: a value stored in {low} stays in {low}")
    copy = Rule(wide, f"may copy an element many times: its transpose is a sum, which is {wide}")
    arithmetic = Rule(wide, f"everything but products is computed in {wide}")
    expensive = Rule(wide, f"computed in {wide}, not recomputed: it is expensive, or works on the bits of {wide}")
    return {
        **dict.fromkeys(sorted(PRODUCTS), product),
        **dict.fromkeys((f"{name}[precision]" for name in sorted(PRODUCTS)), precise),
        **dict.fromkeys((f"{name}[range]" for name in sorted(PRODUCTS)), out_of_range),
        # Not of convolutions: cuDNN has none from 16 bit to float32, so XLA would cast the operands to float32 (for an
        # H200, jaxlib 0.10.2).
        **dict.fromkeys((f"{name}[{GRADIENT}]" for name in ("dot_general", "ragged_dot_general")), gradient),
        **dict.fromkeys((f"{name}[{FEW}]" for name in ("dot_general", "conv_general_dilated")), Rule(wide, few)),
        f"dot_general[{VECTOR}]": Rule(wide, f"a product of two vectors is a sum, and sums stay {wide}"),
        **dict.fromkeys(sorted(MOVES | TRANSFERS), move),
        **dict.fromkeys(sorted(COPIES | GATHERS), copy),
        **dict.fromkeys(sorted(ARITHMETIC), arithmetic),
        **dict.fromkeys(sorted(EXPENSIVE), expensive),
    }


RULES = _table(
    FLOAT32, "16 bit", "16-bit hardware is for matrix products and convolutions; it accumulates them in float32"
)
RULES_OF_FLOAT64 = {
    **_table(FLOAT64, FLOAT32, "products in float32 are faster, and everything between them stays float64"),
    **dict.fromkeys(
        (f"{name}[{LINALG}]" for name in sorted(PRODUCTS)),
        Rule(FLOAT64, "it is part of JAX's linear algebra (jax.numpy.linalg, jax.scipy.linalg), or of its derivative"),
    ),
}


def wide_dtype(compute_dtype: DTypeLike) -> np.dtype[Any]:
    """The dtype of the operands that products cast to the compute dtype: float64 to float32, and float32 to 16 bit."""
    return np.dtype(np.float64 if np.dtype(compute_dtype) == np.float32 else np.float32)


def rules_for(wide: np.dtype[Any]) -> Mapping[str, Rule]:
    """The rules for the products of operands of this dtype."""
    return RULES if wide == np.float32 else RULES_OF_FLOAT64


def categories(wide: np.dtype[Any]) -> tuple[str, ...]:
    """The names of the categories for the products of operands of this dtype."""
    return tuple(str(wide) if name == FLOAT32 else name for name in CATEGORIES)
