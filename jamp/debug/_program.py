"""A program in the dtype of a reference, with roundings that can be switched and tapped, as compiled segments.

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

from jamp._cast import is_inexact
from jamp._jaxprs import equality, ir
from jamp._jaxprs.ir import ClosedJaxpr
from jamp._jaxprs.primitives import operation
from jamp._jaxprs.source import user_line
from jamp.debug._run_steps import Damage, Data, Switches, measure_damage, run_steps, widen
from jamp.debug._steps import Builder, Step, SteppedJaxpr

ON, OFF = (Switches(*[np.bool_(x)] * 3) for x in (True, False))
OPERANDS = ON._replace(result=OFF.result)
_measure_damage = jax.jit(measure_damage, static_argnums=3)


@dataclasses.dataclass(frozen=True, eq=False)
class _CompiledSteps:
    """Steps that are compiled together: one that rounds, a loop, or all between two of them.

    Attributes:
      steps, reads, writes: The steps, the variables that they read from others, and the variables that others read.
      active: The floating reads that a rounding can change.
    """

    steps: Sequence[Step]
    reads: Sequence[Any]
    writes: Sequence[Any]
    active: Sequence[Any]

    @functools.cached_property
    def sites(self) -> list[int]:
        """The sites in it that round."""
        return sorted(frozenset().union(*(step.sites for step in self.steps)))

    @property
    def is_loop(self) -> bool:
        """Whether it is a loop."""
        return bool(self.steps[0].bodies)

    @functools.cached_property
    def key(self) -> Any:
        """Equal for segments that compute the same, at any site. A loop has a key of its own."""
        if self.is_loop:
            return id(self)
        active, eqns = set(self.active), [step.eqn for step in self.steps]
        flags = tuple(v in active for v in self.reads), tuple((x.site is None, x.encoding) for x in self.steps)
        return equality.fingerprint(self.reads, self.writes, eqns, sources=False), flags

    @functools.cached_property
    def run_forward(self) -> Callable[..., Any]:
        """`forward`, compiled."""
        return jax.jit(self.forward)

    @functools.cached_property
    def run_backward(self) -> Callable[..., Any]:
        """`backward`, compiled."""
        return jax.jit(self.backward)

    def forward(self, data: list[Any], xs: list[Any]) -> list[Any]:
        """Return its outputs, given the data of its sites and its inputs."""
        env = dict(zip(self.reads, xs, strict=True))
        run_steps(self.steps, dict(zip(self.sites, data, strict=True)), env)
        return [env[v] for v in self.writes]

    def backward(self, data: list[Any], xs: list[Any], cotangents: list[list[Any]]) -> list[Any]:
        """Return the cotangents of the data and of the active reads, for several cotangents of its writes."""
        floating = [i for i, v in enumerate(self.writes) if is_inexact(v.aval)]
        given = dict(zip(self.reads, xs, strict=True))

        def results_of(data: list[Any], active: list[Any]) -> list[Any]:
            results = self.forward(data, list((given | dict(zip(self.active, active, strict=True))).values()))
            return [results[i] for i in floating]

        results, pull_back = jax.vjp(results_of, data, [given[v] for v in self.active])
        dense = lambda cts: [
            jnp.zeros_like(y) if cts[i] is None else cts[i] for i, y in zip(floating, results, strict=True)
        ]
        return [pull_back(dense(cts)) for cts in cotangents]


class RoundedProgram:
    """A jaxpr whose roundings can be switched and tapped. Programs with the same segments `known` compile each once.

    Attributes:
      sites: The lines and layers that round.
      flops: The FLOPs of all operations.
      opaque: The lines of operations without a derivative. `damages` does not see what goes through them.
    """

    def __init__(
        self, closed: ClosedJaxpr, parameters: Sequence[str], wide: np.dtype[Any], known: dict[Any, "_CompiledSteps"]
    ):
        builder = Builder(wide)
        self._body = builder.body(closed, parameters)
        self.sites, self.flops = builder.sites, builder.flops
        self.opaque: set[str] = set()
        self._segments = _grouped(self._body)
        # Equal segments share the first one's compiled functions, also of another program. A key is long, so it is
        # hashed once, here.
        self._compiled = [known.setdefault(segment.key, segment) for segment in self._segments]
        self._last = {v: i for i, segment in enumerate(self._segments) for v in segment.reads}
        self._last |= dict.fromkeys(_variables(self._body.outputs), len(self._segments))

    def run(self, args: Sequence[Any], on: Data, keep: bool = False) -> tuple[list[Array], dict[Any, Any]]:
        """Return the results with the switches `on`, else off, and with `keep` all values by their variables."""
        constants = {v: widen(x) for v, x in self._body.constants.items()}
        given = [widen(jnp.asarray(x)) for x in args]
        env: dict[Any, Any] = constants | dict(zip(self._body.inputs, given, strict=True))
        for i, (segment, compiled) in enumerate(zip(self._segments, self._compiled, strict=True)):
            xs = [env[v] for v in segment.reads]
            results = compiled.run_forward([on.get(site, OFF) for site in segment.sites], xs)
            env.update(zip(segment.writes, results, strict=True))
            for v in () if keep else [v for v in segment.reads if self._last[v] == i]:
                env.pop(v, None)
        return [widen(ir.read(env, v)) for v in self._body.outputs], env

    def damages(self, env: Mapping[Any, Any], cotangents: Sequence[Sequence[Any]]) -> list[dict[int, list[Damage]]]:
        """Return each site's damage, for several cotangents of the results (None: 0). `env` holds all values."""
        damages_of: list[dict[int, list[Damage]]] = [{} for _ in cotangents]
        given: list[dict[Any, Any]] = [{} for _ in cotangents]
        for mine, values in zip(given, cotangents, strict=True):
            _add(mine, self._body.outputs, values)
        for segment, compiled in zip(reversed(self._segments), reversed(self._compiled), strict=True):
            now = [[mine.pop(v, None) for v in segment.writes] for mine in given]
            nonzero = [i for i, values in enumerate(now) if any(x is not None for x in values)]
            if not nonzero:
                continue
            xs = [env[v] for v in segment.reads]
            if segment.sites and not segment.is_loop:
                step, ys, (site,) = segment.steps[0], [env[v] for v in segment.writes], segment.sites
                is_rounded = any(step.rounds) or step.encoding is not None
                others = compiled.run_forward([OPERANDS], xs) if is_rounded else ys
                narrow = [step.narrow(v.aval) for v in segment.writes]
                for i in nonzero:
                    results = zip(ys, others, now[i], narrow, strict=True)
                    found = [_measure_damage(*x) for x in results if x[2] is not None]
                    damages_of[i].setdefault(site, []).extend(found)
            tapped = sorted(segment.steps[0].tapped) if segment.is_loop else []
            if segment.is_loop and tapped != segment.sites:
                self.opaque.add(user_line(segment.steps[0].eqn) or "while")
            if tapped or segment.active:
                zeros = {
                    i: Damage(*[jnp.zeros(self.sites[i].steps, jnp.float32)] * len(Damage._fields)) for i in tapped
                }
                data = [zeros.get(i) for i in segment.sites]
                try:
                    pulled = compiled.run_backward(data, xs, [now[i] for i in nonzero])
                except NotImplementedError:  # JAX has no derivative for some derivatives.
                    self.opaque.update(user_line(step.eqn) or operation(step.eqn) for step in segment.steps)
                    continue
                for i, (damages, values) in zip(nonzero, pulled, strict=True):
                    _add(given[i], segment.active, values)
                    for site in tapped:
                        damages_of[i].setdefault(site, []).append(damages[segment.sites.index(site)])
        return jax.device_get(damages_of)


def _add(cotangents: dict[Any, Any], atoms: Sequence[Any], values: Sequence[Any]) -> None:
    for v, x in zip(atoms, values, strict=True):
        if x is not None and not ir.is_literal(v):
            cotangents[v] = cotangents[v] + x if v in cotangents else x


def _grouped(body: SteppedJaxpr) -> list[_CompiledSteps]:
    """Return the steps of a jaxpr in segments."""
    is_alone = lambda step: bool(step.bodies) or step.site is not None
    groups: list[list[Step]] = []
    for step in body.steps:
        if not groups or is_alone(step) or is_alone(groups[-1][0]):
            groups.append([])
        groups[-1].append(step)
    count = lambda steps: Counter(v for step in steps for v in _variables(step.eqn.invars))
    readers = count(body.steps) + Counter(_variables(body.outputs))
    affected: set[Any] = set()  # values that a rounding can change
    segments = []
    for steps in groups:
        inner, written = count(steps), [v for step in steps for v in step.eqn.outvars]
        reads = [v for v in inner if v not in set(written)]
        writes = [v for v in written if readers[v] > inner[v]]
        active = [v for v in reads if v in affected and is_inexact(v.aval)]
        segments.append(_CompiledSteps(steps, reads, writes, active))
        if segments[-1].sites or segments[-1].active:
            affected.update(written)
    return segments


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [v for v in atoms if not ir.is_literal(v)]
