"""Names for the values of a segment. A checkpoint keeps those that have a name which its policy knows."""

import dataclasses
import functools
from collections.abc import Mapping, Set

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.interpreters import ad

from jamp._jaxprs import build, ir
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn, Var
from jamp._jaxprs.primitives import PRODUCTS
from jamp._products.product import equation, name_of, of
from jamp._products.quantized import has_narrow_sums
from jamp._recompute.segments import Segment
from jamp._recompute.stored import with_rounding


def with_names(segment: Segment, names: Mapping[Var, str], stored: Set[Var] = frozenset()) -> ClosedJaxpr:
    """The code of a segment, in which some values have a name (`checkpoint_name`).

    Those that are `stored` are rounded to their dtypes for their readers in it, too.
    """
    eqns: list[JaxprEqn] = []
    for eqn in with_rounding(segment.eqns, stored):
        if (product := of(eqn)) and has_narrow_sums(product) and (v := eqn.outvars[0]) in names:
            eqns.append(equation(dataclasses.replace(product, kept_as=names[v]), eqn.invars, v, eqn))
            continue
        results = [core.Var(v.aval) if v in names else v for v in eqn.outvars]
        eqns.append(eqn.replace(outvars=results))
        for value, v in zip(results, eqn.outvars, strict=True):
            if v in names:
                name = ir.with_name_for(_name_equation(names[v], ir.is_next_checkpoint()), v.aval).replace(
                    invars=[value], outvars=[v]
                )
                eqns.append(build.located(name, eqn))
    return build.closed_jaxpr({}, segment.inputs, segment.outputs, eqns)


def computed_twice(segment: Segment) -> set[Var]:
    """Return the values of a segment that both passes must round alike: its results, and results of products and casts.

    A kept value, such as the maximum of a softmax, must fit the values that are computed again from them.
    """
    is_rounding = lambda eqn: name_of(eqn) in PRODUCTS or ir.name(eqn) == "convert_element_type"
    return {*segment.outputs, *(v for eqn in segment.eqns if is_rounding(eqn) for v in eqn.outvars)}


@functools.cache
def _name_equation(name: str, is_next: bool) -> JaxprEqn:
    """The equation of a `checkpoint_name`, which is another one under JAX's next checkpoint."""
    del is_next
    eqn = jax.make_jaxpr(lambda x: checkpoint_name(x, name))(0.0).eqns[0]
    if eqn.primitive.name == "name":  # JAX has no such rule, and jax.linear_transpose would fail.
        ad.primitive_transposes.setdefault(eqn.primitive, lambda cotangent, x, **_: [cotangent])
    return eqn
