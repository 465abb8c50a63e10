"""Which operation runs in which dtype, and why: data only.

A key is the name of a JAX primitive. A key in brackets is a special case of the primitive before it, recognised in
`_autocast/plan.py`; a user's rule for the primitive alone covers its special cases too.
"""

COMPUTE = "compute"
FLOAT32 = "float32"
WIDEST = "widest"
CATEGORIES = {
    COMPUTE: "float32 operands are cast to the compute dtype, and the result has it",
    FLOAT32: "16-bit operands are cast back to float32, and the result is float32",
    WIDEST: "16 bit if all operands are, else float32; a constant that 16 bit can hold does not count",
}
MOVES_DATA = "moves data: keeps the dtype it gets"
EXACT = "exact in every dtype, or as exact as its input"


def _rules(category: str, reason: str, names: str) -> dict[str, tuple[str, str]]:
    return dict.fromkeys(names.split(), (category, reason))


RULES: dict[str, tuple[str, str]] = {
    **_rules(
        COMPUTE,
        "matrix products and convolutions are what 16-bit hardware is for; it accumulates them in float32",
        "dot_general conv_general_dilated",
    ),
    **_rules(COMPUTE, "a bias that is added to a product belongs to it, as in torch's linear and conv", "add[bias]"),
    **_rules(
        WIDEST,
        "a product that sums over nothing (positions times frequencies) is a multiplication",
        "dot_general[outer]",
    ),
    **_rules(
        FLOAT32,
        "its precision (HIGHEST, or an algorithm) was asked for in the code",
        "dot_general[precision] conv_general_dilated[precision]",
    ),
    **_rules(
        WIDEST,
        "a sum or product of mixed inputs keeps the range of the wider one: x + 70000 is right",
        "add sub mul add_any",
    ),
    **_rules(
        WIDEST,
        MOVES_DATA,
        "broadcast_in_dim concatenate convert_element_type copy copy_p dynamic_slice dynamic_update_slice gather pad "
        "reshape rev scatter select_n slice split squeeze tile transpose "
        "all_gather all_gather_invariant all_to_all collective_permute device_put mesh_cast name optimization_barrier "
        "pbroadcast ppermute pvary reshard sharding_constraint stop_gradient",
    ),
    **_rules(
        WIDEST,
        EXACT,
        "abs ceil clamp eq eq_to floor ge gt is_finite le le_to lt lt_to max min ne neg round sign "
        "argmax argmin cummax cummin pmax pmin reduce_min reduce_window_max reduce_window_min "
        "select_and_gather_add select_and_scatter scatter-max scatter-min",
    ),
    **_rules(
        WIDEST, "bounded: 16 bit in, 16 bit out loses no more than rounding does", "atan cos erf erfc logistic sin tanh"
    ),
    **_rules(WIDEST, "a division by a constant is a multiplication", "div[constant]"),
    **_rules(
        FLOAT32,
        "sums of many terms lose digits or overflow in 16 bit: mean, variance, norms, losses",
        "reduce_sum cumsum cumlogsumexp reduce_window_sum reduce reduce_window psum psum_invariant reduce_scatter "
        "scatter-add select_and_scatter_add",
    ),
    **_rules(
        FLOAT32,
        "what is subtracted from its maximum and exponentiated (softmax, logsumexp) is all of it float32",
        "reduce_max",
    ),
    **_rules(FLOAT32, "products of many terms leave the range of 16 bit", "reduce_prod cumprod scatter-mul"),
    **_rules(
        FLOAT32,
        "leaves the range of float16, or magnifies a rounding error",
        "acos acosh asin asinh atan2 atanh cbrt cosh exp exp2 expm1 integer_pow log log1p log2 pow rsqrt sinh sqrt "
        "square tan",
    ),
    **_rules(FLOAT32, "a quotient leaves the range of float16 where its divisor is small", "div rem"),
    **_rules(
        FLOAT32,
        "a special function, given by polynomials that need the digits",
        "bessel_i0e bessel_i1e digamma erf_inv igamma igamma_grad_a igammac lgamma polygamma "
        "regularized_incomplete_beta zeta",
    ),
    **_rules(
        FLOAT32,
        "linear algebra and transforms have no 16-bit form, or none that is stable",
        "cholesky eig eigh fft hessenberg householder_product lu qr schur svd triangular_solve tridiagonal "
        "tridiagonal_solve",
    ),
    **_rules(
        FLOAT32,
        "compares or takes apart the bits of float32",
        "approx_top_k bitcast_convert_type nextafter reduce_precision sort top_k",
    ),
}
