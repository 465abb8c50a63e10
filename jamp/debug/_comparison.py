"""The result of `compare`."""

import dataclasses
import math

_WIDTH = 100


@dataclasses.dataclass(frozen=True)
class ComparedRow:
    """An operation of both functions, or a difference between them.

    Attributes:
      operation: The primitive. Of a difference what differs: "mul(_, 0.25) here, mul(_, 0.2) there".
      source, scope, dtype: The user's line, the name scopes, and the dtype of the result.
      other_source, other_scope, other_dtype: The same in the other function.
      only: "here" or "there" if only one function has the operation. The line in the other function is then the line of
        the next operation that both have.
      difference: How much the results differ, relative, by the norm of those elements that differ.
      is_explained: Whether rounding explains it.
    """

    operation: str
    source: str
    scope: str
    dtype: str
    other_source: str
    other_scope: str
    other_dtype: str
    only: str
    difference: float
    is_explained: bool

    def __str__(self) -> str:
        lines = [_cut(self.operation, _WIDTH - 7)]
        for side, line, scope in (("here", self.source, self.scope), ("there", self.other_source, self.other_scope)):
            place = f"before {line}" if self.only not in ("", side) else line
            room = _WIDTH - 13 - len(place)
            lines += [_cut(f"  {side:<5}  {place}" + f" in {scope}" * (0 < len(scope) <= room), _WIDTH)] if line else []
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """The result of `compare`. `bool()` is whether the results differ, `str()` is a report, `repr()` one line of it.

    Attributes:
      results_part: Whether a result differs by more than rounding explains.
      results: How much each result differs: by the norm, or the share of unequal integers. inf if the shapes differ, or
        where they are inf or NaN.
      without_rounding: The same in float64.
      dtype: The coarsest dtype of the functions if its rounding is seen in the results, else the finest.
      differences: What differs in the functions, the first one first. Empty if the results agree.
      rows: The operations that both functions have, in order.
      rounding_is_unknown: Whether the rounding of float64 code is unknown, because in float32, from which it is
        estimated, results are inf or NaN at other elements.
    """

    results_part: bool
    results: tuple[float, ...]
    without_rounding: tuple[float, ...]
    dtype: str
    differences: tuple[ComparedRow, ...]
    rows: tuple[ComparedRow, ...]
    rounding_is_unknown: bool = False

    @property
    def first(self) -> ComparedRow | None:
        """The first operation that both functions have and whose results differ."""
        return next((row for row in self.rows if not row.is_explained), None)

    def __bool__(self) -> bool:
        return self.results_part

    def __repr__(self) -> str:
        text = self._verdict()
        for x in self.differences[:1]:
            lines = ", ".join(dict.fromkeys(_cut(line, 60) for line in (x.source, x.other_source) if line))
            text = f"differ by {max(self.without_rounding):.1e} in float64; first {_cut(x.operation, 75)}; {lines}"
        return f"<Comparison: {text}>"  # pytest shows 240 characters.

    def __str__(self) -> str:
        is_coarse = self.dtype not in ("", "float32", "float64")
        # Beside an operation that only one function has stands what the other one has instead.
        shown = self.differences[: 2 if self.differences and self.differences[0].only else 1]
        lines = [self._verdict(), *map("{} {}".format, ("First:", "Other:"), shown)]
        if self.differences:
            lines.append("Make the first difference equal, and compare again.")
        elif self:
            lines.append("In float64 they agree. Call jamp.debug.find_nonfinite of both functions.")
        elif is_coarse:
            lines.append(f"If that is too much, call jamp.debug.rounding_report(fun, jnp.{self.dtype}).")
        return "\n".join(lines)

    def _verdict(self) -> str:
        worst = max(self.results, default=0.0)
        if math.isinf(worst):
            return "The results differ in shape, or in where they are inf or NaN."
        if self and self.rounding_is_unknown:
            return (
                f"The results differ by {worst:.1e}. What rounding explains of it is unknown: it is estimated in "
                "float32,\nwhere they are inf or NaN at other elements."
            )
        if self:
            return f"The results differ by {max(self.without_rounding):.1e} in float64, so not by rounding."
        is_coarse = self.dtype not in ("", "float32", "float64")
        return (
            f"The functions agree{f' to {self.dtype}' * is_coarse}: rounding explains that they differ by {worst:.1e}."
        )


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
