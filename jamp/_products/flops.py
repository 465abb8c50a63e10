"""The FLOPs of equations."""

import math

from jamp._jaxprs import ir
from jamp._jaxprs.ir import Jaxpr, JaxprEqn
from jamp._jaxprs.primitives import ARITHMETIC, CUBIC, EXPENSIVE, MOVING, PRODUCTS
from jamp._products.product import as_traced, name_of


def flops(eqn: JaxprEqn) -> float:
    """Two for each multiply-add of a product, one for each element of any other arithmetic. A symbolic size is 1.

    Linear algebra counts as textbooks do.
    """
    eqn = as_traced(eqn)
    known = lambda sizes: math.prod(n for n in sizes if isinstance(n, int))
    sizes = [known(getattr(v.aval, "shape", ())) for v in (*eqn.invars, *eqn.outvars)]
    name = ir.name(eqn)
    if name in PRODUCTS:
        return 2.0 * sizes[-1] * known([ir.summed_terms(eqn)])
    if name in CUBIC:
        return CUBIC[name] * max(sizes[len(eqn.invars) :]) * known(ir.avals(eqn.invars)[0].shape[-1:])
    if name in MOVING:
        return 0.0
    if name in ARITHMETIC | EXPENSIVE:
        return float(max(sizes))
    return float(sum(times * flops(e) for inner, times in ir.inner(eqn) for e in inner.eqns))


def of_products(jaxpr: Jaxpr) -> float:
    """The FLOPs of the products of a jaxpr, and of the jaxprs in it. Each branch of a cond counts."""
    total = 0.0
    for eqn in jaxpr.eqns:
        if name_of(eqn) in PRODUCTS:
            total += flops(eqn)
        else:
            inner = ir.inner(eqn)[-1:] if ir.is_platform_dependent(eqn) else ir.inner(eqn)
            total += sum(times * of_products(body) for body, times in inner)
    return total
