"""Tools that find inf, NaN, underflow, lost digits and memory: which operation, on which line, in which parameter."""

from ._compare import compare as compare
from ._comparison import ComparedRow as ComparedRow, Comparison as Comparison
from ._error_curve import ErrorCurve as ErrorCurve, ErrorPoint as ErrorPoint
from ._find_nonfinite import find_nonfinite as find_nonfinite
from ._lost_updates import LostUpdates as LostUpdates, lost_updates as lost_updates
from ._memory_curve import MemoryCurve as MemoryCurve, MemoryPoint as MemoryPoint, memory_curve as memory_curve
from ._nonfinite_report import NonfiniteReport as NonfiniteReport, nonfinite_report as nonfinite_report
from ._nonfinite_search import Finding as Finding, NonfiniteSearch as NonfiniteSearch, Values as Values
from ._rounding_report import (
    RoundingReport as RoundingReport,
    RoundingRow as RoundingRow,
    rounding_report as rounding_report,
)
from ._underflow_report import UnderflowReport as UnderflowReport, underflow_report as underflow_report

__all__ = [
    "ComparedRow", "Comparison", "ErrorCurve", "ErrorPoint", "Finding", "LostUpdates", "MemoryCurve", "MemoryPoint",
    "NonfiniteReport", "NonfiniteSearch", "RoundingReport", "RoundingRow", "UnderflowReport", "Values", "compare",
    "find_nonfinite", "lost_updates", "memory_curve", "nonfinite_report", "rounding_report", "underflow_report",
]  # fmt: skip
