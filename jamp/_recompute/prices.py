"""The price of a value: its bytes if it is kept, and the FLOPs to compute it again."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jamp._jaxprs import constructs, ir, walk
from jamp._jaxprs.ir import JaxprEqn
from jamp._jaxprs.manual_axes import shards_of
from jamp._jaxprs.primitives import (
    ARITHMETIC,
    COLLECTIVES,
    CUBIC,
    ENCODED_PRODUCTS,
    EXPENSIVE,
    MOVING,
    OTHERS,
    PRODUCTS,
)
from jamp._products.flops import flops
from jamp._products.product import name_of
from jamp._recompute.kept import nbytes
from jamp._recompute.stores import Store

_NEVER_AGAIN = COLLECTIVES | frozenset(
    ("after_all", "create_token", "get", "random_gamma", "rng_bit_generator", "rng_uniform", "swap")
)
UNKNOWN = 1e18  # the FLOPs of a primitive that jamp does not know, which is therefore kept until last
_RANDOM = 60.0  # FLOPs for 32 random bits: threefry has 20 rounds of three operations for two numbers
# FLOPs for a byte that is gathered from other devices: as many as one computes meanwhile. By their data sheets, a TPU
# v5e computes 1,000 in bfloat16, and an H100 on NVLink 2,200.
_GATHERED = 2000.0


def cost(eqn: JaxprEqn, of_arguments: bool = False) -> float:
    """The FLOPs to compute an equation again, or infinity if it must not be computed again.

    A collective must not, except an all_gather of an argument, as FSDP has for each layer.
    """
    name = name_of(eqn)
    if of_arguments and is_gather(eqn):
        return _GATHERED * device_bytes(eqn.outvars[0])
    inside = (e for body, _ in constructs.inner(eqn) for e in walk.all_equations(body))
    if not all(map(_is_repeatable, (eqn, *inside))):
        return math.inf
    if _is_random(eqn):
        return _RANDOM * sum(nbytes(v) / 4 for v in eqn.outvars)
    known = ARITHMETIC | CUBIC.keys() | ENCODED_PRODUCTS | EXPENSIVE | MOVING | OTHERS | PRODUCTS
    is_known = constructs.has_body(eqn) or name in known
    return flops(eqn) if is_known else UNKNOWN


def _is_repeatable(eqn: JaxprEqn) -> bool:
    """Whether computing an equation again gives the same results. Its bodies are not entered."""
    if _is_random(eqn):
        dtypes = [aval.dtype for aval in ir.avals(eqn.invars)]
        # The bits of other generators may depend on how a program is compiled.
        return all(str(dtype) == "key<fry>" for dtype in dtypes if jnp.issubdtype(dtype, jax.dtypes.prng_key))
    return name_of(eqn) not in _NEVER_AGAIN and not eqn.effects


def _is_random(eqn: JaxprEqn) -> bool:
    name = ir.name(eqn)
    return name.startswith(("random_", "threefry")) and name != "random_gamma"


def is_gather(eqn: JaxprEqn) -> bool:
    """Whether an equation gathers the parts of an array from other devices."""
    return ir.name(eqn) in ("all_gather", "all_gather_invariant")


def device_bytes(v: Any, store: Store = Store.ITSELF) -> float:
    """The bytes of what is kept of a value on one device, as far as its type says."""
    is_token = getattr(v.aval, "sharding", None) is None
    return 0.0 if is_token else store.nbytes(v.aval) / math.prod(shards_of(v.aval))
