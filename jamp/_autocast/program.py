"""Turn the decisions about a jaxpr into what is evaluated: equations, casts between them, and runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jamp import _evaluate, _jaxpr
from jamp._autocast.constructs import enter
from jamp._autocast.runs import Kind, group
from jamp._autocast.values import Atom, is_float32
from jamp._jaxpr import JaxprEqn, Var

_FLOAT32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class PlannedEqn:
    """What was decided about one equation: by which rule, what it reads and writes, what was entered."""

    eqn: JaxprEqn
    category: str
    key: str
    reads: tuple[Atom, ...]
    writes: tuple[Var, ...]
    bodies: tuple[Any, ...] = ()
    why: str = ""


class _Scope:
    """Equations in their order, with casts where they are needed: a jaxpr, or (inside another scope) a run.

    Attributes:
      items: The equations, and the runs between them.
      inputs: What a run reads from outside.
      outputs: What is read of a run outside.
    """

    def __init__(self, plan: Any, parent: _Scope | None = None):
        self._planner, self._is_low, self._parent = plan.planner, plan.values.is_low, parent
        self.items: list[JaxprEqn | _Scope] = []
        self.inputs: list[Var] = []
        self.outputs: dict[Var, None] = {}
        self.makers: dict[Var, _Scope] = {}  # the run that computes a value
        self._homes: dict[tuple[Var, bool], Var] = {}  # where a value is found in each of the two dtypes
        self._defined: set[Var] = set()
        self._quantized: dict[Any, list[Var]] = {}

    def define(self, v: Var, low: bool) -> Var:
        """A new value, low or as traced."""
        self._defined.add(v)
        self._homes[v, low] = self._new_low(v) if low else v
        return self._homes[v, low]

    def read(self, atom: Atom, low: bool) -> Atom:
        """A value in one of its two dtypes. It is cast where the other one is first needed, and only once."""
        if _jaxpr.is_literal(atom):
            if not low:
                return atom
            value = np.asarray(atom.val).astype(self._planner.compute_dtype)
            return _jaxpr.core().Literal(value, self._planner.low_aval(atom.aval))
        if (atom, low) not in self._homes:
            self._homes[atom, low] = self._find(atom, low)
        return self._homes[atom, low]

    def _find(self, v: Var, low: bool) -> Var:
        if v in self.makers:
            maker = self.makers[v]
            is_made_low = (v, False) not in maker._homes  # a product: its result is cast outside
            found = maker.read(v, low or is_made_low)
            maker.outputs[found] = None
            if low or not is_made_low:
                return found
            self._homes[v, True] = found
            return self._cast(v, low)
        is_stored_low = self._is_low(v)
        if (v, not low) in self._homes and (low or is_stored_low):
            return self._cast(v, low)
        assert self._parent is not None
        if (v, False) in self._parent._homes and not low:  # an operation before this run has cast it
            is_stored_low = False
        found = self._parent.read(v, low or is_stored_low)
        self.inputs.append(found)
        if low or not is_stored_low:
            return found
        self._homes[v, True] = found
        # An operation after this run reads its cast: two casts would have two gradients, added in 16 bit.
        self._parent.makers[v] = self
        return self._cast(v, low)

    def quantized(self, v: Var, axes: tuple[int, ...] | None) -> list[Var]:
        """The float8 values and the scales of a value. It is quantized once, in the scope that computes it."""
        key = v, axes
        if key not in self._quantized:
            if v not in self._defined and self._parent is not None:
                self._quantized[key] = self._parent.quantized(v, axes)
                self.inputs.extend(self._quantized[key])
            else:
                closed = self._planner.quantize(self._planner.low_aval(v.aval), axes)
                outputs = [_jaxpr.core().Var(aval) for aval in closed.out_avals]
                self.items.extend(_evaluate.inline(closed, [self.read(v, True)], outputs))
                self._quantized[key] = outputs
        return self._quantized[key]

    def _cast(self, v: Var, low: bool) -> Var:
        target = self._new_low(v) if low else v
        self.items.append(self._planner.convert(self._homes[v, not low], target, low))
        return target

    def _new_low(self, v: Var) -> Var:
        return _jaxpr.core().Var(self._planner.low_aval(v.aval))


class Program:
    """What a planned jaxpr evaluates.

    Attributes:
      closed: The jaxpr at its planned dtypes.
      eqns: Every decision, for the report.
    """

    def __init__(self, plan: Any, low: Sequence[bool]):
        self._plan, self._planner = plan, plan.planner
        jaxpr, is_low = plan.closed.jaxpr, plan.values.is_low
        decisions = dict(zip(map(id, jaxpr.eqns), plan.decisions, strict=True))
        self.eqns: list[PlannedEqn] = []
        scope = _Scope(plan)
        for v in (*jaxpr.constvars, *jaxpr.invars):
            scope.define(v, is_low(v))
        inputs = [scope.read(v, is_low(v)) for v in jaxpr.invars]
        for eqns, kinds in group(jaxpr, lambda eqn, depth: self._planner.kind(eqn, decisions[id(eqn)], depth)):
            into = scope
            if plan.where.recompute and any(map(self._planner.is_worth_recomputing, eqns, kinds)):
                into = _Scope(plan, scope)
            for eqn, kind in zip(eqns, kinds, strict=True):
                is_in_run = kind is Kind.CHEAP or (kind is Kind.MOVE and len(eqns) > 1)
                self._add(into, eqn, decisions[id(eqn)], is_in_run)
            if into is not scope:  # after the casts of what it reads
                scope.items.append(into)
                scope.makers.update((v, into) for eqn in eqns for v in eqn.outvars)
        outputs = [scope.read(v, x) for v, x in zip(jaxpr.outvars, low, strict=True)]
        constants = dict(zip(jaxpr.constvars, plan.closed.consts, strict=True))
        self.closed = _evaluate.closed_jaxpr(constants, inputs, outputs, list(self._flatten(scope)))

    def _add(self, scope: _Scope, eqn: JaxprEqn, decision: Any, is_in_run: bool) -> None:
        """Add an equation: as it was traced in a run, else with its float32 operands and results all low or none."""
        low = (False,) * len(eqn.outvars) if is_in_run else decision.low
        is_entered = not is_in_run and any(body.changed for body in decision.bodies)
        reads: tuple[Atom, ...]
        if is_entered:
            reads = tuple(scope.read(v, x.low) for v, x in zip(eqn.invars, decision.known, strict=True))
        else:
            reads = tuple(scope.read(v, any(low) and is_float32(v)) for v in eqn.invars)
        quantized: list[list[Var]] = []
        if decision.float8:
            axes = _jaxpr.contracted(eqn) if self._planner.float8.granularity == "row" else (None, None)
            operands: list[Any] = eqn.invars
            quantized = [scope.quantized(v, x) for v, x in zip(operands, axes, strict=True)]
        writes = tuple(scope.define(v, x) for v, x in zip(eqn.outvars, low, strict=True))
        shown = tuple(_jaxpr.core().Var(q.aval.update(dtype=self._planner.float8.forward)) for q, _ in quantized)
        self.eqns.append(
            PlannedEqn(eqn, decision.category, decision.key, shown or reads, writes, decision.bodies, decision.why)
        )
        if quantized:
            inputs = [*reads, *quantized[0], *quantized[1]]
            closed = self._planner.float8_product(eqn, _jaxpr.avals(inputs))
            items = _evaluate.inline(closed, inputs, writes)
            scope.items.extend(item.replace(source_info=eqn.source_info) for item in items)
        elif is_entered:
            scope.items.extend(enter(eqn, decision.bodies, low, reads, writes))
        else:
            run = _evaluate.replace_dtype(eqn, _FLOAT32, self._planner.compute_dtype) if any(low) else eqn
            scope.items.append(run.replace(invars=list(reads), outvars=list(writes)))

    def _flatten(self, scope: _Scope) -> Iterator[JaxprEqn]:
        for item in scope.items:
            if not isinstance(item, _Scope):
                yield item
            elif item.outputs:
                # A barrier keeps XLA:GPU from finding that the values are computed already, and keeping them. A loop is
                # a barrier. After a run that no product reads, such as a loss, its gradient follows at once. XLA:TPU
                # decides better without one (docs/autocast.md has the measurements).
                is_read = any(v not in scope.makers for v in item.outputs)
                prevent_cse = is_read and not self._plan.where.in_loop and jax.default_backend() != "tpu"
                body = self._planner.run(item.inputs, list(item.outputs), list(self._flatten(item)))
                yield _evaluate.checkpoint(item.inputs, list(item.outputs), body, prevent_cse=prevent_cse)
