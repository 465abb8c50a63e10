"""The warning of a loss scale that a traced function holds as a constant."""

import warnings
from typing import Any

import jax

from jamp._staging import is_kept
from jamp._step.find import adapts
from jamp._step.stacklevel import users_stacklevel


def warn_if_frozen(loss: Any, loss_scale_state: Any) -> None:
    """Warn if a loss that is traced is scaled by an adapting loss scale that is not.

    It is no error, because a function that is traced anew for each step, such as the body of a scan outside `jit`, gets
    the current scale.
    """
    is_constant = _is_traced(loss) and not _is_traced(loss_scale_state.loss_scale)
    if adapts(loss_scale_state) and is_constant and is_kept():
        warnings.warn(
            "The loss scale is a constant of the function that is being traced, because the optimizer state is not one "
            "of its arguments. A compiled function keeps the first scale forever, and skips every step if that "
            "overflows. Pass the state to the jitted step, and make jamp.value_and_grad(loss_fn, opt_state) or "
            "jamp.scale_loss(loss, opt_state) inside it.",
            stacklevel=users_stacklevel(),
        )


def _is_traced(tree: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))
