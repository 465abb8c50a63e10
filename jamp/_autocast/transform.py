"""The function transformations: autocast and full_precision."""

import difflib
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.typing import DTypeLike

from jamp import _evaluate, _jaxpr
from jamp._arguments import Call
from jamp._autocast.cast import cast
from jamp._autocast.decisions import warnings_of
from jamp._autocast.facts import AUTOCAST, FULL_PRECISION
from jamp._autocast.formats import Float8, Format, Int8
from jamp._autocast.lower import lower
from jamp._autocast.product import products
from jamp._autocast.quantize import quantize
from jamp._autocast.rules import CATEGORIES, COMPUTE, FLOAT32, GRADIENT, RULES, YOURS, Rule
from jamp._autocast.target import Target
from jamp._cast import as_dtype
from jamp._jaxpr import ClosedJaxpr

P = ParamSpec("P")
R = TypeVar("R")


def autocast(
    fun: Callable[P, R],
    compute_dtype: DTypeLike | Format,
    *,
    rules: Mapping[str, str] | None = None,
    recompute: bool = True,
) -> Callable[P, R]:
    """Run the matrix products of a function in 16 bit, and the operations between them in float32.

    `fun` is traced. Its matrix products and convolutions get operands in the compute dtype and give results in it. The
    operations between two products (norms, activations, softmax, losses) are computed in float32, and their result is
    rounded where the next product reads it. The backward pass keeps the 16-bit inputs of these cheap operations, and
    recomputes their float32 values. Values that are float64, complex, integer, or already 16 bit are left alone. It
    enters jit, scan, while, cond, remat, shard_map, and functions with custom derivatives. Code that it cannot enter
    runs as it was traced. The [rules](../autocast.md#rules) are a table, and `autocast_report` shows the decisions.

    Args:
      fun: A function of arrays, or pytrees of them, and any other arguments. The latter, and Python numbers, are not
        traced.
      compute_dtype: float16 or bfloat16, or its name; or a `Float8` or `Int8`, for products in 8 bit.
      rules: Categories for primitives that differ from the default: `{"tanh": "float32"}`. One for a construct, such
        as `{"scan": "float32"}`, keeps autocast out of it. `{"dot_general[head]": "float32"}` is for the products
        that have "head" in their name stack (`jax.named_scope`, names of Linen modules).
      recompute: False keeps the float32 values that the backward pass needs in memory. Inside your own
        `jax.checkpoint`, only its policy decides.

    Returns:
      A function like `fun`, whose results have the structure, shapes, dtypes and weak types that those of `fun` have.
      Gradients with respect to float32 arguments are float32. Use it before or after `jax.grad`, `jit`, `vmap`,
      `scan` and `remat`. Outside `jit` it is traced at every call.

    Raises:
      ValueError: If the compute dtype is not a 16-bit float, or a rule is for an unknown primitive or category.
      TypeError: If `fun` is not a function. When called, if a result of `fun` cannot be traced, or inside
        `hk.transform`.

    Examples:
      >>> import jax, jax.numpy as jnp, jamp
      >>> loss = jamp.autocast(lambda w, x: jnp.mean((x @ w) ** 2), jnp.bfloat16)
      >>> jax.grad(loss)(jnp.ones((2, 2)), jnp.ones((3, 2))).dtype
      dtype('float32')

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.3. The categories are those of
      `torch.autocast`.
    """
    trace = passes(fun, compute_dtype, rules)

    @functools.wraps(fun)
    def with_casts(*args: Any, **kwargs: Any) -> Any:
        traced = trace(args, kwargs)
        for message in warnings_of(traced):
            warnings.warn(message, stacklevel=2)
        with jax.named_scope(AUTOCAST):
            values = _evaluate.call(traced.to_evaluate(recompute), traced.call.leaves)
        return traced.call.finish(values)

    return with_casts


def full_precision(fun: Callable[P, R]) -> Callable[P, R]:
    """Exclude a function from autocast: a loss, an attention softmax, a kernel.

    Args:
      fun: Any function. It may be a method of a module, and may be called inside a model.

    Returns:
      The same function. Under `autocast`, its forward and backward pass keep the dtypes they were traced with, and
      operands that are stored in 16 bit are cast back first. Without `autocast` nothing changes.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> logits = jamp.full_precision(jnp.matmul)
      >>> float(jamp.autocast(lambda x: logits(x, x), jnp.float16)(jnp.float32([[300.0]]))[0, 0])
      90000.0
    """

    @functools.wraps(fun)
    def marked(*args: P.args, **kwargs: P.kwargs) -> R:
        # A traced operation keeps its name scopes through every transformation.
        with jax.named_scope(FULL_PRECISION):
            return fun(*args, **kwargs)

    return marked


class Passes(NamedTuple):
    """A call of a function, and its jaxprs: as traced, and with the decisions about its products.

    It may be `manual`, inside a shard_map.
    """

    call: Call
    traced: ClosedJaxpr
    decided: ClosedJaxpr
    target: Target
    format: Format | None
    manual: bool

    def to_evaluate(self, recompute: bool) -> ClosedJaxpr:
        """The jaxpr to evaluate."""
        from jamp._autocast import recompute as last  # Imported late, because it imports Pallas: see `_jaxpr.core`.

        if not any(product.format for product in products(self.decided.jaxpr)):
            return self.traced
        return lower(last.recompute(self.decided) if recompute else self.decided)


def passes(
    fun: Callable[..., Any], compute_dtype: DTypeLike | Format, rules: Mapping[str, str] | None
) -> Callable[[tuple[Any, ...], dict[str, Any]], Passes]:
    """The function that traces a call of `fun`, and decides about its products."""
    _check_fun(fun)
    config = compute_dtype if isinstance(compute_dtype, Format) else None
    dtype = np.dtype(config.carrier) if config else _check_dtype(compute_dtype)
    table = _merge(rules or {})

    def trace(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Passes:
        call, target = Call(args, kwargs), Target(dtype, table)
        traced = call.trace(fun, "autocast")
        manual = AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types
        decided = cast(traced, target, manual)
        return Passes(call, traced, quantize(decided, config, table) if config else decided, target, config, manual)

    return trace


def _check_fun(fun: Any) -> None:
    is_dtype = isinstance(fun, type(jnp.float16)) or (isinstance(fun, type) and issubclass(fun, np.generic))
    if not callable(fun) or is_dtype:
        raise TypeError(
            "autocast is a function transformation, like jax.grad, and not a context: it takes a function, got "
            f"{fun.__name__ if is_dtype else f'a {type(fun).__name__}'}. In place of `with autocast():`, transform the "
            "function that is called inside: jamp.autocast(loss_fn, jnp.float16)(params, batch). To cast arrays: "
            "jamp.cast_floating(params, jnp.float16)."
        )


def _check_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    checked = as_dtype(dtype)
    if checked is not None and checked in (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16)):
        return checked
    got, why = checked or dtype, "."
    if isinstance(dtype, type) and dtype in (Float8, Int8):
        got, why = f"the class {dtype.__name__}", f": pass an instance, jamp.{dtype.__name__}()."
    elif checked is not None and jnp.issubdtype(checked, jnp.floating):
        why = ". To compute in it, leave autocast out."
        if checked.itemsize == 1:
            why = ": its values need a scale for each tensor, which a cast does not have. Pass jamp.Float8()."
    elif checked == jnp.int8:
        why = ": its values need scales, which a cast does not have. Pass jamp.Int8()."
    raise ValueError(f"compute_dtype must be float16 or bfloat16, got {got}{why}")


def _merge(rules: Mapping[str, str]) -> dict[str, Rule]:
    """The table with a user's rules in it. A rule for a primitive covers its special cases, but not its gradients."""
    for name, category in rules.items():
        if category not in CATEGORIES:
            raise ValueError(f"The rule for {name!r} must be one of {', '.join(CATEGORIES)}, got {category!r}.")
        known = {*RULES, *(key.split("[")[0] for key in RULES), *_jaxpr.CONSTRUCTS, *_jaxpr.primitive_names()}
        base = name.partition("[")[0] if name.endswith("]") else ""
        if name not in known and (base not in known or base in _jaxpr.CONSTRUCTS):
            close = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {close[0]!r}?" if close else " The keys are names of JAX primitives."
            raise ValueError(f"{name!r} is not the name of an operation.{hint}")
        if name in _jaxpr.CONSTRUCTS and category != FLOAT32:
            raise ValueError(f"The rule for {name!r} must be 'float32', which keeps autocast out, got {category!r}.")
    is_kept = lambda name, case: name not in rules or (case == f"{GRADIENT}]" and rules[name] == COMPUTE)
    kept = {key: rule for key, rule in RULES.items() if is_kept(key.split("[")[0], key.partition("[")[2])}
    return kept | {name: Rule(category, YOURS) for name, category in rules.items()}
