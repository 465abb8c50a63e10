"""What the passes know about values and places, and the analyses that find it out."""

import functools
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jamp._autocast.qualify import sums_few_terms
from jamp._autocast.rules import ANY
from jamp._cast import is_floating, is_inexact
from jamp._jaxprs import constructs, ir
from jamp._jaxprs.dataflow import Backward, Flags, Forward, spreads
from jamp._jaxprs.equality import Bits
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn, Var
from jamp._jaxprs.primitives import COPIES, MOVES, MOVING
from jamp._jaxprs.walk import holds_product

# Name scopes, which an operation keeps through every transformation: of a function marked by the user, of everything in
# an autocast function.
FULL_PRECISION, AUTOCAST = "jamp.full_precision", "jamp.autocast"
# The categories of equations that no rule decides.
NOT_ENTERED, REGION, NO_RULE = "not entered", "full_precision", "no rule"
_SUMS = frozenset({"add", "add_any", "psum", "psum_invariant", "reduce_scatter", "reduce_sum"})


IsWide = Callable[[Any], bool]  # whether a type has the dtype that products cast


class Constant(NamedTuple):
    """A value that is a constant of the function, perhaps moved.

    Attributes:
      number: The number that the whole value is filled with, or None.
      is_out_of_range: Whether it is an array beyond the range of the compute dtype.
    """

    number: Bits | None
    is_out_of_range: bool = False


class Input(NamedTuple):
    """What is known of an input of a jaxpr.

    Attributes:
      is_stored: Whether it is stored in another dtype than it was traced in: in 16 bit, or by a rule in float32.
      constant: The constant that it is, or None.
      is_computed: Whether it is computed, and not an argument of the function, perhaps moved.
      follows_long_sum: Whether it depends on a product that sums more than a few terms.
      follows_product: Whether it depends on a product. This and the next are found for 8-bit formats only.
      follows_tangent: Whether it depends on a tangent or cotangent.
    """

    is_stored: bool = False
    constant: Constant | None = None
    is_computed: bool = True
    follows_long_sum: bool = False
    follows_product: bool = False
    follows_tangent: bool = False


class Output(NamedTuple):
    """What is known of an output of a jaxpr.

    Attributes:
      is_consumed: Whether an operation other than moves and sums reads it later (see `consumes`).
      keeps_narrow: Whether it is 16 bit if it is the result of a product, perhaps moved, even if others read it too.
      feeds_product: Whether a later product reads it, perhaps through other operations.
      is_read_wide: Whether it is read in float32, although it was traced in 16 bit (`reads_wide`).
    """

    is_consumed: bool = False
    keeps_narrow: bool = False
    feeds_product: bool = False
    is_read_wide: bool = False


def computes(eqn: JaxprEqn, operands: Flags) -> bool:
    """Whether the results of an equation are computed, and not an argument of the function or a constant that is moved.

    Forward. A product casts the arguments that it reads, so that their gradients are float32.
    """
    floats = [is_inexact(aval) and x for aval, x in zip(ir.avals(eqn.invars), operands, strict=True)]
    return any(floats) or ir.name(eqn) not in MOVING


def consumes(eqn: JaxprEqn, results: Flags) -> bool:
    """Whether an operation other than moves and sums reads the operands of an equation, which are then *consumed*.

    Backward. A gradient of an argument that only moves and sums read is a result of the function, and stays float32.
    """
    return any(results) or ir.name(eqn) not in MOVING | _SUMS


def reads_wide(raised: frozenset[str], eqn: JaxprEqn, results: Flags) -> bool:
    """Whether an equation reads its 16-bit operands in float32: it casts them, is raised, or moves what others so read.

    Backward. `raised` are the primitives that a rule raises (see `Target.raises`).
    """
    if ir.name(eqn) == "convert_element_type":
        return bool(is_floating(eqn.outvars[0].aval) and ir.avals(eqn.outvars)[0].dtype.itemsize > 2) or any(results)
    if ir.name(eqn) in MOVES | COPIES | {"add_any"}:
        return any(results)
    return not raised.isdisjoint((ir.name(eqn), ANY))


def fills(is_wide: IsWide, eqn: JaxprEqn, operands: list[Constant | None]) -> Constant | None:
    """The constant that the results of an equation are, if any. `join_constants` is for values that meet."""
    if len(eqn.invars) != 1 or ir.name(eqn) not in MOVES | COPIES:
        return None
    (constant,), (before,), (after, *_) = operands, ir.avals(eqn.invars), ir.avals(eqn.outvars)
    if constant is None or before.dtype == after.dtype:
        return constant
    if constant.number is None:
        return constant if is_wide(after) else None
    if is_inexact(before) and not is_inexact(after):  # Of a number out of range, platforms differ.
        return None
    return Constant(Bits(np.asarray(constant.number.value, before.dtype).astype(after.dtype)[()]))


def join_constants(x: Constant | None, y: Constant | None) -> Constant | None:
    """The constant that a value from one of two places is."""
    return x if x == y else None


def as_constant(is_out_of_range: Callable[[Any], bool], value: Any) -> Constant | None:
    """The fact about a constant of a jaxpr. None if it has no value yet, or is not an array of real numbers, but a Ref.

    Of an array, no more than whether it `is_out_of_range`: bodies that are called with different weights are cast once.
    """
    aval = jax.typeof(value)
    if isinstance(value, jax.core.Tracer) or not isinstance(aval, jax.core.ShapedArray):
        return None
    if not isinstance(value, jax.Array) and aval.ndim == 0:
        return Constant(Bits(value))
    is_real = is_floating(aval) or jnp.issubdtype(aval.dtype, np.integer)  # and no random key
    return Constant(None, is_out_of_range(value)) if is_real else None


def follows_long_sum(eqn: JaxprEqn, operands: Flags) -> bool:
    """Whether the results of an equation depend on a product that sums more than a few terms. Forward."""
    return any(operands) or (holds_product(eqn) and not sums_few_terms(eqn))


def follows_product(eqn: JaxprEqn, operands: Flags) -> bool:
    """Whether the results of an equation depend on a product. Forward."""
    return any(operands) or holds_product(eqn)


def feeds_product(eqn: JaxprEqn, results: Flags) -> bool:
    """Whether a product reads the operands of an equation, perhaps through others. Backward.

    A dot product of all elements, such as a squared loss, is not a layer.
    """
    is_layer = ir.name(eqn) != "dot_general" or ir.product_sizes(eqn)[:2] != [1, 1]
    return any(results) or (holds_product(eqn) and is_layer)


class Analyses:
    """The analyses of a function. Each finds a field of `Input` or of `Output`, by its name, for every value.

    `raised` are the primitives that a rule raises. The last fields are found for 8-bit formats only.
    """

    def __init__(
        self, is_wide: IsWide, is_out_of_range: Callable[[Any], bool], raised: frozenset[str], has_format: bool
    ):
        constant = Forward(
            functools.partial(fills, is_wide), join_constants, functools.partial(as_constant, is_out_of_range)
        )
        self.of_inputs: dict[str, Forward[Any]] = {
            "constant": constant,
            "is_computed": spreads(computes),
            "follows_long_sum": spreads(follows_long_sum),
        }
        self.of_outputs = {"is_consumed": Backward(consumes)}
        if raised:
            self.of_outputs["is_read_wide"] = Backward(functools.partial(reads_wide, raised))
        if has_format:
            self.of_inputs["follows_product"] = spreads(follows_product)
            self.of_inputs["follows_tangent"] = spreads(lambda eqn, operands: any(operands))
            self.of_outputs["feeds_product"] = Backward(feeds_product)


class Facts:
    """What the analyses found about the values of a jaxpr, from what is known of its inputs and outputs."""

    def __init__(self, analyses: Analyses, closed: ClosedJaxpr, inputs: Sequence[Input], outputs: Sequence[Output]):
        self._analyses = analyses
        given = lambda ends, name: [getattr(x, name) for x in ends]
        self._forward = {name: find(closed, given(inputs, name)) for name, find in analyses.of_inputs.items()}
        self._backward = {name: find(closed, given(outputs, name)) for name, find in analyses.of_outputs.items()}

    def of_inputs(self, name: str, atoms: Sequence[Any]) -> list[Any]:
        """A field of `Input` of some variables and literals."""
        return self._analyses.of_inputs[name].read(self._forward[name], atoms)

    def of_outputs(self, name: str) -> Set[Var]:
        """The values with a field of `Output`."""
        return self._backward.get(name, frozenset())

    def into(
        self, eqn: JaxprEqn, is_stored: Sequence[bool], first: int
    ) -> tuple[list[list[Input]], list[list[Output]]]:
        """What is known of the inputs and the outputs of each body of a construct.

        `is_stored` says which operands are stored in another dtype. From the `first` result on, results may be.
        """
        known = lambda analyses, found: {name: x.into(eqn, found[name]) for name, x in analyses.items()}
        of_inputs = known(self._analyses.of_inputs, self._forward)
        of_outputs = known(self._analyses.of_outputs, self._backward)
        inputs = [
            [Input(is_stored[i], **{name: found[j][k] for name, found in of_inputs.items()}) for k, i in enumerate(at)]
            for j, at in enumerate(constructs.operands_of_bodies(eqn))
        ]
        outputs = [
            [Output(**dict(zip(of_outputs, fields, strict=True))) for fields in zip(*columns, strict=True)]
            for columns in zip(*of_outputs.values(), strict=True)
        ]
        return inputs, [
            [x._replace(is_read_wide=x.is_read_wide and i >= first) for i, x in enumerate(body)] for body in outputs
        ]
