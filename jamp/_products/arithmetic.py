"""How products are computed: their values, their tangents and their cotangents.

Products of 16-bit operands are in this module, products of 8-bit operands in `quantized.py`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from jamp._cast import is_floating
from jamp._jaxprs import interpret, ir
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn
from jamp._jaxprs.primitives import PRODUCTS
from jamp._products.multiply import multiply
from jamp._products.product import Dtype, Product

Run = Callable[[JaxprEqn, list[Any]], Any]  # evaluates a traced product
# The name scopes of the backward products: the cotangents of the left and of the right operand.
OF_LEFT, OF_RIGHT = "jamp.of_left", "jamp.of_right"


class Arithmetic(Protocol):
    """The arithmetic of a format. `perturbed` are the operands that have a tangent."""

    def read(self, product: Product, operands: Sequence[Array]) -> list[Array]:
        """Return the operands to multiply, from the operands of the product."""

    def value(self, product: Product, operands: Sequence[Array]) -> Array:
        """The product of operands from `read`."""

    def residuals(self, product: Product, operands: Sequence[Array], perturbed: Sequence[int]) -> list[Array]:
        """Select what the tangent needs of the operands from `read`. `lower` also calls it on their vmap axes."""

    def tangent(
        self, product: Product, perturbed: Sequence[int], residuals: Sequence[Array], tangents: Sequence[Any]
    ) -> Array:
        """Return the tangent of the product, from the tangents of the perturbed operands."""

    def cotangents(
        self, product: Product, perturbed: Sequence[int], types: Sequence[Any], residuals: Sequence[Array], g: Array
    ) -> list[Array]:
        """Return the cotangents of the perturbed operands, which have these types, from the cotangent of the result."""


@dataclasses.dataclass(frozen=True)
class Rounded:
    """A product of operands that are rounded to a dtype. Its sums are float32.

    Products of float32 operands have the highest precision, unless the code asked for another: the default of GPUs is
    TF32, and the default of TPUs is bfloat16.
    """

    dtype: Dtype

    def read(self, product: Product, operands: Sequence[Array]) -> list[Array]:
        return list(map(self.rounded, operands))

    def value(self, product: Product, operands: Sequence[Array]) -> Array:
        return self.multiply(product.primitive, operands, dict(product.params), product.dtype)

    def residuals(self, product: Product, operands: Sequence[Array], perturbed: Sequence[int]) -> list[Array]:
        return [operands[j] for j in others_of(product, perturbed)]

    def tangent(
        self, product: Product, perturbed: Sequence[int], residuals: Sequence[Array], tangents: Sequence[Any]
    ) -> Array:
        # For each perturbed operand, the product with its tangent in its place.
        values = dict(zip(others_of(product, perturbed), residuals, strict=True))
        given = [{**values, i: self.rounded(t)} for i, t in zip(perturbed, tangents, strict=True)]
        terms = [self.value(product, [operands[j] for j in sorted(operands)]) for operands in given]
        return sum(terms[1:], start=terms[0])

    def cotangents(
        self, product: Product, perturbed: Sequence[int], types: Sequence[Any], residuals: Sequence[Array], g: Array
    ) -> list[Array]:
        values = dict(zip(others_of(product, perturbed), residuals, strict=True))
        g = g.astype(self.dtype)  # from float32, or from a third dtype that the code asked for
        results = []
        for i, aval in zip(perturbed, types, strict=True):
            operands = [g, *(values[j] for j in sorted(values) if j != i)]
            run = lambda eqn, args, aval=aval: self.multiply(eqn.primitive, args, ir.params(eqn), aval.dtype)
            given = list(map(jax.typeof, operands))
            results.append(cotangent(product, i, aval.update(dtype=self.dtype), given, operands, run))
        return results

    def rounded(self, x: Array) -> Array:
        """A float32 operand in the dtype."""
        return x.astype(self.dtype) if x.dtype == jnp.float32 else x

    def multiply(self, primitive: Any, operands: Sequence[Array], params: dict[str, Any], dtype: Dtype) -> Array:
        """A product of rounded operands, by a primitive of JAX."""
        return multiply(primitive, operands, _precise(params) if self.dtype == jnp.float32 else params, dtype)


class Raised(Rounded):
    """A product of 16-bit operands, or of such an operand and a float32 one, whose result is float32.

    A product of two numbers of one 16-bit dtype is exact in float32. So a dot_general of two such operands reads them
    as they are. Any other product is one of float32 operands.
    """

    def cotangents(
        self, product: Product, perturbed: Sequence[int], types: Sequence[Any], residuals: Sequence[Array], g: Array
    ) -> list[Array]:
        return super().cotangents(product, perturbed, types, _in_float32(residuals), g)

    def multiply(self, primitive: Any, operands: Sequence[Array], params: dict[str, Any], dtype: Dtype) -> Array:
        if primitive.name != "dot_general" or any(x.dtype == jnp.float32 for x in operands):
            operands, params = _in_float32(operands), _precise(params)
        return multiply(primitive, operands, params, jnp.float32).astype(dtype)


def _precise(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a product with the highest precision, unless they state one."""
    is_stated = params["precision"] not in (None, lax.DotAlgorithmPreset.DEFAULT)
    return params if is_stated else {**params, "precision": (lax.Precision.HIGHEST,) * 2}


def _in_float32(operands: Sequence[Array]) -> list[Array]:
    """The operands of a product in float32, but for the sizes of groups."""
    return [x.astype(jnp.float32) if is_floating(x) else x for x in operands]


def others_of(product: Product, perturbed: Sequence[int]) -> list[int]:
    """The operands that the tangents of the perturbed ones are multiplied with."""
    return [j for j in range(product.arity) if any(i != j for i in perturbed)]


def cotangent(product: Product, i: int, aval: Any, types: Sequence[Any], values: Sequence[Any], run: Run) -> Any:
    """The cotangent of the i-th operand of a product: a product, which `run` evaluates, and moves.

    `types` and `values` are of the cotangent of the result, and of the other operands.
    """
    params = (
        *(x for x in product.params if x[0] != "preferred_element_type"),
        ("preferred_element_type", types[0].dtype),
    )
    closed = _transposed(product.primitive, params, i, aval, tuple(types), jax.sharding.get_abstract_mesh())
    evaluate = lambda eqn, args: [run(eqn, args)] if ir.name(eqn) in PRODUCTS else moved(eqn, args)
    with jax.named_scope((OF_LEFT, OF_RIGHT)[i]):
        return interpret.interpret(closed.jaxpr, values, evaluate)[0]


@functools.lru_cache(maxsize=4096)
def _transposed(
    primitive: Any, params: tuple[tuple[str, Any], ...], i: int, aval: Any, types: tuple[Any, ...], mesh: Any
) -> ClosedJaxpr:
    """The cotangent of the i-th operand as a jaxpr. A model transposes few products of different types, many times."""
    del mesh  # The types name its axes.

    def transposed(g: Array, *others: Array) -> Array:
        fun = lambda x: primitive.bind(*others[:i], x, *others[i:], **dict(params))
        found: Array = jax.linear_transpose(fun, aval)(g)[0]
        return found

    return jax.make_jaxpr(transposed)(*types)


def moved(eqn: JaxprEqn, args: Sequence[Array]) -> list[Array]:
    """Return the results of an operation that moves data, for operands of another dtype.

    It runs in the context of the caller: the equation may be of an earlier trace, with other metadata for XLA.
    """
    found: Any = eqn.primitive.bind(*args, **ir.params(eqn))
    return list(found) if eqn.primitive.multiple_results else [found]
