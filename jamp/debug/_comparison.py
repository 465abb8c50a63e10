"""The result of `compare`."""

import dataclasses

from jamp import _table

JUMP = 8.0  # A difference is a jump if it is more than 8 times what rounding and the operands explain.
_SHOWN = 12


@dataclasses.dataclass(frozen=True)
class ComparedRow:
    """An operation that both functions have. All differences are relative, by the norm.

    Attributes:
      operation, source, scope, dtype: The primitive, the user's line, the name scopes, and the dtype of the result.
      other_operation, other_source, other_scope, other_dtype: The same in the other function.
      backward: Whether it is part of a backward pass.
      difference: How much the results differ, estimated to about 15 %.
      operands: How much of it the differences of its operands explain. A sum whose terms cancel amplifies them.
      rounding: How much of it rounding explains: the unit roundoff of the coarsest dtype among this operation and those
        before it, with the same amplification.
      reaches_results: Whether a result still shows the difference. That of masked values does not.
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
    operands: float
    rounding: float
    reaches_results: bool = True

    @property
    def is_jump(self) -> bool:
        """Whether rounding and the operands do not explain the difference."""
        return self.difference > JUMP * max(self.operands, self.rounding)

    def __str__(self) -> str:
        name = self.operation if self.operation == self.other_operation else f"{self.operation}, {self.other_operation}"
        dtypes = self.dtype if self.dtype == self.other_dtype else f"{self.dtype}, {self.other_dtype}"
        lines = [f"{name}, {dtypes}: differs by {self.difference:.1e}; its operands explain {self.operands:.1e}"]
        for title, line, scope in (("line", self.source, self.scope), ("other", self.other_source, self.other_scope)):
            lines.append(f"  {title:<7} {line or 'unknown'}{f' in {scope}' if scope else ''}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of `compare`. `bool()` is whether the functions part, `str()` is a report.

    Attributes:
      rows: The operations that both functions have, in order.
      first: The first operation that differs by more than rounding explains.
      only_here, only_there: The operations before it that only one of the functions has.
      results: How much each result differs: by the norm, or the share of unequal integers. inf if the shapes differ, or
        where they are inf or NaN.
      results_part: Whether a result differs by more than rounding explains.
      compiled: How much the results of each function differ if XLA compiles it whole.
    """

    rows: tuple[ComparedRow, ...]
    first: ComparedRow | None
    only_here: tuple[str, ...]
    only_there: tuple[str, ...]
    results: tuple[float, ...]
    results_part: bool
    compiled: tuple[float, float]

    def __bool__(self) -> bool:
        return self.first is not None or self.results_part

    def __str__(self) -> str:
        worst = max(self.results, default=0.0)
        if not self:
            lines = [f"The functions agree: the results differ by {worst:.1e}, which rounding explains"]
        elif self.first is None:
            lines = [f"The results differ by {worst:.1e}, but none of the {len(self.rows)} operations in both parts"]
        else:
            lines = [f"The functions part at {self.first}"]
        if self:
            for title, names in (("here", self.only_here), ("there", self.only_there)):
                lines += [f"  only {title:<5} {', '.join(names[-3:])}"] if names else []
            if not (self.only_here or self.only_there):
                lines += ["  its operands agree, so they are moved, masked or indexed differently, or arguments are"]
        grown, largest = [], 0.0
        for row in self.rows:
            if row.reaches_results and row.difference > 1.5 * largest:
                grown.append(row)
                largest = row.difference
        if grown:
            cells = [
                (
                    f"{x.difference:.1e}",
                    x.operation + ", backward" * x.backward,
                    f"{x.dtype}, {x.other_dtype}",
                    x.scope,
                    x.source,
                )
                for x in grown[-_SHOWN:]
            ]
            lines += ["", "The difference grows:", *(f"  {line}" for line in _table.aligned(cells))]
            lines += [f"  {worst:.1e}  the results"]
        if max(self.compiled) > max(2 * worst, 1e-6):  # Below, it is the order of sums.
            here, there = self.compiled
            lines += [
                "",
                f"Compiled whole, the results change by {here:.1e} and {there:.1e}. This is the compiler's difference "
                "and not the program's: XLA may leave out roundings (xla_allow_excess_precision).",
            ]
        return "\n".join(lines)
