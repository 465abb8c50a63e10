"""A program that runs in float32, with roundings that can be switched and tapped, as compiled segments.

A program of many layers would take minutes to compile whole. Segments that compute the same are compiled once, so that
it takes no longer than a program of one layer. The backward pass goes through the segments in reverse.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jamp import _evaluate, _jaxpr
from jamp._cast import is_inexact
from jamp._jaxpr import ClosedJaxpr
from jamp._source_line import user_line
from jamp.debug._rounded import Damage, Data, Switches, damage, run_steps, widen
from jamp.debug._steps import Body, Builder, Place, Step

ON, OFF = (Switches(np.bool_(x), np.bool_(x)) for x in (True, False))
_OPERANDS = Switches(ON.operands, OFF.result)
_damage = jax.jit(damage, static_argnums=3)


@dataclasses.dataclass(frozen=True, eq=False)
class _Segment:
    """Steps that are compiled together: one that rounds, a loop, or all between two of them.

    Attributes:
      steps, reads, writes: The steps, what they read from others, and what others read.
      moving: The floating reads that a rounding can change.
    """

    steps: Sequence[Step]
    reads: Sequence[Any]
    writes: Sequence[Any]
    moving: Sequence[Any]

    @functools.cached_property
    def places(self) -> list[int]:
        """The places in it that round."""
        return sorted(frozenset().union(*(step.places for step in self.steps)))

    @property
    def is_loop(self) -> bool:
        """Whether it is a loop."""
        return bool(self.steps[0].bodies)

    @functools.cached_property
    def key(self) -> Any:
        """Equal for segments that compute the same, at any place. A loop has a key of its own."""
        if self.is_loop:
            return id(self)
        moving, eqns = set(self.moving), [step.eqn for step in self.steps]
        flags = tuple(v in moving for v in self.reads), tuple(step.place is None for step in self.steps)
        return _evaluate.fingerprint(self.reads, self.writes, eqns, sources=False), flags

    @functools.cached_property
    def run_forward(self) -> Callable[..., Any]:
        """`forward`, compiled."""
        return jax.jit(self.forward)

    @functools.cached_property
    def run_backward(self) -> Callable[..., Any]:
        """`backward`, compiled."""
        return jax.jit(self.backward)

    def forward(self, data: list[Any], xs: list[Any]) -> list[Any]:
        """Its outputs, given the data of its places and its inputs."""
        env = dict(zip(self.reads, xs, strict=True))
        run_steps(self.steps, dict(zip(self.places, data, strict=True)), env)
        return [env[v] for v in self.writes]

    def backward(self, data: list[Any], xs: list[Any], cotangents: list[list[Any]]) -> list[Any]:
        """The cotangents of the data and of the moving reads, for several cotangents of what it writes."""
        floating = [i for i, v in enumerate(self.writes) if is_inexact(v.aval)]
        given = dict(zip(self.reads, xs, strict=True))

        def results_of(data: list[Any], moving: list[Any]) -> list[Any]:
            results = self.forward(data, list((given | dict(zip(self.moving, moving, strict=True))).values()))
            return [results[i] for i in floating]

        results, pull_back = jax.vjp(results_of, data, [given[v] for v in self.moving])
        dense = lambda cts: [
            jnp.zeros_like(y) if cts[i] is None else cts[i] for i, y in zip(floating, results, strict=True)
        ]
        return [pull_back(dense(cts)) for cts in cotangents]


class Program:
    """A jaxpr whose roundings can be switched and tapped.

    Attributes:
      places: The lines and layers that round.
      flops: The FLOPs of all operations.
      opaque: The lines of operations without a derivative. `damages` does not see what goes through them.
    """

    def __init__(self, closed: ClosedJaxpr, parameters: Sequence[str]):
        builder = Builder()
        self._body = builder.body(closed, parameters, Place("", "", False, ()))
        self.places, self.flops = builder.places, builder.flops
        self.opaque: set[str] = set()
        self._segments = _segments(self._body)
        # Equal segments share the first one's compiled functions. A key is long, so it is hashed here and not in a run.
        first: dict[Any, _Segment] = {}
        self._compiled = [first.setdefault(segment.key, segment) for segment in self._segments]
        self._last = {v: i for i, segment in enumerate(self._segments) for v in segment.reads}
        self._last |= dict.fromkeys(_variables(self._body.outputs), len(self._segments))

    def run(self, args: Sequence[Any], on: Data, keep: bool = False) -> tuple[list[Array], dict[Any, Any]]:
        """The results with the switches `on`, by default off, and with `keep` all values by their variables."""
        constants = {v: widen(x) for v, x in self._body.constants.items()}
        given = [widen(jnp.asarray(x)) for x in args]
        env: dict[Any, Any] = constants | dict(zip(self._body.inputs, given, strict=True))
        for i, (segment, compiled) in enumerate(zip(self._segments, self._compiled, strict=True)):
            xs = [env[v] for v in segment.reads]
            results = compiled.run_forward([on.get(place, OFF) for place in segment.places], xs)
            env.update(zip(segment.writes, results, strict=True))
            for v in () if keep else [v for v in segment.reads if self._last[v] == i]:
                env.pop(v, None)
        return [widen(_jaxpr.read(env, v)) for v in self._body.outputs], env

    def damages(self, env: Mapping[Any, Any], cotangents: Sequence[Sequence[Any]]) -> list[dict[int, list[Damage]]]:
        """The damage of each place, for several cotangents of the results (None: 0), where all values are `env`."""
        found: list[dict[int, list[Damage]]] = [{} for _ in cotangents]
        given: list[dict[Any, Any]] = [{} for _ in cotangents]
        for mine, values in zip(given, cotangents, strict=True):
            _add(mine, self._body.outputs, values)
        for segment, compiled in zip(reversed(self._segments), reversed(self._compiled), strict=True):
            now = [[mine.pop(v, None) for v in segment.writes] for mine in given]
            active = [i for i, values in enumerate(now) if any(x is not None for x in values)]
            xs = [env[v] for v in segment.reads]
            if active and segment.places and not segment.is_loop:
                step, (y,), (place,) = segment.steps[0], [env[v] for v in segment.writes], segment.places
                others = compiled.run_forward([_OPERANDS], xs)[0] if any(step.rounds) else y
                for i in active:
                    dtype = segment.writes[0].aval.dtype
                    found[i].setdefault(place, []).append(_damage(y, others, now[i][0], dtype))
            places = sorted(segment.steps[0].tapped) if segment.is_loop else []
            if active and segment.is_loop and set(places) != set(segment.places):
                self.opaque.add(user_line(segment.steps[0].eqn) or "while")
            if active and (places or segment.moving):
                zeros = {i: Damage(*[jnp.zeros(self.places[i].steps)] * len(Damage._fields)) for i in places}
                data = [zeros.get(i) for i in segment.places]
                try:
                    pulled = compiled.run_backward(data, xs, [now[i] for i in active])
                except NotImplementedError:  # JAX has no derivative for some derivatives.
                    self.opaque.update(user_line(step.eqn) or _jaxpr.name(step.eqn) for step in segment.steps)
                    continue
                for i, (damages, values) in zip(active, pulled, strict=True):
                    _add(given[i], segment.moving, values)
                    for place in places:
                        found[i].setdefault(place, []).append(damages[segment.places.index(place)])
        return jax.device_get(found)


def _add(cotangents: dict[Any, Any], atoms: Sequence[Any], values: Sequence[Any]) -> None:
    for v, x in zip(atoms, values, strict=True):
        if x is not None and not _jaxpr.is_literal(v):
            cotangents[v] = cotangents[v] + x if v in cotangents else x


def _segments(body: Body) -> list[_Segment]:
    """The steps of a body in segments."""
    is_alone = lambda step: bool(step.bodies) or step.place is not None
    groups: list[list[Step]] = []
    for step in body.steps:
        if not groups or is_alone(step) or is_alone(groups[-1][0]):
            groups.append([])
        groups[-1].append(step)
    count = lambda steps: Counter(v for step in steps for v in _variables(step.eqn.invars))
    readers = count(body.steps) + Counter(_variables(body.outputs))
    live: set[Any] = set()  # values that a rounding can change
    segments = []
    for steps in groups:
        inner, written = count(steps), [v for step in steps for v in step.eqn.outvars]
        reads = [v for v in inner if v not in set(written)]
        writes = [v for v in written if readers[v] > inner[v]]
        segments.append(_Segment(steps, reads, writes, [v for v in reads if v in live and is_inexact(v.aval)]))
        if segments[-1].places or segments[-1].moving:
            live.update(written)
    return segments


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [v for v in atoms if not _jaxpr.is_literal(v)]
