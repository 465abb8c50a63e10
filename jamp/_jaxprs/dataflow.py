"""Dataflow analyses: facts about the values of a jaxpr.

A `Forward` analysis starts at the inputs of a jaxpr, a `Backward` one at its outputs. Its rule says what one equation
passes on. The recursion into the bodies of constructs (calls, branches, loops) is here, for all analyses.

A loop passes facts on from step to step, so those about a carry are computed to the fixed point.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from jamp._jaxprs import build, constructs, ir
from jamp._jaxprs.cache import Cache
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn, Var

Flags = list[bool]
IsWhole = Callable[[JaxprEqn], bool]
T = TypeVar("T")


class Analysis(Protocol):
    """The interface of `Forward` and `Backward`."""

    def __call__(self, closed: ClosedJaxpr, given: Sequence[Any]) -> Any:
        """Return the facts about the values of a jaxpr, given the facts about its inputs or outputs."""

    def into(self, eqn: JaxprEqn, facts: Any) -> list[list[Any]]:
        """Return the facts that are given to each body of a construct, from the facts about the jaxpr around it."""


class Forward(Generic[T]):
    """A fact about each value, from the facts about the values that it is computed from.

    Args:
      rule: From an equation and the facts about its operands to the fact about its results, or to a list with one for
        each result.
      join: The fact about a value that comes from one of two places.
      constant: The fact about a constant.
      is_whole: About which constructs the rule decides. Of others, the bodies do.
    """

    def __init__(
        self,
        rule: Callable[[JaxprEqn, list[T]], T | list[T]],
        join: Callable[[T, T], T],
        constant: Callable[[Any], T],
        is_whole: IsWhole = lambda eqn: False,
    ):
        self._rule, self._join, self._constant, self._is_whole = rule, join, constant, is_whole
        self._cache: Cache[dict[Var, T]] = Cache()

    def __call__(self, closed: ClosedJaxpr, given: Sequence[T]) -> dict[Var, T]:
        """Return the facts about the values of a jaxpr, given the facts about its inputs."""
        return self._cache(closed, tuple(given), lambda: self._facts(closed, given))

    def _facts(self, closed: ClosedJaxpr, inputs: Sequence[T]) -> dict[Var, T]:
        jaxpr = closed.jaxpr
        facts = dict(zip(jaxpr.invars, inputs, strict=True))
        facts |= {v: self._constant(x) for v, x in zip(jaxpr.constvars, closed.consts, strict=True)}
        return self.over(jaxpr.eqns, facts)

    def over(self, eqns: Sequence[JaxprEqn], facts: dict[Var, T]) -> dict[Var, T]:
        """Add the facts about the results of equations to those about the values that they read."""
        for eqn in eqns:
            facts.update(zip(eqn.outvars, self._results(eqn, self.read(facts, eqn.invars)), strict=True))
        return facts

    def read(self, facts: dict[Var, T], atoms: Sequence[Any]) -> list[T]:
        """The facts about some variables and literals."""
        return [self._constant(v.val) if ir.is_literal(v) else facts[v] for v in atoms]

    def into(self, eqn: JaxprEqn, facts: dict[Var, T]) -> list[list[T]]:
        """Return the facts about the inputs of each body of a construct."""
        known = self._around(eqn, self.read(facts, eqn.invars))
        return [[known[i] for i in places] for places in constructs.operands_of_bodies(eqn)]

    def _around(self, eqn: JaxprEqn, operands: list[T]) -> list[T]:
        """The facts about the operands of a construct in any step, if it is a loop."""
        known, carry = operands, constructs.carry(eqn)
        while carry:
            end = self._outputs(eqn, known)[-1]
            ends = build.replaced(known, carry, end[: len(carry)])
            new = list(map(self._join, known, ends))
            if new == known:
                break
            known = new
        return known

    def _results(self, eqn: JaxprEqn, operands: list[T]) -> list[T]:
        if self._is_whole(eqn) or not _bodies(eqn):
            return self._ruled(eqn, operands)
        known = self._around(eqn, operands)
        (first, *others), carry = self._outputs(eqn, known), constructs.carry(eqn)
        first = build.replaced(first, range(len(carry)), [known[i] for i in carry])
        results = [functools.reduce(self._join, column) for column in zip(first, *others, strict=True)]
        # The gradients that a chunked_sum also returns are results of no body.
        return results + (self._ruled(eqn, operands)[len(results) :] if len(results) < len(eqn.outvars) else [])

    def _ruled(self, eqn: JaxprEqn, operands: list[T]) -> list[T]:
        found = self._rule(eqn, operands)
        return found if isinstance(found, list) else [found] * len(eqn.outvars)

    def _outputs(self, eqn: JaxprEqn, operands: list[T]) -> list[list[T]]:
        """The facts about the outputs of each body that computes results, given those about the operands."""
        outputs = []
        for body, places in zip(_bodies(eqn), constructs.operands_of_bodies(eqn), strict=True):
            facts = self(body, [operands[i] for i in places])
            outputs.append(self.read(facts, body.jaxpr.outvars))
        return outputs[constructs.bodies_before_results(eqn) :]


def spreads(rule: Callable[[JaxprEqn, Flags], bool]) -> Forward[bool]:
    """An analysis of a property that no constant has, and that a value has if it has it in any step or branch."""
    return Forward(rule, operator.or_, lambda value: False)


def sources(closed: ClosedJaxpr) -> dict[Var, frozenset[Var]]:
    """For each value, the inputs that decide it, also as a condition. The result of an effect decides itself."""
    nothing = frozenset[Var]()
    rule = lambda eqn, operands: nothing.union(*operands, eqn.outvars if eqn.effects else ())
    analysis = Forward(rule, operator.or_, lambda value: nothing, is_whole=lambda eqn: True)
    return analysis(closed, [frozenset([v]) for v in closed.jaxpr.invars])


class Backward:
    """Which values have a property that the operands of an equation have if `rule(eqn, flags of results)` says so.

    The rule returns a flag for all operands or one for each. It also decides about a construct that `is_whole`. Of
    others, the bodies do.
    """

    def __init__(self, rule: Callable[[JaxprEqn, Flags], bool | Flags], is_whole: IsWhole = lambda eqn: False):
        self._rule, self._is_whole = rule, is_whole
        self._cache: Cache[set[Var]] = Cache()

    def __call__(self, closed: ClosedJaxpr, given: Sequence[bool]) -> set[Var]:
        """Return the values of a jaxpr that have the property, given which of its outputs have it."""
        return self._cache(closed, tuple(given), lambda: self._having(closed, given))

    def _having(self, closed: ClosedJaxpr, outputs: Sequence[bool]) -> set[Var]:
        jaxpr = closed.jaxpr
        having: set[Any] = {v for v, x in zip(jaxpr.outvars, outputs, strict=True) if x and not ir.is_literal(v)}
        return self.over(jaxpr.eqns, having)

    def over(self, eqns: Sequence[JaxprEqn], having: set[Any]) -> set[Var]:
        """Add the values that equations read and that have the property to those of their results that have it."""
        for eqn in reversed(eqns):
            operands = self._operands(eqn, flags(eqn.outvars, having))
            having.update(v for v, x in zip(eqn.invars, operands, strict=True) if x and not ir.is_literal(v))
        return having

    def into(self, eqn: JaxprEqn, facts: set[Var]) -> list[Flags]:
        """Return the flags of the outputs of each body of a construct."""
        return self._into(eqn, flags(eqn.outvars, facts))

    def _into(self, eqn: JaxprEqn, results: Sequence[bool]) -> list[Flags]:
        known, carry = list(results), constructs.carry(eqn)
        while carry:
            read = self._read(eqn, known)
            new = [x or (i < len(carry) and read[carry[i]]) for i, x in enumerate(known)]
            if new == known:
                break
            known = new
        return _outputs_of_bodies(eqn, known)

    def _operands(self, eqn: JaxprEqn, results: Flags) -> Flags:
        if self._is_whole(eqn) or not _bodies(eqn):
            passed = self._rule(eqn, results)
            return [passed] * len(eqn.invars) if isinstance(passed, bool) else passed
        carry, end = constructs.carry(eqn), self._into(eqn, results)[-1]
        return [x or (i in carry and end[i - carry.start]) for i, x in enumerate(self._read(eqn, end))]

    def _read(self, eqn: JaxprEqn, results: Flags) -> Flags:
        """Return the flags of the operands that some body reads, given the flags of the results."""
        read = [False] * len(eqn.invars)
        for body, places, outputs in zip(
            _bodies(eqn), constructs.operands_of_bodies(eqn), _outputs_of_bodies(eqn, results), strict=True
        ):
            having = self(body, outputs)
            for i, x in zip(places, flags(body.jaxpr.invars, having), strict=True):
                read[i] = read[i] or x
        return read


def flags(atoms: Sequence[Any], having: set[Var]) -> Flags:
    """Which variables are in a set. A literal is in none."""
    return [not ir.is_literal(v) and v in having for v in atoms]


def _bodies(eqn: JaxprEqn) -> tuple[ClosedJaxpr, ...]:
    return constructs.bodies(eqn) or ()


def _outputs_of_bodies(eqn: JaxprEqn, results: Flags) -> list[Flags]:
    if ir.name(eqn) == "while":
        return [[False], results]
    return [results[: len(body.jaxpr.outvars)] for body in _bodies(eqn)]  # The products of a solver have no aux.
