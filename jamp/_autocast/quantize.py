"""Quantize: products of 16-bit operands become products of 8-bit ones.

`quantize` takes the result of `cast`. Whether a product qualifies depends on the source of its operands and the readers
of its result. Attention does not, because products compute both operands. The head does not: no product follows it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jamp import _evaluate, _jaxpr
from jamp._autocast.cast import Cast, Decision
from jamp._autocast.constructs import KEEPS_RESULTS
from jamp._autocast.float8 import Float8
from jamp._autocast.quantized import packed, quantized_product
from jamp._autocast.rules import COMPUTE, YOURS
from jamp._cast import is_float32
from jamp._jaxpr import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jamp._primitives import holds_product
from jamp._shard_map import trace
from jamp._source_line import is_transposed

_NOT_REACHED = "it is in a custom derivative or a linear solve"


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A jaxpr with 8-bit products.

    Attributes:
      closed: The jaxpr.
      config: How operands are quantized.
      why: For each product, by the id of its equation in the `Cast`, why it stays in 16 bit; "" if it is 8 bit.
      bodies: For each construct, by the id of its equation in the `Cast`, its quantized bodies.
    """

    closed: ClosedJaxpr
    config: Float8
    why: dict[int, str]
    bodies: dict[int, list["Quantized"]]

    @property
    def is_used(self) -> bool:
        """Whether any product is 8 bit."""
        return "" in self.why.values() or any(x.is_used for inner in self.bodies.values() for x in inner)

    def why_not(self, product: int, path: Sequence[tuple[int, int]]) -> str:
        """Why a product inside these constructs, each given by its id and the number of the body, stays in 16 bit."""
        if not path:
            return self.why.get(product, _NOT_REACHED)
        construct, i = path[0]
        return self.bodies[construct][i].why_not(product, path[1:]) if construct in self.bodies else _NOT_REACHED


def quantize(body: Cast, config: Float8) -> Quantized:
    """Quantize the operands of the products that qualify."""
    products = {id(decision.run): decision for decision in _products(body)}
    closed = body.closed()
    unknown = (False,) * len(closed.in_avals)
    return _Pass(config, body, products).run(closed, unknown, (False,) * len(closed.out_avals), None)


def _products(body: Cast) -> list[Decision]:
    found: list[Decision] = []
    for decision in body.decisions:
        found.extend(x for inner in decision.bodies for x in _products(inner))
        is_product = decision.is_low and decision.eqn.primitive.name == "dot_general"
        if is_product and decision.category == COMPUTE and is_float32(decision.eqn.outvars[0].aval):
            found.append(decision)
    return found


class _Pass:
    def __init__(self, config: Float8, body: Cast, products: dict[int, Decision]):
        self._config, self._products = config, products
        self._rules, self._parts = body.caster.rules, body.caster.parts
        self._done: dict[Any, Quantized] = {}
        self._traced: dict[Any, ClosedJaxpr] = {}

    def run(
        self, closed: ClosedJaxpr, computed: tuple[bool, ...], read_on: tuple[bool, ...], inside: JaxprEqn | None
    ) -> Quantized:
        """Quantize a jaxpr. `computed` inputs depend on a product, and later products read the `read_on` outputs."""
        key = id(closed.jaxpr), computed, read_on, inside
        if key not in self._done:
            self._done[key] = self._run(closed, computed, read_on, inside)
        return self._done[key]

    def _run(
        self, closed: ClosedJaxpr, computed: tuple[bool, ...], read_on: tuple[bool, ...], inside: JaxprEqn | None
    ) -> Quantized:
        jaxpr = closed.jaxpr
        made = {v for v, x in zip(jaxpr.invars, computed, strict=True) if x}
        is_made = lambda v: not _jaxpr.is_literal(v) and v in made
        feeding = _feeding(jaxpr, read_on)
        sources: dict[Any, Var] = {}  # for the result of a cast, its operand
        values: dict[Any, list[Var]] = {}  # the 8-bit values and the scales of a value
        found = Quantized(closed, self._config, {}, {})
        eqns: list[JaxprEqn] = []
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "convert_element_type" and not _jaxpr.is_literal(eqn.invars[0]):
                sources[eqn.outvars[0]] = eqn.invars[0]
            decision = self._products.get(id(eqn))
            if decision:
                found.why[id(eqn)] = self._why_not(decision, all(map(is_made, eqn.invars)), eqn.outvars[0] in feeding)
            if decision and not found.why[id(eqn)]:
                axes = _jaxpr.contracted(decision.eqn) if self._config.granularity == "row" else (None, None)
                pairs = []
                for v, x in zip(eqn.invars, axes, strict=True):
                    key = _source(sources, v), x
                    if key not in values:
                        values[key], items = self._pack(v, x, inside)
                        eqns.extend(items)
                    pairs.extend(values[key])
                eqns.extend(self._product(decision.eqn, [*eqn.invars, *pairs], eqn.outvars, inside))
            elif (inner := _jaxpr.bodies(eqn)) and eqn.primitive.name not in KEEPS_RESULTS:
                later = _read_on(eqn, inner, [v in feeding for v in eqn.outvars])
                known = [is_made(v) for v in eqn.invars]
                around = eqn if eqn.primitive.name == "shard_map" else inside
                found.bodies[id(eqn)] = [
                    self.run(body, tuple(known[i] for i in operands), later[-len(body.out_avals) :], around)
                    for body, operands in zip(inner, _jaxpr.body_operands(eqn), strict=True)
                ]
                bodies = [body.closed for body in found.bodies[id(eqn)]]
                eqns.append(_evaluate.with_bodies(eqn, bodies, eqn.invars, eqn.outvars))
            else:
                eqns.append(eqn)
            if holds_product(eqn) or any(map(is_made, eqn.invars)):
                made.update(eqn.outvars)
        constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        new = _evaluate.closed_jaxpr(constants, jaxpr.invars, jaxpr.outvars, eqns)
        return dataclasses.replace(found, closed=new)

    def _why_not(self, decision: Decision, is_attention: bool, is_read_on: bool) -> str:
        """Why a product stays in the carrier; nothing if it is 8 bit."""
        eqn, key, least = decision.eqn, decision.key, self._config.min_size
        name = key if key in self._parts else eqn.primitive.name
        force = f"rules={{{name!r}: 'compute'}} makes it float8"
        sizes = _jaxpr.product_sizes(eqn)
        if self._rules[key].reason == YOURS:
            return ""
        if is_transposed(eqn):
            return "the function was differentiated before autocast; write jax.grad(autocast(f))"
        if any(isinstance(n, int) and n < least for n in sizes):  # A symbolic size is not compared.
            return f"one of its sizes {sizes} is below min_size={least}"
        if is_attention:
            return f"products compute both operands, as in attention; {force}"
        if not is_read_on:
            return f"no product follows, so it is the head; {force}"
        return ""

    def _pack(self, v: Var, axes: tuple[int, ...] | None, inside: JaxprEqn | None) -> tuple[list[Var], list[JaxprEqn]]:
        """The variables of the 8-bit values and the scales of an operand, and the equations that compute them."""
        (aval,) = _jaxpr.avals([v])
        key = aval, axes, inside
        if key not in self._traced:
            self._traced[key] = trace(inside, lambda x: packed(x, self._config.forward, axes), [aval])
        closed = self._traced[key]
        outputs = [_jaxpr.core().Var(aval) for aval in closed.out_avals]
        return outputs, _evaluate.inline(closed, [v], outputs)

    def _product(
        self, eqn: JaxprEqn, operands: list[Any], results: list[Var], inside: JaxprEqn | None
    ) -> list[JaxprEqn]:
        avals = _jaxpr.avals(operands)
        key = *_jaxpr.parameters(eqn), *avals, inside
        if key not in self._traced:
            self._traced[key] = trace(inside, quantized_product(eqn, self._config), avals)
        items = _evaluate.inline(self._traced[key], operands, results)
        return [item.replace(source_info=eqn.source_info) for item in items]


def _source(sources: dict[Any, Var], v: Any) -> Any:
    """The value before its casts, so that equal casts of a value are quantized once."""
    while not _jaxpr.is_literal(v) and v in sources:
        v = sources[v]
    return v


def _feeding(jaxpr: Jaxpr, read_on: Sequence[bool]) -> set[Any]:
    """The values that a product reads, perhaps through other operations. Later products read the `read_on` outputs."""
    found = {v for v, x in zip(jaxpr.outvars, read_on, strict=True) if x and not _jaxpr.is_literal(v)}
    for eqn in reversed(jaxpr.eqns):
        # A dot product of all elements, such as a squared loss, is not a layer.
        is_layer = eqn.primitive.name != "dot_general" or _jaxpr.product_sizes(eqn)[:2] != [1, 1]
        if any(v in found for v in eqn.outvars) or (holds_product(eqn) and is_layer):
            found.update(v for v in eqn.invars if not _jaxpr.is_literal(v))
    return found


def _read_on(eqn: JaxprEqn, bodies: Sequence[ClosedJaxpr], later: Sequence[bool]) -> tuple[bool, ...]:
    """Which results of a construct's bodies a product reads, after it or, in a loop, in the next step."""
    carry, operands = _jaxpr.carry(eqn), _jaxpr.body_operands(eqn)[-1]
    found = list(later)
    for _ in carry:
        feeding = _feeding(bodies[-1].jaxpr, found)
        inputs = [bodies[-1].jaxpr.invars[operands.index(i)] for i in carry]
        new = [x or v in feeding for x, v in zip(found, inputs, strict=False)] + found[len(carry) :]
        if new == found:
            break
        found = new
    return tuple(found)
