"""Turn the decisions about a jaxpr into what is evaluated: equations, casts between them, and runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jamp import _evaluate, _jaxpr
from jamp._autocast.constructs import enter
from jamp._autocast.runs import group, variables
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


@dataclasses.dataclass
class _Run:
    """A run that the backward pass computes again: its inputs, its equations, and those results that are read."""

    inputs: list[Var]
    eqns: list[JaxprEqn]
    outputs: dict[Var, Var] = dataclasses.field(default_factory=dict)  # by the variable that is read outside


class Program:
    """What a planned jaxpr evaluates.

    Attributes:
      closed: The jaxpr at its planned dtypes.
      eqns: Every decision, for the report.
    """

    def __init__(self, plan: Any, low: Sequence[bool]):
        self._plan, self._planner, self._values = plan, plan.planner, plan.values
        jaxpr = plan.closed.jaxpr
        decisions = dict(zip(map(id, jaxpr.eqns), plan.decisions, strict=True))
        self.eqns: list[PlannedEqn] = []
        self._items: list[JaxprEqn | _Run] = []
        self._homes: dict[tuple[Var, bool], Var] = {}  # where a value is found in each of the two dtypes
        self._runs: dict[Var, _Run] = {}  # the run that computes a value
        for v in (*jaxpr.constvars, *jaxpr.invars):
            self._define(v, self._values.is_low(v))
        inputs = [self._read(v, self._values.is_low(v)) for v in jaxpr.invars]
        kind = lambda eqn, depth: self._planner.kind(eqn, decisions[id(eqn)].key, depth)
        for is_run, eqns in group(jaxpr, kind):
            found = [decisions[id(eqn)] for eqn in eqns]
            if not is_run:
                self._single(eqns[0], found[0])
            else:
                self.eqns.extend(
                    PlannedEqn(eqn, d.category, d.key, tuple(eqn.invars), tuple(eqn.outvars), d.bodies)
                    for eqn, d in zip(eqns, found, strict=True)
                )
                keeps = not plan.where.recompute or not any(map(self._planner.is_worth_recomputing, eqns))
                (self._in_place if keeps else self._recomputed)(eqns)
        outputs = [self._read(v, is_low) for v, is_low in zip(jaxpr.outvars, low, strict=True)]
        constants = dict(zip(jaxpr.constvars, plan.closed.consts, strict=True))
        self.closed = _evaluate.closed_jaxpr(constants, inputs, outputs, list(self._finish()))

    def _single(self, eqn: JaxprEqn, decision: Any) -> None:
        """An equation outside all runs: its float32 operands and results are all low or none."""
        reads: tuple[Atom, ...]
        if any(body.changed for body in decision.bodies):
            reads = tuple(self._read(v, x.low) for v, x in zip(eqn.invars, decision.known, strict=True))
        else:
            reads = tuple(self._read(v, any(decision.low) and is_float32(v)) for v in eqn.invars)
        writes = tuple(self._define(v, low) for v, low in zip(eqn.outvars, decision.low, strict=True))
        planned = PlannedEqn(eqn, decision.category, decision.key, reads, writes, decision.bodies)
        self.eqns.append(planned)
        if any(body.changed for body in decision.bodies):
            self._items.extend(enter(eqn, decision.bodies, decision.low, reads, writes))
        else:
            run = _evaluate.replace_dtype(eqn, _FLOAT32, self._planner.compute_dtype) if any(decision.low) else eqn
            self._items.append(run.replace(invars=list(reads), outvars=list(writes)))

    def _in_place(self, eqns: list[JaxprEqn]) -> None:
        """A run whose values are kept."""
        made = {v for eqn in eqns for v in eqn.outvars}
        for v in dict.fromkeys(v for eqn in eqns for v in variables(eqn) if v not in made):
            assert self._read(v, False) is v
        self._items.extend(eqns)
        self._homes.update(((v, False), v) for v in made)

    def _recomputed(self, eqns: list[JaxprEqn]) -> None:
        """A run of which the backward pass keeps the inputs. What is low is cast inside."""
        made = dict.fromkeys(v for eqn in eqns for v in eqn.outvars)
        run = _Run([], [])
        for v in dict.fromkeys(v for eqn in eqns for v in variables(eqn) if v not in made):
            low = self._values.is_low(v)
            run.inputs.append(self._read(v, low))
            if low:
                run.eqns.append(self._planner.convert(run.inputs[-1], v, low=False))
        run.eqns.extend(eqns)
        self._runs.update(dict.fromkeys(made, run))
        self._items.append(run)

    def _define(self, v: Var, low: bool) -> Var:
        """A new value, low or as traced."""
        self._homes[v, low] = self._new_low(v) if low else v
        return self._homes[v, low]

    def _read(self, atom: Atom, low: bool) -> Atom:
        """A value in one of its two dtypes. It is cast where the other one is first needed, and only once."""
        if _jaxpr.is_literal(atom):
            if not low:
                return atom
            value = np.asarray(atom.val).astype(self._planner.compute_dtype)
            return _jaxpr.core().Literal(value, self._planner.low_aval(atom.aval))
        if (atom, low) not in self._homes:
            target = self._new_low(atom) if low else atom
            if atom in self._runs:
                run = self._runs[atom]
                run.outputs[target] = atom
                if low:
                    run.eqns.append(self._planner.convert(atom, target, low))
            else:
                self._items.append(self._planner.convert(self._homes[atom, not low], target, low))
            self._homes[atom, low] = target
        return self._homes[atom, low]

    def _new_low(self, atom: Atom) -> Var:
        return _jaxpr.core().Var(self._planner.low_aval(atom.aval))

    def _finish(self) -> Iterator[JaxprEqn]:
        for item in self._items:
            if not isinstance(item, _Run):
                yield item
            elif item.outputs:
                # A barrier keeps XLA:GPU from finding that the values are computed already, and keeping them. A loop is
                # a barrier. After a run that no product reads, such as a loss, its gradient follows at once. XLA:TPU
                # decides better without one (docs/autocast.md has the measurements).
                is_read = any(v not in self._runs for v in item.outputs)
                prevent_cse = is_read and not self._plan.where.in_loop and jax.default_backend() != "tpu"
                body = self._planner.run(item.inputs, list(item.outputs), item.eqns)
                yield _evaluate.checkpoint(item.inputs, list(item.outputs), body, prevent_cse=prevent_cse)
