"""Group the equations of a jaxpr: the cheap operations between products, and the products that read them, are a run.

The backward pass computes the cheap operations of a run again from its inputs, most of which are 16-bit products. So
neither the float32 values inside it are kept, nor the operands of its products. A run is evaluated as a whole, so no
path may leave it and come back. Therefore every equation that is not cheap is one step deeper than its operands; a run
holds cheap equations of one depth, and products one step below.
"""

import enum
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeAlias

from jamp import _jaxpr
from jamp._cast import is_inexact
from jamp._jaxpr import Jaxpr, JaxprEqn, Var

Reads: TypeAlias = list[list[Var]]  # the variables that each equation reads


class Kind(enum.Enum):
    """What an equation is to a run: computed again, computed again and only moving data, kept, or not in any."""

    CHEAP = enum.auto()
    MOVE = enum.auto()
    PRODUCT = enum.auto()
    OTHER = enum.auto()


def group(jaxpr: Jaxpr, kind: Callable[[JaxprEqn, int], Kind]) -> list[tuple[list[JaxprEqn], list[Kind]]]:
    """Divide a jaxpr into groups of equations that can be evaluated in turn.

    Args:
      jaxpr: A jaxpr.
      kind: The kind of an equation whose operands have a given depth.

    Returns:
      The equations of each group, and their kinds. An equation outside all runs is a group of its own.
    """
    atoms: list[list[Any]] = [eqn.invars for eqn in jaxpr.eqns]
    reads = [[v for v in each if not _jaxpr.is_literal(v)] for each in atoms]
    labels, kinds = _label(jaxpr, reads, kind)
    members: dict[int, list[int]] = defaultdict(list)
    for i, label in enumerate(labels):
        members[label].append(i)
    groups = [members[label] for label in _in_order(jaxpr, reads, labels)]
    return [([jaxpr.eqns[i] for i in group], [kinds[i] for i in group]) for group in groups]


def _label(jaxpr: Jaxpr, reads: Reads, kind: Callable[[JaxprEqn, int], Kind]) -> tuple[list[int], list[Kind]]:
    """The group of each equation, and its kind. One that does not depend on a floating input is not in a run."""
    depths: dict[Var, int] = {}
    # Values that depend on a floating input or a product. The others are masks, positions and random bits. They are
    # computed once, because what they are computed from is larger.
    live = {v for v in (*jaxpr.constvars, *jaxpr.invars) if is_inexact(v.aval)}
    labels = list(range(len(jaxpr.eqns)))  # a forest: each equation points towards the label of its group
    kinds: list[Kind] = []
    neighbour: dict[Var, int] = {}  # an equation whose group a cheap reader of a value joins
    at_start: set[int] = set()
    runs: set[int] = set()
    effects = 0
    for i, eqn in enumerate(jaxpr.eqns):
        depth = max((depths.get(v, 0) for v in reads[i]), default=0)
        is_live = any(v in live for v in reads[i])
        kinds.append(Kind.OTHER if eqn.effects else kind(eqn, depth))
        if kinds[i] in (Kind.OTHER, Kind.PRODUCT):
            depth += 1
        elif is_live:
            for v in reads[i]:
                if v in live and depths.get(v, 0) == depth and (depth or v in neighbour):
                    labels[_root(labels, i)] = _root(labels, neighbour.setdefault(v, i))
            neighbour.update((v, i) for v in eqn.outvars)
            if kinds[i] is Kind.CHEAP:
                runs.add(i)
        if eqn.effects:
            depth = effects = max(depth, effects + 1)
        if kinds[i] in (Kind.CHEAP, Kind.MOVE) and depth == 0:
            at_start.add(i)
        depths.update((v, depth) for v in eqn.outvars)
        if is_live:
            live.update(eqn.outvars)
    runs = {_root(labels, i) for i in runs}
    maker = {v: root for i, eqn in enumerate(jaxpr.eqns) if (root := _root(labels, i)) in runs for v in eqn.outvars}
    labels = [root if (root := _root(labels, i)) in runs else i for i in range(len(labels))]
    for i, eqn in enumerate(jaxpr.eqns):
        if kinds[i] is Kind.PRODUCT:
            above = [maker[v] for v in reads[i] if v in maker and depths[v] == depths[eqn.outvars[0]] - 1]
            labels[i] = above[0] if above else i
    _sink(jaxpr, reads, labels, kinds, runs, at_start)
    return labels, kinds


def _root(labels: list[int], i: int) -> int:
    while labels[i] != i:
        labels[i] = i = labels[labels[i]]
    return i


def _sink(jaxpr: Jaxpr, reads: Reads, labels: list[int], kinds: list[Kind], runs: set[int], at_start: set[int]) -> None:
    """Move what only one run reads into it: the broadcast of a bias, an iota. Only what needs no product can move."""
    readers: dict[Any, set[int]] = defaultdict(set)
    for v in jaxpr.outvars:
        if not _jaxpr.is_literal(v):
            readers[v].add(-1)
    for i in reversed(range(len(labels))):
        eqn = jaxpr.eqns[i]
        into = set().union(*(readers[v] for v in eqn.outvars))
        if i in at_start and len(into) == 1 and into <= runs:
            labels[i] = min(into)
        for v in reads[i]:
            readers[v].add(-1 if kinds[i] is Kind.PRODUCT else labels[i])


def _in_order(jaxpr: Jaxpr, reads: Reads, labels: list[int]) -> list[int]:
    """The groups, each after those that it reads from, and those with effects in the order of the program."""
    maker = {v: label for eqn, label in zip(jaxpr.eqns, labels, strict=True) for v in eqn.outvars}
    first: dict[int, set[int]] = defaultdict(set)  # the groups before each
    previous = None
    for eqn, label, read in zip(jaxpr.eqns, labels, reads, strict=True):
        first[label].update(maker[v] for v in read if v in maker)
        if eqn.effects:
            first[label].update([] if previous is None else [previous])
            previous = label
    done: dict[int, None] = {}
    for label in labels:
        stack = [label]
        while stack:
            missing = [x for x in first[stack[-1]] if x not in done and x != stack[-1]]
            if missing:
                stack.extend(sorted(missing, reverse=True))
            else:
                done.setdefault(stack.pop())
    return list(done)
