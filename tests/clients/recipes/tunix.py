"""Tunix: supervised fine-tuning of a small Qwen3 with `PeftTrainer`, its checkpoints and its metrics logger."""

import dataclasses
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.sft import hooks, peft_trainer, utils

import jamp
from tests.clients.data import text_batches

MARGIN = 0.01
MORE = ("losses in chunks",)
CONFIG = qwen3.ModelConfig(2, 256, 128, 256, 4, 64, 2, rope_theta=10_000, norm_eps=1e-6)
BATCHES = text_batches(100, length=31)


def make_model(dtype, config=CONFIG):
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    for i, layer in enumerate(model.layers):  # Tunix initializes these with zeros, for weights to be loaded
        for j, linear in enumerate((layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)):
            key = nnx.Rngs(100 + 3 * i + j).params()
            linear.kernel[...] = nnx.initializers.lecun_normal()(key, linear.kernel.shape)
    nnx.update(model, jamp.cast_floating(nnx.state(model), dtype))
    return model


def make_inputs(example):
    mask = example["input_mask"] != 0
    positions, attention_mask = utils.build_positions_from_mask(mask), utils.make_causal_attn_mask(mask)
    return example | {"positions": positions, "attention_mask": attention_mask}


def cross_entropy(head, hidden, targets, weights):
    """A sum over tokens."""
    logits = (hidden @ head).astype(jnp.float32)
    words = jnp.arange(logits.shape[-1])
    chosen = jnp.where(words == targets[:, None], logits, 0).sum(-1)
    return jnp.sum(weights * (jax.nn.logsumexp(logits, -1) - chosen))


def chunked_loss(model, input_tokens, input_mask, positions, attention_mask):
    """Tunix's loss. Logits exist for 128 tokens at a time: nothing reads those that the model returns."""
    model(input_tokens, positions, None, attention_mask, output_hidden_states=True)
    hidden = nnx.pop(model, nnx.Intermediate)["all_hidden_states"][0]
    hidden, targets, weights = hidden[:, :-1], input_tokens[:, 1:], input_mask[:, 1:]
    rows = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), weights.reshape(-1)
    total = jamp.chunked_sum(cross_entropy, 128)(model.lm_head.w[...], *rows)
    return total / (jnp.sum(weights) + 1e-8)


class LogLossScale(hooks.TrainingHooks):
    def on_train_step_end(self, trainer, train_step, train_loss):
        for name, value in jamp.metrics(trainer.optimizer.opt_state).items():
            trainer.metrics_logger.log("", name, np.asarray(value), "train", train_step)

    def on_train_start(self, trainer): ...
    def on_train_end(self, trainer): ...
    def on_train_step_start(self, trainer): ...
    def on_eval_step_start(self, trainer): ...
    def on_eval_step_end(self, trainer, eval_loss): ...


def make_trainer(way, **config):
    tx, dtype = optax.adamw(1e-3), jnp.float32
    if way == "float16":
        tx = jamp.skip_nonfinite(tx)
    elif way == "bfloat16 parameters":
        tx, dtype = jamp.stochastic_rounding(tx), jnp.bfloat16
    config = peft_trainer.TrainingConfig(eval_every_n_steps=1000, pbar_description=None, **config)
    trainer = peft_trainer.PeftTrainer(make_model(dtype), tx, config).with_gen_model_input_fn(make_inputs)
    if way == "float16":
        trainer.with_loss_fn(jamp.scaled(jamp.autocast(trainer.loss_fn, jnp.float16)))
    elif way == "bfloat16":
        trainer.with_loss_fn(jamp.autocast(trainer.loss_fn, jnp.bfloat16))
    elif way == "8 bit":
        trainer.with_loss_fn(jamp.autocast(trainer.loss_fn, jamp.Float8()))
    elif way == "losses in chunks":
        trainer.with_loss_fn(chunked_loss)
    return trainer


def examples(steps, bad=()):
    """Tokens, and a mask that weighs them: inf in a bad step."""
    for i in range(steps):
        tokens = BATCHES[i]
        yield {"input_tokens": tokens, "input_mask": np.full(tokens.shape, np.inf if i in bad else 1.0, np.float32)}


def train(way):
    trainer = make_trainer(way)
    trainer.train(examples(100))
    return trainer.metrics_logger.get_metric_history("", "loss", "train")


def arrays(trainer):
    """The parameters and Adam's state, copied from the device."""
    return jax.device_get((nnx.as_pure(nnx.state(trainer.model)), nnx.as_pure(trainer.optimizer.opt_state.inner_state)))


def overflow():
    trainer = make_trainer("float16")
    trainer.is_managed_externally = True  # keep the trainer open, to continue it
    trainer.train(examples(1))
    before = arrays(trainer)
    trainer.train(examples(1, bad={0}))
    return before, arrays(trainer), jamp.metrics(trainer.optimizer.opt_state)["overflow_steps"]


def checkpoint():
    undisturbed = make_trainer("float16")
    undisturbed.train(examples(6))
    every_step = ocp.CheckpointManagerOptions(save_interval_steps=1)
    with tempfile.TemporaryDirectory() as folder:
        config = {"checkpoint_root_directory": folder, "checkpointing_options": every_step}
        make_trainer("float16", **config).train(examples(3))
        continued = make_trainer("float16", **config)  # restores, and skips the three batches
        assert continued.train_steps == 3
        continued.train(examples(6))
    return arrays(undisturbed), arrays(continued)


def metrics():
    trainer = make_trainer("float16")
    trainer.with_training_hooks(LogLossScale())
    trainer.train(examples(3, bad={1}))
    history = trainer.metrics_logger.get_metric_history
    return {name: history("", name, "train")[-1] for name in ("loss_scale", "overflow_steps", "finite_steps")}


def losses(vocabulary):
    """Of sequences that end in tokens without weight."""
    graphdef, params = nnx.split(make_model(jnp.float32, dataclasses.replace(CONFIG, vocab_size=vocabulary)))
    mask = np.ones(BATCHES[0].shape, np.float32)
    mask[:, -8:] = 0
    inputs = make_inputs({"input_tokens": BATCHES[0], "input_mask": mask})
    of = lambda loss_fn: lambda params: loss_fn(nnx.merge(graphdef, params, copy=True), **inputs)
    return params, {"whole logits": of(peft_trainer._default_loss_fn), "in chunks": of(chunked_loss)}


def reported():
    tokens = text_batches(1, batch=4, length=2047)[0]
    inputs = make_inputs({"input_tokens": tokens, "input_mask": np.ones(tokens.shape, np.float32)})

    def of(dtype):
        graphdef, params = nnx.split(make_model(jnp.float32, dataclasses.replace(CONFIG, dtype=dtype)))
        return params, lambda params: peft_trainer._default_loss_fn(nnx.merge(graphdef, params, copy=True), **inputs)

    return {"float32": of(jnp.float32), "bfloat16": of(jnp.bfloat16)}
