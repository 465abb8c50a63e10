"""Choose the memory plan of a function: which values are dropped, and how the function is split for it.

`MemoryPlan.drop` drops values, the best price first, until the bytes are within the budget. `choose` compares plans.
"""

import math
import warnings
from collections import Counter
from typing import Any

from jamp._jaxprs import ir, walk
from jamp._jaxprs.ir import ClosedJaxpr
from jamp._jaxprs.primitives import operation
from jamp._jaxprs.source import is_transposed, user_line, users_stacklevel
from jamp._recompute.budget import MemoryBudget, bytes_of, megabytes
from jamp._recompute.cut import PRODUCTS_OF_A_SEGMENT
from jamp._recompute.opened import opened
from jamp._recompute.plan import Known, MemoryPlan
from jamp._recompute.prices import cost
from jamp._recompute.segments import Split, key_of
from jamp._recompute.stores import Store

# 8 bits are used only if they leave less than this share of the bytes. A U-Net in which they leave 0.90 took 7 % more
# temporary memory with them (for an H200, jaxlib 0.12.0).
_WORTH_CODING = 0.875


def choose(closed: ClosedJaxpr, budget: MemoryBudget, residuals: Store = Store.ITSELF) -> tuple[MemoryPlan, float]:
    """The plan within a budget that computes the fewest FLOPs again, and the bytes that are kept without a budget.

    A share is of these bytes, with nothing in 8 bits. `residuals` is how large activations are kept, if that takes
    clearly fewer bytes. It may not, because a value that other code reads as it is would be kept twice.
    """
    known = Known({}, {})
    without = MemoryPlan(Split().function(closed), known)
    total = without.total
    coded = without if residuals is Store.ITSELF else MemoryPlan(Split(residuals=residuals).function(closed), known)
    if budget == 1.0:
        return coded if coded.total < _WORTH_CODING * total else without, total
    target = bytes_of(budget, total)
    found = _within(closed, target, residuals, known, coded)
    if residuals is not Store.ITSELF and found.total > target:
        found = min(found, _within(closed, target, Store.ITSELF, known, without), key=lambda x: x.total)
    if found.total > target and budget != 0:
        _warn(found, target, total)
    return found, total


def _within(closed: ClosedJaxpr, target: float, residuals: Store, known: Known, first: MemoryPlan) -> MemoryPlan:
    """The plan that keeps no more than the `target` bytes, or else the fewest. The `first` drops nothing yet.

    Gathers and whole constructs are computed again if that pays. Segments are merged, if the target is not reached, as
    long as the sum of the kept bytes and the bytes that the largest segment computes again at once becomes smaller.
    """

    def plan(whole: frozenset[Any] = frozenset(), products: int = PRODUCTS_OF_A_SEGMENT) -> MemoryPlan:
        return MemoryPlan(Split(products, whole, True, residuals).function(closed), known)

    best = first
    if best.total <= target:
        return best
    # Models that name most values, for checkpoints that are not there, would keep them all.
    named, closed = closed, opened(closed, keep_names=False)
    if closed is not named or any(x.segment.convolves for x in best.occurrences.values()):
        best = plan()
    again = _repeatable(best)
    best.drop(target)
    largest = max(target, best.largest)

    def rank(x: MemoryPlan) -> tuple[bool, bool, float, float]:
        if x.total > target:
            return True, True, x.total, x.largest
        return False, x.largest > largest, x.flops, x.total

    whole = frozenset[Any]()
    for keys in again:
        other = plan(whole | keys)
        other.drop(target)
        if rank(other) < rank(best):
            best, whole = other, whole | keys
    products = PRODUCTS_OF_A_SEGMENT
    while best.total > target:
        products *= 2
        other = plan(whole, products)
        other.drop(target)
        if other.total + other.largest >= best.total + best.largest:
            break
        best = other
    return best


def _repeatable(plan: MemoryPlan) -> list[frozenset[Any]]:
    """The keys of equations that may be computed again as a whole, in sets that `_within` tries one after the other.

    First all gathers, then the constructs with the fewest FLOPs, then calls with custom rules: one, one, two, four and
    so on. A construct is tried only if it runs more than once: to compute the only one again frees nothing at the peak.
    """
    runs: Counter[Any] = Counter()
    costs: dict[Any, float] = {}
    calls: dict[Any, float] = {}
    for eqn, times in plan.others:
        name = ir.name(eqn)
        if name in ("custom_vjp_call", "custom_jvp_call", "scan", "cond") and (again := cost(eqn)) < math.inf:
            key = key_of(eqn)
            runs[key] += times
            (calls if name.startswith("custom") else costs)[key] = again
    found = [frozenset(plan.gathers)] if plan.gathers else []
    found += [frozenset([key]) for key in sorted(costs, key=costs.__getitem__)[:4] if runs[key] > 1]
    cheapest = sorted(calls, key=calls.__getitem__)
    while cheapest:
        some = max(1, len(calls) - len(cheapest))  # as many as before them
        found.append(frozenset(cheapest[:some]))
        cheapest = cheapest[some:]
    return found


def _warn(plan: MemoryPlan, target: float, total: float) -> None:
    equations = list(walk.all_equations(plan.body.closed.jaxpr))
    if any(map(is_transposed, equations)):
        return  # `warnings_of_budget` names the cause.
    held = sorted((x for x in plan.readers if plan.readers[x] > 0 and x.eqn), key=lambda x: -x.size)[:3]
    lines = [
        f"{operation(x.eqn)} at {user_line(x.eqn) or 'an unknown line'} ({megabytes(x.size)} MB)" for x in held if x.eqn
    ]
    advice = "A smaller batch or fewer steps of a scan keep less."
    if any(ir.name(eqn) == "remat2" for eqn in equations):
        advice = "Your own jax.checkpoint or nn.remat keeps its inputs at any budget."
    warnings.warn(
        f"The memory budget is {megabytes(target)} MB, and the backward pass keeps at least {megabytes(plan.total)} "
        f"of {megabytes(total)} MB. The largest values: {', '.join(lines)}. {advice}",
        stacklevel=users_stacklevel(),
    )
