"""Visit the equations of a jaxpr and of the jaxprs in it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jamp._jaxprs import constructs, dataflow, ir
from jamp._jaxprs.context import Context
from jamp._jaxprs.ir import ClosedJaxpr, Jaxpr, JaxprEqn
from jamp._jaxprs.primitives import CHEAP, ENCODED_PRODUCTS, PRODUCTS
from jamp._jaxprs.source import scope_path


def walk(
    closed: ClosedJaxpr,
    enters: Callable[[JaxprEqn], bool],
    analysis: dataflow.Analysis | None = None,
    given: Sequence[Any] = (),
    context: Context = Context(),
) -> Iterator[tuple[JaxprEqn, Any, Context]]:
    """Yield the equations of a jaxpr, and in place of those that it `enters` the equations of their bodies.

    Each comes with what an analysis found about its jaxpr, from what is `given` about the inputs or outputs.
    """
    facts = analysis(closed, given) if analysis else None
    for eqn in closed.jaxpr.eqns:
        bodies = constructs.bodies(eqn) if enters(eqn) else None
        if bodies is None:
            yield eqn, facts, context
            continue
        into = analysis.into(eqn, facts) if analysis else [()] * len(bodies)
        for body, inner in zip(bodies, into, strict=True):
            yield from walk(body, enters, analysis, inner, context.inside(eqn))


def all_equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield every equation of a jaxpr and of the jaxprs in it, also of kernels."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body, _ in constructs.inner(eqn):
            yield from all_equations(body)


def with_paths(jaxpr: Jaxpr, around: str = "") -> Iterator[tuple[JaxprEqn, str]]:
    """Yield every equation, as `all_equations`, with the names in the name stacks of it and around it."""
    for eqn in jaxpr.eqns:
        path = scope_path(eqn, around)
        yield eqn, path
        for body, _ in constructs.inner(eqn):
            yield from with_paths(body, path)


def innermost(eqn: JaxprEqn, is_whole: Callable[[JaxprEqn], bool], times: int = 1) -> Iterator[tuple[JaxprEqn, int]]:
    """Yield the innermost equations in an equation, also if it is a kernel, and how often each runs.

    An equation without a body, or that `is_whole`, is innermost. Of branches for platforms, the default counts.
    """
    inner = [] if is_whole(eqn) else constructs.inner(eqn)
    if constructs.is_platform_dependent(eqn):
        inner = inner[-1:]
    if not inner:
        yield eqn, times
    for jaxpr, n in inner:
        for e in jaxpr.eqns:
            yield from innermost(e, is_whole, times * n)


def is_product(eqn: JaxprEqn) -> bool:
    """Whether an equation is a product: of JAX, or of autocast, until it is lowered."""
    return ir.name(eqn) in _PRODUCTS


_PRODUCTS = PRODUCTS | ENCODED_PRODUCTS | {"product"}


def holds_product(eqn: JaxprEqn) -> bool:
    """Whether an equation is a product, or holds one in its bodies."""
    is_whole = lambda e: ir.name(e) in CHEAP or is_product(e)
    return any(is_product(e) for e, _ in innermost(eqn, is_whole))


def through_calls(
    eqn: JaxprEqn, body_of: Callable[[JaxprEqn], ClosedJaxpr | None] = constructs.body_of_call
) -> Iterator[JaxprEqn]:
    """Yield the equations that a call evaluates if it is not differentiated. Any other equation is one by itself."""
    body = body_of(eqn)
    if body is None:
        yield eqn
    for e in body.jaxpr.eqns if body else ():
        yield from through_calls(e, body_of)
