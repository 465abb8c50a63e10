"""What the plans of a function share: the compute dtype, the rules, and the jaxprs planned so far."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jamp import _jaxpr
from jamp._autocast.plan import Input, PlannedJaxpr
from jamp._autocast.rules import EXACT, MOVES_DATA
from jamp._jaxpr import ClosedJaxpr, JaxprEqn, Var


class Planner:
    """The compute dtype and the rules, and the bodies planned so far."""

    def __init__(self, compute_dtype: Any, rules: Mapping[str, tuple[str, str]]):
        self.compute_dtype = np.dtype(compute_dtype)
        self.rules = rules
        self._bodies: dict[Any, PlannedJaxpr] = {}
        to_low = jax.make_jaxpr(lambda x: lax.convert_element_type(x, self.compute_dtype))(np.float32(0)).eqns[0]
        to_float32 = _jaxpr.replace_dtype(to_low, self.compute_dtype, np.dtype(np.float32))
        self._converts = {True: to_low, False: to_float32}

    def body(self, closed: ClosedJaxpr, inputs: Sequence[Input]) -> PlannedJaxpr:
        """The plan of a jaxpr for what is known of its inputs."""
        key = id(closed.jaxpr), tuple((x.low, repr(x.constant), x.parameter) for x in inputs)
        if key not in self._bodies:
            self._bodies[key] = PlannedJaxpr(
                self, closed, inputs
            )  # It holds the jaxpr, whose id therefore stays its own.
        return self._bodies[key]

    def convert(self, source: Var, target: Var, low: bool) -> JaxprEqn:
        """The equation that casts one variable to another."""
        return self._converts[low].replace(invars=[source], outvars=[target])

    @functools.cache  # noqa: B019
    def broadcast(self, aval: Any, shape: tuple[int, ...]) -> JaxprEqn:
        """The equation that broadcasts the trailing axes of an array."""
        axes = range(len(shape) - len(aval.shape), len(shape))
        return jax.make_jaxpr(lambda x: lax.broadcast_in_dim(x, shape, axes))(aval).eqns[0]

    def is_exact(self, key: str) -> bool:
        """Whether an operation gives the same numbers in both dtypes."""
        return self.rules.get(key, ("", ""))[1] in (MOVES_DATA, EXACT)

    def holds(self, constant: Any) -> bool:
        """Whether the compute dtype holds a constant, to within its rounding."""
        with np.errstate(all="ignore"):
            wide, low = np.float64(constant), np.float64(np.asarray(constant).astype(self.compute_dtype))
            error = abs(low - wide) <= float(jnp.finfo(self.compute_dtype).eps) * abs(wide)
        return bool(error) or np.array_equal(wide, low, equal_nan=True)
