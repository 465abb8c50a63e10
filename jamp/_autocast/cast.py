"""Cast: products read and write 16 bit, and nothing else is rounded.

`Caster.cast` takes a jaxpr and returns a `Cast`: the same jaxpr at its new dtypes, and a decision for each equation.
The result of a product is *stored* in 16 bit, also after data movement. Other operations read it as float32.

Each product casts its own operands, so that cotangents are added in float32. A value with several readers is therefore
read as float32 and cast by each of them (XLA merges equal casts). With one reader, it is passed on in 16 bit.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax import lax

from jamp import _evaluate, _jaxpr
from jamp._autocast.constructs import KEEPS_RESULTS, enter
from jamp._autocast.rules import COMPUTE, RULES, WIDEST, Rule
from jamp._cast import is_float32, is_inexact
from jamp._jaxpr import ClosedJaxpr, JaxprEqn, Var
from jamp._primitives import COPIES, MOVES, PRODUCTS
from jamp._source_line import in_scope, scope_path

Atom: TypeAlias = Any  # Var | Literal
# Name scopes, which an operation keeps through every transformation: of a function marked by the user, of everything in
# an autocast function, and of a call that `recompute` made.
FULL_PRECISION, AUTOCAST, SEGMENT = "jamp.full_precision", "jamp.autocast", "jamp.segment"
# The categories of equations that no rule decides.
ENTERED, NOT_ENTERED, REGION, NO_RULE = "entered", "not entered", "full_precision", "no rule"
_FLOAT32 = np.dtype(np.float32)


class Input(NamedTuple):
    """An input of a jaxpr: whether it is stored in 16 bit, and the number that it is filled with, if known."""

    low: bool = False
    constant: Any = None


class Place(NamedTuple):
    """The surroundings of a jaxpr: whether it is in a shard_map, and its name stack if a rule is for part of one."""

    manual: bool = False
    scope: str = ""


@dataclasses.dataclass(frozen=True)
class Decision:
    """The decision about one equation: its category, the key of the rule, the equation to run, and its cast bodies."""

    eqn: JaxprEqn
    category: str
    key: str
    run: JaxprEqn
    bodies: tuple["Cast", ...] = ()


class Caster:
    """Casts jaxprs to a compute dtype. Each body is cast once for the same `Input`s."""

    def __init__(self, compute_dtype: np.dtype[Any], rules: Mapping[str, Rule]):
        self.compute_dtype, self.rules = compute_dtype, rules
        self.parts = [key for key in rules if "[" in key and key not in RULES]  # rules for a part of the name stack
        self._casts: dict[Any, Cast] = {}
        to_low = jax.make_jaxpr(lambda x: lax.convert_element_type(x, compute_dtype))(np.float32(0)).eqns[0]
        self._converts = {True: to_low, False: _evaluate.replace_dtype(to_low, compute_dtype, _FLOAT32)}
        self._default_precision = _jaxpr.precisions(jax.make_jaxpr(lax.dot)(*[np.ones(1, np.float32)] * 2).eqns[0])

    def cast(self, closed: ClosedJaxpr, inputs: Sequence[Input], place: Place) -> "Cast":
        """Cast a jaxpr."""
        # Constants are compared by their text, because 0.0 == -0.0 and nan != nan.
        key = id(closed.jaxpr), tuple((x.low, repr(x.constant)) for x in inputs), place
        if key not in self._casts:  # The cast holds the jaxpr, so no other one gets its id.
            self._casts[key] = Cast(self, closed, inputs, place)
        return self._casts[key]

    def convert(self, source: Atom, target: Var, low: bool, like: JaxprEqn | None) -> JaxprEqn:
        """The equation that casts one variable to another. It has the source line and scopes of `like`, its reader."""
        eqn = self._converts[low].replace(invars=[source], outvars=[target])
        return eqn.replace(source_info=like.source_info) if like else eqn

    def low_aval(self, aval: Any) -> Any:
        """The 16-bit type of a value that was traced as `aval`."""
        return aval.update(dtype=self.compute_dtype, weak_type=False)

    def holds(self, constant: Any) -> bool:
        """Whether the compute dtype holds a constant exactly."""
        with np.errstate(all="ignore"):
            low = np.asarray(constant).astype(self.compute_dtype).astype(np.float64)
        return np.array_equal(low, np.float64(constant), equal_nan=True)

    def rule_key(self, eqn: JaxprEqn, scope: str) -> str:
        """The key of the rule for an equation: the primitive's name, also with a special case or scope in brackets."""
        name, case = eqn.primitive.name, None
        for key in self.parts:
            if key.startswith(f"{name}[") and f"/{key[len(name) + 1 : -1]}/" in scope_path(eqn, scope):
                return key
        # Any other precision was asked for in the code, and not by a default for the whole program.
        usual = (None, lax.Precision.DEFAULT, lax.Precision.HIGH, *self._default_precision)
        if name in PRODUCTS and any(precision not in usual for precision in _jaxpr.precisions(eqn)):
            case = "precision"
        elif name == "dot_general" and _jaxpr.summed_terms(eqn) == 1:
            case = "outer"
        return f"{name}[{case}]" if f"{name}[{case}]" in self.rules else name


class Cast:
    """A jaxpr at its new dtypes.

    Attributes:
      caster: The `Caster` that made it.
      traced: The jaxpr at its traced dtypes.
      decisions: The decision about each of its equations.
      low: Which outputs may be 16 bit: those that are stored in 16 bit and read nowhere else in the jaxpr.
      stored: Which outputs are stored in 16 bit.
      changed: Whether any equation differs from the traced one.
    """

    def __init__(self, caster: Caster, closed: ClosedJaxpr, inputs: Sequence[Input], place: Place):
        self.caster, self._place, self.traced = caster, place, closed
        jaxpr = closed.jaxpr
        reads: list[Any] = [*(v for eqn in jaxpr.eqns for v in eqn.invars), *jaxpr.outvars]
        self._readers = Counter(v for v in reads if not _jaxpr.is_literal(v))
        self._low: dict[Var, Var] = {}  # the values that are stored in 16 bit
        self._wide: set[Var] = set()  # those of them that were cast to float32 already
        self._constants: dict[Var, Any] = {}
        self._closed: dict[tuple[bool, ...], ClosedJaxpr] = {}
        self._eqns: list[JaxprEqn] = []
        self.decisions: list[Decision] = []
        self.changed = any(x.low for x in inputs)
        for v, known in zip(jaxpr.invars, inputs, strict=True):
            if known.low:
                self._define(v, low=True)
            if known.constant is not None:
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
            start, wide = len(self._eqns), set(self._wide)
            outputs = []
            for v, is_low in zip(self.traced.jaxpr.outvars, wanted, strict=True):
                stored = None if _jaxpr.is_literal(v) else self._low.get(v)
                outputs.append(stored if is_low and stored is not None else self._read(v, is_low, None))
            constants = dict(zip(self.traced.jaxpr.constvars, self.traced.consts, strict=True))
            self._closed[wanted] = _evaluate.closed_jaxpr(constants, self._inputs, outputs, self._eqns)
            del self._eqns[start:]  # the casts of these outputs
            self._wide = wide
        return self._closed[wanted]

    def _decide(self, eqn: JaxprEqn) -> Decision:
        name, rules = eqn.primitive.name, self.caster.rules
        if in_scope(eqn, FULL_PRECISION):
            return Decision(eqn, REGION, name, self._add(eqn, low=False))
        if name in _jaxpr.CONSTRUCTS and name not in rules:
            return self._enter(eqn)
        key = self.caster.rule_key(eqn, self._place.scope)
        category = rules[key].category if key in rules else NO_RULE
        # A jaxpr in the parameters, such as that of a scatter, runs only at the dtypes it was traced with.
        return Decision(eqn, category, key, self._add(eqn, self._runs_low(eqn, category) and not _jaxpr.has_body(eqn)))

    def _runs_low(self, eqn: JaxprEqn, category: str) -> bool:
        """Whether an equation of a category reads and writes its float32 values in 16 bit."""
        floats = [v for v in eqn.invars if is_float32(v.aval)]
        if category == COMPUTE:
            others = {aval.dtype for aval in _jaxpr.avals(eqn.invars) if is_inexact(aval)}
            return bool(floats) and others <= {_FLOAT32, self.caster.compute_dtype}
        arrays = [v for v in floats if self._constant(v) is None]
        constants = [self._constant(v) for v in floats if self._constant(v) is not None]
        is_exact = all(map(self._is_low, arrays)) and all(map(self.caster.holds, constants))
        return category == WIDEST and bool(arrays) and is_exact

    def _add(self, eqn: JaxprEqn, low: bool) -> JaxprEqn:
        """Add an equation, with all its float32 operands and results in 16 bit, or none."""
        reads = [self._read(v, low and is_float32(v.aval), eqn) for v in eqn.invars]
        if len(eqn.invars) == 1 and eqn.primitive.name in MOVES | COPIES:  # still filled with the same number
            self._constants.update((v, self._constant(eqn.invars[0])) for v in eqn.outvars)
        writes = [self._define(v, low and is_float32(v.aval)) for v in eqn.outvars]
        run = _evaluate.replace_dtype(eqn, _FLOAT32, self.caster.compute_dtype) if low else eqn
        self._eqns.append(run.replace(invars=reads, outvars=writes))
        self.changed |= low
        return self._eqns[-1]

    def _enter(self, eqn: JaxprEqn) -> Decision:
        inner, name = _jaxpr.bodies(eqn), eqn.primitive.name
        # Inside shard_map, JAX does not tell a custom rule which of its operands are differentiated.
        if inner is None or (self._place.manual and _jaxpr.asks_for_zeros(eqn)):
            return Decision(eqn, NOT_ENTERED, name, self._add(eqn, low=False))
        # A carry keeps its traced dtype. The gradient of a constant of a loop is a sum over all steps, in float32.
        carry = _jaxpr.carry(eqn)
        wide = range(carry.stop) if carry else ()
        known = [Input() if i in wide else Input(self._is_low(v), self._constant(v)) for i, v in enumerate(eqn.invars)]
        scope = scope_path(eqn, self._place.scope) if self.caster.parts else ""
        place = Place(self._place.manual or name == "shard_map", scope)
        rewrite = lambda closed, low: self.caster.cast(closed, [Input(x) for x in low], place)
        casts = tuple(
            self.caster.cast(closed, [known[i] for i in operands], place)
            for closed, operands in zip(inner, _jaxpr.body_operands(eqn), strict=True)
        )
        if not any(body.changed for body in casts):
            return Decision(eqn, ENTERED, name, self._add(eqn, low=False), casts)
        first = len(eqn.outvars) if name in KEEPS_RESULTS else len(carry)
        low = [i >= first and all(body.low[i] for body in casts) for i in range(len(eqn.outvars))]
        reads = [self._read(v, x.low, eqn) for v, x in zip(eqn.invars, known, strict=True)]
        writes = [self._define(v, x) for v, x in zip(eqn.outvars, low, strict=True)]
        self._eqns.extend(enter(eqn, casts, [x.low for x in known], low, reads, writes, rewrite))
        self.changed = True
        return Decision(eqn, ENTERED, name, self._eqns[-1], casts)

    def _constant(self, atom: Atom) -> Any:
        """The value of a scalar constant, or of an array filled with it; else None."""
        if _jaxpr.is_literal(atom):
            return atom.val if np.ndim(atom.val) == 0 else None
        return self._constants.get(atom)

    def _is_low(self, atom: Atom) -> bool:
        """Whether a value is stored in 16 bit and has a single reader."""
        return not _jaxpr.is_literal(atom) and atom in self._low and self._readers[atom] == 1

    def _define(self, v: Var, low: bool) -> Var:
        self._low |= {v: _jaxpr.core().Var(self.caster.low_aval(v.aval))} if low else {}
        return self._low.get(v, v)

    def _read(self, atom: Atom, low: bool, eqn: JaxprEqn | None) -> Atom:
        """A value for an equation, in 16 bit or as it was traced."""
        if low and _jaxpr.is_literal(atom):
            value = np.asarray(atom.val).astype(self.caster.compute_dtype)
            return _jaxpr.core().Literal(value, self.caster.low_aval(atom.aval))
        if low and self._is_low(atom):
            return self._low[atom]
        if not _jaxpr.is_literal(atom) and atom in self._low and atom not in self._wide:
            self._wide.add(atom)
            self._eqns.append(self.caster.convert(self._low[atom], atom, False, eqn))
        if low:
            target = _jaxpr.core().Var(self.caster.low_aval(atom.aval))
            self._eqns.append(self.caster.convert(atom, target, True, eqn))
            return target
        return atom
