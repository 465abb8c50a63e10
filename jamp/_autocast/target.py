"""The compute dtype and the rules of a transformation."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jamp import _jaxpr
from jamp._autocast.rules import ACCUMULATE, GRADIENT, RULES, Rule
from jamp._jaxpr import JaxprEqn, Var
from jamp._primitives import PRODUCTS
from jamp._source_line import scope_path

_FLOAT32 = np.dtype(np.float32)


class Target:
    """A compute dtype and rules, and the equations that they make of others."""

    def __init__(self, compute_dtype: np.dtype[Any], rules: Mapping[str, Rule]):
        self.compute_dtype, self.rules = compute_dtype, rules
        self.parts = [key for key in rules if "[" in key and key not in RULES]  # rules for a part of the name stack
        self.used: set[str] = set()  # the keys that decided about an equation, and the names of all primitives

    def low_var(self, v: Any) -> Var:
        """A variable for a value in 16 bit."""
        found: Var = core.Var(v.aval.update(dtype=self.compute_dtype, weak_type=False))
        return found

    def low_literal(self, literal: Any) -> Any:
        """A literal in 16 bit."""
        aval = literal.aval.update(dtype=self.compute_dtype, weak_type=False)
        return core.Literal(self._low(literal.val), aval)

    def holds(self, constant: Any) -> bool:
        """Whether a constant is exact in 16 bit."""
        return np.array_equal(self._low(constant).astype(np.float64), np.float64(constant), equal_nan=True)

    def overflows(self, constant: Any) -> bool:
        """Whether a finite constant, or an element of an array of constants, becomes infinite in 16 bit."""
        # For bfloat16 no array is read, because it has the range of float32 but for the last half unit.
        if constant is None or (np.ndim(constant) and jnp.finfo(self.compute_dtype).maxexp == 128):
            return False
        return bool(np.any(np.isinf(self._low(constant)) & np.isfinite(constant)))

    def _low(self, constant: Any) -> Any:
        with np.errstate(all="ignore"):
            return np.asarray(constant).astype(self.compute_dtype)

    def widens_gradients(self, eqn: JaxprEqn) -> bool:
        """Whether the gradients of the weights of a product are float32."""
        rule = self.rules.get(f"{_jaxpr.name(eqn)}[{GRADIENT}]")
        return rule is not None and rule.category == ACCUMULATE

    def rule_key(self, eqn: JaxprEqn, scope: str, is_gradient: bool, overflows: bool) -> str:
        """The key of the rule for an equation: the primitive's name, also with a special case or scope in brackets.

        `overflows` says that an operand is a constant beyond the range of 16 bit.
        """
        name, case = _jaxpr.name(eqn), GRADIENT if is_gradient else None
        self.used.add(name)
        for key in self.parts:
            if key.startswith(f"{name}[") and f"/{key[len(name) + 1 : -1]}/" in scope_path(eqn, scope):
                self.used.add(key)
                return key
        if name in PRODUCTS and not self._is_usual(_jaxpr.precisions(eqn)):
            case = "precision"
        elif name == "dot_general" and _jaxpr.summed_terms(eqn) == 1:
            case = "outer"
        elif name in PRODUCTS and overflows:
            case = "range"
        return f"{name}[{case}]" if f"{name}[{case}]" in self.rules else name

    def _is_usual(self, precisions: tuple[Any, ...]) -> bool:
        """Whether no precision is one that was asked for in the code, and not by a default for the whole program."""
        others = [x for x in precisions if x not in (None, lax.Precision.DEFAULT, lax.Precision.HIGH)]
        return all(x in self._default_precisions for x in others)

    @functools.cached_property
    def _default_precisions(self) -> tuple[Any, ...]:
        return _jaxpr.precisions(jax.make_jaxpr(lax.dot)(*[np.ones(1, np.float32)] * 2).eqns[0])
