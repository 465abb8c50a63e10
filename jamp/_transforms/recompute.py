"""`recompute`, which keeps less for the backward pass of any function."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from jax.typing import DTypeLike

from jamp._arguments import Call, check_function
from jamp._jaxprs import interpret
from jamp._jaxprs.ir import ClosedJaxpr
from jamp._jaxprs.source import users_stacklevel
from jamp._numbers import as_number
from jamp._products.lower import with_products
from jamp._recompute.budget import (
    MemoryBudget,
    check_budget,
    warnings_of_budget,
)
from jamp._recompute.opened import opened
from jamp._recompute.policies import warnings_of_policies
from jamp._recompute.stores import as_store
from jamp._transforms.passes import finished

P = ParamSpec("P")
R = TypeVar("R")


def recompute(
    fun: Callable[P, R], memory_budget: MemoryBudget, *, residuals: DTypeLike | None = None
) -> Callable[P, R]:
    """Compute values again in the backward pass of a function, so that it keeps no more than a budget.

    It is `jax.checkpoint` that chooses by itself what to keep, and it needs no change in the model. Cheap operations
    (norms, activations, softmax) are computed again first, at any budget. Below 1.0 the results of products are dropped
    too, those first that free the most bytes for the FLOPs of computing them again: the scores of attention, then
    products with few terms, at last everything but the inputs of segments of about a layer. It enters jit, scan, cond
    and shard_map. Your own `jax.checkpoint` stays as it is. A `checkpoint_name` outside of one keeps its value at a
    budget of 1.0 only. Collectives are not repeated, but for an `all_gather` of an argument, as FSDP has for each
    weight. That counts as 2,000 FLOPs a byte. `memory_report` shows the choice.

    A function without a product is left to JAX at 1.0, and cut into segments of about equal bytes below. What reaches a
    result only through `stop_gradient` is not kept. The code from where a Ref is made to its last use is computed once.

    The choice depends on shapes only, so that a program is the same on every host. It takes every floating-point
    argument to be differentiated.

    Args:
      fun: A function of arrays, or pytrees of them, and any other arguments: a loss, or a model. A train step has a
        gradient in it, whose values are not entered: transform the loss inside.
      memory_budget: A share from 0 to 1 of the bytes that are kept at 1.0, where every product is kept. Or bytes:
        "12GiB", "800MB". It bounds what the backward pass keeps of the forward pass: not parameters, optimizer state or
        temporaries, nor the last product and what follows, such as logits, which the backward pass reads at once. The
        bytes are of one device inside shard_map and on explicit mesh axes. With automatic sharding a trace sees
        whole arrays.
      residuals: How large activations are kept. None keeps them as they are. `jnp.int8` keeps values of 16 or 32 bits
        and at least 4096 elements in 8 bits, with a bfloat16 scale for each 16 along the last axis: 1.125 bytes an
        element. Where 16 does not divide it, blocks are of 15 to 8, and where none does, a value stays as it is. No
        product is computed again for it. The forward pass is the same. The backward pass computes from decoded values
        alone, so the rows of a softmax sum to 1. Weights and integers stay as they are. So do indices and predicates
        that are computed from activations, cumulative sums, factors of matrices, arguments of exponentials, roots,
        divisors, sines and maxima, such as scores of attention (a budget below 1.0 computes these again), and what is
        normalised over other axes than the last, as in batch norm. If more than 7/8 of the bytes would be left, nothing
        is kept in 8 bits. Of a `custom_vjp`, residuals that are its operands or results are kept in 8 bits. What your
        own `jax.checkpoint` keeps is not changed.

    Returns:
      A function like `fun`, with the same results and gradients, but XLA may round values that are computed again
      differently. Under `jamp.autocast` use the argument `memory_budget` of `jamp.autocast`.

    Raises:
      TypeError: If `fun` is not a function, or `memory_budget` is not a number or a string.
      ValueError: If it is not in [0, 1], or has an unknown unit.
        Also if `residuals` is neither None nor `jnp.int8`.
      NotImplementedError: If it is not 1.0, under `jax_remat3` with JAX 0.10.2. With `residuals`, when a second
        derivative is taken.

    Warns:
      UserWarning: If the least that can be kept is more than the budget. The largest values are named. If the function
        takes a gradient itself. If bytes are given where arrays are sharded automatically. If JAX ignores the policy
        of a `jax.checkpoint` inside, under `jax_remat3` with JAX 0.10.2 to 0.11.1.

    Examples:
      >>> import jax, jax.numpy as jnp, jamp
      >>> def loss(w, x):
      ...     for _ in range(4):
      ...         x = jnp.tanh(x @ w)
      ...     return jnp.mean(x**2)
      >>> args = jnp.eye(64), jnp.ones((32, 64))
      >>> grad = jax.jit(jax.grad(jamp.recompute(loss, 0.5)))(*args)
      >>> bool(jnp.allclose(grad, jax.grad(loss)(*args), rtol=1e-5))
      True

      Half of the bytes, and nothing computed again:

      >>> args = jnp.eye(64), jnp.ones((128, 64))
      >>> in_8_bits = jax.grad(jamp.recompute(loss, 1.0, residuals=jnp.int8))(*args)
      >>> bool(jnp.allclose(in_8_bits, jax.grad(loss)(*args), rtol=0.02))
      True

    References:
      Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016. Korthikanti et al., Reducing Activation
      Recomputation in Large Transformer Models, 2022. The budget is as in `torch._functorch.config`. Chen et al.,
      ActNN: Reducing Training Memory Footprint via 2-Bit Activation Compressed Training, ICML 2021. Xi et al., COAT:
      Compressing Optimizer States and Activation for Memory-Efficient FP8 Training, ICLR 2025.
    """
    check_function(fun, "jamp.recompute({}, 0.5)")
    check_budget(memory_budget)
    memory_budget, store = as_number(memory_budget), as_store(residuals)

    @functools.wraps(fun)
    def with_budget(*args: P.args, **kwargs: P.kwargs) -> R:
        call, closed = traced_with_budget(args, kwargs, fun, memory_budget, "recompute")
        values = interpret.call(finished(closed, memory_budget, store), call.leaves)
        result: R = call.finish(values)
        return result

    return with_budget


def traced_with_budget(
    args: tuple[Any, ...], kwargs: dict[str, Any], fun: Callable[..., Any], budget: MemoryBudget, caller: str
) -> tuple[Call, ClosedJaxpr]:
    """Return a call and its jaxpr, in which what autocast and recompute made is as it was before it was lowered."""
    call = Call(args, kwargs)
    closed = with_products(opened(call.trace(fun, caller)))
    messages = warnings_of_budget(closed, budget, "recompute(loss, memory_budget)")
    for message in [*messages, *warnings_of_policies(closed)]:
        warnings.warn(message, stacklevel=users_stacklevel())
    return call, closed
