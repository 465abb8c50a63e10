"""The decisions about the equations of a function, and the source, the number of runs and the FLOPs of each."""

import dataclasses
import difflib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jamp import _jaxpr
from jamp._autocast.cast import Cast, Decision
from jamp._autocast.context import AUTOCAST, ENTERED, NO_RULE, NOT_ENTERED
from jamp._autocast.rules import GRADIENT, RULES, YOURS
from jamp._cast import is_float32, is_floating
from jamp._jaxpr import Jaxpr, JaxprEqn
from jamp._primitives import CUBIC, MOVING, PRODUCTS, REARRANGES
from jamp._source_line import in_scope, scope, scope_path, user_line

if TYPE_CHECKING:
    from jamp._autocast.quantize import Quantized

_WAY_OUT = "cast its arguments in your code, or pass it functions that are under autocast themselves"


@dataclasses.dataclass(frozen=True)
class Found:
    """A decision about an equation that was not entered.

    Attributes:
      decision: The decision.
      times: How often the equation runs.
      source: The user's line.
      scope: The name scopes around it.
      parameters: The paths of the parameters that it reads.
      path: The constructs around it: the id of each one's equation, and the number of the body.
    """

    decision: Decision
    times: int
    source: str
    scope: str
    parameters: list[str]
    path: tuple[tuple[int, int], ...]


def flat_decisions(body: Cast, parameters: dict[Any, str]) -> Iterator[Found]:
    """Every decision about an equation that is not an entered construct."""
    yield from _flat(body, dict(parameters), 1, "", "", ())


def _flat(
    body: Cast, parameters: dict[Any, str], times: int, source: str, caller: str, path: tuple[tuple[int, int], ...]
) -> Iterator[Found]:
    for decision in body.decisions:
        eqn = decision.eqn
        line, place = user_line(eqn) or source, scope(eqn, caller)
        reads = [None if _jaxpr.is_literal(v) else parameters.get(v) for v in eqn.invars]
        if decision.category == ENTERED:
            carry = _jaxpr.carry(eqn)
            for i, (inner, operands) in enumerate(zip(decision.bodies, _jaxpr.body_operands(eqn), strict=True)):
                given = zip(inner.traced.jaxpr.invars, operands, strict=True)
                known = {v: found for v, j in given if j not in carry and (found := reads[j])}
                inside = (*path, (id(decision.run), i))
                yield from _flat(inner, known, times * _jaxpr.iterations(eqn), line, place, inside)
        else:
            yield Found(decision, times, line, place, [found for found in reads if found], path)
            if _jaxpr.name(eqn) in REARRANGES and reads[0]:
                parameters.update(dict.fromkeys(eqn.outvars, reads[0]))


def all_equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Every equation of a jaxpr and of the jaxprs in it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner, _ in _jaxpr.inner(eqn):
            yield from all_equations(inner)


def flops(eqn: JaxprEqn) -> float:
    """Two for each multiply-add of a product, one for each element of any other arithmetic. A symbolic size is 1.

    Linear algebra counts as textbooks do.
    """
    known = lambda sizes: math.prod(n for n in sizes if isinstance(n, int))
    sizes = [known(getattr(v.aval, "shape", ())) for v in (*eqn.invars, *eqn.outvars)]
    name = _jaxpr.name(eqn)
    if name in PRODUCTS:
        return 2.0 * sizes[-1] * known([_jaxpr.summed_terms(eqn)])
    if name in CUBIC:
        return CUBIC[name] * max(sizes[len(eqn.invars) :]) * known(_jaxpr.avals(eqn.invars)[0].shape[-1:])
    if name in RULES:
        return 0.0 if name in MOVING else float(max(sizes))
    return float(sum(times * flops(e) for inner, times in _jaxpr.inner(eqn) for e in inner.eqns))


def cause(eqn: JaxprEqn) -> str:
    """The reason why autocast does not enter an equation, or has no rule for it, and the cure."""
    name = _jaxpr.name(eqn)
    if name == "custom_linear_solve":
        return "a solver needs the digits of float32; for products in 16 bit, pass it jamp.autocast(matvec, dtype)"
    if name not in _jaxpr.CONSTRUCTS:
        if name in _jaxpr.primitive_names() and not _jaxpr.has_body(eqn):
            return "autocast has no rule for it: give it one with rules={...} if 16 bit is right"
        return f"it is a kernel, or an operation of a library, that autocast does not know; {_WAY_OUT}"
    if _jaxpr.bodies(eqn) is not None:
        return f"it is a custom rule with symbolic zeros inside shard_map; {_WAY_OUT}"
    if _jaxpr.is_known(eqn):
        return f"it reads or writes a Ref; {_WAY_OUT}"
    return f"this release of JAX gives it parameters that autocast does not know; {_WAY_OUT}"


def warnings_of(body: Cast, quantized: "Quantized | None") -> list[str]:
    """Warnings for the user: about large parts that are not entered, or that no product is changed."""
    decisions = list(_all_decisions(body))
    products = [x for x in decisions if _is_product(x)]
    is_used = quantized.is_used if quantized else any(x.is_low for x in products)
    unused = _unused_rules(body)
    if is_used and not any(map(_is_left_out, decisions)):
        return unused
    found = list(flat_decisions(body, {}))
    total = sum(x.times * flops(x.decision.eqn) for x in found) or 1
    has_autocast = any(in_scope(eqn, AUTOCAST) for eqn in all_equations(body.traced.jaxpr))
    unchanged = [x for x in found if _is_product(x.decision)]
    messages = unused + ([] if is_used or has_autocast else _unchanged(unchanged, quantized))
    for x in found:
        eqn, share = x.decision.eqn, x.times * flops(x.decision.eqn) / total
        if _is_left_out(x.decision) and share >= 0.01:
            where = x.source or x.scope or "an unknown line"
            message = f"autocast leaves {share:.1%} of the FLOPs in float32: {_jaxpr.name(eqn)} at {where} runs"
            messages.append(f"{message} as it was traced, because {cause(eqn)}.")
    return messages


def _unused_rules(body: Cast) -> list[str]:
    """Warnings about rules of the user that decided about no operation."""
    rules = {key for key, rule in body.caster.rules.items() if rule.reason == YOURS}
    unused = sorted(rules - body.caster.used)
    # The derivatives of custom rules are traced later, and the gradients of weights only by a gradient.
    is_custom = lambda eqn: _jaxpr.name(eqn) in ("custom_jvp_call", "custom_vjp_call", "linear_call")
    paths = [(path, is_custom(eqn)) for eqn, path in _paths(body.traced.jaxpr, "")] if unused else []
    messages = []
    for key in unused:
        part = key.partition("[")[2][:-1]
        if part == GRADIENT or (key in RULES and part):
            continue
        seen = sorted({name for path, _ in paths for name in path.split("/") if name})
        close = difflib.get_close_matches(part, seen, 3) if part else []
        hint = f" Scopes with a similar name: {', '.join(close)}." if close else ""
        if part in seen:
            hint = " The scope has no such operation, or an earlier rule decides about it."
        if any(custom and (not close or f"/{part}/" in path) for path, custom in paths):
            continue
        messages.append(f"The rule for {key!r} matches no operation of this function.{hint}")
    return messages


def _paths(jaxpr: Jaxpr, around: str) -> Iterator[tuple[JaxprEqn, str]]:
    """Every equation of a jaxpr and of the jaxprs in it, and the name scopes around it."""
    for eqn in jaxpr.eqns:
        path = scope_path(eqn, around)
        yield eqn, path
        for inner, _ in _jaxpr.inner(eqn):
            yield from _paths(inner, path)


def _unchanged(products: list[Found], quantized: "Quantized | None") -> list[str]:
    """A warning that no product is cast or no cast product is 8 bit, with the reason for the largest."""
    reasons = {id(x): quantized.why_not(x.decision, x.path) for x in products} if quantized else {}
    candidates = [x for x in products if reasons.get(id(x))]
    largest = max(candidates or products, key=lambda x: x.times * flops(x.decision.eqn), default=None)
    if largest is None:
        return []
    name, why = type(quantized.config).__name__ if quantized else "autocast", reasons.get(id(largest))
    if not why and any(is_floating(x) and x.dtype.itemsize == 2 for x in _jaxpr.avals(largest.decision.eqn.invars)):
        why = "its operands are 16 bit already. Pass float32 parameters and inputs, and modules without dtype=..."
    if not why:  # The code asked for float32, or for a 16-bit result.
        return []
    place = largest.source or largest.scope
    at = f" is at {place}" if place else ""
    return [f"{name} changes no product of this function. The largest{at}: {why}."]


def _is_product(decision: Decision) -> bool:
    return _jaxpr.name(decision.eqn) in PRODUCTS


def _all_decisions(body: Cast) -> Iterator[Decision]:
    for decision in body.decisions:
        yield decision
        for inner in decision.bodies:
            yield from _all_decisions(inner)


def _is_left_out(decision: Decision) -> bool:
    """Whether an equation with float32 products in it runs as it was traced."""
    if decision.category not in (NOT_ENTERED, NO_RULE) or not any(map(is_float32, _jaxpr.avals(decision.eqn.invars))):
        return False
    inner = [e for jaxpr, _ in _jaxpr.inner(decision.eqn) for e in all_equations(jaxpr)]
    return any(_jaxpr.name(e) in PRODUCTS and any(map(is_float32, _jaxpr.avals(e.invars))) for e in inner)
