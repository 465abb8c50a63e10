"""The result of `find_nonfinite`."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Values:
    """The range of the finite numbers in an array, and how many are inf or NaN."""

    dtype: str
    shape: tuple[int, ...]
    low: float  # the smallest finite number, by magnitude if complex. NaN if there is none
    high: float
    inf: int  # how many were inf or -inf
    nan: int
    first: tuple[int, ...] | None  # the index of the first inf or NaN

    @classmethod
    def of(cls, x: Any) -> "Values":
        """Describe an array, on the host."""
        wide = to_host(x)
        finite = np.isfinite(wide)
        some = wide[finite] if wide.dtype.kind == "f" else np.abs(wide[finite])
        low, high = (float(some.min()), float(some.max())) if some.size else (np.nan, np.nan)
        first = None if finite.all() else tuple(int(i) for i in np.argwhere(~finite)[0])
        counts = int(np.isinf(wide).sum()), int(np.isnan(wide).sum())
        return cls(str(jnp.result_type(x)), np.shape(x), low, high, *counts, first)

    def __str__(self) -> str:
        shape = "[" + ", ".join(map(str, self.shape)) + "]"
        some = "nothing finite" if np.isnan(self.low) else f"from {number(self.low)} to {number(self.high)}"
        if self.low == self.high:
            some = f"all {number(self.low)}" if self.shape else number(self.low)
        bad = [f"{n} {kind}" for n, kind in ((self.inf, "inf"), (self.nan, "nan")) if n]
        where = f", first at {list(self.first)}" if self.first else ""
        return ", ".join([f"{self.dtype}{shape} {some}", *bad]) + where


def to_host(x: Any) -> np.ndarray[Any, Any]:
    """An array as float64 or complex128 in NumPy."""
    array = np.asarray(jax.device_get(x))
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def number(x: float, exact_to: float = 1e5) -> str:
    """A number in few characters: 7.1e4, 65504, 0.031."""
    x += 0.0  # -0 is 0
    text = f"{x:g}" if abs(x) < exact_to and float(f"{x:g}") == x else f"{x:.2g}"
    return re.sub(r"e([+-])0*(\d)", lambda m: "e" + m[1].strip("+") + m[2], text)


@dataclasses.dataclass(frozen=True)
class Finding:
    """An operation that returned inf or NaN for finite inputs."""

    primitive: str
    cause: str
    source: str  # file:line (function) of the user's code
    path: tuple[str, ...]  # the constructs around it
    backward: bool  # whether it is part of a backward pass
    inputs: tuple[Values, ...]
    outputs: tuple[Values, ...]
    order: int
    scope: str = ""  # the name scopes around it, such as the names of Linen modules: "Net/h_3/attn"
    parameter: str = ""  # the path, in the arguments, of a parameter that it reads: "params['h_3']['kernel']"


@dataclasses.dataclass(frozen=True)
class NonfiniteSearch:
    """The result of `find_nonfinite`. `bool()` is whether it found anything, `str()` is a report."""

    finding: Finding | None  # the operation that caused the inf or NaN
    reaches_results: bool  # whether a result holds its inf or NaN
    inputs: tuple[str, ...]  # the inputs of the function that hold inf or NaN
    constants: bool  # whether a result holds an inf or NaN that is a constant in the code
    operations: int  # the number of operations that ran

    def __bool__(self) -> bool:
        return self.finding is not None or bool(self.inputs)

    def __str__(self) -> str:
        held = [f"  note    the input {held}" for held in self.inputs[:2]]
        held += [f"  note    and {len(self.inputs) - 2} more inputs hold inf or nan"] if len(self.inputs) > 2 else []
        if (finding := self.finding) is None:
            return "\n".join([self._nothing(), *held])
        kinds = [kind for kind in ("inf", "nan") if any(getattr(x, kind) for x in finding.outputs)]
        of = "in the backward pass of " if finding.backward else ""
        layer = [finding.scope] * bool(finding.scope) + [f"with {finding.parameter}"] * bool(finding.parameter)
        masked = "  note    no result shows it; the operation that hides it may still give a nan gradient"
        lines = [
            f"{finding.primitive} gave {' and '.join(kinds)}: {finding.cause}",
            f"  line    {of}{finding.source or 'unknown'}",
            *([f"  layer   {' '.join(layer)}"] if layer else []),
            *([f"  inside  {' > '.join(finding.path)}"] if finding.path else []),
            *(f"  input   {x}" for x in finding.inputs[:3]),
            *(f"  output  {x}" for x in finding.outputs if x.first is not None),
            *([] if self.reaches_results else [masked]),
        ]
        return "\n".join([*lines, *held][:10])

    def _nothing(self) -> str:
        if self.inputs:
            return f"None of {self.operations} operations made inf or nan: the inputs hold them"
        if self.constants:
            return f"None of {self.operations} operations made inf or nan: those in the results are constants"
        return f"Found nothing: {self.operations} operations, all finite"
