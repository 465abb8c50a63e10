"""Rewrite a jaxpr, and the jaxprs in it, by a rule for one equation.

A pass is a rule. It gets an equation and the jaxpr in which it stands (`Body`), and returns the equations that take its
place. The recursion and the cache are here. For example, a pass that computes sines in float32:

    def rule(eqn, body):
        return in_float32(eqn) if ir.name(eqn) == "sin" else None

    Rewriter(rule)(closed)

`cast` and `recompute` have recursions of their own. `cast` changes the types of the inputs and outputs of a body,
and `recompute` makes segments of it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from jamp._jaxprs import build, constructs
from jamp._jaxprs.cache import Cache
from jamp._jaxprs.context import Context
from jamp._jaxprs.dataflow import Analysis
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn, is_literal

T = TypeVar("T")


class Body(NamedTuple):
    """A jaxpr that is rewritten.

    Attributes:
      closed: The jaxpr.
      context: The constructs around it.
      shared: Equations that a rule added and that it may use again for later ones, by a key of its own.
      facts: What the analysis found about its values. None without an analysis.
    """

    closed: ClosedJaxpr
    context: Context
    shared: dict[Any, Any]
    facts: Any


class Replaced(NamedTuple):
    """Equations that take the place of one, and the variables or literals that take the place of its results."""

    eqns: Sequence[JaxprEqn]
    results: Sequence[Any]


# None leaves an equation as it is, but for its bodies.
Rule = Callable[[JaxprEqn, Body], Sequence[JaxprEqn] | Replaced | None]


class Rewriter:
    """Rewrites jaxprs, each once for the same part of its context.

    Args:
      rule: The rule for one equation.
      reads: The part of the context that it reads.
      enters: Whether the bodies of a construct are rewritten.
      analysis: An analysis of each jaxpr, whose facts the rule reads.
    """

    def __init__(
        self,
        rule: Rule,
        reads: Callable[[Context], Any] = lambda context: None,
        enters: Callable[[JaxprEqn], bool] = lambda eqn: True,
        analysis: Analysis | None = None,
    ):
        self._rule, self._reads, self._enters, self._analysis = rule, reads, enters, analysis
        self._cache: Cache[ClosedJaxpr] = Cache()

    def __call__(self, closed: ClosedJaxpr, context: Context = Context(), given: Sequence[Any] = ()) -> ClosedJaxpr:
        """Return the rewritten jaxpr, or the same object if nothing changes.

        `given` is what the analysis starts from: the facts about the inputs or outputs.
        """
        key = self._reads(context), tuple(given)
        return self._cache(closed, key, lambda: self._rewritten(closed, context, given))

    def _rewritten(self, closed: ClosedJaxpr, context: Context, given: Sequence[Any]) -> ClosedJaxpr:
        facts = self._analysis(closed, given) if self._analysis else None
        jaxpr, body = closed.jaxpr, Body(closed, context, {}, facts)
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
        into = self._analysis.into(eqn, body.facts) if self._analysis else [()] * len(old)
        new = [self(x, body.context.inside(eqn), given) for x, given in zip(old, into, strict=True)]
        if all(map(lambda x, y: x is y, new, old)):
            return eqn
        return build.with_bodies(eqn, new, eqn.invars, eqn.outvars)


def _renamed(eqn: JaxprEqn, names: dict[Any, Any]) -> JaxprEqn:
    if not names or not any(not is_literal(v) and v in names for v in eqn.invars):
        return eqn
    return eqn.replace(invars=[v if is_literal(v) else names.get(v, v) for v in eqn.invars])
