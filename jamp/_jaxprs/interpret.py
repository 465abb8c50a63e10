"""Evaluate jaxprs, at once or equation by equation."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jamp._jaxprs import build, ir
from jamp._jaxprs.ir import ClosedJaxpr, Env, Jaxpr, JaxprEqn, Var, is_literal

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


def interpret(jaxpr: Jaxpr, values: Sequence[Any], run: Run, literal: Callable[[Any], Any] = ir.value) -> list[Any]:
    """The results of a jaxpr whose equations are evaluated one by one, on values of any kind.

    `values` are those of its constants and inputs. `run` returns the results of an equation, given its operands.
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
