"""Cast: products read and write 16 bit, and nothing else is rounded.

`cast` maps a jaxpr to one in which every product is an equation that carries the decision about it. For arguments x, w
and u in float32:

    traced           cast to bfloat16
    y = x @ w        y = product(x, w)     bf16      x and w are arguments: the product casts them
    z = tanh(y)      a = float32(y)        f32       not a product: it reads y in float32
                     z = tanh(a)           f32
    v = y @ u        b = bfloat16(a)       bf16      cast for this product, because y has two readers
                     v = product(b, u)     bf16
    return z + v     return z + float32(v)

The result of a product (y and v) is *stored* in 16 bit, also after data movement. Other operations read it as float32.
A value with several readers is read as float32, and cast by each product that reads it (XLA merges equal casts). With
one reader, it is passed on in 16 bit: without the tanh, the second product would read y.

So each value has one cotangent for each reader, and these are added in float32. The backward pass of sum(z + v):

    dv = bfloat16(1)                       bf16      the cast of v, transposed
    db = dv @ u.T                          bf16      of u in bfloat16. b was computed, so its cotangent is 16 bit
    du = b.T @ dv                          f32       u is an argument: its gradient stays as it was accumulated
    da = float32(db) + dz * (1 - z**2)     f32       the cotangents from both readers of y
    dy = bfloat16(da)                      bf16
    dx, dw = dy @ w.T, x.T @ dy            f32       products of x, w and dy in bfloat16

A rule of the user can also *raise* an operation that was traced in 16 bit. It reads its operands in float32, and its
result is stored in float32. For a bfloat16 model and the rule {"dot_general[head]": "float32"}:

    logits = x @ head                bf16      is stored as the f32 result of the product
    wide = logits.astype(float32)    f32       reads what is stored
    largest = max(logits)            bf16      reads it rounded, as everything does that is not raised
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from jax.extend import core

from jamp._autocast import facts
from jamp._autocast.custom_rules import CastConstruct, Rewritten, enter, is_entered
from jamp._autocast.decisions import Decision, Decisions
from jamp._autocast.facts import Analyses, Constant, Facts, Input, Output
from jamp._autocast.qualify import (
    expands_products,
    is_candidate,
    sums_few_terms,
    why_not,
)
from jamp._autocast.rules import ACCUMULATE, COMPUTE, ROUNDED_AGAIN, WIDEST, YOURS
from jamp._autocast.target import Target
from jamp._cast import is_floating, is_inexact
from jamp._jaxprs import build, constructs, ir
from jamp._jaxprs.cache import Cache
from jamp._jaxprs.constructs import Derivative
from jamp._jaxprs.context import Context
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn, Var
from jamp._jaxprs.manual_axes import splits
from jamp._jaxprs.primitives import COPIES, MOVES, PRODUCTS, operation
from jamp._jaxprs.source import in_scope, is_transposed, user_line
from jamp._products.formats import Format
from jamp._products.product import Dtype, Product, equation
from jamp._rounded import rounded

Atom: TypeAlias = Any  # Var | Literal
_FLOAT32 = np.dtype(np.float32)
_COMPARISONS = frozenset(("eq", "ge", "gt", "le", "lt", "ne"))
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
    caster = _Caster(target, format, rest)
    arguments = [Input(is_computed=False)] * len(closed.in_avals)
    outputs = [Output()] * len(closed.out_avals)
    body = caster.run(closed, arguments, outputs, Context(in_shard_map=in_shard_map))
    return body.at([False] * len(outputs)), caster.decisions


class _Caster:
    """Casts jaxprs, each of them once for the same facts about its inputs and outputs, and the same kind of place."""

    def __init__(self, target: Target, format: Format | None, rest: Rest):
        self.target, self.format, self.rest = target, format, rest
        self.decisions = Decisions()
        self.analyses = Analyses(target.is_wide, target.is_out_of_range, target.raised, format is not None)
        self._cache: Cache[Rewritten] = Cache()

    def run(
        self, closed: ClosedJaxpr, inputs: Sequence[Input], outputs: Sequence[Output], context: Context
    ) -> Rewritten:
        path = context.path if self.target.parts else ""
        here = path, context.shard_map, context.is_manual, context.is_backward, context.in_backward_rule
        key = tuple(inputs), tuple(outputs), here
        return self._cache(closed, key, lambda: _Body(self, closed, inputs, outputs, context, path).rewritten())


class _Body:
    """The equations of a jaxpr, cast one after the other."""

    def __init__(
        self,
        caster: _Caster,
        closed: ClosedJaxpr,
        inputs: Sequence[Input],
        outputs: Sequence[Output],
        context: Context,
        path: str,
    ):
        self._caster, self._target, self._context, self._path, self._traced = (
            caster,
            caster.target,
            context,
            path,
            closed,
        )
        jaxpr = closed.jaxpr
        self._facts = Facts(caster.analyses, closed, inputs, outputs)
        self._outputs = outputs
        reads: list[Any] = [*(v for eqn in jaxpr.eqns for v in eqn.invars), *jaxpr.outvars]
        self._readers = Counter(v for v in reads if not ir.is_literal(v))
        self._stored: dict[Var, Var] = {}  # the values that are stored in 16 bit, or raised to float32
        self._cast_back: set[Var] = set()  # those that were cast to the traced dtype already
        self._eqns: list[JaxprEqn] = []
        self._changed = any(x.is_stored for x in inputs)
        self._decided: list[tuple[JaxprEqn, Decision]] = []  # the traced equations
        self._inputs = [self._define(v, x.is_stored) for v, x in zip(jaxpr.invars, inputs, strict=True)]

    def rewritten(self) -> Rewritten:
        """The cast jaxpr. Its outputs are 16 bit if they are stored so and read nowhere else."""
        jaxpr = self._traced.jaxpr
        for eqn in jaxpr.eqns:
            self._add(eqn)
        last = jaxpr.eqns[-1] if jaxpr.eqns else None
        recast = [
            x.is_read_wide if self._is_raised(v) else self._is_passed_on(v) or (x.keeps_narrow and self._is_stored(v))
            for v, x in zip(jaxpr.outvars, self._outputs, strict=True)
        ]
        results = [
            self._stored[v] if x else self._read(v, False, last) for v, x in zip(jaxpr.outvars, recast, strict=True)
        ]
        follow = self._facts.of_inputs("follows_long_sum", jaxpr.outvars)
        if not self._changed:
            for eqn, decision in self._decided:
                self._caster.decisions.add(eqn, decision)
            return Rewritten(self._traced, recast, self._traced.out_avals, False, follow)
        constants = dict(zip(jaxpr.constvars, self._traced.consts, strict=True))
        closed = build.closed_jaxpr(constants, self._inputs, results, self._eqns)
        return Rewritten(closed, recast, self._traced.out_avals, True, follow)

    def _add(self, eqn: JaxprEqn) -> None:
        name, rules = ir.name(eqn), self._target.rules
        if in_scope(eqn, facts.FULL_PRECISION):
            self._copy(eqn, name, facts.REGION, in_16_bit=False)
        elif name in constructs.CONSTRUCTS and name not in rules:
            self._enter(eqn)
        else:
            is_product = name in PRODUCTS
            is_back = is_product and (is_transposed(eqn) or self._context.is_backward)
            is_gradient = is_back and self._facts.of_outputs("is_consumed").isdisjoint(eqn.outvars)
            # Of arithmetic, only a rule for all operations of a scope asks.
            is_asked = is_product or self._target.parts
            is_out_of_range = bool(is_asked) and any(map(self._is_out_of_range, eqn.invars))
            is_few = is_product and sums_few_terms(eqn) and not self._expands_products(eqn)
            key = self._target.rule_key(eqn, self._path, is_gradient, is_out_of_range, is_few)
            category = rules[key].category if key in rules else facts.NO_RULE
            # A jaxpr in the parameters, such as the update of a scatter, runs only at the dtypes it was traced with.
            in_16_bit = self._runs_in_16_bit(eqn, category) and not constructs.has_body(eqn)
            if self._target.raises(key, eqn) and not self._compares_rounded(eqn):
                self._raise(eqn, key, category)
            elif self._target.raised and self._moves_raised(eqn):
                self._changed = True
            elif is_product:
                self._multiply(eqn, key, category, in_16_bit)
            else:
                self._copy(eqn, key, category, in_16_bit)

    def _expands_products(self, eqn: JaxprEqn) -> bool:
        follow = self._facts.of_inputs("follows_long_sum", eqn.invars)
        are_stored = [self._is_stored(v) and not self._is_raised(v) for v in eqn.invars]
        return expands_products(eqn, follow, are_stored)

    def _runs_in_16_bit(self, eqn: JaxprEqn, category: str) -> bool:
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
        is_exact = all(map(self._is_passed_on, arrays)) and all(map(self._target.holds, numbers))
        return len(arrays) == 1 and is_exact

    def _copy(self, eqn: JaxprEqn, key: str, category: str, in_16_bit: bool) -> None:
        """Add an equation, with all its float32 operands and results in 16 bit, or none."""
        # It may copy an element many times, and its transpose is the sum over the copies, such as over all uses of a
        # token. So it runs in float32, and its result is cast.
        is_copy = in_16_bit and ir.name(eqn) in COPIES
        recast = [in_16_bit and not is_copy and self._target.is_wide(v.aval) for v in (*eqn.invars, *eqn.outvars)]
        n = len(eqn.invars)
        reads = [self._read(v, x, eqn) for v, x in zip(eqn.invars, recast[:n], strict=True)]
        if is_copy:
            writes: list[Any] = [core.Var(v.aval) for v in eqn.outvars]
        else:
            writes = [self._define(v, x) for v, x in zip(eqn.outvars, recast[n:], strict=True)]
        run = build.replace_dtype(eqn, self._target.wide, self._target.compute_dtype) if any(recast) else eqn
        # By a rule for a scope, another place may decide otherwise about the same equation.
        is_same = reads == eqn.invars and writes == eqn.outvars and not self._target.parts
        run = run if is_same else run.replace(invars=reads, outvars=writes)
        self._eqns.append(run)
        casts = (self._target.wide, self._target.compute_dtype) if in_16_bit else None
        decision = Decision(eqn, key, category, casts)
        self._caster.decisions.add(run, decision)
        self._decided.append((eqn, decision))
        if is_copy:
            self._eqns.extend(
                build.convert(w, self._define(v, True), eqn) for w, v in zip(writes, eqn.outvars, strict=True)
            )
        self._changed |= in_16_bit

    def _raise(self, eqn: JaxprEqn, key: str, category: str) -> None:
        """Add an equation that was traced in 16 bit, with the digits of float32."""
        types = ir.avals([*eqn.invars, *eqn.outvars])
        n = len(eqn.invars)
        dtype = next(aval.dtype for aval in types[:n] if is_inexact(aval) and aval.dtype.itemsize == 2)
        is_16_bit = [aval.dtype == dtype for aval in types]
        is_raised = [
            x and v in self._facts.of_outputs("is_read_wide") for x, v in zip(is_16_bit[n:], eqn.outvars, strict=True)
        ]
        if ir.name(eqn) in PRODUCTS:
            keeps_cotangent = category != ACCUMULATE
            reads = [self._read(v, keeps_cotangent and self._is_raised(v), eqn) for v in eqn.invars]
            in_vain = is_16_bit[-1] and not is_raised[0]
            product = Product(
                eqn.primitive,
                tuple(ir.params(eqn).items()),
                tuple(aval.dtype for aval in types),
                key,
                category,
                _FLOAT32 if keeps_cotangent else dtype,
                (False,) * n,
                dtype if in_vain else _FLOAT32,
                self._why_in_vain(eqn.outvars[0], key, dtype) if in_vain else "",
            )
            self._eqns.append(equation(product, reads, self._define(eqn.outvars[0], is_raised[0]), eqn))
        else:
            reads = [
                self._read_raised(v, eqn) if x else self._read(v, False, eqn)
                for v, x in zip(eqn.invars, is_16_bit[:n], strict=True)
            ]
            writes = [self._define(v, x) for v, x in zip(eqn.outvars, is_raised, strict=True)]
            is_rounded = [x and not y for x, y in zip(is_16_bit[n:], is_raised, strict=True)]
            wide = [
                core.Var(aval.update(dtype=_FLOAT32)) if x else v
                for v, aval, x in zip(writes, types[n:], is_rounded, strict=True)
            ]
            run = build.widened(eqn, [dtype], _FLOAT32).replace(invars=reads, outvars=wide)
            self._eqns.append(run)
            self._caster.decisions.add(run, Decision(eqn, key, category, (dtype, _FLOAT32)))
            for x, v, flag in zip(wide, writes, is_rounded, strict=True):
                self._eqns.extend(_rounded(x, v, eqn) if flag else [])
        self._changed = True

    def _compares_rounded(self, eqn: JaxprEqn) -> bool:
        """Whether an equation compares 16-bit values, not all of which are raised. A maximum equals an operand."""
        is_16_bit = lambda v: is_floating(v.aval) and v.aval.dtype.itemsize == 2
        operands = [v for v in eqn.invars if not ir.is_literal(v) and is_16_bit(v)]
        return ir.name(eqn) in _COMPARISONS and not all(map(self._is_raised, operands))

    def _why_in_vain(self, result: Var, key: str, dtype: Dtype) -> str:
        """Why the float32 result of a raised product is rounded: which equation reads it in 16 bit."""
        reader = next((eqn for eqn in self._traced.jaxpr.eqns if result in eqn.invars), None)
        if reader is None:
            return f"{ROUNDED_AGAIN} {dtype}, as a result of the function or construct"
        line, scope = user_line(reader), key.partition("[")[2]
        other = f"*[{scope}" if scope else operation(reader)
        at = f" at {line}" if line else ""
        return f"{ROUNDED_AGAIN} {dtype} by {operation(reader)}{at}. A rule for {other!r} raises that too"

    def _moves_raised(self, eqn: JaxprEqn) -> bool:
        """Add a move of values that are raised, or the cast of a cotangent, if its result is read in float32."""
        name, (result, *_) = ir.name(eqn), (*eqn.outvars, None)
        # Cotangents of a value that is read twice, once in float32, are added in float32.
        if name not in MOVES | COPIES | {"add_any"} or result is None or not is_floating(result.aval):
            return False
        if name == "convert_element_type" and not self._is_raised(eqn.invars[0]):
            # The transpose of a cast to float32 rounds the cotangent that a raised product reads.
            is_back = is_transposed(eqn) or self._context.is_backward
            if not (
                is_back
                and result in self._facts.of_outputs("is_read_wide")
                and ir.avals([result])[0].dtype.itemsize == 2
            ):
                return False
            if not self._target.is_wide(eqn.invars[0].aval):
                return False
            self._stored[result] = self._read(eqn.invars[0], False, eqn)
            return True
        is_cast_back = ir.avals([result])[0].dtype.itemsize > 2
        is_read_wide = is_cast_back or not self._facts.of_outputs("is_read_wide").isdisjoint(eqn.outvars)
        if not is_read_wide or not any(map(self._is_raised, eqn.invars)):
            return False
        reads = [self._read_raised(v, eqn) if is_floating(v.aval) else v for v in eqn.invars]
        writes = [self._define(v, not is_cast_back) for v in eqn.outvars]
        self._eqns.append(eqn.replace(invars=reads, outvars=writes))
        return True

    def _read_raised(self, atom: Atom, eqn: JaxprEqn) -> Atom:
        """A 16-bit value for an equation in float32."""
        if self._is_raised(atom):
            return self._stored[atom]
        aval = atom.aval.update(dtype=_FLOAT32, weak_type=False)
        if ir.is_literal(atom):
            return core.Literal(np.asarray(atom.val).astype(np.float32), aval)
        wide = core.Var(aval)
        self._eqns.append(build.convert(atom, wide, eqn))
        return wide

    def _multiply(self, eqn: JaxprEqn, key: str, category: str, in_16_bit: bool) -> None:
        """Add a product with the decision about it."""
        operands, (result,) = eqn.invars, ir.avals(eqn.outvars)
        widens = in_16_bit and self._target.widens_gradients(eqn)
        arguments = [widens and self._target.is_wide(v.aval) and self._is_argument(v) for v in operands]
        casts = [in_16_bit and self._target.is_wide(v.aval) and not x for v, x in zip(operands, arguments, strict=True)]
        reads = [self._read(v, x, eqn) for v, x in zip(operands, casts, strict=True)]
        written = self._target.result_dtype(category)
        is_stored = in_16_bit and written == self._target.compute_dtype and self._target.is_wide(result)
        format, reason = self._format(eqn, key, category, in_16_bit)
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

    def _format(self, eqn: JaxprEqn, key: str, category: str, in_16_bit: bool) -> tuple[Dtype | Format | None, str]:
        """Return the format of a product, and why it is not the one that was asked for."""
        usual, wanted = self._target.compute_dtype if in_16_bit else None, self._caster.format
        if wanted is None or not is_candidate(eqn, category, in_16_bit):
            return usual, self._beyond_range(eqn) if key == f"{ir.name(eqn)}[range]" else ""
        why = why_not(
            eqn,
            wanted,
            key,
            is_asked_for=self._target.rules[key].reason == YOURS,
            is_linear=any(self._facts.of_inputs("follows_tangent", eqn.invars)),
            in_backward_rule=self._context.in_backward_rule,
            in_gradient=is_transposed(eqn) or self._context.is_backward,
            is_attention=all(self._facts.of_inputs("follows_product", eqn.invars[:2])),
            is_fed_on=eqn.outvars[0] in self._facts.of_outputs("feeds_product"),
        )
        return (usual, why) if why else (wanted, "")

    def _enter(self, eqn: JaxprEqn) -> None:
        if not is_entered(eqn, self._context.is_manual, self._target):
            return self._copy(eqn, ir.name(eqn), facts.NOT_ENTERED, in_16_bit=False)
        # A carry is float32. So is an operand whose gradient is a sum, over the steps of a loop or over devices.
        is_split = splits(eqn) if ir.name(eqn) == "shard_map" else [True] * len(eqn.invars)
        wide = {*constructs.added_up(eqn), *(i for i, x in enumerate(is_split) if not x)}
        is_by_rule = constructs.derivative(eqn) is Derivative.BY_RULE
        carry = constructs.carry(eqn)
        is_stored = [
            not is_by_rule and i not in carry if self._is_raised(v) else i not in wide and self._is_passed_on(v)
            for i, v in enumerate(eqn.invars)
        ]
        inside = self._context.inside(eqn)

        def rewrite(
            closed: ClosedJaxpr, inputs: Sequence[Input], outputs: Sequence[Output], in_backward_rule: bool = False
        ) -> Rewritten:
            here = inside._replace(in_backward_rule=in_backward_rule or inside.in_backward_rule)
            return self._caster.run(closed, inputs, outputs, here)

        # The first results keep their traced dtypes.
        first = len(eqn.outvars) if is_by_rule else len(carry)
        inputs, outputs = self._facts.into(eqn, is_stored, first)
        bodies = list(map(rewrite, constructs.bodies(eqn) or (), inputs, outputs))
        if not any(body.changed for body in bodies):
            self._eqns.append(eqn.replace(invars=[self._read(v, False, eqn) for v in eqn.invars]))
            return
        meets = lambda i: all if self._target.is_wide(eqn.outvars[i].aval) else any  # Branches may differ.
        recast = [i >= first and meets(i)(body.recast[i] for body in bodies) for i in range(len(eqn.outvars))]
        reads = [self._read(v, x, eqn) for v, x in zip(eqn.invars, is_stored, strict=True)]
        writes = [self._define(v, x) for v, x in zip(eqn.outvars, recast, strict=True)]
        call = CastConstruct(eqn, bodies, inputs, outputs, recast, rewrite, self._caster.rest)
        self._eqns.extend(enter(call, reads, writes, self._context.shard_map))
        self._changed = True

    def _constant(self, atom: Atom) -> Constant | None:
        found: Constant | None = self._facts.of_inputs("constant", [atom])[0]
        return found

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
        """Whether a value is stored in another dtype than it was traced in."""
        return not ir.is_literal(atom) and atom in self._stored

    def _is_raised(self, atom: Atom) -> bool:
        """Whether a value was traced in 16 bit and is stored in float32."""
        return self._is_stored(atom) and not self._target.is_wide(atom.aval)

    def _is_passed_on(self, atom: Atom) -> bool:
        """Whether a float32 value is stored in 16 bit and has a single reader."""
        return self._is_stored(atom) and not self._is_raised(atom) and self._readers[atom] == 1

    def _is_argument(self, atom: Atom) -> bool:
        """Whether a value is an argument of the function, perhaps moved, and not computed."""
        return (
            ir.is_literal(atom)
            or not self._target.is_wide(atom.aval)
            or not self._facts.of_inputs("is_computed", [atom])[0]
        )

    def _define(self, v: Var, is_stored: bool) -> Var:
        self._stored |= {v: self._target.stored_var(v)} if is_stored else {}
        return self._stored.get(v, v)

    def _read(self, atom: Atom, is_stored: bool, eqn: JaxprEqn | None) -> Atom:
        """A value for an equation, as it was traced or in the other dtype."""
        if is_stored and ir.is_literal(atom):
            return self._target.narrow_literal(atom)
        if is_stored and (self._is_passed_on(atom) or self._is_raised(atom)):
            return self._stored[atom]
        if self._is_stored(atom) and atom not in self._cast_back:
            self._cast_back.add(atom)
            cast = _rounded if self._is_raised(atom) else lambda *args: [build.convert(*args)]
            self._eqns.extend(cast(self._stored[atom], atom, eqn))
        if is_stored:
            target = self._target.stored_var(atom)
            self._eqns.append(build.convert(atom, target, eqn))
            return target
        return atom


def _rounded(source: Var, target: Var, like: JaxprEqn | None) -> list[JaxprEqn]:
    """The equations that round a float32 value to 16 bit, for all its readers."""
    cast = core.Var(target.aval)
    conversion = build.convert(source, cast, like)
    return [conversion, conversion.replace(primitive=rounded, params={}, invars=[cast], outvars=[target])]
