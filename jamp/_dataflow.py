"""Dataflow analyses: which values of a jaxpr have a property.

A `Forward` analysis starts at the inputs of a jaxpr, a `Backward` one at its outputs. Its rule says how one equation
passes the property on. The recursion into the bodies of constructs (calls, branches, loops) is here, for all analyses.

A property only spreads: it is enough that it holds for one reader, or on one way through a branch. A loop passes it on
from step to step, so the properties of a carry are computed to the fixed point.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jamp import _jaxpr
from jamp._jaxpr import ClosedJaxpr, Jaxpr, JaxprEqn, Var

Flags = list[bool]
Rule = Callable[[JaxprEqn, Flags], bool]


class Forward:
    """Which values have a property that the results of an equation have if `rule(eqn, flags of operands)` says so."""

    def __init__(self, rule: Rule):
        self._rule = rule
        self._done: dict[Any, tuple[Jaxpr, set[Var]]] = {}

    def __call__(self, jaxpr: Jaxpr, inputs: Sequence[bool]) -> set[Var]:
        """The values of a jaxpr with the property, given which of its inputs have it."""
        key = id(jaxpr), tuple(inputs)
        if key not in self._done:
            found = {v for v, x in zip(jaxpr.invars, inputs, strict=True) if x}
            self._done[key] = jaxpr, found  # The jaxpr, so that no other one gets its id.
            for eqn in jaxpr.eqns:
                results = self._results(eqn, flags(eqn.invars, found))
                found.update(v for v, x in zip(eqn.outvars, results, strict=True) if x)
        return self._done[key][1]

    def into(self, eqn: JaxprEqn, operands: Sequence[bool]) -> list[Flags]:
        """The flags of the inputs of each body of a construct, given those of its operands."""
        known, carry = list(operands), _jaxpr.carry(eqn)
        for _ in carry:
            end = self._outputs(eqn, known)[-1]
            new = [x or (i in carry and end[i - carry.start]) for i, x in enumerate(known)]
            if new == known:
                break
            known = new
        return [[known[i] for i in places] for places in _jaxpr.body_operands(eqn)]

    def _results(self, eqn: JaxprEqn, operands: Flags) -> Flags:
        if not _bodies(eqn):
            return [self._rule(eqn, operands)] * len(eqn.outvars)
        carry = _jaxpr.carry(eqn)
        start = [operands[i] for i in carry] + [False] * (len(eqn.outvars) - len(carry))
        known = list(operands)
        for inside, places in zip(self.into(eqn, operands), _jaxpr.body_operands(eqn), strict=True):
            for i, x in zip(places, inside, strict=True):
                known[i] = x
        return [any(column) for column in zip(start, *self._outputs(eqn, known), strict=True)]

    def _outputs(self, eqn: JaxprEqn, operands: Flags) -> list[Flags]:
        """The flags of the outputs of each body that computes results, given those of the operands."""
        found = []
        for body, places in zip(_bodies(eqn), _jaxpr.body_operands(eqn), strict=True):
            values = self(body.jaxpr, [operands[i] for i in places])
            found.append(flags(body.jaxpr.outvars, values))
        return found[1:] if _jaxpr.name(eqn) == "while" else found  # The first is the condition.


class Backward:
    """Which values have a property that the operands of an equation have if `rule(eqn, flags of results)` says so."""

    def __init__(self, rule: Rule):
        self._rule = rule
        self._done: dict[Any, tuple[Jaxpr, set[Var]]] = {}

    def __call__(self, jaxpr: Jaxpr, outputs: Sequence[bool]) -> set[Var]:
        """The values of a jaxpr with the property, given which of its outputs have it."""
        key = id(jaxpr), tuple(outputs)
        if key not in self._done:
            found: set[Any] = {v for v, x in zip(jaxpr.outvars, outputs, strict=True) if x and not _jaxpr.is_literal(v)}
            self._done[key] = jaxpr, found
            for eqn in reversed(jaxpr.eqns):
                operands = self._operands(eqn, flags(eqn.outvars, found))
                found.update(v for v, x in zip(eqn.invars, operands, strict=True) if x and not _jaxpr.is_literal(v))
        return self._done[key][1]

    def into(self, eqn: JaxprEqn, results: Sequence[bool]) -> list[Flags]:
        """The flags of the outputs of each body of a construct, given those of its results."""
        known, carry = list(results), _jaxpr.carry(eqn)
        for _ in carry:
            read = self._read(eqn, known)
            new = [x or (i < len(carry) and read[carry[i]]) for i, x in enumerate(known)]
            if new == known:
                break
            known = new
        return _outputs_of_bodies(eqn, known)

    def _operands(self, eqn: JaxprEqn, results: Flags) -> Flags:
        if not _bodies(eqn):
            return [self._rule(eqn, results)] * len(eqn.invars)
        carry, end = _jaxpr.carry(eqn), self.into(eqn, results)[-1]
        return [x or (i in carry and end[i - carry.start]) for i, x in enumerate(self._read(eqn, end))]

    def _read(self, eqn: JaxprEqn, results: Flags) -> Flags:
        """The flags of the operands that some body reads, given those of the results."""
        found = [False] * len(eqn.invars)
        for body, places, outputs in zip(
            _bodies(eqn), _jaxpr.body_operands(eqn), _outputs_of_bodies(eqn, results), strict=True
        ):
            values = self(body.jaxpr, outputs)
            for i, x in zip(places, flags(body.jaxpr.invars, values), strict=True):
                found[i] = found[i] or x
        return found


def flags(atoms: Sequence[Any], found: set[Var]) -> Flags:
    """Which variables are in a set. A literal is in none."""
    return [not _jaxpr.is_literal(v) and v in found for v in atoms]


def _bodies(eqn: JaxprEqn) -> tuple[ClosedJaxpr, ...]:
    return (_jaxpr.bodies(eqn) or ()) if _jaxpr.name(eqn) in _jaxpr.CONSTRUCTS else ()


def _outputs_of_bodies(eqn: JaxprEqn, results: Flags) -> list[Flags]:
    return [[False], results] if _jaxpr.name(eqn) == "while" else [results] * len(_bodies(eqn))
