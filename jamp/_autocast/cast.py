"""Cast: products read and write 16 bit, and nothing else is rounded.

`Caster.cast` takes a jaxpr and returns a `Cast`: the same jaxpr at its new dtypes, and a decision for each equation.
The result of a product is *stored* in 16 bit, also after data movement. Other operations read it as float32.

Each product casts its own operands, so that cotangents are added in float32. A value with several readers is therefore
read as float32 and cast by each of them (XLA merges equal casts). With one reader, it is passed on in 16 bit.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

from jamp import _dataflow, _evaluate, _jaxpr
from jamp._autocast import context
from jamp._autocast.constructs import KEEPS_RESULTS, enter
from jamp._autocast.context import Input, Place
from jamp._autocast.rules import ACCUMULATE, COMPUTE, WIDEST, Rule
from jamp._autocast.target import Target
from jamp._cast import is_float32, is_inexact
from jamp._jaxpr import ClosedJaxpr, JaxprEqn, Var
from jamp._primitives import COPIES, MOVES, PRODUCTS
from jamp._shard_map import splits
from jamp._source_line import in_scope, is_transposed, scope_path

Atom: TypeAlias = Any  # Var | Literal
_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class Decision:
    """The decision about one equation.

    Attributes:
      eqn, category, key: The traced equation, its category, and the key of its rule.
      run, is_low: The equation to run, and whether it reads 16 bit.
      bodies: The cast bodies of a construct.
    """

    eqn: JaxprEqn
    category: str
    key: str
    run: JaxprEqn
    is_low: bool = False
    bodies: tuple["Cast", ...] = ()


class Caster(Target):
    """Casts jaxprs. Each body is cast once for the same `Input`s."""

    def __init__(self, compute_dtype: np.dtype[Any], rules: Mapping[str, Rule]):
        super().__init__(compute_dtype, rules)
        self._casts: dict[Any, Cast] = {}
        self.consumed = _dataflow.Backward(context.consumes)
        self.computed = _dataflow.Forward(context.computes)

    def cast(
        self, closed: ClosedJaxpr, inputs: Sequence[Input], place: Place, consumed: Sequence[bool] | None = None
    ) -> "Cast":
        """Cast a jaxpr. Of its outputs, `consumed` ones (`context.consumes`), by default none, have such readers."""
        consumed = tuple(consumed or [False] * len(closed.out_avals))
        # By the text of constants, because 0.0 == -0.0 and nan != nan.
        key = id(closed.jaxpr), tuple(x._replace(constant=repr(x.constant)) for x in inputs), place, consumed
        if key not in self._casts:  # The cast holds the jaxpr, so no other one gets its id.
            self._casts[key] = Cast(self, closed, inputs, place, consumed)
        return self._casts[key]


class Cast:
    """A jaxpr at its new dtypes.

    Attributes:
      caster, traced: The `Caster` that made it, and the jaxpr at its traced dtypes.
      decisions: The decision about each of its equations.
      low: Which outputs may be 16 bit: those that are stored in 16 bit and read nowhere else in the jaxpr.
      stored: Which outputs are stored in 16 bit.
      changed: Whether any equation differs from the traced one.
    """

    def __init__(
        self, caster: Caster, closed: ClosedJaxpr, inputs: Sequence[Input], place: Place, consumed: Sequence[bool]
    ):
        self.caster, self._place, self.traced = caster, place, closed
        jaxpr = closed.jaxpr
        reads: list[Any] = [*(v for eqn in jaxpr.eqns for v in eqn.invars), *jaxpr.outvars]
        self._readers = Counter(v for v in reads if not _jaxpr.is_literal(v))
        self._low: dict[Var, Var] = {}  # the values that are stored in 16 bit
        self._wide: set[Var] = set()  # those of them that were cast to float32 already
        self._constants: dict[Var, Any] = {}
        self._arrays: dict[Var, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self._closed: dict[tuple[bool, ...], ClosedJaxpr] = {}
        self._eqns: list[JaxprEqn] = []
        self.decisions: list[Decision] = []
        self.changed = any(x.low for x in inputs)
        self._consumed = caster.consumed(jaxpr, consumed)
        self._computed = caster.computed(jaxpr, [not x.weight for x in inputs])
        self._large = {v for v, x in zip(jaxpr.invars, inputs, strict=True) if x.large}
        for v, known in zip(jaxpr.invars, inputs, strict=True):
            self._define(v, known.low)
            self._constants[v] = known.constant
        self._inputs = [self._low.get(v, v) for v in jaxpr.invars]
        self.decisions.extend(map(self._decide, jaxpr.eqns))
        self.stored = [not _jaxpr.is_literal(v) and v in self._low for v in jaxpr.outvars]
        self.low = [self._is_low(v) for v in jaxpr.outvars]

    def closed(self, low: Sequence[bool] | None = None) -> ClosedJaxpr:
        """The jaxpr to evaluate. `low` says which outputs are to be 16 bit, by default none."""
        wanted = tuple(low) if low else (False,) * len(self.traced.jaxpr.outvars)
        if not self.changed and not any(wanted):
            return self.traced
        if wanted not in self._closed:
            start, wide, outputs = len(self._eqns), set(self._wide), []
            last = self.traced.jaxpr.eqns[-1] if self.traced.jaxpr.eqns else None
            for v, is_low in zip(self.traced.jaxpr.outvars, wanted, strict=True):
                stored = None if _jaxpr.is_literal(v) else self._low.get(v)
                outputs.append(stored if is_low and stored is not None else self._read(v, is_low, last))
            constants = dict(zip(self.traced.jaxpr.constvars, self.traced.consts, strict=True))
            self._closed[wanted] = _evaluate.closed_jaxpr(constants, self._inputs, outputs, self._eqns)
            del self._eqns[start:]  # the casts of these outputs
            self._wide = wide
        return self._closed[wanted]

    def _decide(self, eqn: JaxprEqn) -> Decision:
        name, rules = _jaxpr.name(eqn), self.caster.rules
        if in_scope(eqn, context.FULL_PRECISION):
            return Decision(eqn, context.REGION, name, self._add(eqn, low=False))
        if name in _jaxpr.CONSTRUCTS and name not in rules:
            return self._enter(eqn)
        is_gradient = (is_transposed(eqn) or self._place.backward) and not self._consumed.intersection(eqn.outvars)
        overflows = name in PRODUCTS and any(map(self._overflows, eqn.invars))
        key = self.caster.rule_key(eqn, self._place.scope, is_gradient, overflows)
        category = rules[key].category if key in rules else context.NO_RULE
        # A jaxpr in the parameters, such as that of a scatter, runs only at the dtypes it was traced with.
        is_low = self._runs_low(eqn, category) and not _jaxpr.has_body(eqn)
        run = self._multiply(eqn, category) if is_low and name in PRODUCTS else self._add(eqn, is_low)
        return Decision(eqn, category, key, run, is_low)

    def _runs_low(self, eqn: JaxprEqn, category: str) -> bool:
        """Whether an equation of a category reads and writes its float32 values in 16 bit."""
        floats = [v for v in eqn.invars if is_float32(v.aval)]
        if category in (COMPUTE, ACCUMULATE):
            others = {aval.dtype for aval in _jaxpr.avals(eqn.invars) if is_inexact(aval)}
            return bool(floats) and others <= {_FLOAT32, self.caster.compute_dtype}
        arrays = [v for v in floats if self._constant(v) is None]
        constants = [self._constant(v) for v in floats if self._constant(v) is not None]
        # Not of several arrays: a vmap around autocast may copy one of them, which has the sum as its cotangent.
        is_exact = all(map(self._is_low, arrays)) and all(map(self.caster.holds, constants))
        return category == WIDEST and len(arrays) == 1 and is_exact

    def _add(self, eqn: JaxprEqn, low: bool) -> JaxprEqn:
        """Add an equation, with all its float32 operands and results in 16 bit, or none."""
        reads = [self._read(v, low and is_float32(v.aval), eqn) for v in eqn.invars]
        if len(eqn.invars) == 1 and _jaxpr.name(eqn) in MOVES | COPIES:  # still filled with the same number
            self._constants.update((v, self._moved(eqn.invars[0], v)) for v in eqn.outvars)
            self._arrays.update((v, self._array(eqn.invars[0])) for v in eqn.outvars if is_float32(v.aval))
            self._large.update(eqn.outvars if self._overflows(eqn.invars[0]) else ())
        writes = [self._define(v, low and is_float32(v.aval)) for v in eqn.outvars]
        run = _evaluate.replace_dtype(eqn, _FLOAT32, self.caster.compute_dtype) if low else eqn
        is_same = reads == eqn.invars and writes == eqn.outvars
        self._eqns.append(run if is_same else run.replace(invars=reads, outvars=writes))
        self.changed |= low
        return self._eqns[-1]

    def _multiply(self, eqn: JaxprEqn, category: str) -> JaxprEqn:
        """Add a product in 16 bit, whose weights and, with the category "accumulate", whose result are float32."""
        wide = [self.caster.widens_gradients(eqn) and self._is_weight(v) for v in eqn.invars]
        reads = [v if x else self._read(v, is_float32(v.aval), eqn) for v, x in zip(eqn.invars, wide, strict=True)]
        (result,) = _jaxpr.avals(eqn.outvars)
        is_low = category == COMPUTE and is_float32(result)
        writes = [self._define(v, is_low) for v in eqn.outvars]
        run = _evaluate.with_result(eqn, self.caster.compute_dtype if is_low else result.dtype)
        if category == ACCUMULATE or any(wide):
            run = self.caster.product(run, reads, self._place.inside)
        self._eqns.append(run.replace(invars=reads, outvars=writes))
        self.changed = True
        return self._eqns[-1]

    def _enter(self, eqn: JaxprEqn) -> Decision:
        inner, name = _jaxpr.bodies(eqn), _jaxpr.name(eqn)
        # Inside shard_map, JAX does not tell a custom rule which of its operands are differentiated.
        if inner is None or (self._place.manual and _jaxpr.asks_for_zeros(eqn)):
            return Decision(eqn, context.NOT_ENTERED, name, self._add(eqn, low=False))
        # Float32 are a carry, and operands whose gradient is a sum over the steps of a loop or over devices.
        carry = _jaxpr.carry(eqn)
        wide = range(carry.stop) if name != "shard_map" else [i for i, x in enumerate(splits(eqn)) if not x]
        known = [
            Input(i not in wide and self._is_low(v), self._constant(v), self._is_weight(v), self._overflows(v))
            if i not in carry
            else Input()
            for i, v in enumerate(eqn.invars)
        ]
        scope = scope_path(eqn, self._place.scope) if self.caster.parts else ""
        place = self._place._replace(scope=scope, backward=self._place.backward or is_transposed(eqn))
        place = place._replace(manual=True, inside=eqn) if name == "shard_map" else place
        rewrite = lambda closed, inputs, backward=False: self.caster.cast(
            closed, inputs, place._replace(backward=backward or place.backward)
        )
        later = _dataflow.flags(eqn.outvars, self._consumed)
        consumed = self.caster.consumed.into(eqn, later)
        casts = tuple(
            self.caster.cast(closed, [known[i] for i in operands], place, outputs)
            for closed, operands, outputs in zip(inner, _jaxpr.body_operands(eqn), consumed, strict=True)
        )
        if not any(body.changed for body in casts):
            return Decision(eqn, context.ENTERED, name, self._add(eqn, low=False), bodies=casts)
        first = len(eqn.outvars) if name in KEEPS_RESULTS else len(carry)
        low = [i >= first and all(body.low[i] for body in casts) for i in range(len(eqn.outvars))]
        reads = [self._read(v, x.low, eqn) for v, x in zip(eqn.invars, known, strict=True)]
        writes = [self._define(v, x) for v, x in zip(eqn.outvars, low, strict=True)]
        self._eqns.extend(enter(eqn, casts, known, low, reads, writes, rewrite, place.inside))
        self.changed = True
        return Decision(eqn, context.ENTERED, name, self._eqns[-1], bodies=casts)

    def _constant(self, atom: Atom) -> Any:
        """The value of a scalar constant, or of an array filled with it; else None."""
        if _jaxpr.is_literal(atom):
            return atom.val if np.ndim(atom.val) == 0 else None
        return self._constants.get(atom)

    def _overflows(self, atom: Atom) -> bool:
        """Whether a value is float32, and known to be beyond the range of the compute dtype."""
        if not is_float32(atom.aval):
            return False
        constant, array = self._constant(atom), self._array(atom)
        is_large = not _jaxpr.is_literal(atom) and atom in self._large
        return is_large or self.caster.overflows(array if constant is None else constant)

    def _moved(self, atom: Atom, v: Var) -> Any:
        """The constant of a value that is another one moved, or cast: an integer may become another number."""
        constant, (before, after) = self._constant(atom), (x.dtype for x in _jaxpr.avals([atom, v]))
        if constant is None or before == after:
            return constant
        to_int = is_inexact(atom.aval) and not is_inexact(v.aval)  # of a number out of range, platforms differ
        return None if to_int else np.asarray(constant, before).astype(after)[()]

    def _array(self, atom: Atom) -> Any:
        """A constant array with the elements of a value, if there is one and this process can read it."""
        found = None if _jaxpr.is_literal(atom) else self._arrays.get(atom)
        is_here = isinstance(found, jax.Array) and not isinstance(found, jax.core.Tracer) and found.is_fully_addressable
        return found if is_here or isinstance(found, np.ndarray) else None

    def _is_low(self, atom: Atom) -> bool:
        """Whether a value is stored in 16 bit and has a single reader."""
        return not _jaxpr.is_literal(atom) and atom in self._low and self._readers[atom] == 1

    def _is_weight(self, atom: Atom) -> bool:
        """Whether a value is an argument of the function, perhaps moved, and not computed."""
        return _jaxpr.is_literal(atom) or not is_float32(atom.aval) or atom not in self._computed

    def _define(self, v: Var, low: bool) -> Var:
        self._low |= {v: self.caster.low_var(v)} if low else {}
        return self._low.get(v, v)

    def _read(self, atom: Atom, low: bool, eqn: JaxprEqn | None) -> Atom:
        """A value for an equation, in 16 bit or as it was traced."""
        if low and _jaxpr.is_literal(atom):
            return self.caster.low_literal(atom)
        if low and self._is_low(atom):
            return self._low[atom]
        if not _jaxpr.is_literal(atom) and atom in self._low and atom not in self._wide:
            self._wide.add(atom)
            self._eqns.append(self.caster.convert(self._low[atom], atom, False, eqn))
        if low:
            target = self.caster.low_var(atom)
            self._eqns.append(self.caster.convert(atom, target, True, eqn))
            return target
        return atom
