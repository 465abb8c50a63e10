"""Levanter: a small Llama in `Trainer`, with its data loader, microbatches, checkpoints and tracker."""

import dataclasses
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import levanter.tracker
import numpy as np
from levanter import trainer_state
from levanter.checkpoint import CheckpointerConfig
from levanter.data.dataset import ListAsyncDataset
from levanter.kernels.pallas.fused_cross_entropy_loss import (
    fused_cross_entropy_loss_and_logsumexp_penalty,
    linear_softmax_cross_entropy_weighted_sum,
)
from levanter.layers.attention import AttentionMask
from levanter.models import loss
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample
from levanter.models.loss import next_token_loss_weight
from levanter.optim.config import AdamConfig
from levanter.tracker.tracker import DictTracker, NoopConfig
from levanter.trainer import Trainer, TrainerConfig

import jamp
from tests.clients.data import text_batches

MARGIN = 0.01
MORE = ("own bfloat16", "8-bit moments", "split masters", "float16, accumulated", "losses in chunks")
BATCH, LENGTH = 16, 64
CONFIG = LlamaConfig(
    max_seq_len=LENGTH, hidden_dim=128, intermediate_dim=256, num_layers=2, num_heads=4, num_kv_heads=2
)


def loss_function(model, example, *, key=None):
    return model.compute_next_token_loss(example, key=key)


def cross_entropy(head, hidden, targets, weights, z_loss):
    """Levanter's, with its z-loss: a sum over tokens."""
    logits = jnp.dot(hidden, head.T, preferred_element_type=jnp.float32)
    words = jnp.arange(logits.shape[-1])
    chosen = jnp.where(words == targets[:, None], logits, 0).sum(-1)
    log_z = jax.nn.logsumexp(logits, -1)
    return jnp.sum(weights * (log_z - chosen + z_loss * log_z**2))


def rows_of_tokens(model, example, key=None):
    """The head, and a hidden state, a target and a weight for each token."""
    hidden = model.activations(example.tokens, example.attn_mask, key=key)
    hidden = hidden.array.reshape(-1, model.Embed.size)
    targets = hax.roll(example.tokens, -1, model.Pos).array.reshape(-1)
    weights = next_token_loss_weight(model.Pos, example.loss_weight).array.reshape(-1)
    head = model.get_lm_head().rearrange((model.Vocab, model.Embed)).array
    return head, hidden, targets, weights


def chunked_loss_function(model, example, *, key=None, z_loss=0.0):
    """`compute_next_token_loss`. Logits exist for 128 tokens at a time."""
    head, *rows = rows_of_tokens(model, example, key)
    loss_sum = lambda *args: cross_entropy(*args, z_loss)
    return jamp.chunked_sum(loss_sum, 128)(head, *rows) / rows[2].sum()


def apply_updates(model, updates, overwrites, original=trainer_state.apply_updates):
    """Levanter's adds float32 updates to bfloat16 parameters, and keeps the float32 sum."""
    new = original(model, updates, overwrites)
    return jax.tree.map(lambda new, old: new.astype(old.dtype) if eqx.is_inexact_array(old) else new, new, model)


trainer_state.apply_updates = apply_updates


def make_trainer(way, folder, steps=100, batch=BATCH, seed=0, config=CONFIG):
    optimizer, mp, microbatch = AdamConfig(learning_rate=1e-3, lr_schedule="constant").build(100), "f32", batch
    loss_fn = loss_function
    if way.startswith("float16"):
        optimizer = jamp.skip_nonfinite(optimizer)
        loss_fn = jamp.scaled(jamp.autocast(loss_function, jnp.float16))
        microbatch = batch // 4 if way.endswith("accumulated") else batch
    elif way == "bfloat16":
        loss_fn = jamp.autocast(loss_function, jnp.bfloat16)
    elif way == "own bfloat16":
        mp = "p=f32,c=bf16"
    elif way == "8 bit":
        loss_fn, mp = jamp.autocast(loss_function, jamp.Float8()), "p=f32,c=bf16"
    elif way == "bfloat16 parameters":
        optimizer, mp = jamp.stochastic_rounding(optimizer), "p=bf16,c=f32"
    elif way == "split masters":
        optimizer, mp = jamp.master_params(optimizer, split=True), "p=bf16,c=f32"
    elif way == "8-bit moments":
        optimizer = jamp.quantized_state(optimizer)
    elif way == "losses in chunks":
        loss_fn = chunked_loss_function
    trainer_config = TrainerConfig(
        id="run",
        seed=seed,
        mp=jmp.get_policy(mp),
        tracker=NoopConfig(),
        log_dir=Path(folder),
        log_jaxprs=False,
        log_xla_hlo=False,
        crash_on_inf=False,
        crash_on_nan=False,
        train_batch_size=batch,
        per_device_parallelism=microbatch,
        num_train_steps=steps,
        require_accelerator=False,
        checkpointer=CheckpointerConfig(base_path=folder, save_interval=None, keep=None),
    )
    trainer_config._validate_and_set_defaults()
    return Trainer(trainer_config, optimizer, loss_fn)


class Run:
    """A trainer and its state, and the losses by step."""

    def __init__(self, way, folder, steps=100, seed=0, config=CONFIG):
        self.trainer, self.config = make_trainer(way, folder, steps, seed=seed), config
        self.losses = {}
        self.trainer.add_hook(lambda info: self.losses.update({int(info.step): info.loss}))
        vocab, key = hax.Axis("vocab", 256), jax.random.PRNGKey(seed)
        with self.trainer:
            self.state = self.trainer.initial_state(key, model_init=lambda: config.build(vocab, key=key))

    def train(self, bad=(), seed=0):
        """Train from the step of the state to the last. The weight of the losses is inf in a bad step."""
        Pos, rows = self.config.max_Pos, []
        for i, tokens in enumerate(text_batches(self.trainer.num_train_steps, BATCH, LENGTH - 1, seed)):
            weight = hax.full(Pos, np.inf if i in bad else 1.0)
            rows += [LmExample(hax.named(row, Pos), weight, AttentionMask.causal()) for row in tokens]
        with self.trainer:
            loader = self.trainer.data_loader(ListAsyncDataset(rows)).iter_from_step(int(self.state.step))
            self.state = self.trainer.train(self.state, loader).state

    def arrays(self):
        """The parameters and Adam's state, copied from the device."""
        state = self.state.model, self.state.opt_state.inner_state
        return jax.device_get(jax.tree.leaves(eqx.filter(state, eqx.is_array)))


def train(way, seed=0):
    with tempfile.TemporaryDirectory() as folder:
        run = Run(way, folder, seed=seed)
        run.train(seed=seed)
    return [run.losses[i] for i in range(100)]


def overflow():
    with tempfile.TemporaryDirectory() as folder:
        undisturbed, run = Run("float16", folder, steps=1), Run("float16", folder, steps=2)
        undisturbed.train()
        run.train(bad={1})
        skipped = jamp.metrics(run.state.opt_state)["overflow_steps"]
        return undisturbed.arrays(), run.arrays(), skipped


def checkpoint():
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = Run("float16", folder + "/undisturbed", steps=6)
        undisturbed.train()
        Run("float16", folder, steps=3).train()  # saves its last state
        continued = Run("float16", folder, steps=6)
        assert int(continued.state.step) == 3
        continued.train()
        return undisturbed.arrays(), continued.arrays()


class Recorder(DictTracker):
    def log(self, metrics, *, step, commit=None):
        self.metrics |= metrics


def metrics():
    with tempfile.TemporaryDirectory() as folder:
        run = Run("float16", folder, steps=3)
        run.trainer.add_hook(lambda info: levanter.tracker.log(jamp.metrics(info.state.opt_state), step=info.step))
        run.trainer.tracker.loggers.append(tracker := Recorder())
        run.train(bad={1})
        return {name: tracker.metrics[name] for name in ("loss_scale", "overflow_steps", "finite_steps")}


def decoder(vocabulary=256, **settings):
    """The parameters, a function that puts them into the model, and an example."""
    config = dataclasses.replace(CONFIG, **settings)
    model = config.build(hax.Axis("vocab", vocabulary), key=jax.random.PRNGKey(0))
    length = config.max_seq_len
    tokens = hax.named(text_batches(1, BATCH, length - 1)[0], ("batch", "position"))
    weights = hax.named(np.arange(length) < length - 8, "position").astype(jnp.float32).broadcast_to(tokens.axes)
    params, rest = eqx.partition(model, eqx.is_inexact_array)
    return params, lambda params: eqx.combine(params, rest), LmExample(tokens, weights, AttentionMask.causal())


def kept(budget):
    """Of the loss without Levanter's own checkpoints, because jamp leaves those as they are."""
    params, model, example = decoder(num_layers=4, gradient_checkpointing=False)
    loss_fn = lambda params: loss_function(model(params), example).scalar()
    grads = jax.jit(jax.grad(jamp.recompute(loss_fn, budget)))(params)
    return jamp.memory_report(loss_fn, budget)(params).kept, grads


def reported():
    params, model, example = decoder(max_seq_len=2048)
    of = lambda mp: lambda params: loss_function(jmp.get_policy(mp).cast_to_compute(model(params)), example).scalar()
    return {"float32": (params, of("f32")), "bfloat16": (params, of("p=f32,c=bf16"))}


def losses(vocabulary):
    """With a z-loss. Levanter takes words in blocks of 8,192, and its model Grug can take tokens in blocks."""
    params, model, example = decoder(vocabulary)

    def of(implementation):
        def kernel(*args, **kwargs):
            return fused_cross_entropy_loss_and_logsumexp_penalty(*args, **kwargs | {"implementation": implementation})

        def loss_fn(params):
            with mock.patch.object(loss, "fused_cross_entropy_loss_and_logsumexp_penalty_kernel", kernel):
                return model(params).compute_next_token_loss(example, logsumexp_weight=1e-4).scalar()

        return loss_fn

    def of_grug(params):
        head, hidden, targets, weights = rows_of_tokens(model(params), example)
        options = {"logsumexp_weight": 1e-4, "token_block_size": 128}
        total = linear_softmax_cross_entropy_weighted_sum(hidden, targets, head.T, weights, **options)
        return total / weights.sum()

    return params, {
        "whole logits": of("reference"),
        "in Levanter's blocks": of("xla"),
        "in Grug's blocks": of_grug,
        "in chunks": lambda params: chunked_loss_function(model(params), example, z_loss=1e-4),
    }


def decoders():
    """Of the logits that the model returns. The loss function computes its logits in float32 from bfloat16 anyway."""
    params, model, example = decoder()
    targets = hax.roll(example.tokens, -1, "position").array[..., None]

    def log_probs(params, policy, head="f32"):
        own = jmp.get_policy(policy).cast_to_compute(model(params))
        hidden = own.activations(example.tokens, example.attn_mask)
        hidden, weight = jmp.get_policy(head).cast_to_compute((hidden, own.get_lm_head()))
        with jax.named_scope("head"):
            logits = hax.dot(hidden, weight, axis=own.Embed).array
        return jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32)), targets, -1)

    own = "p=f32,c=bf16"
    return params, {
        "float32": partial(log_probs, policy="f32"),
        "float32 head": partial(log_probs, policy=own),
        "bfloat16": partial(log_probs, policy=own, head=own),
    }
