"""The result of `find_nonfinite`."""

import dataclasses
import re
from typing import Any

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
    text = f"{x:g}" if abs(x) < exact_to and float(f"{x:g}") == x else f"{x:.2g}"
    return re.sub(r"e([+-])0*(\d)", lambda m: "e" + m[1].strip("+") + m[2], text)


@dataclasses.dataclass(frozen=True)
class Finding:
    """An operation that returned inf or NaN, and follows from no other finding."""

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
    reaches: str = ""  # "the loss", "a gradient", or "a result" that is not the loss. Nothing if another one hides it

    @property
    def cure(self) -> str:
        """What to do about it."""
        if self.backward and "overflow in float16" in self.cause:
            return _LOWER_SCALE
        return next((cure for start, cure in _CURES if re.search(start, self.cause)), _NO_CURE)

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


_LOWER_SCALE = "lower the loss scale: a dynamic one does so itself, for others jamp.set_loss_scale"
_NO_CURE = "look at the inputs above: the operation has no finite result there"
# The first of these patterns that is found in a cause.
_CURES = (
    ("^exp overflow", "subtract the maximum first (jax.nn.softmax, jax.nn.logsumexp), or clip the exponent"),
    ("on the way", "compute it in float32: put it into jamp.full_precision, or give autocast a rule for it"),
    ("overflow in float(16|8)", "use jamp.full_precision or smaller operands; in attention divide by sqrt(width)"),
    ("overflow in .*, and in", "the value is too large for any dtype: divide, normalize or clip before"),
    (
        "overflow",
        "the value is beyond float32: look for a learning rate, a scale or an input that is too large; in float64 "
        "code, use jamp.full_precision",
    ),
    (
        "^log of 0",
        "add an epsilon that the dtype can hold, or compute the logarithm itself: jax.nn.log_softmax of logits",
    ),
    ("difference of squares$", "if it is a variance, use jnp.var: E[x**2] - E[x]**2 cancels, and may be negative"),
    ("^(log|sqrt) of a negative", "clip it, or find out why it is not positive"),
    ("^nan from 0/0", "add an epsilon, or look for a mean over an empty array or mask"),
    (
        "^division by zero",
        "add an epsilon (in float16, 1e-8 is 0); under a gradient, also jnp.where inside the operation",
    ),
    (
        "^nan is a constant",
        "the code has this NaN on purpose: look at the condition that chooses it, or at what reads it",
    ),
    (
        "^nan from inf - inf",
        "find what made the inf: a division by 0 or an overflow before it, or in a softmax a row that is masked out "
        "completely, which needs a large finite number as its mask",
    ),
    ("^nan from", "find the inf among its inputs, and mask with a large finite number in its place"),
    ("outside|not between|below 1|pole|fractional", "clip the operand, with a margin that the dtype can hold"),
    ("of inf$", "find the operation that made the inf, and clip its result"),
    ("^an index", "check the indices: jnp.take and x[i] return NaN out of bounds"),
    (
        "made inside it",
        "search what it maps: find_nonfinite(jax.vmap(body, axis_name=...)) on arrays with one more axis, which stands "
        "for the devices",
    ),
    (
        "positive definite|singular",
        "add a small multiple of the identity, 1e-6 of its diagonal in float32 and 1e-12 in float64, and compute it in "
        "no fewer bits",
    ),
)


# What to do if inputs hold inf or NaN.
_KEEP = {
    "parameters": "if an earlier step made these, pass the parameters from before it. To keep them, in any precision: "
    "tx = jamp.loss_scaled(tx, jamp.StaticLossScale(1.0)). It skips a step whose gradients are not finite, and "
    "jamp.get_grads_finite(opt_state) is then false",
    "batch": "repair the example or leave it out of the batch",
}


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
        if (finding := self.finding) is None:
            return "\n".join(wrapped(line) for line in [self._nothing(), *held])
        masked = "  note    no result shows it; " + (
            "nor does a gradient"
            if self.gradients_are_finite
            else "find_nonfinite(fun, grad=True) says if a gradient does"
        )
        lines = [
            finding.title,
            *finding.where,
            *([f"  inside  {' > '.join(finding.path)}"] if finding.path else []),
            *(f"  input   {x}" for x in finding.inputs[:3]),
            *(f"  output  {x}" for x in finding.outputs if x.first is not None),
            *([] if self.reaches_results else [masked]),
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
