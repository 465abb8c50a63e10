"""Follow the rows through a function: is each of its results a sum over them?

The function is traced with n and with 3 n rows. An axis follows the rows if its size differs in the two traces, and a
number follows them if its value does. A fact says what a value is. Here are the facts of a function that is not a sum:

    y = dot_general x w           f32[n,5]   ROWS, as x
    c = 1 / n                     f32[]      CONSTANT, n to the power -1, which is not used
    t = reduce_sum[axes=(0,)] y   f32[5]     SUM
    u = mul t 2                   f32[5]     SUM
    v = integer_pow[y=2] u        f32[5]     WRONG: it is not linear in the sum
    s = reduce_sum[axes=(0,)] v   f32[]      WRONG: the error names the line of `v`

A result is a SUM, or UNKNOWN if it comes from what has no rule in `rules.py`, such as a kernel. That is not an error,
and neither is a value that is WRONG and reaches no result.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jamp._chunked_sum import rules
from jamp._chunked_sum.rules import CONSTANT, PAIRS, POSITION, ROWS, RUNNING, SUM, UNKNOWN, WRONG, ZERO, Fact, Step
from jamp._jaxprs import build, constructs, ir
from jamp._jaxprs.dataflow import Forward
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn
from jamp._jaxprs.source import is_of_jax, user_line
from jamp._jaxprs.walk import walk

FACTOR = 3  # of the rows in one trace to those in the other


def check(closed: ClosedJaxpr, fewer: ClosedJaxpr, are_rows: Sequence[bool], size: int) -> None:
    """Raise unless the results of a function are sums over rows, as far as they can be followed.

    Args:
      closed: The function of some number of rows.
      fewer: The function of `FACTOR` times fewer rows.
      are_rows: Which arguments are rows.
      size: How many rows there are in a chunk, for the message.
    """
    inputs = zip(closed.jaxpr.invars, fewer.jaxpr.invars, strict=True)
    rows = next(ir.avals([v])[0].shape[i] for v, w in inputs for i in rules.following(v, w))
    analysis = _Rows(rows)
    if not analysis.pair(closed, fewer):
        return
    given, outputs = [Fact(ROWS) if x else rules.FIXED for x in are_rows], closed.jaxpr.outvars
    for v, x in zip(outputs, analysis.read(analysis(closed, given), outputs), strict=True):
        if x.kind == WRONG:
            why, line = x.detail[0], _line(closed, analysis, given, x)
        elif (x.kind == CONSTANT and x.detail != 1) or (x.kind in (ROWS, SUM) and x.detail):
            why = rules.TERM if x.kind == CONSTANT else rules.SOME
            line = next((user_line(e) for e in closed.jaxpr.eqns if v in e.outvars), None)
        else:
            continue
        at = f" at {line}" if line else ""
        raise ValueError(f"chunked_sum takes a sum over rows, and this function {why}{at}{_cure(why, size)}")


def _cure(why: str, size: int) -> str:
    call = "jamp.chunked_sum(loss_sum, n)(params, x, y)"
    if why == rules.AVERAGE:
        return f": by {size} in a chunk of {size}. Return the sum and divide outside: {call} / len(x)."
    if why == rules.TERM:
        return f". Add it outside: {call} + term."
    return ". Return sums over rows, others as aux, and compute the rest outside."


def _line(closed: ClosedJaxpr, analysis: "_Rows", given: Sequence[Fact], wrong: Fact) -> str | None:
    """The user's line of the equation that a fact comes from."""
    origin = wrong.detail[1]
    is_jit_of_jax = lambda e: ir.name(e) == "jit" and all(is_of_jax(x.jaxpr) for x in constructs.bodies(e) or ())
    for eqn, facts, context in walk(closed, lambda e: id(e) != origin and not is_jit_of_jax(e), analysis, given):
        # JAX traces such a jit once, so the lines in it are the lines of its first call.
        if wrong in map(facts.get, eqn.outvars) and _holds(eqn, origin):
            return user_line(eqn) or context.line
    return None


def _holds(eqn: JaxprEqn, origin: int) -> bool:
    bodies = constructs.bodies(eqn) or ()
    return id(eqn) == origin or any(_holds(e, origin) for body in bodies for e in body.jaxpr.eqns)


class _Rows(Forward[Fact]):
    """The facts about the values of a trace, from it and another one with fewer rows."""

    def __init__(self, rows: int):
        super().__init__(self._of_results, rules.join, lambda x: self._numbers.get(id(x), rules.FIXED))
        self._rows = rows
        self._numbers: dict[int, Fact] = {}  # of literals and constants
        self._others: dict[int, list[JaxprEqn]] = {}
        self._paired: set[tuple[int, int]] = set()

    def pair(self, one: ClosedJaxpr, two: ClosedJaxpr) -> bool:
        """Find the equations and numbers of two traces that belong together. False if the traces differ in others."""
        key = id(one.jaxpr), id(two.jaxpr)
        if key in self._paired:
            return True
        self._paired.add(key)
        names = [[(ir.name(e), len(e.outvars)) for e in x.jaxpr.eqns] for x in (one, two)]
        if names[0] != names[1] or len(one.consts) != len(two.consts):
            return False
        self._numbers |= {id(x): _number(x, y) for x, y in zip(one.consts, two.consts, strict=True)}
        self._pair_literals(one.jaxpr.outvars, two.jaxpr.outvars)
        for a, b in zip(one.jaxpr.eqns, two.jaxpr.eqns, strict=True):
            self._pair_literals(a.invars, b.invars)
            self._others.setdefault(id(a), []).append(b)
            bodies = constructs.bodies(a) or (), constructs.bodies(b) or ()
            if len(bodies[0]) != len(bodies[1]) or not all(map(self.pair, *bodies)):
                return False
        return True

    def _pair_literals(self, ones: Sequence[Any], twos: Sequence[Any]) -> None:
        for v, w in zip(ones, twos, strict=False):
            if ir.is_literal(v) and ir.is_literal(w):
                fact = _number(v.val, w.val)
                self._numbers[id(v)] = rules.join(fact, self._numbers.get(id(v), fact))

    def read(self, facts: dict[Any, Fact], atoms: Sequence[Any]) -> list[Fact]:
        return [self._numbers.get(id(v), rules.FIXED) if ir.is_literal(v) else facts[v] for v in atoms]

    def _step(self, eqn: JaxprEqn, facts: list[Fact]) -> Step:
        others = self._others[id(eqn)]
        if len(others) > 1:  # One jit is called with rows, and with something else of the same size.
            atoms = lambda e: [*e.invars, *e.outvars]
            axes = lambda other: sum(len(rules.following(*pair)) for pair in zip(atoms(eqn), atoms(other), strict=True))
            others = sorted(others, key=axes, reverse=any(x.kind in (POSITION, ROWS, PAIRS) for x in facts))
        return Step(eqn, others[0], facts, self._rows)

    def _of_results(self, eqn: JaxprEqn, facts: list[Fact]) -> list[Fact]:
        """The facts about the results of an equation that is not a construct."""
        step, rule = self._step(eqn, facts), rules.RULES.get(ir.name(eqn), rules.unknown)
        found: Fact | list[Fact] | None = None
        if rule not in rules.EACH:
            found = next((x for x in facts if x.kind == WRONG), None)
            found = Fact(UNKNOWN) if not found and UNKNOWN in step.kinds and rule not in rules.ANY else found
        found = found or rule(step)
        results = found if isinstance(found, list) else [found] * len(eqn.outvars)
        return [Fact(PAIRS) if x.kind == ROWS and len(step.out(i)) > 1 else x for i, x in enumerate(results)]

    def _around(self, eqn: JaxprEqn, operands: list[Fact]) -> list[Fact]:
        if not self._scans_rows(eqn, operands):
            return super()._around(eqn, operands)
        carry, wrong = constructs.carry(eqn), self._step(eqn, operands).wrong(rules.CARRIED)
        start = [Fact(RUNNING) if operands[i].kind in (ZERO, SUM) else operands[i] for i in carry]
        known = super()._around(eqn, build.replaced(operands, carry, start))
        end = [wrong if known[i].kind in (ROWS, PAIRS) else known[i] for i in carry]
        return super()._around(eqn, build.replaced(known, carry, end))

    def _is_longer(self, eqn: JaxprEqn) -> bool:
        others = self._others[id(eqn)]
        return ir.name(eqn) == "scan" and constructs.iterations(eqn) != constructs.iterations(others[0])

    def _scans_rows(self, eqn: JaxprEqn, operands: list[Fact]) -> bool:
        read = operands[constructs.carry(eqn).stop :]
        return self._is_longer(eqn) and any(x.kind in (POSITION, ROWS, PAIRS) for x in read)

    def _results(self, eqn: JaxprEqn, operands: list[Fact]) -> list[Fact]:
        results = super()._results(eqn, operands)
        if ir.name(eqn) == "cond" and operands[0].kind not in (ZERO, CONSTANT):
            return [_chosen(operands[0], x) for x in results]
        if not self._is_longer(eqn):
            return results
        carry = len(constructs.carry(eqn))
        if self._scans_rows(eqn, operands):
            wrong = self._step(eqn, operands).wrong(rules.CARRIED)
            end = [Fact(SUM) if i < carry else wrong for i, _ in enumerate(results)]
            return [y if x.kind == RUNNING else x for x, y in zip(results, end, strict=True)]
        # It may read rows by their numbers.
        return [Fact(UNKNOWN) if x.kind in (CONSTANT, SUM) and i < carry else x for i, x in enumerate(results)]


def _chosen(which: Fact, x: Fact) -> Fact:
    """The result of a branch that a value chooses."""
    if UNKNOWN in (which.kind, x.kind):  # The other branch may raise an error, by a callback.
        return Fact(UNKNOWN)
    if which.kind == WRONG:
        return which
    return Fact(UNKNOWN) if x.kind == SUM else rules.join(which, x) if x.kind in (ZERO, CONSTANT) else x


def _number(x: Any, y: Any) -> Fact:
    """The fact about a constant that is `x`, and `y` with fewer rows."""
    if isinstance(x, jax.core.Tracer) or not isinstance(getattr(x, "dtype", np.dtype(float)), np.dtype):
        return rules.FIXED  # A key of a random stream has another dtype.
    if np.shape(x) == np.shape(y) and (np.size(x) != 1 or not getattr(x, "is_fully_addressable", True)):
        return rules.FIXED
    values = [np.unique(np.asarray(v).astype(np.complex128)) for v in (x, y)]
    if any(len(v) != 1 for v in values):
        return Fact(POSITION, rules.OWN if np.array_equal(x, np.arange(np.size(x))) else rules.MOVED)
    m, n = (v.item() for v in values)
    if m == n or (m != m and n != n):
        return rules.FIXED if m else Fact(ZERO)
    power = math.log(abs(m / n), FACTOR) if m and n and math.isfinite(abs(m / n)) else 0.5
    return Fact(CONSTANT, round(power) if abs(power - round(power)) < 0.02 else None)
