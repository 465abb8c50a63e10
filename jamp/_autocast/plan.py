"""Plan a jaxpr: decide the dtype of every value, and what the backward pass computes again, before anything is run.

A value is *low* where it was traced as float32 and is stored in the compute dtype. Products read and write low values.
What stands between them is computed in float32, in runs (`_autocast/runs.py`): a run casts the low values it reads, and
rounds the values that are read as low ones. A plan follows from the jaxpr alone, and each jaxpr is planned once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jamp import _jaxpr
from jamp._autocast.program import Program
from jamp._autocast.rules import COMPUTE
from jamp._autocast.runs import Kind
from jamp._autocast.values import Atom, Values, is_float32
from jamp._jaxpr import ClosedJaxpr, JaxprEqn

FULL_PRECISION = "jamp.full_precision"
_RULES_OF_OTHERS = ("custom_jvp_call", "custom_vjp_call", "linear_call")
# What becomes of an equation that no rule decides.
ENTERED, NOT_ENTERED, REGION, NO_RULE = "entered", "not entered", "full_precision", "no rule"


@dataclasses.dataclass(frozen=True)
class Input:
    """What is known of the input of a jaxpr.

    Attributes:
      low: Whether it is stored in 16 bit.
      constant: The number that it is filled with.
      computed: Whether a product has computed it, so that it is not a parameter or a batch.
    """

    low: bool = False
    constant: Any = None
    computed: bool = False


@dataclasses.dataclass(frozen=True)
class Where:
    """Where a jaxpr stands: are its runs computed again by the backward pass, is it in a loop, in a shard_map?"""

    recompute: bool = True
    in_loop: bool = False
    manual: bool = False
    float8: bool = True  # whether products may be float8: not in custom rules
    read_on: tuple[bool, ...] = ()  # whether a later product reads each result
    scope: str = ""  # the names around it, if a rule is for one


@dataclasses.dataclass(frozen=True)
class Decision:
    """By which rule an equation is planned, which of its results are low, and its bodies."""

    category: str
    key: str
    low: tuple[bool, ...]
    bodies: tuple[PlannedJaxpr, ...] = ()
    known: tuple[Input, ...] = ()  # what its bodies were planned with
    float8: bool = False
    why: str = ""  # the reason, if it is not that of the rule


class PlannedJaxpr:
    """A jaxpr, planned.

    Attributes:
      planner: The `Planner` that made it.
      closed: The jaxpr at its traced dtypes.
      low: Whether each output is low.
    """

    def __init__(self, planner: Any, closed: ClosedJaxpr, inputs: Sequence[Input], where: Where, as_traced: int):
        self.planner, self.closed, self.where, self.inputs = planner, closed, where, inputs
        self._programs: dict[tuple[bool, ...], Program] = {}
        jaxpr = closed.jaxpr
        self.values = Values(planner.compute_dtype, planner.holds)
        for v, known in zip(jaxpr.invars, inputs, strict=True):
            if known.low:
                self.values.low.add(v)
            if known.constant is not None:
                self.values.constants[v] = known.constant
            if known.computed:
                self.values.computed.add(v)
        later = where.read_on or (False,) * len(jaxpr.outvars)
        self._read_on = planner.feeding(jaxpr, later) if planner.float8 else set()
        self.decisions = [self._decide(eqn) for eqn in jaxpr.eqns]
        self.low = [i >= as_traced and self.values.is_low(v) for i, v in enumerate(jaxpr.outvars)]

    def _decide(self, eqn: JaxprEqn) -> Decision:
        name, rules = eqn.primitive.name, self.planner.rules
        as_traced = (False,) * len(eqn.outvars)
        if FULL_PRECISION in str(eqn.source_info.name_stack):
            decision = Decision(REGION, FULL_PRECISION, as_traced)
        elif name in _jaxpr.CONSTRUCTS and name not in rules:
            decision = self._enter(eqn)
        else:
            key = self.planner.rule(eqn, self.values, self.where.scope)
            category = rules[key][0] if key in rules else NO_RULE
            # A function in the parameters (that of a scatter) is for the dtypes it was traced with.
            low = self.values.runs_low(eqn, category) and not _jaxpr.has_body(eqn)
            decision = Decision(category, key, tuple(low and is_float32(v) for v in eqn.outvars))
            if self.planner.float8 and category == COMPUTE and any(decision.low) and name == "dot_general":
                why = self.planner.why_not_float8(eqn, key, self.values, self.where, eqn.outvars[0] in self._read_on)
                decision = dataclasses.replace(decision, float8=not why, why=why)
        if decision.category in (NOT_ENTERED, NO_RULE):
            self.planner.left_out.append(eqn)
        self.values.follow(eqn, decision.low, self.planner.kind(eqn, decision, 1) is Kind.CHEAP)
        if self.planner.float8 and (self.planner.is_product(eqn) or any(map(self.values.is_computed, eqn.invars))):
            self.values.computed.update(eqn.outvars)
        return decision

    def _enter(self, eqn: JaxprEqn) -> Decision:
        inner, name = _jaxpr.bodies(eqn), eqn.primitive.name
        # Inside shard_map, JAX does not tell a custom rule which of its operands are differentiated.
        if inner is None or (self.where.manual and _jaxpr.asks_for_zeros(eqn)):
            return Decision(NOT_ENTERED, name, (False,) * len(eqn.outvars))
        # A carry keeps its traced dtypes, and is another value at every step.
        carry = _jaxpr.carry(eqn)
        # A constant of a loop is, too: its gradient is the sum over all steps.
        wide = range(carry.stop) if carry else ()
        kind = self.planner.kind(eqn, Decision(ENTERED, name, ()), 1)
        exact = kind is Kind.OTHER and not self.planner.holds_product(inner)
        known = tuple(Input() if i in wide else self._known(v, exact) for i, v in enumerate(eqn.invars))
        # What the user's own checkpoint keeps and computes again is the user's decision.
        where = Where(
            recompute=self.where.recompute and name != "remat2",
            in_loop=self.where.in_loop or bool(carry),
            manual=self.where.manual or name == "shard_map",
            float8=self.where.float8 and name not in _RULES_OF_OTHERS,
            read_on=self.planner.read_on(eqn, [v in self._read_on for v in eqn.outvars]) if self.planner.float8 else (),
            scope=self.planner.scope(eqn, self.where.scope) if self.planner.parts else "",
        )
        bodies = tuple(
            self.planner.body(closed, [known[i] for i in operands], where, len(carry))
            for closed, operands in zip(inner, _jaxpr.body_operands(eqn), strict=True)
        )
        low = tuple(i >= len(carry) and all(body.low[i] for body in bodies) for i in range(len(eqn.outvars)))
        return Decision(ENTERED, name, low, bodies, known)

    def _known(self, atom: Atom, exact: bool) -> Input:
        low = self.values.is_low(atom) and not (exact and self.values.is_rounded(atom))
        return Input(low, self.values.constant(atom), self.planner.float8 is not None and self.values.is_computed(atom))

    def program(self, low: Sequence[bool] | None = None) -> Program:
        """What to evaluate, if some outputs are to be low: by default, those that are."""
        wanted = tuple(self.low if low is None else low)
        if wanted not in self._programs:
            self._programs[wanted] = Program(self, wanted)
        return self._programs[wanted]

    def same_as(self, closed: ClosedJaxpr, low: Sequence[bool]) -> PlannedJaxpr:
        """The plan of another jaxpr in the place of this one: that of a custom rule."""
        where = dataclasses.replace(self.where, float8=False, read_on=())
        return self.planner.body(closed, [Input(x) for x in low], where)

    @functools.cached_property
    def changed(self) -> bool:
        """Whether any equation is not run as it was traced."""
        low = [known.low for known in self.inputs]
        return any(low) or any(
            any(decision.low) or any(body.changed for body in decision.bodies) for decision in self.decisions
        )
