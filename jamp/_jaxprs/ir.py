"""Read jaxprs.

This module uses only public modules of JAX. The parameters of primitives are not a stable API, though, so only this,
`build.py` and `manual_axes.py` know those of constructs, and how JAX versions differ.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from types import FunctionType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import Sharding

Env = dict[Any, Any]  # of Var


def is_literal(atom: Var | Literal) -> bool:
    """Whether an operand is a constant written into its equation."""
    return isinstance(atom, core.Literal)


def trace(fun: Callable[..., Any], *args: Any) -> tuple[ClosedJaxpr, Any]:
    """The jaxpr of `fun` over the flattened `args`, and the pytree of its outputs' shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(args)
    closed, shapes = jax.make_jaxpr(lambda *flat: fun(*jax.tree.unflatten(treedef, flat)), return_shape=True)(*leaves)
    return closed, shapes


def identity(closed: ClosedJaxpr) -> tuple[int, ...]:
    """What tells a function from others, as long as it exists. Calls of one jaxpr may have other constants."""
    return id(closed.jaxpr), *map(id, closed.consts)


def value(literal: Any) -> Any:
    """The value of a literal, as an array."""
    return jnp.asarray(literal.val, literal.aval.dtype)


def number(atom: Any) -> Any:
    """The value of a literal as it was traced. None for a variable."""
    return atom.val if is_literal(atom) else None


def read(env: Env, atom: Var | Literal) -> Any:
    """The value of an operand."""
    return value(atom) if is_literal(atom) else env[atom]


def is_ref(v: Any) -> bool:
    """Whether a variable is a Ref, which equations read and write."""
    return not is_literal(v) and type(v.aval).__name__ == "AbstractRef"


def last_uses(jaxpr: Jaxpr) -> dict[Any, int]:
    """For each variable, the index of the last equation that reads it. For an output, the number of equations."""
    uses = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not is_literal(v)}
    return uses | {v: len(jaxpr.eqns) for v in jaxpr.outvars if not is_literal(v)}


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


def inlinable(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The body of a jit call that can be inlined because it pins no sharding, else None."""
    if name(eqn) not in ("jit", "pjit"):
        return None
    shardings = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    body: ClosedJaxpr = eqn.params["jaxpr"]
    return None if any(isinstance(s, Sharding) for s in shardings) else body


# The constructs (control flow, calls, custom derivatives), and the parameters of each that jamp reads. Releases of JAX
# name them differently, so one of the sets must be there. All other parameters are copied unchanged.
_SCAN = {"jaxpr", "length", "reverse", "unroll"}
_READ: dict[str, list[set[str]]] = {
    "jit": [{"jaxpr", "in_shardings", "out_shardings"}],
    "scan": [_SCAN | {"num_consts", "num_carry"}, _SCAN | {"ft_in", "ft_out"}],  # jax 0.10, jax 0.12
    "while": [{"cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts"}],
    "cond": [{"branches"}],
    "closed_call": [{"call_jaxpr"}],
    "linear_call": [{"callee", "transpose_thunk", "num_callee_consts", "num_res"}],
    "remat2": [{"jaxpr", "differentiated"}, {"jaxpr", "policy"}],  # the second with `jax_remat3`
    "remat_opt": [{"fwd_jaxpr", "fun_jaxpr_thunk"}],
    "custom_jvp_call": [{"call_jaxpr", "jvp_jaxpr_fun"}],
    "custom_vjp_call": [{"call_jaxpr", "fwd_jaxpr_thunk", "bwd", "num_consts"}],
    "shard_map": [{"jaxpr", "in_specs", "out_specs"}],
    "custom_linear_solve": [{"const_lengths", "jaxprs"}],
    "scaled_call": [{"jaxpr"}],  # of `jamp.scaled`
}
CONSTRUCTS = frozenset(_READ)
BODIES = ("cond_jaxpr", "body_jaxpr", "call_jaxpr", "jaxpr", "callee", "fwd_jaxpr")


def bodies(eqn: JaxprEqn) -> tuple[ClosedJaxpr, ...] | None:
    """The jaxprs that a construct evaluates, or None if it cannot be entered.

    Of a while: condition, body. Of a linear solve: matvec, vecmat, the solve and its transpose, if there are any.
    """
    if not is_known(eqn):
        return None
    given = params(eqn)
    if "jaxprs" in given:
        found = [x for x in given["jaxprs"] if x is not None]
    else:
        found = given["branches"] if "branches" in given else [given[key] for key in BODIES if key in given]
    closed = tuple(j if hasattr(j, "consts") else core.ClosedJaxpr(j, []) for j in found)
    # A body that reads or writes a Ref has inputs that are not arrays.
    types = [x for j in closed for x in (*j.in_avals, *j.out_avals)]
    return closed if all(isinstance(x, jax.core.ShapedArray) for x in types) else None


def is_known(eqn: JaxprEqn) -> bool:
    """Whether a construct has the parameters that jamp reads."""
    return any(names <= params(eqn).keys() for names in _READ.get(name(eqn), []))


def body_operands(eqn: JaxprEqn) -> list[list[int]]:
    """For each body of a construct, which of the operands are its arguments."""
    operands = list(range(len(eqn.invars)))
    if name(eqn) == "cond":
        return [operands[1:]] * len(eqn.params["branches"])
    if name(eqn) == "while":
        m, n = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        return [operands[:m] + operands[m + n :], operands[m:]]
    if name(eqn) == "custom_linear_solve":
        lengths = eqn.params["const_lengths"]
        ends = list(itertools.accumulate(lengths))
        constants = [operands[end - n : end] for n, end in zip(lengths, ends, strict=True)]
        bodies = zip(constants, eqn.params["jaxprs"], strict=True)
        return [mine + operands[ends[-1] :] for mine, body in bodies if body is not None]
    return [operands]


def bodies_before_results(eqn: JaxprEqn) -> int:
    """How many bodies of a construct come before those that compute its results.

    They are the condition of a while, and the matrix-vector products of a linear solve.
    """
    if name(eqn) == "custom_linear_solve":
        return sum(body is not None for body in eqn.params["jaxprs"][:2])
    return int(name(eqn) == "while")


def carry(eqn: JaxprEqn) -> range:
    """Which operands of a loop are its carry. Its first results are the carry at the end.

    A linear solve counts as a loop. Its bodies take the right-hand side, the solution, or a vector on the way to it.
    """
    params = eqn.params
    if name(eqn) == "custom_linear_solve":
        return range(sum(params["const_lengths"]), len(eqn.invars))
    if name(eqn) == "while":
        return range(params["cond_nconsts"] + params["body_nconsts"], len(eqn.invars))
    if name(eqn) != "scan":
        return range(0)
    if "num_carry" in params:
        return range(params["num_consts"], params["num_consts"] + params["num_carry"])
    consts, init, _ = params["ft_in"].unpack()
    return range(len(consts), len(consts) + len(init))


def asks_for_zeros(eqn: JaxprEqn) -> bool:
    """Whether a custom rule must be told which operands are differentiated.

    A rule with symbolic zeros must. So must one that closes over arrays, because those have no derivative.
    """
    params = eqn.params
    return bool(params.get("symbolic_zeros") or (name(eqn) == "custom_vjp_call" and params["num_consts"]))


@functools.cache
def cond_copies_operands() -> bool:
    """Whether a cond whose derivative reads an operand returns a copy of it. JAX 0.12 keeps the operand itself."""
    double = lambda x, y: jax.lax.cond(y > 0, jnp.multiply, lambda x, y: x, x, y)
    kept = lambda x, y: jax.tree.leaves(jax.vjp(lambda x: double(x, y), x)[1])
    jaxpr = jax.make_jaxpr(kept)(1.0, 1.0).jaxpr
    return not any(v is jaxpr.invars[1] for v in jaxpr.outvars)


def residuals(eqn: JaxprEqn) -> int:
    """The number of leading operands in which a linear_call is not linear."""
    return int(eqn.params["num_callee_consts"] + eqn.params["num_res"])


def condition_constants(eqn: JaxprEqn) -> int:
    """The number of leading operands of a while loop that only its condition reads."""
    return int(eqn.params["cond_nconsts"])


def scan_options(eqn: JaxprEqn) -> dict[str, Any]:
    """The keywords with which `jax.lax.scan` makes the same scan."""
    return {name: eqn.params[name] for name in ("length", "reverse", "unroll")}


def iterations(eqn: JaxprEqn) -> int:
    """How often the body of a construct runs, if the jaxpr says so: the length of a scan, else 1."""
    return int(eqn.params.get("length", 1))


def has_body(eqn: JaxprEqn) -> bool:
    """Whether an equation holds a jaxpr, even if it is not in `CONSTRUCTS`."""
    return bool(inner(eqn))


def inner(eqn: JaxprEqn) -> list[tuple[Jaxpr, int]]:
    """Every jaxpr that an equation of any kind evaluates, and how often, as far as the equation says so."""
    given: Any = params(eqn)
    if name(eqn) == "custom_linear_solve":  # The others are matvec, vecmat and transpose_solve.
        given = given["jaxprs"].solve
    grid = getattr(eqn.params.get("grid_mapping"), "grid", ())  # of a Pallas kernel
    times = iterations(eqn) * math.prod(n for n in grid if isinstance(n, int))
    found = {id(x): x for x in _held(given, 2)}
    high = eqn.params.get("_prim")
    if high is not None and not found and name(eqn) not in CONSTRUCTS | {"name"}:
        with contextlib.suppress(NameError):  # It communicates over an axis that is not mapped here.
            found[0] = jax.make_jaxpr(high.expand)(*high.in_avals)  # an operation that a user or a library defines
    return [(getattr(x, "jaxpr", x), times) for x in found.values()]


def all_equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Every equation of a jaxpr and of the jaxprs in it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body, _ in inner(eqn):
            yield from all_equations(body)


_WITHOUT_JAXPRS = (type, FunctionType, ModuleType, Enum)


def _held(x: Any, depth: int) -> Iterator[Any]:
    """The jaxprs in a tree of parameters, and in the attributes of objects in it, down to a depth."""
    has_eqns = lambda x: hasattr(x, "eqns")
    for leaf in jax.tree.leaves(x, is_leaf=has_eqns):
        if has_eqns(leaf):
            yield leaf
        elif depth and (parts := getattr(leaf, "__dict__", None)) and not isinstance(leaf, _WITHOUT_JAXPRS):
            yield from _held(list(parts.values()), depth - 1)


def is_high(eqn: JaxprEqn) -> bool:
    """Whether JAX lowers an equation, or one in its bodies, to other primitives before it compiles it."""
    if "_prim" in eqn.params:
        return True
    # Not by `inner`, which takes far longer, and this is asked of every equation.
    values = [x for value in eqn.params.values() for x in (value if isinstance(value, tuple) else (value,))]
    return any(getattr(getattr(x, "jaxpr", x), "is_high", False) for x in values)


def is_platform_dependent(eqn: JaxprEqn) -> bool:
    """Whether an equation has a branch for each platform, of which one is compiled. The last is the default."""
    return bool(eqn.params.get("branches_platforms"))


def function_name(eqn: JaxprEqn) -> str | None:
    """The name of the function that a jit call runs."""
    return eqn.params.get("name")


def context(eqn: JaxprEqn) -> Any:
    """The context in which an equation was traced: the mesh, the options of `compute_on`, metadata for XLA.

    An equation is evaluated in it. One that takes its place is traced in it, too, because types name the mesh.
    """
    return eqn.ctx.manager


def precisions(eqn: JaxprEqn) -> tuple[Any, ...]:
    """The precision of a product, or that of each operand. None if the code states none, also by the preset DEFAULT."""
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
