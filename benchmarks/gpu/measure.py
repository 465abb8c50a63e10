"""Programs that a GPU runs in turns. It holds the arrays of one program at a time."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from benchmarks.gpu.processes import COMPILING
from benchmarks.timing import runner

Row = dict[str, Any]
Send = Callable[[int, Row], None]  # takes the number of a row, and what is known of it so far
ROUNDS = 5


@dataclass(frozen=True)
class Way:
    """A step to time: `step(carry, *args) -> carry`; the carry is donated. `make()` gives the carry and the args."""

    name: str
    step: Callable[..., Any]
    make: Callable[[], tuple[Any, tuple[Any, ...]]]
    options: dict[str, Any] | None = None  # of the compiler


def measure(labels: Row, ways: list[Way], quick: bool, send: Send, calls: int = 3, steps: int = 1) -> None:
    """Compile the ways one after the other, then time them in rounds in a random order. The first is the baseline.

    A way is timed once as soon as it is compiled, and each round is sent, because a later compilation may hang. A
    timing is of several calls, after as many that do not count, and a call makes several steps. Ratios are to the
    baseline in the same round. Low and high are the least and the greatest round.
    """
    rounds, calls = (1, 1) if quick else (ROUNDS, calls)
    jax.jit(lambda x: x + 1)(0)  # what only the first compilation of a process pays
    rows: list[Row] = []
    times: dict[int, list[float]] = {}
    programs: dict[int, Any] = {}
    makers: dict[Any, Any] = {}

    def add_round(i: int) -> None:
        carry, args = makers[ways[i].make]()
        run = runner(programs[i], carry, args, calls)
        run()
        times.setdefault(i, []).append(run() / steps)

    for i, way in enumerate(ways):
        rows.append(labels | {"name": way.name} | ({"flags": way.options} if way.options else {}))
        send(i, rows[i] | {"outcome": COMPILING})
        try:
            if way.make not in makers:
                makers[way.make] = jax.jit(way.make).lower().compile()
            programs[i], facts = build(way)
            rows[i] |= facts
            add_round(i)
            send(i, rows[i] | summary(times[i], times.get(0, [])))
        except Exception as error:  # too little memory, or a kernel that this device lacks: one row is lost
            programs.pop(i, None)
            send(i, rows[i] | {"outcome": f"{type(error).__name__}: {str(error).strip()[:200]}"})
    for _ in range(rounds - 1):
        for i in random.sample(list(programs), len(programs)):
            add_round(i)
        for i in programs:
            send(i, rows[i] | summary(times[i], times.get(0, [])))


def build(way: Way) -> tuple[Any, Row]:
    """The compiled step, the seconds that it took, and its memory: the peak counts donated arrays once."""
    jax.clear_caches()  # or what an equal program left would answer
    carry, args = jax.eval_shape(way.make)
    start = time.perf_counter()
    lowered = jax.jit(lambda carry, *args: way.step(carry, *args), donate_argnums=0).lower(carry, *args)
    traced = time.perf_counter()
    program = lowered.compile(compiler_options=way.options)
    seconds = {"trace_seconds": traced - start, "compile_seconds": time.perf_counter() - traced}
    memory = program.memory_analysis()
    stored = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    temporary = memory.temp_size_in_bytes
    return program, seconds | {"temporary_gigabytes": temporary / 1e9, "peak_gigabytes": (stored + temporary) / 1e9}


def summary(times: list[float], base: list[float]) -> Row:
    """Medians and ranges. Without a ratio where the baseline failed."""
    found = spread("milliseconds", np.array(times) * 1e3) | {"rounds": len(times)}
    if len(base) >= len(times):
        found |= spread("ratio", np.array(times) / np.array(base[: len(times)]))
    return found


def spread(name: str, values: np.ndarray) -> Row:
    return {name: float(np.median(values)), f"{name}_low": float(values.min()), f"{name}_high": float(values.max())}
