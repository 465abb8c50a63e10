"""A linear function whose transpose computes its coefficients again.

    recomputed(kept, tangents)         the tangents of a segment's results
    its transpose(cotangents)          computes from the kept values what the function needs, and pulls back

It is what `jax.checkpoint` does for the second half of a derivative. It is a primitive of its own because a checkpoint
inside a custom rule has no transpose under `jax_remat3`.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from jamp import _evaluate
from jamp._barrier import behind_barrier
from jamp._jaxpr import ClosedJaxpr

_call = core.Primitive("recomputed")
_call.multiple_results = True


def recomputed(jaxpr: ClosedJaxpr, kept: Sequence[Any], tangents: Sequence[Any], *, barrier: bool) -> list[Any]:
    """The results of a jaxpr of `kept` values and `tangents`, which is linear in the latter.

    A `barrier` keeps XLA from merging the recomputation with the forward pass (CSE).
    """
    found: list[Any] = _call.bind(*kept, *tangents, jaxpr=jaxpr, kept=len(kept), barrier=barrier)
    return found


def _run(*operands: Any, jaxpr: ClosedJaxpr, kept: int, barrier: bool) -> list[Any]:
    return _evaluate.call(jaxpr, operands)


def _jvp(
    operands: Sequence[Any], tangents: Sequence[Any], *, jaxpr: ClosedJaxpr, kept: int, barrier: bool
) -> tuple[list[Any], list[Any]]:
    results = recomputed(jaxpr, operands[:kept], operands[kept:], barrier=barrier)
    moving = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]

    def derivative(*args: Any) -> list[Any]:
        primals, given = args[: len(operands)], args[len(operands) :]
        of_moving = lambda *xs: _evaluate.call(jaxpr, _evaluate.replaced(primals, moving, xs))
        found: list[Any] = jax.jvp(of_moving, [primals[i] for i in moving], list(given))[1]
        return found

    given = [tangents[i] for i in moving]
    closed = _evaluate.without_constants(jax.make_jaxpr(derivative)(*operands, *given))
    return results, recomputed(closed, operands, given, barrier=barrier)


def _transpose(cotangents: Sequence[Any], *operands: Any, jaxpr: ClosedJaxpr, kept: int, barrier: bool) -> list[Any]:
    used = [i for i, g in enumerate(cotangents) if not isinstance(g, ad.Zero)]
    values, given = list(operands[:kept]), [cotangents[i] for i in used]
    if barrier:
        both = behind_barrier([*values, *given])
        values, given = both[:kept], both[kept:]

    def of_tangents(*xs: Any) -> list[Any]:
        results = _evaluate.call(jaxpr, [*values, *xs])
        return [results[i] for i in used]

    found = jax.linear_transpose(of_tangents, *(x.aval for x in operands[kept:]))(given) if used else ()
    return [None] * kept + list(found or [None] * (len(operands) - kept))


def _batch(
    axis: Any, operands: Sequence[Any], axes: Sequence[Any], *, jaxpr: ClosedJaxpr, kept: int, barrier: bool
) -> tuple[list[Any], list[int]]:
    batched = _evaluate.batched(jaxpr, axis, operands, axes)
    results = recomputed(batched, operands[:kept], operands[kept:], barrier=barrier)
    return results, [0] * len(results)


_call.def_impl(_run)
_call.def_abstract_eval(lambda *_, jaxpr, kept, barrier: jaxpr.out_avals)
ad.primitive_jvps[_call] = _jvp
ad.primitive_transposes[_call] = _transpose
batching.fancy_primitive_batchers[_call] = _batch
mlir.register_lowering(_call, mlir.lower_fun(_run, multiple_results=True))
