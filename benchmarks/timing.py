"""Timing: every case runs once in each round, so that a drifting machine drifts for all of them.

Where arrays lie in memory differs from process to process and decides about as much as the code. So the same cases are
timed in several processes. The interval of a ratio is the range of the processes. Of five, it holds the median of all
possible processes with a probability of 1 - 2 / 2**5, which is 94 %, whatever the distribution. One case is the
baseline a second time (A/A).
"""

import math
import multiprocessing
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from benchmarks.record import Rows, show

PROCESSES = 5


@dataclass(frozen=True)
class Case:
    """A step to time: `step(carry, *args) -> carry`; the carry is donated."""

    name: str
    step: Callable[..., Any]
    carry: Any
    args: tuple[Any, ...]


def compare(cases: list[Case], rounds: int) -> Rows:
    """Compile and time the cases side by side; the first is the baseline. Their carries are used up.

    Times are medians over rounds, the ratio is to the first case, round by round. The peak is that of arguments,
    results and temporaries, donated ones once.
    """
    built = build(cases)
    carries, _padding = placed(cases)
    calls = {case.name: runner(built[case.name][0], carries[case.name], case.args, 1) for case in cases}
    times = paired(calls, rounds)
    base = times[cases[0].name]
    rows = []
    for name, (compiled, traced, seconds) in built.items():
        memory = compiled.memory_analysis()
        stored = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        rows.append(
            {
                "name": name,
                "milliseconds": float(np.median(times[name]) * 1e3),
                "ratio": float(np.median(times[name] / base)),
                "ratios": (times[name] / base).tolist(),
                "trace_seconds": traced,
                "compile_seconds": seconds,
                "temporary_megabytes": memory.temp_size_in_bytes / 1e6,
                "peak_megabytes": (stored + memory.temp_size_in_bytes) / 1e6,
            }
        )
    return rows


def build(cases: list[Case]) -> dict[str, tuple[Any, float, float]]:
    """Each case compiled, and the seconds that its tracing and its compilation took."""
    jax.jit(lambda x: x + 1)(0)  # what only the first compilation of a process pays
    built = {}
    for case in random.sample(cases, len(cases)):
        # A function of its own, and nothing that another case has traced, or the cache would answer.
        jax.clear_caches()
        jitted = jax.jit(lambda carry, *args, step=case.step: step(carry, *args), donate_argnums=0)
        start = time.perf_counter()
        lowered = jitted.lower(case.carry, *case.args)
        traced = time.perf_counter()
        compiled = lowered.compile()
        built[case.name] = compiled, traced - start, time.perf_counter() - traced
    return {case.name: built[case.name] for case in cases}


def placed(cases: list[Case]) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Copies of the carries, which a step updates in place, at random places; and what lies between them."""
    padding: list[np.ndarray] = []

    def copy(x: Any) -> Any:
        padding.append(np.empty(random.randrange(2**22), np.uint8))  # addresses alone: no page of it is touched
        return x.copy()

    order = random.sample(cases, len(cases))
    return jax.block_until_ready({case.name: jax.tree.map(copy, case.carry) for case in order}), padding


def runner(step: Callable[..., Any], carry: Any, args: tuple[Any, ...], steps: int) -> Callable[[], Any]:
    """A function that returns the seconds of a step: it starts several and waits for the last, as training does."""

    def run() -> float:
        nonlocal carry
        start = time.perf_counter()
        for _ in range(steps):
            carry = step(carry, *args)
        jax.block_until_ready(carry)
        return (time.perf_counter() - start) / steps

    return run


def paired(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, np.ndarray]:
    """What each call returned in each round, f64[rounds]; their order is random."""
    found: dict[str, list[Any]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            calls[name]()  # the first call meets the caches and the freed memory of another case: not counted
            found[name].append(calls[name]())
    return {name: np.array(values) for name, values in found.items()}


def across(labels: dict[str, Any], measure: Callable[..., Rows], *args: Any, quick: bool) -> Rows:
    """`measure(*args)` in fresh processes, one after the other, and its rows summarised by their names and labelled.

    `measure` returns a row for each case, the baseline first. Numbers of a row become their median; of "ratio" the
    interval is kept too, as "ratio_low" and "ratio_high", and every single one as "ratios". Those of one process, with
    --quick, are its rounds.
    """
    print()
    show(labels)
    runs = []
    for _ in range(1 if quick else PROCESSES):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            runs.append(pool.apply(measure, args))
    rows = [labels | row for row in summary(runs)]
    for row in rows:
        print(line(row), flush=True)
    return rows


def summary(runs: list[Rows]) -> Rows:
    rows = []
    for found in zip(*runs, strict=True):
        numbers = {key for key, value in found[0].items() if isinstance(value, float)}
        row = {key: float(np.median([x[key] for x in found])) if key in numbers else found[0][key] for key in found[0]}
        ratios = [x["ratio"] for x in found] if len(found) > 1 else found[0]["ratios"]
        rows.append(row | {"ratio_low": min(ratios), "ratio_high": max(ratios), "ratios": ratios})
    return rows


def equal(rows: Rows) -> float:
    """How far, as a logarithm, the ratio of two equal programs was from 1 in the worst process."""
    again = [abs(math.log(x)) for row in rows if is_again(row) for x in row["ratios"]]
    return max(again, default=0.0)


def is_again(row: dict[str, Any]) -> bool:
    return row["name"].endswith(", again")


def cell(row: dict[str, Any] | None) -> str:
    """The ratio and its interval."""
    return f"{row['ratio']:.2f} ({row['ratio_low']:.2f}-{row['ratio_high']:.2f})" if row else ""


def line(row: dict[str, Any]) -> str:
    """A row as it is printed while the benchmark runs."""
    text = f"{row['name']:36s} {row['milliseconds']:9.2f} ms   {cell(row):32s}"
    if "trace_seconds" in row:
        text += "   trace {trace_seconds:5.2f} + compile {compile_seconds:6.2f} s".format(**row)
        text += "   {temporary_megabytes:8.1f} MB temporary".format(**row)
    return text
