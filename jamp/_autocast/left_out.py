"""What autocast does not enter: why, and a warning if products stay float32 because of it."""

import warnings

from jamp import _jaxpr
from jamp._autocast.equations import all_equations, flat_equations, flops
from jamp._autocast.plan import NO_RULE, NOT_ENTERED, PlannedJaxpr
from jamp._autocast.values import is_float32
from jamp._jaxpr import JaxprEqn

_WAY_OUT = (
    "cast its arguments in your code, or autocast the function that you pass to it: ODETerm(jamp.autocast(field))"
)


def cause(eqn: JaxprEqn) -> str:
    """Why autocast does not enter an equation, or has no rule for it, and what a user can do."""
    name = eqn.primitive.name
    if name not in _jaxpr.CONSTRUCTS:
        if name in _jaxpr.primitive_names() and not _jaxpr.has_body(eqn):
            return "autocast has no rule for it: give it one with rules={...} if 16 bit is right"
        return f"it is a kernel, or an operation of a library, that autocast does not know; {_WAY_OUT}"
    if _jaxpr.bodies(eqn) is not None:
        return f"it is a custom rule with symbolic zeros inside shard_map; {_WAY_OUT}"
    if _jaxpr.is_known(eqn):
        return f"it reads or writes a Ref; {_WAY_OUT}"
    return f"this release of JAX gives it parameters that autocast does not know; {_WAY_OUT}"


def warn(body: PlannedJaxpr, stacklevel: int) -> None:
    """Warn of what is not entered if it holds a hundredth of the FLOPs or more, in float32 products."""
    if not any(map(_holds_float32_products, body.planner.left_out)):
        return
    found = list(flat_equations(body, {}))
    total = sum(x.times * flops(x.planned.eqn) for x in found) or 1
    for x in found:
        eqn = x.planned.eqn
        if x.planned.category in (NOT_ENTERED, NO_RULE) and _holds_float32_products(eqn):
            share = x.times * flops(eqn) / total
            if share >= 0.01:
                where = x.source or x.scope or "an unknown line"
                message = f"autocast leaves {share:.1%} of the FLOPs in float32: {eqn.primitive.name} at {where} runs"
                warnings.warn(f"{message} as it was traced, because {cause(eqn)}.", stacklevel=stacklevel + 1)


def _holds_float32_products(eqn: JaxprEqn) -> bool:
    inner = (e for jaxpr, _ in _jaxpr.inner(eqn) for e in all_equations(jaxpr))
    return any(map(is_float32, eqn.invars)) and any(
        e.primitive.name in _jaxpr.PRODUCTS and any(map(is_float32, e.invars)) for e in inner
    )
