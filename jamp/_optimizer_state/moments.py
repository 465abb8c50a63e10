"""The arrays in Optax's states that are like the parameters: which are moments, and of what kind."""

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.tree_util import GetAttrKey, tree_map_with_path

from jamp._cast import is_inexact
from jamp._leaves import contains, find_nodes

# What a field of a state holds:
# signed: a moment
# squares: a moment that is never negative
# whole: a moment that eight bits would spoil, or that is small
# sum: a sum of all gradients so far, or of their squares
# other: a copy of the parameters, a constant, or gradients of the last few steps
# origin: the first parameters, if updates depend on the distance to them
_Kind = Literal["signed", "squares", "whole", "sum", "other", "origin"]

# Centered RMSprop takes the root of a difference of its two moments, which roundings can make negative. Momo subtracts
# a sum of products with its moment. They are whole.
FIELDS: dict[str, dict[str, _Kind]] = {
    # In any state. The scales are the units of jamp's 8-bit codes.
    "*": dict.fromkeys(("acc_grads", "avg_grad", "hyperparams", "params", "projector", "scales", "slow", "z"), "other"),
    "COCOBState": {"init_particles": "other", "cumulative_gradients": "sum"},
    "DAdaptAdamWState": {"exp_avg": "signed", "exp_avg_sq": "squares", "grad_sum": "sum"},
    "DoGState": {"init_params": "origin"},
    "DoWGState": {"init_params": "origin"},
    "EmaState": {"ema": "signed"},
    "FactoredState": {"v": "squares", "v_row": "whole", "v_col": "whole"},
    "MadgradState": {"grad_sum_sq": "sum", "s": "sum", "x0": "other"},
    "MechanicState": {"s": "other", "x0": "origin"},
    "MomoAdamState": {"exp_avg": "whole", "exp_avg_sq": "whole"},
    "MomoState": {"exp_avg": "whole"},
    "MuonState": {"mu": "signed", "ns_coeffs": "other"},
    "ProdigyState": {"exp_avg": "signed", "exp_avg_sq": "squares", "grad_sum": "sum", "params0": "other"},
    "ScaleByAdaDeltaState": {"e_g": "squares", "e_x": "squares"},
    "ScaleByAdamState": {"mu": "signed", "nu": "squares"},
    "ScaleByAdanState": {"m": "signed", "v": "signed", "n": "squares"},
    "ScaleByAdemamixState": {"m1": "signed", "m2": "signed", "nu": "squares"},
    "ScaleByAmsgradState": {"mu": "signed", "nu": "squares", "nu_max": "squares"},
    "ScaleByBeliefState": {"mu": "signed", "nu": "squares"},
    "ScaleByLionState": {"mu": "signed"},
    "ScaleByNovogradState": {"mu": "signed", "nu": "whole"},
    "ScaleByRStdDevState": {"mu": "whole", "nu": "whole"},
    "ScaleByRmsState": {"nu": "squares"},
    "ScaleByRmsWithCountState": {"nu": "squares"},
    "ScaleByRssState": {"sum_of_squares": "sum"},
    "ScaleBySM3State": {"mu": "whole", "nu": "signed"},  # nu is its momentum
    "ScaleBySimplifiedAdEMAMixState": {"m": "signed", "n": "squares"},
    "SophiaState": {"mu": "signed", "nu": "signed"},  # An estimate of the Hessian may be negative.
    "TraceState": {"trace": "signed"},
}
# More arrays that are no moments.
_NO_MOMENTS = {
    "ApplyEvery": {"grad_acc"},
    "COCOBState": {"scale", "subgradients", "reward"},
    "SAMState": {"cache"},
    "ScaleByAdanState": {"g"},
    "ScaleByDistanceOverGradientsState": {"init_params"},
    "ScaleByLBFGSState": {"updates", "diff_params_memory", "diff_updates_memory"},
    "ScaleByOptimisticGradientState": {"previous_gradient"},
    "ScaleByRpropState": {"step_sizes", "prev_updates"},
    "ScaleByZoomLinesearchState": {"grad"},
}
# The usual names of moments, for states of other libraries.
_USUAL = FIELDS["EmaState"] | FIELDS["ScaleByAdamState"] | FIELDS["TraceState"]
# The names of fields that are no moments, in a state of any library.
_NOT_MOMENTS = {name for row in FIELDS.values() for name, kind in row.items() if kind in ("sum", "other", "origin")}


def map_moments(fun: Callable[[Any, Any, bool | None], Any], state: Any) -> Any:
    """Return an optimizer's state with `fun(path, tree, never_negative)` in place of each moment and other leaf.

    A moment is a tree like the parameters. `never_negative` is None for a leaf that is in none. Only Optax's types
    count, not a user's state with a field of the same name.
    """

    def of_node(path: Any, x: Any) -> Any:
        if not (kinds := _kinds(x)):
            return fun(path, x, None)
        fields = {}
        for name, field in x._asdict().items():
            inside, kind = (*path, GetAttrKey(name)), kinds.get(name)
            is_moment = kind in ("signed", "squares")
            fields[name] = fun(inside, field, kind == "squares") if is_moment else visit(inside, field)
        return x._replace(**fields)

    def visit(start: Any, tree: Any) -> Any:
        is_leaf = lambda x: bool(_kinds(x))
        return tree_map_with_path(lambda path, x: of_node((*start, *path), x), tree, is_leaf=is_leaf)

    return visit((), state)


def unknown_fields(state: Any, is_large: Callable[[Any], bool]) -> list[str]:
    """Return the fields with large arrays, in Optax's states, that this version of jamp does not know."""
    found = []
    for _, x in find_nodes(state, _is_of_optax):
        of = type(x).__name__
        known = FIELDS["*"].keys() | FIELDS.get(of, {}).keys() | _NO_MOMENTS.get(of, set())
        for name, field in x._asdict().items():
            if name not in known and any(map(is_large, jax.tree.leaves(field, is_leaf=_is_of_optax))):
                found.append(f"{of}.{name}")
        found += [
            y for name, field in x._asdict().items() if name not in known for y in unknown_fields(field, is_large)
        ]
    return found


def _is_of_optax(x: Any) -> bool:
    return hasattr(x, "_fields") and type(x).__module__.partition(".")[0] == "optax"


def averages_and_sums(state: Any) -> list[Any]:
    """Return the floating arrays of a state that are all zero only if all gradients were zero, as far as is known."""
    trees = []
    for _, x in find_nodes(state, lambda x: hasattr(x, "_fields"), enters=lambda x: True):
        kinds = _kinds(x, of_others=_USUAL)
        trees += [getattr(x, name) for name in x._fields if kinds.get(name, "other") not in ("other", "origin")]
    return [x for x in jax.tree.leaves(trees) if is_inexact(x)]


def may_be_moment(path: tuple[Any, ...]) -> bool:
    """Whether no field on the path of an array is known not to be a moment."""
    return not _NOT_MOMENTS & {getattr(key, "name", None) for key in path}


def measures_distance(state: Any) -> bool:
    """Whether updates depend on the distance to the first parameters."""
    return contains(state, lambda x: "origin" in _kinds(x).values())


def _kinds(x: Any, of_others: dict[str, _Kind] | None = None) -> dict[str, _Kind]:
    """Return the kinds of the fields of a node, by name, if it is a state of Optax, else `of_others`."""
    is_of_optax = type(x).__module__.partition(".")[0] == "optax"
    return FIELDS.get(type(x).__name__, {}) if is_of_optax else of_others or {}
