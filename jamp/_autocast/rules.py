"""The table of primitives: which category an operation has, and whether the backward pass may compute it again.

A key is the name of a JAX primitive. A key in brackets is a special case of the primitive before it, which
`_autocast/cast.py` recognizes. A user's rule for the primitive alone covers its special cases too.
"""

from typing import NamedTuple

from jamp import _jaxpr
from jamp._jaxpr import JaxprEqn

COMPUTE = "compute"
FLOAT32 = "float32"
WIDEST = "widest"
CATEGORIES = {
    COMPUTE: "float32 operands are cast to the compute dtype, and the result has it",
    FLOAT32: "16-bit operands are cast to float32, and the result is float32",
    WIDEST: "the result is 16 bit if all operands are stored in 16 bit, else float32",
}


class Rule(NamedTuple):
    """What autocast does with a primitive."""

    category: str
    reason: str
    recomputed: bool = False  # whether the backward pass may compute it again: it is cheap, pure and deterministic


def _rules(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


YOURS = "a rule of yours"
_PRODUCT = Rule(COMPUTE, "16-bit hardware is for matrix products and convolutions; it accumulates them in float32")
_PRECISE = Rule(FLOAT32, "its precision (HIGHEST, or an algorithm) was asked for in the code")
_MOVE = Rule(WIDEST, "moves data: what is stored in 16 bit stays in 16 bit", recomputed=True)
_TRANSFER = Rule(WIDEST, _MOVE.reason)
_COPY = Rule(FLOAT32, "may copy an element many times: its transpose is a sum, which is float32", recomputed=True)
_OUTER = Rule(FLOAT32, "sums over one term or none: positions times frequencies need float32")
_ARITHMETIC = Rule(FLOAT32, "everything but products is computed in float32", recomputed=True)
_ONCE = Rule(FLOAT32, "computed in float32, and once: it is expensive, or works on the bits of float32")

RULES: dict[str, Rule] = {
    **_rules(_PRODUCT, "conv_general_dilated dot_general ragged_dot_general"),
    **_rules(_PRECISE, "conv_general_dilated[precision] dot_general[precision] ragged_dot_general[precision]"),
    **_rules(_OUTER, "dot_general[outer]"),
    **_rules(
        _MOVE,
        "concatenate convert_element_type copy copy_p dynamic_slice dynamic_update_slice pad reshape rev select_n "
        "slice split squeeze stop_gradient transpose",
    ),
    **_rules(
        _TRANSFER,
        "all_to_all collective_permute device_put mesh_cast name optimization_barrier ppermute reshard "
        "sharding_constraint nonbatchable nondifferentiable_backward nontraceable select_if_vmap",  # the last: Equinox
    ),
    **_rules(_COPY, "broadcast_in_dim tile"),
    **_rules(_COPY._replace(recomputed=False), "all_gather all_gather_invariant gather pbroadcast pvary"),
    **_rules(
        _ARITHMETIC,
        "abs acos acosh add add_any and argmax argmin asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp "
        "cos cosh div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow iota is_finite le le_to log "
        "log1p log2 logistic lt lt_to max min mul ne neg nextafter not or pow reduce_and reduce_max reduce_min "
        "reduce_or reduce_prod reduce_sum reduce_window_max reduce_window_min reduce_window_sum rem round rsqrt sign "
        "sin sinh sqrt square sub tan tanh xor",
    ),
    **_rules(
        _ONCE,
        "cumlogsumexp cummax cummin cumprod cumsum pmax pmin psum psum_invariant reduce reduce_scatter reduce_window "
        "scatter scatter-add scatter-max scatter-min scatter-mul select_and_gather_add select_and_scatter "
        "select_and_scatter_add bessel_i0e bessel_i1e digamma igamma igamma_grad_a igammac lgamma polygamma "
        "regularized_incomplete_beta zeta cholesky eig eigh fft hessenberg householder_product lu qr schur svd "
        "triangular_solve tridiagonal tridiagonal_solve approx_top_k reduce_precision sort top_k",
    ),
}
PRODUCTS = frozenset(key for key, rule in RULES.items() if rule is _PRODUCT)
# What gives a part of its first operand, or another order of it: a parameter is still a parameter.
REARRANGES = frozenset(key for key, rule in RULES.items() if rule is _MOVE) - {"concatenate", "select_n"} | {
    "broadcast_in_dim"
}


def moves(name: str) -> bool:
    """Whether a primitive only moves data."""
    return name in RULES and RULES[name] in (_MOVE, _TRANSFER, _COPY, _COPY._replace(recomputed=False))


def holds_product(eqn: JaxprEqn) -> bool:
    """Whether an equation is a product, or holds one in its bodies."""
    return eqn.primitive.name in PRODUCTS or any(holds_product(e) for jaxpr, _ in _jaxpr.inner(eqn) for e in jaxpr.eqns)
