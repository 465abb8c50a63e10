"""The FLOPs of equations."""

import math

from jamp._jaxprs import ir
from jamp._jaxprs.ir import Jaxpr, JaxprEqn
from jamp._jaxprs.primitives import ARITHMETIC, CUBIC, ENCODED_PRODUCTS, EXPENSIVE, MOVING, PRODUCTS
from jamp._jaxprs.walk import innermost
from jamp._products.product import as_traced, name_of


def flops(eqn: JaxprEqn) -> float:
    """Count two for each multiply-add of a product, one for each element of any other arithmetic. A symbolic size is 1.

    Linear algebra counts as textbooks do.
    """
    return sum((times * _own_flops(e) for e, times in innermost(eqn, _is_known)), 0.0)


def flops_of_products(jaxpr: Jaxpr) -> float:
    """Count the FLOPs of the products of a jaxpr, and of the jaxprs in it. Each branch of a cond counts."""
    products = [x for eqn in jaxpr.eqns for x in innermost(eqn, _is_known) if name_of(x[0]) in _PRODUCTS]
    return sum((times * _own_flops(eqn) for eqn, times in products), 0.0)


_PRODUCTS = PRODUCTS | ENCODED_PRODUCTS
_KNOWN = _PRODUCTS | CUBIC.keys() | ARITHMETIC | EXPENSIVE | MOVING


def _is_known(eqn: JaxprEqn) -> bool:
    return name_of(eqn) in _KNOWN


def _own_flops(eqn: JaxprEqn) -> float:
    """The FLOPs of an equation without a body."""
    eqn = as_traced(eqn)
    known = lambda sizes: math.prod(n for n in sizes if isinstance(n, int))
    sizes = [known(getattr(v.aval, "shape", ())) for v in (*eqn.invars, *eqn.outvars)]
    name = ir.name(eqn)
    if name in _PRODUCTS:
        return 2.0 * sizes[-1] * known([ir.summed_terms(eqn)])
    if name in CUBIC:
        return CUBIC[name] * max(sizes[len(eqn.invars) :]) * known(ir.avals(eqn.invars)[0].shape[-1:])
    return float(max(sizes)) if name in ARITHMETIC | EXPENSIVE else 0.0
