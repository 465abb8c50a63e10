"""Log the loss scale and its statistics over a training, without waiting for the device on a step."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import DictKey, GetAttrKey, SequenceKey, tree_flatten_with_path
from jax.typing import ArrayLike

from jamp._checks import check_count
from jamp._lookup import get_stats, metrics
from jamp._writers import (
    CsvWriter as CsvWriter,
    JsonLinesWriter as JsonLinesWriter,
    Row,
    TensorBoardWriter as TensorBoardWriter,
)


class History:
    """Collects `jamp.metrics` of each step on the device, and brings them to the host every so many steps.

    `append` enqueues one small program, which writes into a ring of `every` rows on the device. When it is full, its
    copy to the host starts in the background; it is read, and handed to `write`, when the next one is full. To be
    used in the training loop, outside `jit`. After the last step call `flush`.

    Args:
      every: How many steps the ring holds.
      write: A function of the step (an int) and its values by name (Python numbers; a bool as 0 or 1), called once for
        each step, in order, and its `flush()` after that if it has one: a `CsvWriter`, `JsonLinesWriter` or
        `TensorBoardWriter`; `clu_writer.write_scalars`; `lambda step, row: wandb.log(row, step=step)`.
      first_step: The number of the first step, for a run that goes on.

    Raises:
      ValueError: If `every` is not a positive int, or `first_step` a negative one.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from jamp.history import History
      >>> import jamp
      >>> tx = jamp.loss_scaled(optax.sgd(0.1))
      >>> opt_state, history = tx.init(jnp.ones(2)), History()
      >>> for grads in (jnp.ones(2), jnp.array([1.0, jnp.inf])):
      ...     _, opt_state = tx.update(grads, opt_state)
      ...     history.append(opt_state, largest=jnp.max(grads))
      >>> history["loss_scale"].tolist(), history["grads_finite"].tolist(), history["largest"].tolist()
      ([65536.0, 32768.0], [True, False], [1.0, inf])
    """

    def __init__(self, every: int = 100, write: Callable[[int, Row], object] | None = None, *, first_step: int = 0):
        check_count("every", every)
        check_count("first_step", first_step, least=0)
        self.first_step = first_step
        self._every, self._write = every, write
        self._path: tuple[Any, ...] | None = None  # to the state, in the trees that are appended
        self._ring: dict[str, Array] = {}
        self._extra: frozenset[str] = frozenset()  # the names that the user added
        self._sent = self._filled = 0  # rows of the ring that are on their way to the host, and that are used
        self._on_the_way: list[tuple[dict[str, Array], slice]] = []
        self._received: list[dict[str, np.ndarray[Any, Any]]] = []
        self._length = 0

    def append(self, tree: Any, **scalars: ArrayLike) -> None:
        """Record a step, without waiting for it.

        Args:
          tree: The optimizer state after the step, or any pytree that holds exactly one from `jamp.loss_scaled`. The
            next step may donate it.
          **scalars: What else to record, such as `loss=loss`: the same names at each step.

        Raises:
          ValueError: If `tree` holds no loss-scaled state or several, a value is not a scalar, or the names change.
          TypeError: Inside `jit`.
        """
        state = self._find(tree)
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((state, scalars))):
            raise TypeError("History.append must be called outside `jit`, with what the jitted step returns.")
        if not self._ring:
            rows = jax.eval_shape(_row, state, scalars)
            self._ring = {name: jnp.zeros(self._every, x.dtype) for name, x in rows.items()}
            self._extra = frozenset(scalars)
        if self._extra != scalars.keys():
            raise ValueError(f"The names must stay {sorted(self._extra)}, as at the first step; got {sorted(scalars)}.")
        self._ring = _record(self._ring, np.int32(self._filled), state, scalars)
        self._filled += 1
        self._length += 1
        if self._filled == self._every:
            self._send()
            self._receive(leave=1)

    def flush(self) -> None:
        """Wait for all steps so far, and hand them to `write`."""
        if self._sent < self._filled:
            self._send()
        self._receive(leave=0)

    @property
    def names(self) -> tuple[str, ...]:
        """What is recorded: the names of `jamp.metrics`, `window_index` of an adaptive loss scale, and yours."""
        return tuple(self._ring)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        """The values of a name at all steps so far, [steps]; it waits for them."""
        if name not in self._ring:
            raise KeyError(f"Nothing called {name!r} was recorded, only: {', '.join(self._ring) or 'no steps yet'}.")
        self.flush()
        return np.concatenate([rows[name] for rows in self._received])

    def _find(self, tree: Any) -> "_State":
        node: Any = None if self._path is None else _follow(tree, self._path)
        if not _is_state(node):
            get_stats(tree)  # raises unless there is exactly one
            flat, _ = tree_flatten_with_path(tree, is_leaf=_is_state)
            self._path, node = next((path, x) for path, x in flat if _is_state(x))
        return _State(node.loss_scale_state, node.stats, node.grads_finite)

    def _send(self) -> None:
        for x in self._ring.values():
            x.copy_to_host_async()
        self._on_the_way.append((self._ring, slice(self._sent, self._filled)))
        self._sent = self._filled = self._filled % self._every

    def _receive(self, leave: int) -> None:
        while len(self._on_the_way) > leave:
            ring, rows = self._on_the_way.pop(0)
            start = self.first_step + sum(len(x["loss_scale"]) for x in self._received)
            self._received.append({name: np.asarray(x)[rows] for name, x in ring.items()})
            if self._write is not None:
                columns = [x.astype(int) if x.dtype == bool else x for x in self._received[-1].values()]
                for i, row in enumerate(zip(*(x.tolist() for x in columns), strict=True)):
                    self._write(start + i, dict(zip(ring, row, strict=True)))
        flush = getattr(self._write, "flush", None)
        if flush is not None:
            flush()


class _State(NamedTuple):
    """What `metrics` reads of an optimizer state."""

    loss_scale_state: Any
    stats: Any
    grads_finite: Any


def _is_state(x: Any) -> bool:
    return isinstance(x, tuple) and set(_State._fields) <= set(getattr(x, "_fields", ()))


def _follow(tree: Any, path: tuple[Any, ...]) -> Any:
    """What lies at a path: looking for it anew at each step would take longer than to record it."""
    for key in path:
        try:
            match key:
                case GetAttrKey(name=name):
                    tree = getattr(tree, name)
                case SequenceKey(idx=i) | DictKey(key=i):
                    tree = tree[i]
                case _:
                    return None
        except (AttributeError, IndexError, KeyError, TypeError):
            return None
    return tree


def _row(state: _State, scalars: Mapping[str, ArrayLike]) -> dict[str, Array]:
    values = metrics(state)
    if hasattr(state.loss_scale_state, "window_index"):
        values["window_index"] = state.loss_scale_state.window_index
    if taken := values.keys() & scalars.keys():
        raise ValueError(f"{', '.join(sorted(taken))} is recorded in any case: give yours another name.")
    values |= {name: jnp.asarray(x) for name, x in scalars.items()}
    for name, x in values.items():
        if x.shape:
            raise ValueError(f"{name} must be a scalar, got {x.dtype}{list(x.shape)}.")
    return values


@jax.jit
def _record(ring: dict[str, Array], index: Array, state: _State, scalars: Mapping[str, ArrayLike]) -> dict[str, Array]:
    row = _row(state, scalars)
    return {name: x.at[index].set(row[name].astype(x.dtype)) for name, x in ring.items()}
