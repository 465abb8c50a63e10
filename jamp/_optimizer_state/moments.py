"""The arrays of Optax's states that are moments, so that they may be stored in fewer bits between steps."""

from collections.abc import Callable
from typing import Any

from jax.tree_util import GetAttrKey, tree_map_with_path

_SIGNED, _SQUARES = False, True  # whether a moment is never negative

# The fields of Optax's states that are moments. Centered RMSprop is not here: it takes the root of a difference of its
# two moments, which roundings can make negative. Nor is Momo, which subtracts a sum of products with its moment.
_MOMENTS = {
    "EmaState": {"ema": _SIGNED},
    "FactoredState": {"v": _SQUARES},
    "TraceState": {"trace": _SIGNED},
    "ScaleByAdaDeltaState": {"e_g": _SQUARES, "e_x": _SQUARES},
    "ScaleByAdamState": {"mu": _SIGNED, "nu": _SQUARES},
    "ScaleByAdanState": {"m": _SIGNED, "v": _SIGNED, "n": _SQUARES},
    "ScaleByAdemamixState": {"m1": _SIGNED, "m2": _SIGNED, "nu": _SQUARES},
    "ScaleByAmsgradState": {"mu": _SIGNED, "nu": _SQUARES, "nu_max": _SQUARES},
    "ScaleByBeliefState": {"mu": _SIGNED, "nu": _SQUARES},
    "ScaleByLionState": {"mu": _SIGNED},
    "ScaleByNovogradState": {"mu": _SIGNED},
    "ScaleByRmsState": {"nu": _SQUARES},
    "ScaleByRmsWithCountState": {"nu": _SQUARES},
    "ScaleBySM3State": {"nu": _SIGNED},  # its momentum
    "ScaleBySimplifiedAdEMAMixState": {"m": _SIGNED, "n": _SQUARES},
    "DAdaptAdamWState": {"exp_avg": _SIGNED, "exp_avg_sq": _SQUARES},
    "MuonState": {"mu": _SIGNED},
    "ProdigyState": {"exp_avg": _SIGNED, "exp_avg_sq": _SQUARES},
    "SophiaState": {"mu": _SIGNED, "nu": _SIGNED},  # An estimate of the Hessian may be negative.
}

# Fields of Optax's states that are like the parameters but not moments: parameters, sums of gradients, constants.
NOT_MOMENTS = frozenset({
    "acc_grads", "avg_grad", "cumulative_gradients", "grad_sum", "grad_sum_sq", "hyperparams", "init_params",
    "init_particles", "ns_coeffs", "params", "params0", "projector", "s", "slow", "sum_of_squares", "x0", "z",
    "scales",  # of BlockCodes
})  # fmt: skip


def map_moments(fun: Callable[[Any, Any, bool | None], Any], state: Any) -> Any:
    """An optimizer's state with `fun(path, tree, never_negative)` in place of each field above, and of any other leaf.

    `never_negative` is None for a leaf that is in none of the fields. Only Optax's types count, not a user's state with
    a field of the same name.
    """

    def of_node(path: Any, x: Any) -> Any:
        if not _is_known(x):
            return fun(path, x, None)
        kinds, fields = _MOMENTS[type(x).__name__], {}
        for name, field in x._asdict().items():
            inside = (*path, GetAttrKey(name))
            fields[name] = fun(inside, field, kinds[name]) if name in kinds else visit(inside, field)
        return x._replace(**fields)

    def visit(start: Any, tree: Any) -> Any:
        return tree_map_with_path(lambda path, x: of_node((*start, *path), x), tree, is_leaf=_is_known)

    return visit((), state)


def _is_known(x: Any) -> bool:
    return type(x).__name__ in _MOMENTS and type(x).__module__.partition(".")[0] == "optax"
