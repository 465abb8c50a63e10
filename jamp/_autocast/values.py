"""What is known of the values of a jaxpr: which are constants, and which are stored in 16 bit."""

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np

from jamp import _jaxpr
from jamp._autocast.rules import CHEAP, COMPUTE, MOVES, WIDEST
from jamp._cast import is_inexact
from jamp._jaxpr import JaxprEqn, Var

Atom: TypeAlias = Any  # Var | Literal
_FLOAT32 = np.dtype(np.float32)
_IN_RUNS = CHEAP | MOVES
_BROADCASTS = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze", "transpose"})


class Values:
    """What is known of the values of a jaxpr, equation after equation.

    Attributes:
      low: The values that were traced as float32 and are stored in 16 bit.
      rounded: Those of them that are computed in float32, in a run. Only products and later runs read them in 16 bit:
        who reads the same number in two precisions may see a difference where there is none.
      constants: The numbers that arrays are filled with.
      computed: The values that depend on a product.
    """

    def __init__(self, compute_dtype: np.dtype[Any], holds: Callable[[Any], bool]):
        self.low: set[Var] = set()
        self.rounded: set[Var] = set()
        self.computed: set[Var] = set()
        self.constants: dict[Var, Any] = {}
        self._extents: dict[Var, Any] = {}
        self._compute_dtype, self._holds = compute_dtype, holds

    def is_low(self, atom: Atom) -> bool:
        """Whether a value is stored in 16 bit."""
        return not _jaxpr.is_literal(atom) and atom in self.low

    def is_computed(self, atom: Atom) -> bool:
        """Whether a value depends on a product."""
        return not _jaxpr.is_literal(atom) and atom in self.computed

    def constant(self, atom: Atom) -> Any:
        """The value of a scalar constant, or of an array filled with it; else None."""
        if _jaxpr.is_literal(atom):
            return atom.val if np.ndim(atom.val) == 0 else None
        return self.constants.get(atom)

    def is_rounded(self, atom: Atom) -> bool:
        """Whether a value is low, but not exactly."""
        return not _jaxpr.is_literal(atom) and atom in self.rounded

    def follow(self, eqn: JaxprEqn, low: Iterable[bool], is_run: bool) -> None:
        """Note what the results of an equation are, of which some are low. It may be part of a run."""
        found = [v for v, is_low in zip(eqn.outvars, low, strict=True) if is_low]
        self.low.update(found)
        is_moved = eqn.primitive.name in MOVES and any(map(self.is_rounded, eqn.invars))
        self.rounded.update(found if is_run or is_moved else ())
        if eqn.primitive.name in _BROADCASTS:
            source, out = eqn.invars[0], eqn.outvars[0]
            if self.constant(source) is not None:
                self.constants[out] = self.constant(source)
            self._extents[out] = self._extent(source)

    def runs_low(self, eqn: JaxprEqn, category: str) -> bool:
        """Whether the results of an equation of a category are 16 bit.

        Those of a widest operation are if its largest operands are. Smaller ones, which are broadcast (a bias, a scale,
        statistics of a row), have no say, nor has a constant that 16 bit can hold.
        """
        floats = [v for v in eqn.invars if is_float32(v)]
        if category == COMPUTE:
            others = {_dtype(v) for v in eqn.invars if is_inexact(v.aval)}
            return bool(floats) and others <= {_FLOAT32, self._compute_dtype}
        if category != WIDEST or not any(map(self.is_low, floats)):
            return False
        if eqn.primitive.name not in _IN_RUNS and any(map(self.is_rounded, floats)):
            return False
        constants = [self.constant(v) for v in floats if self.constant(v) is not None]
        arrays = [v for v in floats if self.constant(v) is None]
        extents = {v: self._extent(v) for v in arrays}
        voters = [v for v in arrays if not any(_is_less(extents[v], extents[w]) for w in arrays)]
        return all(map(self.is_low, voters)) and all(map(self._holds, constants))

    def _extent(self, atom: Atom) -> Any:
        """The number of elements of an array before it was broadcast."""
        size = math.prod(getattr(atom.aval, "shape", ()))
        return size if _jaxpr.is_literal(atom) else self._extents.get(atom, size)


def _is_less(a: Any, b: Any) -> bool:
    """Whether a size is less than another. Symbolic sizes are not compared."""
    return isinstance(a, int) and isinstance(b, int) and a < b


def _dtype(atom: Atom) -> Any:
    return getattr(atom.aval, "dtype", None)


def is_float32(atom: Atom) -> bool:
    """Whether a value was traced as float32."""
    return bool(_dtype(atom) == _FLOAT32)
