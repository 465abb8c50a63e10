"""What the plans of a function share: the compute dtype, the rules, and the jaxprs planned so far."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jamp import _evaluate, _jaxpr
from jamp._autocast.float8 import Float8
from jamp._autocast.plan import Decision, Input, PlannedJaxpr, Where
from jamp._autocast.rules import CHEAP, COMPUTE, COPIES, LINEAR, MOVES, RULES, YOURS
from jamp._autocast.runs import Kind
from jamp._autocast.values import Values
from jamp._cast import is_inexact
from jamp._jaxpr import ClosedJaxpr, Jaxpr, JaxprEqn, Var

_LARGE = 1024  # elements: a run that computes no array of this size is not worth computing again


class Planner:
    """The compute dtype and the rules, and the bodies planned so far."""

    def __init__(self, compute_dtype: Any, rules: Mapping[str, tuple[str, str]]):
        self.float8 = compute_dtype if isinstance(compute_dtype, Float8) else None
        self.compute_dtype = np.dtype(self.float8.carrier if self.float8 else compute_dtype)
        self.rules = rules
        self.parts = [key for key in rules if "[" in key and key not in RULES]  # rules for a part of the name stack
        self.left_out: list[JaxprEqn] = []  # what is not entered, or has no rule
        self._bodies: dict[Any, PlannedJaxpr] = {}
        self._runs: dict[Any, ClosedJaxpr] = {}
        self._kinds: dict[Any, Kind] = {}
        to_low = jax.make_jaxpr(lambda x: lax.convert_element_type(x, self.compute_dtype))(np.float32(0)).eqns[0]
        to_float32 = _evaluate.replace_dtype(to_low, self.compute_dtype, np.dtype(np.float32))
        self._converts = {True: to_low, False: to_float32}
        self._default_precision = _jaxpr.precisions(jax.make_jaxpr(lax.dot)(*[np.ones(1, np.float32)] * 2).eqns[0])

    def body(self, closed: ClosedJaxpr, inputs: Sequence[Input], where: Where, as_traced: int = 0) -> PlannedJaxpr:
        """The plan of a jaxpr for what is known of its inputs. Its first outputs have their traced dtypes."""
        known = tuple((x.low, repr(x.constant), x.computed) for x in inputs)
        key = id(closed.jaxpr), known, where, as_traced
        if key not in self._bodies:  # The plan holds the jaxpr, whose id therefore stays its own.
            self._bodies[key] = PlannedJaxpr(self, closed, inputs, where, as_traced)
        return self._bodies[key]

    def rule(self, eqn: JaxprEqn, values: Values, scope: str = "") -> str:
        """The key of the rule for an equation: the primitive's name, or a special case of it, also by its scope."""
        name, case = eqn.primitive.name, None
        for key in self.parts:
            if key.startswith(f"{name}[") and f"/{key[len(name) + 1 : -1]}/" in self.scope(eqn, scope):
                return key
        if name in _jaxpr.PRODUCTS and self._is_explicit(_jaxpr.precisions(eqn)):
            case = "precision"
        elif name == "dot_general" and _jaxpr.summed_terms(eqn) == 1:
            case = "outer"
        elif name == "div" and values.constant(eqn.invars[1]) is not None:
            case = "constant"
        return f"{name}[{case}]" if f"{name}[{case}]" in self.rules else name

    def scope(self, eqn: JaxprEqn, around: str) -> str:
        """The names in the name stack of an equation and of the constructs around it: "/jvp/h_3/attn/"."""
        return re.sub(r"[/()]+", "/", f"{around}/{eqn.source_info.name_stack}/")

    def _is_explicit(self, precisions: tuple[Any, ...]) -> bool:
        """Whether the precision of a product was asked for in the code, and not by a default for the whole program."""
        usual = (None, lax.Precision.DEFAULT, lax.Precision.HIGH, *self._default_precision)
        return any(precision not in usual for precision in precisions)

    def kind(self, eqn: JaxprEqn, decision: Decision, depth: int) -> Kind:
        """What an equation is to a run, if its operands have a depth."""
        if decision.bodies and eqn.primitive.name not in ("jit", "custom_jvp_call"):
            return Kind.OTHER
        return self._kind(eqn, decision.key, depth > 0)

    def _kind(self, eqn: JaxprEqn, key: str, is_deep: bool) -> Kind:
        known = id(eqn), key, is_deep
        if known not in self._kinds:  # A plan holds the equation, whose id therefore stays its own.
            self._kinds[known] = self._find_kind(eqn, key, is_deep)
        return self._kinds[known]

    def _find_kind(self, eqn: JaxprEqn, key: str, is_deep: bool) -> Kind:
        name = eqn.primitive.name
        if key in self.rules and self.rules[key][0] == COMPUTE:
            return Kind.PRODUCT if name in _jaxpr.PRODUCTS else Kind.OTHER
        if name in ("jit", "custom_jvp_call") and name not in self.rules:
            bodies = _jaxpr.bodies(eqn)
            unknown = Values(self.compute_dtype, self.holds)
            inner = [eqn for body in bodies or () for eqn in body.jaxpr.eqns]
            kinds = {Kind.OTHER if e.effects else self._kind(e, self.rule(e, unknown), is_deep) for e in inner}
            if bodies is None or Kind.OTHER in kinds or {Kind.PRODUCT, Kind.CHEAP} <= kinds:
                return Kind.OTHER
            return next((kind for kind in (Kind.PRODUCT, Kind.CHEAP) if kind in kinds), Kind.MOVE)
        if name == "gather" and not is_deep:  # An embedding may lie on many devices: to look it up is a collective.
            return Kind.OTHER
        sizes = {aval.size for aval in _jaxpr.avals((*eqn.invars[:1], *eqn.outvars))} if name in COPIES else ()
        is_copy = (
            name == "gather" or len(sizes) > 1 or (name == "concatenate" and len(set(eqn.invars)) < len(eqn.invars))
        )
        if name in MOVES and not is_copy:
            return Kind.MOVE
        return Kind.CHEAP if key in CHEAP or is_copy else Kind.OTHER

    def is_product(self, eqn: JaxprEqn) -> bool:
        """Whether an equation is a product, or a construct that holds one."""
        return eqn.primitive.name in _jaxpr.PRODUCTS or self.holds_product(_jaxpr.bodies(eqn) or ())

    def feeding(self, jaxpr: Jaxpr, read_on: Sequence[bool]) -> set[Any]:
        """The values that a product reads, however late; of the results, some are read on by a later one."""
        found = {v for v, x in zip(jaxpr.outvars, read_on, strict=False) if x and not _jaxpr.is_literal(v)}
        for eqn in reversed(jaxpr.eqns):
            # A sum of all products, such as a loss that is written as one, is not a layer.
            is_layer = eqn.primitive.name != "dot_general" or _jaxpr.product_sizes(eqn)[:2] != [1, 1]
            if any(v in found for v in eqn.outvars) or (self.is_product(eqn) and is_layer):
                found.update(v for v in eqn.invars if not _jaxpr.is_literal(v))
        return found

    def read_on(self, eqn: JaxprEqn, later: Sequence[bool]) -> tuple[bool, ...]:
        """Of which results of a construct's bodies a product reads: a later one, or of a loop, one in the next step."""
        carry, bodies = _jaxpr.carry(eqn), _jaxpr.bodies(eqn) or ()
        found, operands = list(later), _jaxpr.body_operands(eqn)[-1]
        for _ in carry:
            feeding = self.feeding(bodies[-1].jaxpr, found)
            inputs = [bodies[-1].jaxpr.invars[operands.index(i)] for i in carry]
            new = [x or v in feeding for x, v in zip(found, inputs, strict=False)] + found[len(carry) :]
            if new == found:
                break
            found = new
        return tuple(found)

    def why_not_float8(self, eqn: JaxprEqn, key: str, values: Values, where: Where, is_read_on: bool) -> str:
        """Why a dot_general stays in the carrier; nothing if it is float8."""
        assert self.float8 is not None
        name = key if key in self.parts else eqn.primitive.name
        force = f"rules={{{name!r}: 'compute'}} makes it float8"
        sizes = _jaxpr.product_sizes(eqn)
        if not where.float8:
            return "it is in a custom derivative or a linear solve"
        if self.rules[key][1] == YOURS:
            return ""
        if "transpose(" in str(eqn.source_info.name_stack):
            return "the function was differentiated before autocast; write jax.grad(autocast(f))"
        if any(isinstance(n, int) and n < self.float8.min_size for n in sizes):  # A symbolic size is not compared.
            return f"a size of it, of {sizes}, is below min_size={self.float8.min_size}"
        if all(map(values.is_computed, eqn.invars)):
            return f"products compute both operands, as in attention; {force}"
        if not is_read_on:
            return f"no product follows, so it is the head; {force}"
        return ""

    def holds_product(self, bodies: Sequence[ClosedJaxpr]) -> bool:
        """Whether there is a product in the bodies of a construct, however deep."""
        eqns = [eqn for body in bodies for eqn in body.jaxpr.eqns]
        return any(map(self.is_product, eqns))

    def is_worth_recomputing(self, eqn: JaxprEqn, kind: Kind) -> bool:
        """Whether the backward pass of an equation needs a large float32 array that it reads or computes."""
        sizes = [aval.size for aval in _jaxpr.avals(eqn.outvars) if is_inexact(aval)]
        is_large = any(not isinstance(size, int) or size >= _LARGE for size in sizes)
        return kind is Kind.CHEAP and is_large and eqn.primitive.name not in LINEAR

    def run(self, inputs: list[Var], outputs: list[Var], eqns: list[JaxprEqn]) -> ClosedJaxpr:
        """The body of a run. Those of equal layers are one, which JAX differentiates and transposes once."""
        key = _evaluate.fingerprint(inputs, outputs, eqns)
        if key is None or key not in self._runs:
            self._runs[key] = _evaluate.closed_jaxpr({}, inputs, outputs, eqns)
        return self._runs[key]

    def quantize(self, aval: Any, axes: tuple[int, ...] | None) -> ClosedJaxpr:
        """The equations that quantize an operand of a product, traced once."""
        from jamp._autocast.quantized import packed  # It imports Pallas: `_jaxpr.core` says more.

        assert self.float8 is not None
        key, dtype = ("quantize", aval, axes), self.float8.forward
        if key not in self._runs:
            self._runs[key] = jax.make_jaxpr(lambda x: packed(x, dtype, axes))(aval)
        return self._runs[key]

    def float8_product(self, eqn: JaxprEqn, avals: Sequence[Any]) -> ClosedJaxpr:
        """A product as a function of its operands and of what they are quantized to, traced once."""
        from jamp._autocast.quantized import quantized_product

        assert self.float8 is not None
        key = "product", *_jaxpr.parameters(eqn), *avals
        if key not in self._runs:
            self._runs[key] = jax.make_jaxpr(quantized_product(eqn, self.float8))(*avals)
        return self._runs[key]

    def convert(self, source: Var, target: Var, low: bool) -> JaxprEqn:
        """The equation that casts one variable to another."""
        return self._converts[low].replace(invars=[source], outvars=[target])

    def low_aval(self, aval: Any) -> Any:
        """The type of a low value that was traced with a type."""
        return aval.update(dtype=self.compute_dtype, weak_type=False)

    def holds(self, constant: Any) -> bool:
        """Whether the compute dtype holds a constant, to within its rounding."""
        with np.errstate(all="ignore"):
            wide, low = np.float64(constant), np.float64(np.asarray(constant).astype(self.compute_dtype))
            error = abs(low - wide) <= float(jnp.finfo(self.compute_dtype).eps) * abs(wide)
        return bool(error) or np.array_equal(wide, low, equal_nan=True)
