"""`nonfinite_report`, which counts inf and NaN in each leaf of a tree."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.tree_util import keystr

from jamp import _table
from jamp._cast import is_inexact
from jamp.debug._usage import called_as

_STATIC: Any = {"static": True}
_SHOWN = 20  # leaves


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NonfiniteReport:
    """The numbers of inf, -inf and NaN in each floating or complex leaf of a tree, from `nonfinite_report`.

    It is a pytree, so `jit` and `scan` can return it. `bool()` is True if there is any, and `str()` is a report. Both
    wait for the device.
    """

    paths: tuple[str, ...] = dataclasses.field(metadata=_STATIC)
    shapes: tuple[tuple[int, ...], ...] = dataclasses.field(metadata=_STATIC)
    inf: Array  # i32[leaves]. Out of scan or vmap, all of them have one more axis in front for each
    neg_inf: Array  # i32[leaves]
    nan: Array  # i32[leaves]
    first: Array  # i32[leaves], position of the first in the flattened leaf, or -1 if all are finite

    def __bool__(self) -> bool:
        return bool(np.any(np.asarray(self.first) >= 0))

    def __str__(self) -> str:
        if isinstance(self.first, jax.core.Tracer):
            return repr(self)
        counts, first = np.stack([self.inf, self.neg_inf, self.nan]), np.asarray(self.first)
        steps = tuple(range(first.ndim - 1))
        rows = [self._row(i, counts[..., i], first[..., i]) for i in np.flatnonzero((first >= 0).any(steps)).tolist()]
        if not rows:
            return "all leaves are finite"
        title = f"inf or nan in {len(rows)} of {len(self.paths)} leaves"
        if steps:
            bad = (first >= 0).any(-1)
            title += f", in {bad.sum()} of {bad.size} steps"
        more = [f"  ... and {len(rows) - _SHOWN} more leaves"] if len(rows) > _SHOWN else []
        return "\n".join([title, *rows[:_SHOWN], *more])

    def _row(self, i: int, counts: Any, first: Any) -> str:
        """The line of a leaf: i32[3, ...] counts, and the position of the first in each step, i32[...]."""
        totals = counts.reshape(3, -1).sum(-1)
        kinds = [f"{n} {kind}" for n, kind in zip(totals, ("inf", "-inf", "nan"), strict=True) if n]
        step = tuple(np.argwhere(first >= 0)[0].tolist())
        index = [int(k) for k in np.unravel_index(first[step], self.shapes[i])]
        where = f", first{f' in step {list(step)}' if step else ''}{f' at {index}' if index else ''}"
        size = math.prod(self.shapes[i]) * first.size
        line = f"{', '.join(kinds)} of {size}{where if step or index else ''}"
        return f"  {_table.fit(self.paths[i] or 'the array', _table.WIDTH - len(line) - 4)}: {line}"


@called_as("jamp.debug.nonfinite_report(grads), or jamp.debug.find_nonfinite(loss_fn)(params, batch)", trees=1)
def nonfinite_report(tree: Any) -> NonfiniteReport:
    """Count inf, -inf and NaN in each leaf of a tree, to find the parameter or gradient that holds them.

    It works inside and outside `jit`. Nothing waits for the device before the report is printed.

    Args:
      tree: A pytree. Leaves that are not floating or complex are left out. A complex number is NaN if one of its parts
        is, else inf if one of its parts is.

    Returns:
      A `NonfiniteReport`.

    Examples:
      >>> import jax.numpy as jnp, jamp.debug
      >>> print(jamp.debug.nonfinite_report({"w": jnp.array([[1.0, 2.0], [jnp.inf, 4.0]]), "b": jnp.zeros(2)}))
      inf or nan in 1 of 2 leaves
        ['w']: 1 inf of 4, first at [1, 0]
    """
    flat = [(keystr(path), jnp.asarray(x)) for path, x in jax.tree.leaves_with_path(tree) if is_inexact(x)]
    arrays = [x for _, x in flat]
    return NonfiniteReport(tuple(path for path, _ in flat), tuple(x.shape for x in arrays), *_count(arrays))


@functools.partial(jax.jit, inline=True)
def _count(arrays: list[Array]) -> list[Array]:
    if not arrays:
        return [jnp.zeros(0, jnp.int32)] * 4
    columns = []
    for x in arrays:
        negative = jnp.isneginf(x) if not jnp.iscomplexobj(x) else jnp.zeros(x.shape, bool)
        is_nan = jnp.isnan(x)
        bad = ~jnp.isfinite(x)
        counts = [jnp.sum(kind, dtype=jnp.int32) for kind in (bad & ~is_nan & ~negative, negative, is_nan)]
        columns.append([*counts, _first(bad)])
    return [jnp.stack(row) for row in zip(*columns, strict=True)]


def _first(bad: Array) -> Array:
    """Return the position of the first True in the flattened array, i32[], or -1. A sharded array stays where it is."""
    if not bad.size:
        return jnp.int32(-1)
    position = jnp.zeros((), jnp.int32)
    for axis, n in enumerate(bad.shape):
        along = jnp.arange(n, dtype=jnp.int32)
        position = position * n + lax.expand_dims(along, [i for i in range(bad.ndim) if i != axis])
    first = jnp.min(jnp.where(bad, position, np.int32(2**31 - 1)))
    return jnp.where(jnp.any(bad), jnp.maximum(first, 0), -1)  # Of more elements than that, positions wrap.
