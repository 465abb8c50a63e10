"""A jaxpr as steps. Every operation that rounds has a site: a primitive, a line and a layer.

To round is to write, or in a product to read, floats of fewer bits than the `wide` dtype: 16 bit in float32 code, and
float32 in float64 code.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jamp._jaxprs import build, constructs, interpret, ir
from jamp._jaxprs.constructs import Derivative
from jamp._jaxprs.context import Context
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn
from jamp._jaxprs.primitives import IDENTITIES, MOVING, PRODUCTS, REARRANGES, operation
from jamp._jaxprs.source import in_scope
from jamp._jaxprs.walk import holds_product
from jamp._products.arithmetic import OF_LEFT, OF_RIGHT
from jamp._products.flops import flops
from jamp.debug._unencoded import Encoding, encoding_of, without_codes
from jamp.debug._wider import is_narrower

CAST = "convert_element_type"


@dataclasses.dataclass
class Site:
    """The operations of one primitive, line and layer that round, in one pass and in the same loops.

    Attributes:
      operation: The primitive.
      line, scope: Their line, and the name scopes around them.
      is_backward: Whether they are part of the backward pass.
      gradient_of: For the gradient of an operand of a product: "left" or "right". Unknown for products without weights.
      steps: The lengths of the scans around them.
      format: The name of the format of 8 bits in which they are products, or "".
      flops, dtypes, parameters: Their FLOPs, the dtypes that they round to, and the paths of parameters that they read.
    """

    operation: str
    line: str
    scope: str
    is_backward: bool
    gradient_of: str
    steps: tuple[int, ...]
    format: str
    flops: float = 0.0
    dtypes: set[str] = dataclasses.field(default_factory=set)
    parameters: dict[str, None] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """An operation, or a loop with its bodies.

    Attributes:
      eqn: The operation. A product in a format of 8 bits is the product of its primitive.
      wide: The dtype of what is not rounded.
      site: The index of its site, if it rounds.
      rounds: For each operand, whether it is a narrow operand of a product.
      encoding: How a product in a format of 8 bits encodes its operands.
      bodies: The bodies of a loop.
    """

    eqn: JaxprEqn
    wide: np.dtype[Any]
    site: int | None = None
    rounds: tuple[bool, ...] = ()
    encoding: Encoding | None = None
    bodies: tuple["SteppedJaxpr", ...] = ()

    @functools.cached_property
    def sites(self) -> frozenset[int]:
        """All sites in it."""
        own = () if self.site is None else (self.site,)
        return frozenset(own).union(*(step.sites for body in self.bodies for step in body.steps))

    @functools.cached_property
    def tapped(self) -> frozenset[int]:
        """All sites in it, except the sites in loops that have no derivative in reverse mode."""
        if constructs.derivative(self.eqn) is Derivative.NONE:
            return frozenset()
        own = () if self.site is None else (self.site,)
        return frozenset(own).union(*(step.tapped for body in self.bodies for step in body.steps))

    def narrow(self, aval: Any) -> np.dtype[Any] | None:
        """Return the dtype to which a value of the step is rounded. None if it is not narrower than the wide dtype."""
        return aval.dtype if is_narrower(aval, self.wide) else None


@dataclasses.dataclass(frozen=True, eq=False)
class SteppedJaxpr:
    """A jaxpr as steps. Calls in it are inlined."""

    inputs: Sequence[Any]
    constants: Mapping[Any, Any]
    steps: Sequence[Step]
    outputs: Sequence[Any]


class Builder:
    """Reads jaxprs into steps, and collects the sites that round."""

    def __init__(self, wide: np.dtype[Any]) -> None:
        self._wide = wide
        self.sites: list[Site] = []
        self.flops = 0.0
        self._index: dict[Any, int] = {}

    def body(self, closed: ClosedJaxpr, parameters: Sequence[str], around: Context = Context()) -> SteppedJaxpr:
        """Return the steps of a jaxpr, whose inputs have the paths `parameters`."""
        jaxpr = closed.jaxpr
        known = {v: path for v, path in zip(jaxpr.invars, parameters, strict=True) if path}
        constants, steps = dict(zip(jaxpr.constvars, closed.consts, strict=True)), list[Step]()
        run = functools.partial(self._run, steps, known, around)
        outputs = interpret.interpret(jaxpr, [*constants, *jaxpr.invars], run, lambda v: v)
        return SteppedJaxpr(jaxpr.invars, constants, _without_casts(steps, outputs), outputs)

    def _run(
        self, steps: list[Step], known: dict[Any, str], around: Context, eqn: JaxprEqn, reads: list[Any]
    ) -> Sequence[Any]:
        """Add the steps of an equation. Return the variables of its results."""
        bodies, name, inside = _bodies_to_enter(eqn), ir.name(eqn), around.inside(eqn)
        if name in IDENTITIES:  # Its derivative is the derivative of the product.
            return reads[: len(eqn.outvars)]
        loop = build.loop(eqn)
        if loop is not None:
            return interpret.interpret_names(loop, reads, functools.partial(self._run, steps, known, around))
        if bodies and constructs.is_call(eqn):
            return interpret.interpret_names(bodies[0], reads, functools.partial(self._run, steps, known, inside))
        if bodies and constructs.is_platform_dependent(eqn):  # The first operand is the index of the platform.
            return interpret.interpret_names(bodies[-1], reads[1:], functools.partial(self._run, steps, known, inside))
        paths = ["" if ir.is_literal(v) else known.get(v, "") for v in reads]
        outs = [core.Var(v.aval) for v in eqn.outvars]  # A body may be inlined twice.
        eqn, encoding = eqn.replace(invars=reads, outvars=outs), encoding_of(eqn)
        if encoding is not None:
            eqn = without_codes(eqn, encoding)
            name = ir.name(eqn)
        if bodies:
            operands = zip(bodies, constructs.operands_of_bodies(eqn), strict=True)
            inner = [self.body(body, [paths[i] for i in mine], inside) for body, mine in operands]
            steps.append(Step(eqn, self._wide, bodies=tuple(inner)))
            return outs
        self.flops += around.times * flops(eqn)
        if name in REARRANGES and paths[0]:
            known[outs[0]] = paths[0]
        site = self._site(eqn, encoding, around, paths) if encoding is not None or self._rounds(eqn) else None
        rounds = tuple(name in PRODUCTS and is_narrower(v.aval, self._wide) for v in reads)
        steps.append(Step(eqn, self._wide, site, rounds, encoding))
        return outs

    def _rounds(self, eqn: JaxprEqn) -> bool:
        """Whether an operation rounds its result or reads rounded operands."""
        is_narrow = functools.partial(is_narrower, dtype=self._wide)
        name, before, after = ir.name(eqn), ir.avals(eqn.invars), ir.avals(eqn.outvars)
        if name == CAST:
            size = before[0].dtype.itemsize if jnp.issubdtype(before[0].dtype, jnp.floating) else 0
            return is_narrow(after[0]) and size > after[0].dtype.itemsize
        return (any(map(is_narrow, after)) and name not in MOVING) or (name in PRODUCTS and any(map(is_narrow, before)))

    def _site(self, eqn: JaxprEqn, encoding: Encoding | None, around: Context, paths: Sequence[str]) -> int:
        """Return the index of the site of an operation, and add the operation to it."""
        here, steps = around.inside(eqn), tuple(constructs.iterations(x) for x in around.around if ir.name(x) == "scan")
        is_in = lambda name: any(in_scope(x, name) for x in here.around)
        gradient_of = "left" if is_in(OF_LEFT) else "right" if is_in(OF_RIGHT) else ""
        format = encoding.format.name if encoding else ""
        key = operation(eqn), here.line, here.scope, here.is_backward, gradient_of, steps, format
        i = self._index.setdefault(key, len(self.sites))
        if i == len(self.sites):
            self.sites.append(Site(*key))
        site = self.sites[i]
        site.flops += around.times * flops(eqn)
        site.dtypes.update(
            str(aval.dtype) for aval in ir.avals([*eqn.invars, *eqn.outvars]) if is_narrower(aval, self._wide)
        )
        site.dtypes.update(np.dtype(dtype).name for dtype in (encoding.codes if encoding else ()))
        site.parameters.update(dict.fromkeys(filter(None, paths)))
        return i


def _bodies_to_enter(eqn: JaxprEqn) -> tuple[ClosedJaxpr, ...] | None:
    """Return the bodies that are steps. A custom rule without products is one operation, so that the rule is used."""
    has_rule = constructs.derivative(eqn) is Derivative.BY_RULE and not constructs.is_forward_rule(eqn)
    return None if has_rule and not holds_product(eqn) else interpret.bodies_to_enter(eqn)


def _without_casts(steps: list[Step], outputs: Sequence[Any]) -> list[Step]:
    """Leave out the rounding of casts that only products read. Products round their operands themselves."""
    kept = {v for v in outputs if not ir.is_literal(v)}  # what any step but a product or data movement reads
    backwards = []
    for step in reversed(steps):
        name, outs = ir.name(step.eqn), step.eqn.outvars
        if name == CAST and kept.isdisjoint(outs):
            step = dataclasses.replace(step, site=None)
        is_move = name in MOVING and name != CAST and kept.isdisjoint(outs)
        if name not in PRODUCTS and not is_move:
            kept.update(v for v in step.eqn.invars if not ir.is_literal(v))
        backwards.append(step)
    return backwards[::-1]
