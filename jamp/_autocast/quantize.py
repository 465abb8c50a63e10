"""Quantize: the operands of the products that `cast` chose become values of 8 bits and scales."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jamp._cast import is_floating
from jamp._jaxprs import build, inline, ir
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn, Var
from jamp._jaxprs.manual_axes import trace_inside
from jamp._jaxprs.rewrite import Body, Rewriter
from jamp._products import product as _product
from jamp._products.formats import Format
from jamp._products.matrix_product import as_matrix_product
from jamp._products.product import as_traced
from jamp._products.quantized import QUANTIZE, packed

_FLOAT32 = np.dtype(np.float32)


def quantize(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return the same function, whose products in a `Format` have operands in that format."""
    return Rewriter(_Quantize(), reads=lambda context: context.shard_map)(closed)


class _Quantize:
    """The rule for one equation."""

    def __init__(self) -> None:
        self._traced: dict[Any, ClosedJaxpr] = {}

    def __call__(self, eqn: JaxprEqn, body: Body) -> list[JaxprEqn] | None:
        product = _product.of(eqn)
        if product is None or not isinstance(product.format, Format) or len(eqn.invars) != product.arity:
            return None
        if "sources" not in body.shared:
            casts = [e for e in body.closed.jaxpr.eqns if ir.name(e) == "convert_element_type"]
            body.shared["sources"] = {e.outvars[0]: e.invars[0] for e in casts if not ir.is_literal(e.invars[0])}
        matrix, inside, eqns = as_matrix_product(as_traced(eqn)), body.context.shard_map, list[JaxprEqn]()
        assert matrix is not None  # Other convolutions do not qualify.
        config, params = product.format, ir.params(matrix.eqn)
        operands, packs = list[Any](eqn.invars), list[Any]()
        axes = config.axes(ir.name(matrix.eqn), params)
        for i, move in enumerate(matrix.moves[:2]):
            v = operands[i]
            key = _source(body.shared["sources"], v), axes[i], move
            if key not in body.shared:
                pack = lambda x, move=move, i=i: packed(move(x) if move else x, config, axes[i])
                body.shared[key] = self._run(eqns, (key[1:], config, "pack"), pack, [v], eqn, inside)
            packs.extend(body.shared[key])
            if move:
                (operands[i],) = self._run(eqns, (move, "move"), move, [v], eqn, inside)
        new = dataclasses.replace(
            product,
            primitive=matrix.eqn.primitive,
            params=tuple(params.items()),
            arguments=(),
            dtype=ir.avals(eqn.outvars)[0].dtype,
        )
        inputs, move_back = [*operands, *packs], matrix.moves[2]
        if move_back is None:
            back, result = None, eqn.outvars[0]
        else:
            with ir.trace_context(eqn):
                aval = _product.result_type(new, ir.avals(inputs))
            back = trace_inside(inside, _named(move_back), [aval])
            result = core.Var(aval) if back.jaxpr.eqns else eqn.outvars[0]
        after = inline.inline(back, [result], eqn.outvars) if back else []
        located = [[build.located(item, eqn) for item in items] for items in (eqns, after)]
        return [*located[0], _product.equation(new, inputs, result, eqn), *located[1]]

    def _run(
        self,
        eqns: list[JaxprEqn],
        key: Any,
        fun: Callable[..., Any],
        operands: Sequence[Any],
        like: JaxprEqn,
        inside: JaxprEqn | None,
    ) -> list[Var]:
        """Add the equations of a function, in the context of another. It is traced once for the same key and types."""
        avals = ir.avals(operands)
        key = key, *avals, like.ctx, inside
        if key not in self._traced:
            self._traced[key] = trace_inside(inside, ir.in_trace_context(like, _named(fun)), avals)
        new, results = inline.inlined(self._traced[key], operands)
        eqns.extend(new)
        return results


def _named(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function in the scope QUANTIZE, so that reports leave its operations out."""
    return jax.named_scope(QUANTIZE)(fun)


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
