"""Check the arguments of autocast: the compute dtype and the rules."""

import difflib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jamp._autocast.rules import ANY, COMPUTE, GRADIENT, YOURS, Rule, categories, rules_for
from jamp._cast import as_dtype
from jamp._jaxprs import constructs, ir
from jamp._products.formats import Format


def is_format_class(x: Any) -> bool:
    """Whether an argument is `Float8`, say, where `Float8()` is meant."""
    return isinstance(x, type) and issubclass(x, Format)


def checked_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """The compute dtype. Raise if products are not computed in it."""
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


def merged_rules(rules: Mapping[str, str], wide: np.dtype[Any]) -> dict[str, Rule]:
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
