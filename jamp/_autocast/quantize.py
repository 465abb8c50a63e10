"""Quantize: products of 16-bit operands become products of 8-bit ones.

`quantize` takes the result of `cast`, whose products were cast to 16 bit or traced in 16 bit. Whether one qualifies
depends on the source of its operands and the readers of its result. Attention does not, because products compute both
operands. The head does not: no product follows it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from jamp import _dataflow, _evaluate, _jaxpr
from jamp._autocast.cast import Cast, Decision
from jamp._autocast.constructs import KEEPS_RESULTS
from jamp._autocast.formats import Format
from jamp._autocast.quantized import Axes, packed, quantized_product, summed
from jamp._autocast.rules import COMPUTE, YOURS
from jamp._cast import is_float32, is_floating
from jamp._dataflow import Flags
from jamp._evaluate import MatrixProduct, Move
from jamp._jaxpr import ClosedJaxpr, JaxprEqn, Var
from jamp._primitives import PRODUCTS, holds_product
from jamp._shard_map import trace
from jamp._source_line import is_transposed

_FLOAT32 = np.dtype(np.float32)
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
    config: Format
    why: dict[int, str]
    bodies: dict[int, list["Quantized"]]

    @property
    def is_used(self) -> bool:
        """Whether any product is 8 bit."""
        return "" in self.why.values() or any(x.is_used for inner in self.bodies.values() for x in inner)

    def why_not(self, decision: Decision, path: Sequence[tuple[int, int]]) -> str | None:
        """Why a product stays in 16 bit: "" if it is 8 bit. None for all other equations.

        `path` holds the constructs around it: the id of each, and the number of the body.
        """
        if not is_candidate(decision):
            return None
        if not path:
            return self.why.get(id(decision.run), _NOT_REACHED)
        construct, i = path[0]
        return self.bodies[construct][i].why_not(decision, path[1:]) if construct in self.bodies else _NOT_REACHED


def quantize(body: Cast, config: Format) -> Quantized:
    """Quantize the operands of the products that qualify."""
    closed = body.closed()
    unknown = (False,) * len(closed.in_avals)
    return _Pass(config, body).run(closed, body, unknown, (False,) * len(closed.out_avals), None)


def is_candidate(decision: Decision) -> bool:
    """Whether an equation is a product with 16-bit operands, by a rule or as traced, that may become 8 bit."""
    if _jaxpr.name(decision.eqn) not in PRODUCTS or decision.category != COMPUTE:
        return False
    if decision.is_low:
        return is_float32(decision.eqn.outvars[0].aval)
    return all(is_floating(aval) and aval.dtype.itemsize == 2 for aval in _jaxpr.avals(decision.eqn.invars[:2]))


class _Pass:
    def __init__(self, config: Format, body: Cast):
        self._config = config
        self._rules, self._parts = body.caster.rules, body.caster.parts
        self._computed, self._feeding = _dataflow.Forward(_computes), _dataflow.Backward(_feeds)
        self._done: dict[Any, Quantized] = {}
        self._traced: dict[Any, ClosedJaxpr] = {}

    def run(
        self,
        closed: ClosedJaxpr,
        cast: Cast,
        computed: tuple[bool, ...],
        read_on: tuple[bool, ...],
        inside: JaxprEqn | None,
    ) -> Quantized:
        """Quantize the jaxpr of a `Cast`.

        `computed` inputs depend on a product, and later products read the `read_on` outputs.
        """
        key = id(closed.jaxpr), id(cast), computed, read_on, inside
        if key in self._done:
            return self._done[key]
        # Of this call: equal calls of a jitted function have the same equations, but not always the same decisions.
        decisions = {id(decision.run): decision for decision in cast.decisions}
        jaxpr = closed.jaxpr
        made = self._computed(jaxpr, computed)
        feeding = self._feeding(jaxpr, read_on)
        sources: dict[Any, Var] = {}  # for the result of a cast, its operand
        values: dict[Any, list[Var]] = {}  # the 8-bit values and the scales of a value
        found = Quantized(closed, self._config, {}, {})
        eqns: list[JaxprEqn] = []
        for eqn in jaxpr.eqns:
            if _jaxpr.name(eqn) == "convert_element_type" and not _jaxpr.is_literal(eqn.invars[0]):
                sources[eqn.outvars[0]] = eqn.invars[0]
            decision = decisions.get(id(eqn))
            product = None
            if decision and is_candidate(decision):
                product = _evaluate.as_matrix_product(decision.eqn)
                is_attention = all(_dataflow.flags(eqn.invars[:2], made))
                found.why[id(eqn)] = self._why_not(decision, product, is_attention, eqn.outvars[0] in feeding)
            if decision and product and not found.why[id(eqn)]:
                eqns.extend(self._multiply(decision, product, eqn, sources, values, inside))
            elif decision and decision.bodies and _jaxpr.name(eqn) not in KEEPS_RESULTS:
                later = self._feeding.into(eqn, _dataflow.flags(eqn.outvars, feeding))
                known = self._computed.into(eqn, _dataflow.flags(eqn.invars, made))
                around = eqn if _jaxpr.name(eqn) == "shard_map" else inside
                found.bodies[id(eqn)] = [
                    self.run(body, own, tuple(x), tuple(y), around)
                    for body, own, x, y in zip(_jaxpr.bodies(eqn) or (), decision.bodies, known, later, strict=True)
                ]
                bodies = [body.closed for body in found.bodies[id(eqn)]]
                eqns.append(_evaluate.with_bodies(eqn, bodies, eqn.invars, eqn.outvars))
            else:
                eqns.append(eqn)
        constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        new = _evaluate.closed_jaxpr(constants, jaxpr.invars, jaxpr.outvars, eqns)
        self._done[key] = dataclasses.replace(found, closed=new)
        return self._done[key]

    def _why_not(self, decision: Decision, product: MatrixProduct | None, is_attention: bool, is_read_on: bool) -> str:
        """Why a product stays in the carrier; nothing if it is 8 bit."""
        key, least = decision.key, self._config.min_size
        if product is None:
            why = "its windows overlap or leave gaps, or it has padding, dilation or groups"
            return f"no compiler has {self._config.name} gradients of such a convolution: {why}"
        name = key if key in self._parts else _jaxpr.name(decision.eqn)
        force = f"rules={{{name!r}: 'compute'}} makes it {self._config.name}"
        eqn, sizes = decision.eqn, _jaxpr.product_sizes(product.eqn)
        if self._rules[key].reason == YOURS:
            return ""
        if is_transposed(eqn):
            carrier = np.dtype(self._config.carrier).name
            return (
                f"it is part of a gradient that the function takes itself, and stays in {carrier}. If the loss depends "
                "on that gradient (forces), it must stay, because 8-bit products have no second derivative. If not, "
                "write jax.grad(autocast(f))"
            )
        if any(isinstance(n, int) and n < least for n in sizes):  # A symbolic size is not compared.
            return f"one of its sizes {sizes} is below min_size={least}"
        if is_attention:
            return f"products compute both operands, as in attention; {force}"
        if not is_read_on:
            return f"no product follows, so it is the head; {force}"
        return ""

    def _multiply(
        self,
        decision: Decision,
        product: MatrixProduct,
        eqn: JaxprEqn,
        sources: dict[Any, Var],
        values: dict[Any, list[Var]],
        inside: JaxprEqn | None,
    ) -> list[JaxprEqn]:
        """The equations that quantize the operands of a product, if no other product did, and multiply them."""
        operands, found = list[Any](eqn.invars), []
        for v, axes, move in zip(eqn.invars, summed(product.eqn, self._config), product.moves, strict=False):
            key = _source(sources, v), axes, move
            if key not in values:
                closed = self._trace((axes, move), self._packing(move, axes), [v], inside)
                values[key] = [_jaxpr.core().Var(aval) for aval in closed.out_avals]
                found.extend(_evaluate.inline(closed, [v], values[key]))
            operands.extend(values[key])
        (result,) = _jaxpr.avals(eqn.outvars)
        key = *_jaxpr.parameters(decision.eqn), result.dtype
        closed = self._trace(key, self._product(product, result.dtype), operands, inside)
        items = _evaluate.inline(closed, operands, eqn.outvars)
        return [*found, *(item.replace(source_info=eqn.source_info) for item in items)]

    def _trace(
        self, key: Any, fun: Callable[..., Any], operands: Sequence[Any], inside: JaxprEqn | None
    ) -> ClosedJaxpr:
        """The jaxpr of a function, which is the same one for the same key and types."""
        avals = _jaxpr.avals(operands)
        key = key, *avals, inside
        if key not in self._traced:
            self._traced[key] = trace(inside, fun, avals)
        return self._traced[key]

    def _packing(self, move: Move, axes: Axes) -> Callable[..., Any]:
        """The function that gives the 8-bit values and the scales of an operand."""
        return lambda x: packed(move(x), self._config.forward, axes)

    def _product(self, product: MatrixProduct, dtype: DTypeLike) -> Callable[..., Any]:
        """The function of a product's operands, and of their 8-bit values and scales."""
        move_x, move_y, move_back = product.moves
        multiply = quantized_product(product.eqn, self._config, dtype)
        return lambda x, y, *others: move_back(multiply(move_x(x), move_y(y), *others))


def _source(sources: dict[Any, Var], v: Any) -> tuple[Any, Any]:
    """The value before its casts, and the 16-bit dtype on the way: equal casts of a value are quantized once.

    Only casts between float32 and one 16-bit dtype count. Others, such as one to an integer, make another value.
    """
    low = {v.aval.dtype} - {_FLOAT32}
    while not _jaxpr.is_literal(v) and v in sources:
        (aval,) = _jaxpr.avals([sources[v]])
        found = low | {aval.dtype} - {_FLOAT32}
        if not is_floating(aval) or len(found) > 1 or any(x.itemsize != 2 for x in found):
            break
        v, low = sources[v], found
    return v, frozenset(low)


def _computes(eqn: JaxprEqn, operands: Flags) -> bool:
    """Whether the results of an equation depend on a product. A rule for `_dataflow.Forward`."""
    return any(operands) or holds_product(eqn)


def _feeds(eqn: JaxprEqn, results: Flags) -> bool:
    """Whether a product reads the operands of an equation, perhaps through others. A rule for `_dataflow.Backward`.

    A dot product of all elements, such as a squared loss, is not a layer.
    """
    is_layer = _jaxpr.name(eqn) != "dot_general" or _jaxpr.product_sizes(eqn)[:2] != [1, 1]
    return any(results) or (holds_product(eqn) and is_layer)
