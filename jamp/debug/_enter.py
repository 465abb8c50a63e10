"""Evaluate the constructs of JAX on real values: a loop is a Python loop, and of a cond only one branch runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from jamp import _jaxpr
from jamp.debug._value import Value, earliest, known

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn

# Evaluates a body on its arguments. The string says where it is.
Inside = Callable[[str, "ClosedJaxpr", Sequence[Value]], list[Value]]
Bodies = Sequence["ClosedJaxpr"]


def _call(eqn: JaxprEqn, bodies: Bodies, values: list[Value], inside: Inside) -> list[Value]:
    kind = {"remat2": "remat", "custom_jvp_call": "custom_jvp", "custom_vjp_call": "custom_vjp"}
    name = _jaxpr.function_name(eqn) or bodies[0].jaxpr.debug_info.func_name
    return inside(f"{kind.get(eqn.primitive.name, eqn.primitive.name)}({name})", bodies[0], values)


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
        slices = [known(x.array[i], x.origin) if x.origin else Value(x.array[i]) for x in xs]
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


ENTER: dict[str, Callable[[JaxprEqn, Bodies, list[Value], Inside], list[Value]]] = {
    "jit": _call,
    "remat2": _call,
    "custom_jvp_call": _call,
    "custom_vjp_call": _call,
    "cond": _cond,
    "while": _while,
    "scan": _scan,
}
