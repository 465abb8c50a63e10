"""Which values of a segment (see `segments.py`) are kept for the backward pass. The others are computed again.

The results of products and other expensive operations are kept. For cheap operations, bytes decide:

- A value is computed again if that reads at most four times its size. So sums over more than four times their size are
  kept. In a long chain of residual additions, every fourth value or so is kept too.
- A value that depends on no product is kept if it has at most two thirds of the bytes that it is computed from, as a
  dropout mask has. The broadcast of a mask, and a weight that is transposed or scaled, are computed again.
- An argument of the function that is cast or moved is computed again, because the argument is there anyway.
- JAX rounds the floats that a checkpoint keeps, which makes large E4M3 NaN. So no float8 value is kept, but its bytes.

With a memory budget, `plan.py` drops some of these.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax.numpy as jnp

from jamp._cast import is_floating, is_inexact
from jamp._jaxprs import constructs, ir, walk
from jamp._jaxprs.dataflow import Forward
from jamp._jaxprs.ir import JaxprEqn, Var
from jamp._jaxprs.primitives import CHEAP, GATHERS, IDENTITIES, MOVING
from jamp._recompute.stores import Store

_READS = 4  # a value is computed again if that reads at most this many times its size
_READS_OF_NO_PRODUCT = 1.5
_COMPARISONS = frozenset(["abs", "clamp", "ge", "gt", "le", "lt", "max", "min", "sign"])
_LARGE_MASK = 4096  # elements


class Origin(NamedTuple):
    """What a value is computed from. Of a constant, only `argument` is true.

    Attributes:
      argument: It is an argument of the function or a constant, perhaps cast or moved.
      activation: It depends on a product or other expensive operation. A weight that is gathered does not.
      perturbed: A floating-point argument of the function can change it.
    """

    argument: bool = False
    activation: bool = False
    perturbed: bool = False


def origins() -> Forward[Origin]:
    """The analysis of what each value is computed from."""
    return Forward(_origin, _join, lambda value: Origin(argument=True), constructs.has_own_rule)


def _origin(eqn: JaxprEqn, operands: Sequence[Origin]) -> Origin:
    # A bool that depends on floats has no derivative.
    inexact = [is_inexact(v.aval) for v in eqn.invars]
    if any(map(ir.is_ref, eqn.invars)):  # Anything may have been written to it.
        return Origin(activation=True, perturbed=True)
    return Origin(
        all(x.argument for x in operands) and all(ir.name(e) in CHEAP & MOVING for e in walk.through_calls(eqn)),
        any(x.activation for x in operands) or (any(inexact) and not is_cheap(eqn) and ir.name(eqn) not in GATHERS),
        any(x.perturbed and y for x, y in zip(operands, inexact, strict=True)) and ir.name(eqn) != "stop_gradient",
    )


def _join(x: Origin, y: Origin) -> Origin:
    return Origin(x.argument and y.argument, x.activation or y.activation, x.perturbed or y.perturbed)


def discrete_values(eqns: Sequence[JaxprEqn], outputs: Iterable[Any], of_values: Mapping[Var, Origin]) -> set[Var]:
    """What is decided from activations: indices, and small bools, such as the predicate of a cond.

    From decoded values they might be others. A large mask is computed again. Of the integers that are computed from
    bools, as `(x[..., None] > edges).sum(-1)` is, those are kept that other code than sums of integers reads.
    """
    of_floats = lambda v: is_inexact(v.aval) and of_values[v].perturbed
    is_a: Any = lambda v, kind: hasattr(v.aval, "dtype") and jnp.issubdtype(v.aval.dtype, kind)
    is_integer, is_bool = functools.partial(is_a, kind=jnp.integer), functools.partial(is_a, kind=jnp.bool_)
    decided, found = set[Var](), set[Var]()
    last = {v for v in outputs if not ir.is_literal(v)}
    for eqn in eqns:
        reads: list[Any] = [v for v in eqn.invars if not ir.is_literal(v)]
        results = [v for v in eqn.outvars if is_integer(v) or is_bool(v)]
        if not all(map(is_integer, eqn.outvars)):
            last.update(reads)
        if any(map(of_floats, reads)):
            found.update(v for v in results if is_integer(v) or _size(v) < _LARGE_MASK)
            decided.update(results)
        elif not decided.isdisjoint(reads):
            decided.update(results)
    return found | {v for v in decided & last if is_integer(v)}


def values_to_keep(
    eqns: Sequence[JaxprEqn], inputs: Iterable[Var], of_values: Mapping[Var, Origin], coded: Set[Var]
) -> set[Var]:
    """The values that the backward pass does not compute again, of which some are then `coded`.

    In 8 bits, a value that a mask is made of is kept itself, because its sign is: `x @ w + b` in `relu(x @ w + b)`.
    """
    kept_bytes = lambda v: (Store.INT8 if v in coded else Store.ITSELF).nbytes(v.aval)
    # For each value, the bytes that are read of each kept value to compute it.
    sources: dict[Var, dict[Var, float]] = {v: {v: kept_bytes(v)} for v in inputs}
    chosen, narrowed = set[Var](), _narrowed(eqns) | (_compared(eqns) & coded)
    for eqn in eqns:
        reads, may = _variables(eqn), is_cheap(eqn)
        for out in eqn.outvars:
            here, found = of_values[out], dict[Var, float]()
            for v in reads:
                # An operation that only moves data, such as a slice, may read only a part.
                share = min(1.0, _size(out) / (_size(v) or 1.0)) if ir.name(eqn) in MOVING else 1.0
                for source, size in sources[v].items():
                    found[source] = max(found.get(source, 0.0), size * share)
            read = sum(found.values())
            # A value of 8 bits counts as one of 16, which it is rounded from.
            size = max(nbytes(out), 2 * _size(out))
            limit = _READS * size if here.activation else _READS_OF_NO_PRODUCT * nbytes(out)
            is_expensive = not may or out in narrowed or read > limit
            if is_expensive and not here.argument and not _is_float8(out.aval):
                chosen.add(out)
                found = {out: kept_bytes(out)}
            sources[out] = found
    return chosen


def _compared(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """The values that are compared with another one, in calls too."""
    is_comparison = lambda eqn: any(ir.name(e) in _COMPARISONS for e in walk.through_calls(eqn))
    return {v for eqn in eqns if is_comparison(eqn) for v in _variables(eqn)}


def _narrowed(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """The narrower values to keep in place of results of products that are only scaled and cast to them."""
    readers: dict[Var, list[JaxprEqn]] = {}
    for eqn in eqns:
        for v in _variables(eqn):
            readers.setdefault(v, []).append(eqn)
    found: set[Var] = set()
    for eqn in eqns:
        if is_cheap(eqn) or len(eqn.outvars) != 1:
            continue
        v = product = eqn.outvars[0]
        while len(readers.get(v, [])) == 1 and nbytes(v) >= nbytes(product):
            (reader,) = readers[v]
            if not is_cheap(reader) or len(reader.outvars) != 1 or _size(reader.outvars[0]) != _size(product):
                break
            v = reader.outvars[0]
            found.update([v] if nbytes(v) < nbytes(product) else [])
    return found


def _is_float8(aval: Any) -> bool:
    return is_floating(aval) and aval.dtype.itemsize == 1


def nbytes(v: Any) -> float:
    """The bytes of a value. A symbolic dimension counts as 1."""
    return Store.ITSELF.nbytes(v.aval)


def _size(v: Any) -> float:
    """The number of elements. A symbolic dimension counts as 1."""
    return float(math.prod(n for n in v.aval.shape if isinstance(n, int)))


def _variables(eqn: JaxprEqn) -> list[Any]:
    """The variables that an equation reads to compute its results."""
    operands = eqn.invars[: len(eqn.outvars)] if ir.name(eqn) in IDENTITIES else eqn.invars
    return [v for v in operands if not ir.is_literal(v)]


def is_cheap(eqn: JaxprEqn) -> bool:
    """Whether an equation consists of cheap operations only, so that it may be computed again."""
    return all(ir.name(e) in CHEAP for e in walk.through_calls(eqn))
