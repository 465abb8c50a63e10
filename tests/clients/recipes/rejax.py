"""rejax: PPO on CartPole with `PPO.train`. Its losses are closures in methods, so the networks are wrapped."""

import tempfile
from pathlib import Path

import flax
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from rejax import PPO

import jamp

MARGIN = 0.02
NOTE = dict.fromkeys(("float16", "bfloat16", "8 bit", "bfloat16 parameters"), "loss of the critic")


class Wrapped:
    """A network whose `apply` is another function."""

    def __init__(self, network, wrap):
        self.init, self.apply = network.init, wrap(network.apply)


def make_ppo(way, updates):
    wrap = lambda apply: apply
    if way == "float16":
        wrap = lambda apply: jamp.scaled(jamp.autocast(apply, jnp.float16))
    elif way == "bfloat16":
        wrap = lambda apply: jamp.autocast(apply, jnp.bfloat16)
    elif way == "8 bit":
        wrap = lambda apply: jamp.autocast(apply, jamp.Float8())
    elif way == "bfloat16 parameters":
        wrap = lambda apply: lambda params, *args, **kw: apply(jamp.cast_floating(params, jnp.float32), *args, **kw)
    ppo = PPO.create(
        env="CartPole-v1",
        num_envs=64,
        num_steps=8,
        num_minibatches=1,
        num_epochs=1,
        gamma=0.9,
        learning_rate=1e-3,
        eval_freq=64 * 8,
        total_timesteps=64 * 8 * updates,
        skip_initial_evaluation=True,
        agent_kwargs={"hidden_layer_sizes": (256, 256)},
    )
    return ppo.replace(
        actor=Wrapped(ppo.actor, wrap), critic=Wrapped(ppo.critic, wrap), eval_callback=lambda ppo, ts, rng: evaluate(ppo, ts)
    )


def evaluate(ppo, ts):
    """The mean squared advantage of a new rollout."""
    ts, trajectories = ppo.collect_trajectories(ts)
    last = jnp.where(ts.last_done, 0, ppo.critic.apply(ts.critic_ts.params, ts.last_obs))
    return jnp.mean(ppo.calculate_gae(trajectories, last)[0] ** 2)
