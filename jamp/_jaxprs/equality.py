"""Keys that are equal for equal code and for equal constants."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jamp._jaxprs.ir import JaxprEqn, Var, avals, is_literal, parameters


def fingerprint(inputs: Sequence[Var], outputs: Sequence[Any], eqns: Sequence[JaxprEqn], sources: bool = True) -> Any:
    """A key that is equal for code with the same operations on the same operands.

    With `sources`, they also come from the same lines and scopes, with the same metadata.
    """
    numbers: dict[Any, int] = {v: i for i, v in enumerate(inputs)}
    name = lambda v: (v.aval, Bits(v.val)) if is_literal(v) else numbers[v]
    parts: list[Any] = [tuple(avals(inputs))]
    for eqn in eqns:
        source = (eqn.source_info.traceback, eqn.source_info.name_stack, eqn.ctx) if sources else ()
        params = (_hashable(x, sources) for x in parameters(eqn))
        parts.append((eqn.primitive, *source, *params, *map(name, eqn.invars), *avals(eqn.outvars)))
        numbers |= {v: len(numbers) + i for i, v in enumerate(eqn.outvars)}
    return (*parts, *map(name, outputs))


class Bits:
    """A constant in a key. It equals a constant of the same type and bits, because 0.0 == -0.0 and nan != nan."""

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self) -> int:
        return hash(np.shape(self.value))  # To read the bits would wait for the device.

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Bits):
            return False
        x, y = self.value, other.value
        if x is y:
            return True
        # A tracer, or an object that is not an array, only equals itself.
        if not (_has_bits(x) and _has_bits(y)):
            return False
        return bool(jax.typeof(x) == jax.typeof(y)) and _bytes(x) == _bytes(y)


def _has_bits(x: Any) -> bool:
    return not isinstance(x, jax.core.Tracer) and (hasattr(x, "dtype") or isinstance(x, (int, float, complex)))


def _bytes(x: Any) -> bytes:
    is_key = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x).tobytes()


def _hashable(param: Any, sources: bool) -> Any:
    """A stand-in for a parameter of an equation. A jaxpr is replaced by its fingerprint."""
    if hasattr(param, "eqns"):
        jaxpr, consts = getattr(param, "jaxpr", param), getattr(param, "consts", ())
        inputs = [*jaxpr.constvars, *jaxpr.invars]
        return fingerprint(inputs, jaxpr.outvars, jaxpr.eqns, sources), *map(Bits, consts)
    if isinstance(param, (tuple, list)):
        return tuple(_hashable(x, sources) for x in param)
    try:
        hash(param)
    except TypeError:
        return Bits(param)
    return param
