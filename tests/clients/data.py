"""Data that every machine has, for recipes."""

import os
from pathlib import Path

import numpy as np


def text_batches(steps, batch=16, length=64, seed=0):
    """Bytes of Python's standard library, i32[batch, length + 1] for each step."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = np.frombuffer(b"\n".join(file.read_bytes() for file in files)[:2_000_000], np.uint8).astype(np.int32)
    starts = np.random.default_rng(seed).integers(0, len(text) - length - 1, (steps, batch))
    return [np.stack([text[i : i + length + 1] for i in row]) for row in starts]
