"""Which causes of inf and NaN reach the results of a function."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jamp._cast import is_inexact
from jamp.debug._made import all_finite, is_bad, where, where_new
from jamp.debug._nonfinite_search import Finding
from jamp.debug._origin import CLEAN, REST, ArrayInStreams, OriginInterpreter

_MOST_RUNS = 8  # to tell apart the causes that share a stream


@dataclasses.dataclass(frozen=True)
class Run:
    """One evaluation.

    Attributes:
      causes: The operations that made inf or NaN and follow from no other one, in the order in which they ran.
      reaching: Those that put inf or NaN into results, and whether the first result, the loss, is one of them.
      is_given: Whether a result holds inf or NaN that no operation made.
      has_loss: Whether the first result is a scalar.
      count: The number of operations.
    """

    causes: Sequence[Finding]
    reaching: Sequence[tuple[Finding, bool]]
    is_given: bool
    has_loss: bool
    count: int

    @property
    def has_bad_loss(self) -> bool:
        """Whether a cause reaches the loss, or any result if there is no loss."""
        return any(of_loss or not self.has_loss for _, of_loss in self.reaching)

    def of_results(self, other: str) -> list[Finding]:
        """Return the causes that reach results, the causes of the loss first. `other` names any other result."""
        loss = [dataclasses.replace(x, reaches="the loss") for x, of_loss in self.reaching if of_loss]
        return distinct(
            [*loss, *(dataclasses.replace(x, reaches=other) for x, of_loss in self.reaching if not of_loss)]
        )


def run(fun: Callable[..., list[Any]], leaves: Sequence[Any], parameters: Sequence[str], gradients: int = 0) -> Run:
    """Evaluate a function. If its first results are gradients, causes are searched for these only."""
    closed = jax.make_jaxpr(fun)(*leaves)
    given = [ArrayInStreams(jnp.asarray(x), parameter=path) for x, path in zip(leaves, parameters, strict=True)]
    results: list[ArrayInStreams] = []

    def evaluate(streams: Mapping[int, int] | None = None) -> tuple[OriginInterpreter, dict[int, set[int]]]:
        interpreter = OriginInterpreter(streams)
        results[:] = interpreter.run(closed, given)
        return interpreter, _reached(results[:gradients] if gradients else results, set(interpreter.streams))

    interpreter, reached = evaluate()
    is_given = not all(all_finite(x.stream(CLEAN)) for x in results)
    has_loss = not gradients and bool(results) and is_inexact(results[0].array) and not results[0].array.shape
    reaching = _Search(evaluate, interpreter, has_loss).first(reached)
    return Run(list(interpreter.findings.values()), reaching, is_given, has_loss, interpreter.count)


def distinct(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings, the first of each operation."""
    first: dict[Any, Finding] = {}
    for x in findings:
        first.setdefault((x.primitive, x.source, x.scope), x)
    return list(first.values())


def _reached(results: Sequence[ArrayInStreams], streams: set[int]) -> dict[int, set[int]]:
    """Return the results into which each stream puts inf or NaN. What none puts there alone, all of them do."""
    reached: dict[int, set[int]] = {i: set() for i in streams}
    for n, x in enumerate(results):
        new = {i: where_new(x.stream(i), x.stream(CLEAN)) for i in streams}
        alone = functools.reduce(np.logical_or, new.values(), where(is_bad, x.stream(CLEAN)))
        is_joint = bool((where(is_bad, x.array) & ~alone).any())
        for i in streams:
            if is_joint or new[i].any():
                reached[i].add(n)
    return reached


class _Search:
    """Finds, of each operation, the first time it runs and reaches the loss, and the first time any other result."""

    def __init__(self, evaluate: Callable[..., Any], interpreter: OriginInterpreter, has_loss: bool) -> None:
        self._evaluate, self._made, self._has_loss = evaluate, interpreter.made, has_loss
        self._runs, self._found = 0, dict[Any, Finding]()
        self._interpreter = interpreter

    def first(self, reached: Mapping[int, set[int]]) -> list[tuple[Finding, bool]]:
        """Return them in the order in which they ran, and whether they reach the loss."""
        groups: dict[int, list[int]] = {}
        for n, stream in enumerate(self._interpreter.streams):
            groups.setdefault(stream, []).append(n)
        for stream, group in groups.items():
            self._add(self._interpreter, group, reached[stream])
        found = sorted(self._found.items(), key=lambda item: item[1].order)
        return [(finding, of_loss) for (_, of_loss), finding in found]

    def _add(self, interpreter: OriginInterpreter, group: Sequence[int], results: set[int]) -> None:
        """Add those of a group, which shares a stream of an evaluation and reaches results."""
        kinds = {self._has_loss and n == 0 for n in results}
        wanted = [n for n in group for kind in kinds if (self._made[n], kind) not in self._found]
        if not wanted:
            return
        if len(group) > 1 and self._runs < _MOST_RUNS:
            self._runs += 1
            chunks = [x.tolist() for x in np.array_split(group, min(len(group), REST))]
            again, reached = self._evaluate({n: i for i, chunk in enumerate(chunks) for n in chunk})
            is_same = again.made == self._made  # A callback may return other values.
            parts = [(chunk, reached.get(i)) for i, chunk in enumerate(chunks) if reached.get(i)]
            if is_same and parts:
                for chunk, some in parts:
                    self._add(again, chunk, some)
                return
        for n, kind in itertools.product(wanted, kinds):
            if n in interpreter.findings:
                self._found.setdefault((self._made[n], kind), interpreter.findings[n])
