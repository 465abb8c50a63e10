"""The text that the studies of language models read: files, and windows of their bytes or words."""

from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np


def halves(files: Iterable[Path]) -> tuple[jax.Array, jax.Array]:
    """The bytes of some files to train on, and those of every tenth file, u8[n] each."""
    ordered = sorted(files)
    read = lambda some: jnp.asarray(np.frombuffer(b"\n".join(file.read_bytes() for file in some), np.uint8))
    return read(file for i, file in enumerate(ordered) if i % 10), read(ordered[::10])


def windows(text: jax.Array, starts: jax.Array, tokens: int) -> jax.Array:
    """So many bytes and the one that follows, i32[n, tokens + 1]."""
    return text[starts[:, None] + jnp.arange(tokens + 1)].astype(jnp.int32)


def spread(text: jax.Array, count: int, tokens: int) -> jax.Array:
    """Windows at equal distances."""
    return windows(text, jnp.linspace(0, len(text) - tokens - 1, count).astype(jnp.int32), tokens)
