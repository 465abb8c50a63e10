"""Which operation runs in which dtype, and why: data only.

A key is the name of a JAX primitive. A key in brackets is a special case of the primitive before it, recognised in
`_autocast/planner.py`; a user's rule for the primitive alone covers its special cases too.
"""

COMPUTE = "compute"
FLOAT32 = "float32"
WIDEST = "widest"
CATEGORIES = {
    COMPUTE: "float32 operands are cast to the compute dtype, and the result has it",
    FLOAT32: "16-bit operands are cast to float32, and the result is float32",
    WIDEST: "the result is 16 bit if the largest operands are, else float32",
}
MOVES_DATA = "moves or compares data: keeps the dtype that it gets"
ROUNDED = "computed in float32, in a run; stored in 16 bit if its largest operands are"
IN_A_RUN = "computed in float32, in a run; stored in float32, unless only products read it"
YOURS = "a rule of yours"
ONCE = "computed in float32, once: many terms, no stable 16-bit form, or the bits of float32"


def _rules(category: str, reason: str, names: str) -> dict[str, tuple[str, str]]:
    return dict.fromkeys(names.split(), (category, reason))


RULES: dict[str, tuple[str, str]] = {
    **_rules(
        COMPUTE,
        "matrix products and convolutions are what 16-bit hardware is for; it accumulates them in float32",
        "conv_general_dilated dot_general ragged_dot_general",
    ),
    **_rules(
        FLOAT32,
        "its precision (HIGHEST, or an algorithm) was asked for in the code",
        "conv_general_dilated[precision] dot_general[precision] ragged_dot_general[precision]",
    ),
    **_rules(
        WIDEST,
        MOVES_DATA,
        "broadcast_in_dim concatenate convert_element_type copy copy_p device_put dynamic_slice "
        "dynamic_update_slice gather iota pad reshape rev scatter "
        "select_and_gather_add select_and_scatter slice split squeeze stop_gradient tile transpose "
        "all_gather all_gather_invariant all_to_all collective_permute mesh_cast name optimization_barrier pbroadcast "
        "pmax pmin ppermute pvary reshard sharding_constraint "
        "nonbatchable nondifferentiable_backward nontraceable select_if_vmap",  # Equinox
    ),
    **_rules(
        WIDEST,
        ROUNDED,
        "abs add add_any and argmax argmin atan ceil clamp cos div[constant] dot_general[outer] eq eq_to erf erfc "
        "floor ge gt is_finite le le_to logistic lt lt_to max min mul ne neg not or reduce_and reduce_max reduce_min "
        "reduce_or reduce_window_max reduce_window_min round select_n sign sin sub tanh xor",
    ),
    **_rules(
        FLOAT32,
        IN_A_RUN,
        "acos acosh asin asinh atan2 atanh cbrt cosh div erf_inv exp exp2 expm1 integer_pow log log1p log2 nextafter "
        "pow reduce_prod reduce_sum reduce_window_sum rem rsqrt sinh sqrt square tan",
    ),
    **_rules(
        FLOAT32,
        ONCE,
        "cumlogsumexp cummax cummin cumprod cumsum psum psum_invariant reduce reduce_scatter reduce_window "
        "scatter-add scatter-max scatter-min scatter-mul select_and_scatter_add "
        "bessel_i0e bessel_i1e digamma igamma igamma_grad_a igammac lgamma polygamma regularized_incomplete_beta zeta "
        "cholesky eig eigh fft hessenberg householder_product lu qr schur svd triangular_solve tridiagonal "
        "tridiagonal_solve approx_top_k bitcast_convert_type reduce_precision sort top_k",
    ),
}
# What a run may hold, and the backward pass compute again, besides what moves its data.
CHEAP = frozenset(key for key, (_, reason) in RULES.items() if reason in (ROUNDED, IN_A_RUN))
MOVES = frozenset(
    [
        *("broadcast_in_dim", "concatenate", "convert_element_type", "copy", "dynamic_slice", "gather"),
        *("iota", "pad", "reshape", "rev", "slice", "split", "squeeze", "stop_gradient", "tile", "transpose"),
    ]
)
# Of these, the ones that may copy an element many times: their transpose is a sum, which has to be in float32.
COPIES = frozenset(["broadcast_in_dim", "gather", "tile"])
# Operations whose backward pass does not need their values.
LINEAR = COPIES | {"add", "add_any", "neg", "reduce_sum", "sub"}
