"""The classes of JAX's primitives, by name. One table for autocast, for skipped steps and for the reports."""

from jamp._jaxprs import ir
from jamp._jaxprs.ir import JaxprEqn


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


PRODUCTS = _names("conv_general_dilated dot_general ragged_dot_general")
# Products of encoded operands, or that encode them. They count as products, and autocast leaves them alone.
ENCODED_PRODUCTS = _names("scaled_dot unencoded_product")
MOVES = _names(
    "concatenate convert_element_type copy copy_p dynamic_slice dynamic_update_slice pad reshape rev rounded row_major "
    "select_n slice split squeeze stack stop_gradient transpose unstack"
)
# Between devices or shardings, or markers for transformations. The last four are Equinox's, those before jamp's.
TRANSFERS = _names(
    "all_to_all collective_permute device_put mesh_cast name optimization_barrier ppermute reshard sharding_constraint "
    "barrier barrier_unless_tpu cotangents_behind_barrier in_one_kernel_on_tpu "
    "nonbatchable nondifferentiable_backward nontraceable select_if_vmap"
)
# They may copy an element many times, on one device or to others.
COPIES = _names("broadcast_in_dim gather tile")
GATHERS = _names(
    "all_gather all_gather_invariant all_gather_reduced pbroadcast preduced pvary reduced_vary_cast reduced_vary_cast_p"
)
# Arithmetic on each element, and cheap reductions.
ARITHMETIC = _names(
    "abs acos acosh add add_any and argmax argmin asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp clz "
    "complex conj cos cosh div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow iota is_finite le "
    "le_to log log1p log2 logistic lt lt_to max min mul ne neg nextafter not one_minus_square or polynomial "
    "population_count pow real reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_window_max "
    "reduce_window_min reduce_window_sum reduce_xor rem round rsqrt scaled_sums shift_left "
    "shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor"
)
# Expensive, between devices, or on the bits of a number.
EXPENSIVE = _names(
    "cumlogsumexp cummax cummin cumprod cumsum pmax pmin psum psum_invariant reduce reduce_scatter reduce_window "
    "unreduced_psum unreduced_reduce_scatter vary_unreduced_cast vary_unreduced_cast_p "
    "scatter scatter-add scatter-max scatter-min scatter-mul select_and_gather_add select_and_scatter "
    "select_and_scatter_add bessel_i0e bessel_i1e digamma igamma igamma_grad_a igammac lgamma polygamma "
    "regularized_incomplete_beta zeta cholesky eig eigh fft hessenberg householder_product lu qr schur svd "
    "triangular_solve tridiagonal tridiagonal_solve approx_top_k reduce_precision sort top_k"
)

# They communicate between devices. In some versions of JAX, not all of them have an effect.
COLLECTIVES = _names(
    "all_gather all_gather_invariant all_gather_reduced all_to_all collective_permute pmax pmin ppermute psum "
    "psum_invariant ragged_all_to_all reduce_scatter unreduced_psum unreduced_reduce_scatter"
)
# Random bits, tokens, Refs and calls. They run as they were traced.
OTHERS = _names(
    "after_all axis_index call create_token custom_lin empty2 eval_jaxpr get ragged_all_to_all "
    "random_bits random_fold_in random_gamma random_seed random_split rng_bit_generator rng_uniform swap threefry2x32"
)

# Linear algebra on a matrix of n columns takes this times n for each element of its result (Golub and Van Loan, Matrix
# Computations; about, where it iterates).
CUBIC = {
    "cholesky": 1 / 3,
    "eig": 25.0,
    "eigh": 9.0,
    "geqrf": 4 / 3,
    "hessenberg": 10 / 3,
    "householder_product": 4 / 3,
    "lu": 2 / 3,
    "qr": 4 / 3,
    "schur": 25.0,
    "svd": 20.0,
    "triangular_solve": 1.0,
    "tridiagonal": 4 / 3,
}

# Of a product that autocast has lowered, and of values in 8 bits. They return their first operands.
IDENTITIES = _names("attach detached differentiated_once with_tangents_of")
# Cheap and deterministic. They terminate on any input, also on NaN. A gather reads a table of any size.
CHEAP = (MOVES | COPIES | ARITHMETIC | IDENTITIES) - {"gather"}
# They compute nothing.
MOVING = MOVES | TRANSFERS | COPIES | GATHERS | IDENTITIES
# A small error of an operand may be a large one of what they compute, or choose: an error of an exponent is a factor.
AMPLIFYING = _names(
    "acos acosh approx_top_k asin atan2 atanh cbrt ceil cos cosh cummax cummin digamma erf_inv erfc exp exp2 expm1 "
    "floor igamma igammac lgamma log log1p polygamma pow reduce_max reduce_min reduce_prod reduce_window_max "
    "reduce_window_min round rsqrt select_and_gather_add select_and_scatter_add sin sinh sort sqrt tan top_k"
) | frozenset(CUBIC)
# Their results may differ by orders of magnitude.
WIDE_RANGE = _names("cosh cumlogsumexp cumprod cumsum exp exp2 expm1 pow sinh") | frozenset(CUBIC)
# An element of the result is computed from one element of each operand, of which it has about the errors. A cumulative
# sum has all of them.
ELEMENTWISE = (MOVES | COPIES | _names("abs add add_any clamp cumsum div integer_pow max min mul neg square sub")) - {
    "gather"
}
# Their results do not depend on how XLA optimizes them. Those of functions that are approximated, such as tanh, do.
EXACT = (
    PRODUCTS
    | MOVING
    | _names(
        "abs add add_any and clamp cumsum div eq ge gt iota is_finite le lt max min mul ne neg not or reduce_and "
        "reduce_max reduce_min reduce_or reduce_precision reduce_sum scatter-add sign square sub xor"
    )
)
# The result is the first operand, a part or a rearrangement of it, perhaps on other devices. A parameter keeps its path
# through them.
REARRANGES = (
    MOVES
    | COPIES
    | GATHERS
    | IDENTITIES
    | _names("all_to_all collective_permute mesh_cast name ppermute reshard sharding_constraint")
) - _names("concatenate gather select_n")


# jamp's own primitives that stand for no product, as a user knows them.
_SHOWN = {
    **dict.fromkeys(
        ("barrier", "barrier_unless_tpu", "cotangents_behind_barrier", "in_one_kernel_on_tpu"), "optimization_barrier"
    ),
    **dict.fromkeys(("scaled_call", "scaled_linear_call", "scaled_gradient"), "jamp.scaled"),
    "chunked_sum": "jamp.chunked_sum",
    **dict.fromkeys(("detached", "differentiated_once", "with_tangents_of"), "stop_gradient"),
    "rounded": "convert_element_type",
    "row_major": "layout_constraint",
    "scaled_sums": "mul",
    "scale_tangent": "jvp",
    "unencoded_product": "dot_general",
}
_OF_PRODUCTS = _names("attach product product_tangent")


def operation(eqn: JaxprEqn) -> str:
    """What reports and warnings call an equation: the user's operation, also if the primitive is one of jamp's own."""
    name = ir.name(eqn)
    product = ir.params(eqn).get("product") if name in _OF_PRODUCTS else None
    return _SHOWN.get(name, name) if product is None else product.operation
