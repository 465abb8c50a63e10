"""A memory budget: which of the values that `kept.py` keeps are computed again after all.

`MemoryPlan` adds up the bytes of a whole function. A value that several segments read counts once, and one in a loop
counts for every step. `choose` drops values, the best price first, until the bytes are within the budget.

The choice depends on shapes only, so it is the same on every host. It takes every floating-point argument of the
function to be differentiated.
"""

import itertools
import math
import re
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from jax.sharding import AxisType

from jamp._cast import is_inexact
from jamp._jaxprs import build, constructs, dataflow, equality, ir, walk
from jamp._jaxprs.context import Context
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn
from jamp._jaxprs.primitives import operation
from jamp._jaxprs.source import is_transposed, user_line, users_stacklevel
from jamp._numbers import as_number
from jamp._recompute.cut import PRODUCTS_OF_A_SEGMENT
from jamp._recompute.opened import opened
from jamp._recompute.residuals import UNKNOWN, Choice, Residuals, cost, device_bytes, is_gather, with_residuals
from jamp._recompute.segments import Chosen, CodedRule, Place, Segment, Split, SplitConstruct, SplitJaxpr, key_of
from jamp._recompute.stores import Store

MemoryBudget: TypeAlias = float | str

_UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def check_budget(budget: MemoryBudget) -> None:
    """Raise if a budget is neither a share nor a number of bytes."""
    budget = as_number(budget)
    if isinstance(budget, str):
        in_bytes(budget)
    elif isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(f'memory_budget must be a number from 0 to 1, or bytes such as "12GiB", got {budget!r}.')
    elif not 0 <= budget <= 1:
        hint = f' For bytes, write "{budget:g}GiB" or "{budget:g}MB".' if budget > 1 else ""
        raise ValueError(f"memory_budget must be a share from 0 to 1, got {budget}.{hint}")


def in_bytes(budget: str) -> float:
    """The bytes that a text such as "12GiB" says."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(\w+)\s*", budget)
    if not match or match[2] not in _UNITS:
        raise ValueError(
            f'memory_budget must be a number from 0 to 1, or bytes such as "12GiB", got {budget!r}. Units: '
            f"{', '.join(_UNITS)}."
        )
    return float(match[1]) * _UNITS[match[2]]


def bytes_of(budget: MemoryBudget, total: float) -> float:
    """The bytes of a budget, of which a share is of the `total`."""
    return in_bytes(budget) if isinstance(budget, str) else float(budget) * total


def megabytes(size: float) -> str:
    """A number of bytes in MB, as a text."""
    return f"{size / 1e6:,.1f}" if size >= 1e5 else f"{size / 1e6:.2g}"


@dataclass(eq=False)
class Value:
    """A value that may be kept.

    Attributes:
      size: Its bytes in all steps of the loops around it.
      aval: Its type.
      context: The constructs around it.
      eqn: The equation that computes it. None for an argument or a constant, which is in memory anyway.
      slots: For each `cond` around it, outermost first: the cond, the type in which it returns the value, the branch.
        JAX returns what the branches keep in the same arrays, so of each type the branch that keeps the most counts. A
        scan inside the branch returns the values of all its steps in one array, whose shape begins with its length.
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
    plain: dict[Any, ClosedJaxpr]


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
        plain: list[CodedRule | JaxprEqn] = []
        for i, part in enumerate(body.parts):
            if not isinstance(part, (Segment, SplitConstruct)):
                plain.append(part)
                continue
            self._add_plain(plain, body, values, place, fixed)
            plain = []
            if isinstance(part, Segment):
                self._add_segment(part, values, (*place, i), fixed)
            else:
                self._add_construct(part, values, (*place, i), fixed)
        self._add_plain(plain, body, values, place, fixed)

    def _add_segment(self, segment: Segment, values: dict[Any, Value], place: Place, fixed: dict[Any, Place]) -> None:
        body = place[:-1]
        key = segment.key(sources=False)
        if key not in self._known.residuals:
            self._known.residuals[key] = Residuals(segment)
        residuals = self._known.residuals[key]
        known = {-1 - i: values[v] for i, v in enumerate(segment.inputs)}
        stored = lambda i, value: self._in_8_bits(value) if i in residuals.coded else value
        places = {-1 - i: fixed[v] for i, v in enumerate(segment.inputs) if v in fixed}

        at = lambda i: _innermost(residuals.sources(i), places, body)
        computed_at = lambda i: self._computed(*residuals.computed[i], at(i))
        computed = frozenset(segment.numbers[v] for v in segment.outputs)
        for v in segment.outputs:
            number = segment.numbers[v]
            known[number] = values[v] = values.get(v) or computed_at(number)
        for i in residuals.kept - computed:
            known[i] = computed_at(i)
        known = {i: stored(i, value) for i, value in known.items()}
        choice = residuals.choice(residuals.kept, frozenset())
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

    def _add_plain(
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
        if key not in self._known.plain:
            closed = build.closed_jaxpr({}, inputs, [*defined], eqns)
            self._known.plain[key] = with_residuals(closed, perturbed, alive, context.shard_map)
        found = self._known.plain[key]
        results = found.jaxpr.outvars[: len(defined)]
        known = dict(zip([*results, *found.jaxpr.invars], [*defined, *inputs], strict=True))
        producers = {v: eqn for eqn in found.jaxpr.eqns for v in eqn.outvars}
        places = {v: fixed[known[v]] for v in found.jaxpr.invars if known[v] in fixed}
        sources = dataflow.sources(found) if places else {}
        for v in dict.fromkeys(v for v in found.jaxpr.outvars[len(defined) :] if not ir.is_literal(v)):
            if v in known or v in producers:  # A constant of the rule of a primitive is there anyway.
                at = _innermost(sources.get(v, frozenset()), places, place)
                is_made = v in producers and (v not in known or at != place)
                value = self._computed(v, producers[v], at) if is_made else values[known[v]]
                self._count(self._in_8_bits(value) if known.get(v) in coded else value, 1)

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
        return max(
            (x.residuals.live - x.choice.size for x in self.occurrences.values() if _is_checkpoint(x)), default=0.0
        )

    @property
    def chosen(self) -> Chosen:
        """The choice for each segment, but for small ones in which nothing is dropped."""
        return {place: x.residuals.stores(x.choice.kept) for place, x in self.occurrences.items() if _is_checkpoint(x)}

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


def _is_checkpoint(x: Occurrence) -> bool:
    return x.segment.is_worth_it or not x.choice.kept >= x.residuals.kept


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


def _innermost(sources: frozenset[Any], places: dict[Any, Place], here: Place) -> Place:
    """Where a value is computed: the innermost place of its sources, if all are fixed in the loops `here`."""
    is_fixed = sources and sources <= places.keys()
    return max((places[i] for i in sources), key=len) if is_fixed else here


def _given(v: Any) -> Value:
    return Value(device_bytes(v), v.aval, Context())


def choose(closed: ClosedJaxpr, budget: MemoryBudget, residuals: Store = Store.ITSELF) -> MemoryPlan:
    """The plan for a function, with the split of it for which the backward pass computes least again.

    A budget is a share of what is kept without one, as it is. `residuals` is how large activations are kept, if that
    takes fewer bytes: codes of what other code reads as it is come on top.
    """
    known = Known({}, {})
    without = MemoryPlan(Split().function(closed), known)
    if budget == 1.0:
        if residuals is Store.ITSELF:
            return without
        coded = MemoryPlan(Split(residuals=residuals).function(closed), known)
        return coded if coded.total < without.total else without
    target = bytes_of(budget, without.total)
    found = _within(closed, target, residuals, known)
    if residuals is not Store.ITSELF and found.total > target:
        found = min(found, _within(closed, target, Store.ITSELF, known), key=lambda x: x.total)
    if found.total > target and budget != 0:
        _warn(found, target, without.total)
    return found


def _within(closed: ClosedJaxpr, target: float, residuals: Store, known: Known) -> MemoryPlan:
    """The plan that keeps no more than the `target` bytes, or else the fewest.

    Gathers and whole constructs are computed again if that pays. Segments are merged, if the target is not reached, as
    long as the sum of the kept bytes and the bytes that the largest segment computes again at once becomes smaller.
    """

    def plan(
        whole: frozenset[Any] = frozenset(), products: int = PRODUCTS_OF_A_SEGMENT, cut: bool = True
    ) -> MemoryPlan:
        return MemoryPlan(Split(products, whole, cut, residuals).function(closed), known)

    best = plan(cut=False)
    if best.total <= target:
        return best
    # Models that name most values, for checkpoints that are not there, would keep them all.
    named, closed = closed, opened(closed, keep_names=False)
    if closed is not named or any(x.segment.convolves for x in best.occurrences.values()):
        best = plan()
    again = _repeatable(best)
    best.drop(target)
    largest = max(target, best.largest)

    def rank(x: MemoryPlan) -> tuple[bool, bool, float, float]:
        if x.total > target:
            return True, True, x.total, x.largest
        return False, x.largest > largest, x.flops, x.total

    whole = frozenset[Any]()
    for keys in again:
        other = plan(whole | keys)
        other.drop(target)
        if rank(other) < rank(best):
            best, whole = other, whole | keys
    products = PRODUCTS_OF_A_SEGMENT
    while best.total > target:
        products *= 2
        other = plan(whole, products)
        other.drop(target)
        if other.total + other.largest >= best.total + best.largest:
            break
        best = other
    return best


def _repeatable(plan: MemoryPlan) -> list[frozenset[Any]]:
    """The keys of equations that may be computed again as a whole, in sets that `choose` tries one after the other.

    First all gathers, then the constructs with the fewest FLOPs, then calls with custom rules: one, one, two, four and
    so on. A construct is tried only if it runs more than once: to compute the only one again frees nothing at the peak.
    """
    runs: Counter[Any] = Counter()
    costs: dict[Any, float] = {}
    calls: dict[Any, float] = {}
    for eqn, times in plan.others:
        name = ir.name(eqn)
        if name in ("custom_vjp_call", "custom_jvp_call", "scan", "cond") and (again := cost(eqn)) < math.inf:
            key = key_of(eqn)
            runs[key] += times
            (calls if name.startswith("custom") else costs)[key] = again
    found = [frozenset(plan.gathers)] if plan.gathers else []
    found += [frozenset([key]) for key in sorted(costs, key=costs.__getitem__)[:4] if runs[key] > 1]
    cheapest = sorted(calls, key=calls.__getitem__)
    while cheapest:
        some = max(1, len(calls) - len(cheapest))  # as many as before them
        found.append(frozenset(cheapest[:some]))
        cheapest = cheapest[some:]
    return found


def warnings_of_budget(closed: ClosedJaxpr, budget: MemoryBudget, way: str) -> list[str]:
    """Warnings that a budget does not bound what a function keeps, `way` being how to give one to a loss."""
    messages = []
    if any(map(is_transposed, walk.all_equations(closed.jaxpr))):
        messages.append(f"This function takes a gradient itself. Transform the loss inside: jax.grad(jamp.{way}).")
    meshes = [aval.sharding.mesh for aval in closed.in_avals if hasattr(aval, "sharding")]
    is_auto = any(
        kind is AxisType.Auto and size > 1
        for mesh in meshes
        for kind, size in zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    )
    if isinstance(budget, str) and is_auto:
        messages.append(
            f"memory_budget={budget!r} counts the bytes of all devices, because mesh axes of the arguments are Auto. "
            "Give a share from 0 to 1, and find it with jamp.debug.memory_curve."
        )
    return messages


def _warn(plan: MemoryPlan, target: float, total: float) -> None:
    equations = list(walk.all_equations(plan.body.closed.jaxpr))
    if any(map(is_transposed, equations)):
        return  # `warnings_of_budget` names the cause.
    held = sorted((x for x in plan.readers if plan.readers[x] > 0 and x.eqn), key=lambda x: -x.size)[:3]
    lines = [
        f"{operation(x.eqn)} at {user_line(x.eqn) or 'an unknown line'} ({megabytes(x.size)} MB)" for x in held if x.eqn
    ]
    advice = "A smaller batch or fewer steps of a scan keep less."
    if any(ir.name(eqn) == "remat2" for eqn in equations):
        advice = "Your own jax.checkpoint or nn.remat keeps its inputs at any budget."
    warnings.warn(
        f"The memory budget is {megabytes(target)} MB, and the backward pass keeps at least {megabytes(plan.total)} "
        f"of {megabytes(total)} MB. The largest values: {', '.join(lines)}. {advice}",
        stacklevel=users_stacklevel(),
    )
