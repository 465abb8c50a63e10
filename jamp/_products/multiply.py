"""Products by JAX's own primitives, so that checkpoint policies and reports recognize them.

XLA:CPU lacks a dot_general from bfloat16 to float32 for some layouts of the result ("Unsupported element type for
DotThunk", jaxlib 0.10.0 to 0.12.0). There its operands are cast to float32, which gives the same sums. The platform of
the lowered program decides.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax


def multiply(primitive: Any, operands: Sequence[Array], params: dict[str, Any], dtype: Any) -> Array:
    """A product with a result of this dtype."""
    bind = functools.partial(primitive.bind, **{**params, "preferred_element_type": np.dtype(dtype)})
    if primitive.name == "dot_general" and dtype == jnp.float32 and operands[0].dtype == jnp.bfloat16:
        cpu = lambda *xs: bind(*(x.astype(jnp.float32) for x in xs))
        found: Array = lax.platform_dependent(*operands, cpu=cpu, default=bind)
    else:
        found = bind(*operands)
    return found
