"""The FLOPs of equations."""

import math

from jamp import _jaxpr
from jamp._autocast.product import as_traced, name_of
from jamp._autocast.rules import RULES
from jamp._jaxpr import Jaxpr, JaxprEqn
from jamp._primitives import CUBIC, MOVING, PRODUCTS


def flops(eqn: JaxprEqn) -> float:
    """Two for each multiply-add of a product, one for each element of any other arithmetic. A symbolic size is 1.

    Linear algebra counts as textbooks do.
    """
    eqn = as_traced(eqn)
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


def of_products(jaxpr: Jaxpr) -> float:
    """The FLOPs of the products of a jaxpr, and of the jaxprs in it. Each branch of a cond counts."""
    total = 0.0
    for eqn in jaxpr.eqns:
        if name_of(eqn) in PRODUCTS:
            total += flops(eqn)
        else:
            inner = _jaxpr.inner(eqn)[-1:] if _jaxpr.is_platform_dependent(eqn) else _jaxpr.inner(eqn)
            total += sum(times * of_products(body) for body, times in inner)
    return total
