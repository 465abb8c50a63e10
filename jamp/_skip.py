"""Run a step or skip it, for the memory traffic of the step alone.

`jnp.where(ok, new, old)` over finished outputs makes XLA keep two versions of every buffer, and `lax.cond` around the
step copies its operands on GPU. Here each output is selected in the place that defines it, so that what follows reads
the selected value and one buffer serves. Where `ok` holds, that changes nothing; where it does not, what is computed
from a selected value is masked at its own definition. docs/design.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.tree_util import keystr

from jamp import _jaxpr

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn


# What takes nan as it takes any number. With anything else in the update (a loop, which may never end, a callback, a
# factorisation) a skipped update gets zeros for its gradients. Where it need not, the gradients are read without a
# selection, and their norm can be computed beside the check instead of after it.
_TAKES_NAN = (
    "abs add and broadcast_in_dim convert_element_type copy div eq exp ge gt integer_pow le log lt max min mul ne neg "
    "not or pow reduce_max reduce_sum reshape rsqrt select_n sign sqrt square squeeze sub transpose"
)


def update_or_skip(
    ok: Array, update: Callable[..., tuple[Any, Any]], grads: Any, state: Any, params: Any
) -> tuple[Any, Any]:
    """`update(grads, state, params)`, which returns updates and a new state, where `ok`; else nothing and `state`.

    Args:
      ok: bool[], whether to run the update.
      update: A traceable function of pytrees of arrays.
      grads: The gradients, a pytree of arrays.
      state: The state, a pytree of arrays, kept on a skip.
      params: The parameters, a pytree of arrays.

    Raises:
      ValueError: If the new state has another structure, shape or dtype than `state`. The message names the leaf.
    """
    closed, (updates, new_state) = _jaxpr.trace(update, grads, state, params)
    _check_kept(new_state, state)
    skipped = jax.tree.leaves((jax.tree.map(_nothing, updates), state))
    # Outside jit each operation runs by itself, under jax_debug_nans too.
    if not (_takes_nan(closed) and isinstance(ok, jax.core.Tracer)):
        grads = jax.tree.map(lambda g: lax.select(ok, g, jnp.zeros_like(g)), grads)
    outputs = _evaluate(ok, closed, jax.tree.leaves((grads, state, params)), skipped)
    unflattened: tuple[Any, Any] = jax.tree.unflatten(jax.tree.structure((updates, new_state)), outputs)
    return unflattened


def _takes_nan(closed: ClosedJaxpr) -> bool:
    inner = [(eqn.primitive.name, _jaxpr.inlinable(eqn)) for eqn in closed.jaxpr.eqns]
    return all(name in _TAKES_NAN.split() if body is None else _takes_nan(body) for name, body in inner)


def _nothing(update: Any) -> complex:
    """What leaves a parameter as it is, bit for bit: p + -0.0 is p for every p, also for p = -0.0."""
    if jnp.issubdtype(update.dtype, jnp.complexfloating):
        return complex(-0.0, -0.0)
    return -0.0 if jnp.issubdtype(update.dtype, jnp.floating) else 0


def _evaluate(ok: Array, closed: ClosedJaxpr, args: Sequence[Any], skipped: Sequence[Any]) -> list[Any]:
    """The outputs of `closed`, the i-th selected against `skipped[i]` unless that is None."""
    jaxpr = closed.jaxpr
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))
    # A variable may be an input, a literal, or returned twice (a momentum that is also the update). In its place of
    # definition it is selected for one position only; the other positions are selected at the end.
    position = {
        v: i
        for i, v in enumerate(jaxpr.outvars)
        if not _jaxpr.is_literal(v) and v not in env and skipped[i] is not None
    }
    last_use = _jaxpr.last_uses(jaxpr)
    pending: list[JaxprEqn] = []

    def evaluate(eqns: list[JaxprEqn], end: int) -> None:
        """Evaluate `eqns` for what the equations from `end` on read."""
        _jaxpr.evaluate(eqns, env, lambda v: last_use.get(v, -1) >= end)

    for index, eqn in enumerate(jaxpr.eqns):
        selected = [v for v in eqn.outvars if v in position]
        if not selected:
            pending.append(eqn)
            continue
        body = _jaxpr.inlinable(eqn)
        if body is None:
            evaluate([*pending, eqn], index + 1)
            env.update({v: _select(ok, env[v], skipped[position[v]]) for v in selected})
        else:
            # A call would hide the definitions inside it: a jitted update costs three times an inlined one.
            evaluate(pending, index)
            inner = [skipped[position[v]] if v in position else None for v in eqn.outvars]
            outputs = _evaluate(ok, body, [_jaxpr.read(env, v) for v in eqn.invars], inner)
            env.update(zip(eqn.outvars, outputs, strict=True))
        pending = []
    evaluate(pending, len(jaxpr.eqns))

    done = {*position.values(), *(i for i, old in enumerate(skipped) if old is None)}
    values = [_jaxpr.read(env, v) for v in jaxpr.outvars]
    return [
        new if i in done or new is old else _select(ok, new, old)
        for i, (new, old) in enumerate(zip(values, skipped, strict=True))
    ]


def _select(ok: Array, new: Any, old: Any) -> Any:
    if isinstance(old, (int, float, complex)):
        old = lax.full_like(new, old)
    elif not (sharding := jax.typeof(new).sharding).mesh.empty and jax.typeof(old).sharding != sharding:
        # Over explicit axes, a state that `init` made without looking at the parameters' sharding.
        old = jax.sharding.reshard(old, sharding)
    return lax.select(ok, new, old)


def _check_kept(new_state: Any, state: Any) -> None:
    new, old = ({keystr(path): x for path, x in jax.tree.leaves_with_path(tree)} for tree in (new_state, state))
    kept = (
        "so a skipped step could not keep it. Make `update` return the structure, shapes and dtypes that `init` made."
    )
    before: Any = jax.tree.structure(state)
    after: Any = jax.tree.structure(new_state)
    if before != after:
        lost, gained = ([path for path in a if path not in b] for a, b in ((old, new), (new, old)))
        raise ValueError(
            f"The inner optimizer changed the structure of its state, {kept} Lost: {', '.join(lost) or None}; "
            f"gained: {', '.join(gained) or None}; before: {before}; after: {after}."
        )
    for path, y in old.items():
        if (new[path].shape, new[path].dtype) != (jnp.shape(y), jnp.result_type(y)):
            raise ValueError(
                f"The inner optimizer changed its state{path} from {jnp.result_type(y)}{list(jnp.shape(y))} to "
                f"{new[path].dtype}{list(new[path].shape)}, {kept}"
            )
