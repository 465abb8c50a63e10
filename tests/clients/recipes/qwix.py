"""Qwix: a small Flax Linen language model in quantized training, beside the same model in jamp's 8 bit."""

import tempfile
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import qwix

import jamp
from tests.clients.data import text_batches

MARGIN = 0.01
WIDTH, LENGTH = 128, 32
NOTE = {"8 bit": "jamp's Int8, without Qwix"}
IMPOSSIBLE = {"bfloat16": "all products are int8 already"}
BATCHES = text_batches(101, length=LENGTH)


class Network(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(256, WIDTH)(tokens) + nn.Embed(LENGTH, WIDTH)(jnp.arange(tokens.shape[1]))
        mask = nn.make_causal_mask(tokens)
        for _ in range(2):
            x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x), mask=mask)
            x = x + nn.Dense(WIDTH)(jax.nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(256)(nn.LayerNorm()(x))


def quantized(qtype):
    """The network with its products of weights in 8 bit, in the forward and the backward pass."""
    rule = qwix.QtRule(module_path=".*", weight_qtype=qtype, act_qtype=qtype, bwd_qtype=qtype)
    return qwix.quantize_model(Network(), qwix.QtProvider([rule]))


def make_loss(net):
    def loss_fn(params, tokens, weight):
        logits = net.apply(params, tokens[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean() * weight

    return loss_fn


def of_way(way):
    """The loss function, the optimizer and the dtype of the parameters."""
    loss_fn, tx, dtype = make_loss(quantized("int8")), optax.adamw(1e-3), jnp.float32
    if way == "float16":
        loss_fn = jamp.scaled(jamp.autocast(loss_fn, jnp.float16))
        tx = jamp.loss_scaled(tx, jamp.StaticLossScale(1.0))
    elif way == "8 bit":
        loss_fn = jamp.autocast(make_loss(Network()), jamp.Int8())
    elif way == "bfloat16 parameters":
        tx, dtype = jamp.stochastic_rounding(tx), jnp.bfloat16
    elif way == "plain float32":
        loss_fn = make_loss(Network())
    elif way == "Qwix float8":
        loss_fn = make_loss(quantized("float8_e4m3fn"))
    elif way == "Float8 of jamp":
        loss_fn = jamp.autocast(make_loss(Network()), jamp.Float8())
    return loss_fn, tx, dtype


class Run:
    def __init__(self, way):
        self.loss_fn, self.tx, dtype = of_way(way)
        self.params = jamp.cast_floating(Network().init(jax.random.key(0), BATCHES[0][:, :-1]), dtype)
        self.opt_state = self.tx.init(self.params)
        self.update = jax.jit(self._update)

    def _update(self, params, opt_state, tokens, weight):
        loss, grads = jax.value_and_grad(self.loss_fn)(params, tokens, weight)
        updates, opt_state = self.tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def step(self, i, weight=1.0):
        self.params, self.opt_state, loss = self.update(self.params, self.opt_state, BATCHES[i], weight)
        return float(loss)


def train(way):
    run = Run(way)
    return [run.step(i) for i in range(100)]


def overflow():
    run = Run("float16")
    run.step(0)
    before = run.params, run.opt_state.inner_state
    run.step(1, np.inf)
    return before, (run.params, run.opt_state.inner_state), jamp.metrics(run.opt_state)["overflow_steps"]


def checkpoint():
    run, other = Run("float16"), Run("float16")
    for i in range(3):
        run.step(i)
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder) / "state", (run.params, run.opt_state))
        checkpointer.wait_until_finished()
        other.params, other.opt_state = checkpointer.restore(Path(folder) / "state", (other.params, other.opt_state))
    for i in range(3, 6):
        run.step(i), other.step(i)
    return (run.params, run.opt_state), (other.params, other.opt_state)


def metrics():
    run = Run("float16")
    for i in range(3):
        run.step(i, np.inf if i == 1 else 1.0)
    return jamp.metrics(run.opt_state)  # Qwix has no loggers: what you hand to yours
