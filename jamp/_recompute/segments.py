"""Segments: straight-line code between constructs such as loops.

`Split` cuts a jaxpr, and the bodies of its constructs, into segments of about a layer each. `kept.py` says which values
of a segment the backward pass keeps, `plan.py` which of these a budget drops, and `checkpoint.py` makes it so. For
three layers and x of f32[256, 64]:

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
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jamp._cast import is_inexact
from jamp._jaxprs import constructs, dataflow, equality, ir
from jamp._jaxprs.cache import Cache
from jamp._jaxprs.context import Context
from jamp._jaxprs.dataflow import Flags
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn, Var
from jamp._jaxprs.walk import holds_product
from jamp._products.product import of
from jamp._recompute.codable import Around, Codable, SensitivityAnalyses, nothing_around, precise, wide_range
from jamp._recompute.cut import (
    PRODUCTS_OF_A_SEGMENT,
    convolves,
    cut,
    cut_by_bytes,
    end,
    frees_memory,
    may_be_in_segment,
    reads,
    with_refs,
)
from jamp._recompute.derivative_rules import CodedRule, with_codes
from jamp._recompute.kept import Origin, discrete_values, origins, values_to_keep
from jamp._recompute.stores import Store, Stores

# Of a segment: the number of a part, of a body in it, of a part in that, and so on. Without the last one, of a body.
Place: TypeAlias = tuple[int, ...]
Chosen: TypeAlias = dict[Place, Stores]  # what each segment keeps that becomes a checkpoint


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """Straight-line code.

    Attributes:
      eqns, inputs, outputs: The equations, the values that they read, and their results that later code reads.
      origins: The origins of its inputs and values, among others.
      alive: Which outputs have tangents that reach a result of the function.
      coded: Its values and inputs that are kept in 8 bits, if they are kept.
      context: The constructs around it.
      is_worth_it: Whether it becomes a checkpoint at any budget. Computing something in it again frees memory.
      convolves: Whether more than half of its products are convolutions.
      is_end: Whether it is the last product of a function and what follows.
    """

    eqns: tuple[JaxprEqn, ...]
    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]
    origins: Mapping[Var, Origin]
    alive: tuple[bool, ...]
    coded: frozenset[Var]
    context: Context
    is_worth_it: bool
    convolves: bool
    is_end: bool

    @functools.cached_property
    def computed(self) -> list[tuple[Var, JaxprEqn]]:
        """The values that it computes, by their numbers, and their equations."""
        return [(v, eqn) for eqn in self.eqns for v in eqn.outvars]

    @functools.cached_property
    def values(self) -> list[Var]:
        """The values that it computes, by their numbers."""
        return [v for v, _ in self.computed]

    @functools.cached_property
    def numbers(self) -> dict[Var, int]:
        """The numbers of its values, from 0, and of its inputs, from -1 down."""
        return {v: -1 - i for i, v in enumerate(self.inputs)} | {v: i for i, v in enumerate(self.values)}

    @property
    def perturbed(self) -> list[bool]:
        """Which inputs may have tangents."""
        return [self.origins[v].perturbed and is_inexact(v.aval) for v in self.inputs]

    @functools.cached_property
    def reaching(self) -> Flags:
        """Which inputs have tangents that reach an output that is alive."""
        outputs = {v for v, x in zip(self.outputs, self.alive, strict=True) if x}
        return dataflow.flags(self.inputs, _alive(scales=False).over(self.eqns, outputs))

    @functools.cached_property
    def discrete(self) -> set[Var]:
        """The values that are always kept, because they might be others if they were computed from decoded ones."""
        return discrete_values(self.eqns, self.outputs, self.origins) if self.coded else set()

    @functools.cached_property
    def kept(self) -> set[Var]:
        """The values that are kept without a budget, if it becomes a checkpoint."""
        return values_to_keep(self.eqns, self.inputs, self.origins, self.coded) | self.discrete

    def key(self, sources: bool) -> Any:
        """A key that is equal for equal segments. With `sources`, they also come from the same lines."""
        code = equality.fingerprint(self.inputs, self.outputs, self.eqns, sources)
        of_inputs, coded = tuple(self.origins[v] for v in self.inputs), frozenset(self.numbers[v] for v in self.coded)
        return code, of_inputs, self.alive, coded, *_read(self.context), self.is_worth_it


class SplitConstruct(NamedTuple):
    """A construct that is entered, with its bodies in parts."""

    eqn: JaxprEqn
    bodies: list["SplitJaxpr"]


Part: TypeAlias = Segment | SplitConstruct | CodedRule | JaxprEqn


class SplitJaxpr(NamedTuple):
    """A jaxpr in parts: segments, constructs, and equations that are in neither.

    Attributes:
      closed: The jaxpr.
      parts: Its parts.
      origins: The origins of its values.
      alive: Its values whose tangents reach a result of the function.
      codable: Its values that may be kept in 8 bits. None without `residuals`.
      context: The constructs around it.
    """

    closed: ClosedJaxpr
    parts: list[Part]
    origins: dict[Var, Origin]
    alive: set[Var]
    codable: Codable | None
    context: Context

    def kept(self, place: Place = ()) -> Chosen:
        """What the segments keep without a budget, those in constructs too."""
        found: Chosen = {}
        for i, part in enumerate(self.parts):
            if isinstance(part, Segment) and part.is_worth_it:
                values = frozenset((part.numbers[v], Store.ITSELF) for v in part.kept)
                found[*place, i] = Stores(values, frozenset())
            elif isinstance(part, SplitConstruct):
                for j, body in enumerate(part.bodies):
                    found |= body.kept((*place, i, j))
        return found


def key_of(eqn: JaxprEqn) -> Any:
    """A key that is equal for equal constructs. Calls of a custom rule have their own functions, so none are equal."""
    inputs: list[Any] = [v for v in eqn.invars if not ir.is_literal(v)]
    return equality.fingerprint(inputs, eqn.outvars, [eqn], sources=False)


class Split:
    """Cuts jaxprs, in which jit calls are inlined, into segments.

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
        self._of_codes = SensitivityAnalyses(wide_range(), precise()) if residuals is Store.INT8 else None
        self._cache: Cache[SplitJaxpr] = Cache()
        self._products, self._whole, self._cut_convolutions = products, whole, cut_convolutions
        self._has_products = True

    def function(self, closed: ClosedJaxpr) -> SplitJaxpr:
        """A function in parts. Its last product and what follows are a segment of their own."""
        self._has_products = any(map(holds_product, closed.jaxpr.eqns))
        arguments = [Origin(argument=True, perturbed=is_inexact(aval)) for aval in closed.in_avals]
        outputs = [True] * len(closed.out_avals)
        return self._body(closed, arguments, outputs, nothing_around(closed), Context(), is_function=True)

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
        key = tuple(inputs), tuple(outputs), around, *_read(context)
        return self._cache(closed, key, lambda: self._parts(closed, inputs, outputs, around, context, is_function))

    def _parts(
        self,
        closed: ClosedJaxpr,
        inputs: Sequence[Origin],
        outputs: Sequence[bool],
        around: Around,
        context: Context,
        is_function: bool,
    ) -> SplitJaxpr:
        eqns, of_values = closed.jaxpr.eqns, self._origins(closed, inputs)
        codable = Codable(closed, of_values, around, self._of_codes) if self._of_codes else None
        body = SplitJaxpr(closed, [], of_values, self._alive(closed, outputs), codable, context)
        last_uses = ir.last_uses(eqns, closed.jaxpr.outvars)
        last = end(eqns, last_uses, of_values) if is_function else len(eqns)
        of_refs = with_refs(eqns)

        def is_straight(i: int) -> bool:
            return i not in of_refs and (
                may_be_in_segment(eqns[i]) or bool(self._whole and key_of(eqns[i]) in self._whole)
            )

        for straight, group in itertools.groupby(range(len(eqns)), is_straight):
            members = list(group)
            if not straight:
                body.parts.extend(eqns[i] if i in of_refs else self._part(eqns[i], body, i < last) for i in members)
                continue
            for piece in self._cut(eqns, range(members[0], members[-1] + 1), last, last_uses, context.in_loop):
                body.parts.append(self._segment(body, piece, last_uses, is_function and piece.start >= last))
        return body

    def _cut(
        self, eqns: Sequence[JaxprEqn], whole: range, last: int, last_uses: dict[Any, int], in_loop: bool
    ) -> list[range]:
        """Straight-line code in pieces. The end of the function, from `last` on, is one."""
        before, after = range(whole.start, min(last, whole.stop)), range(max(last, whole.start), whole.stop)
        is_one = in_loop or (convolves(eqns[whole.start : whole.stop]) and not self._cut_convolutions)
        in_pieces = cut if self._has_products else cut_by_bytes
        pieces = [before] if is_one else in_pieces(eqns, before, last_uses, self._products)
        return [piece for piece in (*pieces, after) if piece]

    def _segment(self, body: SplitJaxpr, piece: range, last_uses: dict[Any, int], is_end: bool) -> Segment:
        eqns = tuple(body.closed.jaxpr.eqns[piece.start : piece.stop])
        inputs, values = reads(eqns), [v for eqn in eqns for v in eqn.outvars]
        outputs = tuple(v for v in values if last_uses.get(v, -1) >= piece.stop)
        # The backward pass reads the end at once, when it begins.
        in_8_bits = body.codable is not None and not (is_end and self._has_products)
        coded = body.codable.of_segment(values, inputs) if body.codable and in_8_bits else frozenset[Var]()
        return Segment(
            eqns,
            inputs,
            outputs,
            body.origins,
            alive=tuple(v in body.alive for v in outputs),
            coded=coded,
            context=body.context,
            is_worth_it=bool(coded) or (self._has_products and any(map(frees_memory, eqns))),
            convolves=convolves(eqns) and not body.context.in_loop,
            is_end=is_end,
        )

    def _part(self, eqn: JaxprEqn, body: SplitJaxpr, is_coded: bool) -> Part:
        """An equation that is not straight-line code. `is_coded` says whether values of it may be kept in 8 bits."""
        bodies = constructs.bodies(eqn) if constructs.differentiates_bodies(eqn) else None
        if bodies is None:
            if body.codable and is_coded and any(v in body.alive for v in eqn.outvars):
                return with_codes(eqn, body.codable.values, body.context) or eqn
            return eqn
        origins, alive = self._origins.into(eqn, body.origins), self._alive.into(eqn, body.alive)
        around = body.codable.into(eqn) if body.codable else list(map(nothing_around, bodies))
        context = body.context.inside(eqn)
        of_bodies = zip(bodies, origins, alive, around, strict=True)
        return SplitConstruct(eqn, [self._body(*x, context) for x in of_bodies])


def _read(context: Context) -> tuple[bool, JaxprEqn | None]:
    """What a segment reads of its context. Equal bodies are split once where it is equal."""
    return context.in_loop, context.shard_map


def _alive(scales: bool) -> dataflow.Backward:
    """The analysis of which values have tangents that reach a result.

    The scales of the 8-bit operands of a product have no tangents. With `scales` they count as if they had: then the
    gradients of the segment that encodes the operands are not stopped, and JAX's default checkpoint keeps what a budget
    counts.
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
