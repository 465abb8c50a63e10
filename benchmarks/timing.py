"""Paired timing: every case runs once in each round, so that a drifting machine drifts for all of them."""

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True)
class Case:
    """A step to time: `step(carry, *args) -> carry`; the carry is donated."""

    name: str
    step: Callable[..., Any]
    carry: Any
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Result:
    """Medians over rounds; `ratio` is to the first case, round by round."""

    name: str
    milliseconds: float
    ratio: float
    ratio_low: float  # lower quartile
    ratio_high: float  # upper quartile
    compile_seconds: float  # trace, lower and compile
    compile_ratio: float
    hlo_lines: int
    temporary_megabytes: float

    def row(self) -> str:
        return (
            f"{self.name:28s} {self.milliseconds:9.2f} ms"
            f"   x {self.ratio:5.3f} ({self.ratio_low:.3f}-{self.ratio_high:.3f})"
            f"   compile {self.compile_seconds:6.2f} s x {self.compile_ratio:4.2f}   {self.hlo_lines:7d} HLO lines"
            f" {self.temporary_megabytes:8.1f} MB temporary"
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(cases: list[Case], rounds: int) -> list[Result]:
    """Compile and time the cases side by side; the first is the baseline."""
    jax.jit(lambda x: x + 1)(0)  # what only the first compilation of a process pays
    compiled, seconds = {}, {case.name: [] for case in cases}
    for _ in range(3):
        for case in cases:
            if seconds[case.name] and seconds[case.name][0] > 2:
                continue  # long enough to be told from noise
            start = time.perf_counter()
            # A function of its own each time, or the trace would come from the cache.
            jitted = jax.jit(lambda carry, *args, step=case.step: step(carry, *args), donate_argnums=0)
            compiled[case.name] = jitted.lower(case.carry, *case.args).compile()
            seconds[case.name].append(time.perf_counter() - start)
    carries = {case.name: jax.tree.map(lambda x: x.copy(), case.carry) for case in cases}
    times: dict[str, list[float]] = {case.name: [] for case in cases}
    order = list(cases)
    for _ in range(rounds):
        random.shuffle(order)
        for case in order:
            for _ in range(2):  # the first call meets the caches and the freed memory of another case: not counted
                start = time.perf_counter()
                carries[case.name] = jax.block_until_ready(compiled[case.name](carries[case.name], *case.args))
                seconds_taken = time.perf_counter() - start
            times[case.name].append(seconds_taken)
    base = cases[0].name
    return [
        Result(
            case.name,
            float(np.median(times[case.name]) * 1e3),
            *np.quantile(np.array(times[case.name]) / np.array(times[base]), [0.5, 0.25, 0.75]).tolist(),
            float(np.median(seconds[case.name])),
            float(np.median(seconds[case.name]) / np.median(seconds[base])),
            compiled[case.name].as_text().count("\n"),
            compiled[case.name].memory_analysis().temp_size_in_bytes / 1e6,
        )
        for case in cases
    ]
