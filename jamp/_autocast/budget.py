"""A memory budget: which of the values that `kept.py` keeps are computed again after all.

Of each segment, `Kind` finds what its derivative reads, and so which values are kept and how many FLOPs are computed
again for any choice. It proposes a few choices (`Point`), from all values kept to none. `Memory` adds up the bytes of a
whole function: a value that several segments read counts once, and one in a loop counts for every step. `choose` drops
values, the best price first, until the bytes are within the budget.

The choice depends on shapes only, so it is the same on every host. It takes every floating-point argument of the
function to be differentiated.
"""

import functools
import itertools
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from jamp import _evaluate, _fingerprint, _jaxpr
from jamp._autocast.facts import KEPT
from jamp._autocast.flops import flops
from jamp._autocast.kept import nbytes
from jamp._autocast.lower import lower
from jamp._autocast.product import name_of
from jamp._autocast.segments import PRODUCTS_OF_A_SEGMENT, Body, Code, Construct, Segment, Split, code, key_of
from jamp._cast import is_inexact
from jamp._jaxpr import ClosedJaxpr, JaxprEqn
from jamp._primitives import ARITHMETIC, COLLECTIVES, CUBIC, EXPENSIVE, MOVING, OTHERS, PRODUCTS
from jamp._shard_map import trace
from jamp._source_line import user_line

MemoryBudget: TypeAlias = float | str
Place: TypeAlias = tuple[int, ...]  # of a segment: the number of a part, of a body in it, of a part in that, and so on
Chosen: TypeAlias = dict[Place, frozenset[int]]  # the numbers of the values that a segment keeps, as it computes them

_UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_NEVER_AGAIN = COLLECTIVES | frozenset(
    ("after_all", "create_token", "get", "random_gamma", "rng_bit_generator", "rng_uniform", "swap")
)
_UNKNOWN = 1e18  # the FLOPs of a primitive that jamp does not know, which is therefore kept until last
_GROUPS = 9  # so many values of a segment, or groups of equal ones, are kept or dropped in all combinations
_RANDOM = 60.0  # FLOPs for 32 random bits: threefry has 20 rounds of three operations for two numbers


def check_budget(budget: MemoryBudget) -> None:
    """Raise if a budget is neither a share nor a number of bytes."""
    if isinstance(budget, str):
        in_bytes(budget)
    elif isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(f'memory_budget must be a number from 0 to 1, or bytes such as "12GiB", got {budget!r}.')
    elif not 0 <= budget <= 1:
        hint = f' For bytes, write "{budget:g}GiB" or "{budget:g}MB".' if budget > 1 else ""
        raise ValueError(
            f"memory_budget must be from 0 to 1, the share of what is kept without a budget, got {budget}.{hint}"
        )


def in_bytes(budget: str) -> float:
    """The bytes that a text such as "12GiB" says."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(\w+)\s*", budget)
    if not match or match[2] not in _UNITS:
        raise ValueError(f'memory_budget must be a number from 0 to 1, or bytes such as "12GiB", got {budget!r}.')
    return float(match[1]) * _UNITS[match[2]]


class Point(NamedTuple):
    """A choice for a segment: the numbers of the values that it keeps, their bytes, and the FLOPs computed again."""

    kept: frozenset[int]
    size: float
    flops: float


class Kind:
    """What the backward pass of a segment reads.

    The values of the segment are numbered in the order in which they are computed, and its inputs from -1 down.

    Attributes:
      code: The segment.
      computed: The values, and the equation of each.
      sizes: The bytes of each value.
      kept: The numbers of the values that are kept without a budget.
    """

    def __init__(self, segment: Segment):
        self.code = code(segment)
        self.computed = [(v, eqn) for eqn in self.code.eqns for v in eqn.outvars]
        values = [v for v, _ in self.computed]
        self._numbers = {v: -1 - i for i, v in enumerate(self.code.inputs)} | {v: i for i, v in enumerate(values)}
        self.sizes = [_size(v) for v in values]
        closed = _derivative(self.code, segment)
        self._producers = {v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}
        self._inputs = {v: -1 - i for i, v in enumerate(closed.jaxpr.invars)}
        self._constants = {*closed.jaxpr.constvars}
        named = [(eqn, number) for eqn in closed.jaxpr.eqns if (number := _number(eqn)) is not None]
        self._named: dict[Any, int] = {eqn.outvars[0]: number for eqn, number in named}
        # What is read to compute each value, up to other values, and the FLOPs.
        self._needs = {number: self._walk(eqn.invars) for eqn, number in named}
        self._read = self._walk(closed.jaxpr.outvars[len(self.code.outputs) :])
        self.kept = frozenset(self._numbers[v] for v in self.code.kept)
        self._points: dict[frozenset[int], list[Point]] = {}

    def numbers(self, variables: Iterable[Any]) -> list[int | None]:
        """The numbers of some variables of the code. A literal has none."""
        return [None if _jaxpr.is_literal(v) else self._numbers[v] for v in variables]

    def _walk(self, atoms: Iterable[Any]) -> tuple[frozenset[int], float]:
        """The values from which these are computed, and the FLOPs in between."""
        found, cost, seen = set[int](), 0.0, set[int]()
        stack = [v for v in atoms if not _jaxpr.is_literal(v)]
        while stack:
            v = stack.pop()
            if v in self._named or v in self._inputs:
                found.add(self._named[v] if v in self._named else self._inputs[v])
            elif v not in self._constants and id(self._producers[v]) not in seen:
                eqn = self._producers[v]
                seen.add(id(eqn))
                cost += _cost(eqn)
                stack.extend(x for x in eqn.invars if not _jaxpr.is_literal(x))
        return frozenset(found), cost

    def needs(self, kept: frozenset[int]) -> tuple[set[int], float]:
        """The values and inputs that are read in the backward pass if some are kept, and the FLOPs computed again."""
        (read, cost), found, seen = self._read, set[int](), set[int]()
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
                cost += more
                stack.extend(others)
        return found, cost

    def point(self, kept: frozenset[int], free: frozenset[int]) -> Point:
        """What a choice costs. The values in `free` are there anyway."""
        found, cost = self.needs(kept | free)
        return Point(kept | free, sum(self.sizes[i] for i in found if i >= 0 and i not in free), cost)

    def points(self, free: frozenset[int]) -> list[Point]:
        """The choices that may be best, from all values kept to none: each keeps less and computes more again.

        All combinations of some groups of values are tried.
        """
        if free not in self._points:
            groups = self._groups(self.kept - free)
            fixed = self.kept.difference(*groups)
            found = [
                self.point(fixed.union(*chosen), free)
                for n in range(len(groups) + 1)
                for chosen in itertools.combinations(groups, n)
            ]
            self._points[free] = _pareto(found)
        return self._points[free]

    def _groups(self, values: frozenset[int]) -> list[frozenset[int]]:
        """The values that may be dropped, each large one by itself. If those are many, equal ones are together."""
        may_be_dropped = sorted(i for i in values if self._needs[i][1] < math.inf)
        least = 0.01 * sum(self.sizes[i] for i in values)
        large = [i for i in may_be_dropped if self.sizes[i] >= least]
        members: dict[Any, set[int]] = {}
        for i in large:
            members.setdefault((self.sizes[i], self._needs[i][1]) if len(large) > _GROUPS else i, set()).add(i)
        groups = sorted(map(frozenset, members.values()), key=lambda x: -sum(self.sizes[i] for i in x))[:_GROUPS]
        rest = frozenset(may_be_dropped).difference(*groups)
        return [*groups, rest] if rest else groups


def _price(x: Point, y: Point) -> float:
    """FLOPs for each byte that is freed from one choice to another."""
    freed, more = x.size - y.size, y.flops - x.flops
    return more / freed if freed > 0 or more == math.inf else _UNKNOWN + more


def _pareto(points: list[Point]) -> list[Point]:
    """The points than which no other one keeps less and computes less."""
    found: list[Point] = []
    for point in sorted(points, key=lambda x: (x.flops, x.size)):
        if not found or point.size < found[-1].size:
            found.append(point)
    return found


def _hull(points: list[Point]) -> list[int]:
    """The numbers of those points after which the price of a byte rises: of the lower convex hull."""
    found: list[int] = []
    for i, point in enumerate(points):
        while len(found) > 1 and _price(points[found[-2]], points[found[-1]]) >= _price(points[found[-1]], point):
            found.pop()
        found.append(i)
    return found


def _derivative(code: Code, segment: Segment) -> ClosedJaxpr:
    """The results of a segment and what its backward pass reads, as a function of its inputs.

    The values that may be kept have a name.
    """
    eqns: list[JaxprEqn] = []
    may_be_kept = code.kept.union(v for v in code.outputs if not _jaxpr.is_literal(v))
    number = 0
    for eqn in code.eqns:
        results = [core.Var(v.aval) if v in may_be_kept else v for v in eqn.outvars]
        eqns.append(eqn.replace(outvars=results))
        for value, v in zip(results, eqn.outvars, strict=True):
            if value is not v:
                name = _jaxpr.with_name_for(_name_equation(number), v.aval)
                eqns.append(name.replace(invars=[value], outvars=[v]))
            number += 1
    closed = lower(_evaluate.closed_jaxpr({}, code.inputs, code.outputs, eqns))
    perturbed = [x.perturbed and is_inexact(v.aval) for x, v in zip(segment.origins, segment.inputs, strict=True)]
    return _with_residuals(closed, perturbed, segment.around.inside)


def _with_residuals(closed: ClosedJaxpr, perturbed: Sequence[bool], inside: JaxprEqn | None) -> ClosedJaxpr:
    """A function that also returns what its backward pass reads. It may be inside a shard_map."""
    places = [i for i, x in enumerate(perturbed) if x]
    n = len(closed.in_avals)

    def of_perturbed(args: Sequence[Any]) -> Callable[..., list[Any]]:
        return lambda *xs: _evaluate.call(closed, _evaluate.replaced(args, places, xs))

    def jvp(*args: Any) -> list[Any]:
        results, tangents = jax.jvp(of_perturbed(args[:n]), [args[i] for i in places], list(args[n:]))
        return [*results, *(x for x in tangents if x.dtype != jax.dtypes.float0)]

    def vjp(*args: Any) -> list[Any]:
        results, pull_back = jax.vjp(of_perturbed(args), *(args[i] for i in places))
        return [*results, *jax.tree.leaves(pull_back)]

    # JAX splits constructs, which takes far longer than to see what the tangents of straight-line code read.
    if any(_jaxpr.has_body(e) and _jaxpr.name(e) != "custom_jvp_call" for e in _evaluate.flattened(closed)[0]):
        return trace(inside, vjp, closed.in_avals)
    types = [*closed.in_avals, *(closed.in_avals[i] for i in places)]
    traced = trace(inside, jvp, types)
    eqns, outputs = _evaluate.flattened(traced)
    linear = {*traced.jaxpr.invars[n:]}
    reads: dict[Any, None] = {}
    primal: list[JaxprEqn] = []
    for eqn in eqns:
        operands: list[Any] = [v for v in eqn.invars if not _jaxpr.is_literal(v)]
        if linear.isdisjoint(operands):
            primal.append(eqn)
        elif _jaxpr.has_body(eqn):
            return trace(inside, vjp, closed.in_avals)
        else:
            linear.update(eqn.outvars)
            reads |= dict.fromkeys(v for v in operands if v not in linear)
    # `flattened` makes the constants literals.
    return _evaluate.closed_jaxpr({}, traced.jaxpr.invars[:n], [*outputs[: len(closed.out_avals)], *reads], primal)


@functools.cache
def _name_equation(number: int) -> JaxprEqn:
    return jax.make_jaxpr(lambda x: checkpoint_name(x, f"{KEPT} {number}"))(0.0).eqns[0]


def _number(eqn: JaxprEqn) -> int | None:
    prefix, _, number = str(_jaxpr.params(eqn)["name"]).partition(" ") if _jaxpr.name(eqn) == "name" else ("", "", "")
    return int(number) if prefix == KEPT and number else None


def _cost(eqn: JaxprEqn) -> float:
    """The FLOPs to compute an equation again, or infinity if it must not be."""
    name = name_of(eqn)
    if name.startswith(("random_", "threefry")) and name != "random_gamma":
        dtypes = [aval.dtype for aval in _jaxpr.avals(eqn.invars)]
        keys = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jax.dtypes.prng_key)]
        # The bits of other generators may depend on how a program is compiled.
        is_exact = all(str(key) == "key<fry>" for key in keys)
        return _RANDOM * sum(nbytes(v) / 4 for v in eqn.outvars) if is_exact else math.inf
    bodies = [e for inner, _ in _jaxpr.inner(eqn) for e in inner.eqns]
    if name in _NEVER_AGAIN or eqn.effects or any(_cost(e) == math.inf for e in bodies):
        return math.inf
    is_known = bodies or name in ARITHMETIC | CUBIC.keys() | EXPENSIVE | MOVING | OTHERS | PRODUCTS
    return flops(eqn) if is_known else _UNKNOWN


@dataclass(eq=False)
class Value:
    """A value that may be kept.

    Attributes:
      size: Its bytes in all steps of the loops around it.
      type: Its dtype and shape.
      around: The constructs around it.
      eqn: What computes it. Of an argument or a constant, which is there anyway, None.
      slot: In a branch of a `cond`: the cond, the type, and the branch. Branches share what is kept by type.
    """

    size: float
    type: str
    around: "Loops"
    eqn: JaxprEqn | None = None
    slot: tuple[Any, Any, int] | None = None


class Loops(NamedTuple):
    """The constructs around a jaxpr.

    Attributes:
      times: How often it runs.
      eqns: The constructs, outermost first.
      inside: The shard_map among them.
      branch: The place of the innermost cond, and the number of the branch.
    """

    times: int = 1
    eqns: tuple[JaxprEqn, ...] = ()
    inside: JaxprEqn | None = None
    branch: tuple[Place, int] | None = None


@dataclass(eq=False)
class Occurrence:
    """A segment at a place.

    Attributes:
      segment: The segment.
      kind: What its backward pass reads.
      values: Its values and inputs, by their numbers.
      times: How often it runs.
      outputs: The numbers of those of its values that are read after it.
      point: The choice for it.
    """

    segment: Segment
    kind: Kind
    values: dict[int, Value]
    times: int
    outputs: frozenset[int]
    point: Point


class Memory:
    """What the backward pass of a function keeps.

    Attributes:
      body: The function.
      occurrences: Its segments, by their places.
      others: What is in no segment: constructs and equations, and how often each runs.
      total: The bytes, but for those of the end.
      end: The bytes of the last product and what follows, which the backward pass reads at once. To compute them again
        would free nothing at the peak.
    """

    def __init__(self, body: Body, kinds: dict[Any, Any]):
        self.body, self.total, self.end = body, 0.0, 0.0
        self.occurrences: dict[Place, Occurrence] = {}
        self.others: list[tuple[JaxprEqn, int]] = []
        self.readers: Counter[Value] = Counter()
        self._kinds = kinds
        self._slots: dict[Any, dict[int, float]] = {}
        jaxpr = body.closed.jaxpr
        arguments = {v: _given(v) for v in (*jaxpr.constvars, *jaxpr.invars)}
        self._add_body(body, arguments, (), Loops())

    def _add_body(self, body: Body, values: dict[Any, Value], place: Place, around: Loops) -> None:
        """Add a jaxpr. `values` are those of its inputs, and those of its outputs that have one already."""
        plain: list[JaxprEqn] = []
        for i, part in enumerate(body.parts):
            if not isinstance(part, (Segment, Construct)):
                plain.append(part)
                continue
            self._add_plain(plain, body, values, around)
            plain = []
            if isinstance(part, Segment):
                self._add_segment(part, values, (*place, i), around)
            else:
                self._add_construct(part, values, (*place, i), around)
        self._add_plain(plain, body, values, around)

    def _add_segment(self, segment: Segment, values: dict[Any, Value], place: Place, around: Loops) -> None:
        key = segment.key(sources=False)
        if key not in self._kinds:
            self._kinds[key] = Kind(segment)
        kind: Kind = self._kinds[key]
        known = {-1 - i: values[v] for i, v in enumerate(segment.inputs)}
        outputs = dict(zip(kind.numbers(kind.code.outputs), segment.outputs, strict=True))
        for i, (v, eqn) in enumerate(kind.computed):
            known[i] = values.get(outputs.get(i)) or _computed(v, eqn, around)
        values.update((v, _given(v) if i is None else known[i]) for i, v in outputs.items())
        computed = frozenset(i for i in outputs if i is not None and i >= 0)
        point = kind.point(kind.kept, frozenset())
        self.occurrences[place] = Occurrence(segment, kind, known, around.times, computed, point)
        self._read(self.occurrences[place], 1)

    def _add_construct(self, construct: Construct, values: dict[Any, Value], place: Place, around: Loops) -> None:
        eqn, name, carry = construct.eqn, _jaxpr.name(construct.eqn), _jaxpr.carry(construct.eqn)
        self.others.append((eqn, around.times))
        inside = eqn if name == "shard_map" else around.inside
        for j, (body, places) in enumerate(zip(construct.bodies, _jaxpr.body_operands(eqn), strict=True)):
            jaxpr = body.closed.jaxpr
            here = Loops(around.times * _jaxpr.iterations(eqn), (*around.eqns, eqn), inside, around.branch)
            inner = {v: _given(v) for v in jaxpr.constvars}
            if name == "cond":  # It returns what it keeps, also of its operands.
                here = here._replace(branch=(place, j))
                inner |= {v: _computed(v, eqn, here) for v in jaxpr.invars}
                self._add_body(body, inner, (*place, j), here)
                continue
            for v, i in zip(jaxpr.invars, places, strict=True):
                atom = eqn.invars[i]
                if i in carry:
                    inner[v] = _computed(v, eqn, here)  # one for each step
                else:
                    inner[v] = _given(v) if _jaxpr.is_literal(atom) else values[atom]
                if name == "shard_map":
                    inner[v].size = _size(v) * here.times  # of one device
            # What a scan stacks are the values of all steps.
            for v, outer in list(zip(jaxpr.outvars, eqn.outvars, strict=True))[len(carry) :]:
                if not _jaxpr.is_literal(v) and v not in inner:
                    inner[v] = values.setdefault(outer, _computed(v, eqn, here))
                elif not carry and not _jaxpr.is_literal(v):
                    values.setdefault(outer, inner[v])
            self._add_body(body, inner, (*place, j), here)
        for outer in eqn.outvars:
            values.setdefault(outer, _computed(outer, eqn, around))

    def _add_plain(self, eqns: list[JaxprEqn], body: Body, values: dict[Any, Value], around: Loops) -> None:
        """Add equations that are in no segment. What JAX keeps for them is kept."""
        self.others.extend((eqn, around.times) for eqn in eqns)
        defined = {v: eqn for eqn in eqns for v in eqn.outvars}
        reads: list[Any] = [v for eqn in eqns for v in eqn.invars]
        inputs = list(dict.fromkeys(v for v in reads if not _jaxpr.is_literal(v) and v not in defined))
        perturbed = tuple(body.origins[v].perturbed and is_inexact(v.aval) for v in inputs)
        for v, eqn in defined.items():
            values.setdefault(v, _computed(v, eqn, around))
        if not any(perturbed):
            return
        key = _fingerprint.fingerprint(inputs, [*defined], eqns, sources=False), perturbed
        if key not in self._kinds:
            closed = lower(_evaluate.closed_jaxpr({}, inputs, [*defined], eqns))
            self._kinds[key] = _with_residuals(closed, perturbed, around.inside)
        found: ClosedJaxpr = self._kinds[key]
        results = found.jaxpr.outvars[: len(defined)]
        known = dict(zip([*results, *found.jaxpr.invars], [*defined, *inputs], strict=True))
        producers = {v: eqn for eqn in found.jaxpr.eqns for v in eqn.outvars}
        for v in dict.fromkeys(v for v in found.jaxpr.outvars[len(defined) :] if not _jaxpr.is_literal(v)):
            if v in known or v in producers:  # A constant of the rule of a primitive is there anyway.
                self._count(values[known[v]] if v in known else _computed(v, producers[v], around), 1)

    def _count(self, value: Value, step: int) -> None:
        before = self.readers[value]
        self.readers[value] += step
        if value.eqn is None or (before > 0) == (before + step > 0):
            return
        change = value.size if step > 0 else -value.size
        if value.slot is None:
            self.total += change
            return
        cond, dtype, branch = value.slot
        sums = self._slots.setdefault((cond, dtype), {})
        self.total -= max(sums.values(), default=0.0)
        sums[branch] = sums.get(branch, 0.0) + change
        self.total += max(sums.values())

    def _read(self, occurrence: Occurrence, step: int) -> None:
        for i in occurrence.kind.needs(occurrence.point.kept)[0]:
            if occurrence.segment.is_end and i >= 0:
                self.end += step * occurrence.kind.sizes[i]
            else:
                self._count(occurrence.values[i], step)

    def _set(self, occurrence: Occurrence, point: Point) -> None:
        self._read(occurrence, -1)
        occurrence.point = point
        self._read(occurrence, 1)

    @property
    def flops(self) -> float:
        """The FLOPs that are computed again."""
        return sum(x.times * x.point.flops for x in self.occurrences.values())

    @property
    def largest(self) -> float:
        """The most bytes that one segment computes again at once."""
        return max(
            (x.kind.point(x.kind.kept, frozenset()).size - x.point.size for x in self.occurrences.values()), default=0.0
        )

    @property
    def chosen(self) -> Chosen:
        """The choice for each segment."""
        return {place: x.point.kept for place, x in self.occurrences.items()}

    def drop(self, target: float) -> None:
        """Drop values, the best price first, until no more than `target` bytes are kept."""
        points: dict[Place, list[Point]] = {}
        for place, x in self.occurrences.items():
            if x.segment.is_end:
                continue
            # What others read is there anyway, and may be kept here too.
            own = x.kind.needs(x.point.kept)[0]
            free = frozenset(i for i in x.outputs if self.readers[x.values[i]] > (i in own))
            points[place] = x.kind.points(free)
            self._set(x, points[place][0])
        moves = [
            (_price(of_one[before], of_one[after]), place, after)
            for place, of_one in points.items()
            for before, after in itertools.pairwise(_hull(of_one))
        ]
        at = dict.fromkeys(points, 0)
        for _, place, after in sorted(moves):
            if self.total <= target:
                break
            self._set(self.occurrences[place], points[place][after])
            at[place] = after
        # The last ones may have freed more than was needed.
        for place in reversed(points):
            while at[place] and self.total <= target:
                self._set(self.occurrences[place], points[place][at[place] - 1])
                if self.total > target:
                    self._set(self.occurrences[place], points[place][at[place]])
                    break
                at[place] -= 1


def _given(v: Any) -> Value:
    return Value(_size(v), "", Loops())


def _computed(v: Any, eqn: JaxprEqn, around: Loops) -> Value:
    slot = around.branch and (around.branch[0], (v.aval.shape, v.aval.dtype), around.branch[1])
    kind = f"{v.aval.dtype}[{','.join(map(str, v.aval.shape))}]"
    return Value(_size(v) * around.times, kind, around, eqn, slot)


def _size(v: Any) -> float:
    """The bytes of a value on one device, as far as its type says."""
    if not isinstance(v.aval, jax.core.ShapedArray):  # a token
        return 0.0
    sharding = v.aval.sharding
    if sharding.mesh.empty or not all(isinstance(n, int) for n in v.aval.shape):
        return nbytes(v)
    local = math.prod(sharding.shard_shape(v.aval.shape))
    return nbytes(v) * local / max(1, math.prod(v.aval.shape))


def choose(closed: ClosedJaxpr, budget: MemoryBudget) -> Memory:
    """The choice for a function, and the split of it for which it computes least again.

    Whole constructs are computed again if that pays. Segments are merged, if the budget is not reached, as long as what
    is kept and what the largest segment computes again at once become less.
    """
    kinds: dict[Any, Any] = {}

    def memory(whole: frozenset[Any] = frozenset(), products: int = PRODUCTS_OF_A_SEGMENT) -> Memory:
        return Memory(Split(products, whole, cut_convolutions=budget != 1.0).function(closed), kinds)

    best = memory()
    total = best.total
    target = in_bytes(budget) if isinstance(budget, str) else budget * total
    if total <= target:
        return best
    constructs = _repeatable(best)
    best.drop(target)
    largest = max(target, best.largest)

    def rank(x: Memory) -> tuple[bool, float]:
        is_enough = x.total <= target and x.largest <= largest
        return not is_enough, x.flops if is_enough else x.total + x.largest

    whole = frozenset[Any]()
    for construct in constructs:
        other = memory(whole | {construct})
        other.drop(target)
        if rank(other) < rank(best):
            best, whole = other, whole | {construct}
    products = PRODUCTS_OF_A_SEGMENT
    while best.total > target:
        products *= 2
        other = memory(whole, products)
        other.drop(target)
        if other.total + other.largest >= best.total + best.largest:
            break
        best = other
    if best.total > target and budget != 0:
        _warn(best, target, total)
    return best


def _repeatable(memory: Memory) -> list[Any]:
    """The keys of the constructs that may be computed again as a whole, those with the fewest FLOPs first.

    A construct that is entered must be one of many: to compute the only one again would free nothing at the peak.
    """
    runs: Counter[Any] = Counter()
    costs: dict[Any, float] = {}
    for eqn, times in memory.others:
        name = _jaxpr.name(eqn)
        if name in ("custom_vjp_call", "custom_jvp_call", "scan", "cond") and (cost := _cost(eqn)) < math.inf:
            key = key_of(eqn)
            runs[key] += times
            costs[key] = cost
            if name.startswith("custom"):
                runs[key] += 1
    return sorted((key for key in costs if runs[key] > 1), key=lambda key: costs[key])[:4]


def _warn(memory: Memory, target: float, total: float) -> None:
    held = sorted((x for x in memory.readers if memory.readers[x] > 0 and x.eqn), key=lambda x: -x.size)[:3]
    lines = [
        f"{_jaxpr.name(x.eqn)} at {user_line(x.eqn) or 'an unknown line'} ({x.size / 1e6:.1f} MB)"
        for x in held
        if x.eqn
    ]
    warnings.warn(
        f"The memory budget is {target / 1e6:.1f} MB, and the backward pass keeps at least {memory.total / 1e6:.1f} of "
        f"{total / 1e6:.1f} MB. The largest values: {', '.join(lines)}. A smaller batch or fewer steps of a scan keep "
        "less.",
        stacklevel=2,
    )
