"""`memory_curve`: the memory of a compiled function at several memory budgets."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jamp import _table
from jamp._arguments import arrays_and_types, describe, is_array
from jamp._products.flops import flops_of_products
from jamp._recompute.budget import MemoryBudget, check_budget, in_bytes
from jamp.debug._usage import called_as

_CALL = "jamp.debug.memory_curve(lambda budget: jax.grad(jamp.recompute(loss_fn, budget)))(params, batch)"


@dataclasses.dataclass(frozen=True)
class MemoryPoint:
    """A function, compiled at a memory budget.

    Attributes:
      budget: The budget.
      temporary: The bytes of temporary memory, which hold what is kept for the backward pass.
      total: The bytes of temporary memory, arguments and results. A donated argument counts once.
      flops: The FLOPs of all products, also of products that are computed again.
      platform: What it is compiled for: "cpu", "gpu" or "tpu".
    """

    budget: MemoryBudget
    temporary: int
    total: int
    flops: float
    platform: str = ""


@dataclasses.dataclass(frozen=True)
class MemoryCurve:
    """The memory of a function over its FLOPs. `str()` is a table, and `jamp.plot.memory_curve` a picture.

    Attributes:
      points: One for each budget, in the order in which they were given.
    """

    points: tuple[MemoryPoint, ...]

    def largest(self, limit: str) -> MemoryBudget:
        """The first budget with which the program fits in `limit`, such as "15.5GiB".

        Raises:
          ValueError: If none does, or `limit` is not a text such as "15.5GiB".
        """
        try:
            bound = in_bytes(limit)
        except (TypeError, ValueError):
            raise ValueError(f'limit must be bytes such as "15.5GiB" or "900MB", got {limit!r}.') from None
        fitting = [point.budget for point in self.points if point.total <= bound]
        if not fitting:
            least = min(self.points, key=lambda point: point.total)
            raise ValueError(
                f"No budget fits in {limit}: {least.budget} needs {least.total / 1e9:.2f} GB. Take a smaller batch, or "
                "optimizer state in fewer bytes (jamp.quantized_state)."
            )
        return fitting[0]

    def __str__(self) -> str:
        first = self.points[0].flops or 1.0  # A function without products computes none again.
        rows = [
            (str(x.budget), f"{x.temporary / 1e9:.3f}", f"{x.total / 1e9:.3f}", f"{x.flops / first:.3f}")
            for x in self.points
        ]
        table = _table.with_header(("budget", "temporary, GB", "total, GB", "FLOPs to the first"), rows)
        return "\n".join([*table, *(_table.wrapped(note, 6) for note in self._notes())])

    def _notes(self) -> list[str]:
        """Why all budgets take the same memory, if they do."""
        if len(self.points) < 2 or len({x.temporary for x in self.points}) > 1:
            return []
        if len({x.flops for x in self.points}) == 1:
            return [
                "note: no budget computes anything again. Is the budget passed on, as in jamp.recompute(loss_fn, "
                "budget), and to the loss, not to its gradient?"
            ]
        if self.points[0].platform == "cpu":
            return [
                "note: XLA for CPUs often removes checkpoints outside jax.lax.scan: it sees that a value is computed "
                "twice and keeps the first. Put the layers into jax.lax.scan, or compile for the accelerator"
            ]
        return []


@called_as(_CALL, functions=1)
def memory_curve(
    make: Callable[[MemoryBudget], Callable[..., Any]], budgets: Sequence[MemoryBudget] = (1.0, 0.75, 0.5, 0.25, 0.1, 0)
) -> Callable[..., MemoryCurve]:
    """Compile a function at several memory budgets, and say what memory each takes. Nothing is run.

    Args:
      make: From a budget to the function to compile: a gradient or a whole train step, perhaps from `jax.jit`,
        `nnx.jit` or `eqx.filter_jit` with donated arguments.
        `lambda budget: jax.grad(jamp.autocast(loss, dtype, memory_budget=budget))`.
      budgets: As in `jamp.recompute`.

    Returns:
      A function of the arguments of the function. They may be of type `jax.ShapeDtypeStruct`: nothing is allocated. To
      compile for devices that are not there, give those the shardings of `jax.experimental.topologies`.

    Raises:
      TypeError: If `make` is not a function. When called, if it returns none, as a compiled step does not.
      ValueError: If a budget is not one.

    Examples:
      >>> import jax, jax.numpy as jnp, jamp, jamp.debug
      >>> def loss(w, x):
      ...     for _ in range(8):
      ...         x = jnp.tanh(x @ w)
      ...     return jnp.mean(x**2)
      >>> curve = jamp.debug.memory_curve(lambda budget: jax.grad(jamp.recompute(loss, budget)), (1.0, 0))
      >>> found = curve(jnp.ones((64, 64)), jnp.ones((512, 64)))
      >>> found.points[0].flops < found.points[1].flops
      True
      >>> found.largest("16GiB")
      1.0
    """
    if not isinstance(budgets, Sequence) or isinstance(budgets, str):
        raise TypeError(f"budgets must be a sequence, such as (1.0, 0.5, 0), got {describe(budgets)} {budgets!r}.")
    for budget in budgets:
        check_budget(budget)

    def compiled(*args: Any, **kwargs: Any) -> MemoryCurve:
        return MemoryCurve(tuple(_point(budget, _made(make, budget), args, kwargs) for budget in budgets))

    return compiled


def _made(make: Callable[[MemoryBudget], Any], budget: MemoryBudget) -> Any:
    fun = make(budget)
    if not callable(fun):
        raise TypeError(f"make(budget) must be the function to compile, got {describe(fun)}. Write {_CALL}.")
    return fun


def _point(budget: MemoryBudget, fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MemoryPoint:
    values, rebuild = arrays_and_types(args, kwargs)

    def results(*values: Any) -> list[Any]:
        """The arrays that a program returns: a model may hold functions and strings too."""
        args, kwargs = rebuild(values)
        return [x for x in jax.tree.leaves(fun(*args, **kwargs)) if is_array(x)]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The memory budget is", UserWarning)  # The curve shows what is least.
        flops = flops_of_products(jax.make_jaxpr(results)(*values).jaxpr)
        # `jax.jit`, `nnx.jit` and `eqx.filter_jit` know what is donated.
        lowered = fun.lower(*args, **kwargs) if hasattr(fun, "lower") else jax.jit(results).lower(*values)
    wrapped: Any = lowered.compile()
    compiled = getattr(wrapped, "compiled", wrapped)  # Equinox holds JAX's
    found = compiled.memory_analysis()
    held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    temporary = int(found.temp_size_in_bytes)
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    platform = next((device.platform for x in shardings for device in x.device_set), "")
    return MemoryPoint(budget, temporary, temporary + int(held), flops, platform)
