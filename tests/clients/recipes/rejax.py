"""rejax: PPO on CartPole with `PPO.train`. Its losses are closures in methods, so the networks are wrapped."""

import tempfile
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
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
    ppo = ppo.replace(actor=Wrapped(ppo.actor, wrap), critic=Wrapped(ppo.critic, wrap))
    return ppo.replace(eval_callback=evaluate)


def evaluate(ppo, ts, rng):
    """The mean squared advantage of a new rollout."""
    ts, trajectories = ppo.collect_trajectories(ts)
    last = jnp.where(ts.last_done, 0, ppo.critic.apply(ts.critic_ts.params, ts.last_obs))
    return jnp.mean(ppo.calculate_gae(trajectories, last)[0] ** 2)


def wrapped(ts, wrap, dtype):
    """A train state whose optimizers are wrapped."""

    def of(network):
        params = jamp.cast_floating(network.params, dtype)
        return TrainState.create(apply_fn=(), params=params, tx=wrap(network.tx))

    return ts.replace(actor_ts=of(ts.actor_ts), critic_ts=of(ts.critic_ts))


def trained(way, updates, ts=None, seed=0):
    """Train, and return the train state and the loss of each update."""
    ppo = make_ppo(way, updates)
    if ts is None:
        ts = ppo.init_state(jax.random.key(seed))
        if way == "float16":
            ts = wrapped(ts, lambda tx: jamp.loss_scaled(tx, jamp.StaticLossScale(1.0)), jnp.float32)
        elif way == "bfloat16 parameters":
            ts = wrapped(ts, lambda tx: jamp.stochastic_rounding(tx), jnp.bfloat16)
    return jax.jit(ppo.train)(train_state=ts)


def train(way):
    return trained(way, 100)[1]


def saved(ts):
    """The parameters and Adam's states."""
    return [(network.params, network.opt_state.inner_state) for network in (ts.actor_ts, ts.critic_ts)]


def overflow():
    ts, _ = trained("float16", 1)
    # Between two updates of `train`: an observation that no scale repairs.
    skipped, _ = trained("float16", 1, ts.replace(last_obs=ts.last_obs.at[0, 0].set(jnp.inf)))
    return saved(ts), saved(skipped), jamp.metrics(skipped.critic_ts.opt_state)["overflow_steps"]


def checkpoint():
    undisturbed, _ = trained("float16", 6)
    ts, _ = trained("float16", 3)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "state.msgpack"  # rejax saves nothing: Flax does
        file.write_bytes(flax.serialization.to_bytes(ts.replace(rng=jax.random.key_data(ts.rng))))
        new, _ = trained("float16", 1)
        restored = flax.serialization.from_bytes(new.replace(rng=jax.random.key_data(new.rng)), file.read_bytes())
    continued, _ = trained("float16", 3, restored.replace(rng=jax.random.wrap_key_data(restored.rng)))
    return saved(undisturbed), saved(continued)


def metrics():
    ts, _ = trained("float16", 1)
    ts, _ = trained("float16", 1, ts.replace(last_obs=ts.last_obs.at[0, 0].set(jnp.inf)))
    return jamp.metrics(ts.critic_ts.opt_state)  # rejax has no loggers: what you hand to yours
