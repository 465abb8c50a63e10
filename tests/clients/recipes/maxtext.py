"""MaxText: a small Llama in `train_loop`, with its gradient accumulation, checkpoints and metrics file."""

import json
import tempfile
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from maxtext.configs import pyconfig
from maxtext.input_pipeline import input_pipeline_interface
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train as pre_train
from maxtext.utils import model_creation_utils

import jamp
from tests.clients.data import text_batches

MARGIN = 0.01
NOTE = {"8 bit": "Float8 on MaxText's own bfloat16, `dtype: bfloat16`"}
MORE = ("own bfloat16", "8-bit moments", "split masters", "float16, accumulated")
BATCH, LENGTH = 16, 64
BASE = Path(pyconfig.__file__).parent / "base.yml"
SETTINGS = {
    "run_name": "run",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "dataset_type": "synthetic",
    "dtype": "float32",
    "enable_tensorboard": False,
    "enable_checkpointing": False,
    "abort_on_inf_loss": False,
    "abort_on_nan_loss": False,
    "jax_cache_dir": "",
    "log_config": False,
    "per_device_batch_size": BATCH,
    "max_target_length": LENGTH,
    "vocab_size": 256,
    "base_emb_dim": 128,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "base_mlp_dim": 256,
    "base_num_decoder_layers": 2,
    "head_dim": 32,
    "attention": "dot_product",
    "learning_rate": 1e-3,
    "learning_rate_schedule_steps": 1000,
    "warmup_steps_fraction": 0.01,
}


class Text:
    """A data iterator of MaxText. The positions are negative in a bad step."""

    start, bad = 0, ()

    def __init__(self, config, mesh):
        self.step, self.batches = self.start, text_batches(config.steps, BATCH, LENGTH)

    def __iter__(self):
        return self

    def __next__(self):
        tokens, positions = self.batches[self.step], np.tile(np.arange(LENGTH, dtype=np.int32), (BATCH, 1))
        positions -= LENGTH * (self.step in self.bad)
        self.step += 1
        row = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
        return {
            key + more: value
            for name, tokens in row.items()
            for key, value, more in ((name, tokens, ""), (name, positions, "_position"), (name, positions * 0 + 1, "_segmentation"))
        }


def loss_fn(model, config, data, *args, **kwargs):
    """MaxText's, or inf in a bad step."""
    loss, aux = their_loss_fn(model, config, data, *args, **kwargs)
    return loss * jnp.where(data["inputs_position"].min() < 0, jnp.inf, 1.0), aux


def train_step(model, *args, **kwargs):
    """MaxText's, with jamp's metrics among its own."""
    state, metrics = their_train_step(model, *args, **kwargs)
    opt_state = nnx.merge(model, state).optimizer.opt_state
    if isinstance(opt_state, jamp.LossScaledState):
        metrics["scalar"] |= jamp.metrics(opt_state)
    return state, metrics


their_loss_fn, their_train_step, get_optimizer = pre_train.loss_fn, pre_train.train_step, optimizers.get_optimizer
input_pipeline_interface.SyntheticDataIterator, pre_train.train_step = Text, train_step


def of_way(way):
    """The settings, the loss function and what is around the optimizer."""
    tx = lambda tx: tx
    if way.startswith("float16"):
        tx = lambda tx: jamp.loss_scaled(tx, jamp.StaticLossScale(1.0))
        more = {"per_device_batch_size": BATCH // 4, "gradient_accumulation_steps": 4}
        return more if "accumulated" in way else {}, jamp.scaled(jamp.autocast(loss_fn, jnp.float16)), tx
    if way == "bfloat16":
        return {}, jamp.autocast(loss_fn, jnp.bfloat16), tx
    if way == "own bfloat16":
        return {"dtype": "bfloat16"}, loss_fn, tx
    if way == "8 bit":
        return {"dtype": "bfloat16"}, jamp.autocast(loss_fn, jamp.Float8()), tx
    if way == "bfloat16 parameters":
        return {"weight_dtype": "bfloat16"}, loss_fn, lambda tx: jamp.stochastic_rounding(tx)
    if way == "split masters":
        return {"weight_dtype": "bfloat16"}, loss_fn, lambda tx: jamp.master_params(tx, split=True)
    if way == "8-bit moments":
        return {}, loss_fn, lambda tx: jamp.quantized_state(tx)
    return {}, loss_fn, tx


def run(way, steps, bad=(), start=0, **settings):
    """Train, and return the parameters, the state of the optimizer, and what MaxText logged."""
    of_config, loss_fn, wrap = of_way(way)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(Text, "bad", bad),
        mock.patch.object(Text, "start", start),
        mock.patch.object(pre_train, "loss_fn", loss_fn),
        mock.patch.object(optimizers, "get_optimizer", lambda *args, **kwargs: wrap(get_optimizer(*args, **kwargs))),
    ):
        files = {"base_output_directory": folder, "metrics_file": f"{folder}/metrics.txt", "steps": steps}
        arguments = SETTINGS | of_config | files | settings
        config, recorder = pre_train.initialize(["", str(BASE), *(f"{k}={v}" for k, v in arguments.items())])
        state = pre_train.train_loop(config, recorder)
        rows = [json.loads(line) for line in Path(config.metrics_file).read_text().splitlines()]
    return jax.device_get(jax.tree.leaves((state.model, state.optimizer.opt_state.get("inner_state", ())))), rows


def train(way):
    return [row["learning/loss"] for row in run(way, 100)[1]]


def overflow():
    before, _ = run("float16", 1)
    after, rows = run("float16", 2, bad={1})
    return before, after, rows[-1]["overflow_steps"]


def checkpoint():
    undisturbed, _ = run("float16", 6)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"enable_checkpointing": True, "async_checkpointing": False, "base_output_directory": folder}
        run("float16", 3, **settings)
        continued, _ = run("float16", 6, start=3, **settings)
    return undisturbed, continued


def metrics():
    return run("float16", 3, bad={1})[1][-1]
