"""Trace a function and run the passes: `cast`, `quantize`, `recompute`, `lower`, each from a jaxpr to a jaxpr."""

import difflib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.typing import DTypeLike

from jamp._arguments import Call, check_function
from jamp._autocast.cast import cast
from jamp._autocast.decisions import Decisions
from jamp._autocast.quantize import quantize
from jamp._autocast.rules import ANY, COMPUTE, GRADIENT, YOURS, Rule, categories, rules_for, wide_dtype
from jamp._autocast.target import Target
from jamp._cast import as_dtype, is_dtype
from jamp._jaxprs import constructs, ir
from jamp._jaxprs.ir import ClosedJaxpr
from jamp._products.formats import Format
from jamp._products.lower import lower
from jamp._products.product import products
from jamp._recompute.budget import MemoryBudget
from jamp._recompute.checkpoint import recompute
from jamp._recompute.stored import round_stored
from jamp._recompute.stores import Store

NO_CONTEXT = "The function comes first."
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
    check_function(fun, "jamp.autocast({}, jnp.bfloat16)", " " + NO_CONTEXT if is_dtype(fun) else _CAST)
    config: Format | None = None
    if isinstance(compute_dtype, Format):
        config, dtype = compute_dtype, np.dtype(compute_dtype.carrier)
    else:
        dtype = _check_dtype(compute_dtype)
    table = _merge(rules or {}, wide_dtype(dtype))

    def trace(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Passes:
        call, target = Call(args, kwargs), Target(dtype, table)
        traced = call.trace(fun, "autocast")
        in_shard_map = AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types
        decided, decisions = cast(traced, target, config, finished, in_shard_map)
        return Passes(call, traced, decided, decisions, target, config)

    return trace


def is_format_class(x: Any) -> bool:
    """Whether an argument is `Float8`, say, where `Float8()` is meant."""
    return isinstance(x, type) and issubclass(x, Format)


def _check_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    checked = as_dtype(dtype)
    if checked is not None and checked in (jnp.float16, jnp.bfloat16, jnp.float32):
        return checked
    got, why = checked or dtype, "."
    if isinstance(dtype, type) and is_format_class(dtype):
        got, why = f"the class {dtype.__name__}", f". Pass jamp.{dtype.__name__}()."
    elif checked is not None and jnp.issubdtype(checked, jnp.floating):
        why = ". To compute in it, leave autocast out."
        if checked.itemsize == 1:
            why = ". Pass jamp.Float8(), which has scales."
    elif checked == jnp.int8:
        why = ". Pass jamp.Int8(), which has scales."
    elif isinstance(dtype, str) and dtype.lower().startswith(("float8", "fp8")):
        got, why = repr(dtype), ". Pass jamp.Float8()."
    elif checked is None:
        got = repr(dtype) if dtype is None or isinstance(dtype, str) else f"a {type(dtype).__name__}"
        why = ". Write jnp.bfloat16."
    raise ValueError(f"compute_dtype must be float16, bfloat16 or float32, got {got}{why}")


def _merge(rules: Mapping[str, str], wide: np.dtype[Any]) -> dict[str, Rule]:
    """The table with a user's rules in it. A rule for a primitive covers its special cases, but not its gradients."""
    table = rules_for(wide)
    if not isinstance(rules, Mapping) or not all(isinstance(name, str) for name in rules):
        raise TypeError(f'rules must map names of operations to categories, {{"tanh": "float32"}}, got {rules!r}.')
    for name, category in rules.items():
        if category not in categories(wide):
            names = ", ".join(categories(wide))
            raise ValueError(f"The rule for {name!r} must be one of {names}, got {category!r}.")
        known = {*table, *(key.split("[")[0] for key in table), *constructs.CONSTRUCTS, *ir.primitive_names()}
        base = name.partition("[")[0] if name.endswith("]") else ""
        if base == ANY:
            continue
        if name not in known and (base not in known or base in constructs.CONSTRUCTS):
            close = difflib.get_close_matches(name, known, 1, 0.8)
            keys = "Write a JAX primitive: 'dot_general' for matrix products"
            hint = f"Did you mean {close[0]!r}?" if close else f"{keys}, 'conv_general_dilated' for convolutions."
            raise ValueError(f"{name!r} is not the name of an operation. {hint}")
        if name in constructs.CONSTRUCTS and category != str(wide):
            raise ValueError(f"The rule for {name!r} must be '{wide}', which keeps autocast out, got {category!r}.")
    is_kept = lambda name, case: name not in rules or (case == f"{GRADIENT}]" and rules[name] == COMPUTE)
    kept = {key: rule for key, rule in table.items() if is_kept(key.split("[")[0], key.partition("[")[2])}
    return kept | {name: Rule(category, YOURS) for name, category in rules.items()}
