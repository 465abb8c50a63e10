"""Timing on an accelerator: many steps are started, and only the last one is waited for, as in a training loop."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

REPEATS = 5
# Dense peak of matrix products in 16 bit, FLOP/s, from NVIDIA's data sheets (theirs with sparsity is twice that).
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}


def timed(advance: Callable[[int], Any], quick: bool) -> dict[str, float]:
    """Milliseconds a step: median, lowest and highest of several blocks of steps. `advance(n)` takes n and waits."""
    advance(1 if quick else 3)  # compiles, and fills the caches
    start = time.perf_counter()
    advance(1)
    steps = 2 if quick else int(np.clip(1 / (time.perf_counter() - start), 3, 200))  # about a second
    blocks = []
    for _ in range(1 if quick else REPEATS):
        start = time.perf_counter()
        advance(steps)
        blocks.append(1e3 * (time.perf_counter() - start) / steps)
    return dict(
        zip(("milliseconds", "lowest", "highest"), (float(f(blocks)) for f in (np.median, min, max)), strict=True)
    )


def carried(step: Callable[..., Any], carry: Any, args: tuple[Any, ...]) -> Callable[[int], None]:
    """`advance` of a jitted step that donates its carry."""

    def advance(steps: int) -> None:
        nonlocal carry
        for _ in range(steps):
            carry = step(carry, *args)
        jax.block_until_ready(carry)

    return advance


def peak_gigabytes() -> float | None:
    """The most memory that this process has held on its device; None where JAX does not know it."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats["peak_bytes_in_use"] / 1e9 if "peak_bytes_in_use" in stats else None


def utilization(flops: float, milliseconds: float, device: str) -> float | None:
    """The share of the device's peak in 16 bit (MFU)."""
    peaks = [peak for name, peak in PEAKS.items() if name in device]
    return flops / (1e-3 * milliseconds) / peaks[0] if peaks else None
