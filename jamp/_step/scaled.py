"""`scaled`: a function that scales its own backward pass, for trainers that own the gradient and the optimizer."""

import functools
import math
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from jamp._arguments import Call, check_function
from jamp._jaxprs import build
from jamp._leaves import is_gradient
from jamp._numbers import as_number
from jamp._step.misuse import scales_once
from jamp._step.retry import Scaling
from jamp._step.scaled_primitives import scaled_call

P = ParamSpec("P")
R = TypeVar("R")


def scaled(fun: Callable[P, R], scale: float = 2.0**15, *, retries: int = 2) -> Callable[P, R]:
    """Make a function that scales its own backward pass, so that float16 cotangents do not underflow.

    It is for trainers that call `jax.grad` and the optimizer themselves. There is no state. The backward pass
    multiplies the cotangents of the results by the power of two that brings the largest to `scale`, and divides the
    gradients by it, so they are true gradients. If one is inf or NaN, the backward pass runs again with a smaller
    scale: by default with 2**7, and then with 2**-9. The backward pass must be linear, as derivatives are. A
    `custom_vjp` that clips its cotangents clips the scaled ones.

    Put `autocast` inside: `jamp.scaled(jamp.autocast(loss_fn, jnp.float16))`. Gradients that no try repairs stay inf or
    NaN. Skip such steps with `jamp.skip_nonfinite(tx)`. With another loss scale, `update`
    raises an error if it gets the gradients as they are, but does not recognize the results of a `jit` of the
    gradient, or of arithmetic with it.

    Where you compute the gradients yourself, `value_and_grad` and a dynamic loss scale are better: they remember the
    scale and need no second try.

    Args:
      fun: A function of arrays, or pytrees of them, and any other arguments. It may close over arrays and models.
      scale: The largest scaled cotangent. It is rounded down to a power of two.
      retries: How often to try again. The first retry divides the scale by 2**8, the next by 2**16, then by 2**24. Each
        computes the forward pass again. With 0, nothing is checked.

    Returns:
      A function with the results of `fun`, whose gradients have the dtypes of the arguments. Use it under `jax.grad`,
      `jit`, `vmap`, `scan`, `remat`, `shard_map`, `jvp` and `autocast`. A second reverse pass through the first one
      needs `retries=0`. Outside `jit` it is traced at every call.

    Raises:
      TypeError: If `fun` is not a function, or as for `autocast`.
      ValueError: If `scale` or `retries` is out of range. When called, inside `scaled` or `value_and_grad`.

    Examples:
      >>> import jax, jax.numpy as jnp, jamp
      >>> loss = lambda w: 1e-6 * jnp.sum((w.astype(jnp.float16) / 100).astype(jnp.float32))
      >>> jax.grad(loss)(jnp.ones(1)).tolist()  # 1e-8 underflows
      [0.0]
      >>> abs(float(jax.grad(jamp.scaled(loss))(jnp.ones(1))[0]) - 1e-8) < 1e-11
      True

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2.
    """
    check_function(fun, "jamp.scaled({})")
    retries, given = as_number(retries), as_number(scale)
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 2.0**-126 <= given < 2.0**127:
        is_state = isinstance(given, tuple)
        got = f"a {type(given).__name__}" if is_state else repr(given)
        hint = " With a state, use jamp.value_and_grad(loss_fn, opt_state)." if is_state else ""
        raise ValueError(f"scale must be a positive number, such as 2.0**15, got scale={got}.{hint}")
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise ValueError(f"retries must be a number of tries, 0 or more, got retries={retries!r}.")
    exponent = math.frexp(given)[1] - 1

    @functools.wraps(fun)
    def with_scaled_gradients(*args: P.args, **kwargs: P.kwargs) -> R:
        call = Call(args, kwargs)
        with scales_once("scaled"):
            closed = call.trace(fun, "scaled")
        jaxpr, constants = build.without_constants(closed), [True] * len(closed.consts)
        scaling = Scaling(exponent, retries, (*constants, *map(is_gradient, call.paths, call.leaves, call.holders)))
        # The primitive is not in the closure: cloudpickle would send another one, without its rules.
        result: R = call.finish(scaled_call().bind(*closed.consts, *call.leaves, jaxpr=jaxpr, scaling=scaling))
        return result

    return with_scaled_gradients
