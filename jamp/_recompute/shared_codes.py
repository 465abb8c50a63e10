"""The codes of the values of a body that its parts read in 8 bits. Each value is encoded once, where it is computed."""

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend import core

from jamp._jaxprs import inline
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn, Var
from jamp._jaxprs.manual_axes import trace_inside
from jamp._recompute.derivative_rules import CodedRule
from jamp._recompute.segments import Chosen, Segment, SplitJaxpr
from jamp._recompute.stores import Store


class SharedCodes:
    """The variables of the codes of values. It has none without `residuals`."""

    def __init__(self, body: SplitJaxpr, chosen: Chosen):
        self._wanted, self._codes = set[Any](), dict[Any, list[Var]]()
        self._inside = body.context.shard_map
        for i, part in enumerate(body.parts):
            if isinstance(part, Segment):
                self._wanted.update(part.inputs[j] for j in (chosen[i,].inputs if (i,) in chosen else ()))
            elif isinstance(part, CodedRule):
                self._wanted.update(part.coded)

    def encoded_by(self, segment: Segment) -> list[int]:
        """Which outputs a segment encodes itself: those that other parts read in 8 bits."""
        return [i for i, v in enumerate(segment.outputs) if v in self._wanted]

    def of(self, values: Sequence[Any]) -> list[Var]:
        """The variables of the codes of some values."""
        return [x for v in values for x in self._codes[v]]

    def define(self, values: Sequence[Any]) -> list[Var]:
        """New variables for the codes of some values."""
        for v in values:
            self._codes[v] = list(map(core.Var, self._encoded(v).out_avals))
        return self.of(values)

    def encode(self, values: Sequence[Any]) -> list[JaxprEqn]:
        """The equations that encode those values that are read in 8 bits and have no codes yet."""
        found = [v for v in dict.fromkeys(values) if v in self._wanted and v not in self._codes]
        return [eqn for v in found for eqn in inline.inline(self._encoded(v), [v], self.define([v]))]

    def _encoded(self, v: Var) -> ClosedJaxpr:
        return trace_inside(self._inside, lambda x: Store.INT8.encode(lax.stop_gradient(x)), [v.aval])
