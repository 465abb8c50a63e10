"""A product of the traced function, with the decision about it.

The pass `cast` replaces every product by an equation of the primitive `product`. `quantize` encodes the operands of
some, the report reads them, and `lower` turns them into JAX's own primitives with a derivative. Between these passes,
the primitive has the derivative of the lowered product.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from jax.extend import core

from jamp._jaxprs import ir
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn
from jamp._jaxprs.walk import walk
from jamp._products.formats import Format

Dtype: TypeAlias = np.dtype[Any]

# In the key of a rule: "dot_general[gradient]" is for gradients of weights, "*[head]" for all operations in a scope.
GRADIENT = "gradient"
ANY = "*"


@dataclasses.dataclass(frozen=True)
class Product:
    """The decision about a product.

    Attributes:
      primitive, params: The traced primitive (`dot_general`, for example), and its parameters.
      before: The dtypes of its operands and of its result as traced.
      key, category: The key of the rule that decided, such as "dot_general[gradient]", and the category that it gives.
      format: What it is computed in: the compute dtype, a `Format` of 8 bits, or None for the traced dtypes.
      arguments: Which operands are read in float32 and cast by the product, so that their gradients are float32.
      dtype: The dtype of the result.
      reason: Why it is not in the format that was asked for.
      kept_as: The name of its sums, which the backward pass keeps in place of the result that is scaled from them.
    """

    primitive: Any
    params: tuple[tuple[str, Any], ...]
    before: tuple[Dtype, ...]
    key: str
    category: str
    format: Dtype | Format | None
    arguments: tuple[bool, ...]
    dtype: Dtype
    reason: str = ""
    kept_as: str = ""

    @property
    def arity(self) -> int:
        """The number of operands of the traced product."""
        return len(self.before) - 1

    @property
    def operation(self) -> str:
        """The name of the primitive in the user's function, if a rule is for that. `quantize` may use another one."""
        name = self.key.partition("[")[0]
        return self.primitive.name if name == ANY else name

    @property
    def is_gradient(self) -> bool:
        """Whether it is the gradient of a weight. The key "*[gradient]" is for a scope of this name."""
        return self.key.endswith(f"[{GRADIENT}]") and not self.key.startswith(ANY)

    @property
    def is_raised(self) -> bool:
        """Whether a rule of the user gives the result, and the cotangent, of 16-bit operands the digits of float32."""
        return self.format == np.float32 and any(dtype.itemsize == 2 for dtype in self.before[:-1])

    def __repr__(self) -> str:
        name = "its traced dtypes" if self.format is None else self.format.name
        places = ", ".join(str(i) for i, x in enumerate(self.arguments) if x)
        return f"({self.key}: {self.category} in {name}" + f", argument: {places}" * bool(places) + ")"


product_p = core.Primitive("product")


def equation(product: Product, operands: Sequence[Any], result: Any, like: JaxprEqn) -> JaxprEqn:
    """A product as an equation, from the line and the scopes of another."""
    return like.replace(
        primitive=product_p, params={"product": product}, invars=list(operands), outvars=[result], effects=frozenset()
    )


def of(eqn: JaxprEqn) -> Product | None:
    """The decision that an equation carries, if it is a product."""
    product: Product | None = ir.params(eqn)["product"] if eqn.primitive is product_p else None
    return product


def name_of(eqn: JaxprEqn) -> str:
    """Return the name of an equation's primitive. For a product it is the traced primitive."""
    product = of(eqn)
    return product.primitive.name if product else ir.name(eqn)


def as_traced(eqn: JaxprEqn) -> JaxprEqn:
    """The traced product, if the equation is a product: its primitive, its parameters and the types of its operands."""
    product = of(eqn)
    if product is None:
        return eqn
    types = zip(ir.avals([*eqn.invars[: product.arity], *eqn.outvars]), product.before, strict=True)
    *operands, result = [core.Var(aval.update(dtype=dtype)) for aval, dtype in types]
    invars: list[Any] = operands
    return eqn.replace(primitive=product.primitive, params=dict(product.params), invars=invars, outvars=[result])


def products(closed: ClosedJaxpr) -> Iterator[Product]:
    """Yield the products of a jaxpr, and of the jaxprs in it."""
    yield from filter(None, (of(eqn) for eqn, *_ in walk(closed, lambda eqn: True)))


def result_type(product: Product, operands: Sequence[Any]) -> Any:
    """Return the type of a product's result, given the types of its operands."""
    traced = [aval.update(dtype=dtype) for aval, dtype in zip(operands, product.before[:-1], strict=False)]
    result, _ = product.primitive.abstract_eval(*traced, **dict(product.params))
    return result.update(dtype=product.dtype, weak_type=False)


product_p.def_abstract_eval(lambda *operands, product: result_type(product, operands))
