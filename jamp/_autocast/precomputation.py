"""`precompute`: evaluate once what a function computes from its parameters alone, such as their float8 values."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array
from jax.tree_util import Partial

from jamp import _evaluate
from jamp._autocast.split import Level, Split, inlined, split
from jamp._jaxpr import ClosedJaxpr


def precompute(fun: Callable[..., Any], params: Any, *args: Any, **kwargs: Any) -> Partial:
    """Evaluate once what a function computes from its parameters alone: casts to 16 bit, float8 values and scales.

    For weights that are used many times: in inference, and in the micro-batches of gradient accumulation. What is kept
    is never larger than what it is computed from. Parameters that are not needed any more are not kept, so that a model
    with float8 or 16-bit weights needs a quarter or half of their memory. Loops over layers are split too.

    Args:
      fun: A function of parameters and other arguments: `jamp.autocast(model, jamp.Float8())`, or a gradient of it.
      params: The first argument of `fun`, a pytree of arrays.
      *args: The other arguments as `fun` will be called, arrays or `jax.ShapeDtypeStruct`s. Only their types are used.
      **kwargs: Keyword arguments, likewise.

    Returns:
      A function of the other arguments, which is a pytree: it may be an argument of a function under `jax.jit`. It has
      no derivative: give `precompute` the gradient of `fun` instead.

    Raises:
      ValueError: When it is called, if what it keeps does not fit arguments of these types. Call `precompute` again.
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
    parts, _ = _trace(fun, params, args, kwargs)
    leaves = jax.tree.leaves(params)
    computed = jax.jit(lambda *known: _evaluate.call(parts.early, known))(*leaves)
    late = _Late(fun, jax.tree.map(jax.typeof, params))
    return Partial(late, [*computed, *(leaves[i] for i in parts.passed)])


@dataclasses.dataclass(frozen=True, eq=False)
class _Late:
    """The function that `precompute` returns: `fun`, with the types of its parameters."""

    fun: Callable[..., Any]
    params: Any

    def __call__(self, kept: list[Array], *args: Any, **kwargs: Any) -> Any:
        parts, structure = _trace(self.fun, self.params, args, kwargs)
        arrays, _ = _arrays(args, kwargs)
        expected = parts.late.in_avals[: len(parts.late.in_avals) - len(arrays)]
        if [x.str_short() for x in expected] != [jax.typeof(x).str_short() for x in kept]:
            raise ValueError(
                "The function reads other values of its parameters for arguments of these types than for those that "
                "precompute was called with. Call jamp.precompute again, with arguments of these types."
            )
        return jax.tree.unflatten(structure, _without_derivative(parts.late)(*kept, *arrays))


def _without_derivative(closed: ClosedJaxpr) -> Callable[..., list[Array]]:
    evaluate = jax.custom_jvp(lambda *args: _evaluate.call(closed, args))

    @evaluate.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        raise TypeError(
            "What precompute returns has no derivative. Take the gradient first: jamp.precompute(jax.grad(loss_fn), "
            "params, batch)."
        )

    return evaluate


def _trace(fun: Callable[..., Any], params: Any, args: Any, kwargs: Any) -> tuple[Split, Any]:
    """The parts of a function whose parameters are known, and the structure of its result."""
    known, treedef = jax.tree.flatten(params)
    arrays, rebuild = _arrays(args, kwargs)
    structure = None

    def flat_fun(*leaves: Any) -> list[Any]:
        nonlocal structure
        given, named = rebuild(leaves[len(known) :])
        results = fun(jax.tree.unflatten(treedef, leaves[: len(known)]), *given, **named)
        found, structure = jax.tree.flatten(results)
        return found

    levels = [Level.KNOWN] * len(known) + [Level.OTHER] * len(arrays)
    closed = jax.make_jaxpr(flat_fun)(*known, *arrays)
    return split(inlined(closed, levels), levels), structure


def _arrays(args: Any, kwargs: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """What is traced of some arguments, and the function that puts other values in its place."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    places = [i for i, x in enumerate(leaves) if hasattr(x, "dtype") and hasattr(x, "shape")]

    def rebuild(values: Sequence[Any]) -> Any:
        new = dict(zip(places, values, strict=True))
        return jax.tree.unflatten(treedef, [new.get(i, x) for i, x in enumerate(leaves)])

    return [leaves[i] for i in places], rebuild
