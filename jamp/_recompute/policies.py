"""What JAX's next checkpoint (`jax_remat3`) does not do yet in some versions of JAX.

The page "A model that does not fit" has a table, which tests/test_checkpoint_policies.py measures.
"""

from typing import Any

import jax
from jax import checkpoint_policies

from jamp._jaxprs import ir, walk
from jamp._jaxprs.ir import ClosedJaxpr
from jamp._jaxprs.source import user_line
from jamp._recompute.budget import MemoryBudget

_BACK = 'jax.config.update("jax_remat3", False)'


def check_version(budget: MemoryBudget) -> None:
    """Raise if the checkpoints of a budget fail in this JAX: in 0.10.2, of conds, and in a vmap."""
    if budget != 1.0 and ir.is_next_checkpoint() and jax.__version_info__ < (0, 11):
        raise NotImplementedError(
            f"A memory budget under jax_remat3 needs JAX 0.11.0 or later, got memory_budget={budget!r} and JAX "
            f"{jax.__version__}. Update JAX, or write {_BACK}."
        )


def warnings_of_policies(closed: ClosedJaxpr) -> list[str]:
    """A warning for each policy that this JAX ignores."""
    if not ir.is_next_checkpoint() or jax.__version_info__ >= (0, 11, 2):
        return []  # From 0.11.2 on, JAX asks every policy about some operations.
    found = [(eqn, ir.params(eqn)["policy"]) for eqn in walk.all_equations(closed.jaxpr) if _is_checkpoint(eqn)]
    lines = {
        f"{getattr(policy, '__qualname__', type(policy).__name__)} of the jax.checkpoint at {user_line(eqn)}": None
        for eqn, policy in found
        if not _is_honoured(policy)
    }
    return [
        f"JAX {jax.__version__} ignores the policy {line} under jax_remat3. Give values to keep a checkpoint_name for "
        f"jax.checkpoint_policies.save_only_these_names, update to JAX 0.12, or write {_BACK}."
        for line in lines
    ]


def _is_checkpoint(eqn: ir.JaxprEqn) -> bool:
    return ir.name(eqn) == "remat2" and "policy" in ir.params(eqn)


def _is_honoured(policy: Any) -> bool:
    """Whether JAX 0.10.2 to 0.11.1 do what a policy says. They know it by identity, or by its class."""
    known = (
        None,
        checkpoint_policies.nothing_saveable,
        checkpoint_policies.dots_saveable,
        checkpoint_policies.dots_with_no_batch_dims_saveable,
    )
    of_jax = type(policy).__module__.split(".")[0] == "jax"
    return of_jax or any(policy is x for x in known)
