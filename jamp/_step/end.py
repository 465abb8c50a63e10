"""The end of a backward pass that no reverse pass may enter."""

import functools
from typing import Any

from jax.interpreters import ad, batching, mlir

from jamp import _jaxpr


@functools.cache
def end() -> Any:
    """The identity, as a primitive. Its transpose raises a ValueError that is about `jamp.scaled`.

    Without it, JAX would say that a `while_loop` cannot be differentiated.
    """
    primitive = _jaxpr.core().Primitive("scaled_gradient")
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda aval: aval)
    mlir.register_lowering(primitive, lambda _, x: [x])
    batching.defvectorized(primitive)
    ad.deflinear2(primitive, _refuse)
    return primitive


def _refuse(*_: Any) -> None:
    raise ValueError(
        "A gradient of a gradient of jamp.scaled: a second reverse pass cannot pass through the loop that tries again "
        "with a smaller scale. Write jamp.scaled(fun, retries=0). jax.jacfwd of a gradient needs no such change."
    )
