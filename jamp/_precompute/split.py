"""Split a jaxpr in two: equations that depend on known values alone, and the rest. Loops are split, too."""

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from jamp import _evaluate, _jaxpr
from jamp._jaxpr import ClosedJaxpr, JaxprEqn
from jamp._primitives import IDENTITIES


class Level(enum.IntEnum):
    """The dependence of a value: on nothing, on known values alone, or on others."""

    FREE, KNOWN, OTHER = range(3)


@dataclasses.dataclass(frozen=True)
class Split:
    """The two parts of a jaxpr.

    Attributes:
      early: From the free and the known inputs to values that are kept.
      late: From these values, the known inputs in `passed`, and all inputs that are not known, to the results.
      passed: Which known inputs the late part reads directly, as indices among the known inputs.
    """

    early: ClosedJaxpr
    late: ClosedJaxpr
    passed: list[int]


def split(closed: ClosedJaxpr, levels: Sequence[Level]) -> Split:
    """Split a jaxpr whose inputs have these levels."""
    jaxpr, variables = closed.jaxpr, lambda atoms: [v for v in atoms if not _jaxpr.is_literal(v)]
    level = dict.fromkeys(jaxpr.constvars, Level.FREE) | dict(zip(jaxpr.invars, levels, strict=True))
    known = lambda atoms: [v for v in variables(atoms) if level[v] is Level.KNOWN]
    depends: list[Level] = []
    # The bytes of a known value, or of the known inputs it is computed from if those are fewer.
    size = {v: _bytes(v) for v in known(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        inputs = (level[v] for v in variables(eqn.invars))
        depends.append(Level.OTHER if eqn.effects else max(inputs, default=Level.FREE))
        level.update(dict.fromkeys(eqn.outvars, depends[-1]))
        source = sum(size[v] for v in dict.fromkeys(known(eqn.invars)))
        size.update((v, min(_bytes(v), source)) for v in known(eqn.outvars))
    is_late = [x is not Level.KNOWN for x in depends]
    reads = [v for eqn, x in zip(jaxpr.eqns, is_late, strict=True) if x for v in eqn.invars]
    kept = dict.fromkeys(known([*reads, *jaxpr.outvars]))
    for i, eqn in reversed([*enumerate(jaxpr.eqns)]):
        # A value larger than its source, such as a broadcast, is computed late, because keeping it would waste memory.
        if any(v in kept and _bytes(v) > size[v] for v in known(eqn.outvars)):
            is_late[i] = True
            kept = {v: None for v in kept if v not in eqn.outvars} | dict.fromkeys(known(eqn.invars))
    early = [eqn for eqn, x in zip(jaxpr.eqns, depends, strict=True) if x is not Level.OTHER]
    late = [eqn for eqn, x in zip(jaxpr.eqns, is_late, strict=True) if x]
    given = known(jaxpr.invars)
    computed, passed = [v for v in kept if v not in set(given)], [v for v in given if v in kept]
    both = [v for v in jaxpr.invars if level[v] is not Level.OTHER]
    others = [v for v in jaxpr.invars if level[v] is not Level.KNOWN]
    constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    return Split(
        _evaluate.closed_jaxpr(constants, both, computed, early),
        _evaluate.closed_jaxpr(constants, [*computed, *passed, *others], jaxpr.outvars, late),
        [given.index(v) for v in passed],
    )


def _bytes(v: Any) -> float:
    (aval,) = _jaxpr.avals([v])
    # A symbolic size depends on other arguments.
    return aval.size * aval.dtype.itemsize if isinstance(aval.size, int) else math.inf


def inlined(closed: ClosedJaxpr, levels: Sequence[Level]) -> ClosedJaxpr:
    """The same jaxpr, with its calls inlined, and its loops and checkpoints split."""

    def run(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        if body := _evaluate.body_of_call(eqn):
            return inside(body, operands)
        if _jaxpr.name(eqn) in IDENTITIES:
            return operands[:1]
        args, flags = [x for x, _ in operands], [flag for _, flag in operands]
        found = [all(flags) and not eqn.effects] * len(eqn.outvars)
        if _jaxpr.name(eqn) == "optimization_barrier":  # of a checkpoint: known operands go around it
            others = iter(lax.optimization_barrier([x for x, flag in operands if not flag]))
            results, found = [x if flag else next(others) for x, flag in operands], flags
        elif any(flags) and not any(found) and _jaxpr.name(eqn) in _CONSTRUCTS and _jaxpr.bodies(eqn):
            results = _CONSTRUCTS[_jaxpr.name(eqn)](eqn, args, flags)
        else:
            results = _evaluate.bind(eqn, args, _jaxpr.avals(eqn.outvars))
        return list(zip(results, found, strict=True))

    def inside(closed: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
        """The results of a jaxpr. Every value goes with a flag: whether it is known."""
        constants = [(x, True) for x in closed.consts]
        return _evaluate.interpret(closed.jaxpr, [*constants, *operands], run, lambda v: (_jaxpr.value(v), True))

    known = [level is not Level.OTHER for level in levels]
    results = lambda *args: [x for x, _ in inside(closed, list(zip(args, known, strict=True)))]
    return jax.make_jaxpr(results)(*closed.in_avals)


def _scan(eqn: JaxprEqn, args: Sequence[Any], known: Sequence[bool]) -> list[Any]:
    """A split scan. Values of known constants are computed once, those of known slices in a first scan."""
    (body,), carry, options = _jaxpr.bodies(eqn) or (), _jaxpr.carry(eqn), _jaxpr.scan_options(eqn)
    consts, init, xs = args[: carry.start], args[carry.start : carry.stop], args[carry.stop :]
    levels = [Level.KNOWN if x and i not in carry else Level.OTHER for i, x in enumerate(known)]
    whole = inlined(body, levels)
    first = split(whole, levels[: carry.start] + [Level.OTHER] * len(args[carry.start :]))
    once, others = _evaluated(first, consts, levels)
    given = [Level.FREE] * len(once) + [Level.OTHER] * len([*others, *init])
    second = split(first.late, given + levels[carry.stop :])
    known_xs, other_xs = (
        [x for x, level in zip(xs, levels[carry.stop :], strict=True) if (level is Level.KNOWN) == is_known]
        for is_known in (True, False)
    )
    early = lambda _, x: (None, _evaluate.call(second.early, [*once, *x]))
    slices = lax.scan(early, None, known_xs, options["length"])[1]
    kept = [*slices, *(known_xs[i] for i in second.passed)]

    def late(c: Sequence[Any], x: list[Any]) -> tuple[Sequence[Any], list[Any]]:
        results = _evaluate.call(second.late, [*x[: len(kept)], *once, *others, *c, *x[len(kept) :]])
        return results[: len(carry)], results[len(carry) :]

    end, ys = lax.scan(late, init, [*kept, *other_xs], **options)
    return [*end, *ys]


def _while(eqn: JaxprEqn, args: Sequence[Any], known: Sequence[bool]) -> list[Any]:
    """A split while loop. Values that depend only on known constants are computed once, before it."""
    (condition, body), carry, n = _jaxpr.bodies(eqn) or (), _jaxpr.carry(eqn), _jaxpr.condition_constants(eqn)
    levels = [Level.KNOWN if x and i not in carry else Level.OTHER for i, x in enumerate(known)][n:]
    parts = split(inlined(body, levels), levels)
    once, others = _evaluated(parts, args[n : carry.start], levels)
    until = lambda c: _evaluate.call(condition, [*args[:n], *c])[0]
    end: list[Any] = lax.while_loop(
        until, lambda c: _evaluate.call(parts.late, [*once, *others, *c]), list(args[carry.start :])
    )
    return end


def _remat(eqn: JaxprEqn, args: Sequence[Any], known: Sequence[bool]) -> list[Any]:
    """A split `jax.checkpoint`. Values that depend only on known operands are computed once, before it."""
    (body,) = _jaxpr.bodies(eqn) or ()
    levels = [Level.KNOWN if x else Level.OTHER for x in known]
    parts = split(inlined(body, levels), levels)
    once, others = _evaluated(parts, args, levels)
    late_eqn = _evaluate.with_bodies(eqn, [_evaluate.without_constants(parts.late)], eqn.invars, eqn.outvars)
    return _evaluate.bind(late_eqn, [*parts.late.consts, *once, *others], _jaxpr.avals(eqn.outvars))


def _evaluated(parts: Split, constants: Sequence[Any], levels: Sequence[Level]) -> tuple[list[Any], list[Any]]:
    """The values kept in place of the known constants of a construct, and its other constants."""
    known = [x for x, level in zip(constants, levels, strict=False) if level is Level.KNOWN]
    others = [x for x, level in zip(constants, levels, strict=False) if level is not Level.KNOWN]
    return [*_evaluate.call(parts.early, known), *(known[i] for i in parts.passed)], others


_CONSTRUCTS = {"scan": _scan, "while": _while, "remat2": _remat}
