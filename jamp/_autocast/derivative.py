"""Split the derivative of a segment (see `recompute.py`) in two: some values are kept, others are computed again.

The results of products and other expensive operations are kept. For cheap operations, bytes decide:

- A value is recomputed if that reads at most four times its size. Sums over many terms are therefore kept, and so is
  now and then a value in a long chain of residual additions.
- A value that depends on no product, such as the cast of a weight or a dropout mask, is recomputed only if it is larger
  than the values it is computed from, as the broadcast of a mask is.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core
from jax.typing import DTypeLike

from jamp import _evaluate, _jaxpr
from jamp._cast import is_inexact
from jamp._jaxpr import ClosedJaxpr, JaxprEqn, Var
from jamp._primitives import CHEAP, MOVING

_READS = 4  # a value is recomputed if that reads at most this many times its size


class Split(NamedTuple):
    """The derivative of a segment in two parts.

    Attributes:
      forward: From the inputs to the results and the values that are kept.
      backward: From the kept values, some inputs and the tangents to the tangents of the results.
      inputs: Which inputs the backward part reads.
    """

    forward: ClosedJaxpr
    backward: ClosedJaxpr
    inputs: list[int]


def derivative(closed: ClosedJaxpr, moving: Sequence[int]) -> Callable[..., list[Array]]:
    """The results of a jaxpr and their tangents, as a function of its inputs and of the tangents of `moving` ones."""
    n = len(closed.in_avals)

    def fun(*args: Array) -> list[Array]:
        of_moving = lambda *some: _evaluate.call(closed, _evaluate.replaced(args[:n], moving, some))
        results, tangents = jax.jvp(of_moving, [args[i] for i in moving], list(args[n:]))
        return [*results, *(t for x, t in zip(results, tangents, strict=True) if is_inexact(x))]

    return fun


def split_derivative(closed: ClosedJaxpr, live: Sequence[bool], moving: Sequence[int]) -> Split | None:
    """Split the derivative of a jaxpr with respect to its `moving` inputs. `live` inputs depend on a product.

    Return None if an equation, such as a loop in a custom derivative, computes values and tangents together.
    """
    avals, n = closed.in_avals, len(closed.in_avals)
    both = jax.make_jaxpr(derivative(closed, moving))(*avals, *(avals[i].to_tangent_aval() for i in moving))
    eqns, outputs = _evaluate.flattened(both)
    results, derivatives = outputs[: len(closed.out_avals)], outputs[len(closed.out_avals) :]
    inputs, tangents = both.jaxpr.invars[:n], both.jaxpr.invars[n:]
    linear, is_linear = set(tangents), []
    for eqn in eqns:
        is_linear.append(any(v in linear for v in _variables(eqn)))
        linear.update(eqn.outvars if is_linear[-1] else ())
    if any(not _jaxpr.is_literal(v) and v in linear for v in results):
        return None
    first = [eqn for eqn, x in zip(eqns, is_linear, strict=True) if not x]
    second = [eqn for eqn, x in zip(eqns, is_linear, strict=True) if x]
    kept = _kept(first, inputs, live)
    reads: list[Any] = [*derivatives, *(v for eqn in second for v in eqn.invars)]
    needed = {v for v in reads if not _jaxpr.is_literal(v) and v not in linear}
    again = []
    for eqn in reversed(first):
        if any(v in needed and v not in kept for v in eqn.outvars):
            again.append(eqn)
            needed.update(_variables(eqn))
    saved = [v for eqn in first for v in eqn.outvars if v in needed and v in kept]
    read = [i for i, v in enumerate(inputs) if v in needed]
    return Split(
        _evaluate.closed_jaxpr({}, inputs, [*results, *saved], _rounded(first, set(saved))),
        _evaluate.closed_jaxpr(
            {}, [*saved, *(inputs[i] for i in read), *tangents], derivatives, [*reversed(again), *second]
        ),
        read,
    )


def _rounded(eqns: Sequence[JaxprEqn], saved: set[Var]) -> list[JaxprEqn]:
    """The same equations, with an explicit rounding of the saved bfloat16 values for all their readers.

    Without it, XLA may leave out the rounding for a reader in the forward pass, and the backward pass then recomputes
    other numbers. JAX does the same for values that a checkpoint saves (jax-ml/jax#22244). float16 is left out, because
    where XLA computes it in float32, reduce_precision flushes the subnormal numbers of float16.
    """
    found = []
    for eqn in eqns:
        outvars = [core.Var(v.aval) if v in saved and _dtype(v) == jnp.bfloat16 else v for v in eqn.outvars]
        found.append(eqn.replace(outvars=outvars))
        for made, v in zip(outvars, eqn.outvars, strict=True):
            if made is not v:
                found.append(_reduce_precision(_dtype(v)).replace(invars=[made], outvars=[v], ctx=eqn.ctx))
    return found


@functools.cache
def _reduce_precision(dtype: DTypeLike) -> JaxprEqn:
    bits = jnp.finfo(dtype)
    return jax.make_jaxpr(lambda x: lax.reduce_precision(x, bits.nexp, bits.nmant))(jnp.zeros((), dtype)).eqns[0]


def _kept(eqns: Sequence[JaxprEqn], inputs: Sequence[Var], live: Sequence[bool]) -> set[Var]:
    """The values that the backward pass does not compute again."""
    alive = {v for v, x in zip(inputs, live, strict=True) if x}
    # For each value, the bytes that are read of each kept value to compute it.
    sources: dict[Var, dict[Var, float]] = {v: {v: nbytes(v)} for v in inputs}
    kept, narrowed = set[Var](), _narrowed(eqns)
    for eqn in eqns:
        reads = _variables(eqn)
        may, depends = is_recomputed(eqn), is_live(eqn, alive)
        for out in eqn.outvars:
            found: dict[Var, float] = {}
            for v in reads:
                # An operation that only moves data, such as a slice, may read only a part.
                share = min(1.0, _size(out) / (_size(v) or 1.0)) if _jaxpr.name(eqn) in MOVING else 1.0
                for source, size in sources[v].items():
                    found[source] = max(found.get(source, 0.0), size * share)
            read = sum(found.values())
            # An 8-bit value counts as the 16-bit one that it is rounded from.
            size = max(nbytes(out), 2 * _size(out))
            if not may or out in narrowed or read > (_READS * size if depends else nbytes(out) - 1):
                kept.add(out)
                found = {out: nbytes(out)}
            sources[out] = found
            if depends:
                alive.add(out)
    return kept


def _narrowed(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """The narrower values to keep in place of results of products that are only scaled and cast to them."""
    readers: dict[Var, list[JaxprEqn]] = {}
    for eqn in eqns:
        for v in _variables(eqn):
            readers.setdefault(v, []).append(eqn)
    found: set[Var] = set()
    for eqn in eqns:
        if is_recomputed(eqn) or len(eqn.outvars) != 1:
            continue
        v = product = eqn.outvars[0]
        while len(readers.get(v, [])) == 1 and nbytes(v) >= nbytes(product):
            (reader,) = readers[v]
            if not is_recomputed(reader) or len(reader.outvars) != 1 or _size(reader.outvars[0]) != _size(product):
                break
            v = reader.outvars[0]
            found.update([v] if nbytes(v) < nbytes(product) else [])
    return found


def _dtype(v: Any) -> Any:
    return v.aval.dtype


def nbytes(v: Any) -> float:
    """The bytes of a value. A symbolic dimension counts as 1."""
    return _size(v) * float(getattr(v.aval.dtype, "itemsize", 4))


def _size(v: Any) -> float:
    """The number of elements. A symbolic dimension counts as 1."""
    return float(math.prod(n for n in v.aval.shape if isinstance(n, int)))


def _variables(eqn: JaxprEqn) -> list[Any]:
    return [v for v in eqn.invars if not _jaxpr.is_literal(v)]


def is_live(eqn: JaxprEqn, alive: set[Var]) -> bool:
    """Whether the results of an equation depend on a live value, or on a product or other expensive operation."""
    reads = _variables(eqn)
    return any(v in alive for v in reads) or (any(is_inexact(v.aval) for v in reads) and not is_recomputed(eqn))


def is_recomputed(eqn: JaxprEqn) -> bool:
    """Whether an equation may be computed again."""
    if body := _evaluate.body_of_call(eqn):
        return all(map(is_recomputed, body.jaxpr.eqns))
    return _jaxpr.name(eqn) in CHEAP
