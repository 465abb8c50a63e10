"""The smallest set of rules with which a function under autocast has an error below a bound."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jamp._autocast.rules import ACCUMULATE
from jamp._jaxprs.primitives import PRODUCTS
from jamp.debug._errors import Errors
from jamp.debug._program import OFF, ON, OPERANDS
from jamp.debug._run_steps import Damage, Data, Switches
from jamp.debug._steps import Site

_TRIED = 20
# Shares of the bound at which the search aims, in order. Rules that just reach a bound for one batch are beyond it for
# others, and autocast rounds a little differently from the search.
_TARGETS = 0.85, 0.7, 0.5, 1.0
_SURE = 1.5  # times the bound: a predicted error beyond it is not measured
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

    def __init__(self, errors: Errors, errors_of: Callable[[Mapping[str, str]], Errors]):
        self._errors, self._errors_of = errors, errors_of
        self._measured: dict[frozenset[tuple[str, str]], float] = {}

    @property
    def _kind(self) -> int:
        """Whether the error is the error of the value, or of the gradients."""
        return int(self._errors.has_gradients)

    @functools.cached_property
    def _candidates(self) -> tuple[list[_Rule], list[_Rule]]:
        """The rules that cost no FLOPs, and the others, each with the most damage for its FLOPs first."""
        sites, damages = self._errors.program.sites, self._errors.damages[self._kind]
        free, wide = _candidates(sites, damages, "" if self._errors.format else str(self._errors.wide))
        by_damage = lambda x: -x.prevents / (x.flops + 1)
        return sorted(free, key=by_damage), sorted(wide, key=by_damage)

    def find(self, bound: float) -> Found:
        """Return the fewest rules, chosen by the damage that each prevents for its FLOPs, and checked with autocast.

        If none reach the bound, those for all products, with which the error is least.
        """
        errors, kind = self._errors, self._kind
        if not bound > 0 or math.isnan(errors.total[kind]):
            got = "the function has no floating result that is not 0" if bound > 0 else f"got error={bound}"
            raise ValueError(f"rules() needs a positive bound and an error to bound: {got}.")
        if errors.total[kind] <= bound:
            return Found({}, errors)
        sites, (free, wide) = errors.program.sites, self._candidates
        for target in (share * bound for share in _TARGETS):
            if self._error(wide) > target:
                continue
            needed = self._without_needless(self._fewest(wide, free, target), free, target)
            needed = self._exchanged(needed, wide, free, target)
            others = [x for x in free if x.key not in {y.key for y in needed}]
            kept = self._fewest(others, needed, target)
            # The first rule that matches decides, so the longer name stands first.
            chosen = {x.key: x.category for x in sorted([*needed, *kept], key=lambda x: -len(x.key))}
            is_all = {i for x in needed for i in x.on}.issuperset(i for x in wide for i in x.on)
            if not is_all and (found := self._errors_of(chosen)).total[kind] <= bound:
                return Found(chosen, found, _nameless(sites, needed).strip())
        operations = sorted({x.operation for x in sites} & PRODUCTS)
        everything = dict.fromkeys(operations, ACCUMULATE if errors.format else str(errors.wide))
        at_full_width = self._errors_of(everything)  # What rounds here too is the code's own, or 16 bit.
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

    def _fewest(self, rules: Sequence[_Rule], others: Sequence[_Rule], bound: float) -> Sequence[_Rule]:
        """Return the first rules that are enough with the others, given that all of them are."""
        low, high = -1, len(rules)
        while high - low > 1:
            middle = (low + high) // 2
            is_enough = self._error([*rules[:middle], *others]) <= bound
            low, high = (low, middle) if is_enough else (middle, high)
        return rules[:high]

    def _without_needless(self, rules: Sequence[_Rule], others: Sequence[_Rule], bound: float) -> list[_Rule]:
        """Leave out rules that the others make needless, tried from the most FLOPs on."""
        kept = list(rules)
        for rule in sorted(rules, key=lambda x: -x.flops)[:_TRIED]:
            rest = [x for x in kept if x is not rule]
            if self._may_do(kept, others, rule.prevents, bound) and self._error([*rest, *others]) <= bound:
                kept = rest
        return kept

    def _exchanged(
        self, rules: Sequence[_Rule], every: Sequence[_Rule], others: Sequence[_Rule], bound: float
    ) -> list[_Rule]:
        """Put rules with fewer FLOPs in the place of others where they are enough, the most FLOPs saved first."""
        kept, tried = list(rules), 0
        while tried < _TRIED:
            pairs = [(x, y) for x in kept for y in every if y not in kept and y.flops < x.flops]
            for x, y in sorted(pairs, key=lambda pair: pair[1].flops - pair[0].flops):
                if tried == _TRIED or not self._may_do(kept, others, x.prevents - y.prevents, bound):
                    continue
                tried += 1
                new = [*(z for z in kept if z is not x), y]
                if self._error([*new, *others]) <= bound:
                    kept = new
                    break
            else:
                break
        return kept

    def _may_do(self, rules: Sequence[_Rule], others: Sequence[_Rule], more: float, bound: float) -> bool:
        """Whether an error may be within the bound with more damage than with some rules, by the prediction."""
        return self._error([*rules, *others]) ** 2 + more <= (_SURE * bound) ** 2


def _candidates(sites: Sequence[Site], damages: Mapping[int, Damage], dtype: str) -> tuple[list[_Rule], list[_Rule]]:
    """Return the rules that keep results of products as they are accumulated, and rules for products in a dtype.

    Without a dtype, only rules that keep products of 8 bits in 16 bit.
    """
    accumulate, wide = [], []
    keys = dict.fromkeys((x.operation, x.scope) for x in sites if x.operation in PRODUCTS and (dtype or x.format))
    for name, scope in keys:
        inside = lambda x, scope=scope: not scope or f"/{scope}/" in f"/{x.scope}/"
        covered = [i for i, x in enumerate(sites) if x.operation == name and inside(x)]
        forward = [i for i in covered if not sites[i].is_backward]
        squares = lambda field, mine: sum(float(np.sum(getattr(damages[i], field))) for i in mine if i in damages)
        key = f"{name}[{scope}]" if scope else name
        # A rule for a scope covers all sites in it. A site with a scope of its own has its own rule, too.
        own = [i for i in covered if sites[i].scope == scope]
        of_results = squares("result", [i for i in own if i in forward])
        if dtype:
            flops = sum(sites[i].flops for i in covered)
            accumulate.append(_Rule(key, ACCUMULATE, dict.fromkeys(forward, OPERANDS), of_results, 0.0))
            prevents = squares("operands", own) + squares("result", own)
            wide.append(_Rule(key, dtype, dict.fromkeys(covered, OFF), prevents, flops))
        else:
            flops = sum(sites[i].flops for i in covered if sites[i].format)
            on = {i: (OPERANDS if i in forward else ON)._replace(codes=OFF.codes) for i in covered}
            prevents = squares("operands", [i for i in own if sites[i].format]) + of_results
            wide.append(_Rule(key, ACCUMULATE, on, prevents, flops))
    return accumulate, wide


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
