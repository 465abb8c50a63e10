"""Levanter: a small Llama in `Trainer`, with its data loader, microbatches, checkpoints and tracker."""

import dataclasses
import tempfile
from pathlib import Path

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
from levanter.layers.attention import AttentionMask
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample
from levanter.optim.config import AdamConfig
from levanter.tracker.tracker import DictTracker, NoopConfig
from levanter.trainer import Trainer, TrainerConfig

import jamp
from tests.clients.data import text_batches

MARGIN = 0.01
MORE = ("own bfloat16", "8-bit moments", "split masters", "float16, accumulated")
BATCH, LENGTH = 16, 64
CONFIG = LlamaConfig(
    max_seq_len=LENGTH, hidden_dim=128, intermediate_dim=256, num_layers=2, num_heads=4, num_kv_heads=2
)


def loss_function(model, example, *, key=None):
    return model.compute_next_token_loss(example, key=key)


def apply_updates(model, updates, overwrites, original=trainer_state.apply_updates):
    """Levanter's adds float32 updates to bfloat16 parameters, and keeps the float32 sum."""
    new = original(model, updates, overwrites)
    return jax.tree.map(lambda new, old: new.astype(old.dtype) if eqx.is_inexact_array(old) else new, new, model)


trainer_state.apply_updates = apply_updates


def make_trainer(way, folder, steps=100, batch=BATCH, seed=0, config=CONFIG):
    optimizer, mp, microbatch = AdamConfig(learning_rate=1e-3, lr_schedule="constant").build(100), "f32", batch
    loss_fn = loss_function
    if way.startswith("float16"):
        optimizer = jamp.loss_scaled(optimizer, jamp.StaticLossScale(1.0))
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


def kept(budget, layers=4):
    """Of the loss without Levanter's own checkpoints, because jamp leaves those as they are."""
    config = dataclasses.replace(CONFIG, num_layers=layers, gradient_checkpointing=False)
    model = config.build(hax.Axis("vocab", 256), key=jax.random.PRNGKey(0))
    tokens = hax.named(text_batches(1, BATCH, LENGTH - 1)[0], ("batch", "position"))
    example = LmExample(tokens, hax.ones(tokens.axes), AttentionMask.causal())
    params, rest = eqx.partition(model, eqx.is_inexact_array)
    loss_fn = lambda params: loss_function(eqx.combine(params, rest), example).scalar()
    grads = jax.jit(jax.grad(jamp.recompute(loss_fn, budget)))(params)
    return jamp.memory_report(loss_fn, budget)(params).kept, grads
