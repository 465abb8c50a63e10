"""The table of rules: which category an operation has.

A key is the name of a JAX primitive. A key in brackets is a special case of the primitive before it, which
`_autocast/cast.py` recognizes. A user's rule for the primitive alone covers its special cases too. If that rule is
"compute", only the gradients of weights keep their own.
"""

from typing import NamedTuple

from jamp._primitives import ARITHMETIC, COPIES, EXPENSIVE, GATHERS, MOVES, PRODUCTS, TRANSFERS

COMPUTE = "compute"
ACCUMULATE = "accumulate"
FLOAT32 = "float32"
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
GRADIENT = "gradient"  # of a weight
_PRODUCT = Rule(COMPUTE, "16-bit hardware is for matrix products and convolutions; it accumulates them in float32")
_GRADIENT = Rule(ACCUMULATE, "the gradient of a weight is a sum over all examples, and is kept as it was accumulated")
_PRECISE = Rule(FLOAT32, "its precision (HIGHEST, or an algorithm) was asked for in the code")
_OUTER = Rule(FLOAT32, "an outer product, which sums over one term, such as positions times frequencies, needs float32")
_RANGE = Rule(FLOAT32, "an operand is a constant beyond the range of the compute dtype")
_MOVE = Rule(WIDEST, "moves data: a value stored in 16 bit stays in 16 bit")
_COPY = Rule(FLOAT32, "may copy an element many times: its transpose is a sum, which is float32")
_ARITHMETIC = Rule(FLOAT32, "everything but products is computed in float32")
_EXPENSIVE = Rule(FLOAT32, "computed in float32, not recomputed: it is expensive, or works on the bits of float32")

RULES: dict[str, Rule] = {
    **dict.fromkeys(sorted(PRODUCTS), _PRODUCT),
    **dict.fromkeys((f"{name}[precision]" for name in sorted(PRODUCTS)), _PRECISE),
    **dict.fromkeys((f"{name}[range]" for name in sorted(PRODUCTS)), _RANGE),
    # Not of convolutions: a GPU has none from 16 bit to float32, so XLA would cast the operands to float32.
    **dict.fromkeys((f"{name}[{GRADIENT}]" for name in ("dot_general", "ragged_dot_general")), _GRADIENT),
    "dot_general[outer]": _OUTER,
    **dict.fromkeys(sorted(MOVES | TRANSFERS), _MOVE),
    **dict.fromkeys(sorted(COPIES | GATHERS), _COPY),
    **dict.fromkeys(sorted(ARITHMETIC), _ARITHMETIC),
    **dict.fromkeys(sorted(EXPENSIVE), _EXPENSIVE),
}
