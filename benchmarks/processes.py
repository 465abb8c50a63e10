"""The same comparison in several processes: the median of their ratios, its interval, and what it is called.

The interval is the range of the processes. Of five, it holds the median of all possible processes with a probability
of 1 - 2 / 2**5, which is 94 %, whatever the distribution. One case is the baseline a second time (A/A). What differs
from 1 by no more than that one did in its worst process is called "no difference".
"""

import math
import multiprocessing
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.record import Rows

PROCESSES = 5


def across(measure: Callable[..., Rows], *args: Any, processes: int = PROCESSES) -> Rows:
    """`measure(*args)` in fresh processes, one after the other, and its rows summarised by their names.

    `measure` returns a row for each case, the baseline first. Numbers of a row become their median; of "ratio" the
    interval is kept too, as "ratio_low" and "ratio_high", and every single one as "ratios".
    """
    return summary([apart(measure, *args) for _ in range(processes)])


def apart(function: Callable[..., Any], *args: Any, timeout: float | None = None) -> Any:
    """What a function returns in a process of its own, which is killed after `timeout` seconds (TimeoutError)."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply_async(function, args).get(timeout)


def summary(runs: list[Rows]) -> Rows:
    rows = []
    for found in zip(*runs, strict=True):
        numbers = {key for key, value in found[0].items() if isinstance(value, float)}
        row = {key: float(np.median([x[key] for x in found])) if key in numbers else found[0][key] for key in found[0]}
        ratios = [x["ratio"] for x in found]
        rows.append(row | {"ratio_low": min(ratios), "ratio_high": max(ratios), "ratios": ratios})
    same = equal(rows)
    return [row | {"difference": abs(math.log(row["ratio"])) > same} for row in rows]


def equal(rows: Rows) -> float:
    """How far, as a logarithm, the ratio of two equal programs was from 1 in the worst process."""
    again = [abs(math.log(x)) for row in rows if is_again(row) for x in row["ratios"]]
    return max(again, default=0.0)


def is_again(row: dict[str, Any]) -> bool:
    return row["name"].endswith(", again")


def cell(row: dict[str, Any] | None) -> str:
    """The ratio and its interval, or that there is no difference."""
    if row is None:
        return ""
    interval = f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"
    return interval if row["difference"] or is_again(row) else f"no difference ({row['ratio']:.2f})"


def line(row: dict[str, Any]) -> str:
    """A row as it is printed while the benchmark runs."""
    text = f"{row['name']:36s} {row['milliseconds']:9.2f} ms   {cell(row):32s}"
    if "trace_seconds" in row:
        text += "   trace {trace_seconds:5.2f} + compile {compile_seconds:6.2f} s".format(**row)
        text += "   {temporary_megabytes:8.1f} MB temporary".format(**row)
    return text
