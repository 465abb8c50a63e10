"""Cast: products read and write 16 bit, and nothing else is rounded.

`cast` maps a jaxpr to one in which every product is an equation that carries the decision about it. The result of a
product is *stored* in 16 bit, also after data movement. Other operations read it as float32.

Each product casts its own operands, so that cotangents are added in float32. A value with several readers is therefore
read as float32 and cast by each of them (XLA merges equal casts). With one reader, it is passed on in 16 bit.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.extend import core

from jamp._autocast import facts
from jamp._autocast.custom_rules import KEEPS_RESULTS, Rewritten, enter, is_entered
from jamp._autocast.facts import Constant, Input, Place
from jamp._autocast.rules import ACCUMULATE, COMPUTE, WIDEST
from jamp._autocast.target import Target
from jamp._cast import is_inexact
from jamp._jaxprs import build, dataflow, ir
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn, Var
from jamp._jaxprs.manual_axes import splits
from jamp._jaxprs.primitives import COPIES, PRODUCTS
from jamp._jaxprs.source import in_scope, is_transposed, scope_path
from jamp._products.product import Product, equation

Atom: TypeAlias = Any  # Var | Literal


def cast(closed: ClosedJaxpr, target: Target, manual: bool = False) -> ClosedJaxpr:
    """The function with its products in 16 bit, at the dtypes of its arguments and results.

    `manual` says that it is called inside a shard_map.
    """
    weights = [Input(computed=False)] * len(closed.in_avals)
    outputs = [Output()] * len(closed.out_avals)
    return _Pass(target).run(closed, weights, Place(manual=manual), outputs).at([False] * len(outputs))


class Output(NamedTuple):
    """What is known of an output of a jaxpr.

    Attributes:
      consumed: Whether it is consumed (`facts.consumes`).
      stored: Whether it is 16 bit if it is the result of a product, perhaps moved, even if others read it too.
    """

    consumed: bool = False
    stored: bool = False


class _Pass:
    """Casts jaxprs, each of them once for the same facts about its inputs and outputs."""

    def __init__(self, target: Target):
        self.target = target
        self.consumed = dataflow.Backward(facts.consumes)
        self.computed = dataflow.spreads(functools.partial(facts.computes, target.is_wide))
        as_constant = functools.partial(facts.as_constant, target.is_out_of_range)
        fills = functools.partial(facts.fills, target.is_wide)
        self.constants = dataflow.Forward(fills, facts.join_constants, as_constant)
        self._done: dict[Any, tuple[ClosedJaxpr, Rewritten]] = {}

    def run(self, closed: ClosedJaxpr, inputs: Sequence[Input], place: Place, outputs: Sequence[Output]) -> Rewritten:
        key = ir.identity(closed), tuple(inputs), place, tuple(outputs)
        if key not in self._done:  # With the function, so that no other one gets its ids.
            self._done[key] = closed, _Body(self, closed, inputs, place, outputs).rewritten()
        return self._done[key][1]


class _Body:
    """The equations of a jaxpr, cast one after the other."""

    def __init__(
        self,
        all_bodies: _Pass,
        closed: ClosedJaxpr,
        inputs: Sequence[Input],
        place: Place,
        outputs: Sequence[Output],
    ):
        self._pass, self._target, self._place, self._traced = all_bodies, all_bodies.target, place, closed
        jaxpr = closed.jaxpr
        self._consumed = all_bodies.consumed(jaxpr, [x.consumed for x in outputs])
        self._computed = all_bodies.computed(closed, [x.computed for x in inputs])
        self._constants = all_bodies.constants(closed, [x.constant for x in inputs])
        self._outputs = outputs
        reads: list[Any] = [*(v for eqn in jaxpr.eqns for v in eqn.invars), *jaxpr.outvars]
        self._readers = Counter(v for v in reads if not ir.is_literal(v))
        self._low: dict[Var, Var] = {}  # the values that are stored in 16 bit
        self._wide: set[Var] = set()  # those of them that were cast to float32 already
        self._eqns: list[JaxprEqn] = []
        self._changed = any(x.low for x in inputs)
        self._inputs = [self._define(v, x.low) for v, x in zip(jaxpr.invars, inputs, strict=True)]

    def rewritten(self) -> Rewritten:
        """The cast jaxpr. Its outputs are 16 bit if they are stored so and read nowhere else."""
        jaxpr = self._traced.jaxpr
        for eqn in jaxpr.eqns:
            self._add(eqn)
        last = jaxpr.eqns[-1] if jaxpr.eqns else None
        low = [
            self._is_low(v) or (x.stored and self._is_stored(v))
            for v, x in zip(jaxpr.outvars, self._outputs, strict=True)
        ]
        results = [self._low[v] if x else self._read(v, False, last) for v, x in zip(jaxpr.outvars, low, strict=True)]
        if not self._changed:
            return Rewritten(self._traced, low, self._traced.out_avals, False)
        constants = dict(zip(jaxpr.constvars, self._traced.consts, strict=True))
        closed = build.closed_jaxpr(constants, self._inputs, results, self._eqns)
        return Rewritten(closed, low, self._traced.out_avals, True)

    def _add(self, eqn: JaxprEqn) -> None:
        name, rules = ir.name(eqn), self._target.rules
        if in_scope(eqn, facts.FULL_PRECISION):
            self._copy(eqn, low=False)
        elif name in ir.CONSTRUCTS and name not in rules:
            self._enter(eqn)
        else:
            is_product = name in PRODUCTS
            is_back = is_product and (is_transposed(eqn) or self._place.backward)
            is_gradient = is_back and not self._consumed.intersection(eqn.outvars)
            # Of arithmetic, only a rule for all operations of a scope asks.
            is_asked = is_product or self._target.parts
            is_out_of_range = bool(is_asked) and any(map(self._is_out_of_range, eqn.invars))
            key = self._target.rule_key(eqn, self._place.scope, is_gradient, is_out_of_range)
            category = rules[key].category if key in rules else facts.NO_RULE
            # A jaxpr in the parameters, such as that of a scatter, runs only at the dtypes it was traced with.
            is_low = self._runs_low(eqn, category) and not ir.has_body(eqn)
            if is_product:
                self._multiply(eqn, key, category, is_low)
            else:
                self._copy(eqn, is_low)

    def _runs_low(self, eqn: JaxprEqn, category: str) -> bool:
        """Whether an equation of a category reads and writes its float32 values in 16 bit."""
        floats = [v for v in eqn.invars if self._target.is_wide(v.aval)]
        if category in (COMPUTE, ACCUMULATE):
            others = {aval.dtype for aval in ir.avals(eqn.invars) if is_inexact(aval)}
            return bool(floats) and others <= {self._target.wide, self._target.compute_dtype}
        if category != WIDEST:
            return False
        arrays = [v for v in floats if self._number(v) is None]
        numbers = [x for x in map(self._number, floats) if x is not None]
        # Not of several arrays: a vmap around autocast may copy one of them, which has the sum as its cotangent.
        is_exact = all(map(self._is_low, arrays)) and all(map(self._target.holds, numbers))
        return len(arrays) == 1 and is_exact

    def _copy(self, eqn: JaxprEqn, low: bool) -> None:
        """Add an equation, with all its float32 operands and results in 16 bit, or none."""
        if low and ir.name(eqn) in COPIES:
            return self._copy_elements(eqn)
        reads = [self._read(v, low and self._target.is_wide(v.aval), eqn) for v in eqn.invars]
        writes = [self._define(v, low and self._target.is_wide(v.aval)) for v in eqn.outvars]
        run = build.replace_dtype(eqn, self._target.wide, self._target.compute_dtype) if low else eqn
        is_same = reads == eqn.invars and writes == eqn.outvars
        self._eqns.append(run if is_same else run.replace(invars=reads, outvars=writes))
        self._changed |= low

    def _copy_elements(self, eqn: JaxprEqn) -> None:
        """Add an equation that may copy an element many times, with its result in 16 bit.

        It runs in float32, because its transpose is the sum over the copies, such as over all uses of a token.
        """
        (v,), reads = eqn.outvars, [self._read(x, False, eqn) for x in eqn.invars]
        wide = core.Var(v.aval)
        self._eqns.append(eqn.replace(invars=reads, outvars=[wide]))
        self._eqns.append(build.convert(wide, self._define(v, True), eqn))
        self._changed = True

    def _multiply(self, eqn: JaxprEqn, key: str, category: str, is_low: bool) -> None:
        """Add a product with the decision about it."""
        operands, (result,) = eqn.invars, ir.avals(eqn.outvars)
        widens = is_low and self._target.widens_gradients(eqn)
        weights = [widens and self._target.is_wide(v.aval) and self._is_weight(v) for v in operands]
        casts = [is_low and self._target.is_wide(v.aval) and not x for v, x in zip(operands, weights, strict=True)]
        reads = [self._read(v, x, eqn) for v, x in zip(operands, casts, strict=True)]
        written = self._target.result_dtype(category)
        is_stored = is_low and written == self._target.compute_dtype and self._target.is_wide(result)
        product = Product(
            eqn.primitive,
            tuple(ir.params(eqn).items()),
            tuple(aval.dtype for aval in (*ir.avals(operands), result)),
            key,
            category,
            self._target.compute_dtype if is_low else None,
            tuple(weights),
            written if is_stored else result.dtype,
            self._beyond_range(eqn) if key.endswith("[range]") else "",
        )
        self._eqns.append(equation(product, reads, self._define(eqn.outvars[0], is_stored), eqn))
        self._changed = True

    def _enter(self, eqn: JaxprEqn) -> None:
        if not is_entered(eqn, self._place.manual, self._target):
            return self._copy(eqn, low=False)
        # A carry is float32. So is an operand whose gradient is a sum, over the steps of a loop or over devices.
        name, carry = ir.name(eqn), ir.carry(eqn)
        wide = range(carry.stop) if name != "shard_map" else [i for i, x in enumerate(splits(eqn)) if not x]
        known = [
            Input(i not in wide and self._is_low(v), self._constant(v), not self._is_weight(v))
            if i not in carry
            else Input()
            for i, v in enumerate(eqn.invars)
        ]
        scope = scope_path(eqn, self._place.scope) if self._target.parts else ""
        place = self._place._replace(scope=scope, backward=self._place.backward or is_transposed(eqn))
        place = place._replace(manual=True, inside=eqn) if name == "shard_map" else place

        def rewrite(
            closed: ClosedJaxpr, inputs: Sequence[Input], *, backward: bool, stored: Sequence[bool]
        ) -> Rewritten:
            outputs = [Output(stored=x) for x in stored]
            return self._pass.run(closed, inputs, place._replace(backward=backward or place.backward), outputs)

        consumed = self._pass.consumed.into(eqn, dataflow.flags(eqn.outvars, self._consumed))
        bodies = [
            self._pass.run(closed, [known[i] for i in operands], place, list(map(Output, flags)))
            for closed, operands, flags in zip(ir.bodies(eqn) or (), ir.body_operands(eqn), consumed, strict=True)
        ]
        if not any(body.changed for body in bodies):
            return self._copy(eqn, low=False)
        first = len(eqn.outvars) if name in KEEPS_RESULTS else len(carry)
        low = [i >= first and all(body.low[i] for body in bodies) for i in range(len(eqn.outvars))]
        reads = [self._read(v, x.low, eqn) for v, x in zip(eqn.invars, known, strict=True)]
        writes = [self._define(v, x) for v, x in zip(eqn.outvars, low, strict=True)]
        self._eqns.extend(enter(eqn, bodies, known, low, reads, writes, rewrite, place.inside))
        self._changed = True

    def _constant(self, atom: Atom) -> Constant | None:
        return self._pass.constants.read(self._constants, [atom])[0]

    def _number(self, atom: Atom) -> Any:
        """The number that a value is filled with, if it is a constant; else None."""
        constant = self._constant(atom)
        return constant.number.value if constant and constant.number else None

    def _beyond_range(self, eqn: JaxprEqn) -> str:
        """Why a product of float64 operands stays float64, if one of them is beyond the range of float32."""
        dtype = self._target.compute_dtype
        if dtype.itemsize == 2:
            return ""
        found = [self._number(v) for v in eqn.invars if self._is_out_of_range(v)]
        constant = "an array of constants" if found[0] is None else f"a constant of {found[0]:g}"
        return f"an operand is {constant}, beyond the range of {dtype}"

    def _is_out_of_range(self, atom: Atom) -> bool:
        """Whether a value is a constant of float32 beyond the range of the compute dtype."""
        constant = self._constant(atom) if self._target.is_wide(atom.aval) else None
        return constant is not None and (constant.is_out_of_range or self._target.is_out_of_range(self._number(atom)))

    def _is_stored(self, atom: Atom) -> bool:
        """Whether a value is stored in 16 bit."""
        return not ir.is_literal(atom) and atom in self._low

    def _is_low(self, atom: Atom) -> bool:
        """Whether a value is stored in 16 bit and has a single reader."""
        return self._is_stored(atom) and self._readers[atom] == 1

    def _is_weight(self, atom: Atom) -> bool:
        """Whether a value is an argument of the function, perhaps moved, and not computed."""
        return ir.is_literal(atom) or not self._target.is_wide(atom.aval) or not self._computed[atom]

    def _define(self, v: Var, low: bool) -> Var:
        self._low |= {v: self._target.low_var(v)} if low else {}
        return self._low.get(v, v)

    def _read(self, atom: Atom, low: bool, eqn: JaxprEqn | None) -> Atom:
        """A value for an equation, in 16 bit or as it was traced."""
        if low and ir.is_literal(atom):
            return self._target.low_literal(atom)
        if low and self._is_low(atom):
            return self._low[atom]
        if self._is_stored(atom) and atom not in self._wide:
            self._wide.add(atom)
            self._eqns.append(build.convert(self._low[atom], atom, eqn))
        if low:
            target = self._target.low_var(atom)
            self._eqns.append(build.convert(atom, target, eqn))
            return target
        return atom
