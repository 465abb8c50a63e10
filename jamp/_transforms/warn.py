"""Warnings about what autocast leaves alone, and rules that match nothing."""

import difflib

import numpy as np

from jamp._autocast.decisions import Entry, entries
from jamp._autocast.facts import AUTOCAST, NO_RULE, NOT_ENTERED
from jamp._autocast.rules import FEW, GRADIENT, RULES, YOURS, rules_for
from jamp._autocast.target import Target
from jamp._cast import is_floating
from jamp._jaxprs import constructs, ir, walk
from jamp._jaxprs.ir import JaxprEqn
from jamp._jaxprs.primitives import ENCODED_PRODUCTS, PRODUCTS, operation
from jamp._jaxprs.source import in_scope, is_of_jax
from jamp._products.flops import flops
from jamp._products.product import Product, products
from jamp._recompute.budget import MemoryBudget, warnings_of_budget
from jamp._recompute.policies import warnings_of_policies
from jamp._transforms.passes import Passes

_FEW = {key for key in RULES if key.endswith(f"[{FEW}]")}
_WAY_OUT = "cast its arguments, or pass it functions under autocast"


def cause(eqn: JaxprEqn) -> str:
    """The reason why autocast does not enter an equation, or has no rule for it, and the cure."""
    name = ir.name(eqn)
    if name == "custom_linear_solve":
        return "a solver needs the digits of float32; for 16 bit, pass it jamp.autocast(matvec, dtype)"
    if name in ENCODED_PRODUCTS:
        return "its operands are encoded already"
    if name not in constructs.CONSTRUCTS:
        if name != operation(eqn):
            return "it is in the derivative of a function that jamp transformed"
        if name in ir.primitive_names() and not constructs.has_body(eqn):
            return "autocast has no rule for it; if 16 bit is right, give it one with rules={...}"
        return f"it is a kernel, or a library's operation, that autocast does not know; {_WAY_OUT}"
    if constructs.bodies(eqn) is not None:
        return f"it is a custom rule inside shard_map, with symbolic zeros or closed-over arrays; {_WAY_OUT}"
    if constructs.is_known(eqn):
        return f"it reads or writes a Ref; {_WAY_OUT}"
    return f"this JAX gives it parameters that autocast does not know; {_WAY_OUT}"


def warnings_of(passes: Passes, budget: MemoryBudget) -> list[str]:
    """Warnings for the user: about large parts that are not entered, or that no product is changed."""
    target, unused = passes.target, [*_unused_rules(passes), *warnings_of_policies(passes.traced)]
    if budget != 1.0:
        unused += warnings_of_budget(passes.traced, budget, "autocast(loss, compute_dtype, memory_budget=...)")
    if target.compute_dtype == np.float32:
        return unused  # Nothing is lost in float64. The report has it.
    is_used = any(_is_asked_for(product, passes) for product in products(passes.decided))
    is_used = is_used or (passes.raises and not passes.format)
    if is_used and not any(_is_left_out(x.eqn, x.category, target) for x in passes.decisions):
        return unused
    every = list(entries(passes.decided, passes.decisions, target))
    total = sum(x.times * flops(x.eqn) for x in every) or 1
    has_autocast = any(in_scope(eqn, AUTOCAST) for eqn in walk.all_equations(passes.traced.jaxpr))
    messages = unused + ([] if is_used or has_autocast else _unchanged(every, passes, budget))
    for x in every:
        share = x.times * flops(x.eqn) / total
        if _is_left_out(x.eqn, x.category, target) and share >= 0.01:
            where = x.source or x.scope or "an unknown line"
            what = f"{operation(x.eqn)} at {where}, because {cause(x.eqn)}"
            messages.append(f"autocast leaves {share:.1%} of the FLOPs in float32: {what}.")
    return messages


def _is_asked_for(product: Product, passes: Passes) -> bool:
    """Whether a product is in the format that was asked for."""
    return product.format == passes.format if passes.format else product.format is not None


def _unused_rules(passes: Passes) -> list[str]:
    """Warnings about rules of the user that decided about no operation."""
    rules = {key for key, rule in passes.target.rules.items() if rule.reason == YOURS}
    unused = sorted(rules - passes.used)
    every = list(walk.with_paths(passes.traced.jaxpr)) if unused else []
    # The derivatives of custom rules are traced later, and the gradients of weights only by a gradient. Of each rule,
    # its path, and whether it may have scopes. A rule of JAX's own functions, such as relu, has none.
    is_custom = lambda eqn: ir.name(eqn) in ("custom_jvp_call", "custom_vjp_call", "linear_call")
    may_have_scopes = lambda eqn: not all(is_of_jax(body) for body, _ in constructs.inner(eqn))
    custom = [(path, may_have_scopes(eqn)) for eqn, path in every if is_custom(eqn)]
    messages = []
    for key in unused:
        part = key.partition("[")[2][:-1]
        if part == GRADIENT or (key in rules_for(passes.target.wide) and part):
            continue
        seen = sorted({name for _, path in every for name in path.split("/") if name})
        close = difflib.get_close_matches(part, seen, 3) if part else []
        hint = f" Scopes with a similar name: {', '.join(close)}." if close else ""
        if part and not close:
            hint = f" Name a scope: jax.named_scope({part!r})."
        if part in seen:
            hint = " The scope has no such operation, or an earlier rule decides."
        if any(f"/{part}/" in path or (not close and (scopes or not part)) for path, scopes in custom):
            continue
        messages.append(f"The rule for {key!r} matches no operation of this function.{hint}")
    return messages


def _unchanged(every: list[Entry], passes: Passes, budget: MemoryBudget) -> list[str]:
    """A warning that no product is cast or no cast product is 8 bit, with the reason for the largest."""
    changeable = [x for x in every if ir.name(x.eqn) in PRODUCTS]
    candidates = [x for x in changeable if x.product and x.product.reason]
    largest = max(candidates or changeable, key=lambda x: x.times * flops(x.eqn), default=None)
    if largest is None:
        return []
    name = passes.format.label if passes.format else "autocast"
    why = largest.product.reason if largest.product else ""
    if not why and any(is_floating(x) and x.dtype.itemsize == 2 for x in ir.avals(largest.eqn.invars)):
        why = "its operands are 16 bit already, by a cast, a module's dtype=, or as arguments"
    if not why and any(getattr(x, "dtype", None) == np.float64 for x in ir.avals(largest.eqn.invars)):
        cures = "jamp.cast_floating(params, jnp.float32), or jamp.autocast(fun, jnp.float32)"
        why = f"its operands are float64. Write {cures}"
    if not why and passes.format and largest.product and largest.product.key in _FEW:
        why = passes.target.rules[largest.product.key].reason
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
    inner = [e for jaxpr, _ in constructs.inner(eqn) for e in walk.all_equations(jaxpr)]
    return any(ir.name(e) in PRODUCTS and any(map(target.is_wide, ir.avals(e.invars))) for e in inner)
