"""`History`: the loss scale and its statistics at every step, for plots and health checks."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jamp._leaves import replace_leaves
from jamp._loss_scale.checks import check_count
from jamp._loss_scale.scaler_state import ScalerState, get_scaler
from jamp._numbers import as_number
from jamp._step.accessors import metrics
from jamp._step.find import find_scaler_state

__all__ = ["History"]
__dir__ = lambda: __all__


class History:
    """Record `jamp.metrics` and other scalars of each step without waiting for the device.

    `append` enqueues one small program, which writes into a buffer of `every` rows on the device. When the buffer is
    full, its copy to the host starts in the background. Call it in the training loop, outside `jit`.

    Args:
      every: The number of steps that the buffer holds, an int of at least 1.
      first_step: The number of the first step, for a run that is resumed. Negative numbers are a ValueError.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> tx = jamp.loss_scaled(optax.sgd(0.1))
      >>> opt_state, history = tx.init(jnp.ones(2)), jamp.History()
      >>> for grads in (jnp.ones(2), jnp.array([1.0, jnp.inf])):
      ...     _, opt_state = tx.update(grads, opt_state)
      ...     history.append(opt_state, largest=jnp.max(grads))
      >>> history["loss_scale"].tolist(), history["grads_finite"].tolist(), history["largest"].tolist()
      ([65536.0, 32768.0], [True, False], [1.0, inf])
    """

    def __init__(self, every: int = 100, *, first_step: int = 0):
        every, first_step = as_number(every), as_number(first_step)
        if not isinstance(every, (int, float, str)):
            raise TypeError(
                "A History takes states one at a time: history = jamp.History(); history.append(opt_state)."
            )
        check_count("every", every)
        check_count("first_step", first_step, least=0)
        self.first_step = first_step
        self._every = every
        self._structure: Any = None  # of the trees that are appended
        self._positions: Any = None  # of the scaler state among their leaves
        self._buffer: dict[str, Array] = {}
        self._extra: frozenset[str] = frozenset()  # the names that the user added
        self._on_the_way: dict[str, Array] = {}  # the last full buffer, which is being copied to the host
        self._on_the_host: list[dict[str, np.ndarray[Any, Any]]] = []
        self._length = 0

    def append(self, tree: Any, **scalars: ArrayLike) -> None:
        """Record a step, without waiting for it.

        Args:
          tree: The optimizer state after the step, or any pytree that holds exactly one from `jamp.loss_scaled`. The
            next step may donate it.
          **scalars: Other values to record, such as `loss=loss`, with the same names at each step.

        Raises:
          ValueError: If `tree` holds no loss-scaled state or several, a value is not a scalar, or the names change.
          TypeError: Inside `jit`.
        """
        state = self._find(tree)
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((state, scalars))):
            raise TypeError("Call History.append outside `jit`, with the state that the step returns.")
        if not self._buffer:
            rows = jax.eval_shape(_row, state, scalars)
            self._buffer = {name: jnp.zeros(self._every, x.dtype) for name, x in rows.items()}
            self._extra = frozenset(scalars)
        if self._extra != scalars.keys():
            raise ValueError(f"The names must stay {sorted(self._extra)}, got {sorted(scalars)}.")
        self._buffer = _record(self._buffer, np.int32(self._length % self._every), state, scalars)
        self._length += 1
        if self._length % self._every == 0:
            self._receive()
            self._on_the_way = self._buffer
            for x in self._buffer.values():
                x.copy_to_host_async()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of `jamp.metrics`, `window_index` if the loss scale is adaptive, and those you added."""
        return tuple(self._buffer)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        """Return the values recorded under a name at all steps so far, [steps]. It waits for them."""
        if name not in self._buffer:
            raise KeyError(f"Nothing called {name!r} was recorded, only: {', '.join(self._buffer) or 'no steps yet'}.")
        self._receive()
        last = np.asarray(self._buffer[name])[: self._length % self._every]
        return np.concatenate([*(rows[name] for rows in self._on_the_host), last])

    def _receive(self) -> None:
        if self._on_the_way:
            self._on_the_host.append({name: np.asarray(x) for name, x in self._on_the_way.items()})
            self._on_the_way = {}

    def _find(self, tree: Any) -> ScalerState:
        leaves, structure = jax.tree.flatten(tree)
        # Finding the state anew at each step would take longer than recording it.
        if self._structure is None or structure != self._structure:
            self._positions = get_scaler(find_scaler_state(replace_leaves(tree, list(range(len(leaves))))))
            self._structure = structure
        return jax.tree.map(leaves.__getitem__, self._positions)


def _row(state: ScalerState, scalars: Mapping[str, ArrayLike]) -> dict[str, Array]:
    values = metrics(state)
    if hasattr(state.loss_scale_state, "window_index"):
        values["window_index"] = state.loss_scale_state.window_index
    if taken := values.keys() & scalars.keys():
        raise ValueError(f"History records {', '.join(sorted(taken))} itself. Give your value another name.")
    values |= {name: jnp.asarray(x) for name, x in scalars.items()}
    for name, x in values.items():
        if x.shape:
            raise ValueError(f"{name} must be a scalar, got {x.dtype}{list(x.shape)}. Write {name}=jnp.mean({name}).")
    return values


@jax.jit
def _record(
    buffer: dict[str, Array], index: Array, state: ScalerState, scalars: Mapping[str, ArrayLike]
) -> dict[str, Array]:
    row = _row(state, scalars)
    return {name: x.at[index].set(row[name].astype(x.dtype)) for name, x in buffer.items()}
