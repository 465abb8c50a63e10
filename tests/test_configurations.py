"""Every public function in JAX's strict and unusual configurations: its results are those of the default one."""

import functools
import inspect

import jax
import jax.numpy as jnp
import optax
import pytest
from configurations import CONFIGURATIONS
from jaxprs import normal
from trees import assert_close

import jamp
import jamp.debug

PARAMS = {"w": normal(16, 16) / 4, "b": normal(16, seed=1)}
X = normal(4, 16, seed=2)
LOW = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
SGD = optax.sgd(0.1, momentum=0.9)
SCALED = jamp.loss_scaled(SGD)
STATE = SCALED.init(PARAMS)
INF = jax.tree.map(lambda x: x.at[-1].set(jnp.inf), PARAMS)
SCALES = (
    jamp.DynamicLossScale(growth_interval=1),
    jamp.AdaptiveLossScale(),
    jamp.StaticLossScale(),
    jamp.NoOpLossScale(),
)


def loss_fn(params, x=X):
    return jnp.mean(jnp.tanh(jnp.dot(x, params["w"]) + params["b"][None]) ** 2)


def two_steps(tx, grads=PARAMS, params=PARAMS):
    """The updates and the state after a step, and after one that overflows."""
    step = jax.jit(lambda state, grads: tx.update(grads, state, params))
    first, state = step(tx.init(params), grads)
    return first, state, step(state, jax.tree.map(lambda x: x.at[-1].set(jnp.inf), grads))


def split_masters():
    """`two_steps` with whole masters: where XLA rounds the last digit of one otherwise, its low bits are others."""
    first, *states = two_steps(jamp.loss_scaled(jamp.master_params(SGD, split=True)), params=LOW)
    stepped = jax.tree.map(lambda p, u: (p.astype(jnp.float32) + u).astype(p.dtype), LOW, first)
    whole = lambda state: state._replace(inner_state=jamp.interop.join_masters(state.inner_state, stepped))
    state, (updates, skipped) = states
    return first, whole(state), updates, whole(skipped)


def scale_and_step(tx):
    state = tx.init(PARAMS)
    return jax.jit(lambda s: tx.update(jax.grad(lambda p: jamp.scale_loss(loss_fn(p), s))(PARAMS), s, PARAMS))(state)


def with_grad_scaler(scaler):
    @jax.jit
    def step(scaler, params):
        loss, grads = scaler.value_and_grad(loss_fn)(params)
        params, opt_state, scaler, stepped = scaler.step(SGD, SGD.init(params), params, grads=grads)
        scaled = jax.grad(lambda p: scaler.scale(loss_fn(p)))(params)
        unscaled = scaler.unscale(scaled), scaler.check_overflow(scaled)
        last = scaler.step(SGD, opt_state, params, scaled_grads=INF)
        return loss, stepped, unscaled, last, scaler.get_inverse_scale(), scaler.update(overflow=stepped).stats

    saved = scaler.state_dict() or jamp.GradScaler().state_dict()
    return step(scaler, PARAMS), jax.tree.leaves(jamp.GradScaler().load_state_dict(saved))


def reads():
    names = "get_loss_scale", "get_stats", "get_grads_finite", "metrics"
    return [getattr(jamp, name)(STATE) for name in names]


def history():
    log = jamp.History(every=1)
    log.append(STATE)
    return log["loss_scale"]


def gradients(transform, *args):
    both = lambda fun: (fun(PARAMS), jax.grad(fun)(PARAMS))
    return both(jax.jit(transform(loss_fn, *args))), both(transform(loss_fn, *args))


def in_chunks(params, x):
    loss_sum = lambda params, x: jnp.sum(jnp.tanh(jnp.dot(x, params["w"]) + params["b"][None]) ** 2)
    return jamp.chunked_sum(loss_sum, 2)(params, x)


ALL = {"dot_general": "compute"}
MOMENTS, WIDE = jamp.quantized_state(SGD), {"w": normal(64, 128), "b": normal(128)}
# One small use of each public function. The names before the first space are those of jamp.
USES = {
    "all_finite": lambda: (jamp.all_finite(PARAMS), jax.jit(jamp.all_finite)(INF)),
    "cast_floating": lambda: jamp.cast_floating(PARAMS, "float16"),
    "check_castable": lambda: len(jamp.check_castable({"w": jnp.full(2, 1e30)}, "float16")),
    "loss_scale_for": lambda: jamp.loss_scale_for("float16").init(),
    "loss_scale_from_config": lambda: jamp.loss_scale_from_config({"type": "dynamic", "init_scale": 8.0}).init(),
    "LossScale": lambda: [x.update(x.init(), jnp.array(ok)) for x in SCALES for ok in (True, False)],
    "scale_loss": lambda: jax.jit(jamp.scale_loss)(jnp.float32(2.0), STATE),
    "unscale_and_check": lambda: jax.jit(jamp.unscale_and_check)(PARAMS, STATE),
    "value_and_grad": lambda: (
        jax.jit(lambda s: jamp.value_and_grad(loss_fn, s)(PARAMS))(STATE),
        jamp.value_and_grad(loss_fn, STATE)(PARAMS),
    ),
    "grad": lambda: jamp.grad(loss_fn, STATE)(PARAMS),
    "scaled": lambda: gradients(jamp.scaled),
    "scaled that tries again": lambda: gradients(lambda fun: jamp.scaled(fun, 2.0**126)),
    "loss_scaled": lambda: [two_steps(jamp.loss_scaled(SGD, x)) for x in SCALES[:-1]],
    "skip_nonfinite": lambda: two_steps(jamp.skip_nonfinite(SGD)),
    "loss_scaled, unscale": lambda: scale_and_step(jamp.loss_scaled(SGD, unscale=True)),
    "master_params": lambda: two_steps(jamp.loss_scaled(jamp.master_params(SGD)), params=LOW),
    "master_params, split": split_masters,
    "stochastic_rounding": lambda: two_steps(jamp.loss_scaled(jamp.stochastic_rounding(SGD)), params=LOW),
    "quantized_state": lambda: two_steps(jamp.loss_scaled(MOMENTS), WIDE, WIDE),
    "get_loss_scale get_stats get_grads_finite metrics": reads,
    "set_loss_scale": lambda: jax.jit(jamp.set_loss_scale)(STATE, jnp.float32(8.0)),
    "set_loss_scale to a number": lambda: jamp.set_loss_scale(STATE, 8),
    "reset": lambda: jamp.reset(STATE, jamp.DynamicLossScale()),
    "convert_loss_scale": lambda: jamp.convert_loss_scale(STATE, jamp.AdaptiveLossScale()),
    "check_health": lambda: jamp.check_health(STATE, loss_scale=jamp.DynamicLossScale()),
    "History": history,
    "GradScaler": lambda: [with_grad_scaler(x) for x in (jamp.GradScaler(), jamp.GradScaler(enabled=False))],
    "autocast": lambda: gradients(jamp.autocast, "float16"),
    "autocast to bfloat16": lambda: gradients(jamp.autocast, "bfloat16"),
    "autocast to float8": lambda: gradients(functools.partial(jamp.autocast, rules=ALL), jamp.Float8(min_size=1)),
    "autocast to int8": lambda: gradients(functools.partial(jamp.autocast, rules=ALL), jamp.Int8(min_size=1)),
    "full_precision": lambda: jamp.full_precision(loss_fn)(PARAMS),
    "autocast_report": lambda: len(jamp.autocast_report(loss_fn, jnp.float16)(PARAMS).rows),
    "recompute": lambda: gradients(jamp.recompute, 0),
    "chunked_sum": lambda: [jax.grad(fun)(PARAMS, jnp.tile(X, (4, 1))) for fun in (in_chunks, jax.jit(in_chunks))],
    "chunked_sum, autocast": lambda: jax.grad(jamp.autocast(in_chunks, "float16"))(PARAMS, jnp.tile(X, (4, 1))),
    "memory_report": lambda: jamp.memory_report(loss_fn, 0)(PARAMS).kept,
    "interop": lambda: jamp.interop.unwrap_state(jamp.interop.wrap_state(SGD.init(PARAMS), jamp.StaticLossScale())),
    "interop for torch": lambda: jax.tree.leaves(jamp.interop.from_torch(jamp.interop.to_torch(jamp.GradScaler()))),
    "interop of moments": lambda: jamp.interop.dequantize_state(MOMENTS.init(WIDE)),
    "optimizers": lambda: [
        two_steps(jamp.loss_scaled(getattr(jamp.optimizers, name)(0.1))) for name in ("sgd", "adam", "adamw", "rmsprop")
    ],
    "debug.find_nonfinite": lambda: jamp.debug.find_nonfinite(loss_fn, grad=True)(PARAMS).operations,
    "debug.nonfinite_report": lambda: jamp.debug.nonfinite_report(INF).inf,
    "debug.underflow_report": lambda: jamp.debug.underflow_report(PARAMS, STATE).loss_scale,
    "debug.lost_updates": lambda: jamp.debug.lost_updates(LOW, PARAMS),
    "debug.rounding_report": lambda: len(jamp.debug.rounding_report(loss_fn, "float16")(PARAMS).rows),
    "debug.memory_curve": lambda: jamp.debug.memory_curve(lambda budget: loss_fn, (1.0,))(PARAMS).points[0].flops,
    "debug.compare": lambda: len(jamp.debug.compare(loss_fn, loss_fn)(PARAMS).rows),
}


@functools.cache
def result(name):
    with jax.numpy_rank_promotion("allow"):
        return USES[name]()


# One of each kind runs by default, where dtypes may change: a check, a gradient, a scaled function, a wrapper, an
# accessor, 16-bit parameters, autocast, and a memory budget. Two of them run in all configurations. The rest is slow.
KINDS = {
    "all_finite", "value_and_grad", "scaled", "loss_scaled, unscale", "set_loss_scale", "master_params", "autocast",
    "recompute", "chunked_sum",
}  # fmt: skip
DTYPES, EVERYWHERE = ("strict", "x64"), ("value_and_grad", "autocast")
is_slow = lambda name, configuration: name not in (KINDS if configuration in DTYPES else EVERYWHERE)
CASES = [
    pytest.param(name, x, marks=[pytest.mark.slow] * is_slow(name, x), id=f"{name}, {x}")
    for name in USES
    for x in CONFIGURATIONS
    if name in KINDS or x in DTYPES
]


@pytest.mark.parametrize(("name", "configuration"), CASES)
def test_results_are_those_of_the_default_configuration(name, configuration):
    expected = result(name)
    with CONFIGURATIONS[configuration]():
        found = USES[name]()
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert list(map(jnp.result_type, jax.tree.leaves(found))) == list(map(jnp.result_type, jax.tree.leaves(expected)))
    assert_close(found, expected, 1e-2 if "8" in name or "autocast" in name else 1e-5)


def test_every_public_function_is_used():
    used = " ".join(USES).replace(",", " ").split()
    functions = [name for name, x in vars(jamp).items() if inspect.isfunction(x) and not name.startswith("_")]
    assert not set(functions) - set(used)
    assert not {f"debug.{name}" for name, x in vars(jamp.debug).items() if inspect.isfunction(x)} - set(used)
