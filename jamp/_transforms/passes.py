"""Trace a function and run the passes: `cast`, `quantize`, `recompute`, `lower`, each from a jaxpr to a jaxpr."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import AxisType
from jax.typing import DTypeLike

from jamp._arguments import Call, check_function
from jamp._autocast.arguments import checked_dtype, merged_rules
from jamp._autocast.cast import cast
from jamp._autocast.decisions import Decisions
from jamp._autocast.quantize import quantize
from jamp._autocast.rules import COMPUTE, YOURS, Rule, wide_dtype
from jamp._autocast.target import Target
from jamp._cast import is_dtype
from jamp._jaxprs import ir
from jamp._jaxprs.ir import ClosedJaxpr
from jamp._products.formats import Format
from jamp._products.lower import lower
from jamp._products.product import products
from jamp._recompute.budget import MemoryBudget
from jamp._recompute.checkpoint import recompute
from jamp._recompute.stored import round_stored
from jamp._recompute.stores import Store

_CAST = " To cast arrays: jamp.cast_floating(params, jnp.bfloat16)."


class Passes(NamedTuple):
    """A call of a function, its jaxpr as traced, and the one with the decisions about it."""

    call: Call
    traced: ClosedJaxpr
    decided: ClosedJaxpr
    decisions: Decisions
    target: Target
    format: Format | None

    @property
    def is_cast(self) -> bool:
        """Whether autocast changes a product, or by a rule of the user another operation."""
        rules = [self.target.rules[key] for key in self.used if key in self.target.rules]
        is_by_rule = any(rule == Rule(COMPUTE, YOURS) for rule in rules)
        return is_by_rule or self.raises or any(product.format for product in products(self.decided))

    @property
    def raises(self) -> bool:
        """Whether a rule of the user raises an operation other than a product from 16 bit to float32."""
        return any(x.casts and x.casts[0].itemsize < x.casts[1].itemsize for x in self.decisions)

    @property
    def used(self) -> set[str]:
        """The keys of the rules that decided about an equation, and the names of all primitives."""
        found = {key for x in self.decisions for key in (x.key, ir.name(x.eqn))}
        return found.union(*((product.key, product.operation) for product in products(self.decided)))

    def to_evaluate(self, recomputes: bool, budget: MemoryBudget = 1.0, residuals: Store = Store.ITSELF) -> ClosedJaxpr:
        """Return the jaxpr to evaluate."""
        if not self.is_cast and budget == 1.0 and residuals is Store.ITSELF:
            return round_stored(self.traced)
        return finished(self.decided, budget if recomputes else None, residuals)


def finished(closed: ClosedJaxpr, budget: MemoryBudget | None = None, residuals: Store = Store.ITSELF) -> ClosedJaxpr:
    """Run the passes after `cast`: on a function, a derivative rule, or a function without autocast.

    Without a budget, JAX and the author of a rule decide what is kept.
    """
    quantized = quantize(closed)
    return lower(round_stored(quantized) if budget is None else recompute(quantized, budget, residuals))


Trace: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], Passes]


def passes(fun: Callable[..., Any], compute_dtype: DTypeLike | Format, rules: Mapping[str, str] | None) -> Trace:
    """The function that traces a call of `fun`, and decides about its products."""
    check_function(fun, "jamp.autocast({}, jnp.bfloat16)", " The function comes first." if is_dtype(fun) else _CAST)
    config: Format | None = None
    if isinstance(compute_dtype, Format):
        config, dtype = compute_dtype, np.dtype(compute_dtype.carrier)
    else:
        dtype = checked_dtype(compute_dtype)
    table = merged_rules(rules or {}, wide_dtype(dtype))

    def trace(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Passes:
        call, target = Call(args, kwargs), Target(dtype, table)
        traced = call.trace(fun, "autocast")
        in_shard_map = AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types
        decided, decisions = cast(traced, target, config, finished, in_shard_map)
        return Passes(call, traced, decided, decisions, target, config)

    return trace
