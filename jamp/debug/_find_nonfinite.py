"""`find_nonfinite`, which names the operation that made inf or NaN."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from jamp import _evaluate
from jamp._arguments import Call, named, paths
from jamp._cast import is_inexact
from jamp.debug._nonfinite_search import Finding, NonfiniteSearch, Values
from jamp.debug._origin import OriginWalker, Value, known, worst


def find_nonfinite(fun: Callable[..., Any], *, grad: bool = False) -> Callable[..., NonfiniteSearch]:
    """Run a function operation by operation, and name the first that returned inf or NaN for finite inputs.

    If the results hold inf or NaN, it names the first operation whose inf or NaN reached them. A deliberate -inf mask
    is not reported. An operation that turns it into NaN is. It enters jit, scan, while, cond, remat and functions with
    custom derivatives, evaluates each operation at its own dtype, and waits for each, so use it for diagnosis and not
    for training. `fun` may be any function that JAX can trace, with or without `jamp.autocast`. To include the loss
    scale, pass `jamp.value_and_grad(loss_fn, opt_state)`.

    Args:
      fun: A function of arrays, or pytrees of them, and any other arguments.
      grad: Whether to run the backward pass too if the results are finite. It differentiates the first result if that
        is a scalar (a loss), else the sum of all results, with respect to all floating arguments.

    Returns:
      A function of the arguments of `fun` that returns a `NonfiniteSearch`. It is false if everything is finite.

    Examples:
      >>> import jax.numpy as jnp, jamp.debug
      >>> search = jamp.debug.find_nonfinite(lambda x: jnp.exp(x))(jnp.float16([1.0, 12.0]))
      >>> print(str(search).splitlines()[0])
      exp gave inf: exp overflow in float16: value would be 1.6e5, float16 ends at 65504
    """

    def search(*args: Any, **kwargs: Any) -> NonfiniteSearch:
        call = Call(args, kwargs)
        held = _nonfinite_inputs(fun, args, kwargs)
        flat = call.traceable(fun)
        parameters = paths(fun, args, kwargs)
        forward, results = _walk(flat, call.leaves, parameters)
        report = _report(forward, results, held)
        if not grad or (report.finding and report.reaches_results):
            return report
        both, gradients = _walk(lambda *leaves: _gradients(flat, leaves), call.leaves, parameters)
        return _report(both, gradients, held, {(f.primitive, f.source) for f in forward.findings})

    return search


def _walk(
    flat: Callable[..., list[Any]], leaves: Sequence[Any], parameters: Sequence[str]
) -> tuple[OriginWalker, list[Value]]:
    closed = jax.make_jaxpr(flat)(*leaves)
    walker = OriginWalker()
    named_leaves = zip(leaves, parameters, strict=True)
    return walker, walker.run(closed, [known(jnp.asarray(x), "input", path) for x, path in named_leaves])


def _gradients(flat: Callable[..., list[Any]], leaves: Sequence[Any]) -> list[Any]:
    differentiable = [i for i, x in enumerate(leaves) if is_inexact(x)]

    def of_differentiable(*xs: Any) -> list[Any]:
        results = [jnp.asarray(x) for x in flat(*_evaluate.replaced(leaves, differentiable, xs))]
        inexact = [x for x in results if is_inexact(x)]
        is_loss = bool(inexact) and inexact[0] is results[0] and not inexact[0].shape
        return inexact[:1] if is_loss else inexact

    results, pull_back = jax.vjp(of_differentiable, *[leaves[i] for i in differentiable])
    return list(pull_back([jnp.ones_like(x) for x in results]))


def _report(
    walker: OriginWalker, results: Sequence[Value], held: tuple[str, ...], forward: set[tuple[str, str]] | None = None
) -> NonfiniteSearch:
    """The result of a search. `forward` has the findings of the forward pass, if the backward pass was run after it."""
    origins = [x.origin for x in results if x.origin is not None]
    seen = [origin for origin in origins if isinstance(origin, Finding)]
    first = min(seen, key=lambda finding: finding.order) if seen else next(iter(walker.findings), None)
    if first and forward is not None:
        first = dataclasses.replace(first, backward=(first.primitive, first.source) not in forward)
    return NonfiniteSearch(first, bool(seen), held, "constant" in origins, walker.count)


def _nonfinite_inputs(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """The inputs that are not finite, each with the name of its parameter and its path."""
    flat = [(path, x) for path, x in jax.tree.leaves_with_path(named(fun, args, kwargs)) if is_inexact(x)]
    bad = worst([x for _, x in flat])
    return tuple(
        f"{path[0].key}{keystr(path[1:])} holds {Values.of(x)}" for (path, x), b in zip(flat, bad, strict=True) if b
    )
