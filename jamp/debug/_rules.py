"""The smallest set of rules with which a function under autocast has an error below a bound."""

import functools
import math
import warnings
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


class _Rule(NamedTuple):
    """A rule, the roundings that are left at the sites it covers, the damage it prevents, and the FLOPs it widens."""

    key: str
    category: str
    on: Mapping[int, Switches]
    prevents: float
    flops: float


def find_rules(errors_of: Callable[[Mapping[str, str]], Errors], bound: float) -> dict[str, str]:
    """Return the fewest rules, chosen by the damage that each prevents for its FLOPs, and checked with autocast."""
    errors = errors_of({})
    kind = int(errors.has_gradients)
    if not bound > 0 or math.isnan(errors.total[kind]):
        got = "the function has no floating result that is not 0" if bound > 0 else f"got error={bound}"
        raise ValueError(f"rules() needs a positive bound and an error to bound: {got}.")
    if errors.total[kind] <= bound:
        return {}
    sites = errors.program.sites
    accumulate, wide = _candidates(sites, errors.damages()[kind], str(errors.wide))
    error = lambda rules: errors.of(_switches(len(sites), rules))[kind]

    def is_enough(rules: Sequence[_Rule], others: Sequence[_Rule], bound: float) -> bool:
        return error([*rules, *others]) <= bound

    for target in (bound, 0.7 * bound, 0.5 * bound):  # Autocast rounds a little differently from the search.
        if not is_enough(wide, [], target):
            break
        needed = _fewest(wide, functools.partial(is_enough, others=accumulate, bound=target))
        needed = _without_needless(needed, functools.partial(is_enough, others=accumulate, bound=target))
        others = [x for x in accumulate if x.key not in {y.key for y in needed}]
        kept = _fewest(others, functools.partial(is_enough, others=needed, bound=target))
        # The first rule that matches decides, so the longer name stands first.
        chosen = {x.key: x.category for x in sorted([*needed, *kept], key=lambda x: -len(x.key))}
        is_all = {i for x in needed for i in x.on}.issuperset(i for x in wide for i in x.on)
        if not is_all and errors_of(chosen).total[kind] <= bound:
            if message := _nameless(sites, needed):
                warnings.warn(message.strip(), stacklevel=3)
            return chosen
    everything = dict.fromkeys(sorted({x.operation for x in sites} & PRODUCTS), str(errors.wide))
    at_full_width = errors_of(everything)  # What rounds here too is the code's own.
    if (least := at_full_width.total[kind]) > bound:
        raise ValueError(_unreachable(at_full_width, least, bound))
    message = f"No smaller set than all products in {errors.wide} was found for an error of {bound:g}."
    warnings.warn(message + _nameless(sites, wide), stacklevel=3)
    return everything


def _candidates(sites: Sequence[Site], damages: Mapping[int, Damage], dtype: str) -> tuple[list[_Rule], list[_Rule]]:
    """Return the rules that keep results of products as they are accumulated, and rules for products in a dtype."""
    accumulate, wide = [], []
    keys = dict.fromkeys((x.operation, x.scope) for x in sites if x.operation in PRODUCTS)
    for name, scope in keys:
        inside = lambda x, scope=scope: not scope or f"/{scope}/" in f"/{x.scope}/"
        covered = [i for i, x in enumerate(sites) if x.operation == name and inside(x)]
        forward = [i for i in covered if not sites[i].is_backward]
        squares = lambda field, mine: sum(float(np.sum(getattr(damages[i], field))) for i in mine if i in damages)
        key = f"{name}[{scope}]" if scope else name
        flops = sum(sites[i].flops for i in covered)
        # A rule for a scope covers all sites in it. A site with a scope of its own has its own rule, too.
        own = [i for i in covered if sites[i].scope == scope]
        prevents = squares("result", [i for i in own if i in forward])
        accumulate.append(_Rule(key, ACCUMULATE, dict.fromkeys(forward, OPERANDS), prevents, 0.0))
        prevents = squares("operands", own) + squares("result", own)
        wide.append(_Rule(key, dtype, dict.fromkeys(covered, OFF), prevents, flops))
    by_damage = lambda x: -x.prevents / (x.flops + 1)
    return sorted(accumulate, key=by_damage), sorted(wide, key=by_damage)


def _switches(sites: int, rules: Sequence[_Rule]) -> Data:
    on = dict.fromkeys(range(sites), ON)
    for rule in rules:
        on |= {i: Switches(*map(np.logical_and, on[i], x)) for i, x in rule.on.items()}
    return on


def _fewest(rules: Sequence[_Rule], is_enough: Callable[[Sequence[_Rule]], bool]) -> Sequence[_Rule]:
    """Return the first rules that are enough, given that all of them are."""
    low, high = -1, len(rules)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(rules[:middle]) else (middle, high)
    return rules[:high]


def _without_needless(rules: Sequence[_Rule], is_enough: Callable[[Sequence[_Rule]], bool]) -> list[_Rule]:
    """Leave out rules that the others make needless, tried from the most FLOPs on."""
    kept = list(rules)
    for rule in sorted(rules, key=lambda x: -x.flops)[:_TRIED]:
        others = [x for x in kept if x is not rule]
        if is_enough(others):
            kept = others
    return kept


def _nameless(sites: Sequence[Site], rules: Sequence[_Rule]) -> str:
    """Return advice for products that only a rule for all products covers."""
    lines = sorted({sites[i].line for x in rules if "[" not in x.key for i in x.on if not sites[i].scope})
    if not lines:
        return ""
    return (
        f" Rules tell products apart by their name scopes, and these lines have none: {', '.join(lines[:5])}. Put them "
        'into `with jax.named_scope("a name"):`, or into `jamp.full_precision`.'
    )


def _unreachable(errors: Errors, error: float, bound: float) -> str:
    """Return the message if products at full width are not enough. The sites of `errors` round nevertheless."""
    sites, narrow = errors.program.sites, "16 bit" if errors.wide == np.float32 else errors.dtype
    lines = sorted({f"{x.operation} at {x.line or x.scope or 'an unknown line'}" for x in sites})
    more = f" and {len(lines) - 5} more" if len(lines) > 5 else ""
    because = f", because other operations round to {narrow} in the code itself: {', '.join(lines[:5])}{more}"
    return (
        f"No rules for products bring the error below {bound:g}. With all of them in {errors.wide} it is {error:.1e}"
        f"{because if lines else ''}."
    )
