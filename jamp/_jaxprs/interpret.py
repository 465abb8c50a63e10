"""Evaluate jaxprs, at once or equation by equation."""

import abc
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jamp._jaxprs import build, constructs, ir
from jamp._jaxprs.context import Context
from jamp._jaxprs.ir import ClosedJaxpr, Env, Jaxpr, JaxprEqn, Var, is_literal
from jamp._jaxprs.primitives import IDENTITIES

Run = Callable[[JaxprEqn, list[Any]], Sequence[Any]]  # an equation and its operands to its results


def call(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr."""
    values: list[Any] = core.jaxpr_as_fun(closed)(*args)
    return values


def evaluate(eqns: Sequence[JaxprEqn], env: Env, needed: Callable[[Var], bool]) -> None:
    """Evaluate `eqns` at their traced dtypes and add to `env` those outputs that are `needed`."""
    defined = dict.fromkeys(v for eqn in eqns for v in eqn.outvars)
    reads: dict[Any, None] = dict.fromkeys(v for eqn in eqns for v in eqn.invars if not is_literal(v))
    inputs = [v for v in reads if v not in defined]
    outputs = [v for v in defined if needed(v)]
    closed = build.closed_jaxpr({}, inputs, outputs, eqns)
    env.update(zip(outputs, call(closed, [env[v] for v in inputs]), strict=True))


def bind(eqn: JaxprEqn, args: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Evaluate one equation on values of any dtypes that it accepts. `results` are the types of its results."""
    inputs: list[Any] = [core.Var(jax.typeof(x)) for x in args]
    outputs = [core.Var(aval) for aval in results]
    env: Env = dict(zip(inputs, args, strict=True))
    evaluate([eqn.replace(invars=inputs, outvars=outputs)], env, lambda v: True)
    return [env[v] for v in outputs]


def function_of(eqn: JaxprEqn, operands: Sequence[Any], some: Sequence[int]) -> Callable[..., list[Any]]:
    """An equation as it was traced, as a function of some of its operands."""

    def original(*values: Any) -> list[Any]:
        return bind(eqn, build.replaced(operands, some, values), ir.avals(eqn.outvars))

    return original


def interpret(jaxpr: Jaxpr, values: Sequence[Any], run: Run, literal: Callable[[Any], Any] = ir.value) -> list[Any]:
    """The results of a jaxpr whose equations are evaluated one by one, on values of any kind.

    `values` are the values of its constants and inputs. `run` returns the results of an equation, given its operands.
    `literal` returns the value of a literal.
    """
    env: Env = dict(zip([*jaxpr.constvars, *jaxpr.invars], values, strict=True))
    read = lambda v: literal(v) if is_literal(v) else env[v]
    last_use = ir.last_uses(jaxpr.eqns, jaxpr.outvars)
    for index, eqn in enumerate(jaxpr.eqns):
        env.update(zip(eqn.outvars, run(eqn, [read(v) for v in eqn.invars]), strict=True))
        for v in {v for v in (*eqn.invars, *eqn.outvars) if not is_literal(v)}:
            if last_use.get(v, -1) <= index:
                del env[v]  # The activations of a model would not all fit in memory.
    return [read(v) for v in jaxpr.outvars]


def interpret_names(closed: ClosedJaxpr, inputs: Sequence[Any], run: Run) -> list[Any]:
    """Interpret a jaxpr on variables and literals. Its constants become literals."""
    constants = [core.Literal(x, jax.typeof(x)) for x in closed.consts]
    return interpret(closed.jaxpr, [*constants, *inputs], run, lambda v: v)


def batched(closed: ClosedJaxpr, axis: Any, args: Sequence[Any], axes: Sequence[Any]) -> ClosedJaxpr:
    """A jaxpr of batches, along the first axis of each result. JAX gives `axis` to the batching rule of a primitive."""
    run = lambda *xs: call(closed, xs)
    mapped = jax.vmap(run, tuple(axes), axis_name=axis.name, axis_size=axis.size, spmd_axis_name=axis.spmd_name)
    return build.without_constants(jax.make_jaxpr(mapped)(*args))


def weaken(x: Any) -> Any:
    """A value made weakly typed, as a traced Python scalar is. JAX has no public function for this."""
    eqn = jax.make_jaxpr(lambda y: jax.lax.convert_element_type(y, x.dtype))(np.uint8(0)).eqns[0]
    return bind(ir.with_params(eqn, weak_type=True), [x], [jax.typeof(x)])[0]


def bodies_to_enter(eqn: JaxprEqn) -> tuple[ClosedJaxpr, ...] | None:
    """Return the bodies of a call, a cond, a while or a scan. None for an equation that is evaluated as a whole.

    A linear solve and a shard_map are evaluated as a whole.
    """
    is_entered = constructs.is_call(eqn) or ir.name(eqn) in _CONTROL_FLOW
    return constructs.bodies(eqn) if is_entered else None


def control_flow(
    eqn: JaxprEqn, bodies: Sequence[Callable[[Any, list[Any]], list[Any]]], operands: Sequence[Any], more: Any
) -> list[Any]:
    """Evaluate a cond, a while or a scan with functions in place of its bodies.

    A function gets the operands of the body and the pytree `more`, or in a scan its slice along the first axis.
    """
    if ir.name(eqn) == "cond":
        return list(lax.switch(operands[0], bodies, more, operands[1:]))
    consts, state, xs = _split(eqn, operands)
    if ir.name(eqn) == "while":
        n = constructs.condition_constants(eqn)
        is_next = lambda state: bodies[0](more, [*consts[:n], *state])[0]
        return list(lax.while_loop(is_next, lambda state: bodies[1](more, [*consts[n:], *state]), state))

    def iteration(state: Sequence[Any], slices: tuple[Any, Sequence[Any]]) -> tuple[Sequence[Any], Sequence[Any]]:
        results = bodies[0](slices[0], [*consts, *state, *slices[1]])
        return results[: len(state)], results[len(state) :]

    end, stacked = lax.scan(iteration, state, (more, xs), **constructs.scan_options(eqn))
    return [*end, *stacked]


def _split(eqn: JaxprEqn, operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Return the constants of a loop, its carry, and what a scan reads in slices."""
    carry = constructs.carry(eqn)
    return operands[: carry.start], operands[carry.start : carry.stop], operands[carry.stop :]


class Entered(NamedTuple):
    """A construct, one of whose bodies is evaluated.

    Attributes:
      eqn: The construct.
      body: The index of the body.
      iteration: The number of the iteration. None if it is not a loop.
    """

    eqn: JaxprEqn
    body: int = 0
    iteration: int | None = None


class Tracked(Protocol):
    """An array with what an interpreter tracks about it."""

    @property
    def array(self) -> Any: ...


V = TypeVar("V", bound=Tracked)


def stacked(arrays: Sequence[Any]) -> Any:
    """Return arrays as one. XLA's time to compile a concatenation grows with the square of the number of operands."""
    size = math.isqrt(len(arrays)) + 1
    return jnp.concatenate([jnp.stack(arrays[i : i + size]) for i in range(0, len(arrays), size)])


class Interpreter(abc.ABC, Generic[V]):
    """An evaluation operation by operation on arrays. Calls are entered, and loops become Python loops.

    Attributes:
      entered: The constructs around the operation that is evaluated, outermost first.
    """

    def __init__(self) -> None:
        self.entered: list[Entered] = []

    @abc.abstractmethod
    def operation(self, eqn: JaxprEqn, values: list[V]) -> list[V]:
        """Evaluate an operation that is not entered."""

    @abc.abstractmethod
    def constant(self, array: Any) -> V:
        """Return a value that is written into the code."""

    @abc.abstractmethod
    def item(self, value: V, i: int) -> V:
        """Return a value along the first axis, for one iteration of a scan."""

    @abc.abstractmethod
    def stack(self, values: list[V]) -> V:
        """Return the values of all iterations of a scan as one. There is at least one iteration."""

    def context(self, eqn: JaxprEqn) -> Context:
        """Return the constructs around an operation that is evaluated, and the operation as the innermost of them."""
        return Context((*(x.eqn for x in self.entered), eqn))

    def run(self, closed: ClosedJaxpr, args: Sequence[V]) -> list[V]:
        """Return the results of a jaxpr."""
        literal = lambda v: self.constant(ir.value(v))
        return interpret(closed.jaxpr, [*map(self.constant, closed.consts), *args], self._results, literal)

    def _results(self, eqn: JaxprEqn, values: list[V]) -> list[V]:
        if ir.name(eqn) in IDENTITIES:
            return values[: len(eqn.outvars)]
        loop = build.loop(eqn)
        if loop is not None:
            return self.run(loop, values)
        bodies = bodies_to_enter(eqn)
        if bodies is None:
            return self.operation(eqn, values)
        if ir.name(eqn) in _CONTROL_FLOW:
            return _CONTROL_FLOW[ir.name(eqn)](self, eqn, bodies, values)
        return self._inside(Entered(eqn), bodies, values)

    def _inside(self, entered: Entered, bodies: Sequence[ClosedJaxpr], args: Sequence[V]) -> list[V]:
        self.entered.append(entered)
        results = self.run(bodies[entered.body], args)
        self.entered.pop()
        return results

    def _cond(self, eqn: JaxprEqn, bodies: Sequence[ClosedJaxpr], values: list[V]) -> list[V]:
        branch = int(np.clip(values[0].array, 0, len(bodies) - 1))
        return self._inside(Entered(eqn, branch), bodies, values[1:])

    def _while(self, eqn: JaxprEqn, bodies: Sequence[ClosedJaxpr], values: list[V]) -> list[V]:
        (consts, state, _), n = _split(eqn, values), constructs.condition_constants(eqn)
        for iteration in itertools.count():
            if not self._inside(Entered(eqn, 0, iteration), bodies, [*consts[:n], *state])[0].array:
                break
            state = self._inside(Entered(eqn, 1, iteration), bodies, [*consts[n:], *state])
        return list(state)

    def _scan(self, eqn: JaxprEqn, bodies: Sequence[ClosedJaxpr], values: list[V]) -> list[V]:
        (consts, state, xs), options = _split(eqn, values), constructs.scan_options(eqn)
        n, step, rows = len(state), -1 if options["reverse"] else 1, list[list[V]]()
        for i in range(options["length"])[::step]:
            results = self._inside(Entered(eqn, 0, i), bodies, [*consts, *state, *(self.item(x, i) for x in xs)])
            state = results[:n]
            rows.append(results[n:])
        if rows:
            return [*state, *(self.stack(list(column)) for column in zip(*rows[::step], strict=True))]
        return [*state, *(self.constant(jnp.zeros(x.shape, x.dtype)) for x in ir.avals(eqn.outvars[n:]))]


_Enter = Callable[[Interpreter[Any], JaxprEqn, Sequence[ClosedJaxpr], list[Any]], list[Any]]
_CONTROL_FLOW: dict[str, _Enter] = {"cond": Interpreter._cond, "while": Interpreter._while, "scan": Interpreter._scan}
