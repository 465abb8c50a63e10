"""`master_params`: 16-bit parameters with float32 masters in the optimizer state."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr, tree_map_with_path
from jax.typing import DTypeLike

from jamp._cast import cast_leaf, check_floating, is_floating
from jamp._loss_scale.scaler_state import check_kind, check_optimizer
from jamp._optimizer_state.dtypes import keeping_dtypes
from jamp._optimizer_state.params import compute_update
from jamp._optimizer_state.split_masters import (
    MasterParamsState as MasterParamsState,
    check_given,
    check_inner,
    with_split_masters,
)

_CURE = (
    "For split masters: jamp.interop.join_masters(state, params). For the inner optimizer's: "
    "tx.init(float32_params)._replace(inner_state=state)."
)


def master_params(
    inner: optax.GradientTransformation, dtype: DTypeLike = jnp.float32, *, split: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Keep float32 masters of float16 or bfloat16 parameters in the optimizer state.

    A step of 1e-4 on a bfloat16 parameter of 1.0 is always lost in rounding. Here `inner` steps the masters, and
    `optax.apply_updates(params, updates)` gives `masters.astype(params.dtype)`. If an update is more than twice as
    large as the new parameter, the addition may round differently, and the next step corrects it. No update leads back
    from a parameter that has become inf.

    With a loss scale it is the optimizer inside: `jamp.loss_scaled(jamp.master_params(inner))`.

    The masters start as the parameters that `init` is given. If you have float32 parameters, pass those and cast them
    with `jamp.cast_floating` afterwards. To load other parameters later, call `init` again.

    With `split=True` the state holds 16 bits a parameter, not 32: a bfloat16 parameter is the upper half of its
    float32 master, rounded to nearest with ties away from zero, and the state the lower half. A step equals that with
    whole masters, except that those round ties to even, and that XLA may round the last digits of a master differently
    in another program: 20 steps of schedule-free AdamW end some dozens of units in the last place apart.

    Save parameters and state together: the low bits of another step are not detected, and move each master by up to a
    spacing of bfloat16. To start from float32 masters, or to go back to them, use `jamp.interop.split_masters` and
    `join_masters`.

    Args:
      inner: The optimizer. It sees gradients and parameters in `dtype`.
      dtype: The dtype of the masters. Wider leaves, and leaves that are not floating, keep their own.
      split: Whether parameters and state share the bits of the masters. It takes bfloat16 parameters and float32
        masters. Wider parameters are their own masters.

    Returns:
      An Optax transformation whose `update` needs `params`. Its state is a `MasterParamsState`, or with `split` a
      `SplitMasterParamsState`, sharded like the parameters.

    Raises:
      TypeError: From `update`, if the state is not from `init`, or its masters or low bits have other dtypes.
      ValueError: If a dtype is not floating, or not float32 with `split`. From `init` and `update`, if a parameter is
        float16 or float8 and `split` is set. From `update`, without `params`, or with `split` if a parameter is
        bfloat16 and was not for `init`, or the other way round.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> tx, params = jamp.master_params(optax.sgd(1e-4)), jnp.ones(1, jnp.bfloat16)
      >>> state = tx.init(params)
      >>> for _ in range(1000):
      ...     updates, state = tx.update(-jnp.ones(1), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> params
      Array([1.10156], dtype=bfloat16)

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.1. Split: Zamirai et al., Revisiting BFloat16
      Training, arXiv:2010.06192; Gonzalez Ortiz et al., FlashOptim, arXiv:2602.23349.
    """
    check_optimizer(inner, "jamp.master_params({})")
    if not split:
        return _with_masters(inner, dtype)
    if check_floating("dtype", dtype) != jnp.float32:
        raise ValueError(f"Split masters are float32, got dtype={dtype!r}. Leave dtype out, or use split=False.")
    return with_split_masters(inner)


def _with_masters(inner: optax.GradientTransformation, dtype: DTypeLike) -> optax.GradientTransformationExtraArgs:
    inner, dtype = keeping_dtypes(inner), check_floating("dtype", dtype)

    def make_master(p: Any) -> Any:
        # Also copies float32 parameters, because a donated parameter and its master must not share a buffer.
        return jnp.array(cast_leaf(p, dtype), copy=True)

    def init(params: optax.Params) -> MasterParamsState:
        masters = jax.tree.map(make_master, params)
        return MasterParamsState(masters, check_inner(inner.init(masters)))

    def update(
        updates: optax.Updates, state: MasterParamsState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, MasterParamsState]:
        check_kind(state, MasterParamsState, _CURE)
        check_given(params)
        _check_masters(state.master_params, params, dtype)
        grads = jax.tree.map(lambda g: cast_leaf(g, dtype), updates)
        steps, inner_state = inner.update(grads, state.inner_state, state.master_params, **extra_args)
        masters = optax.apply_updates(state.master_params, steps)

        def to_master(step: Any, master: Any, p: Any) -> Any:
            return compute_update(p.astype(master.dtype), master) if is_floating(p) else step

        return jax.tree.map(to_master, steps, masters, params), MasterParamsState(masters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_masters(masters: Any, params: Any, dtype: DTypeLike) -> None:
    """Raise TypeError if a master has another dtype, such as one cast with its state, or another parameter's shape."""

    def check(path: Any, master: Any, p: Any) -> None:
        wanted = jnp.result_type(cast_leaf(master, dtype))
        if (jnp.result_type(master), jnp.shape(master)) != (wanted, jnp.shape(p)):
            got = f"{jnp.result_type(master).name}{list(jnp.shape(master))}"
            expected = f"The master of {keystr(path) or 'the array'} must be {wanted.name}{list(jnp.shape(p))}"
            raise TypeError(f"{expected}, got {got}. Restore into tx.init(params).")

    tree_map_with_path(check, masters, params)
