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
from maxtext.layers import nnx_decoders
from maxtext.layers.nnx_decoders import NNXDecoder
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train as pre_train
from maxtext.utils import model_creation_utils

import jamp
from tests.clients.data import text_batches

MARGIN = 0.01
MORE = ("own bfloat16", "8-bit moments", "split masters", "float16, accumulated", "losses in chunks")
# MaxText rounds the logits of its router, and has a setting for float32 ones: `float32_gate_logits`.
LINTS = dict.fromkeys(("float32 experts", "bfloat16 experts"), ("top_k chooses by values with the digits of",))
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
        self.step, self.length = self.start, config.max_target_length
        self.batches = text_batches(config.steps, BATCH, self.length)

    def __iter__(self):
        return self

    def __next__(self):
        tokens, positions = self.batches[self.step], np.tile(np.arange(self.length, dtype=np.int32), (BATCH, 1))
        positions -= self.length * (self.step in self.bad)
        self.step += 1
        batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
        for name in ("inputs", "targets"):
            batch |= {f"{name}_position": positions, f"{name}_segmentation": np.ones_like(positions)}
        return batch


loss_fn = pre_train.loss_fn
get_optimizer = optimizers.get_optimizer


def with_bad_steps(model, config, data, dropout_rng, params, is_train=True):
    """MaxText's loss, or inf in a bad step."""
    loss, aux = loss_fn(model, config, data, dropout_rng, params, is_train=is_train)
    return loss * jnp.where(data["inputs_position"].min() < 0, jnp.inf, 1.0), aux


def chunked_loss(model, hidden, data, config, is_train):
    """In place of MaxText's `vocab_tiling_nnx_loss`: its cross entropy and z-loss, without dropout before the head."""

    def sums(_, hidden, targets, segments):
        # The final norm and the head belong to the model, which this function closes over.
        logits = model.logits_from_hidden_states_for_vocab_tiling(hidden, True, "train")
        words = jnp.arange(logits.shape[-1])
        chosen = jnp.where(words == targets[:, None], logits, 0).sum(-1)
        log_z = jax.nn.logsumexp(logits, -1)
        z_loss = config.z_loss_multiplier * log_z**2
        weights = segments != 0
        return jnp.sum(weights * (log_z - chosen + z_loss)), jnp.sum(weights * z_loss)

    hidden = hidden.reshape(-1, hidden.shape[-1])
    rows = data["targets"].reshape(-1), data["targets_segmentation"].reshape(-1)
    return jamp.chunked_sum(sums, 128)(None, hidden, *rows)


vocab_tiling_nnx_loss = pre_train.vocab_tiling_nnx_loss


def train_step(model, *args, original=pre_train.train_step, **kwargs):
    """MaxText's, with jamp's metrics among its own."""
    state, metrics = original(model, *args, **kwargs)
    opt_state = nnx.merge(model, state).optimizer.opt_state
    if isinstance(opt_state, jamp.LossScaledState):
        metrics["scalar"] |= jamp.metrics(opt_state)
    return state, metrics


NNXDecoder.apply_output_head = jax.named_scope("head")(NNXDecoder.apply_output_head)
input_pipeline_interface.SyntheticDataIterator, pre_train.train_step = Text, train_step


def patch(way):
    """Wrap the loss function and the optimizer, and return the settings."""
    loss_fn, wrap, settings = with_bad_steps, lambda tx: tx, {}
    pre_train.vocab_tiling_nnx_loss = vocab_tiling_nnx_loss
    if way.startswith("float16"):
        loss_fn = jamp.scaled(jamp.autocast(loss_fn, jnp.float16))
        wrap = lambda tx: jamp.skip_nonfinite(tx)
        if way == "float16, accumulated":
            settings = {"per_device_batch_size": BATCH // 4, "gradient_accumulation_steps": 4}
    elif way == "bfloat16":
        loss_fn = jamp.autocast(loss_fn, jnp.bfloat16)
    elif way == "own bfloat16":
        settings = {"dtype": "bfloat16"}
    elif way == "8 bit":
        loss_fn, settings = jamp.autocast(loss_fn, jamp.Float8()), {"dtype": "bfloat16"}
    elif way == "bfloat16 parameters":
        wrap, settings = lambda tx: jamp.stochastic_rounding(tx), {"weight_dtype": "bfloat16"}
    elif way == "split masters":
        wrap, settings = lambda tx: jamp.master_params(tx, split=True), {"weight_dtype": "bfloat16"}
    elif way == "8-bit moments":
        wrap = lambda tx: jamp.quantized_state(tx)
    elif way == "losses in chunks":
        pre_train.vocab_tiling_nnx_loss = chunked_loss
        settings = {"num_vocab_tiling": 2}  # above 1, the model returns no logits
    pre_train.loss_fn = loss_fn
    optimizers.get_optimizer = lambda *args, **kwargs: wrap(get_optimizer(*args, **kwargs))
    return settings


def initialize(folder, **settings):
    files = {"base_output_directory": folder, "metrics_file": f"{folder}/metrics.txt"}
    return pre_train.initialize(["", str(BASE), *(f"{k}={v}" for k, v in (SETTINGS | files | settings).items())])


def run(way, steps, folder=None, bad=(), start=0, **settings):
    """Train, and return the parameters, the state of the optimizer, and what MaxText logged."""
    with tempfile.TemporaryDirectory() as new:
        Text.start, Text.bad = start, bad
        config, recorder = initialize(folder or new, steps=steps, **patch(way), **settings)
        state = pre_train.train_loop(config, recorder)
        rows = [json.loads(line) for line in Path(config.metrics_file).read_text().splitlines()]
    leaves = jax.tree.leaves((state.model, state.optimizer.opt_state.get("inner_state", ())))
    return jax.device_get([x for x in leaves if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]), rows


def train(way):
    return [row["learning/loss"] for row in run(way, 100)[1]]


def overflow():
    before, _ = run("float16", 1)
    after, rows = run("float16", 2, bad={1})
    return before, after, rows[-1]["overflow_steps"]


def checkpoint():
    undisturbed, _ = run("float16", 6)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"enable_checkpointing": True, "async_checkpointing": False}
        run("float16", 3, folder, **settings)
        continued, _ = run("float16", 6, folder, start=3, **settings)
    return undisturbed, continued


def metrics():
    row = run("float16", 3, bad={1})[1][-1]
    return {name: row[name] for name in ("loss_scale", "overflow_steps", "finite_steps")}


class WithoutCheckpoints:
    """The module `jax`, whose `checkpoint` returns the function as it is."""

    checkpoint = staticmethod(lambda fun, **_: fun)

    def __getattr__(self, name):
        return getattr(jax, name)


def decoder(**settings):
    """The parameters, a function that puts them into the model, the configuration and a batch."""
    with tempfile.TemporaryDirectory() as folder:
        config, _ = initialize(folder, steps=1, **settings)
    model = model_creation_utils.from_config(config, rngs=nnx.Rngs(0))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    data = next(Text(config, model.mesh))
    data["targets_segmentation"][:, -8:] = 0
    return params, lambda params: nnx.merge(graphdef, params, rest, copy=True), config, data


def kept(budget):
    """Of the loss without MaxText's own checkpoints, because jamp leaves those as they are."""
    params, model, config, data = decoder(base_num_decoder_layers=4, param_scan_axis=0)

    def loss(params):
        with mock.patch.object(nnx_decoders, "jax", WithoutCheckpoints()):
            return with_bad_steps(model(params), config, dict(data), None, None)[0]

    grads = jax.jit(jax.grad(jamp.recompute(loss, budget)))(params)
    return jamp.memory_report(loss, budget)(params).kept, grads


def reported():
    def of(**settings):
        params, model, config, data = decoder(max_target_length=2048, **settings)
        return params, lambda params: loss_fn(model(params), config, dict(data), None, None)[0]

    experts = {"decoder_block": "mixtral", "num_experts": 8, "num_experts_per_tok": 2, "base_moe_mlp_dim": 256}
    experts |= {"sparse_matmul": False}
    return {
        "float32": of(),
        "float32 experts": of(**experts),
        "bfloat16": of(dtype="bfloat16"),
        "bfloat16 experts": of(dtype="bfloat16", **experts),
    }


def losses(vocabulary):
    """With a z-loss, and as many tiles as chunks."""

    def of(tiles, tiled_loss=vocab_tiling_nnx_loss):
        settings = {"vocab_size": vocabulary, "num_vocab_tiling": tiles, "z_loss_multiplier": 1e-4}
        params, model, config, data = decoder(**settings)

        def loss(params):
            with mock.patch.object(pre_train, "vocab_tiling_nnx_loss", tiled_loss):
                return loss_fn(model(params), config, dict(data), None, None)[0]

        return params, loss

    params, whole = of(1)
    return params, {"whole logits": whole, "num_vocab_tiling": of(8)[1], "in chunks": of(8, chunked_loss)[1]}


def decoders():
    """MaxText's own setting for the head is `logits_dot_in_fp32`."""

    def of(**settings):
        params, model, _, data = decoder(**settings)
        names = {"decoder_input_tokens": "inputs", "decoder_positions": "inputs_position"}
        inputs = {name: data[key] for name, key in (names | {"decoder_segment_ids": "inputs_segmentation"}).items()}

        def log_probs(params):
            logits = model(params)(**inputs, enable_dropout=False)
            return jnp.take_along_axis(jax.nn.log_softmax(logits), data["targets"][..., None], -1)

        return params, log_probs

    params, bfloat16 = of(dtype="bfloat16")
    _, float32_head = of(dtype="bfloat16", logits_dot_in_fp32=True)
    return params, {"float32": of()[1], "float32 head": float32_head, "bfloat16": bfloat16}
