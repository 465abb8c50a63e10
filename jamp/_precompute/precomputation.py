"""`precompute`: evaluate once the values that depend only on a function's parameters, such as their float8 values."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.interpreters.partial_eval import dce_jaxpr
from jax.tree_util import Partial

from jamp import _evaluate, _fingerprint
from jamp._arguments import arrays_and_types
from jamp._jaxpr import ClosedJaxpr, Jaxpr
from jamp._precompute.split import Level, Split, inlined, split


def precompute(fun: Callable[..., Any], params: Any, *args: Any, **kwargs: Any) -> Partial:
    """Evaluate once the values that depend only on a function's parameters: casts to 16 bit, float8 values and scales.

    Use it for weights that are used many times: in inference, and in the micro-batches of gradient accumulation. A
    parameter is replaced by the values computed from it, so a model with float8 or 16-bit weights needs a quarter or
    half of their memory. No value is kept that is larger than the values it is computed from. It enters loops over
    layers, `jit` and `jax.checkpoint`. A parameter with any other reader, such as a `cond`, is kept as it is.

    `fun` must be pure: changes of a module's state are lost, and a random key in the parameters is used again in every
    call. A kept value may be a parameter itself, so do not donate the parameters.

    Args:
      fun: A function of parameters and other arguments: `jamp.autocast(model, jamp.Float8())`, or a gradient of it.
      params: The first argument of `fun`, a pytree of arrays, or a module.
      *args: The other arguments as `fun` will be called, arrays or `jax.ShapeDtypeStruct`s. Only their types are used.
      **kwargs: Keyword arguments, used in the same way.

    Returns:
      A function of the other arguments, which is a pytree: it may be an argument of a function under `jax.jit`. It has
      no derivative: give `precompute` the gradient of `fun` instead.

    Raises:
      ValueError: When the result is called with arguments for which `fun` computes other values from its parameters,
        such as values scaled by the sequence length. Call `precompute` again.
      TypeError: When it is differentiated.

    Examples:
      >>> import jax, jax.numpy as jnp, jamp
      >>> model = jamp.autocast(lambda w, x: jax.nn.relu(x @ w[0]) @ w[1], jnp.bfloat16)
      >>> w, x = jnp.ones((2, 128, 128)), jnp.ones((4, 128))
      >>> predict = jamp.precompute(model, w, x)
      >>> sorted({str(leaf.dtype) for leaf in jax.tree.leaves(predict)}), predict(x).shape
      (['bfloat16'], (4, 128))

    References:
      Partial evaluation: Jones, Gomard, Sestoft, Partial Evaluation and Automatic Program Generation, 1993.
      `torch.autocast` caches the casts of weights in the same way, inside one region.
    """
    parts, _ = _trace(fun, (params, *args), kwargs, params)
    leaves, rebuild = arrays_and_types((params,), {})
    computed = jax.jit(lambda *known: _evaluate.call(parts.early, known))(*leaves)
    types = rebuild([jax.typeof(x) for x in leaves])[0][0]
    return Partial(_Late(fun, types, parts), [*computed, *(leaves[i] for i in parts.passed)])


class _Late:
    """The function that `precompute` returns: `fun`, the types of its parameters, and its `Split`.

    Two are equal if their functions, types and early parts are, so that new parameter values need no compilation.
    """

    def __init__(self, fun: Callable[..., Any], params: Any, parts: Split):
        self.fun, self.params, self._key = fun, params, _early_key(parts)

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, _Late) or self.fun != other.fun:
            return False
        return bool(self.params == other.params and self._key == other._key)

    def __hash__(self) -> int:
        return hash((self.fun, jax.tree.structure(self.params)))

    def __call__(self, kept: list[Array], *args: Any, **kwargs: Any) -> Any:
        parts, structure = _trace(self.fun, (self.params, *args), kwargs, self.params)
        if _early_key(parts) != self._key:
            raise ValueError(
                "For these arguments the function computes other values from its parameters than for those "
                "given to jamp.precompute. Call jamp.precompute again, with arguments like these."
            )
        arrays, _ = arrays_and_types(args, kwargs)
        return jax.tree.unflatten(structure, _without_derivative(parts.late)(*kept, *arrays))


def _early_key(parts: Split) -> Any:
    """Equal for traces that compute equal values from the parameters. Constants of the late part alone may differ."""
    jaxpr, consts = _without_dead_code(parts.early)
    code = _fingerprint.fingerprint(jaxpr.invars, jaxpr.outvars, jaxpr.eqns, sources=False)
    return code, tuple(parts.passed), *map(_fingerprint.Bits, consts)


def _without_dead_code(early: ClosedJaxpr) -> tuple[Jaxpr, list[Any]]:
    """A jaxpr whose first inputs are the constants that it reads, and these constants."""
    jaxpr = _evaluate.without_constants(early).jaxpr
    n = len(early.consts)
    found, used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), [False] * n + [True] * (len(jaxpr.invars) - n))
    return found, [x for x, is_used in zip(early.consts, used, strict=False) if is_used]


def _without_derivative(closed: ClosedJaxpr) -> Callable[..., list[Array]]:
    # The constants are arguments: they may be values that a caller differentiates.
    evaluate = jax.custom_jvp(lambda *args: _evaluate.call(_evaluate.without_constants(closed), args))

    @evaluate.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        raise TypeError(
            "The result of precompute has no derivative. Take the gradient first: jamp.precompute(jax.grad(loss_fn), "
            "params, batch)."
        )

    return lambda *args: evaluate(*closed.consts, *args)


def _trace(fun: Callable[..., Any], args: Any, kwargs: Any, params: Any) -> tuple[Split, Any]:
    """The parts of a function whose first argument, the parameters, is known; and the structure of its result."""
    arrays, rebuild = arrays_and_types(args, kwargs)
    structure = None

    def flat_fun(*leaves: Any) -> list[Any]:
        nonlocal structure
        given, named = rebuild(leaves)
        found, structure = jax.tree.flatten(fun(*given, **named))
        return found

    known = len(arrays_and_types((params,), {})[0])
    levels = [Level.KNOWN] * known + [Level.OTHER] * (len(arrays) - known)
    closed = jax.make_jaxpr(flat_fun)(*arrays)
    return split(inlined(closed, levels), levels), structure
