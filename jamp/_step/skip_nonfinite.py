"""`skip_nonfinite`, an Optax wrapper that skips steps whose gradients are not finite, in any precision."""

from typing import Any

import optax

from jamp._loss_scale.scaler_state import check_optimizer
from jamp._loss_scale.static import StaticLossScale
from jamp._step.loss_scaled import loss_scaled


def skip_nonfinite(
    inner: optax.GradientTransformation, *, axis_name: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Skip steps whose gradients hold an inf or NaN, in any precision. Nothing is scaled.

    It is `jamp.loss_scaled(inner, jamp.StaticLossScale(1.0))`, with the same state. So checkpoints of one continue
    with the other, and `get_grads_finite`, `metrics`, `History` and `check_health` work. Take the gradients from
    `jax.grad`, or from `jax.grad(jamp.scaled(fun))` in float16.

    On a skip, `update` returns updates of -0.0 and leaves the inner state as it is: no count, no schedule, no moment
    changes. Wrap the whole chain, because what stands outside the wrapper is not skipped. The check reads the
    gradients alone. To check the loss too, pass `grads_finite=jamp.all_finite((loss, grads))` to `update`.

    Compared with `optax.apply_if_finite(inner, n)`, which applies a bad step when more than n steps in a row are bad,
    it never applies one. If every step is bad, training stands still: `check_health` raises an error. Replicas of a
    `shard_map` can skip together.

    Gradients and parameters of 16 bit reach `inner` as float32, as in `loss_scaled`. So the moments and the updates are
    float32. Adam's moments take 8 bytes a parameter, where plain Optax makes 16-bit ones of 4. Inside,
    `jamp.quantized_state(tx)` takes about 2, and `jamp.stochastic_rounding(tx, state_dtype=jnp.bfloat16)` 4, with
    parameters that are rounded stochastically. Optax's `mu_dtype=jnp.bfloat16` keeps the first moment in 16 bit.

    What it costs: each step reads the gradients once more, and updates a flag and a few counts. It keeps no copy of the
    parameters. With a dynamic scale, which also counts finite steps and picks a scale, [AdamW took 1.19 times as
    long](../benchmarks/times.md#a-step-that-may-be-skipped) as plain Optax on an H200.

    Args:
      inner: The optimizer.
      axis_name: Name(s) of the `shard_map`, `pmap` or `vmap` axes whose replicas must skip together.

    Returns:
      An Optax transformation whose state is a `LossScaledState`. Its `update` also takes `grads_finite` (bool[]), which
      replaces the check.

    Raises:
      TypeError: If `inner` is not an optimizer. From `update`, if the state is not from `init`.
      ValueError: As for `loss_scaled`.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> tx = jamp.skip_nonfinite(optax.adamw(1e-3))
      >>> params = jnp.ones(2)
      >>> updates, state = tx.update(jnp.array([1.0, jnp.nan]), tx.init(params), params)
      >>> optax.apply_updates(params, updates).tolist(), int(jamp.metrics(state)["overflow_steps"])
      ([1.0, 1.0], 1)
    """
    check_optimizer(inner, "jamp.skip_nonfinite({})")
    return loss_scaled(inner, StaticLossScale(1.0), axis_name=axis_name)
