"""Evaluate one equation on other operands."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.extend import core

from jamp._jaxprs import build, constructs, equality, interpret, ir
from jamp._jaxprs.ir import JaxprEqn
from jamp._jaxprs.primitives import EXACT


def bind(eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """Return the results of an equation. On a CPU it is compiled quickly, and once for equal equations."""
    types = ir.avals(eqn.outvars)
    if eqn.effects or constructs.has_body(eqn) or not all(map(is_on_cpu, args)):
        return interpret.bind(eqn, args, types)
    inputs: list[Any] = [core.Var(jax.typeof(x)) for x in args]
    outputs = [core.Var(x) for x in types]
    like = eqn.replace(invars=inputs, outvars=outputs)
    key = equality.fingerprint(inputs, outputs, [like], sources=False), eqn.ctx
    results: list[Any] = _compiled(_Operation(key, like))(*args)
    return results


@dataclasses.dataclass(frozen=True)
class _Operation:
    """An equation that equals another one if the keys are equal."""

    key: Any
    eqn: JaxprEqn = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=4096)
def _compiled(operation: _Operation) -> Callable[..., Any]:
    eqn = operation.eqn
    inputs: Any = eqn.invars
    closed = build.closed_jaxpr({}, inputs, eqn.outvars, [eqn])
    options = _quick() if ir.name(eqn) in EXACT else {}
    return jax.jit(lambda *xs: interpret.call(closed, xs), compiler_options=options)


def is_on_cpu(x: Any) -> bool:
    return isinstance(x, Array) and all(device.platform == "cpu" for device in x.devices())


@functools.cache
def _quick() -> dict[str, Any]:
    """Options with which XLA compiles an operation for a CPU in a fifth of the time. Not every release has all."""
    options: dict[str, Any] = {}
    for name, value in _QUICK.items():
        try:
            jax.jit(lambda x: x + 1, compiler_options={name: value}).lower(np.float32(0)).compile()
            options[name] = value
        except jax.errors.JaxRuntimeError:
            continue
    return options


_QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}
