"""Straight-line code out of calls: the segments that jamp made before, and the user's jit calls."""

from jamp._jaxprs import build, constructs, inline, ir, walk
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn
from jamp._jaxprs.rewrite import Body, Replaced, Rewriter
from jamp._jaxprs.source import in_scope

SEGMENT = "jamp.segment"  # the name scope of a call that `segment_call.py` made
CODED_RULE = "jamp.coded_rule"  # the name scope of a derivative rule that keeps values in 8 bits
KEPT = "jamp.kept"  # the name of the values that a segment keeps


def opened(closed: ClosedJaxpr, keep_names: bool = True) -> ClosedJaxpr:
    """Return a function in which the segments that jamp made are straight-line code again, of which nothing is coded.

    Without `keep_names`, the user's `checkpoint_name`s go too, but for those in a `jax.checkpoint`.
    """

    def rule(eqn: JaxprEqn, _: Body) -> Replaced | None:
        name = ir.name(eqn)
        is_dropped = name == "name" and (not keep_names or ir.params(eqn)["name"] == KEPT)
        if is_dropped or name == "cotangents_behind_barrier":
            return Replaced([], eqn.invars)
        if name == "with_tangents_of":  # What has the tangents is computed as the function is.
            n = len(eqn.outvars)
            return Replaced([], eqn.invars[n : 2 * n])
        body = None
        if name == "jit" and in_scope(eqn, SEGMENT):
            body = _segment_body(eqn)
        if name == "custom_vjp_call" and in_scope(eqn, CODED_RULE):
            body = constructs.body_of_call(eqn)
        return Replaced(*inline.inlined(rewriter(body), eqn.invars)) if body else None

    rewriter = Rewriter(rule, enters=constructs.differentiates_bodies)
    found = rewriter(closed)
    if any(ir.name(eqn) == "with_tangents_of" for eqn in walk.all_equations(closed.jaxpr)):
        found = build.without_dead_code(found)  # The codes are read by nothing now.
    return found


def without_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a function whose jit calls are inlined, but for those that pin a sharding."""

    def rule(eqn: JaxprEqn, _: Body) -> Replaced | None:
        body = constructs.inlinable(eqn)
        if body is None:
            return None
        eqns, results = inline.inlined(rewriter(body), eqn.invars)
        return Replaced([build.in_scope_of(x, eqn) for x in eqns], results)

    rewriter = Rewriter(rule, enters=constructs.differentiates_bodies)
    return rewriter(closed)


def _segment_body(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The code of a segment that jamp made, in the calls around it."""
    body = constructs.body_of_call(eqn)
    while body and len(body.jaxpr.eqns) == 1 and ir.name(body.jaxpr.eqns[0]) in ("custom_jvp_call", "remat2"):
        (call,) = body.jaxpr.eqns
        inner = constructs.body_of_call(call)
        if inner is None or list(call.outvars) != list(body.jaxpr.outvars):
            return None
        eqns, results = inline.inlined(inner, call.invars)  # JAX may have made arguments of constants
        constants = dict(zip(body.jaxpr.constvars, body.consts, strict=True))
        body = build.closed_jaxpr(constants, body.jaxpr.invars, results, eqns)
    return body
