"""The decisions about the equations of a function, read from its jaxpr, with source, number of runs and FLOPs."""

import dataclasses
import difflib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jamp._autocast.custom_rules import is_entered
from jamp._autocast.facts import AUTOCAST, ENTERED, FULL_PRECISION, NO_RULE, NOT_ENTERED, REGION
from jamp._autocast.passes import Passes
from jamp._autocast.rules import COMPUTE, GRADIENT, YOURS, rules_for
from jamp._autocast.target import Target
from jamp._cast import is_floating
from jamp._jaxprs import dataflow, ir
from jamp._jaxprs.build import CAST
from jamp._jaxprs.dataflow import Flags
from jamp._jaxprs.ir import ClosedJaxpr, Jaxpr, JaxprEqn
from jamp._jaxprs.primitives import COPIES, IDENTITIES, PRODUCTS, REARRANGES, operation
from jamp._jaxprs.source import in_scope, scope, scope_path, user_line
from jamp._products import product as _product
from jamp._products.flops import flops
from jamp._products.product import Product, as_traced, products
from jamp._products.quantized import QUANTIZE
from jamp._recompute.budget import MemoryBudget, warnings_of_budget
from jamp._recompute.policies import warnings_of_policies

_WAY_OUT = "cast its arguments in your code, or pass it functions that are under autocast themselves"


@dataclasses.dataclass(frozen=True)
class Decision:
    """The decision about an equation that is not an entered construct.

    Attributes:
      eqn: The equation, of a product the traced one.
      product: The decision that the equation carries, if it is a product.
      key, category: The key of its rule, and the category.
      before, after: The dtypes of its operands and results as traced, and as it runs.
      times: How often it runs.
      source: The user's line.
      scope: The name scopes around it.
      parameters: The paths of the parameters that it reads.
    """

    eqn: JaxprEqn
    product: Product | None
    key: str
    category: str
    before: tuple[str, str]
    after: tuple[str, str]
    times: int
    source: str
    scope: str
    parameters: list[str]


def decisions(closed: ClosedJaxpr, target: Target, parameters: dict[Any, str], manual: bool) -> list[Decision]:
    """The decisions about the equations of a jaxpr, the result of `cast` or of `quantize`.

    `parameters` are the paths of its inputs. `manual` says that it is inside a shard_map.
    """
    around = _Around(1, "", "", "", manual)
    return list(_Walk(target).walk(closed, dict(parameters), [False] * len(closed.in_avals), around))


class _Around(NamedTuple):
    """The constructs around a jaxpr.

    Attributes:
      times: How often it runs.
      source: The user's line of the innermost.
      scope: The name scopes, as the report shows them.
      path: The name scopes, as rules match them.
      manual: Whether one is a shard_map.
    """

    times: int
    source: str
    scope: str
    path: str
    manual: bool


class _Walk:
    def __init__(self, target: Target):
        self._target = target
        self._stored = dataflow.spreads(self._is_stored)

    def walk(self, closed: ClosedJaxpr, parameters: dict[Any, str], low: Flags, around: _Around) -> Iterator[Decision]:
        """The decisions about a jaxpr. `low` inputs are stored in 16 bit."""
        stored = self._stored(closed, low)
        casts = {eqn.invars[0]: eqn.outvars[0] for eqn in closed.jaxpr.eqns if _is_cast(eqn)}
        for eqn in closed.jaxpr.eqns:
            product, line, place = _product.of(eqn), user_line(eqn) or around.source, scope(eqn, around.scope)
            reads = [None if ir.is_literal(v) else parameters.get(v) for v in eqn.invars]
            if ir.name(eqn) in REARRANGES and reads[0]:
                parameters.update(dict.fromkeys(eqn.outvars, reads[0]))
            if ir.name(eqn) in IDENTITIES or (in_scope(eqn, QUANTIZE) and not product):
                continue
            key, category = self._decide(eqn, product, around)
            operands = self._stored.read(stored, eqn.invars)
            if category == ENTERED:
                carry, name = ir.carry(eqn), ir.name(eqn)
                into, path = self._stored.into(eqn, operands), scope_path(eqn, around.path)
                inner = _Around(
                    around.times * ir.iterations(eqn), line, place, path, around.manual or name == "shard_map"
                )
                bodies = zip(ir.bodies(eqn) or (), ir.body_operands(eqn), into, strict=True)
                for body, places, inputs in bodies:
                    given = zip(body.jaxpr.invars, places, strict=True)
                    known = {v: x for v, j in given if j not in carry and (x := reads[j])}
                    yield from self.walk(body, known, inputs, inner)
                continue
            results = self._stored.read(stored, eqn.outvars)
            before = self._dtypes(eqn.invars, operands), self._dtypes(eqn.outvars, results)
            is_cast = category == COMPUTE and ir.name(eqn) in COPIES
            after = self._dtypes(eqn.invars), self._dtypes([casts.get(v, v) if is_cast else v for v in eqn.outvars])
            if product:
                before = ", ".join(map(str, product.before[:-1])), str(product.before[-1])
                after = self._as_multiplied(eqn, product), after[1]
            paths = [x for x in reads[: product.arity if product else None] if x]
            yield Decision(as_traced(eqn), product, key, category, before, after, around.times, line, place, paths)

    def _decide(self, eqn: JaxprEqn, product: Product | None, around: _Around) -> tuple[str, str]:
        """The key of the rule for an equation, and the category, as `cast` decides."""
        if product:
            return product.key, product.category
        name, rules = ir.name(eqn), self._target.rules
        if in_scope(eqn, FULL_PRECISION):
            return name, REGION
        if name in ir.CONSTRUCTS and name not in rules:
            return name, ENTERED if is_entered(eqn, around.manual, self._target) else NOT_ENTERED
        literals = [ir.number(v) for v in eqn.invars if self._target.is_wide(v.aval)]
        key = self._target.rule_key(eqn, around.path, is_out_of_range=any(map(self._target.is_out_of_range, literals)))
        return key, rules[key].category if key in rules else NO_RULE

    def _is_stored(self, eqn: JaxprEqn, operands: Flags) -> bool:
        """Whether the results of an equation are 16 bit where the traced ones are float32. Forward."""
        product, (result, *_) = _product.of(eqn), ir.avals(eqn.outvars) or [None]
        if product:
            return product.before[-1] != product.dtype
        if not is_floating(result) or result.dtype.itemsize != self._target.compute_dtype.itemsize:
            return False
        return _is_cast(eqn) if ir.name(eqn) == "convert_element_type" else any(operands)

    def _as_multiplied(self, eqn: JaxprEqn, product: Product) -> str:
        """The dtypes of the operands that a product multiplies."""
        if product.format is None:
            return self._dtypes(eqn.invars)
        if isinstance(product.format, np.dtype):
            return self._dtypes(eqn.invars).replace(str(self._target.wide), str(product.format))
        return ", ".join([str(product.format.forward)] * 2)

    def _dtypes(self, atoms: Any, stored: Flags | None = None) -> str:
        """The dtypes of some values. Of those that are stored in 16 bit, the traced one."""
        wide, flags = str(self._target.wide), stored or [False] * len(atoms)
        return ", ".join(
            wide if x else str(v.aval.dtype) for v, x in zip(atoms, flags, strict=True) if hasattr(v.aval, "dtype")
        )


def _is_cast(eqn: JaxprEqn) -> bool:
    """Whether `cast` added an equation. The casts of an autocast inside are part of the function."""
    return in_scope(eqn, CAST) and not in_scope(eqn, AUTOCAST)


def cause(eqn: JaxprEqn) -> str:
    """The reason why autocast does not enter an equation, or has no rule for it, and the cure."""
    name = ir.name(eqn)
    if name == "custom_linear_solve":
        return "a solver needs the digits of float32; for products in 16 bit, pass it jamp.autocast(matvec, dtype)"
    if name not in ir.CONSTRUCTS:
        if name != operation(eqn):
            return "it is part of a derivative of a function that jamp transformed, and runs as that made it"
        if name in ir.primitive_names() and not ir.has_body(eqn):
            return "autocast has no rule for it: give it one with rules={...} if 16 bit is right"
        return f"it is a kernel, or an operation of a library, that autocast does not know; {_WAY_OUT}"
    if ir.bodies(eqn) is not None:
        return f"it is a custom rule with symbolic zeros, or that closes over arrays, inside shard_map; {_WAY_OUT}"
    if ir.is_known(eqn):
        return f"it reads or writes a Ref; {_WAY_OUT}"
    return f"this release of JAX gives it parameters that autocast does not know; {_WAY_OUT}"


def warnings_of(passes: Passes, budget: MemoryBudget) -> list[str]:
    """Warnings for the user: about large parts that are not entered, or that no product is changed."""
    target, unused = passes.target, [*_unused_rules(passes), *warnings_of_policies(passes.traced)]
    if budget != 1.0:
        unused += warnings_of_budget(passes.traced, budget, "autocast(loss, compute_dtype, memory_budget=...)")
    if target.compute_dtype == np.float32:
        return unused  # Nothing is lost in float64. The report has it.
    is_used = any(_is_asked_for(product, passes) for product in products(passes.decided.jaxpr))
    if is_used and not _holds_left_out(passes.decided.jaxpr, target, passes.manual):
        return unused
    every = decisions(passes.decided, target, {}, passes.manual)
    total = sum(x.times * flops(x.eqn) for x in every) or 1
    has_autocast = any(in_scope(eqn, AUTOCAST) for eqn in ir.all_equations(passes.traced.jaxpr))
    messages = unused + ([] if is_used or has_autocast else _unchanged(every, passes, budget))
    for x in every:
        share = x.times * flops(x.eqn) / total
        if _is_left_out(x.eqn, x.category, target) and share >= 0.01:
            where = x.source or x.scope or "an unknown line"
            message = f"autocast leaves {share:.1%} of the FLOPs in float32: {operation(x.eqn)} at {where} runs"
            messages.append(f"{message} as it was traced, because {cause(x.eqn)}.")
    return messages


def _is_asked_for(product: Product, passes: Passes) -> bool:
    """Whether a product is in the format that was asked for."""
    return product.format == passes.format if passes.format else product.format is not None


def _holds_left_out(jaxpr: Jaxpr, target: Target, manual: bool) -> bool:
    """Whether some equation with float32 products in it runs as it was traced."""
    for eqn in jaxpr.eqns:
        name = ir.name(eqn)
        if name in target.rules or _product.of(eqn) or in_scope(eqn, FULL_PRECISION):
            continue
        is_construct = name in ir.CONSTRUCTS
        if is_construct and is_entered(eqn, manual, target):
            inner = manual or name == "shard_map"
            if any(_holds_left_out(body.jaxpr, target, inner) for body in ir.bodies(eqn) or ()):
                return True
        elif _is_left_out(eqn, NOT_ENTERED if is_construct else NO_RULE, target):
            return True
    return False


def _unused_rules(passes: Passes) -> list[str]:
    """Warnings about rules of the user that decided about no operation."""
    rules = {key for key, rule in passes.target.rules.items() if rule.reason == YOURS}
    unused = sorted(rules - passes.target.used)
    # The derivatives of custom rules are traced later, and the gradients of weights only by a gradient.
    is_custom = lambda eqn: ir.name(eqn) in ("custom_jvp_call", "custom_vjp_call", "linear_call")
    paths = [(path, is_custom(eqn)) for eqn, path in _paths(passes.traced.jaxpr, "")] if unused else []
    messages = []
    for key in unused:
        part = key.partition("[")[2][:-1]
        if part == GRADIENT or (key in rules_for(passes.target.wide) and part):
            continue
        seen = sorted({name for path, _ in paths for name in path.split("/") if name})
        close = difflib.get_close_matches(part, seen, 3) if part else []
        hint = f" Scopes with a similar name: {', '.join(close)}." if close else ""
        if part and not close:
            hint = f" A name in brackets is a scope, of jax.named_scope({part!r}) or of a Linen module."
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
        for inner, _ in ir.inner(eqn):
            yield from _paths(inner, path)


def _unchanged(every: list[Decision], passes: Passes, budget: MemoryBudget) -> list[str]:
    """A warning that no product is cast or no cast product is 8 bit, with the reason for the largest."""
    changeable = [x for x in every if ir.name(x.eqn) in PRODUCTS]
    candidates = [x for x in changeable if x.product and x.product.reason]
    largest = max(candidates or changeable, key=lambda x: x.times * flops(x.eqn), default=None)
    if largest is None:
        return []
    name = type(passes.format).__name__ if passes.format else "autocast"
    why = largest.product.reason if largest.product else ""
    if not why and any(is_floating(x) and x.dtype.itemsize == 2 for x in ir.avals(largest.eqn.invars)):
        why = "its operands are 16 bit already, by a cast in the code, by dtype=... of a module, or as arguments"
    if not why:  # The code asked for float32, or for a 16-bit result.
        return []
    place = largest.source or largest.scope
    at = f" is at {place}" if place else ""
    way = "" if budget == 1.0 else " For a memory budget alone, use jamp.recompute."
    return [f"{name} changes no product of this function. The largest{at}: {why}.{way}"]


def _is_left_out(eqn: JaxprEqn, category: str, target: Target) -> bool:
    """Whether an equation with float32 products in it runs as it was traced."""
    if category not in (NOT_ENTERED, NO_RULE) or not any(map(target.is_wide, ir.avals(eqn.invars))):
        return False
    inner = [e for jaxpr, _ in ir.inner(eqn) for e in ir.all_equations(jaxpr)]
    return any(ir.name(e) in PRODUCTS and any(map(target.is_wide, ir.avals(e.invars))) for e in inner)
