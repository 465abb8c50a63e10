"""`autocast_from_jmp`: autocast by a policy of jmp, or by its text."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jamp._arguments import check_function, is_box
from jamp._cast import cast_floating, cast_leaf, check_floating
from jamp._transforms.autocast import autocast

P = ParamSpec("P")
R = TypeVar("R")

_KEYS = {"p": "params", "c": "compute", "o": "output"}


def autocast_from_jmp(fun: Callable[P, R], policy: Any, **options: Any) -> Callable[P, R]:
    """Run a function under `jamp.autocast` with the dtypes of a `jmp.Policy`.

    It takes the place of `policy.cast_to_compute` at the start of a function and `policy.cast_to_output` at its end.
    Each part of the policy becomes:

    - compute: the compute dtype of `autocast`. The matrix products run in it. Unlike in jmp, the operations between
      them, such as norms and softmax, run in float32.
    - output: the floating results of `fun` are cast to it.
    - params: nothing. 16-bit arrays among the arguments are cast to float32 first, and their gradients are in 16 bit
      again. Variables of Flax NNX keep their dtype. To store parameters in 16 bit, call
      `jamp.cast_floating(params, dtype)`.

    Args:
      fun: A function of arrays, or pytrees of them, that does no casts of its own.
      policy: A `jmp.Policy`, or its text: "p=f32,c=bf16,o=f32", "params=float32,compute=half", "bf16". As in jmp,
        params are f32 if the text has none, compute is like params, and output like compute. So "c=f16" has float16
        results. Add "o=f32" where `fun` is a loss function.
      options: Keywords of `jamp.autocast`, such as `rules`.

    Returns:
      A function like `fun`.

    Raises:
      ValueError: If the text is not a policy, or `autocast` has no such compute dtype.
      TypeError: If `fun` is not a function, or `policy` is neither a text nor a policy.

    Examples:
      >>> import jax, jax.numpy as jnp, jamp
      >>> fun = jamp.interop.autocast_from_jmp(lambda w, x: jnp.tanh(x @ w), "p=f32,c=bf16,o=f16")
      >>> w, x = jnp.ones((16, 16)), jnp.ones((3, 16))
      >>> fun(w, x).dtype, jax.grad(lambda w: fun(w, x).sum())(w).dtype
      (dtype('float16'), dtype('float32'))
    """
    check_function(fun, "jamp.interop.autocast_from_jmp({}, policy)")
    compute, output = _dtypes(policy)

    def raised(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(_raise, (args, kwargs), is_leaf=is_box)
        return cast_floating(fun(*args, **kwargs), output)

    return autocast(functools.wraps(fun)(raised), compute, **options)


def _raise(x: Any) -> Any:
    return cast_leaf(x, jnp.float32) if isinstance(x, jax.Array) else x


def _dtypes(policy: Any) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """The compute and output dtypes of a policy or its text."""
    if isinstance(policy, str):
        found = _parse(policy)
        params = found.get("params", "float32")
        compute = found.get("compute", params)
        names = compute, found.get("output", compute)
    elif hasattr(policy, "compute_dtype") and hasattr(policy, "output_dtype"):
        names = policy.compute_dtype, policy.output_dtype
    else:
        raise TypeError(f"policy must be a jmp.Policy or a text such as 'p=f32,c=bf16,o=f32', got {policy!r}.")
    return check_floating("compute", names[0]), check_floating("output", names[1])


def _parse(text: str) -> Mapping[str, str]:
    if "=" not in text:
        return dict.fromkeys(_KEYS.values(), text.strip())
    found = {}
    for part in text.split(","):
        key, _, dtype = (x.strip() for x in part.partition("="))
        name = _KEYS.get(key, key)
        if name not in _KEYS.values():
            raise ValueError(f"A policy has params, compute and output, got {key!r} in {text!r}.")
        found[name] = dtype
    return found
