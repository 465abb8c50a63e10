"""Mistakes of a first day with jamp: each is an error, or a warning, that holds the right line or the right name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp

pytestmark = pytest.mark.promotes("optax")

PARAMS = {"w": jnp.ones((16, 16)), "b": jnp.ones(16)}
LOW, WIDE = jamp.cast_floating(PARAMS, "bfloat16"), {"w": jnp.ones((64, 128))}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)
X = jnp.ones((8, 16))
ADAM, MOMENTUM = optax.adam(0.1), optax.sgd(0.1, momentum=0.9)
TX, SCALER = jamp.loss_scaled(ADAM), jamp.GradScaler()
STATE, PLAIN = TX.init(PARAMS), ADAM.init(PARAMS)
# Its state becomes None where a gradient is, as that of Adam in Optax 0.2.5.
MOMENT = optax.GradientTransformation(lambda params: params, lambda grads, state, params: (grads, grads))
LENIENT = jamp.loss_scaled(MOMENT)
REFUSES = jamp.loss_scaled(optax.stateless(lambda grads, params: jax.tree.map(jnp.add, grads, params)))
UNSCALING = jamp.loss_scaled(ADAM, unscale=True)
MASTERS, SPLIT = jamp.master_params(ADAM), jamp.master_params(ADAM, split=True)
BF16 = jnp.bfloat16


def loss_fn(params, x=X):
    return jnp.mean((jnp.matmul(x, params["w"]) + params["b"][None]) ** 2)


def loss_sum(params, x):
    return jnp.sum(jnp.matmul(x, params["w"]))


def kept(loss_scale_state):
    return jax.jit(jamp.value_and_grad(loss_fn, loss_scale_state)).lower(PARAMS)


def scaled_step(state):
    return TX.update(jax.grad(lambda p: jamp.scale_loss(loss_fn(p), state))(PARAMS), state, PARAMS)


autocast, value_and_grad = functools.partial(jamp.autocast, loss_fn), functools.partial(jamp.value_and_grad, loss_fn)
step = functools.partial(SCALER.step, ADAM, PLAIN, PARAMS)
matched = lambda **rules: autocast(BF16, rules=rules)
A_CAST, A_DECORATOR = "jamp.autocast(loss_fn, jnp.bfloat16)(params, batch)", "@jamp.autocast(jnp.bfloat16) above"
A_GRAD, A_STATE = "jamp.value_and_grad(loss_fn, opt_state)", "opt_state = tx.init(params)"
AN_UPDATE, A_SCALED = "tx.update(grads, state, params)", "`tx = jamp.loss_scaled(tx)`"

# What is done, and words that the error or the warning holds.
MISTAKES = {
    # autocast: forms of decorators, and what is not a function.
    "@autocast": (lambda: jamp.autocast(loss_fn), A_DECORATOR),
    "@autocast()": (lambda: jamp.autocast(), A_DECORATOR),
    "autocast of a device": (lambda: jamp.autocast("cuda")(loss_fn), "jnp.bfloat16"),
    "autocast of swapped arguments": (lambda: jamp.autocast(BF16, loss_fn), A_CAST),
    "autocast of params": (lambda: jamp.autocast(PARAMS, BF16), "jamp.cast_floating(params, jnp.bfloat16)"),
    "autocast of an array": (lambda: jamp.autocast(X, BF16), "jamp.cast_floating(params, jnp.bfloat16)"),
    "autocast of a state": (lambda: jamp.autocast(STATE, BF16), A_CAST),
    "autocast of a list": (lambda: jamp.autocast([loss_fn, loss_fn], BF16), A_CAST),
    "autocast of a result": (lambda: jamp.autocast(loss_fn(PARAMS), BF16), A_CAST),
    "a decorator of params": (lambda: jamp.autocast(BF16)(PARAMS), A_CAST),
    "a decorator of a class of functions": (lambda: jamp.autocast(BF16)(type("Model", (), {})), "decorate its method"),
    "a decorator without a dtype": (lambda: jamp.autocast(None), A_DECORATOR),
    # autocast: dtypes and rules.
    "autocast to float64": (lambda: autocast(jnp.float64), "leave autocast out"),
    "autocast to int8": (lambda: autocast("int8"), "jamp.Int8()"),
    "autocast to fp8": (lambda: autocast("fp8"), "jamp.Float8()"),
    "autocast to e4m3": (lambda: autocast(jnp.float8_e4m3fn), "jamp.Float8()"),
    "autocast to a class": (lambda: autocast(jamp.Float8), "jamp.Float8()"),
    "a decorator of a class": (lambda: jamp.autocast(jamp.MXFP8)(loss_fn), "jamp.MXFP8()"),
    "a wrong name of a dtype": (lambda: autocast("bfloat"), "jnp.bfloat16"),
    "a rule for a layer": (lambda: matched(softmx="float32"), "'dot_general'"),
    "a rule for matmul": (lambda: matched(matmul="float32"), "'dot_general'"),
    "a rule with a typing error": (lambda: matched(dot_generl="float32"), "'dot_general'"),
    "a rule with a short name": (lambda: matched(tanh="fp32"), "float32"),
    "a rule with a dtype": (lambda: matched(tanh=jnp.float32), "compute, accumulate, float32, widest"),
    "rules as a list": (lambda: autocast(BF16, rules=["tanh"]), '{"tanh": "float32"}'),
    "a rule for a scan": (lambda: matched(scan="compute"), "must be 'float32'"),
    "a rule that matches nothing": (lambda: matched(tanh="float32")(PARAMS), "'tanh' matches no operation"),
    "a budget without recomputation": (lambda: autocast(BF16, recompute=False, memory_budget=0.5), "recompute=False"),
    "nothing to cast": (lambda: autocast(BF16)(LOW, X.astype(BF16)), "its operands are 16 bit already"),
    "Float8 on small products": (lambda: autocast(jamp.Float8())(PARAMS), "min_size=128"),
    "Float8 on coordinates": (
        lambda: jamp.autocast(jnp.matmul, jamp.Float8())(X[:, :3], jnp.eye(3)),
        "it sums at most 8 terms, as products of coordinates",
    ),
    "a wide carrier": (lambda: jamp.Float8(carrier="fp32"), "jamp.Float8(carrier=jnp.bfloat16)"),
    "a wrong granularity": (lambda: jamp.Float8(granularity="block"), "'tensor' or 'row'"),
    "a size of 0": (lambda: jamp.Int8(min_size=0), "at least 1"),
    "a report of params": (lambda: jamp.autocast_report(PARAMS, "bf16"), "jamp.autocast_report(loss_fn, jnp.bfloat16)"),
    "a report, swapped": (lambda: jamp.autocast_report("bf16", loss_fn), "jamp.autocast_report(loss_fn, jnp.bfloat16)"),
    "a report without a dtype": (lambda: jamp.autocast_report(loss_fn, None), "jnp.bfloat16"),
    "full_precision of an array": (lambda: jamp.full_precision(X), "jamp.full_precision(loss_fn)"),
    # recompute, scaled, chunked_sum.
    "a budget of 2": (lambda: jamp.recompute(loss_fn, 2.0), '"2GiB"'),
    "a budget of apples": (lambda: jamp.recompute(loss_fn, "4 apples"), "GiB"),
    "a budget of None": (lambda: jamp.recompute(loss_fn, None), '"12GiB"'),
    "recompute, swapped": (lambda: jamp.recompute(0.5, loss_fn), "jamp.recompute(loss_fn, 0.5)"),
    "recompute of params": (lambda: jamp.recompute(PARAMS, 0.5), "jamp.recompute(loss_fn, 0.5)"),
    "memory_report of params": (lambda: jamp.memory_report(PARAMS), "jamp.memory_report(loss_fn, 0.5)"),
    "scaled gradients": (lambda: jamp.scaled(GRADS), "jamp.scaled(loss_fn)"),
    "scaled with a state": (lambda: jamp.scaled(loss_fn, STATE), A_GRAD),
    "scaled with a text": (lambda: jamp.scaled(loss_fn, "big"), "2.0**15"),
    "scaled inside value_and_grad": (lambda: jamp.value_and_grad(jamp.scaled(loss_fn), STATE)(PARAMS), A_GRAD),
    "chunks of 0": (lambda: jamp.chunked_sum(loss_sum, 0), "1 or more"),
    "chunks of a text": (lambda: jamp.chunked_sum(loss_sum, "64"), "1 or more"),
    "chunks, swapped": (lambda: jamp.chunked_sum(64, loss_sum), "jamp.chunked_sum(loss_fn, 1024)(params, batch)"),
    "chunks of a mean": (lambda: jamp.chunked_sum(loss_fn, 2)(PARAMS, X), "jamp.chunked_sum(loss_sum, n)"),
    "chunks without rows": (lambda: jamp.chunked_sum(loss_sum, 2)(PARAMS), "jamp.chunked_sum(fun, 1024)(params, x, y)"),
    "chunks along a text": (lambda: jamp.chunked_sum(loss_sum, 2, axis="0"), "axis=0"),
    "chunks of a number": (lambda: jamp.chunked_sum(loss_sum, 2)(PARAMS, jnp.float32(1)), "in params"),
    "chunks of unequal rows": (lambda: jamp.chunked_sum(loss_sum, 2)(PARAMS, X, X[:3]), "rows[1] has 3"),
    "chunks of logits": (lambda: jamp.chunked_sum(lambda p, x: x, 2)(PARAMS, X), "summed over its rows"),
    # value_and_grad.
    "value_and_grad, swapped": (lambda: jamp.value_and_grad(STATE, loss_fn), A_GRAD),
    "value_and_grad of a list": (lambda: jamp.value_and_grad([loss_fn], STATE), A_GRAD),
    "value_and_grad with the optimizer": (lambda: value_and_grad(TX), A_STATE),
    "value_and_grad with a loss scale": (lambda: value_and_grad(jamp.DynamicLossScale()), "loss_scale.init()"),
    "value_and_grad with argnums": (lambda: value_and_grad(0), A_GRAD),
    "value_and_grad with params": (lambda: value_and_grad(PARAMS), A_SCALED),
    "value_and_grad with a plain state": (lambda: value_and_grad(PLAIN), A_SCALED),
    "value_and_grad with None": (lambda: value_and_grad(None), A_SCALED),
    "value_and_grad with two states": (lambda: value_and_grad((STATE, STATE)), "Pass the one that is meant"),
    "value_and_grad with unscale=True": (lambda: value_and_grad(UNSCALING.init(PARAMS)), "without unscale=True"),
    "a state in place of params": (lambda: value_and_grad(STATE)(STATE), "state.params"),
    "params with a function": (lambda: value_and_grad(STATE)({"f": jnp.tanh}), "jamp.equinox.filter_value_and_grad"),
    "int params": (lambda: value_and_grad(STATE)({"w": jnp.arange(4)}), "jnp.asarray(x, jnp.float32)"),
    "a loss of None": (lambda: jamp.grad(lambda p: None, STATE)(PARAMS), "jnp.mean(losses)"),
    "a loss of many numbers": (lambda: jamp.grad(lambda p: p["b"], STATE)(PARAMS), "jnp.mean(losses)"),
    "a loss of int": (lambda: jamp.grad(lambda p: jnp.int32(1), STATE)(PARAMS), "in float32"),
    "a dictionary of losses": (lambda: jamp.grad(lambda p: {"a": p["b"][0]}, STATE)(PARAMS), "has_aux=True"),
    "a pair without has_aux": (lambda: jamp.grad(lambda p: (p["b"][0], 1), STATE)(PARAMS), "has_aux=True"),
    "has_aux without a pair": (lambda: value_and_grad(STATE, has_aux=True)(PARAMS), "(loss, aux)"),
    "a state outside the step": (lambda: kept(STATE), "Pass the state to the jitted step"),
    # scale_loss and unscale_and_check.
    "scale_loss, swapped": (lambda: jamp.scale_loss(STATE, jnp.float32(1)), "jamp.scale_loss(loss, opt_state)"),
    "scale_loss of a function": (
        lambda: jamp.scale_loss(loss_fn, STATE),
        "jamp.scale_loss(loss_fn(params), opt_state)",
    ),
    "scale_loss with a loss scale": (
        lambda: jamp.scale_loss(jnp.float32(1), jamp.StaticLossScale()),
        "loss_scale.init()",
    ),
    "scale_loss of float16": (lambda: jamp.scale_loss(jnp.float16(1), STATE), "loss.astype(jnp.float32)"),
    "unscale_and_check, swapped": (lambda: jamp.unscale_and_check(STATE, GRADS), "jamp.loss_scaled(...).init(params)"),
    "unscale to int8": (lambda: jamp.unscale_and_check(GRADS, STATE, dtype="int8"), "jnp.float16"),
    # Optimizers and their states.
    "loss_scaled with a number": (lambda: jamp.loss_scaled(ADAM, 65536.0), "jamp.StaticLossScale(65536.0)"),
    "loss_scaled with NumPy's number": (lambda: jamp.loss_scaled(ADAM, np.int32(8)), "jamp.StaticLossScale(8.0)"),
    "loss_scaled with a text": (lambda: jamp.loss_scaled(ADAM, "dynamic"), "jamp.DynamicLossScale()"),
    "loss_scaled with a dtype": (lambda: jamp.loss_scaled(ADAM, jnp.float16), "jamp.loss_scale_for(dtype)"),
    "loss_scaled with a class": (lambda: jamp.loss_scaled(ADAM, jamp.AdaptiveLossScale), "jamp.AdaptiveLossScale()"),
    "loss_scaled with a mapping": (lambda: jamp.loss_scaled(ADAM, {"type": "static"}), "jamp.loss_scale_from_config"),
    "loss_scaled with a scale's state": (lambda: jamp.loss_scaled(ADAM, STATE[0]), "jamp.DynamicLossScale()"),
    "loss_scaled with a scaler": (lambda: jamp.loss_scaled(ADAM, SCALER), "scaler.loss_scale"),
    "loss_scaled with two optimizers": (lambda: jamp.loss_scaled(ADAM, MOMENTUM), "jamp.DynamicLossScale()"),
    "loss_scaled, swapped": (
        lambda: jamp.loss_scaled(jamp.DynamicLossScale(), ADAM),
        "jamp.loss_scaled(tx, loss_scale=",
    ),
    "loss_scaled of a function": (lambda: jamp.loss_scaled(optax.adamw), "jamp.loss_scaled(optax.adamw(1e-3))"),
    "loss_scaled of a rate": (lambda: jamp.loss_scaled(1e-3), "jamp.loss_scaled(optax.adamw(1e-3))"),
    "loss_scaled of a state": (lambda: jamp.loss_scaled(STATE), A_STATE),
    "loss_scaled twice": (lambda: jamp.loss_scaled(TX).init(PARAMS), "Pass the plain optimizer"),
    "loss_scaled of params": (lambda: jamp.loss_scaled(PARAMS), "jamp.loss_scaled(optax.adamw(1e-3))"),
    "loss_scaled in a chain": (
        lambda: value_and_grad(optax.chain(optax.zero_nans(), TX).init(PARAMS)),
        "jamp.loss_scaled(optax.chain(optax.zero_nans(), tx))",
    ),
    "loss_scaled in MultiSteps": (
        lambda: value_and_grad(optax.MultiSteps(TX, 2).init(PARAMS)),
        "jamp.loss_scaled(optax.MultiSteps(tx, every_k_schedule))",
    ),
    "float16 params": (lambda: TX.init(jamp.cast_floating(PARAMS, "fp16")), "jamp.master_params(tx)"),
    "update, swapped": (lambda: TX.update(GRADS, PARAMS, STATE), AN_UPDATE),
    "update with a plain state": (lambda: TX.update(GRADS, PLAIN, PARAMS), "jamp.interop.wrap_state"),
    "update with another loss scale": (
        lambda: jamp.loss_scaled(ADAM, jamp.StaticLossScale(8.0)).update(GRADS, STATE, PARAMS),
        "jamp.convert_loss_scale(state, StaticLossScale(scale=8.0))",
    ),
    "update with a pair": (lambda: TX.update(value_and_grad(STATE)(PARAMS), STATE, PARAMS), "loss, grads ="),
    "update of a moment with None": (
        lambda: LENIENT.update(GRADS | {"b": None}, LENIENT.init(PARAMS), PARAMS),
        "give zeros (jnp.zeros_like) in place of None",
    ),
    "update with many flags": (
        lambda: TX.update(GRADS, STATE, PARAMS, grads_finite=jnp.ones(2, bool)),
        "jnp.all(grads_finite)",
    ),
    "quantized_state of a state": (lambda: jamp.quantized_state(STATE), A_STATE),
    "quantized_state of a plain state": (
        lambda: jamp.quantized_state(PLAIN),
        "jamp.quantized_state(optax.adamw(1e-3))",
    ),
    "quantized_state of loss_scaled": (
        lambda: jamp.quantized_state(TX).init(PARAMS),
        "jamp.loss_scaled(jamp.quantized_state(tx))",
    ),
    "quantized_state of bfloat16": (
        lambda: jamp.quantized_state(ADAM).init({"w": jnp.ones((64, 128), BF16)}),
        "jamp.master_params(jamp.quantized_state(tx), split=True)",
    ),
    "a block of 100": (lambda: jamp.quantized_state(ADAM, block_size=100), "a power of two"),
    "master_params of params": (lambda: jamp.master_params(PARAMS), "jamp.master_params(optax.adamw(1e-3))"),
    "master_params without params": (lambda: MASTERS.update(GRADS, MASTERS.init(LOW)), AN_UPDATE),
    "master_params of int8": (lambda: jamp.master_params(ADAM, "int8"), "jnp.float16"),
    "split masters of float16": (lambda: SPLIT.init(jamp.cast_floating(PARAMS, "fp16")), "jamp.master_params(tx)"),
    "split masters with whole ones": (
        lambda: SPLIT.update(GRADS, MASTERS.init(LOW), LOW),
        "jamp.interop.split_masters",
    ),
    "stochastic_rounding of a function": (
        lambda: jamp.stochastic_rounding(optax.adamw),
        "jamp.stochastic_rounding(optax.adamw(1e-3))",
    ),
    "stochastic_rounding with a key": (
        lambda: jamp.stochastic_rounding(ADAM, seed=jax.random.key(0)),
        "must be an int",
    ),
    "stochastic_rounding of float32": (
        lambda: (tx := jamp.stochastic_rounding(ADAM)).update(GRADS, tx.init(PARAMS), PARAMS),
        "jamp.cast_floating(params, jnp.bfloat16)",
    ),
    "adamw of params": (
        lambda: jamp.optimizers.adamw(PARAMS, 1e-3),
        "tx = jamp.optimizers.adamw(1e-3); tx.init(params)",
    ),
    "adamw of a text": (lambda: jamp.optimizers.adamw("1e-3"), "jamp.optimizers.adamw(1e-3)"),
    "adamw with one beta": (lambda: jamp.optimizers.adamw(1e-3, 0.9), "betas=(0.9, 0.95)"),
    "a negative rate": (lambda: jamp.optimizers.sgd(-0.1), "must not be negative"),
    "nesterov without momentum": (lambda: jamp.optimizers.sgd(0.1, nesterov=True), "needs a momentum"),
    "a momentum of text": (lambda: jamp.optimizers.sgd(0.1, momentum="0.9"), "momentum must be a number"),
    "set_learning_rate, swapped": (
        lambda: jamp.optimizers.set_learning_rate(1e-3, jamp.optimizers.sgd(0.1).init(PARAMS)),
        "jamp.optimizers.set_learning_rate(opt_state, 1e-3)",
    ),
    "the rate of an optimizer": (lambda: jamp.optimizers.get_learning_rate(jamp.optimizers.sgd(0.1)), A_STATE),
    "the rate of Optax's adam": (lambda: jamp.optimizers.get_learning_rate(STATE), "optax.inject_hyperparams"),
    # Loss scales and their states.
    "set_loss_scale, swapped": (lambda: jamp.set_loss_scale(8.0, STATE), "jamp.set_loss_scale(opt_state, 1024.0)"),
    "set_loss_scale to another": (
        lambda: jamp.set_loss_scale(STATE, jamp.StaticLossScale()),
        "jamp.convert_loss_scale",
    ),
    "get_loss_scale of the optimizer": (lambda: jamp.get_loss_scale(TX), A_STATE),
    "metrics of a class": (lambda: jamp.metrics(jamp.GradScaler), A_GRAD),
    "metrics of params": (lambda: jamp.metrics(PARAMS), A_SCALED),
    "reset to a number": (lambda: jamp.reset(STATE, 1024.0), "jamp.StaticLossScale(1024.0)"),
    "reset to another": (lambda: jamp.reset(STATE, jamp.StaticLossScale()), "jamp.convert_loss_scale(tree,"),
    "convert_loss_scale, swapped": (
        lambda: jamp.convert_loss_scale(jamp.StaticLossScale(), STATE),
        "jamp.DynamicLossScale()",
    ),
    "a growth of 0.5": (lambda: jamp.DynamicLossScale(growth_factor=0.5), "such as 2.0"),
    "a scale of text": (lambda: jamp.DynamicLossScale("2**16"), "such as 2.0**16"),
    "a scale of 0": (lambda: jamp.StaticLossScale(0), "such as 2.0**16"),
    "a wrong type in a file": (lambda: jamp.loss_scale_from_config({"type": "dynamc"}), "Did you mean 'dynamic'"),
    "a wrong key in a file": (
        lambda: jamp.loss_scale_from_config({"type": "dynamic", "growth": 2}),
        "Did you mean 'growth_factor'",
    ),
    "a file without a type": (lambda: jamp.loss_scale_from_config({"init_scale": 8.0}), "'dynamic'"),
    "no file": (lambda: jamp.loss_scale_from_config(None), "a mapping with a 'type'"),
    "loss_scale_for int8": (lambda: jamp.loss_scale_for("int8"), "jnp.float16"),
    "cast_floating, swapped": (
        lambda: jamp.cast_floating(jnp.float16, PARAMS),
        "jamp.cast_floating(params, jnp.float16)",
    ),
    "cast_floating, swapped, by name": (
        lambda: jamp.cast_floating("bf16", X),
        "jamp.cast_floating(params, jnp.float16)",
    ),
    "cast_floating with params twice": (lambda: jamp.cast_floating(PARAMS, PARAMS), "such as jnp.float16"),
    "cast_floating to a typing error": (lambda: jamp.cast_floating(PARAMS, "flaot16"), "fp16, bf16"),
    "check_castable, swapped": (
        lambda: jamp.check_castable("fp16", PARAMS),
        "jamp.check_castable(params, jnp.float16)",
    ),
    # Logs and checks.
    "a History of a state": (lambda: jamp.History(STATE), "history.append(opt_state)"),
    "a History of params": (lambda: jamp.History().append(PARAMS), A_SCALED),
    "a History of vectors": (lambda: jamp.History().append(STATE, loss=jnp.ones(3)), "loss=jnp.mean(loss)"),
    "a History of taken names": (lambda: jamp.History().append(STATE, loss_scale=1.0), "another name"),
    "a History inside jit": (lambda: jax.jit(lambda s: jamp.History().append(s))(STATE), "outside `jit`"),
    "a wrong policy": (lambda: jamp.check_health(STATE, policy="ignore"), "'raise', 'warn'"),
    "check_health inside jit": (lambda: jax.jit(lambda s: jamp.check_health(s))(STATE), "jax.debug.callback"),
    "check_health with a list": (lambda: jamp.check_health(STATE, history=[1.0]), "a jamp.History"),
    "check_health with a state": (lambda: jamp.check_health(STATE, loss_scale=STATE), "jamp.DynamicLossScale()"),
    # GradScaler.
    "GradScaler with a number": (lambda: jamp.GradScaler(65536.0), "jamp.GradScaler.static(65536.0)"),
    "GradScaler with a device": (lambda: jamp.GradScaler("cuda"), "jamp.DynamicLossScale()"),
    "GradScaler with both": (
        lambda: jamp.GradScaler(jamp.StaticLossScale(), growth_factor=2.0),
        "Give growth_factor to the loss scale itself",
    ),
    "scaler.update()": (lambda: SCALER.update(), "scaler = result.scaler.update(grads_finite=result.stepped)"),
    "scaler.step without gradients": (lambda: step(), "scaler.value_and_grad"),
    "scaler.step with a pair": (lambda: step(grads=SCALER.value_and_grad(loss_fn)(PARAMS)), "loss, grads ="),
    "scaler.step, swapped": (
        lambda: SCALER.step(ADAM, PARAMS, PLAIN, grads=GRADS),
        "step(tx, opt_state, params, grads=grads)",
    ),
    "scaler.step of a state": (
        lambda: SCALER.step(PLAIN, ADAM, PARAMS, grads=GRADS),
        "scaler.step(optax.adamw(1e-3), opt_state",
    ),
    "scaler.step of loss_scaled": (
        lambda: SCALER.step(TX, STATE, PARAMS, grads=GRADS),
        "jamp.value_and_grad(fun, opt_state)",
    ),
    "scaler.scale of an int": (lambda: SCALER.scale(3), "in float32"),
    "an empty state dict": (lambda: SCALER.load_state_dict({}), "GradScaler(enabled=False)"),
    "torch's state dict": (lambda: SCALER.load_state_dict({"scale": 1.0}), "jamp.interop.from_torch"),
    "a state for a state dict": (lambda: SCALER.load_state_dict(STATE), "scaler.state_dict()"),
    # interop.
    "from_torch of a scaler": (lambda: jamp.interop.from_torch(SCALER), "jamp.interop.from_torch(scaler.state_dict())"),
    "from_torch of an empty dict": (lambda: jamp.interop.from_torch({}), "GradScaler(enabled=False)"),
    "from_torch of a number": (lambda: jamp.interop.from_torch(3.0), "is a mapping"),
    "to_torch of a state": (lambda: jamp.interop.to_torch(STATE), "jamp.interop.to_torch(scaler)"),
    "wrap_state with a number": (lambda: jamp.interop.wrap_state(PLAIN, 8.0), "jamp.StaticLossScale(8.0)"),
    "wrap_state twice": (lambda: jamp.interop.wrap_state(STATE), "Pass the plain optimizer"),
    "unwrap_state of a plain state": (lambda: jamp.interop.unwrap_state(PLAIN), "`jamp.loss_scaled`"),
    "quantize_state twice": (
        lambda: jamp.interop.quantize_state(jamp.quantized_state(ADAM).init(WIDE)),
        "jamp.quantized_state(tx).update",
    ),
    "dequantize_state of a plain state": (lambda: jamp.interop.dequantize_state(PLAIN), "jamp.quantized_state(tx)"),
    "split_masters, swapped": (lambda: jamp.interop.split_masters(LOW, MASTERS.init(LOW)), "jamp.master_params(tx)"),
    "join_masters, swapped": (
        lambda: jamp.interop.join_masters(LOW, SPLIT.init(LOW)),
        "jamp.master_params(tx, split=True)",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error_or_a_warning_that_names_the_cure(name):
    mistake, cure = MISTAKES[name]
    with pytest.raises(Exception) as caught:  # noqa: PT011 - warnings are errors here
        mistake()
    assert cure in str(caught.value), str(caught.value)


# Python checks the names and the number of arguments, and JAX what a loss may do. Their errors name the argument.
OF_OTHERS = {
    "no state": (lambda: jamp.value_and_grad(loss_fn), "'state'"),
    "no budget": (lambda: jamp.recompute(loss_fn), "'memory_budget'"),
    "a typing error of GradScaler": (lambda: jamp.GradScaler(init_scal=2.0), "'init_scal'"),
    "torch's name of the learning rate": (lambda: jamp.optimizers.adamw(lr=1e-3), "'lr'"),
    "params by name": (lambda: value_and_grad(STATE)(params=PARAMS), "argnums=0"),
    "a loss that is converted": (lambda: jamp.grad(lambda p: float(p["b"][0]), STATE)(PARAMS), "`float` function"),
}


@pytest.mark.parametrize("name", OF_OTHERS)
def test_a_mistake_that_python_or_jax_finds_names_the_argument(name):
    mistake, words = OF_OTHERS[name]
    with pytest.raises(TypeError) as caught:
        mistake()
    assert words in str(caught.value)


def test_every_error_is_short():
    """A dump of arrays or tracers hides the words that help."""
    for name, (mistake, _) in MISTAKES.items():
        with pytest.raises(Exception) as caught:  # noqa: PT011
            mistake()
        assert len(str(caught.value)) < 700, name
        assert "Tracer<" not in str(caught.value), name
