"""The compute dtype and the rules of a transformation."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jamp._autocast.rules import (
    ACCUMULATE,
    ANY,
    COMPUTE,
    FEW,
    FLOAT32,
    GRADIENT,
    LINALG,
    VECTOR,
    YOURS,
    Rule,
    rules_for,
    wide_dtype,
)
from jamp._cast import is_inexact
from jamp._jaxprs import constructs, ir
from jamp._jaxprs.ir import JaxprEqn, Var
from jamp._jaxprs.primitives import EXPENSIVE, MOVING, PRODUCTS
from jamp._jaxprs.source import is_linear_algebra, scope_path

_FLOAT32 = np.dtype(np.float32)
_NOT_RAISED = MOVING | {"bitcast_convert_type", "nextafter", "reduce_precision"}  # They move values, or work on bits.


class Target:
    """The dtypes that autocast casts from (`wide`) and to (`compute_dtype`, which is *narrow*), and the rules.

    The comments of this package call them float32 and 16 bit. For a compute dtype of float32, read float64 and float32.
    """

    def __init__(self, compute_dtype: np.dtype[Any], rules: Mapping[str, Rule]):
        self.compute_dtype, self.wide, self.rules = compute_dtype, wide_dtype(compute_dtype), rules
        # The rules for a part of the name stack.
        self.parts = [key for key in rules if "[" in key and key not in rules_for(self.wide)]
        # The primitives that rules of the user raise: 16-bit operands are read in float32. `ANY` stands for all.
        is_raise = lambda rule: rule.reason == YOURS and rule.category in (FLOAT32, ACCUMULATE)
        names = (key.partition("[")[0] for key, rule in rules.items() if is_raise(rule))
        self.raised = frozenset(names) if self.wide == _FLOAT32 else frozenset[str]()
        # The types of the arrays of constants that this process cannot read, because others hold parts of them.
        self.unread: dict[str, None] = {}

    def is_wide(self, x: Any) -> bool:
        """Whether an array, or its type, has the dtype that products cast."""
        return bool(getattr(x, "dtype", None) == self.wide)

    def result_dtype(self, category: str) -> np.dtype[Any]:
        """Return the dtype of the result of a product of narrow operands. Sums are at most float32."""
        return self.compute_dtype if category == COMPUTE else _FLOAT32

    def stored_var(self, v: Any) -> Var:
        """Return a variable for a float32 value in 16 bit, or for a raised 16-bit value in float32."""
        dtype = self.compute_dtype if self.is_wide(v.aval) else _FLOAT32
        found: Var = core.Var(v.aval.update(dtype=dtype, weak_type=False))
        return found

    def narrow_literal(self, literal: Any) -> Any:
        """Return a literal in 16 bit."""
        aval = literal.aval.update(dtype=self.compute_dtype, weak_type=False)
        return core.Literal(self._narrow(literal.val), aval)

    def holds(self, constant: Any) -> bool:
        """Whether a constant is exact in 16 bit."""
        return np.array_equal(self._narrow(constant).astype(np.float64), np.float64(constant), equal_nan=True)

    def is_out_of_range(self, constant: Any) -> bool:
        """Whether a finite constant, or an element of an array of them, becomes infinite in 16 bit, or all become 0."""
        if constant is None:
            return False
        # For bfloat16 no array is read, because it has the range of float32 but for the last half unit.
        if np.ndim(constant) and jnp.finfo(self.compute_dtype).maxexp == jnp.finfo(self.wide).maxexp:
            return False
        if not getattr(constant, "is_fully_addressable", True):
            self.unread[jax.typeof(constant).str_short()] = None
            return False
        values = np.abs(np.asarray(constant).astype(self.wide))
        finite = np.isfinite(values)
        largest = np.max(values, where=finite, initial=0)
        narrow = self._narrow(largest)
        return bool(np.isinf(narrow) or (finite.all() and largest != 0 and narrow == 0))

    def _narrow(self, constant: Any) -> Any:
        with np.errstate(all="ignore"):
            return np.asarray(constant).astype(self.compute_dtype)

    def raises(self, key: str, eqn: JaxprEqn) -> bool:
        """Whether a rule of the user raises the precision of an equation that was traced in 16 bit."""
        name, rule = ir.name(eqn), self.rules.get(key)
        if rule is None or rule.reason != YOURS or key.partition("[")[0] not in self.raised or name in _NOT_RAISED:
            return False
        dtypes = {aval.dtype for aval in ir.avals([*eqn.invars, *eqn.outvars]) if is_inexact(aval)}
        is_16_bit = any(aval.dtype.itemsize == 2 for aval in ir.avals(eqn.invars) if is_inexact(aval))
        is_meant = rule.category == FLOAT32 or name in PRODUCTS
        return is_meant and is_16_bit and len(dtypes - {_FLOAT32}) == 1 and not constructs.has_body(eqn)

    def widens_gradients(self, eqn: JaxprEqn) -> bool:
        """Whether the gradients of the weights of a product are wider than the compute dtype."""
        if self.compute_dtype == _FLOAT32:
            return False
        rule = self.rules.get(f"{ir.name(eqn)}[{GRADIENT}]")
        return rule is not None and rule.category == ACCUMULATE

    def rule_key(
        self,
        eqn: JaxprEqn,
        scope: str,
        is_gradient: bool = False,
        is_out_of_range: bool = False,
        is_few: bool = False,
    ) -> str:
        """The key of the rule for an equation: the primitive's name, also with a special case or scope in brackets.

        `is_gradient` says that it is the gradient of a weight, `is_out_of_range` that an operand is a constant beyond
        the range of 16 bit, `is_few` that it sums few terms.
        """
        name, case = ir.name(eqn), GRADIENT if is_gradient else None
        for key in self.parts:
            base, _, part = key[:-1].partition("[")
            is_meant = base == name or (base == ANY and name not in EXPENSIVE and not is_out_of_range)
            if is_meant and f"/{part}/" in scope_path(eqn, scope):
                return key
        is_of_float64 = self.compute_dtype == _FLOAT32
        if name not in PRODUCTS or (is_of_float64 and not any(map(self.is_wide, ir.avals(eqn.invars)))):
            return name
        if not self._is_usual(ir.precisions(eqn)):
            case = "precision"
        elif is_out_of_range:
            case = "range"
        elif is_of_float64 and is_linear_algebra(eqn):
            case = LINALG
        elif ir.is_vector_product(eqn):
            case = VECTOR
        elif is_few and not (is_gradient and ir.summed_terms(eqn) > 1):  # One term is no sum to accumulate.
            case = FEW
        return f"{name}[{case}]" if f"{name}[{case}]" in self.rules else name

    def _is_usual(self, precisions: tuple[Any, ...]) -> bool:
        """Whether no precision is one that was asked for in the code, and not by a default for the whole program."""
        others = [x for x in precisions if x not in (None, lax.Precision.DEFAULT, lax.Precision.HIGH)]
        return all(x in self._default_precisions for x in others)

    @functools.cached_property
    def _default_precisions(self) -> tuple[Any, ...]:
        return ir.precisions(jax.make_jaxpr(lax.dot)(*[np.ones(1, np.float32)] * 2).eqns[0])
