"""Rewrite a jaxpr, and the jaxprs in it, by a rule for one equation.

A pass is a rule. It gets an equation, and what is known of the jaxpr in which it stands (`Body`), and returns the
equations that take its place. The recursion, the dataflow analyses along the way, and the cache are here. For example,
a pass that computes sines in float32:

    def rule(eqn, body):
        return in_float32(eqn) if ir.name(eqn) == "sin" else None

    Rewriter(rule)(closed)

`cast` has a recursion of its own, because it changes the types of what goes into a body and comes out.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from jamp._jaxprs import build, constructs, dataflow
from jamp._jaxprs.cache import Cache
from jamp._jaxprs.context import Context
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn, is_literal

T = TypeVar("T")


class Body(NamedTuple):
    """A jaxpr that is rewritten.

    Attributes:
      closed: The jaxpr.
      facts: What each analysis found: for each variable its fact, or the set of the variables that have a property.
      context: The constructs around it.
      shared: Equations that a rule added and that it may use again for later ones, by a key of its own.
    """

    closed: ClosedJaxpr
    facts: tuple[Any, ...]
    context: Context
    shared: dict[Any, Any]


class Replaced(NamedTuple):
    """Equations that take the place of one, and the variables or literals that take those of its results."""

    eqns: Sequence[JaxprEqn]
    results: Sequence[Any]


# None leaves an equation as it is, but for its bodies.
Rule = Callable[[JaxprEqn, Body], Sequence[JaxprEqn] | Replaced | None]
Given = tuple[tuple[Any, ...], ...]  # for each analysis, the facts about the inputs (forward) or the outputs (backward)


class Rewriter:
    """Rewrites jaxprs, each once for the same facts about it.

    Args:
      rule: The rule for one equation.
      analyses: The dataflow analyses whose facts it reads.
      reads: The part of the context that it reads.
      enters: Whether the bodies of a construct are rewritten.
    """

    def __init__(
        self,
        rule: Rule,
        analyses: Sequence[dataflow.Analysis] = (),
        reads: Callable[[Context], Any] = lambda context: None,
        enters: Callable[[JaxprEqn], bool] = lambda eqn: True,
    ):
        self._rule, self._analyses, self._reads, self._enters = rule, analyses, reads, enters
        self._cache: Cache[ClosedJaxpr] = Cache()

    def __call__(self, closed: ClosedJaxpr, context: Context = Context(), given: Given = ()) -> ClosedJaxpr:
        """Return the rewritten jaxpr, or the same object if nothing changes."""
        return self._cache(closed, (given, self._reads(context)), lambda: self._rewritten(closed, context, given))

    def _rewritten(self, closed: ClosedJaxpr, context: Context, given: Given) -> ClosedJaxpr:
        jaxpr = closed.jaxpr
        facts = tuple(analysis(closed, x) for analysis, x in zip(self._analyses, given, strict=True))
        body = Body(closed, facts, context, {})
        eqns: list[JaxprEqn] = []
        names: dict[Any, Any] = {}  # what takes the place of a variable
        for original in jaxpr.eqns:
            eqn = _renamed(original, names)
            new = self._rule(eqn, body)
            if isinstance(new, Replaced):
                names.update(zip(eqn.outvars, new.results, strict=True))
                new = new.eqns
            eqns.extend([self.with_bodies(eqn, body)] if new is None else new)
        is_same = len(eqns) == len(jaxpr.eqns) and all(map(lambda x, y: x is y, eqns, jaxpr.eqns))
        if is_same and not names:
            return closed
        outputs = [v if is_literal(v) else names.get(v, v) for v in jaxpr.outvars]
        constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        return build.closed_jaxpr(constants, jaxpr.invars, outputs, eqns)

    def with_bodies(self, eqn: JaxprEqn, body: Body) -> JaxprEqn:
        """Return a construct with rewritten bodies, and any other equation as it is."""
        old = constructs.bodies(eqn) if self._enters(eqn) else None
        if not old:
            return eqn
        into = [x.into(eqn, facts) for x, facts in zip(self._analyses, body.facts, strict=True)]
        inside, given = body.context.inside(eqn), [tuple(map(tuple, column)) for column in zip(*into, strict=True)]
        new = [self(x, inside, y) for x, y in zip(old, given or [()] * len(old), strict=True)]
        if all(map(lambda x, y: x is y, new, old)):
            return eqn
        return build.with_bodies(eqn, new, eqn.invars, eqn.outvars)


def _renamed(eqn: JaxprEqn, names: dict[Any, Any]) -> JaxprEqn:
    if not names or not any(not is_literal(v) and v in names for v in eqn.invars):
        return eqn
    return eqn.replace(invars=[v if is_literal(v) else names.get(v, v) for v in eqn.invars])
