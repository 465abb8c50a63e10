"""`find_nonfinite`, which names the operation that made inf or NaN."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from jamp._arguments import Call, arguments_by_name, differentiable, leaf_names, parameter_paths, with_numbers_as_arrays
from jamp._cast import is_inexact
from jamp._jaxprs import build
from jamp.debug._made import all_finite
from jamp.debug._nonfinite_search import ASK_FOR_GRADIENTS, NonfiniteSearch, Values
from jamp.debug._reaching import Run, distinct, run
from jamp.debug._usage import called_as, check_concrete, naming_states

_CALL = "jamp.debug.find_nonfinite(loss_fn, grad=True)(params, batch)"


@called_as(_CALL, functions=1)
def find_nonfinite(fun: Callable[..., Any], *, grad: bool = False) -> Callable[..., NonfiniteSearch]:
    """Run a function operation by operation, and name those that made the inf or NaN in its results.

    It names each operation that alone puts an inf or NaN into a result and does not follow from another one. The
    operations of the first result, the loss, come first, in the order in which they ran. A deliberate -inf mask is not
    reported. A NaN in the code that reaches a result is, and so is an operation that makes NaN of a mask. If no result
    holds an inf or NaN, it names the operations whose inf or NaN others hide, and is false.

    It enters jit, scan, while, cond, remat and functions with custom derivatives, evaluates each operation at its own
    dtype, and waits for each, so use it for diagnosis and not for training. `fun` may be any function that JAX can
    trace, with or without `jamp.autocast`. To include the loss scale, pass `jamp.value_and_grad(loss_fn, opt_state)`.

    [A loss that is NaN](../nan.md) shows how to find the step, and how to keep the parameters from before it.

    Args:
      fun: A function of arrays, or pytrees of them, and any other arguments.
      grad: Whether to run the backward pass too. It differentiates the first result if that is a scalar (a loss), else
        the sum of all results, with respect to the first argument that holds floating arrays. In an argument that
        `jax.grad` takes, Python floats count as arrays. For another argument, pass the gradient:
        `find_nonfinite(jax.grad(fun, argnums=1))`.

    Returns:
      A function of the arguments of `fun` that returns a `NonfiniteSearch`. Call it outside `jit`.

    Raises:
      TypeError: If it is called inside `jit` or another transformation, or if `fun` is not a function.

    Examples:
      >>> import jax.numpy as jnp, jamp.debug
      >>> search = jamp.debug.find_nonfinite(lambda x: jnp.exp(x))(jnp.float16([1.0, 12.0]))
      >>> print(str(search).splitlines()[0])
      exp gave inf: exp overflow in float16: value would be 1.6e5, float16 ends at 65504
    """

    def search(*args: Any, **kwargs: Any) -> NonfiniteSearch:
        if grad:
            args, kwargs = with_numbers_as_arrays(args, kwargs)
        call = Call(args, kwargs)
        check_concrete("find_nonfinite", call.leaves)
        held, kind = _nonfinite_inputs(fun, args, kwargs)
        note = _about_gradients(fun, args, kwargs) if grad else ASK_FOR_GRADIENTS
        flat = call.traceable(fun)
        evaluate = functools.partial(run, leaves=call.leaves, parameters=parameter_paths(fun, args, kwargs))
        places = differentiable(args, kwargs, call.leaves) if grad else []
        with naming_states(_CALL, args):
            if not places:
                return _result(evaluate(flat), None, held, kind, note)
            with_gradients = evaluate(lambda *leaves: _gradients(flat, leaves, places), gradients=len(places))
            # What is part of the backward pass is what the function itself does not run.
            return _result(evaluate(flat) if with_gradients.causes else None, with_gradients, held, kind, note)

    return search


def _gradients(flat: Callable[..., list[Any]], leaves: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """Return the gradients with respect to the leaves at some places, and the results."""

    def of_differentiable(*xs: Any) -> tuple[list[Any], list[Any]]:
        results = [jnp.asarray(x) for x in flat(*build.replaced(leaves, places, xs))]
        inexact = [x for x in results if is_inexact(x)]
        is_loss = bool(inexact) and inexact[0] is results[0] and not inexact[0].shape
        return inexact[:1] if is_loss else inexact, results

    values, pull_back, results = jax.vjp(of_differentiable, *[leaves[i] for i in places], has_aux=True)
    return [*pull_back([jnp.ones_like(x) for x in values]), *results]


def _about_gradients(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return a sentence on the gradients that were not computed, or an empty text."""
    places = differentiable(args, kwargs, Call(args, kwargs).leaves)
    if not places:
        return "no argument holds floating arrays, so no gradient was computed. jnp.asarray(x) makes one of a number"
    of, _ = leaf_names(fun, args, kwargs)[places[0]]
    names = list(arguments_by_name(fun, args, kwargs))
    others = (i for i, x in enumerate(args) if names[i] != of and any(map(is_inexact, jax.tree.leaves(x))))
    if (i := next(others, None)) is None:
        return ""
    return f"the gradients are with respect to {of}. For {names[i]}: find_nonfinite(jax.grad(fun, argnums={i}))"


def _result(forward: Run | None, backward: Run | None, held: tuple[str, ...], kind: str, note: str) -> NonfiniteSearch:
    """Return the result of a run of the function, a run of its gradients, or both."""
    runs = [x for x in (forward, backward) if x is not None]
    findings = forward.of_results("a result") if forward else []
    hidden = distinct(forward.causes) if forward else []
    if forward and backward and not forward.has_bad_loss:
        known = {(x.primitive, x.source) for x in forward.causes}
        marked = lambda x: dataclasses.replace(x, backward=(x.primitive, x.source) not in known)
        findings = distinct([*map(marked, backward.of_results("a gradient")), *findings])
        hidden = distinct([*hidden, *map(marked, backward.causes)])
    is_given = any(x.is_given for x in runs)
    is_finite = not findings and backward is not None
    return NonfiniteSearch(
        tuple(findings or hidden),
        bool(findings),
        held,
        bool(held) and is_given,
        is_given,
        runs[-1].count,
        is_finite,
        kind,
        note,
    )


def _nonfinite_inputs(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[str, ...], str]:
    """Return the inputs that are not finite, each with the name of its parameter and its path.

    And whether one of them is in the first argument that holds floating arrays ("parameters"), or none ("batch").
    """
    by_name = arguments_by_name(fun, args, kwargs)
    flat = [(path, x) for path, x in jax.tree.leaves_with_path(by_name) if is_inexact(x)]
    bad = [(path, x) for path, x in flat if not all_finite(x)]
    arguments = {path[0].key for path, _ in flat}
    first = next((name for name in by_name if name in arguments), "")
    is_batch = len(arguments) > 1 and all(path[0].key != first for path, _ in bad)
    held = tuple(f"{path[0].key}{keystr(path[1:])} holds {Values.of(x)}" for path, x in bad)
    return held, "" if not bad else "batch" if is_batch else "parameters"
