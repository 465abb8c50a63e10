"""Cast: products read and write 16 bit, and nothing else is rounded.

`cast` maps a jaxpr to one in which every product is an equation that carries the decision about it. The result of a
product is *stored* in 16 bit, also after data movement. Other operations read it as float32.

Each product casts its own operands, so that cotangents are added in float32. A value with several readers is therefore
read as float32 and cast by each of them (XLA merges equal casts). With one reader, it is passed on in 16 bit.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.extend import core

from jamp._autocast import facts
from jamp._autocast.custom_rules import Call, Rewritten, enter, is_entered
from jamp._autocast.decisions import Decision, Decisions
from jamp._autocast.facts import Constant, Input, Output
from jamp._autocast.qualify import feeds, is_after_product, is_candidate, why_not
from jamp._autocast.rules import ACCUMULATE, COMPUTE, WIDEST, YOURS
from jamp._autocast.target import Target
from jamp._cast import is_inexact
from jamp._jaxprs import build, constructs, dataflow, ir
from jamp._jaxprs.cache import Cache
from jamp._jaxprs.constructs import Derivative
from jamp._jaxprs.context import Context
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn, Var
from jamp._jaxprs.manual_axes import splits
from jamp._jaxprs.primitives import COPIES, PRODUCTS
from jamp._jaxprs.source import in_scope, is_transposed
from jamp._products.formats import Format
from jamp._products.product import Dtype, Product, equation

Atom: TypeAlias = Any  # Var | Literal
Rest: TypeAlias = Callable[[ClosedJaxpr], ClosedJaxpr]


def cast(
    closed: ClosedJaxpr, target: Target, format: Format | None, rest: Rest, in_shard_map: bool = False
) -> tuple[ClosedJaxpr, Decisions]:
    """Return a function with its products in 16 bit, at the dtypes of its arguments and results, and the decisions.

    Args:
      closed: The function.
      target: The dtypes and the rules.
      format: That of the products that qualify, if it is not the compute dtype.
      rest: The passes after this one. Derivative rules are traced while JAX differentiates, and run through all passes.
      in_shard_map: Whether it is called inside a shard_map.
    """
    every = _Pass(target, format, rest)
    arguments = [Input(is_computed=False)] * len(closed.in_avals)
    outputs = [Output()] * len(closed.out_avals)
    body = every.run(closed, arguments, outputs, _Place(Context(in_shard_map=in_shard_map)))
    return body.at([False] * len(outputs)), every.decisions


class _Place(NamedTuple):
    """Where a jaxpr is. No transposed equation is around the backward rule of a custom_vjp."""

    context: Context
    in_backward_rule: bool = False

    @property
    def is_backward(self) -> bool:
        return self.in_backward_rule or self.context.is_backward


class _Pass:
    """Casts jaxprs, each of them once for the same facts about its inputs and outputs, and the same kind of place."""

    def __init__(self, target: Target, format: Format | None, rest: Rest):
        self.target, self.format, self.rest = target, format, rest
        self.decisions = Decisions()
        self.consumed = dataflow.Backward(facts.consumes)
        self.computed = dataflow.spreads(facts.computes)
        as_constant = functools.partial(facts.as_constant, target.is_out_of_range)
        fills = functools.partial(facts.fills, target.is_wide)
        self.constants = dataflow.Forward(fills, facts.join_constants, as_constant)
        self.after_product, self.feeding = dataflow.spreads(is_after_product), dataflow.Backward(feeds)
        self.of_tangents = dataflow.spreads(lambda eqn, operands: any(operands))
        self._cache: Cache[Rewritten] = Cache()

    def run(self, closed: ClosedJaxpr, inputs: Sequence[Input], outputs: Sequence[Output], place: _Place) -> Rewritten:
        context = place.context
        path = context.path if self.target.parts else ""
        here = path, context.shard_map, context.is_manual, place.is_backward, place.in_backward_rule
        key = tuple(inputs), tuple(outputs), here
        return self._cache(closed, key, lambda: _Body(self, closed, inputs, outputs, place, path).rewritten())


class _Body:
    """The equations of a jaxpr, cast one after the other."""

    def __init__(
        self,
        every: _Pass,
        closed: ClosedJaxpr,
        inputs: Sequence[Input],
        outputs: Sequence[Output],
        place: _Place,
        path: str,
    ):
        self._pass, self._target, self._place, self._path, self._traced = every, every.target, place, path, closed
        jaxpr = closed.jaxpr
        self._consumed = every.consumed(closed, [x.is_consumed for x in outputs])
        self._computed = every.computed(closed, [x.is_computed for x in inputs])
        self._constants = every.constants(closed, [x.constant for x in inputs])
        if every.format:
            self._after_product = every.after_product(closed, [x.follows_product for x in inputs])
            self._feeding = every.feeding(closed, [x.feeds_product for x in outputs])
            self._of_tangents = every.of_tangents(closed, [x.follows_tangent for x in inputs])
        self._outputs = outputs
        reads: list[Any] = [*(v for eqn in jaxpr.eqns for v in eqn.invars), *jaxpr.outvars]
        self._readers = Counter(v for v in reads if not ir.is_literal(v))
        self._narrow: dict[Var, Var] = {}  # the values that are stored in 16 bit
        self._wide: set[Var] = set()  # the narrow values that were cast to float32 already
        self._eqns: list[JaxprEqn] = []
        self._changed = any(x.is_narrow for x in inputs)
        self._decided: list[tuple[JaxprEqn, Decision]] = []  # the traced equations
        self._inputs = [self._define(v, x.is_narrow) for v, x in zip(jaxpr.invars, inputs, strict=True)]

    def rewritten(self) -> Rewritten:
        """The cast jaxpr. Its outputs are 16 bit if they are stored so and read nowhere else."""
        jaxpr = self._traced.jaxpr
        for eqn in jaxpr.eqns:
            self._add(eqn)
        last = jaxpr.eqns[-1] if jaxpr.eqns else None
        narrow = [
            self._is_narrow(v) or (x.keeps_narrow and self._is_stored(v))
            for v, x in zip(jaxpr.outvars, self._outputs, strict=True)
        ]
        results = [
            self._narrow[v] if x else self._read(v, False, last) for v, x in zip(jaxpr.outvars, narrow, strict=True)
        ]
        if not self._changed:
            for eqn, decision in self._decided:
                self._pass.decisions.add(eqn, decision)
            return Rewritten(self._traced, narrow, self._traced.out_avals, False)
        constants = dict(zip(jaxpr.constvars, self._traced.consts, strict=True))
        closed = build.closed_jaxpr(constants, self._inputs, results, self._eqns)
        return Rewritten(closed, narrow, self._traced.out_avals, True)

    def _add(self, eqn: JaxprEqn) -> None:
        name, rules = ir.name(eqn), self._target.rules
        if in_scope(eqn, facts.FULL_PRECISION):
            self._copy(eqn, name, facts.REGION, narrow=False)
        elif name in constructs.CONSTRUCTS and name not in rules:
            self._enter(eqn)
        else:
            is_product = name in PRODUCTS
            is_back = is_product and (is_transposed(eqn) or self._place.is_backward)
            is_gradient = is_back and not self._consumed.intersection(eqn.outvars)
            # Of arithmetic, only a rule for all operations of a scope asks.
            is_asked = is_product or self._target.parts
            is_out_of_range = bool(is_asked) and any(map(self._is_out_of_range, eqn.invars))
            key = self._target.rule_key(eqn, self._path, is_gradient, is_out_of_range)
            category = rules[key].category if key in rules else facts.NO_RULE
            # A jaxpr in the parameters, such as the update of a scatter, runs only at the dtypes it was traced with.
            is_narrow = self._runs_narrow(eqn, category) and not constructs.has_body(eqn)
            if is_product:
                self._multiply(eqn, key, category, is_narrow)
            else:
                self._copy(eqn, key, category, is_narrow)

    def _runs_narrow(self, eqn: JaxprEqn, category: str) -> bool:
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
        is_exact = all(map(self._is_narrow, arrays)) and all(map(self._target.holds, numbers))
        return len(arrays) == 1 and is_exact

    def _copy(self, eqn: JaxprEqn, key: str, category: str, narrow: bool) -> None:
        """Add an equation, with all its float32 operands and results in 16 bit, or none."""
        # It may copy an element many times, and its transpose is the sum over the copies, such as over all uses of a
        # token. So it runs in float32, and its result is cast.
        is_copy = narrow and ir.name(eqn) in COPIES
        is_narrow = [narrow and not is_copy and self._target.is_wide(v.aval) for v in (*eqn.invars, *eqn.outvars)]
        n = len(eqn.invars)
        reads = [self._read(v, x, eqn) for v, x in zip(eqn.invars, is_narrow[:n], strict=True)]
        if is_copy:
            writes: list[Any] = [core.Var(v.aval) for v in eqn.outvars]
        else:
            writes = [self._define(v, x) for v, x in zip(eqn.outvars, is_narrow[n:], strict=True)]
        run = build.replace_dtype(eqn, self._target.wide, self._target.compute_dtype) if any(is_narrow) else eqn
        # By a rule for a scope, another place may decide otherwise about the same equation.
        is_same = reads == eqn.invars and writes == eqn.outvars and not self._target.parts
        run = run if is_same else run.replace(invars=reads, outvars=writes)
        self._eqns.append(run)
        decision = Decision(eqn, key, category, narrow)
        self._pass.decisions.add(run, decision)
        self._decided.append((eqn, decision))
        if is_copy:
            self._eqns.extend(
                build.convert(w, self._define(v, True), eqn) for w, v in zip(writes, eqn.outvars, strict=True)
            )
        self._changed |= narrow

    def _multiply(self, eqn: JaxprEqn, key: str, category: str, is_narrow: bool) -> None:
        """Add a product with the decision about it."""
        operands, (result,) = eqn.invars, ir.avals(eqn.outvars)
        widens = is_narrow and self._target.widens_gradients(eqn)
        arguments = [widens and self._target.is_wide(v.aval) and self._is_argument(v) for v in operands]
        casts = [is_narrow and self._target.is_wide(v.aval) and not x for v, x in zip(operands, arguments, strict=True)]
        reads = [self._read(v, x, eqn) for v, x in zip(operands, casts, strict=True)]
        written = self._target.result_dtype(category)
        is_stored = is_narrow and written == self._target.compute_dtype and self._target.is_wide(result)
        format, reason = self._format(eqn, key, category, is_narrow)
        product = Product(
            eqn.primitive,
            tuple(ir.params(eqn).items()),
            tuple(aval.dtype for aval in (*ir.avals(operands), result)),
            key,
            category,
            format,
            tuple(arguments),
            written if is_stored else result.dtype,
            reason,
        )
        self._eqns.append(equation(product, reads, self._define(eqn.outvars[0], is_stored), eqn))
        self._changed = True

    def _format(self, eqn: JaxprEqn, key: str, category: str, is_narrow: bool) -> tuple[Dtype | Format | None, str]:
        """Return the format of a product, and why it is not the one that was asked for."""
        usual, wanted = self._target.compute_dtype if is_narrow else None, self._pass.format
        if wanted is None or not is_candidate(eqn, category, is_narrow):
            return usual, self._beyond_range(eqn) if key == f"{ir.name(eqn)}[range]" else ""
        why = why_not(
            eqn,
            wanted,
            key,
            is_asked_for=self._target.rules[key].reason == YOURS,
            is_linear=any(self._pass.of_tangents.read(self._of_tangents, eqn.invars)),
            in_backward_rule=self._place.in_backward_rule,
            in_gradient=is_transposed(eqn) or self._place.is_backward,
            is_attention=all(self._pass.after_product.read(self._after_product, eqn.invars[:2])),
            is_fed_on=eqn.outvars[0] in self._feeding,
        )
        return (usual, why) if why else (wanted, "")

    def _enter(self, eqn: JaxprEqn) -> None:
        if not is_entered(eqn, self._place.context.is_manual, self._target):
            return self._copy(eqn, ir.name(eqn), facts.NOT_ENTERED, narrow=False)
        # A carry is float32. So is an operand whose gradient is a sum, over the steps of a loop or over devices.
        is_split = splits(eqn) if ir.name(eqn) == "shard_map" else [True] * len(eqn.invars)
        wide = {*constructs.added_up(eqn), *(i for i, x in enumerate(is_split) if not x)}
        narrow_operands = [i not in wide and self._is_narrow(v) for i, v in enumerate(eqn.invars)]
        place = self._place._replace(context=self._place.context.inside(eqn))

        def rewrite(
            closed: ClosedJaxpr, inputs: Sequence[Input], outputs: Sequence[Output], in_backward_rule: bool = False
        ) -> Rewritten:
            here = place._replace(in_backward_rule=in_backward_rule or place.in_backward_rule)
            return self._pass.run(closed, inputs, outputs, here)

        inputs, outputs = self._facts_of_bodies(eqn, narrow_operands)
        bodies = list(map(rewrite, constructs.bodies(eqn) or (), inputs, outputs))
        if not any(body.changed for body in bodies):
            self._eqns.append(eqn.replace(invars=[self._read(v, False, eqn) for v in eqn.invars]))
            return
        is_by_rule = constructs.derivative(eqn) is Derivative.BY_RULE
        first = len(eqn.outvars) if is_by_rule else len(constructs.carry(eqn))
        narrow = [i >= first and all(body.narrow[i] for body in bodies) for i in range(len(eqn.outvars))]
        reads = [self._read(v, x, eqn) for v, x in zip(eqn.invars, narrow_operands, strict=True)]
        writes = [self._define(v, x) for v, x in zip(eqn.outvars, narrow, strict=True)]
        call = Call(eqn, bodies, inputs, outputs, narrow, rewrite, self._pass.rest)
        self._eqns.extend(enter(call, reads, writes, place.context.shard_map))
        self._changed = True

    def _facts_of_bodies(self, eqn: JaxprEqn, narrow: Sequence[bool]) -> tuple[list[list[Input]], list[list[Output]]]:
        """Return what is known of the inputs and the outputs of each body of a construct with these narrow operands."""
        constant, computed = (
            self._pass.constants.into(eqn, self._constants),
            self._pass.computed.into(eqn, self._computed),
        )
        inputs = [
            list(map(Input, (narrow[i] for i in places), *facts))
            for places, *facts in zip(constructs.operands_of_bodies(eqn), constant, computed, strict=True)
        ]
        outputs = [list(map(Output, flags)) for flags in self._pass.consumed.into(eqn, self._consumed)]
        if self._pass.format:
            after = self._pass.after_product.into(eqn, self._after_product)
            tangent = self._pass.of_tangents.into(eqn, self._of_tangents)
            feeding = self._pass.feeding.into(eqn, self._feeding)
            inputs = [
                [x._replace(follows_product=y, follows_tangent=z) for x, y, z in zip(*columns, strict=True)]
                for columns in zip(inputs, after, tangent, strict=True)
            ]
            outputs = [
                [x._replace(feeds_product=y) for x, y in zip(*columns, strict=True)]
                for columns in zip(outputs, feeding, strict=True)
            ]
        return inputs, outputs

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
        return not ir.is_literal(atom) and atom in self._narrow

    def _is_narrow(self, atom: Atom) -> bool:
        """Whether a value is stored in 16 bit and has a single reader."""
        return self._is_stored(atom) and self._readers[atom] == 1

    def _is_argument(self, atom: Atom) -> bool:
        """Whether a value is an argument of the function, perhaps moved, and not computed."""
        return ir.is_literal(atom) or not self._target.is_wide(atom.aval) or not self._computed[atom]

    def _define(self, v: Var, narrow: bool) -> Var:
        self._narrow |= {v: self._target.narrow_var(v)} if narrow else {}
        return self._narrow.get(v, v)

    def _read(self, atom: Atom, narrow: bool, eqn: JaxprEqn | None) -> Atom:
        """A value for an equation, in 16 bit or as it was traced."""
        if narrow and ir.is_literal(atom):
            return self._target.narrow_literal(atom)
        if narrow and self._is_narrow(atom):
            return self._narrow[atom]
        if self._is_stored(atom) and atom not in self._wide:
            self._wide.add(atom)
            self._eqns.append(build.convert(self._narrow[atom], atom, eqn))
        if narrow:
            target = self._target.narrow_var(atom)
            self._eqns.append(build.convert(atom, target, eqn))
            return target
        return atom
