"""Keras on JAX: a language model in `Model.fit`, with the optimizers, `.keras` files and callbacks of Keras."""

import os
import tempfile
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax

import jamp
from tests.clients.data import text_batches

MARGIN = 0.005
NOTE = {"bfloat16 parameters": "custom loop with Optax"}
WIDTH, LENGTH = 128, 32
BATCHES = text_batches(100, length=LENGTH)


def make_model():
    keras.utils.set_random_seed(0)
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(256, WIDTH)(tokens)
    for _ in range(2):
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(4, WIDTH // 4)(y, y, use_causal_mask=True)
        y = keras.layers.Dense(4 * WIDTH, activation="gelu")(keras.layers.LayerNormalization()(x))
        x = x + keras.layers.Dense(WIDTH)(y)
    logits = keras.layers.Dense(256)(keras.layers.LayerNormalization()(x))
    return keras.Model(tokens, logits)


def compiled(way, model=None):
    """A model for `fit`. A model from a file is compiled already."""
    optimizer = keras.optimizers.AdamW(1e-3)
    if way == "float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    if model is None:
        model = make_model()
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    if way == "float16":
        model.compute_loss_and_updates = jamp.autocast(model.compute_loss_and_updates, "float16")
    elif way == "bfloat16":
        model.compute_loss_and_updates = jamp.autocast(model.compute_loss_and_updates, jnp.bfloat16)
    elif way == "8 bit":
        model.compute_loss_and_updates = jamp.autocast(model.compute_loss_and_updates, jamp.Float8())
    return model


def fit(model, batches, weight=1.0):
    """One batch an epoch, because Keras averages the loss over an epoch."""
    examples = ((text[:, :-1], text[:, 1:], np.full((len(text), LENGTH), weight, np.float32)) for text in batches)
    return model.fit(examples, epochs=len(batches), steps_per_epoch=1, shuffle=False, verbose=0).history["loss"]


class Loop:
    """Keras's custom loop: `stateless_call`, and an optimizer of Optax."""

    def __init__(self, tx, dtype):
        self.tx, self.model = tx, make_model()
        self.params = jamp.cast_floating([v.value for v in self.model.trainable_variables], dtype)
        self.rest = [v.value for v in self.model.non_trainable_variables]
        self.opt_state = tx.init(self.params)
        self.update = jax.jit(self._update)

    def loss_fn(self, params, rest, tokens, weight):
        logits, rest = self.model.stateless_call(params, rest, tokens[:, :-1], training=True)
        loss = keras.losses.sparse_categorical_crossentropy(tokens[:, 1:], logits, from_logits=True)
        return loss.mean() * weight, rest

    def _update(self, params, rest, opt_state, tokens, weight):
        (loss, rest), grads = jax.value_and_grad(self.loss_fn, has_aux=True)(params, rest, tokens, weight)
        updates, opt_state = self.tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), rest, opt_state, loss

    def step(self, tokens, weight=1.0):
        state = self.update(self.params, self.rest, self.opt_state, tokens, weight)
        self.params, self.rest, self.opt_state, loss = state
        return float(loss)


def train(way):
    if way == "bfloat16 parameters":
        loop = Loop(jamp.stochastic_rounding(optax.adamw(1e-3, weight_decay=0.004)), jnp.bfloat16)
        return [loop.step(tokens) for tokens in BATCHES]
    return fit(compiled(way), BATCHES)


def arrays(model):
    """The parameters and the state of the optimizer inside the loss scale."""
    inner = model.optimizer.inner_optimizer
    return jax.device_get([v.value for v in model.variables + inner.variables])


def overflow():
    model = compiled("float16")
    fit(model, BATCHES[:1])
    before, scale = arrays(model), float(model.optimizer.dynamic_scale)
    fit(model, BATCHES[1:2], weight=np.inf)
    return before, arrays(model), scale / float(model.optimizer.dynamic_scale) == 2  # Keras keeps no statistics


def checkpoint():
    model = compiled("float16")
    fit(model, BATCHES[:3])
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "model.keras")
        restored = compiled("float16", keras.models.load_model(Path(folder) / "model.keras"))
    for each in (model, restored):
        fit(each, BATCHES[3:6])
    return arrays(model), arrays(restored)


def metrics():
    loop = Loop(jamp.loss_scaled(optax.adamw(1e-3), jamp.StaticLossScale(1.0)), jnp.float32)
    loop.loss_fn = jamp.scaled(jamp.autocast(loop.loss_fn, jnp.float16))
    callbacks = keras.callbacks.CallbackList(add_history=True, model=loop.model)
    callbacks.on_train_begin()
    for i in range(3):
        loop.step(BATCHES[i], np.inf if i == 1 else 1.0)
        callbacks.on_epoch_end(i, logs=jamp.metrics(loop.opt_state))
    return {name: values[-1] for name, values in loop.model.history.history.items()}
