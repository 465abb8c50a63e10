"""Where the values of a jaxpr come from: what tells a constant from an array, and a bias from an activation."""

from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax

from jamp import _jaxpr
from jamp._jaxpr import JaxprEqn

Atom: TypeAlias = Any  # Var | Literal

_SHAPE_ONLY = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze", "transpose"})


class Origins:
    """What is known of the values of a jaxpr, equation after equation.

    Attributes:
      constants: The values of arrays that are filled with one constant.
      parameters: The shapes, without axes of length 1, of inputs of the whole function before they were reshaped or
        broadcast.
      products: Matrix products and convolutions in the compute dtype, and sums of them, as yet without a bias.
    """

    def __init__(self, is_low: Callable[[Atom], bool], rules: Collection[str]):
        self.constants: dict[Atom, Any] = {}
        self.parameters: dict[Atom, tuple[int, ...]] = {}
        self.products: set[Atom] = set()
        self._is_low, self._rules = is_low, rules

    def constant(self, atom: Atom) -> Any:
        """The value of a scalar constant, or of an array filled with it; else None."""
        if _jaxpr.is_literal(atom):
            return atom.val if np.ndim(atom.val) == 0 else None
        return self.constants.get(atom)

    def is_parameter(self, atom: Atom) -> bool:
        """Whether a value is an input of the whole function, or that in another shape."""
        return not _jaxpr.is_literal(atom) and atom in self.parameters

    def rule(self, eqn: JaxprEqn) -> str:
        """The key of the rule for an equation: the primitive's name, or a special case of it."""
        name, case = eqn.primitive.name, None
        if name in _jaxpr.PRODUCTS and _is_explicit(_jaxpr.precisions(eqn)):
            case = "precision"
        elif name == "dot_general" and not _jaxpr.contracts(eqn):
            case = "outer"
        elif name == "div" and self.constant(eqn.invars[1]) is not None:
            case = "constant"
        elif name == "add" and (self._is_bias(*eqn.invars) or self._is_bias(*eqn.invars[::-1])):
            case = "bias"
        return f"{name}[{case}]" if f"{name}[{case}]" in self._rules else name

    def follow(self, eqn: JaxprEqn) -> None:
        """Note what the results of an equation are."""
        name = eqn.primitive.name
        if name in _jaxpr.PRODUCTS:
            # With a batch axis both operands may be activations, and what is added a mask.
            is_batched = name == "dot_general" and _jaxpr.has_batch_axes(eqn)
            if self._is_low(eqn.outvars[0]) and not is_batched:
                self.products.add(eqn.outvars[0])
        elif name == "add" and all(map(self._is_product, eqn.invars)):
            self.products.add(eqn.outvars[0])
        elif name in _SHAPE_ONLY:
            source, out = eqn.invars[0], eqn.outvars[0]
            if self.constant(source) is not None:
                self.constants[out] = self.constant(source)
            elif self.is_parameter(source):
                self.parameters[out] = self.parameters[source]
            elif self._is_product(source):
                self.products.add(out)

    def _is_product(self, atom: Atom) -> bool:
        return not _jaxpr.is_literal(atom) and atom in self.products

    def _is_bias(self, product: Atom, bias: Atom) -> bool:
        """Whether a parameter is broadcast and added to a product."""
        is_pair = self._is_product(product) and self.is_parameter(bias)
        return is_pair and self.parameters[bias] != without_ones(product.aval.shape)


def without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without its axes of length 1."""
    return tuple(n for n in shape if n != 1)


def _is_explicit(precisions: Iterable[Any]) -> bool:
    """Whether the precision of a product was asked for in the code, and not by a default for the whole program."""
    is_default = getattr(jax.config, "jax_default_matmul_precision", None) is not None
    return not is_default and any(p not in (None, lax.Precision.DEFAULT, lax.Precision.HIGH) for p in precisions)
