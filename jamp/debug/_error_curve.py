"""The error of a function over the share of its FLOPs in few bits."""

import dataclasses
import math

from jamp import _table


@dataclasses.dataclass(frozen=True)
class ErrorPoint:
    """Rules for one bound of an error.

    Attributes:
      bound: The bound.
      error: The measured error with the rules. If no rules reach the bound, the least.
      share: The share of the FLOPs that are products in the compute dtype or format, from 0 to 1.
      rules: The rules, as `autocast` takes them.
    """

    bound: float
    error: float
    share: float
    rules: dict[str, str]

    @property
    def is_reached(self) -> bool:
        """Whether the error is at most the bound."""
        return self.error <= self.bound


@dataclasses.dataclass(frozen=True)
class ErrorCurve:
    """The share of the FLOPs in few bits for several bounds. `str()` is a table, `jamp.plot.error_curve` a picture.

    Attributes:
      compute_dtype: The name of the compute dtype or format, such as "float8".
      points: One for each bound, in the order in which they were given.
    """

    compute_dtype: str
    points: tuple[ErrorPoint, ...]

    def __str__(self) -> str:
        header = ("error at most", "error", f"FLOPs in {self.compute_dtype}", "rules")
        return "\n".join(_table.with_header(header, list(map(_cells, self.points)), ("rules",)))


def _cells(point: ErrorPoint) -> tuple[str, ...]:
    error = "overflow" if math.isinf(point.error) else f"{point.error:.2g}"
    names = list(point.rules)
    rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
    rules = (names[0] + rest if names else "none") if point.is_reached else "no rules reach it"
    return f"{point.bound:g}", error, f"{point.share:.1%}", rules
