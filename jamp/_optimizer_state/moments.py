"""The arrays in Optax's states that are like the parameters: which are moments, and of what kind."""

import enum
from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import GetAttrKey, tree_map_with_path

from jamp._cast import is_inexact
from jamp._step.leaves import contains, find_nodes


class _Kind(enum.Enum):
    """What a field of a state holds."""

    SIGNED = enum.auto()  # a moment
    SQUARES = enum.auto()  # a moment that is never negative
    WHOLE = enum.auto()  # a moment that eight bits would spoil, or that is small
    SUM = enum.auto()  # of all gradients so far, or of their squares
    OTHER = enum.auto()  # a copy of the parameters, or a constant, or gradients of the last few steps
    ORIGIN = enum.auto()  # the first parameters, if updates depend on the distance to them


_SIGNED, _SQUARES, _WHOLE, _SUM, _OTHER, _ORIGIN = _Kind

# Centered RMSprop takes the root of a difference of its two moments, which roundings can make negative. Momo subtracts
# a sum of products with its moment. Those are WHOLE.
FIELDS = {
    "AccumulateAvgUpdatesState": {"avg_grad": _OTHER},
    "COCOBState": {"init_particles": _OTHER, "cumulative_gradients": _SUM},
    "DAdaptAdamWState": {"exp_avg": _SIGNED, "exp_avg_sq": _SQUARES, "grad_sum": _SUM},
    "DoGState": {"init_params": _ORIGIN},
    "DoWGState": {"init_params": _ORIGIN},
    "EmaState": {"ema": _SIGNED},
    "FactoredState": {"v": _SQUARES, "v_row": _WHOLE, "v_col": _WHOLE},
    "GaLoreState": {"projector": _OTHER},
    "InjectHyperparamsState": {"hyperparams": _OTHER},
    "InjectStatefulHyperparamsState": {"hyperparams": _OTHER},
    "LookaheadParams": {"slow": _OTHER},
    "MadgradState": {"grad_sum_sq": _SUM, "s": _SUM, "x0": _OTHER},
    "MechanicState": {"s": _OTHER, "x0": _ORIGIN},
    "MomoAdamState": {"exp_avg": _WHOLE, "exp_avg_sq": _WHOLE},
    "MomoState": {"exp_avg": _WHOLE},
    "MultiStepsState": {"acc_grads": _OTHER},
    "MuonState": {"mu": _SIGNED, "ns_coeffs": _OTHER},
    "ProdigyState": {"exp_avg": _SIGNED, "exp_avg_sq": _SQUARES, "grad_sum": _SUM, "params0": _OTHER},
    "ScaleByAdaDeltaState": {"e_g": _SQUARES, "e_x": _SQUARES},
    "ScaleByAdamState": {"mu": _SIGNED, "nu": _SQUARES},
    "ScaleByAdanState": {"m": _SIGNED, "v": _SIGNED, "n": _SQUARES},
    "ScaleByAdemamixState": {"m1": _SIGNED, "m2": _SIGNED, "nu": _SQUARES},
    "ScaleByAmsgradState": {"mu": _SIGNED, "nu": _SQUARES, "nu_max": _SQUARES},
    "ScaleByBeliefState": {"mu": _SIGNED, "nu": _SQUARES},
    "ScaleByLBFGSState": {"params": _OTHER},
    "ScaleByLionState": {"mu": _SIGNED},
    "ScaleByNovogradState": {"mu": _SIGNED, "nu": _WHOLE},
    "ScaleByRStdDevState": {"mu": _WHOLE, "nu": _WHOLE},
    "ScaleByRmsState": {"nu": _SQUARES},
    "ScaleByRmsWithCountState": {"nu": _SQUARES},
    "ScaleByRssState": {"sum_of_squares": _SUM},
    "ScaleBySM3State": {"mu": _WHOLE, "nu": _SIGNED},  # nu is its momentum
    "ScaleBySimplifiedAdEMAMixState": {"m": _SIGNED, "n": _SQUARES},
    "ScheduleFreeState": {"z": _OTHER},
    "SophiaState": {"mu": _SIGNED, "nu": _SIGNED},  # An estimate of the Hessian may be negative.
    "TraceState": {"trace": _SIGNED},
}
# The usual names of moments, for states of other libraries.
_USUAL = FIELDS["EmaState"] | FIELDS["ScaleByAdamState"] | FIELDS["TraceState"]
# The names of fields that are no moments in a state of any library. The units of jamp's 8-bit codes are not.
_NOT_MOMENTS = {"scales"} | {
    name for fields in FIELDS.values() for name, kind in fields.items() if kind in (_SUM, _OTHER, _ORIGIN)
}


def map_moments(fun: Callable[[Any, Any, bool | None], Any], state: Any) -> Any:
    """Return an optimizer's state with `fun(path, tree, never_negative)` in place of each moment and other leaf.

    A moment is a tree like the parameters. `never_negative` is None for a leaf that is in none. Only Optax's types
    count, not a user's state with a field of the same name.
    """

    def of_node(path: Any, x: Any) -> Any:
        if not _is_known(x):
            return fun(path, x, None)
        kinds, fields = _kinds(x), {}
        for name, field in x._asdict().items():
            inside, kind = (*path, GetAttrKey(name)), kinds.get(name)
            is_moment = kind in (_SIGNED, _SQUARES)
            fields[name] = fun(inside, field, kind is _SQUARES) if is_moment else visit(inside, field)
        return x._replace(**fields)

    def visit(start: Any, tree: Any) -> Any:
        return tree_map_with_path(lambda path, x: of_node((*start, *path), x), tree, is_leaf=_is_known)

    return visit((), state)


def averages_and_sums(state: Any) -> list[Any]:
    """Return the floating arrays of a state that are all zero only if all gradients were zero, as far as is known."""
    trees = []
    for _, x in find_nodes(state, lambda x: hasattr(x, "_fields"), enters=lambda x: True):
        kinds = _kinds(x) if _is_of_optax(x) else _USUAL
        trees += [getattr(x, name) for name in x._fields if kinds.get(name, _OTHER) not in (_OTHER, _ORIGIN)]
    return [x for x in jax.tree.leaves(trees) if is_inexact(x)]


def may_be_moment(path: tuple[Any, ...]) -> bool:
    """Whether no field on the path of an array is known not to be a moment."""
    return not _NOT_MOMENTS & {getattr(key, "name", None) for key in path}


def measures_distance(state: Any) -> bool:
    """Whether updates depend on the distance to the first parameters."""
    return contains(state, lambda x: _is_known(x) and _ORIGIN in _kinds(x).values())


def _kinds(x: Any) -> dict[str, _Kind]:
    return FIELDS.get(type(x).__name__, {})


def _is_known(x: Any) -> bool:
    return bool(_kinds(x)) and _is_of_optax(x)


def _is_of_optax(x: Any) -> bool:
    return type(x).__module__.partition(".")[0] == "optax"
