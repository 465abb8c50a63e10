"""The function transformations: autocast and full_precision."""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jamp._arguments import check_function
from jamp._autocast.arguments import is_format_class
from jamp._autocast.facts import AUTOCAST, FULL_PRECISION
from jamp._cast import as_dtype, is_dtype
from jamp._jaxprs import interpret
from jamp._jaxprs.source import users_stacklevel
from jamp._numbers import as_number
from jamp._products.formats import Format
from jamp._recompute.budget import MemoryBudget, check_budget
from jamp._recompute.stores import Store, as_store
from jamp._transforms.passes import passes
from jamp._transforms.warn import warnings_of

P = ParamSpec("P")
R = TypeVar("R")

_USAGE = "Write jamp.autocast(loss_fn, jnp.bfloat16)(params, batch), or @jamp.autocast(jnp.bfloat16)."


@overload
def autocast(
    fun: Callable[P, R],
    compute_dtype: DTypeLike | Format,
    *,
    rules: Mapping[str, str] | None = None,
    recompute: bool | None = None,
    memory_budget: MemoryBudget = 1.0,
    residuals: DTypeLike | None = None,
) -> Callable[P, R]: ...


@overload
def autocast(
    compute_dtype: DTypeLike | Format,
    /,
    *,
    rules: Mapping[str, str] | None = None,
    recompute: bool | None = None,
    memory_budget: MemoryBudget = 1.0,
    residuals: DTypeLike | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def autocast(
    fun: Any = None,
    compute_dtype: Any = None,
    *,
    rules: Mapping[str, str] | None = None,
    recompute: bool | None = None,
    memory_budget: MemoryBudget = 1.0,
    residuals: DTypeLike | None = None,
) -> Any:
    """Run the matrix products of a function in 16 bit, and the operations between them in float32.

    For code in float64, the compute dtype float32 runs the products in float32. Everything else stays float64.

    `@jamp.autocast(jnp.bfloat16)` above a function is the same as `jamp.autocast(fun, jnp.bfloat16)`.

    `fun` is traced. Its matrix products and convolutions get operands in the compute dtype and give results in it. The
    operations between two products (norms, activations, softmax, losses) are computed in float32, and their result is
    rounded where the next product reads it. The backward pass keeps the 16-bit inputs of these cheap operations, and
    recomputes their float32 values. Values that are float64, complex, integer, or already 16 bit are left alone. It
    enters jit, scan, while, cond, remat, shard_map, and functions with custom derivatives. Code that it cannot enter
    runs as it was traced. Products that sum at most 8 terms stay in float32, because they often carry coordinates. The
    [rules](../autocast.md#rules) are a table, and `autocast_report` shows the decisions.

    With `jnp.float32`, products of float64 operands get float32 operands and the precision HIGHEST, unless the code
    asks for a lower one. Gradients of weights are computed in float32 and added in float64. Products of two vectors,
    products that sum at most 8 terms, products in JAX's linear algebra and its derivatives, and products for which the
    code asks for HIGHEST stay float64. Products in a function that you pass to a solver do not. Values beyond the range
    of float32 become inf or 0 in a product. Float32 operands are left alone, and without float64 the function is
    unchanged. [Float64](../float64.md) says when it pays.

    Args:
      fun: A function of arrays, or pytrees of them, and any other arguments. The latter, and Python numbers, are not
        traced. Without it, with the compute dtype in its place, `autocast` returns a decorator.
      compute_dtype: float16 or bfloat16, or its name; or a `Float8`, `Int8` or `MXFP8`, for products in 8 bit; or
        float32, for the products of code in float64.
      rules: Categories for primitives that differ from the default: `{"tanh": "float32"}`. One for a construct, such
        as `{"scan": "float32"}`, keeps autocast out of it. `{"dot_general[head]": "float32"}` is for the products
        that have "head" in their name stack (`jax.named_scope`, names of Linen modules), and `{"*[head]": "compute"}`
        for all operations there but expensive ones, such as linear algebra, sorts and cumulative sums. For float64
        code, the category that changes nothing is "float64". A rule of yours that says "float32" or "accumulate" also
        raises operations that were traced in 16 bit: the result of such a product is float32 for whatever casts it to
        float32, or is raised too, and rounded for everything else. "accumulate" rounds its cotangent to 16 bit.
      recompute: False keeps in memory the values between products that the backward pass needs, and True computes
        them again. The default is True. It is False for the compute dtype float32, whose purpose is to save time,
        unless there is a memory budget. Inside your own `jax.checkpoint`, only its policy decides.
      memory_budget: How much the backward pass may keep, as in `jamp.recompute`. At 1.0 all products are kept.
      residuals: `jnp.int8` keeps large activations in 8 bits for the backward pass, as in `jamp.recompute`.

    Returns:
      A function like `fun`, whose results have the structure, shapes, dtypes and weak types of the results of `fun`.
      Gradients with respect to float32 arguments are float32. Use it before or after `jax.grad`, `jit`, `vmap`,
      `scan` and `remat`, but in 8 bit only before `jax.grad`: `jax.grad(jamp.autocast(fun, jamp.Float8()))`. Outside
      `jit` it is traced at every call.

    Raises:
      ValueError: If the compute dtype is not one of these, a rule is for an unknown primitive or category, or
        `residuals` is neither None nor `jnp.int8`.
      TypeError: If `fun` is not a function, or there is no compute dtype. When called, if a result of `fun` cannot be
        traced, or inside `hk.transform`.

    Examples:
      >>> import jax, jax.numpy as jnp, jamp
      >>> loss = jamp.autocast(lambda w, x: jnp.mean((x @ w) ** 2), jnp.bfloat16)
      >>> jax.grad(loss)(jnp.ones((16, 16)), jnp.ones((3, 16))).dtype
      dtype('float32')

      As a decorator:

      >>> @jamp.autocast(jnp.bfloat16)
      ... def predict(w, x):
      ...     return x @ w
      >>> predict(jnp.ones((16, 16)), jnp.ones((3, 16))).shape
      (3, 16)

      In float64, with a network in float32 and a factorization that is not:

      >>> def fun(w, x):
      ...     h = jnp.tanh(x @ w)
      ...     return jnp.linalg.slogdet(h.T @ h + jnp.eye(16))[1]
      >>> with jax.enable_x64(True):
      ...     w, x = jnp.full((16, 16), 0.1), jnp.ones((12, 16))
      ...     grads = jax.grad(jamp.autocast(fun, jnp.float32))(w, x)
      ...     error = float(abs(grads - jax.grad(fun)(w, x)).max())
      >>> grads.dtype, 0 < error < 1e-6
      (dtype('float64'), True)

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.3. The categories are the categories of
      `torch.autocast`.
    """
    if fun is None:
        fun, compute_dtype = compute_dtype, None
    if compute_dtype is None and (is_dtype(fun) or isinstance(fun, Format) or is_format_class(fun)):
        return lambda f: autocast(
            f, fun, rules=rules, recompute=recompute, memory_budget=memory_budget, residuals=residuals
        )
    if compute_dtype is None:
        got = "nothing" if fun is None else f"{getattr(fun, '__name__', f'a {type(fun).__name__}')} alone"
        raise TypeError(f"autocast takes a function and a compute_dtype, got {got}. {_USAGE}")
    check_budget(memory_budget)
    memory_budget, store = as_number(memory_budget), as_store(residuals)
    keeps_all = memory_budget == 1.0 and store is Store.ITSELF
    if recompute is None:
        recompute = not keeps_all or as_dtype(compute_dtype) != jnp.float32
    if not recompute and not keeps_all:
        asked = f"residuals={residuals!r}" if memory_budget == 1.0 else f"memory_budget={memory_budget!r}"
        raise ValueError(f"{asked} needs recompute=True, got recompute=False.")
    trace = passes(fun, compute_dtype, rules)

    @functools.wraps(fun)
    def with_casts(*args: Any, **kwargs: Any) -> Any:
        traced = trace(args, kwargs)
        for message in warnings_of(traced, memory_budget):
            warnings.warn(message, stacklevel=users_stacklevel())
        with jax.named_scope(AUTOCAST):
            values = interpret.call(traced.to_evaluate(recompute, memory_budget, store), traced.call.leaves)
        return traced.call.finish(values)

    return with_casts


def full_precision(fun: Callable[P, R]) -> Callable[P, R]:
    """Exclude a function from autocast: a loss, an attention softmax, a kernel.

    Args:
      fun: Any function. It may be a method of a module, and may be called inside a model.

    Returns:
      The same function. Under `autocast`, its forward and backward pass keep the dtypes they were traced with, and
      operands that are stored in 16 bit are cast back first. Without `autocast` nothing changes.

    Raises:
      TypeError: If `fun` is not a function.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> logits = jamp.full_precision(jnp.matmul)
      >>> float(jamp.autocast(lambda x: logits(x, x), jnp.float16)(300 * jnp.eye(16))[0, 0])
      90000.0
    """
    check_function(fun, "jamp.full_precision({})")

    @functools.wraps(fun)
    def marked(*args: P.args, **kwargs: P.kwargs) -> R:
        # A traced operation keeps its name scopes through every transformation.
        with jax.named_scope(FULL_PRECISION):
            return fun(*args, **kwargs)

    return marked
