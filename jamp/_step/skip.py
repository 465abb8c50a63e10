"""Apply or skip an optimizer step without a second copy of its buffers.

This is a step with momentum, and what is evaluated in its place, all f32[n]:

    mu1 = 0.9 * mu + g                 mu1 = where(finite, 0.9 * mu + g, mu)       where it is defined
    update = -0.1 * mu1                update = where(finite, -0.1 * mu1, -0.0)    from the selected mu1

`jnp.where(grads_finite, new, old)` over finished outputs makes XLA:CPU keep two versions of every buffer, and
`lax.cond` around the step copies its operands on a GPU (JAX 0.10.2, not 0.11.2; jax-ml/jax#39449). Here each output is
selected where it is defined. Later equations read the selected value, so one buffer is enough. If the gradients are
finite, that changes nothing. If not, outputs computed from a selected value are themselves replaced by their old
values. On a GPU and a TPU the kernels are the same as of `jnp.where` over finished outputs. docs/design.md has the
measurements.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.tree_util import keystr

from jamp._jaxprs import build, constructs, inline, interpret, ir, walk
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn
from jamp._jaxprs.primitives import CHEAP
from jamp._leaves import replace_leaves
from jamp._mesh import reshard_like
from jamp._optimizer_state.dtypes import has_other_dtypes
from jamp._step.misuse import check_not_scaled


def update_or_skip(
    grads_finite: Array | None, update: Callable[..., tuple[Any, Any]], grads: Any, state: Any, params: Any
) -> tuple[Any, Any]:
    """Return `update(grads, state, params)` if the gradients are finite, else updates of -0.0 and `state`.

    `grads_finite` is bool[], or None if they were not checked. `update` is a traceable function of pytrees of arrays
    that returns updates and a new state. If the new state of a checked step has another structure, shape or dtype than
    `state`, a ValueError names the leaf.
    """
    if grads_finite is None:
        return update(grads, state, params)
    closed, (updates, new_state) = ir.trace(update, grads, state, params)
    cure = "Let `update` return what `init` made, and jnp.zeros_like in place of None."
    # `keeping_dtypes` brings floating arrays to the dtypes that `init` makes, so they had others before.
    if has_other_dtypes(state, new_state):
        cure = "Write state = optax.tree.cast_like(state, tx.init(params))."
    _check_types(state, new_state, "The inner optimizer's state", cure)
    check_not_scaled(closed, len(jax.tree.leaves(updates)))
    skipped = jax.tree.leaves((jax.tree.map(_no_update, updates), state))
    # Outside jit each operation runs by itself, and jax_debug_nans would raise on the gradients.
    if not (_is_safe_on_nan(closed) and isinstance(grads_finite, jax.core.Tracer)):
        grads = jax.tree.map(lambda g: _select(grads_finite, jnp.asarray(g), jnp.zeros_like(g)), grads)
    outputs = _run(grads_finite, closed, jax.tree.leaves((grads, state, params)), skipped)
    selected: tuple[Any, Any] = replace_leaves((updates, new_state), outputs)
    return selected


def select_new(grads_finite: Array | None, new: Any, old: Any, name: str) -> Any:
    """Return the tree `new` if the gradients are finite (bool[]; None: they were not checked), else `old`.

    It is for arrays that were computed elsewhere, such as BatchNorm's statistics. If the structure, a shape or a dtype
    changed, a ValueError names the leaf, preceded by `name`.
    """
    _check_types(old, new, name, "Of `out, updates = model.apply(..., mutable=...)`, pass `updates['batch_stats']`.")
    return _choose(grads_finite, new, old)


def apply_or_keep(grads_finite: Array | None, params: Any, updates: Any) -> Any:
    """Apply updates if the gradients are finite (bool[]; None: they were not checked), else return `params`.

    An update of -0.0 leaves every number unchanged, but XLA:CPU may flush subnormal numbers to 0 in the addition, also
    inside `jit` (by design, jax-ml/jax#16200), and it may change the payload of a NaN. The selection keeps every bit,
    and `jit` fuses it with the addition.
    """
    with jax.numpy_dtype_promotion("standard"):  # Optax adds float32 updates to 16-bit parameters.
        new = optax.apply_updates(params, updates)
    return _choose(grads_finite, new, params)


def _choose(grads_finite: Array | None, new: Any, old: Any) -> Any:
    if grads_finite is None:
        return new
    return jax.tree.map(lambda x, y: _select(grads_finite, jnp.asarray(x), jnp.asarray(y)), new, old)


def _is_safe_on_nan(closed: ClosedJaxpr) -> bool:
    """Whether an update may be evaluated on NaN.

    If it has a loop that may never end, a callback or a factorisation, a skipped update gets gradients of zero.
    Otherwise the gradients are read without a selection, and their norm can be computed at the same time as the check
    instead of after it.
    """
    inlined = (e for eqn in closed.jaxpr.eqns for e in walk.through_calls(eqn, constructs.inlinable))
    return all(ir.name(e) in CHEAP for e in inlined)


def _no_update(update: Any) -> complex:
    """Return the update that leaves a parameter unchanged: p + -0.0 is p, also for -0.0, unless p is flushed."""
    if jnp.issubdtype(update.dtype, jnp.complexfloating):
        return complex(-0.0, -0.0)
    return -0.0 if jnp.issubdtype(update.dtype, jnp.floating) else 0


def _run(grads_finite: Array, closed: ClosedJaxpr, args: Sequence[Any], skipped: Sequence[Any]) -> list[Any]:
    """Evaluate `closed` and select its i-th output against `skipped[i]`.

    Calls that return outputs are inlined, because a call hides the definitions inside it: a jitted update costs three
    times as much.
    """
    opened = build.without_constants(closed)
    returned = {v for v in opened.jaxpr.outvars if not ir.is_literal(v)}

    def enter(eqn: JaxprEqn) -> ClosedJaxpr | None:
        body = constructs.inlinable(eqn) if not returned.isdisjoint(eqn.outvars) else None
        returned.update(v for v in (body.jaxpr.outvars if body else ()) if not ir.is_literal(v))
        return body

    eqns, outputs = inline.flattened(opened, enter)
    env = dict(zip(opened.jaxpr.invars, [*closed.consts, *args], strict=True))
    # An output may be an input, a literal, or returned twice (a momentum that is also the update). A variable is
    # selected for one output position where it is defined. Its other positions are selected at the end.
    position = {v: i for i, v in enumerate(outputs) if not ir.is_literal(v) and v not in env}
    last_use = ir.last_uses(eqns, outputs)
    pending: list[JaxprEqn] = []

    def evaluate(some: list[JaxprEqn], end: int) -> None:
        """Evaluate equations and keep the variables that equations from `end` on read."""
        interpret.evaluate(some, env, lambda v: last_use.get(v, -1) >= end)

    for index, eqn in enumerate(eqns, start=1):
        pending.append(eqn)
        selected = [v for v in eqn.outvars if v in position]
        if selected or index == len(eqns):
            evaluate(pending, index)
            env.update({v: _select(grads_finite, env[v], skipped[position[v]]) for v in selected})
            pending = []
    done = set(position.values())
    values = [ir.read(env, v) for v in outputs]
    return [
        new if i in done or new is old else _select(grads_finite, new, old)
        for i, (new, old) in enumerate(zip(values, skipped, strict=True))
    ]


def _select(grads_finite: Array, new: Any, old: Any) -> Any:
    if jnp.issubdtype(new.dtype, jax.dtypes.prng_key):
        # `new` was split from `old`, and jax_debug_key_reuse counts a selection between keys as a use of both.
        data = _select(grads_finite, jax.random.key_data(new), jax.random.key_data(old))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(new))
    if isinstance(old, (int, float, complex)):
        old = lax.full_like(new, old)
    elif not (sharding := jax.typeof(new).sharding).mesh.empty and jax.typeof(old).sharding != sharding:
        # On Explicit axes, `init` may have made a state that is not sharded like the parameters.
        old = jax.sharding.reshard(old, sharding)
    return lax.select(reshard_like(new, grads_finite), new, old)


def _check_types(before: Any, after: Any, name: str, cure: str) -> None:
    """Raise ValueError if a tree changed its structure, a shape or a dtype."""
    old, new = ({keystr(path): _type(x) for path, x in jax.tree.leaves_with_path(tree)} for tree in (before, after))
    # The structure is compared last. It also differs between a dict and a FrozenDict of the same leaves.
    paths = [*(old | new), ".structure"]
    old[".structure"], new[".structure"] = (str(jax.tree.structure(tree)) for tree in (before, after))
    for path in paths:
        if old.get(path) != new.get(path):
            raise ValueError(f"{name}{path} must stay {old.get(path)}, got {new.get(path)}. {cure}")


def _type(x: Any) -> str:
    return f"{jnp.result_type(x)}{list(jnp.shape(x))}"
