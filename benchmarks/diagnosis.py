"""What it costs to look: `metrics` inside the step and `History` beside it, on a float16 transformer with AdamW.

    python -m benchmarks.diagnosis [--quick] [--json FILE]

Every case runs a block of steps in each round, in random order, without waiting for a step inside a block. All of them
hand on the same parameters and optimizer state, in the same memory: copies differ by more than what is measured.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

import jamp
from benchmarks import transformer
from jamp.debug import underflow_report
from jamp.history import History

Block = Callable[[int], None]  # runs so many steps, and waits for the last


def blocks(**size: int) -> dict[str, Block]:
    """The plain step of `benchmarks.transformer`, and the same with each tool."""
    case = transformer.cases(**size)[1]
    (tokens,) = case.args
    carry = [jax.tree.map(lambda x: x.copy(), case.carry)]

    def step(carry: Any, tokens: jax.Array) -> Any:
        return case.step(carry, tokens), ()

    def step_with_metrics(carry: Any, tokens: jax.Array) -> Any:
        carry = case.step(carry, tokens)
        return carry, jamp.metrics(carry[1])

    history = History(every=100)
    report = jax.jit(lambda params, state: underflow_report(params, state))  # of as many numbers as the gradients
    return {
        "step": block(step, carry, tokens),
        "step that returns metrics": block(step_with_metrics, carry, tokens),
        "step and History.append": block(step, carry, tokens, lambda carry: history.append(carry[1])),
        "step and underflow_report": block(step, carry, tokens, lambda carry: report(*carry)),
    }


def block(
    step: Callable[..., Any], carry: list[Any], tokens: jax.Array, after: Callable[[Any], Any] = lambda carry: None
) -> Block:
    compiled = jax.jit(step, donate_argnums=0).lower(carry[0], tokens).compile()

    def run(steps: int) -> None:
        for _ in range(steps):
            carry[0], returned = compiled(carry[0], tokens)
            returned = returned, after(carry[0])
        jax.block_until_ready((carry, returned))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diagnosis", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="every case once, small: does it run at all")
    parser.add_argument("--json", metavar="FILE", help="write the results here too")
    options = parser.parse_args()
    steps, rounds = (2, 1) if options.quick else (10, 25)
    cases = blocks(layers=1, width=64) if options.quick else blocks()
    times: dict[str, list[float]] = {name: [] for name in cases}
    order = list(cases)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            cases[name](1)  # meets the caches of another case: not counted
            start = time.perf_counter()
            cases[name](steps)
            times[name].append((time.perf_counter() - start) / steps)
    plain = np.array(times["step"])
    rows = []
    for name, seconds in times.items():
        low, ratio, high = np.quantile(np.array(seconds) / plain, [0.25, 0.5, 0.75])
        rows.append({"name": name, "milliseconds": 1e3 * float(np.median(seconds)), "ratio": float(ratio)})
        print(f"{name:28s} {rows[-1]['milliseconds']:9.2f} ms a step   x {ratio:5.3f} ({low:.3f}-{high:.3f})")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"versions": {m.__name__: m.__version__ for m in (jax, optax, jamp)}, "steps": rows}, file)


if __name__ == "__main__":
    main()
