"""The result of `find_nonfinite`."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jamp._table import wrapped

_SHOWN = 3  # findings


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
        low, high = map(format_number, (self.low, self.high))
        some = "nothing finite" if np.isnan(self.low) else f"from {low} to {high}"
        if self.low == self.high:
            some = f"all {low}" if self.shape else low
        bad = [f"{n} {kind}" for n, kind in ((self.inf, "inf"), (self.nan, "nan")) if n]
        where = f", first at {list(self.first)}" if self.first else ""
        return ", ".join([f"{self.dtype}{shape} {some}", *bad]) + where


def to_host(x: Any) -> np.ndarray[Any, Any]:
    """Return an array as float64 or complex128 in NumPy."""
    array = np.asarray(jax.device_get(x))
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def format_number(x: float, exact_to: float = 1e5) -> str:
    """Return a number in few characters: 7.1e4, 65504, 0.031."""
    x += 0.0  # -0 is 0
    digits, e, exponent = (f"{x:g}" if abs(x) < exact_to and float(f"{x:g}") == x else f"{x:.2g}").partition("e")
    return f"{digits}e{int(exponent)}" if e else digits


class Cause(NamedTuple):
    """Why an operation gave inf or NaN, in one line, and what to do about it.

    Attributes:
      text: Why.
      cure: What to do.
      cure_in_backward: What to do in a backward pass, if that is something else.
    """

    text: str
    cure: str
    cure_in_backward: str = ""


@dataclasses.dataclass(frozen=True)
class Finding:
    """An operation that returned inf or NaN, and follows from no other finding."""

    primitive: str
    why: Cause
    source: str  # file:line (function) of the user's code
    path: tuple[str, ...]  # the constructs around it
    backward: bool  # whether it is part of a backward pass
    inputs: tuple[Values, ...]
    outputs: tuple[Values, ...]
    order: int  # the number of operations that made inf or NaN before it
    scope: str = ""  # the name scopes around it, such as the names of Linen modules: "Net/h_3/attn"
    parameter: str = ""  # the path, in the arguments, of a parameter that it reads: "params['h_3']['kernel']"
    reaches: str = ""  # "the loss", "a gradient", or "a result" that is not the loss. Nothing if another one hides it

    @property
    def cause(self) -> str:
        """Why it returned inf or NaN."""
        return self.why.text

    @property
    def cure(self) -> str:
        """What to do about it."""
        return (self.backward and self.why.cure_in_backward) or self.why.cure

    @property
    def title(self) -> str:
        """The operation and the cause in one line."""
        kinds = [kind for kind in ("inf", "nan") if any(getattr(x, kind) for x in self.outputs)]
        return f"{self.primitive} gave {' and '.join(kinds)}: {self.cause}"

    @property
    def where(self) -> list[str]:
        """Lines that say where it is."""
        layer = [self.scope] * bool(self.scope) + [f"with {self.parameter}"] * bool(self.parameter)
        return [
            f"  line    {'in the backward pass of ' * self.backward}{self.source or 'unknown'}",
            *([f"  layer   {' '.join(layer)}"] if layer else []),
        ]


# What to do if inputs hold inf or NaN.
_KEEP = {
    "parameters": "if an earlier step made these, pass the parameters from before it. To keep them, in any precision: "
    "tx = jamp.skip_nonfinite(tx). It skips a step whose gradients are not finite, and "
    "jamp.get_grads_finite(opt_state) is then false",
    "batch": "repair the example or leave it out of the batch",
}


# What the report says of gradients if it was not asked for them.
ASK_FOR_GRADIENTS = "a gradient may be inf or nan: find_nonfinite(fun, grad=True)"


@dataclasses.dataclass(frozen=True)
class NonfiniteSearch:
    """The result of `find_nonfinite`. `str()` is a report.

    `bool()` is whether a result holds an inf or NaN that an operation made or an input brought.
    """

    findings: tuple[Finding, ...]  # None follows from another one. Findings in the first result (the loss) come first.
    reaches_results: bool  # whether a result holds the inf or NaN of the findings. If not, an operation hides them.
    inputs: tuple[str, ...]  # the inputs of the function that hold inf or NaN
    inputs_reach_results: bool
    constants: bool  # whether a result holds an inf or NaN that is a constant in the code
    operations: int  # the number of operations that ran
    gradients_are_finite: bool = False  # whether the backward pass ran, and gave no inf or NaN that an operation made
    inputs_kind: str = ""  # "parameters" if the first argument with floating arrays holds inf or NaN, else "batch"
    note: str = ""  # what it does not know of gradients

    @property
    def finding(self) -> Finding | None:
        """The first finding: the operation that caused the inf or NaN."""
        return next(iter(self.findings), None)

    def __bool__(self) -> bool:
        return bool(self.findings and self.reaches_results) or self.inputs_reach_results

    def __str__(self) -> str:
        held = [f"  note    the input {held}" for held in self.inputs[:2]]
        held += [f"  note    and {len(self.inputs) - 2} more inputs hold inf or nan"] if len(self.inputs) > 2 else []
        held += [f"  next    {_KEEP[self.inputs_kind]}"] if self.inputs_kind else []
        note = [f"  note    {self.note}"] if self.note else []
        if (finding := self.finding) is None:
            note = [] if self.inputs_reach_results or self.constants else note
            return "\n".join(wrapped(line) for line in [self._nothing(), *note, *held])
        masked = f"  note    no result shows it{', nor does a gradient' * self.gradients_are_finite}"
        lines = [
            finding.title,
            *finding.where,
            *([f"  inside  {' > '.join(finding.path)}"] if finding.path else []),
            *(f"  input   {x}" for x in finding.inputs[:3]),
            *(f"  output  {x}" for x in finding.outputs if x.first is not None),
            *([] if self.reaches_results else [masked, *note]),
        ]
        others = self.findings[1:_SHOWN]
        more = len(self.findings) - len(others) - 1
        also = [
            line
            for x in others
            for line in (
                f"and independent of it, in {x.reaches or 'no result'}",
                x.title,
                *x.where,
                f"  next    {x.cure}",
            )
        ]
        also += [f"and {more} more that are independent of these, in `.findings`"] if more else []
        # Of parameters that are NaN the operation is a consequence.
        cure = [] if self.inputs_kind == "parameters" else [f"  next    {finding.cure}"]
        return "\n".join(wrapped(line) for line in [*lines, *cure, *held, *also])

    def _nothing(self) -> str:
        if self.inputs_reach_results:
            return "No operation made inf or nan: the inputs hold them"
        if self.constants:
            return "No operation made inf or nan: those in the results are constants"
        return f"Found nothing: {self.operations} operations, all finite"
