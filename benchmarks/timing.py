"""Paired timing in one process: every case runs once in each round, so that a drifting machine drifts for all of them.

Where arrays lie in memory differs from process to process and decides about as much as the code. `benchmarks.processes`
therefore times the same cases in several.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from benchmarks.record import Rows


@dataclass(frozen=True)
class Case:
    """A step to time: `step(carry, *args) -> carry`; the carry is donated."""

    name: str
    step: Callable[..., Any]
    carry: Any
    args: tuple[Any, ...]


def compare(cases: list[Case], rounds: int) -> Rows:
    """Compile and time the cases side by side; the first is the baseline. Their carries are used up.

    Times are medians over rounds, the ratio is to the first case, round by round. "dispatch_milliseconds" is until the
    call returns. The peak is that of arguments, results and temporaries, donated ones once.
    """
    built = build(cases)
    carries, _padding = placed(cases)
    calls = {case.name: runner(built[case.name][0], carries[case.name], case.args) for case in cases}
    times = paired(calls, rounds)
    base = times[cases[0].name][:, 1]
    rows = []
    for name, (compiled, traced, seconds) in built.items():
        dispatched, done = times[name].T
        memory = compiled.memory_analysis()
        stored = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        rows.append(
            {
                "name": name,
                "milliseconds": float(np.median(done) * 1e3),
                "ratio": float(np.median(done / base)),
                "dispatch_milliseconds": float(np.median(dispatched) * 1e3),
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


def runner(step: Callable[..., Any], carry: Any, args: tuple[Any, ...]) -> Callable[[], tuple[float, float]]:
    """A function that steps once and returns the seconds until the call returned and until its results were there."""

    def run() -> tuple[float, float]:
        nonlocal carry
        start = time.perf_counter()
        carry = step(carry, *args)
        dispatched = time.perf_counter() - start
        jax.block_until_ready(carry)
        return dispatched, time.perf_counter() - start

    return run


def paired(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, np.ndarray]:
    """What each call returned in each round, f64[rounds, ...]; their order is random."""
    found: dict[str, list[Any]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            calls[name]()  # the first call meets the caches and the freed memory of another case: not counted
            found[name].append(calls[name]())
    return {name: np.array(values) for name, values in found.items()}
