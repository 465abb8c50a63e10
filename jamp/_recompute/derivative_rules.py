"""The derivative rule of a custom_vjp, whose residuals are kept in 8 bits: queries, keys, values and results, say.

Only residuals that are operands or results of the function are. Others, such as the sums of a softmax, are small or
have a meaning that jamp does not know.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
from jax import Array

from jamp._cast import is_inexact
from jamp._compiler_hints import behind_barrier
from jamp._jaxprs import build, constructs, inline, interpret, ir
from jamp._jaxprs.context import Context
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn, Var
from jamp._jaxprs.manual_axes import trace_inside
from jamp._recompute.kept import is_cheap
from jamp._recompute.stores import Store
from jamp._recompute.tangents import differentiated_once


class ForwardRule(NamedTuple):
    """The forward rule of a custom_vjp.

    Attributes:
      closed: Its results and its residuals, as a function of its operands.
      structure: The structure of the residuals: of a function of cotangents.
      operands, results: For each residual that is an operand or a result, its number. No other one is encoded.
    """

    closed: ClosedJaxpr
    structure: Any
    operands: dict[int, int]
    results: dict[int, int]


class CodedRule(NamedTuple):
    """A function with a derivative rule that keeps some operands and results in 8 bits, by their numbers."""

    eqn: JaxprEqn
    rule: ForwardRule
    operands: tuple[int, ...]
    results: tuple[int, ...]
    context: Context

    @property
    def coded(self) -> list[Any]:
        """The values that it keeps in 8 bits."""
        return [*(self.eqn.invars[i] for i in self.operands), *(self.eqn.outvars[j] for j in self.results)]


def with_codes(eqn: JaxprEqn, coded: Set[Var], context: Context) -> CodedRule | None:
    """A function with a derivative rule that keeps `coded` values in 8 bits. None if it keeps none of them."""
    if coded.isdisjoint(x for x in (*eqn.invars, *eqn.outvars) if not ir.is_literal(x)):
        return None
    rule = _forward_rule(eqn, context.shard_map)
    if rule is None:
        return None
    of = lambda atoms, found: tuple(i for i in sorted(set(found)) if not ir.is_literal(atoms[i]) and atoms[i] in coded)
    operands, results = of(eqn.invars, rule.operands.values()), of(eqn.outvars, rule.results.values())
    if is_cheap(eqn):  # Its result may be a softmax, whose rows must sum to 1.
        results = ()
    return CodedRule(eqn, rule, operands, results, context) if operands or results else None


def _forward_rule(eqn: JaxprEqn, inside: JaxprEqn | None) -> ForwardRule | None:
    """The forward rule of a custom_vjp. None if it asks which operands are differentiated, and for all else."""
    if ir.name(eqn) != "custom_vjp_call" or constructs.asks_for_zeros(eqn) or constructs.bodies(eqn) is None:
        return None
    inputs, outputs = ir.avals(eqn.invars), ir.avals(eqn.outvars)
    perturbed = _perturbed(eqn)
    structures: list[Any] = []

    def forward(*args: Any) -> list[Any]:
        results, pull_back = jax.vjp(interpret.function_of(eqn, args, perturbed), *(args[i] for i in perturbed))
        residuals, structure = jax.tree.flatten(pull_back)
        structures.append(structure)
        return [*results, *residuals]

    closed = trace_inside(inside, forward, inputs)
    _, found = inline.flattened(closed)
    n = len(outputs)
    places = lambda atoms: {v: i for i, v in enumerate(atoms) if not ir.is_literal(v)}
    of_inputs, of_outputs = places(closed.jaxpr.invars), places(found[:n])
    residuals = [(k, v) for k, v in enumerate(found[n:]) if not ir.is_literal(v)]
    operands = {k: of_inputs[v] for k, v in residuals if v in of_inputs}
    return ForwardRule(closed, structures[-1], operands, {k: of_outputs[v] for k, v in residuals if v in of_outputs})


def _perturbed(eqn: JaxprEqn) -> list[int]:
    return [i for i, aval in enumerate(ir.avals(eqn.invars)) if is_inexact(aval)]


def coded_rule(part: CodedRule) -> Callable[..., list[Array]]:
    """A custom_vjp as a function of its operands and of the codes of some, which also returns codes of some results."""
    eqn, rule, operands, results, context = part
    inputs, outputs = ir.avals(eqn.invars), ir.avals(eqn.outvars)
    n, perturbed = len(outputs), _perturbed(eqn)
    of_operands = {k: i for k, i in rule.operands.items() if i in operands}
    of_results = {k: j for k, j in rule.results.items() if j in results}

    @jax.custom_vjp
    def call(args: Sequence[Array], codes: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        found = interpret.bind(eqn, args, outputs)
        return found, [x for j in results for x in Store.INT8.encode(found[j])]

    def forward(args: Sequence[Array], codes: Sequence[Array]) -> tuple[Any, Any]:
        found = interpret.call(rule.closed, differentiated_once(args))
        values, residuals = found[:n], found[n:]
        parts = [x for j in results for x in Store.INT8.encode(values[j])]
        if parts and not context.in_loop:  # as in `with_tangents_of`
            found = behind_barrier([*values, *parts])
            values, parts = found[:n], found[n:]
        # An operand is kept as it came: what is `differentiated_once` is another array to JAX.
        exact = [args[rule.operands[k]] if k in rule.operands else x for k, x in enumerate(residuals)]
        kept = [x for k, x in enumerate(exact) if k not in of_operands and k not in of_results]
        return (values, parts), (kept, codes, parts)

    def backward(residuals: Any, cotangents: Any) -> tuple[Any, None]:
        kept, codes, parts = residuals
        pairs = lambda places, arrays: dict(zip(places, zip(arrays[::2], arrays[1::2], strict=True), strict=True))
        operand, result = pairs(operands, codes), pairs(results, parts)
        decoded = {k: Store.INT8.decode(operand[i], inputs[i]) for k, i in of_operands.items()}
        decoded |= {k: Store.INT8.decode(result[j], outputs[j]) for k, j in of_results.items()}
        others: Iterator[Array] = iter(kept)
        size = len(kept) + len(decoded)
        pull_back = jax.tree.unflatten(
            rule.structure, [decoded[k] if k in decoded else next(others) for k in range(size)]
        )
        return build.replaced([None] * len(inputs), perturbed, pull_back(list(cotangents[0]))), None

    call.defvjp(forward, backward)

    def flat(*args: Array) -> list[Array]:
        found, parts = call(list(args[: len(inputs)]), list(args[len(inputs) :]))
        return [*found, *parts]

    return flat
