"""The memory plan of a function: a choice for each segment, and the bytes that the backward pass then keeps.

A value that several segments read counts once, and one in a loop counts for every step. The plan depends on shapes
only, so it is the same on every host. It takes every floating-point argument of the function to be differentiated.
"""

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

from jamp._cast import is_inexact
from jamp._jaxprs import build, constructs, dataflow, equality, ir
from jamp._jaxprs.context import Context
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn
from jamp._recompute.derivative_rules import CodedRule
from jamp._recompute.linearized import with_residuals
from jamp._recompute.prices import UNKNOWN, device_bytes, is_gather
from jamp._recompute.residuals import Choice, Residuals
from jamp._recompute.segments import Chosen, Place, Segment, SplitConstruct, SplitJaxpr, key_of
from jamp._recompute.stores import Store


@dataclass(eq=False)
class Value:
    """A value that may be kept.

    Attributes:
      size: Its bytes in all steps of the loops around it.
      aval: Its type.
      context: The constructs around it.
      eqn: The equation that computes it. None for an argument or a constant, which is in memory anyway.
      slots: For each `cond` around it, outermost first: the cond, the type in which it returns the value, the branch.
        The branches share one array for each value that they keep, by its type. So of each type only the branch that
        keeps the most bytes counts. A scan inside the branch returns the values of all its steps in one array, whose
        shape begins with its length.
      store: How it is kept.
    """

    size: float
    aval: Any
    context: Context
    eqn: JaxprEqn | None = None
    slots: tuple[tuple[Place, Any, int], ...] = ()
    store: Store = Store.ITSELF


@dataclass(eq=False)
class Occurrence:
    """A segment at a place.

    Attributes:
      segment: The segment.
      residuals: Its residuals, found once for equal segments.
      values: Its inputs, and the values that may be kept, by their numbers.
      times: How often it runs.
      outputs: The numbers of the segment's values that later code reads. They exist whatever the segment keeps.
      choice: The choice for it.
    """

    segment: Segment
    residuals: Residuals
    values: dict[int, Value]
    times: int
    outputs: frozenset[int]
    choice: Choice


class Known(NamedTuple):
    """Results that are found once for equal segments, and for equal equations that are in no segment."""

    residuals: dict[Any, Residuals]
    of_others: dict[Any, ClosedJaxpr]


class MemoryPlan:
    """A choice for each segment of a function, and the bytes that its backward pass then keeps.

    Attributes:
      body: The function.
      occurrences: Its segments, by their places.
      others: The constructs and equations that are in no segment, and how often each runs.
      gathers: The keys of the all_gathers of arguments among them.
      total: The bytes, without the end.
      end: The bytes of the last product and what follows, which the backward pass reads at once. To compute them again
        would free nothing at the peak.
    """

    def __init__(self, body: SplitJaxpr, known: Known):
        self.body, self.total, self.end = body, 0.0, 0.0
        self.occurrences: dict[Place, Occurrence] = {}
        self.others: list[tuple[JaxprEqn, int]] = []
        self.gathers = set[Any]()
        self.readers: Counter[Value] = Counter()
        self._known = known
        self._coded: dict[Value, Value] = {}
        self._slots: dict[Any, dict[int, float]] = {}
        self._contexts: dict[Place, Context] = {(): Context()}  # of the bodies
        jaxpr = body.closed.jaxpr
        arguments = {v: _given(v) for v in (*jaxpr.constvars, *jaxpr.invars)}
        self._add_body(body, arguments, (), {})

    def _add_body(self, body: SplitJaxpr, values: dict[Any, Value], place: Place, fixed: dict[Any, Place]) -> None:
        """Add the jaxpr at a place. `values` are the values of its inputs, and of the outputs that have one already.

        JAX keeps a value that is the same in each step of a scan once, outside. `fixed` are such inputs, and the places
        where they are computed.
        """
        others: list[CodedRule | JaxprEqn] = []
        for i, part in enumerate(body.parts):
            if not isinstance(part, (Segment, SplitConstruct)):
                others.append(part)
                continue
            self._add_others(others, body, values, place, fixed)
            others = []
            if isinstance(part, Segment):
                self._add_segment(part, values, (*place, i), fixed)
            else:
                self._add_construct(part, values, (*place, i), fixed)
        self._add_others(others, body, values, place, fixed)

    def _add_segment(self, segment: Segment, values: dict[Any, Value], place: Place, fixed: dict[Any, Place]) -> None:
        body = place[:-1]
        key = segment.key(sources=False)
        if key not in self._known.residuals:
            self._known.residuals[key] = Residuals(segment)
        residuals = self._known.residuals[key]
        known = {-1 - i: values[v] for i, v in enumerate(segment.inputs)}
        stored = lambda i, value: self._in_8_bits(value) if i in residuals.coded else value
        places = {-1 - i: fixed[v] for i, v in enumerate(segment.inputs) if v in fixed}

        at = lambda i: self._where(residuals.sources(i), places, body)
        every = [*segment.computed, *residuals.derived]
        computed_at = lambda i: self._computed(*every[i], at(i))
        computed = frozenset(segment.numbers[v] for v in segment.outputs)
        for v in segment.outputs:
            number = segment.numbers[v]
            known[number] = values[v] = values.get(v) or computed_at(number)
        for i in residuals.kept_without_budget - computed:
            known[i] = computed_at(i)
        known = {i: stored(i, value) for i, value in known.items()}
        choice = residuals.choice(residuals.kept_without_budget, frozenset())
        occurrence = Occurrence(segment, residuals, known, self._contexts[body].times, computed, choice)
        self.occurrences[place] = occurrence
        self._read(occurrence, 1)

    def _add_construct(
        self, construct: SplitConstruct, values: dict[Any, Value], place: Place, fixed: dict[Any, Place]
    ) -> None:
        outside = place[:-1]
        eqn, name, carry = construct.eqn, ir.name(construct.eqn), constructs.carry(construct.eqn)
        self.others.append((eqn, self._contexts[outside].times))
        for j, (body, places) in enumerate(zip(construct.bodies, constructs.operands_of_bodies(eqn), strict=True)):
            jaxpr = body.closed.jaxpr
            here = *place, j
            self._contexts[here] = self._contexts[outside].inside(eqn)
            inner = {v: _given(v) for v in jaxpr.constvars}
            if name == "cond":  # It returns the values that it keeps, in some versions of JAX also its operands.
                for v, i in zip(jaxpr.invars, places, strict=True):
                    is_copied = ir.is_literal(eqn.invars[i]) or constructs.cond_copies_operands()
                    inner[v] = self._computed(v, eqn, here) if is_copied else values[eqn.invars[i]]
                self._add_body(body, inner, here, {})
                continue
            for v, i in zip(jaxpr.invars, places, strict=True):
                atom = eqn.invars[i]
                if ir.is_literal(atom) or (name == "shard_map" and values[atom].eqn is None):
                    inner[v] = _given(v)
                elif i in carry or name == "shard_map":  # one for each step; the bytes of one device
                    inner[v] = self._computed(v, eqn, here)
                else:
                    inner[v] = values[atom]
            # The stacked results of a scan are the values of all steps.
            for v, outer in list(zip(jaxpr.outvars, eqn.outvars, strict=True))[len(carry) :]:
                if not ir.is_literal(v) and v not in inner:
                    inner[v] = values.setdefault(outer, self._computed(v, eqn, here))
                elif not carry and not ir.is_literal(v):
                    values.setdefault(outer, inner[v])
            # The constants of a scan are fixed in it. So are operands of another construct that are fixed outside.
            atoms: list[Any] = [eqn.invars[i] for i in places]
            is_fixed = lambda i, v: i < carry.start if name == "scan" else v in fixed
            given = {
                v: fixed.get(atom, outside)
                for v, i, atom in zip(jaxpr.invars, places, atoms, strict=True)
                if not ir.is_literal(atom) and is_fixed(i, atom)
            }
            self._add_body(body, inner, here, given)
        for outer in eqn.outvars:
            values.setdefault(outer, self._computed(outer, eqn, outside))

    def _add_others(
        self,
        parts: list[CodedRule | JaxprEqn],
        body: SplitJaxpr,
        values: dict[Any, Value],
        place: Place,
        fixed: dict[Any, Place],
    ) -> None:
        """Add equations that are in no segment. The residuals that JAX has for them are kept."""
        eqns = [part.eqn if isinstance(part, CodedRule) else part for part in parts]
        coded = {v for part in parts if isinstance(part, CodedRule) for v in part.coded}
        context = self._contexts[place]
        self.others.extend((eqn, context.times) for eqn in eqns)
        made = {v for eqn in eqns for v in eqn.outvars}
        defined = {v: eqn for eqn in eqns for v in eqn.outvars if not ir.is_ref(v)}
        reads: list[Any] = [v for eqn in eqns for v in eqn.invars]
        is_given = lambda v: ir.is_literal(v) or body.origins[v].argument
        self.gathers.update(key_of(eqn) for eqn in eqns if is_gather(eqn) and all(map(is_given, eqn.invars)))
        inputs = list(dict.fromkeys(v for v in reads if not ir.is_literal(v) and v not in made))
        perturbed = tuple(body.origins[v].perturbed and is_inexact(v.aval) for v in inputs)
        alive = tuple(v in body.alive for v in defined)
        for v, eqn in defined.items():
            values.setdefault(v, self._computed(v, eqn, place))
        if not any(perturbed):
            return
        key = equality.fingerprint(inputs, [*defined], eqns, sources=False), perturbed, alive
        if key not in self._known.of_others:
            closed = build.closed_jaxpr({}, inputs, [*defined], eqns)
            self._known.of_others[key] = with_residuals(closed, perturbed, alive, context.shard_map)
        found = self._known.of_others[key]
        results = found.jaxpr.outvars[: len(defined)]
        pairs = zip([*results, *found.jaxpr.invars], [*defined, *inputs], strict=True)
        known = {v: of for v, of in pairs if not ir.is_literal(v)}
        producers = {v: eqn for eqn in found.jaxpr.eqns for v in eqn.outvars}
        places = {v: fixed[known[v]] for v in found.jaxpr.invars if known[v] in fixed}
        sources = dataflow.sources(found)
        for v in dict.fromkeys(v for v in found.jaxpr.outvars[len(defined) :] if not ir.is_literal(v)):
            if v in known or v in producers:  # A constant of the rule of a primitive is there anyway.
                at = self._where(sources.get(v), places, place)
                is_made = v in producers and (v not in known or at != place)
                value = self._computed(v, producers[v], at) if is_made else values[known[v]]
                self._count(self._in_8_bits(value) if known.get(v) in coded else value, 1)

    def _where(self, sources: frozenset[Any] | None, places: dict[Any, Place], here: Place) -> Place:
        """The place of a value: here, or outside of the loops in which all its sources are fixed.

        A random mask in a scan has no sources if its key is a constant. JAX computes it once, outside.
        """
        if sources is None or not sources <= places.keys():
            return here
        if sources:
            return max((places[i] for i in sources), key=len)
        while here and ir.name(self._contexts[here].around[-1]) == "scan":
            here = here[:-2]  # the body around the loop
        return here

    def _computed(self, v: Any, eqn: JaxprEqn, place: Place) -> Value:
        """The value that an equation computes in the body at a place."""
        context = self._contexts[place]
        slots: list[tuple[Place, Any, int]] = []
        for d, cond in enumerate(context.around):
            if ir.name(cond) == "cond":
                lengths = [constructs.iterations(e) for e in context.around[d + 1 :] if ir.name(e) == "scan"]
                slots.append((place[: 2 * d + 1], ((*lengths, *v.aval.shape), v.aval.dtype), place[2 * d + 1]))
        return Value(device_bytes(v) * context.times, v.aval, context, eqn, tuple(slots))

    def _in_8_bits(self, value: Value) -> Value:
        """What is kept of a value in 8 bits. What is in memory anyway is read as it is."""
        if value.eqn is None:
            return value
        if value not in self._coded:
            share = Store.INT8.nbytes(value.aval) / Store.ITSELF.nbytes(value.aval)
            slots = tuple((cond, (Store.INT8, kind), branch) for cond, kind, branch in value.slots)
            coded = Value(value.size * share, value.aval, value.context, value.eqn, slots, Store.INT8)
            self._coded[value] = coded
        return self._coded[value]

    def _count(self, value: Value, step: int) -> None:
        before = self.readers[value]
        self.readers[value] += step
        if value.eqn is None or (before > 0) == (before + step > 0):
            return
        change = value.size if step > 0 else -value.size
        for cond, kind, branch in reversed(value.slots):
            sums = self._slots.setdefault((cond, kind), {})
            most = max(sums.values(), default=0.0)
            sums[branch] = sums.get(branch, 0.0) + change
            change = max(sums.values()) - most
        self.total += change

    def _read(self, occurrence: Occurrence, step: int) -> None:
        for i in occurrence.residuals.needs(occurrence.choice.kept)[0]:
            if occurrence.segment.is_end and i >= 0:
                self.end += step * occurrence.residuals.sizes[i]
            else:
                self._count(occurrence.values[i], step)

    def _set(self, occurrence: Occurrence, choice: Choice) -> None:
        self._read(occurrence, -1)
        occurrence.choice = choice
        self._read(occurrence, 1)

    @property
    def _checkpoints(self) -> dict[Place, Occurrence]:
        return {at: x for at, x in self.occurrences.items() if x.residuals.is_checkpoint(x.choice.kept)}

    @property
    def is_coded(self) -> bool:
        """Whether it keeps a value in 8 bits."""
        return bool(self._coded)

    @property
    def flops(self) -> float:
        """The FLOPs that are computed again."""
        return sum(x.times * x.choice.flops for x in self.occurrences.values())

    @property
    def largest(self) -> float:
        """The most bytes that one segment computes again and holds at once."""
        return max((x.residuals.read_at_once - x.choice.size for x in self._checkpoints.values()), default=0.0)

    @property
    def chosen(self) -> Chosen:
        """The choice for each segment, but for small ones in which nothing is dropped."""
        return {place: x.residuals.stores(x.choice.kept) for place, x in self._checkpoints.items()}

    def drop(self, target: float) -> None:
        """Drop values, the best price first, until no more than `target` bytes are kept."""
        choices: dict[Place, list[Choice]] = {}
        for place, x in self.occurrences.items():
            if x.segment.is_end:
                continue
            # Values that others read are in memory anyway, and may be kept here too.
            own = x.residuals.needs(x.choice.kept)[0]
            free = frozenset(i for i in x.outputs if self.readers[x.values[i]] > (i in own))
            choices[place] = x.residuals.choices(free)
            self._set(x, choices[place][0])
        moves = [
            (_price(of_one[before], of_one[after]), place, after)
            for place, of_one in choices.items()
            for before, after in itertools.pairwise(_hull(of_one))
        ]
        at = dict.fromkeys(choices, 0)
        for _, place, after in sorted(moves):
            if self.total <= target:
                break
            self._set(self.occurrences[place], choices[place][after])
            at[place] = after
        # The last ones may have freed more than was needed, or nothing, where inputs are kept in their place.
        for place in reversed(choices):
            while at[place]:
                before = self.total
                self._set(self.occurrences[place], choices[place][at[place] - 1])
                if self.total > max(target, before):
                    self._set(self.occurrences[place], choices[place][at[place]])
                    break
                at[place] -= 1


def _hull(choices: list[Choice]) -> list[int]:
    """The numbers of those choices after which the price of a byte rises: of the lower convex hull."""
    found: list[int] = []
    for i, choice in enumerate(choices):
        while len(found) > 1 and _price(choices[found[-2]], choices[found[-1]]) >= _price(choices[found[-1]], choice):
            found.pop()
        found.append(i)
    return found


def _price(x: Choice, y: Choice) -> float:
    """FLOPs for each byte that is freed from one choice to another."""
    freed, more = x.size - y.size, y.flops - x.flops
    return more / freed if freed > 0 or more == math.inf else UNKNOWN + more


def _given(v: Any) -> Value:
    return Value(device_bytes(v), v.aval, Context())
