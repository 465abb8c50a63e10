"""Transformers: a small GPT-2 in the loop of `run_clm_flax.py`, with `save_pretrained` and its metrics."""

import tempfile
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from flax.training import train_state
from flax.training.common_utils import get_metrics, onehot, shard, shard_prng_key
from transformers import FlaxGPT2LMHeadModel, GPT2Config

import jamp
import jamp.linen
from tests.clients.data import text_batches

MARGIN = 0.015
CONFIG = GPT2Config(vocab_size=256, n_positions=64, n_embd=128, n_layer=2, n_head=4)
BATCHES = text_batches(100, batch=8, length=32)


class PlainTrainState(train_state.TrainState):
    dropout_rng: jax.Array

    def replicate(self):
        return jax_utils.replicate(self).replace(dropout_rng=shard_prng_key(self.dropout_rng))


class TrainState(jamp.linen.TrainState):
    dropout_rng: jax.Array

    def replicate(self):
        return jax_utils.replicate(self).replace(dropout_rng=shard_prng_key(self.dropout_rng))


class Run:
    """`train_step` is that of `run_clm_flax.py`, with a weight of the loss, and the gradient as `way` wants it."""

    def __init__(self, way, model=None):
        self.way, self.model = way, model or FlaxGPT2LMHeadModel(CONFIG, seed=0)
        params, tx, cls = self.model.params, optax.adamw(1e-3), PlainTrainState
        if way == "float16":
            cls = TrainState
        elif way == "bfloat16 parameters":
            params, tx = self.model.to_bf16(params), jamp.stochastic_rounding(tx)
        rng = jax.random.PRNGKey(1)
        self.state = cls.create(apply_fn=self.model.__call__, params=params, tx=tx, dropout_rng=rng).replicate()
        self.p_train_step = jax.pmap(self.train_step, "batch", donate_argnums=(0,))
        self.train_metrics = []

    def train_step(self, state, batch):
        dropout_rng, new_dropout_rng = jax.random.split(state.dropout_rng)

        def compute_loss(params):
            labels, weight = batch.pop("labels"), batch.pop("weight")
            logits = state.apply_fn(**batch, params=params, dropout_rng=dropout_rng, train=True)[0]
            shift_logits, shift_labels = logits[..., :-1, :], labels[..., 1:]
            loss = optax.softmax_cross_entropy(shift_logits, onehot(shift_labels, shift_logits.shape[-1]))
            return (loss * weight[:, None]).mean()

        if self.way == "float16":
            grad_fn = state.value_and_grad(jamp.autocast(compute_loss, jnp.float16))
        elif self.way == "bfloat16":
            grad_fn = jax.value_and_grad(jamp.autocast(compute_loss, jnp.bfloat16))
        elif self.way == "8 bit":
            grad_fn = jax.value_and_grad(jamp.autocast(compute_loss, jamp.Float8()))
        else:
            grad_fn = jax.value_and_grad(compute_loss)
        loss, grad = grad_fn(state.params)
        grad = jax.lax.pmean(grad, "batch")
        new_state = state.apply_gradients(grads=grad, dropout_rng=new_dropout_rng)
        metrics = jax.lax.pmean({"loss": loss}, axis_name="batch")
        if self.way == "float16":
            metrics |= jamp.metrics(new_state)
        return new_state, metrics

    def step(self, i, weight=1.0):
        tokens = BATCHES[i]
        batch = {"input_ids": tokens, "labels": tokens, "weight": np.full(len(tokens), weight, np.float32)}
        self.state, train_metric = self.p_train_step(self.state, shard(batch))
        self.train_metrics.append(train_metric)

    def saved(self):
        """The parameters and Adam's state, copied from the device."""
        state = jax_utils.unreplicate(self.state)
        return jax.device_get((state.params, state.opt_state.inner_state))


def train(way):
    run = Run(way)
    for i in range(100):
        run.step(i)
    return get_metrics(run.train_metrics)["loss"]


def overflow():
    run = Run("float16")
    run.step(0)
    before = run.saved()
    run.step(1, np.inf)
    return before, run.saved(), jamp.metrics(jax_utils.unreplicate(run.state))["overflow_steps"]


def checkpoint():
    run = Run("float16")
    for i in range(3):
        run.step(i)
    with tempfile.TemporaryDirectory() as folder:
        state = jax.device_get(jax_utils.unreplicate(run.state))
        run.model.save_pretrained(folder, params=state.params)  # the example saves no optimizer: Flax does
        (Path(folder) / "state.msgpack").write_bytes(flax.serialization.to_bytes(state))
        other = Run("float16", FlaxGPT2LMHeadModel.from_pretrained(folder))
        new = jax_utils.unreplicate(other.state)
        restored = flax.serialization.from_bytes(new, (Path(folder) / "state.msgpack").read_bytes())
        other.state = jax_utils.replicate(restored.replace(params=new.params))  # the rng is a device's own already
    for i in range(3, 6):
        run.step(i), other.step(i)
    return run.saved(), other.saved()


def metrics():
    run = Run("float16")
    for i in range(3):
        run.step(i, np.inf if i == 1 else 1.0)
    return {name: values[-1] for name, values in get_metrics(run.train_metrics).items()}
