"""The residuals of a segment, which its backward pass reads, and the FLOPs to compute them again.

`Residuals` finds them once for all equal segments. It traces the derivative, in which the values of the segment have a
name. For any choice of kept values it counts the bytes, as JAX would keep them, and the FLOPs. It proposes a few
choices (`Choice`), from all values kept to none. For the layer at the top of `segments.py`, with inputs x (-1) and w
(-2), three of them are:

    kept          read by the backward pass     bytes       FLOPs computed again
    0, 2, 4, 7    -2, -1, 0, 2, 4, 7            394,240        164,096: of values 1, 3, 5, 6 and 8
    0, 4, 7       -2, -1, 0, 4, 7               132,096      8,552,704: of the scores (2), too
    none          -2, -1                              0     19,300,608

A segment that does not become a checkpoint keeps the residuals that JAX keeps. Among them are values that it moves,
operands that a product casts, and values that only the derivative computes, such as the cosine for a sine.
"""

import itertools
import math
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

from jax.interpreters.partial_eval import dce_jaxpr

from jamp._jaxprs import build, dataflow, ir
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn
from jamp._jaxprs.primitives import (
    MOVING,
)
from jamp._recompute.kept import is_cheap
from jamp._recompute.linearized import with_residuals
from jamp._recompute.names import with_names
from jamp._recompute.opened import KEPT
from jamp._recompute.prices import cost, device_bytes
from jamp._recompute.segments import Segment
from jamp._recompute.stores import Store, Stores

_OTHER = "jamp.other"  # the name of the values of a segment that it computes again
_GROUPS = 9  # so many values of a segment, or groups of equal ones, are kept or dropped in all combinations


class Choice(NamedTuple):
    """A choice for a segment: the numbers of the values that it keeps, their bytes, and the FLOPs computed again."""

    kept: frozenset[int]
    size: float
    flops: float


class Residuals:
    """The residuals of a segment for any choice of kept values.

    The values of the segment are numbered in the order in which they are computed, and its inputs from -1 down. Values
    that only the derivative computes have the numbers after these.

    Attributes:
      derived: The values that only the derivative computes, and their equations.
      sizes: The bytes of each value, as it is kept.
      coded: The numbers of the values, and of the inputs, that are kept in 8 bits, if they are kept.
      kept_without_budget: The numbers of the values that are kept without one.
      read_at_once: The bytes that the backward pass reads in the segment at once.
    """

    def __init__(self, segment: Segment):
        numbered = lambda variables: frozenset(segment.numbers[v] for v in variables)
        self.coded = numbered(segment.coded)
        self.sizes = [device_bytes(v, self.store(i)) for i, v in enumerate(segment.values)]
        closed = _derivative(segment)
        self._producers = {v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}
        self._inputs = {v: -1 - i for i, v in enumerate(closed.jaxpr.invars)}
        self._constants = {*closed.jaxpr.constvars}
        is_moved = lambda eqn, operands: all(operands) and ir.name(eqn) in MOVING
        of_arguments = dataflow.Forward(is_moved, operator.and_, lambda value: True)
        # The values that are arguments of the function, perhaps cast, moved or gathered.
        self._of_arguments = of_arguments(closed, [segment.origins[v].argument for v in segment.inputs])
        of_prefix = lambda prefix: {e.outvars[0]: n for e in closed.jaxpr.eqns if (n := _number(e, prefix)) is not None}
        self._named = of_prefix(KEPT)
        # The named values and the inputs that each value is computed from, and the FLOPs in between.
        self._needs = {number: self._reads_and_flops(self._producers[v].invars) for v, number in self._named.items()}
        residuals = [v for v in closed.jaxpr.outvars[len(segment.outputs) :] if not ir.is_literal(v)]
        # A construct, such as a cond, may compute a named value and a residual. Where the named one is kept, it reads
        # only the operands that the residual needs.
        given = [*closed.jaxpr.constvars, *closed.jaxpr.invars, *self._named]
        between = [eqn for eqn in closed.jaxpr.eqns if self._named.keys().isdisjoint(eqn.outvars)]
        needed, _ = dce_jaxpr(build.closed_jaxpr({}, given, residuals, between).jaxpr, [True] * len(residuals))
        self._producers |= {v: eqn for eqn in needed.eqns for v in eqn.outvars}
        self._read = self._reads_and_flops(residuals)
        named = self._named | of_prefix(_OTHER)
        # The rule of an exponential reads its result as it is before it has a name.
        pairs = [(e.invars[0], named[e.outvars[0]]) for e in closed.jaxpr.eqns if ir.name(e) == "name"]
        known = {v: i for v, i in pairs if not ir.is_literal(v)} | self._inputs | named
        self.derived: list[tuple[Any, JaxprEqn]] = []
        self._direct = set[int]()
        for v in residuals:
            if v not in known and v not in self._constants:
                known[v] = len(self.sizes)
                self.derived.append((v, self._producers[v]))
                self.sizes.append(device_bytes(v))
            self._direct.update([known[v]] if v in known else [])
        self.read_at_once = sum(self.sizes[i] for i in self._direct if i >= 0)
        sources = dataflow.sources(closed)
        self._sources = {i: frozenset(map(self._inputs.get, sources[v])) for v, i in known.items() if v in sources}
        self._in_checkpoint = numbered(segment.kept)
        self._discrete = numbered(segment.discrete)
        cheap = frozenset(i for i, (_, eqn) in enumerate(segment.computed) if is_cheap(eqn))
        statistics = (self._in_checkpoint & cheap) - self.coded - self._discrete
        self._statistics = sorted(statistics) if self.coded else []
        self.kept_without_budget = self._in_checkpoint = self._consistent(self._in_checkpoint)
        if not segment.is_worth_it:
            self.kept_without_budget |= {i for i in self._direct if i >= 0}
        self._is_worth_it = segment.is_worth_it
        self._choices: dict[frozenset[int], list[Choice]] = {}

    def store(self, i: int) -> Store:
        """How a value is kept, if it is kept."""
        return Store.INT8 if i in self.coded else Store.ITSELF

    def stores(self, kept: frozenset[int]) -> Stores:
        """The stores of the values that are kept, and of the inputs that are read, for a choice of `kept` ones."""
        coded = self.needs(kept)[0] & self.coded
        values = {(i, Store.ITSELF) for i in kept - self.coded} | {(i, Store.INT8) for i in coded if i >= 0}
        return Stores(frozenset(values), frozenset(-1 - i for i in coded if i < 0))

    def is_checkpoint(self, kept: frozenset[int]) -> bool:
        """Whether the segment becomes a checkpoint if it keeps some values. Else JAX decides what is kept."""
        return self._is_worth_it or not kept >= self.kept_without_budget

    def _consistent(self, kept: frozenset[int]) -> frozenset[int]:
        """The kept values without exact statistics, such as a sum, of values that are decoded in the backward pass."""
        for i in self._statistics:
            if i in kept and not self._closure(self._needs[i][0], kept)[0].isdisjoint(self.coded):
                kept -= {i}
        return kept

    def sources(self, i: int) -> frozenset[Any] | None:
        """The inputs from which a value is computed, by their numbers. None if that is not known."""
        return self._sources.get(i)

    def _reads_and_flops(self, atoms: Iterable[Any]) -> tuple[frozenset[int], float]:
        """The named values and the inputs from which variables are computed, and the FLOPs in between."""
        found, total, seen = set[int](), 0.0, set[int]()
        stack = [v for v in atoms if not ir.is_literal(v)]
        while stack:
            v = stack.pop()
            if v in self._named or v in self._inputs:
                found.add(self._named[v] if v in self._named else self._inputs[v])
            elif v not in self._constants and id(self._producers[v]) not in seen:
                eqn = self._producers[v]
                seen.add(id(eqn))
                total += cost(eqn, self._of_arguments.get(eqn.outvars[0], False))
                stack.extend(x for x in eqn.invars if not ir.is_literal(x))
        return frozenset(found), total

    def needs(self, kept: frozenset[int]) -> tuple[set[int], float]:
        """The values and inputs that are read in the backward pass if some are kept, and the FLOPs computed again."""
        if not self.is_checkpoint(kept):
            return set(self._direct), 0.0
        read, total = self._read
        found, more = self._closure(read, kept)
        return found, total + more

    def _closure(self, read: Iterable[int], kept: frozenset[int]) -> tuple[set[int], float]:
        """The kept values and the inputs from which some are computed, and the FLOPs in between."""
        total, found, seen = 0.0, set[int](), set[int]()
        stack = list(read)
        while stack:
            i = stack.pop()
            if i in seen:
                continue
            seen.add(i)
            if i < 0 or i in kept:
                found.add(i)
            else:
                others, more = self._needs[i]
                total += more
                stack.extend(others)
        return found, total

    def choice(self, kept: frozenset[int], free: frozenset[int]) -> Choice:
        """The choice that keeps some values. The values in `free` are in memory anyway."""
        kept = self._consistent(kept | free)
        found, again = self.needs(kept)
        return Choice(kept, sum(self.sizes[i] for i in found if i >= 0 and i not in free), again)

    def choices(self, free: frozenset[int]) -> list[Choice]:
        """The choices that may be best, from all values kept to none: each keeps less and computes more again.

        All combinations of some groups of values are tried.
        """
        if free not in self._choices:
            groups = self._groups(self._in_checkpoint - free)
            fixed = self._in_checkpoint.difference(*groups)
            found = [
                self.choice(fixed.union(*chosen), free)
                for n in range(len(groups) + 1)
                for chosen in itertools.combinations(groups, n)
            ]
            self._choices[free] = _pareto([self.choice(self.kept_without_budget, free), *found])
        return self._choices[free]

    def _groups(self, values: frozenset[int]) -> list[frozenset[int]]:
        """The values that may be dropped, each large one by itself. If those are many, equal ones are together."""
        may_be_dropped = sorted(i for i in values - self._discrete if self._needs[i][1] < math.inf)
        least = 0.01 * sum(self.sizes[i] for i in values)
        large = [i for i in may_be_dropped if self.sizes[i] >= least]
        members: dict[Any, set[int]] = {}
        for i in large:
            members.setdefault((self.sizes[i], self._needs[i][1]) if len(large) > _GROUPS else i, set()).add(i)
        groups = sorted(map(frozenset, members.values()), key=lambda x: -sum(self.sizes[i] for i in x))[:_GROUPS]
        rest = frozenset(may_be_dropped).difference(*groups)
        return [*groups, rest] if rest else groups


def _pareto(choices: list[Choice]) -> list[Choice]:
    """Return the Pareto front: the choices that no other choice beats in both bytes and FLOPs."""
    found: list[Choice] = []
    for choice in sorted(choices, key=lambda x: (x.flops, x.size)):
        if not found or choice.size < found[-1].size:
            found.append(choice)
    return found


def _derivative(segment: Segment) -> ClosedJaxpr:
    """The results and the residuals of a segment, as a function of its inputs.

    Its values have names, of two kinds: those that may be kept, and others.
    """
    may_be_kept = segment.kept.union(segment.outputs)
    names = {v: f"{KEPT if v in may_be_kept else _OTHER} {i}" for i, v in enumerate(segment.values)}
    closed = with_names(segment, names)
    return with_residuals(closed, segment.perturbed, segment.alive, segment.context.shard_map)


def _number(eqn: JaxprEqn, wanted: str) -> int | None:
    prefix, _, number = str(ir.params(eqn)["name"]).partition(" ") if ir.name(eqn) == "name" else ("", "", "")
    return int(number) if prefix == wanted and number else None
