"""The contract of everything that steps a model under a loss scale, and one small adapter for each.

An adapter makes `(carry, step, kept)` for a loss scale: `step(carry, x)` is a training step, and `kept(carry)` is what
a skipped step must leave unchanged, bit for bit. A batch that holds inf or NaN overflows.

The contract of a wrapper:

1. It starts with `inner = optax.with_extra_args_support(inner)`, returns a `GradientTransformationExtraArgs`, passes
   unknown extra args on and requires none.
2. Its state is a NamedTuple made in `init`, which only maps over `params`. No two arrays of it share a buffer, and no
   leaf changes its dtype.
3. On an overflow the updates are -0.0 and the inner state keeps its bits. The inner optimizer gets float32 gradients
   and parameters.
4. It works inside and around `chain`, `inject_hyperparams`, `partition`, `MultiSteps`, `tree.map_params`, under
   `scan`, `vmap` and donation.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from steps import with_masters
from trees import assert_close, assert_equal, avals, bits

import jamp

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
BATCHES = {"good": X, "inf": X * np.float32(np.inf), "nan": np.where(X > 0.9, np.float32(np.nan), X)}
DYNAMIC = jamp.DynamicLossScale(init_scale=2.0**10)
INNER = optax.sgd(optax.linear_schedule(0.1, 0.01, 5), momentum=0.9)  # its momentum is also its update


def params(dtype=jnp.float32):
    return {"w": jnp.array([0.5, -0.0, 4.0], dtype), "b": jnp.array(-0.0, dtype)}


def loss_fn(p, x):
    return jnp.mean((x @ p["w"].astype(jnp.float32) + p["b"].astype(jnp.float32) - 1.0) ** 2)


def plain(tx=INNER, dtype=jnp.float32, loss_fn=loss_fn):
    """The step of a trainer that knows of no loss scale."""

    def step(carry, x):
        p, state = carry
        updates, state = tx.update(jax.grad(loss_fn)(p, x), state, p)
        return optax.apply_updates(p, updates), state

    return (params(dtype), tx.init(params(dtype))), step if dtype == jnp.float32 else promoting(step)


def wrapper(wrap, loss_scale=DYNAMIC, axis_name=None, dtype=jnp.float32, unscale=False):
    """An Optax wrapper."""
    tx = wrap(INNER, loss_scale, axis_name=axis_name, unscale=unscale)

    def step(carry, x):
        p, state = carry
        scaled = lambda p: jamp.scale_loss(loss_fn(p, x), state)
        grads = jax.grad(scaled)(p) if unscale else jamp.grad(loss_fn, state)(p, x)
        updates, state = tx.update(grads, state, p)
        return optax.apply_updates(p, updates), state

    return (params(dtype), tx.init(params(dtype))), step, lambda carry: (carry[0], carry[1].inner_state)


def scaled(loss_scale=DYNAMIC, axis_name=None, dtype=jnp.float32):
    """That step with `jamp.scaled(loss_fn)`, under a wrapper that skips what is left.

    The trainer averages over one gradient, so that a loss scale that adapts is not recognized as a mistake.
    """
    tx = optax.chain(optax.scale(1.0), jamp.loss_scaled(INNER, loss_scale, axis_name=axis_name))
    return *plain(tx, dtype, jamp.scaled(loss_fn)), lambda carry: (carry[0], carry[1][1].inner_state)


def grad_scaler(loss_scale=DYNAMIC, axis_name=None, dtype=jnp.float32):
    """GradScaler, which takes gradients that the replicas have averaged."""

    def step(carry, x):
        p, state, scaler = carry
        grads = scaler.value_and_grad(loss_fn)(p, x)[1]
        grads = grads if axis_name is None else jax.lax.pmean(grads, axis_name)
        return scaler.step(INNER, state, p, grads=grads)[:3]

    return (params(dtype), INNER.init(params(dtype)), jamp.GradScaler(loss_scale)), step, lambda carry: carry[:2]


@dataclass(frozen=True)
class Adapter:
    make: Callable[..., Any]
    plain: Callable[[], Any] = plain  # the step that it is with NoOpLossScale
    dtypes: tuple[Any, ...] = (jnp.float32, jnp.float16, jnp.bfloat16)  # of the parameters
    rtol: float = 1e-5  # from the plain optimizer
    adapts: bool = True  # whether it takes the loss scale; otherwise the scale is 1 forever


def promoting(step):
    """optax.apply_updates adds float32 to 16-bit parameters."""

    def call(*args):
        with jax.numpy_dtype_promotion("standard"):
            return step(*args)

    return call


def with_split_masters(loss_scale=DYNAMIC, axis_name=None, dtype=jnp.bfloat16):
    """bfloat16 parameters, of which `kept` shows the masters."""
    wrap = lambda tx, *args, **kwargs: jamp.loss_scaled(jamp.master_params(tx, split=True), *args, **kwargs)
    carry, step, _ = wrapper(wrap, loss_scale, axis_name, dtype)
    step = promoting(step)
    kept = lambda c: (jamp.interop.join_masters(c[1].inner_state, c[0]), c[0], c[1].inner_state.inner_state)
    return carry, step, kept


def quantized(tx):
    """`quantized_state` of arrays that are repeated until they are large enough for eight bits."""
    low = jamp.quantized_state(tx)
    repeated = functools.partial(jax.tree.map, lambda x: jnp.tile(x, (64, 64)))
    first = lambda x, like: x[:1, : jnp.size(like)].reshape(jnp.shape(like))

    def update(grads, state, params=None, **extra_args):
        updates, state = low.update(repeated(grads), state, repeated(params), **extra_args)
        return jax.tree.map(first, updates, grads), state

    return optax.GradientTransformationExtraArgs(lambda params: low.init(repeated(params)), update)


ADAPTERS = {
    "loss_scaled": Adapter(functools.partial(wrapper, jamp.loss_scaled)),
    "unscale": Adapter(functools.partial(wrapper, jamp.loss_scaled, unscale=True)),
    "skip_nonfinite": Adapter(
        functools.partial(wrapper, lambda tx, *_, axis_name, **__: jamp.skip_nonfinite(tx, axis_name=axis_name)),
        adapts=False,
    ),
    "master_params": Adapter(functools.partial(wrapper, with_masters), lambda: plain(jamp.master_params(INNER))),
    "split masters": Adapter(
        with_split_masters,
        lambda: plain(jamp.master_params(INNER, split=True), jnp.bfloat16),
        dtypes=(jnp.float32, jnp.bfloat16),
        rtol=0.02,  # the gradients are those of the rounded parameters
    ),
    "quantized_state": Adapter(
        functools.partial(wrapper, lambda tx, *args, **kwargs: jamp.loss_scaled(quantized(tx), *args, **kwargs)),
        lambda: plain(quantized(INNER)),
        rtol=0.02,
    ),
    "scaled": Adapter(  # float16 gradients warn
        scaled, lambda: plain(loss_fn=jamp.scaled(loss_fn)), dtypes=(jnp.float32, jnp.bfloat16)
    ),
    "GradScaler": Adapter(grad_scaler, dtypes=(jnp.float32, jnp.bfloat16)),  # float16 without masters warns
}


def run(step, carry, *names):
    """The carry after each batch."""
    return [carry := step(carry, BATCHES[name]) for name in names]


def check_skips(adapter):
    """A skipped step changes nothing but the scale and the statistics, and compiles to the program of any other."""
    traces = []
    carry, step, kept = adapter.make()
    jitted = jax.jit(lambda carry, x: (traces.append(1), step(carry, x))[1], donate_argnums=0)
    for start in (carry, adapter.make()[0]):  # A second one shares no buffer with the first, which was donated.
        carry, (scale, backoff) = start, (2.0**10, 2) if adapter.adapts else (1, 1)
        for name in ("inf", "good", "nan", "good", "inf"):
            before = bits(kept(carry))
            carry = jitted(carry, BATCHES[name])
            assert (bits(kept(carry)) == before) == (name != "good")
            assert bool(jamp.get_grads_finite(carry)) == (name == "good")
            scale = scale if name == "good" else scale / backoff
            assert float(jamp.get_loss_scale(carry)) == scale
        stats = jamp.get_stats(carry)
        assert (int(stats.finite_steps), int(stats.overflow_steps), int(stats.decreases)) == (2, 3, 3 * adapter.adapts)
    assert len(traces) == 1


def check_steps(adapter):
    """The steps that are applied are those of a run that never saw the bad batches, and the plain optimizer's."""
    carry, step, kept = adapter.make()
    disturbed = run(jax.jit(step), carry, "good", "inf", "good", "nan")[-1]
    assert_equal(kept(disturbed), kept(run(jax.jit(step), carry, "good", "good")[-1]))
    expected, plain_step = plain()
    found = [x for x in jax.tree.leaves(kept(disturbed)[:2]) if np.shape(x) == (3,) and x.dtype == jnp.float32]
    assert found
    want = jax.tree.leaves(run(jax.jit(plain_step), expected, "good", "good")[-1])
    for x in found:
        assert any(np.shape(y) == (3,) and np.allclose(x, y, rtol=adapter.rtol) for y in want)


def check_types(adapter):
    """A step keeps the structure, shapes and strong dtypes of its carry, whatever the dtype of the parameters."""
    for dtype in adapter.dtypes:
        carry, step, _ = adapter.make(dtype=dtype)
        with jax.numpy_dtype_promotion("standard"):  # optax.apply_updates adds float32 to 16-bit parameters
            assert avals(jax.eval_shape(step, carry, X)) == avals(carry)
        assert not any(x.weak_type for x in jax.tree.leaves(carry))
        pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(carry)]
        assert len(set(pointers)) == len(pointers)


def check_transformations(adapter):
    """Under scan, ahead of time and on arrays from the host a step is what it is in a loop."""
    carry, step, kept = adapter.make()
    names = "good", "inf", "good"
    looped = run(jax.jit(step), carry, *names)[-1]
    batches = np.stack([BATCHES[name] for name in names])
    scanned = jax.jit(lambda c: jax.lax.scan(lambda c, x: (step(c, x), None), c, batches)[0])(carry)
    assert_close(kept(scanned), kept(looped))  # XLA may round differently, and split masters are compared as numbers
    assert_equal(jamp.metrics(scanned), jamp.metrics(looped))
    compiled = jax.jit(step).lower(*jax.eval_shape(lambda: (carry, jnp.asarray(X)))).compile()
    assert_equal(run(compiled, carry, *names)[-1], looped)
    restored = jax.tree.map(np.asarray, run(compiled, carry, "good")[-1])
    assert_equal(run(jax.jit(step), restored, "inf", "good")[-1], looped)


def check_replicas(adapter):
    """Replicas skip each for itself, or together if they share an axis."""
    carry, step, _ = adapter.make()
    batches = np.stack([BATCHES["good"], BATCHES["inf"]])
    both = jax.tree.map(lambda x: jnp.stack([x, x]), carry)
    assert jamp.get_grads_finite(jax.jit(jax.vmap(step))(both, batches)).tolist() == [True, False]
    carry, step, kept = adapter.make(axis_name="i")
    after = jax.jit(jax.vmap(step, in_axes=(None, 0), axis_name="i"))(carry, batches)
    assert jamp.get_grads_finite(after).tolist() == [False, False]
    for i in range(2):
        assert_equal(kept(jax.tree.map(lambda x, i=i: x[i], after)), kept(carry))


def opcodes(step, carry):
    text = jax.jit(step).lower(carry, X).compile().as_text()
    return Counter(re.findall(r" = \S+ ([\w-]+)\(", text))


def check_noop(adapter):
    """NoOpLossScale compiles to the plain step and what is carried along, and applies whatever comes."""
    carry, step, _ = adapter.make(jamp.NoOpLossScale())
    carried = {"parameter", "copy", "get-tuple-element", "tuple", "constant", "bitcast"}
    without = lambda counted: {k: n for k, n in counted.items() if k not in carried}
    assert without(opcodes(step, carry)) == without(opcodes(*adapter.plain()[::-1]))
    after = jax.jit(step)(carry, BATCHES["nan"])
    assert any(np.isnan(x).any() for x in jax.tree.leaves(after) if jnp.issubdtype(x.dtype, jnp.floating))
    assert bool(jamp.get_grads_finite(after))
    assert [int(x) for x in jamp.get_stats(after)[:5]] == [0] * 5
    assert opcodes(*adapter.make()[1::-1]) != opcodes(step, carry)  # The comparison can fail.


def check_lookups(adapter):
    """Every function that reads or sets a loss scale finds it in the carry."""
    carry, step, _ = adapter.make()
    carry = jax.jit(step)(carry, BATCHES["inf"])
    metrics = jamp.metrics(carry)
    scale = 512 if adapter.adapts else 1
    found = float(metrics["loss_scale"]), int(metrics["overflow_steps"]), bool(metrics["grads_finite"])
    assert found == (scale, 1, False)
    with pytest.raises(jamp.LossScaleError, match="1 steps in a row"):
        jamp.check_health(carry, max_consecutive_overflows=0)
    changed = jamp.set_loss_scale(carry, 8.0)
    assert avals(changed) == avals(carry)
    assert float(jamp.get_loss_scale(jax.jit(step)(changed, BATCHES["inf"]))) == (4.0 if adapter.adapts else 8.0)
    converted = jamp.convert_loss_scale(carry, jamp.AdaptiveLossScale(init_scale=2.0))
    assert float(jamp.get_loss_scale(converted)) == scale


CHECKS = [check_skips, check_steps, check_types, check_transformations, check_replicas, check_noop, check_lookups]
