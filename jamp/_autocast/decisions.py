"""The decisions about the equations of a function: `cast` makes them, reports and warnings read them."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jamp._autocast.target import Target
from jamp._jaxprs import dataflow, ir
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn
from jamp._jaxprs.primitives import COPIES, IDENTITIES, REARRANGES
from jamp._jaxprs.source import in_scope, scope, user_line
from jamp._jaxprs.walk import walk
from jamp._products import product as _product
from jamp._products.formats import Format
from jamp._products.product import Dtype, Product, as_traced
from jamp._products.quantized import QUANTIZE


class Decision(NamedTuple):
    """The decision about an equation that is not a product, and that `cast` did not enter.

    Attributes:
      eqn: The equation as it was traced.
      key, category: The key of the rule that decided, such as "dot_general[gradient]", and the category that it gives.
      casts: From which dtype to which its values are cast, if they are: from float32 to 16 bit, or back by a rule.
    """

    eqn: JaxprEqn
    key: str
    category: str
    casts: tuple[Dtype, Dtype] | None = None


class Decisions:
    """Decisions by the equations that `cast` wrote. Those that it added, such as casts, have none.

    A product carries its own (`Product`).
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[JaxprEqn, Decision]] = {}  # with the equation, so that no other one gets its id

    def add(self, eqn: JaxprEqn, decision: Decision) -> None:
        """Add the decision about an equation."""
        self._found[id(eqn)] = eqn, decision

    def of(self, eqn: JaxprEqn) -> Decision | None:
        """Return the decision about an equation."""
        found = self._found.get(id(eqn))
        return found[1] if found else None

    def __iter__(self) -> Iterator[Decision]:
        return (decision for _, decision in self._found.values())


class Dtypes(NamedTuple):
    """The dtypes of the operands and of the results of an operation. Its text is "float32, float32 -> float32"."""

    operands: tuple[Any, ...]
    results: tuple[Any, ...]

    def __repr__(self) -> str:
        return " -> ".join(", ".join(map(str, dtypes)) for dtypes in self)


@dataclasses.dataclass(frozen=True)
class Entry:
    """An equation of a function, with the decision about it.

    Attributes:
      eqn: The equation as it was traced.
      product: The decision that it carries, if it is a product.
      key, category: As in `Decision`.
      before, after: Its dtypes as traced, and as it runs.
      times: How often it runs.
      source: The user's line.
      scope: The name scopes around it.
      parameters: The paths of the parameters that it reads.
    """

    eqn: JaxprEqn
    product: Product | None
    key: str
    category: str
    before: Dtypes
    after: Dtypes
    times: int
    source: str
    scope: str
    parameters: list[str]


def entries(
    closed: ClosedJaxpr, decisions: Decisions, target: Target, parameters: Mapping[Any, str] | None = None
) -> Iterator[Entry]:
    """Yield the equations of a jaxpr that `cast` returned, in all bodies that it entered.

    `parameters` are the paths of its inputs.
    """
    same: Callable[[str, str], str] = lambda x, y: x if x == y else ""
    paths = dataflow.Forward[str](_path, same, lambda value: "")
    given = [(parameters or {}).get(v, "") for v in closed.jaxpr.invars]
    is_entered = lambda eqn: _product.of(eqn) is None and decisions.of(eqn) is None
    for eqn, facts, context in walk(closed, is_entered, paths, given):
        product, decision = _product.of(eqn), decisions.of(eqn)
        if ir.name(eqn) in IDENTITIES or in_scope(eqn, QUANTIZE) or (product is None and decision is None):
            continue  # It is of an autocast inside, or `cast` added it.
        if product:
            traced, key, category = as_traced(eqn), product.key, product.category
            after = Dtypes(_multiplied(eqn, product, target), _dtypes(eqn.outvars))
        else:
            assert decision is not None
            traced, key, category, casts = decision
            is_copy = ir.name(traced) in COPIES
            after = Dtypes(_dtypes(traced.invars, None if is_copy else casts), _dtypes(traced.outvars, casts))
        before = Dtypes(_dtypes(traced.invars), _dtypes(traced.outvars))
        reads = paths.read(facts, eqn.invars[: product.arity] if product else eqn.invars)
        line, place = user_line(eqn) or context.line, scope(eqn, context.scope)
        read = [x for x in reads if x]
        yield Entry(traced, product, key, category, before, after, context.times, line, place, read)


def _path(eqn: JaxprEqn, operands: list[str]) -> str:
    """The path of the parameter that the results of an equation are, perhaps moved. Forward."""
    return operands[0] if ir.name(eqn) in REARRANGES else ""


def _multiplied(eqn: JaxprEqn, product: Product, target: Target) -> tuple[Any, ...]:
    """The dtypes of the operands that a product multiplies."""
    if isinstance(product.format, Format):
        return (np.dtype(product.format.forward),) * 2
    return _dtypes(eqn.invars, (target.wide, product.format) if product.format else None)


def _dtypes(atoms: Iterable[Any], cast: tuple[Dtype, Dtype] | None = None) -> tuple[Any, ...]:
    """The dtypes of values, of which those in the first dtype of a `cast` are in the second one."""
    found = (v.aval.dtype for v in atoms if hasattr(v.aval, "dtype"))
    return tuple(cast[1] if cast and dtype == cast[0] else dtype for dtype in found)
