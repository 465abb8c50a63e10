"""The result of `compare`."""

import dataclasses

from jamp import _table

_WIDTH, _SHOWN = 100, 8


@dataclasses.dataclass(frozen=True)
class Difference:
    """A difference of two functions that can be read.

    Attributes:
      text: What differs, such as "mul(_, 0.25) here, mul(_, 0.2) there".
      only: "here" or "there" if only one function has the operation, else "".
      source, scope: The user's line and the name scopes in the first function. If only the other one has the operation,
        those of the next operation in both.
      other_source, other_scope: The same in the other function.
    """

    text: str
    only: str
    source: str
    scope: str
    other_source: str
    other_scope: str

    def __str__(self) -> str:
        sides = (("here", self.source, self.scope), ("there", self.other_source, self.other_scope))
        before = {"here": "there", "there": "here"}.get(self.only)
        places = [(title, _place(line, scope, 85)) for title, line, scope in sides if line]
        lines = [f"  {title:<5}  {'before ' * (title == before)}{place}" for title, place in places]
        return "\n".join([_cut(self.text + f" only {self.only}" * bool(self.only), 90), *lines])


@dataclasses.dataclass(frozen=True)
class ComparedRow:
    """An operation that both functions have.

    Attributes:
      operation, source, scope, dtype: The primitive, the user's line, the name scopes, and the dtype of the result.
      other_operation, other_source, other_scope, other_dtype: The same in the other function.
      backward: Whether it is part of a backward pass.
      difference: How much the results differ, relative, by the norm of those elements that differ.
    """

    operation: str
    source: str
    scope: str
    dtype: str
    other_operation: str
    other_source: str
    other_scope: str
    other_dtype: str
    backward: bool
    difference: float

    @property
    def reaches_results(self) -> bool:
        """True: operations that no result is computed from have no row."""
        return True


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """The result of `compare`. `bool()` is whether the results differ, `str()` is a report, `repr()` one line of it.

    Attributes:
      results_part: Whether a result differs by more than rounding explains.
      results: How much each result differs: by the norm, or the share of unequal integers. inf if the shapes differ, or
        where they are inf or NaN.
      without_rounding: The same in float64. This decides.
      dtype: The dtype whose rounding explains the results' differences, or "" if none does.
      differences: What differs in the functions, the first one first. Empty if the results agree.
      first: The first operation that both functions have and whose results differ.
      rows: The operations that both functions have, in order.
      compiled: How much the results of each function differ if XLA compiles it whole.
    """

    results_part: bool
    results: tuple[float, ...]
    without_rounding: tuple[float, ...]
    dtype: str
    differences: tuple[Difference, ...]
    first: ComparedRow | None
    rows: tuple[ComparedRow, ...]
    compiled: tuple[float, float]

    def __bool__(self) -> bool:
        return self.results_part

    def __repr__(self) -> str:
        if not self.differences:
            return f"<Comparison: {self._verdict()}>"
        x = self.differences[0]
        only = f" only {x.only}" * bool(x.only)
        lines = ", ".join(dict.fromkeys(_cut(line, 50) for line in (x.source, x.other_source) if line))
        worst = max(self.without_rounding)
        return f"<Comparison: differ by {worst:.1e} in float64; first {_cut(x.text, 80)}{only}, {lines}>"  # pytest shows 240

    def __str__(self) -> str:
        lines = [self._verdict()]
        for title, x in zip(("First:", "Then: ", "Then: "), self.differences, strict=False):
            lines += [f"{title} {x}"]
        lines += self._growth() if self._is_coarse else []
        if max(self.compiled) > max(2 * self._worst, 1e-6):  # Below, it is the order of sums.
            here, there = self.compiled
            lines += [
                f"Compiled whole, the results change by {here:.1e} and {there:.1e}. This is the compiler's difference:",
                "XLA may leave out roundings (xla_allow_excess_precision).",
            ]
        return "\n".join([*lines, *self._next()])

    @property
    def _worst(self) -> float:
        return max(self.results, default=0.0)

    def _verdict(self) -> str:
        exact = max(self.without_rounding, default=0.0)
        if self and self._worst == float("inf"):
            return "The results differ in shape, or in where they are inf or NaN"
        if self:
            return f"The functions differ, not by rounding: in float64 their results differ by {exact:.1e}"
        dtype = f" to {self.dtype}" * self._is_coarse
        return f"The functions agree{dtype}: their results differ by {self._worst:.1e}, which is rounding"

    @property
    def _is_coarse(self) -> bool:
        return self.dtype not in ("", "float32", "float64")

    def _growth(self) -> list[str]:
        """A table of the operations at which the difference grows."""
        grown, largest = list[ComparedRow](), 0.0
        for row in self.rows:
            if row.difference > 1.5 * largest:
                grown.append(row)
                largest = row.difference
        cells = [
            (f"{x.difference:.1e}", x.operation + ", backward" * x.backward, f"{x.dtype}, {x.other_dtype}")
            for x in grown[-_SHOWN:]
        ]
        if not cells:
            return []
        header = ("differs by", "operation", "dtypes", "where")
        room = _WIDTH - 4 - sum(max(map(len, column)) + 2 for column in zip(header[:3], *cells, strict=True))
        places = [_place(x.source, x.scope, room) for x in grown[-_SHOWN:]]
        rows = [(*cell, place) for cell, place in zip(cells, places, strict=True)]
        table = _table.with_header(header, [*rows, (f"{self._worst:.1e}", "the results", "", "")])
        return ["", "The difference grows:", *(f"  {line}" for line in table), ""]

    def _next(self) -> list[str]:
        if self and self._worst == float("inf"):
            return ["Next: jamp.debug.find_nonfinite of both functions, if the shapes are equal."]
        if self:
            return ["Next: change the first line that differs, and compare again."]
        if self._is_coarse:
            return [f"Next: if that is too much, jamp.debug.rounding_report(fun, jnp.{self.dtype}) names the lines."]
        return []


def _place(line: str, scope: str, width: int) -> str:
    """A line and its scopes in at most `width` characters."""
    line = line or "an unknown line"
    room = width - len(line) - 4
    return _cut(line, width) if not scope or room < 8 else f"{line} in {scope if len(scope) <= room else '…' + scope[1 - room:]}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
