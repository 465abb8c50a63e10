"""Evaluate a jaxpr operation by operation on real values, and trace each inf and NaN to the operation that made it."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jamp import _evaluate, _jaxpr
from jamp._autocast.context import SEGMENT
from jamp._cast import is_inexact
from jamp._jaxpr import ClosedJaxpr, JaxprEqn
from jamp._primitives import REARRANGES
from jamp._source_line import in_scope, is_transposed, pattern, scope, user_line
from jamp.debug._cause import explain
from jamp.debug._finding import Finding, Values

INF, NAN = 1, 2

# Where an inf or NaN comes from: the operation that made it, an input of the function, or a constant in the code. A
# deliberate -inf mask is not reported. An operation that turns it into NaN is.
Origin = Finding | Literal["input", "constant"]


@dataclasses.dataclass(frozen=True)
class Value:
    """An array, the worst kind of number in it, the origin of that number, and the path if it is an argument."""

    array: Any
    bits: int = 0  # 0, INF or NAN
    origin: Origin | None = None
    parameter: str = ""


def known(array: Any, origin: Origin, parameter: str = "") -> Value:
    """A value that is not the result of an operation."""
    (bits,) = worst([array])
    return Value(array, bits, origin if bits else None, parameter)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an operation stands: the user's line, the name scopes, and whether it is part of a backward pass."""

    line: str = ""
    scope: str = ""
    backward: bool = False


def worst(arrays: Sequence[Any]) -> list[int]:
    """For each array 0, INF or NAN."""
    inexact = [i for i, x in enumerate(arrays) if is_inexact(x)]
    bits = np.zeros(len(arrays), int)
    if inexact:
        bits[inexact] = _classify([arrays[i] for i in inexact])
    return bits.tolist()


@jax.jit
def _classify(arrays: list[Array]) -> Array:
    has_nan = [jnp.any(jnp.isnan(x)) for x in arrays]
    has_inf = [jnp.any(jnp.isinf(x)) for x in arrays]
    return jnp.where(jnp.stack(has_nan), NAN, jnp.where(jnp.stack(has_inf), INF, 0))


def earliest(values: Iterable[Value]) -> Origin | None:
    """The origin of the result of an operation on some values: the first finding, else an input, else a constant."""
    origins = [x.origin for x in values if x.origin is not None]
    made = [origin for origin in origins if isinstance(origin, Finding)]
    if made:
        return min(made, key=lambda finding: finding.order)
    return "input" if "input" in origins else "constant" if origins else None


class Walker:
    """One evaluation of a function.

    Attributes:
      found: The operations that returned inf or NaN for finite inputs, in the order in which they ran.
      count: The number of operations that ran.
    """

    def __init__(self) -> None:
        self.found: list[Finding] = []
        self.count = 0
        self._path: list[str] = []

    def run(self, closed: ClosedJaxpr, args: Sequence[Value], caller: Place | None = None) -> list[Value]:
        """Return the results of a jaxpr. Operations without a source line get that of the caller."""
        jaxpr, caller = closed.jaxpr, caller or Place()
        env: dict[Any, Value] = dict(zip(jaxpr.invars, args, strict=True))
        env |= {v: known(x, "constant") for v, x in zip(jaxpr.constvars, closed.consts, strict=True)}
        last_use = _jaxpr.last_uses(jaxpr)
        for index, eqn in enumerate(jaxpr.eqns):
            values = [_read(env, v) for v in eqn.invars]
            here = _place(eqn, caller)
            bodies = _jaxpr.bodies(eqn) if eqn.primitive.name in _ENTER else None
            if bodies is None:
                results = self._operation(eqn, values, here)
            else:
                inside = lambda step, body, args, here=here: self._inside(step, body, args, here)
                results = _ENTER[eqn.primitive.name](eqn, bodies, values, inside)
            env.update(zip(eqn.outvars, results, strict=True))
            for v in {v for v in (*eqn.invars, *eqn.outvars) if not _jaxpr.is_literal(v)}:
                if last_use.get(v, -1) <= index:
                    del env[v]  # The activations of a model would not all fit in memory.
        return [_read(env, v) for v in jaxpr.outvars]

    def _inside(self, step: str, body: ClosedJaxpr, args: Sequence[Value], here: Place) -> list[Value]:
        self._path.append(step)
        results = self.run(body, args, here)
        self._path.pop()
        return results

    def _operation(self, eqn: JaxprEqn, values: list[Value], here: Place) -> list[Value]:
        self.count += 1
        arrays = [x.array for x in values]
        results = _evaluate.bind(eqn, arrays, _jaxpr.avals(eqn.outvars))
        bits = worst(results)
        origin = earliest(values)
        # If no operation made the inf (a mask of -inf), the operation that turns it into NaN is reported.
        is_new = origin is None or (not isinstance(origin, Finding) and max(x.bits for x in values) < NAN == max(bits))
        if any(bits) and is_new:
            origin = Finding(
                eqn.primitive.name,
                explain(eqn, arrays, results),
                here.line,
                tuple(filter(None, self._path)),
                here.backward,
                tuple(map(Values.of, filter(is_inexact, arrays))),
                tuple(map(Values.of, filter(is_inexact, results))),
                order=len(self.found),
                scope=here.scope,
                parameter=pattern(x.parameter for x in values if x.parameter),
            )
            self.found.append(origin)
        parameter = values[0].parameter if eqn.primitive.name in REARRANGES else ""
        return [Value(x, b, origin if b else None, parameter) for x, b in zip(results, bits, strict=True)]


def _place(eqn: JaxprEqn, caller: Place) -> Place:
    """Where an operation stands."""
    backward = caller.backward or is_transposed(eqn)
    return Place(user_line(eqn) or caller.line, scope(eqn, caller.scope), backward)


def _read(env: dict[Any, Value], atom: Any) -> Value:
    return known(_jaxpr.read({}, atom), "constant") if _jaxpr.is_literal(atom) else env[atom]


# The constructs, on real values. A loop becomes a Python loop, and only one branch of a cond runs.

# Evaluates a body on its arguments. The string is the body's entry in the path, such as "cond, branch 1".
Inside = Callable[[str, "ClosedJaxpr", Sequence[Value]], list[Value]]
Bodies = Sequence["ClosedJaxpr"]


def _call(eqn: JaxprEqn, bodies: Bodies, values: list[Value], inside: Inside) -> list[Value]:
    kind = {"remat2": "remat", "custom_jvp_call": "custom_jvp", "custom_vjp_call": "custom_vjp"}
    name = _jaxpr.function_name(eqn) or bodies[0].jaxpr.debug_info.func_name
    step = f"{kind.get(eqn.primitive.name, eqn.primitive.name)}({name})"
    return inside("" if in_scope(eqn, SEGMENT) else step, bodies[0], values)


def _cond(eqn: JaxprEqn, bodies: Bodies, values: list[Value], inside: Inside) -> list[Value]:
    del eqn
    branch = int(np.clip(values[0].array, 0, len(bodies) - 1))
    return inside(f"cond, branch {branch}", bodies[branch], values[1:])


def _while(eqn: JaxprEqn, bodies: Bodies, values: list[Value], inside: Inside) -> list[Value]:
    n, carry = _jaxpr.condition_constants(eqn), _jaxpr.carry(eqn)
    consts, state, iteration = values[n : carry.start], values[carry.start :], 0
    while inside(f"while, condition {iteration}", bodies[0], [*values[:n], *state])[0].array:
        state = inside(f"while, iteration {iteration}", bodies[1], [*consts, *state])
        iteration += 1
    return state


def _scan(eqn: JaxprEqn, bodies: Bodies, values: list[Value], inside: Inside) -> list[Value]:
    carry, options = _jaxpr.carry(eqn), _jaxpr.scan_options(eqn)
    length, is_reverse = options["length"], options["reverse"]
    consts, state, xs = values[: carry.start], values[carry.start : carry.stop], values[carry.stop :]
    rows: list[list[Value]] = []
    steps = reversed(range(length)) if is_reverse else range(length)
    for i in steps:
        slices = [
            known(x.array[i], x.origin, x.parameter) if x.origin else Value(x.array[i], parameter=x.parameter)
            for x in xs
        ]
        results = inside(f"scan, iteration {i} of {length}", bodies[0], [*consts, *state, *slices])
        state = results[: len(carry)]
        rows.append(results[len(carry) :])
    rows = rows[::-1] if is_reverse else rows
    types = _jaxpr.avals(eqn.outvars[len(carry) :])
    if not rows:
        return [*state, *(Value(jnp.zeros(aval.shape, aval.dtype)) for aval in types)]
    return [*state, *(_stack([row[j] for row in rows]) for j in range(len(types)))]


def _stack(rows: list[Value]) -> Value:
    return Value(jnp.stack([row.array for row in rows]), max(row.bits for row in rows), earliest(rows))


_ENTER: dict[str, Callable[[JaxprEqn, Bodies, list[Value], Inside], list[Value]]] = {
    "jit": _call,
    "remat2": _call,
    "custom_jvp_call": _call,
    "custom_vjp_call": _call,
    "closed_call": _call,
    "linear_call": _call,
    "cond": _cond,
    "while": _while,
    "scan": _scan,
}
