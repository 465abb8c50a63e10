"""Quantize: products of 16-bit operands become products of 8-bit ones.

`quantize` takes the result of `cast`, and changes the format of the products that qualify. Whether one does depends on
the source of its operands and the readers of its result. Attention does not, because products compute both operands.
The head does not: no product follows it. The others get the reason why they stay in 16 bit.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jamp._autocast.custom_rules import KEEPS_RESULTS
from jamp._autocast.rules import COMPUTE, RULES, YOURS, Rule
from jamp._cast import is_floating
from jamp._jaxprs import build, dataflow, inline, ir
from jamp._jaxprs.dataflow import Flags
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn, Var
from jamp._jaxprs.manual_axes import trace
from jamp._jaxprs.primitives import holds_product
from jamp._jaxprs.source import is_transposed
from jamp._products import product as _product
from jamp._products.formats import Format
from jamp._products.matrix_product import as_matrix_product
from jamp._products.product import Product, as_traced
from jamp._products.quantized import QUANTIZE, packed, summed

_FLOAT32 = np.dtype(np.float32)
_NOT_REACHED = "it is in a function with a derivative rule of its own"


def quantize(closed: ClosedJaxpr, config: Format, rules: Mapping[str, Rule]) -> ClosedJaxpr:
    """The same function with the operands of the products that qualify in 8 bit."""
    unknown = (False,) * len(closed.in_avals)
    return _Pass(config, rules).run(closed, unknown, (False,) * len(closed.out_avals), None)


def is_candidate(product: Product) -> bool:
    """Whether a product has 16-bit operands, by a rule or as traced, and may become 8 bit."""
    if product.category != COMPUTE:
        return False
    if product.format is not None:
        return product.before[-1] == _FLOAT32
    return all(dtype.itemsize == 2 and jnp.issubdtype(dtype, jnp.floating) for dtype in product.before[:2])


class _Pass:
    def __init__(self, config: Format, rules: Mapping[str, Rule]):
        self._config, self._rules = config, rules
        self._after_product, self._feeding = dataflow.spreads(_is_after_product), dataflow.Backward(_feeds)
        self._done: dict[Any, tuple[ClosedJaxpr, ClosedJaxpr]] = {}
        self._traced: dict[Any, ClosedJaxpr] = {}

    def run(
        self, closed: ClosedJaxpr, after: tuple[bool, ...], feeding: tuple[bool, ...], inside: JaxprEqn | None
    ) -> ClosedJaxpr:
        """Quantize a jaxpr. `after` inputs depend on a product, and later products read the `feeding` outputs."""
        key = ir.identity(closed), after, feeding, inside
        if key not in self._done:  # With the function, so that no other one gets its ids.
            self._done[key] = closed, self._quantize(closed, after, feeding, inside)
        return self._done[key][1]

    def _quantize(
        self, closed: ClosedJaxpr, after: tuple[bool, ...], feeding: tuple[bool, ...], inside: JaxprEqn | None
    ) -> ClosedJaxpr:
        jaxpr = closed.jaxpr
        is_after_product = self._after_product(closed, after)
        is_fed_on = self._feeding(jaxpr, feeding)
        sources: dict[Any, Var] = {}  # for the result of a cast, its operand
        pairs: dict[Any, list[Var]] = {}  # the 8-bit values and the scales of a value
        eqns: list[JaxprEqn] = []
        for eqn in jaxpr.eqns:
            name, bodies = ir.name(eqn), ir.bodies(eqn) if ir.name(eqn) in ir.CONSTRUCTS else None
            if name == "convert_element_type" and not ir.is_literal(eqn.invars[0]):
                sources[eqn.outvars[0]] = eqn.invars[0]
            product = _product.of(eqn)
            if product and is_candidate(product):
                is_attention = all(self._after_product.read(is_after_product, eqn.invars[:2]))
                why = self._why_not(eqn, product, is_attention, eqn.outvars[0] in is_fed_on)
                eqns.extend([_with(eqn, reason=why)] if why else self._multiply(eqn, product, sources, pairs, inside))
            elif bodies and name in KEEPS_RESULTS:
                eqns.append(build.with_bodies(eqn, list(map(_not_reached, bodies)), eqn.invars, eqn.outvars))
            elif bodies:
                known = self._after_product.into(eqn, self._after_product.read(is_after_product, eqn.invars))
                later = self._feeding.into(eqn, dataflow.flags(eqn.outvars, is_fed_on))
                around = eqn if name == "shard_map" else inside
                new = [self.run(b, tuple(x), tuple(y), around) for b, x, y in zip(bodies, known, later, strict=True)]
                eqns.append(build.with_bodies(eqn, new, eqn.invars, eqn.outvars))
            else:
                eqns.append(eqn)
        constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        return build.closed_jaxpr(constants, jaxpr.invars, jaxpr.outvars, eqns)

    def _why_not(self, eqn: JaxprEqn, product: Product, is_attention: bool, is_read_on: bool) -> str:
        """Why a product stays in the carrier; nothing if it is 8 bit."""
        key, least, matrix = product.key, self._config.min_size, as_matrix_product(as_traced(eqn))
        if matrix is None:
            why = "its windows overlap or leave gaps, or it has padding, dilation or groups"
            return f"no compiler has {self._config.name} gradients of such a convolution: {why}"
        name = product.primitive.name if key in RULES else key
        force = f"rules={{{name!r}: 'compute'}} makes it {self._config.name}"
        sizes = ir.product_sizes(matrix.eqn)
        if self._rules[key].reason == YOURS:
            return ""
        if is_transposed(eqn):
            carrier = np.dtype(self._config.carrier).name
            return (
                f"it is part of a gradient that the function takes itself, and stays in {carrier}. If the loss depends "
                "on that gradient (forces), it must stay, because 8-bit products have no second derivative. If not, "
                "write jax.grad(jamp.autocast(f, format))"
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
        eqn: JaxprEqn,
        product: Product,
        sources: dict[Any, Var],
        pairs: dict[Any, list[Var]],
        inside: JaxprEqn | None,
    ) -> list[JaxprEqn]:
        """The equations that quantize the operands of a product, if no other product did, and multiply them."""
        matrix = as_matrix_product(as_traced(eqn))
        assert matrix is not None  # `_why_not` has its reason.
        params, eqns = ir.params(matrix.eqn), list[JaxprEqn]()
        operands, packs = list[Any](eqn.invars), list[Any]()
        axes = summed(ir.name(matrix.eqn), params, self._config)
        for i, move in enumerate(matrix.moves[:2]):
            v = operands[i]
            key = _source(sources, v), axes[i], move
            if key not in pairs:
                pack = lambda x, move=move, i=i: packed(move(x) if move else x, self._config.forward, axes[i])
                pairs[key] = self._run(eqns, (key[1:], "pack"), pack, [v], inside)
            packs.extend(pairs[key])
            if move:
                (operands[i],) = self._run(eqns, (move, "move"), move, [v], inside)
        new = dataclasses.replace(
            product,
            primitive=matrix.eqn.primitive,
            params=tuple(params.items()),
            format=self._config,
            weights=(),
            dtype=ir.avals(eqn.outvars)[0].dtype,
        )
        inputs, move_back = [*operands, *packs], matrix.moves[2]
        if move_back is None:
            back, result = None, eqn.outvars[0]
        else:
            with ir.context(eqn):
                aval = _product.result_type(new, ir.avals(inputs))
            back = trace(inside, _named(move_back), [aval])
            result = core.Var(aval) if back.jaxpr.eqns else eqn.outvars[0]
        after = inline.inline(back, [result], eqn.outvars) if back else []
        located = [[build.located(item, eqn) for item in items] for items in (eqns, after)]
        return [*located[0], _product.equation(new, inputs, result, eqn), *located[1]]

    def _run(
        self, eqns: list[JaxprEqn], key: Any, fun: Callable[..., Any], operands: Sequence[Any], inside: JaxprEqn | None
    ) -> list[Var]:
        """Add the equations of a function. It is traced once for the same key and types."""
        avals = ir.avals(operands)
        key = key, *avals, inside
        if key not in self._traced:
            self._traced[key] = trace(inside, _named(fun), avals)
        new, results = inline.inlined(self._traced[key], operands)
        eqns.extend(new)
        return results


def _named(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose operations are not of the user's function and not in reports."""
    return jax.named_scope(QUANTIZE)(fun)


def _with(eqn: JaxprEqn, reason: str) -> JaxprEqn:
    """A product with the reason why it is not 8 bit."""
    product = _product.of(eqn)
    assert product is not None
    return _product.equation(dataclasses.replace(product, reason=reason), eqn.invars, eqn.outvars[0], eqn)


def _not_reached(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same jaxpr, in which every product has the reason that this pass does not enter it."""
    eqns = []
    for eqn in closed.jaxpr.eqns:
        product = _product.of(eqn)
        bodies = ir.bodies(eqn) if ir.name(eqn) in ir.CONSTRUCTS else None
        if product and is_candidate(product):
            eqn = _with(eqn, _NOT_REACHED)
        elif bodies:
            eqn = build.with_bodies(eqn, list(map(_not_reached, bodies)), eqn.invars, eqn.outvars)
        eqns.append(eqn)
    constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    return build.closed_jaxpr(constants, closed.jaxpr.invars, closed.jaxpr.outvars, eqns)


def _source(sources: dict[Any, Var], v: Any) -> tuple[Any, Any]:
    """The value before its casts, and the 16-bit dtype on the way: equal casts of a value are quantized once.

    Only casts between float32 and one 16-bit dtype count. Others, such as one to an integer, make another value.
    """
    low = {v.aval.dtype} - {_FLOAT32}
    while not ir.is_literal(v) and v in sources:
        (aval,) = ir.avals([sources[v]])
        on_the_way = low | {aval.dtype} - {_FLOAT32}
        if not is_floating(aval) or len(on_the_way) > 1 or any(x.itemsize != 2 for x in on_the_way):
            break
        v, low = sources[v], on_the_way
    return v, frozenset(low)


def _is_after_product(eqn: JaxprEqn, operands: Flags) -> bool:
    """Whether the results of an equation depend on a product. Forward."""
    return any(operands) or holds_product(eqn)


def _feeds(eqn: JaxprEqn, results: Flags) -> bool:
    """Whether a product reads the operands of an equation, perhaps through others. Backward.

    A dot product of all elements, such as a squared loss, is not a layer.
    """
    traced = as_traced(eqn)
    is_layer = ir.name(traced) != "dot_general" or ir.product_sizes(traced)[:2] != [1, 1]
    return any(results) or (holds_product(eqn) and is_layer)
