"""The constructs of JAX: control flow, calls and functions with a derivative rule. One table says what each of them is.

A construct is an equation with jaxprs in its parameters, its *bodies*, which it evaluates on its operands. A new
construct of JAX is a row in `CONSTRUCTS`. If its bodies do not take all operands, it is also a case in
`operands_of_bodies` and `carry`, in `build.with_bodies` if they lie in a new parameter, and in `interpret.py`.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from enum import Enum
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.sharding import Sharding

from jamp._jaxprs import ir
from jamp._jaxprs.ir import ClosedJaxpr, Jaxpr, JaxprEqn


class Derivative(Enum):
    """How JAX differentiates a construct in reverse mode."""

    OF_BODY = "JAX differentiates the bodies"
    BY_RULE = "the author of the function wrote a rule, which also computes the results again, in the traced dtypes"
    CHECKPOINT = "JAX differentiates the body, and the user has decided what is kept"
    NONE = "JAX cannot"


class Construct(NamedTuple):
    """A construct.

    Attributes:
      parameters: The names of parameters by which jamp recognizes it. Releases of JAX name them differently, so one of
        the sets must be there. All parameters but the bodies are copied unchanged.
      derivative: How JAX differentiates it.
      is_call: Whether it evaluates one body, once, on all its operands.
    """

    parameters: tuple[frozenset[str], ...]
    derivative: Derivative
    is_call: bool = False


def _row(parameters: str, derivative: Derivative, is_call: bool = False) -> Construct:
    return Construct(tuple(frozenset(names.split()) for names in parameters.split("|")), derivative, is_call)


_SCAN = "jaxpr length reverse unroll"
CONSTRUCTS = {
    "jit": _row("jaxpr in_shardings out_shardings", Derivative.OF_BODY, is_call=True),
    "closed_call": _row("call_jaxpr", Derivative.OF_BODY, is_call=True),
    "scaled_call": _row("jaxpr", Derivative.OF_BODY, is_call=True),  # of `jamp.scaled`
    "remat2": _row("jaxpr differentiated|jaxpr policy", Derivative.CHECKPOINT, is_call=True),  # jax_remat3: the second
    "remat_opt": _row("fwd_jaxpr fun_jaxpr_thunk", Derivative.BY_RULE, is_call=True),
    "custom_jvp_call": _row("call_jaxpr jvp_jaxpr_fun", Derivative.BY_RULE, is_call=True),
    "custom_vjp_call": _row("call_jaxpr fwd_jaxpr_thunk bwd num_consts", Derivative.BY_RULE, is_call=True),
    "linear_call": _row("callee transpose_thunk num_callee_consts num_res", Derivative.BY_RULE, is_call=True),
    "custom_linear_solve": _row("const_lengths jaxprs", Derivative.BY_RULE),
    "scan": _row(f"{_SCAN} num_consts num_carry|{_SCAN} ft_in ft_out", Derivative.OF_BODY),  # jax 0.10, jax 0.12
    "while": _row("cond_jaxpr body_jaxpr cond_nconsts body_nconsts", Derivative.NONE),
    "cond": _row("branches", Derivative.OF_BODY),
    "shard_map": _row("jaxpr in_specs out_specs", Derivative.OF_BODY),
    "chunked_sum": _row("jaxpr chunks wanted", Derivative.BY_RULE),  # of `jamp.chunked_sum`
}
# Constructs of jamp that run a loop of JAX: the loop, a function of the operands and the parameters. The module that
# defines such a primitive adds it.
LOOPS: dict[str, Callable[..., Any]] = {}
BODIES = ("cond_jaxpr", "body_jaxpr", "call_jaxpr", "jaxpr", "callee", "fwd_jaxpr")


def derivative(eqn: JaxprEqn) -> Derivative | None:
    """How JAX differentiates a construct. None for any other equation."""
    construct = CONSTRUCTS.get(ir.name(eqn))
    return construct.derivative if construct else None


def is_call(eqn: JaxprEqn) -> bool:
    """Whether an equation evaluates one body, once, on all its operands."""
    construct = CONSTRUCTS.get(ir.name(eqn))
    return construct is not None and construct.is_call


def differentiates_bodies(eqn: JaxprEqn) -> bool:
    """Whether JAX differentiates the bodies of a construct, each as it stands."""
    return derivative(eqn) is Derivative.OF_BODY


def reads_again(eqn: JaxprEqn) -> bool:
    """Whether the backward pass of a construct computes again from its operands: the user's rule or checkpoint does.

    A custom_jvp computes all that it keeps in the forward pass, and a chunked_sum its gradients.
    """
    is_by_user = derivative(eqn) in (Derivative.BY_RULE, Derivative.CHECKPOINT)
    return is_by_user and ir.name(eqn) not in ("custom_jvp_call", "chunked_sum")


def has_own_rule(eqn: JaxprEqn) -> bool:
    """Whether a construct has a derivative rule, which may pass on tangents of operands that its body does not read."""
    return derivative(eqn) is Derivative.BY_RULE


def is_forward_rule(eqn: JaxprEqn) -> bool:
    """Whether an equation is the forward rule of a custom_vjp with `optimize_remat`, in a gradient.

    Only the body of the rule is differentiated once more.
    """
    return ir.name(eqn) == "remat_opt"


def is_known(eqn: JaxprEqn) -> bool:
    """Whether an equation is a construct with the parameters that jamp reads."""
    construct = CONSTRUCTS.get(ir.name(eqn))
    return construct is not None and any(names <= ir.params(eqn).keys() for names in construct.parameters)


def bodies(eqn: JaxprEqn) -> tuple[ClosedJaxpr, ...] | None:
    """Return the jaxprs that a construct evaluates, or None if an equation is not one that can be entered.

    Of a while: condition, body. Of a linear solve: matvec, vecmat, the solve and its transpose, if there are any.
    """
    if not is_known(eqn):
        return None
    given = ir.params(eqn)
    if "jaxprs" in given:
        found = [x for x in given["jaxprs"] if x is not None]
    else:
        found = given["branches"] if "branches" in given else [given[key] for key in BODIES if key in given]
    closed = tuple(j if hasattr(j, "consts") else core.ClosedJaxpr(j, []) for j in found)
    # A body that reads or writes a Ref has inputs that are not arrays.
    types = [x for j in closed for x in (*j.in_avals, *j.out_avals)]
    return closed if all(isinstance(x, jax.core.ShapedArray) for x in types) else None


def operands_of_bodies(eqn: JaxprEqn) -> list[list[int]]:
    """For each body of a construct, return which of the operands are its arguments."""
    operands = list(range(len(eqn.invars)))
    if ir.name(eqn) == "cond":
        return [operands[1:]] * len(eqn.params["branches"])
    if ir.name(eqn) == "while":
        m, n = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        return [operands[:m] + operands[m + n :], operands[m:]]
    if ir.name(eqn) == "custom_linear_solve":
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
    if ir.name(eqn) == "custom_linear_solve":
        return sum(body is not None for body in eqn.params["jaxprs"][:2])
    return int(ir.name(eqn) == "while")


def carry(eqn: JaxprEqn) -> range:
    """Return which operands of a loop are its carry. Its first results are the carry at the end.

    A linear solve counts as a loop. Its bodies take the right-hand side, the solution, or a vector on the way to it.
    """
    params = eqn.params
    if ir.name(eqn) == "custom_linear_solve":
        return range(sum(params["const_lengths"]), len(eqn.invars))
    if ir.name(eqn) == "while":
        return range(params["cond_nconsts"] + params["body_nconsts"], len(eqn.invars))
    if ir.name(eqn) != "scan":
        return range(0)
    if "num_carry" in params:
        return range(params["num_consts"], params["num_consts"] + params["num_carry"])
    consts, init, _ = params["ft_in"].unpack()
    return range(len(consts), len(consts) + len(init))


def added_up(eqn: JaxprEqn) -> range:
    """Which operands of a loop have a cotangent that is a sum over its steps, or are its carry."""
    if ir.name(eqn) == "chunked_sum":
        return range(len(eqn.invars) if eqn.params["wanted"] else eqn.params["chunks"].shared)
    return range(carry(eqn).stop)


def condition_constants(eqn: JaxprEqn) -> int:
    """The number of leading operands of a while loop that only its condition reads."""
    return int(eqn.params["cond_nconsts"])


def scan_options(eqn: JaxprEqn) -> dict[str, Any]:
    """The keywords with which `jax.lax.scan` makes the same scan."""
    return {name: eqn.params[name] for name in ("length", "reverse", "unroll")}


def iterations(eqn: JaxprEqn) -> int:
    """How often the body of a construct runs, if the jaxpr says so: the length of a scan, else 1."""
    if ir.name(eqn) == "chunked_sum":
        return int(eqn.params["chunks"].number)
    return int(eqn.params.get("length", 1))


def is_platform_dependent(eqn: JaxprEqn) -> bool:
    """Whether an equation has a branch for each platform, of which one is compiled. The last is the default."""
    return bool(eqn.params.get("branches_platforms"))


def function_name(eqn: JaxprEqn) -> str | None:
    """The name of the function that a jit call runs."""
    return eqn.params.get("name")


def asks_for_zeros(eqn: JaxprEqn) -> bool:
    """Whether a custom rule must be told which operands are differentiated.

    A rule with symbolic zeros must. So must one that closes over arrays, because those have no derivative.
    """
    params = eqn.params
    return bool(params.get("symbolic_zeros") or (ir.name(eqn) == "custom_vjp_call" and params["num_consts"]))


def nonlinear_operands(eqn: JaxprEqn) -> int:
    """The number of leading operands in which a linear_call is not linear."""
    return int(eqn.params["num_callee_consts"] + eqn.params["num_res"])


@functools.cache
def cond_copies_operands() -> bool:
    """Whether a cond whose derivative reads an operand returns a copy of it. JAX 0.12 keeps the operand itself."""
    double = lambda x, y: jax.lax.cond(y > 0, jax.numpy.multiply, lambda x, y: x, x, y)
    kept = lambda x, y: jax.tree.leaves(jax.vjp(lambda x: double(x, y), x)[1])
    jaxpr = jax.make_jaxpr(kept)(1.0, 1.0).jaxpr
    return not any(v is jaxpr.invars[1] for v in jaxpr.outvars)


def inlinable(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return the body of a jit call that can be inlined because it pins no sharding, else None."""
    if ir.name(eqn) != "jit":
        return None
    shardings = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    body: ClosedJaxpr = eqn.params["jaxpr"]
    return None if any(isinstance(s, Sharding) for s in shardings) else body


def body_of_call(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return the body of a call that, unless it is differentiated, only evaluates this body. Otherwise None."""
    name = ir.name(eqn)
    if name == "jit" or name not in CONSTRUCTS or not CONSTRUCTS[name].is_call:
        return inlinable(eqn)
    # What is linear by declaration is not inlined, nor the backward pass of a checkpoint.
    if name in ("linear_call", "remat_opt") or ir.params(eqn).get("differentiated"):
        return None
    found = bodies(eqn)
    return found[0] if found else None


def has_body(eqn: JaxprEqn) -> bool:
    """Whether an equation holds a jaxpr, even if it is not a construct."""
    return bool(inner(eqn))


def inner(eqn: JaxprEqn) -> list[tuple[Jaxpr, int]]:
    """Return every jaxpr that an equation of any kind evaluates, and how often, as far as the equation says so."""
    given: Any = ir.params(eqn)
    if ir.name(eqn) == "custom_linear_solve":  # The others are matvec, vecmat and transpose_solve.
        given = given["jaxprs"].solve
    grid = getattr(eqn.params.get("grid_mapping"), "grid", ())  # of a Pallas kernel
    times = iterations(eqn) * math.prod(n for n in grid if isinstance(n, int))
    # The gradient of a product is two more products.
    times *= 3 if ir.name(eqn) == "chunked_sum" and eqn.params["wanted"] else 1
    found = {id(x): x for x in _held(given, 2)}
    high = eqn.params.get("_prim")
    if high is not None and not found and ir.name(eqn) not in CONSTRUCTS.keys() | {"name"}:
        with contextlib.suppress(NameError):  # It communicates over an axis that is not mapped here.
            found[0] = jax.make_jaxpr(high.expand)(*high.in_avals)  # an operation that a user or a library defines
    return [(getattr(x, "jaxpr", x), times) for x in found.values()]


_WITHOUT_JAXPRS = (type, FunctionType, ModuleType, Enum)


def _held(x: Any, depth: int) -> Iterator[Any]:
    """Yield the jaxprs in a tree of parameters, and in the attributes of objects in it, down to a depth."""
    has_eqns = lambda x: hasattr(x, "eqns")
    for leaf in jax.tree.leaves(x, is_leaf=has_eqns):
        if has_eqns(leaf):
            yield leaf
        elif depth and (parts := getattr(leaf, "__dict__", None)) and not isinstance(leaf, _WITHOUT_JAXPRS):
            yield from _held(list(parts.values()), depth - 1)
