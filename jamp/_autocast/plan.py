"""Plan a jaxpr: decide the dtype of every value before anything is evaluated.

A value is *low* where it was traced as float32 and is computed in the compute dtype; every other value has the dtype
it was traced with. So a plan follows from the jaxpr alone, and each piece of a jaxpr is planned once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jamp import _jaxpr
from jamp._autocast.origins import Atom, Origins, without_ones
from jamp._autocast.rules import COMPUTE, WIDEST
from jamp._jaxpr import ClosedJaxpr, JaxprEqn, Var

_FLOAT32 = np.dtype(np.float32)
FULL_PRECISION = "jamp.full_precision"
# What becomes of an equation that no rule decides.
ENTERED, NOT_ENTERED, REGION, NO_RULE = "entered", "not entered", "full_precision", "no rule"


@dataclasses.dataclass(frozen=True)
class Input:
    """What is known of the input of a jaxpr: is it low, a constant, a parameter (an input of the whole, reshaped)?"""

    low: bool = False
    constant: Any = None
    parameter: bool = False


@dataclasses.dataclass(frozen=True)
class PlannedEqn:
    """What was decided about one equation: by which rule, what it reads and writes, what was entered."""

    eqn: JaxprEqn
    category: str
    key: str
    reads: tuple[Atom, ...]
    writes: tuple[Var, ...]
    bodies: tuple[PlannedJaxpr, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether the equation is not run as it was traced."""
        pairs = zip((*self.reads, *self.writes), (*self.eqn.invars, *self.eqn.outvars), strict=True)
        return any(new is not old for new, old in pairs) or any(body.changed for body in self.bodies)


class PlannedJaxpr:
    """A jaxpr, planned.

    Attributes:
      planner: The `Planner` that made it.
      closed: The jaxpr at its traced dtypes.
      inputs: The variables to bind the arguments to.
      pieces: What to evaluate in turn: lists of equations to run as they are, and planned equations to enter.
      outputs: Where the outputs are found.
      low: Whether each output is low.
      changed: Whether anything is not as it was traced.
      eqns: Every decision, for the report.
      traced: The jaxpr at its planned dtypes, where the interpreter has needed it.
    """

    def __init__(self, planner: Any, closed: ClosedJaxpr, inputs: Sequence[Input]):
        self.planner, self.closed = planner, closed
        self.traced: ClosedJaxpr | None = None
        self._wide: set[Var] = set()  # Low values that are needed in float32 too.
        self._plan_all(inputs)
        cast_back = {v for v in self._low if (v, False) in self._homes}
        in_16_bit = {self._homes[v, True] for v in cast_back}
        if any(self._is_exact(planned) and any(_is_in(v, in_16_bit) for v in planned.reads) for planned in self.eqns):
            # logsumexp(x) - x[label]: the two gradients of x nearly cancel, and have to be added in float32.
            self._wide = cast_back
            self._plan_all(inputs)
        self.changed = any(self.low) or any(planned.changed for planned in self.eqns)

    def _plan_all(self, inputs: Sequence[Input]) -> None:
        jaxpr = self.closed.jaxpr
        self.eqns: list[PlannedEqn] = []
        self.pieces: list[list[JaxprEqn] | PlannedEqn] = []
        self._homes: dict[tuple[Var, bool], Var] = {}  # Where a value is found in each of the two dtypes.
        self._low: set[Var] = set()
        self._origins = Origins(self.is_low, self.planner.rules)
        consts = [Input(parameter=True)] * len(jaxpr.constvars)
        for v, known in zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True):
            self._define(v, known.low)
            if known.constant is not None:
                self._origins.constants[v] = known.constant
            elif known.parameter and _is_float32(v):
                self._origins.parameters[v] = without_ones(v.aval.shape)
        self.inputs = [self._read(v, self.is_low(v)) for v in jaxpr.invars]
        for eqn in jaxpr.eqns:
            self._plan(eqn)
        self.low = [self.is_low(v) for v in jaxpr.outvars]
        self.outputs = [self._read(v, self.is_low(v)) for v in jaxpr.outvars]

    def is_low(self, atom: Atom) -> bool:
        """Whether a value, where it is defined, is low."""
        return _is_in(atom, self._low)

    def _is_exact(self, planned: PlannedEqn) -> bool:
        """Whether an equation, and all that it holds, gives the numbers it gets, in whichever dtype it is run."""
        if planned.bodies:
            return all(body._is_exact(inner) for body in planned.bodies for inner in body.eqns)
        floats = any(map(_is_float32, (*planned.eqn.invars, *planned.eqn.outvars)))
        return not floats or self.planner.is_exact(planned.key)

    def _plan(self, eqn: JaxprEqn) -> None:
        if FULL_PRECISION in str(eqn.source_info.name_stack):
            self._add(eqn, REGION, FULL_PRECISION)
        elif eqn.primitive.name in _jaxpr.CONSTRUCTS and eqn.primitive.name not in self.planner.rules:
            self._enter(eqn)
        else:
            key = self._origins.rule(eqn)
            category = self.planner.rules[key][0] if key in self.planner.rules else NO_RULE
            wide = self.planner.is_exact(key) and self._reads_wide(eqn)
            self._add(eqn, category, key, low=not wide and self._runs_low(eqn, category))
        self._origins.follow(eqn)

    def _runs_low(self, eqn: JaxprEqn, category: str) -> bool:
        if category != COMPUTE and not (category == WIDEST and self._reads_low(eqn)):
            return False
        floats = [v for v in eqn.invars if _is_float32(v)]
        if category == COMPUTE:
            others = {_dtype(v) for v in eqn.invars if jnp.issubdtype(_dtype(v), np.inexact)}
            return bool(floats) and others <= {np.dtype(np.float32), self.planner.compute_dtype}
        voters = [v for v in floats if self._origins.constant(v) is None]
        constants = [self._origins.constant(v) for v in floats if self._origins.constant(v) is not None]
        return bool(voters) and all(map(self.is_low, voters)) and all(map(self.planner.holds, constants))

    def _reads_low(self, eqn: JaxprEqn) -> bool:
        return any(map(self.is_low, eqn.invars))

    def _reads_wide(self, eqn: JaxprEqn) -> bool:
        return any(_is_in(v, self._wide) for v in eqn.invars)

    def _enter(self, eqn: JaxprEqn) -> None:
        inner = _jaxpr.bodies(eqn)
        if inner is None:
            return self._add(eqn, NOT_ENTERED, eqn.primitive.name)
        name, carry = eqn.primitive.name, _jaxpr.carry(eqn)
        # A carry keeps its traced dtypes, and is another value at every step.
        known = [Input() if i in carry else self._known(v) for i, v in enumerate(eqn.invars)]
        plan = lambda known: tuple(
            self.planner.body(closed, [known[i] for i in operands])
            for closed, operands in zip(inner, _jaxpr.body_operands(eqn), strict=True)
        )
        bodies = plan(known)
        if self._reads_wide(eqn) and self._is_exact(PlannedEqn(eqn, ENTERED, name, (), (), bodies)):
            known = [
                dataclasses.replace(x, low=x.low and not _is_in(v, self._wide))
                for v, x in zip(eqn.invars, known, strict=True)
            ]
            bodies = plan(known)
        if not any(body.changed for body in bodies):
            return self._add(eqn, ENTERED, name, bodies=bodies)
        low = [i >= len(carry) and all(body.low[i] for body in bodies) for i in range(len(eqn.outvars))]
        reads = tuple(self._read(v, x.low) for v, x in zip(eqn.invars, known, strict=True))
        writes = tuple(self._define(v, is_low) for v, is_low in zip(eqn.outvars, low, strict=True))
        planned = PlannedEqn(eqn, ENTERED, name, reads, writes, bodies)
        self.eqns.append(planned)
        self.pieces.append(planned)
        return None

    def _known(self, atom: Atom) -> Input:
        return Input(self.is_low(atom), self._origins.constant(atom), self._origins.is_parameter(atom))

    def _add(
        self, eqn: JaxprEqn, category: str, key: str, low: bool = False, bodies: tuple[PlannedJaxpr, ...] = ()
    ) -> None:
        """Plan to run an equation as it is, its float32 operands and results all low or none."""
        if not low and key != "add[bias]" and not self._reads_low(eqn):  # Nothing to do, as in most of a backward pass.
            self._homes.update(((v, False), v) for v in eqn.outvars)
            self._equations().append(eqn)
            self.eqns.append(PlannedEqn(eqn, category, key, tuple(eqn.invars), tuple(eqn.outvars), bodies))
            return
        operands = [self._broadcast(v, eqn.outvars[0].aval) for v in eqn.invars] if key == "add[bias]" else eqn.invars
        reads = tuple(self._read(v, low) if _is_float32(v) else v for v in operands)
        writes = tuple(self._define(v, low and _is_float32(v)) for v in eqn.outvars)
        run = _jaxpr.replace_dtype(eqn, _FLOAT32, self.planner.compute_dtype) if low else eqn
        self._equations().append(run.replace(invars=list(reads), outvars=list(writes)))
        self.eqns.append(PlannedEqn(eqn, category, key, reads, writes, bodies))

    def _broadcast(self, bias: Atom, aval: Any) -> Atom:
        """A bias in the shape of the product it is added to: cast after that, its gradient is summed in float32."""
        if bias.aval.shape == aval.shape or not aval.sharding.mesh.empty:
            return bias
        wide = _jaxpr.core().Var(aval)
        self._equations().append(self.planner.broadcast(bias.aval, aval.shape).replace(invars=[bias], outvars=[wide]))
        self._define(wide, low=False)
        return wide

    def _equations(self) -> list[JaxprEqn]:
        if not self.pieces or isinstance(self.pieces[-1], PlannedEqn):
            self.pieces.append([])
        last = self.pieces[-1]
        assert isinstance(last, list)
        return last

    def _define(self, v: Var, low: bool) -> Var:
        """A new value, low or as traced."""
        if low:
            self._low.add(v)
        self._homes[v, low] = _jaxpr.core().Var(_low_aval(v.aval, self.planner)) if low else v
        return self._homes[v, low]

    def _read(self, atom: Atom, low: bool) -> Atom:
        """A value in one of its two dtypes. It is cast where the other one is first needed, and only once."""
        if _jaxpr.is_literal(atom):
            if not low:
                return atom
            value = np.asarray(atom.val).astype(self.planner.compute_dtype)
            return _jaxpr.core().Literal(value, _low_aval(atom.aval, self.planner))
        if (atom, low) not in self._homes:
            target = _jaxpr.core().Var(_low_aval(atom.aval, self.planner) if low else atom.aval)
            self._equations().append(self.planner.convert(self._homes[atom, not low], target, low))
            self._homes[atom, low] = target
        return self._homes[atom, low]


def _low_aval(aval: Any, planner: Any) -> Any:
    return aval.update(dtype=planner.compute_dtype, weak_type=False)


def _dtype(atom: Atom) -> Any:
    return atom.aval.dtype if isinstance(atom.aval, jax.core.ShapedArray) else None


def _is_in(atom: Atom, variables: set[Var]) -> bool:
    return not _jaxpr.is_literal(atom) and atom in variables


def _is_float32(atom: Atom) -> bool:
    return bool(_dtype(atom) == _FLOAT32)
