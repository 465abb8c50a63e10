"""Evaluate a jaxpr operation by operation on real values, and trace each inf and NaN to the operation that made it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jamp import _jaxpr
from jamp._cast import is_inexact
from jamp._source_line import made_by_jamp, user_line
from jamp.debug._cause import explain
from jamp.debug._enter import ENTER
from jamp.debug._finding import Finding, Values
from jamp.debug._value import NAN, Value, earliest, known, worst

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn


class Walker:
    """One evaluation of a function.

    Attributes:
      found: The operations that returned inf or NaN for finite inputs, in the order in which they ran.
      count: The number of operations that ran.
    """

    def __init__(self) -> None:
        self.found: list[Finding] = []
        self.count = 0
        self._path: list[str] = []

    def run(self, closed: ClosedJaxpr, args: Sequence[Value], line: str = "", backward: bool = False) -> list[Value]:
        """Return the results of a jaxpr.

        Args:
          closed: The jaxpr.
          args: Its arguments.
          line: The line of the call, used for an operation that has none of its own.
          backward: Whether the call is part of a backward pass.
        """
        jaxpr = closed.jaxpr
        env: dict[Any, Value] = dict(zip(jaxpr.invars, args, strict=True))
        env |= {v: known(x, "constant") for v, x in zip(jaxpr.constvars, closed.consts, strict=True)}
        last_use = _jaxpr.last_uses(jaxpr)
        for index, eqn in enumerate(jaxpr.eqns):
            values = [_read(env, v) for v in eqn.invars]
            here = _line(jaxpr.eqns, index) or line, backward or "transpose(" in str(eqn.source_info.name_stack)
            bodies = _jaxpr.bodies(eqn) if eqn.primitive.name in ENTER else None
            if bodies is None:
                results = self._operation(eqn, values, *here)
            else:
                inside = lambda step, body, args, here=here: self._inside(step, body, args, *here)
                results = ENTER[eqn.primitive.name](eqn, bodies, values, inside)
            env.update(zip(eqn.outvars, results, strict=True))
            for v in {v for v in (*eqn.invars, *eqn.outvars) if not _jaxpr.is_literal(v)}:
                if last_use.get(v, -1) <= index:
                    del env[v]  # The activations of a model would not all fit in memory.
        return [_read(env, v) for v in jaxpr.outvars]

    def _inside(self, step: str, body: ClosedJaxpr, args: Sequence[Value], line: str, backward: bool) -> list[Value]:
        self._path.append(step)
        results = self.run(body, args, line, backward)
        self._path.pop()
        return results

    def _operation(self, eqn: JaxprEqn, values: list[Value], line: str, backward: bool) -> list[Value]:
        self.count += 1
        arrays = [x.array for x in values]
        results = _jaxpr.bind(eqn, arrays, _jaxpr.avals(eqn.outvars))
        bits = worst(results)
        origin = earliest(values)
        # If no operation made the inf (a mask of -inf), the operation that turns it into NaN is to blame.
        is_new = origin is None or (not isinstance(origin, Finding) and max(x.bits for x in values) < NAN == max(bits))
        if any(bits) and is_new:
            origin = Finding(
                eqn.primitive.name,
                explain(eqn, arrays, results),
                line,
                tuple(self._path),
                backward,
                tuple(map(Values.of, filter(is_inexact, arrays))),
                tuple(map(Values.of, filter(is_inexact, results))),
                order=len(self.found),
            )
            self.found.append(origin)
        return [Value(x, b, origin if b else None) for x, b in zip(results, bits, strict=True)]


def _line(eqns: Sequence[JaxprEqn], index: int) -> str | None:
    """The user's line of an operation. A cast that autocast inserted has that of the operation that reads it."""
    eqn = eqns[index]
    if eqn.primitive.name == "convert_element_type" and made_by_jamp(eqn):
        eqn = next((later for later in eqns[index + 1 :] if eqn.outvars[0] in later.invars), eqn)
    return user_line(eqn)


def _read(env: dict[Any, Value], atom: Any) -> Value:
    return known(_jaxpr.read({}, atom), "constant") if _jaxpr.is_literal(atom) else env[atom]
