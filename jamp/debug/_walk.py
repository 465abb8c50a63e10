"""Evaluate a jaxpr operation by operation on real values. Loops become Python loops."""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import jax.numpy as jnp
import numpy as np

from jamp._jaxprs import constructs, interpret, ir
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn
from jamp._jaxprs.primitives import IDENTITIES, operation
from jamp._jaxprs.source import Location, in_scope
from jamp._recompute.segments import SEGMENT


class Tracked(Protocol):
    """An array with what a walker tracks about it."""

    @property
    def array(self) -> Any: ...


V = TypeVar("V", bound=Tracked)


class Walker(abc.ABC, Generic[V]):
    """One evaluation of a function.

    Attributes:
      path: The constructs around the operation that runs: "scan, iteration 3 of 12".
      loops: For each loop around it, a number of the loop and that of the iteration.
    """

    def __init__(self) -> None:
        self.path: list[str] = []
        self.loops: list[tuple[int, int]] = []

    @abc.abstractmethod
    def operation(self, eqn: JaxprEqn, values: list[V], here: Location) -> list[V]:
        """Evaluate an operation that has no body to enter."""

    @abc.abstractmethod
    def constant(self, array: Any) -> V:
        """A value that is written into the code."""

    @abc.abstractmethod
    def item(self, value: V, i: int) -> V:
        """A value along the first axis, for one iteration of a scan."""

    @abc.abstractmethod
    def stack(self, values: list[V]) -> V:
        """The values of all iterations of a scan as one. There is at least one iteration."""

    def run(self, closed: ClosedJaxpr, args: Sequence[V], caller: Location | None = None) -> list[V]:
        """Return the results of a jaxpr. Operations without a source line get that of the caller."""
        run = functools.partial(self._results, caller or Location())
        literal = lambda v: self.constant(ir.value(v))
        return interpret.interpret(closed.jaxpr, [*map(self.constant, closed.consts), *args], run, literal)

    def _results(self, caller: Location, eqn: JaxprEqn, values: list[V]) -> list[V]:
        if ir.name(eqn) in IDENTITIES:
            return values[:1]
        here = caller.inside(eqn)
        bodies = constructs.bodies(eqn) if ir.name(eqn) in _ENTER else None
        if bodies is None:
            return self.operation(eqn, values, here)
        return _ENTER[ir.name(eqn)](self, eqn, bodies, values, functools.partial(self._inside, here, id(eqn)))

    def _inside(
        self, here: Location, loop: int, step: str, body: ClosedJaxpr, args: Sequence[V], iteration: int | None = None
    ) -> list[V]:
        self.path.append(step)
        self.loops += [] if iteration is None else [(loop, iteration)]
        results = self.run(body, args, here)
        del self.path[-1], self.loops[len(self.loops) - (iteration is not None) :]
        return results


class Inside(Protocol):
    """Evaluates a body on its arguments. `step` is its entry in the path, such as "cond, branch 1"."""

    def __call__(
        self, step: str, body: ClosedJaxpr, args: Sequence[Any], iteration: int | None = None
    ) -> list[Any]: ...


Bodies = Sequence[ClosedJaxpr]


def _call(walker: Walker[Any], eqn: JaxprEqn, bodies: Bodies, values: list[Any], inside: Inside) -> list[Any]:
    kind = {"remat2": "remat", "custom_jvp_call": "custom_jvp", "custom_vjp_call": "custom_vjp"}
    name = constructs.function_name(eqn) or bodies[0].jaxpr.debug_info.func_name
    step = f"{kind.get(ir.name(eqn), operation(eqn))}({name})"
    return inside("" if in_scope(eqn, SEGMENT) else step, bodies[0], values)


def _cond(walker: Walker[Any], eqn: JaxprEqn, bodies: Bodies, values: list[Any], inside: Inside) -> list[Any]:
    branch = int(np.clip(values[0].array, 0, len(bodies) - 1))
    return inside(f"cond, branch {branch}", bodies[branch], values[1:])


def _while(walker: Walker[Any], eqn: JaxprEqn, bodies: Bodies, values: list[Any], inside: Inside) -> list[Any]:
    n, carry = constructs.condition_constants(eqn), constructs.carry(eqn)
    consts, state, iteration = values[n : carry.start], values[carry.start :], 0
    while inside(f"while, condition {iteration}", bodies[0], [*values[:n], *state], iteration)[0].array:
        state = inside(f"while, iteration {iteration}", bodies[1], [*consts, *state], iteration)
        iteration += 1
    return state


def _scan(walker: Walker[Any], eqn: JaxprEqn, bodies: Bodies, values: list[Any], inside: Inside) -> list[Any]:
    carry, options = constructs.carry(eqn), constructs.scan_options(eqn)
    length, is_reverse = options["length"], options["reverse"]
    consts, state, xs = values[: carry.start], values[carry.start : carry.stop], values[carry.stop :]
    rows: list[list[Any]] = []
    for i in reversed(range(length)) if is_reverse else range(length):
        slices = [walker.item(x, i) for x in xs]
        results = inside(f"scan, iteration {i} of {length}", bodies[0], [*consts, *state, *slices], i)
        state = results[: len(carry)]
        rows.append(results[len(carry) :])
    rows = rows[::-1] if is_reverse else rows
    empty = (walker.constant(jnp.zeros(x.shape, x.dtype)) for x in ir.avals(eqn.outvars[len(carry) :]))
    return [*state, *(map(walker.stack, map(list, zip(*rows, strict=True))) if rows else empty)]


_CALLS = "jit", "remat2", "custom_jvp_call", "custom_vjp_call", "closed_call", "linear_call", "scaled_call"
_Enter = Callable[[Walker[Any], JaxprEqn, Bodies, list[Any], Inside], list[Any]]
_ENTER: dict[str, _Enter] = dict.fromkeys(_CALLS, _call) | {"cond": _cond, "while": _while, "scan": _scan}
