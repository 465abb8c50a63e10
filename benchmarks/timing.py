"""Paired timing: every case runs once in each round, so that a drifting machine drifts for all of them."""

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

TRIES = 3  # how often a quick compilation is repeated


@dataclass(frozen=True)
class Case:
    """A step to time: `step(carry, *args) -> carry`; the carry is donated."""

    name: str
    step: Callable[..., Any]
    carry: Any
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Result:
    """Medians over rounds; ratios are to the first case, round by round."""

    name: str
    milliseconds: float
    ratio: float
    ratio_low: float  # lower quartile
    ratio_high: float  # upper quartile
    dispatch_milliseconds: float  # until the call returns, before anybody waits for its results
    trace_seconds: float  # trace and lower, in Python
    compile_seconds: float  # what XLA takes after that
    compile_ratio: float  # trace and compile together
    hlo_lines: int
    temporary_megabytes: float
    peak_megabytes: float  # arguments, results and temporaries, donated ones once

    def row(self) -> str:
        return (
            f"{self.name:32s} {self.milliseconds:9.2f} ms"
            f"   x {self.ratio:5.3f} ({self.ratio_low:.3f}-{self.ratio_high:.3f})"
            f"   dispatch {self.dispatch_milliseconds:7.3f} ms"
            f"   trace {self.trace_seconds:5.2f} + compile {self.compile_seconds:6.2f} s x {self.compile_ratio:4.2f}"
            f"   {self.temporary_megabytes:8.1f} MB temporary, {self.peak_megabytes:8.1f} peak"
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(cases: list[Case], rounds: int, tries: int = TRIES) -> list[Result]:
    """Compile and time the cases side by side; the first is the baseline. Their carries are used up."""
    compiled, seconds = build(cases, tries)
    calls = {
        case.name: runner(compiled[case.name], carry, case.args)
        for case, carry in zip(cases, distinct(cases), strict=True)
    }
    times = paired(calls, rounds)
    base = cases[0].name
    results = []
    for case in cases:
        dispatched, done = times[case.name].T
        trace, compilation = np.median(seconds[case.name], 0)
        memory = compiled[case.name].memory_analysis()
        peak = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes
        )
        results.append(
            Result(
                case.name,
                float(np.median(done) * 1e3),
                *ratio(done, times[base][:, 1]),
                float(np.median(dispatched) * 1e3),
                float(trace),
                float(compilation),
                float((trace + compilation) / np.median(seconds[base], 0).sum()),
                compiled[case.name].as_text().count("\n"),
                memory.temp_size_in_bytes / 1e6,
                peak / 1e6,
            )
        )
    return results


def build(cases: list[Case], tries: int = TRIES) -> tuple[dict[str, Any], dict[str, list[tuple[float, float]]]]:
    """Each case compiled, and the seconds that its tracing and its compilation took, in each try."""
    jax.jit(lambda x: x + 1)(0)  # what only the first compilation of a process pays
    compiled: dict[str, Any] = {}
    seconds: dict[str, list[tuple[float, float]]] = {case.name: [] for case in cases}
    for _ in range(tries):
        for case in cases:
            if sum(map(sum, seconds[case.name])) > 2:
                continue  # long enough to be told from noise
            # A function of its own each time, and nothing that another case has traced, or the cache would answer.
            jax.clear_caches()
            jitted = jax.jit(lambda carry, *args, step=case.step: step(carry, *args), donate_argnums=0)
            start = time.perf_counter()
            lowered = jitted.lower(case.carry, *case.args)
            traced = time.perf_counter()
            compiled[case.name] = lowered.compile()
            seconds[case.name].append((traced - start, time.perf_counter() - traced))
    return compiled, seconds


def distinct(cases: list[Case]) -> list[Any]:
    """The carries, each array donated once: one that several cases share, or that is an argument, is copied."""
    taken = {id(x) for case in cases for x in jax.tree.leaves(case.args)}

    def own(x: Any) -> Any:
        if id(x) in taken:
            return x.copy()
        taken.add(id(x))
        return x

    return [jax.tree.map(own, case.carry) for case in cases]


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


def ratio(times: np.ndarray, base: np.ndarray) -> list[float]:
    """Median and quartiles of the ratios, round by round."""
    return np.quantile(times / base, [0.5, 0.25, 0.75]).tolist()
