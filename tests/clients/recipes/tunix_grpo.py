"""Tunix GRPO: a small Qwen3 learns to answer with the digit of the prompt, from the rewards of its own samples."""

import tempfile
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import common, rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout
from tunix.sft import hooks

import jamp

MARGIN = 0.1  # of the reward, which differs as much between seeds
LETTERS = "0123456789="
PROMPTS, GENERATIONS, LENGTH = 16, 8, 4
MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))


class Tokenizer:
    """One token for each letter, after padding, end and beginning."""

    def encode(self, text):
        return [3 + LETTERS.index(letter) for letter in text]

    def decode(self, ids):
        return "".join(LETTERS[i - 3] if 3 <= i < 3 + len(LETTERS) else "?" for i in ids)

    def pad_id(self):
        return 0

    def eos_id(self):
        return 1

    def bos_id(self):
        return 2


class Float16(qwen3.Qwen3):
    __call__ = jamp.autocast(qwen3.Qwen3.__call__, jnp.float16)


class BFloat16(qwen3.Qwen3):
    __call__ = jamp.autocast(qwen3.Qwen3.__call__, jnp.bfloat16)


class EightBit(qwen3.Qwen3):
    __call__ = jamp.autocast(qwen3.Qwen3.__call__, jamp.Float8())


def make_model(way, seed=0):
    kind = {"float16": Float16, "bfloat16": BFloat16, "8 bit": EightBit}.get(way, qwen3.Qwen3)
    dtype = jnp.bfloat16 if way == "own bfloat16" else jnp.float32
    config = qwen3.ModelConfig(2, 16, 128, 256, 4, 64, 2, rope_theta=10_000, norm_eps=1e-6, dtype=dtype)
    model = kind(config, rngs=nnx.Rngs(seed))
    for i, layer in enumerate(model.layers):  # Tunix initializes these with zeros, for weights to be loaded
        for j, linear in enumerate((layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)):
            key = nnx.Rngs(100 + 3 * i + j).params()
            linear.kernel[...] = nnx.initializers.lecun_normal()(key, linear.kernel.shape)
    if way == "bfloat16 parameters":
        nnx.update(model, jamp.cast_floating(nnx.state(model), jnp.bfloat16))
    return model


def share_of_right_digits(prompts, completions, weight, **kwargs):
    return [
        w * text[:LENGTH].count(prompt[0]) / LENGTH
        for prompt, text, w in zip(prompts, completions, weight, strict=True)
    ]


def learn(learner, steps, bad=(), seed=0):
    """Train on prompts such as "7=". The weight of their rewards is inf in a bad step."""
    rng, rollout_config = np.random.default_rng(seed), learner.rl_cluster.cluster_config.rollout_config

    def batches():
        for i in range(steps):
            rollout_config.seed = int(rng.integers(2**31))  # else each rollout draws with the same random key
            prompts = np.array([f"{digit}=" for digit in rng.integers(0, 10, PROMPTS)])
            yield {"prompts": prompts, "weight": np.full(PROMPTS, np.inf if i in bad else 1.0)}

    learner.train(batches())


class LogLossScale(hooks.TrainingHooks):
    def on_train_step_end(self, trainer, train_step, train_loss):
        for name, value in jamp.metrics(trainer.optimizer.opt_state).items():
            trainer.metrics_logger.log("actor", name, np.asarray(value), "train", train_step)

    def on_train_start(self, trainer): ...
    def on_train_end(self, trainer): ...
    def on_train_step_start(self, trainer): ...
    def on_eval_step_start(self, trainer): ...
    def on_eval_step_end(self, trainer, eval_loss): ...


def make_learner(way, seed=0, **config):
    tx = optax.adamw(3e-4)
    if way == "float16":
        tx = jamp.skip_nonfinite(tx)
    elif way == "bfloat16 parameters":
        tx = jamp.stochastic_rounding(tx)
    cluster = rl_cluster.RLCluster(
        actor=make_model(way, seed),
        tokenizer=Tokenizer(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(rl_cluster.Role, MESH),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=tx, eval_every_n_steps=1000, max_steps=1000, pbar_description=None, **config
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=LENGTH,
                max_prompt_length=4,
                kv_cache_size=16,
                temperature=1.0,
                return_logprobs=True,
            ),
        ),
    )
    algo_config = grpo_learner.GRPOConfig(num_generations=GENERATIONS, beta=0.0)
    learner = grpo_learner.GRPOLearner(cluster, algo_config, share_of_right_digits)
    trainer = learner.rl_cluster.actor_trainer
    if way == "float16":
        trainer.with_loss_fn(jamp.scaled(trainer.loss_fn), has_aux=True)
    return learner


def history(learner, prefix, name):
    return learner.rl_cluster.actor_trainer.metrics_logger.get_metric_history(prefix, name, "train")


def train(way):
    learner = make_learner(way)
    learn(learner, 100)
    return -history(learner, "rewards", "score/mean")


def arrays(learner):
    """The parameters and Adam's state, copied from the device."""
    trainer = learner.rl_cluster.actor_trainer
    return jax.device_get((nnx.as_pure(nnx.state(trainer.model)), nnx.as_pure(trainer.optimizer.opt_state.inner_state)))


def overflow():
    learner = make_learner("float16")
    learn(learner, 1)
    before = arrays(learner)
    learn(learner, 1, bad={0})
    opt_state = learner.rl_cluster.actor_trainer.optimizer.opt_state
    return before, arrays(learner), jamp.metrics(opt_state)["overflow_steps"]


def checkpoint():
    undisturbed = make_learner("float16")
    learn(undisturbed, 6)
    with tempfile.TemporaryDirectory() as folder:
        every_step = ocp.CheckpointManagerOptions(save_interval_steps=1)
        config = {"checkpoint_root_directory": folder, "checkpointing_options": every_step}
        learn(make_learner("float16", **config), 3)
        continued = make_learner("float16", **config)  # restores, and skips the three batches
        learn(continued, 6)
    return arrays(undisturbed), arrays(continued)


def metrics():
    learner = make_learner("float16")
    learner.rl_cluster.actor_trainer.with_training_hooks(LogLossScale())
    learn(learner, 3, bad={1})
    return {name: history(learner, "actor", name)[-1] for name in ("loss_scale", "overflow_steps", "finite_steps")}


def reported():
    tokens = np.random.default_rng(0).integers(3, 3 + len(LETTERS), (4, 2048), np.int32)
    ids, mask = np.split(tokens, [4], axis=1), np.split(np.ones_like(tokens), [4], axis=1)
    example = grpo_learner.TrainExample(ids[0], mask[0], ids[1], mask[1], np.ones(4, np.float32), None, None)

    def of(way):
        learner = make_learner(way)
        trainer = learner.rl_cluster.actor_trainer
        graphdef, params = nnx.split(trainer.model)
        loss = lambda model: trainer.loss_fn(model, example, learner.algo_config)[0]
        return params, lambda params: loss(nnx.merge(graphdef, params, copy=True))

    return {"float32": of("float32"), "bfloat16": of("own bfloat16")}


def log_probs(learner, wrap):
    """The log-probability of each sampled token: of the sampler, and of the trainer."""
    cluster = learner.rl_cluster
    tokenizer, trained = cluster.tokenizer, cluster.actor_trainer.model
    rollout = cluster.generate([f"{i % 10}=" for i in range(PROMPTS * GENERATIONS)])
    completions = np.array([np.pad(tokens, (0, LENGTH - len(tokens))) for tokens in rollout.tokens])

    @wrap
    def of_trainer(model):  # as in `grpo_loss_fn`
        ids = {"pad_id": tokenizer.pad_id(), "eos_id": tokenizer.eos_id()}
        return common.compute_per_token_logps(
            *nnx.split(model), jnp.asarray(rollout.left_padded_prompt_tokens), jnp.asarray(completions), **ids
        )

    # Tunix's masks take a sampled padding token for padding, so that the tokens after it do not see it.
    rows = [i for i, tokens in enumerate(rollout.tokens) if tokenizer.pad_id() not in tokens]
    by_trainer = np.asarray(of_trainer(trained))
    sampled = np.concatenate([rollout.logprobs[i] for i in rows])
    return sampled, np.concatenate([by_trainer[i, : len(rollout.tokens[i])] for i in rows])


def mismatch(way, seed):
    """How far the log-probabilities of trainer and sampler differ, before the trainer learns and while it does.

    `way` is one of the ways above, or "float16 loss" or "bfloat16 loss": a loss in 16 bit, and a sampler in float32.
    """
    of_loss = {f"{dtype} loss": partial(jamp.autocast, compute_dtype=dtype) for dtype in ("float16", "bfloat16")}
    learner = make_learner("float32" if way in of_loss else way, seed)
    for updates, more in ((0, 0), (25, 25), (50, 25), (100, 50)):
        if more:
            learn(learner, more, seed=(seed, updates))
        sampled, trained = log_probs(learner, of_loss.get(way, lambda f: f))
        apart = trained.astype(np.float64) - sampled
        yield {
            "updates": updates,
            "reward": float(np.mean(history(learner, "rewards", "score/mean")[-20:])) if more else None,
            "entropy": float(-sampled.mean()),
            "mean_abs": float(np.abs(apart).mean()),
            "max_abs": float(np.abs(apart).max()),
            "bias": float(apart.mean()),
            "kl": float((np.exp(apart) - 1 - apart).mean()),  # of the trainer from the sampler, at least 0
        }
