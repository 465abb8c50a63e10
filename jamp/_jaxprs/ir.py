"""Read equations and jaxprs.

This package uses only public modules of JAX. The parameters of primitives are not a stable API, though, so this module
and `constructs.py` know how releases of JAX differ in them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import ClosedJaxpr as ClosedJaxpr, Jaxpr as Jaxpr, JaxprEqn as JaxprEqn, Literal, Var as Var

Env = dict[Any, Any]  # of Var


def is_literal(atom: Var | Literal) -> bool:
    """Whether an operand is a constant written into its equation."""
    return isinstance(atom, core.Literal)


def trace(fun: Callable[..., Any], *args: Any) -> tuple[ClosedJaxpr, Any]:
    """The jaxpr of `fun` over the flattened `args`, and the pytree of its outputs' shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(args)
    closed, shapes = jax.make_jaxpr(lambda *flat: fun(*jax.tree.unflatten(treedef, flat)), return_shape=True)(*leaves)
    return closed, shapes


def value(literal: Any) -> Any:
    """The value of a literal, as an array."""
    return jnp.asarray(literal.val, literal.aval.dtype)


def read(env: Env, atom: Var | Literal) -> Any:
    """The value of an operand."""
    return value(atom) if is_literal(atom) else env[atom]


def is_ref(v: Any) -> bool:
    """Whether a variable is a Ref, which equations read and write."""
    return not is_literal(v) and is_ref_type(v.aval)


def is_ref_type(aval: Any) -> bool:
    """Whether a type is the type of a Ref."""
    return type(aval).__name__ == "AbstractRef"


def last_uses(eqns: Sequence[JaxprEqn], outputs: Sequence[Any]) -> dict[Any, int]:
    """Return for each variable the index of the last equation that reads it, for an output the number of equations."""
    uses = {v: i for i, eqn in enumerate(eqns) for v in eqn.invars if not is_literal(v)}
    return uses | {v: len(eqns) for v in outputs if not is_literal(v)}


# Under `jax_remat3`, `jax.checkpoint` and `checkpoint_name` are one primitive with an object in its parameters, whose
# class extends the public `jax.experimental.hijax.HiPrim`. Here they have the names that they have without that flag.
_HIGH = {"RematTraced": "remat2", "CheckpointName": "name", "CheckpointNameFwd": "name"}


def is_next_checkpoint() -> bool:
    """Whether `jax.checkpoint` is the next one. JAX before 0.10.2 has no such option."""
    return bool(getattr(jax.config, "jax_remat3", False))


def name(eqn: JaxprEqn) -> str:
    """The name of an equation's primitive."""
    high = eqn.params.get("_prim")
    own: str = eqn.primitive.name
    return own if high is None else _HIGH.get(type(high).__name__, type(high).__name__)


def params(eqn: JaxprEqn) -> dict[str, Any]:
    """The parameters of an equation by name."""
    high = eqn.params.get("_prim")
    return eqn.params if high is None else high.params


def with_params(eqn: JaxprEqn, **changes: Any) -> JaxprEqn:
    """An equation with some other parameters. An object in them is made anew, because its types depend on them."""
    high = eqn.params.get("_prim")
    new = {**params(eqn), **changes}
    return eqn.replace(params=new if high is None else {**eqn.params, "_prim": type(high)(**new)})


def with_name_for(eqn: JaxprEqn, aval: Any) -> JaxprEqn:
    """A `checkpoint_name` for a value of another type."""
    high = eqn.params.get("_prim")
    return eqn if high is None else eqn.replace(params={"_prim": type(high)(**high.params, aval=aval)})


def is_high(eqn: JaxprEqn) -> bool:
    """Whether JAX lowers an equation, or one in its bodies, to other primitives before it compiles it."""
    if "_prim" in eqn.params:
        return True
    # Not by `inner`, which takes far longer, and this is asked of every equation.
    values = [x for value in eqn.params.values() for x in (value if isinstance(value, tuple) else (value,))]
    return any(getattr(getattr(x, "jaxpr", x), "is_high", False) for x in values)


def trace_context(eqn: JaxprEqn) -> Any:
    """The context in which an equation was traced: the mesh, the options of `compute_on`, metadata for XLA.

    An equation is evaluated in it. One that takes its place is traced in it, too, because types name the mesh.
    """
    return eqn.ctx.manager


def in_trace_context(eqn: JaxprEqn, fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs in the context of an equation."""

    def run(*args: Any) -> Any:
        with trace_context(eqn):
            return fun(*args)

    return run


def precisions(eqn: JaxprEqn) -> tuple[Any, ...]:
    """Return the precision of a product or of each operand: None if the code states none, or the preset DEFAULT."""
    precision = eqn.params["precision"]
    if precision is jax.lax.DotAlgorithmPreset.DEFAULT:
        return (None,)
    return precision if isinstance(precision, tuple) else (precision,)


def summed_terms(eqn: JaxprEqn) -> int:
    """How many products are summed for each element of a product's result. 1 if it is an outer product."""
    params = eqn.params
    if name(eqn) == "conv_general_dilated":
        operand, axes = 1, params["dimension_numbers"].rhs_spec[1:]
    else:
        operand, axes = 0, contracted(params)[0]
    shape = avals(eqn.invars)[operand].shape
    return math.prod(shape[i] for i in axes)


def is_vector_product(eqn: JaxprEqn) -> bool:
    """Whether a dot_general has no free axis: each element of its result is a product of two vectors."""
    if name(eqn) != "dot_general":
        return False
    contracting, batch = _dimensions(eqn.params)
    shapes = avals(eqn.invars)
    return all(len(x.shape) == len(c) + len(b) for x, c, b in zip(shapes, contracting, batch, strict=True))


def contracted(params: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of each operand over which a matrix product sums."""
    axes: tuple[tuple[int, ...], tuple[int, ...]] = _dimensions(params)[0]
    return axes


def product_sizes(eqn: JaxprEqn) -> list[int]:
    """M, N and K of a matrix product: the free elements of each operand, and the terms of a sum."""
    (contracting, batch), operands = _dimensions(eqn.params), avals(eqn.invars[:2])
    free = [
        math.prod(n for i, n in enumerate(x.shape) if i not in (*c, *b))
        for x, c, b in zip(operands, contracting, batch, strict=True)
    ]
    return [*free, summed_terms(eqn)]


def _dimensions(params: Mapping[str, Any]) -> Any:
    """The contracting and the batch axes of each operand of a matrix product. An axis of groups is a batch axis."""
    ragged = params.get("ragged_dot_dimension_numbers")
    if ragged is None:
        return params["dimension_numbers"]
    contracting, (left, right) = ragged.dot_dimension_numbers
    return contracting, (left, (*right, *ragged.rhs_group_dimensions))


def parameters(eqn: JaxprEqn) -> tuple[Any, ...]:
    """The values of all parameters of an equation."""
    return tuple(eqn.params.values())


def exponent(eqn: JaxprEqn) -> int:
    """The exponent of an integer_pow."""
    return int(eqn.params["y"])


def primitive_names() -> frozenset[str]:
    """The names of JAX's own primitives."""
    listed = core.primitives
    return frozenset(getattr(listed, name).name for name in dir(listed) if name.endswith("_p"))


def avals(atoms: Sequence[Any]) -> list[Any]:
    """The types of variables and literals."""
    return [atom.aval for atom in atoms]
