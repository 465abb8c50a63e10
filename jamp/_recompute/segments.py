"""Segments: straight-line code between constructs such as loops.

`Split` cuts a jaxpr, and the bodies of its constructs, into segments of about a layer each. `kept.py` says which values
of a segment the backward pass keeps, `budget.py` which of these it drops, and `checkpoint.py` makes it so. For three
layers and x of f32[256, 64]:

    def layer(x, w):                             values
        q = x @ w                                0
        s = q @ q.T                              1 (q.T), 2
        e = exp(s)                               3
        p = e / sum(e, -1, keepdims=True)        4 (the sums, f32[256]), 5 (as a column), 6
        return tanh(p @ q), None                 7, 8

    def loss(ws, head, x):
        x, _ = scan(layer, x, ws)
        return sum(sin(x @ head))                0, 1, 2

The body of the scan is a segment, and so are the last product and what follows, the *end*. The values of a segment are
numbered as it computes them. Its place is the number of a part of the function, of a body in that, of a part in that:

    segment     place          kept          at a budget of 0.5     of 0
    a layer     (0, 0, 0)      0, 2, 4, 7    0, 4, 7                none
    the end     (1,)           0, 2          0, 2                   0, 2

Products are kept, and the sums, each of which reads 256 numbers. Value 8 is the x of the next layer: a scan keeps the
inputs of every step. The budget drops the scores (2) first. It drops nothing in the end, which the backward pass reads
at once.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.interpreters import ad

from jamp._cast import is_complex, is_floating, is_inexact
from jamp._jaxprs import build, constructs, dataflow, equality, inline, ir, walk
from jamp._jaxprs.cache import Cache
from jamp._jaxprs.context import Context
from jamp._jaxprs.dataflow import Flags
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn, Var
from jamp._jaxprs.manual_axes import is_partial
from jamp._jaxprs.primitives import CHEAP, EXPENSIVE, MOVING, PRODUCTS
from jamp._jaxprs.rewrite import Body, Replaced, Rewriter
from jamp._jaxprs.source import in_scope
from jamp._jaxprs.walk import holds_product, is_product
from jamp._products.product import equation, name_of, of
from jamp._products.quantized import has_narrow_sums
from jamp._recompute.derivative_rules import Rule, forward_rule
from jamp._recompute.kept import (
    Origin,
    coded_values,
    decisions,
    is_cheap,
    nbytes,
    origins,
    precise,
    values_to_keep,
    wide,
)
from jamp._recompute.stored import is_split, with_rounding
from jamp._recompute.stores import Store

SEGMENT = "jamp.segment"  # the name scope of a call that `checkpoint.py` made
CODED_RULE = "jamp.coded_rule"  # the name scope of a derivative rule that keeps values in 8 bits
KEPT = "jamp.kept"  # the name of the values that a segment keeps
_LARGE = 1024  # elements: a segment without an array of this size is not worth computing again
PRODUCTS_OF_A_SEGMENT = 6  # more or less: a layer
_MOST = 1.5  # a segment has at most so many times that number, and at least half as many
_SMALL = 0.1  # of the bytes that cross a cut: the most that may be kept in the end of a function, and is never dropped
_LEAST_CUT = 4  # Code that computes fewer times the bytes that cross a cut is not cut.


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """Straight-line code.

    Attributes:
      eqns, inputs, outputs: The equations, the values that they read, and their results that later code reads.
      origins: The origins of the inputs.
      alive: Which outputs have tangents that reach a result of the function.
      context: The constructs around it.
      is_worth_it: Whether it becomes a checkpoint at any budget. Computing something in it again frees memory.
      convolves: Whether more than half of its products are convolutions.
      is_end: Whether it is the last product of a function and what follows.
      coding: What it needs to know to keep values in 8 bits. None if it keeps none.
    """

    eqns: tuple[JaxprEqn, ...]
    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]
    origins: tuple[Origin, ...]
    alive: tuple[bool, ...]
    context: Context
    is_worth_it: bool
    convolves: bool
    is_end: bool
    coding: "Coding | None" = None

    @property
    def perturbed(self) -> list[bool]:
        """Which inputs may have tangents."""
        return [x.perturbed and is_inexact(v.aval) for x, v in zip(self.origins, self.inputs, strict=True)]

    def key(self, sources: bool) -> Any:
        """A key that is equal for equal segments. With `sources`, they also come from the same lines."""
        code = equality.fingerprint(self.inputs, self.outputs, self.eqns, sources)
        return code, self.origins, self.alive, *_read(self.context), self.is_worth_it, self.coding


class Coding(NamedTuple):
    """What the code around a segment says of values in 8 bits.

    Attributes:
      coded: Which inputs are kept in 8 bits.
      wide: Which inputs may have elements that differ by orders of magnitude.
      precise: Which outputs stay as they are, because a small error in them may be a large one of what reads them.
    """

    coded: tuple[bool, ...]
    wide: tuple[bool, ...]
    precise: tuple[bool, ...]


class Around(NamedTuple):
    """What the code around a jaxpr says of its inputs that are `wide`, and of its outputs that are `precise`.

    A wide input stays as it is. So does one of which the jaxpr reads a statistic, too.
    """

    wide: Sequence[bool]
    precise: Sequence[bool]


class SplitConstruct(NamedTuple):
    """A construct that is entered, with its bodies in parts."""

    eqn: JaxprEqn
    bodies: list["SplitJaxpr"]


class CodedRule(NamedTuple):
    """A function with a derivative rule that keeps some operands and results in 8 bits, by their numbers."""

    eqn: JaxprEqn
    rule: Rule
    operands: tuple[int, ...]
    results: tuple[int, ...]
    context: Context

    @property
    def coded(self) -> list[Any]:
        """The values that it keeps in 8 bits."""
        return [*(self.eqn.invars[i] for i in self.operands), *(self.eqn.outvars[j] for j in self.results)]


Part: TypeAlias = Segment | SplitConstruct | CodedRule | JaxprEqn


class SplitJaxpr(NamedTuple):
    """A jaxpr in parts: segments, constructs, and equations that are in neither.

    Attributes:
      closed: The jaxpr.
      parts: Its parts.
      origins: The origins of its values.
      alive: Its values whose tangents reach a result of the function.
      context: The constructs around it.
    """

    closed: ClosedJaxpr
    parts: list[Part]
    origins: dict[Var, Origin]
    alive: Set[Var]
    context: Context


class FlatSegment(NamedTuple):
    """A segment in which jit calls are inlined.

    Attributes:
      eqns, inputs, outputs: As of the segment.
      kept: The values in it that are kept.
      reaching: Which inputs have tangents that reach an output that is alive.
      coded: The values in it that are kept in 8 bits, if they are kept.
      decided: The values in it that are always kept, because they might be others if they were computed again.
    """

    eqns: list[JaxprEqn]
    inputs: Sequence[Var]
    outputs: list[Any]
    kept: set[Var]
    reaching: Flags
    coded: Set[Var] = frozenset()
    decided: Set[Var] = frozenset()


def key_of(eqn: JaxprEqn) -> Any:
    """A key that is equal for equal constructs. Calls of a custom rule have their own functions, so none are equal."""
    inputs: list[Any] = [v for v in eqn.invars if not ir.is_literal(v)]
    return equality.fingerprint(inputs, eqn.outvars, [eqn], sources=False)


def flatten_segment(segment: Segment) -> FlatSegment:
    """Inline the jit calls of a segment. It is computed and differentiated so. The variables of its inputs stay."""
    closed = build.closed_jaxpr({}, segment.inputs, segment.outputs, segment.eqns)
    eqns, outputs = inline.flattened(closed)
    of_values = origins().over(eqns, dict(zip(segment.inputs, segment.origins, strict=True)))
    reaching = dataflow.flags(segment.inputs, _alive(scales=False)(closed, segment.alive))
    coded, chosen = set[Var](), set[Var]()
    if coding := segment.coding:
        given = {v for v, x in zip(outputs, coding.precise, strict=True) if x and not ir.is_literal(v)}
        of_inputs = dict(zip(segment.inputs, coding.wide, strict=True))
        coded = coded_values(of_values, wide().over(eqns, of_inputs), precise().over(eqns, given))
        coded = (coded - {*segment.inputs}).union(itertools.compress(segment.inputs, coding.coded))
        chosen = decisions(eqns, outputs, of_values)
    kept = values_to_keep(eqns, segment.inputs, of_values, coded) | chosen
    return FlatSegment(eqns, segment.inputs, outputs, kept, reaching, coded, chosen)


def with_names(flat: FlatSegment, names: Mapping[Var, str], stored: Set[Var] = frozenset()) -> ClosedJaxpr:
    """The code of a segment, in which some values have a name (`checkpoint_name`).

    Those that are `stored` are rounded to their dtypes for their readers in it, too.
    """
    eqns: list[JaxprEqn] = []
    for eqn in with_rounding(flat.eqns, stored):
        if (product := of(eqn)) and has_narrow_sums(product) and (v := eqn.outvars[0]) in names:
            eqns.append(equation(dataclasses.replace(product, kept_as=names[v]), eqn.invars, v, eqn))
            continue
        results = [core.Var(v.aval) if v in names else v for v in eqn.outvars]
        eqns.append(eqn.replace(outvars=results))
        for value, v in zip(results, eqn.outvars, strict=True):
            if v in names:
                name = ir.with_name_for(_name_equation(names[v], ir.is_next_checkpoint()), v.aval).replace(
                    invars=[value], outvars=[v]
                )
                eqns.append(build.located(name, eqn))
    return build.closed_jaxpr({}, flat.inputs, flat.outputs, eqns)


def computed_twice(flat: FlatSegment) -> set[Var]:
    """Return the values of a segment that both passes must round alike: its results, and results of products and casts.

    A kept value, such as the maximum of a softmax, must fit the values that are computed again from them.
    """
    is_rounding = lambda eqn: name_of(eqn) in PRODUCTS or ir.name(eqn) == "convert_element_type"
    found: set[Var] = {v for v in flat.outputs if not ir.is_literal(v)}
    return found.union(v for eqn in flat.eqns if is_rounding(eqn) for v in eqn.outvars)


@functools.cache
def _name_equation(name: str, is_next: bool) -> JaxprEqn:
    """The equation of a `checkpoint_name`, which is another one under JAX's next checkpoint."""
    del is_next
    eqn = jax.make_jaxpr(lambda x: checkpoint_name(x, name))(0.0).eqns[0]
    if eqn.primitive.name == "name":  # JAX has no such rule, and jax.linear_transpose would fail.
        ad.primitive_transposes.setdefault(eqn.primitive, lambda cotangent, x, **_: [cotangent])
    return eqn


class Split:
    """Cuts jaxprs into segments.

    A function without a product is cut by bytes. At a budget of 1.0 it is left to JAX.

    Args:
      products: How many products a segment has, more or less.
      whole: The keys of the constructs that are part of a segment, and so computed again as a whole.
      cut_convolutions: Whether code with convolutions is cut. It pays if products are computed again.
      residuals: How large activations are kept.
    """

    def __init__(
        self,
        products: int = PRODUCTS_OF_A_SEGMENT,
        whole: frozenset[Any] = frozenset(),
        cut_convolutions: bool = False,
        residuals: Store = Store.ITSELF,
    ):
        # JAX's next checkpoint gives the scales of 8-bit values cotangents of zeros.
        self._origins, self._alive = origins(), _alive(scales=not ir.is_next_checkpoint())
        self._precise, self._wide, self._residuals = precise(), wide(), residuals
        self._cache: Cache[SplitJaxpr] = Cache()
        self._products, self._whole, self._cut_convolutions = products, whole, cut_convolutions
        self._has_products = True

    def function(self, closed: ClosedJaxpr) -> SplitJaxpr:
        """A function in parts. Its last product and what follows are a segment of their own."""
        self._has_products = any(map(holds_product, closed.jaxpr.eqns))
        arguments = [Origin(argument=True, perturbed=is_inexact(aval)) for aval in closed.in_avals]
        alive = [True] * len(closed.out_avals)
        return self._body(closed, arguments, alive, _said_nothing(closed), Context(), is_function=True)

    def _body(
        self,
        closed: ClosedJaxpr,
        inputs: Sequence[Origin],
        outputs: Sequence[bool],
        around: Around,
        context: Context,
        is_function: bool = False,
    ) -> SplitJaxpr:
        """A jaxpr in parts. The tangents of some `outputs` reach a result of the function."""
        key = tuple(inputs), tuple(outputs), *map(tuple, around), *_read(context)
        return self._cache(closed, key, lambda: self._parts(closed, inputs, outputs, around, context, is_function))

    def _parts(
        self,
        traced: ClosedJaxpr,
        inputs: Sequence[Origin],
        outputs: Sequence[bool],
        around: Around,
        context: Context,
        is_function: bool,
    ) -> SplitJaxpr:
        closed = _without_large_calls(traced)
        jaxpr = closed.jaxpr
        alive, origins = self._alive(closed, outputs), self._origins(closed, inputs)
        wide, precise, coded = dict[Var, bool](), set[Var](), set[Var]()
        if self._residuals is not Store.ITSELF:
            wide, precise = self._wide(closed, around.wide), self._precise(closed, around.precise)
            coded = coded_values(origins, wide, precise)
        parts: list[Part] = []
        straight: list[JaxprEqn] = []
        last_uses = ir.last_uses(jaxpr.eqns, jaxpr.outvars)
        end = _end(jaxpr.eqns, last_uses, origins) if is_function else len(jaxpr.eqns)

        def close(stop: int) -> None:
            if not straight:
                return
            whole = range(stop - len(straight), stop)
            is_one = context.in_loop or (_convolves(straight) and not self._cut_convolutions)
            first, last = range(whole.start, min(end, stop)), range(max(end, whole.start), stop)
            cut = _cut if self._has_products else _cut_by_bytes
            pieces = [first] if is_one else cut(jaxpr.eqns, first, last_uses, self._products)
            for piece in filter(None, [*pieces, last]):
                members = tuple(jaxpr.eqns[i] for i in piece)
                results = tuple(v for eqn in members for v in eqn.outvars if last_uses.get(v, -1) >= piece.stop)
                here = set[Var]() if piece is last and is_function and self._has_products else coded
                part = _segment(members, results, origins, alive, context, piece is last, self._has_products)
                parts.append(_with_codes(part, here, wide, precise, jaxpr.eqns) if coded else part)
            straight.clear()

        with_refs = _with_refs(jaxpr.eqns)
        for i, eqn in enumerate(jaxpr.eqns):
            if i not in with_refs and (_is_plain(eqn) or (self._whole and key_of(eqn) in self._whole)):
                straight.append(eqn)
                continue
            close(i)
            if i in with_refs:
                parts.append(eqn)
                continue
            bodies = constructs.bodies(eqn) if is_split(eqn) else None
            if bodies is None:
                is_coded = i < end and any(v in alive for v in eqn.outvars)
                parts.append((_rule(eqn, coded, context) if is_coded else None) or eqn)
                continue
            into = self._origins.into(eqn, origins)
            itself = _read_as_well(eqn.invars, coded, jaxpr.eqns) if coded else set[Var]()
            around_bodies = self._around(eqn, bodies, wide | dict.fromkeys(itself, True), precise)
            out_of = self._alive.into(eqn, alive)
            of_bodies = zip(bodies, into, out_of, around_bodies, strict=True)
            parts.append(SplitConstruct(eqn, [self._body(*x, context.inside(eqn)) for x in of_bodies]))
        close(len(jaxpr.eqns))
        return SplitJaxpr(closed, parts, origins, alive, context)

    def _around(
        self, eqn: JaxprEqn, bodies: Sequence[ClosedJaxpr], wide: dict[Var, bool], precise: set[Var]
    ) -> list[Around]:
        """What is said to each body of a construct."""
        if self._residuals is Store.ITSELF:
            return [_said_nothing(body) for body in bodies]
        return list(map(Around, self._wide.into(eqn, wide), self._precise.into(eqn, precise)))


def _read(context: Context) -> tuple[bool, JaxprEqn | None]:
    """What a segment reads of its context. Equal bodies are split once where it is equal."""
    return context.in_loop, context.shard_map


def _said_nothing(closed: ClosedJaxpr) -> Around:
    return Around([False] * len(closed.in_avals), [False] * len(closed.out_avals))


def _rule(eqn: JaxprEqn, coded: Set[Var], context: Context) -> CodedRule | None:
    """A derivative rule that keeps values in 8 bits. None if there are none."""
    if coded.isdisjoint(x for x in (*eqn.invars, *eqn.outvars) if not ir.is_literal(x)):
        return None
    rule = forward_rule(eqn, context.shard_map)
    if rule is None:
        return None
    of = lambda atoms, found: tuple(i for i in sorted(set(found)) if not ir.is_literal(atoms[i]) and atoms[i] in coded)
    operands, results = of(eqn.invars, rule.operands.values()), of(eqn.outvars, rule.results.values())
    if is_cheap(eqn):  # Its result may be a softmax, whose rows must sum to 1.
        results = ()
    return CodedRule(eqn, rule, operands, results, context) if operands or results else None


def _with_codes(
    segment: Segment, coded: Set[Var], wide: Mapping[Var, bool], precise: Set[Var], eqns: Sequence[JaxprEqn]
) -> Segment:
    """A segment that keeps values in 8 bits, if there are some."""
    if coded.isdisjoint((*segment.inputs, *(v for eqn in segment.eqns for v in eqn.outvars))):
        return segment
    inputs = set(coded - _read_as_well(segment.inputs, coded, eqns))
    coding = Coding(
        tuple(dataflow.flags(segment.inputs, inputs)),
        tuple(wide[v] for v in segment.inputs),
        tuple(dataflow.flags(segment.outputs, set(precise))),
    )
    return dataclasses.replace(segment, is_worth_it=True, coding=coding)


def _read_as_well(inputs: Sequence[Any], coded: Set[Var], eqns: Sequence[JaxprEqn]) -> set[Var]:
    """The inputs of which a segment, or a construct, also reads an exact statistic, such as a mean, from other code.

    Both must belong to the same values.
    """
    inputs = [v for v in inputs if not ir.is_literal(v)]
    producers = {v: eqn for eqn in eqns for v in eqn.outvars}
    found, seen = set[Var](), set[Var]()
    stack = [v for v in inputs if is_floating(v.aval) and v not in coded]
    while stack:
        v = stack.pop()
        if v in seen or v not in producers:
            continue
        seen.add(v)
        if not is_cheap(producers[v]):
            continue
        reads: list[Any] = [x for x in producers[v].invars if not ir.is_literal(x)]
        found.update(x for x in reads if x in coded and x in inputs)
        stack.extend(reads)
    return found


def _without_large_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A jaxpr in which jit calls are inlined that are too large for a segment, and the last one unless it is a product.

    A whole model may be in one call. It would be one segment, or the end.
    """
    while True:
        eqns, jaxpr = closed.jaxpr.eqns, closed.jaxpr
        held = {id(eqn): _runs(eqn) for eqn in eqns if constructs.inlinable(eqn)}
        last = next((eqn for eqn in reversed(eqns) if holds_product(eqn)), None)
        large = {i for i, n in held.items() if n > _MOST * PRODUCTS_OF_A_SEGMENT}
        large |= {id(last)} if last is not None and held.get(id(last), 0) > 1 else set()
        if not large:
            return closed
        enter = lambda eqn, large=large: constructs.inlinable(eqn) if id(eqn) in large else None
        new, outputs = inline.flattened(build.without_constants(closed), enter)
        constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        closed = build.closed_jaxpr(constants, jaxpr.invars, outputs, new)


def _with_refs(eqns: Sequence[JaxprEqn]) -> range:
    """The equations from the first one that makes a Ref to the last one that uses a Ref. They stay together."""
    makes = [i for i, eqn in enumerate(eqns) if any(map(ir.is_ref, eqn.outvars))]
    uses = [i for i, eqn in enumerate(eqns) if any(map(ir.is_ref, eqn.invars))]
    return range(makes[0], max([*makes, *uses]) + 1) if makes else range(0)


def _alive(scales: bool) -> dataflow.Backward:
    """The analysis of which values have tangents that reach a result.

    A product has none of the `scales` of its 8-bit operands. Where they count all the same, the segment that encodes
    them is not stopped: with JAX's default checkpoint, what is kept is then what a budget counts.
    """
    return dataflow.Backward(functools.partial(_passes_tangents, scales), constructs.has_own_rule)


def _passes_tangents(scales: bool, eqn: JaxprEqn, results: Flags) -> bool | Flags:
    """Which operands have tangents that reach a result of the function, if the tangents of some results do.

    Tangents that are written to a Ref reach the equations that read it.
    """
    if any(map(ir.is_ref, eqn.invars)):
        return True
    is_any = any(x and is_inexact(v.aval) for v, x in zip(eqn.outvars, results, strict=True))
    if (product := of(eqn)) and not scales:
        return [is_any and i < product.arity for i in range(len(eqn.invars))]
    return is_any and ir.name(eqn) != "stop_gradient"


def _segment(
    eqns: tuple[JaxprEqn, ...],
    outputs: tuple[Var, ...],
    origins: dict[Var, Origin],
    alive: Set[Var],
    context: Context,
    is_end: bool,
    has_products: bool,
) -> Segment:
    inputs = _reads(eqns)
    convolves = _convolves(eqns) and not context.in_loop
    is_worth_it = has_products and any(map(_is_worth_it, eqns))
    of_inputs, of_outputs = tuple(origins[v] for v in inputs), tuple(v in alive for v in outputs)
    return Segment(eqns, inputs, outputs, of_inputs, of_outputs, context, is_worth_it, convolves, is_end)


def _convolves(eqns: Sequence[JaxprEqn]) -> bool:
    names = [name for eqn in eqns if (name := name_of(eqn)) in PRODUCTS]
    return names.count("conv_general_dilated") > len(names) / 2


def _end(eqns: Sequence[JaxprEqn], last_uses: dict[Any, int], origins: Mapping[Var, Origin]) -> int:
    """Where the end of a function begins: at its last product, or before, where fewer bytes cross.

    The values that are kept in between are small, because no budget drops them: a random key, or the mean of a norm.
    """
    products = [i for i, eqn in enumerate(eqns) if holds_product(eqn)]
    if not products or not _is_plain(eqns[products[-1]]):
        return products[-1] + 1 if products else len(eqns)
    last, start = products[-1], products[-2] + 1 if len(products) > 1 else 0
    inputs = _reads(eqns[start:last])
    held = values_to_keep(eqns[start:last], inputs, origins, frozenset())
    crossing = _crossing(eqns, range(len(eqns)), last_uses)
    between = [sum(nbytes(v) for v in eqn.outvars if v in held) for eqn in eqns[start:last]]
    sizes = itertools.accumulate(reversed(between))  # kept from each equation on, the last one first
    start = last - sum(1 for _ in itertools.takewhile(lambda size: size <= _SMALL * crossing[last], sizes))
    return min(range(start, last + 1), key=crossing.__getitem__)


def _reads(eqns: Sequence[JaxprEqn]) -> tuple[Var, ...]:
    """The variables that some equations read and do not compute."""
    defined = {v for eqn in eqns for v in eqn.outvars}
    reads: list[Any] = [v for eqn in eqns for v in eqn.invars]
    return tuple(dict.fromkeys(v for v in reads if not ir.is_literal(v) and v not in defined))


def _crossing(eqns: Sequence[JaxprEqn], whole: range, last_uses: dict[Any, int]) -> list[float]:
    """For each equation, the bytes that cross a cut in front of it."""
    change = [0.0] * (whole.stop + 2)
    for i in whole:
        for v in eqns[i].outvars:
            change[i + 1] += nbytes(v)
            change[max(i, min(last_uses.get(v, -1), whole.stop)) + 1] -= nbytes(v)
    return list(itertools.accumulate(change))


def _cut(eqns: Sequence[JaxprEqn], whole: range, last_uses: dict[Any, int], products: int) -> list[range]:
    """Cut straight-line code into segments of some products each, where the fewest bytes cross the cut.

    A whole construct counts as the products that it runs, from one, for a kernel, to as many as a layer has.
    """
    layers = lambda eqn: min(max(1, _runs(eqn)), PRODUCTS_OF_A_SEGMENT) if _is_whole(eqn) else holds_product(eqn)
    counts = itertools.accumulate((layers(eqns[i]) for i in whole), initial=0)
    before = dict(zip([*whole, whole.stop], counts, strict=True))  # the number of products before each equation
    least, most = products / 2 * _MOST, _MOST * products
    if before[whole.stop] <= most:
        return [whole]
    crossing = _crossing(eqns, whole, last_uses)
    found, start = [], whole.start
    while before[whole.stop] - before[start] > most:
        ends = [j for j in range(start + 1, whole.stop) if least <= before[j] - before[start] <= most]
        if not ends:  # a single call holds more products
            break
        end = min(ends, key=crossing.__getitem__)
        found.append(range(start, end))
        start = end
    return [*found, range(start, whole.stop)]


def _cut_by_bytes(eqns: Sequence[JaxprEqn], whole: range, last_uses: dict[Any, int], products: int) -> list[range]:
    """Cut straight-line code without products, where the fewest bytes cross the cut.

    Of code that computes 40 times the bytes that cross a cut, six segments (the square root) keep and compute again
    about as many bytes as each other. With twice the `products`, segments are twice as long.
    """
    sizes = dict(zip(whole, (_computed_bytes(eqns[i]) for i in whole), strict=True))
    crossing = _crossing(eqns, whole, last_uses)
    inner = sorted(crossing[i] for i in whole[1:]) or [0.0]
    computed, typical = sum(sizes.values()), inner[len(inner) // 2]
    least = math.sqrt(computed * typical) * products / PRODUCTS_OF_A_SEGMENT
    if typical * _LEAST_CUT > computed:
        return [whole]
    found, start, size = [], whole.start, 0.0
    for i in whole:
        size += sizes[i]
        if size < least or i + 1 == whole.stop:
            continue
        near = range(max(start, i - (i - start) // 4), i + 1)  # a quarter shorter at most
        end = min(reversed(near), key=lambda j: crossing[j + 1]) + 1
        found.append(range(start, end))
        start, size = end, sum(sizes[j] for j in range(end, i + 1))
    return [*found, range(start, whole.stop)]


def _computed_bytes(eqn: JaxprEqn) -> float:
    """The bytes of the floating-point values that an equation, or a jit call, computes."""
    computing = (e for e in walk.through_calls(eqn, constructs.inlinable) if ir.name(e) not in MOVING)
    return sum((nbytes(v) for e in computing for v in e.outvars if is_inexact(v.aval)), 0.0)


def _is_plain(eqn: JaxprEqn) -> bool:
    """Whether an equation may be in a segment: not a construct, without effects, and not a `checkpoint_name`."""
    operations = list(walk.through_calls(eqn, _plain_body))
    # JAX keeps no partial sum between the passes unless the axes are explicit. Its checkpoint rounds the values that it
    # keeps, and cannot round complex ones.
    avals = ir.avals([v for e in (eqn, *operations) for v in (*e.invars, *e.outvars)])
    return not any(is_partial(x) or is_complex(x) for x in avals) and all(map(_is_plain_operation, operations))


def _plain_body(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The body of a call that may be in a segment."""
    # A derivative rule that multiplies would do so again in the backward pass.
    is_plain = ir.name(eqn) == "jit" or (ir.name(eqn) == "custom_jvp_call" and not holds_product(eqn))
    return constructs.body_of_call(eqn) if is_plain else None


def _is_plain_operation(eqn: JaxprEqn) -> bool:
    # A derivative rule that sorts would do so again in the backward pass.
    if eqn.effects or ir.name(eqn) in ("name", "sort", "jit", "custom_jvp_call"):
        return False
    if ir.name(eqn) == "custom_vjp_call":  # An identity, such as a clip of cotangents, has nothing to compute again.
        body = constructs.body_of_call(eqn)
        return body is not None and not body.jaxpr.eqns
    return name_of(eqn) in CHEAP | EXPENSIVE | PRODUCTS or not constructs.has_body(eqn)


def _is_whole(eqn: JaxprEqn) -> bool:
    """Whether an equation of a segment is a whole construct, which is computed again."""
    return constructs.has_body(eqn) and not constructs.inlinable(eqn) and not is_cheap(eqn)


def _runs(eqn: JaxprEqn) -> int:
    """How many products an equation runs."""
    return sum(times for e, times in walk.innermost(eqn, is_product) if is_product(e))


def _is_worth_it(eqn: JaxprEqn) -> bool:
    """Whether an equation computes a large array that may be computed again. A symbolic size is large."""

    def computes_much(e: JaxprEqn) -> bool:
        sizes = [aval.size for aval in ir.avals(e.outvars) if is_inexact(aval)]
        is_large = any(not isinstance(size, int) or size >= _LARGE for size in sizes)
        return is_large and ir.name(e) not in MOVING and is_cheap(e)

    return any(map(computes_much, walk.through_calls(eqn, constructs.inlinable)))


def opened(closed: ClosedJaxpr, keep_names: bool = True) -> ClosedJaxpr:
    """Return a function in which the segments that jamp made are straight-line code again, of which nothing is coded.

    Without `keep_names`, the user's `checkpoint_name`s go too, but for those in a `jax.checkpoint`.
    """

    def rule(eqn: JaxprEqn, _: Body) -> Replaced | None:
        name = ir.name(eqn)
        is_dropped = name == "name" and (not keep_names or ir.params(eqn)["name"] == KEPT)
        if is_dropped or name == "cotangents_behind_barrier":
            return Replaced([], eqn.invars)
        if name == "with_tangents_of":  # What has the tangents is computed as the function is.
            n = len(eqn.outvars)
            return Replaced([], eqn.invars[n : 2 * n])
        body = None
        if name == "jit" and in_scope(eqn, SEGMENT):
            body = _segment_body(eqn)
        if name == "custom_vjp_call" and in_scope(eqn, CODED_RULE):
            body = constructs.body_of_call(eqn)
        return Replaced(*inline.inlined(rewriter(body), eqn.invars)) if body else None

    every = list(walk.all_equations(closed.jaxpr))
    is_made = lambda eqn: in_scope(eqn, SEGMENT) or in_scope(eqn, CODED_RULE)
    if not any(is_made(eqn) or (not keep_names and ir.name(eqn) == "name") for eqn in every):
        return closed
    rewriter = Rewriter(rule, enters=is_split)
    found = rewriter(closed)
    if any(ir.name(eqn) == "with_tangents_of" for eqn in every):  # The codes are read by nothing now.
        found = build.without_dead_code(found)
    return found


def _segment_body(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The code of a segment that jamp made, in the calls around it."""
    body = constructs.body_of_call(eqn)
    while body and len(body.jaxpr.eqns) == 1 and ir.name(body.jaxpr.eqns[0]) in ("custom_jvp_call", "remat2"):
        (inner,) = body.jaxpr.eqns
        if list(inner.invars) != list(body.jaxpr.invars) or list(inner.outvars) != list(body.jaxpr.outvars):
            return None
        body = constructs.body_of_call(inner)
    return body
