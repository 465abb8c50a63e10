"""The smallest set of rules with which a function under autocast has an error below a bound."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax import Array

from jamp._autocast.rules import ACCUMULATE
from jamp._jaxprs.primitives import PRODUCTS
from jamp.debug._errors import Errors
from jamp.debug._program import OFF, ON, OPERANDS
from jamp.debug._run_steps import Damage, Data, Switches
from jamp.debug._steps import Site

# Shares of the bound at which the search aims, in order. Rules that just reach a bound for one batch are beyond it for
# others, and autocast rounds a little differently from the search.
_TARGETS = 0.85, 1.0
_SURE = 1.5  # times the bound: what rules may leave by the prediction, where errors cancel in one batch
_LEFT = np.geomspace(1, 1e-6, 256)[1:]  # shares of the damage that sets of rules leave, by the prediction
_STEP = 8  # sets, between two of which the error is measured first
_UNITS = 4096  # of FLOPs, in which the cost of rules is counted
_NAMED = 5  # operations in an error


class _Rule(NamedTuple):
    """A rule, the roundings that are left at the sites it covers, the damage it prevents, and the FLOPs it widens."""

    key: str
    category: str
    on: Mapping[int, Switches]
    prevents: float
    flops: float


class Found(NamedTuple):
    """Rules, the errors of the function with them, and what a user should know about them."""

    rules: dict[str, str]
    errors: Errors
    warning: str = ""


class RuleSearch:
    """Searches rules for several bounds.

    In 16 bit, rules widen products to float32, or only their results. In a format of 8 bits, they keep products in
    16 bit.
    """

    def __init__(self, errors: Errors, errors_of: Callable[[Mapping[str, str], list[Array]], Errors]):
        self._errors, self._errors_of = errors, errors_of
        self._measured: dict[frozenset[tuple[str, str]], float] = {}
        self._runs: dict[frozenset[tuple[str, str]], Errors] = {}

    @property
    def _kind(self) -> int:
        """Whether the error is the error of the value, or of the gradients."""
        return int(self._errors.has_gradients)

    @functools.cached_property
    def _candidates(self) -> tuple[list[_Rule], list[_Rule]]:
        """The rules that cost no FLOPs, those that prevent the most damage first, and the others."""
        sites, damages = self._errors.program.sites, self._errors.damages[self._kind]
        free, wide = _candidates(sites, damages, "" if self._errors.format else str(self._errors.wide))
        return sorted(free, key=lambda x: -x.prevents), wide

    @functools.cached_property
    def _sets(self) -> list[tuple[float, list[_Rule]]]:
        """Sets of rules and the damage that each leaves by the prediction, each with the fewest FLOPs for it.

        Each has more FLOPs in more bits than the one before. The one with all products is not among them.
        """
        free, wide = self._candidates
        sites, of_free = self._errors.program.sites, {x.key: x.prevents for x in free}
        all_sites = {i for x in wide for i in x.on if sites[i].format or not self._errors.format}
        # With all free rules, a rule for a product prevents the rest of its damage.
        rest = [x.prevents - of_free.get(x.key, 0.0) for x in wide]
        total, cheapest = sum(rest) + sum(of_free.values()), _cheapest(wide, rest)
        sets: dict[frozenset[str], tuple[float, list[_Rule]]] = {}
        for left in total * _LEFT:
            rules = cheapest(total - left - sum(of_free.values()))
            if all_sites.issubset(i for x in rules for i in x.on):
                break
            keys, now = {x.key for x in rules}, total - sum(x.prevents for x in rules)
            for x in free:
                if now > left and x.key not in keys:
                    rules.append(x)
                    now -= x.prevents
            sets.setdefault(frozenset(x.key + x.category for x in rules), (now, rules))
        return list(sets.values())

    def find(self, bound: float) -> Found:
        """Return rules with few FLOPs in more bits, chosen by the damage that they prevent, and checked with autocast.

        If none reach the bound, those for all products, with which the error is least.
        """
        errors, kind = self._errors, self._kind
        if not bound > 0 or math.isnan(errors.total[kind]):
            got = "the function has no floating result that is not 0" if bound > 0 else f"got error={bound}"
            raise ValueError(f"rules() needs a positive bound and an error to bound: {got}.")
        if errors.total[kind] <= bound:
            return Found({}, errors)
        sites = errors.program.sites
        free, wide = self._candidates
        sets = [rules for left, rules in self._sets if left <= (_SURE * bound) ** 2]
        for target in (share * bound for share in _TARGETS) if self._error([*wide, *free]) <= bound else ():
            for rules in sets[self._first(sets, target) :]:
                chosen = _chosen(rules)
                if self._error(rules) <= target and (found := self._run(chosen)).total[kind] <= bound:
                    return Found(chosen, found, _nameless(sites, [x for x in rules if x.flops]).strip())
        operations = sorted({x.operation for x in sites} & PRODUCTS)
        everything = dict.fromkeys(operations, ACCUMULATE if errors.format else str(errors.wide))
        at_full_width = self._run(everything)  # What rounds here too is the code's own, or 16 bit.
        narrow = "16 bit" if errors.format else errors.wide
        message = f"No smaller set than all products in {narrow} was found for an error of {bound:g}."
        return Found(everything, at_full_width, message + _nameless(sites, wide))

    def unreachable(self, found: Found, bound: float) -> str:
        """Return the message that products at full width are not enough."""
        errors, kind = found.errors, self._kind
        operations = [f"{x.operation} at {x.line or x.scope or 'an unknown line'}" for x in _by_damage(errors, kind)]
        operations = list(dict.fromkeys(operations))
        more = f" and {len(operations) - _NAMED} more" if len(operations) > _NAMED else ""
        named = f"{', '.join(operations[:_NAMED])}{more}"
        narrow = "16 bit" if errors.wide == np.float32 else errors.dtype
        least = f"No rules for products bring the error below {bound:g}. With all of them in"
        if errors.format:
            return f"{least} {narrow} it is {errors.total[kind]:.1e}, by the rounding to 16 bit of {named}."
        because = f", because other operations round to {narrow} in the code itself: {named}" if operations else ""
        return f"{least} {errors.wide} it is {errors.total[kind]:.1e}{because}."

    def _error(self, rules: Sequence[_Rule]) -> float:
        """The error with some rules, without a trace of the function."""
        key = frozenset((x.key, x.category) for x in rules)
        if key not in self._measured:
            on = _switches(len(self._errors.program.sites), rules)
            self._measured[key] = self._errors.of(on)[self._kind]
        return self._measured[key]

    def _run(self, rules: dict[str, str]) -> Errors:
        """The function with some rules, as autocast traces it. Its reference is the same."""
        key = frozenset(rules.items())
        if key not in self._runs:
            self._runs[key] = self._errors_of(rules, self._errors.exact()[0])
        return self._runs[key]

    def _first(self, sets: Sequence[Sequence[_Rule]], bound: float) -> int:
        """Return the index of the first set that is enough, by steps of several sets and then between two.

        An error may rise with more rules, where errors cancel. So the search does not start with many.
        """
        low, high = -1, len(sets)
        for i in range(0, len(sets), _STEP):
            if self._error(sets[i]) <= bound:
                high = i
                break
            low = i
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._error(sets[middle]) <= bound else (middle, high)
        return high


def _chosen(rules: Sequence[_Rule]) -> dict[str, str]:
    """Return rules as autocast takes them. The first one that matches decides, so the longer name stands first."""
    return {x.key: x.category for x in sorted(rules, key=lambda x: -len(x.key))}


def _cheapest(rules: Sequence[_Rule], values: Sequence[float]) -> Callable[[float], list[_Rule]]:
    """Return a function that returns the rules with the fewest FLOPs whose values add up to a sum, or all rules."""
    unit = sum(x.flops for x in rules) / _UNITS or 1.0
    costs = [round(x.flops / unit) for x in rules]
    most, takes = np.zeros(sum(costs) + 1), []  # the largest sum for each cost, and whether it takes each rule
    for cost, value in zip(costs, values, strict=True):
        with_it = most.copy()
        with_it[cost:] = most[: len(most) - cost] + value
        takes.append(with_it > most)
        most = np.maximum(most, with_it)

    def chosen(total: float) -> list[_Rule]:
        at = min(int(np.searchsorted(most, total)), len(most) - 1)
        found = []
        for rule, cost, taken in reversed(list(zip(rules, costs, takes, strict=True))):
            if taken[at]:
                found.append(rule)
                at -= cost
        return found

    return chosen


def _candidates(sites: Sequence[Site], damages: Mapping[int, Damage], dtype: str) -> tuple[list[_Rule], list[_Rule]]:
    """Return the rules that keep results of products as they are accumulated, and those that widen products to a dtype.

    Without a dtype, those that keep products of 8 bits in 16 bit. The first ones are for products that have 16 bit.
    """
    free, wide = [], []
    for name, scope in dict.fromkeys((x.operation, x.scope) for x in sites if x.operation in PRODUCTS):
        inside = lambda x, scope=scope: not scope or f"/{scope}/" in f"/{x.scope}/"
        covered = [i for i, x in enumerate(sites) if x.operation == name and inside(x)]
        forward, eight = (
            [i for i in covered if f(sites[i])] for f in (lambda x: not x.is_backward, lambda x: x.format)
        )
        squares = lambda field, mine: sum(float(np.sum(getattr(damages[i], field))) for i in mine if i in damages)
        key = f"{name}[{scope}]" if scope else name
        # A rule for a scope covers all sites in it. A site with a scope of its own has its own rule, too.
        own = [i for i in covered if sites[i].scope == scope]
        of_results = squares("result", [i for i in own if i in forward])
        flops = sum(sites[i].flops for i in (covered if dtype else eight))
        if not eight:
            free.append(_Rule(key, ACCUMULATE, dict.fromkeys(forward, OPERANDS), of_results, 0.0))
        if dtype:
            prevents = squares("operands", own) + squares("result", own)
            wide.append(_Rule(key, dtype, dict.fromkeys(covered, OFF), prevents, flops))
        elif eight:
            on = {i: (OPERANDS if i in forward else ON)._replace(codes=OFF.codes) for i in covered}
            prevents = squares("operands", [i for i in own if sites[i].format]) + of_results
            wide.append(_Rule(key, ACCUMULATE, on, prevents, flops))
    return free, wide


def _switches(sites: int, rules: Sequence[_Rule]) -> Data:
    on = dict.fromkeys(range(sites), ON)
    for rule in rules:
        on |= {i: Switches(*map(np.logical_and, on[i], x)) for i, x in rule.on.items()}
    return on


def _nameless(sites: Sequence[Site], rules: Sequence[_Rule]) -> str:
    """Return advice for products that only a rule for all products covers."""
    lines = sorted({sites[i].line for x in rules if "[" not in x.key for i in x.on if not sites[i].scope})
    if not lines:
        return ""
    return (
        f" Rules tell products apart by their name scopes, and these lines have none: {', '.join(lines[:5])}. Put them "
        'into `with jax.named_scope("a name"):`, or into `jamp.full_precision`.'
    )


def _by_damage(errors: Errors, kind: int) -> list[Site]:
    """The sites, the most damage first."""
    sites, damages = errors.program.sites, errors.damages[kind]
    square = lambda i: float(np.sum(damages[i].operands) + np.sum(damages[i].result)) if i in damages else 0.0
    return [sites[i] for i in sorted(range(len(sites)), key=lambda i: (-square(i), sites[i].line))]
