"""Misuse: each wrong call is an error, or a warning, of the right type that holds the word that names the cure."""

import functools
import importlib.util
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import pallas as pl

import jamp
import jamp.plot
from jamp import debug, interop, optimizers

pytestmark = pytest.mark.promotes("optax, Flax and Equinox")

PARAMS = {"w": jnp.ones((16, 16)), "b": jnp.ones(16)}
LOW, WIDE = jamp.cast_floating(PARAMS, "bfloat16"), {"w": jnp.ones((64, 128))}
HALF = jamp.cast_floating(PARAMS, "float16")
GRADS, X, BF16 = jax.tree.map(jnp.ones_like, PARAMS), jnp.ones((8, 16)), jnp.bfloat16
EIGHT, LARGE = jamp.StaticLossScale(8.0), jamp.DynamicLossScale()
LEFT = {"w": True, "b": False}
ADAM, SGD, MOMENTUM = optax.adam(0.1), optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)
TX, SCALED, UNSCALING = jamp.loss_scaled(ADAM), jamp.loss_scaled(MOMENTUM), jamp.loss_scaled(MOMENTUM, unscale=True)
STATIC = jamp.loss_scaled(MOMENTUM, EIGHT)
SKIPPING = optax.MultiSteps(SCALED, 4, should_skip_update_fn=optax.skip_not_finite)
STATE, PLAIN, SCALER = TX.init(PARAMS), ADAM.init(PARAMS), jamp.GradScaler()
MASTERS, SPLIT = jamp.master_params(ADAM), jamp.master_params(ADAM, split=True)
ROUNDING, QUANTIZED = jamp.stochastic_rounding(optax.sgd(1.0)), jamp.quantized_state(ADAM)
# Its state becomes None where a gradient is, as that of Adam in Optax 0.2.5.
MOMENT = optax.GradientTransformation(lambda params: params, lambda grads, state, params: (grads, grads))
LENIENT = jamp.loss_scaled(MOMENT)
REFUSES = jamp.loss_scaled(optax.stateless(lambda grads, params: jax.tree.map(jnp.add, grads, params)))


def loss_fn(params, x=X):
    return jnp.mean((jnp.matmul(x, params["w"]) + params["b"][None]) ** 2)


def loss_sum(params, x):
    return jnp.sum(jnp.matmul(x, params["w"]))


state = lambda tx: tx.init(PARAMS)
update = lambda tx, state: tx.update(GRADS, state, PARAMS)
of_budget = lambda budget: jax.grad(jamp.recompute(loss_fn, budget))
kept = lambda state: jax.jit(jamp.value_and_grad(loss_fn, state)).lower(PARAMS)
autocast, value_and_grad = functools.partial(jamp.autocast, loss_fn), functools.partial(jamp.value_and_grad, loss_fn)
step = functools.partial(SCALER.step, ADAM, PLAIN, PARAMS)
matched = lambda **rules: autocast(BF16, rules=rules)
scaled_loss = lambda params: jamp.scale_loss(loss_fn(params), STATE)
from_config = jamp.loss_scale_from_config

MISUSE = {
    "masters of a wrapper": (ValueError, "plain", lambda: state(jamp.loss_scaled(jamp.master_params(SCALED)))),
    "masked": (ValueError, "optax.masked", lambda: state(optax.masked(SCALED, LEFT))),
    "partition": (ValueError, "optax.partition", lambda: state(optax.partition({True: SCALED, False: SGD}, LEFT))),
    "scaled twice": (ValueError, "one of them", lambda: jamp.scaled(lambda p: jamp.scaled(loss_fn)(p))(PARAMS)),
    "grad of scaled": (ValueError, "one of them", lambda: jamp.grad(jax.jit(jamp.scaled(loss_fn)), STATE)(PARAMS)),
    "GradScaler of scaled": (ValueError, "one of them", lambda: SCALER.value_and_grad(jamp.scaled(loss_fn))(PARAMS)),
    "scaled's scale": (ValueError, "2.0**15", lambda: jamp.scaled(loss_fn, 0)),
    "scaled's retries": (ValueError, "0 or more", lambda: jamp.scaled(loss_fn, retries=-1)),
    "scale_loss in value_and_grad": (ValueError, "one of them", lambda: jamp.grad(scaled_loss, STATE)(PARAMS)),
    "scale_loss in scaled": (ValueError, "one of them", lambda: jamp.scaled(scaled_loss)(PARAMS)),
    "scale in value_and_grad": (
        ValueError,
        "one of them",
        lambda: jamp.grad(lambda p: SCALER.scale(loss_fn(p)), STATE)(PARAMS),
    ),
    "restored dict": (TypeError, "tx.init", lambda: update(SCALED, state(SCALED)._asdict())),
    "other unscale": (TypeError, "unscale=True", lambda: update(UNSCALING, state(SCALED))),
    "apply_if_finite": (ValueError, "inside", lambda: value_and_grad(state(optax.apply_if_finite(TX, 5)))),
    "MultiSteps that skips": (ValueError, "inside", lambda: value_and_grad(state(SKIPPING))),
    "unscale_and_check": (ValueError, "jamp.scale_loss", lambda: jamp.unscale_and_check(GRADS, state(UNSCALING))),
    "disabled": (ValueError, "plain", lambda: SCALER.disable().step(ADAM, STATE, PARAMS, grads=GRADS)),
    "@autocast": (TypeError, "jamp.autocast", lambda: jamp.autocast(loss_fn)),
    "@autocast()": (TypeError, "jamp.autocast", lambda: jamp.autocast()),
    "autocast of a device": (ValueError, "jnp.bfloat16", lambda: jamp.autocast("cuda")(loss_fn)),
    "autocast of swapped arguments": (TypeError, "jamp.autocast", lambda: jamp.autocast(BF16, loss_fn)),
    "autocast of params": (TypeError, "jamp.cast_floating", lambda: jamp.autocast(PARAMS, BF16)),
    "autocast of an array": (TypeError, "jamp.cast_floating", lambda: jamp.autocast(X, BF16)),
    "autocast of a state": (TypeError, "jamp.autocast", lambda: jamp.autocast(STATE, BF16)),
    "autocast of a result": (TypeError, "jamp.autocast", lambda: jamp.autocast(loss_fn(PARAMS), BF16)),
    "a decorator of a class of functions": (TypeError, "decorate", lambda: jamp.autocast(BF16)(type("Model", (), {}))),
    "a decorator without a dtype": (TypeError, "jamp.autocast", lambda: jamp.autocast(None)),
    "autocast to float64": (ValueError, "leave", lambda: autocast(jnp.float64)),
    "autocast to int8": (ValueError, "jamp.Int8", lambda: autocast("int8")),
    "autocast to fp8": (ValueError, "jamp.Float8", lambda: autocast("fp8")),
    "autocast to e4m3": (ValueError, "jamp.Float8", lambda: autocast(jnp.float8_e4m3fn)),
    "autocast to a class": (ValueError, "jamp.Float8", lambda: autocast(jamp.Float8)),
    "a wrong name of a dtype": (ValueError, "jnp.bfloat16", lambda: autocast("bfloat")),
    "a rule for a layer": (ValueError, "'dot_general'", lambda: matched(softmx="float32")),
    "a rule for matmul": (ValueError, "'dot_general'", lambda: matched(matmul="float32")),
    "a rule with a typing error": (ValueError, "'dot_general'", lambda: matched(dot_generl="float32")),
    "a rule with a short name": (ValueError, "accumulate", lambda: matched(tanh="fp32")),
    "a rule with a dtype": (ValueError, "accumulate", lambda: matched(tanh=jnp.float32)),
    "rules as a list": (TypeError, '{"tanh"', lambda: autocast(BF16, rules=["tanh"])),
    "a rule for a scan": (ValueError, "must be", lambda: matched(scan="compute")),
    "a rule that matches nothing": (UserWarning, "matches", lambda: matched(tanh="float32")(PARAMS)),
    "no recomputation": (ValueError, "recompute=", lambda: autocast(BF16, recompute=False, memory_budget=0.5)),
    "nothing to cast": (UserWarning, "already", lambda: autocast(BF16)(LOW, X.astype(BF16))),
    "Float8 on small products": (UserWarning, "min_size=", lambda: autocast(jamp.Float8())(PARAMS)),
    "Float8 on points": (
        UserWarning,
        "coordinates",
        lambda: jamp.autocast(jnp.dot, jamp.Float8())(X[:, :3], jnp.eye(3)),
    ),
    "a wide carrier": (ValueError, "jnp.bfloat16", lambda: jamp.Float8(carrier="fp32")),
    "a wrong granularity": (ValueError, "tensor", lambda: jamp.Float8(granularity="block")),
    "a size of 0": (ValueError, "least 1", lambda: jamp.Int8(min_size=0)),
    "a report of params": (TypeError, "jamp.autocast_report", lambda: jamp.autocast_report(PARAMS, "bf16")),
    "a report, swapped": (TypeError, "jamp.autocast_report", lambda: jamp.autocast_report("bf16", loss_fn)),
    "a report without a dtype": (ValueError, "jnp.bfloat16", lambda: jamp.autocast_report(loss_fn, None)),
    "full_precision of an array": (TypeError, "jamp.full_precision", lambda: jamp.full_precision(X)),
    "a budget of 2": (ValueError, "2GiB", lambda: jamp.recompute(loss_fn, 2.0)),
    "a budget of apples": (ValueError, "GiB", lambda: jamp.recompute(loss_fn, "4 apples")),
    "a budget of None": (TypeError, "12GiB", lambda: jamp.recompute(loss_fn, None)),
    "recompute, swapped": (TypeError, "jamp.recompute", lambda: jamp.recompute(0.5, loss_fn)),
    "recompute of params": (TypeError, "jamp.recompute", lambda: jamp.recompute(PARAMS, 0.5)),
    "memory_report of params": (TypeError, "jamp.memory_report", lambda: jamp.memory_report(PARAMS)),
    "scaled gradients": (TypeError, "jamp.scaled", lambda: jamp.scaled(GRADS)),
    "scaled with a state": (ValueError, "jamp.value_and_grad", lambda: jamp.scaled(loss_fn, STATE)),
    "scaled with a text": (ValueError, "2.0**15", lambda: jamp.scaled(loss_fn, "big")),
    "scaled inside value_and_grad": (ValueError, "one of them", lambda: jamp.grad(jamp.scaled(loss_fn), STATE)(PARAMS)),
    "chunks of 0": (ValueError, "1", lambda: jamp.chunked_sum(loss_sum, 0)),
    "chunks, swapped": (TypeError, "jamp.chunked_sum", lambda: jamp.chunked_sum(64, loss_sum)),
    "chunks of a mean": (ValueError, "jamp.chunked_sum", lambda: jamp.chunked_sum(loss_fn, 2)(PARAMS, X)),
    "chunks without rows": (TypeError, "jamp.chunked_sum", lambda: jamp.chunked_sum(loss_sum, 2)(PARAMS)),
    "chunks along a text": (ValueError, "axis=", lambda: jamp.chunked_sum(loss_sum, 2, axis="0")),
    "chunks of a number": (ValueError, "params", lambda: jamp.chunked_sum(loss_sum, 2)(PARAMS, jnp.float32(1))),
    "chunks of unequal rows": (ValueError, "rows[1]", lambda: jamp.chunked_sum(loss_sum, 2)(PARAMS, X, X[:3])),
    "chunks of logits": (TypeError, "summed", lambda: jamp.chunked_sum(lambda p, x: x, 2)(PARAMS, X)),
    "value_and_grad, swapped": (TypeError, "jamp.value_and_grad", lambda: jamp.value_and_grad(STATE, loss_fn)),
    "value_and_grad with the optimizer": (ValueError, "tx.init", lambda: value_and_grad(TX)),
    "a gradient with a loss scale": (ValueError, "loss_scale.init", lambda: value_and_grad(jamp.DynamicLossScale())),
    "value_and_grad with argnums": (ValueError, "jamp.value_and_grad", lambda: value_and_grad(0)),
    "value_and_grad with params": (ValueError, "tx = jamp", lambda: value_and_grad(PARAMS)),
    "value_and_grad with a plain state": (ValueError, "tx = jamp", lambda: value_and_grad(PLAIN)),
    "value_and_grad with None": (ValueError, "tx = jamp", lambda: value_and_grad(None)),
    "value_and_grad with two states": (ValueError, "meant", lambda: value_and_grad((STATE, STATE))),
    "value_and_grad with unscale=True": (ValueError, "unscale=", lambda: value_and_grad(UNSCALING.init(PARAMS))),
    "a state in place of params": (TypeError, "state.params", lambda: value_and_grad(STATE)(STATE)),
    "a model": (TypeError, "filter_value_and_grad", lambda: value_and_grad(STATE)({"f": jnp.tanh})),
    "int params": (TypeError, "jnp.asarray", lambda: value_and_grad(STATE)({"w": jnp.arange(4)})),
    "a loss of None": (TypeError, "jnp.mean", lambda: jamp.grad(lambda p: None, STATE)(PARAMS)),
    "a loss of many numbers": (TypeError, "jnp.mean", lambda: jamp.grad(lambda p: p["b"], STATE)(PARAMS)),
    "a loss of int": (TypeError, "jnp.mean", lambda: jamp.grad(lambda p: jnp.int32(1), STATE)(PARAMS)),
    "a dictionary of losses": (TypeError, "has_aux=", lambda: jamp.grad(lambda p: {"a": p["b"][0]}, STATE)(PARAMS)),
    "a pair without has_aux": (TypeError, "has_aux=", lambda: jamp.grad(lambda p: (p["b"][0], 1), STATE)(PARAMS)),
    "has_aux without a pair": (TypeError, "(loss, aux)", lambda: value_and_grad(STATE, has_aux=True)(PARAMS)),
    "a state outside the step": (UserWarning, "jitted", lambda: kept(STATE)),
    "scale_loss, swapped": (ValueError, "jamp.scale_loss", lambda: jamp.scale_loss(STATE, jnp.float32(1))),
    "scale_loss of a function": (TypeError, "jamp.scale_loss", lambda: jamp.scale_loss(loss_fn, STATE)),
    "scale_loss with a loss scale": (ValueError, "init()", lambda: jamp.scale_loss(1.0, jamp.StaticLossScale())),
    "scale_loss of float16": (UserWarning, "jnp.float32", lambda: jamp.scale_loss(jnp.float16(1), STATE)),
    "unscale_and_check, swapped": (ValueError, "tx = jamp", lambda: jamp.unscale_and_check(STATE, GRADS)),
    "unscale to int8": (ValueError, "jnp.float16", lambda: jamp.unscale_and_check(GRADS, STATE, dtype="int8")),
    "loss_scaled with a number": (TypeError, "jamp.StaticLossScale", lambda: jamp.loss_scaled(ADAM, 65536.0)),
    "loss_scaled with a text": (TypeError, "jamp.DynamicLossScale", lambda: jamp.loss_scaled(ADAM, "dynamic")),
    "loss_scaled with a dtype": (TypeError, "jamp.loss_scale_for", lambda: jamp.loss_scaled(ADAM, jnp.float16)),
    "a class of scales": (TypeError, "jamp.AdaptiveLossScale", lambda: jamp.loss_scaled(ADAM, jamp.AdaptiveLossScale)),
    "loss_scaled with a mapping": (TypeError, "from_config", lambda: jamp.loss_scaled(ADAM, {"type": "static"})),
    "loss_scaled with a scale's state": (TypeError, "jamp.DynamicLossScale", lambda: jamp.loss_scaled(ADAM, STATE[0])),
    "loss_scaled with a scaler": (TypeError, "scaler.loss_scale", lambda: jamp.loss_scaled(ADAM, SCALER)),
    "loss_scaled with two optimizers": (TypeError, "jamp.DynamicLossScale", lambda: jamp.loss_scaled(ADAM, MOMENTUM)),
    "loss_scaled, swapped": (TypeError, "loss_scale=", lambda: jamp.loss_scaled(jamp.DynamicLossScale(), ADAM)),
    "loss_scaled of a function": (TypeError, "optax.adamw", lambda: jamp.loss_scaled(optax.adamw)),
    "loss_scaled of a rate": (TypeError, "optax.adamw", lambda: jamp.loss_scaled(1e-3)),
    "loss_scaled of a state": (TypeError, "tx.init", lambda: jamp.loss_scaled(STATE)),
    "loss_scaled twice": (ValueError, "plain", lambda: jamp.loss_scaled(TX).init(PARAMS)),
    "loss_scaled of params": (TypeError, "optax.adamw", lambda: jamp.loss_scaled(PARAMS)),
    "loss_scaled in a chain": (
        UserWarning,
        "inside",
        lambda: value_and_grad(state(optax.chain(optax.zero_nans(), TX))),
    ),
    "loss_scaled in MultiSteps": (UserWarning, "inside", lambda: value_and_grad(state(optax.MultiSteps(TX, 2)))),
    "float16 params": (UserWarning, "jamp.master_params", lambda: TX.init(HALF)),
    "update, swapped": (TypeError, "tx.update", lambda: TX.update(GRADS, PARAMS, STATE)),
    "update with a plain state": (TypeError, "jamp.interop.wrap_state", lambda: TX.update(GRADS, PLAIN, PARAMS)),
    "update with another loss scale": (TypeError, "jamp.convert_loss_scale", lambda: update(STATIC, state(SCALED))),
    "update with a pair": (TypeError, "grads =", lambda: TX.update(value_and_grad(STATE)(PARAMS), STATE, PARAMS)),
    "update of a moment with None": (
        ValueError,
        "zeros",
        lambda: LENIENT.update(GRADS | {"b": None}, state(LENIENT), PARAMS),
    ),
    "update with many flags": (ValueError, "jnp.all", lambda: TX.update(GRADS, STATE, PARAMS, grads_finite=[True])),
    "quantized_state of a state": (TypeError, "tx.init", lambda: jamp.quantized_state(STATE)),
    "quantized_state of a plain state": (TypeError, "jamp.quantized_state", lambda: jamp.quantized_state(PLAIN)),
    "quantized_state of loss_scaled": (ValueError, "whole", lambda: jamp.quantized_state(TX).init(PARAMS)),
    "quantized_state of bfloat16": (UserWarning, "split=True", lambda: QUANTIZED.init(jamp.cast_floating(WIDE, BF16))),
    "a block of 100": (ValueError, "power", lambda: jamp.quantized_state(ADAM, block_size=100)),
    "master_params of params": (TypeError, "jamp.master_params", lambda: jamp.master_params(PARAMS)),
    "master_params without params": (ValueError, "tx.update", lambda: MASTERS.update(GRADS, MASTERS.init(LOW))),
    "master_params of int8": (ValueError, "jnp.float16", lambda: jamp.master_params(ADAM, "int8")),
    "split masters of float16": (ValueError, "jamp.master_params", lambda: SPLIT.init(HALF)),
    "split masters with whole ones": (TypeError, "split_masters", lambda: SPLIT.update(GRADS, MASTERS.init(LOW), LOW)),
    "quantized_state twice": (ValueError, "plain", lambda: jamp.quantized_state(QUANTIZED).init(PARAMS)),
    "split masters to float16": (ValueError, "split=False", lambda: jamp.master_params(ADAM, "float16", split=True)),
    "split masters without params": (ValueError, "tx.update", lambda: SPLIT.update(GRADS, SPLIT.init(LOW))),
    "masters of rounding": (ValueError, "one of", lambda: jamp.master_params(ROUNDING).init(LOW)),
    "split masters of split ones": (ValueError, "one of", lambda: jamp.master_params(SPLIT, split=True).init(LOW)),
    "rounding of masters": (ValueError, "plain", lambda: jamp.stochastic_rounding(MASTERS).init(LOW)),
    "rounding of split masters": (ValueError, "plain", lambda: jamp.stochastic_rounding(SPLIT).init(LOW)),
    "rounding twice": (ValueError, "plain", lambda: jamp.stochastic_rounding(ROUNDING).init(LOW)),
    "rounding of loss_scaled": (ValueError, "whole", lambda: jamp.stochastic_rounding(TX).init(LOW)),
    "rounding of float16": (ValueError, "jamp.master_params", lambda: ROUNDING.init(HALF)),
    "rounding without params": (ValueError, "tx.update", lambda: ROUNDING.update(GRADS, state(ROUNDING))),
    "rounding to float16": (ValueError, "bfloat16", lambda: jamp.stochastic_rounding(ADAM, state_dtype="float16")),
    "a rounding seed of 1.5": (ValueError, "int", lambda: jamp.stochastic_rounding(ADAM, seed=1.5)),
    "rounding of a function": (TypeError, "optax.adamw(1e-3)", lambda: jamp.stochastic_rounding(optax.adamw)),
    "a rounding key": (ValueError, "int", lambda: jamp.stochastic_rounding(ADAM, seed=jax.random.key(0))),
    "stochastic_rounding of float32": (UserWarning, "jamp.cast_floating", lambda: update(ROUNDING, state(ROUNDING))),
    "adamw of params": (TypeError, "jamp.optimizers.adamw", lambda: optimizers.adamw(PARAMS, 1e-3)),
    "adamw of a text": (TypeError, "jamp.optimizers.adamw", lambda: optimizers.adamw("1e-3")),
    "adamw with one beta": (ValueError, "betas=", lambda: optimizers.adamw(1e-3, 0.9)),
    "a negative rate": (ValueError, "negative", lambda: optimizers.sgd(-0.1)),
    "nesterov without momentum": (ValueError, "momentum", lambda: optimizers.sgd(0.1, nesterov=True)),
    "a momentum of text": (TypeError, "momentum", lambda: optimizers.sgd(0.1, momentum="0.9")),
    "a swapped rate": (TypeError, "(opt_state", lambda: optimizers.set_learning_rate(1e-3, STATE)),
    "the rate of an optimizer": (ValueError, "tx.init", lambda: optimizers.get_learning_rate(SGD)),
    "Optax's rate": (ValueError, "inject_hyperparams", lambda: optimizers.get_learning_rate(STATE)),
    "set_loss_scale, swapped": (ValueError, "jamp.set_loss_scale", lambda: jamp.set_loss_scale(8.0, STATE)),
    "set_loss_scale to another": (TypeError, "convert", lambda: jamp.set_loss_scale(STATE, jamp.StaticLossScale())),
    "get_loss_scale of the optimizer": (ValueError, "tx.init", lambda: jamp.get_loss_scale(TX)),
    "metrics of a class": (ValueError, "opt_state", lambda: jamp.metrics(jamp.GradScaler)),
    "metrics of params": (ValueError, "tx = jamp", lambda: jamp.metrics(PARAMS)),
    "reset to a number": (TypeError, "jamp.StaticLossScale", lambda: jamp.reset(STATE, 1024.0)),
    "reset to another": (ValueError, "jamp.convert_loss_scale", lambda: jamp.reset(STATE, jamp.StaticLossScale())),
    "a conversion, swapped": (TypeError, "jamp.DynamicLossScale", lambda: jamp.convert_loss_scale(TX, STATE)),
    "a scale of 0": (ValueError, "2.0**16", lambda: jamp.StaticLossScale(0)),
    "a wrong type in a file": (ValueError, "'dynamic'", lambda: from_config({"type": "dynamc"})),
    "a wrong key in a file": (ValueError, "growth_factor", lambda: from_config({"type": "dynamic", "growth": 2})),
    "a file without a type": (ValueError, "dynamic", lambda: from_config({"init_scale": 8.0})),
    "no file": (TypeError, "mapping", lambda: from_config(None)),
    "loss_scale_for int8": (ValueError, "jnp.float16", lambda: jamp.loss_scale_for("int8")),
    "cast_floating, swapped": (TypeError, "jamp.cast_floating", lambda: jamp.cast_floating(jnp.float16, PARAMS)),
    "cast_floating with params twice": (ValueError, "jnp.float16", lambda: jamp.cast_floating(PARAMS, PARAMS)),
    "cast_floating to a typing error": (ValueError, "fp16", lambda: jamp.cast_floating(PARAMS, "flaot16")),
    "check_castable, swapped": (TypeError, "jamp.check_castable", lambda: jamp.check_castable("fp16", PARAMS)),
    "a History of a state": (TypeError, "history.append", lambda: jamp.History(STATE)),
    "a History of params": (ValueError, "tx = jamp", lambda: jamp.History().append(PARAMS)),
    "a History of vectors": (ValueError, "jnp.mean", lambda: jamp.History().append(STATE, loss=jnp.ones(3))),
    "a History of taken names": (ValueError, "another", lambda: jamp.History().append(STATE, loss_scale=1.0)),
    "a History inside jit": (TypeError, "outside", lambda: jax.jit(lambda s: jamp.History().append(s))(STATE)),
    "a wrong policy": (ValueError, "'warn'", lambda: jamp.check_health(STATE, policy="ignore")),
    "check_health inside jit": (TypeError, "jax.debug.callback", lambda: jax.jit(jamp.check_health)(STATE)),
    "check_health with a list": (TypeError, "jamp.History", lambda: jamp.check_health(STATE, history=[1.0])),
    "check_health with a state": (TypeError, "DynamicLossScale()", lambda: jamp.check_health(STATE, loss_scale=STATE)),
    "GradScaler with a number": (TypeError, "jamp.GradScaler.static", lambda: jamp.GradScaler(65536.0)),
    "GradScaler with a device": (TypeError, "jamp.DynamicLossScale", lambda: jamp.GradScaler("cuda")),
    "GradScaler with both": (ValueError, "itself", lambda: jamp.GradScaler(jamp.StaticLossScale(), growth_factor=2.0)),
    "scaler.update()": (ValueError, "scaler.update", lambda: SCALER.update()),
    "scaler.step without gradients": (ValueError, "scaler.value_and_grad", lambda: step()),
    "scaler.step with a pair": (TypeError, "grads =", lambda: step(grads=SCALER.value_and_grad(loss_fn)(PARAMS))),
    "scaler.step, swapped": (ValueError, "opt_state,", lambda: SCALER.step(ADAM, PARAMS, PLAIN, grads=GRADS)),
    "scaler.step of a state": (TypeError, "scaler.step", lambda: SCALER.step(PLAIN, ADAM, PARAMS, grads=GRADS)),
    "step of loss_scaled": (ValueError, "plain", lambda: SCALER.step(TX, STATE, PARAMS, grads=GRADS)),
    "scaler.scale of an int": (TypeError, "in float32", lambda: SCALER.scale(3)),
    "an empty state dict": (ValueError, "enabled=", lambda: SCALER.load_state_dict({})),
    "torch's state dict": (ValueError, "jamp.interop.from_torch", lambda: SCALER.load_state_dict({"scale": 1.0})),
    "a state for a state dict": (ValueError, "scaler.state_dict", lambda: SCALER.load_state_dict(STATE)),
    "from_torch of a scaler": (TypeError, "jamp.interop.from_torch", lambda: interop.from_torch(SCALER)),
    "from_torch of an empty dict": (ValueError, "enabled=", lambda: interop.from_torch({})),
    "from_torch of a number": (TypeError, "mapping", lambda: interop.from_torch(3.0)),
    "to_torch of a state": (TypeError, "jamp.interop.to_torch", lambda: interop.to_torch(STATE)),
    "wrap_state with a number": (TypeError, "jamp.StaticLossScale", lambda: interop.wrap_state(PLAIN, 8.0)),
    "wrap_state twice": (ValueError, "plain", lambda: interop.wrap_state(STATE)),
    "unwrap_state of a plain state": (ValueError, "jamp.loss_scaled", lambda: interop.unwrap_state(PLAIN)),
    "quantize_state twice": (ValueError, "update", lambda: interop.quantize_state(QUANTIZED.init(WIDE))),
    "dequantize_state of Adam's": (TypeError, "jamp.quantized_state", lambda: interop.dequantize_state(PLAIN)),
    "split_masters, swapped": (TypeError, "master_params(tx)", lambda: interop.split_masters(LOW, MASTERS.init(LOW))),
    "join_masters, swapped": (TypeError, "jamp.master_params", lambda: interop.join_masters(LOW, SPLIT.init(LOW))),
    # jamp.debug and jamp.plot.
    "the arguments in the first call": (TypeError, "grad=True", lambda: debug.find_nonfinite(loss_fn, PARAMS, X)),
    "find_nonfinite of a loss": (TypeError, "grad=True", lambda: debug.find_nonfinite(loss_fn(PARAMS, X))),
    "find_nonfinite of a batch": (TypeError, "grad=True", lambda: debug.find_nonfinite(X)(PARAMS)),
    "params as a function": (TypeError, "grad=True", lambda: debug.find_nonfinite(PARAMS)(X)),
    "find_nonfinite of a dtype": (TypeError, "grad=True", lambda: debug.find_nonfinite(jnp.float16)),
    "opt_state for params": (TypeError, "grad=True", lambda: debug.find_nonfinite(loss_fn)(STATE, X)),
    "rounding_report without a dtype": (TypeError, "jnp.bfloat16", lambda: debug.rounding_report(loss_fn)(PARAMS, X)),
    "rounding dtype=": (TypeError, "jnp.bfloat16", lambda: debug.rounding_report(loss_fn, dtype="bfloat16")),
    "params for a dtype": (TypeError, "jnp.bfloat16", lambda: debug.rounding_report(loss_fn, PARAMS)(X)),
    "the dtype first": (TypeError, "jnp.bfloat16", lambda: debug.rounding_report(jnp.bfloat16, loss_fn)),
    "rounding, all at once": (TypeError, "bfloat16", lambda: debug.rounding_report(loss_fn, jnp.bfloat16, PARAMS, X)),
    "a report of opt_state": (TypeError, "jnp.bfloat16", lambda: debug.rounding_report(loss_fn, "float16")(STATE, X)),
    "one function": (TypeError, "compare(fun", lambda: debug.compare(loss_fn)(PARAMS, X)),
    "two losses": (TypeError, "compare(fun", lambda: debug.compare(loss_fn(PARAMS, X), jnp.ones(()))),
    "params to compare": (TypeError, "compare(fun", lambda: debug.compare(loss_fn, PARAMS)(X)),
    "opt_state to compare": (TypeError, "compare(fun", lambda: debug.compare(loss_fn, loss_fn)(STATE, X)),
    "a function to count": (TypeError, "nonfinite_report(grads", lambda: debug.nonfinite_report(loss_fn)),
    "underflow_report, swapped": (TypeError, "underflow_report(grads", lambda: debug.underflow_report(STATE, PARAMS)),
    "underflow_report without a state": (TypeError, "underflow_report(grads", lambda: debug.underflow_report(PARAMS)),
    "gradients of a function": (TypeError, "underflow_report(grads", lambda: debug.underflow_report(loss_fn, STATE)),
    "opt_state for updates": (TypeError, "tx.update", lambda: debug.lost_updates(PARAMS, STATE)),
    "what update returns": (ValueError, "tx.update", lambda: debug.lost_updates(PARAMS, (PARAMS, STATE))),
    "lost_updates without updates": (TypeError, "tx.update", lambda: debug.lost_updates(PARAMS)),
    "a function for updates": (TypeError, "tx.update", lambda: debug.lost_updates(PARAMS, loss_fn)),
    "the arguments to compile": (TypeError, "jamp.recompute", lambda: debug.memory_curve(of_budget, PARAMS, X)),
    "a curve of results": (TypeError, "jamp.recompute", lambda: debug.memory_curve(lambda budget: X)(X)),
    "a curve of one budget": (TypeError, "(1.0, 0.5, 0)", lambda: debug.memory_curve(of_budget, 0.5)),
    "a plot of no steps": (ValueError, "history.append", lambda: jamp.plot.loss_scale_history(jamp.History())),
    "a plot of no gradients": (ValueError, "none", lambda: jamp.plot.gradient_range({"w": X * 0}, STATE)),
}


def modules():
    """Misuse with modules of Flax and Equinox."""
    import equinox as eqx
    from flax import linen as nn, nnx

    import jamp.equinox
    import jamp.linen
    import jamp.nnx

    class Model(nnx.Module):
        def __init__(self, *layers):
            self.layers = nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(0)), *layers])

        def __call__(self, x):
            return functools.reduce(lambda x, layer: layer(x), self.layers, x)

    class Method(nn.Module):
        @jamp.autocast("bf16")
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(x)

    class Inside(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jamp.recompute(nn.Dense(4), 0.5)(x)

    X, KEY = jnp.ones((2, 4)), jax.random.key(0)
    LINEN = nn.Dense(4)
    VARIABLES = LINEN.init(KEY, X)
    create = functools.partial(jamp.linen.TrainState.create, apply_fn=LINEN.apply, params=VARIABLES["params"])
    train_state, ones = create(tx=ADAM), VARIABLES["params"]
    EQX = eqx.nn.MLP(4, 4, 4, 1, key=KEY)
    ARRAYS = eqx.filter(EQX, eqx.is_inexact_array)
    EQX_STATE = TX.init(ARRAYS)
    PLAIN, DROPOUT = Model(), Model(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    NORMED = Model(nnx.BatchNorm(4, rngs=nnx.Rngs(0)))
    optimizer, adam = jamp.nnx.Optimizer, {"tx": ADAM, "wrt": nnx.Param}
    OPTIMIZER = optimizer(PLAIN, **adam)
    linen_loss = lambda params: LINEN.apply({"params": params}, X).sum()
    nnx_loss = lambda model: jnp.mean(model(X) ** 2)
    eqx_loss = lambda model: jnp.mean(jax.vmap(model)(X) ** 2)
    eqx_grad, eqx_step = jamp.equinox.filter_value_and_grad, jamp.equinox.apply_gradients
    nnx_grad = jamp.nnx.value_and_grad
    return {
        "autocast of a Linen module": (TypeError, "jamp.autocast", lambda: jamp.autocast(LINEN, "bf16")),
        "a decorator of a Linen module": (TypeError, "jamp.autocast", lambda: jamp.autocast("bf16")(LINEN)),
        "recompute of a Linen module": (TypeError, "jamp.recompute", lambda: jamp.recompute(LINEN, 0.5)),
        "scaled of a Linen module": (TypeError, "jamp.scaled", lambda: jamp.scaled(LINEN)),
        "chunked_sum of a Linen module": (TypeError, "jamp.chunked_sum", lambda: jamp.chunked_sum(LINEN, 2)),
        "full_precision of a Linen module": (TypeError, "jamp.full_precision", lambda: jamp.full_precision(LINEN)),
        "a Linen module": (TypeError, "model.apply", lambda: train_state.value_and_grad(LINEN)),
        "a train state of a number": (TypeError, "jamp.StaticLossScale", lambda: create(tx=ADAM, loss_scale=8.0)),
        "a train state of loss_scaled": (ValueError, "plain", lambda: create(tx=TX)),
        "a train state of a function": (TypeError, "optax.adamw", lambda: create(tx=optax.adam)),
        "a field with the name of a method": (ValueError, "Rename", lambda: create(tx=ADAM, metrics={})),
        "a field that was not created": (TypeError, "create", lambda: train_state.apply_gradients(grads=ones, ema=1)),
        "apply_gradients of a pair": (TypeError, "grads =", lambda: train_state.apply_gradients(grads=(1.0, ones))),
        "a state as params": (TypeError, "state.params", lambda: train_state.value_and_grad(linen_loss)(train_state)),
        "init of a decorated method": (TypeError, "jamp.autocast", lambda: Method().init(KEY, X)),
        "init of a layer": (TypeError, "jamp.recompute", lambda: Inside().init(KEY, X)),
        "autocast of Dropout": (TypeError, "(model,", lambda: jamp.autocast(DROPOUT, "bf16")(X)),
        "autocast of BatchNorm": (TypeError, "(model,", lambda: jax.jit(jamp.autocast(NORMED, "bf16"))(X)),
        "autocast of a closure": (TypeError, "(model,", lambda: jamp.autocast(lambda x: DROPOUT(x), "bf16")(X)),
        "recompute of Dropout": (TypeError, "(model,", lambda: jamp.recompute(DROPOUT, 0.5)(X)),
        "scaled of BatchNorm": (TypeError, "(model,", lambda: jamp.scaled(NORMED)(X)),
        "Dropout": (TypeError, "jamp.nnx.value_and_grad", lambda: jamp.value_and_grad(nnx_loss, STATE)(DROPOUT)),
        "BatchNorm": (TypeError, "jamp.nnx.value_and_grad", lambda: jamp.value_and_grad(nnx_loss, STATE)(NORMED)),
        "grad of Dropout": (TypeError, "jamp.nnx.value_and_grad", lambda: jamp.grad(nnx_loss, STATE)(DROPOUT)),
        "a tuple": (TypeError, "jamp.nnx", lambda: jamp.grad(lambda x: nnx_loss(x[0]), STATE)((DROPOUT, X))),
        "GradScaler of Dropout": (TypeError, "jamp.nnx", lambda: SCALER.value_and_grad(nnx_loss)(DROPOUT)),
        "a gradient with an optimizer": (ValueError, "jamp.nnx", lambda: jamp.value_and_grad(nnx_loss, OPTIMIZER)),
        "nnx.Optimizer": (ValueError, "jamp.nnx", lambda: nnx_grad(nnx_loss, nnx.Optimizer(PLAIN, **adam))(PLAIN)),
        "jamp.nnx with a state": (TypeError, "jamp.nnx.Optimizer", lambda: nnx_grad(nnx_loss, STATE)(PLAIN)),
        "jamp.nnx with a GradScaler": (TypeError, "nnx.DiffState", lambda: nnx_grad(nnx_loss, SCALER)(PLAIN)),
        "jamp.nnx, swapped": (ValueError, "opt_state", lambda: nnx_grad(OPTIMIZER, nnx_loss)(PLAIN)),
        "the batch first": (TypeError, "(model, batch)", lambda: nnx_grad(nnx_loss, OPTIMIZER)(X, PLAIN)),
        "jamp.nnx of a pair": (TypeError, "has_aux=", lambda: nnx_grad(lambda m: (nnx_loss(m), 1), OPTIMIZER)(PLAIN)),
        "an optimizer, swapped": (TypeError, "jamp.nnx.Optimizer", lambda: optimizer(ADAM, PLAIN, wrt=nnx.Param)),
        "an optimizer of loss_scaled": (ValueError, "plain", lambda: optimizer(PLAIN, TX, wrt=nnx.Param)),
        "an optimizer with a number": (TypeError, "StaticLossScale", lambda: optimizer(PLAIN, **adam, loss_scale=1024)),
        "a module, swapped": (TypeError, "optimizer.update", lambda: OPTIMIZER.update(nnx.state(PLAIN), PLAIN)),
        "metrics of a split optimizer": (ValueError, "restore", lambda: jamp.metrics(nnx.split(OPTIMIZER)[0])),
        "Equinox": (TypeError, "filter_value_and_grad", lambda: jamp.value_and_grad(eqx_loss, EQX_STATE)(EQX)),
        "filter_value_and_grad with a model": (ValueError, "opt_state", lambda: eqx_grad(eqx_loss, EQX)(EQX)),
        "filter_value_and_grad, swapped": (ValueError, "opt_state", lambda: eqx_grad(EQX_STATE, eqx_loss)(EQX)),
        "the optimizer second": (TypeError, "optax.adamw", lambda: eqx_step(ARRAYS, TX, EQX_STATE, EQX)),
        "apply_gradients, the state second": (TypeError, "tx.update", lambda: eqx_step(TX, EQX_STATE, ARRAYS, EQX)),
        "a filtered pair": (TypeError, "grads =", lambda: eqx_step(TX, (1.0, ARRAYS), EQX_STATE, EQX)),
    }


if importlib.util.find_spec("flax") and importlib.util.find_spec("equinox"):
    MISUSE |= modules()


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_an_error_that_names_the_cure(name):
    error, cure, call = MISUSE[name]
    with pytest.raises(error) as caught:  # Warnings are errors here.
        call()
    text = str(caught.value)
    assert cure in text, text
    # A dump of arrays or tracers hides the words that help.
    assert len(text) < 500
    assert "Tracer<" not in text


def test_what_is_no_misuse_passes():
    whole = optax.masked(SCALED, dict.fromkeys(LEFT, True))
    update(whole, state(whole))
    numbers = {"w": 1.0}
    assert SCALED.update(numbers, SCALED.init(numbers), numbers)[1].grads_finite
    assert jamp.grad(lambda x, y: x * y, state(SCALED), argnums=np.int64(1))(2.0, 3.0) == 2.0

    class Own(jamp.LossScaledState):
        pass

    assert type(SCALED.update(GRADS, Own(*state(SCALED)), PARAMS)[1]) is Own


TENTH = optax.chain(ROUNDING, optax.scale(0.1))
UNROUNDED = {
    "scale": optax.chain(TENTH, optax.scale(0.1)),
    "jit": optax.GradientTransformationExtraArgs(TENTH.init, jax.jit(TENTH.update)),
    "schedule": optax.chain(ROUNDING, optax.scale_by_schedule(optax.linear_schedule(0.1, 0.0, 4))),
    "schedule_free": optax.contrib.schedule_free(ROUNDING, 0.1),
}


def rounded_step(tx, params, loss_scale=jamp.StaticLossScale(1.0)):
    tx = jamp.loss_scaled(tx, loss_scale)
    return jax.eval_shape(lambda p: tx.update(p, tx.init(p), p)[0], params)


@pytest.mark.parametrize("name", UNROUNDED)
def test_updates_that_change_after_their_rounding_are_an_error(name):
    tx = UNROUNDED[name]
    with pytest.raises(ValueError, match="rounding last"):
        rounded_step(tx, LOW)
    with pytest.raises(ValueError, match="rounding last"):
        rounded_step(optax.partition({True: tx, False: SGD}, LEFT), LOW)
    with pytest.warns(UserWarning, match="does nothing"):
        rounded_step(tx, PARAMS)  # float32 parameters are not rounded
    rounded_step(optax.partition({True: SGD, False: tx}, LEFT), LOW | {"b": PARAMS["b"]})


def test_what_leaves_rounded_updates_as_they_are_passes():
    masking = optax.stateless(lambda updates, p: jax.tree.map(lambda u, x: u * (x > 0), updates, p))

    @jax.custom_jvp
    def straight_through(x, rounded):
        return rounded

    straight_through.defjvp(lambda primals, tangents: (primals[1], tangents[0]))
    own = optax.stateless(lambda updates, _: jax.tree.map(lambda u: 0.1 * straight_through(u, jnp.round(u)), updates))
    rounded_step(own, PARAMS)
    rounded_step(jamp.stochastic_rounding(own), LOW)
    for after in (optax.identity(), optax.keep_params_nonnegative(), masking, optax.scale(1.0)):
        rounded_step(optax.chain(ROUNDING, after), LOW)
    around = optax.apply_if_finite(ROUNDING, 5), optax.inject_hyperparams(optax.sgd)(0.1)
    for tx in (*around, jamp.stochastic_rounding(optax.contrib.schedule_free(SGD, 0.1)), optax.scale(0.5)):
        same = rounded_step(tx, LOW), rounded_step(tx, LOW, jamp.NoOpLossScale())
        assert jax.tree.structure(same[0]) == jax.tree.structure(same[1])


def test_a_clip_or_a_decay_before_unscale_in_a_chain_warns_at_the_caller():
    for before in (optax.clip_by_global_norm(1.0), optax.clip(1.0), optax.add_decayed_weights(0.1)):
        for chain in (optax.chain(before, UNSCALING), optax.chain(optax.scale(2.0), optax.chain(before, UNSCALING))):
            with pytest.warns(UserWarning, match="clip") as caught:
                jax.jit(lambda s: jamp.scale_loss(1.0, s))({"opt": state(chain)})
            assert [w.filename for w in caught] == [__file__]


def test_multisteps_around_loss_scaled_warns_at_the_caller():
    for tx in (optax.MultiSteps(STATIC, 4), optax.chain(optax.MultiSteps(SCALED, 4), optax.scale(0.5))):
        with pytest.warns(UserWarning, match="micro-batch") as caught:
            jax.jit(lambda s: jamp.scale_loss(1.0, {"opt": s}))(state(tx))
        assert [w.filename for w in caught] == [__file__]
        jamp.metrics(state(tx))


def test_zero_nans_before_or_an_optimizer_after_loss_scaled_warns_at_the_caller():
    adam, before, after = optax.adam(0.1), "zero_nans", "adamw"
    no_state = [jamp.loss_scaled(x, scale) for x in (optax.identity(), optax.clip(1.0)) for scale in (LARGE, EIGHT)]
    chains = {optax.chain(optax.zero_nans(), tx): before for tx in (SCALED, STATIC, optax.chain(SCALED, SGD))}
    chains |= {optax.chain(tx, then): after for tx in no_state for then in (adam, MOMENTUM, optax.ema(0.9))}
    chains |= {optax.chain(optax.scale(2.0), optax.zero_nans(), optax.chain(jamp.loss_scaled(SGD), SGD)): before}
    for chain, match in chains.items():
        for look_up in (lambda s: jamp.grad(loss_fn, s), lambda s: jamp.scale_loss(1.0, s)):
            with pytest.warns(UserWarning, match=match) as caught:
                jax.eval_shape(lambda s, f=look_up: jax.tree.leaves(f({"opt": s})) and None, state(chain))
            assert {w.filename for w in caught} == {__file__}


def test_float16_parameters_without_masters_warn_at_the_caller():
    for call in (lambda: SCALED.init(HALF), lambda: SCALER.step(SGD, SGD.init(HALF), HALF, grads=GRADS)):
        with pytest.warns(UserWarning, match="master_params") as caught:
            call()
        assert [w.filename for w in caught] == [__file__]
    jamp.loss_scaled(jamp.master_params(MOMENTUM)).init(HALF)
    jamp.loss_scaled(MOMENTUM, jamp.NoOpLossScale()).init(HALF)
    SCALED.init(HALF | {"b": PARAMS["b"]})  # such as frozen float16 weights with float32 adapters
    SCALED.init(LOW)


def test_scale_loss_and_value_and_grad_are_silent_in_correct_chains():
    clip = optax.clip(1.0)
    inside = jamp.loss_scaled(optax.chain(clip, optax.add_decayed_weights(0.1), SGD), unscale=True)
    unscaled, skipping = jamp.loss_scaled(SGD, jamp.NoOpLossScale()), {"should_skip_update_fn": optax.skip_not_finite}
    for tx in (
        inside,
        optax.chain(inside, clip),
        optax.chain(SCALED, clip, optax.scale(0.5)),
        # The norm of an overflow is inf or NaN, so these hand it on.
        *(optax.chain(x, SCALED) for x in (optax.clip_by_global_norm(1.0), optax.scale(2.0), optax.identity())),
        optax.chain(jamp.loss_scaled(optax.adam(0.1)), optax.scale_by_schedule(lambda _: 0.5)),
        jamp.loss_scaled(optax.MultiSteps(SGD, 2)),
        optax.chain(clip, unscaled, optax.adam(0.1)),
        optax.MultiSteps(unscaled, 2),
        optax.MultiSteps(STATIC, 2, **skipping),
    ):
        jamp.scale_loss(1.0, (PARAMS, state(SGD), state(tx)))
    jamp.scale_loss(1.0, (state(jamp.loss_scaled(SGD)), PARAMS, jnp.ones(2)))
    jamp.scale_loss(1.0, (state(jamp.loss_scaled(SGD)), state(optax.ema(0.9))))  # a user's tuple
    jamp.scale_loss(1.0, state(optax.chain(clip, jamp.loss_scaled(SGD, jamp.NoOpLossScale(), unscale=True))))
    fixed = [jamp.loss_scaled(SGD, x) for x in (jamp.NoOpLossScale(), jamp.StaticLossScale(8.0))]
    for tx in (jamp.loss_scaled(optax.apply_if_finite(SGD, 5)), *(optax.apply_if_finite(x, 5) for x in fixed)):
        assert jamp.grad(loss_fn, {"frozen": state(optax.apply_if_finite(SGD, 5)), "opt": state(tx)})


CONSTANT = state(SCALED)
FROZEN = {
    "value_and_grad": jax.jit(jamp.value_and_grad(loss_fn, CONSTANT)),
    "grad, called in a step": jax.jit(lambda p, f=jamp.grad(loss_fn, CONSTANT): f(p)),
    "scale_loss": jax.jit(jax.grad(lambda p, s=state(UNSCALING): jamp.scale_loss(loss_fn(p), {"opt": s}))),
    "of autocast": jax.jit(jamp.autocast(jamp.grad(loss_fn, CONSTANT), jnp.float16)),
    "GradScaler.value_and_grad": jax.jit(lambda p, f=jamp.GradScaler().value_and_grad(loss_fn): f(p)),
    "GradScaler.scale": jax.jit(jax.grad(lambda p, scaler=jamp.GradScaler(): scaler.scale(loss_fn(p)))),
    "another loss scale": jax.jit(jamp.grad(loss_fn, jamp.AdaptiveLossScale().init())),
    "numbers of a checkpoint": jax.jit(jamp.grad(loss_fn, jax.tree.map(np.asarray, CONSTANT))),
}


@pytest.mark.parametrize("name", FROZEN)
def test_a_loss_scale_that_is_a_constant_of_a_jitted_function_warns_at_the_caller(name):
    with pytest.warns(UserWarning, match="jitted") as caught:
        FROZEN[name].lower(PARAMS)
    assert [w.filename for w in caught] == [__file__]


def test_a_loss_scale_that_is_traced_or_read_at_each_call_or_never_changes_is_silent():
    grad = jamp.grad(loss_fn, CONSTANT)
    jax.jit(lambda p, s: jamp.grad(loss_fn, s)(p)).lower(PARAMS, CONSTANT)
    jax.jit(lambda p: jamp.grad(loss_fn, state(SCALED))(p)).lower(PARAMS)  # a state that the step itself makes
    jax.jit(lambda p: lax.scan(lambda s, _: (s, jamp.grad(loss_fn, s)(p)), CONSTANT, length=2)).lower(PARAMS)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), (PARAMS, CONSTANT))
    jax.vmap(lambda p, s: jax.jit(jamp.grad(loss_fn, s))(p))(*stacked)
    grad(PARAMS)
    jax.vmap(grad)(stacked[0])
    jax.jvp(grad, (PARAMS,), (PARAMS,))
    jax.grad(lambda p: jamp.scale_loss(loss_fn(p), CONSTANT))(PARAMS)
    jamp.autocast(grad, jnp.float16)(PARAMS)  # outside jit it is traced at each call
    jamp.autocast_report(grad, jnp.float16)(PARAMS)
    with jax.disable_jit():
        jax.jit(grad)(PARAMS)
    for fixed in (jamp.NoOpLossScale(), jamp.StaticLossScale(8.0), jamp.GradScaler.static().loss_scale):
        jax.jit(jamp.grad(loss_fn, jamp.loss_scaled(SGD, fixed).init(PARAMS))).lower(PARAMS)
    jax.jit(lambda: jamp.scale_loss(jnp.float32(1.0), state(SCALED))).lower()


def test_products_that_are_not_entered_warn_once_with_their_share():
    def kernel(x, y, o):
        o[...] = (x[...] @ y[...]).astype(jnp.float32)

    product = pl.pallas_call(kernel, jax.ShapeDtypeStruct((16, 16), jnp.float32), interpret=True)
    fun = jamp.autocast(lambda x: product(x, x) @ x, jnp.float16)
    with pytest.warns(UserWarning, match=r"50.0%.* test_misuse.py:") as caught:
        jax.jit(fun)(jnp.ones((16, 16)))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        low = jnp.ones((16, 16), jnp.bfloat16)
        jamp.autocast(lambda x, y: jnp.float32(product(x, x).sum()) + (y @ y).sum(), jnp.float16)(
            low, jnp.ones((16, 16))
        )


FUNCTIONS = {
    "grad_fn": optax.contrib.sam(optax.sgd(0.01), optax.sgd(0.05), opaque_mode=True),
    "value_fn": optax.lbfgs(),
    "obj_fn": optax.sgd(0.1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_for_the_inner_optimizer_and_unscale_are_an_error(name):
    tx, w = jamp.loss_scaled(FUNCTIONS[name], unscale=True), jnp.zeros(4)
    with pytest.raises(ValueError, match=f"{name}=.*jamp.grad"):
        tx.update(w, tx.init(w), w, **{name: lambda w: jnp.sum(w)})


def test_a_rule_that_matches_no_operation_is_a_warning_that_names_scopes_like_it():
    def fun(w, x):
        with jax.named_scope("body"):
            h = jnp.tanh(x @ w)
        with jax.named_scope("head"):
            return lax.scan(lambda c, _: (c @ w, None), h, None, length=2)[0]

    w, x = jnp.ones((16, 16)), jnp.ones((2, 16))
    for rules in (
        {"dot_general[head]": "float32"},
        {"tanh": "float32", "scan": "float32"},
        {"dot_general[gradient]": "compute", "dot_general[precision]": "compute"},
    ):
        jamp.autocast(fun, jnp.bfloat16, rules=rules)(w, x)
    for key, hint in {
        "dot_general[haed]": " Scopes with a similar name: head.",
        "dot_general[bdoy]": " Scopes with a similar name: body.",
        "conv_general_dilated[head]": " The scope has no such operation, or an earlier rule",
        "dot_general[zzz]": r" Name a scope: jax.named_scope\('zzz'\).",
        "exp": "",
        "while": "",
    }.items():
        with pytest.warns(UserWarning, match=rf"^The rule for '{re.escape(key)}' matches no operation of.*{hint}"):
            jamp.autocast(fun, jnp.bfloat16, rules={key: "float32"})(w, x)
    # The derivative of a custom rule is traced later, so that nobody knows yet.
    own = jax.custom_jvp(lambda w, x: x @ w)
    own.defjvp(lambda p, t: (own(*p), jnp.exp(t[1] @ p[0])))
    jamp.autocast(own, jnp.bfloat16, rules={"exp": "float32"})(w, x)
    by_hand = jax.custom_vjp(lambda w, x: x @ w)
    back = jax.named_scope("back")(lambda kept, g: (kept[1].T @ g, g @ kept[0].T))
    by_hand.defvjp(lambda w, x: (x @ w, (w, x)), back)
    jax.grad(lambda w: jamp.autocast(by_hand, jnp.bfloat16, rules={"dot_general[back]": "float32"})(w, x).sum())(w)
    # The derivatives of JAX's own functions have no scopes.
    with_relu = lambda w, x: jax.nn.relu(fun(w, x))
    jamp.autocast(with_relu, jnp.bfloat16, rules={"exp": "float32"})(w, x)
    with pytest.warns(UserWarning, match=r"^The rule for 'dot_general\[zzz\]' matches no operation"):
        jamp.autocast(with_relu, jnp.bfloat16, rules={"dot_general[zzz]": "float32"})(w, x)
    with pytest.raises(ValueError, match="Did you mean 'dot_general'"):
        jamp.autocast(fun, jnp.bfloat16, rules={"dot_genral": "float32"})
